"""Launches of the GPU, bound without a device: each rank's plans of any run file bind, take the scratch that their components declare, and
ask for no compiled file but those that are listed. An executor refuses other scratch, so a rank whose cut has no element would not start; a
file that is not listed would need a compiler where a run starts."""

from __future__ import annotations

import ctypes
import math
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alpha import config
from alpha.backends.cuda.cubins_of import ANYWHERE, NullGpu
from alpha.backends.cuda.kernels import flash, gemm
from alpha.backends.cuda.launches import recording
from alpha.backends.cuda.lib import Operand
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.memory import Span, aligned
from alpha.graph.plan import Program
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ("model.layers=2", "model.width=128", "model.heads=2", "data.sequence=128", "data.vocab=512", "train.batch=8", "train.shards=4")


class Counting(NullGpu):
    """Counts the scratch that is asked for."""

    def scratch(self, nbytes: int) -> Span:
        self.used += aligned(nbytes)
        return super().scratch(nbytes)


class Nothing:
    """Stands for a tensor map, a compiled kernel, a device: takes what it is given and has what it is asked for."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.buffer = (ctypes.c_ubyte * 128)()
        self.multiprocessors = 132

    def prepare(self, *arguments: Any, **more: Any) -> Nothing:
        return self

    @property
    def properties(self) -> Nothing:
        return self

    @classmethod
    def open(cls) -> Nothing:
        return cls()


@pytest.fixture(autouse=True)
def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention encode tensor maps by the driver and load their kernels when they are bound."""
    for module in (gemm, flash):
        for name in ("TensorMap", "Kernel", "Device"):
            monkeypatch.setattr(module, name, Nothing)
    monkeypatch.setattr(gemm, "compile_all", lambda sources: [compiled(x) for x in sources])
    monkeypatch.setattr(flash, "compile_kernel", compiled)


ASKED: set[Source] = set()
"""Files that products and attention asked for since it was cleared."""


def compiled(source: Source) -> Path:
    """Nothing is compiled."""
    ASKED.add(source)
    return Path()


@cache
def listed(component_id: str) -> frozenset[Source]:
    """Files that `alpha kernels build` compiles for a component."""
    binaries = catalogue()[component_id].binaries
    return frozenset(binaries.sources()) if binaries is not None else frozenset()


def taken(program: Program) -> dict[str, set[tuple[int, int]]]:
    """Component -> (taken, planned) bytes of scratch of its launches, those that have none included. Fails on a file that is not listed."""
    found: dict[str, set[tuple[int, int]]] = {}
    for plan in program.plans.values():
        for launch in plan.launches:
            component = catalogue()[launch.component]
            if component.kind != "kernel":
                continue  # a collective takes its scratch from a channel
            gpu = Counting()
            ASKED.clear()
            with recording() as noted:
                component.implementation(gpu, [Operand(ANYWHERE, r.type) for r in launch.ins],
                                         [Operand(ANYWHERE, r.type) for r in launch.outs], launch.attrs)
            assert {*noted, *ASKED} <= listed(component.id), f"{component.id} asks for a file that nothing compiles beforehand"
            found.setdefault(component.id, set()).add((gpu.used, launch.scratch.type.nbytes if launch.scratch else 0))
    return found


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_binder_takes_the_scratch_that_was_planned(family: str, zero: int, ranks: int) -> None:
    name = {"gpt": "gpt2-124m", "llama": "llama-1b"}[family]
    cfg = config.load(CONFIGS / f"{name}.toml", [*SMALL, f"train.zero={zero}",
                                                 *(("model.kv_heads=2", "model.hidden=256") if family == "llama" else ())])
    found = taken(program_for(cfg, 512, catalogue(), 1, ranks=ranks))
    assert {k: sorted(v) for k, v in found.items() if any(a != b for a, b in v)} == {}
    assert {"adamw.f32.sm90", "linear_cross_entropy_grad.bf16.sm90"} <= found.keys()


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.toml") if 'backend = "cuda"' in p.read_text()))
def test_every_run_file_of_the_gpu_binds(name: str) -> None:
    """At its own sizes, on one GPU and on four."""
    for ranks in (1, 4):
        cfg = config.load(CONFIGS / f"{name}.toml")
        train = replace(cfg.train, batch=cfg.train.batch * ranks, shards=ranks, zero=int(ranks > 1))
        found = taken(program_for(replace(cfg, train=train), cfg.model.vocab_size or cfg.data.vocab, catalogue(), 1, ranks=ranks))
        assert found and all(a == b for x in found.values() for a, b in x)


DRAWN = {
    "model.layers": (1, 2), "data.sequence": (64, 128, 192, 1024), "data.vocab": (512, 4096, 50304), "data.documents": ("false", "true"),
    "model.tied": ("true", "false"), "model.window": (0, 64), "model.z_loss": (0.0, 1e-4), "train.fuse": ("true", "false"),
    "train.recompute": ("'none'", "'block'"), "train.micro_batch": (0, 1, 2), "optim.clip": (0.0, 1.0), "train.replay": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_drawn_run_files_bind(seed: int) -> None:
    """Widths, heads and settings away from their defaults, on one to four ranks."""
    rng = random.Random(seed)
    gpt, heads, ranks = bool(seed % 2), rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 2, 4))
    width = heads * rng.choice((64, 128)) * (4 // math.gcd(heads, 4))
    heads *= 4 // math.gcd(heads, 4)
    own = ("model.dropout=0.1",) if gpt else (f"model.kv_heads={rng.choice([k for k in (1, 2, 4, heads) if heads % k == 0])}",
                                              "model.attention_bias='qkv'", f"model.hidden={rng.choice((64, 256, 640))}")
    drawn = [f"{key}={rng.choice(values)}" for key, values in DRAWN.items()]
    shards = ranks * rng.choice((1, 2))
    cfg = config.load(CONFIGS / f"{'gpt2-124m' if gpt else 'llama-1b'}.toml", [
        f"model.width={width}", f"model.heads={heads}", f"train.batch={4 * shards}", f"train.shards={shards}",
        f"train.zero={int(ranks > 1 and rng.random() < 0.7)}", *own, *drawn])
    found = taken(program_for(cfg, cfg.data.vocab, catalogue(), 1, ranks=ranks))
    assert found and all(a == b for x in found.values() for a, b in x), drawn


def test_a_file_that_is_not_listed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.load(CONFIGS / "gpt2-124m.toml", SMALL)
    for name in ("matmul.bf16.sm90", "attention_packed_bwd.bf16.sm90", "adamw.f32.sm90"):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "listed", lambda i, own=name, was=listed: frozenset() if i == own else was(i))
            with pytest.raises(AssertionError, match=f"{name} asks for a file"):
                taken(program_for(cfg, 512, catalogue(), 1))


def test_adamw_of_no_segments_takes_it_too() -> None:
    """As on two of four ranks of GPT-2 124M: their cut ends inside of the embedding."""
    cfg = config.load(CONFIGS / "gpt2-124m.toml", ["train.zero=1", "train.batch=256", "train.shards=4"])
    program = program_for(cfg, 50304, catalogue(), 1, ranks=4)
    launches = (x for plan in program.plans.values() for x in plan.launches if x.op == "adamw")
    empty = [x for x in launches if not any(s[1] for s in x.attrs["segments"])]  # type: ignore[attr-defined]
    assert empty and all(a == b for a, b in taken(program)["adamw.f32.sm90"])
