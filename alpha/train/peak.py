"""The peak that an MFU on a CPU is measured against: single-precision matrix products on the run's own workers. Floor 6."""

from __future__ import annotations

import time

import numpy as np

from alpha.backends.cpu.lib import Workers

SIZE, REPEATS = 768, 6


def measured_peak(workers: Workers) -> tuple[float, str]:
    """(FLOP/s, source): the best of a few runs in which every worker multiplies its own two SIZE x SIZE float32 matrices.

    A ceiling for this machine as it is now, not a data sheet's: on a CPU no such figure can be trusted.
    """
    a = [np.full((SIZE, SIZE), 0.5, np.float32) for _ in range(workers.n)]
    out = [np.empty((SIZE, SIZE), np.float32) for _ in range(workers.n)]

    def multiply(i: int) -> None:
        np.matmul(a[i], a[i], out=out[i])

    tasks = [lambda i=i: multiply(i) for i in range(workers.n)]
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        workers.run(tasks)
        best = min(best, time.perf_counter() - began)
    flops = 2.0 * SIZE**3 * workers.n / best
    return flops, f"measured in this run: float32 {SIZE}^3 products on {workers.n} worker{'s' if workers.n > 1 else ''}"
