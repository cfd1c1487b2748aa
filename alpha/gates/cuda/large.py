"""Parity of GPU kernels at the sizes of a model, where a sequential walk is out of reach. Floor 7.

Matrix products: the whole result by random projections (Freivalds: C r against A (B r) for r of random signs, in float64), and whole
rows, chosen by the nonce, the first and the last among them, against the oracle. Attention: every element against the oracle in float64.

Tolerances are derived. An element is allowed half an output ulp, and six times the root of the sum of the squares of the roundings that
enter it (independent errors: exceeded with probability 1e-9 for each): u of every probability or score gradient that is rounded to
bf16, and `growth(K)` of u of fp32 times the mean size of the terms for sums in fp32. An entry's error is the worst over its tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from alpha.component import Component
from alpha.gates.cuda.sizes import ATTENTIONS, DOCUMENTS, GEMMS, large_names
from alpha.gates.cuda.subjects import CudaBound
from alpha.gates.subjects import crash, generator, short, spec_of
from alpha.ops.numerics import UNIT_ROUNDOFF, growth, round_to
from alpha.types import Attrs, TensorType

U16, U32 = UNIT_ROUNDOFF["bf16"], UNIT_ROUNDOFF["f32"]
VECTORS = 4
ROWS = 24


def entries(component: Component, nonce: str) -> list[dict[str, object]]:
    """Run every large case; one entry each."""
    found: list[dict[str, object]] = []
    for name in large_names(component):
        try:
            error, cases = MAKES[component.op or ""](component, name.removeprefix("large:"), generator(nonce, component.id, name))
            found.append({"name": name, "kind": "contract", "error": short(error, 3), "bound": 1.0, "cases": cases})
        except Exception as problem:  # a kernel that raises inside its envelope
            found.append({"name": name, "kind": "contract", "error": float("inf"), "bound": 1.0, "cases": 1, "note": crash(problem)})
    return found


def _run(component: Component, inputs: list[np.ndarray], dtypes: list[str], attrs: Attrs) -> list[np.ndarray]:
    """Outputs of one call on fresh poisoned buffers; GraphError if a guard was hit."""
    types = [TensorType(x.shape, d) for x, d in zip(inputs, dtypes)]
    why = component.envelope.why_outside(types, attrs)
    assert why is None, why
    bound = CudaBound(component, types, spec_of(component).infer(types, attrs), attrs)
    bound.fill(inputs)
    bound.run()
    return bound.outs


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers, representable in bf16, as float32."""
    bits = rng.standard_normal(shape, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def _worst(error: np.ndarray, allowed: np.ndarray) -> float:
    """Largest error over what is allowed; infinite when anything is not finite."""
    ratio = error / np.maximum(allowed, 1e-30)
    return float(ratio.max()) if np.isfinite(ratio).all() else float("inf")


def _gemm(component: Component, name: str, rng: np.random.Generator) -> tuple[float, int]:
    m, n, k, ta, tb, wide = GEMMS[name]
    a, b = _draw(rng, *((k, m) if ta else (m, k))), _draw(rng, *((n, k) if tb else (k, n)))
    attrs = {"trans_a": ta, "trans_b": tb} | ({"wide": True} if wide else {})
    (c,) = _run(component, [a, b], ["bf16", "bf16"], attrs)
    out = U32 if wide else U16
    left, right = (a.T if ta else a), (b.T if tb else b)
    sums = growth(k) * U32 * k * float(np.abs(a[:64]).mean() * np.abs(b[:64]).mean())
    r = rng.integers(0, 2, (n, VECTORS)).astype(np.float32) * 2 - 1
    got = _product(c, r)
    want = _product(left, _product(right, r))
    spread = 6 * np.sqrt(np.square(out * c, dtype=np.float64).sum(1) / 3 + n * sums**2 / 9)
    worst = _worst(np.abs(got - want), np.repeat(spread[:, None], VECTORS, 1))
    rows = np.unique([0, m - 1, *rng.integers(0, m, ROWS)])
    exact = left[rows].astype(np.float64) @ right.astype(np.float64)
    worst = max(worst, _worst(np.abs(c[rows] - exact), out * 1.01 * np.abs(exact) + sums))
    return worst, VECTORS * m + rows.size * n


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x @ y in float64, a block of rows at a time: a converted copy of a large x would not stay in a cache."""
    y = np.asarray(y, np.float64)
    return np.concatenate([x[i : i + 256].astype(np.float64) @ y for i in range(0, x.shape[0], 256)])


def _inputs(name: str, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, object], np.ndarray]:
    """q, k, v as [B,T,H,D], ids of documents of queries and keys (none, or both), attributes, and which keys are seen [T,S]."""
    b, t, s, h, g, d, causal, window = ATTENTIONS[name]
    q, k, v = _draw(rng, b, t, h, d), _draw(rng, b, s, g, d), _draw(rng, b, s, g, d)
    place, key = np.arange(t)[:, None] + (s - t), np.arange(s)[None, :]
    seen = np.ones((t, s), bool)
    seen &= (key <= place) if causal else True
    seen &= (place - key < window) if window else True
    ids = np.repeat(np.arange(len(DOCUMENTS.get(name, ())), dtype=np.int32), DOCUMENTS.get(name, ()))
    seen &= (ids[:, None] == ids) if ids.size else True
    both = [np.tile(ids, (b, 1))] * 2 if ids.size else []
    return [q, k, v], both, {"causal": causal, "window": window, "scale": float(d**-0.5)}, seen


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


def _attention(component: Component, name: str, rng: np.random.Generator) -> tuple[float, int]:
    (q, k, v), ids, attrs, seen = _inputs(name, rng)
    o, lse = _run(component, [q, k, v, *ids], ["bf16"] * 3 + ["i32"] * len(ids), attrs)
    worst, heads = 0.0, q.shape[2]
    for b in range(q.shape[0]):
        for h in range(heads):
            value = _head(v, b, h, heads)
            p, want = _probabilities(_head(q, b, h, heads), _head(k, b, h, heads), seen, float(attrs["scale"]))  # type: ignore[arg-type]
            exact = p @ value
            worst = max(worst, _worst(np.abs(o[b, :, h] - exact), U16 * 1.01 * np.abs(exact) + _spread(p, value) + 1e-6))
            worst = max(worst, _worst(np.abs(lse[b, h] - want), 32 * U32 * (1 + np.abs(want))))
    return worst, o.size + lse.size


def _attention_bwd(component: Component, name: str, rng: np.random.Generator) -> tuple[float, int]:
    (q, k, v), ids, attrs, seen = _inputs(name, rng)
    scale, heads, groups = float(attrs["scale"]), q.shape[2], k.shape[2]  # type: ignore[arg-type]
    do, o = _draw(rng, *q.shape), np.zeros(q.shape, np.float32)
    lse = np.zeros((q.shape[0], heads, q.shape[1]), np.float32)
    for b in range(q.shape[0]):
        for h in range(heads):
            p, lse[b, h] = _probabilities(_head(q, b, h, heads), _head(k, b, h, heads), seen, scale)
            o[b, :, h] = round_to(p @ _head(v, b, h, heads), "bf16")
    dq, dk, dv = _run(component, [do, q, k, v, o, lse, *ids], ["bf16"] * 5 + ["f32"] + ["i32"] * len(ids), attrs)
    worst = 0.0
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


MAKES: Mapping[str, Callable[[Component, str, np.random.Generator], tuple[float, int]]] = {
    "matmul": _gemm,
    "attention": _attention,
    "attention_bwd": _attention_bwd,
}
"""Row -> (component, case, generator) -> (worst error over its tolerance, elements looked at); names in cuda_sizes.LARGE."""
