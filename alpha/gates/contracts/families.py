"""Each family's plain reference: one token, one head, one number at a time; with its published sizes and the sizes it is looked at in.

The contract of a model (models.py) finds the entry by the family's name. A new family: its reference and its entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, sqrt, tanh
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts import of_settings
from alpha.gates.contracts.reference import yes
from alpha.graph.trace import Tracer
from alpha.models import gpt, llama
from alpha.models.family import Family

Case = Callable[[np.random.Generator], Measured]
Params = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """What the gates of a family know of it.

    small      sizes of the check against it: vocabulary 11, 8 positions
    reference  (sizes, parameters by name, tokens[T], targets[T]) -> summed loss of one document, without dropout; all sizes count, window,
               z-loss and tied head too, for the gates draw them
    whole      sizes of the finite differences over the whole model: all that the family can do, as little of it as will do
    published  name -> (sizes, sequence, parameters of the released checkpoint or worked out by hand, the tied head counted once)
    products   sizes -> a block's (parameters of attention's projections, of the MLP, channels that attention scores): flops/v1 is held
               against them
    ours       name -> (sizes, sequence) of configs/ whose parameters nobody published
    parity     further cases of the family alone; `faults`: such of its faults
    """

    family: Family
    small: Any
    reference: Callable[[Any, Params, np.ndarray, np.ndarray], float]
    whole: Any
    published: Mapping[str, tuple[Any, int, int]]
    products: Callable[[Any], tuple[int, int, int]]
    ours: Mapping[str, tuple[Any, int]] = field(default_factory=dict)
    parity: tuple[tuple[str, Case], ...] = ()
    faults: tuple[tuple[str, Case], ...] = ()


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, sees: Callable[[int, int], bool]) -> np.ndarray:
    """q, k, v [T, D] of one head."""
    out = np.zeros_like(q)
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if sees(i, j)]
        scores = [float(q[i] @ k[j]) / sqrt(q.shape[1]) for j in keys]
        weights = [exp(s - max(scores)) for s in scores]
        for j, w in zip(keys, weights):
            out[i] += w / sum(weights) * v[j]
    return out


def _nll(x: np.ndarray, head: np.ndarray, targets: np.ndarray, z: float) -> float:
    total = 0.0
    for row, target in zip(x, targets):
        if target >= 0:
            logits = head @ row
            lse = float(np.log(np.sum(np.exp(logits - logits.max()))) + logits.max())
            total += lse - float(logits[target]) + z * lse * lse
    return total


def _sees(c: Any) -> Callable[[int, int], bool]:
    """Whether query i sees key j: causal, and within the window where there is one."""
    return lambda i, j: j <= i and (c.window == 0 or i - j < c.window)


def _head(c: Any, p: Params) -> np.ndarray:
    return p["embedding.token.weight"] if c.tied else p["head.weight"]


def gpt_loss(c: gpt.GPTConfig, p: Params, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Summed loss of one sequence, without dropout, from the paper's description."""
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return np.stack([(r - r.mean()) / sqrt(r.var() + c.norm_eps) * p[f"{name}.gain"] + p[f"{name}.bias"] for r in x])

    x = np.stack([p["embedding.token.weight"][t] + p["embedding.position.weight"][i] for i, t in enumerate(tokens)])
    d = c.width // c.heads
    for i in range(c.layers):
        b = f"block.{i}"
        qkv = norm(x, f"{b}.norm1") @ p[f"{b}.attention.qkv.weight"].T + p[f"{b}.attention.qkv.bias"]
        q, k, v = np.split(qkv, 3, axis=1)
        heads = [_attend(q[:, at], k[:, at], v[:, at], _sees(c)) for at in (slice(h * d, (h + 1) * d) for h in range(c.heads))]
        x = x + np.concatenate(heads, axis=1) @ p[f"{b}.attention.out.weight"].T + p[f"{b}.attention.out.bias"]
        h = norm(x, f"{b}.norm2") @ p[f"{b}.mlp.up.weight"].T + p[f"{b}.mlp.up.bias"]
        h = np.vectorize(lambda u: 0.5 * u * (1 + tanh(sqrt(2 / np.pi) * (u + 0.044715 * u**3))))(h)
        x = x + h @ p[f"{b}.mlp.down.weight"].T + p[f"{b}.mlp.down.bias"]
    return _nll(norm(x, "head.norm"), _head(c, p), targets, c.z_loss)


def llama_loss(c: llama.LlamaConfig, p: Params, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Summed loss of one sequence: rotation by complex numbers, explicit head groups, explicit window."""
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return np.stack([r / sqrt(float(np.mean(r * r)) + c.norm_eps) * p[f"{name}.gain"] for r in x])

    d = c.head_dim or c.width // c.heads
    biases = {"none": (0, 0), "qkv": (1, 0), "all": (1, 1)}[c.attention_bias]

    def bias(name: str, rows: int, has: int) -> np.ndarray:
        return p[f"{name}.bias"] if has else np.zeros(rows)

    def rate(n: int) -> float:
        plain, factor = float(c.rope_base ** (-2 * n / d)), (*c.rope_scaling, 1.0)[0]
        if len(c.rope_scaling) < 4:
            return plain / factor
        _, low, high, original = c.rope_scaling
        wavelength = 2 * np.pi / plain
        if original / high <= wavelength <= original / low:
            share = (original / wavelength - low) / (high - low)
            return float((1 - share) * plain / factor + share * plain)
        return plain if wavelength < original / high else plain / factor

    def turn(x: np.ndarray) -> np.ndarray:
        z = x[:, : d // 2] + 1j * x[:, d // 2 :]
        z = z * np.exp(1j * np.outer(np.arange(len(x)), [rate(n) for n in range(d // 2)]))
        return np.concatenate([z.real, z.imag], axis=1)

    x = np.stack([p["embedding.token.weight"][t] for t in tokens])
    for i in range(c.layers):
        b = f"block.{i}"
        w = p[f"{b}.attention.qkv.weight"]
        n = norm(x, f"{b}.norm1")
        own = bias(f"{b}.attention.qkv", len(w), biases[0])
        rows = [slice(at * d, (at + 1) * d) for at in range(c.heads + 2 * c.kv_heads)]
        heads = [n @ w[at].T + own[at] for at in rows]
        q, k = [turn(x) for x in heads[: c.heads]], [turn(x) for x in heads[c.heads : c.heads + c.kv_heads]]
        v = heads[c.heads + c.kv_heads :]
        group = c.heads // c.kv_heads
        heads = [_attend(q[h], k[h // group], v[h // group], _sees(c)) for h in range(c.heads)]
        x = x + np.concatenate(heads, axis=1) @ p[f"{b}.attention.out.weight"].T + bias(f"{b}.attention.out", c.width, biases[1])
        n = norm(x, f"{b}.norm2")
        gate, up = n @ p[f"{b}.mlp.gate.weight"].T, n @ p[f"{b}.mlp.up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p[f"{b}.mlp.down.weight"].T
    return _nll(norm(x, "head.norm"), _head(c, p), targets, c.z_loss)


def _dropout(rng: np.random.Generator) -> Measured:
    """Training drops on the embedding and both residual branches of each block, every place under a key of its own; nothing else does."""
    cfg = gpt.GPTConfig(vocab=11, positions=8, layers=3, width=12, heads=3, dropout=0.25, seed=77)
    found: dict[bool, list[Any]] = {}
    for training in (True, False):
        t = Tracer("dropout")
        gpt.loss(t, cfg, 2, 8, training)
        found[training] = [n for n in t.graph.nodes if n.op == "dropout"]
    keys = [(n.attrs["rate"], n.attrs["seed"], n.attrs["purpose"]) for n in found[True]]
    layers = [n.layer for n in found[True]]
    good = keys == [(0.25, 77, i) for i in range(7)] and not found[False]
    good &= layers == ["embedding", *(f"block.{i}" for i in (0, 0, 1, 1, 2, 2))]
    return yes(good, cases=7)


FAMILY_CASES: dict[str, FamilyCase] = {
    "gpt": FamilyCase(
        family=gpt.FAMILY, reference=gpt_loss,
        small=gpt.GPTConfig(vocab=11, positions=8, layers=2, width=12, heads=3, norm_eps=1e-2),
        whole=gpt.GPTConfig(vocab=13, positions=9, layers=2, width=16, heads=4, dropout=0.2, documents=True, seed=5),
        published={  # Radford et al. 2019, table 2
            "gpt2-124m": (gpt.GPTConfig(vocab=50257, positions=1024, layers=12, width=768, heads=12), 1024, 124_439_808),
            "gpt2-1.5b": (gpt.GPTConfig(vocab=50257, positions=1024, layers=48, width=1600, heads=25), 1024, 1_557_611_200)},
        products=lambda c: (4 * c.width * c.width, 8 * c.width * c.width, c.width),
        parity=(("dropout", _dropout),)),
    "llama": FamilyCase(
        family=llama.FAMILY, reference=llama_loss,
        small=llama.LlamaConfig(vocab=11, positions=8, layers=2, width=16, heads=4, kv_heads=2, hidden=20, window=4, z_loss=1e-2,
                                rope_base=100.0, head_dim=6, attention_bias="all", norm_eps=1e-2),
        whole=llama.LlamaConfig(vocab=13, positions=9, layers=2, width=16, heads=4, kv_heads=2, hidden=24, window=5, z_loss=1e-3,
                                head_dim=6, attention_bias="all", norm_eps=1e-3),
        published={  # Grattafiori et al. 2024, table 3; Llama 3.2 model card
            "llama3.2-1b": (llama.LlamaConfig(vocab=128256, positions=8192, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192,
                                              tied=True), 8192, 1_235_814_400),
            "llama3-8b": (llama.LlamaConfig(vocab=128256, positions=8192, layers=32, width=4096, heads=32, kv_heads=8, hidden=14336),
                          8192, 8_030_261_248),
            "llama3-70b": (llama.LlamaConfig(vocab=128256, positions=8192, layers=80, width=8192, heads=64, kv_heads=8, hidden=28672),
                           8192, 70_553_706_496)},
        ours={"llama-1.1b": (llama.LlamaConfig(vocab=32768, positions=4096, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192),
                             4096)},
        products=lambda c: (2 * c.width * (c.width + c.kv_heads * (c.width // c.heads)), 3 * c.width * c.hidden, c.width),
        parity=(("frequencies", of_settings.frequencies), ("run-file", of_settings.run_file_sizes)),
        faults=(("odd-heads", of_settings.odd_heads),)),
}
"""Family -> what its gates know of it."""
