"""What a committed record must say of itself: a sound one has nothing wrong; each property that is spoiled alone is named, and nothing else
is; a nonce is drawn once. Boundaries are tried on both sides. Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import HERE, KERNEL, ONE, OTHER, PAIR, SINGLE, TWO, catalogue, folder, make
from alpha.registry import consistency
from alpha.registry.evidence import save
from alpha.registry.history import hash_of
from alpha.registry.record import Record

Spoil = Callable[[Record], Record]


def _sound(rng: np.random.Generator, gate: str = "perf") -> Record:
    """A record of a kernel of the CPU as its engine writes one, with a drawn share."""
    ceiling, least = int(rng.integers(10_000, 90_000)), int(rng.integers(100_000, 900_000))
    case = {"name": "a", "share": float(f"{ceiling / least:.4g}"), "times_ns": [least, least + 7], "ceiling_ns": ceiling}
    cases = [case] if gate == "perf" else None
    known = {"blas": f"{HERE.blas} 0.3.27", "cpu": "made", "numpy": f"{HERE.numpy}.3", "processor": "Made-6-1", "python": "3.11.9",
             "seconds": "0.5", "flops": "flops/v1"}
    return replace(make(gate, cases, component=KERNEL.id), nonce=rng.bytes(16).hex(), environment=known)


def _says(**changed: str) -> Spoil:
    return lambda r: replace(r, environment={k: x for k, x in {**r.environment, **changed}.items() if x != "-"})


def _timed(**changed: Any) -> Spoil:
    return lambda r: replace(r, cases=[{**r.cases[0], **changed}])


def contradictions(rng: np.random.Generator) -> Measured:
    """Each is told, by its words, and alone; what is just within is told nothing of."""
    checks, known = Checks(), catalogue(KERNEL)
    of, major = HERE.blas, HERE.numpy.partition(".")[0]
    spoiled: list[tuple[str, Spoil, str]] = [
        *((f"no {name}", _says(**{name: "-"}), f"does not say {name}")
          for name in ("blas", "cpu", "numpy", "processor", "python", "flops")),
        ("no time that it took", _says(seconds="long"), "seconds"), ("less than no time", _says(seconds="-1"), "seconds"),
        ("a time that is none", _says(seconds="nan"), "seconds"),
        ("a BLAS that names it later", _says(blas=f"other-{of} 0.3"), "BLAS"), ("a longer name", _says(blas=f"{of}2 0.3"), "BLAS"),
        ("a part of the name", _says(blas=f"{of[:-1]} 0.3"), "BLAS"), ("another minor version", _says(numpy=f"{major}.99.1"), "NumPy"),
        ("NumPy of another major version", _says(numpy=f"9{HERE.numpy}.1"), "NumPy"), ("a driver", _says(driver="575"), "driver"),
        ("a nonce that is short", lambda r: replace(r, nonce=r.nonce[:-1]), "nonce"),
        ("a nonce that is long", lambda r: replace(r, nonce=r.nonce + "0"), "nonce"),
        ("a nonce in capitals", lambda r: replace(r, nonce="A" + r.nonce[1:]), "nonce"),
        ("no time of the ceiling", _timed(ceiling_ns=None), "no time of the ceiling"),
    ]
    for what, spoil, said in spoiled:
        record = spoil(_sound(rng))
        found = consistency.wrong_in(record, known)
        more = [name for name in ("blas", "numpy") if what == f"no {name}"]  # then it is not that of the class either
        checks.that(len(found) == 1 + len(more) and said in found[0], f"{what}: {found}")
    for gate in ("perf", "parity", "faults"):
        found = consistency.wrong_in(_sound(rng, gate), known)
        checks.that(not found, f"a sound record of {gate}: {found}")
    for allowed in (_says(seconds="0"), _says(numpy=f"{HERE.numpy}.0rc1"), _says(blas=of)):
        found = consistency.wrong_in(allowed(_sound(rng)), known)
        checks.that(not found, f"what engines may write: {found}")
    without = replace(_sound(rng, "parity"), environment={k: x for k, x in _sound(rng).environment.items() if k != "flops"})
    checks.that(not consistency.wrong_in(without, known), "a record of another gate needs no FLOPs model")
    for _ in range(20):
        _shares(checks, rng)
    return checks.measured()


def _shares(checks: Checks, rng: np.random.Generator) -> None:
    """Share times the kernel's time is the ceiling's, as far as four digits of a share and whole nanoseconds allow, and no further."""
    record = _sound(rng)
    case = record.cases[0]
    least, ceiling = min(case["times_ns"]), case["ceiling_ns"]
    room = 0.5 * (1 + case["share"]) + 5e-4 * ceiling
    for off, wrong in ((0.9, False), (1.1, True), (-0.9, False), (-1.1, True), (4.0, True)):
        share = (ceiling + off * room) / least
        within = 0.5 * (1 + share) + 5e-4 * ceiling
        found = consistency.wrong_in(replace(record, cases=[{**case, "share": share}]), catalogue(KERNEL))
        checks.that(bool(found) == wrong or abs(abs(off * room) - within) < 0.05 * within, f"a share off by {off} of its room: {found}")
    turned = replace(record, cases=[{**case, "times_ns": [2 * least, least]}])
    checks.that(not consistency.wrong_in(turned, catalogue(KERNEL)), "the kernel's time is its least, wherever it stands")


def once(rng: np.random.Generator) -> Measured:
    """A nonce of two records, or one that was ever committed with another line, whether or not this line was too."""
    checks, known = Checks(), catalogue(KERNEL)
    with folder() as root:
        records = [_sound(rng, "parity"), _sound(rng, "faults")]
        save(records, root)
        (path,) = root.rglob("*.jsonl")
        lines = {line.record.gate: line for line in consistency.lines(root)}
        checks.that(len(lines) == 2 and all(line.path == path for line in lines.values()), f"{len(lines)} lines are read")
        own, nonce = hash_of(lines["parity"].text.encode()), records[0].nonce
        other = f"{rng.integers(1 << 40):064x}"
        for what, past, wrong in (("never", {}, 0), ("as it is", {nonce: {own}}, 0), ("otherwise", {nonce: {other}}, 1),
                                  ("as it is and otherwise", {nonce: {own, other}}, 1), ("another nonce", {"00" * 16: {other}}, 0)):
            found = consistency.problems(root, known, past)
            told = [line.record.gate for line, why in found if "committed before" in why]
            checks.that(told == ["parity"] * wrong and len(found) == wrong, f"committed {what}: {[why for _, why in found]}")
        save([replace(records[1], nonce=nonce)], root)
        found = consistency.problems(root, known, {})
        checks.that(len(found) == 1 and "its nonce is that of" in found[0][1] and KERNEL.id in found[0][1], f"one nonce twice: {found}")
    return checks.measured()


def elsewhere(rng: np.random.Generator) -> Measured:
    """A record in the folder of another class is told what of its environment is not of that class."""
    checks = Checks()
    record = replace(_sound(rng), machine=OTHER.key)
    found = consistency.wrong_in(record, catalogue(KERNEL))
    wanted = (HERE.numpy != OTHER.numpy) + (HERE.blas != OTHER.blas)
    checks.that(len(found) == wanted > 0, f"{wanted} of {found}")
    return checks.measured()


def of_gpus(rng: np.random.Generator) -> Measured:
    """A record of a GPU names the driver, its share is of the median; it is of as many devices as its component asks
    for. Of a component or a gate that does not exist nothing is asked that only they could say."""
    checks, known = Checks(), catalogue(KERNEL, SINGLE, PAIR)
    for component, machine, other in ((SINGLE, ONE, TWO), (PAIR, TWO, ONE)):
        record = replace(_sound(rng), component=component.id, machine=machine.key)
        least, ceiling = min(record.cases[0]["times_ns"]), record.cases[0]["ceiling_ns"]
        record = _timed(times_ns=[least, 3 * least, least // 9])(_says(driver="575", numpy="9.9", blas="none")(record))
        checks.that(consistency.wrong_in(record, known) == [], f"on {machine.key}: {consistency.wrong_in(record, known)}")
        away = consistency.wrong_in(_timed(times_ns=[3 * least, least, 3 * least])(record), known)
        share = record.cases[0]["share"]
        checks.that(away == [f"a: a share of {share:g}, but {ceiling:g} ns over {3 * least:g} ns"], f"the median is another one: {away}")
        silent = consistency.wrong_in(_says(driver="-")(record), known)
        checks.that(silent == ["its environment does not say driver"], f"no driver: {silent}")
        found = consistency.wrong_in(replace(record, machine=other.key), known)
        sorts = {ONE: "cuda", TWO: "cuda x2"}
        wanted = [f"it was measured on a class of the sort {sorts[other]}, and its component asks for {sorts[machine]}"]
        checks.that(found == wanted, f"of {component.id} on {other.key}: {found}")
        gone = _says(driver="-")(replace(record, component="made.gone"))
        checks.that(consistency.wrong_in(gone, known) == [], f"of a component that is gone: {consistency.wrong_in(gone, known)}")
    strange = _timed(share=9.0)(replace(_sound(rng), gate="speed"))
    checks.that(consistency.wrong_in(strange, known) == [], f"of a gate that is none: {consistency.wrong_in(strange, known)}")
    spared: tuple[dict[str, Any], ...] = ({"note": "it failed"}, {"times_ns": []})
    for free in spared:
        found = consistency.wrong_in(_timed(share=9.0, **free)(_sound(rng)), known)
        checks.that(found == [], f"a case without times: {found}")
    with folder() as root:
        sound = [_sound(rng, "parity"), replace(_sound(rng, "faults"), component="made.more", nonce="short")]
        save(sound, root)
        (root / HERE.key / "made.bad.jsonl").write_text("x\n")
        told = [(line.about, line.number, why) for line, why in consistency.problems(root, known, {})]
        checks.that(told == [("made.more faults", 1, "its nonce 'short' is none that the gates draw")], f"beside a damaged file: {told}")
        checks.that(len([*consistency.lines(root)]) == 2, "a damaged file is read")
    return checks.measured()
