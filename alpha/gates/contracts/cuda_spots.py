"""What looks at a GPU's memory while a run trains: sound steps are not accused, flipped bits and wrong results are. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.spot import Look
from alpha.component import Measured
from alpha.cuda_runtime.memory import Span, download, upload
from alpha.errors import SpotCheckError
from alpha.gates.contracts.reference import Batches, text_of
from alpha.graph.plan import Plan, Ref, Step
from alpha.ops.table import row
from alpha.train.spots import Spots

WRONG = 4
"""Launches with a wrong result that are tried of each model."""

After = Callable[["Struck", Plan, int], None]
"""Called with a launch that has run."""


def _nowhere() -> Any:
    """Metrics that keep nothing."""
    return SimpleNamespace(add=lambda table, found: None, checked_again=lambda step, ranks: None)


class Judged(Spots):
    """Spot checks of every step of one GPU, by which a launch beyond its tolerance ends the run."""

    def __init__(self, executor: CudaExecutor, rng: np.random.Generator) -> None:
        super().__init__(1, int(rng.integers(1 << 31)), executor, 0, _nowhere())
        self.judged = True


class Every(Judged):
    """The same, which look at every launch of a step. `looks`: (ratio, how, op, place) of each; none ends the run."""

    looks: list[tuple[float, str, str, str]]

    def _draw(self) -> None:
        super()._draw()
        self._drawn = {(n, i): x.component for n, call in enumerate(self._schedule) for i, x in enumerate(self._plans[call.plan].launches)
                       if row(x.op).across is None}

    def _note(self, plan: Plan, index: int, look: Look, ns: int) -> None:
        self.looks.append((look.ratio if look.ratio >= 0 else np.inf, look.how, plan.launches[index].op, look.place))


class Struck(Judged):
    """The same as Judged, with what disturbs the run: `ran` comes after a launch and before it is looked at, `looked` after that."""

    ran: After | None = None
    looked: After | None = None

    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        """The launch has run."""
        if self.ran is not None:
            self.ran(self, plan, index)
        super().after(plan, index, read)
        if self.looked is not None:
            self.looked(self, plan, index)

    def is_drawn(self, index: int) -> bool:
        """Whether this launch of the call that runs is one of those that are recomputed."""
        return (self._call, index) in self._drawn


def checked_step(executor: CudaExecutor, spots: Spots, step: int, batches: Batches) -> dict[str, np.ndarray]:
    """A step as the training loop hands it over, with its checks; the results of its update."""
    def handed(calls: Sequence[Step]) -> None:
        executor.enqueue(tuple(call.plan for call in calls), [text_of(batches, call) for call in calls])

    *micros, update = executor.program.replays()
    spots.begin(step)
    for calls in micros:
        handed(calls)
    spots.read("before the update", now=False)
    handed(update)
    spots.wrote(step)
    out = executor.outputs(update[-1].plan)
    spots.end(step)
    return out


def undisturbed(executor: CudaExecutor, steps: Sequence[Batches], rng: np.random.Generator) -> Measured:
    """Every launch of sound steps, recomputed from the operands that it had: the largest error over its tolerance. All memory is hashed."""
    spots = Every(executor, rng)
    spots.looks = []
    spots.restart(0)
    for step, batches in enumerate(steps):
        checked_step(executor, spots, step, batches)
    worst = max(spots.looks)
    return Measured(error=worst[0], bound=1.0, cases=len(spots.looks), note=f"worst of {worst[2]} ({worst[1]}) {worst[3]}".strip())


def flip(executor: CudaExecutor, arena: str, start: int, mask: np.ndarray) -> None:
    """Turn round the bits of an arena that a mask of bytes has, from byte `start` on, once all that was enqueued is done."""
    span = Span(executor.arenas[arena].address + start, mask.size)
    executor.stream.synchronize()
    turned = download(span, mask.shape, np.uint8) ^ mask
    upload(span, turned, executor.stream)  # in its order: a launch there might not see a copy outside it
    executor.stream.synchronize()


def disturbed(executor: CudaExecutor, batches: Batches, rng: np.random.Generator) -> Measured:
    """One bit of weights, their copy, moments and gradients, one of an activation before a launch reads it, and results that are wrong:
    how many of these are not told of in that step, by name."""
    spots = Struck(executor, rng)
    spots.restart(0)
    checked_step(executor, spots, 0, batches)
    missed = []
    for name, said, strike in _strikes(executor, rng):
        saved = {k: executor.look(k) for k in executor.program.plans["snapshot"].outputs}
        spots.restart(1)
        try:
            strike(spots)
            checked_step(executor, spots, 1, batches)
            missed.append(f"{name} unseen")
        except SpotCheckError as error:
            if not all(part in str(error) for part in said):
                missed.append(f"{name} told as {str(error)[:120]}")
        executor.inspector, spots.ran, spots.looked = None, None, None
        for kind, x in saved.items():
            executor.state(kind)[...] = x
        executor.run("narrow")
    return Measured(error=float(len(missed)), bound=0.0, cases=len(executor.program.states) + 1 + WRONG, note="; ".join(missed)[:300])


def _strikes(executor: CudaExecutor, rng: np.random.Generator) -> Iterator[tuple[str, tuple[str, ...], Callable[[Struck], None]]]:
    """(what is struck, what must be said of it, what strikes in the step that comes)."""
    schedule, plans = executor.program.schedule, executor.program.plans

    def somewhere(arena: str, start: int = 0, nbytes: int = 0) -> tuple[str, int, np.ndarray]:
        at = start + int(rng.integers(nbytes or executor.program.arenas()[arena]))
        return arena, at, np.uint8(1) << rng.integers(0, 8, 1, np.uint8)

    first = plans[schedule[0].plan]
    last, sums = len(first.launches) - 1, {ref.arena for x in first.launches for ref in x.outs}
    for kind in executor.program.states:
        struck = partial(flip, executor, *somewhere(f"state.{kind}"))
        said = (f"memory changed by itself: rank 0, step 1, {kind}, seen before plan",)
        if not kind.startswith("grad"):
            yield kind, said, partial(_now, struck)
        elif f"state.{kind}" in sums:
            yield kind, said, partial(_at, last, struck)
    writer, ref = _read_later(first, rng)
    struck = partial(flip, executor, *somewhere(ref.arena, ref.offset, ref.type.nbytes))
    yield "an activation", (f"changed since {first.launches[writer].op} of",), partial(_at, writer, struck)
    for _ in range(WRONG):
        yield "a result", ("a spot check failed: rank 0, step 1", " times the tolerance"), partial(_wrong, executor, rng)


def _now(strike: Callable[[], None], spots: Struck) -> None:
    strike()


def _at(launch: int, strike: Callable[[], None], spots: Struck) -> None:
    """Strike once, when this launch of the step's first call has been looked at."""
    def looked(own: Struck, plan: Plan, index: int) -> None:
        if index == launch:
            own.looked = None
            strike()
    spots.looked = looked


def _read_later(plan: Plan, rng: np.random.Generator) -> tuple[int, Ref]:
    """(launch, one of its results) that a later launch reads as it is; drawn."""
    found = []
    for i, x in enumerate(plan.launches):
        for ref in x.outs:
            if ref.arena == "act" and ref.type.nbytes and _next_is_a_reading(plan, i, ref):
                found.append((i, ref))
    return found[int(rng.integers(len(found)))]


def _next_is_a_reading(plan: Plan, writer: int, ref: Ref) -> bool:
    for x in plan.launches[writer + 1 :]:
        if ref in x.ins:
            return True
        if any(ref.arena == o.arena and ref.offset < o.stop and o.offset < ref.stop for o in x.outs):
            return False
    return False


def _wrong(executor: CudaExecutor, rng: np.random.Generator, spots: Struck) -> None:
    """Spoil what a launch made that is recomputed: the highest bit of each exponent is turned round, for which elements are looked at is
    drawn."""
    left = int(rng.integers(WRONG))

    def ran(own: Struck, plan: Plan, index: int) -> None:
        nonlocal left
        ref = plan.launches[index].outs[0]
        if not own.is_drawn(index) or not ref.type.is_float:
            return
        if left:
            left -= 1
            return
        own.ran = None
        mask = np.zeros((ref.type.size, ref.type.nbytes // ref.type.size), np.uint8)
        mask[:, -1] = 1 << 6
        flip(executor, ref.arena, ref.offset, mask.reshape(-1))
    spots.ran = ran
