"""Scaled dot-product attention with grouped key heads, causal, windowed and per document. Vaswani et al. 2017 (arXiv:1706.03762), section
3.2.1; grouped heads: Ainslie et al. 2023 (arXiv:2305.13245); backward from o and lse: Dao 2023 (arXiv:2307.08691), section 3.1.2.

Query i of T stands at place i + S - T among the S keys (bottom-right aligned), so a decoded suffix sees all that came before it.
It sees key j iff
  causal:     j <= i + S - T
  window w>0: (i + S - T) - j < w
  documents:  documents_q[b,i] == documents_k[b,j]
and all of these hold that are asked for. A row that sees no key gives o = 0 and lse = -inf.
lse = log(sum(exp(scale * q.k))) over the keys seen; it is kept for the backward pass and takes no cotangent.

Legend: B batch, T queries, S keys, H query heads, G key heads (G divides H; query head h reads key head h // (H//G)), D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from alpha.ops.numerics import ACCUMULATE, growth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype, sole_cotangent
from alpha.types import Attrs, TensorType


def _check(op: str, q: TensorType, k: TensorType, v: TensorType, documents: Sequence[TensorType], attrs: Attrs) -> None:
    expect(len(q.shape) == 4 and len(k.shape) == 4, op, "q is [B,T,H,D] and k is [B,S,G,D]", f"{q} and {k}", "four axes each")
    expect(k == v, op, "k and v agree", f"{k} and {v}", "equal types")
    (b, t, h, d), (kb, s, g, kd) = q.shape, k.shape
    expect(b == kb and d == kd, op, "batch and head width of q and k agree", f"{q} and {k}", "equal B and D")
    expect(g > 0 and h % g == 0, op, "key heads divide query heads", f"H={h}, G={g}", "H a multiple of G")
    expect(q.size > 0 and k.size > 0, op, "q and k are not empty", f"{q} and {k}", "every axis >= 1")
    same_dtype(op, (q, k, v))
    expect(len(documents) in (0, 2), op, "documents of queries and keys come together", len(documents), "none or both")
    for got, n in zip(documents, (t, s)):
        expect(got == TensorType((b, n), "i32"), op, "one i32 document id per row", got, TensorType((b, n), "i32"))
    causal, window, scale = attrs["causal"], attrs["window"], attrs["scale"]
    expect(isinstance(causal, bool), op, "causal is a bool", causal, "True or False")
    expect(isinstance(window, int) and window >= 0, op, "window is an integer >= 0", window, "0 for none")
    expect(isinstance(scale, float) and scale > 0, op, "scale is a positive float", scale, "1/sqrt(D)")


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    q, k, v, *documents = types
    _check("attention", q, k, v, documents, attrs)
    return (q, TensorType((q.shape[0], q.shape[2], q.shape[1]), ACCUMULATE[q.dtype]))


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    do, q, k, v, o, lse, *documents = types
    _check("attention_bwd", q, k, v, documents, attrs)
    expect(do == q and o == q, "attention_bwd", "do, o and q agree", f"{do}, {o}, {q}", "equal types")
    expected = TensorType((q.shape[0], q.shape[2], q.shape[1]), ACCUMULATE[q.dtype])
    expect(lse == expected, "attention_bwd", "lse is [B,H,T]", lse, expected)
    return (q, k, v)


def visible_pairs(t: int, s: int, causal: bool, window: int) -> int:
    """Number of (query, key) pairs that causal and window leave; documents can only lower it."""
    place = np.arange(t, dtype=np.int64) + (s - t)
    last = np.minimum(place, s - 1) if causal else np.full(t, s - 1)
    first = np.maximum(place - window + 1, 0) if window else np.zeros(t, np.int64)
    return int(np.maximum(last - first + 1, 0).sum())


def _seen(t: int, s: int, documents: Sequence[np.ndarray], causal: bool, window: int) -> np.ndarray:
    """Bool [B or 1, 1, T, S]."""
    place = np.arange(t)[:, None] + (s - t)
    key = np.arange(s)[None, :]
    seen: np.ndarray = np.ones((1, 1, t, s), bool)
    if causal:
        seen = seen & (key <= place)
    if window:
        seen = seen & (place - key < window)
    if documents:
        seen = seen & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
    return seen


def _by_head(x: np.ndarray, heads: int) -> np.ndarray:
    """[B,S,G,D] -> [B,heads,S,D], each key head repeated for its query heads."""
    return x.transpose(0, 2, 1, 3)[:, np.arange(heads) // (heads // x.shape[2])]


def _oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, *documents: np.ndarray, causal: bool, window: int, scale: float) -> Arrays:
    t, h = q.shape[1], q.shape[2]
    scores = np.matmul(_by_head(q, h), _by_head(k, h).transpose(0, 1, 3, 2)) * scale
    scores = np.where(_seen(t, k.shape[1], documents, causal, window), scores, -np.inf)
    top = scores.max(-1)
    top = np.where(top == -np.inf, 0.0, top)
    p = np.exp(scores - top[..., None])
    total = p.sum(-1)
    divisor = np.where(total == 0, 1.0, total)
    o = np.matmul(p / divisor[..., None], _by_head(v, h))
    return o.transpose(0, 2, 1, 3), np.where(total == 0, -np.inf, top + np.log(divisor))


def _oracle_bwd(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, lse: np.ndarray, *documents: np.ndarray,
                causal: bool, window: int, scale: float) -> Arrays:
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    q_, k_, v_, do_ = _by_head(q, h), _by_head(k, h), _by_head(v, h), _by_head(do, h)
    lse = np.where(lse == -np.inf, np.inf, lse)  # a row that saw no key: every p is exp(-inf)
    scores = np.matmul(q_, k_.transpose(0, 1, 3, 2)) * scale - lse[..., None]
    p = np.exp(np.where(_seen(t, s, documents, causal, window), scores, -np.inf))
    delta = (do * o).sum(-1).transpose(0, 2, 1)
    ds = p * (np.matmul(do_, v_.transpose(0, 1, 3, 2)) - delta[..., None]) * scale
    dq = np.matmul(ds, k_)
    dk = np.matmul(ds.transpose(0, 1, 3, 2), q_).reshape(b, g, h // g, s, d).sum(2)
    dv = np.matmul(p.transpose(0, 1, 3, 2), do_).reshape(b, g, h // g, s, d).sum(2)
    return dq.transpose(0, 2, 1, 3), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def _vjp(emit: Emit, node: NodeLike, cotangents: Sequence[object]) -> Sequence[object]:
    q, k, v, *documents = node.inputs
    o, lse = node.outputs
    do = sole_cotangent("attention", cotangents)
    grads = emit("attention_bwd", do, q, k, v, o, lse, *documents, **node.attrs)  # type: ignore[arg-type]
    return (*grads, *(None for _ in documents))  # type: ignore[misc]


def _flops(types: Sequence[TensorType], attrs: Attrs) -> int:
    (b, t, h, d), s = types[0].shape, types[1].shape[1]
    return 4 * b * h * d * visible_pairs(t, s, bool(attrs["causal"]), int(attrs["window"]))  # type: ignore[call-overload]


def _flops_bwd(types: Sequence[TensorType], attrs: Attrs) -> int:
    return _flops(types[1:], attrs) * 5 // 2  # five matrix products where forward has two


def _case(rng: np.random.Generator, name: str, b: int, t: int, s: int, h: int, g: int, d: int, *documents: np.ndarray, causal: bool = True,
          window: int = 0, scale: float | None = None, q_scale: float = 1.0, wrt: tuple[int, ...] | None = None) -> Sample:
    q, k, v = rng.standard_normal((b, t, h, d)) * q_scale, rng.standard_normal((b, s, g, d)), rng.standard_normal((b, s, g, d))
    return Sample(name=name, inputs=(q, k, v, *(np.asarray(x, np.int32) for x in documents)),
                  attrs={"causal": causal, "window": window, "scale": d**-0.5 if scale is None else scale}, wrt=wrt)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    packed = np.array([[0] * 5 + [1] * 7 + [2], [0] * 1 + [3] * 11 + [4]])
    yield _case(rng, "one", 1, 1, 1, 1, 1, 1)
    yield _case(rng, "full", 2, 5, 11, 2, 2, 7, causal=False)
    yield _case(rng, "causal", 2, 13, 13, 2, 2, 8)
    yield _case(rng, "grouped", 1, 7, 7, 6, 2, 4)
    yield _case(rng, "one-key-head", 1, 7, 9, 3, 1, 5, causal=False, scale=1.0)
    yield _case(rng, "decode", 2, 1, 17, 2, 1, 8)
    yield _case(rng, "suffix", 1, 5, 13, 2, 2, 8)
    yield _case(rng, "more-queries-than-keys", 1, 13, 5, 2, 1, 8)  # the first 8 rows see nothing
    yield _case(rng, "block+1", 1, 65, 65, 1, 1, 8)
    yield _case(rng, "two-blocks+1", 1, 129, 129, 2, 1, 4)
    yield _case(rng, "window-1", 1, 9, 9, 2, 2, 8, window=1)
    yield _case(rng, "window-3", 2, 13, 13, 4, 2, 8, window=3)
    yield _case(rng, "window-wide", 1, 9, 9, 1, 1, 8, window=64)
    yield _case(rng, "window-blocks", 1, 150, 150, 1, 1, 4, window=20)
    yield _case(rng, "window-suffix", 1, 5, 13, 1, 1, 4, window=6)
    yield _case(rng, "window-not-causal", 1, 11, 11, 2, 2, 4, causal=False, window=4)
    yield _case(rng, "documents", 2, 13, 13, 4, 2, 8, packed, packed)
    yield _case(rng, "documents-window", 2, 13, 13, 2, 2, 4, packed, packed, window=4)
    yield _case(rng, "documents-not-causal", 2, 13, 13, 2, 1, 4, packed, packed, causal=False)
    yield _case(rng, "documents-unseen", 2, 3, 13, 2, 1, 4, np.array([[9, 2, 9], [4, 9, 3]]), packed)  # a document that no key has
    yield _case(rng, "heads-64", 2, 70, 70, 2, 1, 64)
    yield _case(rng, "heads-64-suffix", 1, 33, 77, 2, 2, 64, window=20)
    yield _case(rng, "heads-128", 1, 40, 40, 2, 1, 128, causal=False)
    yield _case(rng, "large", 2, 12, 12, 2, 1, 8, q_scale=1e4, wrt=())  # probabilities of 0 and 1: no slope to compare
    yield _case(rng, "steep", 1, 12, 12, 2, 2, 8, q_scale=60.0, wrt=())  # scores on both sides of where exp overflows f32
    below = _case(rng, "far-below", 1, 9, 9, 2, 1, 8, wrt=())  # every score near -120, where exp underflows f32
    yield replace(below, inputs=(below.inputs[0] + 10.0, below.inputs[1] * 0.1 - 4.0, below.inputs[2]))
    yield _case(rng, "tiny", 1, 12, 12, 1, 1, 8, q_scale=1e-20)
    same = np.full((1, 10, 2, 8), 0.3)
    yield Sample(name="all-equal", inputs=(same, same, rng.standard_normal(same.shape)), attrs={"causal": True, "window": 0, "scale": 0.25})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _samples(rng):
        if sample.name == "large":  # among the exact samples
            continue
        o, lse = _oracle(*sample.inputs, **sample.attrs)  # type: ignore[arg-type]
        q, k, v, *documents = sample.inputs
        yield Sample(name=sample.name, inputs=(rng.standard_normal(q.shape), q, k, v, o, lse, *documents), attrs=sample.attrs)


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-9, 9, shape).astype(float)
    for n in (1, 8, 32, 64):  # one-hot: the chosen key scores 1024, the others 0, and exp(-1024) is 0 in every type; lse = 1024
        pick = np.array([rng.integers(0, i + 1) for i in range(n)])
        q, k = np.eye(n)[pick][None, :, None, :], 1024.0 * np.eye(n)[None, :, None, :]
        yield Sample(name=f"one-hot-{n}", inputs=(q, k, whole(1, n, 1, n)), attrs={"causal": True, "window": 0, "scale": 1.0})
    for t, s, window in ((5, 8, 0), (1, 64, 0), (64, 64, 1), (3, 128, 4), (17, 256, 64)):
        # uniform over 2^n keys with every score 2^60: o is a sum of integers over 2^n, and lse = 2^60, which absorbs log(2^n) even in f64;
        # exp without the maximum taken off would overflow
        causal = window > 0
        q, k = np.zeros((2, t, 4, 4)), np.zeros((2, s, 2, 4))
        q[..., 0], k[..., 0] = 2.0**30, 2.0**30
        yield Sample(name=f"uniform-{t}x{s}-window-{window}", inputs=(q, k, whole(2, s, 2, 4)),
                     attrs={"causal": causal, "window": window, "scale": 1.0})
    documents = np.array([[0] * 4 + [1] * 2 + [2] * 8 + [3]], np.int32)
    q = np.zeros((1, 15, 2, 4))
    q[..., 1] = 2.0**30
    yield Sample(name="uniform-documents", inputs=(q, q, whole(1, 15, 2, 4), documents, documents),
                 attrs={"causal": False, "window": 0, "scale": 1.0})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(float)
    for t, s, causal, window in ((1, 1, True, 0), (7, 7, True, 0), (5, 9, True, 3), (66, 66, True, 0), (4, 6, False, 0)):
        # q and k are orthogonal, so every score is 0, and lse is given as 0, so every p is 1: the rest is products of integers
        q, k = whole(2, t, 4, 4), whole(2, s, 2, 4)
        q[..., 2:], k[..., :2] = 0.0, 0.0
        yield Sample(name=f"integers-{t}x{s}-{'causal' if causal else 'full'}-window-{window}",
                     inputs=(whole(2, t, 4, 4), q, k, whole(2, s, 2, 4), whole(2, t, 4, 4), np.zeros((2, 4, t))),
                     attrs={"causal": causal, "window": window, "scale": 0.5})
    for n in (1, 8, 32, 64):  # one-hot, as forward: p is 1 for the chosen key and exp(-1024) = 0 for the others
        pick = np.array([rng.integers(0, i + 1) for i in range(n)])
        q, k, v = np.eye(n)[pick][None, :, None, :], 1024.0 * np.eye(n)[None, :, None, :], whole(1, n, 1, n)
        yield Sample(name=f"one-hot-{n}", inputs=(whole(1, n, 1, n), q, k, v, whole(1, n, 1, n), np.full((1, 1, n), 1024.0)),
                     attrs={"causal": True, "window": 0, "scale": 1.0})


def _score_error(q_: np.ndarray, k_: np.ndarray, seen: np.ndarray, scale: float) -> np.ndarray:
    """Largest absolute error of a row's scores in u: a dot product of D terms, scaled, and turned to another base: [B,H,T,1]."""
    e = (growth(q_.shape[-1]) + 5) * scale * np.matmul(np.abs(q_), np.abs(k_).transpose(0, 1, 3, 2))
    return np.where(seen, e, 0.0).max(-1, keepdims=True)


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: p is off by R = 2 E + 8 relative (E the error of its score and of the row's maximum; exp up to 4 ulp), the sum of S of them by
    # R + growth(S), o by both and by growth(S) of its own sum; lse by the error of the maximum, of log(total) and two roundings
    q, k, v, *documents = x
    causal, window, scale = bool(attrs["causal"]), int(attrs["window"]), float(attrs["scale"])  # type: ignore[call-overload, arg-type]
    h = q.shape[2]
    seen = _seen(q.shape[1], k.shape[1], documents, causal, window)
    relative = 2 * _score_error(_by_head(q, h), _by_head(k, h), seen, scale) + 8
    o = _oracle(q, k, np.abs(v), *documents, causal=causal, window=window, scale=scale)[0]
    lse = _oracle(q, k, v, *documents, causal=causal, window=window, scale=scale)[1]
    grown = growth(k.shape[1])
    o_bound = (2 * relative + 2 * grown + 4).transpose(0, 2, 1, 3) * o
    return o_bound, np.where(np.isfinite(lse), relative[..., 0] + grown + 2 + np.abs(np.where(np.isfinite(lse), lse, 0.0)), 0.0)


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: p = exp(score - lse) is off by R = E + |lse| + 6 relative; dp and delta by growth(D) + 2 of their absolute sums; ds by both; the
    # last products by growth of their own sums
    do, q, k, v, o, lse, *documents = x
    causal, window, scale = bool(attrs["causal"]), int(attrs["window"]), float(attrs["scale"])  # type: ignore[call-overload, arg-type]
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    seen = _seen(t, s, documents, causal, window)
    q_, k_, v_, do_, o_ = (_by_head(a, h) for a in (q, k, v, do, o))
    finite = np.where(np.isfinite(lse), lse, 0.0)[..., None]
    p = np.exp(np.where(seen, np.matmul(q_, k_.transpose(0, 1, 3, 2)) * scale - finite, -np.inf))
    relative = _score_error(q_, k_, seen, scale) + np.abs(finite) + 6
    inner = np.matmul(np.abs(do_), np.abs(v_).transpose(0, 1, 3, 2)) + (np.abs(do_) * np.abs(o_)).sum(-1, keepdims=True)
    difference = np.abs(np.matmul(do_, v_.transpose(0, 1, 3, 2)) - (do_ * o_).sum(-1, keepdims=True))
    ds, ds_off = p * difference * scale, p * scale * ((relative + 4) * difference + (growth(d) + 2) * inner)

    def grouped(y: np.ndarray) -> np.ndarray:
        return y.reshape(b, g, h // g, s, d).sum(2).transpose(0, 2, 1, 3)
    dq = np.matmul(ds_off + (growth(s) + 1) * ds, np.abs(k_)).transpose(0, 2, 1, 3)
    dk = np.matmul((ds_off + (growth(t * h // g) + 1) * ds).transpose(0, 1, 3, 2), np.abs(q_))
    dv = np.matmul((p * (relative + growth(t * h // g) + 1)).transpose(0, 1, 3, 2), np.abs(do_))
    return dq, grouped(dk), grouped(dv)


ROWS = (
    OpSpec(name="attention", inputs=("q", "k", "v", "documents_q?", "documents_k?"), outputs=("o", "lse"), infer=_infer, oracle=_oracle,
           vjp=_vjp, flops=_flops, samples=_samples, exact=_exact, bound=_bound, undifferentiable=("documents_q", "documents_k", "lse"),
           kept={"lse": "accumulate"}),
    OpSpec(name="attention_bwd", inputs=("do", "q", "k", "v", "o", "lse", "documents_q?", "documents_k?"), outputs=("dq", "dk", "dv"),
           infer=_infer_bwd, oracle=_oracle_bwd, vjp=None, why_no_vjp="backward row", flops=_flops_bwd, samples=_samples_bwd,
           exact=_exact_bwd, bound=_bound_bwd, undifferentiable=("documents_q", "documents_k"), kept={"lse": "accumulate"}),
)
