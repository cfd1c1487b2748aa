"""Rotary position embedding. Su et al. 2021 (arXiv:2104.09864), equation 34: pair i of a head turns by position * base^(-2i/D).

`layout` says which entries form pair i: 'half' (i, i + D/2), as in Llama; 'interleaved' (2i, 2i + 1), as in the paper.
`inverse` turns back; a rotation's transpose is its inverse, so that is the vjp. Positions come with the data, so packed documents,
decoding and sequence shards need no new row. Legend: B batch, T time, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType

LAYOUTS = ("half", "interleaved")


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, positions = types
    expect(len(x.shape) == 4 and x.is_float and x.shape[-1] % 2 == 0, "rope", "x is a float [B,T,H,D] with D even", x, "f32[B,T,H,2n]")
    expect(positions == TensorType(x.shape[:2], "i32"), "rope", "one i32 position per row", positions, TensorType(x.shape[:2], "i32"))
    expect(attrs["layout"] in LAYOUTS, "rope", "layout is known", attrs["layout"], "'half' or 'interleaved'")
    expect(isinstance(attrs["base"], float) and attrs["base"] > 0, "rope", "base is a positive float", attrs["base"], "10000.0")
    return (x,)


def _pairs(x: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if layout == "half" else (x[..., 0::2], x[..., 1::2])


def _join(a: np.ndarray, b: np.ndarray, layout: str) -> np.ndarray:
    if layout == "half":
        return np.concatenate([a, b], axis=-1)
    return np.concatenate([a[..., None], b[..., None]], axis=-1).reshape(*a.shape[:-1], 2 * a.shape[-1])


def _turn(positions: np.ndarray, d: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    angle = positions[..., None, None] * base ** (-2.0 * np.arange(d // 2) / d)
    return np.cos(angle), np.sin(angle)


def _oracle(x: np.ndarray, positions: np.ndarray, *, base: float, layout: str, inverse: bool = False) -> Arrays:
    cos, sin = _turn(positions, x.shape[-1], base)
    sin = -sin if inverse else sin
    a, b = _pairs(x, layout)
    return (_join(a * cos - b * sin, b * cos + a * sin, layout),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    attrs = {**node.attrs, "inverse": not node.attrs.get("inverse", False)}
    return (emit("rope", dy[0], node.inputs[1], **attrs), None)  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    def count(b: int, t: int) -> np.ndarray:
        return np.tile(np.arange(t, dtype=np.int32), (b, 1))
    cases = [
        ("one", (1, 1, 1, 2), np.array([[3]], np.int32), 10000.0),
        ("ragged", (2, 7, 3, 10), count(2, 7), 10000.0),
        ("offsets", (3, 5, 2, 8), count(3, 5) + np.array([[0], [11], [70]], np.int32), 10000.0),
        ("packed", (1, 9, 1, 4), np.array([[0, 1, 2, 3, 0, 1, 0, 1, 2]], np.int32), 10000.0),
        ("far", (1, 3, 2, 6), np.array([[4095, 131071, 1000000]], np.int32), 500000.0),
        ("block+1", (1, 129, 2, 32), count(1, 129), 500000.0),
    ]
    for layout in LAYOUTS:
        for inverse in (False, True):
            for name, shape, positions, base in cases:
                yield Sample(name=f"{layout}-{'inverse-' if inverse else ''}{name}", inputs=(rng.standard_normal(shape), positions),
                             attrs={"base": base, "layout": layout, "inverse": inverse})
    yield Sample(name="half-large", inputs=(rng.standard_normal((1, 5, 1, 8)) * 1e20, count(1, 5)), attrs={"base": 100.0, "layout": "half"})
    yield Sample(name="half-all-equal", inputs=(np.ones((1, 5, 2, 8)), count(1, 5)), attrs={"base": 10000.0, "layout": "half"})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for layout in LAYOUTS:  # position 0 turns nothing
        yield Sample(name=f"{layout}-origin", inputs=(rng.standard_normal((2, 3, 2, 6)).astype(np.float32).astype(float),
                                                      np.zeros((2, 3), np.int32)),
                     attrs={"base": 10000.0, "layout": layout, "inverse": layout == "half"})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # cos and sin rounded (1 u each), products (1 u each), sum (1 u): 3 u of |a cos| + |b sin|
    cos, sin = (np.abs(t) for t in _turn(x[1], x[0].shape[-1], attrs["base"]))  # type: ignore[arg-type]
    a, b = _pairs(np.abs(x[0]), attrs["layout"])  # type: ignore[arg-type]
    return (3 * _join(a * cos + b * sin, b * cos + a * sin, attrs["layout"]),)  # type: ignore[arg-type]


ROWS = (
    OpSpec(name="rope", inputs=("x", "positions"), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp, flops=lambda t, a: 3 * t[0].size,
           samples=_samples, exact=_exact, bound=_bound, undifferentiable=("positions",)),
)
