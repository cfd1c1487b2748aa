"""The sizes of a model at which parity looks at kernels of the GPU (cuda_large.py). Floor 7.

Between them and the row's samples every compiled file that a component may load is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.ops.numerics import round_to
from alpha.types import TensorType

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


def large_names(component: Component) -> list[str]:
    """Names of the large cases of a component, in order."""
    table: Mapping[str, object] = {"matmul": GEMMS, "attention": ATTENTIONS, "attention_bwd": ATTENTIONS}.get(component.op or "", {})
    return [f"large:{name}" for name in table]


REPEATED_GEMM = (1032, 1096, 4104)
"""M, N, K of the product that determinism repeats: its last tiles are cut along K."""

REPEATED_ATTENTION = (2, 1100, 8, 2, 128)
"""B, T, H, G, D."""


def large_inputs(op: str, rng: np.random.Generator) -> tuple[list[tuple[np.ndarray, str]], dict[str, object]] | None:
    """(operands with their types, attributes) of one call of a model's size; None for an op that is not listed."""

    def draw(*shape: int) -> tuple[np.ndarray, str]:
        return round_to(rng.standard_normal(shape), "bf16"), "bf16"

    if op == "matmul":
        m, n, k = REPEATED_GEMM
        return [draw(m, k), draw(n, k)], {"trans_a": False, "trans_b": True}
    b, t, h, g, d = REPEATED_ATTENTION
    q, k_, v = draw(b, t, h, d), draw(b, t, g, d), draw(b, t, g, d)
    attrs: dict[str, object] = {"causal": True, "window": 0, "scale": float(d**-0.5)}
    if op == "attention":
        return [q, k_, v], attrs
    if op == "attention_bwd":
        lse = np.log(np.arange(1.0, t + 1)) + 0.5
        seen = np.broadcast_to(lse.astype(np.float32), (b, h, t)).astype(float)
        return [draw(b, t, h, d), q, k_, v, draw(b, t, h, d), (seen, "f32")], attrs
    return None


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
    return [c for c in _calls(component.op or "") if component.envelope.why_outside(c.types, c.attrs) is None]


def _calls(op: str) -> list[Call]:

    def bf16(*shape: int) -> TensorType:
        return TensorType(shape, "bf16")

    if op == "matmul":
        return [
            Call("forward-gpt", (bf16(16384, 768), bf16(3072, 768)), {"trans_b": True}),
            Call("input-gradient-llama", (bf16(8192, 8192), bf16(8192, 2048)), {}),
            Call("weight-gradient-gpt", (bf16(16384, 3072), bf16(16384, 768)), {"trans_a": True, "wide": True}),
        ]
    if op in ("attention", "attention_bwd"):
        found = []
        for name, b, t, h, g, d in (("gpt", 16, 1024, 12, 12, 64), ("llama", 2, 4096, 32, 8, 64), ("wide-heads", 2, 4096, 16, 16, 128)):
            q, k = bf16(b, t, h, d), bf16(b, t, g, d)
            types = (q, k, k) if op == "attention" else (q, q, k, k, q, TensorType((b, h, t), "f32"))
            found.append(Call(name, types, {"causal": True, "window": 0, "scale": float(d**-0.5)}))
        return found
    return _other_calls(op)


def _other_calls(op: str) -> list[Call]:
    """Calls of the other rows, in a table by op."""

    def of(dtype: str, *shape: int) -> TensorType:
        return TensorType(shape, dtype)

    x, wide = of("bf16", 32768, 1024), of("bf16", 16384, 16384)
    vector, stat = of("bf16", 1024), of("f32", 32768)
    ids, table, grad = of("i32", 65536), of("bf16", 50304, 768), of("f32", 50304, 768)
    flat, scalar, number = of("f32", 1 << 27), of("f32"), of("i32")
    gpt, llama = of("bf16", 16, 1024, 36 * 64), of("bf16", 2, 4096, 48 * 64)
    heads = {"heads": 12, "kv_heads": 12, "causal": True, "window": 0, "scale": 0.125}
    groups = {**heads, "heads": 32, "kv_heads": 8}
    turn = {"base": 5e5, "layout": "half", "inverse": False}
    head = ((of("bf16", 8192, 768), of("bf16", 50304, 768), of("i32", 8192)), {"ignore_index": -1, "z_loss": 0.0, "chunk": 4096})
    segments = ((0, 1 << 27),)
    rule = {"max_norm": 1.0, "schedule": "cosine", "peak": 1e-3, "floor": 0.1, "warmup": 10, "total": 100, "decay": 0}
    adamw = {"segments": ((0, 1 << 27, 1.0, 1.0),), "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    columns = {"axis": (0,), "keepdims": False, "wide": True}
    eps = {"eps": 1e-5}
    packed = [(12, gpt, heads), (32, llama, groups)]
    tokens, tanh = of("bf16", 16384, 768), {"approximate": "tanh"}
    calls: dict[str, list[tuple[tuple[TensorType, ...], Any, bool, int]]] = {
        "layernorm": [((x, vector, vector), eps, False, 1)], "rmsnorm": [((x, vector), eps, False, 1)],
        "add_layernorm": [((x, x, vector, vector), eps, False, 1)], "add_rmsnorm": [((x, x, vector), eps, False, 1)],
        "layernorm_bwd": [((x, x, vector, stat, stat), {}, False, 1)], "rmsnorm_bwd": [((x, x, vector, stat), {}, False, 1)],
        "layernorm_bwd_add": [((x, x, x, vector, stat, stat), {}, False, 1)],
        "rmsnorm_bwd_add": [((x, x, x, vector, stat), {}, False, 1)],
        "add": [((x, x), {}, False, 1)], "scale": [((x,), {"factor": 0.5}, False, 1)],
        "cast": [((flat,), {"dtype": "bf16"}, False, 1), ((of("bf16", 1 << 27),), {"dtype": "f32"}, False, 1)],
        "accumulate": [((flat, flat), {}, False, 1), ((flat, of("bf16", 1 << 27)), {}, False, 1)],
        "gelu": [((x,), tanh, False, 1)], "gelu_bwd": [((x, x), tanh, False, 1)],
        "swiglu_packed": [((wide,), {}, False, 1)], "swiglu_packed_bwd": [((of("bf16", 16384, 8192), wide), {}, False, 1)],
        "dropout": [((of("bf16", 16, 2048, 1024), number, of("i32", 16)), {"rate": 0.1, "seed": 1, "purpose": 2}, False, 9)],
        "sum": [((x,), columns, False, 1)], "sum_accumulate": [((of("f32", 1024), x), columns, False, 1)],
        "embedding": [((table, ids), {}, False, 50304)],
        "embedding_add": [((table, ids, table, ids), {}, False, 50304)],
        "embedding_bwd": [((of("bf16", 65536, 768), ids), {"vocab": 50304}, False, 50304)],
        "embedding_bwd_accumulate": [((grad, of("bf16", 65536, 768), ids), {"vocab": 50304}, False, 50304)],
        "take_row": [((of("bf16", 1, 1024, 2048), of("i32", 1)), {}, False, 1024)],
        "rope_packed": [((llama, of("i32", 2, 4096)), {**turn, "heads": 32, "kv_heads": 8}, False, 4096)],
        "linear_gelu": [((tokens, of("bf16", 3072, 768), of("bf16", 3072)), {"trans_b": True, **tanh}, True, 1)],
        "linear_swiglu": [((of("bf16", 8192, 2048), of("bf16", 16384, 2048)), {"trans_b": True}, True, 1)],
        "matmul_gelu_bwd": [((tokens, of("bf16", 768, 3072), of("bf16", 16384, 3072)), tanh, True, 1)],
        "matmul_accumulate": [((of("f32", 3072, 768), of("bf16", 16384, 3072), tokens), {"trans_a": True, "wide": True}, True, 1)],
        "linear_cross_entropy": [(*head, True, 50304)], "linear_cross_entropy_grad": [(*head, True, 50304)],
        "count_valid": [((of("i32", 1 << 20),), {"ignore_index": -1}, False, 50304)],
        "update_scalars": [((flat, scalar, scalar, number), {**rule, "segments": segments}, False, 9)],
        "adamw": [((flat, flat, flat, flat, scalar, scalar, number, number, of("bf16", 1 << 27)), adamw, False, 2)],
        "attention_packed": [((qkv,), attrs, True, 1) for _, qkv, attrs in packed],
        "attention_packed_bwd": [((of("bf16", *qkv.shape[:2], h * 64), qkv, of("bf16", *qkv.shape[:2], h * 64),
                                   of("f32", qkv.shape[0], h, qkv.shape[1])), attrs, True, 1) for h, qkv, attrs in packed],
    }
    least = 1 if op == "adamw" else 0  # its flag: a step that is not finite has nothing to do
    return [Call(f"model-{i}", *entry, least=least) for i, entry in enumerate(calls.get(op, ()))]
