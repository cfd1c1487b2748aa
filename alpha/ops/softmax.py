"""Softmax along one axis, the maximum taken off first. An entry of -inf gives 0, and a row of nothing else gives zeros, never NaN."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import growth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, axis = types[0], attrs.get("axis", -1)
    expect(x.is_float and x.size > 0, "softmax", "x is a float tensor that is not empty", x, "f32[...]")
    expect(isinstance(axis, int) and -len(x.shape) <= axis < len(x.shape), "softmax", "axis is one of x's", axis, f"an axis of {x}")
    return (x,)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0] == types[1], "softmax_bwd", "dy and y agree", f"{types[0]} and {types[1]}", "equal types")
    return _infer(types, attrs)


def _oracle(x: np.ndarray, *, axis: int = -1) -> Arrays:
    top = x.max(axis, keepdims=True)
    p = np.exp(x - np.where(top == -np.inf, 0.0, top))
    total = p.sum(axis, keepdims=True)
    return (p / np.where(total == 0, 1.0, total),)


def _oracle_bwd(dy: np.ndarray, y: np.ndarray, *, axis: int = -1) -> Arrays:
    return (y * (dy - (dy * y).sum(axis, keepdims=True)),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("softmax_bwd", dy[0], node.outputs[0], **node.attrs),)  # type: ignore[arg-type]


def _contents(rng: np.random.Generator) -> Iterable[tuple[str, np.ndarray, dict[str, object]]]:
    yield "default-axis", rng.standard_normal((3, 5)), {}
    yield "ragged", rng.standard_normal((3, 7, 13)) * 3, {"axis": -1}
    yield "block+1", rng.standard_normal((33, 1025)), {"axis": 1}
    yield "first-axis", rng.standard_normal((7, 5)), {"axis": 0}
    yield "middle-axis", rng.standard_normal((3, 6, 5)), {"axis": 1}
    yield "large", rng.standard_normal((5, 9)) + 1e4, {"axis": -1}
    yield "large-negative", rng.standard_normal((5, 9)) - 1e4, {"axis": -1}
    yield "tiny", rng.standard_normal((5, 9)) * 1e-30, {"axis": -1}
    yield "all-equal", np.full((2, 11), 0.7), {"axis": -1}


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x, attrs in _contents(rng):  # a difference step scaled by entries of 1e4 would cross the whole range of the exponential
        yield Sample(name=name, inputs=(x,), attrs=attrs, wrt=() if name.startswith("large") else None)
    x = rng.standard_normal((3, 8))
    x[0, 3:], x[1] = -np.inf, -np.inf
    yield Sample(name="minus-infinity", inputs=(x,), attrs={"axis": -1}, wrt=())


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x, attrs in _contents(rng):
        yield Sample(name=name, inputs=(rng.standard_normal(x.shape), _oracle(x, **attrs)[0]), attrs=attrs)  # type: ignore[arg-type]


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for n in (1, 2, 64):  # equal entries over 2^k places; the others too far below to count
        x = np.concatenate([np.full((3, n), 88.0), np.full((3, 7), -1e4)], axis=1)
        yield Sample(name=f"uniform-{n}", inputs=(rng.permuted(x, axis=1),), attrs={"axis": -1})
    yield Sample(name="far-apart", inputs=(np.array([[1e4, -1e4, 0.0, 9e3], [-1e4, -9e3, -1e30, -9.9e3]]),), attrs={"axis": -1})
    yield Sample(name="uniform-first-axis", inputs=(np.full((4, 3), -5.5),), attrs={"axis": 0})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="one", inputs=(np.array([[3.0]]), np.array([[1.0]])), attrs={"axis": -1})
    yield Sample(name="dyadic", inputs=(rng.integers(-9, 9, (5, 8)).astype(float), np.full((5, 8), 0.125)), attrs={"axis": -1})
    yield Sample(name="dyadic-first-axis", inputs=(rng.integers(-9, 9, (4, 3)).astype(float), np.full((4, 3), 0.25)), attrs={"axis": 0})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: exp(x - top) is off by |x - top| + 5 relative (the subtraction; exp up to 4 ulp), the sum by the mean of that, weighted, +
    # growth
    axis: int = attrs.get("axis", -1)  # type: ignore[assignment]
    (p,) = _oracle(x[0], axis=axis)
    finite = np.where(np.isfinite(x[0]), x[0], 0.0)
    distance = np.where(p > 0, finite.max(axis, keepdims=True) - finite, 0.0) + 5
    total = (p * distance).sum(axis, keepdims=True) + growth(x[0].shape[axis])
    return (p * (distance + total + 2),)


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: the sum growth + 1 of its absolute terms, then a difference and a product
    axis: int = attrs.get("axis", -1)  # type: ignore[assignment]
    dy, y = np.abs(x[0]), np.abs(x[1])
    total = (dy * y).sum(axis, keepdims=True)
    return (y * (2 * dy + (growth(y.shape[axis]) + 3) * total),)


ROWS = (
    OpSpec(name="softmax", inputs=("x",), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp, flops=lambda t, a: 5 * t[0].size,
           samples=_samples, exact=_exact, bound=_bound),
    OpSpec(name="softmax_bwd", inputs=("dy", "y"), outputs=("dx",), infer=_infer_bwd, oracle=_oracle_bwd, vjp=None,
           why_no_vjp="backward row",
           flops=lambda t, a: 4 * t[0].size, samples=_samples_bwd, exact=_exact_bwd, bound=_bound_bwd),
)
