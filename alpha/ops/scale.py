"""Product with a constant known when the graph is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0].is_float, "scale", "x is a float tensor", types[0], "f64, f32 or bf16")
    expect(isinstance(attrs["factor"], (int, float)), "scale", "factor is a number", repr(attrs["factor"]), "int or float")
    return (types[0],)


def _oracle(x: np.ndarray, *, factor: float) -> Arrays:
    return (x * factor,)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("scale", dy[0], factor=node.attrs["factor"]),)  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, factor in (
        ("one", (1,), 0.3),
        ("ragged", (7, 13), -1.7),
        ("block-1", (8191,), 1 / 3),
        ("block+1", (8193,), 1e-4),
        ("blocks", (3, 43777), 0.7),
        ("large", (5, 3), 1e30),
        ("tiny", (5, 3), 1e-40),
        ("scalar", (), 2.0),
        ("int", (31,), 3),
    ):
        yield Sample(name=name, inputs=(rng.standard_normal(shape),), attrs={"factor": factor})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for factor in (0.125, -1.0, 0.0, 3.0):
        yield Sample(name=f"by{factor}", inputs=(rng.integers(-999, 1000, (3, 2731)).astype(float),), attrs={"factor": factor})


ROWS = (
    OpSpec(
        name="scale",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: t[0].size,
        samples=_samples,
        exact=_exact,
        # the kernel rounds the factor to the compute type first: off by u*|factor|, or by u*2^-126 where that is denormal
        bound=lambda x, a: (np.abs(x[0]) * max(abs(float(a["factor"])), 2.0**-126),),  # type: ignore[arg-type]
    ),
)
