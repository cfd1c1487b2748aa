"""Arithmetic mean over axes. `axis`: an integer, a tuple of integers, or None for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample
from alpha.ops.sum import bound_reduction, infer_reduction, keepdims, reduced_axes, samples_reduction
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return infer_reduction("mean", types, attrs)


def count(x: TensorType, attrs: Attrs) -> int:
    """Number of elements behind one mean."""
    return prod(x.shape[i] for i in reduced_axes("mean", x, attrs))


def _oracle(x: np.ndarray, *, axis: object = None, keepdims: bool = False) -> Arrays:
    total = np.sum(x, axis=axis, keepdims=keepdims)  # type: ignore[call-overload]
    return (total / (x.size // total.size),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    x = node.inputs[0].type
    scaled = emit("scale", keepdims(emit, dy[0], x, "mean", node.attrs), factor=1 / count(x, node.attrs))  # type: ignore[arg-type]
    return (emit("broadcast_to", scaled, shape=x.shape),)  # type: ignore[arg-type]


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray]:
    """The sum's bound over the number of terms, and one rounding of the quotient."""
    total = bound_reduction(x, attrs)[0]
    n = x[0].size // max(1, total.size)
    return (total / n + np.abs(_oracle(x[0], **attrs)[0]),)  # type: ignore[arg-type]


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    """Integers over 2^k elements."""
    for name, shape, axis, kept in (
        ("rows", (31, 64), 1, False),
        ("columns", (128, 17), 0, True),
        ("all", (16, 32), None, False),
    ):
        yield Sample(name=name, inputs=(rng.integers(-99, 100, shape).astype(float),), attrs={"axis": axis, "keepdims": kept})


ROWS = (
    OpSpec(
        name="mean",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: t[0].size,
        samples=samples_reduction,
        exact=_exact,
        bound=_bound,
    ),
)
