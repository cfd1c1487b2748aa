"""Cases of the models and of the FLOPS model: dull loop-by-loop references, published parameter counts, totals derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, sqrt, tanh
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import ConfigError
from alpha.flops import v1
from alpha.flops.parts import ATTENTION, FEED_FORWARD, LOGITS, PARTS, PROJECTIONS
from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.reference import hash_of, in_new_process, references, refuses, yes
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, prune
from alpha.graph.state import StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.models import gpt, llama
from alpha.optim.init import draw
from alpha.tomlfile import read_toml

Case = Callable[[np.random.Generator], Measured]
Params = dict[str, np.ndarray]

SIZES: dict[str, tuple[Any, Any, int]] = {
    "gpt2-124m": (gpt, gpt.GPTConfig(vocab=50257, positions=1024, layers=12, width=768, heads=12), 1024),
    "gpt2-1.5b": (gpt, gpt.GPTConfig(vocab=50257, positions=1024, layers=48, width=1600, heads=25), 1024),
    "llama3.2-1b": (llama, llama.LlamaConfig(vocab=128256, positions=8192, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192,
                                             tied=True), 8192),
    "llama3-8b": (llama, llama.LlamaConfig(vocab=128256, positions=8192, layers=32, width=4096, heads=32, kv_heads=8, hidden=14336), 8192),
    "llama3-70b": (llama, llama.LlamaConfig(vocab=128256, positions=8192, layers=80, width=8192, heads=64, kv_heads=8, hidden=28672), 8192),
}
"""Published sizes: Radford et al. 2019 table 2; Grattafiori et al. 2024 table 3; Llama 3.2 model card."""

PUBLISHED = {"gpt2-124m": 124_439_808, "gpt2-1.5b": 1_557_611_200, "llama3.2-1b": 1_235_814_400, "llama3-8b": 8_030_261_248,
             "llama3-70b": 70_553_706_496}
"""Parameters of the released checkpoints (the tied head counted once)."""


OURS: dict[str, tuple[Any, Any, int]] = {
    "llama-1.1b": (llama, llama.LlamaConfig(vocab=32768, positions=4096, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192), 4096),
}
"""Sizes of configs/llama-1b.toml: no released checkpoint has them."""


def _trace(name: str) -> tuple[Tracer, int]:
    module, config, seq = {**SIZES, **OURS}[name]
    t = Tracer(name)
    module.loss(t, config, 1, seq)
    return t, seq


def _counts(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        names = [n for n in SIZES if n.startswith(family)]
        wrong = [n for n in names if sum(s.size for s in _trace(n)[0].tensors.values()) != PUBLISHED[n]]
        return Measured(error=float(len(wrong)), bound=0.0, cases=len(names), note=f"parameter counts {wrong or 'as published'}")
    return check


# -- dull references: one token, one head, one number at a time ------------------------------------------------------------------------


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


def gpt_reference(c: gpt.GPTConfig, p: Params, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Summed loss of one sequence, without dropout, from the paper's description."""
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return np.stack([(r - r.mean()) / sqrt(r.var() + 1e-5) * p[f"{name}.gain"] + p[f"{name}.bias"] for r in x])

    x = np.stack([p["embedding.token.weight"][t] + p["embedding.position.weight"][i] for i, t in enumerate(tokens)])
    d = c.width // c.heads
    for i in range(c.layers):
        b = f"block.{i}"
        qkv = norm(x, f"{b}.norm1") @ p[f"{b}.attention.qkv.weight"].T + p[f"{b}.attention.qkv.bias"]
        q, k, v = np.split(qkv, 3, axis=1)
        heads = [_attend(q[:, at], k[:, at], v[:, at], lambda a, j: j <= a) for at in (slice(h * d, (h + 1) * d) for h in range(c.heads))]
        x = x + np.concatenate(heads, axis=1) @ p[f"{b}.attention.out.weight"].T + p[f"{b}.attention.out.bias"]
        h = norm(x, f"{b}.norm2") @ p[f"{b}.mlp.up.weight"].T + p[f"{b}.mlp.up.bias"]
        h = np.vectorize(lambda u: 0.5 * u * (1 + tanh(sqrt(2 / np.pi) * (u + 0.044715 * u**3))))(h)
        x = x + h @ p[f"{b}.mlp.down.weight"].T + p[f"{b}.mlp.down.bias"]
    return _nll(norm(x, "head.norm"), p["embedding.token.weight"], targets, c.z_loss)


def llama_reference(c: llama.LlamaConfig, p: Params, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Summed loss of one sequence: rotation by complex numbers, explicit head groups, explicit window."""
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return np.stack([r / sqrt(float(np.mean(r * r)) + 1e-5) * p[f"{name}.gain"] for r in x])

    d = c.width // c.heads

    def turn(x: np.ndarray) -> np.ndarray:
        z = x[:, : d // 2] + 1j * x[:, d // 2 :]
        z = z * np.exp(1j * np.outer(np.arange(len(x)), [c.rope_base ** (-2 * n / d) for n in range(d // 2)]))
        return np.concatenate([z.real, z.imag], axis=1)

    x = np.stack([p["embedding.token.weight"][t] for t in tokens])
    for i in range(c.layers):
        b = f"block.{i}"
        w = p[f"{b}.attention.qkv.weight"]
        n = norm(x, f"{b}.norm1")
        q = [turn(n @ w[h * d : (h + 1) * d].T) for h in range(c.heads)]
        base = c.heads * d
        k = [turn(n @ w[base + g * d : base + (g + 1) * d].T) for g in range(c.kv_heads)]
        v = [n @ w[base + (c.kv_heads + g) * d : base + (c.kv_heads + g + 1) * d].T for g in range(c.kv_heads)]
        group = c.heads // c.kv_heads
        heads = [_attend(q[h], k[h // group], v[h // group], lambda a, j: j <= a and (c.window == 0 or a - j < c.window))
                 for h in range(c.heads)]
        x = x + np.concatenate(heads, axis=1) @ p[f"{b}.attention.out.weight"].T
        n = norm(x, f"{b}.norm2")
        gate, up = n @ p[f"{b}.mlp.gate.weight"].T, n @ p[f"{b}.mlp.up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p[f"{b}.mlp.down.weight"].T
    head = p["embedding.token.weight"] if c.tied else p["head.weight"]
    return _nll(norm(x, "head.norm"), head, targets, c.z_loss)


def _small(family: str) -> tuple[Any, Any, Callable[..., float]]:
    if family == "gpt":
        return gpt, gpt.GPTConfig(vocab=11, positions=8, layers=2, width=12, heads=3), gpt_reference
    return llama, llama.LlamaConfig(vocab=11, positions=8, layers=2, width=16, heads=4, kv_heads=2, hidden=20, window=4, z_loss=1e-2,
                                    rope_base=100.0), llama_reference


def _graph(family: str, kind: str, seq: int) -> tuple[Graph, StateLayout]:
    module, c, _ = _small(family)
    probe = Tracer("probe")
    module.loss(probe, c, 1, seq, False)
    layout = StateLayout(probe.tensors.values())
    t = Tracer(kind, layout)
    if kind == "decode":
        t.output("logits", module.decode(t, c, 1, seq))
    else:
        for name, value in zip(("loss_sum", "count"), module.loss(t, c, 1, seq, False)):
            t.output(name, value)
    return prune(t.graph), layout


def _random_params(layout: StateLayout, rng: np.random.Generator) -> tuple[np.ndarray, Params]:
    flat, params = np.zeros(layout.size), {}
    for s in layout.tensors:
        x = (1.0 if s.init.kind == "ones" else 0.0) + 0.4 * rng.standard_normal(s.shape)
        flat[layout.offsets[s.name] : layout.offsets[s.name] + s.size] = x.ravel()
        params[s.name] = x
    return flat, params


def _dull(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """The traced model through the oracles equals the dull reference to float64 roundoff (about 1e4 operations deep: 1e-11)."""
        _, c, reference = _small(family)
        seq, worst = 7, 0.0
        graph, layout = _graph(family, "loss", seq)
        for _ in range(2):
            flat, params = _random_params(layout, rng)
            tokens, targets = rng.integers(0, 11, seq), rng.integers(0, 11, seq)
            targets[rng.integers(seq)] = -1
            inputs = {"tokens": tokens[None].astype(np.int32), "targets": targets[None].astype(np.int32),
                      "positions": np.arange(seq, dtype=np.int32)[None]}
            out, _ = evaluate(graph, {k: inputs[k] for k in graph.inputs}, {"param": flat})
            want = reference(c, params, tokens, targets)
            worst = max(worst, abs(float(out["loss_sum"]) - want) / abs(want), abs(float(out["count"]) - int((targets >= 0).sum())))
        return Measured(error=worst, bound=1e-11, cases=2)
    return check


def _causal(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """decode at index i is unmoved, to the bit, by any token after i, and moved by the token at i."""
        seq = 8
        graph, layout = _graph(family, "decode", seq)
        flat, _ = _random_params(layout, rng)
        good = True
        for i in range(0, seq - 1, 3):
            tokens = rng.integers(0, 11, (1, seq)).astype(np.int32)
            changed, moved = tokens.copy(), tokens.copy()
            changed[0, i + 1 :] = (changed[0, i + 1 :] + 1 + rng.integers(0, 9)) % 11
            moved[0, i] = (moved[0, i] + 1) % 11
            base, other, third = (
                evaluate(graph, {k: v for k, v in (("tokens", x), ("positions", np.arange(seq, dtype=np.int32)[None]),
                                                   ("index", np.array([i], np.int32))) if k in graph.inputs}, {"param": flat})[0]["logits"]
                for x in (tokens, changed, moved))
            good &= bool((base == other).all()) and bool((base != third).any())
        return yes(good, cases=3)
    return check


def _decay(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """Matrices decay; gains and biases do not. Gains start at one, biases at zero, residual outputs are scaled down by depth."""
        module, c, _ = _small(family)
        tensors = []
        for tied in (True, False):
            t = Tracer("decay")
            module.loss(t, replace(c, tied=tied), 1, 4)
            tensors += list(t.tensors.values())
            if ("head.weight" in t.tensors) == tied:
                return yes(False, "a tied head has no weight of its own")
        good = all(s.decay == (len(s.shape) == 2) for s in tensors)
        for s in tensors:
            kind = "ones" if s.name.endswith("gain") else "zeros" if s.name.endswith("bias") else "normal"
            good &= s.init.kind == kind
            if s.name.endswith(("attention.out.weight", "mlp.down.weight")):
                good &= abs(s.init.std - 0.02 / sqrt(2 * c.layers)) < 1e-12
            elif kind == "normal":
                good &= s.init.std == (0.01 if "position" in s.name else 0.02)
        return yes(good, cases=len(tensors))
    return check


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


def _init_moments(rng: np.random.Generator) -> Measured:
    """200,000 draws: mean within 5 sigma of 0, variance within 5 sigma of std^2, no draw repeated across names, same name same bits."""
    from alpha.graph.state import Init

    n, seed = 200_000, int(rng.integers(1 << 30))
    a = draw(TensorSpec("a", (n,), "u", Init("normal", 0.02)), seed).astype(np.float64)
    b = draw(TensorSpec("b", (n,), "u", Init("normal", 0.02)), seed).astype(np.float64)
    again = draw(TensorSpec("a", (n,), "u", Init("normal", 0.02)), seed)
    z = [abs(a.mean()) / 0.02 * sqrt(n), abs(a.var() / 0.02**2 - 1) / sqrt(2 / n), abs(float(np.corrcoef(a, b)[0, 1])) * sqrt(n)]
    return Measured(error=max(z) + (0 if (again == a.astype(np.float32)).all() else np.inf), bound=5.0, cases=3, note="sigmas")


def _gradient(family: str) -> Case:
    """The differentiate pass's whole-model check on this family's reference."""
    def check(rng: np.random.Generator) -> Measured:
        from alpha.gates.contracts.passes import _finite_difference

        return _finite_difference(references()[family], rng)
    return check


def model_hash(family: str, seed: int) -> str:
    """Hash of a family's small graph and of its initial parameters."""
    graph, layout = _graph(family, "loss", 7)
    return graph.hash() + hash_of(*(draw(s, seed) for s in layout.tensors))


def _same_elsewhere(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        seed = int(rng.integers(1 << 30))
        here = model_hash(family, seed)
        there = in_new_process(f"model_hash({family!r}, {seed})", "alpha.gates.contracts.models")
        return Measured(error=float(there != here), bound=0.0, digest=here)
    return check


def _too_long(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        module, c, _ = _small(family)
        return refuses(ConfigError, lambda: module.loss(Tracer("long"), c, 1, c.positions + 1))
    return check


# -- FLOPS model -----------------------------------------------------------------------------------------------------------------------


def _golden(rng: np.random.Generator) -> Measured:
    """Counted totals equal baselines/flops/v1.toml, whose numbers docs/flops.md derives by hand."""
    golden = read_toml(Path(__file__).parents[3] / "baselines" / "flops" / "v1.toml")["model"]
    wrong = []
    for name in SIZES:
        t, seq = _trace(name)
        f, g = v1.count(t.graph, seq), golden[name]
        if (f.step, f.per_token_6n, f.matmul_parameters) != (g["step"], g["six_n"], g["matmul_parameters"]):
            wrong.append(name)
    return Measured(error=float(len(wrong) + len(set(golden) ^ set(SIZES))), bound=0.0, cases=len(SIZES), note=str(wrong))


def _golden_parts(rng: np.random.Generator) -> Measured:
    """Parts of a token's forward equal baselines/flops/v1.toml; three times their sum is the total; no other part has any."""
    golden = read_toml(Path(__file__).parents[3] / "baselines" / "flops" / "v1.toml")["forward"]
    wrong = []
    for name, parts in golden.items():
        t, seq = _trace(name)
        f = v1.count(t.graph, seq)
        apart = {part: n for part, n in f.forward.items() if n}
        if apart != {part: n * seq for part, n in parts.items() if part != "total"} or f.step != parts["total"] * seq:
            wrong.append(name)
    return Measured(error=float(len(wrong)), bound=0.0, cases=len(golden), note=str(wrong))


def _formula(rng: np.random.Generator) -> Measured:
    """The closed form of the docs, 6 N + 6 L H D T (causal half), from the sizes alone, part by part; and twice the attention when full."""
    worst = 0.0
    for name, (_, c, seq) in {**SIZES, **OURS}.items():
        t, _ = _trace(name)
        f = v1.count(t.graph, seq)
        d = c.width // c.heads
        if isinstance(c, gpt.GPTConfig):
            projections, mlp = 4 * c.width * c.width, 8 * c.width * c.width
        else:
            projections, mlp = c.width * (c.width + 2 * c.kv_heads * d) + c.width * c.width, 3 * c.width * c.hidden
        n = c.layers * (projections + mlp) + c.vocab * c.width
        attention = 6 * c.layers * c.width * seq
        worst = max(worst, abs(f.per_token - (6 * n + attention)), abs(f.per_token_full_attention - (6 * n + 2 * attention)))
        apart = {PROJECTIONS: 2 * c.layers * projections, FEED_FORWARD: 2 * c.layers * mlp, LOGITS: 2 * c.vocab * c.width,
                 ATTENTION: attention // 3}
        worst = max([worst, *(abs(f.forward[part] - seq * apart.get(part, 0)) for part in PARTS)])
    return Measured(error=float(worst), bound=0.0, cases=len(SIZES) + len(OURS))


def _mfu(rng: np.random.Generator) -> Measured:
    t, seq = _trace("gpt2-124m")
    f = v1.count(t.graph, seq)
    value = v1.mfu(550_000, f, 989.5e12)
    stamped = v1.stamp(989.5e12, "x")
    return yes(abs(value - 550_000 * f.per_token / 989.5e12) < 1e-15 and "flops/v1" in stamped and "causal" in stamped)


def _family(family: str, published: str) -> dict[str, list[tuple[str, Case]]]:
    return {"parity": [("dull", _dull(family)), ("published-counts", _counts(published)), ("causal", _causal(family)),
                       ("decay-and-init", _decay(family)), ("moments", _init_moments)],
            "gradient": [("whole-model", _gradient(family))], "determinism": [("elsewhere", _same_elsewhere(family))],
            "faults": [("too-long", _too_long(family))]}


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = merged({
    "model.gpt": {**_family("gpt", "gpt2"), "parity": [*_family("gpt", "gpt2")["parity"], ("dropout", _dropout)]},
    "model.llama": _family("llama", "llama"),
    "flops.v1": {"parity": [("golden", _golden), ("golden-parts", _golden_parts), ("closed-form", _formula), ("mfu", _mfu)]},
})
