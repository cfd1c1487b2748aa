"""The sizes of a model at which parity looks at kernels of the GPU (cuda_large.py). Floor 7.

Between them and the row's samples every compiled file that a component may load is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.ops.numerics import round_to
from alpha.types import Table, TensorType

Shape = tuple[int, int, int, bool, bool, bool]
GEMMS: Mapping[str, Shape] = {  # M, N, K, a transposed, b transposed, fp32 result
    f"{kind}-{'T' if ta else 'N'}{'T' if tb else 'N'}{'-wide' if wide else ''}": (m, n, k, ta, tb, wide)
    for kind, m, n, k in (("split-few", 264, 200, 4136), ("split", 1032, 1096, 4104), ("broad", 72, 65608, 72))
    for ta in (False, True) for tb in (False, True) for wide in (False, True)
} | {
    "forward": (8192, 3072, 768, False, True, False),
    "input-gradient": (16384, 768, 768, False, False, False),
    "weight-gradient": (768, 2304, 16384, True, False, True),
    "input-gradient-wide": (16384, 768, 768, False, False, True),
}
ATTENTIONS: Mapping[str, tuple[int, int, int, int, int, int, bool, int]] = {  # B, T, S, H, G, D, causal, window
    "causal-64": (1, 1600, 1600, 2, 1, 64, True, 0),
    "full-64": (1, 700, 1100, 2, 2, 64, False, 0),
    "causal-128": (1, 1100, 1100, 2, 1, 128, True, 0),
    "window-128": (2, 900, 900, 2, 2, 128, True, 300),
    "causal-96": (1, 1100, 1100, 2, 1, 96, True, 0),
    "documents-64": (1, 1600, 1600, 2, 1, 64, True, 0),
    "documents-128": (1, 1100, 1100, 2, 1, 128, True, 0),
}
DOCUMENTS: Mapping[str, tuple[int, ...]] = {"documents-64": (1, 127, 192, 1000, 280), "documents-128": (500, 12, 588)}
"""Lengths of the documents of each row of the batch."""


LARGE: Mapping[str, Mapping[str, object]] = {
    "matmul": GEMMS,
    "attention": ATTENTIONS,
    "attention_bwd": ATTENTIONS,
}
"""Row -> its large cases of parity. Of this and the tables below evidence binds to a component's own entry (registry/package.py, BY_OP)."""


def large_names(component: Component) -> list[str]:
    """Names of the large cases of a component, in order."""
    return [f"large:{name}" for name in LARGE.get(component.op or "", ())]


REPEATED_GEMM = (1032, 1096, 4104)
"""M, N, K of the product that determinism repeats: its last tiles are cut along K."""

REPEATED_ATTENTION = (2, 1100, 8, 2, 128)
"""B, T, H, G, D."""


Drawn = tuple[list[tuple[np.ndarray, str]], dict[str, object]]
"""(operands with their types, attributes)."""


def _draw(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, str]:
    return round_to(rng.standard_normal(shape), "bf16"), "bf16"


def _repeated_gemm(rng: np.random.Generator) -> Drawn:
    m, n, k = REPEATED_GEMM
    return [_draw(rng, m, k), _draw(rng, n, k)], {"trans_a": False, "trans_b": True}


def _repeated_attention(rng: np.random.Generator) -> Drawn:
    b, t, h, g, d = REPEATED_ATTENTION
    inputs = [_draw(rng, b, t, h, d), _draw(rng, b, t, g, d), _draw(rng, b, t, g, d)]
    return inputs, {"causal": True, "window": 0, "scale": float(d**-0.5)}


def _repeated_attention_bwd(rng: np.random.Generator) -> Drawn:
    b, t, h, _, d = REPEATED_ATTENTION
    (q, k, v), attrs = _repeated_attention(rng)
    lse = np.log(np.arange(1.0, t + 1)) + 0.5
    seen = np.broadcast_to(lse.astype(np.float32), (b, h, t)).astype(float)
    return [_draw(rng, b, t, h, d), q, k, v, _draw(rng, b, t, h, d), (seen, "f32")], attrs


REPEATED: Mapping[str, Callable[[np.random.Generator], Drawn]] = {
    "matmul": _repeated_gemm,
    "attention": _repeated_attention,
    "attention_bwd": _repeated_attention_bwd,
}
"""Row -> the call of a model's size that determinism repeats."""


def large_inputs(op: str, rng: np.random.Generator) -> Drawn | None:
    """(operands with their types, attributes) of one call of a model's size; None for an op that is not listed."""
    make = REPEATED.get(op)
    return make(rng) if make is not None else None


@dataclass(frozen=True)
class Call:
    """A call that the perf gate times. `tensor_cores`: whether its FLOPs are theirs (else bytes alone are its ceiling). Integer operands
    lie in `least` .. `below` - 1."""

    name: str
    types: tuple[TensorType, ...]
    attrs: dict[str, Any]
    tensor_cores: bool = True
    below: int = 1
    least: int = 0


def timed_calls(component: Component) -> list[Call]:
    """Calls of the sizes of GPT-2 124M and a Llama of 1.1 billion parameters, those inside the component's envelope."""
    found = [c if c.name else replace(c, name=f"model-{i}") for i, c in enumerate(TIMED.get(component.op or "", ()))]
    return [c for c in found if component.envelope.why_outside(c.types, c.attrs) is None]


def _bf16(*shape: int) -> TensorType:
    return TensorType(shape, "bf16")


def _f32(*shape: int) -> TensorType:
    return TensorType(shape, "f32")


def _i32(*shape: int) -> TensorType:
    return TensorType(shape, "i32")


def _plain(*types: TensorType, below: int = 1, least: int = 0, **attrs: Any) -> Call:
    """A call bound by memory; a name comes with its place."""
    return Call("", types, attrs, False, below, least)


def _product(*types: TensorType, below: int = 1, **attrs: Any) -> Call:
    return Call("", types, attrs, True, below)


def _attentions(back: bool) -> list[Call]:
    found = []
    for name, b, t, h, g, d in (("gpt", 16, 1024, 12, 12, 64), ("llama", 2, 4096, 32, 8, 64), ("wide-heads", 2, 4096, 16, 16, 128)):
        q, k = _bf16(b, t, h, d), _bf16(b, t, g, d)
        types = (q, q, k, k, q, _f32(b, h, t)) if back else (q, k, k)
        found.append(Call(name, types, {"causal": True, "window": 0, "scale": float(d**-0.5)}))
    return found


def _packed_attentions(back: bool) -> list[Call]:
    found = []
    for h, g, qkv in ((12, 12, _bf16(16, 1024, 36 * 64)), (32, 8, _bf16(2, 4096, 48 * 64))):
        b, t, _ = qkv.shape
        o = _bf16(b, t, h * 64)
        types = (o, qkv, o, _f32(b, h, t)) if back else (qkv,)
        found.append(_product(*types, heads=h, kv_heads=g, causal=True, window=0, scale=0.125))
    return found


_ROWS, _WIDE, _VECTOR, _STATISTIC = _bf16(32768, 1024), _bf16(16384, 16384), _bf16(1024), _f32(32768)
_IDS, _TABLE, _TABLE_GRADIENT, _TOKEN_GRADIENT = _i32(65536), _bf16(50304, 768), _f32(50304, 768), _bf16(65536, 768)
_FLAT, _SCALAR, _INTEGER = _f32(1 << 27), _f32(), _i32()
_TOKENS = _bf16(16384, 768)
_HEAD: dict[str, Any] = {"ignore_index": -1, "z_loss": 0.0, "chunk": 4096}
_UPDATE: dict[str, Any] = {"max_norm": 1.0, "rates": Table.of([1e-3] * 101), "segments": ((0, 1 << 27),)}
_ADAMW: dict[str, Any] = {"segments": ((0, 1 << 27, 1.0, 1.0),), "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_COLUMNS: dict[str, Any] = {"axis": (0,), "keepdims": False, "wide": True}

TIMED: Mapping[str, Sequence[Call]] = {
    "matmul": [
        Call("forward-gpt", (_bf16(16384, 768), _bf16(3072, 768)), {"trans_b": True}),
        Call("input-gradient-llama", (_bf16(8192, 8192), _bf16(8192, 2048)), {}),
        Call("weight-gradient-gpt", (_bf16(16384, 3072), _bf16(16384, 768)), {"trans_a": True, "wide": True}),
    ],
    "attention": _attentions(False),
    "attention_bwd": _attentions(True),
    "attention_packed": _packed_attentions(False),
    "attention_packed_bwd": _packed_attentions(True),
    "layernorm": [_plain(_ROWS, _VECTOR, _VECTOR, eps=1e-5)],
    "rmsnorm": [_plain(_ROWS, _VECTOR, eps=1e-5)],
    "add_layernorm": [_plain(_ROWS, _ROWS, _VECTOR, _VECTOR, eps=1e-5)],
    "add_rmsnorm": [_plain(_ROWS, _ROWS, _VECTOR, eps=1e-5)],
    "layernorm_bwd": [_plain(_ROWS, _ROWS, _VECTOR, _STATISTIC, _STATISTIC)],
    "rmsnorm_bwd": [_plain(_ROWS, _ROWS, _VECTOR, _STATISTIC)],
    "layernorm_bwd_add": [_plain(_ROWS, _ROWS, _ROWS, _VECTOR, _STATISTIC, _STATISTIC)],
    "rmsnorm_bwd_add": [_plain(_ROWS, _ROWS, _ROWS, _VECTOR, _STATISTIC)],
    "add": [_plain(_ROWS, _ROWS)],
    "scale": [_plain(_ROWS, factor=0.5)],
    "cast": [_plain(_FLAT, dtype="bf16"), _plain(_bf16(1 << 27), dtype="f32")],
    "accumulate": [_plain(_FLAT, _FLAT), _plain(_FLAT, _bf16(1 << 27))],
    "gelu": [_plain(_ROWS, approximate="tanh")],
    "gelu_bwd": [_plain(_ROWS, _ROWS, approximate="tanh")],
    "swiglu_packed": [_plain(_WIDE)],
    "swiglu_packed_bwd": [_plain(_bf16(16384, 8192), _WIDE)],
    "dropout": [_plain(_bf16(16, 2048, 1024), _INTEGER, _i32(16), below=9, rate=0.1, seed=1, purpose=2)],
    "sum": [_plain(_ROWS, **_COLUMNS)],
    "sum_accumulate": [_plain(_f32(1024), _ROWS, **_COLUMNS)],
    "embedding": [_plain(_TABLE, _IDS, below=50304)],
    "embedding_add": [_plain(_TABLE, _IDS, _TABLE, _IDS, below=50304)],
    "embedding_bwd": [_plain(_TOKEN_GRADIENT, _IDS, below=50304, vocab=50304)],
    "embedding_bwd_accumulate": [_plain(_TABLE_GRADIENT, _TOKEN_GRADIENT, _IDS, below=50304, vocab=50304)],
    "take_row": [_plain(_bf16(1, 1024, 2048), _i32(1), below=1024)],
    "rope_packed": [_plain(_bf16(2, 4096, 48 * 64), _i32(2, 4096), below=4096, base=5e5, layout="half", inverse=False, heads=32,
                           kv_heads=8)],
    "linear_gelu": [_product(_TOKENS, _bf16(3072, 768), _bf16(3072), trans_b=True, approximate="tanh")],
    "linear_swiglu": [_product(_bf16(8192, 2048), _bf16(16384, 2048), trans_b=True)],
    "matmul_gelu_bwd": [_product(_TOKENS, _bf16(768, 3072), _bf16(16384, 3072), approximate="tanh")],
    "matmul_accumulate": [_product(_f32(3072, 768), _bf16(16384, 3072), _TOKENS, trans_a=True, wide=True)],
    "linear_cross_entropy": [_product(_bf16(8192, 768), _TABLE, _i32(8192), below=50304, **_HEAD)],
    "linear_cross_entropy_grad": [_product(_bf16(8192, 768), _TABLE, _i32(8192), below=50304, **_HEAD)],
    "count_valid": [_plain(_i32(1 << 20), below=50304, ignore_index=-1)],
    "update_scalars": [_plain(_FLAT, _SCALAR, _SCALAR, _INTEGER, below=9, **_UPDATE)],
    "adamw": [_plain(_FLAT, _FLAT, _FLAT, _FLAT, _SCALAR, _SCALAR, _INTEGER, _INTEGER, _bf16(1 << 27), below=2, least=1, **_ADAMW)],
}
"""Row -> the calls that perf times. AdamW's flag is 1: a step that is not finite has nothing to do."""
