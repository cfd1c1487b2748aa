"""Largest element over axes, and its backward.

Elements that tie for the maximum share the cotangent equally: a subgradient, and symmetric, so that no order matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype
from alpha.ops.sum import CASES, exact_reduction, infer_reduction, kept_shape, samples_reduction
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return infer_reduction("max", types, attrs)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dy, x, y = types
    same_dtype("max_bwd", types)
    expected = infer_reduction("max", (x,), attrs)[0]
    expect(
        dy == expected and y == expected, "max_bwd", "dy and y have the shape of max(x)", f"dy {dy}, y {y}", f"{expected} both"
    )
    return (x,)


def _oracle(x: np.ndarray, *, axis: object = None, keepdims: bool = False) -> Arrays:
    return (np.max(x, axis=axis, keepdims=keepdims),)  # type: ignore[call-overload]


def _oracle_bwd(dy: np.ndarray, x: np.ndarray, y: np.ndarray, *, axis: object = None, keepdims: bool = False) -> Arrays:
    attrs = {"axis": axis, "keepdims": keepdims}
    kept = kept_shape("max_bwd", TensorType(x.shape, "f64"), attrs)
    hit = np.where(x == y.reshape(kept), 1.0, 0.0)
    ties = np.sum(hit, axis=axis, keepdims=True)  # type: ignore[call-overload]
    return (hit * (dy.reshape(kept) / ties),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("max_bwd", dy[0], node.inputs[0], node.outputs[0], **node.attrs),)  # type: ignore[arg-type]


def _bwd(x: np.ndarray, attrs: dict[str, object], dy: np.ndarray, name: str) -> Sample:
    y = _oracle(x, **attrs)[0]  # type: ignore[arg-type]
    return Sample(name=name, inputs=(np.resize(dy, y.shape), x, y), attrs=attrs)


def _apart(sample: Sample, rng: np.random.Generator) -> Sample:
    """The sample with as many values of its scale, evenly spaced and shuffled: where two values tie there is no derivative to compare."""
    x = sample.inputs[0]
    if sample.wrt == ():  # no derivative is asked for
        return sample
    return replace(sample, inputs=(np.abs(x).max() * ((2 * rng.permutation(x.size) + 1) / x.size - 1).reshape(x.shape),))


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    yield from (_apart(sample, rng) for sample in samples_reduction(rng))
    yield Sample(name="negative", inputs=(-1 - rng.random((5, 7)),), attrs={"axis": 1, "keepdims": False})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, axis, kept in CASES:
        # values of few bits: the same in every type, so that x == y survives rounding; some tie, some do not
        x = (
            rng.integers(-6, 7, shape).astype(float)
            if name in ("rows", "columns", "middle")
            else rng.integers(-64, 65, shape) / 4.0
        )
        yield _bwd(x, {"axis": axis, "keepdims": kept}, rng.standard_normal(x.size), name)
    yield _bwd(np.full((7, 6), 0.5), {"axis": 1, "keepdims": False}, rng.standard_normal(7), "equal")
    yield _bwd(np.arange(30.0).reshape(5, 6), {"axis": 0, "keepdims": True}, 1e-40 * rng.standard_normal(6), "tiny")


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, axis, kept in CASES:
        x = rng.permutation(int(np.prod(shape))).reshape(shape).astype(float)
        yield _bwd(x, {"axis": axis, "keepdims": kept}, rng.integers(-99, 100, x.size).astype(float), name)
    yield _bwd(np.full((7, 8), 0.5), {"axis": 1, "keepdims": False}, rng.integers(-99, 100, 7).astype(float), "ties")


ROWS = (
    OpSpec(
        name="max",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: t[0].size,
        samples=_samples,
        exact=exact_reduction,
    ),
    OpSpec(
        name="max_bwd",
        inputs=("dy", "x", "y"),
        outputs=("dx",),
        infer=_infer_bwd,
        oracle=_oracle_bwd,
        vjp=None,
        why_no_vjp="backward row",
        flops=lambda t, a: 3 * t[1].size,
        samples=_samples_bwd,
        exact=_exact_bwd,
    ),
)
