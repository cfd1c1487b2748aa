"""What a watched step tells of the device: time stamps where the phase changes, or on a profiled step around every launch. Floor 4."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from typing import Any

from alpha.cudart.mark import PLACES, Marks
from alpha.errors import GraphError
from alpha.graph.plan import Launch, Plan
from alpha.profile.phases import phase_of
from alpha.profile.recorder import Recorder

_FLOW = count()
SECOND, RARELY, PROBES = 1_000_000_000, 10, 10
"""The device's clock is set against the host's again after one second, then two, four and so on up to RARELY, with PROBES tries: quartz is
off by some 25 us a second, until two such moments far apart have said by how much."""

Bound = Sequence[tuple[Launch, Callable[[int], None]]]


def runs_of(plan: Plan) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of launches of one phase, in order."""
    found, at = [], 0
    for _, group in groupby(plan.launches, key=phase_of):
        n = len(list(group))
        found.append((at, at + n))
        at += n
    return found


def stamps_of(plans: Iterable[Plan]) -> int:
    """Most time stamps that Segments take: one before the first launch, one after each."""
    return sum(len(plan.launches) + 1 for plan in plans)


@dataclass(frozen=True)
class _Segment:
    """One that was enqueued with `stamps` stamps from number `first` on; on a profiled step with the host's times of its launches."""

    plan: Plan
    first: int
    stamps: int
    host: list[tuple[int, int]] | None


class Watch:
    """Keeps count of the stamps of Segments until those have been waited for, then tells the recorder. `launched`: Segments so far."""

    def __init__(self, stream: Any, clock: Callable[[], int]) -> None:
        self.marks, self._stream, self._clock, self.launched = Marks(stream), stream, clock, 0
        self._pending: deque[_Segment] = deque()
        self._aligned, self._every = clock(), 1
        self._runs: dict[str, list[tuple[int, int]]] = {}

    def make_room(self, plans: Sequence[Plan], recorder: Recorder) -> None:
        """Before Segments are enqueued: where the ring cannot hold their stamps beside those that wait, wait and collect. GraphError where
        it could not hold them alone."""
        waiting, more = stamps_of(s.plan for s in self._pending), stamps_of(plans)
        if more > PLACES:
            raise GraphError("a replay takes more time stamps than there is room for", came=more, expected=f"at most {PLACES}",
                             do="take a smaller train.replay")
        if waiting + more > PLACES:
            self._stream.synchronize()
            self.collect(recorder, self.launched)

    def launch_all(self, plan: Plan, bound: Bound, stream: int) -> None:
        """Enqueue every launch, with a stamp before the first and after each run of one phase. May be captured."""
        self.marks.mark(stream)
        for first, stop in self._runs_of(plan):
            for _, run in bound[first:stop]:
                run(stream)
            self.marks.mark(stream)

    def enqueued(self, plans: Sequence[Plan]) -> None:
        """Segments that hold such stamps were enqueued."""
        for plan in plans:
            self._wait_for(plan, 1 + len(self._runs_of(plan)), None)

    def launch_each(self, plan: Plan, bound: Bound, stream: int) -> None:
        """Enqueue every launch by itself, with a stamp before the first and after each, and the host's time of each."""
        host = []
        self.marks.mark(stream)
        for _, run in bound:
            start = self._clock()
            run(stream)
            host.append((start, self._clock()))
            self.marks.mark(stream)
        self._wait_for(plan, 1 + len(plan.launches), host)

    def _wait_for(self, plan: Plan, stamps: int, host: list[tuple[int, int]] | None) -> None:
        self._pending.append(_Segment(plan, self.marks.number(stamps), stamps, host))
        self.launched += 1

    def collect(self, recorder: Recorder, upto: int) -> None:
        """The first `upto` Segments have ended: read the stamps of those that are still to be told of, and tell the recorder what ran when.
        Later ones may be running."""
        ended = [self._pending.popleft() for _ in range(len(self._pending) - (self.launched - upto))]
        if ended:
            first = ended[0].first  # clocks are set when none is pending: the stamps follow one another
            taken = self.marks.take(first, ended[-1].first + ended[-1].stamps - first)
        for segment in ended:
            plan, stamps = segment.plan, taken[segment.first - first : segment.first - first + segment.stamps]
            if segment.host is None:
                recorder.ran_on_device(plan, self._runs_of(plan), list(pairwise(stamps)))
                continue
            recorder.ran_on_device(plan, [(i, i + 1) for i in range(len(plan.launches))], list(pairwise(stamps)))
            for i, (launch, (called, returned)) in enumerate(zip(plan.launches, segment.host)):
                flow, phase = next(_FLOW), phase_of(launch)
                recorder.event("host enqueue", launch.op, phase, called, returned, flow)
                recorder.event("stream 0", launch.op, phase, stamps[i], stamps[i + 1], flow)
                recorder.profiled(plan, i, enqueue=returned - called, device=stamps[i + 1] - stamps[i], wait=0, dispatches=1)
        if self.due and not self._pending:
            self.marks.align(PROBES)
            self._aligned, self._every = self._clock(), min(2 * self._every, RARELY)

    @property
    def due(self) -> bool:
        """Whether it is time to set the clocks, which takes an idle stream."""
        return self._clock() - self._aligned >= self._every * SECOND

    def _runs_of(self, plan: Plan) -> list[tuple[int, int]]:
        if plan.name not in self._runs:
            self._runs[plan.name] = runs_of(plan)
        return self._runs[plan.name]

    def free(self) -> None:
        """Give the ring back."""
        self.marks.free()
