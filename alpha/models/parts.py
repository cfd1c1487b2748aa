"""What both model families share: the loss head, packed query-key-value attention, decoding one position. Floor 5.

They call rows that read packed operands: heads stay in one tensor, gate and up in another, and the head goes with its loss in chunks of
rows. Every back end is given the same nodes; one without a kernel for a packed row runs its composition (alpha/passes/expand.py).

Legend of shape suffixes: B sequences, T tokens, C width, H heads, G key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from math import sqrt

from alpha.graph.ir import Value
from alpha.graph.state import Init
from alpha.graph.trace import Tracer

IGNORE = -1
"""Target id that carries no loss."""

CHUNK = 8192
"""Rows whose logits exist at a time: enough for the matrix product to fill the chip, 0.8 GB in bf16 at a vocabulary of 50,304."""


def linear(t: Tracer, name: str, x: Value, width_in: int, width_out: int, std: float, *, bias: bool) -> Value:
    """x[..., width_in] @ weight[width_out, width_in]^T (+ bias). Weights decay, biases do not."""
    weight = t.param(f"{name}.weight", (width_out, width_in), Init("normal", std), decay=True)
    if not bias:
        return t.matmul(x, weight, trans_b=True)
    return t.matmul(x, weight, t.param(f"{name}.bias", (width_out,), Init("zeros")), trans_b=True)


def attention(t: Tracer, qkv: Value, heads: int, kv_heads: int, head_width: int, *, window: int = 0, documents: Value | None = None,
              rope: tuple[Value, float | tuple[float, ...]] | None = None) -> Value:
    """Causal attention from packed qkv[B, T, (H + 2G) * D]; returns [B, T, H * D]. `rope`: (positions[B, T], base of the frequencies or
    the frequencies themselves), half layout."""
    masks = () if documents is None else (documents, documents)
    packed = {"heads": heads, "kv_heads": kv_heads}
    if rope is not None and isinstance(rope[1], tuple):
        qkv = t.rope_scaled(qkv, rope[0], **packed, frequencies=rope[1], inverse=False)
    elif rope is not None:
        qkv = t.rope_packed(qkv, rope[0], **packed, base=rope[1], layout="half", inverse=False)
    return t.attention_packed(qkv, *masks, **packed, causal=True, window=window, scale=1 / sqrt(head_width))[0]


def swiglu(t: Tracer, x: Value, width: int, hidden: int, std: float) -> Value:
    """silu(x gate^T) * (x up^T): [..., width] to [..., hidden]."""
    both = t.stacked(("mlp.gate.weight", "mlp.up.weight"), (hidden, width), Init("normal", std), decay=True)
    return t.swiglu_packed(t.matmul(x, both, trans_b=True))


def token_loss(t: Tracer, x_BTC: Value, head_VC: Value, targets_BT: Value, z_loss: float, *, training: bool) -> tuple[Value, Value]:
    """(sum of cross entropies in nats f32[], number of targets that are not IGNORE f32[])."""
    b, n, c = x_BTC.type.shape
    x, targets = t.reshape(x_BTC, shape=(b * n, c)), t.reshape(targets_BT, shape=(b * n,))
    attrs = {"ignore_index": IGNORE, "z_loss": z_loss, "chunk": CHUNK}
    if training:
        total = t.linear_cross_entropy_grad(x, head_VC, targets, **attrs)[0]
    else:
        total = t.linear_cross_entropy(x, head_VC, targets, **attrs)
    return total, t.count_valid(targets, ignore_index=IGNORE)


def next_logits(t: Tracer, x_BTC: Value, head_VC: Value, index_B: Value) -> Value:
    """Logits f32[B, V] of the token that follows position index[b]."""
    return t.matmul(t.take_row(x_BTC, index_B), head_VC, trans_b=True, wide=True)
