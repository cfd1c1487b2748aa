"""What this machine can do: the one peak that a run's MFU and bandwidth utilisation stand against, and how fast it is just now. Floor 6.

The peak is taken once, when a run begins, and kept with it: console, report, dashboard and every resumed session divide by the same number.
Machines wander, so a `Speedometer` is read now and then as well; its readings tell two runs' machines apart (alpha/profile/compare.py) and
enter no utilisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Workers
from alpha.errors import CorruptError, MachineError
from alpha.profile.store import Store, read
from alpha.train.engine import Executor

SIZE, REPEATS = 512, 50
COPY_BYTES, COPIES = 32 << 20, 6
"""A copy far larger than the caches, by every worker."""

AGREE, ROUNDS = 0.02, 8
"""A peak is taken when the two best of at least four rounds lie this close together, or after so many rounds."""


@dataclass(frozen=True)
class Peak:
    """`flops`: FLOP/s of one device; `bandwidth`: bytes/s of one device, read and written; `source`: where both come from."""

    flops: float
    bandwidth: float
    source: str


SHEETS = {"H200": (989.4e12, 4.8e12), "H100 80GB HBM3": (989.4e12, 3.35e12), "H100 SXM": (989.4e12, 3.35e12), "H100 PCIe": (756e12, 2.0e12)}
"""GPU -> dense bf16 FLOP/s and bytes/s of memory: NVIDIA's data sheets of H200 SXM, H100 SXM5 and H100 PCIe."""


def peak_of(executor: Executor) -> Peak:
    """The peak of what a run computes on: measured here and now on a CPU, the data sheet's on a GPU."""
    if isinstance(executor, CpuExecutor):
        return measured(executor.workers)
    return sheet(executor.hardware()["hardware"])


def sheet(hardware: str) -> Peak:
    """The data sheet's figures of a GPU: what everybody's MFU stands against. Sustained clocks lie below them.

    `hardware`: the GPU's name. MachineError for one whose data sheet is not known.
    """
    known = hardware.removeprefix("NVIDIA ")  # a GH200 is no H200, and an H200 NVL is slower than the one that the sheet is of
    found = next((name for name in SHEETS if known.startswith(name) and "NVL" not in known.split()), None)
    if found is None:
        raise MachineError("no data sheet of this GPU is known", came=hardware, expected=", ".join(SHEETS),
                           do="add its peaks to SHEETS in alpha/train/peak.py")  # fmt: skip
    return Peak(*SHEETS[found], f"NVIDIA's data sheet of the {found}: dense bf16 and memory")


def measured(workers: Workers) -> Peak:
    """The best rates of a CPU over rounds of readings, until two agree: a neighbour's burst must not become the run's peak.

    Ceilings of this machine as it was, not a data sheet's: none is trustworthy on a CPU.
    """
    speed, rounds = Speedometer(workers), [(0.0, 0.0)] * 0
    while len(rounds) < ROUNDS and not (len(rounds) > 3 and all(_agree(best) for best in zip(*rounds))):
        rounds.append(speed.read())
    n, (flops, bandwidth) = workers.n, (max(best) for best in zip(*rounds))
    return Peak(flops, bandwidth, f"measured once, when the run began: float32 {SIZE}^3 products and {COPY_BYTES >> 20} MiB copies on {n} "
                                  f"worker{'s' if n > 1 else ''}")  # fmt: skip


def _agree(rates: Sequence[float]) -> bool:
    best, second = sorted(rates)[-1:-3:-1]
    return second >= (1 - AGREE) * best


class Speedometer:
    """How fast a CPU is just now: many short runs in which every worker multiplies its own two SIZE x SIZE float32 matrices, or copies its
    own memory; the best counts."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._a = [np.full((SIZE, SIZE), 0.5, np.float32) for _ in range(workers.n)]
        self._out = [np.empty((SIZE, SIZE), np.float32) for _ in range(workers.n)]

    def read(self) -> tuple[float, float]:
        """FLOP/s of products, and bytes/s, read and written, of copies."""
        products = [partial(np.matmul, a, a, out=out) for a, out in zip(self._a, self._out)]
        source, target = (np.ones((self._workers.n, COPY_BYTES // 4), np.float32) for _ in range(2))
        copies = [partial(np.copyto, t, s) for t, s in zip(target, source)]
        return (2.0 * SIZE**3 * self._workers.n / self._best(products, REPEATS),
                2.0 * COPY_BYTES * self._workers.n / self._best(copies, COPIES))  # fmt: skip

    def _best(self, tasks: Sequence[Callable[[], object]], repeats: int) -> float:
        """Shortest time in s of `repeats` runs."""
        best = float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            self._workers.run(tasks)  # type: ignore[arg-type]
            best = min(best, time.perf_counter() - began)
        return best


def readings(executor: Executor, store: Store) -> Callable[[], None]:
    """A function that reads the machine's speed into the table `peaks`; one that does nothing where only a data sheet is known."""
    if not isinstance(executor, CpuExecutor):
        return lambda: None
    speed = Speedometer(executor.workers)

    def note() -> None:
        flops, bandwidth = speed.read()
        store.add("peaks", {"clock_ns": time.perf_counter_ns(), "rank": store.rank, "flops": flops, "bandwidth": bandwidth})

    return note


def peak_of_run(executor: Executor, store: Store) -> Peak:
    """The run's one peak: what an earlier session took, else what is taken now and kept. CorruptError if the run holds two."""
    store.flush()
    kept = read(store.path, "run_peak", "session, flops, bandwidth, source")
    if len(kept) > 1:
        raise CorruptError("the run holds more than one peak", came=f"{store.path}: {len(kept)} rows in run_peak", expected="one",
                           do="restore metrics.sqlite from a copy")  # fmt: skip
    if kept:
        return Peak(*kept[0][1:])
    stored = dict(read(store.path, "run_metadata"))
    try:  # a run that began before the peak had a table of its own keeps the one that its metadata states
        peak = Peak(float(stored["peak_flops"]), float(stored["peak_bandwidth"]), str(stored["peak_source"]))
    except (KeyError, ValueError):
        peak = peak_of(executor)
    store.add("run_peak", {"session": store.session, "flops": peak.flops, "bandwidth": peak.bandwidth, "source": peak.source})
    return peak
