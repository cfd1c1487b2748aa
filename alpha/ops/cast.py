"""Change of float type, rounding to nearest even; f64 goes to bf16 by way of f32, as the hardware's conversion does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import round_to
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import FLOATS, Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0].is_float, "cast", "x is a float tensor", types[0], ", ".join(FLOATS))
    expect(attrs["dtype"] in FLOATS, "cast", "the target is a float type", attrs["dtype"], ", ".join(FLOATS))
    return (TensorType(types[0].shape, str(attrs["dtype"])),)


def _oracle(x: np.ndarray, *, dtype: str) -> Arrays:
    return (round_to(x, dtype),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("cast", dy[0], dtype=node.inputs[0].type.dtype),)  # type: ignore[arg-type]


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    """A cast is one rounding, so every result is exact: ties to even, carries, denormals, both zeros."""
    ties = (np.arange(64) * 0x8000 + 0x3F800000).astype(np.uint32).view(np.float32).astype(np.float64)
    near = np.concatenate(
        [
            ties,
            -ties,
            np.nextafter(ties.astype(np.float32), np.float32(0)).astype(np.float64),
            np.nextafter(ties.astype(np.float32), np.float32(9)).astype(np.float64),
        ]
    )
    edges = np.array([0.0, -0.0, 1e-40, -1e-45, 1.17549435e-38, 3.38e38, -3.38e38, 1.9999999])
    for dtype in FLOATS:
        wrt: tuple[int, ...] | None = None if dtype == "f64" else ()  # a rounded result is a staircase: no finite differences
        yield Sample(name=f"{dtype}-ties", inputs=(near,), attrs={"dtype": dtype}, wrt=wrt)
        yield Sample(name=f"{dtype}-edges", inputs=(edges,), attrs={"dtype": dtype}, wrt=wrt)
        for name, shape in (("one", (1,)), ("ragged", (7, 13)), ("block-1", (8191,)), ("blocks", (3, 43777)), ("scalar", ())):
            yield Sample(name=f"{dtype}-{name}", inputs=(rng.standard_normal(shape),), attrs={"dtype": dtype}, wrt=wrt)


ROWS = (
    OpSpec(
        name="cast",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: 0,
        samples=_exact,
        exact=_exact,
    ),
)
