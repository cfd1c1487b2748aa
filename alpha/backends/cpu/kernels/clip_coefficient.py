"""The factor of the update's gradients on the CPU: scalars, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs


def clip_coefficient(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """coefficient = min(1, max_norm / (norm/count)) / count, and norm/count; max_norm 0 clips nothing; count 0 counts as 1."""
    (norm, total), (coefficient, mean_norm) = ins, outs
    max_norm = float(attrs["max_norm"])  # type: ignore[arg-type]

    def run() -> None:
        count = np.maximum(np.float64(total), 1.0)
        mean = np.float64(norm) / count
        factor = max_norm / mean if max_norm > 0 and mean > max_norm else 1.0
        coefficient[...] = factor / count
        mean_norm[...] = mean

    return run


KERNELS = (
    Component(id="clip_coefficient.f32.cpu", kind="kernel", backend="cpu", op="clip_coefficient", implementation=clip_coefficient,
              envelope=Envelope(dtypes=("f32", "f64"))),
)
