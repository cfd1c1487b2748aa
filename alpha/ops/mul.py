"""Elementwise product of two tensors, NumPy broadcasting of either side."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from alpha.ops.add import exact_binary, infer_binary, samples_binary, sum_to
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return infer_binary("mul", types)


def _oracle(a: np.ndarray, b: np.ndarray) -> Arrays:
    return (a * b,)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    a, b = node.inputs
    shape = node.outputs[0].type.shape
    return (sum_to(emit, emit("mul", dy[0], b), a.type, shape), sum_to(emit, emit("mul", dy[0], a), b.type, shape))  # type: ignore[arg-type]


ROWS = (
    OpSpec(
        name="mul",
        inputs=("a", "b"),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: prod(_infer(t, a)[0].shape),
        samples=lambda rng: samples_binary(rng, 1e18),
        exact=exact_binary,
    ),
)
