"""What a watched step tells of the device: time stamps where the phase changes, or on a profiled step around every launch. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, groupby, pairwise
from typing import Any

from alpha.cudart.mark import PLACES, Marks
from alpha.errors import GraphError
from alpha.graph.plan import Launch, Plan
from alpha.profile.phases import phase_of
from alpha.profile.recorder import Recorder

_FLOW = count()
ALIGN_NS, ALIGN_PROBES = 1_000_000_000, 10
"""Time after which the device's clock is set against the host's again, and tries that it takes: quartz drifts by some 25 us a second."""

Bound = Sequence[tuple[Launch, Callable[[int], None]]]


def runs_of(plan: Plan) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of launches of one phase, in order."""
    found, at = [], 0
    for _, group in groupby(plan.launches, key=phase_of):
        n = len(list(group))
        found.append((at, at + n))
        at += n
    return found


class Watch:
    """Collects the stamps of one step's Segments until the stream has been waited for, then tells the recorder."""

    def __init__(self, stream: Any) -> None:
        self.marks, self._stream = Marks(stream), stream
        self._pending: list[tuple[Plan, bool, list[tuple[int, int]]]] = []  # plan, profiled, host times of its launches
        self._aligned = 0
        self._runs: dict[str, list[tuple[int, int]]] = {}

    def make_room(self, plans: Sequence[Plan], recorder: Recorder) -> None:
        """Before Segments are enqueued: where the ring cannot hold their stamps beside those that wait, wait and collect. GraphError where
        it could not hold them alone."""
        waiting, more = (sum(len(p.launches) + 1 for p in found) for found in ([p for p, _, _ in self._pending], plans))
        if more > PLACES:
            raise GraphError("a replay takes more time stamps than there is room for", came=more, expected=f"at most {PLACES}",
                             do="take a smaller train.replay")
        if waiting + more > PLACES:
            self._stream.synchronize()
            self.collect(recorder)

    def launch_all(self, plan: Plan, bound: Bound, stream: int) -> None:
        """Enqueue every launch, with a stamp before the first and after each run of one phase. May be captured."""
        self.marks.mark(stream)
        for first, stop in self._runs_of(plan):
            for _, run in bound[first:stop]:
                run(stream)
            self.marks.mark(stream)

    def launched(self, plans: Sequence[Plan]) -> None:
        """Segments that hold such stamps were enqueued."""
        self._pending += [(plan, False, []) for plan in plans]

    def launch_each(self, plan: Plan, bound: Bound, stream: int, clock: Callable[[], int]) -> None:
        """Enqueue every launch by itself, with a stamp before the first and after each, and the host's time of each."""
        host = []
        self.marks.mark(stream)
        for _, run in bound:
            start = clock()
            run(stream)
            host.append((start, clock()))
            self.marks.mark(stream)
        self._pending.append((plan, True, host))

    def collect(self, recorder: Recorder) -> None:
        """The stream is idle: read the stamps and tell the recorder what ran when."""
        if not self._pending:
            return
        counts = [1 + (len(plan.launches) if profiled else len(self._runs_of(plan))) for plan, profiled, _ in self._pending]
        stamps, at = self.marks.take(sum(counts)), 0
        for (plan, profiled, host), n in zip(self._pending, counts):
            mine = stamps[at : at + n]
            at += n
            if not profiled:
                recorder.ran_on_device(plan, self._runs_of(plan), list(pairwise(mine)))
                continue
            recorder.ran_on_device(plan, [(i, i + 1) for i in range(len(plan.launches))], list(pairwise(mine)))
            for i, (launch, (called, returned)) in enumerate(zip(plan.launches, host)):
                flow, phase = next(_FLOW), phase_of(launch)
                recorder.event("host enqueue", launch.op, phase, called, returned, flow)
                recorder.event("stream 0", launch.op, phase, mine[i], mine[i + 1], flow)
                recorder.profiled(plan, i, enqueue=returned - called, device=mine[i + 1] - mine[i], wait=0, dispatches=1)
        self._pending = []
        if recorder.clock() - self._aligned >= ALIGN_NS:
            self.marks.align(ALIGN_PROBES)
            self._aligned = recorder.clock()

    def _runs_of(self, plan: Plan) -> list[tuple[int, int]]:
        if plan.name not in self._runs:
            self._runs[plan.name] = runs_of(plan)
        return self._runs[plan.name]

    def free(self) -> None:
        """Give the ring back."""
        self.marks.free()
