"""Attention that reads queries, keys and values from one packed tensor and writes their gradients into one: no copies in between.

qkv[B, T, (H + 2G) * D] holds H query heads, then G key heads, then G value heads; o is [B, T, H * D]. The rest is attention.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from alpha.ops.compose import derived
from alpha.ops.rope_packed import head_width
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, sole_cotangent
from alpha.ops.table import row
from alpha.types import Attrs


def _unpack(emit: Any, qkv: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    d = head_width("attention_packed", qkv.shape, heads, kv_heads)
    b, n, _ = qkv.shape
    q, k, v = emit("split", qkv, axis=2, sizes=(heads * d, kv_heads * d, kv_heads * d))
    return (emit("reshape", q, shape=(b, n, heads, d)), emit("reshape", k, shape=(b, n, kv_heads, d)),
            emit("reshape", v, shape=(b, n, kv_heads, d)))


def _compose(emit: Any, qkv: Any, *documents: Any, heads: int, kv_heads: int, causal: bool, window: int, scale: float) -> Any:
    q, k, v = _unpack(emit, qkv, heads, kv_heads)
    o, lse = emit("attention", q, k, v, *documents, causal=causal, window=window, scale=scale)
    b, n, h, d = q.shape
    return emit("reshape", o, shape=(b, n, h * d)), lse


def _compose_bwd(emit: Any, do: Any, qkv: Any, o: Any, lse: Any, *documents: Any, heads: int, kv_heads: int, causal: bool, window: int,
                 scale: float) -> Any:
    q, k, v = _unpack(emit, qkv, heads, kv_heads)
    do_BTHD, o_BTHD = emit("reshape", do, shape=tuple(q.shape)), emit("reshape", o, shape=tuple(q.shape))
    grads = emit("attention_bwd", do_BTHD, q, k, v, o_BTHD, lse, *documents, causal=causal, window=window, scale=scale)
    b, n, _ = qkv.shape
    return (emit("concat", *(emit("reshape", g, shape=(b, n, g.shape[2] * g.shape[3])) for g in grads), axis=2),)


def _vjp(emit: Emit, node: NodeLike, cotangents: Sequence[object]) -> Sequence[object]:
    qkv, *documents = node.inputs
    o, lse = node.outputs
    do = sole_cotangent("attention_packed", cotangents)
    grad = emit("attention_packed_bwd", do, qkv, o, lse, *documents, **node.attrs)  # type: ignore[arg-type]
    return (grad, *(None for _ in documents))


def _case(rng: np.random.Generator, name: str, b: int, t: int, h: int, g: int, d: int, *documents: np.ndarray, causal: bool = True,
          window: int = 0, scale: float | None = None, size: float = 1.0) -> Sample:
    return Sample(name=name, inputs=(rng.standard_normal((b, t, (h + 2 * g) * d)) * size, *(np.asarray(x, np.int32) for x in documents)),
                  attrs={"heads": h, "kv_heads": g, "causal": causal, "window": window, "scale": d**-0.5 if scale is None else scale})


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    packed = np.array([[0] * 30 + [1] * 35 + [2] * 12, [0] * 1 + [3] * 70 + [4] * 6])
    yield _case(rng, "one", 1, 1, 1, 1, 64)
    yield _case(rng, "small", 2, 5, 2, 1, 6)
    yield _case(rng, "causal", 2, 77, 2, 2, 64)
    yield _case(rng, "grouped", 1, 67, 6, 2, 64)
    yield _case(rng, "wide", 1, 131, 2, 1, 128)
    yield _case(rng, "full", 1, 33, 2, 2, 64, causal=False, scale=0.25)
    yield _case(rng, "window", 1, 150, 1, 1, 64, window=20)
    yield _case(rng, "documents", 2, 77, 2, 1, 64, packed, packed)
    yield _case(rng, "steep", 1, 40, 2, 2, 64, size=3.0)
    yield _case(rng, "tiny", 1, 12, 1, 1, 64, size=1e-10)


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _samples(rng):
        o, lse = row("attention_packed").oracle(*sample.inputs, **sample.attrs)
        qkv, *documents = sample.inputs
        yield Sample(name=sample.name, inputs=(rng.standard_normal(o.shape), qkv, o, lse, *documents), attrs=sample.attrs)


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for t, h, g, d in ((1, 1, 1, 64), (16, 2, 1, 64), (32, 2, 2, 128)):  # one-hot, as in attention.py: the chosen key scores 1024, others 0
        pick = np.array([rng.integers(0, i + 1) for i in range(t)])
        q, k = np.eye(d)[pick], 1024.0 * np.eye(d)[:t]
        v = rng.integers(-9, 9, (t, g * d)).astype(float)
        qkv = np.concatenate([np.tile(q, (1, h)), np.tile(k, (1, g)), v], axis=1)[None]
        yield Sample(name=f"one-hot-{t}", inputs=(qkv,), attrs={"heads": h, "kv_heads": g, "causal": True, "window": 0, "scale": 1.0})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _exact(rng):
        o, lse = row("attention_packed").oracle(*sample.inputs, **sample.attrs)
        yield Sample(name=sample.name, inputs=(rng.integers(-9, 9, o.shape).astype(float), *sample.inputs, o, lse), attrs=sample.attrs)


def _parts(qkv: np.ndarray, attrs: Attrs) -> tuple[Arrays, dict[str, object]]:
    heads, kv_heads = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    d, (b, n, _) = head_width("attention_packed", qkv.shape, heads, kv_heads), qkv.shape
    q, k, v = np.split(qkv, [heads * d, (heads + kv_heads) * d], axis=2)
    rest = {name: value for name, value in attrs.items() if name not in ("heads", "kv_heads")}
    return (q.reshape(b, n, heads, d), k.reshape(b, n, kv_heads, d), v.reshape(b, n, kv_heads, d)), rest


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    parts, rest = _parts(x[0], attrs)
    found = row("attention").bound
    assert found is not None
    o, lse = found((*parts, *x[1:]), rest)
    return np.asarray(o).reshape(*x[0].shape[:2], -1), lse


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    parts, rest = _parts(x[1], attrs)
    found = row("attention_bwd").bound
    assert found is not None
    shape = parts[0].shape
    grads = found((x[0].reshape(shape), *parts, x[2].reshape(shape), *x[3:]), rest)
    return (np.concatenate([np.asarray(g).reshape(*x[1].shape[:2], -1) for g in grads], axis=2),)


ROWS = (
    OpSpec(name="attention_packed", inputs=("qkv", "documents_q?", "documents_k?"), outputs=("o", "lse"), vjp=_vjp, samples=_samples,
           exact=_exact, bound=_bound, undifferentiable=("documents_q", "documents_k", "lse"), kept={"lse": "accumulate"},
           **derived(_compose)),
    OpSpec(name="attention_packed_bwd", inputs=("do", "qkv", "o", "lse", "documents_q?", "documents_k?"), outputs=("dqkv",), vjp=None,
           why_no_vjp="backward row", samples=_samples_bwd, exact=_exact_bwd, bound=_bound_bwd,
           undifferentiable=("documents_q", "documents_k"), kept={"lse": "accumulate"}, **derived(_compose_bwd)),
)
