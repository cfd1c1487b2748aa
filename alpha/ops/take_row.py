"""One position of each sequence, y[b] = x[b, index[b]] (the last token of a prompt), and its backward, zero elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, index = types
    expect(len(x.shape) == 3 and x.is_float, "take_row", "x is a float [B, T, C]", x, "f32[B,T,C]")
    expect(index == TensorType(x.shape[:1], "i32"), "take_row", "index has one i32 per sequence", index, f"i32[{x.shape[0]}]")
    return (TensorType((x.shape[0], x.shape[2]), x.dtype),)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dy, index = types
    expect(len(dy.shape) == 2 and dy.is_float, "take_row_bwd", "dy is a float [B, C]", dy, "f32[B,C]")
    expect(
        index == TensorType(dy.shape[:1], "i32"), "take_row_bwd", "index has one i32 per sequence", index, f"i32[{dy.shape[0]}]"
    )
    return (TensorType((dy.shape[0], int(attrs["rows"]), dy.shape[1]), dy.dtype),)  # type: ignore[call-overload]


def _oracle(x: np.ndarray, index: np.ndarray) -> Arrays:
    return (x[np.arange(x.shape[0]), index],)


def _oracle_bwd(dy: np.ndarray, index: np.ndarray, *, rows: int) -> Arrays:
    hit = np.arange(rows)[None, :, None] == index[:, None, None]
    return (np.where(hit, dy[:, None, :], 0.0),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    x, index = node.inputs
    return (emit("take_row_bwd", dy[0], index, rows=x.type.shape[1]), None)  # type: ignore[arg-type]


_CASES = (("one", 1, 1, 1), ("ragged", 7, 5, 13), ("prime", 31, 17, 67), ("eights", 5, 9, 72), ("one-row", 3, 1, 8))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, c in _CASES:
        index = rng.integers(0, t, b).astype(np.int32)
        index[:2] = (0, t - 1)[: index[:2].size]
        yield Sample(name=name, inputs=(rng.integers(-999, 1000, (b, t, c)).astype(float), index))


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, c in _CASES:
        index = rng.integers(0, t, b).astype(np.int32)
        index[:2] = (0, t - 1)[: index[:2].size]
        yield Sample(name=name, inputs=(rng.integers(-999, 1000, (b, c)).astype(float), index), attrs={"rows": t})


ROWS = (
    OpSpec(
        name="take_row",
        inputs=("x", "index"),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: 0,
        nbytes=lambda t, a: 2 * _infer(t, a)[0].nbytes + t[1].nbytes,
        samples=_exact,
        exact=_exact,
        undifferentiable=("index",),
    ),
    OpSpec(
        name="take_row_bwd",
        inputs=("dy", "index"),
        outputs=("dx",),
        infer=_infer_bwd,
        oracle=_oracle_bwd,
        vjp=None,
        why_no_vjp="backward row",
        flops=lambda t, a: 0,
        samples=_exact_bwd,
        exact=_exact_bwd,
        undifferentiable=("index",),
    ),
)
