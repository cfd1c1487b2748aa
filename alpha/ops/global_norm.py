"""Euclidean norm over the listed segments of a flat gradient buffer; what lies between segments (padding) never enters.

Each segment is cut from its own start into blocks of 64K elements; the sums of squares of the blocks, in the order of the segments, are
added by a fixed binary tree: neighbours (0,1), (2,3), ..., an odd one is carried. So the order of additions depends on the segments alone.

A sum of squares that float32 does not hold is infinite, for kernels add there: the step is then as one whose gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import growth
from alpha.ops.spec import Arrays, OpSpec, Sample, expect, stretched
from alpha.types import Attrs, TensorType

BLOCK = 65536
LARGEST = float(np.finfo(np.float32).max)

Segments = tuple[tuple[int, int], ...]


def blocks(segments: Segments) -> list[tuple[int, int]]:
    """(start, stop) of every block, in order."""
    return [(at, min(at + BLOCK, start + length)) for start, length in segments for at in range(start, start + length, BLOCK)]


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (grads,) = types
    expect(len(grads.shape) == 1 and grads.dtype in ("f32", "f64"), "global_norm", "grads are a flat f32 buffer", grads, "f32[N]")
    segments: Segments = attrs["segments"]  # type: ignore[assignment]
    for start, length in segments:
        expect(start >= 0 and length >= 0 and start + length <= grads.shape[0], "global_norm", "segments lie inside the buffer",
               (start, length), f"(offset, length) inside 0..{grads.shape[0]}")
    return (TensorType((), grads.dtype),)


def _oracle(grads: np.ndarray, *, segments: Segments) -> Arrays:
    parts = [(grads[start:stop] * grads[start:stop]).sum() for start, stop in blocks(segments)]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    held = np.float64(parts[0]) <= LARGEST if parts else True
    return (np.sqrt(parts[0] if held else parts[0] + parts[0].dtype.type(np.inf)) if parts else np.zeros(()),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="one", inputs=(rng.standard_normal(1),), attrs={"segments": ((0, 1),)})
    yield Sample(name="padding", inputs=(rng.standard_normal(100) + 1,), attrs={"segments": ((0, 7), (64, 13), (80, 3))})
    yield Sample(name="blocks", inputs=(rng.standard_normal(3 * BLOCK),),
                 attrs={"segments": ((0, BLOCK + 1), (BLOCK + 64, BLOCK), (2 * BLOCK + 99, 11))})
    yield Sample(name="large", inputs=(rng.standard_normal(33) * 1e15,), attrs={"segments": ((0, 33),)})
    yield Sample(name="tiny", inputs=(rng.standard_normal(33) * 1e-15,), attrs={"segments": ((0, 32), (32, 1))})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="three-four-five", inputs=(np.array([3.0, 100.0, 4.0, 0.0]),), attrs={"segments": ((0, 1), (2, 2))})
    yield Sample(name="none", inputs=(np.arange(5.0),), attrs={"segments": ()})
    yield Sample(name="zero", inputs=(np.zeros(300),), attrs={"segments": ((1, 250),)})
    yield Sample(name="overflows", inputs=(np.array([3e25, 0.0, -4e25]),), attrs={"segments": ((0, 3),)})
    yield Sample(name="ones", inputs=(np.ones(4 * BLOCK + 7),), attrs={"segments": ((0, 2 * BLOCK - 5), (2 * BLOCK, 2 * BLOCK + 5))})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: squares 1, a block's sum growth(its length), the tree one per level; the root halves that and adds 1; terms are positive
    cut = blocks(attrs["segments"])  # type: ignore[arg-type]
    relative = 2 + growth(max((stop - start for start, stop in cut), default=0)) + len(cut).bit_length()
    return (_oracle(x[0], segments=attrs["segments"])[0] * (relative / 2 + 1),)  # type: ignore[arg-type]


def _elements(attrs: Attrs) -> int:
    return sum(length for _, length in attrs["segments"])  # type: ignore[attr-defined]


ROWS = (
    OpSpec(name="global_norm", inputs=("grads",), outputs=("norm",), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="part of the update, which no gradient crosses", flops=lambda t, a: 2 * _elements(a),
           nbytes=lambda t, a: _elements(a) * (t[0].nbytes // max(1, t[0].size)), samples=_samples, exact=_exact, bound=_bound,
           stretch=stretched),
)
