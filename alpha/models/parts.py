"""What both model families share: the loss head, packed query-key-value attention, decoding one position. Floor 5.

Legend of shape suffixes: B sequences, T tokens, C width, H heads, G key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from math import sqrt

from alpha.graph.ir import Value
from alpha.graph.state import Init
from alpha.graph.trace import Tracer

IGNORE = -1
"""Target id that carries no loss."""


def linear(t: Tracer, name: str, x: Value, width_in: int, width_out: int, std: float, *, bias: bool) -> Value:
    """x[..., width_in] @ weight[width_out, width_in]^T (+ bias). Weights decay, biases do not."""
    weight = t.param(f"{name}.weight", (width_out, width_in), Init("normal", std), decay=True)
    if not bias:
        return t.matmul(x, weight, trans_b=True)
    return t.matmul(x, weight, t.param(f"{name}.bias", (width_out,), Init("zeros")), trans_b=True)


def attention(t: Tracer, qkv: Value, heads: int, kv_heads: int, head_width: int, *, window: int = 0, documents: Value | None = None,
              rope: tuple[Value, float] | None = None) -> Value:
    """Causal attention from packed qkv[B, T, (H + 2G) * D]; returns [B, T, H * D]. `rope`: (positions[B, T], base), half layout."""
    b, n, _ = qkv.type.shape
    q, k, v = t.split(qkv, axis=2, sizes=(heads * head_width, kv_heads * head_width, kv_heads * head_width))
    q_BTHD = t.reshape(q, shape=(b, n, heads, head_width))
    k_BTGD = t.reshape(k, shape=(b, n, kv_heads, head_width))
    v_BTGD = t.reshape(v, shape=(b, n, kv_heads, head_width))
    if rope is not None:
        positions, base = rope
        q_BTHD = t.rope(q_BTHD, positions, base=base, layout="half", inverse=False)
        k_BTGD = t.rope(k_BTGD, positions, base=base, layout="half", inverse=False)
    masks = () if documents is None else (documents, documents)
    o_BTHD, _ = t.attention(q_BTHD, k_BTGD, v_BTGD, *masks, causal=True, window=window, scale=1 / sqrt(head_width))
    return t.reshape(o_BTHD, shape=(b, n, heads * head_width))


def token_loss(t: Tracer, x_BTC: Value, head_VC: Value, targets_BT: Value, z_loss: float) -> tuple[Value, Value]:
    """(sum of cross entropies in nats f32[], number of targets that are not IGNORE f32[])."""
    b, n, c = x_BTC.type.shape
    logits = t.matmul(t.reshape(x_BTC, shape=(b * n, c)), head_VC, trans_b=True)
    targets = t.reshape(targets_BT, shape=(b * n,))
    loss, _ = t.cross_entropy(logits, targets, ignore_index=IGNORE, z_loss=z_loss)
    return t.sum(loss, axis=(0,), keepdims=False), t.count_valid(targets, ignore_index=IGNORE)


def next_logits(t: Tracer, x_BTC: Value, head_VC: Value, index_B: Value) -> Value:
    """Logits [B, V] of the token that follows position index[b]."""
    return t.matmul(t.take_row(x_BTC, index_B), head_VC, trans_b=True)
