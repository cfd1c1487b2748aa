"""The CPU's worker threads: a fixed pool that hands over work without a sleep where it can. Floor 4.

Waking a sleeping thread takes 20 to 50 microseconds on a virtual machine, twice per hand-over (the helper at the start, the caller at the
end), which is as long as a small kernel runs. So both wait awake for a short while first: they run a vector loop of a few microseconds
that gives the interpreter lock away, look, and run it again, for SPIN_NS at most. An idle pool sleeps. A task that no helper has begun
when the caller is done with its own is taken by the caller, so a helper that comes late, or whose core is busy, holds nothing up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import numpy as np

SPIN_NS = 50_000
"""Longest time awake without work, in ns: the gap between two launches that share work is mostly shorter. Four times as long costs more
than it brings where other programs want the cores."""

_LANES = 2048
"""float64 elements of the waiting loop: a few microseconds without the interpreter lock, in one core's L1 cache."""

Task = Callable[[], None]


class _Round:
    """One hand-over. `left`: tasks that nobody has begun; `done`: tasks that ended; `waiting`: the caller's lock while it sleeps."""

    __slots__ = ("done", "errors", "left", "tasks", "waiting")

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.left = deque(range(len(tasks)))
        self.done: list[int] = []
        self.waiting: list[threading.Lock] = []
        self.errors: list[BaseException] = []

    def over(self) -> bool:
        return len(self.done) == len(self.tasks)

    def work(self, take: Callable[[], int]) -> None:
        """Run tasks until none is left to begin. Lists and deques change one element at a time under the interpreter lock."""
        while self.left:
            try:
                i = take()
            except IndexError:
                return
            try:
                self.tasks[i]()
            except BaseException as error:  # handed to the caller of run()
                self.errors.append(error)
            self.done.append(i)
            if self.waiting and self.over():
                _wake(self.waiting)


class _Idle:
    """The waiting loop of one thread: `until(found)` is True as soon as `found()`, False after SPIN_NS."""

    def __init__(self) -> None:
        self._x, self._y = np.ones(_LANES), np.empty(_LANES)

    def until(self, found: Callable[[], bool]) -> bool:
        if found():
            return True
        end = perf_counter_ns() + SPIN_NS
        while perf_counter_ns() < end:
            np.power(self._x, 1.5, out=self._y)
            if found():
                return True
        return False


class Workers:
    """A fixed pool: `run(tasks)` executes every task once, the first on the caller, the others on whoever is free, and returns when all
    are done. Up to `n` run at the same time.

    The first exception of any task is raised in the caller. Threads are daemons; `close` ends them.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._round = _Round(())
        self._asleep: deque[threading.Lock] = deque()
        self._closed = False
        self._idle = _Idle()
        self._ended = threading.Lock()
        self._ended.acquire()
        # The helpers get the empty round from here: one that starts late and read it itself would take the first real round for done.
        self._threads = [threading.Thread(target=self._loop, args=(self._round,), daemon=True, name=f"alpha-cpu-{i}") for i in range(1, n)]
        for t in self._threads:
            t.start()

    def _loop(self, last: _Round) -> None:
        idle, lock = _Idle(), threading.Lock()
        lock.acquire()

        def found() -> bool:
            return self._round is not last

        with np.errstate(all="ignore"):  # kernels pass NaN and infinity on; `finite` and replay are what looks at them
            while not self._closed:
                if not idle.until(found):
                    self._asleep.append(lock)
                    if not found() or not _taken_back(self._asleep, lock):
                        lock.acquire()
                last = self._round
                last.work(last.left.pop)

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks; blocks until the last one is done."""
        now = _Round(tasks)
        self._round = now
        for _ in range(min(self.n, len(tasks)) - 1):
            if not _wake(self._asleep):
                break
        with np.errstate(all="ignore"):
            now.work(now.left.popleft)
        if not self._idle.until(now.over):
            now.waiting.append(self._ended)
            if not now.over() or not _taken_back(now.waiting, self._ended):
                self._ended.acquire()
        if now.errors:
            raise now.errors[0]

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        self._closed = True
        self._round = _Round(())
        while _wake(self._asleep):
            pass
        for t in self._threads:
            t.join()


def _wake(sleepers: deque[threading.Lock] | list[threading.Lock]) -> bool:
    """Release one lock of `sleepers`; False when there is none. Taking it out decides who of two threads releases it."""
    try:
        sleepers.pop().release()
    except IndexError:
        return False
    return True


def _taken_back(sleepers: deque[threading.Lock] | list[threading.Lock], lock: threading.Lock) -> bool:
    """Whether `lock` was still in `sleepers` and is out now; if not, somebody releases it."""
    try:
        sleepers.remove(lock)
    except ValueError:
        return False
    return True
