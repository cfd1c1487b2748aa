"""Sum over axes. `axis`: an integer, a tuple of integers, or None for all. `wide`: the result keeps the type in which it is summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from alpha.ops.numerics import depth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, accumulated, expect
from alpha.types import Attrs, TensorType


def reduced_axes(op: str, x: TensorType, attrs: Attrs) -> tuple[int, ...]:
    """The axes that a reduction removes, sorted and non-negative; ShapeError when one does not exist."""
    rank, axis = len(x.shape), attrs.get("axis")
    axes = tuple(range(rank)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    expect(
        all(isinstance(i, int) and -rank <= i < rank for i in axes) and len({i % rank for i in axes}) == len(axes),
        op,  # type: ignore[operator]
        "axis names axes of x, each once",
        f"axis {axis} of {x}",
        f"integers in [{-rank}, {rank})",
    )
    return tuple(sorted(i % rank for i in axes))  # type: ignore[operator]


def kept_shape(op: str, x: TensorType, attrs: Attrs) -> tuple[int, ...]:
    """Shape of the result with the reduced axes kept as 1."""
    axes = reduced_axes(op, x, attrs)
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def infer_reduction(op: str, types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """Shape rule of sum, mean and max."""
    x = types[0]
    expect(x.is_float, op, "x is a float tensor", x, "f64, f32 or bf16")
    axes = reduced_axes(op, x, attrs)
    expect(op == "sum" or prod(x.shape[i] for i in axes) > 0, op, "something is reduced", x, "no reduced axis of size 0")
    shape = (
        kept_shape(op, x, attrs) if attrs.get("keepdims", False) else tuple(n for i, n in enumerate(x.shape) if i not in axes)
    )
    return (TensorType(shape, accumulated(op, x.dtype, attrs) if op == "sum" else x.dtype),)


def keepdims(emit: Emit, cotangent: object, x: TensorType, op: str, attrs: Attrs) -> object:
    """The reduction's cotangent with the reduced axes back as 1."""
    if attrs.get("keepdims", False):
        return cotangent
    return emit("reshape", cotangent, shape=kept_shape(op, x, attrs))  # type: ignore[arg-type]


CASES: tuple[tuple[str, tuple[int, ...], object, bool], ...] = (  # name, shape, axis, keepdims
    ("one", (1,), 0, False),
    ("all", (5, 7), None, False),
    ("all-kept", (5, 7), None, True),
    ("rows", (31, 37), -1, False),
    ("rows-kept", (31, 37), 1, True),
    ("columns", (37, 31), 0, False),
    ("bias", (3, 85, 129), (0, 1), False),
    ("middle", (5, 17, 3), 1, True),
    ("ends", (3, 5, 7), (0, 2), False),
    ("last-two", (5, 3, 7), (-1, -2), False),
    ("block-1", (8191,), 0, False),
    ("block+1", (257, 65), 0, False),
    ("long", (8193,), None, True),
    ("blocks", (1031, 67), 0, False),
    ("row-blocks", (67, 1031), 1, False),
)


def samples_reduction(rng: np.random.Generator) -> Iterable[Sample]:
    """CASES, then contents: all equal, large, tiny."""
    for name, shape, axis, kept in CASES:
        yield Sample(name=name, inputs=(rng.standard_normal(shape),), attrs={"axis": axis, "keepdims": kept})
    yield Sample(name="equal", inputs=(np.full((301, 5), 0.1),), attrs={"axis": 0, "keepdims": False}, wrt=())
    yield Sample(name="large", inputs=(1e30 * rng.standard_normal((33, 65)),), attrs={"axis": 1, "keepdims": False})
    yield Sample(name="tiny", inputs=(1e-40 * rng.standard_normal((33, 65)),), attrs={"axis": 1, "keepdims": False})


def exact_reduction(rng: np.random.Generator) -> Iterable[Sample]:
    """Small integers: every partial sum is exact in f32."""
    for name, shape, axis, kept in CASES:
        yield Sample(
            name=name, inputs=(rng.integers(-99, 100, shape).astype(float),), attrs={"axis": axis, "keepdims": kept}, wrt=()
        )


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return infer_reduction("sum", types, attrs)


def bound_reduction(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray]:
    """n terms added in a tree (numerics.depth): on the scale of sum |x|."""
    scale = _oracle(np.abs(x[0]), **attrs)[0]  # type: ignore[arg-type]
    return (depth(x[0].size // max(1, scale.size)) * scale,)


def _oracle(x: np.ndarray, *, axis: object = None, keepdims: bool = False, wide: bool = False) -> Arrays:
    return (np.sum(x, axis=axis, keepdims=keepdims),)  # type: ignore[call-overload]


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    x, dy = node.inputs[0].type, list(dy)
    if node.outputs[0].type.dtype != x.dtype:
        dy[0] = emit("cast", dy[0], dtype=x.dtype)  # type: ignore[arg-type]
    return (emit("broadcast_to", keepdims(emit, dy[0], x, "sum", node.attrs), shape=x.shape),)  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    yield from samples_reduction(rng)
    for name, shape in (("wide", (3, 70, 136)), ("wide-one", (1, 8)), ("wide-tall", (1031, 24)), ("wide-broad", (7, 1032))):
        attrs = {"axis": tuple(range(len(shape) - 1)), "keepdims": False, "wide": True}
        yield Sample(name=name, inputs=(rng.standard_normal(shape),), attrs=attrs)


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield from exact_reduction(rng)
    x = rng.integers(-99, 100, (300, 72)).astype(float)
    yield Sample(name="wide", inputs=(x,), attrs={"axis": (0,), "keepdims": False, "wide": True}, wrt=())


ROWS = (
    OpSpec(
        name="sum",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: t[0].size,
        samples=_samples,
        exact=_exact,
        bound=bound_reduction,
    ),
)
