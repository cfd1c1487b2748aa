"""Cosine learning rate on the CPU, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component
from alpha.types import Attrs


def lr_cosine(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Linear warm-up to peak, half a cosine to floor * peak at total, constant after."""
    step, lr = ins[0], outs[0]
    peak, floor = float(attrs["peak"]), float(attrs["floor"])  # type: ignore[arg-type]
    warmup, total = int(attrs["warmup"]), int(attrs["total"])  # type: ignore[call-overload]

    def run() -> None:
        now = int(step)
        if now < warmup:
            lr[...] = peak * (now + 1) / warmup
            return
        x = min((now - warmup) / (total - warmup), 1.0)
        lr[...] = peak * (floor + (1 - floor) * 0.5 * (1 + cos(pi * x)))

    return run


KERNELS = (Component(id="lr_cosine.f32.cpu", kind="kernel", backend="cpu", op="lr_cosine", implementation=lr_cosine),)
