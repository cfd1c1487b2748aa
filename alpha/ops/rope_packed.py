"""Rotary position embedding of packed query, key and value heads, [B, T, (H + 2G) * D]: the H + G heads of queries and keys turn, the G
value heads stay. Its vjp is its inverse. Legend as in rope.py; H query heads, G key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from alpha.ops.compose import derived
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.ops.table import row
from alpha.types import Attrs


def head_width(op: str, shape: Sequence[int], heads: int, kv_heads: int) -> int:
    """D of packed [B, T, (H + 2G) * D]; ShapeError where the heads do not divide the last axis."""
    expect(len(shape) == 3 and heads > 0 and kv_heads > 0 and shape[2] % (heads + 2 * kv_heads) == 0, op,
           "qkv is [B,T,(H+2G)*D]", f"{list(shape)}, heads {heads}, kv_heads {kv_heads}", "a last axis that H + 2G divides")
    return shape[2] // (heads + 2 * kv_heads)


def _compose(emit: Any, qkv: Any, positions: Any, *, heads: int, kv_heads: int, base: float, layout: str, inverse: bool = False) -> Any:
    d = head_width("rope_packed", qkv.shape, heads, kv_heads)
    (b, n, _), turning = qkv.shape, heads + kv_heads
    x, v = emit("split", qkv, axis=2, sizes=(turning * d, kv_heads * d))
    x = emit("rope", emit("reshape", x, shape=(b, n, turning, d)), positions, base=base, layout=layout, inverse=inverse)
    return (emit("concat", emit("reshape", x, shape=(b, n, turning * d)), v, axis=2),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    attrs = {**node.attrs, "inverse": not node.attrs.get("inverse", False)}
    return (emit("rope_packed", dy[0], node.inputs[1], **attrs), None)  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    sizes = (("one", 1, 1, 1, 1, 2), ("grouped", 2, 7, 6, 2, 10), ("wide", 2, 19, 4, 2, 64), ("wide-128", 1, 9, 3, 3, 128))
    for name, b, t, h, g, d in sizes:
        for layout in ("half", "interleaved"):
            positions = np.tile(np.arange(t, dtype=np.int32), (b, 1)) + np.arange(b, dtype=np.int32)[:, None]
            yield Sample(name=f"{name}-{layout}", inputs=(rng.standard_normal((b, t, (h + 2 * g) * d)), positions),
                         attrs={"heads": h, "kv_heads": g, "base": 10000.0, "layout": layout, "inverse": name == "wide"})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for layout in ("half", "interleaved"):  # position 0 turns nothing
        yield Sample(name=f"{layout}-origin", inputs=(rng.integers(-99, 100, (2, 3, 8 * 64)).astype(float), np.zeros((2, 3), np.int32)),
                     attrs={"heads": 4, "kv_heads": 2, "base": 10000.0, "layout": layout, "inverse": layout == "half"})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    heads, kv_heads = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    d, (b, n, _) = head_width("rope_packed", x[0].shape, heads, kv_heads), x[0].shape
    turned = (heads + kv_heads) * d
    found = row("rope").bound
    assert found is not None
    own = found((x[0][..., :turned].reshape(b, n, heads + kv_heads, d), x[1]), attrs)[0]
    return (np.concatenate([np.asarray(own).reshape(b, n, turned), np.zeros((b, n, kv_heads * d))], axis=2),)


ROWS = (
    OpSpec(name="rope_packed", inputs=("qkv", "positions"), outputs=("y",), vjp=_vjp, samples=_samples, exact=_exact, bound=_bound,
           undifferentiable=("positions",), **derived(_compose)),
)
