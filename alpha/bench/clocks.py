"""How a benchmark takes blocks of several arms in turn, which of them count, and the ratio of two: readings of the GPU's clock in it.
Floor 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from alpha.cuda_runtime.nvml import Reading
from alpha.gates.cuda import time as cuda_time
from alpha.profile import noise
from alpha.profile.served import Served, ServedError

Blocks = Sequence[tuple[float, "Reading | None"]]
"""(nanoseconds, what the GPU said meanwhile) of each block."""


def merged(readings: Sequence[Reading]) -> Reading | None:
    """One reading of a block: the middle clock and all reasons; None of none."""
    if not readings:
        return None
    reasons = 0
    for r in readings:
        reasons |= r.reasons
    return Reading(float(np.median([r.sm_mhz for r in readings])), reasons)


def ask(served: Served, do: str, read: Callable[[], Reading] | None, **arguments: Any) -> tuple[float, Reading | None]:
    """A block of another process, which answers nanoseconds, and what the GPU says while it runs, read from here."""
    if read is None:
        return float(served.ask(do, **arguments)), None
    readings: list[Reading] = []
    ns = float(served.ask(do, meanwhile=lambda: readings.append(read()), **arguments))
    return ns, merged(readings or [read()])


def alternate(arms: Mapping[str, Callable[[], tuple[float, Reading | None]]], rounds: int, rng: np.random.Generator,
              lost: Callable[[str, ServedError], None]) -> dict[str, list[tuple[float, Reading | None]]]:
    """Blocks of all arms in random order; the first round warms up and does not count. An arm that fails is told to `lost` and has none,
    and the others go on."""
    taken: dict[str, list[tuple[float, Reading | None]]] = {name: [] for name in arms}
    for i, order in enumerate(noise.orders(len(arms), rounds + 1, rng)):
        for name in (list(arms)[k] for k in order):
            if name not in taken:
                continue
            try:
                one = arms[name]()
            except ServedError as error:
                del taken[name]
                lost(name, error)
                continue
            if i:
                taken[name].append(one)
    return taken


def kept(taken: Mapping[str, Blocks], probe_ns: Sequence[float] | np.ndarray | None) -> dict[str, noise.Kept]:
    """Which blocks of each arm count: on the CPU by the reference probe of the same round, on the GPU (None) by the clock read in each."""
    if probe_ns is not None:
        slow = noise.throttled_cpu(probe_ns)
        return {name: noise.keep(slow) for name in taken}
    return cuda_time.kept({name: [r or Reading(float("nan"), 0) for _, r in blocks] for name, blocks in taken.items()})


def ratio(theirs: np.ndarray, ours: np.ndarray, family: int) -> tuple[float, float, float]:
    """(low, middle, high) of the time of theirs over ours, from the rounds in which both count; `family`: ratios that are looked at."""
    i = noise.interval(np.log(theirs / ours).tolist(), noise.share(noise.ALPHA, family=family))
    return 1 + i.low, 1 + i.estimate, 1 + i.high
