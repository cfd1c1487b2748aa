"""Rerunning shipped evidence: a random sample is measured again from its own nonce and compared. Floor 7.

Same machine class, same nonce, same code: parity probes and determinism digests must repeat bit for bit, the numbers of parity, gradient
and faults must be the same, and a share of the ceiling must lie within the tripwire. This is what forgery has to survive.

A GPU's class says nothing of the processor beside it, whose float64 sums decide the last bits of a finite difference: under another
processor or BLAS the gradient gate is asked for its verdict alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alpha.component import Catalogue, Component
from alpha.gates import run as runner
from alpha.registry.cases import Repeats, Share
from alpha.registry.evidence import current
from alpha.registry.gates import cases_of
from alpha.registry.gpu import class_here
from alpha.registry.pins import GROSS
from alpha.registry.record import Record
from alpha.registry.status import Registry


@dataclass(frozen=True)
class Audited:
    """One record that was measured again; `problems` is empty when it repeats."""

    component: str
    gate: str
    problems: tuple[str, ...]


def run(catalogue: Catalogue, root: Path, n: int, seed: int | None = None) -> list[Audited]:
    """Audit `n` current records of this machine's classes, CPU and GPU, chosen at random."""
    registry = Registry(catalogue, [root])
    having = [(component, record) for component in catalogue for record in records(registry, component).values()]
    rng = np.random.default_rng(seed)
    chosen = [having[i] for i in rng.permutation(len(having))[:n]]
    return [Audited(c.id, r.gate, tuple(again(c, r))) for c, r in chosen]


def records(registry: Registry, component: Component) -> dict[str, Record]:
    """gate -> the current record of this machine's own class; {} where the component cannot run here."""
    here = class_here(component)
    having = registry.evidence.load(component.id, here.key) if here is not None else {}
    return {gate: found[0].record for gate, found in having.items() if current(found[0].record, registry.digests(component, gate))}


def again(component: Component, record: Record) -> list[str]:
    """Measure once more from the record's own nonce: where it departs from it."""
    new = runner.measure(component, record.gate, record.nonce)
    judgement = runner.judged(new, component)
    said = [] if judgement.satisfied else [f"now {judgement.verdict}: {'; '.join(judgement.reasons[:2])}"]
    return said + differences(record, new)


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
