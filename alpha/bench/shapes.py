"""Shapes that a kernel of the GPU is held against its peers on, beside the calls of the perf gate. Floor 8.

Products: the layers of GPT-2, of Llamas of 1 and 8 billion parameters and a square one, forward, both gradients, and the weight gradient
into float32. Attention: six shapes, causal and full. Norms: a narrow and a wide row.
"""

from __future__ import annotations

from typing import Any

from alpha.component import Component
from alpha.gates.cuda.sizes import Call, timed_calls
from alpha.types import TensorType

PRODUCTS = ((16384, 768, 768), (16384, 3072, 768), (16384, 768, 3072), (16384, 2304, 768), (16384, 50304, 768), (16384, 2048, 2048),
            (16384, 6144, 2048), (16384, 8192, 2048), (16384, 2048, 8192), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336),
            (8192, 128256, 4096), (8192, 8192, 8192))
"""M, N, K of x[M,K] weight[N,K]^T."""

ATTENTIONS = ((16, 12, 1024, 64), (8, 16, 2048, 64), (8, 16, 2048, 128), (4, 32, 4096, 128), (2, 32, 8192, 128), (1, 32, 16384, 128))
"""B, H, T, D."""

NORMS = ((65536, 768), (16384, 4096))


def calls(component: Component) -> list[Call]:
    """The calls of the perf gate, then those of the tables, inside the component's envelope."""
    more = [c for c in _table(component.op or "") if component.envelope.why_outside(c.types, c.attrs) is None]
    return [*timed_calls(component), *more]


def _table(op: str) -> list[Call]:
    def of(*shape: int, dtype: str = "bf16") -> TensorType:
        return TensorType(shape, dtype)

    found: list[Call] = []
    if op == "matmul":
        for m, n, k in PRODUCTS:
            kinds: tuple[tuple[str, tuple[int, int], tuple[int, int], dict[str, Any]], ...] = (
                ("fwd", (m, k), (n, k), {"trans_b": True}), ("dgrad", (m, n), (n, k), {}), ("wgrad", (m, n), (m, k), {"trans_a": True}),
                ("wgrad-f32", (m, n), (m, k), {"trans_a": True, "wide": True}))
            found += [Call(f"{kind}-{m}x{n}x{k}", (of(*a), of(*b)), attrs) for kind, a, b, attrs in kinds]
    elif op in ("attention", "attention_bwd"):
        for b, h, t, d in ATTENTIONS:
            x = of(b, t, h, d)
            types = (x, x, x) if op == "attention" else (x, x, x, x, x, of(b, h, t, dtype="f32"))
            found += [Call(f"{name}-{b}x{h}x{t}x{d}", types, {"causal": causal, "window": 0, "scale": float(d**-0.5)})
                      for name, causal in (("causal", True), ("full", False))]
    else:
        for rows, width in NORMS:
            x, scale, stat = of(rows, width), of(width), of(rows, dtype="f32")
            operands = {"rmsnorm": (x, scale), "layernorm": (x, scale, scale), "rmsnorm_bwd": (x, x, scale, stat),
                        "layernorm_bwd": (x, x, scale, stat, stat)}.get(op)
            if operands is not None:
                attrs = {} if op.endswith("_bwd") else {"eps": 1e-5}
                found.append(Call(f"{rows}x{width}", operands, attrs, tensor_cores=False))
    return found
