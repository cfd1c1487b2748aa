"""Many cases in one evidence line: neighbours of one sort share an entry that keeps the worst of each number. Floor 7.

A line holds at most 8 KB; a row may have a hundred samples. Which cases share an entry depends on their order and number only, never on
what was measured, so the declared number of entries is known before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpha.registry.cases import CaseRecord, Relative

ENTRIES = 40
"""Entries per line, about: 8 KB less the probes, at 80 to 120 bytes each."""


def summarise(entries: Sequence[CaseRecord], most: int = ENTRIES) -> list[CaseRecord]:
    """At most about `most` entries; each names its first and last case, how many there are (`n`), and the worst one's note."""
    share = -(-len(entries) // most)
    if share <= 1:
        return list(entries)
    found: list[CaseRecord] = []
    for group in _runs(entries):
        for start in range(0, len(group), share):
            found.append(_merge(group[start : start + share]))
    return found


def _runs(entries: Sequence[CaseRecord]) -> list[list[CaseRecord]]:
    """Consecutive entries of one sort that may be merged."""
    groups: list[list[CaseRecord]] = []
    for e in entries:
        if groups and e.decides and _sort(groups[-1][-1]) == _sort(e):
            groups[-1].append(e)
        else:
            groups.append([e])
    return groups


def _sort(entry: CaseRecord) -> tuple[type[CaseRecord], bool]:
    """What entries that share a line must have in common: the sort, and whether they are f64 runs."""
    return type(entry), entry.name.endswith(".f64")


def _merge(group: Sequence[CaseRecord]) -> CaseRecord:
    if len(group) == 1:
        return group[0]
    worst = max(group, key=lambda e: _order(getattr(e, e.decides)))
    told = worst.name if not _order(getattr(worst, worst.decides)) == 0.0 else ""
    merged = replace(worst, name=f"{group[0].name}..{group[-1].name}", n=len(group), worst=told)
    if isinstance(merged, Relative):
        floors = [e.floor for e in group if isinstance(e, Relative) and e.floor is not None]
        return replace(merged, floor=min(floors, key=_order) if floors else None)
    return merged


def _order(value: float) -> float:
    return float("inf") if value != value else value
