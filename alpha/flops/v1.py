"""FLOPS model v1: useful model FLOPs of one training step, part by part, and the conventions peers quote beside it. Floor 3. Frozen.

v1 counts, from the traced forward graph: every matmul (head included) as 2MNK and attention as 4*B*H*T*S*D, halved when causal; nothing
else (no embedding lookup, norms, activations, optimizer). A training step is three times the forward: one forward, two backward.
Attention's backward is 2x here; the 2.5x that kernels execute, and recompute, belong to HFU (alpha/flops/executed.py).
docs/flops.md derives the golden totals of baselines/flops/v1.toml by hand and sets them beside 6N, PaLM appendix B and Megatron's formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from alpha.flops.parts import ATTENTION, EMBEDDING, LOGITS, PARTS, part_of_weight
from alpha.graph.ir import Graph
from alpha.ops.table import row

VERSION = "flops/v1"
CONVENTION = "3 x forward; matmuls with head; causal attention counted half"
_WITH_HEAD = ("linear_cross_entropy", "linear_cross_entropy_grad")
"""Rows that hold the product x[N, C] weight[V, C]^T of the head; of the second the forward counts, its gradients are backward."""

BACKWARD = 2
"""The backward as a multiple of the forward: a gradient for each operand."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward pass over `tokens` tokens, by part, and the parameters that matmuls read."""

    tokens: int
    forward: Mapping[str, int]
    matmul_parameters: int

    @property
    def backward(self) -> dict[str, int]:
        """Useful FLOPs of the backward pass over `tokens` tokens, by part."""
        return {part: BACKWARD * n for part, n in self.forward.items()}

    @property
    def step(self) -> int:
        """Useful FLOPs of forward and backward over `tokens` tokens (v1)."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def per_token(self) -> float:
        """v1, FLOPs per trained token."""
        return self.step / self.tokens

    @property
    def per_token_full_attention(self) -> float:
        """The same with attention not halved (PaLM appendix B, arXiv:2204.02311: 6N + 12*L*H*Q*T)."""
        return (self.step + (1 + BACKWARD) * self.forward[ATTENTION]) / self.tokens

    @property
    def per_token_6n(self) -> int:
        """6N with N the parameters that matmuls read (Kaplan et al. 2020, arXiv:2001.08361)."""
        return 6 * self.matmul_parameters


def count(graph: Graph, tokens: int) -> ModelFlops:
    """Count a traced forward graph (training loss). `tokens`: B*T of the trace. A product belongs to the part of the weight that it reads;
    the head's is told by its layer, for its weight may be the embedding's."""
    forward = dict.fromkeys(PARTS, 0)
    parameters: dict[tuple[str, int], int] = {}
    for node in graph.nodes:
        types = [v.type for v in node.inputs]
        if node.op == "matmul" or node.op in _WITH_HEAD:
            attrs = node.attrs if node.op == "matmul" else {"trans_b": True}
            m_n = row("matmul").infer(types if node.op == "matmul" else types[:2], attrs)[0].size
            k = types[0].shape[-2 if attrs.get("trans_a", False) else -1]
            weights = [v for v in node.inputs if v.state is not None and len(v.type.shape) == 2]
            part = node.layer if node.layer in (LOGITS, EMBEDDING) else part_of_weight(weights[0].name if weights else "")
            forward[part] += 2 * m_n * k
            for v in weights:
                parameters[v.state] = v.type.size  # type: ignore[index]
        elif node.op in ("attention", "attention_packed"):
            b, t, *heads = node.outputs[0].type.shape  # [B, T, H, D], or [B, T, H * D] of packed heads
            full = 4 * b * t * (t if node.op == "attention_packed" else types[1].shape[1]) * prod(heads)
            forward[ATTENTION] += full // 2 if node.attrs["causal"] else full
    return ModelFlops(tokens, forward, sum(parameters.values()))


def mfu(tokens_per_second: float, flops: ModelFlops, peak: float) -> float:
    """Model FLOPs utilisation in [0, 1]: useful FLOPs per second over `peak` FLOP/s."""
    return tokens_per_second * flops.per_token / peak


def stamp(peak: float, source: str) -> str:
    """What stands beside every MFU: version, convention, peak and where the peak comes from."""
    return f"{VERSION} ({CONVENTION}); peak {peak / 1e9:.1f} GFLOP/s ({source})"
