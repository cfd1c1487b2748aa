"""FLOPS model v1: useful model FLOPs of one training step, and the conventions peers quote beside it. Floor 3. Frozen once released.

v1 counts, from the traced forward graph: every matmul (head included) as 2MNK and attention as 4*B*H*T*S*D, halved when causal; nothing
else (no embedding lookup, norms, activations). A training step is three times the forward: one forward, two backward (attention's
backward is 2x here; the 2.5x that kernels execute, and recompute, belong to HFU, which is counted from the Plan). docs/flops.md derives
the golden totals of baselines/flops/v1.toml by hand and sets them beside 6N, PaLM appendix B and Megatron's formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpha.graph.ir import Graph
from alpha.ops.table import row

VERSION = "flops/v1"
CONVENTION = "3 x forward; matmuls with head; causal attention counted half"


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward pass, by part, and the parameters that matmuls read. `tokens`: tokens of that pass."""

    tokens: int
    matmul: int
    head: int
    attention: int
    matmul_parameters: int

    @property
    def step(self) -> int:
        """Useful FLOPs of forward and backward over `tokens` tokens (v1)."""
        return 3 * (self.matmul + self.head + self.attention)

    @property
    def per_token(self) -> float:
        """v1, FLOPs per trained token."""
        return self.step / self.tokens

    @property
    def per_token_full_attention(self) -> float:
        """The same with attention not halved (PaLM appendix B, arXiv:2204.02311: 6N + 12*L*H*Q*T)."""
        return 3 * (self.matmul + self.head + 2 * self.attention) / self.tokens

    @property
    def per_token_6n(self) -> int:
        """6N with N the parameters that matmuls read (Kaplan et al. 2020, arXiv:2001.08361)."""
        return 6 * self.matmul_parameters


def count(graph: Graph, tokens: int) -> ModelFlops:
    """Count a traced forward graph (training loss). `tokens`: B*T of the trace."""
    matmul = head = attention = 0
    parameters: dict[tuple[str, int], int] = {}
    for node in graph.nodes:
        types = [v.type for v in node.inputs]
        if node.op == "matmul":
            m_n = row("matmul").infer(types, node.attrs)[0].size
            k = types[0].shape[-2 if node.attrs.get("trans_a", False) else -1]
            if node.layer == "head":
                head += 2 * m_n * k
            else:
                matmul += 2 * m_n * k
            for v in node.inputs:
                if v.state is not None and len(v.type.shape) == 2:
                    parameters[v.state] = v.type.size
        elif node.op == "attention":
            b, t, h, d = types[0].shape
            full = 4 * b * h * t * types[1].shape[1] * d
            attention += full // 2 if node.attrs["causal"] else full
    return ModelFlops(tokens, matmul, head, attention, sum(parameters.values()))


def mfu(tokens_per_second: float, flops: ModelFlops, peak: float) -> float:
    """Model FLOPs utilisation in [0, 1]: useful FLOPs per second over `peak` FLOP/s."""
    return tokens_per_second * flops.per_token / peak


def stamp(peak: float, source: str) -> str:
    """What stands beside every MFU: version, convention, peak and where the peak comes from."""
    return f"{VERSION} ({CONVENTION}); peak {peak / 1e9:.1f} GFLOP/s ({source})"
