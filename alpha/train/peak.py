"""What this machine can do: the peaks that MFU and bandwidth utilisation stand against. Floor 6."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Workers
from alpha.errors import MachineError
from alpha.profile.store import Store
from alpha.train.engine import Executor

SIZE, REPEATS = 512, 100
COPY_BYTES, COPIES = 32 << 20, 12
"""A copy far larger than the caches, by every worker."""


class Peak(Protocol):
    """`flops`: FLOP/s; `bandwidth`: bytes/s, read and written; `source`: where they come from."""

    flops: float
    bandwidth: float

    @property
    def source(self) -> str: ...
    def measure(self) -> None: ...


def peak_of(executor: Executor, store: Store | None = None) -> Peak:
    """The peak of what a run computes on."""
    if isinstance(executor, CpuExecutor):
        return CpuPeak(executor.workers, store)
    return SheetPeak(executor.hardware()["hardware"])


SHEETS = {"H200": (989.4e12, 4.8e12), "H100 80GB HBM3": (989.4e12, 3.35e12), "H100 SXM": (989.4e12, 3.35e12), "H100 PCIe": (756e12, 2.0e12)}
"""GPU -> dense bf16 FLOP/s and bytes/s of memory: NVIDIA's data sheets of H200 SXM, H100 SXM5 and H100 PCIe."""


class SheetPeak:
    """The data sheet's figures of a GPU: what everybody's MFU stands against. Sustained clocks lie below them."""

    def __init__(self, hardware: str) -> None:
        """`hardware`: the GPU's name. MachineError for one whose data sheet is not known."""
        found = next((name for name in SHEETS if name in hardware), None)
        if found is None:
            raise MachineError("no data sheet of this GPU is known", came=hardware, expected=", ".join(SHEETS),
                               do="add its peaks to SHEETS in alpha/train/peak.py")  # fmt: skip
        (self.flops, self.bandwidth), self._name = SHEETS[found], found

    @property
    def source(self) -> str:
        return f"NVIDIA's data sheet of the {self._name}: dense bf16 and memory"

    def measure(self) -> None:
        """Nothing to measure."""


class CpuPeak:
    """The best rates seen so far; a busy machine shows less than it can, so they are measured again now and then and never lowered.

    `flops`: FLOP/s of float32 products; `bandwidth`: bytes/s, read and written, of copies. With a `store` each look is a row of `peaks`.
    """

    def __init__(self, workers: Workers, store: Store | None = None) -> None:
        self.workers, self._store = workers, store
        self._a = [np.full((SIZE, SIZE), 0.5, np.float32) for _ in range(workers.n)]
        self._out = [np.empty((SIZE, SIZE), np.float32) for _ in range(workers.n)]
        self.flops = self.bandwidth = 0.0
        self.measure()

    def measure(self) -> None:
        """Many short runs in which every worker multiplies its own two SIZE x SIZE float32 matrices, or copies its own memory; the best
        counts."""
        products = [partial(np.matmul, a, a, out=out) for a, out in zip(self._a, self._out)]
        flops = 2.0 * SIZE**3 * self.workers.n / self._best(products, REPEATS)
        source, target = (np.ones((self.workers.n, COPY_BYTES // 4), np.float32) for _ in range(2))
        copies = [partial(np.copyto, t, s) for t, s in zip(target, source)]
        bandwidth = 2.0 * COPY_BYTES * self.workers.n / self._best(copies, COPIES)
        self.flops, self.bandwidth = max(self.flops, flops), max(self.bandwidth, bandwidth)
        if self._store is not None:
            self._store.add("peaks", {"clock_ns": time.perf_counter_ns(), "rank": self._store.rank, "flops": flops, "bandwidth": bandwidth})

    def _best(self, tasks: Sequence[Callable[[], object]], repeats: int) -> float:
        """Shortest time in s of `repeats` runs."""
        best = float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            self.workers.run(tasks)  # type: ignore[arg-type]
            best = min(best, time.perf_counter() - began)
        return best

    @property
    def source(self) -> str:
        """Where the figures come from. Ceilings of this machine as it was, not a data sheet's: none is trustworthy on a CPU."""
        n = self.workers.n
        return f"measured in this run: float32 {SIZE}^3 products and {COPY_BYTES >> 20} MiB copies on {n} worker{'s' if n > 1 else ''}"
