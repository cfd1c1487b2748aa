"""Run files: TOML to frozen keyword-only dataclasses. Floor 0.

One dataclass a section, one field a key; the field's metadata is its documentation, unit and range, and `table()` prints it.
Unknown keys are rejected with the nearest valid name, wrong types with what came and what was expected, impossible sizes before
anything is built. No environment variable is read.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from alpha.errors import ConfigError, InputError
from alpha.files import path_problem, read_regular
from alpha.tomlfile import parse_toml

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "gpt": ("norm_eps", "dropout"),
    "llama": ("norm_eps", "head_dim", "kv_heads", "attention_bias", "hidden", "rope_base", "rope_scaling"),
}
"""Family of models (a file of alpha/models) -> the keys of [model] that not every family has."""

SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "cosine": (),
    "wsd": ("decay",),
}
"""Schedule of the learning rate (an entry of alpha/optim/schedules.py) -> the keys of [optim] that not every schedule has."""

MOST_STEPS = 1 << 24
"""Optimizer steps: the learning rate of each lies in memory, 4 bytes a step."""

COMPUTES = {"cpu": "f32", "cuda": "bf16"}
"""Back end -> the precision that it has kernels for."""
PRECISIONS = tuple(COMPUTES.values())

MOST_TOKENS = 1 << 22
"""Tokens of one microbatch. A plan makes tables of this length (positions, rows), so it stays small whatever a run file says."""

MOST_INTEGER = 2**63 - 1
"""What SQLite and NumPy hold."""

LEAST_FLOAT, MOST_FLOAT = 1.1754943508222875e-38, 3.4028234663852886e38
"""The normal numbers of float32, in which every one of these is used (IEEE 754)."""

MOST_RUN_FILE = 1 << 20
"""Bytes of a run file."""

MOST_NAME = 100
"""Bytes of run.name: a folder's name has at most 255, and numbers and reports put theirs behind it."""


def key(
    default: Any = MISSING,
    *,
    doc: str,
    unit: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field: default (none = required), one line of documentation, unit, range `least <= x <= most`, `x > above`, choices."""
    return field(default=default, metadata={"doc": doc, "unit": unit, "least": least, "above": above, "most": most, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the run is called and where it is kept."""

    name: str = key(doc="name of the run and of its folder")
    seed: int = key(1, doc="decides initial weights, order of the data and dropout", least=0, most=2**63 - 1)
    out: str = key("runs", doc="folder that run folders are made in")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model and its sizes."""

    family: str = key(doc="architecture", choices=tuple(FAMILIES))
    layers: int = key(doc="blocks", least=1, most=4096)
    width: int = key(doc="size of the residual stream", unit="channels", least=1, most=1 << 20)
    heads: int = key(doc="query heads; divide the width", least=1, most=4096)
    positions: int = key(0, doc="longest sequence the model has positions for; 0 = data.sequence", unit="tokens", least=0,
                         most=1 << 24)
    vocab_size: int = key(0, doc="ids of embedding and head, at least the tokenizer's; 0 = the tokenizer's", unit="ids", least=0,
                     most=1 << 31)
    tied: bool = key(True, doc="the head shares the embedding's weights")
    norm_eps: float = key(1e-5, doc="added to the variance, or to the mean square, in a norm", above=0.0, most=1.0)
    head_dim: int = key(0, doc="width of a head; 0 = width / heads", unit="channels", least=0, most=1 << 16)
    kv_heads: int = key(0, doc="key and value heads; divide `heads`; 0 = heads", least=0, most=4096)
    attention_bias: str = key("none", doc="which of attention's products have a bias: none, qkv (queries, keys and values), or all "
                              "(the one behind attention, too)", choices=("none", "qkv", "all"))
    hidden: int = key(0, doc="inner width of SwiGLU; 0 = 8/3 width rounded up to a multiple of 32", unit="channels", least=0,
                      most=1 << 22)
    rope_base: float = key(500000.0, doc="base of the rotary frequencies", above=1.0)
    rope_scaling: tuple[float, ...] = key((), doc="none; [factor], which divides every rotary frequency; or Llama 3's [factor, "
                                          "low_freq_factor, high_freq_factor, original_max_position_embeddings]; on the CPU alone")
    window: int = key(0, doc="keys that a query sees, itself included; 0 = all before it", unit="tokens", least=0, most=1 << 24)
    z_loss: float = key(0.0, doc="weight of the squared log-normaliser added to the loss", least=0.0)
    dropout: float = key(0.0, doc="share of activations dropped while training", least=0.0, most=0.9)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text and how it is cut."""

    corpus: str = key("stdlib", doc="`stdlib` (source of the installed Python standard library), a folder (its text files, or prepared), "
                      "a file, a glob")
    mixture: str = key("", doc="in place of `corpus`: several of them and their weights, such as `texts/a:0.7, texts/b:0.3`")
    tokenizer: str = key("bpe", doc="bytes (257 ids) or byte-level BPE trained on the train split", choices=("bytes", "bpe"))
    vocab: int = key(512, doc="ids of the BPE tokenizer; `bytes` always has 257", unit="ids", least=258, most=1 << 31)
    tokenizer_file: str = key("", doc="in place of `tokenizer` and `vocab`: a Hugging Face tokenizer.json, or a tokenizer that Alpha saved")
    tokenizer_end: str = key("", doc="name of the token that ends a text in that tokenizer.json; empty = a known one")
    sample: int = key(4_000_000, doc="most text that the BPE tokenizer is trained on", unit="bytes", least=1)
    validation: float = key(0.05, doc="share of files held out for validation; of one file its end", above=0.0, most=0.5)
    sequence: int = key(128, doc="tokens of one training sequence", unit="tokens", least=2, most=1 << 20)
    packing: str = key("windows", doc="what a sequence holds: a window of the stream, which cuts documents, or whole documents and padding",
                       choices=("windows", "documents"))
    documents: bool = key(False, doc="attention does not cross from one document into the next")
    buckets: int = key(0, doc="length bucketing: so many steps' sequences are sorted by the pairs of query and key that they cost, and "
                       "each step reads one bucket of them; 0 = none", unit="steps", least=0, most=1 << 12)
    prefetch: int = key(2, doc="microbatches that a thread makes ahead; 0 = each is made when it is read", least=0, most=1024)
    baseline: bool = key(True, doc="an order-2 byte model is fitted at the end, to compare bits per byte with")
    cache: str = key(".alpha/data", doc="folder of tokenizers and token shards; safe to delete")


@dataclass(frozen=True, kw_only=True)
class Train:
    """The steps."""

    steps: int = key(doc="optimizer steps", unit="steps", least=1, most=MOST_STEPS)
    start_from: str = key("", doc="what parameters begin from: a run's, `RUN` or `RUN@STEP`; a model of Hugging Face, `hf:FOLDER`; "
                          "empty = drawn by the seed")
    batch: int = key(doc="sequences of one step, all shards together", unit="sequences", least=1, most=1 << 20)
    shards: int = key(1, doc="logical shards S, a power of two; part of the numerics, not of the machine", least=1, most=1024)
    zero: int = key(0, doc="1: of many ranks each holds its cut of the optimizer's state (ZeRO-1); 0: all of it", least=0, most=1)
    precision: str = key(
        "f32",
        doc="compute type: f32, or bf16 with f32 weights, moments, gradients and sums (docs/numerics.md)",
        choices=PRECISIONS,
    )
    micro_batch: int = key(0, doc="sequences of one microbatch; 0 = batch / shards", unit="sequences", least=0)
    replay: int = key(1, doc="microbatches handed over at once, on a GPU one captured graph; 0 = the whole step", least=0)
    recompute: str = key("none", doc="activations computed again in the backward pass: none, block, or ops:name,name")
    fuse: bool = key(True, doc="use fused rows where the back end has a kernel for them")
    eval_every: int = key(100, doc="steps between validations; 0 = only at the end", unit="steps", least=0)
    eval_windows: int = key(64, doc="validation sequences of each validation on the way", unit="sequences", least=1)
    final_windows: int = key(0, doc="validation sequences of the figure at the end; 0 = the whole split", unit="sequences", least=0)
    sample_every: int = key(0, doc="steps between samples of text; 0 = only at the end", unit="steps", least=0)
    checkpoint_every: int = key(200, doc="steps between checkpoints; 0 = only at the end", unit="steps", least=0)
    keep: int = key(2, doc="checkpoints kept", least=1)
    keep_every: int = key(0, doc="checkpoints of steps that this divides are kept beside them; 0 = none", unit="steps", least=0)
    verify: int = key(200, doc="steps between spot checks, in which launches are recomputed and all of the state is hashed; 0 = none",
                      unit="steps", least=0)
    profile: int = key(20, doc="steps of the run that are profiled launch by launch, spread evenly; 0 = none", unit="steps", least=0)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its learning-rate schedule."""

    name: str = key("adamw", doc="optimizer", choices=("adamw", "sgd"))
    lr: float = key(doc="peak learning rate", above=0.0)
    betas: tuple[float, ...] = key((0.9, 0.95), doc="decay of the first and second moment (adamw)")
    eps: float = key(1e-8, doc="added to the root of the second moment (adamw)", above=0.0)
    momentum: float = key(0.0, doc="momentum (sgd)", least=0.0, most=0.999)
    weight_decay: float = key(0.1, doc="decoupled decay of matrices; never of norms and biases", least=0.0)
    clip: float = key(1.0, doc="largest global gradient norm; 0 = no clipping", least=0.0)
    schedule: str = key("cosine", doc="learning rate over the steps", choices=tuple(SCHEDULES))
    warmup: int = key(0, doc="steps of linear warm-up", unit="steps", least=0)
    decay: int = key(0, doc="last steps over which the rate falls; 0 = a tenth of all steps", unit="steps", least=0)
    floor: float = key(0.1, doc="learning rate at the end as a share of `lr`", least=0.0, most=1.0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What runs the run. Nothing here changes one bit of the result: where back ends compute differently, `train.precision` says so."""

    backend: str = key("cpu", doc="cpu computes in f32, cuda in bf16", choices=tuple(COMPUTES))
    threads: int = key(0, doc="worker threads; 0 = the cores this process may use", least=0, most=256)
    debug: str = key("off", doc="of many ranks: check each collective against its row, log each, trace those of every step, or all three",
                     choices=("off", "check", "log", "trace", "all"))


@dataclass(frozen=True, kw_only=True)
class Log:
    """Where else the metrics go. Each client is a process beside the run; whether it works changes nothing of the run."""

    tensorboard: bool = key(False, doc="event files in `tensorboard/` of the run directory (extra `tensorboard`)")
    wandb: bool = key(False, doc="Weights & Biases, project `alpha` (extra `wandb`)")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run file. Cross-section rules are checked here; a Config that exists is possible."""

    run: Run
    model: Model
    data: Data
    train: Train
    optim: Optim
    machine: Machine = field(default_factory=Machine)
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        for name, section in self.sections():
            for f in fields(section):
                _check_range(f"{name}.{f.name}", getattr(section, f.name), f)
        m, d, t, o = self.model, self.data, self.train, self.optim
        _only("model", m, "family", FAMILIES)
        _rule(
            m.width % m.heads == 0,
            "model.heads does not divide model.width",
            f"width {m.width}, heads {m.heads}",
            f"heads out of {_divisors(m.width)}",
            "change model.heads or model.width",
        )
        kv = m.kv_heads or m.heads
        _rule(
            m.heads % kv == 0,
            "model.kv_heads does not divide model.heads",
            f"heads {m.heads}, kv_heads {kv}",
            f"kv_heads out of {_divisors(m.heads)}",
            "change model.kv_heads",
        )
        _rule(
            "rope_base" not in FAMILIES[m.family] or self.head_dim % 2 == 0,
            "rotary positions need an even head size",
            f"head_dim {m.head_dim}" if m.head_dim else f"width {m.width} / heads {m.heads} = {self.head_dim}",
            "an even number",
            "change model.head_dim" if m.head_dim else "change model.heads or model.width",
        )
        s = m.rope_scaling
        _rule(
            len(s) in (0, 1, 4) and all(LEAST_FLOAT <= x <= MOST_FLOAT for x in s) and (
                len(s) < 4 or (s[1] < s[2] and s[3].is_integer())),
            "model.rope_scaling is none of its forms",
            list(s),
            "[], [factor], or [factor, low_freq_factor, high_freq_factor, original_max_position_embeddings]: all above 0, low below high, "
            "the last a whole number",
            "for example [8.0, 1.0, 4.0, 8192]",
        )
        _rule(
            not s or self.machine.backend != "cuda",
            "model.rope_scaling has no kernel on cuda",
            f"rope_scaling = {list(s)}",
            "no scaling there",
            "train it on the CPU, or leave model.rope_scaling out",
        )
        _rule(
            not m.dropout or self.run.seed < 2**32,
            "run.seed is too large for dropout, whose masks know 32 bits of it",
            f"seed {self.run.seed}, dropout {m.dropout}",
            f"at most {2**32 - 1}",
            "take a smaller seed, or model.dropout = 0",
        )
        _rule(
            not m.positions or d.sequence <= m.positions,
            "data.sequence is longer than the model has positions",
            f"sequence {d.sequence}, positions {m.positions}",
            f"at most {m.positions}",
            "raise model.positions or shorten the sequence",
        )
        _rule(
            t.shards & (t.shards - 1) == 0,
            "train.shards is no power of two",
            t.shards,
            "1, 2, 4, 8, ...",
            f"take {1 << (t.shards.bit_length() - 1)} or {1 << t.shards.bit_length()}",
        )
        _rule(
            t.batch % t.shards == 0,
            "train.batch cannot be cut into the shards",
            f"batch {t.batch}, shards {t.shards}",
            f"a multiple of {t.shards}",
            f"take batch {max(1, t.batch // t.shards) * t.shards}",
        )
        per_shard = t.batch // t.shards
        _rule(
            not t.micro_batch or per_shard % t.micro_batch == 0,
            "a shard's sequences cannot be cut into microbatches",
            f"batch {t.batch} / shards {t.shards} = {per_shard} sequences, micro_batch {t.micro_batch}",
            f"micro_batch out of {_divisors(per_shard)}",
            "change train.micro_batch or train.batch",
        )
        _rule(
            self.micro_batch * d.sequence <= MOST_TOKENS,
            "a microbatch has too many tokens",
            f"{self.micro_batch} sequences of {d.sequence} tokens = {self.micro_batch * d.sequence:,}",
            f"at most {MOST_TOKENS:,}",
            "lower train.micro_batch: the gradients of a step do not depend on it",
        )
        _rule(
            t.recompute in ("none", "block") or (t.recompute.startswith("ops:") and all(t.recompute[4:].split(","))),
            "train.recompute is not a policy",
            t.recompute,
            "none, block, or ops:name,name",
            "for example `ops:gelu,layernorm`",
        )
        _rule(
            t.precision == COMPUTES[self.machine.backend],
            "machine.backend does not compute in train.precision",
            f"backend {self.machine.backend}, precision {t.precision}",
            ", ".join(f"{p} on {b}" for b, p in COMPUTES.items()),
            f'take precision = "{COMPUTES[self.machine.backend]}", or the other back end',
        )
        _rule(
            len(o.betas) == 2 and all(0.0 <= b < 1.0 for b in o.betas),
            "optim.betas are two numbers from 0 to below 1",
            list(o.betas),
            "for example [0.9, 0.95]",
            "change optim.betas",
        )
        _rule(
            o.warmup < t.steps,
            "optim.warmup leaves no step to train",
            f"warmup {o.warmup}, steps {t.steps}",
            f"below {t.steps}",
            "shorten the warm-up",
        )
        _only("optim", o, "schedule", SCHEDULES)
        _rule(
            o.warmup + self.decay <= t.steps,
            "optim.warmup and optim.decay overlap",
            f"{o.warmup} + {self.decay} of {t.steps} steps",
            f"at most {t.steps} together",
            "shorten one",
        )
        problem = name_problem(self.run.name)
        _rule(not problem, "run.name is no folder name", f"{self.run.name!r}, which {problem}", "letters, digits, dots and dashes",
              "change run.name")
        for where in ("run.out", "data.corpus", "data.cache"):
            section, _, name = where.partition(".")
            problem = path_problem(getattr(getattr(self, section), name), text_only=True)
            _rule(not problem, f"{where} is no path", f"{getattr(getattr(self, section), name)!r}, which {problem}",
                  "a path that a file system can hold", f"change {where}")

    # -- derived sizes ---------------------------------------------------------------------------------------------------------

    @property
    def micro_batch(self) -> int:
        """Sequences of one microbatch."""
        return self.train.micro_batch or self.train.batch // self.train.shards

    @property
    def micros(self) -> int:
        """Microbatches of one shard in one step."""
        return self.train.batch // self.train.shards // self.micro_batch

    @property
    def positions(self) -> int:
        """Positions of the model."""
        return self.model.positions or self.data.sequence

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.model.head_dim or self.model.width // self.model.heads

    @property
    def hidden(self) -> int:
        """Inner width of SwiGLU."""
        return self.model.hidden or (8 * self.model.width + 95) // 96 * 32

    @property
    def decay(self) -> int:
        """Steps over which the learning rate falls at the end; 0 for a schedule that has no such key."""
        return (self.optim.decay or max(1, self.train.steps // 10)) if "decay" in SCHEDULES[self.optim.schedule] else 0

    @property
    def recompute(self) -> tuple[str, tuple[str, ...]]:
        """The recompute policy as (mode, names of ops)."""
        if self.train.recompute.startswith("ops:"):
            return "ops", tuple(self.train.recompute[4:].split(","))
        return self.train.recompute, ()

    # -- as text ---------------------------------------------------------------------------------------------------------------

    def sections(self) -> list[tuple[str, Any]]:
        """(name, section) in order."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]

    def resolved(self) -> str:
        """The whole configuration as TOML, every default written out: saved with the run; loading it gives an equal Config."""
        blocks = []
        for name, section in self.sections():
            lines = [f"{f.name} = {_toml(getattr(section, f.name))}" for f in fields(section)]
            blocks.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(blocks) + "\n"

    def identity(self) -> str:
        """sha256 of every key that decides a bit of the trained state; what a resumed run must agree on."""
        free = {
            "run.name",
            "run.out",
            "data.baseline",
            "data.cache",
            "data.prefetch",
            "train.eval_every",
            "train.eval_windows",
            "train.final_windows",
            "train.sample_every",
            "train.checkpoint_every",
            "train.keep",
            "train.keep_every",
            "train.profile",
            "train.verify",
            "train.replay",
            "train.zero",
        }
        if not self.data.buckets:  # runs that began before the key was there go on
            free.add("data.buckets")
        lines = [
            f"{name}.{f.name} = {_toml(getattr(section, f.name))}"
            for name, section in self.sections()
            if name not in ("machine", "log")
            for f in fields(section)
            if f"{name}.{f.name}" not in free
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load(path: Path | str, overrides: Iterable[str] = ()) -> Config:
    """Read a run file and apply `section.key=value` overrides. ConfigError for what is wrong in it, InputError if missing."""
    try:
        raw = read_regular(path, MOST_RUN_FILE)
    except OSError as error:
        raise InputError(
            "the run file cannot be read",
            came=f"{path} ({error.strerror})",
            expected="a TOML file",
            do="check the path; configs/ has examples",
        ) from error
    return parse(raw, overrides, where=str(path))


def parse(text: str | bytes, overrides: Iterable[str] = (), where: str = "the run file") -> Config:
    """A Config from TOML text. ConfigError naming `where`, the key, what came and what was expected."""
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not TOML",
            came=str(error),
            expected="key = value lines in [sections]",
            do="strings need quotes; see configs/tiny.toml",
        ) from error
    for name, section in tables.items():
        if not isinstance(section, dict):
            raise ConfigError(
                f"{where}: a key outside any section",
                came=f"{name} = {section!r}",
                expected=f"[section] first; sections are {', '.join(_sections())}",
                do=_where_is(name),
            )
    for override in overrides:
        _apply(tables, override)
    return from_tables(tables, where)


def from_tables(tables: Mapping[str, Mapping[str, Any]], where: str = "the run file") -> Config:
    """A Config from plain nested mappings, with every check."""
    known = _sections()
    for name in tables:
        if name not in known:
            raise ConfigError(f"{where}: unknown section [{name}]", came=name, expected=", ".join(known), do=_nearest(name, known))
    built: dict[str, Any] = {}
    for name, cls in known.items():
        built[name] = _section(cls, name, tables.get(name), where)
    return Config(**built)


@cache
def _sections() -> dict[str, type]:
    return {f.name: t for f, t in zip(fields(Config), get_type_hints(Config).values())}


def _section(cls: type, name: str, given: Mapping[str, Any] | None, where: str) -> Any:
    hints = get_type_hints(cls)
    given = given or {}
    for k, value in given.items():
        if k not in hints:
            raise ConfigError(
                f"{where}: unknown key `{name}.{k}`",
                came=f"{k} = {value!r}",
                expected=f"one of {', '.join(hints)}",
                do=_nearest(k, hints, name),
            )
    values = {}
    for f in fields(cls):
        if f.name in given:
            values[f.name] = _typed(f"{name}.{f.name}", given[f.name], hints[f.name], where)
        elif f.default is MISSING:
            raise ConfigError(
                f"{where}: `{name}.{f.name}` is missing",
                came=f"[{name}] with {', '.join(given) or 'no keys'}",
                expected=f"{f.name}: {f.metadata['doc']}",
                do=f"add `{f.name} = ...` to [{name}]",
            )
    return cls(**values)


def _typed(name: str, value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`; an integer may stand for a float, nothing else is converted."""
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if isinstance(value, (list, tuple)):
            return tuple(_typed(f"{name}[{i}]", x, inner, where) for i, x in enumerate(value))
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer of hundreds of digits
            return math.inf if value > 0 else -math.inf
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    what = (
        "a list of numbers"
        if get_origin(hint) is tuple
        else {int: "an integer", float: "a number", str: "a string in quotes", bool: "true or false"}[hint]
    )
    raise ConfigError(
        f"{where}: `{name}` has the wrong type",
        came=f"{value!r} ({type(value).__name__})",
        expected=what,
        do=f"write `{name.rpartition('.')[2]} = {_example(hint)}`",
    )


def _example(hint: Any) -> str:
    return {int: "128", float: "0.1", str: '"text"', bool: "true"}.get(hint, "[0.9, 0.95]")


def _check_range(name: str, value: Any, f: Field[Any]) -> None:
    meta = f.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(
            f"`{name}` is not one of its choices",
            came=repr(value),
            expected=", ".join(meta["choices"]),
            do=_nearest(str(value), meta["choices"]),
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        held = abs(value) <= MOST_INTEGER if isinstance(value, int) else value == 0 or LEAST_FLOAT <= abs(value) <= MOST_FLOAT
        inside = (
            held
            and (meta["least"] is None or value >= meta["least"])
            and (meta["above"] is None or value > meta["above"])
            and (meta["most"] is None or value <= meta["most"])
        )
        kind = "" if held else "; an integer of 64 bits" if isinstance(value, int) else "; a normal number of float32"
        _rule(inside, f"`{name}` is out of range", _came(value), _range(meta) + kind, f"{name}: {meta['doc']}")


def _came(value: float) -> str:
    """A number as text; one too long for Python to print by its length."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > MOST_INTEGER else str(value)


def name_problem(name: str) -> str:
    """Why `name` cannot be that of a run, to stand behind 'which'; '' when it can. It goes into paths, pages, tables and SQL."""
    problem = path_problem(name, text_only=True)
    if problem:
        return problem
    if len(name.encode()) > MOST_NAME:
        return f"is too long: {len(name.encode())} bytes, at most {MOST_NAME}"
    if not all(c.isprintable() for c in name):
        return "holds a character that cannot be printed"
    refused = sorted({c for c in name if c in "/\\\"'`<>|*?$&;"})
    if refused:
        return f"holds {' '.join(refused)}"
    if name[0] in ".-~ " or name[-1] == " ":
        return f"begins or ends with {name[0] if name[0] in '.-~ ' else name[-1]!r}"
    return ""


def _range(meta: Mapping[str, Any]) -> str:
    low = f"at least {meta['least']}" if meta["least"] is not None else f"above {meta['above']}" if meta["above"] is not None else ""
    high = f"at most {meta['most']}" if meta["most"] is not None else ""
    return ", ".join(x for x in (low, high) if x) or "a finite number"


def _rule(holds: bool, what: str, came: object, expected: object, do: str) -> None:
    if not holds:
        raise ConfigError(what, came=came, expected=expected, do=do)


def _only(section: str, given: Any, choice: str, own: Mapping[str, tuple[str, ...]]) -> None:
    """ConfigError for a key of `given` that is set although what `choice` names does not have it. `own`: name -> keys that it has."""
    chosen = getattr(given, choice)
    for name in sorted({k for keys in own.values() for k in keys} - set(own[chosen])):
        default = next(f.default for f in fields(given) if f.name == name)
        having = " or ".join(x for x, keys in own.items() if name in keys)
        _rule(
            getattr(given, name) == default,
            f"{section}.{name} does not apply to {choice} {chosen}",
            f"{name} = {getattr(given, name)}",
            f"no such key for {chosen}",
            f"remove {section}.{name}, or take {choice} = {having}",
        )


def _divisors(n: int) -> str:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    found = [str(d) for d in sorted({*small, *(n // d for d in small)})]
    return ", ".join(found if len(found) <= 12 else [*found[:11], "..."])


def _nearest(name: str, known: Iterable[str], section: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if close:
        return f"did you mean `{close[0]}`?"
    return _where_is(name) if section else "see configs/ for examples"


def _where_is(name: str) -> str:
    """In which section a key of this name, or the nearest one, lives."""
    homes = {f.name: s for s, cls in _sections().items() for f in fields(cls)}
    close = difflib.get_close_matches(name, list(homes), n=1, cutoff=0.6)
    return f"did you mean `{homes[close[0]]}.{close[0]}`?" if close else "see configs/ for examples"


def _apply(tables: dict[str, Any], override: str) -> None:
    """One `section.key=value`; the value is read as TOML, else as a bare string."""
    name, equals, text = override.partition("=")
    section, dot, k = name.strip().partition(".")
    if not (equals and dot and section and k):
        raise ConfigError(
            "an override is not section.key=value",
            came=override,
            expected="for example train.steps=100",
            do="write `--set section.key=value`",
        )
    try:
        value = parse_toml(f"x = {text}")["x"]
    except ValueError:
        value = text.strip()
    tables.setdefault(section, {})[k] = value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def table() -> str:
    """Every key as Markdown, from the dataclasses: the reference in docs/ is this text."""
    out: list[str] = []
    own = {"model": FAMILIES, "optim": SCHEDULES}
    for name, cls in _sections().items():
        out += [
            f"### [{name}]",
            "",
            (cls.__doc__ or "").strip(),
            "",
            "| key | type | default | unit | range | what |",
            "|---|---|---|---|---|---|",
        ]
        hints = get_type_hints(cls)
        for f in fields(cls):
            kind = "list of numbers" if get_origin(hints[f.name]) is tuple else hints[f.name].__name__
            default = "required" if f.default is MISSING else f"`{_toml(f.default)}`"
            having = [x for x, keys in own.get(name, {}).items() if f.name in keys]
            doc = f.metadata["doc"] + (f" ({', '.join(having)} only)" if having else "")
            limits = ", ".join(f.metadata["choices"]) or (_range(f.metadata) if kind in ("int", "float") else "")
            out.append(f"| `{f.name}` | {kind} | {default} | {f.metadata['unit']} | {limits} | {doc} |")
        out.append("")
    return "\n".join(out)
