"""Hugging Face models as runs, and runs as Hugging Face models. Floor 6."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from alpha import config
from alpha.checkpoint import folders, hf
from alpha.checkpoint.hf import Hub
from alpha.checkpoint.safetensors import MOST_SHARD
from alpha.component import Catalogue
from alpha.config import Config
from alpha.data.tokenizer import Tokenizer
from alpha.errors import InputError
from alpha.graph.plan import Program
from alpha.graph.state import StateLayout
from alpha.options import MOST_DIGITS
from alpha.train import hf_tokenizer, rundir
from alpha.train.assemble import program_for, threads_for, vocabulary
from alpha.train.engine import Executor, open_executor, refresh
from alpha.types import NUMPY

PREFIX = "hf:"
"""What a source begins with that is a folder of Hugging Face, not a run."""

MOST_SEQUENCE = 1024
"""Tokens that a run made by an import sees at a time, unless its model has fewer positions: sampling computes all of them."""

_KEYS = {"gpt": ("norm_eps",), "llama": ("norm_eps", "head_dim", "kv_heads", "attention_bias", "hidden", "rope_base", "rope_scaling")}
"""Family -> what of [model] decides about its tensors and logits, beside what every family has."""


def sizes_of(cfg: Config, vocab: int) -> dict[str, Any]:
    """The sizes of a run's model with `vocab` ids, as `hf.open_hub` gives them. InputError for a family that has no place there."""
    if cfg.model.family not in _KEYS:
        raise InputError("this family has no place among Hugging Face's", came=cfg.model.family, expected=", ".join(_KEYS))
    m = cfg.model
    derived = {"kv_heads": m.kv_heads or m.heads, "hidden": cfg.hidden, "head_dim": cfg.head_dim}
    return {"family": m.family, "vocab_size": vocab, "positions": cfg.positions, "layers": m.layers, "width": m.width, "heads": m.heads,
            "tied": m.tied, **{key: derived.get(key, getattr(m, key)) for key in _KEYS[m.family]}}


def run_file(sizes: hf.Sizes, name: str, out: Path, sequence: int, data: Mapping[str, Any]) -> Config:
    """A run file for the CPU of a model of these sizes, in sequences of `sequence` tokens. Its steps and rate are the least that a run file
    may say."""
    return config.from_tables({
        "run": {"name": name, "out": str(out)}, "model": dict(sizes), "data": {"sequence": sequence, **data},
        "train": {"steps": 1, "batch": 1}, "optim": {"lr": 1e-5}})


Fill = Callable[[np.ndarray, StateLayout, int], None]
"""Writes the first parameters: (the flat array, its layout, the run's seed)."""


def beginning(cfg: Config, tokenizer: Tokenizer) -> Fill | None:
    """What the parameters of a new run begin from: None where they are drawn by the seed, or those of `train.start_from`. InputError where
    that is another model, by the first key that differs, or has another tokenizer; also as `open_source`, and for a run as `folders.at`."""
    source = cfg.train.start_from
    if not source:
        return None
    fill: Fill
    if source.startswith(PREFIX):
        model = open_source(source)
        path, sizes, file = model.path, model.sizes, model.path / hf_tokenizer.NAME
        own = hf_tokenizer.read(file) if file.exists() else tokenizer
        fill = lambda flat, layout, seed: model.fill(flat, layout)  # noqa: E731
    else:
        path, step = at_step(source)
        other, own, checkpoint = rundir.read_config(path), rundir.read_tokenizer(path), folders.at(path / "checkpoints", step)
        sizes = sizes_of(other, vocabulary(other, own.vocab_size))
        fill = lambda flat, layout, seed: (folders.load(checkpoint, {"param": (layout, flat)}, some=True), None)[1]  # noqa: E731
    if own.hash != tokenizer.hash:
        raise InputError(f"the run's tokenizer is not that of {path}", came=f"{tokenizer.kind} {tokenizer.hash[:16]}",
                         expected=f"{own.kind} {own.hash[:16]}", do="take the model's own in [data]")
    wanted = sizes_of(cfg, vocabulary(cfg, tokenizer.vocab_size))
    for key, size in sizes.items():
        if wanted.get(key) != size:
            raise InputError(f"the run's model is not that of {path}", came=f"model.{key} = {wanted.get(key)}", expected=str(size),
                             do=f"take model.{key} = {size}")
    return fill


def at_step(source: str) -> tuple[Path, int | None]:
    """`RUN@STEP` as (run directory, step); the step is None where none is named, and where a folder has all of that name."""
    run, sign, step = source.rpartition("@")
    named = sign and step.isdecimal() and len(step) <= MOST_DIGITS and not Path(source).is_dir()
    return (Path(run), int(step)) if named else (Path(source), None)


def open_source(source: str) -> Hub:
    """The model that `hf:FOLDER` names. InputError for what begins otherwise, and as `hf.open_hub`."""
    if not source.startswith(PREFIX):
        raise InputError("no model to begin from", came=source, expected="hf:FOLDER, the folder of a model of Hugging Face")
    return hf.open_hub(Path(source.removeprefix(PREFIX)))


def import_model(source: str, out: Path, catalogue: Catalogue) -> Path:
    """Make a run directory `out` that holds the model `hf:FOLDER` as its checkpoint 0, with its tokenizer. It is UNGATED: no gated
    component trained it. InputError if `out` is there already, and as `open_source`; MachineError if the disk refuses."""
    if out.exists():
        raise InputError("there is something already", came=out, expected="a folder that is not there yet", do="name another with --out")
    model = open_source(source)
    tokenizer = hf_tokenizer.read(model.path / hf_tokenizer.NAME)
    cfg = run_file(model.sizes, out.name, out.parent, min(int(model.sizes["positions"]), MOST_SEQUENCE), {})
    program = program_for(cfg, vocabulary(cfg, tokenizer.vocab_size), catalogue, threads_for(cfg))
    states = empty_states(program)
    model.fill(states["param"][1], states["param"][0])
    with rundir.create(cfg, tokenizer) as held, ExitStack() as undo:
        undo.callback(shutil.rmtree, held.path, ignore_errors=True)  # without its checkpoint it would begin from parameters that are drawn
        folders.save(held.checkpoints, 0, states, {"tokenizer": tokenizer.hash, "config": cfg.identity(), "program": program.hash(),
                                                  "from": str(model.path.resolve())})
        undo.pop_all()
        return held.path


def open_model(source: str, catalogue: Catalogue, prompt: bytes, tokens: int) -> tuple[Executor, Tokenizer]:
    """An executor that holds the model `hf:FOLDER`, for sequences as long as `prompt` and `tokens` tokens behind it, and its tokenizer. The
    caller closes it."""
    model = open_source(source)
    tokenizer = hf_tokenizer.read(model.path / hf_tokenizer.NAME)
    length = min(int(model.sizes["positions"]), max(2, 1 + len(tokenizer.encode(prompt)) + tokens))
    cfg = run_file(model.sizes, "sample", Path("runs"), length, {})
    program = program_for(cfg, vocabulary(cfg, tokenizer.vocab_size), catalogue, threads_for(cfg))
    executor = open_executor(program, catalogue)
    model.fill(executor.state("param"), program.states["param"])
    refresh(executor)
    return executor, tokenizer


def export_run(path: Path, step: int | None, out: Path, most: int = MOST_SHARD) -> tuple[int, str]:
    """Write a run's checkpoint (default: the latest) as a model of Hugging Face into the new folder `out`, in files of at most `most` bytes
    of tensors. Returns (the checkpoint's step, why there is no tokenizer.json, '' where there is one).

    InputError for what is no run, has no such checkpoint, or is a model that has no place there; CorruptError, MachineError.
    """
    cfg, tokenizer = rundir.read_config(path), rundir.read_tokenizer(path)
    checkpoint = folders.at(path / "checkpoints", step)
    if cfg.model.window:
        raise InputError("this model has no place among Hugging Face's", came=f"model.window = {cfg.model.window}", expected="0")
    vocab = vocabulary(cfg, tokenizer.vocab_size)
    layout, flat = folders.read(checkpoint, "param")["param"]
    files, why = hf_tokenizer.files(tokenizer)
    sizes = {**sizes_of(cfg, vocab), "dropout": cfg.model.dropout}
    hf.export(out, sizes, flat, layout, eod=tokenizer.eod, files=files, most=most)
    return folders.inspect(checkpoint, verify=False).step, why


def empty_states(program: Program) -> folders.States:
    """Arrays for all that a checkpoint of this Program holds, full of zeros."""
    kinds = program.plans["snapshot"].outputs
    return {kind: (program.states[kind], np.zeros(program.states[kind].size, NUMPY[program.states[kind].dtype])) for kind in kinds}
