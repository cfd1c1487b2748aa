"""Rotary position embedding of packed heads by frequencies that are given: pair i of a head turns by position * frequencies[i].

Otherwise `rope_packed` in the half layout: the H + G heads of queries and keys turn, the G value heads stay, and the vjp is the inverse.
For scaled frequencies, which are no power of one base (alpha/models/rotary.py). Legend as in rope_packed.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from alpha.ops.rope_packed import head_width
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _sizes(types: Sequence[TensorType], attrs: Attrs) -> tuple[int, int]:
    """(D, how many heads turn)."""
    heads, kv_heads = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    return head_width("rope_scaled", types[0].shape, heads, kv_heads), heads + kv_heads


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, positions = types
    d, frequencies = _sizes(types, attrs)[0], attrs["frequencies"]
    expect(x.is_float, "rope_scaled", "qkv is a float", x, "f32[B,T,(H+2G)*D]")
    expect(positions == TensorType(x.shape[:2], "i32"), "rope_scaled", "one i32 position per row", positions,
           TensorType(x.shape[:2], "i32"))
    good = isinstance(frequencies, tuple) and all(isinstance(f, float) and isfinite(f) for f in frequencies)
    expect(good and 2 * len(frequencies) == d, "rope_scaled",  # type: ignore[arg-type]
           "each pair has a frequency", frequencies, f"a tuple of {d // 2} floats, D = {d} being even")
    return (x,)


def _halves(x: np.ndarray, turning: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second of each pair, [B, T, H + G, D / 2] each."""
    pairs = x[..., : turning * d].reshape(*x.shape[:2], turning, 2, d // 2)
    return pairs[..., 0, :], pairs[..., 1, :]


def _turn(positions: np.ndarray, frequencies: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    angle = positions[..., None, None] * np.array(frequencies)
    return np.cos(angle), np.sin(angle)


def _oracle(qkv: np.ndarray, positions: np.ndarray, *, heads: int, kv_heads: int, frequencies: tuple[float, ...],
            inverse: bool = False) -> Arrays:
    turning, d = heads + kv_heads, 2 * len(frequencies)
    cos, sin = _turn(positions, frequencies)
    sin = -sin if inverse else sin
    a, b = _halves(qkv, turning, d)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(*qkv.shape[:2], turning * d)
    return (np.concatenate([turned, qkv[..., turning * d :]], axis=-1),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    attrs = {**node.attrs, "inverse": not node.attrs.get("inverse", False)}
    return (emit("rope_scaled", dy[0], node.inputs[1], **attrs), None)  # type: ignore[arg-type]


def _flops(types: Sequence[TensorType], attrs: Attrs) -> int:
    d, turning = _sizes(types, attrs)
    return 3 * turning * d * types[1].size


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    sizes = (("one", 1, 1, 1, 1, 2), ("grouped", 2, 7, 6, 2, 10), ("wide", 2, 19, 4, 2, 64), ("wide-128", 1, 9, 3, 3, 128))
    for name, b, t, h, g, d in sizes:
        for inverse in (False, True):
            positions = np.tile(np.arange(t, dtype=np.int32), (b, 1)) + np.arange(b, dtype=np.int32)[:, None] * 4000
            frequencies = tuple((10.0 ** rng.uniform(-6, 0, d // 2)).tolist())
            yield Sample(name=f"{name}{'-inverse' if inverse else ''}", inputs=(rng.standard_normal((b, t, (h + 2 * g) * d)), positions),
                         attrs={"heads": h, "kv_heads": g, "frequencies": frequencies, "inverse": inverse})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for what, position, frequencies in (("origin", 0, (1.0, 0.5)), ("still", 9, (0.0, 0.0))):
        yield Sample(name=what, inputs=(rng.integers(-99, 100, (2, 3, 8 * 4)).astype(float), np.full((2, 3), position, np.int32)),
                     attrs={"heads": 4, "kv_heads": 2, "frequencies": frequencies})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # as in rope: cos and sin rounded (1 u each), products (1 u each), sum (1 u): 3 u of |a cos| + |b sin|
    frequencies: tuple[float, ...] = attrs["frequencies"]  # type: ignore[assignment]
    d, turning = 2 * len(frequencies), int(attrs["heads"]) + int(attrs["kv_heads"])  # type: ignore[call-overload]
    cos, sin = (np.abs(t) for t in _turn(x[1], frequencies))
    a, b = _halves(np.abs(x[0]), turning, d)
    turned = np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1).reshape(*x[0].shape[:2], turning * d)
    return (3 * np.concatenate([turned, 0 * x[0][..., turning * d :]], axis=-1),)


ROWS = (
    OpSpec(name="rope_scaled", inputs=("qkv", "positions"), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp, flops=_flops,
           samples=_samples, exact=_exact, bound=_bound, undifferentiable=("positions",)),
)
