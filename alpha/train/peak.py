"""The peak that an MFU on a CPU is measured against: single-precision matrix products on the run's own workers. Floor 6."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from alpha.backends.cpu.lib import Workers

SIZE, REPEATS = 512, 100


class Peak:
    """The best rate seen so far; a busy machine shows less than it can, so it is measured again now and then and never lowered."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._a = [np.full((SIZE, SIZE), 0.5, np.float32) for _ in range(workers.n)]
        self._out = [np.empty((SIZE, SIZE), np.float32) for _ in range(workers.n)]
        self.flops = 0.0
        self.measure()

    def measure(self) -> None:
        """Many short runs in which every worker multiplies its own two SIZE x SIZE float32 matrices; the best counts."""
        tasks = [partial(np.matmul, a, a, out=out) for a, out in zip(self._a, self._out)]
        for _ in range(REPEATS):
            began = time.perf_counter()
            self.workers.run(tasks)
            self.flops = max(self.flops, 2.0 * SIZE**3 * self.workers.n / (time.perf_counter() - began))

    @property
    def source(self) -> str:
        """Where the figure comes from. A ceiling of this machine as it was, not a data sheet's: none is trustworthy on a CPU."""
        n = self.workers.n
        return f"measured in this run: float32 {SIZE}^3 products on {n} worker{'s' if n > 1 else ''}"
