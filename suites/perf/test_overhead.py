"""What timing every launch of every step costs: less than half a percent of a step of the demo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from alpha import config
from alpha.backends.cpu.executor import CpuExecutor
from alpha.optim.init import fill_initial
from alpha.profile.noise import interval
from alpha.profile.recorder import Recorder
from alpha.profile.store import Store
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue

pytestmark = pytest.mark.alone

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
LIMIT = 0.005


class Bench:
    """Training steps of the demo on made-up text, with the recorder that a run has, or with one that is off."""

    def __init__(self, path: Path) -> None:
        cfg = config.load(DEMO)
        self.program = program_for(cfg, cfg.data.vocab, catalogue(), 2)
        self.executor = CpuExecutor(self.program, catalogue())
        fill_initial(self.executor.state("param"), self.program.states["param"], 1)
        rng = np.random.default_rng(0)
        self.inputs = {}
        for name, plan in self.program.plans.items():
            self.inputs[name] = {k: rng.integers(0, 100, r.type.shape).astype(np.int32) for k, r in plan.inputs.items()}
            if "positions" in self.inputs[name]:
                positions = np.arange(cfg.data.sequence, dtype=np.int32)
                self.inputs[name]["positions"] = np.broadcast_to(positions, plan.inputs["positions"].type.shape)
        self.store = Store(path / "m.sqlite")
        self.store.begin(0, 0, 0, 0)
        self.on, self.off, self.count = Recorder(self.store), Recorder(), 0

    def step(self, watched: bool) -> int:
        """ns of one step, its row included."""
        r = self.executor.recorder = self.on if watched else self.off
        began = time.perf_counter_ns()
        if watched:
            r.begin(self.count)
        for call in self.program.schedule:
            with r.span("data_load"):
                inputs = self.inputs[call.plan] if call.shard is not None else {}
            self.executor.run(call.plan, inputs)
        r.end_step()
        if watched:
            r.finish()
        self.count += 1
        return time.perf_counter_ns() - began

    def close(self) -> None:
        self.store.close()
        self.executor.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_what_the_recorder_itself_costs(bench: Bench) -> None:
    """The same calls with launches that do nothing: what is left is the cost of timing and storing, beside the time of a real step."""
    for _ in range(3):
        bench.step(False)
    real = min(bench.step(False) for _ in range(10))
    bench.executor._bound = {name: [(launch, lambda: None) for launch, _ in bound] for name, bound in bench.executor._bound.items()}
    costs = []
    for _ in range(5):  # what else the machine does hits some of them
        watched, plain = zip(*((bench.step(True), bench.step(False)) for _ in range(100)))
        costs.append(sorted(watched)[50] - sorted(plain)[50])
    cost = sorted(costs)[2]
    print(f"recorder: {cost / 1e3:.1f} us a step of {real / 1e6:.1f} ms: {cost / real:.3%}")
    assert 0 < cost < LIMIT * real


def _pairs(bench: Bench, n: int) -> list[float]:
    """Logarithms of watched over unwatched, of real steps in alternating pairs."""
    logs, rng = [], np.random.default_rng(n)
    for _ in range(n):
        first = bool(rng.integers(2))
        a, b = bench.step(first), bench.step(not first)
        watched, plain = (a, b) if first else (b, a)
        logs.append(float(np.log(watched / plain)))
    return logs


@pytest.mark.slow
def test_watched_against_unwatched_steps(bench: Bench) -> None:
    """The interval of the median ratio must not lie above the limit. That of 60 pairs does by chance in one run of 40, so then four times
    as many pairs decide, these among them: they tell a cost from chance better, whichever it was."""
    for _ in range(4):
        bench.step(True)
    logs = _pairs(bench, 60)
    if interval(logs, 0.05).low >= LIMIT:
        logs += _pairs(bench, 180)
    found = interval(logs, 0.05)
    print(f"watched against unwatched: {found.estimate:+.3%} [{found.low:+.3%}, {found.high:+.3%}], {found.n} pairs")
    assert found.low < LIMIT
