"""Readings of the GPU's clock in a benchmark: many of one block as one, and which blocks of each arm count. Floor 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from alpha.cudart.nvml import Reading
from alpha.profile import noise
from alpha.profile.served import Served

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


def kept(taken: Mapping[str, Blocks], probe_ns: Sequence[float] | np.ndarray | None) -> dict[str, noise.Kept]:
    """Which blocks of each arm count: on the CPU by the reference probe of the same round, on the GPU (None) by the clock read in each."""
    if probe_ns is not None:
        slow = noise.throttled_cpu(probe_ns)
        return {name: noise.keep(slow) for name in taken}
    readings = {name: [r or Reading(float("nan"), 0) for _, r in blocks] for name, blocks in taken.items()}
    return {name: noise.keep(noise.throttled_gpu([r.sm_mhz for r in found], [r.reasons for r in found]))
            for name, found in readings.items()}
