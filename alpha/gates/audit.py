"""Rerunning shipped evidence: a random sample, or what a branch changed, is measured again from its own nonce and compared. Floor 7.

Same machine class, same nonce, same code: parity probes and determinism digests must repeat bit for bit, the numbers of parity, gradient
and faults must be the same, and a share of the ceiling must lie within the tripwire. This is what forgery has to survive.

A GPU's class says nothing of the processor beside it, whose float64 sums decide the last bits of a finite difference: under another
processor or BLAS the gradient gate is asked for its verdict alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from alpha.component import Catalogue, Component
from alpha.gates import run as runner
from alpha.gates.adversarial import catches as planted
from alpha.registry.cases import Repeats, Share
from alpha.registry.catches import NAME, Catch, load_catches
from alpha.registry.evidence import current, load_file
from alpha.registry.faults import Fault
from alpha.registry.gates import cases_of
from alpha.registry.gpu import class_here
from alpha.registry.history import History, hash_of
from alpha.registry.pins import GROSS
from alpha.registry.record import Record
from alpha.registry.status import Registry


@dataclass(frozen=True)
class Audited:
    """One record that was measured again; `problems` is empty when it repeats. not_run: why nothing can be said, '' where something can."""

    component: str
    gate: str
    problems: tuple[str, ...]
    not_run: str = ""


def run(catalogue: Catalogue, root: Path, n: int, seed: int | None = None) -> list[Audited]:
    """Audit `n` current records of this machine's classes, CPU and GPU, chosen at random."""
    registry = Registry(catalogue, [root])
    having = [(component, record) for component in catalogue for record in records(registry, component).values()]
    rng = np.random.default_rng(seed)
    chosen = [having[i] for i in rng.permutation(len(having))[:n]]
    return [again(c, r) for c, r in chosen]


SECONDS = 90.0
"""What CI affords for the lines that a branch changed."""

CATCH_SECONDS = 4.0
"""What a planted fault takes, about."""


@dataclass
class Changed:
    """Lines of evidence that are other ones than at the base. here: current records of this machine's classes, of perf only where the
    machine is quiet; faults: planted faults whose catch changed, of these classes; elsewhere: class -> number of lines."""

    here: list[tuple[Component, Record]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    elsewhere: dict[str, int] = field(default_factory=dict)


def changed(catalogue: Catalogue, root: Path, history: History, faults: Sequence[Fault], *, quiet: bool = False) -> Changed:
    """What differs from the commit that the branch left. `quiet`: the machine does nothing else, so that shares can be measured."""
    found, registry, by_id = Changed(), Registry(catalogue, [root]), {f.id: f for f in faults}
    new = history.changed(root)
    for path in sorted(root.glob("*/*.jsonl")) if new else ():
        machine = path.parent.name
        lines: Sequence[Catch | Record] = list((load_catches(root, machine) if path.name == NAME else load_file(path)).values())
        for line in lines:
            if hash_of(line.line().encode()) not in new or line.component not in catalogue:
                continue
            component = catalogue[line.component]
            if _here(component) != machine:
                found.elsewhere[machine] = found.elsewhere.get(machine, 0) + 1
            elif isinstance(line, Catch):
                found.faults += [by_id[line.fault]] * (line.fault in by_id)
            elif (quiet or line.gate != "perf") and current(line, registry.digests(component, line.gate)):
                found.here.append((component, line))
    return found


def _here(component: Component) -> str:
    here = class_here(component)
    return "" if here is None else here.key


def run_changed(catalogue: Catalogue, what: Changed, seed: str, budget: float | None = SECONDS) -> tuple[list[Audited], int]:
    """Measure changed lines again, in an order that the seed (hex) draws, until the budget in seconds is used up (None: all of them; at
    least one). Returns what came of each, and how many were left over."""
    todo: list[tuple[Component, Record] | Fault] = [*what.here, *what.faults]
    order = [todo[i] for i in np.random.default_rng(int(seed, 16)).permutation(len(todo))]
    done: list[Audited] = []
    plants: list[Fault] = []
    start, expected = time.perf_counter(), 0.0
    for item in order:
        takes = CATCH_SECONDS if isinstance(item, Fault) else float(item[1].environment.get("seconds", 1.0))
        if budget is not None and (done or plants) and time.perf_counter() - start + expected + takes > budget:
            break
        if isinstance(item, Fault):
            plants.append(item)
            expected += takes
        else:
            done.append(again(*item))
    if plants:
        with tempfile.TemporaryDirectory(prefix="alpha-audit-") as folder:
            for result in planted.run(catalogue, plants, stale=False, root=Path(folder)):
                problems = () if result.caught else (f"now the gate passes the planted fault {result.fault.id}",)
                done.append(Audited(result.fault.component, f"{result.fault.gate} of {result.fault.id}", problems))
    return done, len(order) - len(done)


def records(registry: Registry, component: Component) -> dict[str, Record]:
    """gate -> the current record of this machine's own class; {} where the component cannot run here."""
    here = class_here(component)
    having = registry.evidence.load(component.id, here.key) if here is not None else {}
    return {gate: found[0].record for gate, found in having.items() if current(found[0].record, registry.digests(component, gate))}


def again(component: Component, record: Record) -> Audited:
    """Measure once more from the record's own nonce: where it departs from it; nothing where cores of ranks stand elsewhere now."""
    new, judgement = runner.measure(component, record.gate, record.nonce)
    if judgement.elsewhere:
        return Audited(component.id, record.gate, (), "; ".join(judgement.reasons))
    problems = [] if judgement.satisfied else [f"now {judgement.verdict}: {'; '.join(judgement.reasons[:2])}"]
    return Audited(component.id, record.gate, (*problems, *differences(record, new)))


def differences(old: Record, new: Record) -> list[str]:
    """Where a repeated measurement departs from the record."""
    pairs = list(zip(cases_of(old), cases_of(new)))
    if len(old.cases) != len(new.cases) or any(a.name != b.name for a, b in pairs):
        return ["other cases than the nonce gives"]
    found = []
    if [list(p) for p in old.probes] != [list(p) for p in new.probes]:
        found.append("probes have other bits")
    other_host = any(old.environment.get(k) != new.environment.get(k) for k in ("cpu", "blas", "numpy"))
    for a, b in pairs:
        if old.gate == "gradient" and other_host:
            continue
        if isinstance(a, Share):
            if not (isinstance(b, Share) and GROSS * a.share <= b.share):
                found.append(f"{a.name}: {getattr(b, 'share', None)!r} of the ceiling, recorded {a.share!r}")
            continue
        keys = ("digest", "distinct") if isinstance(a, Repeats) else ("error", "ratio", "floor", "bound")
        found += [f"{a.name}: {k} is {getattr(b, k, None)!r}, recorded {getattr(a, k)!r}" for k in keys
                  if hasattr(a, k) and str(getattr(a, k)) != str(getattr(b, k, None))]
    return found
