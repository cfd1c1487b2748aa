"""Product with one number that lies on the device, such as the cotangent of a loss. The number has the accumulation type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import ACCUMULATE
from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, factor = types
    expect(x.is_float, "scale_by", "x is a float tensor", x, "f64, f32 or bf16")
    expect(factor == TensorType((), ACCUMULATE[x.dtype]), "scale_by", "factor is a scalar of the accumulation type", factor,
           TensorType((), ACCUMULATE[x.dtype]))
    return (x,)


def _oracle(x: np.ndarray, factor: np.ndarray) -> Arrays:
    return (x * factor,)


_SHAPES = (("one", (1,)), ("ragged", (7, 13)), ("eights", (67, 136)), ("block+1", (8193,)), ("scalar", ()))


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape in _SHAPES:
        yield Sample(name=name, inputs=(rng.standard_normal(shape), np.array(rng.standard_normal())))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape in _SHAPES:
        yield Sample(name=name, inputs=(rng.integers(-99, 100, shape).astype(float), np.array(-0.25)))


ROWS = (
    OpSpec(name="scale_by", inputs=("x", "factor"), outputs=("y",), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="emitted by vjps alone", flops=lambda t, a: t[0].size, samples=_samples, exact=_exact,
           kept={"factor": "accumulate"}),
)
