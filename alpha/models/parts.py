"""What both model families share: the loss head, packed query-key-value attention, decoding one position. Floor 5.

In bf16 they call rows that read packed operands, as the GPU's kernels do: heads stay in one tensor, gate and up in another, and the head
goes with its loss in chunks of rows. The CPU has no such kernels and gains nothing from them, so in f32 the parts stay apart.

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
"""Rows whose logits exist at a time in bf16: enough for the matrix product to fill the chip, 0.8 GB at a vocabulary of 50,304."""


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
    masks = () if documents is None else (documents, documents)
    sees = {"causal": True, "window": window, "scale": 1 / sqrt(head_width)}
    if t.precision == "bf16":
        packed = {"heads": heads, "kv_heads": kv_heads}
        if rope is not None:
            qkv = t.rope_packed(qkv, rope[0], **packed, base=rope[1], layout="half", inverse=False)
        return t.attention_packed(qkv, *masks, **packed, **sees)[0]
    q, k, v = t.split(qkv, axis=2, sizes=(heads * head_width, kv_heads * head_width, kv_heads * head_width))
    q_BTHD = t.reshape(q, shape=(b, n, heads, head_width))
    k_BTGD = t.reshape(k, shape=(b, n, kv_heads, head_width))
    v_BTGD = t.reshape(v, shape=(b, n, kv_heads, head_width))
    if rope is not None:
        positions, base = rope
        q_BTHD = t.rope(q_BTHD, positions, base=base, layout="half", inverse=False)
        k_BTGD = t.rope(k_BTGD, positions, base=base, layout="half", inverse=False)
    o_BTHD, _ = t.attention(q_BTHD, k_BTGD, v_BTGD, *masks, **sees)
    return t.reshape(o_BTHD, shape=(b, n, heads * head_width))


def swiglu(t: Tracer, x: Value, width: int, hidden: int, std: float) -> Value:
    """silu(x gate^T) * (x up^T): [..., width] to [..., hidden]."""
    if t.precision == "bf16":
        both = t.stacked(("mlp.gate.weight", "mlp.up.weight"), (hidden, width), Init("normal", std), decay=True)
        return t.swiglu_packed(t.matmul(x, both, trans_b=True))
    gate = linear(t, "mlp.gate", x, width, hidden, std, bias=False)
    up = linear(t, "mlp.up", x, width, hidden, std, bias=False)
    return t.swiglu(gate, up)


def token_loss(t: Tracer, x_BTC: Value, head_VC: Value, targets_BT: Value, z_loss: float, *, training: bool) -> tuple[Value, Value]:
    """(sum of cross entropies in nats f32[], number of targets that are not IGNORE f32[])."""
    b, n, c = x_BTC.type.shape
    x = t.reshape(x_BTC, shape=(b * n, c))
    if t.precision == "bf16":
        targets, attrs = t.reshape(targets_BT, shape=(b * n,)), {"ignore_index": IGNORE, "z_loss": z_loss, "chunk": CHUNK}
        if training:
            total = t.linear_cross_entropy_grad(x, head_VC, targets, **attrs)[0]
        else:
            total = t.linear_cross_entropy(x, head_VC, targets, **attrs)
        return total, t.count_valid(targets, ignore_index=IGNORE)
    logits = t.matmul(x, head_VC, trans_b=True)
    targets = t.reshape(targets_BT, shape=(b * n,))
    loss, _ = t.cross_entropy(logits, targets, ignore_index=IGNORE, z_loss=z_loss)
    return t.sum(loss, axis=(0,), keepdims=False), t.count_valid(targets, ignore_index=IGNORE)


def next_logits(t: Tracer, x_BTC: Value, head_VC: Value, index_B: Value) -> Value:
    """Logits f32[B, V] of the token that follows position index[b]."""
    wide = {"wide": True} if t.precision == "bf16" else {}
    return t.matmul(t.take_row(x_BTC, index_B), head_VC, trans_b=True, **wide)
