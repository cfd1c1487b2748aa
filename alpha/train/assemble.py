"""From a Config to what a run is made of: the text and its tokens, the model and its Program. Floor 6."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from alpha.backends.cpu.catalogue import MOST_BYTES
from alpha.component import Catalogue
from alpha.config import FAMILIES, Config, Data
from alpha.cores import cores
from alpha.data.bucketed import BucketedSampler
from alpha.data.corpus import Corpus, open_corpus
from alpha.data.files import sha256_hex, sweep
from alpha.data.mixture import MixedSampler, Streams, joined, kept_apart, sources_of
from alpha.data.packing import PackedSampler
from alpha.data.prepared import SIDES, TOKENIZER, PreparedSplit, PreparedText, is_prepared, open_prepared
from alpha.data.sampler import PermutedSampler, Sampler, window_count
from alpha.data.shards import TokenStream, token_stream
from alpha.data.split import Split, split_by_file
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from alpha.data.tokenizer_file import load_tokenizer, open_tokenizer
from alpha.errors import ConfigError, CorruptError, InputError, MachineError, ShapeError
from alpha.files import path_problem
from alpha.flops.v1 import ModelFlops, count
from alpha.graph.ir import Value
from alpha.graph.plan import Program
from alpha.graph.state import StateLayout
from alpha.graph.trace import Tracer
from alpha.graph.verify_program import verify_program
from alpha.models.family import family
from alpha.ops.table import table
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw, sgd
from alpha.parallel.data import DataParallel
from alpha.passes.build import Model, Optimizer, StepShape, build_program
from alpha.passes.select import kernel_for
from alpha.types import ITEMSIZE, Attrs, TensorType

SPLIT_SEED = 0
"""The split does not follow the run's seed, so that runs with other seeds are validated on the same text."""

VOCABULARY_STEP = 8
"""Rows of logits lie 16 bytes apart, in bf16."""

MOST_HEAD_WIDTH = 512
"""Up to which widths of a head are asked for, to say which ones a GPU's kernels take."""


@dataclass(frozen=True)
class Dataset:
    """The corpus, its split, the tokenizer and both token streams; of a mixture those of all sources."""

    corpus: Corpus | PreparedText
    split: Split | PreparedSplit
    tokenizer: Tokenizer
    train: TokenStream | Streams
    validation: TokenStream | Streams


def open_data(cfg: Config) -> Dataset:
    """Hash the corpus, split it, train or load the tokenizer, tokenize or open both streams (all cached by content).

    InputError, CorruptError and MachineError as the parts say; InputError if a split is shorter than one sequence.
    """
    prepared = [name for name in sources_read(cfg) if is_prepared(Path(name))]
    if prepared:
        return _open_prepared(cfg, prepared)
    if cfg.data.mixture:
        return _open_mixture(cfg)
    corpus = open_corpus(cfg.data.corpus)
    split = _split(cfg, corpus)
    cache = Path(cfg.data.cache)
    tokenizer = tokenizer_for(cfg, split.train)
    sweep(cache)
    streams = [token_stream(side, tokenizer, cache) for side in (split.train, split.validation)]
    for stream in streams:
        window_count(stream, cfg.data.sequence)  # refuses here what would otherwise be refused after a long build
    return Dataset(corpus, split, tokenizer, *streams)


def sources_read(cfg: Config) -> list[str]:
    """The corpus, or those of the mixture. ConfigError where both are named."""
    if cfg.data.mixture and cfg.data.corpus != Data.corpus:
        raise ConfigError("data.corpus and data.mixture exclude each other", came=f"corpus {cfg.data.corpus}, mixture {cfg.data.mixture}",
                          expected="one of them", do="name the corpus in data.mixture, and remove data.corpus")
    return [name for name, _ in sources_of(cfg.data.mixture)] if cfg.data.mixture else [cfg.data.corpus]


def _open_prepared(cfg: Config, names: list[str]) -> Dataset:
    """Streams as `alpha data prepare` made them, with their tokenizer; of a mixture all of one tokenizer and split alike, so that no text
    is on both sides. ConfigError where the run file asks for another vocabulary, InputError where sources do not go together."""
    plain = sorted({*sources_read(cfg)} - {*names})
    if plain:
        raise InputError("a mixture holds prepared and other sources", came=f"{plain[0]} beside {names[0]}", expected="all of one kind",
                         do=f"run `alpha data prepare {plain[0]} --out FOLDER` with the same tokenizer")
    found = [open_prepared(Path(name)) for name in names]
    tokenizer, bound = found[0].tokenizer, found[0].facts["bound"]
    for name, one in zip(names, found):
        if (one.tokenizer.hash, one.facts["bound"]) != (tokenizer.hash, bound):
            raise InputError("prepared sources do not go together", came=f"{name}: tokenizer {one.tokenizer.hash[:16]}, validation below "
                             f"{one.facts['bound']}", expected=f"tokenizer {tokenizer.hash[:16]}, {bound}, as {names[0]}",
                             do=f"prepare it with --tokenizer {names[0]}/{TOKENIZER} and the same --validation")
    asked = 257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab
    if (cfg.data.tokenizer, cfg.data.vocab) != (Data.tokenizer, Data.vocab) and asked != tokenizer.vocab_size:
        raise ConfigError("the run file asks for another vocabulary than the prepared data has", came=f"{asked} ids",
                          expected=f"{tokenizer.vocab_size} ids, of {names[0]}",
                          do="remove data.tokenizer and data.vocab: prepared data brings its own")
    path = tokenizer_file_of(cfg)
    if path and open_tokenizer(path, cfg.data.tokenizer_end).hash != tokenizer.hash:
        raise ConfigError("the run file names another tokenizer than the prepared data has", came=path, expected=f"that of {names[0]}",
                          do=f"remove data.tokenizer_file, or prepare the data again with --tokenizer {path}")
    for one in found:
        for stream in one.streams.values():
            window_count(stream, cfg.data.sequence)
    train, validation = (tuple(one.streams[side] for one in found) for side in SIDES)
    texts = [PreparedText(streams, tokenizer) for streams in (train, validation)]
    sides = [Streams(tuple(zip(names, side))) if cfg.data.mixture else side[0] for side in (train, validation)]
    return Dataset(PreparedText(train + validation, tokenizer), PreparedSplit(*texts), tokenizer, *sides)


def known_tokenizer(cfg: Config) -> Tokenizer | None:
    """The tokenizer of prepared data, or of a file; None where the run makes its own."""
    folder = Path(sources_read(cfg)[0])
    if is_prepared(folder):
        return load_tokenizer(folder / TOKENIZER)
    path = tokenizer_file_of(cfg)
    return open_tokenizer(path, cfg.data.tokenizer_end) if path else None


def _split(cfg: Config, corpus: Corpus) -> Split:
    return split_by_file(corpus, fraction=cfg.data.validation, seed=SPLIT_SEED)


def _open_mixture(cfg: Config) -> Dataset:
    """The same of each source of `data.mixture`, under one tokenizer."""
    names, weights = zip(*sources_of(cfg.data.mixture))
    corpora = [open_corpus(name) for name in names]
    splits = kept_apart([_split(cfg, corpus) for corpus in corpora])
    train, validation = ([getattr(split, side) for split in splits] for side in ("train", "validation"))
    learned, held = joined("mixture:train", train, weights), joined("mixture:validation", validation, weights)
    tokenizer, cache = tokenizer_for(cfg, learned), Path(cfg.data.cache)
    sweep(cache)
    sides = []
    for side in (train, validation):
        streams = [token_stream(part, tokenizer, cache) for part in side]
        for stream in streams:
            window_count(stream, cfg.data.sequence)
        sides.append(Streams(tuple(zip(names, streams))))
    return Dataset(joined("mixture", corpora, weights), replace(splits[0], train=learned, validation=held), tokenizer, *sides)


def tokenizer_for(cfg: Config, train: Corpus) -> Tokenizer:
    """The tokenizer of a run: that of a file; fixed for bytes; BPE is trained on the train split alone and kept in the cache by what
    decides it.

    The file in the cache says what it was trained for: CorruptError where that is not what is asked for now.
    """
    if known := known_tokenizer(cfg):
        return known
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


def vocabulary(cfg: Config, ids: int) -> int:
    """Ids of the model of a run whose tokenizer has `ids`. ConfigError where `model.vocab_size` is below them."""
    if cfg.model.vocab_size and cfg.model.vocab_size < ids:
        raise ConfigError("the tokenizer has more ids than the model", came=f"{ids} ids, model.vocab_size = {cfg.model.vocab_size}",
                          expected=f"at least {ids}", do="raise model.vocab_size, or leave it 0")
    return cfg.model.vocab_size or ids


def tokenizer_file_of(cfg: Config) -> Path | None:
    """`data.tokenizer_file`, where it is given. ConfigError where it is no path, or another key asks for another tokenizer."""
    d = cfg.data
    if not d.tokenizer_file:
        if d.tokenizer_end:
            raise ConfigError("data.tokenizer_end names a token of no file", came=d.tokenizer_end, expected="data.tokenizer_file with it",
                              do="remove data.tokenizer_end, or give data.tokenizer_file")
        return None
    if problem := path_problem(d.tokenizer_file, text_only=True):
        raise ConfigError("data.tokenizer_file is no path", came=f"{d.tokenizer_file!r}, which {problem}",
                          expected="a path that a file system can hold", do="change data.tokenizer_file")
    for name in ("tokenizer", "vocab", "sample"):
        if getattr(d, name) != getattr(Data, name):
            raise ConfigError(f"data.tokenizer_file and data.{name} exclude each other", came=f"{name} = {getattr(d, name)}",
                              expected="the file's tokenizer, or one that is trained", do=f"remove data.{name} or data.tokenizer_file")
    return Path(d.tokenizer_file)


def buckets_of(cfg: Config) -> int:
    """`data.buckets`: steps of a pool, 0 for none. ConfigError where no sequence would move."""
    d = cfg.data
    if d.buckets == 1:
        raise ConfigError("data.buckets leaves every sequence where it is", came=d.buckets, expected="at least 2, or 0 for none",
                          do="take 64, or leave data.buckets out")
    if d.buckets and not (d.packing == "documents" and d.documents):
        raise ConfigError("data.buckets needs packed documents that attention keeps apart",
                          came=f'buckets = {d.buckets}, packing = "{d.packing}", documents = {str(d.documents).lower()}',
                          expected='packing = "documents", of which it sorts the sequences, and documents = true, without which all cost '
                          "the same", do="set both in [data], or leave data.buckets out")
    return d.buckets


def sampler_for(cfg: Config, data: Dataset) -> Sampler:
    """The order in which this run sees its sequences. Source i of a mixture is permuted by the seed plus i, modulo 2^64."""
    kind = PackedSampler if cfg.data.packing == "documents" else PermutedSampler
    buckets = buckets_of(cfg)
    made = partial(BucketedSampler, buckets=buckets, most=cfg.model.window) if buckets else kind

    def of(stream: TokenStream, number: int = 0) -> PermutedSampler:
        return made(stream, sequence=cfg.data.sequence, global_batch=cfg.train.batch, seed=(cfg.run.seed + number) % 2**64)

    if isinstance(data.train, Streams):
        return MixedSampler([of(stream, i) for i, (_, stream) in enumerate(data.train.parts)],
                            [weight for _, weight in sources_of(cfg.data.mixture)])
    return of(data.train)


def model_for(cfg: Config, vocab: int, batch: int) -> Model:
    """The model with `batch` sequences a call. Evaluation leaves out the z-loss: it reports nats of the text."""
    own, seq = family(cfg.model.family), cfg.data.sequence
    sizes = own.sizes(cfg, vocab)

    def loss(t: Tracer, training: bool) -> tuple[Value, Value]:
        return own.loss(t, sizes if training else replace(sizes, z_loss=0.0), batch, seq, training)

    def decode(t: Tracer) -> Value:
        return own.decode(t, sizes, 1, seq)

    return Model(name=cfg.model.family, loss=loss, decode=decode)


def schedule_of(cfg: Config) -> ScheduleConfig:
    """The learning rate over a run's steps."""
    o = cfg.optim
    return ScheduleConfig(kind=o.schedule, peak=o.lr, warmup=o.warmup, total=cfg.train.steps, decay=cfg.decay, floor=o.floor)


def optimizer_for(cfg: Config) -> Optimizer:
    """The update graph's builder. `clip = 0` means no clipping, as the row `clip_coefficient` says."""
    o, schedule = cfg.optim, schedule_of(cfg)
    if o.name == "adamw":
        return adamw(schedule, beta1=o.betas[0], beta2=o.betas[1], eps=o.eps, weight_decay=o.weight_decay, max_norm=o.clip)
    return sgd(schedule, momentum=o.momentum, weight_decay=o.weight_decay, max_norm=o.clip)


def program_for(cfg: Config, vocab: int, catalogue: Catalogue, threads: int, ranks: int = 1) -> Program:
    """The Program of a run with a vocabulary of `vocab` ids, for its back end. `threads`: workers of the CPU, of each rank. `ranks`: how
    many share the step; they come from the launch, for no bit hangs on them. A Program of many is verified before it is given.

    For cuda nothing but the catalogue's declarations is needed, no GPU and no driver. ConfigError where the vocabulary, the width of a
    head or an op of `train.recompute` does not fit; InputError from selection where no kernel covers a shape; ShapeError where the ranks do
    not divide the logical shards.
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
    if on_gpu:
        _require_head_width(cfg, catalogue)
    model = model_for(cfg, vocab, cfg.micro_batch)
    if not on_gpu:
        _bounded(model)
    program = build_program(
        name=cfg.run.name,
        model=model,
        optimizer=optimizer_for(cfg),
        shape=StepShape(micro_batch=cfg.micro_batch, seq=cfg.data.sequence, shards=cfg.train.shards, micros=cfg.micros,
                        replay=cfg.train.replay),
        catalogue=catalogue,
        backend=cfg.machine.backend,
        precision=cfg.train.precision,
        threads=threads,
        policy=(mode, ops),
        fused=cfg.train.fuse,
        over=DataParallel(ranks, cfg.train.zero, cfg.micros, precision=cfg.train.precision,
                          one_row=bool(catalogue.for_op("update_scalars", cfg.machine.backend))) if ranks > 1 else None,
    )
    return replace(verify_program(program) if ranks > 1 else program, made_by=made_by(cfg, ranks))


def _require_head_width(cfg: Config, catalogue: Catalogue) -> None:
    """ConfigError where kernels of the GPU take heads of some width, but none as wide as this model's. Selection alone would name an op of
    the expansion, and no key."""
    m, kv_heads = cfg.model, cfg.model.kv_heads or cfg.model.heads

    def taken(width: int) -> bool:
        packed = TensorType((cfg.micro_batch, cfg.data.sequence, (m.heads + 2 * kv_heads) * width), "bf16")
        attrs: Attrs = {"heads": m.heads, "kv_heads": kv_heads, "causal": True, "window": m.window, "scale": width**-0.5}
        return kernel_for(catalogue, "cuda", "attention_packed", [packed], attrs) is not None

    others = [width for width in range(8, MOST_HEAD_WIDTH + 1, 8) if taken(width)]
    if others and not taken(cfg.head_dim):
        own = "head_dim" in FAMILIES[m.family]
        raise ConfigError(
            "no kernel of the GPU takes attention heads of this width",
            came=f"model.head_dim = {m.head_dim}" if m.head_dim else f"model.width {m.width} / model.heads {m.heads} = {cfg.head_dim}",
            expected=f"{', '.join(map(str, others))} channels a head",
            do=("change model.head_dim" if own else "change model.heads or model.width") + ", or train it on the CPU",
        )


def _bounded(model: Model) -> None:
    """ShapeError where the flat parameters are no operand of the CPU. Asked of shapes alone, for a Program lists the leaves of its norm:
    of 5 trillion parameters 20 million, in minutes and 8 GB."""
    t = Tracer("shapes")
    model.loss(t, True)
    nbytes = StateLayout(t.tensors.values()).size * ITEMSIZE["f32"]
    if nbytes > MOST_BYTES:
        raise ShapeError("the parameters are too large for a kernel of the CPU", came=f"{nbytes / 2**30:,.0f} GiB in f32",
                         expected=f"at most {MOST_BYTES >> 30} GiB", do='make the model smaller, or plan it for machine.backend = "cuda"')


def flops_for(cfg: Config, vocab: int) -> ModelFlops:
    """Useful FLOPs of one microbatch (flops/v1)."""
    t = Tracer("flops")
    model_for(cfg, vocab, cfg.micro_batch).loss(t, True)
    return count(t.graph, cfg.micro_batch * cfg.data.sequence)


def threads_for(cfg: Config, ranks: int = 1) -> int:
    """Worker threads of each rank: the configured number, else its share of the cores that this process may use. MachineError for more than
    there are."""
    here = cores()
    if cfg.machine.threads > 4 * here:
        raise MachineError(
            "machine.threads is far more than this machine has cores",
            came=cfg.machine.threads,
            expected=f"at most {4 * here} on {here} cores",
            do="lower it, or leave it 0",
        )
    return cfg.machine.threads or min(max(1, here // ranks), 8)


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

EVERY_RUN = ("checkpoint.ranges", "flops.v1", "sampler.permuted", "shards.v2", "train.loop")
"""What every run uses beside its Program. Evaluation chooses its windows itself, so no run uses `sampler.ordered`."""


def made_by(cfg: Config, ranks: int = 1) -> tuple[str, ...]:
    """Ids of the components that make and execute the Program of a run, by what the Config and the launch chose."""
    chosen = [f"model.{cfg.model.family}", f"optimizer.{cfg.optim.name}", f"schedule.{cfg.optim.schedule}",
              f"executor.{cfg.machine.backend}" + ("_ranks" if ranks > 1 and cfg.machine.backend == "cuda" else "")]
    chosen += ["fuse.pass"] if cfg.train.fuse else []
    chosen += ["recompute.pass"] if cfg.train.recompute != "none" else []
    chosen += ["data_parallel.pass", "verify_program.pass"] if ranks > 1 else []
    return (*PASSES, *chosen)


def components_of(cfg: Config, program: Program) -> list[str]:
    """Ids of all that a run uses, sorted: what its Program rests on, its data, its checkpoints and the loop. The registry is asked about
    exactly these."""
    known = known_tokenizer(cfg)
    chosen = [f"tokenizer.{known.kind if known else cfg.data.tokenizer}"]
    if is_prepared(Path(sources_read(cfg)[0])):
        chosen += ["corpus.prepared"]
    else:
        chosen += ["split.by_file", *("corpus.stdlib" if name == "stdlib" else "corpus.folder" for name in sources_read(cfg))]
    chosen += ["sampler.mixed"] if cfg.data.mixture else []
    chosen += ["sampler.prefetched"] if cfg.data.prefetch else []
    chosen += ["sampler.packed"] if cfg.data.packing == "documents" else []
    chosen += ["sampler.bucketed"] if buckets_of(cfg) else []
    chosen += ["checkpoint.hf"] if cfg.train.start_from.startswith("hf:") else []
    chosen += ["ngram.order2"] if cfg.data.baseline else []
    return sorted({*program.components(), *EVERY_RUN, *chosen})
