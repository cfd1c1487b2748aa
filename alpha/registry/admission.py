"""Admission: what the registry asks of a run before it begins, in which order, and what it says when it refuses. Floor 3.

Nothing is printed and no gate is run here: the command line says what happens, and hands in what runs gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from alpha.component import Catalogue
from alpha.errors import UngatedError
from alpha.registry.evidence import classes, shipped_root
from alpha.registry.record import content_hash
from alpha.registry.status import Call, Registry

REFUSED_LINES = 10
"""Components that a refusal names one by one."""


def needed(catalogue: Catalogue, ids: Iterable[str]) -> list[str]:
    """These components and all that they presuppose, each once."""
    wanted = list(dict.fromkeys(ids))
    for i in wanted:  # grows while it is walked
        wanted += [p for p in catalogue[i].presupposes if p not in wanted]
    return wanted


def asked(ids: Iterable[str], calls: Iterable[Call]) -> list[str]:
    """The components that a run is asked about: those that it names and those that it calls, sorted."""
    return sorted({*ids, *(c[0] for c in calls)})


def never_run(registry: Registry, ids: Iterable[str]) -> list[tuple[str, str]]:
    """(component, gate) to be run first: those without any evidence, on a machine class that no evidence ships for, of these components
    and of what they presuppose. Elsewhere none, and evidence that is stale or says no is never run again silently."""
    if registry.machine.key in classes(shipped_root()):
        return []
    gates = [(i, g) for i in needed(registry.catalogue, ids) for g in registry.status(i).gates.values()]
    return [(i, g.gate) for i, g in gates if not g.satisfied and g.root is None]


def require(registry: Registry, ids: Sequence[str], calls: Iterable[Call], do: str) -> dict[str, dict[str, str]]:
    """component -> gate -> content hash of the record that satisfies it, for the manifest. UngatedError on one screen unless exactly these
    components and calls may run here; `do`: the one command that supplies what is missing."""
    try:
        registry.require(ids, calls)
    except UngatedError as error:
        raise refusal(registry, ids, error, do) from None
    return {i: _evidence_of(registry, i) for i in ids}


def refusal(registry: Registry, ids: Sequence[str], error: UngatedError, do: str) -> UngatedError:
    """The registry's no on one screen: a line a component, and one a call outside its envelope."""
    lines = []
    for status in (registry.status(i) for i in ids):
        if not status.usable:
            why = next((g.why for g in status.gates.values() if not g.satisfied), "presupposes " + ", ".join(status.presupposed))
            lines.append(f"{status.component} ({', '.join(status.missing)}): {why}")
    lines += [line.strip() for line in str(error.came).splitlines() if "outside its envelope" in line]
    shown = lines[:REFUSED_LINES] + ([f"... and {len(lines) - REFUSED_LINES} more"] if len(lines) > REFUSED_LINES else [])
    named = {line.partition(" ")[0] for line in lines}  # several calls of one component may be outside
    return UngatedError(f"{len(named)} of {len(ids)} components of this run are not usable on this machine class",
                        came="\n    " + "\n    ".join(shown), expected=error.expected, do=do)


def _evidence_of(registry: Registry, component_id: str) -> dict[str, str]:
    """Gate of a usable component -> content hash of the record that satisfies it."""
    found: dict[str, str] = {}
    component = registry.catalogue[component_id]
    for gate, status in registry.status(component_id).gates.items():
        best = registry.evidence.best(component_id, status.machine, gate, registry.digests(component, gate))
        assert best is not None, "what satisfies a gate is there"
        found[gate] = content_hash(asdict(best.record))[:16]
    return found
