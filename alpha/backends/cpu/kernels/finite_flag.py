"""Whether norm and loss are finite, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs


def finite_flag(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """1 iff both are finite."""
    (norm, loss), flag = ins, outs[0]

    def run() -> None:
        flag[...] = isfinite(norm) and isfinite(loss)

    return run


KERNELS = (
    Component(id="finite_flag.f32.cpu", kind="kernel", backend="cpu", op="finite_flag", implementation=finite_flag,
              envelope=Envelope(dtypes=("f32", "f64"))),
)
