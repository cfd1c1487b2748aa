"""Attention on packed heads on the CPU: the kernels of attention.py on views of the packed tensor, so that nothing is copied.

Legend: B batch, T tokens, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.kernels.attention import LONGEST, attention, attention_bwd
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope, Limit
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"), limits=(
    Limit(text=f"sequences of at most {LONGEST} tokens", holds=lambda types, attrs: types[0].shape[1] <= LONGEST),))


def _heads(packed: np.ndarray, attrs: Attrs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views [B,T,H,D], [B,T,G,D] and [B,T,G,D] of packed [B, T, (H + 2G) * D]."""
    h, g = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    b, t, width = packed.shape
    every = packed.reshape(b, t, h + 2 * g, width // (h + 2 * g))
    return every[:, :, :h], every[:, :, h : h + g], every[:, :, h + g :]


def attention_packed(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """o[B, T, H * D] and lse of the heads in qkv."""
    q, k, v = _heads(ins[0], attrs)
    return attention(cpu, [q, k, v, *ins[1:]], [outs[0].reshape(q.shape), outs[1]], attrs)


def attention_packed_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dqkv, each gradient written where its heads lie."""
    do, qkv, o, lse, *documents = ins
    q, k, v = _heads(qkv, attrs)
    return attention_bwd(cpu, [do.reshape(q.shape), q, k, v, o.reshape(q.shape), lse, *documents], _heads(outs[0], attrs), attrs)


KERNELS = (
    Component(id="attention_packed.f32.cpu", kind="kernel", backend="cpu", op="attention_packed", implementation=attention_packed,
              envelope=_ENVELOPE),
    Component(id="attention_packed_bwd.f32.cpu", kind="kernel", backend="cpu", op="attention_packed_bwd",
              implementation=attention_packed_bwd, envelope=_ENVELOPE),
)
