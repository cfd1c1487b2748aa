"""What a CPU kernel is given: a fixed number of worker threads, scratch from the plan, and a fixed way to cut rows. Floor 4.

A kernel is a *binder*: `def gelu(cpu, ins, outs, attrs) -> Callable[[], None]`. It is called once, when a Plan is loaded, with arrays at
their final addresses; it makes views, takes scratch, and returns the closure that each step runs. It must not read or write the data
while binding, must not write its inputs (unless an `inplace` pair names them), must write every element of its outputs, and must give
bits that do not depend on the number of threads: work is cut into blocks whose size depends on shapes only, and partial sums are
combined in block order.

BLAS runs with one thread; the workers here are what makes matrix products parallel, so there is one pool and one place to pin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from alpha.errors import GraphError

Kernel = Callable[..., Callable[[], None]]
BLOCK_BYTES = 128 * 1024
"""Row blocks are cut to about this size, so that the several passes of a kernel stay in the L2 cache of one core."""

ALIGN = 256


class Workers:
    """A fixed pool: `run(tasks)` executes task i on worker i mod n, worker 0 being the caller, and returns when all are done.

    The first exception of any task is raised in the caller. Threads are daemons; `close` ends them.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._tasks: Sequence[Callable[[], None]] = ()
        self._error: BaseException | None = None
        self._start = [threading.Semaphore(0) for _ in range(n)]
        self._done = threading.Semaphore(0)
        self._closed = False
        self._threads = [threading.Thread(target=self._loop, args=(i,), daemon=True, name=f"alpha-cpu-{i}") for i in range(1, n)]
        for t in self._threads:
            t.start()

    def _share(self, worker: int) -> None:
        try:
            with np.errstate(all="ignore"):  # kernels pass NaN and infinity on; `finite` and replay are what looks at them
                for i in range(worker, len(self._tasks), self.n):
                    self._tasks[i]()
        except BaseException as error:  # handed to the caller of run()
            self._error = self._error or error

    def _loop(self, worker: int) -> None:
        while True:
            self._start[worker].acquire()
            if self._closed:
                return
            self._share(worker)
            self._done.release()

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks; blocks until the last one is done."""
        helpers = min(self.n, len(tasks)) - 1
        self._tasks, self._error = tasks, None
        for worker in range(1, helpers + 1):
            self._start[worker].release()
        self._share(0)
        for _ in range(helpers):
            self._done.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        self._closed = True
        for s in self._start[1:]:
            s.release()
        for t in self._threads:
            t.join()


class Cpu:
    """Handed to every binder. `threads`: number of workers (affects speed only, never bits)."""

    def __init__(self, workers: Workers, scratch: np.ndarray | None = None) -> None:
        self.workers = workers
        self.threads = workers.n
        self._scratch = scratch
        self.used = 0

    def scratch(self, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
        """An array in the plan's scratch region of this node, uninitialised; its contents do not survive the call.

        Under a dry bind (no region given) fresh memory is handed out and only counted.
        """
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        start = self.used
        self.used = start + (nbytes + ALIGN - 1) // ALIGN * ALIGN
        if self._scratch is None:
            return np.empty(tuple(shape), dtype)
        if self.used > self._scratch.size:
            raise GraphError("a kernel asked for more scratch than it was planned", came=self.used, expected=self._scratch.size,
                             do="scratch requests may depend on types, attrs and threads only")
        return self._scratch[start : start + nbytes].view(dtype).reshape(tuple(shape))

    @staticmethod
    def block_rows(rows: int, row_bytes: int) -> int:
        """Rows per block: depends on shapes only, so bits never depend on the number of threads."""
        return max(1, min(rows, BLOCK_BYTES // max(1, row_bytes)))

    def rows(self, rows: int, row_bytes: int, body: Callable[[int, int, int], None]) -> Callable[[], None]:
        """Closure that calls `body(start, stop, worker)` for every block of rows; blocks are dealt to workers in contiguous runs.

        `worker` in [0, threads) picks per-worker scratch. Use for kernels whose rows are independent.
        """
        block = self.block_rows(rows, row_bytes)
        starts = range(0, rows, block)
        if len(starts) <= 1 or self.threads == 1:
            def serial() -> None:
                for s in starts:
                    body(s, min(s + block, rows), 0)
            return serial
        share = (len(starts) + self.threads - 1) // self.threads

        def task(worker: int) -> Callable[[], None]:
            mine = starts[worker * share : (worker + 1) * share]

            def run() -> None:
                for s in mine:
                    body(s, min(s + block, rows), worker)
            return run

        tasks = [task(w) for w in range(self.threads)]
        return lambda: self.workers.run(tasks)

    def items(self, n: int, body: Callable[[int, int], None]) -> Callable[[], None]:
        """Closure that calls `body(i, worker)` for i in 0..n-1, contiguous runs per worker (matrix products, heads)."""
        if n <= 1 or self.threads == 1:
            def serial() -> None:
                for i in range(n):
                    body(i, 0)
            return serial
        share = (n + self.threads - 1) // self.threads

        def task(worker: int) -> Callable[[], None]:
            def run() -> None:
                for i in range(worker * share, min((worker + 1) * share, n)):
                    body(i, worker)
            return run

        tasks = [task(w) for w in range(self.threads)]
        return lambda: self.workers.run(tasks)

    def panels(self, n: int, bind: Callable[[Cpu, int], Sequence[Callable[[], None]]]) -> Callable[[], None]:
        """Closure over n panels, each the closures that `bind(serial, i)` returns, run one after the other by one worker.

        `serial` is a Cpu with one worker, so that whole kernels can be bound on a panel of rows; the panels of a worker share scratch.
        """
        need = 0
        for i in range(n):
            probe = _Serial(None)
            bind(probe, i)
            need = max(need, probe.used)
        region = self.scratch((self.threads, need), np.uint8)
        share = (n + self.threads - 1) // self.threads
        bound = [bind(_Serial(region[i // share]), i) for i in range(n)]

        def body(i: int, worker: int) -> None:
            for run in bound[i]:
                run()

        return self.items(n, body)


class _Serial(Cpu):
    def __init__(self, scratch: np.ndarray | None) -> None:
        self.threads, self._scratch, self.used = 1, scratch, 0
