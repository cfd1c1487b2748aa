"""Layer normalisation and its backward on the CPU: all passes of a block of rows in cache; row sums are matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def layernorm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = (x - mean) * rstd * gamma + beta, with mean and rstd per row; the variance is that of the centred row."""
    c = ins[0].shape[-1]
    x, y = ins[0].reshape(-1, c), outs[0].reshape(-1, c)
    mean, rstd = outs[1].reshape(-1), outs[2].reshape(-1)
    gamma, beta = ins[1], ins[2]
    eps = float(attrs["eps"])  # type: ignore[arg-type]
    ones = np.ones(c, x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        xb, yb, mb, rb = x[start:stop], y[start:stop], mean[start:stop], rstd[start:stop]
        np.matmul(xb, ones, out=mb)
        np.divide(mb, c, out=mb)
        np.subtract(xb, mb[:, None], out=yb)
        np.vecdot(yb, yb, out=rb)
        np.divide(rb, c, out=rb)
        np.add(rb, eps, out=rb)
        np.sqrt(rb, out=rb)
        np.divide(1, rb, out=rb)
        np.multiply(yb, rb[:, None], out=yb)
        np.multiply(yb, gamma, out=yb)
        np.add(yb, beta, out=yb)

    return cpu.rows(len(x), x.itemsize * c, body)


def layernorm_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx, dgamma and dbeta; the parameter gradients are sums per block of rows, added in the order of the blocks.

    With xc = x - mean: dx = rstd (dy gamma - c1 - xc w), c1 = mean(dy gamma), w = rstd^2 mean(dy gamma xc); rstd enters dgamma as the
    weights of a vector-matrix product.
    """
    c = ins[0].shape[-1]
    dy, x, dx = ins[0].reshape(-1, c), ins[1].reshape(-1, c), outs[0].reshape(-1, c)
    gamma, mean, rstd = ins[2], ins[3].reshape(-1), ins[4].reshape(-1)
    n = len(x)
    block = cpu.block_rows(n, x.itemsize * c)
    ones = np.ones(block, x.dtype)
    t = cpu.scratch((cpu.threads, 2, block, c), x.dtype)
    means = cpu.scratch((cpu.threads, 2, block), x.dtype)
    partial = cpu.scratch((2, (n + block - 1) // block, c), x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        rows = stop - start
        dyb, dxb, rb = dy[start:stop], dx[start:stop], rstd[start:stop]
        xc, u = t[worker, 0, :rows], t[worker, 1, :rows]
        c1, w = means[worker, 0, :rows], means[worker, 1, :rows]
        np.subtract(x[start:stop], mean[start:stop, None], out=xc)
        np.multiply(dyb, xc, out=u)
        np.matmul(rb, u, out=partial[0, start // block])
        np.matmul(ones[:rows], dyb, out=partial[1, start // block])
        np.matmul(dyb, gamma, out=c1)
        np.divide(c1, c, out=c1)
        np.matmul(u, gamma, out=w)
        np.divide(w, c, out=w)
        np.multiply(w, rb, out=w)
        np.multiply(w, rb, out=w)
        np.multiply(xc, w[:, None], out=xc)
        np.add(xc, c1[:, None], out=xc)
        np.multiply(dyb, gamma, out=dxb)
        np.subtract(dxb, xc, out=dxb)
        np.multiply(dxb, rb[:, None], out=dxb)

    blocks = cpu.rows(n, x.itemsize * c, body)

    def run() -> None:
        blocks()
        np.add.reduce(partial[0], axis=0, out=outs[1])
        np.add.reduce(partial[1], axis=0, out=outs[2])

    return run


KERNELS = (
    Component(id="layernorm.f32.cpu", kind="kernel", backend="cpu", op="layernorm", implementation=layernorm, envelope=_ENVELOPE,
              inplace=((0, 0),)),
    Component(id="layernorm_bwd.f32.cpu", kind="kernel", backend="cpu", op="layernorm_bwd", implementation=layernorm_bwd,
              envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
)
