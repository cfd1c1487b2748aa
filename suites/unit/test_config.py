"""Run files: what loads is what was written, and what is wrong is named with what came, what was expected and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from alpha import config
from alpha.errors import ConfigError, InputError

SMALLEST = """
[run]
name = "x"
[model]
family = "gpt"
layers = 2
width = 64
heads = 4
[train]
steps = 10
batch = 8
[optim]
lr = 1e-3
"""
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.name)
def test_shipped_run_files_load(path: Path) -> None:
    cfg = config.load(path)
    assert config.parse(cfg.resolved()) == cfg
    assert cfg.micro_batch * cfg.micros * cfg.train.shards == cfg.train.batch


def test_resolved_text_is_the_whole_configuration() -> None:
    cfg = config.parse(SMALLEST, ['run.out=ü \\" #', "optim.eps=1e-10", "optim.betas=[0.5, 0.25]", "model.tied=false"])
    again = config.parse(cfg.resolved())
    assert again == cfg and again.identity() == cfg.identity()
    for name, section in cfg.sections():
        for f in fields(section):
            assert f"\n{f.name} = " in cfg.resolved().split(f"[{name}]")[1]


def test_sections_are_frozen_and_keyword_only() -> None:
    cfg = config.parse(SMALLEST)
    with pytest.raises(FrozenInstanceError):
        cfg.train.steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.Machine(2)  # type: ignore[misc]


FREE = {
    "run.name", "run.out", "data.baseline", "data.cache", "data.prefetch", "train.eval_every", "train.eval_windows", "train.final_windows",
    "train.sample_every", "train.checkpoint_every", "train.keep", "train.keep_every", "train.profile", "train.verify", "train.replay",
    "train.zero",
}  # fmt: skip
"""Keys that decide no bit of the state, beside those of the machine and of logs."""


def test_identity_follows_what_decides_bits_and_nothing_else() -> None:
    """Each key of a run file changed alone, without a look at whether the value makes sense."""
    base = config.parse(SMALLEST)
    other: dict[type, Callable[[Any], Any]] = {
        bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: 2 * x + 1, str: lambda x: x + "x", tuple: lambda x: (*x, 2.0),
    }  # fmt: skip
    seen = set()
    for name, section in base.sections():
        for f in fields(section):
            value = getattr(section, f.name)
            changed, own = copy.copy(base), copy.copy(section)
            object.__setattr__(own, f.name, other[type(value)](value))
            object.__setattr__(changed, name, own)
            key = f"{name}.{f.name}"
            free = key in FREE or name in ("machine", "log")
            assert (changed.identity() == base.identity()) == free, key
            seen.add(key)
    assert seen >= FREE and len(seen) > 60
    assert config.parse(SMALLEST, ["data.buckets=0"]).identity() == base.identity(), "runs that began before the key was there go on"


WRONG = [
    ("train.step=3", "unknown key `train.step`", "did you mean `steps`?"),
    ("train.lr=3", "unknown key `train.lr`", "did you mean `optim.lr`?"),
    ("modl.width=1", "unknown section [modl]", "did you mean `model`?"),
    ("model.family=gtp", "`model.family` is not one of its choices", "did you mean `gpt`?"),
    ("model.heads=5", "model.heads does not divide model.width", "1, 2, 4, 8, 16, 32, 64"),
    ("model.layers=0", "`model.layers` is out of range", "at least 1"),
    ("model.layers=2.0", "`model.layers` has the wrong type", "an integer"),
    ("model.layers=true", "`model.layers` has the wrong type", "an integer"),
    ("model.tied=1", "`model.tied` has the wrong type", "true or false"),
    ("model.positions=64", "data.sequence is longer than the model has positions", "at most 64"),
    ("model.kv_heads=2", "model.kv_heads does not apply to family gpt", "remove model.kv_heads"),
    ("train.shards=3", "train.shards is no power of two", "take 2 or 4"),
    ("train.shards=16", "train.batch cannot be cut into the shards", "a multiple of 16"),
    ("train.micro_batch=3", "a shard's sequences cannot be cut into microbatches", "1, 2, 4, 8"),
    ("train.recompute=blocks", "train.recompute is not a policy", "none, block"),
    ("train.recompute=ops:", "train.recompute is not a policy", "none, block"),
    ("optim.lr=nan", "`optim.lr` is out of range", "above 0.0"),
    ("optim.lr=inf", "`optim.lr` is out of range", "above 0.0"),
    ("optim.lr=0", "`optim.lr` is out of range", "above 0.0"),
    ("optim.betas=[0.9]", "optim.betas are two numbers", "[0.9, 0.95]"),
    ("optim.betas=0.9", "`optim.betas` has the wrong type", "a list of numbers"),
    ("optim.warmup=10", "optim.warmup leaves no step", "below 10"),
    ("optim.decay=3", "optim.decay does not apply to schedule cosine", "wsd"),
    ("run.name=a/b", "run.name is no folder name", "change run.name"),
    ("data.validation=0", "`data.validation` is out of range", "above 0.0"),
    ("data.vocab=2147483649", "`data.vocab` is out of range", "at most 2147483648"),
    ("data.corpus=3", "`data.corpus` has the wrong type", "a string in quotes"),
    ("steps", "an override is not section.key=value", "--set section.key=value"),
]


@pytest.mark.parametrize(("override", "what", "help_"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_values_are_named(override: str, what: str, help_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(SMALLEST, [override])
    message = str(caught.value)
    assert what in message and help_ in message and "came:" in message and "expected:" in message and "do:" in message
    assert caught.value.exit_code == 2


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        config.load(tmp_path / "none.toml")
    for text, what in (
        ("[run\n", "is not TOML"),
        ("steps = 1\n", "a key outside any section"),
        ("", "`run.name` is missing"),
        (b"\xff", "TOML"),
    ):
        with pytest.raises(ConfigError, match=what):
            config.parse(text)


def test_llama_sizes() -> None:
    llama = ["model.family=llama", "model.kv_heads=2"]
    assert config.parse(SMALLEST, llama).hidden == 192
    with pytest.raises(ConfigError, match="kv_heads does not divide"):
        config.parse(SMALLEST, [*llama, "model.kv_heads=3"])
    with pytest.raises(ConfigError, match="even head size"):
        config.parse(SMALLEST, [*llama, "model.width=12", "model.heads=4"])
    assert config.parse(SMALLEST, llama).head_dim == 16 and config.parse(SMALLEST, [*llama, "model.head_dim=6"]).head_dim == 6
    with pytest.raises(ConfigError, match="even head size"):
        config.parse(SMALLEST, [*llama, "model.head_dim=5"])
    with pytest.raises(ConfigError, match="attention_bias` is not one of its choices"):
        config.parse(SMALLEST, [*llama, "model.attention_bias=q"])
    for wrong in ("[1.0, 2.0]", "[0.0]", "[nan]", "[8.0, 4.0, 1.0, 8192]", "[8.0, 1.0, 4.0, 8192.5]", "[8.0, 1.0, 4.0, 8192, 1.0]"):
        with pytest.raises(ConfigError, match="rope_scaling is none of its forms"):
            config.parse(SMALLEST, [*llama, f"model.rope_scaling={wrong}"])
    with pytest.raises(ConfigError, match="rope_scaling has no kernel on cuda"):
        config.parse(SMALLEST, [*llama, "model.rope_scaling=[2]", "machine.backend=cuda", "train.precision=bf16"])
    with pytest.raises(ConfigError, match="dropout does not apply"):
        config.parse(SMALLEST, [*llama, "model.dropout=0.1"])


def test_every_key_is_documented() -> None:
    text = config.table()
    for name, section in config.parse(SMALLEST).sections():
        assert f"### [{name}]" in text
        for f in fields(section):
            assert f"| `{f.name}` |" in text and f.metadata["doc"]


FROZEN = {
    "run": "name seed out",
    "model": "family layers width heads positions vocab_size tied norm_eps head_dim kv_heads attention_bias hidden rope_base "
    "rope_scaling window z_loss dropout",
    "data": "corpus mixture tokenizer vocab tokenizer_file tokenizer_end sample validation sequence packing documents buckets prefetch "
    "baseline cache",
    "train": "steps start_from batch shards zero precision micro_batch replay recompute fuse eval_every eval_windows final_windows "
    "checkpoint_every keep keep_every profile sample_every verify",
    "optim": "name lr betas eps momentum weight_decay clip schedule warmup decay floor",
    "machine": "backend debug threads",
    "log": "tensorboard wandb",
}


def test_the_keys_are_a_public_surface() -> None:
    found = {name: {f.name for f in fields(section)} for name, section in config.parse(SMALLEST).sections()}
    assert found == {name: set(keys.split()) for name, keys in FROZEN.items()}
