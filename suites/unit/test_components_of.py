"""What a run rests on: declared by the run and by its Program, and together all that the catalogue holds."""

from __future__ import annotations

import atexit
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from alpha import config
from alpha.data.prepare import Order, prepare
from alpha.errors import ConfigError
from alpha.gates.contracts.data.tokenizer_hf import Reference
from alpha.registry.admission import needed
from alpha.train import assemble
from alpha.train.assemble import components_of, program_for
from alpha.train.catalogue import catalogue

CONFIGS = Path(__file__).parents[2] / "configs"
HUGGING_FACE = ("data.tokenizer_file='FILE'", "data.vocab=512")
BUCKETS = ("data.packing='documents'", "data.documents=true", "data.buckets=2")
CHOICES = ((), ("train.fuse=false",), ("train.recompute='block'",), ("data.tokenizer='bytes'",), ("data.corpus='.'",),
           ("data.mixture='stdlib:1, docs:2'",), HUGGING_FACE, ("data.packing='documents'",), BUCKETS,
           ("optim.name='sgd'",), ("optim.schedule='cosine'", "optim.decay=0"), ("optim.schedule='wsd'",),
           ("model.family='llama'", "model.kv_heads=2"),
           ("model.family='llama'", "model.rope_scaling=[2.0]"), ("train.start_from='hf:model'",))
SMALL = ("model.layers=1", "model.width=64", "model.heads=2", "data.sequence=32", "train.batch=4", "train.micro_batch=2", "train.shards=2")


@cache
def _tokenizer() -> Path:
    """A tokenizer.json, in a folder that is removed when the process ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "tokenizer.json"
    path.write_text(json.dumps(Reference(np.random.default_rng(1), "gpt2", 5).content), encoding="utf-8")
    return path


def _used(*choice: str) -> tuple[set[str], set[str]]:
    choice = tuple(key.replace("FILE", str(_tokenizer())) for key in choice)
    cfg = config.load(CONFIGS / "demo.toml", [*SMALL, *choice])
    program = program_for(cfg, 257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab, catalogue(), 1)
    return set(components_of(cfg, program)), set(program.kernels())


def _used_by_ranks() -> set[str]:
    """What a run of two ranks uses, the state whole or cut, with what that presupposes."""
    found = set()
    for zero in (0, 1):
        cfg = config.load(CONFIGS / "demo.toml", [*SMALL, f"train.zero={zero}"])
        found |= set(needed(catalogue(), components_of(cfg, program_for(cfg, cfg.data.vocab, catalogue(), 1, ranks=2))))
    assert found >= {"all_reduce.cpu", "reduce_scatter.cpu", "all_gather.cpu", "data_parallel.pass"}
    return found


def _used_of_prepared(root: Path) -> set[str]:
    """What a run on prepared data uses."""
    for i, text in enumerate(("one", "two", "three")):
        (root / f"{i}.txt").write_text(text)
    made = prepare(Order((str(root),), tokenizer="bytes"), root / "made")
    return _used(f"data.corpus='{made.folder}'", "data.tokenizer='bytes'")[0]


def test_a_tokenizer_learns_from_as_much_as_is_asked(tmp_path: Path) -> None:
    """However large the sample; the text of a test is too small to show it."""
    asked: list[int] = []

    class Text:
        hash = "00"

        def sample(self, nbytes: int) -> Text:
            asked.append(nbytes)
            return self

        def texts(self) -> list[bytes]:
            return [b"some text, some more text"] * 9

    small = config.load(CONFIGS / "tiny.toml")
    for sample in (1 << 20, 3 << 30):
        cfg = replace(small, data=replace(small.data, tokenizer="bpe", cache=str(tmp_path / str(sample)), vocab=260, sample=sample))
        assemble.tokenizer_for(cfg, Text())  # type: ignore[arg-type]
    assert asked == [1 << 20, 3 << 30]


def test_every_component_that_no_kernel_is_is_used_by_some_run(tmp_path: Path) -> None:
    """But the registry's own, another back end's executors, the sampler in order, which evaluation does without, what carries between
    hosts, which a session adds where there are several, and the collectives of GPUs, which no run reaches yet."""
    used = set().union(*(_used(*choice)[0] for choice in CHOICES), _used_by_ranks(), _used_of_prepared(tmp_path))
    unused = {c.id for c in catalogue() if c.kind not in ("kernel", "evidence") and c.profile != "device_collective"} - used
    assert unused == {"sampler.ordered", "executor.cuda", "executor.cuda_ranks", "reduce.cpu", "all_to_all.cpu", "transport.tcp"}
    assert used <= {c.id for c in catalogue()}


def test_buckets_need_sequences_that_differ_in_cost() -> None:
    """And more than one bucket; each refusal names the key, and comes before a text is read."""
    for choice in ((), BUCKETS[:1], BUCKETS[1:2]):
        with pytest.raises(ConfigError, match=r"data\.buckets needs packed documents that attention keeps apart"):
            _used(*choice, "data.buckets=2")
    for wrong in (1, -1, 5000):
        with pytest.raises(ConfigError, match=r"data\.buckets"):
            _used(*BUCKETS[:2], f"data.buckets={wrong}")
    for choice in (BUCKETS, (*BUCKETS[:2], "data.buckets=0")):
        _used(*choice)


@pytest.mark.parametrize(("choice", "more", "less"), [
    (("train.fuse=false",), set(), {"fuse.pass"}), (("train.recompute='block'",), {"recompute.pass"}, set()),
    (("data.tokenizer='bytes'",), {"tokenizer.bytes"}, {"tokenizer.bpe"}), (HUGGING_FACE, {"tokenizer.hf"}, {"tokenizer.bpe"}),
    (("optim.name='sgd'",), {"optimizer.sgd"}, {"optimizer.adamw"}),
    (("data.corpus='.'",), {"corpus.folder"}, {"corpus.stdlib"}),
    (("data.mixture='stdlib:1, docs:2'",), {"corpus.folder", "sampler.mixed"}, set()),
    (("data.packing='documents'",), {"sampler.packed"}, set()), (BUCKETS, {"sampler.packed", "sampler.bucketed"}, set()),
    (("train.start_from='hf:model'",), {"checkpoint.hf"}, set()),
    (("data.prefetch=0",), set(), {"sampler.prefetched"}),
])
def test_a_choice_changes_what_it_names(choice: tuple[str, ...], more: set[str], less: set[str]) -> None:
    (base, kernels), (other, others) = _used(), _used(*choice)
    assert (other - others) - (base - kernels) == more and (base - kernels) - (other - others) == less


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.25, 1.0])
def test_no_clipping_is_asked_for_by_nought(name: str, clip: float) -> None:
    """`optim.clip` = 0 clips nothing, so it is no key that was left out."""
    cfg = config.load(CONFIGS / "demo.toml", [*SMALL, f"optim.name='{name}'", f"optim.clip={clip}"])
    program = program_for(cfg, cfg.data.vocab, catalogue(), 1)
    assert {x.attrs["max_norm"] for x in program.plans["update"].launches if "max_norm" in x.attrs} == {clip}
