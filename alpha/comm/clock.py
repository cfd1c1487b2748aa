"""Where the clocks of all ranks stand at one moment, measured when a job starts. Floor 4.

On one host CLOCK_MONOTONIC is one clock for all processes, unless one lives in a time namespace of its own (time_namespaces(7)). So the
offset is measured, and taken for 0 only where the measurement allows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from alpha.comm import collectives
from alpha.comm.group import Group

TRIPS = 20
"""Questions of each rank. The quickest one counts, for it was disturbed least."""


@dataclass(frozen=True)
class Clocks:
    """offset: i64[size], ns that each member's clock is ahead of the first one's; within: i64[size], ns, how far that may be wrong.

    moment: ns of this member's own clock at one moment of all; unix: that moment in ns of Unix time, by the first member. All members
    hold the same offsets.
    """

    offset: np.ndarray
    within: np.ndarray
    moment: int = 0
    unix: int = 0

    @property
    def shared(self) -> np.ndarray:
        """bool[size]: no offset was seen, so the clock is taken for the first member's own."""
        return np.asarray(np.abs(self.offset) <= self.within)

    def text(self) -> str:
        """For people, one sentence."""
        if self.shared.all():
            return f"one clock: no offset seen within {int(self.within.max()) / 1e3:.1f} us"
        apart = ", ".join(f"rank {r} by {int(self.offset[r]):+,} ns (within {int(self.within[r]):,})" for r in np.flatnonzero(~self.shared))
        return f"clocks apart, aligned by what was measured: {apart}"


def align(group: Group, clock: Callable[[], int] = time.perf_counter_ns) -> Clocks:
    """Compare the members' clocks: each asks the first one for its time, TRIPS times (Cristian, Probabilistic clock synchronization,
    Distributed Computing 3, 1989). The answer was given somewhere within the round trip, so half of that bounds the error."""
    first, question, answer = group.index == 0, np.zeros(1, np.int64), np.zeros(1, np.int64)
    best = [0, 0]
    for member in range(1, group.size):
        for trip in range(TRIPS if group.index in (0, member) else 0):
            if first:
                collectives.receive(group, question, source=member)
                answer[0] = clock()
                collectives.send(group, answer, to=member)
                continue
            asked = clock()
            collectives.send(group, question, to=0)
            collectives.receive(group, answer, source=0)
            heard = clock()
            if not trip or heard - asked < 2 * best[1]:
                best = [(asked + heard) // 2 - int(answer[0]), (heard - asked + 1) // 2]
    every = np.empty((group.size, 2), np.int64)
    collectives.all_gather(group, np.array(best, np.int64), every)
    now = np.array([clock(), time.time_ns()])
    collectives.broadcast(group, now, now, root=0)
    found = Clocks(every[:, 0], every[:, 1])
    own = 0 if found.shared[group.index] else int(found.offset[group.index])
    return replace(found, moment=int(now[0]) + own, unix=int(now[1]))
