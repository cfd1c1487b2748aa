"""From a Config to what a run is made of: the text and its tokens, the model and its Program. Floor 6."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from alpha.component import Catalogue
from alpha.config import Config
from alpha.data.corpus import Corpus, open_corpus
from alpha.data.files import sha256_hex, sweep
from alpha.data.sampler import PermutedSampler, window_count
from alpha.data.shards import TokenStream, token_stream
from alpha.data.split import Split, split_by_file
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from alpha.errors import ConfigError, CorruptError, MachineError
from alpha.flops.v1 import ModelFlops, count
from alpha.graph.ir import Value
from alpha.graph.plan import Program
from alpha.graph.trace import Tracer
from alpha.models.family import family
from alpha.ops.table import table
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw, sgd
from alpha.passes.build import Model, Optimizer, StepShape, build_program
from alpha.types import Attrs, TensorType

SPLIT_SEED = 0
"""The split does not follow the run's seed, so that runs with other seeds are validated on the same text."""

VOCABULARY_STEP = 8
"""Rows of logits lie 16 bytes apart, in bf16."""


@dataclass(frozen=True)
class Dataset:
    """The corpus, its split, the tokenizer and both token streams."""

    corpus: Corpus
    split: Split
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream


def open_data(cfg: Config) -> Dataset:
    """Hash the corpus, split it, train or load the tokenizer, tokenize or open both streams (all cached by content).

    InputError, CorruptError and MachineError as the parts say; InputError if a split is shorter than one sequence.
    """
    corpus = open_corpus(cfg.data.corpus)
    split = split_by_file(corpus, fraction=cfg.data.validation, seed=SPLIT_SEED)
    cache = Path(cfg.data.cache)
    tokenizer = tokenizer_for(cfg, split.train)
    sweep(cache)
    streams = [token_stream(side, tokenizer, cache) for side in (split.train, split.validation)]
    for stream in streams:
        window_count(stream, cfg.data.sequence)  # refuses here what would otherwise be refused after a long build
    return Dataset(corpus, split, tokenizer, *streams)


def tokenizer_for(cfg: Config, train: Corpus) -> Tokenizer:
    """The tokenizer of a run: fixed for bytes; BPE is trained on the train split alone and kept in the cache by what decides it.

    The file says what it was trained for: CorruptError where that is not what is asked for now.
    """
    if cfg.data.tokenizer == "bytes":
        return ByteTokenizer()
    asked = {"corpus": train.hash, "vocab": cfg.data.vocab, "sample_bytes": cfg.data.sample}
    path = Path(cfg.data.cache) / f"bpe-{cfg.data.vocab}-{sha256_hex(json.dumps(asked, sort_keys=True).encode())[:20]}.json"
    if path.is_file():
        found = load_tokenizer(path)
        if found.record.get("asked") != asked or found.vocab_size != cfg.data.vocab:
            raise CorruptError("a cached tokenizer is not the one that is asked for", came=f"{path}: {found.record.get('asked')}",
                               expected=asked, do="remove the file; it is trained again")
        return found
    text = train.sample(cfg.data.sample)
    tokenizer = BPETokenizer.train(text.texts(), cfg.data.vocab, record={"asked": asked, "sample": text.hash})
    tokenizer.save(path)
    return tokenizer


def sampler_for(cfg: Config, data: Dataset) -> PermutedSampler:
    """The order in which this run sees its windows."""
    return PermutedSampler(data.train, sequence=cfg.data.sequence, global_batch=cfg.train.batch, seed=cfg.run.seed)


def model_for(cfg: Config, vocab: int, batch: int) -> Model:
    """The model with `batch` sequences a call. Evaluation leaves out the z-loss: it reports nats of the text."""
    own, seq = family(cfg.model.family), cfg.data.sequence
    sizes = own.sizes(cfg, vocab)

    def loss(t: Tracer, training: bool) -> tuple[Value, Value]:
        return own.loss(t, sizes if training else replace(sizes, z_loss=0.0), batch, seq, training)

    def decode(t: Tracer) -> Value:
        return own.decode(t, sizes, 1, seq)

    return Model(name=cfg.model.family, loss=loss, decode=decode)


def optimizer_for(cfg: Config) -> Optimizer:
    """The update graph's builder. `clip = 0` means no clipping, as the row `clip_coefficient` says."""
    o = cfg.optim
    schedule = ScheduleConfig(kind=o.schedule, peak=o.lr, warmup=o.warmup, total=cfg.train.steps, decay=cfg.decay, floor=o.floor)
    if o.name == "adamw":
        return adamw(schedule, beta1=o.betas[0], beta2=o.betas[1], eps=o.eps, weight_decay=o.weight_decay, max_norm=o.clip)
    return sgd(schedule, momentum=o.momentum, weight_decay=o.weight_decay, max_norm=o.clip)


def program_for(cfg: Config, vocab: int, catalogue: Catalogue, threads: int) -> Program:
    """The Program of a run with a vocabulary of `vocab` ids, for its back end. `threads`: workers of the CPU.

    For cuda nothing but the catalogue's declarations is needed, no GPU and no driver. ConfigError where the vocabulary or an op of
    `train.recompute` does not fit; InputError from selection where no kernel covers a shape.
    """
    on_gpu = cfg.machine.backend == "cuda"
    if on_gpu and vocab % VOCABULARY_STEP:
        fitting = f"data.vocab = {vocab // VOCABULARY_STEP * VOCABULARY_STEP}" if cfg.data.tokenizer == "bpe" else 'tokenizer = "bpe"'
        raise ConfigError(
            "the vocabulary does not fit the GPU's matrix products",
            came=f"{vocab} ids ({cfg.data.tokenizer})",
            expected=f"a multiple of {VOCABULARY_STEP}",
            do=f"take {fitting}",
        )
    mode, ops = cfg.recompute
    for name in ops:
        if name not in table():
            close = difflib.get_close_matches(name, table(), n=1)
            raise ConfigError(
                "train.recompute names an op that does not exist",
                came=name,
                expected="names of the op table, such as gelu or layernorm",
                do=f"did you mean `{close[0]}`?" if close else "see alpha/ops",
            )
    program = build_program(
        name=cfg.run.name,
        model=model_for(cfg, vocab, cfg.micro_batch),
        optimizer=optimizer_for(cfg),
        shape=StepShape(micro_batch=cfg.micro_batch, seq=cfg.data.sequence, shards=cfg.train.shards, micros=cfg.micros,
                        replay=cfg.train.replay),
        catalogue=catalogue,
        backend=cfg.machine.backend,
        precision=cfg.train.precision,
        threads=threads,
        policy=(mode, ops),
        fused=cfg.train.fuse,
    )
    return replace(program, made_by=made_by(cfg))


def flops_for(cfg: Config, vocab: int) -> ModelFlops:
    """Useful FLOPs of one microbatch (flops/v1)."""
    t = Tracer("flops")
    model_for(cfg, vocab, cfg.micro_batch).loss(t, True)
    return count(t.graph, cfg.micro_batch * cfg.data.sequence)


def threads_for(cfg: Config) -> int:
    """Worker threads: the configured number, else the cores that this process may use. MachineError for more than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cfg.machine.threads > 4 * cores:
        raise MachineError(
            "machine.threads is far more than this machine has cores",
            came=cfg.machine.threads,
            expected=f"at most {4 * cores} on {cores} cores",
            do="lower it, or leave it 0",
        )
    return cfg.machine.threads or min(cores, 8)


# -- what a run is made of -----------------------------------------------------------------------------------------------------


def calls_of(program: Program) -> list[tuple[str, tuple[TensorType, ...], Attrs]]:
    """Every distinct launch of a Program as (component, input types, attributes): what the envelopes are asked about."""
    seen: dict[str, tuple[str, tuple[TensorType, ...], Attrs]] = {}
    for plan in program.plans.values():
        for x in plan.launches:
            types = tuple(r.type for r in x.ins)
            seen.setdefault(f"{x.component} {types} {sorted(x.attrs.items(), key=str)}", (x.component, types, x.attrs))
    return list(seen.values())


PASSES = ("differentiate.pass", "expand.pass", "layout.pass", "memory.pass", "program.step", "schedule.pass", "select.pass", "verify.pass")
"""What makes every Program."""

EVERY_RUN = ("checkpoint.simple", "flops.v1", "ngram.order2", "sampler.permuted", "shards.v1", "split.by_file", "train.loop")
"""What every run uses beside its Program. Evaluation chooses its windows itself, so no run uses `sampler.ordered`."""


def made_by(cfg: Config) -> tuple[str, ...]:
    """Ids of the components that make and execute the Program of a run, by what the Config chose."""
    chosen = [f"model.{cfg.model.family}", f"optimizer.{cfg.optim.name}", f"schedule.{cfg.optim.schedule}",
              f"executor.{cfg.machine.backend}"]
    chosen += ["fuse.pass"] if cfg.train.fuse else []
    chosen += ["recompute.pass"] if cfg.train.recompute != "none" else []
    return (*PASSES, *chosen)


def components_of(cfg: Config, program: Program) -> list[str]:
    """Ids of all that a run uses, sorted: what its Program rests on, its data, its checkpoints and the loop. The registry is asked about
    exactly these."""
    corpus = "corpus.stdlib" if cfg.data.corpus == "stdlib" else "corpus.folder"
    return sorted({*program.components(), *EVERY_RUN, corpus, f"tokenizer.{cfg.data.tokenizer}"})
