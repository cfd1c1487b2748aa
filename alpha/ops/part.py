"""A part of a flat array, from an offset on, in a shape of its own: a view, no kernel runs. So what is gathered into one buffer is read
where it lies, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import ITEMSIZE, Attrs, TensorType

ALIGNED = 256
"""Bytes: operands of kernels begin at multiples of it."""


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), offset = types, attrs["offset"]
    shape: tuple[int, ...] = tuple(attrs["shape"])  # type: ignore[arg-type]
    expect(len(x.shape) == 1, "part", "a part is of a flat array", x, "one axis")
    expect(type(offset) is int and offset >= 0 and offset * ITEMSIZE[x.dtype] % ALIGNED == 0, "part",
           f"a part begins at a multiple of {ALIGNED} bytes", offset, f"a multiple of {ALIGNED // ITEMSIZE[x.dtype]} elements, from 0")
    expect(all(type(n) is int and n >= 0 for n in shape), "part", "a shape is of sizes", shape, "integers from 0")
    expect(offset + prod(shape) <= x.size, "part", "a part lies inside", f"{list(shape)} at {offset}",  # type: ignore[operator]
           f"at most {x.size} elements")
    return (TensorType(shape, x.dtype),)


def _oracle(x: np.ndarray, *, offset: int, shape: tuple[int, ...]) -> Arrays:
    return (x[offset : offset + prod(shape)].reshape(shape),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, n, offset, shape in (("all", 35, 0, (5, 7)), ("behind", 192, 128, (3, 21)), ("scalar", 65, 64, ()), ("none", 64, 64, (0, 3))):
        yield Sample(name=name, inputs=(rng.integers(-999, 1000, n).astype(float),), attrs={"offset": offset, "shape": shape})


ROWS = (
    OpSpec(name="part", inputs=("x",), outputs=("y",), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="passes cut gathered buffers behind differentiation; the gradients of parts are a bucket", flops=lambda t, a: 0,
           nbytes=lambda t, a: 0, samples=_samples, exact=_samples, view=True),
)
