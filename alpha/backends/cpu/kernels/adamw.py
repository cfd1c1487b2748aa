"""AdamW on the CPU: blocks of each segment, all passes in cache; state in place where the plan says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs

BLOCK = 32768
"""Elements: four arrays and two of scratch fit in a 1 MB L2 cache."""


def carried(ins: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> Callable[[], None]:
    """Closure that copies each input to its output, except those that share memory."""
    pairs = [(x, y) for x, y in zip(ins, outs) if x.ctypes.data != y.ctypes.data]

    def copy() -> None:
        for x, y in pairs:
            np.copyto(y, x)

    return copy


def cut(segments: Sequence[tuple[int, int, float, float]]) -> list[tuple[slice, float, float]]:
    """(elements, decay, lr_scale) of every block; a block lies in one segment."""
    return [(slice(start, min(start + BLOCK, offset + length)), decay, lr_scale)
            for offset, length, decay, lr_scale in segments for start in range(offset, offset + length, BLOCK)]


def adamw(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """param, m and v after one step on the segments; nothing changes when finite is 0."""
    param, grad, m, v, coefficient, rate, step, finite = ins
    beta1, beta2, eps, weight_decay = (float(attrs[k]) for k in ("beta1", "beta2", "eps", "weight_decay"))  # type: ignore[arg-type]
    segments: tuple[tuple[int, int, float, float], ...] = attrs["segments"]  # type: ignore[assignment]
    blocks = cut(segments)
    scratch = cpu.scratch((cpu.threads, 2, BLOCK), param.dtype)
    now = {"coefficient": 0.0, "lr": 0.0, "correction1": 1.0, "correction2": 1.0}
    copy = carried((param, m, v), outs)

    def body(i: int, worker: int) -> None:
        at, decay, lr_scale = blocks[i]
        g, pb, mb, vb = grad[at], outs[0][at], outs[1][at], outs[2][at]
        t, u = scratch[worker, 0, : g.size], scratch[worker, 1, : g.size]
        lr = now["lr"] * lr_scale
        np.multiply(g, now["coefficient"], out=t)
        np.multiply(t, 1 - beta1, out=u)
        np.multiply(mb, beta1, out=mb)
        np.add(mb, u, out=mb)
        np.multiply(t, t, out=t)
        np.multiply(t, 1 - beta2, out=t)
        np.multiply(vb, beta2, out=vb)
        np.add(vb, t, out=vb)
        np.sqrt(vb, out=t)
        np.multiply(t, 1 / sqrt(now["correction2"]), out=t)
        np.add(t, eps, out=t)
        np.divide(mb, t, out=u)
        np.multiply(u, lr / now["correction1"], out=u)
        if decay:
            np.multiply(pb, lr * weight_decay * decay, out=t)
            np.add(u, t, out=u)
        np.subtract(pb, u, out=pb)

    update = cpu.items(len(blocks), body)

    def run() -> None:
        copy()
        if not finite:
            return
        t = int(step) + 1
        now.update(coefficient=float(coefficient), lr=float(rate), correction1=1 - beta1**t, correction2=1 - beta2**t)
        update()

    return run


def _slow(rng: np.random.Generator) -> Iterable[Sample]:
    """Steps of a run at which the moments, with betas this close to 1, are still corrected."""
    for step in (2_000, 30_000):
        grad, scalars = rng.standard_normal(65), (np.array(0.5), np.array(1e-2), np.array(step, np.int32), np.array(1, np.int32))
        yield Sample(name=f"slow-{step}", inputs=(rng.standard_normal(65), grad, 0.1 * grad, rng.random(65) * 0.1, *scalars), wrt=(),
                     attrs={"beta1": 0.999, "beta2": 0.9999, "eps": 1e-8, "weight_decay": 0.1, "segments": ((0, 65, 1.0, 1.0),)})


KERNELS = (
    Component(id="adamw.f32.cpu", kind="kernel", backend="cpu", op="adamw", implementation=adamw, envelope=Envelope(dtypes=("f32", "f64")),
              inplace=((0, 0), (1, 2), (2, 3)), calls=Calls(further=_slow)),
)
