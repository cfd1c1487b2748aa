"""Cases of the models and of the FLOPS model: each family against its plain reference and its published parameter counts (families.py),
totals against those derived by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import ConfigError
from alpha.flops import v1
from alpha.flops.executed import by_part, executed, part_of, tensors_by_place
from alpha.flops.parts import ATTENTION, DIRECTIONS, EMBEDDING, FEED_FORWARD, LOGITS, OTHERS, PARTS, PROJECTIONS, part_of_weight
from alpha.gates.contracts import data_parallel, edges, of_settings
from alpha.gates.contracts.families import FAMILY_CASES, FamilyCase, Params
from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.reference import BATCH, Reference, both, hash_of, in_new_process, program, reference_of, refuses, yes
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, Value, prune
from alpha.graph.plan import Step
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.ops.table import row
from alpha.optim.init import PIECE, draw, fill_initial
from alpha.tomlfile import read_toml
from alpha.types import TensorType

Case = Callable[[np.random.Generator], Measured]


def _trace(name: str) -> tuple[Tracer, int]:
    case, config, seq = _sizes()[name]
    t = Tracer(name)
    case.family.loss(t, config, 1, seq)
    return t, seq


def _sizes() -> dict[str, tuple[FamilyCase, Any, int]]:
    """Name -> (family, sizes, sequence) of every model of full size."""
    return {name: (case, config, seq) for case in FAMILY_CASES.values()
            for name, (config, seq, *_) in {**case.published, **case.ours}.items()}


def _counts(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        published = FAMILY_CASES[family].published
        wrong = []
        for name, (config, seq, parameters) in published.items():
            t = Tracer(name)
            FAMILY_CASES[family].family.loss(t, config, 1, seq)
            if sum(s.size for s in t.tensors.values()) != parameters:
                wrong.append(name)
        return Measured(error=float(len(wrong)), bound=0.0, cases=len(published), note=f"parameter counts {wrong or 'as published'}")
    return check


def _graph(family: str, kind: str, seq: int, sizes: Any = None, batch: int = 1, training: bool = False) -> tuple[Graph, StateLayout]:
    own, c = FAMILY_CASES[family].family, sizes or FAMILY_CASES[family].small
    probe = Tracer("probe")
    own.loss(probe, c, batch, seq, False)
    layout = StateLayout(probe.tensors.values())
    t = Tracer(kind, layout)
    if kind == "decode":
        t.output("logits", own.decode(t, c, batch, seq))
    else:
        for name, value in zip(("loss_sum", "count"), own.loss(t, c, batch, seq, training)):
            t.output(name, value)
    return prune(t.graph), layout


def _random_params(layout: StateLayout, rng: np.random.Generator) -> tuple[np.ndarray, Params]:
    flat, params = np.zeros(layout.size), {}
    for s in layout.tensors:
        x = (1.0 if s.init.kind == "ones" else 0.0) + 0.4 * rng.standard_normal(s.shape)
        flat[layout.offsets[s.name] : layout.offsets[s.name] + s.size] = x.ravel()
        params[s.name] = x
    return flat, params


def _against_reference(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """The traced model through the oracles equals the plain reference to float64 roundoff (about 1e4 operations deep: 1e-11)."""
        c, reference = FAMILY_CASES[family].small, FAMILY_CASES[family].reference
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


def settings(sizes: Any, rng: np.random.Generator, n: int) -> list[Any]:
    """`n` values of a family's sizes, whose settings are drawn: each window, a tied and an untied head, documents and none, heads
    of their own width and of width / heads, each choice of biases and each form of scaled frequencies come in turn."""
    found, known = [], {f.name for f in fields(sizes)}
    biases, widths = rng.permutation(["none", "qkv", "qkv", "all"]), rng.permutation([0, 0, 2, 6])
    scaled, ends = {0: 4, 1: 0, 3: 1, 9: 4}, 1 + rng.uniform(size=n)  # by window: a query that sees itself alone is turned in vain
    strata = rng.permutation(4)  # of the logarithm of rope's base, from 10 to 10^6
    windows, halves = rng.permutation([0, 1, 3, 9]), [rng.permutation([False, True]) for _ in range(3)]
    for i in range(n):
        drawn = {"window": int(windows[i % 4]), "documents": bool(halves[0][i % 2]), "tied": bool(halves[1][i // 2 % 2]),
                 "z_loss": float(10 ** rng.uniform(-4, -1)) if halves[2][i % 2] else 0.0,
                 "norm_eps": float(10 ** rng.uniform(-4, -1)), "head_dim": int(widths[i % 4]), "attention_bias": str(biases[i % 4]),
                 "rope_scaling": (2.5, 0.3 * ends[i], 1.6 * ends[i], 9.0)[: scaled[int(windows[i % 4])]],
                 "rope_base": float(10 ** (1 + 1.25 * (strata[i % 4] + rng.uniform())))}
        found.append(replace(sizes, **{k: v for k, v in drawn.items() if k in known}))
    return found


def _with_settings(family: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """Two sequences of drawn documents, under drawn settings: the loss of training and of validation is that of the documents one
        by one; decode's logits give the loss of the tokens that follow."""
        batch, seq, worst, reference = 2, 21, 0.0, FAMILY_CASES[family].reference
        drawn = settings(replace(FAMILY_CASES[family].small, positions=seq), rng, 4)
        for c in drawn:
            graph, layout = _graph(family, "loss", seq, c, batch)
            flat, params = _random_params(layout, rng)
            cuts = [[0, *np.sort(rng.choice(np.arange(1, seq), 2 * c.documents, replace=False)).tolist(), seq] for _ in range(batch)]
            starts = np.stack([np.repeat(cut[:-1], np.diff(cut)) for cut in cuts])
            given = {"tokens": rng.integers(0, 11, (batch, seq)), "targets": rng.integers(-1, 11, (batch, seq)),
                     "positions": np.arange(seq) - starts, "documents": starts + 7}
            given = {k: v.astype(np.int32) for k, v in given.items()}
            trained, _ = _graph(family, "loss", seq, c, batch, training=True)
            losses = [float(evaluate(g, {k: given[k] for k in g.inputs}, {"param": flat})[0]["loss_sum"]) for g in (graph, trained)]
            want = sum(reference(c, params, given["tokens"][b, low:high], given["targets"][b, low:high])
                       for b, cut in enumerate(cuts) for low, high in pairwise(cut))
            worst = max(worst, *(abs(loss - want) / abs(want) for loss in losses))
            last, only = rng.integers(0, seq, batch), np.full((batch, seq), -1, np.int32)
            only[np.arange(batch), last] = rng.integers(0, 11, batch)
            out, _ = evaluate(graph, {k: {**given, "targets": only}[k] for k in graph.inputs}, {"param": flat})
            graph, _ = _graph(family, "decode", seq, c, batch)
            inputs = {**given, "index": last.astype(np.int32)}
            logits = evaluate(graph, {k: inputs[k] for k in graph.inputs}, {"param": flat})[0]["logits"]
            lse = np.log(np.exp(logits).sum(1))
            want = float((lse - logits[np.arange(batch), only.max(1)] + c.z_loss * lse * lse).sum())
            worst = max(worst, abs(float(out["loss_sum"]) - want) / abs(want))
        return Measured(error=worst, bound=1e-11, cases=3 * len(drawn))
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
        c, tensors = FAMILY_CASES[family].small, []
        for tied in (True, False):
            t = Tracer("decay")
            FAMILY_CASES[family].family.loss(t, replace(c, tied=tied), 1, 4)
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


def _init_moments(rng: np.random.Generator) -> Measured:
    """200,000 draws: mean within 5 sigma of 0, variance within 5 sigma of std^2, no draw repeated across names or seeds. The same name has
    the same bits."""
    n, seed = 200_000, int(rng.integers(1 << 30))
    a = draw(TensorSpec("a", (n,), "u", Init("normal", 0.02)), seed).astype(np.float64)
    b = draw(TensorSpec("b", (n,), "u", Init("normal", 0.02)), seed).astype(np.float64)
    again = draw(TensorSpec("a", (n,), "u", Init("normal", 0.02)), seed)
    z = [abs(a.mean()) / 0.02 * sqrt(n), abs(a.var() / 0.02**2 - 1) / sqrt(2 / n), abs(float(np.corrcoef(a, b)[0, 1])) * sqrt(n)]
    few = TensorSpec("a", (8,), "u", Init("normal", 0.02))
    seeds = {draw(few, s).tobytes() for s in (seed, seed + (1 << 30), seed + (1 << 32), seed + (1 << 62), seed + (1 << 63))}
    sound = (again == a.astype(np.float32)).all() and len(seeds) == 5
    return Measured(error=max(z) + (0 if sound else np.inf), bound=5.0, cases=8, note="sigmas")


def _initial(rng: np.random.Generator) -> Measured:
    """A whole array of parameters, of tensors in one piece and in many, as its definition gives them: the words of one generator a tensor,
    pair after pair, by Box and Muller. Padding is zero whatever lay there; any number of threads gives the same bits."""
    sizes = [int(n) for n in rng.integers(1, 70, 3)] + [int(rng.integers(3, 5)) * PIECE + int(n) for n in rng.integers(0, 9, 2)]
    kinds = [Init("normal", float(10.0 ** rng.uniform(-3, 1))) for _ in sizes] + [Init("ones"), Init("zeros")]
    tensors = [TensorSpec(f"u.{i}.t", (n,), f"u.{i % 3}", kinds[i]) for i, n in enumerate([*sizes, 5, 6])]
    layout, seed = StateLayout(tensors), int(rng.integers(1 << 63))
    want = np.zeros(layout.size, np.float32)
    for spec in tensors:
        at = slice(layout.offsets[spec.name], layout.offsets[spec.name] + spec.size)
        if spec.init.kind == "normal":
            key = int.from_bytes(hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()[:16], "little")
            u = (np.random.Philox(key=key).random_raw(2 * (-(-spec.size // 2))) >> np.uint64(11)) * 2.0**-53
            radius, angle = np.sqrt(-2 * np.log1p(-u[0::2])), 2 * np.pi * u[1::2]
            want[at] = (np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel() * spec.init.std)[: spec.size]
        else:
            want[at] = spec.init.kind == "ones"
    wrong = 0
    for workers in (1, 2, 7, 0):
        got = np.full(layout.size, np.nan, np.float32)
        fill_initial(got, layout, seed, workers)
        wrong += int(np.count_nonzero(got.view(np.uint32) != want.view(np.uint32)))
    return Measured(error=float(wrong), bound=0.0, cases=4, note="elements whose bits differ")


def _gradient(family: str) -> Case:
    """The differentiate pass's whole-model check on this family."""
    def check(rng: np.random.Generator) -> Measured:
        from alpha.gates.contracts.passes.differentiate import finite_difference

        (sizes,) = settings(FAMILY_CASES[family].whole, rng, 1)
        return finite_difference(reference_of(family, FAMILY_CASES[family].family, sizes, BATCH), rng)
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
        c = FAMILY_CASES[family].small
        return refuses(ConfigError, lambda: FAMILY_CASES[family].family.loss(Tracer("long"), c, 1, c.positions + 1))
    return check


# -- FLOPS model -----------------------------------------------------------------------------------------------------------------------


def _golden(rng: np.random.Generator) -> Measured:
    """Counted totals equal baselines/flops/v1.toml, whose numbers docs/flops.md derives by hand."""
    golden = read_toml(Path(__file__).parents[3] / "baselines" / "flops" / "v1.toml")["model"]
    wrong = []
    for name in sorted(golden.keys() & _sizes().keys()):
        t, seq = _trace(name)
        f, g = v1.count(t.graph, seq), golden[name]
        if (f.step, f.per_token_6n, f.matmul_parameters) != (g["step"], g["six_n"], g["matmul_parameters"]):
            wrong.append(name)
    return Measured(error=float(len(wrong) + len(set(golden) - set(_sizes()))), bound=0.0, cases=len(golden), note=str(wrong))


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
    for name, (case, c, seq) in _sizes().items():
        t, _ = _trace(name)
        f = v1.count(t.graph, seq)
        projections, mlp, channels = case.products(c)
        n = c.layers * (projections + mlp) + c.vocab * c.width
        attention = 6 * c.layers * channels * seq
        worst = max(worst, abs(f.per_token - (6 * n + attention)), abs(f.per_token_full_attention - (6 * n + 2 * attention)))
        apart = {PROJECTIONS: 2 * c.layers * projections, FEED_FORWARD: 2 * c.layers * mlp, LOGITS: 2 * c.vocab * c.width,
                 ATTENTION: attention // 3}
        worst = max([worst, *(abs(f.forward[part] - seq * apart.get(part, 0)) for part in PARTS)])
    return Measured(error=float(worst), bound=0.0, cases=len(_sizes()))


def _counted(rng: np.random.Generator) -> Measured:
    """Products of drawn shapes, of weights and of activations, transposed or not, some of a weight that another reads as well, and
    attention between drawn numbers of queries and keys: each counts 2 M N K, or 4 B H T S D, half of it where causal."""
    wrong = []
    for _ in range(12):
        t, want, weights, held = Tracer("counted"), dict.fromkeys(PARTS, 0), dict[str, int](), list[Value]()
        for i in range(int(rng.integers(2, 6))):
            m, n, k = (int(x) for x in rng.choice(np.arange(2, 30), 3, replace=False))
            lead = tuple(int(x) for x in rng.integers(2, 4, int(rng.integers(0, 2))))
            turned, part = (rng.random(2) < 0.5).tolist(), (PROJECTIONS, FEED_FORWARD, LOGITS, OTHERS)[int(rng.integers(4))]
            layer = LOGITS if part == LOGITS else "block.0"
            name = {PROJECTIONS: "attention.q", FEED_FORWARD: "mlp.up", LOGITS: "weight", OTHERS: "gate"}[part] + str(i)
            x = t.input(f"x{i}", (*lead, *((k, m) if turned[0] else (m, k))), "f32")
            with t.unit(layer):
                if held and rng.random() < 0.3:  # the same weight once more, to whatever it fits
                    w, x = held[-1], t.input(f"y{i}", (5, held[-1].shape[0]), "f32")
                    part, turned, size = part_of_weight(w.name) if layer != LOGITS else LOGITS, [False, False], 5 * w.type.size
                else:
                    w = t.param(name, (n, k) if turned[1] else (k, n), Init("zeros"))
                    held.append(w)
                    size = prod(lead) * m * n * k
                t.matmul(x, w, trans_a=turned[0], trans_b=turned[1])
            want[part] += 2 * size
            weights[w.name] = w.type.size
        with t.unit("block.1"):  # of two activations: no weight says whose it is
            a, b_, c_ = (int(x) for x in rng.integers(2, 30, 3))
            t.matmul(t.input("left", (a, b_), "f32"), t.input("right", (b_, c_), "f32"))
            want[OTHERS] += 2 * a * b_ * c_
        for i, causal in enumerate((False, True)):
            b, heads, d, queries, keys = (int(x) for x in rng.choice(np.arange(1, 20), 5, replace=False))
            q, kv = t.input(f"q{i}", (b, queries, 2 * heads, d), "f32"), t.input(f"k{i}", (b, keys, heads, d), "f32")
            t.attention(q, kv, kv, causal=causal, window=0, scale=1.0)
            packed = t.input(f"p{i}", (b, queries, 4 * heads * d), "f32")
            t.attention_packed(packed, heads=2 * heads, kv_heads=heads, causal=causal, window=0, scale=1.0)
            full = 8 * b * heads * queries * d * (queries + keys)
            want[ATTENTION] += full - (4 * b * heads * queries * d * queries + 4 * b * heads * queries * d * keys) * causal
        f = v1.count(t.graph, 1)
        wrong += [] if (dict(f.forward), f.matmul_parameters) == (want, sum(weights.values())) else [f"{f.forward} for {want}"]
    return yes(not wrong, wrong[0][:300] if wrong else "", cases=12)


def _attended(rng: np.random.Generator) -> Measured:
    """Rows of attention count 4 D for each head and each pair of a query and a key that it sees, causal or not, within a window or not, and
    5 / 2 of that for the backward: pairs counted one by one, of drawn numbers of queries and keys."""
    wrong, cases = list[str](), 40
    for _ in range(cases):
        b, t, s, g, d, each = (int(x) for x in rng.integers(1, 9, 6))
        causal, window = bool(rng.integers(2)), int(rng.integers(0, s + 2)) * int(rng.integers(2))
        attrs = {"causal": causal, "window": window, "scale": 1.0}
        for of, keys in (("attention", s), ("attention_packed", t)):
            places = [(i + keys - t, j) for i in range(t) for j in range(keys)]
            want = 4 * b * g * each * d * sum((j <= i or not causal) and (i - j < window or not window) for i, j in places)
            q, kv, lse = (TensorType(x, "f32") for x in ((b, t, g * each, d), (b, keys, g, d), (b, g * each, t)))
            o, qkv = TensorType((b, t, g * each * d), "f32"), TensorType((b, t, (each + 2) * g * d), "f32")
            packed = of == "attention_packed"
            attrs = {**attrs, "heads": g * each, "kv_heads": g} if packed else attrs
            found = row(of).flops([qkv] if packed else [q, kv, kv], attrs)
            back = row(f"{of}_bwd").flops([o, qkv, o, lse] if packed else [q, q, kv, kv, q, lse], attrs)
            wrong += [] if (found, back) == (want, want * 5 // 2) else [f"{of} of {t} and {keys}, {attrs}: {found} and {back} for {want}"]
    return yes(not wrong, "; ".join(wrong[:2]), cases=4 * cases)


def _executed(ref: Reference, rng: np.random.Generator) -> Measured:
    """What a step executes, part by part: in all what the plans of all ranks say; of the forward what as many validations execute, where
    dropout does nothing; in a block, products count with their weights, attention as itself, norms and sums as others."""
    p, wrong = program(ref.name, shards=4, micros=2), []
    micros = sum(call.shard is not None for call in p.schedule)
    found, seen = executed(p), executed(replace(p, schedule=(Step("eval"),) * micros))
    if sum(found.values()) != sum(p.plans[call.plan].flops() for call in p.schedule):
        wrong.append("the sum of all")
    many = data_parallel.program(ref.name, 2, 1)
    calls = [(role, call) for role in map(many.role, range(2)) for call in role.schedule]
    if sum(executed(many).values()) != sum(many.plans[role.plans[call.plan]].flops() for role, call in calls):
        wrong.append("the sum of all of two ranks")
    for part in (LOGITS, PROJECTIONS, FEED_FORWARD, ATTENTION):
        if not found[part, "forward"] == seen[part, "forward"] > 0:
            wrong.append(f"{part}: {found[part, 'forward']} for {seen[part, 'forward']}")
    for call in p.schedule:
        for x in p.plans[call.plan].launches:
            if x.layer.startswith("block."):
                name = ATTENTION if x.op.startswith("attention") else "products" if "matmul" in x.op or "linear" in x.op else ""
                name = OTHERS if name == "" and (x.op.startswith("sum") or "norm" in x.op or x.op == "dropout") else name
                told = part_of(x, tensors_by_place(p.states))
                if name and told != name and not (name == "products" and told in (PROJECTIONS, FEED_FORWARD)):
                    wrong.append(f"{x.op} of {x.layer} in {told}")
    tokens, times = 7, int(rng.integers(1, 5))
    model = v1.ModelFlops(tokens, {part: int(rng.integers(1, 99)) * (part not in (OTHERS, EMBEDDING)) for part in PARTS}, 1)
    table = by_part(model, p, times * tokens)
    for part in PARTS:
        for to in DIRECTIONS:
            useful = times * model.forward[part] * {"forward": 1, "backward": 2}.get(to, 0)
            both = (useful, found.get((part, to), 0))
            if table.get((part, to)) != (both if any(both) else None):
                wrong.append(f"{part}, {to}: {table.get((part, to))} for {both}")
    if [*table] != [(part, to) for to in DIRECTIONS for part in PARTS if (part, to) in table]:
        wrong.append("the order of a table")
    again = program(ref.name, policy="block")
    phases = {"recompute": 0, "update": 0}
    for call in again.schedule:
        for x in again.plans[call.plan].launches:
            if x.phase in ("recompute", "update"):
                phases[x.phase] += x.flops
    sums = {to: sum(n for (_, of), n in executed(again).items() if of == to) for to in DIRECTIONS}
    if not 0 < phases["recompute"] == sums["recompute"] or not 0 < phases["update"] == sums["update"]:
        wrong.append(f"{sums} for {phases}")
    return yes(not wrong, "; ".join(wrong[:3]), cases=9)


def _mfu(rng: np.random.Generator) -> Measured:
    t, seq = _trace("gpt2-124m")
    f = v1.count(t.graph, seq)
    value = v1.mfu(550_000, f, 989.5e12)
    stamped = v1.stamp(989.5e12, "x")
    return yes(abs(value - 550_000 * f.per_token / 989.5e12) < 1e-15 and "flops/v1" in stamped and "causal" in stamped)


def _family(family: str) -> dict[str, list[tuple[str, Case]]]:
    return {"parity": [("reference", _against_reference(family)), ("settings", _with_settings(family)),
                       ("published-counts", _counts(family)), ("causal", _causal(family)), ("decay-and-init", _decay(family)),
                       ("moments", _init_moments), ("initial", _initial), ("wide", of_settings.logits_are_wide),
                       *FAMILY_CASES[family].parity],
            "gradient": [("whole-model", _gradient(family))], "determinism": [("elsewhere", _same_elsewhere(family))],
            "faults": [("too-long", _too_long(family)), ("edges", edges.models), *FAMILY_CASES[family].faults]}


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = merged({
    **{f"model.{name}": _family(name) for name in FAMILY_CASES},
    "flops.v1": {"parity": [("golden", _golden), ("golden-parts", _golden_parts), ("closed-form", _formula), ("counted", _counted),
                            ("attended", _attended), *both(_executed, "executed-"), ("mfu", _mfu)]},
})
