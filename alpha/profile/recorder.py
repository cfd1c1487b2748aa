"""The recorder: what a loop and an executor tell, as it happens; one row a step comes out. Floor 3.

The time of the compute stream is cut at every change of activity, so the phases of a step interval cannot overlap and add up to its wall
time by construction; what falls between two spans is `unexplained`. Launches are timed one by one on every step (two readings of the
clock each); on a *profiled* step the executor runs the same Plan instrumented and tells more about each launch.

A back end whose launches run on a device tells the device's own times (event nodes of a captured graph) through the same calls. Where the
next step is handed over *ahead*, before this one's results are there, the interval ends with the device's last launch of this step: what
the host does from then on, it does beside the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from alpha.graph.order import COMPUTE
from alpha.graph.plan import Launch, Plan
from alpha.profile.kernels import Activity, Kernel
from alpha.profile.noise import WARM_UP
from alpha.profile.partition import Piece, partition
from alpha.profile.phases import OVERLAPPING, PHASES, phase_of
from alpha.profile.store import Store

_INDEX = {name: i for i, name in enumerate(PHASES)}
_WHOLE = ("eval", "sample_gen", "checkpoint")
"""Phases whose inner activities (batches, launches) are not told apart."""


def sampled(step: int, steps: int, samples: int) -> bool:
    """Whether `step` (from 0) of a run of `steps` is one of its `samples` profiled steps: spread evenly, none in the warm-up.

    It depends on nothing else, so a resumed run profiles the same steps.
    """
    room = steps - WARM_UP
    if samples <= 0 or room <= 0 or step < WARM_UP:
        return False
    samples, at = min(samples, room), step - WARM_UP
    return (at * samples) // room != ((at - 1) * samples) // room


@dataclass
class LaunchTime:
    """What an instrumented run says about one launch, in ns; see table op_profile."""

    enqueue: int = 0
    device: int = 0
    wait: int = 0
    dispatches: int = 0
    count: int = 0


Event = tuple[str, str, str, int, int, "int | None"]
"""(track, name, phase, start_ns, stop_ns, flow) of the table gpu_timeline."""


@dataclass
class _Interval:
    """What has been told of one step interval; times in ns. `step` None: what is told between intervals, which nobody asks for."""

    step: int | None = None
    began: int = 0
    profiled: bool = False
    step_ns: int = 0
    launches: int = 0
    enqueue: int = 0
    spent: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    overlapped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OVERLAPPING, 0))
    host: list[Piece] = field(default_factory=list)
    device: list[Piece] = field(default_factory=list)
    profile: dict[tuple[str, int], tuple[Launch, LaunchTime]] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    each: dict[tuple[str, int, int], tuple[Kernel, int, int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def timing(self, now: int, rank: int, session: int) -> dict[str, Any]:
        """The row of step_timing of the interval from `began` to `now`."""
        spent, overlapped = list(self.spent), dict(self.overlapped)
        if self.device:
            spent, over = partition(self.began, now, self.host, self.device, len(PHASES), _INDEX["idle"],
                                    _INDEX["device_to_host"])
            for name in OVERLAPPING:
                overlapped[name] += over[_INDEX[name]]
        wall = now - self.began
        row = {"step": self.step, "rank": rank, "session": session, "began_ns": self.began, "wall_ns": wall, "step_ns": self.step_ns,
               "profiled": int(self.profiled), "launches": self.launches, "enqueue_ns": self.enqueue}
        row |= {f"{name}_ns": ns for name, ns in zip(PHASES, spent)} | {f"{name}_overlapped_ns": ns for name, ns in overlapped.items()}
        return {**row, "unexplained_ns": wall - sum(spent)}

    def rows(self, now: int, rank: int, session: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(table, row) of everything that this interval leaves, closed at `now`."""
        yield "step_timing", self.timing(now, rank, session)
        key = {"step": self.step, "rank": rank}
        for (plan, index), (launch, t) in self.profile.items():
            yield "op_profile", {
                **key, "plan": plan, "launch": index, "op": launch.op, "component": launch.component, "layer": launch.layer,
                "phase": phase_of(launch), "shape": shape_text(launch), "dtype": dtype_text(launch), "count": t.count,
                "enqueue_ns": t.enqueue, "device_ns": t.device, "wait_ns": t.wait, "flops": launch.flops * t.count,
                "nbytes": launch.nbytes * t.count, "dispatches": t.dispatches}  # fmt: skip
        if self.kernels:
            yield "kernel_times", {**key, **self.kernels}
        for (plan, index, place), (kernel, n, ns) in self.each.items():
            yield "kernel_profile", {**key, "plan": plan, "launch": index, "place": place, "op": kernel.op, "kernel": kernel.name,
                                     "phase": kernel.phase, "count": n, "device_ns": ns}
        for track, name, phase, start, stop, flow in self.events:
            yield "gpu_timeline", {**key, "track": track, "name": name, "category": phase, "start_ns": start, "stop_ns": stop, "flow": flow}


class Recorder:
    """Times of one rank. `store` None: nothing is kept (the calls stay valid), for runs that nobody asks about."""

    def __init__(self, store: Store | None = None, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.store, self.clock = store, clock
        self._at = _Interval()
        self._stack: list[int] = []
        self._mark = 0
        self._phases: dict[str, np.ndarray] = {}
        self._done, self._owed, self._ahead = 0, 0, False
        self._afterwards: list[Callable[[], None]] = []

    # -- the loop --------------------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, profiled: bool = False, ahead: bool = False) -> None:
        """A step begins, and with it a step interval; the one before is closed at this very moment, or where the step was handed over ahead
        when that one was done."""
        self._settle()
        began = self._done if ahead else self.clock()
        host = [piece for piece in self._at.host if piece[2] > began]  # it is cut there
        self._close(began)
        self._at, self._mark = _Interval(step, began, profiled, enqueue=self._owed, host=host), began
        self._owed = 0

    def end_step(self, *, ahead: bool = False) -> int:
        """The step itself is done (what follows until the next `begin` still belongs to its interval): where the next one was handed over
        ahead, when the device's last launch was. Returns its ns."""
        self._done = self._at.device[-1][2] if ahead and self._at.device else self.clock()
        self._at.step_ns = self._done - self._at.began
        self._settle()
        return self._at.step_ns

    def afterwards(self, read: Callable[[], None]) -> None:
        """Call `read` when the step is done, outside of its time: for an instrument whose records are slow to read."""
        self._afterwards.append(read)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set rows of run_metadata."""
        if self.store is not None:
            self.store.describe(facts)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What is handed over inside belongs to the next step, and so does the host's time for it."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def so_far(self) -> None:
        """Enqueue the rows of the step interval as it stands, those of a profiled step too; they are replaced when the interval closes.
        For a checkpoint: what a kill right after it would lose would not run again."""
        if self._at.step is not None and self.store is not None:
            rows = list(self._at.rows(self.clock(), self.store.rank, self.store.session))
            self._at.events = []  # told once: a timeline has no key that would replace them
            self.store.later(lambda: rows)

    def finish(self) -> None:
        """The session ends: close the last interval."""
        self._settle()
        self._close(self.clock())

    def abandon(self) -> None:
        """The step does not count (it was refused or failed): forget its interval."""
        self._settle()
        self._at = _Interval()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """The compute stream is busy with, or waits for, `phase` until the block ends. Spans nest; time counts in the innermost one,
        except inside evaluation, sampling and checkpoints, which stay whole."""
        if self._at.step is None or self.whole:
            yield
            return
        start = self._switch()
        self._stack.append(_INDEX[phase])
        try:
            yield
        finally:
            stop = self._switch()
            self._stack.pop()
            if self.profiling:
                self._at.events.append((_TRACK.get(phase, "host enqueue"), phase, phase, start, stop, None))

    def overlapped(self, phase: str, ns: int) -> None:
        """`ns` of a transfer, a collective or a write that ran beside the compute stream."""
        self._at.overlapped[phase] += ns

    # -- the executor ----------------------------------------------------------------------------------------------------------

    @property
    def profiling(self) -> bool:
        """Whether this step is profiled: each launch is to be told by itself."""
        return self._at.profiled

    @property
    def whole(self) -> bool:
        """Inside evaluation, sampling or a checkpoint: launches there are not told apart."""
        return bool(self._stack) and self._stack[0] in _WHOLE_INDEX

    @property
    def watching(self) -> bool:
        """Whether an executor should time its launches now."""
        return self._at.step is not None and not self._stack

    def ran(self, plan: Plan, marks: Sequence[int], waits: Sequence[tuple[int, int]] = (), checked: tuple[int, int] | None = None) -> None:
        """A Segment ran: marks[2i], marks[2i + 1] are start and end of launch i. Gaps between launches count as idle. Where spot checks
        looked at them, `checked` is from when to when: what no launch took of that time counts as checks.

        Where launches ran on a stream beside compute, `waits` are the times in which compute waited for it, at the end too. These are phase
        'comm'; what else the stream's launches took ran beside compute."""
        times = np.array(marks, np.int64).reshape(-1, 2)
        if not len(times):
            return
        phases = self._phases.get(plan.name)
        if phases is None:
            phases = self._phases[plan.name] = np.array([_INDEX[phase_of(launch)] for launch in plan.launches])
        took = times[:, 1] - times[:, 0]
        idle = int((times[1:, 0] - times[:-1, 1]).sum())
        if waits:
            own = np.array([launch.stream == COMPUTE for launch in plan.launches])
            beside, waited = times[~own].tolist(), sum(stop - start for start, stop in waits)
            exposed = sum(max(0, min(b, d) - max(a, c)) for a, b in beside for c, d in waits)
            self._at.overlapped["comm"] += sum(b - a for a, b in beside) - exposed
            self._at.spent[_INDEX["comm"]] += waited
            times, took, phases = times[own], took[own], phases[own]
            ends = [*times.ravel().tolist(), *(t for pair in waits for t in pair)]
            idle = max(ends) - min(ends) - int(took.sum()) - waited
        for i, ns in enumerate(np.bincount(phases, weights=took, minlength=len(PHASES)).astype(np.int64).tolist()):
            self._at.spent[i] += ns
        if checked is not None:
            self._at.spent[_INDEX["checks"]] += checked[1] - checked[0] - int(took.sum())
        else:
            self._at.spent[_INDEX["idle"]] += idle
        self._at.launches += len(plan.launches)

    def ran_on_device(self, pieces: Sequence[tuple[str, int]], times: Sequence[tuple[int, int]]) -> None:
        """A Segment ran on a device beside the host: `pieces[k]` = (phase, launches that begin in it), `times[k]` its start and stop, ns of
        the recorder's clock. The step is then shared out as alpha/profile/partition.py says. What ended before this interval began belonged
        to a step that was handed over ahead and then forgotten."""
        if times and times[-1][1] <= self._at.began:
            return
        for (phase, launches), (start_ns, stop_ns) in zip(pieces, times, strict=True):
            self._at.device.append((_INDEX[phase], start_ns, stop_ns))
            self._at.launches += launches

    def ran_beside(self, launches: Sequence[Launch], times: Sequence[tuple[int, int]]) -> None:
        """Collectives ran on a device's stream beside compute, from when to when, in a Segment that `ran_on_device` has been told of: there
        the time in which compute waited for them is phase 'comm'. The rest of theirs was hidden."""
        waits = self.waits_on_device()
        exposed = sum(max(0, min(b, d) - max(a, c)) for a, b in times for c, d in waits)
        self._at.overlapped["comm"] += sum(b - a for a, b in times) - exposed

    def waits_on_device(self) -> list[tuple[int, int]]:
        """When, in this interval, a device's compute stream waited for collectives, or ran them itself."""
        return [(start, stop) for phase, start, stop in self._at.device if phase == _INDEX["comm"]]

    def on_device(self, *phases: str) -> int:
        """ns of this interval that a device was busy with these phases, as far as it has told."""
        wanted = {_INDEX[phase] for phase in phases}
        return sum(stop - start for phase, start, stop in self._at.device if phase in wanted)

    def ran_kernels(self, plans: Mapping[str, Plan], activity: Activity) -> None:
        """Every kernel of a profiled step of a device was timed; `plans` by name. They take the place of what `ran_on_device` said of its
        phases, whose pieces hold gaps."""
        at, own, gaps = self._at, activity.own, activity.gaps()
        at.kernels = activity.row(at.began, at.began + at.step_ns if at.step_ns else self.clock())
        at.device = [(_INDEX[k.phase], k.start, k.stop) for k in own]
        for k in own:
            _, n, ns = at.each.get((k.plan, k.launch, k.place), (k, 0, 0))
            at.each[k.plan, k.launch, k.place] = k, n + 1, ns + k.stop - k.start
            _, entry = at.profile.setdefault((k.plan, k.launch), (plans[k.plan].launches[k.launch], LaunchTime()))
            entry.device += k.stop - k.start
            entry.dispatches += 1
            entry.count += k.place == 0
        for start, stop in gaps:
            self.event("gaps", "gap", "idle", start, stop)
        for c in activity.copies:
            phase = "device_to_host" if c.name == "DtoH" else "host_to_device"
            self.event("fills" if c.fill else "copies", f"{c.name} {c.nbytes:,} bytes", phase, c.start, c.stop)
        for w in activity.waits:
            self.event("sync waits", w.name, "device_to_host", w.start, w.stop)

    def enqueued(self, ns: int) -> None:
        """The host spent `ns` on handing work to a device."""
        if self._ahead:
            self._owed += ns
        else:
            self._at.enqueue += ns

    def profiled(self, plan: Plan, index: int, *, enqueue: int, device: int, wait: int, dispatches: int) -> None:
        """Launch `index` of `plan` ran instrumented; ns. Runs of the same launch in one step add up."""
        _, entry = self._at.profile.setdefault((plan.name, index), (plan.launches[index], LaunchTime()))
        entry.enqueue += enqueue
        entry.device += device
        entry.wait += wait
        entry.dispatches += dispatches
        entry.count += 1
        self._at.enqueue += enqueue

    def event(self, track: str, name: str, phase: str, start: int, stop: int, flow: int | None = None) -> None:
        """Something for the timeline of a profiled step."""
        self._at.events.append((track, name, phase, start, stop, flow))

    # -- rows ------------------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read what was put off to the end of the step."""
        while self._afterwards:
            self._afterwards.pop(0)()

    def _switch(self) -> int:
        now = self.clock()
        if self._stack:
            self._at.spent[self._stack[-1]] += now - self._mark
            self._at.host.append((self._stack[-1], self._mark, now))
        self._mark = now
        return now

    def _close(self, now: int) -> None:
        """Hand the interval to the store's thread, which makes its rows: those of a profiled step take milliseconds that no step has."""
        if self._at.step is not None and self.store is not None:
            self.store.later(partial(self._at.rows, now, self.store.rank, self.store.session))
        self._at = _Interval()


_WHOLE_INDEX = frozenset(_INDEX[name] for name in _WHOLE)
_TRACK = {"data_load": "data loading", "checkpoint": "checkpoint writer", "comm": "comm"}


def dtype_text(launch: Launch) -> str:
    """Element type of a launch's first result, or operand where it has none; '' where it has neither."""
    return next((r.type.dtype for r in (*launch.outs, *launch.ins)), "")


def shape_text(launch: Launch) -> str:
    """Operands and results of a launch, such as 'f32[8,128] f32[128] -> f32[8,128]'."""
    return f"{' '.join(str(r.type) for r in launch.ins)} -> {' '.join(str(r.type) for r in launch.outs)}"
