"""The norm of a flat buffer over leaves: the sum of squares of each leaf, and the Euclidean norm of such sums.

A leaf is a fixed piece of the state that no cut over ranks splits (alpha/graph/state.py). So one process, and ranks that each sum their own
leaves and then gather them, add the same numbers in the same order, and their norms have the same bits.

The row update_scalars reads the whole gradient and sums by blocks. A GPU that holds it whole keeps that row. Where a rank holds a cut, each
leaf is a block of its own, or an empty one in place of another rank's; scalars_of_squares makes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import growth
from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType

Leaves = tuple[tuple[tuple[int, int], ...], ...]
"""Of each leaf, in order, the (offset, length) of its runs; what lies between them (padding) never enters."""

_WHY = "part of the update, which no gradient crosses"


def _leaves(attrs: Attrs) -> Leaves:
    return attrs["leaves"]  # type: ignore[return-value]


def _infer_sums(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    expect(len(x.shape) == 1 and x.dtype in ("f32", "f64"), "square_sums", "x is a flat f32 buffer", x, "f32[N]")
    leaves = _leaves(attrs)
    for leaf in leaves:
        for start, length in leaf:
            expect(start >= 0 and length >= 0 and start + length <= x.shape[0], "square_sums", "leaves lie inside the buffer",
                   (start, length), f"(offset, length) inside 0..{x.shape[0]}")
    return (TensorType((len(leaves),), x.dtype),)


def _oracle_sums(x: np.ndarray, *, leaves: Leaves) -> Arrays:
    found = [np.zeros(1)]
    for leaf in leaves:
        runs = [(x[start : start + length] * x[start : start + length]).sum().reshape(1) for start, length in leaf]
        found.append(np.concatenate(runs).sum().reshape(1) if runs else np.zeros(1))
    return (np.concatenate(found)[1:],)


def _infer_norm(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (sums,) = types
    expect(len(sums.shape) == 1 and sums.dtype in ("f32", "f64"), "norm_of_squares", "sums are a flat f32 buffer", sums, "f32[N]")
    return (TensorType((), sums.dtype),)


def _oracle_norm(sums: np.ndarray) -> Arrays:
    """Neighbours are added: (0,1), (2,3), ..., an odd one is carried, until one is left."""
    while len(sums) > 1:
        pairs = sums[: len(sums) // 2 * 2]
        sums = np.concatenate([pairs[0::2] + pairs[1::2], sums[len(pairs) :]])
    return (np.sqrt(sums[0]) if len(sums) else np.zeros(()),)


def _samples_sums(rng: np.random.Generator) -> Iterable[Sample]:
    for name, n, size, leaves in (
        ("one", 1, 1.0, (((0, 1),),)), ("runs", 200, 1.0, (((0, 7), (64, 13)), ((80, 3),), (), ((100, 61), (190, 10)))),
        ("padding", 100, 1.0, (((0, 7),), ((64, 13),))), ("many", 4096, 1.0, tuple(((64 * i, 64),) for i in range(64))),
        ("long", 98304, 1.0, (((0, 32768),), ((32769, 32700),), ((65536, 1), (65600, 32704)))),
        ("large", 33, 1e15, (((0, 33),),)), ("tiny", 33, 1e-15, (((0, 32),), ((32, 1),))),
    ):
        yield Sample(name=name, inputs=((rng.standard_normal(n) + (name == "padding")) * size,), attrs={"leaves": leaves})


def _exact_sums(rng: np.random.Generator) -> Iterable[Sample]:
    for name, n, leaves in (("small", 60, (((0, 7), (10, 20)), ((31, 29),))), ("none", 5, ()), ("empty", 5, ((), ((1, 0),), ((2, 2),)))):
        yield Sample(name=name, inputs=(rng.integers(-99, 100, n).astype(float),), attrs={"leaves": leaves})
    yield Sample(name="ones", inputs=(np.ones(70_000),), attrs={"leaves": (((0, 32768),), ((32768, 32768),), ((65537, 9),))})


def _bound_sums(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: squares 1, a run's sum growth(its length), one more for each further run; terms are positive
    leaves = _leaves(attrs)
    relative = [1 + len(leaf) + growth(max((n for _, n in leaf), default=0)) for leaf in leaves]
    return (_oracle_sums(x[0], leaves=leaves)[0] * np.array(relative),)


def _samples_norm(rng: np.random.Generator) -> Iterable[Sample]:
    for n in (1, 2, 7, 64, 1023, 4097, 70_001):
        yield Sample(name=str(n), inputs=(rng.random(n),))
    for name, size in (("large", 1e30), ("tiny", 1e-30)):
        yield Sample(name=name, inputs=(rng.random(33) * size,))


def _exact_norm(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="three-four-five", inputs=(np.array([9.0, 0.0, 16.0]),))
    yield Sample(name="none", inputs=(np.zeros(0),))
    yield Sample(name="ones", inputs=(np.ones(65536),))


def _bound_norm(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: the tree one per level; the root halves that and adds 1; terms are positive
    return (_oracle_norm(x[0])[0] * (len(x[0]).bit_length() / 2 + 1),)


def _elements(attrs: Attrs) -> int:
    return sum(n for leaf in _leaves(attrs) for _, n in leaf)


def _stretched(attrs: Attrs, k: int) -> Attrs:
    return {**attrs, "leaves": tuple(tuple((start * k, n * k) for start, n in leaf) for leaf in _leaves(attrs))}


ROWS = (
    OpSpec(name="square_sums", inputs=("x",), outputs=("sums",), infer=_infer_sums, oracle=_oracle_sums, vjp=None, why_no_vjp=_WHY,
           flops=lambda t, a: 2 * _elements(a), nbytes=lambda t, a: (_elements(a) + len(_leaves(a))) * (t[0].nbytes // max(1, t[0].size)),
           samples=_samples_sums, exact=_exact_sums, bound=_bound_sums, stretch=_stretched),
    OpSpec(name="norm_of_squares", inputs=("sums",), outputs=("norm",), infer=_infer_norm, oracle=_oracle_norm, vjp=None, why_no_vjp=_WHY,
           flops=lambda t, a: t[0].size, samples=_samples_norm, exact=_exact_norm, bound=_bound_norm),
)
