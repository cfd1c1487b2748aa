"""The sizes of a model at which parity looks at kernels of the GPU (cuda_large.py). Floor 7.

Between them and the row's samples every compiled file that a component may load is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
}


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
    """A call that the perf gate times. `tensor_cores`: whether its FLOPs are theirs (else bytes alone are its ceiling)."""

    name: str
    types: tuple[TensorType, ...]
    attrs: dict[str, object]
    tensor_cores: bool = True


def timed_calls(op: str) -> list[Call]:
    """Calls of the sizes of GPT-2 124M and a Llama of 1.1 billion parameters."""

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
    return []
