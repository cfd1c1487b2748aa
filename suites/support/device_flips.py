"""Bit flips in the memory of a GPU while a small run trains on it: how many of them spot checks see, and how many steps later.

    python suites/support/device_flips.py OUT.json [SECONDS]

As flips.py does on the CPU: a trial loads the same state, turns bits round at a random moment of a step, between two launches, and goes on
for LATER steps at most. Every launch beyond its tolerance ends a trial. Kinds, sizes and steps take turns for SECONDS, after an undisturbed
run whose every step is checked; what came is one JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import flips
import numpy as np

from alpha.backends.checks import Inspector
from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.observe import Watch, works_of
from alpha.component import Catalogue
from alpha.errors import NonFiniteError, SpotCheckError
from alpha.gates.contracts.cuda_spots import flip
from alpha.graph.plan import Plan, Program, Ref
from alpha.profile.noise import wilson
from alpha.profile.store import Store, read
from alpha.train import assemble
from alpha.train.catalogue import catalogue
from alpha.train.engine import refresh
from alpha.train.loop import Loop

KINDS = {**flips.KINDS, "weights": ("state.param", "state.param16")}
LATER, VERIFY = flips.LATER, flips.VERIFY
QUIET = 0.25
"""Share of the time for the undisturbed run."""

ENOUGH = 200
"""Steps of the undisturbed run, at most."""


class Flipping(CudaExecutor):
    """Calls `strike` once, when the stream has come to launch `at` = (call of the step, launch). A step that is not checked is launched
    kernel by kernel then, in place of its graph."""

    def __init__(self, program: Program, kernels: Catalogue) -> None:
        super().__init__(program, kernels)
        self.at, self.calls = (-1, -1), 0
        self._strike: Callable[[], None] = lambda: None

    def arm(self, at: tuple[int, int], strike: Callable[[], None]) -> None:
        """In the step that comes."""
        self.at, self._strike, self.calls = at, strike, 0

    def strike(self) -> None:
        """Once."""
        self.at = (-1, -1)
        self._strike()

    def _launch(self, plans: Sequence[Plan]) -> None:
        first, self.calls = self.calls, self.calls + len(plans)
        if not first <= self.at[0] < self.calls:
            super()._launch(plans)
            return
        name, index, own = plans[self.at[0] - first].name, self.at[1], self.inspector
        assert len({p.name for p in plans}) == len(plans), "a plan that is replayed twice at once has no moment of its own"
        bound, captured = self._bound[name], self.captured
        try:
            if own is not None:
                self.inspector = _Between(self, own, name, index)
            else:
                launch, run = bound[index]

                def both(stream: int) -> None:
                    self.strike()
                    run(stream)
                self.captured = False
                self._rebind(name, [*bound[:index], (launch, both), *bound[index + 1 :]])
            super()._launch(plans)
        finally:
            self.inspector, self.captured = own, captured
            self._rebind(name, bound)

    def _rebind(self, name: str, bound: list[Any]) -> None:
        self._bound[name] = bound
        if self._watch is not None:
            self._watch._works[name] = works_of(bound)


class _Between:
    """Strikes in a checked step, before the launch is looked at: what is then read was written by another one."""

    def __init__(self, executor: Flipping, own: Inspector, plan: str, index: int) -> None:
        self.executor, self.own, self.moment = executor, own, (plan, index)

    def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        if (plan.name, index) == self.moment:
            self.executor.strike()
        self.own.before(plan, index, read)

    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        self.own.after(plan, index, read)


@contextmanager
def running(folder: Path, kernels: Catalogue | None = None, **train: object) -> Iterator[Loop]:
    """A loop on the GPU in bf16, started, which judges every launch that is looked at."""
    cfg = flips.config(folder, "cuda", 128, precision="bf16", **train)
    data = assemble.open_data(cfg)
    program = replace(flips.program_of(cfg, data), replay=1)
    with Flipping(program, kernels or catalogue()) as executor, Store(folder / "metrics.sqlite") as metrics:
        loop = Loop(cfg, executor, assemble.sampler_for(cfg, data), data.validation, data.tokenizer, folder / "checkpoints", metrics)
        loop.start()
        yield loop


def bits(loop: Loop) -> bytes:
    return b"".join(flat.tobytes() for _, flat in loop.snapshot().values())


class Campaign:
    """Trials from one state, which the loop has come to at a step before a checked one."""

    def __init__(self, loop: Loop, rng: np.random.Generator) -> None:
        self.loop, self.rng = loop, rng
        loop.spots.judged = True
        while loop.step < 2 * VERIFY - 1:
            loop.advance()
        self.begin: dict[int, dict[str, np.ndarray]] = {}
        self.after: dict[int, bytes] = {}
        for _ in range(LATER + 3):
            self.begin[loop.step] = {kind: flat for kind, (_, flat) in loop.snapshot().items()}
            loop.advance()
            self.after[loop.step - 1] = bits(loop)

    def trial(self, kind: str, size: int, checked: bool) -> flips.Trial:
        """One flip in a checked step or in one that is not."""
        loop, executor = self.loop, self.loop.executor
        assert isinstance(executor, Flipping)
        step = 2 * VERIFY if checked else 2 * VERIFY + 1
        first = step - 1
        for name, flat in self.begin[first].items():
            executor.state(name)[...] = flat
        refresh(executor)
        loop.step = first
        loop.spots._seed = int(self.rng.integers(1 << 31))  # what is drawn
        loop.spots.restart(first)
        loop.spots._first = False
        loop.spots._turn = int(self.rng.integers(1 << 20))
        loop.advance()  # so that the hashes are those of a run on its way
        moments = [(n, i) for n, call in enumerate(loop.program.schedule) for i in range(len(loop.plans[call.plan].launches))]
        executor.arm(moments[int(self.rng.integers(len(moments)))], self._strike(executor, kind, size))
        changed = True
        for later in range(LATER):
            try:
                loop.advance()
            except SpotCheckError as error:
                executor.inspector = None
                return flips.Trial("memory" if "by itself" in error.what or "changed since" in str(error.came) else "launch", later, True)
            except NonFiniteError:
                executor.inspector = None
                return flips.Trial("non-finite", later, True)
            if later == 0:
                assert executor.at == (-1, -1), "nothing was struck"
                changed = bits(loop) != self.after[step]
        return flips.Trial("", LATER, changed)

    def _strike(self, executor: Flipping, kind: str, size: int) -> Callable[[], None]:
        names = [name for name in KINDS[kind] if name in executor.arenas]
        name = names[int(self.rng.integers(len(names)))]
        nbytes = executor.program.arenas()[name]
        if size == 64:
            at, mask = int(self.rng.integers(nbytes // 64)) * 64, self.rng.integers(0, 256, 64).astype(np.uint8)
        else:
            at = int(self.rng.integers(nbytes // 4)) * 4
            mask = np.packbits(np.isin(np.arange(32), self.rng.choice(32, size, replace=False)))
        return lambda: flip(executor, name, at, mask)


def undisturbed(folder: Path, seconds: float, kernels: Catalogue | None = None) -> dict[str, Any]:
    """A run whose every step is checked, and one without checks: what was looked at, what was beyond its tolerance, times of steps."""
    times: dict[int, list[float]] = {}
    with running(folder / "quiet", kernels, verify=1, steps=ENOUGH + 1) as loop:
        end = time.monotonic() + seconds
        while loop.step < ENOUGH and time.monotonic() < end:
            began = time.monotonic()
            loop.advance()
            times.setdefault(1, []).append(time.monotonic() - began)
        tally = loop.spots.tally
    with running(folder / "off", kernels, verify=0, steps=ENOUGH + 1) as loop:
        for _ in range(min(20, ENOUGH)):
            began = time.monotonic()
            loop.advance()
            times.setdefault(0, []).append(time.monotonic() - began)
    rows = read(folder / "quiet" / "metrics.sqlite", "spot_checks", "op, how, ratio, elements")
    worst: dict[str, float] = {}
    for op, _, ratio, _ in rows:
        worst[op] = max(worst.get(op, 0.0), ratio)
    return {"steps": tally.steps, "looks": tally.launches, "elements": tally.elements, "beyond": tally.beyond,
            "worst_ratio_by_op": dict(sorted(worst.items(), key=lambda x: -x[1])), "looks_by_op": dict(Counter(op for op, *_ in rows)),
            "seconds_of_a_checked_step": median(times[1][1:] or times[1]), "seconds_of_a_step_without_checks": median(times[0][1:])}


def campaign(folder: Path, seconds: float, kernels: Catalogue | None = None, most: int = 10**9) -> list[dict[str, Any]]:
    """Trials of every kind, size and step in turn, `most` rounds at most; one row for each. The device's clock is not set meanwhile: a step
    that ended in an error has left time stamps that nobody numbered, as no run goes on behind one."""
    cells = list(product(KINDS, flips.SIZES, (True, False)))
    found: dict[tuple[str, str, bool], list[flips.Trial]] = {cell: [] for cell in cells}
    with mock.patch.object(Watch, "due", False), running(folder / "flips", kernels) as loop:
        trials, end = Campaign(loop, np.random.default_rng()), time.monotonic() + seconds
        for n, cell in enumerate(cycle(cells)):
            if time.monotonic() > end or n >= most * len(cells):
                break
            kind, size, checked = cell
            found[cell].append(trials.trial(kind, flips.SIZES[size], checked))
    rows = []
    for (kind, size, checked), made in found.items():
        moved = [t for t in made if t.changed]
        seen = [t for t in moved if t.seen]
        rows.append({
            "flipped_in": kind, "size": size, "step": "checked" if checked else "between", "trials": len(made), "moved_a_bit": len(moved),
            "seen_of_those": len(seen), "interval_95": list(wilson(len(seen), len(moved))) if moved else None,
            "by": dict(Counter(t.seen for t in seen)), "latency_steps": dict(sorted(Counter(t.latency for t in seen).items())),
        })  # fmt: skip
    return rows


def main() -> int:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    with tempfile.TemporaryDirectory() as made:
        found: dict[str, Any] = {"undisturbed": undisturbed(Path(made), QUIET * seconds)}
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")  # so that it stands if the rest does not end
        found["flips"] = campaign(Path(made), (1 - QUIET) * seconds)
        with running(Path(made) / "here", verify=0) as loop:
            found["hardware"] = loop.executor.hardware()
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found["undisturbed"], indent=1))
    for row in found["flips"]:
        print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
