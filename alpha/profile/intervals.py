"""Arithmetic of half-open intervals of time, ns. Floor 3."""

from __future__ import annotations

import numpy as np


def apart(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same time as [start, stop), in order of the starts: where one begins before those before it have ended, it begins at their end.
    One that is over by then is empty there."""
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    begin = np.maximum(start, np.append(start[:1], reach[:-1]))
    return begin, np.maximum(begin, reach)


def union_ns(start: np.ndarray, stop: np.ndarray) -> int:
    """Time that [start, stop) cover together."""
    begin, end = apart(start, stop)
    return int((end - begin).sum())


def uncovered_ns(start: np.ndarray, stop: np.ndarray, cover_start: np.ndarray, cover_stop: np.ndarray) -> int:
    """Time inside the union of [start, stop) that no [cover_start, cover_stop) covers."""
    return union_ns(np.concatenate((start, cover_start)), np.concatenate((stop, cover_stop))) - union_ns(cover_start, cover_stop)


def gaps_of(start: np.ndarray, stop: np.ndarray) -> list[tuple[int, int]]:
    """The intervals between the first start and the last stop that no [start, stop) covers, in order."""
    begin, end = apart(start, stop)
    return [(int(a), int(b)) for a, b in zip(end[:-1], begin[1:]) if b > a]
