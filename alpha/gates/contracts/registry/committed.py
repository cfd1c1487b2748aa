"""Sound committed evidence of three made-up components, which a case then spoils, and what it must be told. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import BASE, HERE, KERNEL, TOP, catalogue, folder, make, parity_case, passing, pin_of
from alpha.registry import mutants
from alpha.registry.catches import Catch, catch_digests, save_catches
from alpha.registry.check import ERROR, Checked, Recompute, check, plain
from alpha.registry.evidence import path_of, save, write_reference
from alpha.registry.faults import Fault
from alpha.registry.package import Package
from alpha.registry.pins import Pins, folder_of, key_of_record
from alpha.registry.record import Record

FAULT = Fault(id="made.fault", component=KERNEL.id, gate="parity", mirrors=0, why="made up", file="types.py", find="a", replace="b")
CATALOGUE = catalogue(BASE, TOP, KERNEL)
PROBE = ["a", 0, 3, "0000803f"]


def agree(records: Sequence[Record]) -> list[list[str]]:
    return [[] for _ in records]


@cache
def _package() -> Package:
    """One snapshot for all cases: none of them edits a source."""
    return Package()


class Committed:
    """A folder of sound evidence that a case then spoils."""

    def __init__(self, root: Path) -> None:
        self.root, self.package = root / "baselines" / "evidence", _package()
        records = passing((BASE, TOP, KERNEL), self.package)
        self.records = [replace(r, probes=[PROBE]) if (r.component, r.gate) == (KERNEL.id, "parity") else r for r in records]
        save(self.records, self.root)
        self.pins = Pins(folder_of(self.root))
        self.pin()
        write_reference(self.root, HERE)
        self.catch([parity_case(ratio=9.0)])
        self.score(9)

    def pin(self, share: float = 0.6, **more: Any) -> None:
        """Pin the kernel's share."""
        digests = more.pop("digests", self.record("perf").digests)
        pin = pin_of(KERNEL.id, share, digests=digests, **more)
        self.pins.save(key_of_record(self.record("perf")), {pin.component: pin})

    def perf(self, share: float, **more: object) -> None:
        """A record of the perf gate with this share, and a content hash of its own."""
        self.write(replace(self.record("perf"), cases=[{"name": "a", "share": share, "times_ns": [1000], **more}]))

    def catch(self, cases: Sequence[dict[str, object]], fault: Fault = FAULT, declared: int | None = None, **changes: object) -> None:
        record = make("parity", cases, component=KERNEL.id, digests={"implementation": "broken"}, declared=declared)
        made = Catch(fault=fault.id, component=KERNEL.id, gate="parity", machine=HERE.key, record=record,
                     digests=catch_digests(fault, KERNEL, self.package))
        save_catches([replace(made, **changes)], self.root)  # type: ignore[arg-type]

    def score(self, caught: int, **changes: Any) -> None:
        """A score of 10 seeded mutants."""
        made = mutants.Scores(seed="5eed", number=12, areas={mutants.ALL: (caught, 10, 2)}, survivors=("a.py:f: x -> y",),
                              measure=mutants.measured_by(self.package))
        mutants.save(replace(made, **changes), self.root)

    def check(self, recompute: Recompute = agree, faults: Sequence[Fault] = (FAULT,),
              published: Sequence[str] = (KERNEL.id,)) -> Checked:
        return check(CATALOGUE, self.root, recompute, faults=faults, package=self.package, published=published)

    def path(self, component: str = KERNEL.id) -> Path:
        return path_of(self.root, HERE.key, component)

    def record(self, gate: str) -> Record:
        (found,) = [r for r in self.records if (r.component, r.gate) == (KERNEL.id, gate)]
        return found

    def write(self, *records: Record) -> None:
        save(records, self.root)


def red(checks: Checks, what: str, spoil: Callable[[Committed], object], naming: str, *, faults: Sequence[Fault] = (FAULT,),
         recompute: Recompute = agree) -> None:
    with folder() as at:
        committed = Committed(at)
        spoil(committed)
        found = committed.check(recompute, faults)
        errors = [f for f in found.findings if f.level == ERROR]
        checks.that(not found.ok and any(naming in f.what + f.about for f in errors), f"{what}: {plain(found)[:150]}")
        placed = all(f.line == 0 or (f.line > 0 and not (at / f.path).is_dir()) for f in found.findings)
        checks.that(placed, f"{what}: a line of nothing: {plain(found)[:150]}")
