"""SGD with momentum and decoupled decay on the CPU: blocks of each segment, all passes in cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.kernels.adamw import BLOCK, carried, cut
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs


def sgd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """param and velocity after one step on the segments; nothing changes when finite is 0."""
    param, grad, velocity, coefficient, rate, finite = ins
    momentum, weight_decay = float(attrs["momentum"]), float(attrs["weight_decay"])  # type: ignore[arg-type]
    segments: tuple[tuple[int, int, float, float], ...] = attrs["segments"]  # type: ignore[assignment]
    blocks = cut(segments)
    scratch = cpu.scratch((cpu.threads, 2, BLOCK), param.dtype)
    now = {"coefficient": 0.0, "lr": 0.0}
    copy = carried((param, velocity), outs)

    def body(i: int, worker: int) -> None:
        at, decay, lr_scale = blocks[i]
        g, pb, vb = grad[at], outs[0][at], outs[1][at]
        t, u = scratch[worker, 0, : g.size], scratch[worker, 1, : g.size]
        lr = now["lr"] * lr_scale
        np.multiply(g, now["coefficient"], out=t)
        np.multiply(vb, momentum, out=vb)
        np.add(vb, t, out=vb)
        np.multiply(vb, lr, out=t)
        if decay:
            np.multiply(pb, lr * weight_decay * decay, out=u)
            np.add(t, u, out=t)
        np.subtract(pb, t, out=pb)

    update = cpu.items(len(blocks), body)

    def run() -> None:
        copy()
        if finite:
            now.update(coefficient=float(coefficient), lr=float(rate))
            update()

    return run


KERNELS = (
    Component(id="sgd.f32.cpu", kind="kernel", backend="cpu", op="sgd", implementation=sgd, envelope=Envelope(dtypes=("f32", "f64")),
              inplace=((0, 0), (1, 2))),
)
