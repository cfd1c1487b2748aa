"""What a CPU kernel is given: a fixed number of worker threads, scratch from the plan, and a fixed way to cut rows. Floor 4.

A kernel is a *binder*: `def gelu(cpu, ins, outs, attrs) -> Callable[[], None]`. It is called once, when a Plan is loaded, with arrays at
their final addresses; it makes views, takes scratch, and returns the closure that each step runs. It must not read or write the data
while binding, must not write its inputs (unless an `inplace` pair names them), must write every element of its outputs, and must give
bits that do not depend on the number of threads: work is cut into blocks whose size depends on shapes only, and partial sums are
combined in block order.

BLAS runs with one thread; the workers here are what makes matrix products parallel, so there is one pool and one place to pin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from alpha.backends.cpu.workers import Workers
from alpha.errors import GraphError

Kernel = Callable[..., Callable[[], None]]
BLOCK_BYTES = 512 * 1024
"""Row blocks are at most about this long: a pass over one hides the fixed price of a NumPy call and of handing the interpreter lock to
another worker, and two of them fit in an L2 cache of 1 MB."""

SPLIT_BYTES = 128 * 1024
"""Blocks longer than this are halves at most, so that two workers share what is worth a hand-over."""

ALIGN = 256


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
        row_bytes = max(1, row_bytes)
        most = min(BLOCK_BYTES, max(SPLIT_BYTES, -(-rows // 2) * row_bytes))
        return max(1, min(rows, most // row_bytes))

    def rows(self, rows: int, row_bytes: int, body: Callable[[int, int, int], None]) -> Callable[[], None]:
        """Closure that calls `body(start, stop, worker)` for every block of rows; blocks are dealt to workers in contiguous runs.

        `worker` in [0, threads) picks per-worker scratch. Use for kernels whose rows are independent.
        """
        block = self.block_rows(rows, row_bytes)
        spans = [(s, min(s + block, rows)) for s in range(0, rows, block)]

        def item(i: int, worker: int) -> None:
            body(*spans[i], worker)

        return self.items(len(spans), item)

    def items(self, n: int, body: Callable[[int, int], None]) -> Callable[[], None]:
        """Closure that calls `body(i, worker)` once for each i in 0..n-1 (matrix products, heads, blocks).

        Each worker starts on a contiguous run of its own, which is where its cache was in the launch before, and takes from the ends of
        the others' when it is done: which worker does what depends on time, so nothing but scratch may depend on `worker`.
        """
        if n <= 1 or self.threads == 1:
            def serial() -> None:
                for i in range(n):
                    body(i, 0)
            return serial
        share = (n + self.threads - 1) // self.threads
        runs = [range(w * share, min((w + 1) * share, n)) for w in range(self.threads)]
        left: list[deque[int]] = [deque() for _ in runs]

        def task(worker: int) -> Callable[[], None]:
            own, others = left[worker], left[worker + 1 :] + left[:worker]

            def run() -> None:
                while own:
                    try:
                        i = own.popleft()
                    except IndexError:  # another worker was faster
                        break
                    body(i, worker)
                for other in others:
                    while other:
                        try:
                            i = other.pop()
                        except IndexError:
                            break
                        body(i, worker)
            return run

        tasks = [task(w) for w in range(self.threads)]

        def parallel() -> None:
            for mine, run in zip(left, runs):
                mine.clear()  # what an exception left
                mine.extend(run)
            self.workers.run(tasks)

        return parallel

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
        bound = [[bind(_Serial(region[w]), i) for i in range(n)] for w in range(self.threads)]

        def body(i: int, worker: int) -> None:
            for run in bound[worker][i]:
                run()

        return self.items(n, body)


class _Serial(Cpu):
    def __init__(self, scratch: np.ndarray | None) -> None:
        self.threads, self._scratch, self.used = 1, scratch, 0
