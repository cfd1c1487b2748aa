"""Sum of two tensors, NumPy broadcasting of either side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from alpha.ops.broadcast_to import broadcast_shape
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype
from alpha.types import Attrs, TensorType

PAIRS = (  # name, shape of a, shape of b
    ("one", (1,), (1,)),
    ("same", (7, 13), (7, 13)),
    ("row", (7, 13), (13,)),
    ("row-left", (13,), (5, 13)),
    ("column", (11, 5), (11, 1)),
    ("both", (5, 1, 3), (7, 1)),
    ("scalar", (), (3, 4)),
    ("block-1", (8191,), (8191,)),
    ("block+1", (3, 2731), (3, 2731)),
    ("bias", (65, 257), (257,)),
    ("plane", (3, 67, 33), (67, 33)),
    ("blocks", (3, 43777), (3, 43777)),
    ("bias-blocks", (1031, 67), (67,)),
)
"""Shape pairs that every broadcasting binary op is tested with."""


def infer_binary(op: str, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Shape rule of a broadcasting binary op."""
    expect(all(t.is_float for t in types), op, "operands are floats", ", ".join(map(str, types)), "f64, f32 or bf16")
    dtype = same_dtype(op, types)
    return (TensorType(broadcast_shape(op, types[0], types[1]), dtype),)


def sum_to(emit: Emit, cotangent: object, like: TensorType, shape: tuple[int, ...]) -> object:
    """The cotangent of an operand that was broadcast from `like` to `shape`."""
    return cotangent if like.shape == shape else emit("sum_to", cotangent, shape=like.shape)  # type: ignore[arg-type]


def samples_binary(rng: np.random.Generator, scale: float) -> Iterable[Sample]:
    """Shapes of PAIRS, then contents: all equal, large, tiny (denormal in f32)."""
    for name, a, b in PAIRS:
        yield Sample(name=name, inputs=(rng.standard_normal(a), rng.standard_normal(b)))
    yield Sample(name="equal", inputs=(np.full((5, 7), 0.1), np.full((5, 7), 0.1)))
    yield Sample(name="large", inputs=(scale * rng.standard_normal((5, 7)), scale * rng.standard_normal((5, 7))))
    yield Sample(name="tiny", inputs=(rng.standard_normal((5, 7)) / scale, rng.standard_normal((5, 7)) / scale))


def exact_binary(rng: np.random.Generator) -> Iterable[Sample]:
    """Integers below 2^10: sums and products are exact."""
    for name, a, b in PAIRS:
        yield Sample(name=name, inputs=(rng.integers(-999, 1000, a).astype(float), rng.integers(-999, 1000, b).astype(float)))


def _oracle(a: np.ndarray, b: np.ndarray) -> Arrays:
    return (a + b,)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    shape = node.outputs[0].type.shape
    return tuple(sum_to(emit, dy[0], x.type, shape) for x in node.inputs)


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return infer_binary("add", types)


ROWS = (
    OpSpec(
        name="add",
        inputs=("a", "b"),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: prod(_infer(t, a)[0].shape),
        samples=lambda rng: samples_binary(rng, 1e37),
        exact=exact_binary,
    ),
)
