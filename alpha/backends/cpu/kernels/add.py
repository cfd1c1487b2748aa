"""Broadcasting binary operations on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.blocks import zipped
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def add(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = a + b, broadcast."""
    return zipped(cpu, np.add, outs[0], ins[0], ins[1])


def accumulate(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = into + x, where y may be into's memory."""
    into, x = ins
    return zipped(cpu, np.add, outs[0], into, x)


def mul(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = a * b, broadcast."""
    return zipped(cpu, np.multiply, outs[0], ins[0], ins[1])


KERNELS = (
    Component(id="add.f32.cpu", kind="kernel", backend="cpu", op="add", implementation=add, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
    Component(id="accumulate.f32.cpu", kind="kernel", backend="cpu", op="accumulate", implementation=accumulate, envelope=_ENVELOPE,
              inplace=((0, 0),)),
    Component(id="mul.f32.cpu", kind="kernel", backend="cpu", op="mul", implementation=mul, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
)
