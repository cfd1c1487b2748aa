"""Arithmetic of half-open intervals of time, ns. Floor 3."""

from __future__ import annotations

import numpy as np


def union_ns(start: np.ndarray, stop: np.ndarray) -> int:
    """Time that [start, stop) cover together."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    reach = np.maximum.accumulate(stop)
    before = np.concatenate(([start[0]], reach[:-1]))
    return int(np.maximum(0, reach - np.maximum(start, before)).sum())


def uncovered_ns(start: np.ndarray, stop: np.ndarray, cover_start: np.ndarray, cover_stop: np.ndarray) -> int:
    """Time inside the union of [start, stop) that no [cover_start, cover_stop) covers."""
    return union_ns(np.concatenate((start, cover_start)), np.concatenate((stop, cover_stop))) - union_ns(cover_start, cover_stop)


def gaps_of(start: np.ndarray, stop: np.ndarray) -> list[tuple[int, int]]:
    """The intervals between the first start and the last stop that no [start, stop) covers, in order."""
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order]) if len(stop) else stop
    return [(int(a), int(b)) for a, b in zip(reach[:-1], start[1:]) if b > a]
