"""What evidence files promise: what was written comes back; what was touched, torn or moved is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry import gpus, machines
from alpha.gates.contracts.registry.common import HERE, OTHER, Case, folder, make, parity_case, with_gpus
from alpha.registry import evidence
from alpha.registry.evidence import (
    LOCK,
    WAIT,
    Evidence,
    classes,
    current,
    default_roots,
    load_file,
    local_root,
    locked,
    path_of,
    reference_class,
    reference_classes,
    save,
    shipped_root,
    stale,
    write_reference,
)
from alpha.registry.gpu import LINKS, GpuClass, class_of_key, gpu_classes
from alpha.registry.machine import MachineClass, isa_level, machine_class
from alpha.registry.record import MAX_BYTES, canonical, content_hash, parse
from alpha.resources import ROOT

CORRUPT = CorruptError


def _round_trip(rng: np.random.Generator) -> Measured:
    """Records come back equal, sorted by gate; a new one replaces its gate's and no other."""
    checks = Checks()
    value = float(rng.uniform(0.1, 1.9))
    parity, faults = make("parity", [parity_case(ratio=value)]), make("faults")
    with folder() as root:
        (path,) = save([parity, faults], root)
        checks.that(path == root / HERE.key / "made.up.jsonl", "the file lies elsewhere")
        checks.that(list(load_file(path)) == ["faults", "parity"], "lines are not sorted by gate")
        checks.that(load_file(path)["parity"].line() == parity.line(), "a record changed on its way")
        newer = make("parity", [parity_case(ratio=value / 2)])
        save([newer], root)
        checks.that(load_file(path)["parity"].line() == newer.line(), "a newer record does not replace the older one")
        checks.that(load_file(path)["faults"].line() == faults.line(), "another gate's record is lost")
        checks.that([p.name for p in path.parent.iterdir()] == ["made.up.jsonl"], "a temporary file is left")
        write_reference(root, HERE)
        checks.that(reference_class(root) == HERE.key and classes(root) == [HERE.key], "the reference class is lost")
        checks.that(load_file(root / HERE.key / "none.jsonl") == {}, "no file is not no evidence")
    return checks.measured()


def _stack(rng: np.random.Generator) -> Measured:
    """The later root wins where its digests are current, else the earlier one if it is; else the later one, as stale."""
    checks = Checks()
    today = {"implementation": f"{rng.integers(1 << 40):010x}", "cases": "c"}
    new = make("parity", digests=today)
    old = make("parity", [parity_case(ratio=0.25)], digests={**today, "implementation": "other"})
    for shipped, local, expected in ((new, old, 0), (old, new, 1), (new, replace(new, nonce="11"), 1), (old, replace(old, nonce="11"), 1)):
        with folder() as a, folder() as b:
            save([shipped], a)
            save([local], b)
            found = Evidence((a, b)).best("made.up", HERE.key, "parity", today)
            checks.that(found is not None and found.root == (a, b)[expected], f"the wrong root wins ({expected} expected)")
            checks.that(Evidence((a, b)).best("made.up", OTHER.key, "parity", today) is None, "another class's evidence is found")
    checks.that(current(new, today) and not current(old, today), "current is not told from stale")
    checks.that(not current(new, {**today, "row": "r"}), "a digest that the record lacks counts as equal")
    checks.that(not current(new, {"implementation": today["implementation"]}), "a digest that is asked no more counts as equal")
    for what, now, named in (("nothing", today, []), ("a new one", {**today, "row": "r"}, ["row"]),
                             ("one that is asked no more", {"implementation": today["implementation"]}, ["cases"])):
        checks.that(stale(new, now) == named, f"of {what} that changed {stale(new, now)} is named")
    checks.that(stale(old, today) == ["implementation"], "what changed is not named")
    return checks.measured()


def _line(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line, encoding="utf-8")


def _edited(rng: np.random.Generator) -> Measured:
    """An edited metric, verdict, nonce or digest is refused (content hash)."""
    checks = Checks()
    good = make("parity", [parity_case(ratio=1.5)]).line()
    body = json.loads(good)
    edits = {
        "a metric": good.replace('"ratio":1.5', '"ratio":0.5'),
        "a digest": good.replace('"implementation":"00"', f'"implementation":"{rng.integers(1 << 30):x}"'),
        "a nonce": good.replace('"nonce":"00ff"', '"nonce":"00fe"'),
        "a case left out": canonical({**body, "cases": [], "declared": 0}),
        "a verdict added": canonical({**body, "verdict": "PASS"}),
        "the content hash removed": canonical({k: v for k, v in body.items() if k != "content"}),
        "another format": canonical({**body, "format": 99, "content": content_hash({**body, "format": 99})}),
    }
    with folder() as root:
        path = path_of(root, HERE.key, "made.up")
        for what, line in edits.items():
            checks.that(line != good, f"{what}: the edit is none")
            _line(path, line + "\n")
            checks.raises(CORRUPT, what, lambda: load_file(path))
            checks.raises(CORRUPT, f"{what}, the line alone", lambda line=line: parse(line, "made up"))  # type: ignore[misc]
        _line(path, good + "\n")
        checks.that(load_file(path)["parity"].line() == good, "the sound line is refused")
    return checks.measured()


def _elsewhere(rng: np.random.Generator) -> Measured:
    """Evidence of another machine class or of another component, copied to where it would be wanted."""
    checks = Checks()
    with folder() as root:
        (theirs,) = save([make("parity", machine=OTHER)], root)
        here = path_of(root, HERE.key, "made.up")
        _line(here, theirs.read_text())
        checks.raises(CORRUPT, "evidence of another class", lambda: load_file(here), naming=OTHER.key)
        checks.raises(CORRUPT, "evidence of another class, through the stack", lambda: Evidence((root,)).load("made.up", HERE.key))
        other = path_of(root, OTHER.key, "some.other")
        _line(other, theirs.read_text())
        checks.raises(CORRUPT, "evidence of another component", lambda: load_file(other), naming="made.up")
        unknown = path_of(root, HERE.key, "gate")
        _line(unknown, replace(make("parity", component="gate"), gate="speed").line() + "\n")
        checks.raises(CORRUPT, "evidence of an unknown gate", lambda: load_file(unknown), naming="speed")
        for first, second in ((HERE, OTHER), (GpuClass(capability="sm90", model="H200"), GpuClass(capability="sm90", model="H100"))):
            (root / "REFERENCE").write_text(f"{first.key}\n{second.key}\n")
            checks.raises(InputError, "two reference classes of one sort", lambda: reference_classes(root), naming=second.key)
        checks.raises(InputError, "a path as component id", lambda: path_of(root, HERE.key, "../made.up"))
        checks.raises(InputError, "a folder that is no class", lambda: path_of(root, "laptop", "made.up"), naming="laptop")
    return checks.measured()


def _torn(rng: np.random.Generator) -> Measured:
    """Torn at any byte, over-long, out of order, doubled, reformatted."""
    checks = Checks()
    parity, faults = make("parity").line(), make("faults").line()
    text = faults + "\n" + parity + "\n"
    long = make("parity", [parity_case(name="n" * MAX_BYTES)])
    with folder() as root:
        path = path_of(root, HERE.key, "made.up")
        for cut in {1, len(text) - 1, len(faults), *(int(rng.integers(1, len(text) - 1)) for _ in range(24))} - {len(faults) + 1}:
            _line(path, text[:cut])
            checks.raises(CORRUPT, f"torn after {cut} bytes", lambda: load_file(path))
        for what, wrong in {"out of order": parity + "\n" + faults + "\n", "a gate twice": parity + "\n" + parity + "\n",
                            "spaces": parity.replace(",", ", ") + "\n", "an empty line": parity + "\n\n", "not ASCII": "é" + text,
                            "the keys turned round": json.dumps(dict(reversed(json.loads(parity).items())), separators=(",", ":")) + "\n",
                            "over-long": canonical({**json.loads(parity), "nonce": "0" * MAX_BYTES}) + "\n"}.items():
            _line(path, wrong)
            checks.raises(CORRUPT, what, lambda: load_file(path))
        checks.raises(CORRUPT, "an over-long record", lambda: save([long], root))
        over = {**json.loads(parity), "environment": {"note": "x" * MAX_BYTES}}
        _line(path, canonical({**over, "content": content_hash(over)}) + "\n")
        checks.raises(CORRUPT, "an over-long line whose content hash is right", lambda: load_file(path))
    return checks.measured()


def _full_disk(rng: np.random.Generator) -> Measured:
    """A full disk, a folder that cannot be made: one clear error, and what was saved stands."""
    checks = Checks()
    full = OSError(errno.ENOSPC, "No space left on device")
    with folder() as root:
        (path,) = save([make("parity")], root)
        was = path.read_bytes()
        for call in ("os.fsync", "os.replace"):
            with mock.patch(call, side_effect=full):
                checks.raises(MachineError, f"full disk in {call}", lambda: save([make("faults")], root), naming="No space")
            checks.that(path.read_bytes() == was, f"{call}: what was saved is lost")
            checks.that([p.name for p in path.parent.iterdir()] == ["made.up.jsonl"], f"{call}: a part is left")
        (root / "file").write_text("x")
        checks.raises(MachineError, "a folder that cannot be made", lambda: save([make("parity")], root / "file"))
    return checks.measured()


def _unreadable(rng: np.random.Generator) -> Measured:
    """A file that the disk refuses is told, and never taken for one that is not there; what is no folder is no class."""
    checks = Checks()
    with folder() as root:
        save([make("parity")], root)
        write_reference(root, HERE)
        (root / "notes").write_text("of no class")
        checks.that((classes(root), classes(root / "none"), classes(root / "notes")) == ([HERE.key], [], []), f"classes: {classes(root)}")
        path, do = path_of(root, HERE.key, "made.up"), "restore the file from version control, or delete it and rerun the gate"
        with mock.patch.object(evidence, "read_regular", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))):
            denied = ("an evidence file cannot be read", "made.up.jsonl: Permission denied", "a readable file", do)
            checks.tells(CORRUPT, denied, lambda: load_file(path))
            denied = ("REFERENCE cannot be read", "REFERENCE: Permission denied", "a readable file", do)
            checks.tells(CORRUPT, denied, lambda: reference_classes(root))
        _line(path, "x\n" + "x" * MAX_BYTES + "\n")
        checks.that([len(line) for line in evidence.lines_of(path)] == [1, MAX_BYTES], "the longest line")
        for end in "\r", "\x0b", "\x1c":  # as an editor of another system leaves them
            _line(path, f"a{end}b\n")
            checks.that(evidence.lines_of(path) == [f"a{end}b"], f"{end!r} ends a line")
        _line(path, "x\n" + "x" * (MAX_BYTES + 1) + "\n")
        told = ("an evidence line is too long", f"made.up.jsonl:2 with {MAX_BYTES + 1} bytes", f"at most {MAX_BYTES}", do)
        checks.tells(CORRUPT, told, lambda: evidence.lines_of(path))
        checks.that(load_file(root / HERE.key / "made.none.jsonl") == {} == reference_classes(root / HERE.key), "files that are not there")
    roots = ROOT / "baselines" / "evidence", ROOT / ".alpha" / "evidence"
    checks.that((shipped_root(), local_root()) == roots == default_roots(), f"roots: {default_roots()}")
    return checks.measured()


def _locked(rng: np.random.Generator) -> Measured:
    """A writer waits while another one holds the root, tries again at the pace that is said, and holds it itself then."""
    checks = Checks()
    for tries in (0, 1, int(rng.integers(2, 9))):
        with folder() as at:
            root = at / "new" / "root"
            root.mkdir(parents=True)
            other, slept = os.open(root / LOCK, os.O_RDWR | os.O_CREAT), list[float]()

            def sleep(seconds: float, other: int = other, slept: list[float] = slept, tries: int = tries) -> None:
                slept.append(seconds)
                if len(slept) == tries:
                    fcntl.flock(other, fcntl.LOCK_UN)

            if tries:
                fcntl.flock(other, fcntl.LOCK_EX)
            with mock.patch.object(evidence, "time", SimpleNamespace(sleep=sleep)), locked(root):
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    checks.that(False, f"after {tries} tries nothing is held")
                except BlockingIOError:
                    checks.that(slept == [WAIT] * tries, f"{tries} tries: slept {slept}")
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
            os.close(other)
    return checks.measured()


def _machine(rng: np.random.Generator) -> Measured:
    """Keys of machine classes go to a folder name and back; the widest instruction set names the class."""
    checks = Checks()
    for machine in (HERE, OTHER, machine_class(), machine_class(4)):
        checks.that(MachineClass.from_key(machine.key) == machine, f"{machine.key} does not come back")
        checks.that("/" not in machine.key and " " not in machine.key, f"{machine.key} is no folder name")
    checks.that(len({m.key for m in (HERE, OTHER, replace(HERE, numpy="2.3"), replace(HERE, blas="openblas-Zen"),
                                     replace(HERE, threads=2), replace(HERE, isa="x86_64-avx512"))}) == 6, "classes share a key")
    checks.that(isa_level("x86_64", {"AVX2": True, "AVX512_SKX": True, "SSE42": True}) == "avx512", "AVX-512 is not seen")
    checks.that(isa_level("x86_64", {"AVX2": True, "AVX512_SKX": False, "SSE42": True}) == "avx2", "AVX2 is not seen")
    checks.that(isa_level("arm64", {"ASIMD": True}) == "neon" and isa_level("riscv64", {}) == "baseline", "others are not named")
    for key in ("", "laptop", HERE.key + "/..", "cpu_x_np2_b_t1"):
        checks.raises(InputError, f"the key {key!r}", lambda key=key: MachineClass.from_key(key))  # type: ignore[misc]
    return checks.measured()


def _gpu_classes(rng: np.random.Generator) -> Measured:
    """Keys of GPU classes say how many devices there are and what links them; each number of devices has a reference class of its own."""
    checks = Checks()
    one = GpuClass(capability="sm90", model="H200")
    several = [replace(one, devices=n, link=link) for n in (2, 8, 16) for link in LINKS]
    for machine in (one, *several, replace(several[0], model="H100-80GB-HBM3")):
        checks.that(class_of_key(machine.key) == machine, f"{machine.key} does not come back")
        checks.that("/" not in machine.key and " " not in machine.key, f"{machine.key} is no folder name")
    checks.that(len({m.key for m in (one, *several)}) == 1 + len(several), "classes share a key")
    checks.that(several[0].key == "cuda_sm90_H200x2-nvlink", f"two devices over NVLink are {several[0].key}")
    for key in ("cuda_90_H200", "cuda_sm90_H200x1-nvlink", "cuda_sm90_H200x02-nvlink", "cuda_sm90_H200x0-pcie"):
        checks.raises(InputError, f"the key {key!r}", lambda key=key: GpuClass.from_key(key))  # type: ignore[misc]
    with folder() as root:
        for named_one in (several[0], HERE, one):
            write_reference(root, named_one)
        named = {"cpu": HERE.key, "cuda": one.key, "cuda x2": several[0].key}
        checks.that(reference_classes(root) == named, f"reference classes are {reference_classes(root)}")
        write_reference(root, several[1])
        checks.that(reference_classes(root) == {**named, "cuda x2": several[1].key}, "another class of two devices does not take the place")
    with with_gpus("H200", "H200", "H200", joined=((1, 0), (2, 1))):
        found = [c.key for c in gpu_classes()]
        checks.that(found == ["cuda_sm90_H200", "cuda_sm90_H200x2-nvlink", "cuda_sm90_H200x3-pcie"], f"three GPUs are {found}")
    return checks.measured()


def _same_bytes(rng: np.random.Generator) -> Measured:
    """The same records give the same bytes, whatever the order in which they came."""
    checks = Checks()
    texts = []
    for order in (("parity", "faults", "perf"), ("perf", "parity", "faults")):
        with folder() as root:
            texts.append(save([make(g) for g in order], root)[0].read_bytes())
    checks.that(texts[0] == texts[1], "the order of saving shows")
    return checks.measured(content_hash({"text": texts[0].decode()}))


CASES: dict[str, dict[str, list[Case]]] = {
    "registry.evidence": {
        "parity": [("round trip", _round_trip), ("stack of roots", _stack), ("machine classes", _machine),
                   ("classes of several GPUs", _gpu_classes), ("processors", machines.processors), ("libraries", machines.libraries),
                   ("GPUs that are seen", gpus.seen), ("a root is held", _locked)],
        "determinism": [("same bytes", _same_bytes)],
        "faults": [("edited by hand", _edited), ("of another class or component", _elsewhere), ("torn", _torn), ("full disk", _full_disk),
                   ("files that cannot be read", _unreadable), ("GPUs that are not seen", gpus.unseen)],
    },
}
