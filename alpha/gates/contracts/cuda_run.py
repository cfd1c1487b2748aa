"""What cases of the executor of the GPU run: 2-layer models in bf16, their Programs, and executors that hold a state. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np

from alpha.backends.cuda.catalogue import fill
from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Catalogue, Measured
from alpha.gates.contracts.reference import SCHEDULE, Batches, Reference, filled, pair, random_state, text_of
from alpha.graph.plan import Program
from alpha.models import gpt, llama
from alpha.ops.numerics import round_to
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw
from alpha.passes.build import StepShape, build_program

Check = Callable[[Reference, np.random.Generator], Measured]

VOCAB, SEQ, BATCH = 72, 48, 2

LAST, EVERY = 100, 10
"""Steps of the run along which the state is held against the oracle."""

BAND, WINDOW, RUNS = 60, 10, 8
"""Steps of the run whose losses are compared with those of RUNS runs on the CPU, as means of WINDOW steps."""

UPDATES = {
    "short": adamw(SCHEDULE),
    "long": adamw(ScheduleConfig(kind="cosine", peak=2e-3, warmup=10, total=LAST)),
    "band": adamw(ScheduleConfig(kind="cosine", peak=2e-3, warmup=10, total=BAND), weight_decay=1.0),  # a decay that shows in 60 steps
}
"""Run -> its optimizer."""

KEPT = ("param", "m", "v")
"""Kinds of state whose bits two runs must share."""


@cache
def references() -> dict[str, Reference]:
    """'gpt': dropout, packed documents, tied head; 'llama': grouped heads, window, untied head, z-loss. Heads are 64 wide, rows ragged to
    every tile."""
    return pair(gpt.GPTConfig(vocab=VOCAB, positions=SEQ, layers=2, width=128, heads=2, dropout=0.1, documents=True, seed=5),
                llama.LlamaConfig(vocab=VOCAB, positions=SEQ, layers=2, width=128, heads=2, kv_heads=1, hidden=192, window=20, z_loss=1e-3),
                BATCH)


@cache
def kernels() -> Catalogue:
    """The kernels of the GPU."""
    return filled(fill)


@cache
def program(name: str, shards: int = 1, micros: int = 1, policy: tuple[str, tuple[str, ...]] = ("none", ()), run: str = "short") -> Program:
    """A reference Program in bf16, built once per process and kind. `run`: one of UPDATES."""
    return build_program(name=name, model=references()[name].model, optimizer=UPDATES[run], catalogue=kernels(), backend="cuda",
                         precision="bf16", policy=policy,
                         shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=shards, micros=micros))


def _drawn(ref: Reference, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float64 state whose parameters are float32 values, with their bf16 copy; step 0."""
    state = random_state(ref, rng)
    state["param"] = round_to(state["param"], "f32")
    return {**state, "param16": round_to(state["param"], "bf16"), "counter": np.zeros_like(state["counter"])}


@contextmanager
def opened(p: Program, param: np.ndarray, *, captured: bool = True) -> Iterator[CudaExecutor]:
    """An executor that holds these master parameters and their copy."""
    with CudaExecutor(p, kernels(), captured=captured) as executor:
        executor.state("param")[...] = param
        executor.run("narrow")
        yield executor


def _step(executor: CudaExecutor, batches: Batches) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for s in executor.program.schedule:
        out = executor.run(s.plan, text_of(batches, s))
    return out


def _loss(out: Mapping[str, np.ndarray]) -> float:
    return float(out["loss_sum"]) / float(out["count"])
