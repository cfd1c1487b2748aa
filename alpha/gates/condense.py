"""Many cases in one evidence line: neighbours of one kind share an entry that keeps the worst of each number. Floor 7.

A line holds at most 8 KB; a row may have a hundred samples. Which cases share an entry depends on their order and number only, never on
what was measured, so the declared number of entries is known before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence

ENTRIES = 40
"""Entries per line, about: 8 KB less the probes, at 80 to 120 bytes each."""



def condense(entries: Sequence[dict[str, object]], most: int = ENTRIES) -> list[dict[str, object]]:
    """At most about `most` entries; each names its first and last case, how many there are (`n`), and the worst one's note."""
    share = -(-len(entries) // most)
    if share <= 1:
        return list(entries)
    found: list[dict[str, object]] = []
    for group in _runs(entries):
        for start in range(0, len(group), share):
            found.append(_merge(group[start : start + share]))
    return found


def _runs(entries: Sequence[dict[str, object]]) -> list[list[dict[str, object]]]:
    """Consecutive entries of one kind and one set of keys that may be merged."""
    groups: list[list[dict[str, object]]] = []
    for e in entries:
        if groups and _sort(groups[-1][-1]) == _sort(e):
            groups[-1].append(e)
        else:
            groups.append([e])
    return groups


def _sort(entry: dict[str, object]) -> tuple[object, bool]:
    """What entries that share a line must have in common: the kind, and whether they are f64 runs."""
    return entry.get("kind"), str(entry["name"]).endswith(".f64")


def _merge(group: Sequence[dict[str, object]]) -> dict[str, object]:
    if len(group) == 1:
        return dict(group[0])
    key = "ratio" if "ratio" in group[0] else "error"
    worst = max(group, key=lambda e: _order(e[key]))
    merged: dict[str, object] = {**worst, "name": f"{group[0]['name']}..{group[-1]['name']}", "n": len(group)}
    if not _order(worst[key]) == 0.0:
        merged["worst"] = worst["name"]
    if "floor" in group[0]:
        floors = [e["floor"] for e in group if e["floor"] is not None]
        merged["floor"] = min(floors, key=_order) if floors else None
    return merged


def _order(x: object) -> float:
    value = float(x)  # type: ignore[arg-type]
    return float("inf") if value != value else value
