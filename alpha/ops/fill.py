"""A tensor of one value (zeros: value 0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import round_to
from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import FLOATS, NUMPY, Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(isinstance(attrs["value"], (int, float)), "fill", "value is a number", repr(attrs["value"]), "int or float")
    return (TensorType(tuple(attrs["shape"]), str(attrs["dtype"])),)  # type: ignore[arg-type]


def _oracle(*, shape: tuple[int, ...], value: float, dtype: str) -> Arrays:
    """The value rounded to `dtype`, in float64 for floats and in its own type for integers."""
    if dtype in FLOATS:
        return (np.full(shape, float(round_to(np.asarray(float(value)), dtype))),)
    return (np.full(shape, value, NUMPY[dtype]),)


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, value, dtype in (
        ("one", (1,), 1.0, "f32"),
        ("zeros", (7, 13), 0.0, "f32"),
        ("third", (3, 2731), 1 / 3, "f32"),
        ("bf16", (5,), 1 / 3, "bf16"),
        ("tiny", (8191,), 1e-40, "f32"),
        ("large", (8193,), -1e38, "f32"),
        ("blocks", (3, 43777), 0.7, "f32"),
        ("int", (31,), -7, "i32"),
        ("scalar", (), 2.5, "f32"),
        ("double", (5, 3), 0.1, "f64"),
    ):
        yield Sample(name=name, inputs=(), attrs={"shape": shape, "value": value, "dtype": dtype})


ROWS = (
    OpSpec(
        name="fill",
        inputs=(),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=None,
        why_no_vjp="has no inputs",
        flops=lambda t, a: 0,
        samples=_exact,
        exact=_exact,
    ),
)
