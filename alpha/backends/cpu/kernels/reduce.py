"""Reductions on the CPU: sum, sum_to, mean, max and its backward. Partial results are combined in block order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from alpha.backends.cpu.blocks import BLOCK, cuts, single_pass
from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.broadcast_to import stretched
from alpha.ops.spec import Sample
from alpha.ops.sum import reduced_axes
from alpha.types import Attrs, TensorType

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def _axes(x: np.ndarray, attrs: Attrs) -> tuple[int, ...]:
    return reduced_axes("reduction", TensorType(x.shape, "f32"), attrs)


def _merged(shape: Sequence[int], axes: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """The shape with neighbouring axes of one fate (reduced or kept) merged and 1s dropped, and the reduced axes of that."""
    sizes: list[int] = []
    fates: list[bool] = []
    for i, n in enumerate(shape):
        if n == 1:
            continue
        if fates and fates[-1] == (i in axes):
            sizes[-1] *= n
        else:
            sizes.append(n)
            fates.append(i in axes)
    return sizes, tuple(i for i, reduced in enumerate(fates) if reduced)


def reduction(cpu: Cpu, ufunc: np.ufunc, x: np.ndarray, y: np.ndarray, axes: Sequence[int],
              finish: Callable[[np.ndarray], object] | None = None) -> Callable[[], None]:
    """Closure of y = ufunc.reduce(x, axes), then finish(y).

    Kept rows (or the columns of a wide matrix) are independent; else a reduced leading axis is cut into blocks whose partial results are
    combined in order. Sums of vectors, rows and columns are products with ones, which BLAS does three times as fast as NumPy's reduction.
    """
    sizes, reduced = _merged(x.shape, axes)
    x = x.reshape(sizes)
    y = y.reshape([n for i, n in enumerate(sizes) if i not in reduced])
    ones = np.ones(max(sizes), x.dtype) if ufunc is np.add and reduced and len(sizes) <= 2 else None

    def part(source: np.ndarray, into: np.ndarray) -> None:
        if ones is None:
            ufunc.reduce(source, axis=reduced, out=into)
        elif reduced == (0,):
            np.matmul(ones[: len(source)], source, out=into)
        else:
            np.matmul(source, ones[: source.shape[1]], out=into)

    wide = reduced == (0,) and len(sizes) == 2 and sizes[1] >= 16 * sizes[0]
    if wide or 0 not in reduced:
        step = max(1, BLOCK // sizes[0]) if wide else 0
        parts = [(x[:, s : s + step], y[s : s + step]) for s in range(0, sizes[1], step)] if wide else [(x[c], y[c]) for c in cuts(sizes)]

        def rows(i: int, worker: int) -> None:
            x_p, y_p = parts[i]
            part(x_p, y_p)
            if finish is not None:
                finish(y_p)

        return single_pass(cpu, len(parts), x.size, rows)
    blocks = [x[c] for c in cuts(sizes)]
    partial = cpu.scratch((len(blocks), *y.shape), x.dtype)

    def block(i: int, worker: int) -> None:
        part(blocks[i], partial[i, ...])

    each = single_pass(cpu, len(blocks), x.size, block)

    def run() -> None:
        each()
        ufunc.reduce(partial, axis=0, out=y)
        if finish is not None:
            finish(y)

    return run


def sum_(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = sum of x over axes."""
    return reduction(cpu, np.add, ins[0], outs[0], _axes(ins[0], attrs))


def sum_to(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = sum of x over the axes along which y's shape was stretched to x's."""
    return reduction(cpu, np.add, ins[0], outs[0], stretched(outs[0].shape, ins[0].shape))


def mean(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = sum of x over axes, divided by the number of terms."""
    n = ins[0].size // max(1, outs[0].size)
    return reduction(cpu, np.add, ins[0], outs[0], _axes(ins[0], attrs), lambda y: np.divide(y, n, out=y))


def max_(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = largest element of x over axes."""
    return reduction(cpu, np.maximum, ins[0], outs[0], _axes(ins[0], attrs))


def max_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx = dy / number of ties where x is the maximum y, else 0."""
    sizes, reduced = _merged(ins[1].shape, _axes(ins[1], attrs))
    kept = [1 if i in reduced else n for i, n in enumerate(sizes)]
    dy, x, y, dx = ins[0].reshape(kept), ins[1].reshape(sizes), ins[2].reshape(kept), outs[0].reshape(sizes)
    share = cpu.scratch(kept, x.dtype)
    parts = [(...,)] if 0 in reduced or not sizes else cuts(sizes)
    views = [(dy[at], x[at], y[at], dx[at], share[at]) for at in parts]

    def body(i: int, worker: int) -> None:
        dy_p, x_p, y_p, dx_p, share_p = views[i]
        np.equal(x_p, y_p, out=dx_p, casting="unsafe")
        np.add.reduce(dx_p, axis=reduced, out=share_p, keepdims=True)
        np.divide(dy_p, share_p, out=share_p)
        np.multiply(dx_p, share_p, out=dx_p)

    return cpu.items(len(views), body)


def _nan(rng: np.random.Generator) -> Iterable[Sample]:
    """A NaN in one element of each row, at every place, is the largest of its row alone."""
    for name, shape, axis in (("rows", (7, 9), 1), ("columns", (9, 7), 0), ("all", (3, 5), None), ("blocks", (700, 130), 0)):
        x = rng.standard_normal(shape)
        at = np.arange(min(shape) - 1)
        x[at, rng.permutation(len(at))] = np.nan
        yield Sample(name=f"nan-{name}", inputs=(x,), attrs={"axis": axis, "keepdims": False}, wrt=())


def _parts(rng: np.random.Generator) -> Iterable[Sample]:
    """Rows in more than one block, each of which has its maximum twice."""
    x = rng.standard_normal((530, 131))
    x[:, -1] = x[:, :-1].max(1)
    yield Sample(name="parts", inputs=(rng.standard_normal(530), x, x[:, -1]), attrs={"axis": 1, "keepdims": False}, wrt=())


KERNELS = (
    Component(id="sum.f32.cpu", kind="kernel", backend="cpu", op="sum", implementation=sum_, envelope=_ENVELOPE),
    Component(id="sum_to.f32.cpu", kind="kernel", backend="cpu", op="sum_to", implementation=sum_to, envelope=_ENVELOPE),
    Component(id="mean.f32.cpu", kind="kernel", backend="cpu", op="mean", implementation=mean, envelope=_ENVELOPE),
    Component(id="max.f32.cpu", kind="kernel", backend="cpu", op="max", implementation=max_, envelope=_ENVELOPE,
              calls=Calls(further=_nan)),
    Component(id="max_bwd.f32.cpu", kind="kernel", backend="cpu", op="max_bwd", implementation=max_bwd, envelope=_ENVELOPE,
              calls=Calls(repeated=_parts)),
)
