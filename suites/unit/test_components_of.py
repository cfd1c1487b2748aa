"""What a run rests on: declared by the run and by its Program, and together all that the catalogue holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpha import config
from alpha.train.assemble import components_of, program_for
from alpha.train.catalogue import catalogue

CONFIGS = Path(__file__).parents[2] / "configs"
CHOICES = ((), ("train.fuse=false",), ("train.recompute='block'",), ("data.tokenizer='bytes'",), ("data.corpus='.'",),
           ("optim.name='sgd'",), ("optim.schedule='cosine'", "optim.decay=0"), ("optim.schedule='wsd'",),
           ("model.family='llama'", "model.kv_heads=2"))


def _used(*choice: str) -> tuple[set[str], set[str]]:
    small = ["model.layers=1", "model.width=64", "model.heads=2", "data.sequence=32", "train.batch=4", "train.micro_batch=2",
             "train.shards=2"]
    cfg = config.load(CONFIGS / "demo.toml", [*small, *choice])
    program = program_for(cfg, 257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab, catalogue(), 1)
    return set(components_of(cfg, program)), set(program.kernels())


def test_every_component_that_no_kernel_is_is_used_by_some_run() -> None:
    """But the registry's own, another back end's executor, and the sampler in order, which evaluation does without."""
    used = set().union(*(_used(*choice)[0] for choice in CHOICES))
    unused = {c.id for c in catalogue() if c.kind not in ("kernel", "evidence")} - used
    assert unused == {"sampler.ordered", "executor.cuda"}
    assert used <= {c.id for c in catalogue()}


@pytest.mark.parametrize(("choice", "more", "less"), [
    (("train.fuse=false",), set(), {"fuse.pass"}), (("train.recompute='block'",), {"recompute.pass"}, set()),
    (("data.tokenizer='bytes'",), {"tokenizer.bytes"}, {"tokenizer.bpe"}), (("optim.name='sgd'",), {"optimizer.sgd"}, {"optimizer.adamw"}),
    (("data.corpus='.'",), {"corpus.folder"}, {"corpus.stdlib"}),
])
def test_a_choice_changes_what_it_names(choice: tuple[str, ...], more: set[str], less: set[str]) -> None:
    (base, kernels), (other, others) = _used(), _used(*choice)
    assert (other - others) - (base - kernels) == more and (base - kernels) - (other - others) == less
