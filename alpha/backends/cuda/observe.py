"""What a watched step tells of the device: time stamps where the phase changes; on a profiled step each kernel, by an instrument, or where
there is none each launch, by a stamp before and after. Floor 4."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby, pairwise
from typing import Any

from alpha.backends.cuda.lib import Parts
from alpha.cuda_runtime import cupti
from alpha.cuda_runtime.launch import noted
from alpha.cuda_runtime.mark import PLACES, Marks
from alpha.errors import GraphError, MachineError
from alpha.graph.plan import Launch, Plan
from alpha.profile.kernels import Activity, Copy, Kernel, Stamps, Wait
from alpha.profile.phases import phase_of
from alpha.profile.recorder import Recorder

_FLOW = count()
SECOND, RARELY, PROBES = 1_000_000_000, 10, 10
"""The device's clock is set against the host's again after one second, then two, four and so on up to RARELY, with PROBES tries: quartz is
off by some 25 us a second, until two such moments far apart have said by how much."""

MARK = "mark"
"""Name of the kernel that takes a time stamp."""

Bound = Sequence[tuple[Launch, Callable[[int], None]]]

Look = tuple[Callable[[int], None], Callable[[int], None]]
"""What is called with the number of a launch before it is enqueued, and after."""


@dataclass(frozen=True)
class Work:
    """What one launch of a Segment enqueues in one phase; most launches have one."""

    launch: int
    phase: str
    run: Callable[[int], None]


@dataclass(frozen=True)
class Ran:
    """The kernels that were enqueued for a Work, in order; launch -1: for a time stamp."""

    launch: int
    phase: str
    kernels: tuple[str, ...]


def works_of(bound: Bound) -> list[Work]:
    """The launches of a Segment in order, each cut where its phase changes."""
    found = []
    for index, (launch, run) in enumerate(bound):
        own = phase_of(launch)
        parts = run.parts if isinstance(run, Parts) else ((None, run),)
        found += [Work(index, phase or own, part) for phase, part in parts]
    return found


def runs_of(works: Sequence[Work]) -> list[list[Work]]:
    """The same, cut where the phase changes."""
    return [list(group) for _, group in groupby(works, key=lambda w: w.phase)]


def pieces_of(works: Sequence[Work]) -> list[tuple[str, int]]:
    """(phase, launches that begin in it) of each of `runs_of`."""
    found, before = [], -1
    for run in runs_of(works):
        begun = 0
        for work in run:
            begun, before = begun + (work.launch != before), work.launch
        found.append((run[0].phase, begun))
    return found


def stamps_of(segments: Iterable[Bound]) -> int:
    """Most time stamps that Segments take: one before the first launch, one after each part."""
    return sum(len(works_of(bound)) + 1 for bound in segments)


@dataclass(frozen=True)
class _Segment:
    """One that was enqueued with `stamps` stamps from number `first` on, one before each of `pieces` (phase, launches that begin in it) and
    one at the end. `ran`: its kernels, where an instrument sees them. `host`: when the host handed it over, or where each of `works` has a
    stamp each of them."""

    plan: Plan
    first: int
    pieces: list[tuple[str, int]]
    ran: list[Ran] = field(default_factory=list)
    host: list[tuple[int, int]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    @property
    def stamps(self) -> int:
        return 1 + len(self.pieces)


class Watch:
    """Keeps count of the stamps of Segments until those have been waited for, then tells the recorder. `launched`: Segments so far.
    `instrument`: what times every kernel of a profiled step; None: nothing does."""

    def __init__(self, stream: Any, recorder: Recorder) -> None:
        self.marks, self._stream, self._clock, self.launched = Marks(stream), stream, recorder.clock, 0
        self._pending: deque[_Segment] = deque()
        self._aligned, self._every = self._clock(), 1
        self._works: dict[str, list[Work]] = {}
        found = cupti.opened()
        self.instrument = None if isinstance(found, str) else found
        recorder.describe({"kernel_times": f"not measured: {found}" if isinstance(found, str) else found.text})
        self._seen: list[tuple[_Segment, list[int]]] = []
        self._on, self._switch = False, 0

    def works(self, plan: Plan, bound: Bound) -> list[Work]:
        """The works of a Segment; found once."""
        if plan.name not in self._works:
            self._works[plan.name] = works_of(bound)
        return self._works[plan.name]

    def make_room(self, segments: Sequence[Bound], recorder: Recorder) -> None:
        """Before Segments are enqueued: where the ring cannot hold their stamps beside those that wait, wait and collect. GraphError where
        it could not hold them alone."""
        waiting, more = sum(s.stamps for s in self._pending), stamps_of(segments)
        if more > PLACES:
            raise GraphError("a replay takes more time stamps than there is room for", came=more, expected=f"at most {PLACES}",
                             do="take a smaller train.replay")
        if waiting + more > PLACES:
            self._stream.synchronize()
            self.collect(recorder, self.launched)

    # -- a watched step ----------------------------------------------------------------------------------------------------------

    def launch_all(self, plan: Plan, bound: Bound, stream: int) -> list[Ran]:
        """Enqueue every launch, with a stamp before the first and after each run of one phase. May be captured."""
        ran = [self._mark(stream)]
        for works in runs_of(self.works(plan, bound)):
            for work in works:
                with noted() as names:
                    work.run(stream)
                ran.append(Ran(work.launch, work.phase, tuple(names)))
            ran.append(self._mark(stream))
        return ran

    def _mark(self, stream: int) -> Ran:
        self.marks.mark(stream)
        return Ran(-1, "", (MARK,))

    def enqueued(self, plans: Sequence[Plan], ran: Sequence[list[Ran]]) -> None:
        """Segments that hold such stamps were enqueued."""
        for plan, one in zip(plans, ran, strict=True):
            self._wait_for(_Segment(plan, 0, pieces_of(self._works[plan.name]), list(one) if self._on else []))

    # -- a profiled step ---------------------------------------------------------------------------------------------------------

    def observe(self, recorder: Recorder) -> None:
        """Turn the instrument on, if it is not, until the step is over; its records are read then."""
        assert self.instrument is not None
        if self._on:
            return
        start = self._clock()
        try:
            self.instrument.start()
        except MachineError as error:
            self._give_up(recorder, error)
            return
        self._on, self._seen, self._switch = True, [], self._clock() - start
        recorder.afterwards(partial(self._read, recorder))

    def handed_over(self, plans: Sequence[Plan], called: int, returned: int) -> None:
        """The host handed over these Segments, the last that were enqueued, from `called` to `returned`."""
        self._pending[-len(plans)].host.append((called, returned))

    def _read(self, recorder: Recorder) -> None:
        """The profiled step is over: what its kernels, copies and waits were. Where the instrument did not see the kernels that were
        enqueued, nothing is told, and the run says so."""
        assert self.instrument is not None
        start = self._clock()
        self._on = False
        try:
            records = self.instrument.stop()
        except MachineError as error:
            self._give_up(recorder, error)
            return
        switch, seen = self._switch + self._clock() - start, self._seen
        self._seen = []
        wanted = [(s, r, name) for s, _ in seen for r in s.ran for name in r.kernels]
        found = [r for r in records if r.kind == "kernel" and not r.name.startswith("spot_")]
        if not seen:
            return
        if [name for _, _, name in wanted] != [r.name for r in found]:
            at = next((i for i, (w, f) in enumerate(zip(wanted, found)) if w[2] != f.name), min(len(wanted), len(found)))
            recorder.describe({"kernel_times": f"not measured in a step: {len(wanted)} kernels were enqueued and {len(found)} seen, other "
                                               f"ones from number {at} on ({self.instrument.text})"})
            return
        kernels: list[Kernel] = []
        handed = 0
        places: dict[tuple[int, int], int] = {}
        for (segment, ran, name), record in zip(wanted, found):
            handed = segment.host[0][0] if segment.host else handed  # Segments of one graph are handed over with the first
            launch = segment.plan.launches[ran.launch] if ran.launch >= 0 else None
            key = id(segment), ran.launch
            place = places[key] = places.get(key, -1) + 1
            kernels.append(Kernel(segment.plan.name, ran.launch, place if launch else 0, launch.op if launch else "time stamp", name,
                                  ran.phase or "idle", record.start, record.stop, handed))
        told = [t for _, times in seen for t in times]
        activity = Activity(
            kernels, [Copy(r.name, r.nbytes, r.start, r.stop, r.kind == "fill") for r in records if r.kind in ("copy", "fill")],
            [Wait(r.name, r.start, r.stop) for r in records if r.kind == "wait"],
            Stamps.against(told, [k for k in kernels if k.is_stamp]), switch)
        recorder.ran_kernels({s.plan.name: s.plan for s, _ in seen}, activity)
        self._arrows(recorder, seen, kernels)

    def _give_up(self, recorder: Recorder, error: MachineError) -> None:
        """The instrument refuses: the run goes on without, and says so."""
        self.instrument = None
        recorder.describe({"kernel_times": f"not measured any more: {error.what}: {error.came}"})

    def _arrows(self, recorder: Recorder, seen: Sequence[tuple[_Segment, list[int]]], kernels: Sequence[Kernel]) -> None:
        """The timeline: each graph on the host's track with an arrow to its first kernel, and every kernel on the stream's."""
        at = 0
        for segment, _ in seen:
            own = kernels[at : at + sum(len(r.kernels) for r in segment.ran)]
            at += len(own)
            flow = None
            for called, returned in segment.host:
                flow = next(_FLOW)
                recorder.event("host enqueue", "graph", own[0].phase if own else "idle", called, returned, flow)
            for kernel in own:
                name = kernel.op if kernel.is_stamp else f"{kernel.op}: {kernel.name}"
                recorder.event("stream 0", name, kernel.phase, kernel.start, kernel.stop, None if kernel.is_stamp else flow)
                flow = flow if kernel.is_stamp else None

    def launch_each(self, plan: Plan, bound: Bound, stream: int) -> None:
        """Enqueue every launch by itself, with a stamp before the first and after each part, and the host's time of each."""
        host, works, ran = [], self.works(plan, bound), []
        self.marks.mark(stream)
        for work in works:
            start = self._clock()
            with noted() as names:
                work.run(stream)
            host.append((start, self._clock()))
            ran.append(Ran(work.launch, work.phase, tuple(names)))
            self.marks.mark(stream)
        pieces = [(w.phase, int(i == 0 or works[i - 1].launch != w.launch)) for i, w in enumerate(works)]
        self._wait_for(_Segment(plan, 0, pieces, ran, host, works))

    def launch_inspected(self, plan: Plan, bound: Bound, stream: int, look: Look, profiled: bool) -> None:
        """The same with what looks at each launch before and after it, whose time counts as checks. Launches are told of one by one where
        the step is `profiled`."""
        host, works, ran = [], list[Work](), []
        self.marks.mark(stream)

        def checked(when: Callable[[int], None], index: int) -> None:
            start = self._clock()
            when(index)
            host.append((start, self._clock()))
            works.append(Work(-1, "checks", lambda _: None))
            ran.append(Ran(-1, "checks", ()))
            self.marks.mark(stream)

        for index, parts in groupby(self.works(plan, bound), key=lambda w: w.launch):
            checked(look[0], index)
            for work in parts:
                start = self._clock()
                with noted() as names:
                    work.run(stream)
                host.append((start, self._clock()))
                works.append(work)
                ran.append(Ran(work.launch, work.phase, tuple(names)))
                self.marks.mark(stream)
            checked(look[1], index)
        pieces = [(w.phase, int(w.launch >= 0 and works[i - 1].launch != w.launch)) for i, w in enumerate(works)]
        self._wait_for(_Segment(plan, 0, pieces, ran, host, works) if profiled else _Segment(plan, 0, pieces))

    def checked(self, plan: Plan, hashes: Callable[[], None], stream: int) -> None:
        """What enqueues hashes beside this plan, between two stamps."""
        first = self._mark(stream)
        hashes()
        ran = [first, self._mark(stream)]
        self._wait_for(_Segment(plan, 0, [("checks", 0)], ran if self._on else []))

    # -- afterwards --------------------------------------------------------------------------------------------------------------

    def _wait_for(self, segment: _Segment) -> None:
        first = self.marks.number(segment.stamps)
        self._pending.append(_Segment(segment.plan, first, segment.pieces, segment.ran, segment.host, segment.works))
        self.launched += 1

    def collect(self, recorder: Recorder, upto: int) -> None:
        """The first `upto` Segments have ended: read the stamps of those that are still to be told of, and tell the recorder what ran when.
        Later ones may be running."""
        ended = [self._pending.popleft() for _ in range(len(self._pending) - (self.launched - upto))]
        if ended:
            first = ended[0].first  # clocks are set when none is pending: the stamps follow one another
            taken = self.marks.take(first, ended[-1].first + ended[-1].stamps - first)
        for segment in ended:
            stamps = taken[segment.first - first : segment.first - first + segment.stamps]
            recorder.ran_on_device(segment.pieces, list(pairwise(stamps)))
            if segment.works:
                self._tell_each(recorder, segment, stamps)
            elif segment.ran:
                self._seen.append((segment, stamps))
        if self.due and not self._pending and not self._on:  # what sets the clocks is no kernel of the step
            self.marks.align(PROBES)
            self._aligned, self._every = self._clock(), min(2 * self._every, RARELY)

    def _tell_each(self, recorder: Recorder, segment: _Segment, stamps: Sequence[int]) -> None:
        """Each launch of a Segment with stamps around every part."""
        plan = segment.plan
        for index, group in groupby(range(len(segment.works)), key=lambda i: segment.works[i].launch):
            if index < 0:
                continue
            op, parts = plan.launches[index].op, list(group)
            enqueue = device = kernels = 0
            for i in parts:
                (called, returned), flow, phase = segment.host[i], next(_FLOW), segment.works[i].phase
                recorder.event("host enqueue", op, phase, called, returned, flow)
                recorder.event("stream 0", op, phase, stamps[i], stamps[i + 1], flow)
                enqueue, device = enqueue + returned - called, device + stamps[i + 1] - stamps[i]
                kernels += len(segment.ran[i].kernels)
            recorder.profiled(plan, index, enqueue=enqueue, device=device, wait=0, dispatches=kernels)

    @property
    def due(self) -> bool:
        """Whether it is time to set the clocks, which takes an idle stream."""
        return self._clock() - self._aligned >= self._every * SECOND

    def free(self) -> None:
        """Give the ring back, and turn the instrument off."""
        if self._on and self.instrument is not None:
            self._on = False
            with suppress(MachineError):  # nothing is left to be told of
                self.instrument.stop()
        self.marks.free()
