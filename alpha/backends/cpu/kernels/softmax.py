"""Softmax along one axis and its backward on the CPU: a tensor is [outer, axis, inner], cut along outer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def _split(shape: tuple[int, ...], attrs: Attrs) -> tuple[int, int, int]:
    axis = int(attrs.get("axis", -1)) % len(shape)  # type: ignore[call-overload]
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


SAFE = 60.0
"""While all entries lie within +-SAFE, exp neither overflows nor underflows, and the maximum need not be taken off."""


def softmax(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """exp(x - max) / sum; a row of nothing but -inf gives zeros."""
    outer, c, inner = _split(ins[0].shape, attrs)
    x, y = ins[0].reshape(outer, c, inner), outs[0].reshape(outer, c, inner)
    block = cpu.block_rows(outer, x.itemsize * c * inner)
    t = cpu.scratch((cpu.threads, block, 1, inner), x.dtype)
    lowest, least = np.finfo(x.dtype).min, np.finfo(x.dtype).tiny
    ones = np.ones(c, x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        xb, yb, u = x[start:stop], y[start:stop], t[worker, : stop - start]
        if np.maximum.reduce(xb.reshape(-1)) <= SAFE and np.minimum.reduce(xb.reshape(-1)) >= -SAFE:
            np.exp(xb, out=yb)
        else:
            np.maximum.reduce(xb, axis=1, keepdims=True, out=u)
            np.maximum(u, lowest, out=u)  # -inf - -inf would be NaN
            np.subtract(xb, u, out=yb)
            np.exp(yb, out=yb)
        if inner == 1:
            np.matmul(yb[:, :, 0], ones, out=u[:, 0, 0])
        else:
            np.add.reduce(yb, axis=1, keepdims=True, out=u)
        np.maximum(u, least, out=u)
        np.divide(yb, u, out=yb)

    return cpu.rows(outer, x.itemsize * c * inner, body)


def softmax_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx = y * (dy - sum(dy * y))."""
    outer, c, inner = _split(ins[0].shape, attrs)
    dy, y, dx = (a.reshape(outer, c, inner) for a in (ins[0], ins[1], outs[0]))
    block = cpu.block_rows(outer, y.itemsize * c * inner)
    t = cpu.scratch((cpu.threads, block, c, inner), y.dtype)
    s = cpu.scratch((cpu.threads, block, 1, inner), y.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        u, total = t[worker, : stop - start], s[worker, : stop - start]
        np.multiply(dy[start:stop], y[start:stop], out=u)
        np.add.reduce(u, axis=1, keepdims=True, out=total)
        np.subtract(dy[start:stop], total, out=u)
        np.multiply(u, y[start:stop], out=dx[start:stop])

    return cpu.rows(outer, y.itemsize * c * inner, body)


def _offsets(rng: np.random.Generator) -> Iterable[Sample]:
    """Entries far above and below what exp can take, by an offset that all of a row share, just beyond it, and on either side of SAFE."""
    for name, shape, offset, axis in (("above", (5, 33), 1e4, -1), ("below", (5, 33), -1e4, -1), ("above-middle", (2, 9, 5), 1e3, 1),
                                      ("near-safe", (9, 8), SAFE, -1), ("near-minus-safe", (9, 8), -SAFE, -1),
                                      ("just-above", (5, 33), 86.0, -1), ("just-below", (5, 33), -105.0, -1),
                                      ("far-below", (5, 33), -1e35, -1)):
        yield Sample(name=f"offset-{name}", inputs=(2 * rng.standard_normal(shape) + offset,), attrs={"axis": axis}, wrt=())


KERNELS = (
    Component(id="softmax.f32.cpu", kind="kernel", backend="cpu", op="softmax", implementation=softmax, envelope=_ENVELOPE,
              inplace=((0, 0),), calls=Calls(further=_offsets)),
    Component(id="softmax_bwd.f32.cpu", kind="kernel", backend="cpu", op="softmax_bwd", implementation=softmax_bwd, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
)
