"""Batches made ahead of the loop by a thread, at most `depth` of them waiting; no bit hangs on it.

A batch follows from its place in the run alone, so the thread makes the batches of the following places while the loop computes. Who asks
for another place than the next one gets it all the same: the thread begins anew there. What the thread raises is raised where its batch is
asked for. The thread holds no file and no lock of the machine, so a kill leaves nothing of it behind.

A call is one microbatch of a step: (shard, shards, microbatch, microbatches, whether documents are asked for).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from alpha.data.sampler import Batch, Sampler
from alpha.errors import GraphError

NAME = "alpha-prefetch"
"""Of the thread."""
Call = tuple[int, int, int, int, bool]


@dataclass(frozen=True)
class Waited:
    """What the loop waited for the `batches` of a step: `ready` of them were there when they were asked for; for the others it waited
    `wait_ns`. The thread spent `made_ns` on all of them."""

    step: int
    batches: int = 0
    ready: int = 0
    wait_ns: int = 0
    made_ns: int = 0


class _Line:
    """What one thread has made and nobody has taken: (place, batch or error, ns that it took)."""

    def __init__(self, depth: int) -> None:
        self._depth, self._changed, self._closed = depth, Condition(), False
        self._made: deque[tuple[int, Batch | BaseException, int]] = deque()

    def put(self, place: int, made: Batch | BaseException, ns: int) -> bool:
        """Wait for room; False: nobody will ask for more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._made) < self._depth)
            self._made.append((place, made, ns))
            self._changed.notify_all()
            return not self._closed

    def take(self) -> tuple[int, Batch | BaseException, int, bool]:
        """The next one, and whether it was there already."""
        with self._changed:
            ready = bool(self._made)
            self._changed.wait_for(lambda: self._made)
            taken = self._made.popleft()
            self._changed.notify_all()
            return *taken, ready

    def close(self) -> None:
        """Let the thread go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Prefetcher(Sampler):
    """A sampler whose batches are made ahead. Use as a context manager: the thread ends with it."""

    def __init__(self, sampler: Sampler, calls: Sequence[Call], *, depth: int, steps: int,
                 told: Callable[[Waited], None] = lambda waited: None) -> None:
        """`calls`: those of a step, in the order in which the loop asks; `steps`: of the run; `depth`: 1 or more; `told`: hears of each
        step when its last batch is taken."""
        self.sampler, self.global_batch, self._depth = sampler, sampler.global_batch, depth
        self._calls, self._end, self._told = tuple(calls), steps * len(calls), told
        self._place = {call: i for i, call in enumerate(self._calls)}
        self._line: _Line | None = None
        self._thread: Thread | None = None
        self._next = -1
        self._count = Waited(0)

    @property
    def hash(self) -> str:
        """Of the sampler: no bit hangs on what is made ahead."""
        return self.sampler.hash

    def read(self, samples_b: NDArray[np.int64], documents: bool = False) -> Batch:
        """Of the sampler, at once."""
        return self.sampler.read(samples_b, documents)

    def batch(self, step: int, shard: int = 0, n_shards: int = 1, *, micro: int = 0, n_micro: int = 1,
              documents: bool = False) -> Batch:
        """As Sampler's. What is no call of a step of the run is made at once."""
        at = self._place.get((shard, n_shards, micro, n_micro, documents))
        place = step * len(self._calls) + at if at is not None else -1
        if at is None or not 0 <= place < self._end:
            return self.sampler.batch(step, shard, n_shards, micro=micro, n_micro=n_micro, documents=documents)
        began = time.perf_counter_ns()
        following = self._line if place == self._next else None
        came, made, ns, ready = (following or self._begin(place)).take()
        if isinstance(made, BaseException):
            self.close()
            raise made
        if came != place:
            raise GraphError("a batch was made out of turn", came=f"microbatch {came} of the run", expected=place)
        self._next, c = place + 1, self._count
        ready = ready and following is not None  # else it was begun for this very call
        waited = 0 if ready else time.perf_counter_ns() - began
        self._count = Waited(step, c.batches + 1, c.ready + ready, c.wait_ns + waited, c.made_ns + ns)
        if at == len(self._calls) - 1:
            self._told(self._count)
            self._count = Waited(step + 1)
        return made

    def close(self) -> None:
        """End the thread. A batch that is asked for later begins another."""
        if self._line is not None and self._thread is not None:
            self._line.close()
            self._thread.join()
        self._line, self._thread, self._next = None, None, -1

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _begin(self, place: int) -> _Line:
        self.close()
        self._count = Waited(place // len(self._calls))
        self._line = _Line(self._depth)
        self._thread = Thread(target=self._make, args=(place, self._line), daemon=True, name=NAME)
        self._thread.start()
        return self._line

    def _make(self, first: int, line: _Line) -> None:
        for place in range(first, self._end):
            step, at = divmod(place, len(self._calls))
            shard, n_shards, micro, n_micro, documents = self._calls[at]
            began = time.perf_counter_ns()
            try:
                made = self.sampler.batch(step, shard, n_shards, micro=micro, n_micro=n_micro, documents=documents)
            except BaseException as error:  # it belongs to whoever asks for this batch
                line.put(place, error, 0)
                return
            if not line.put(place, made, time.perf_counter_ns() - began):
                return
