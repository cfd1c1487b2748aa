"""How the gates call a kernel of the CPU: NumPy buffers at chosen offsets, a pool of workers for the process. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import scratch_bytes
from alpha.backends.cpu.lib import Cpu, Workers
from alpha.component import Component
from alpha.gates.subjects import pin_blas, poison
from alpha.ops.spec import Sample
from alpha.types import NUMPY, TensorType


@cache
def pool(n: int) -> Workers:
    """The process-wide pool of n workers."""
    pin_blas()
    return Workers(n)


def warm_up(*workers: int) -> None:
    """Start the pools of so many workers (default: of one), so that nothing starts later."""
    for n in workers or (1,):
        pool(n)


def samples(component: Component, rng: np.random.Generator, which: str) -> list[Sample]:
    """Samples beyond the row's own: 'samples' that the component carries (backends/cpu/calls.py), no 'exact' ones."""
    return list(component.calls.further(rng)) if component.calls is not None and which == "samples" else []


def refused(component: Component, rng: np.random.Generator) -> list[Sample]:
    """Samples whose contents the kernel refuses when it is called."""
    return list(component.calls.refused(rng)) if component.calls is not None else []


def place(nbytes: int, offset: int) -> np.ndarray:
    """Uninitialised memory, `offset` bytes past a 256-byte boundary."""
    raw = np.empty(nbytes + 512 + offset, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + nbytes]


def _placed(t: TensorType, offset: int) -> np.ndarray:
    dtype = np.dtype(NUMPY[t.dtype])
    return place(t.size * dtype.itemsize, offset).view(dtype).reshape(t.shape)


@dataclass
class CpuBound:
    """A kernel bound to buffers of its own (subjects.Bound)."""

    ins: list[np.ndarray]
    outs: list[np.ndarray]
    scratch: np.ndarray
    call: Callable[[], None]

    def fill(self, contents: Iterable[np.ndarray]) -> None:
        """Write contents into the input buffers."""
        for buffer, x in zip(self.ins, contents):
            buffer[...] = x

    def run(self, garbage: int = 0xFF, *, keep: int | None = None) -> None:
        """Poison outputs (but number `keep`) and scratch (0xFF: NaN in every float type), then call once."""
        for i, out in enumerate(self.outs):
            if i != keep:
                poison(out, garbage)
        self.scratch[...] = garbage
        self.call()


def bind(component: Component, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Any, *, offset: int = 0,
         share: tuple[int, int] | None = None, workers: int = 1) -> CpuBound:
    """See subjects.bind. `offset`: elements."""
    given = [_placed(t, offset * np.dtype(NUMPY[t.dtype]).itemsize) for t in ins]
    for x in given:
        x[...] = np.nan if x.dtype.kind == "f" else 0
    made = []
    for i, t in enumerate(outs):
        shared = share is not None and share[0] == i
        made.append(given[share[1]].reshape(t.shape) if shared and share else _placed(t, offset * 4 + 64 * i))
    scratch = place(scratch_bytes(component, ins, attrs, workers), 0)
    scratch[...] = 0xFF
    with np.errstate(all="ignore"):
        call = component.implementation(Cpu(pool(workers), scratch), list(given), made, attrs)

    def quiet() -> None:
        with np.errstate(all="ignore"):
            call()

    return CpuBound(given, made, scratch, quiet)
