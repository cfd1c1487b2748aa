"""Cases of `checkpoint.simple`: bit-exact round trips, the same bytes twice, and every way a save or a file can go wrong. Floor 5.

Kills and power cuts are simulated by a Disk that counts operations: a kill raises something that no handler catches; a power cut also
takes back what was never forced to the medium (halves files, forgets folder entries, undoes renames).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import simple
from alpha.checkpoint.disk import Disk
from alpha.component import Measured
from alpha.errors import CorruptError, GraphError, InputError, MachineError
from alpha.graph.state import StateLayout, TensorSpec
from alpha.types import NUMPY

States = dict[str, tuple[StateLayout, np.ndarray]]


class Killed(BaseException):
    """The process ends here: no handler of the package may see it."""


class Count:
    """Counts checks and failures; the first failure is the note."""

    def __init__(self) -> None:
        self.cases, self.wrong, self.first = 0, 0, ""
        self.digest = hashlib.sha256()

    def check(self, holds: object, what: str) -> None:
        self.cases += 1
        if not bool(holds):
            self.wrong += 1
            self.first = self.first or what

    def refuses(self, kind: type[Exception], action: Callable[[], object], what: str) -> None:
        """`action()` raises exactly `kind`."""
        try:
            action()
        except Exception as error:  # any other class is a wrong answer, counted below
            self.check(type(error) is kind, f"{what}: {type(error).__name__} instead of {kind.__name__}")
        else:
            self.check(False, f"{what}: accepted")

    def measured(self) -> Measured:
        return Measured(float(self.wrong), 0.0, self.cases, self.digest.hexdigest(), self.first[:200])


# -- made-up state -------------------------------------------------------------------------------------------------------------


def layouts(rng: np.random.Generator, blocks: int = 11) -> dict[str, StateLayout]:
    """A small model with odd shapes, scalars and more than ten blocks (natural order matters)."""
    tensors = [TensorSpec("embedding.token.weight", (int(rng.integers(6, 70)), 5), "embedding")]
    for i in range(blocks):
        tensors += [TensorSpec(f"block.{i}.w", (int(rng.integers(1, 9)), 7, 3), f"block.{i}"), TensorSpec(f"block.{i}.b", (), f"block.{i}")]
    params = StateLayout(tensors)
    return {"param": params, "m": params, "v": params, "counter": StateLayout([TensorSpec("step", (), "counter")], "i32")}


def state(rng: np.random.Generator, of: dict[str, StateLayout]) -> States:
    """Random bits, NaN payloads, infinities and denormals included; padding is dirty on purpose."""
    return {k: (x, rng.integers(0, 1 << 32, x.size, np.uint32).view(NUMPY[x.dtype])) for k, x in of.items()}


def empty(of: dict[str, StateLayout]) -> States:
    """Arrays full of a sentinel."""
    return {k: (x, np.full(x.size, 7, NUMPY[x.dtype])) for k, x in of.items()}


def tensor(states: States, kind: str, name: str) -> bytes:
    layout, flat = states[kind]
    at = layout.offsets[name]
    return flat[at : at + layout.by_name[name].size].tobytes()


def same(a: States, b: States) -> bool:
    """Every tensor of every kind bit for bit; padding does not count."""
    return set(a) == set(b) and all(tensor(a, k, t.name) == tensor(b, k, t.name) for k, (x, _) in a.items() for t in x.tensors)


def copied(states: States) -> States:
    return {k: (x, flat.copy()) for k, (x, flat) in states.items()}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="alpha-checkpoint-") as name:
        yield Path(name) / "checkpoints"


# -- disks that fail -----------------------------------------------------------------------------------------------------------


class Failing(Disk):
    """Fails at operation number `at`: each call, and each chunk of a write, is one. `failure` makes what is raised."""

    def __init__(self, at: int, failure: Callable[[], BaseException]) -> None:
        self.at, self.failure, self.done = at, failure, 0

    def step(self) -> None:
        self.done += 1
        if self.done == self.at:
            raise self.failure()

    def make(self, folder: Path) -> None:
        self.step()
        super().make(folder)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        def counted() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                if len(chunk):
                    self.step()
                yield chunk

        self.step()
        super().write(path, counted())
        self.step()

    def sync_folder(self, folder: Path) -> None:
        self.step()
        super().sync_folder(folder)
        self.step()

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)
        self.step()

    def remove(self, folder: Path) -> None:
        self.step()
        for path in sorted(folder.iterdir()):
            path.unlink()
            self.step()
        super().remove(folder)


class Losing(Failing):
    """Also remembers what was never forced to the medium. `power_cut` takes it back.

    `journaled`: whether unforced renames survive (both happen on real file systems).
    """

    def __init__(self, at: int, journaled: bool) -> None:
        super().__init__(at, Killed)
        self.journaled = journaled
        self.loose_entries: set[Path] = set()  # files whose folder was not forced since they were made
        self.loose_names: list[tuple[Path, Path]] = []

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self.loose_entries.add(path)
        super().write(path, chunks)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.loose_entries = {p for p in self.loose_entries if p.parent != folder}
        self.loose_names = [n for n in self.loose_names if n[1].parent != folder]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.loose_names.append((source, target))
        self.loose_entries = {target / p.name if p.parent == source else p for p in self.loose_entries}

    def power_cut(self) -> None:
        for path in self.loose_entries:
            path.unlink(missing_ok=True)
        if not self.journaled:
            for source, target in reversed(self.loose_names):
                if target.exists() and not source.exists():
                    os.rename(target, source)


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


# -- parity --------------------------------------------------------------------------------------------------------------------


def round_trip(rng: np.random.Generator) -> Measured:
    """What is loaded is what was saved, bit for bit; nothing is written outside the tensors but zeros."""
    count, of = Count(), layouts(rng)
    before = state(rng, of)
    facts = {"program": "abc", "sampler": {"next_sample": 12345}, "text": "ü\n"}
    with folder() as at:
        source = copied(before)
        path = simple.save(at, 42, source, facts)
        count.check(
            all(np.array_equal(source[k][1].view(np.uint32), before[k][1].view(np.uint32)) for k in of), "saving wrote to the state"
        )
        after = empty(of)
        saved = simple.load(path, after)
        for kind in of:
            count.check(same({kind: before[kind]}, {kind: after[kind]}), f"{kind} differs")
            flat, layout = after[kind][1].copy(), of[kind]
            for start, size in layout.ranges():
                flat[start : start + size] = 0
            count.check(not flat.view(np.uint32).any(), f"padding of {kind} is not zero")
        count.check(saved.step == 42 and dict(saved.facts) == facts, "step or facts differ")
        stored = np.load(path / "param.npy", allow_pickle=False)
        count.check(stored.shape == (of["param"].size,) and stored.dtype == np.dtype("<f4"), "param.npy is no plain NumPy file")
    return count.measured()


def other_layout(rng: np.random.Generator) -> Measured:
    """Units regrouped, order changed, a tensor renamed: the named tensors still arrive bit for bit."""
    count, of = Count(), layouts(rng)
    before = state(rng, of)

    def moved(t: TensorSpec) -> TensorSpec:
        name = "embedding.wte" if t.name == "embedding.token.weight" else t.name
        return TensorSpec(name, t.shape, "a" if name.endswith(".b") else f"z{t.size % 3}")

    other = {k: StateLayout([moved(t) for t in x.tensors], x.dtype) if k != "counter" else x for k, x in of.items()}
    count.check(other["param"].offsets["block.0.w"] != of["param"].offsets["block.0.w"], "the layouts do not differ")
    with folder() as at:
        path = simple.save(at, 1, before, {})
        after = empty(other)
        simple.load(path, after, rename={"embedding.wte": "embedding.token.weight"})
        for kind, (layout, _) in before.items():
            for t in layout.tensors:
                name = moved(t).name if kind != "counter" else t.name
                count.check(tensor(before, kind, t.name) == tensor(after, kind, name), f"{kind} {t.name} differs")
    return count.measured()


def keeps(rng: np.random.Generator) -> Measured:
    """The latest is the highest step; exactly `keep` stay; a step can be saved again; later ones can be set aside."""
    count, of = Count(), layouts(rng)
    states = {step: state(rng, of) for step in (9, 10, 100, 101)}
    with folder() as at:
        count.check(simple.steps(at) == [], "steps of no folder")
        count.refuses(InputError, lambda: simple.at(at), "no checkpoint")
        for step, x in states.items():
            simple.save(at, step, x, {}, keep=3)
        count.check(simple.steps(at) == [10, 100, 101], f"kept {simple.steps(at)}")
        after = empty(of)
        count.check(simple.load(simple.at(at), after).step == 101 and same(after, states[101]), "the latest is not the last saved")
        simple.load(simple.at(at, 10), after)
        count.check(same(after, states[10]), "an earlier checkpoint differs")
        count.refuses(InputError, lambda: simple.at(at, 11), "a step that was not saved")
        simple.save(at, 100, states[9], {}, keep=2)
        count.check(simple.steps(at) == [10, 100, 101], "saving again dropped a later checkpoint")
        simple.load(simple.at(at, 100), after)
        count.check(same(after, states[9]), "saving a step again kept the old one")
        simple.set_aside(at, 10)
        count.check(simple.steps(at) == [10] and len(list(at.iterdir())) == 3, "setting aside")
        simple.save(at, 100, states[100], {}, keep=1)
        count.check(simple.steps(at) == [100], "keep = 1")
    return count.measured()


# -- determinism ---------------------------------------------------------------------------------------------------------------


def same_bytes(rng: np.random.Generator) -> Measured:
    """Two saves of one state give the same files, whatever the padding held and whatever was saved before."""
    count, of = Count(), layouts(rng)
    one = state(rng, of)
    two = {k: (x, np.zeros_like(flat)) for k, (x, flat) in one.items()}
    for kind, (layout, flat) in two.items():
        for start, size in layout.ranges():
            flat[start : start + size] = one[kind][1][start : start + size]
    with folder() as at:
        a = simple.save(at / "a", 3, one, {"x": 1, "y": 2})
        simple.save(at / "b", 2, state(rng, of), {})
        b = simple.save(at / "b", 3, two, {"y": 2, "x": 1})
        names = sorted(p.name for p in a.iterdir())
        count.check(names == sorted(p.name for p in b.iterdir()), "other files")
        for name in names:
            count.check((a / name).read_bytes() == (b / name).read_bytes(), f"{name} differs")
            count.digest.update(name.encode() + (a / name).read_bytes())
    return count.measured()


# -- faults --------------------------------------------------------------------------------------------------------------------


def damaged_files(rng: np.random.Generator) -> Measured:
    """A flipped bit anywhere, a shortened, lengthened, missing or swapped file: found, named, and nothing loaded."""
    count, of = Count(), layouts(rng)
    before = state(rng, of)
    with folder() as at:
        path = simple.save(at, 5, before, {"x": 1})
        names = sorted(p.name for p in path.iterdir())
        whole_files = {name: (path / name).read_bytes() for name in names}

        def refused(what: str) -> None:
            after = empty(of)
            count.refuses(CorruptError, lambda: simple.load(path, after), what)
            count.check(same(after, empty(of)), f"{what}: something was loaded")

        for name, data in whole_files.items():
            places = {0, len(data) - 1, *(int(x) for x in rng.integers(0, len(data), 6))}
            for place in sorted(places):
                flipped = bytearray(data)
                flipped[place] ^= 1 << int(rng.integers(0, 8))
                (path / name).write_bytes(flipped)
                refused(f"{name} flipped at {place}")
            for what, content in (("shorter", data[:-1]), ("half", data[: len(data) // 2]), ("empty", b""), ("longer", data + b"\0")):
                (path / name).write_bytes(content)
                refused(f"{name} {what}")
            (path / name).unlink()
            refused(f"{name} missing")
            (path / name).write_bytes(data)
        (path / "m.npy").write_bytes(whole_files["v.npy"])
        (path / "v.npy").write_bytes(whole_files["m.npy"])
        refused("m and v swapped")
        (path / "m.npy").write_bytes(whole_files["m.npy"])
        (path / "v.npy").write_bytes(whole_files["v.npy"])
        os.rename(path, path.with_name("step-00000006"))
        path = path.with_name("step-00000006")
        refused("folder renamed to another step")
    return count.measured()


def edited_manifest(rng: np.random.Generator) -> Measured:
    """Each field changed by hand is CorruptError; changed with its hash redone, it is refused for what it now says."""
    count, of = Count(), layouts(rng)
    with folder() as at:
        path = simple.save(at, 5, state(rng, of), {"x": 1})
        rows = of["m"].by_name["embedding.token.weight"].shape[0]
        original = json.loads((path / simple.MANIFEST).read_bytes())

        def attempt(edit: Callable[[dict], object], kind: type[Exception], what: str, *, rehash: bool) -> None:
            content = json.loads(json.dumps(original))
            edit(content)
            if rehash:
                content.pop("sha256")
                content["sha256"] = simple._digest(content)
            (path / simple.MANIFEST).write_text(json.dumps(content))
            after = empty(of)
            count.refuses(kind, lambda: simple.load(path, after), what)
            count.check(same(after, empty(of)), f"{what}: something was loaded")

        def first(c: dict) -> list:
            tensors: list = c["kinds"]["param"]["tensors"]
            return tensors[0]

        edits: list[tuple[str, Callable[[dict], object], type[Exception] | None]] = [
            ("step", lambda c: c.update(step=6), CorruptError),
            ("facts", lambda c: c["facts"].update(x=2), None),
            ("version", lambda c: c.update(version=3), InputError),
            ("format", lambda c: c.update(format="other"), InputError),
            ("a kind gone", lambda c: c["kinds"].pop("m"), InputError),
            ("a kind more", lambda c: c["kinds"].update(w=c["kinds"]["m"]), InputError),
            ("a tensor gone", lambda c: c["kinds"]["param"]["tensors"].pop(), InputError),
            ("a shape", lambda c: first(c).__setitem__(1, [1, 1]), InputError),
            ("a shape transposed", lambda c: c["kinds"]["m"]["tensors"][-1][1].reverse(), InputError),
            ("a longer shape", lambda c: c["kinds"]["m"]["tensors"][-1].__setitem__(1, [rows + 1, 5]), InputError),
            ("a name", lambda c: first(c).__setitem__(0, "other"), InputError),
            ("an offset outside", lambda c: first(c).__setitem__(3, 1 << 40), CorruptError),
            ("a negative offset", lambda c: first(c).__setitem__(3, -1), CorruptError),
            ("a file's hash", lambda c: c["kinds"]["v"].update(sha256="0" * 64), CorruptError),
            ("two kinds exchanged", lambda c: c["kinds"].update(m=c["kinds"]["counter"], counter=c["kinds"]["m"]), InputError),
        ]
        for what, edit, after_rehash in edits:
            attempt(edit, CorruptError, f"{what} edited", rehash=False)
            if after_rehash is not None:
                attempt(edit, after_rehash, f"{what} edited and hashed again", rehash=True)
        for raw in (b"", b"{}", b"[]", b"null", b"\xff\xfe", json.dumps(original).encode()[:-9]):
            (path / simple.MANIFEST).write_bytes(raw)
            count.refuses(CorruptError, lambda: simple.load(path, empty(of)), f"manifest {raw[:8]!r}")
    return count.measured()


def wrong_arrays(rng: np.random.Generator) -> Measured:
    """Arrays that are not of their layout are refused before anything is touched."""
    count, of = Count(), layouts(rng)
    good = state(rng, of)
    with folder() as at:
        path = simple.save(at, 1, good, {})
        for what, bad in (("short", good["m"][1][:-1]), ("float64", np.zeros(of["m"].size)), ("2-d", good["m"][1].reshape(2, -1))):
            wrong = {**good, "m": (of["m"], bad)}
            count.refuses(GraphError, partial(simple.save, at, 2, wrong, {}), f"saving, {what}")
            count.refuses(GraphError, partial(simple.load, path, wrong), f"loading, {what}")
        fewer = {k: good[k] for k in ("param", "counter")}
        count.refuses(InputError, lambda: simple.load(path, fewer), "moments that nobody asked for")
        count.check(simple.steps(at) == [1], "a refused save left a checkpoint")
    return count.measured()


def _interrupted(rng: np.random.Generator, disk_at: Callable[[int], Failing], count: Count, *, again: bool, loses: bool = False) -> None:
    """Save step 2 (or again step 1) with a disk that fails at operation 1, 2, 3, ...: the old or the new is whole, never neither."""
    of = layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    old, new = state(rng, of), state(rng, of)
    target = 1 if again else 2
    at_operation = 0
    while True:
        at_operation += 1
        with folder() as at:
            simple.save(at, 1, old, {"which": "old"}, keep=1)
            disk = disk_at(at_operation)
            finished = False
            try:
                simple.save(at, target, new, {"which": "new"}, keep=1, disk=disk)
                finished = True
            except Killed:
                pass
            except MachineError as error:
                count.check("disk is full" in str(error), f"operation {at_operation}: {error.what}")
            if loses and isinstance(disk, Losing):
                disk.power_cut()
            where = f"operation {at_operation}{' again' if again else ''}"
            after = empty(of)
            simple.clean(at)
            try:
                saved = simple.load(simple.at(at), after)
                expected = {"old": old, "new": new}[saved.facts["which"]]
                count.check(same(after, expected), f"{where}: a mixture was loaded")
                count.check(not finished or saved.facts["which"] == "new", f"{where}: a finished save was lost")
            except (CorruptError, InputError) as error:
                count.check(False, f"{where}: {error.what}")
            simple.save(at, 3, old, {"which": "old"}, keep=1)
            count.check([p.name for p in at.iterdir()] == ["step-00000003"], f"{where}: leftovers {sorted(p.name for p in at.iterdir())}")
            if finished:
                count.check(disk.done < disk.at, f"{where}: a failure was swallowed")
                return


def disk_full(rng: np.random.Generator) -> Measured:
    """The disk fills up at every write position in turn: MachineError, and the checkpoint before it still loads."""
    count = Count()
    for again in (False, True):
        _interrupted(rng, lambda k: Failing(k, _full), count, again=again)
    return count.measured()


def killed(rng: np.random.Generator) -> Measured:
    """The process is killed between any two operations."""
    count = Count()
    for again in (False, True):
        _interrupted(rng, lambda k: Failing(k, Killed), count, again=again)
    return count.measured()


def power_cut(rng: np.random.Generator) -> Measured:
    """As killed, and what was never forced to the medium is gone; also after a save that returned."""
    count = Count()
    for journaled in (True, False):
        _interrupted(rng, partial(Losing, journaled=journaled), count, again=False, loses=True)
    return count.measured()


def synced(rng: np.random.Generator) -> Measured:
    """Every file is forced to the medium by the file system call itself, after its last byte."""
    count, of = Count(), layouts(rng)
    seen: dict[int, int] = {}
    real = os.fsync

    def spy(fd: Any) -> None:
        info = os.fstat(fd)
        seen[info.st_ino] = info.st_size
        real(fd)

    with folder() as at:
        os.fsync = spy
        try:
            path = simple.save(at, 1, state(rng, of), {})
        finally:
            os.fsync = real
        for file in path.iterdir():
            info = file.stat()
            count.check(seen.get(info.st_ino) == info.st_size, f"{file.name} was not forced to the medium whole")
        for place in (path, at, at.parent):
            count.check(place.stat().st_ino in seen, f"the entries of {place.name} were not forced to the medium")
    return count.measured()


CASES: dict[str, dict[str, list[tuple[str, Callable[[np.random.Generator], Measured]]]]] = {
    "checkpoint.simple": {
        "parity": [("round trip", round_trip), ("other layout", other_layout), ("keeps", keeps)],
        "determinism": [("same bytes", same_bytes)],
        "faults": [
            ("damaged files", damaged_files),
            ("edited manifest", edited_manifest),
            ("wrong arrays", wrong_arrays),
            ("disk full", disk_full),
            ("killed", killed),
            ("power cut", power_cut),
            ("synced", synced),
        ],
    }
}
