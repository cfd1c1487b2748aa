"""Warmup-stable-decay learning rate on the CPU, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component
from alpha.types import Attrs


def lr_wsd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Linear warm-up to peak, stable, linear decay to floor * peak over the last `decay` steps, constant after."""
    step, lr = ins[0], outs[0]
    peak, floor = float(attrs["peak"]), float(attrs["floor"])  # type: ignore[arg-type]
    warmup, total, decay = (int(attrs[k]) for k in ("warmup", "total", "decay"))  # type: ignore[call-overload]

    def run() -> None:
        now = int(step)
        if now < warmup:
            lr[...] = peak * (now + 1) / warmup
            return
        x = min(max((now - (total - decay)) / decay, 0.0), 1.0)
        lr[...] = peak * (1 - (1 - floor) * x)

    return run


KERNELS = (Component(id="lr_wsd.f32.cpu", kind="kernel", backend="cpu", op="lr_wsd", implementation=lr_wsd),)
