"""Root mean square normalisation and its backward on the CPU: all passes of a block of rows in cache.

A factor per row and one per column meet the block as one product of rank two, as in layernorm.py, where it says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def rmsnorm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x * rstd * gamma with rstd = 1 / sqrt(mean(x^2) + eps) per row."""
    c = ins[0].shape[-1]
    x, y, rstd, gamma = ins[0].reshape(-1, c), outs[0].reshape(-1, c), outs[1].reshape(-1), ins[1]
    eps = float(attrs["eps"])  # type: ignore[arg-type]
    block = cpu.block_rows(len(x), x.itemsize * c)
    wide = cpu.scratch((cpu.threads, block, c), x.dtype)
    left = cpu.scratch((cpu.threads, block, 2), x.dtype)
    right = cpu.scratch((2, c), x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        xb, yb, rb = x[start:stop], y[start:stop], rstd[start:stop]
        np.vecdot(xb, xb, out=rb)
        np.divide(rb, c, out=rb)
        np.add(rb, eps, out=rb)
        np.sqrt(rb, out=rb)
        np.divide(1, rb, out=rb)
        a, by_a = wide[worker, : stop - start], left[worker, : stop - start]
        by_a[:, 0], by_a[:, 1] = rb, 0
        np.matmul(by_a, right, out=a)
        np.multiply(xb, a, out=yb)

    blocks = cpu.rows(len(x), x.itemsize * c, body)

    def run() -> None:
        right[0], right[1] = gamma, 0
        blocks()

    return run


def rmsnorm_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx = rstd (dy gamma - x w) with w = rstd^2 mean(dy gamma x); dgamma, a sum per block of rows, added in the order of the blocks."""
    c = ins[0].shape[-1]
    dy, x, dx = ins[0].reshape(-1, c), ins[1].reshape(-1, c), outs[0].reshape(-1, c)
    gamma, rstd = ins[2], ins[3].reshape(-1)
    n = len(x)
    block = cpu.block_rows(n, x.itemsize * c)
    wide = cpu.scratch((cpu.threads, 2, block, c), x.dtype)
    means = cpu.scratch((cpu.threads, block), x.dtype)
    left = cpu.scratch((cpu.threads, 2, block, 2), x.dtype)
    right = cpu.scratch((2, 2, c), x.dtype)
    partial = cpu.scratch(((n + block - 1) // block, c), x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        rows = stop - start
        xb, dyb, dxb, rb = x[start:stop], dy[start:stop], dx[start:stop], rstd[start:stop]
        u, a = wide[worker, :, :rows]
        w, (by_dy, by_x) = means[worker, :rows], left[worker, :, :rows]
        np.multiply(dyb, xb, out=u)
        np.matmul(rb, u, out=partial[start // block])
        np.matmul(u, gamma, out=w)
        np.divide(w, c, out=w)
        np.multiply(w, rb, out=w)
        np.multiply(w, rb, out=w)
        by_dy[:, 0], by_dy[:, 1], by_x[:, 1] = rb, 0, 0
        np.multiply(w, rb, out=by_x[:, 0])
        np.matmul(by_dy, right[0], out=a)
        np.multiply(dyb, a, out=a)
        np.matmul(by_x, right[1], out=u)
        np.multiply(xb, u, out=u)
        np.subtract(a, u, out=dxb)

    blocks = cpu.rows(n, x.itemsize * c, body)

    def run() -> None:
        right[:, 1], right[0, 0], right[1, 0] = 0, gamma, 1
        blocks()
        np.add.reduce(partial, axis=0, out=outs[1])

    return run


KERNELS = (
    Component(id="rmsnorm.f32.cpu", kind="kernel", backend="cpu", op="rmsnorm", implementation=rmsnorm, envelope=_ENVELOPE,
              inplace=((0, 0),)),
    Component(id="rmsnorm_bwd.f32.cpu", kind="kernel", backend="cpu", op="rmsnorm_bwd", implementation=rmsnorm_bwd, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
)
