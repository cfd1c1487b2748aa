"""Cases of what a run file becomes: which number of it goes where in the Program, the model, the optimizer and the list of components, and
what is refused before any of it is built. Floor 7.

Whatever builds a Program is stood in for here and notes what it is given; the drawn numbers differ, so that no two can change places.
"""

# mypy: disable-error-code="arg-type,func-returns-value"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import config
from alpha import cores as counted
from alpha.component import Measured
from alpha.config import Config
from alpha.flops.v1 import ModelFlops
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.graph.state import Init
from alpha.graph.trace import Tracer
from alpha.optim.schedules import ScheduleConfig
from alpha.parallel.data import DataParallel
from alpha.passes.build import StepShape
from alpha.train import assemble
from alpha.types import TensorType

FILE = """
[run]
name = "wired"
[model]
family = "{family}"
layers = 2
width = {width}
heads = {heads}
[data]
[train]
steps = {steps}
batch = {batch}
[optim]
lr = 0.25
"""
"""What a run file must say; the rest is drawn as overrides."""

BASE = ("differentiate.pass", "expand.pass", "layout.pass", "memory.pass", "program.step", "schedule.pass", "select.pass", "verify.pass")
RUN = ("checkpoint.ranges", "flops.v1", "sampler.permuted", "shards.v2", "train.loop")


@dataclass(frozen=True)
class Sizes:
    """As much of a family's sizes as is looked at."""

    z_loss: float


@dataclass(frozen=True)
class Built:
    """What stands for a Program. `given`: what it was built from; `verified`: how often."""

    given: dict[str, Any] = field(default_factory=dict)
    verified: int = 0
    made_by: tuple[str, ...] = ()

    def components(self) -> list[str]:
        """What its kernels and makers are."""
        return ["kernel.b", "kernel.a", *self.made_by]


class Rows:
    """A catalogue that has `update_scalars` or not, and notes who asks."""

    def __init__(self, has: bool) -> None:
        self.has, self.asked = has, list[tuple[str, str]]()

    def for_op(self, op: str, backend: str) -> list[str]:
        """The kernels of a row."""
        self.asked.append((op, backend))
        return ["kernel"] * self.has


class Drawn:
    """The numbers of a run file: all differ. `none`: those are 0 by which a run does without something."""

    def __init__(self, rng: np.random.Generator, cuda: bool = False, none: bool = False) -> None:
        self.cuda, self.family = cuda, str(rng.choice(["gpt", "llama"]))
        self.heads, self.width = int(rng.choice([2, 4])), int(rng.choice([64, 192]))
        self.shards, self.micro, self.micros = int(rng.choice([2, 4])), int(rng.integers(5, 8)), int(rng.integers(2, 4))
        self.batch, self.sequence, self.steps = self.shards * self.micro * self.micros, int(rng.integers(33, 60)), int(rng.integers(200,
                                                                                                                                    300))
        self.replay, self.zero, self.fuse = int(rng.integers(2, 9)), int(rng.integers(2)), bool(rng.integers(2))
        self.recompute = str(rng.choice(["none", "block", "ops:gelu,layernorm"]))
        self.optim, self.schedule = str(rng.choice(["adamw", "sgd"])), str(rng.choice(["cosine", "wsd"]))
        self.warmup, self.decay = int(rng.integers(2, 20)), int(rng.integers(21, 90))
        drawn = rng.permutation(np.arange(1, 10)) / 10 + rng.uniform(0, 0.05, 9)
        names = ("lr", "beta1", "beta2", "eps", "momentum", "weight", "clip", "floor", "z")
        self.numbers = {name: round(float(x), 4) for name, x in zip(names, drawn)}
        self.numbers |= dict.fromkeys(("momentum", "weight", "clip", "floor", "z"), 0.0) if none else {}

    def config(self, *overrides: str) -> Config:
        """The run file, and what is set beside it."""
        n = self.numbers
        text = FILE.format(family=self.family, width=self.width, heads=self.heads, steps=self.steps, batch=self.batch)
        return config.parse(text, (
            f"model.z_loss={n['z']}", f"data.sequence={self.sequence}", f"train.shards={self.shards}", f"train.micro_batch={self.micro}",
            f"train.replay={self.replay}", f"train.zero={self.zero}", f"train.fuse={str(self.fuse).lower()}",
            f"train.recompute='{self.recompute}'", f"optim.name='{self.optim}'", f"optim.lr={n['lr']}",
            f"optim.betas=[{n['beta1']},{n['beta2']}]", f"optim.eps={n['eps']}", f"optim.momentum={n['momentum']}",
            f"optim.weight_decay={n['weight']}", f"optim.clip={n['clip']}", f"optim.floor={n['floor']}", f"optim.warmup={self.warmup}",
            f"optim.schedule='{self.schedule}'", *([f"optim.decay={self.decay}"] if self.schedule == "wsd" else []),
            *(["machine.backend='cuda'", "train.precision='bf16'"] if self.cuda else []), *overrides))

    @property
    def rates(self) -> ScheduleConfig:
        """The learning rates that it asks for."""
        return ScheduleConfig(kind=self.schedule, peak=self.numbers["lr"], warmup=self.warmup, total=self.steps,
                              decay=self.decay if self.schedule == "wsd" else 0, floor=self.numbers["floor"])

    @property
    def updates(self) -> tuple[str, ScheduleConfig, dict[str, float]]:
        """The optimizer that it asks for."""
        n, both = self.numbers, {"weight_decay": self.numbers["weight"], "max_norm": self.numbers["clip"]}
        own = {"beta1": n["beta1"], "beta2": n["beta2"], "eps": n["eps"]} if self.optim == "adamw" else {"momentum": n["momentum"]}
        return self.optim, self.rates, {**own, **both}


class Family:
    """A family of models that notes what it is asked for, with one tensor of `n` elements."""

    def __init__(self, n: int = 64) -> None:
        self.n, self.asked = n, list[tuple[object, ...]]()

    def sizes(self, cfg: Config, vocab: int) -> Sizes:
        """Sizes of a run's model."""
        self.asked.append(("sizes", cfg.model.width, vocab))
        return Sizes(cfg.model.z_loss)

    def loss(self, t: Tracer, sizes: Sizes, batch: int, seq: int, training: bool) -> tuple[str, str]:
        """The loss of a batch."""
        self.asked.append(("loss", sizes.z_loss, batch, seq, training))
        t.param("w", (self.n,), Init("ones"))
        return "sum", "count"

    def decode(self, t: Tracer, sizes: Sizes, batch: int, seq: int) -> str:
        """The logits of one text."""
        self.asked.append(("decode", sizes.z_loss, batch, seq))
        return "logits"


def _noted(name: str) -> Any:
    return lambda schedule, **numbers: (name, schedule, numbers)


def programs(rng: np.random.Generator) -> Measured:
    """Every number of a drawn run file, where the builder of Programs, the model and the optimizer are given it; the Program of many ranks
    is verified, and each says what made it."""
    checks: Named = []
    for trial in range(16):
        d = Drawn(rng, cuda=trial % 2 == 1, none=trial >= 8)
        ranks, half = 1 + trial // 2 % 2, trial // 4 % 2  # each choice with each other one, beside what is drawn
        d.optim, d.schedule, d.zero = ("adamw", "sgd")[half], ("cosine", "wsd")[trial % 2], half
        d.fuse, d.recompute = trial % 8 in (0, 3, 5, 6), ("none", "block", "ops:gelu,layernorm")[trial % 3]
        cfg, own, rows = d.config(), Family(), Rows(bool(rng.integers(2)))
        vocab, threads = 8 * int(rng.integers(40, 80)), int(rng.integers(1, 5))
        with instead(assemble, build_program=lambda **given: Built(given), verify_program=lambda p: replace(p, verified=p.verified + 1),
                     family=lambda name: own if name == d.family else None, adamw=_noted("adamw"), sgd=_noted("sgd"),
                     kernel_for=lambda *asked: None):
            made = assemble.program_for(cfg, vocab, rows, threads, ranks)
            given = dict(made.given)  # type: ignore[attr-defined]
            model = given.pop("model")
            own.asked.clear()
            t = Tracer("wired")
            found = [model.loss(t, True), model.loss(Tracer("wired"), False), model.decode(t), model.name]
        z = d.numbers["z"]
        same(checks, "model", (found, own.asked), ([("sum", "count"), ("sum", "count"), "logits", d.family], [
            ("loss", z, d.micro, d.sequence, True), ("loss", 0.0, d.micro, d.sequence, False), ("decode", z, 1, d.sequence)]))
        many = DataParallel(2, d.zero, d.micros, precision="bf16" if d.cuda else "f32", one_row=rows.has) if ranks > 1 else None
        backend = "cuda" if d.cuda else "cpu"
        shape = StepShape(micro_batch=d.micro, seq=d.sequence, shards=d.shards, micros=d.micros, replay=d.replay)
        policy = ("ops", ("gelu", "layernorm")) if d.recompute.startswith("ops") else (d.recompute, ())
        same(checks, "program", given, {
            "name": "wired", "optimizer": d.updates, "shape": shape, "catalogue": rows, "backend": backend, "threads": threads,
            "precision": "bf16" if d.cuda else "f32", "policy": policy, "fused": d.fuse, "over": many})
        same(checks, "rows asked for", rows.asked, [("update_scalars", backend)] * (ranks > 1))
        who = [f"model.{d.family}", f"optimizer.{d.optim}", f"schedule.{d.schedule}",
               "executor.cpu" if not d.cuda else "executor.cuda_ranks" if ranks > 1 else "executor.cuda",
               *["fuse.pass"] * d.fuse, *["recompute.pass"] * (d.recompute != "none"),
               *["data_parallel.pass", "verify_program.pass"] * (ranks > 1)]
        same(checks, "made by", (made.made_by, made.verified), ((*BASE, *who), ranks - 1))  # type: ignore[attr-defined]
    return all_hold(checks)


def parts_of_a_run(rng: np.random.Generator) -> Measured:
    """The components of a run are those of its Program, those of every run, and one for each choice of the file that brings one: for drawn
    choices exactly these."""
    checks: Named = []
    kinds = ("bytes", "bpe")
    for trial in range(16):
        mixed, file, packed, start = (bool(x) for x in rng.integers(2, size=4))
        fetch, order2, buckets = bool(rng.integers(2)), bool(rng.integers(2)), packed and bool(rng.integers(2))
        prepared, kind = trial % 3 == 2, kinds[int(rng.integers(2))]
        corpus = "made" if prepared else str(rng.choice(["stdlib", "texts"]))
        d = Drawn(rng)
        cfg = d.config(*([f"data.mixture='{corpus}:3, more:1'"] if mixed else [f"data.corpus='{corpus}'"]),
                       *(["data.tokenizer_file='t.json'"] if file else [f"data.tokenizer='{kind}'"]),
                       *(["data.packing='documents'"] if packed else []), *(["data.documents=true", "data.buckets=4"] if buckets else []),
                       f"data.prefetch={int(fetch)}", f"data.baseline={str(order2).lower()}",
                       f"train.start_from='{'hf:model' if start else 'runs/hf:x'}'")
        known, opened = SimpleNamespace(kind="hf"), list[tuple[object, ...]]()
        with instead(assemble, is_prepared=lambda path: path.name == "made",
                     load_tokenizer=lambda path: opened.append((path,)) or SimpleNamespace(kind="known"),
                     open_tokenizer=lambda path, end: opened.append((path, end)) or known):
            found = assemble.components_of(cfg, Built(made_by=("pass.one", "kernel.a")))
        expected = {"kernel.a", "kernel.b", "pass.one", *RUN}
        expected |= {"tokenizer.known" if prepared else "tokenizer.hf" if file else f"tokenizer.{kind}"}
        sources = [corpus, *["more"] * mixed]
        expected |= {"corpus.prepared"} if prepared else {"split.by_file", *(
            "corpus.stdlib" if name == "stdlib" else "corpus.folder" for name in sources)}
        for name, there in (("sampler.mixed", mixed), ("sampler.prefetched", fetch), ("sampler.packed", packed),
                            ("sampler.bucketed", buckets),
                            ("checkpoint.hf", start), ("ngram.order2", order2)):
            expected |= {name} if there else set()
        same(checks, f"{trial}: components", found, sorted(expected))
        same(checks, "opened", opened, [(Path("made/tokenizer.json"),)] if prepared else [(Path("t.json"), "")] if file else [])
    return all_hold(checks)


def calls_and_flops(rng: np.random.Generator) -> Measured:
    """The envelopes are asked about each distinct call of a Program once, in order; FLOPs are counted on one microbatch of the training
    loss; the ids of a model, the threads of a rank and the shares of cores are the file's, or those that there are."""
    checks: Named = []
    pool = [(f"kernel.{i}", (TensorType((i + 1, 4), "f32"), TensorType((4,), "i32")), {"a": i, "b": str(i)}) for i in range(3)]
    pool += [(pool[0][0], pool[0][1], {"a": 9, "b": "0"}), (pool[0][0], pool[0][1][::-1], pool[0][2]), ("kernel.9", *pool[0][1:])]
    drawn = [[pool[int(i)] for i in rng.integers(len(pool), size=7)] for _ in range(3)]
    plans = {str(n): SimpleNamespace(launches=[SimpleNamespace(component=c, ins=[SimpleNamespace(type=t) for t in types], attrs=attrs)
                                               for c, types, attrs in calls]) for n, calls in enumerate(drawn)}
    every = [call for calls in drawn for call in calls]
    once = [call for i, call in enumerate(every) if call not in every[:i]]
    same(checks, "calls", assemble.calls_of(SimpleNamespace(plans=plans)), once)
    d, own, asked = Drawn(rng), Family(), list[object]()
    flops = ModelFlops
    with instead(assemble, family=lambda name: own, count=lambda graph, tokens: asked.append((graph.name, tokens)) or flops):
        found = assemble.flops_for(d.config(), 77)
    same(checks, "flops", (found, asked, own.asked), (flops, [("flops", d.micro * d.sequence)], [
        ("sizes", d.width, 77), ("loss", d.numbers["z"], d.micro, d.sequence, True)]))
    for wanted, ids, vocab in ((0, 300, 300), (300, 300, 300), (400, 300, 400)):
        same(checks, f"{wanted} of {ids}", assemble.vocabulary(d.config(f"model.vocab_size={wanted}"), ids), vocab)
    same(checks, "too few ids", said(lambda: assemble.vocabulary(d.config("model.vocab_size=299"), 300)), error_text(
        "ConfigError", "the tokenizer has more ids than the model", "300 ids, model.vocab_size = 299", "at least 300",
        "raise model.vocab_size, or leave it 0"))
    for cores in (1, 2, 3, int(rng.integers(4, 64))):
        for system in (SimpleNamespace(sched_getaffinity=lambda pid, n=cores: range(n if pid == 0 else 0), cpu_count=lambda: 99),
                       SimpleNamespace(cpu_count=lambda n=cores: n)):
            with instead(counted, os=system):
                for ranks in (1, 2, 3, 5, 64):
                    share = max(1, cores // ranks)
                    same(checks, f"{cores} cores, {ranks} ranks", assemble.threads_for(d.config(), ranks), share if share < 8 else 8)
                most = 4 * cores
                same(checks, "all", assemble.threads_for(d.config(f"machine.threads={most}"), 2), most)
                same(checks, "more", said(lambda: assemble.threads_for(d.config(f"machine.threads={most + 1}"))), error_text(
                    "MachineError", "machine.threads is far more than this machine has cores", most + 1, f"at most {most} on {cores} cores",
                    "lower it, or leave it 0"))
    with instead(counted, os=SimpleNamespace(cpu_count=lambda: None)):
        same(checks, "unknown cores", assemble.threads_for(d.config()), 1)
    return all_hold(checks)


def refused_programs(rng: np.random.Generator) -> Measured:
    """Vocabularies and heads that a GPU's kernels do not take, ops that there are not, parameters that are too large, keys that exclude
    each other: each refusal by all its words, and the nearest that is taken."""
    checks: Named = []
    d, gpu = Drawn(rng), Drawn(rng, cuda=True)

    def built(cfg: Config, vocab: int = 512, widths: Sequence[int] = (), n: int = 64, asked: list[Any] | None = None) -> str:
        def kernel(catalogue: object, *call: Any) -> object:
            (asked if asked is not None else []).append(call)
            width = call[2][0].shape[2] // (cfg.model.heads + 2 * (cfg.model.kv_heads or cfg.model.heads))
            return "kernel" if width in widths else None

        with instead(assemble, build_program=lambda **given: Built(given), family=lambda name: Family(n), kernel_for=kernel,
                     MOST_BYTES=1 << 30):
            return said(lambda: type(assemble.program_for(cfg, vocab, Rows(True), 1)).__name__)

    vocab = 8 * int(rng.integers(40, 60)) + int(rng.integers(1, 8))
    for tokenizer, do in (("bpe", f"take data.vocab = {vocab - vocab % 8}"), ("bytes", 'take tokenizer = "bpe"')):
        same(checks, tokenizer, built(gpu.config(f"data.tokenizer='{tokenizer}'"), vocab), error_text(
            "ConfigError", "the vocabulary does not fit the GPU's matrix products", f"{vocab} ids ({tokenizer})", "a multiple of 8", do))
    same(checks, "a vocabulary of the CPU", built(d.config(), vocab), "Built")
    for op, do in (("gelo", "did you mean `gelu`?"), ("zzzzzzzz", "see alpha/ops")):
        same(checks, op, built(d.config(f"train.recompute='ops:gelu,{op}'")), error_text(
            "ConfigError", "train.recompute names an op that does not exist", op, "names of the op table, such as gelu or layernorm", do))
    head = gpu.width // gpu.heads
    for more, family, heads in (((), "gpt", gpu.heads), ((f"model.head_dim={2 * head}",), "llama", gpu.heads),
                                (("model.kv_heads=1",), "llama", 1)):
        cfg = replace(gpu.config(), model=replace(gpu.config().model, family=family, **{
            x.split("=")[0].removeprefix("model."): int(x.split("=")[1]) for x in more}))
        own, calls = 2 * head if "dim" in str(more) else head, list[Any]()
        same(checks, "own width", built(cfg, widths=(8, own), asked=calls), "Built")
        first = calls[0]
        same(checks, "asked", [c[2][0].shape[2] for c in calls], [w * (gpu.heads + 2 * heads) for w in (*range(8, 513, 8), own)])
        same(checks, "call", first,
             ("cuda", "attention_packed", [TensorType((gpu.micro, gpu.sequence, 8 * (gpu.heads + 2 * heads)), "bf16")], {
            "heads": gpu.heads, "kv_heads": heads, "causal": True, "window": 0, "scale": 8**-0.5}))
        same(checks, "no width", built(cfg, widths=()), "Built")
        came = f"model.head_dim = {own}" if own > head else f"model.width {gpu.width} / model.heads {gpu.heads} = {head}"
        same(checks, "other widths", built(cfg, widths=(8, 512)), error_text(
            "ConfigError", "no kernel of the GPU takes attention heads of this width", came, "8, 512 channels a head",
            ("change model.head_dim" if family == "llama" else "change model.heads or model.width") + ", or train it on the CPU"))
    most = (1 << 30) // 4
    same(checks, "all that a kernel takes", built(d.config(), n=most), "Built")
    for backend, expected in ((d, error_text("ShapeError", "the parameters are too large for a kernel of the CPU", "1 GiB in f32",
                                             "at most 1 GiB", 'make the model smaller, or plan it for machine.backend = "cuda"')),
                                             (gpu, "Built")):
        same(checks, "more than a kernel takes", built(backend.config(), n=most + 1), expected)
    for choice, text in _excluded():
        cfg = replace(d.config(), data=replace(d.config().data, **choice))
        same(checks, f"{choice}", said(lambda: (assemble.sources_read(cfg), assemble.tokenizer_file_of(cfg), assemble.buckets_of(cfg))),
             text)
    return all_hold(checks)


def _excluded() -> list[tuple[dict[str, Any], str]]:
    """Keys of [data] -> what is read, the tokenizer's file and the buckets, or the error."""
    apart = "data.buckets needs packed documents that attention keeps apart"
    both = ('packing = "documents", of which it sorts the sequences, and documents = true, without which all cost the same',
            "set both in [data], or leave data.buckets out")
    other = ("the file's tokenizer, or one that is trained",)
    return [
        ({}, "(['stdlib'], None, 0)"),
        ({"mixture": "a:1, b/c:2", "tokenizer_file": "t/x.json", "tokenizer_end": "<end>"}, "(['a', 'b/c'], PosixPath('t/x.json'), 0)"),
        ({"packing": "documents", "documents": True, "buckets": 2, "corpus": "x"}, "(['x'], None, 2)"),
        ({"mixture": "a:1", "corpus": "x"}, error_text("ConfigError", "data.corpus and data.mixture exclude each other",
         "corpus x, mixture a:1", "one of them", "name the corpus in data.mixture, and remove data.corpus")),
        ({"tokenizer_end": "<end>"}, error_text("ConfigError", "data.tokenizer_end names a token of no file", "<end>",
                                                "data.tokenizer_file with it", "remove data.tokenizer_end, or give data.tokenizer_file")),
        ({"tokenizer_file": "a\0b"}, error_text("ConfigError", "data.tokenizer_file is no path",
                                                r"'a\x00b', which holds a control character",
                                                "a path that a file system can hold", "change data.tokenizer_file")),
        *(({"tokenizer_file": "t", name: value}, error_text(
            "ConfigError", f"data.tokenizer_file and data.{name} exclude each other", f"{name} = {value}", *other,
            f"remove data.{name} or data.tokenizer_file")) for name, value in (("tokenizer", "bytes"), ("vocab", 300), ("sample", 7))),
        ({"buckets": 1}, error_text("ConfigError", "data.buckets leaves every sequence where it is", 1, "at least 2, or 0 for none",
                                    "take 64, or leave data.buckets out")),
        *(({"buckets": 3, "packing": packing, "documents": documents}, error_text(
            "ConfigError", apart, f'buckets = 3, packing = "{packing}", documents = {str(documents).lower()}', *both))
          for packing, documents in (("windows", False), ("windows", True), ("documents", False))),
    ]
