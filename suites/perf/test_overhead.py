"""What timing every launch of every step costs: less than half a percent of a step of the demo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
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

    def __init__(self, path: Path, *changes: str) -> None:
        cfg = config.load(DEMO, changes)
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
        self.store = Store(path)
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
    with closing(Bench(tmp_path / "whole.sqlite")) as found:
        yield found


@pytest.fixture
def quarter(tmp_path: Path) -> Iterator[Bench]:
    """The demo at a quarter of its batch."""
    with closing(Bench(tmp_path / "quarter.sqlite", "train.batch=4")) as found:
        yield found


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
def test_watched_against_unwatched_steps(quarter: Bench) -> None:
    """The interval of the median ratio must not lie above the limit. Where all of it lies below, no more pairs are asked for; 240 decide.

    Steps of a quarter of the batch are compared. What is timed and stored of a step is the same there, as its launches are as many, and
    the step takes less than half as long: so twice the limit here is less than the limit there. 240 pairs take as long as 60 of whole
    steps, and tell as small a cost from chance on a busy machine. A quiet one needs 60."""
    cfg, limit = config.load(DEMO), 2 * LIMIT
    whole = program_for(cfg, cfg.data.vocab, catalogue(), 2)
    assert [c.plan for c in quarter.program.schedule] == [c.plan for c in whole.schedule]
    for name, plan in whole.plans.items():
        assert [x.op for x in plan.launches] == [x.op for x in quarter.program.plans[name].launches]
    flops, less = (sum(x.flops for x in p.plans["micro_first@0"].launches) for p in (whole, quarter.program))
    assert less < 0.3 * flops
    for _ in range(4):
        quarter.step(True)
    logs: list[float] = []
    for more in (60, 61, 119):  # also seeds
        logs += _pairs(quarter, more)
        found = interval(logs, 0.05)
        if found.high < limit:
            break
    print(f"watched against unwatched: {found.estimate:+.3%} [{found.low:+.3%}, {found.high:+.3%}], {found.n} pairs")
    assert found.low < limit
