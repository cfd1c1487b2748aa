"""Tensors at places of one flat array, zeros between them: a view, no kernel runs. The bucket of gradients of Li et al. 2020, "PyTorch
Distributed" (arXiv:2006.15704), section 3.2.3, whose memory is the unit's part of the gradient buffer itself.

A plan puts every operand where it lies in the bucket, so what lies between them keeps what memory holds there: padding that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    offsets: tuple[int, ...] = attrs["offsets"]  # type: ignore[assignment]
    size: int = attrs["size"]  # type: ignore[assignment]
    expect(len(types) > 0 and len(types) == len(offsets), "bucket", "every operand has an offset", f"{len(types)} and {len(offsets)}",
           "as many offsets as operands, at least one")
    expect(len({t.dtype for t in types}) == 1, "bucket", "operands share one dtype", ", ".join(map(str, types)), "one dtype")
    end = 0
    for offset, t in zip(offsets, types):
        expect(offset >= end, "bucket", "operands lie in order and apart", f"{t} at {offset}", f"an offset from {end}")
        end = offset + t.size
    expect(end <= size, "bucket", "operands lie inside", end, f"at most {size} elements")
    return (TensorType((size,), types[0].dtype),)


def _oracle(*x: np.ndarray, offsets: tuple[int, ...], size: int) -> Arrays:
    y = np.zeros(size, x[0].dtype)
    for offset, part in zip(offsets, x, strict=True):
        y[offset : offset + part.size] = part.reshape(-1)
    return (y,)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shapes, offsets, size in (("one", ((1,),), (0,), 1), ("padding", ((3, 5), (), (7,)), (0, 64, 128), 192),
                                        ("late", ((31,),), (5,), 64)):
        yield Sample(name=name, inputs=tuple(rng.integers(-999, 1000, s).astype(float) for s in shapes),
                     attrs={"offsets": offsets, "size": size})


ROWS = (
    OpSpec(name="bucket", inputs=("*x",), outputs=("y",), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="holds gradients, which no gradient crosses", flops=lambda t, a: 0, nbytes=lambda t, a: 0, samples=_samples,
           exact=_samples, view=True),
)
