"""into + x, in the memory of `into` where the planner allows it: gradient accumulation. A buffer in the accumulation type may also take an
x in the compute type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import ACCUMULATE
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    into, x = types
    expect(
        into.is_float and x.is_float and into.shape == x.shape and into.dtype in (x.dtype, ACCUMULATE[x.dtype]) and into.dtype != "bf16",
        "accumulate",
        "into and x are floats of one shape, into in the type that x is summed in",
        f"{into} and {x}",
        "f32[..] and f32[..], or f32[..] and bf16[..]",
    )
    return (into,)


def _oracle(into: np.ndarray, x: np.ndarray) -> Arrays:
    return (into + x,)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    into, x = node.inputs
    return (dy[0], dy[0] if into.type.dtype == x.type.dtype else emit("cast", dy[0], dtype=x.type.dtype))  # type: ignore[arg-type]


_SHAPES = (("one", (1,)), ("ragged", (7, 13)), ("block-1", (8191,)), ("block+1", (3, 2731)), ("prime", (31, 37, 3)), ("blocks", (3, 43777)))


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape in _SHAPES:
        yield Sample(name=name, inputs=(rng.standard_normal(shape), rng.standard_normal(shape)))
    yield Sample(name="equal", inputs=(np.full(33, 0.1), np.full(33, 0.1)))
    yield Sample(name="large", inputs=(1e38 * np.ones(7), rng.standard_normal(7)))
    yield Sample(name="tiny", inputs=(1e-40 * rng.standard_normal(7), 1e-40 * rng.standard_normal(7)))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape in _SHAPES:
        yield Sample(
            name=name, inputs=(rng.integers(-999, 1000, shape).astype(float), rng.integers(-999, 1000, shape).astype(float))
        )


ROWS = (
    OpSpec(
        name="accumulate",
        inputs=("into", "x"),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: t[0].size,
        samples=_samples,
        exact=_exact,
        kept={"into": "accumulate", "y": "accumulate"},
    ),
)
