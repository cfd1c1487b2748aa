"""Layer normalisation and its backward on the CPU: all passes of a block of rows in cache; row sums are matrix-vector products.

A number per row or per column meets the block as a product of rank one or two, [n,2] @ [2,C], followed by a pass over flat arrays: BLAS
writes such a product at the speed of memory, while a broadcast of NumPy pays for each row. So y = x A + B with A = rstd gamma and
B = beta - mean rstd gamma, and the sum of squares is taken of x as it is and mean^2 taken off. Where a row's mean is larger than its
spread, that would cancel: a block with such a row is centred first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def layernorm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = (x - mean) * rstd * gamma + beta, with mean and rstd per row."""
    c = ins[0].shape[-1]
    x, y = ins[0].reshape(-1, c), outs[0].reshape(-1, c)
    mean, rstd = outs[1].reshape(-1), outs[2].reshape(-1)
    eps = float(attrs["eps"])  # type: ignore[arg-type]
    ones = np.ones(c, x.dtype)
    block = cpu.block_rows(len(x), x.itemsize * c)
    wide = cpu.scratch((cpu.threads, block, c), x.dtype)
    rows = cpu.scratch((cpu.threads, block), x.dtype)
    left = cpu.scratch((cpu.threads, 2, block, 2), x.dtype)
    right = cpu.scratch((2, 2, c), x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        n = stop - start
        xb, yb, mb, rb = x[start:stop], y[start:stop], mean[start:stop], rstd[start:stop]
        a, t, (by_a, by_b) = wide[worker, :n], rows[worker, :n], left[worker, :, :n]
        np.matmul(xb, ones, out=mb)
        np.divide(mb, c, out=mb)
        np.vecdot(xb, xb, out=rb)
        np.divide(rb, c, out=rb)
        np.multiply(mb, mb, out=t)
        np.subtract(rb, t, out=rb)
        np.subtract(t, rb, out=t)
        near = np.maximum.reduce(t) <= 0  # mean^2 at most the variance, in every row; not so if any is NaN
        if near:
            source = xb
        else:
            source = np.subtract(xb, mb[:, None], out=yb)
            np.vecdot(yb, yb, out=rb)
            np.divide(rb, c, out=rb)
        np.add(rb, eps, out=rb)
        np.sqrt(rb, out=rb)
        np.divide(1, rb, out=rb)
        by_a[:, 0], by_a[:, 1], by_b[:, 1] = rb, 0, 1
        np.multiply(mb, rb, out=t)
        np.multiply(t, -1 if near else 0, out=by_b[:, 0])
        np.matmul(by_a, right[0], out=a)
        np.multiply(source, a, out=a)
        np.matmul(by_b, right[1], out=yb)
        np.add(yb, a, out=yb)

    blocks = cpu.rows(len(x), x.itemsize * c, body)

    def run() -> None:
        right[:, 0], right[0, 1], right[1, 1] = ins[1], 0, ins[2]
        blocks()

    return run


def layernorm_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx, dgamma and dbeta; the parameter gradients are sums per block of rows, added in the order of the blocks.

    With g = mean(dy gamma) and w = rstd^2 (mean(dy gamma x) - mean g): dx = dy rstd gamma - x rstd w + rstd (mean w - g), and
    dgamma = sum(rstd dy x) - sum(rstd mean dy), where the rows' factors are weights of vector-matrix products. In a block that is centred
    first, mean is 0 in all of these.
    """
    c = ins[0].shape[-1]
    dy, x, dx = ins[0].reshape(-1, c), ins[1].reshape(-1, c), outs[0].reshape(-1, c)
    gamma, mean, rstd = ins[2], ins[3].reshape(-1), ins[4].reshape(-1)
    n = len(x)
    block = cpu.block_rows(n, x.itemsize * c)
    wide = cpu.scratch((cpu.threads, 3, block, c), x.dtype)
    rows = cpu.scratch((cpu.threads, 3, block), x.dtype)
    left = cpu.scratch((cpu.threads, 3, block, 2), x.dtype)
    right = cpu.scratch((2, 2, c), x.dtype)
    weights = cpu.scratch((cpu.threads, 2, block), x.dtype)
    sums = cpu.scratch((cpu.threads, 2, c), x.dtype)
    partial = cpu.scratch((2, (n + block - 1) // block, c), x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        n = stop - start
        dyb, xb, dxb, rb, mb = dy[start:stop], x[start:stop], dx[start:stop], rstd[start:stop], mean[start:stop]
        u, a, centred = wide[worker, :, :n]
        g, w, m = rows[worker, :, :n]
        by_dy, by_x, by_one = left[worker, :, :n]
        np.multiply(mb, rb, out=m)
        if c > 1 and max(np.maximum.reduce(m), -np.minimum.reduce(m)) <= 1:  # as forward, with 1/rstd for the spread; one column has none
            np.copyto(m, mb)
        else:
            xb = np.subtract(xb, mb[:, None], out=centred)
            m[...] = 0
        np.multiply(dyb, xb, out=u)
        np.matmul(dyb, gamma, out=g)
        np.divide(g, c, out=g)
        np.matmul(u, gamma, out=w)
        np.divide(w, c, out=w)
        weigh, two = weights[worker, :, :n], sums[worker]
        weigh[0] = 1
        np.multiply(rb, m, out=weigh[1])
        np.matmul(weigh, dyb, out=two)
        np.matmul(rb, u, out=partial[0, start // block])
        np.subtract(partial[0, start // block], two[1], out=partial[0, start // block])
        partial[1, start // block] = two[0]
        by_dy[:, 0], by_dy[:, 1], by_x[:, 1], by_one[:, 1] = rb, 0, 0, 0
        np.subtract(w, np.multiply(m, g, out=by_x[:, 0]), out=w)
        np.multiply(w, rb, out=w)
        np.multiply(w, rb, out=w)
        np.multiply(w, rb, out=by_x[:, 0])  # rstd w
        np.multiply(by_x[:, 0], m, out=m)
        np.multiply(g, rb, out=g)
        np.subtract(m, g, out=by_one[:, 0])
        np.matmul(by_dy, right[0], out=a)
        np.multiply(dyb, a, out=a)
        np.matmul(by_x, right[1], out=u)
        np.multiply(xb, u, out=u)
        np.subtract(a, u, out=a)
        np.matmul(by_one, right[1], out=dxb)
        np.add(dxb, a, out=dxb)

    blocks = cpu.rows(n, x.itemsize * c, body)

    def run() -> None:
        right[:, 1], right[0, 0], right[1, 0] = 0, gamma, 1
        blocks()
        np.add.reduce(partial[0], axis=0, out=outs[1])
        np.add.reduce(partial[1], axis=0, out=outs[2])

    return run


def _below(rng: np.random.Generator) -> Iterable[Sample]:
    """Rows far below zero: what is taken off them first does not hang on the sign of their mean."""
    x, gamma = rng.standard_normal((9, 64)) - 300, 1 + 0.5 * rng.standard_normal(64)
    inputs = (rng.standard_normal((9, 64)), x, gamma, x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-6))
    yield Sample(name="far-below", inputs=inputs, wrt=())


def _alone(rng: np.random.Generator) -> Iterable[Sample]:
    """As `_below`; and one row whose mean is far above its spread among so many that are near that these decide a mean over rows."""
    yield from _below(rng)
    x, dy = rng.standard_normal((2, 257, 64))
    x[200] += 150
    dy[200] = x[200] - x[200].mean()  # along the row: what cancels where it is not centred is then far from nothing in every draw
    inputs = (dy, x, 1 + 0.5 * rng.standard_normal(64), x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-6))
    yield Sample(name="far-alone", inputs=inputs, wrt=())


def _mixed(rng: np.random.Generator) -> Iterable[Sample]:
    """Rows whose mean is far above their spread among rows where it is not, and one among so many of these that they decide a sum."""
    x = rng.standard_normal((9, 64))
    x[1::3] += 300
    yield Sample(name="far-among-near", inputs=(x, 1 + 0.5 * rng.standard_normal(64), rng.standard_normal(64)), attrs={"eps": 1e-6}, wrt=())
    x = rng.standard_normal((3000, 64))
    x[700] += 35
    yield Sample(name="far-among-many", inputs=(x, 1 + 0.5 * rng.standard_normal(64), rng.standard_normal(64)), attrs={"eps": 1e-6}, wrt=())


KERNELS = (
    Component(id="layernorm.f32.cpu", kind="kernel", backend="cpu", op="layernorm", implementation=layernorm, envelope=_ENVELOPE,
              inplace=((0, 0),), calls=Calls(further=_mixed)),
    Component(id="layernorm_bwd.f32.cpu", kind="kernel", backend="cpu", op="layernorm_bwd", implementation=layernorm_bwd,
              envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1)), calls=Calls(further=_alone)),
)
