"""Sums among GPUs go late in the backward, in one row: links that carry nothing for 50 ms sleep."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

import pytest

from alpha.bench.step import ids_of
from alpha.bench.step_ranks import of_gpus
from alpha.config import parse
from alpha.graph.order import COMM
from alpha.graph.plan import Program
from alpha.passes import build
from alpha.resources import ROOT
from alpha.train.assemble import program_for, threads_for
from alpha.train.catalogue import catalogue

GPUS = 2


def program(zero: int) -> Program:
    """GPT-2 124M on GPUS GPUs."""
    cfg = of_gpus(parse((ROOT / "configs/gpt2-124m.toml").read_text()), GPUS)
    cfg = replace(cfg, train=replace(cfg.train, zero=zero))
    return program_for(cfg, ids_of(cfg), catalogue(), threads_for(cfg, GPUS), GPUS)


def beginnings(found: Program) -> list[float]:
    """Of each sum of gradients of the step, how much of its plan's FLOPs stand before it, in the order of the list."""
    plan = next(plan for name, plan in found.plans.items() if name.startswith("micro_last"))
    before = [0, *accumulate(0 if x.stream == COMM else x.flops for x in plan.launches)]
    return [at / before[-1] for at, x in zip(before, plan.launches) if x.stream == COMM and x.phase == "reduce"]


@pytest.mark.parametrize("zero", [0, 1])
def test_sums_of_layers_go_in_one_row_before_the_end_of_the_backward(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    late = program(zero)
    assert build.HIDES["cuda"] < inf
    monkeypatch.setattr(build, "HIDES", {})
    early = program(zero)
    first, then = beginnings(early), beginnings(late)
    assert len(first) == len(then) > 12 and 0.5 < first[0] < 0.6, first
    assert all(x <= y for x, y in zip(first, then))
    assert 0.85 < then[0] < 0.95, then  # 12 layers of 28 MB at 12,000 FLOPs a byte are 7.6 % of the step, and places are a layer apart
    assert then[-1] == first[-1] == 1.0  # the tied embedding's is complete last, and nothing may keep it waiting
    assert late.arenas(0) == early.arenas(0), "to wait costs memory"
