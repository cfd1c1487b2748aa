"""Happens-before among calls that run on streams: what may share memory, and what has to wait for what. Floor 2.

The calls of one stream run in list order. A call of another stream runs beside them, but for the calls that it waits for. List order is
always one of the possible orders, so whoever has one stream runs the list as it stands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from alpha.errors import GraphError

COMPUTE, COMM = "", "comm"
STREAMS = (COMPUTE, COMM)
"""Every stream: the one of compute, and the one of collectives."""


class Order:
    """The order of `len(streams)` calls. `streams`: of each call, None for what never runs (a view); `after`: of each call, indices of
    earlier calls whose results it needs. GraphError if a call waits for itself or for a later one."""

    def __init__(self, streams: Sequence[str | None], after: Sequence[Collection[int]]) -> None:
        self._streams = tuple(streams)
        beside = {s for s in streams if s not in (None, COMPUTE)}
        self._single = len({s for s in streams if s is not None}) <= 1
        self._several = len(beside) > 1
        self._seen: list[dict[str, int]] = []
        """Of each call, by stream the last call that has ended for certain when it begins."""
        self._waits: list[tuple[int, ...]] = []
        self._main: dict[str, list[tuple[int, int]]] = {}
        """Of each stream beside compute: (last call of it that has ended, compute call that knows), both rising."""
        latest: dict[str, dict[str, int]] = {}
        for i, (stream, needed) in enumerate(zip(self._streams, after, strict=True)):
            if any(j >= i for j in needed):
                raise GraphError("a call waits for one that does not come before it", came=f"call {i} after {sorted(needed)}",
                                 expected=f"indices below {i}", do="the order of the list is wrong, or calls wait in a circle")
            if stream is None:
                self._seen.append({})
                self._waits.append(())
                continue
            known = dict(latest.get(stream, {}))
            waits: dict[str, int] = {}
            for j in sorted(needed, reverse=True):
                other = self._streams[j]
                if other is not None and other != stream and known.get(other, -1) < j:
                    waits.setdefault(other, j)
                    for s, k in (*self._seen[j].items(), (other, j)):
                        known[s] = max(known.get(s, -1), k)
            self._seen.append(known)
            self._waits.append(tuple(sorted(waits.values())))
            if stream == COMPUTE:
                for s, k in known.items():
                    rising = self._main.setdefault(s, [])
                    if s != COMPUTE and (not rising or rising[-1][0] < k):
                        rising.append((k, i))
            latest[stream] = {**known, stream: i}

    def waits(self, i: int) -> tuple[int, ...]:
        """The fewest calls of other streams that call `i` must wait for: all else follows from them and from the streams' own order."""
        return self._waits[i]

    def before(self, i: int, j: int) -> bool:
        """Whether call `i` has ended for certain when call `j` begins. What never runs stands where the list has it."""
        mine, other = self._streams[i], self._streams[j]
        if self._single or mine is None or other is None or mine == other:
            return i < j
        return i <= self._seen[j].get(mine, -1)

    def window(self, i: int) -> tuple[int, int]:
        """(first, last) place of the list at which call `i` may run, by what the compute stream knows. Two calls whose windows are apart
        run one after the other. Where several streams run beside compute, the last place is that of the compute call that waits for it:
        another stream may know of the compute call before that one alone."""
        stream = self._streams[i]
        if self._single or stream is None or stream == COMPUTE:
            return i, i
        known = self._main.get(stream, [])
        at = bisect_left(known, (i, -1))
        return self._seen[i].get(COMPUTE, -1) + 1, known[at][1] - (not self._several) if at < len(known) else len(self._streams)
