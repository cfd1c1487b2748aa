"""Broadcasting and its transpose: `broadcast_to` repeats, `sum_to` adds what was repeated.

NumPy's rule: axes align at the right, and a size of 1 stretches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import depth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def broadcast_shape(op: str, a: TensorType, b: TensorType) -> tuple[int, ...]:
    """Common shape of two operands by NumPy's rule; ShapeError if there is none."""
    n = max(len(a.shape), len(b.shape))
    wide = [(1,) * (n - len(s)) + s for s in (a.shape, b.shape)]
    expect(
        all(x == y or 1 in (x, y) for x, y in zip(*wide)),
        op,
        "the operands broadcast together",
        f"{a} and {b}",
        "equal sizes, or 1, on every axis counted from the right",
    )
    return tuple(y if x == 1 else x for x, y in zip(*wide))


def stretched(small: Sequence[int], big: Sequence[int]) -> tuple[int, ...]:
    """Axes of `big` along which a tensor of shape `small` is repeated when it is broadcast to `big`."""
    lead = len(big) - len(small)
    return tuple(i for i, n in enumerate(big) if i < lead or (small[i - lead] == 1 and n != 1))


def _fits(op: str, small: tuple[int, ...], big: tuple[int, ...]) -> None:
    lead = len(big) - len(small)
    expect(
        lead >= 0 and all(s in (1, b) for s, b in zip(small, big[lead:])),
        op,
        "the small shape broadcasts to the big one",
        f"{list(small)} and {list(big)}",
        "equal sizes, or 1 in the small shape, on every axis counted from the right",
    )


def _shape(attrs: Attrs) -> tuple[int, ...]:
    return tuple(attrs["shape"])  # type: ignore[arg-type]


def _infer_to(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _fits("broadcast_to", types[0].shape, _shape(attrs))
    return (TensorType(_shape(attrs), types[0].dtype),)


def _infer_sum(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0].is_float, "sum_to", "x is a float tensor", types[0], "f64, f32 or bf16")
    _fits("sum_to", _shape(attrs), types[0].shape)
    return (TensorType(_shape(attrs), types[0].dtype),)


def _oracle_to(x: np.ndarray, *, shape: tuple[int, ...]) -> Arrays:
    return (np.where(np.ones(shape, bool), x, x),)


def _oracle_sum(x: np.ndarray, *, shape: tuple[int, ...]) -> Arrays:
    axes = stretched(shape, x.shape)
    return (np.sum(x, axis=axes).reshape(shape) if axes else x.reshape(shape),)


def _bound_sum(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray]:
    """n terms added in a tree (numerics.depth): on the scale of sum |x|."""
    scale = _oracle_sum(np.abs(x[0]), shape=_shape(attrs))[0]
    return (depth(x[0].size // max(1, scale.size)) * scale,)


def _vjp_to(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("sum_to", dy[0], shape=node.inputs[0].type.shape),)  # type: ignore[arg-type]


def _vjp_sum(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("broadcast_to", dy[0], shape=node.inputs[0].type.shape),)  # type: ignore[arg-type]


_PAIRS = (  # name, small, big
    ("one", (1,), (1,)),
    ("scalar", (), (7, 5)),
    ("row", (13,), (7, 13)),
    ("column", (7, 1), (7, 13)),
    ("middle", (3, 1, 5), (3, 11, 5)),
    ("mixed", (1, 4, 1), (2, 3, 4, 6)),
    ("same", (3, 5), (3, 5)),
    ("block-1", (129,), (255, 129)),
    ("block+1", (129,), (257, 129)),
    ("ragged", (67,), (3, 331, 67)),
    ("long", (1,), (8193,)),
    ("blocks", (67,), (1031, 67)),
    ("column-blocks", (67, 1), (67, 1031)),
)


def _samples_to(rng: np.random.Generator) -> Iterable[Sample]:
    for name, small, big in _PAIRS:
        yield Sample(name=name, inputs=(rng.standard_normal(small),), attrs={"shape": big})
    yield Sample(name="tiny", inputs=(np.array([1e-40, -1e-38, 1e38]),), attrs={"shape": (5, 3)})


def _samples_sum(rng: np.random.Generator) -> Iterable[Sample]:
    for name, small, big in _PAIRS:
        yield Sample(name=name, inputs=(rng.standard_normal(big),), attrs={"shape": small})
    yield Sample(name="equal", inputs=(np.full((301, 7), 0.1),), attrs={"shape": (7,)})
    yield Sample(name="large", inputs=(1e30 * rng.standard_normal((65, 9)),), attrs={"shape": (9,)})
    yield Sample(name="tiny", inputs=(1e-40 * rng.standard_normal((65, 9)),), attrs={"shape": (65, 1)})


def _exact_to(rng: np.random.Generator) -> Iterable[Sample]:
    for name, small, big in _PAIRS:
        yield Sample(name=name, inputs=(rng.integers(-99, 100, small).astype(float),), attrs={"shape": big})


def _exact_sum(rng: np.random.Generator) -> Iterable[Sample]:
    for name, small, big in _PAIRS:
        yield Sample(name=name, inputs=(rng.integers(-99, 100, big).astype(float),), attrs={"shape": small})


ROWS = (
    OpSpec(
        name="broadcast_to",
        inputs=("x",),
        outputs=("y",),
        infer=_infer_to,
        oracle=_oracle_to,
        vjp=_vjp_to,
        flops=lambda t, a: 0,
        samples=_samples_to,
        exact=_exact_to,
    ),
    OpSpec(
        name="sum_to",
        inputs=("x",),
        outputs=("y",),
        infer=_infer_sum,
        oracle=_oracle_sum,
        vjp=_vjp_sum,
        flops=lambda t, a: t[0].size,
        samples=_samples_sum,
        exact=_exact_sum,
        bound=_bound_sum,
    ),
)
