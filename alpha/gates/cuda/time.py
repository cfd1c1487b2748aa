"""How a call on the GPU is timed: blocks of launches between events, contents drawn anew, the clock read meanwhile and judged. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from alpha.cuda_runtime.memory import Span, fill
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.gates.cuda.subjects import opened
from alpha.profile import noise
from alpha.types import NUMPY, TensorType

LAUNCHES = 6
"""Calls of a block."""

BLOCK = 1 << 20
"""Normal numbers that a tensor's contents repeat."""

FLUSH_BYTES = 256 << 20
"""More than L2 holds."""


def contents(t: TensorType, rng: np.random.Generator, least: int, below: int) -> np.ndarray:
    """A tensor's device form: a block of normal numbers, again and again (zeros would draw less power and run faster), or
    integers from `least` to `below` - 1."""
    return np.resize(block_of(t, rng, least, below), t.shape)


def block_of(t: TensorType, rng: np.random.Generator, least: int, below: int) -> np.ndarray:
    """What a tensor's contents repeat: at most BLOCK normal numbers in device form, or all of its integers. 1-D."""
    if not t.is_float:
        return rng.integers(least, below, t.size).astype(NUMPY[t.dtype])
    block = rng.standard_normal(BLOCK, np.float32)[: max(1, t.size)]
    return (block.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if t.dtype == "bf16" else block


Since = Callable[[Any, Any], float]


def own_clock() -> Since:
    """How events tell the time, as the driver's binding has it now: held before a kernel is bound, it is out of that kernel's reach."""
    clock: Since = type(opened()[0].event()).time_since
    return clock


def kept(readings: Mapping[str, Sequence[Reading]]) -> dict[str, noise.Kept]:
    """Which blocks of each arm count, by the clock that was read in each and noise.throttled_gpu, each arm by itself: a product draws more
    power than a copy and runs at a lower clock for it, which is no throttling."""
    return {name: noise.keep(noise.throttled_gpu([r.sm_mhz for r in found], [r.reasons for r in found]))
            for name, found in readings.items()}


def timed_block(stream: Any, work: Sequence[Callable[[], None]], clocks: Clocks, flush: Span | None = None,
                since: Since | None = None) -> tuple[float, Reading]:
    """One block: each entry of `work` is enqueued between two events, after a fill of `flush`, and nothing is waited for until all are; the
    clock is read meanwhile. Median nanoseconds of an entry. `since`: what tells the milliseconds between two events (default: theirs)."""
    device, _ = opened()
    events = []
    for i, enqueue in enumerate(work):
        if flush is not None:
            fill(flush, i, stream)
        begin, end = device.event(), device.event()
        begin.record(stream)
        enqueue()
        end.record(stream)
        events.append((begin, end))
    reading = clocks.read()
    stream.synchronize()
    since = since or own_clock()
    return float(np.median([float(since(end, begin)) * 1e6 for begin, end in events])), reading
