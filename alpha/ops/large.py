"""Calls of rows at the sizes of a model, where a sequential walk is out of reach: how they are drawn and what may be wrong. Floor 1.

Matrix products: the whole result by random projections (Freivalds: C r against A (B r) for r of random signs, in float64), and whole
rows, chosen by the generator, the first and the last among them, against the oracle. Attention: every element, against the oracle.

Tolerances are derived. An element is allowed half an output ulp, and six times the root of the sum of the squares of the roundings that
enter it (independent errors: exceeded with probability 1e-9 for each): u of every probability or score gradient that is rounded to
bf16, and `growth(K)` of u of fp32 times the mean size of the terms for sums in fp32. An error is the worst over its tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from alpha.ops.numerics import UNIT_ROUNDOFF, growth, round_to

U16, U32 = UNIT_ROUNDOFF["bf16"], UNIT_ROUNDOFF["f32"]
VECTORS = 4
ROWS_LOOKED_AT = 24

Drawn = tuple[list[tuple[np.ndarray, str]], dict[str, object]]
"""(operands with their types, attributes)."""

Arrays = Sequence[np.ndarray]


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers, representable in bf16, as float32."""
    bits = rng.standard_normal(shape, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def _worst(error: np.ndarray, allowed: np.ndarray) -> float:
    """Largest error over what is allowed; infinite when anything is not finite."""
    ratio = error / np.maximum(allowed, 1e-30)
    return float(ratio.max()) if np.isfinite(ratio).all() else float("inf")


def draw_product(m: int, n: int, k: int, ta: bool, tb: bool, wide: bool, rng: np.random.Generator) -> Drawn:
    """Operands of a `matmul` of M x N x K: transposed or not, into fp32 (`wide`) or bf16."""
    a, b = _draw(rng, *((k, m) if ta else (m, k))), _draw(rng, *((n, k) if tb else (k, n)))
    attrs: dict[str, object] = {"trans_a": ta, "trans_b": tb}
    return [(a, "bf16"), (b, "bf16")], attrs | ({"wide": True} if wide else {})


def product_error(rng: np.random.Generator, inputs: Arrays, attrs: dict[str, object], outs: Arrays) -> tuple[float, int]:
    """(worst error of a `matmul` over its tolerance, elements looked at)."""
    (a, b), (c,) = inputs, outs
    left, right = (a.T if attrs["trans_a"] else a), (b.T if attrs["trans_b"] else b)
    (m, k), n = left.shape, right.shape[1]
    out = U32 if attrs.get("wide") else U16
    sums = growth(k) * U32 * k * float(np.abs(a[:64]).mean() * np.abs(b[:64]).mean())
    r = rng.integers(0, 2, (n, VECTORS)).astype(np.float32) * 2 - 1
    got = _product(c, r)
    want = _product(left, _product(right, r))
    spread = 6 * np.sqrt(np.square(out * c, dtype=np.float64).sum(1) / 3 + n * sums**2 / 9)
    worst = _worst(np.abs(got - want), np.repeat(spread[:, None], VECTORS, 1))
    rows = np.unique([0, m - 1, *rng.integers(0, m, ROWS_LOOKED_AT)])
    exact = left[rows].astype(np.float64) @ right.astype(np.float64)
    worst = max(worst, _worst(np.abs(c[rows] - exact), out * 1.01 * np.abs(exact) + sums))
    return worst, VECTORS * m + rows.size * n


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x @ y in float64, a block of rows at a time: a converted copy of a large x would not stay in a cache."""
    y = np.asarray(y, np.float64)
    return np.concatenate([x[i : i + 256].astype(np.float64) @ y for i in range(0, x.shape[0], 256)])


Heads = tuple[int, int, int, int, int, int, bool, int]
"""B, T, S, H, G, D, causal, window."""


def draw_attention(shape: Heads, documents: Sequence[int], rng: np.random.Generator) -> Drawn:
    """q, k, v as [B,T,H,D], ids of documents of queries and keys where lengths of `documents` are given, and attributes."""
    b, t, s, h, g, d, causal, window = shape
    heads = [(_draw(rng, b, t, h, d), "bf16"), (_draw(rng, b, s, g, d), "bf16"), (_draw(rng, b, s, g, d), "bf16")]
    ids = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
    both = [(np.tile(ids, (b, 1)), "i32")] * 2 if ids.size else []
    return [*heads, *both], {"causal": causal, "window": window, "scale": float(d**-0.5)}


def draw_attention_bwd(shape: Heads, documents: Sequence[int], rng: np.random.Generator) -> Drawn:
    """do, q, k, v, o, lse and the ids: o and lse are those of the oracle, o rounded."""
    heads, attrs = draw_attention(shape, documents, rng)
    (q, _), (k, _), (v, _), *ids = heads
    do, o = _draw(rng, *q.shape), np.zeros(q.shape, np.float32)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    seen = _seen(q, k, [x for x, _ in ids], attrs)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            q1, k1, v1 = (_head(x, b, h, q.shape[2]) for x in (q, k, v))
            p, lse[b, h] = _probabilities(q1, k1, seen, float(attrs["scale"]))  # type: ignore[arg-type]
            o[b, :, h] = round_to(p @ v1, "bf16")
    return [(do, "bf16"), *heads[:3], (o, "bf16"), (lse, "f32"), *ids], attrs


def _seen(q: np.ndarray, k: np.ndarray, ids: Arrays, attrs: dict[str, object]) -> np.ndarray:
    """Which keys are seen [T,S]; the documents of every row of the batch are alike."""
    t, s, window = q.shape[1], k.shape[1], int(attrs["window"])  # type: ignore[call-overload]
    place, key = np.arange(t)[:, None] + (s - t), np.arange(s)[None, :]
    seen = np.ones((t, s), bool)
    seen &= (key <= place) if attrs["causal"] else True
    seen &= (place - key < window) if window else True
    return seen & (ids[0][0][:, None] == ids[1][0]) if ids else seen


def _head(x: np.ndarray, b: int, h: int, heads: int) -> np.ndarray:
    """[S,D] in float64 of query head h: its key head where x has fewer heads."""
    return np.asarray(x[b, :, h // (heads // x.shape[2])], np.float64)


def _probabilities(q: np.ndarray, k: np.ndarray, seen: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    scores = np.where(seen, q @ k.T * scale, -np.inf)
    top = scores.max(1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(1, keepdims=True)
    return p / total, (top + np.log(total))[:, 0]


def _spread(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Six standard deviations of weights @ values when each weight is rounded to bf16, and what sums in fp32 add."""
    return 6 * np.sqrt(np.square(U16 * weights) @ np.square(values)) + growth(weights.shape[1]) * U32 * (np.abs(weights) @ np.abs(values))


def attention_error(rng: np.random.Generator, inputs: Arrays, attrs: dict[str, object], outs: Arrays) -> tuple[float, int]:
    """(worst error of o and lse over its tolerance, elements looked at)."""
    (q, k, v, *ids), (o, lse) = inputs, outs
    seen, scale = _seen(q, k, ids, attrs), float(attrs["scale"])  # type: ignore[arg-type]
    worst, heads = 0.0, q.shape[2]
    for b in range(q.shape[0]):
        for h in range(heads):
            value = _head(v, b, h, heads)
            p, want = _probabilities(_head(q, b, h, heads), _head(k, b, h, heads), seen, scale)
            exact = p @ value
            worst = max(worst, _worst(np.abs(o[b, :, h] - exact), U16 * 1.01 * np.abs(exact) + _spread(p, value) + 1e-6))
            worst = max(worst, _worst(np.abs(lse[b, h] - want), 32 * U32 * (1 + np.abs(want))))
    return worst, o.size + lse.size


def attention_bwd_error(rng: np.random.Generator, inputs: Arrays, attrs: dict[str, object], outs: Arrays) -> tuple[float, int]:
    """(worst error of dq, dk and dv over its tolerance, elements looked at)."""
    (do, q, k, v, o, lse, *ids), (dq, dk, dv) = inputs, outs
    seen, scale = _seen(q, k, ids, attrs), float(attrs["scale"])  # type: ignore[arg-type]
    worst, heads, groups = 0.0, q.shape[2], k.shape[2]
    for b in range(q.shape[0]):
        want = {x: np.zeros((groups, k.shape[1], k.shape[3])) for x in ("dk", "dv", "dk allowed", "dv allowed")}
        for h in range(heads):
            g = h // (heads // groups)
            q1, k1, v1, do1, o1 = (_head(x, b, h, heads) for x in (q, k, v, do, o))
            p = np.exp(np.where(seen, q1 @ k1.T * scale, -np.inf) - lse[b, h].astype(np.float64)[:, None])
            ds = p * (do1 @ v1.T - (do1 * o1).sum(1)[:, None])
            exact = ds @ k1 * scale
            worst = max(worst, _worst(np.abs(dq[b, :, h] - exact), U16 * 1.01 * np.abs(exact) + scale * _spread(ds, k1) + 1e-5))
            want["dk"][g] += ds.T @ q1 * scale
            want["dv"][g] += p.T @ do1
            want["dk allowed"][g] += scale * _spread(ds.T, q1)
            want["dv allowed"][g] += _spread(p.T, do1)
        for x, got in (("dk", dk), ("dv", dv)):
            exact, allowed = want[x].transpose(1, 0, 2), want[f"{x} allowed"].transpose(1, 0, 2)
            worst = max(worst, _worst(np.abs(got[b] - exact), U16 * 1.01 * np.abs(exact) + allowed + 1e-5))
    return worst, sum(prod(x.shape) for x in (dq, dk, dv))
