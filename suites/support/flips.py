"""Bit flips in a small run that trains: how many of them spot checks see, and how many steps later. The table of docs/gates.md.

    python suites/support/flips.py [TRIALS]

A trial loads the same state, flips bits at a random moment of a step, between two launches, and goes on for LATER steps at most.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from alpha.backends.checks import Inspector
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Catalogue
from alpha.config import Config, from_tables
from alpha.errors import NonFiniteError, SpotCheckError
from alpha.graph.plan import Plan, Program, Ref
from alpha.profile.noise import wilson
from alpha.profile.store import Store
from alpha.train import assemble
from alpha.train.catalogue import catalogue
from alpha.train.loop import Loop

KINDS = {"weights": ("state.param",), "moments": ("state.m", "state.v"), "gradients": ("state.grad0", "state.grad1"),
         "activations": ("act",)}
SIZES = {"one bit": 1, "3 bits of a word": 3, "64 bytes": 64}
LATER, VERIFY = 3, 4
"""Steps that a trial goes on for; every VERIFY-th step is checked."""


class Flipping(CpuExecutor):
    """Runs `strike` once, before launch `at` = (call of the step, launch)."""

    def __init__(self, program: Program, kernels: Catalogue) -> None:
        super().__init__(program, kernels)
        self.at, self.strike, self.calls = (-1, -1), lambda: None, 0
        self._own: Inspector | None = None

    def arm(self, at: tuple[int, int], strike: Callable[[], None]) -> None:
        self.at, self.strike, self.calls = at, strike, -1

    def _run(self, found: Plan, inputs: object) -> None:
        self.calls += 1
        struck = self._bound[found.name]
        if self.calls == self.at[0]:
            launch, run = struck[self.at[1]]

            def both() -> None:
                if self.inspector is None:
                    self.strike()
                run()
            self._bound[found.name] = [*struck[: self.at[1]], (launch, both), *struck[self.at[1] + 1 :]]
        own = self.inspector
        try:
            if own is not None:
                self.inspector = _Between(self, own)
            super()._run(found, inputs)  # type: ignore[arg-type]
        finally:
            self.inspector, self._bound[found.name] = own, struck


class _Between:
    """Strikes in a checked step, before the launch is looked at: what is then read was written by another one."""

    def __init__(self, executor: Flipping, own: Inspector) -> None:
        self.executor, self.own = executor, own

    def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        if (self.executor.calls, index) == self.executor.at:
            self.executor.strike()
        self.own.before(plan, index, read)

    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        self.own.after(plan, index, read)


def config(folder: Path, backend: str = "cpu", width: int = 64, **train: object) -> Config:
    """A GPT of two layers on made text."""
    folder.mkdir(exist_ok=True)
    text, rng = folder / "text", random.Random(1)
    if not text.exists():
        text.mkdir()
        for i in range(12):
            (text / f"{i}.txt").write_text(" ".join(rng.choices("def return self value None import for in".split(), k=900)))
    return from_tables({
        "run": {"name": "flips", "out": str(folder)}, "model": {"family": "gpt", "layers": 2, "width": width, "heads": 2},
        "data": {"corpus": str(text), **({"tokenizer": "bytes"} if backend == "cpu" else {"tokenizer": "bpe", "vocab": 264}),
                 "sequence": 32, "validation": 0.3, "cache": str(folder / "cache")},
        "train": {"steps": 1000, "batch": 8, "shards": 2, "micro_batch": 2, "verify": VERIFY, "profile": 0, **train},
        "optim": {"lr": 1e-3}, "machine": {"threads": 1, "backend": backend}})  # fmt: skip


def program_of(cfg: Config, data: assemble.Dataset) -> Program:
    """The Program of such a run. Nothing here breaks what builds it, so one is built for all folders."""
    return _built(replace(cfg, run=replace(cfg.run, out="-"), data=replace(cfg.data, corpus="-", cache="-")), data.tokenizer.vocab_size)


@cache
def _built(cfg: Config, vocab: int) -> Program:
    return assemble.program_for(cfg, vocab, catalogue(), 1)


@contextmanager
def running(folder: Path, kernels: Catalogue | None = None, **train: object) -> Iterator[Loop]:
    """A loop that has been started, with the CPU's kernels or others."""
    cfg = config(folder, **train)
    data = assemble.open_data(cfg)
    program = program_of(cfg, data)
    with Flipping(program, kernels or catalogue()) as executor, Store(folder / "metrics.sqlite") as metrics:
        loop = Loop(cfg, executor, assemble.sampler_for(cfg, data), data.validation, data.tokenizer, folder / "checkpoints", metrics)
        loop.start()
        yield loop


@contextmanager
def on_device(folder: Path, kernels: Catalogue, **train: object) -> Iterator[Loop]:
    """The same on a GPU, in bf16, started."""
    cfg = config(folder, "cuda", 128, precision="bf16", **train)
    data = assemble.open_data(cfg)
    program = program_of(cfg, data)
    with CudaExecutor(program, kernels) as executor, Store(folder / "metrics.sqlite") as metrics:
        loop = Loop(cfg, executor, assemble.sampler_for(cfg, data), data.validation, data.tokenizer, folder / "checkpoints", metrics)
        loop.start()
        yield loop


@dataclass(frozen=True)
class Trial:
    """What one flip came to. `seen`: '' or by what; `latency`: steps from the flip to there; `changed`: the bits of the run changed."""

    seen: str
    latency: int
    changed: bool


def bits(loop: Loop) -> bytes:
    return b"".join(flat.tobytes() for _, flat in loop.states().values())


class Campaign:
    """Trials from one state, which the loop has come to at a step before a checked one."""

    def __init__(self, loop: Loop, rng: np.random.Generator) -> None:
        self.loop, self.rng = loop, rng
        while loop.step < 2 * VERIFY - 1:
            loop.advance()
        self.begin: dict[int, dict[str, np.ndarray]] = {}
        self.after: dict[int, bytes] = {}
        for _ in range(LATER + 3):
            self.begin[loop.step] = {kind: flat.copy() for kind, (_, flat) in loop.states().items()}
            loop.advance()
            self.after[loop.step - 1] = bits(loop)

    def trial(self, kind: str, size: int, checked: bool) -> Trial:
        """One flip in a checked step or in one that is not."""
        loop, executor = self.loop, self.loop.executor
        assert isinstance(executor, Flipping)
        step = 2 * VERIFY if checked else 2 * VERIFY + 1
        first = step - 1
        for name, (_, flat) in loop.states().items():
            flat[...] = self.begin[first][name]
        loop.step = first
        loop.spots._seed = int(self.rng.integers(1 << 31))  # what is drawn
        loop.spots.restart(first)
        loop.spots._first = False
        loop.spots._turn = int(self.rng.integers(1 << 20))
        loop.advance()  # so that the hashes are those of a run on its way
        moments = [(n, i) for n, call in enumerate(loop.program.schedule) for i in range(len(loop.plans[call.plan].launches))]
        executor.arm(moments[int(self.rng.integers(len(moments)))], self._strike(executor, kind, size))
        for later in range(LATER):
            try:
                loop.advance()
            except SpotCheckError as error:
                executor.inspector = None
                return Trial("memory" if "by itself" in error.what or "changed since" in str(error.came) else "launch", later, True)
            except NonFiniteError:
                executor.inspector = None
                return Trial("non-finite", later, True)
            if later == 0:
                changed = bits(loop) != self.after[step]
        return Trial("", LATER, changed)

    def _strike(self, executor: Flipping, kind: str, size: int) -> Callable[[], None]:
        arenas = [executor.arenas[name] for name in KINDS[kind] if name in executor.arenas]
        arena = arenas[int(self.rng.integers(len(arenas)))]
        if size == 64:
            at = int(self.rng.integers(arena.size // 64)) * 64
            mask = self.rng.integers(0, 256, 64).astype(np.uint8)
        else:
            at = int(self.rng.integers(arena.size // 4)) * 4
            chosen = self.rng.choice(32, size, replace=False)
            mask = np.packbits(np.isin(np.arange(32), chosen))

        def strike() -> None:
            arena[at : at + mask.size] ^= mask
        return strike


def false_alarms(folder: Path, steps: int) -> str:
    """An undisturbed run in which every step is checked; raises at a false alarm. What was done."""
    with running(folder, verify=1, steps=steps) as loop:
        while loop.step < steps:
            loop.advance()
        return replace(loop.spots.tally).text()


def main() -> int:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as made, running(Path(made) / "flips") as loop:
        campaign = Campaign(loop, np.random.default_rng())
        print("| flipped in | how | step | seen | 95 % interval | by hash, launch, not finite | same step | changed bits, of them seen |")
        print("|---|---|---|---|---|---|---|---|")
        for kind in KINDS:
            for how, size in SIZES.items():
                for checked in (True, False):
                    found = [campaign.trial(kind, size, checked) for _ in range(trials)]
                    seen = [t for t in found if t.seen]
                    low, high = wilson(len(seen), trials)
                    by = [sum(t.seen == x for t in found) for x in ("memory", "launch", "non-finite")]
                    print(f"| {kind} | {how} | {'checked' if checked else 'between'} | {len(seen)} of {trials} | {low:.0%} to {high:.0%} | "
                          f"{by[0]}, {by[1]}, {by[2]} | {sum(t.latency == 0 for t in seen)} | {sum(t.changed for t in found)}, "
                          f"{sum(t.changed for t in seen)} |", flush=True)
    with tempfile.TemporaryDirectory() as made:
        print("undisturbed:", false_alarms(Path(made) / "quiet", 10 * trials))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
