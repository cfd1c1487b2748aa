"""What a profiled step sees of the CPU's workers, and which pages of an arena are in memory. Floor 4."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from alpha.backends.cpu.lib import Workers
from alpha.graph.order import COMPUTE
from alpha.graph.plan import Launch, Plan
from alpha.profile.phases import phase_of
from alpha.profile.recorder import Recorder

PAGE = os.sysconf("SC_PAGESIZE")


@dataclass
class HandOver:
    """One call of Workers.run, in ns of the recorder's clock: called, returned, and for each task (worker, start, stop).

    Worker 0 is the thread that called; which helper takes a task is decided as it goes.
    """

    called: int
    returned: int = 0
    tasks: list[tuple[int, int, int]] = field(default_factory=list)


class ObservedWorkers(Workers):
    """A pool whose hand-overs can be watched. Unwatched it costs one comparison a call."""

    def __init__(self, n: int) -> None:
        self._seen: list[HandOver] | None = None
        self._clock: Callable[[], int] = lambda: 0
        self._helpers: dict[int, int] = {}
        super().__init__(n)

    @contextmanager
    def observed(self, clock: Callable[[], int]) -> Iterator[list[HandOver]]:
        """Until the block ends, every hand-over is appended to the list given."""
        self._clock, self._seen = clock, []
        try:
            yield self._seen
        finally:
            self._seen = None

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        if self._seen is None:
            super().run(tasks)
            return
        clock, over = self._clock, HandOver(self._clock())
        caller = threading.get_ident()

        def timed(task: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                start = clock()
                try:
                    task()
                finally:
                    over.tasks.append((0 if threading.get_ident() == caller else self._number(), start, clock()))
            return run

        super().run([timed(task) for task in tasks])
        over.returned = clock()
        self._seen.append(over)

    def _number(self) -> int:
        """Which helper this thread is: 1, 2, ... in the order in which they were first seen."""
        return self._helpers.setdefault(threading.get_ident(), len(self._helpers) + 1)


def note(recorder: Recorder, plan: Plan, index: int, launch: Launch, start: int, stop: int, seen: Sequence[HandOver]) -> None:
    """Tell the recorder about one launch that ran from `start` to `stop`.

    enqueue: from a hand-over to the start of the caller's own first task; wait: from the end of the caller's last task to the return;
    device: the whole launch less its enqueue time. A launch that hands nothing over runs on the caller: worker 0, or the stream's thread.
    """
    phase, enqueue, wait = phase_of(launch), 0, 0
    if not seen:
        recorder.event("worker 0" if launch.stream == COMPUTE else launch.stream, launch.op, phase, start, stop)
    for over in seen:
        flow = next(_FLOW)
        own = [t for t in over.tasks if t[0] == 0]
        first, last = (min(t[1] for t in own), max(t[2] for t in own)) if own else (over.called, over.called)
        enqueue += first - over.called
        wait += over.returned - last
        recorder.event("host enqueue", launch.op, phase, over.called, first, flow)
        for worker, begun, ended in over.tasks:
            recorder.event(f"worker {worker}", launch.op, phase, begun, ended, flow)
    recorder.profiled(plan, index, enqueue=enqueue, device=stop - start - enqueue, wait=wait, dispatches=len(seen))


_FLOW = count()


def resident(places: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """name -> bytes in memory of the page-aligned range (address, length), and of the whole process under 'process'.

    From Linux's /proc/self/pagemap: 8 bytes a page, bit 63 says present. {} on systems without it.
    """
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages, open("/proc/self/statm", encoding="ascii") as whole:
            found = {}
            for name, (address, length) in places.items():
                pages.seek(address // PAGE * 8)
                entries = np.frombuffer(pages.read(-(-length // PAGE) * 8), np.uint64)
                found[name] = min(length, int((entries >> np.uint64(63)).sum()) * PAGE)
            found["process"] = int(whole.read().split()[1]) * PAGE
            return found
    except OSError:
        return {}
