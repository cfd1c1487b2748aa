"""What the times of all kernels, copies and waits of a profiled step say: busy and idle time, gaps and their causes, copies. Floor 3.

A *gap* lies between two kernels. The part of it in which a copy or fill ran is put down to that: it was not overlapped. The rest is put
down to a wait of the host that began before it and ended in it, where what comes next was handed over after that wait: the host let the
device run dry. Of other gaps no cause is known.

A profiled step is slower than it would be, and its gaps are longer. `slowdowns` says by how much; above PERTURBED gaps and what is exposed
in them are shown and not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpha.profile.intervals import gaps_of, uncovered_ns, union_ns

PERTURBED = 0.02
"""Slowdown of a profiled step above which its gaps are not judged, as a share of its neighbours' time."""

NEIGHBOURS, FEWEST = 5, 3
"""Steady steps on either side that a profiled step is compared with, and the fewest of both sides that say anything."""


@dataclass(frozen=True)
class Kernel:
    """One that ran, ns of the recorder's clock. `launch`, `place`: position of its launch in the Segment `plan`, and its own there; a time
    stamp has launch -1. `handed`: when the host began to hand it over, with all of its graph."""

    plan: str
    launch: int
    place: int
    op: str
    name: str
    phase: str
    start: int
    stop: int
    handed: int = 0

    @property
    def is_stamp(self) -> bool:
        return self.launch < 0


@dataclass(frozen=True)
class Copy:
    """A copy (`name` such as 'HtoD') or fill of device memory, on any stream."""

    name: str
    nbytes: int
    start: int
    stop: int
    fill: bool = False


@dataclass(frozen=True)
class Wait:
    """The host waited for the device."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Stamps:
    """Our own time stamps held against the instrument's times of the kernels that took them: how many, the median difference, and the
    largest distance of one from that; ns."""

    count: int = 0
    offset: int = 0
    spread: int = 0

    @staticmethod
    def against(stamps: Sequence[int], kernels: Sequence[Kernel]) -> Stamps:
        """`stamps[i]` was taken by `kernels[i]`."""
        if not stamps:
            return Stamps()
        off = np.array(stamps, np.int64) - np.array([(k.start + k.stop) // 2 for k in kernels], np.int64)
        middle = int(np.median(off))
        return Stamps(len(stamps), middle, int(np.abs(off - middle).max()))


@dataclass(frozen=True)
class Activity:
    """All that was seen of a profiled step. `switch`: host ns that turning the instrument on and off and reading it took."""

    kernels: Sequence[Kernel]
    copies: Sequence[Copy] = ()
    waits: Sequence[Wait] = ()
    stamps: Stamps = Stamps()
    switch: int = 0

    @property
    def own(self) -> list[Kernel]:
        """The kernels of the step, time stamps left out, by their start."""
        return sorted((k for k in self.kernels if not k.is_stamp), key=lambda k: (k.start, k.stop))

    def gaps(self) -> list[tuple[int, int]]:
        """Intervals between the first kernel and the last in which neither kernel nor stamp ran."""
        own = self.own
        if not own:
            return []
        first, last = own[0].start, max(k.stop for k in own)
        start, stop = _arrays([k for k in self.kernels if k.stop > first and k.start < last])
        return gaps_of(start, stop)

    def row(self, began: int, ended: int) -> dict[str, int]:
        """The row of kernel_times of a step from `began` to `ended`, less its key."""
        kernels, stamps = _arrays(self.own), _arrays([k for k in self.kernels if k.is_stamp])
        copies = _arrays(self.copies)
        all_of = [np.concatenate(x) for x in zip(kernels, stamps, copies)]
        clipped = [np.clip(x, began, ended) for x in all_of]
        gaps, in_copy, in_sync = self.gaps(), 0, 0
        handed = {k.start: k.handed for k in self.kernels}
        for start, stop in gaps:
            copied = union_ns(np.clip(copies[0], start, stop), np.clip(copies[1], start, stop))
            in_copy += copied
            if any(w.start < start <= w.stop <= min(stop, handed[stop]) for w in self.waits):
                in_sync += stop - start - copied
        copy_ns = union_ns(*copies)
        return {
            "kernels": len(kernels[0]), "busy_ns": union_ns(*kernels), "stamp_ns": uncovered_ns(*stamps, *kernels),
            "idle_ns": ended - began - union_ns(*clipped), "gap_ns": sum(b - a for a, b in gaps), "gap_sync_ns": in_sync,
            "gap_copy_ns": in_copy, "longest_gap_ns": max((b - a for a, b in gaps), default=0), "copies": len(self.copies),
            "copy_ns": copy_ns, "copy_overlapped_ns": copy_ns - uncovered_ns(*copies, *kernels), "syncs": len(self.waits),
            "sync_ns": sum(w.stop - w.start for w in self.waits), "stamps": self.stamps.count, "stamp_offset_ns": self.stamps.offset,
            "stamp_spread_ns": self.stamps.spread, "switch_ns": self.switch,
        }  # fmt: skip


def _arrays(found: Sequence[Kernel | Copy]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([x.start for x in found], np.int64), np.array([x.stop for x in found], np.int64)


def slowdowns(step: np.ndarray, run: np.ndarray, step_ns: np.ndarray, steady: np.ndarray, profiled: np.ndarray) -> np.ndarray:
    """For each row how much longer than the median of its steady neighbours the step took, as a share of that; NaN where the row is not
    profiled or has too few neighbours. `run`: which rows belong together, a number for each rank and session."""
    found = np.full(len(step), np.nan)
    for i in np.flatnonzero(profiled):
        near = np.flatnonzero(steady & (run == run[i]))
        before, after = near[step[near] < step[i]], near[step[near] > step[i]]
        chosen = np.concatenate((before[np.argsort(step[before])][-NEIGHBOURS:], after[np.argsort(step[after])][:NEIGHBOURS]))
        if len(chosen) >= FEWEST:
            found[i] = step_ns[i] / np.median(step_ns[chosen]) - 1.0
    return found
