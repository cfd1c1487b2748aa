"""A kernel of the CPU called in this process, for comparisons of speed that trust it: blocks of two arms, benchmarks. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import scratch_bytes
from alpha.backends.cpu.lib import Cpu, Workers
from alpha.component import Component
from alpha.gates import subjects
from alpha.gates.subjects import Case, is_gpu, pin_blas, poison, spec_of
from alpha.types import NUMPY, TensorType


@cache
def pool(n: int) -> Workers:
    """The process-wide pool of n workers."""
    pin_blas()
    return Workers(n)


def place(nbytes: int, offset: int) -> np.ndarray:
    """Uninitialised memory, `offset` bytes past a 256-byte boundary."""
    raw = np.empty(nbytes + 512 + offset, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + nbytes]


def _placed(t: TensorType, offset: int) -> np.ndarray:
    return place(t.size * NUMPY[t.dtype].itemsize, offset).view(NUMPY[t.dtype]).reshape(t.shape)


@dataclass
class BoundHere:
    """A kernel bound to buffers of this process (subjects.Bound)."""

    ins: list[np.ndarray]
    outs: list[np.ndarray]
    scratch: np.ndarray
    call: Callable[[], None]

    def fill(self, contents: Iterable[np.ndarray]) -> None:
        """Write contents into the input buffers."""
        for buffer, x in zip(self.ins, contents):
            buffer[...] = x

    def run(self, garbage: int = 0xFF, *, keep: int | None = None) -> None:
        """Poison outputs (but number `keep`) and scratch, then call once."""
        for i, out in enumerate(self.outs):
            if i != keep:
                poison(out, garbage)
        self.scratch[...] = garbage
        self.call()


def bind(component: Component, case: Case) -> Any:
    """A kernel of the CPU on one worker, its outputs 64 bytes apart; one of the GPU as the gates bind it."""
    if is_gpu(component):
        return subjects.bind(component, case)
    ins = [_placed(t, 0) for t in case.types]
    outs = [_placed(t, 64 * i) for i, t in enumerate(case.out_types(spec_of(component)))]
    for x in ins:
        x[...] = np.nan if x.dtype.kind == "f" else 0
    scratch = place(scratch_bytes(component, case.types, case.attrs, 1), 0)
    scratch[...] = 0xFF
    with np.errstate(all="ignore"):
        call = component.implementation(Cpu(pool(1), scratch), list(ins), outs, case.attrs)

    def quiet() -> None:
        with np.errstate(all="ignore"):
            call()

    return BoundHere(ins, outs, scratch, quiet)
