"""Spot checks of a run: launches recomputed while it trains, and the state hashed from each write to its next read. Floor 6.

At a session's first step, and then every `train.verify` steps, some launches of the step are drawn and looked at (alpha/backends/spot.py):
at the first step one of every component, later DRAWN components with one launch each. So a kernel is seen at the run's own sizes, addresses
and number of calls, and a device that computes wrongly is seen too. In such a step every operand of every launch is hashed when it is
written, or when its plan begins, and so is what a plan leaves in the state; they must be the same when they are read and when it ends.

Parameters and moments are hashed after every update, and looked at before the next one and before a checkpoint. They are cut into
pieces. At checked steps it is all of them, at others as many as the run's own times let BUDGET pay for, in turn. A device hashes beside
the host: two hashes are compared when a plan, or in other steps the step, has ended.

Nothing here writes to what a run computes with, so its bits are the same with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from time import perf_counter_ns

import numpy as np

from alpha.backends.digest import Digest
from alpha.backends.spot import Look, Spot
from alpha.errors import SpotCheckError
from alpha.graph.plan import Plan, Ref, Step
from alpha.ops.table import row
from alpha.profile.store import Store
from alpha.train.engine import Executor
from alpha.types import ITEMSIZE

DRAWN = 8
"""Components looked at in a checked step, one launch of each."""

BUDGET = 0.002
"""Share of a step's time for hashing the state between checked steps."""

SHARE, SPACED = 0.005, 50
"""Checked steps of a device cost at most this share of the time between them, or they move apart: to a multiple of `train.verify`. Who asks
for fewer steps than SPACED gets what was asked for."""

_AGAIN = ("resume from the latest checkpoint with --resume. If the same place fails again, a kernel is wrong there: `alpha gate run` it. "
          "If not, suspect this machine's memory or processor")


@dataclass
class Tally:
    """What a session has done: checked steps, launches, elements, bytes hashed; `worst`: the largest error over its tolerance;
    `beyond`: launches beyond it that did not stop the run."""

    steps: int = 0
    launches: int = 0
    elements: int = 0
    hashed: int = 0
    worst: float = 0.0
    op: str = ""
    beyond: int = 0

    def text(self) -> str:
        """For people."""
        if not self.steps:
            return "none"
        return (f"{self.launches} launches of {self.steps} steps recomputed, {self.elements:,} elements, largest error {self.worst:.2f} of "
                f"its tolerance ({self.op or 'none'}); {self.hashed / 1e6:,.0f} MB of state hashed"
                + (f"; {self.beyond} launches beyond, told and not judged" if self.beyond else ""))


class Spots:
    """The spot checks of one rank. `every`: `train.verify`; 0: nothing is done. `seed` decides what is drawn."""

    def __init__(self, every: int, seed: int, executor: Executor, rank: int, metrics: Store) -> None:
        self.every, self.rank, self.tally = every, rank, Tally()
        self.judged = False
        """Whether a launch beyond its tolerance stops a run on a device beside the host too, as it does on the CPU. No: the tolerances of
        the device's kernels at the sizes of real runs have not been measured on one. A hash that differs stops every run."""
        self._seed, self._executor, self._metrics = seed, executor, metrics
        program = executor.program
        self._schedule, self._plans = program.role(rank).schedule, program.plans_of(rank)
        self.apart = every
        """Steps between checked ones, by what they cost."""
        self._first, self._step, self._looked = True, -1, 0
        self._rng = np.random.default_rng()
        self._call = -1
        self._drawn: dict[tuple[int, int], str] = {}
        self._flows: dict[str, dict[int, set[Ref]]] = {}
        """By plan: launch -> what of its results later launches read; -1: what they read that is there when the plan begins."""
        self._left: dict[str, list[tuple[int, Ref]]] = {}
        """By plan: results in the state that it leaves behind, and their launches."""
        self._operands: dict[Ref, tuple[Digest, int]] = {}
        """What is hashed now, and the launch that wrote it."""
        self._asked: list[tuple[Digest, Digest, Callable[[int], SpotCheckError]]] = []
        """Hashes that must be the same, and what is wrong where they are not, by the first byte that differs."""
        self._spot: Spot | None = None
        self._ns = 0
        grads = [kind for kind in program.states if kind.startswith("grad")]
        self._held = dict(self._pieces(k for k in program.states if k not in grads))
        self._sums = dict(self._pieces(grads))
        self._hashes: dict[tuple[str, int], Digest] = {}
        self._gradients: dict[tuple[str, int], Digest] = {}
        self._turn, self._each_ns, self._step_ns = 0, 0.0, 0

    @property
    def on(self) -> bool:
        """Whether anything is checked."""
        return self.every > 0

    @property
    def status(self) -> str:
        """For the run's metadata."""
        return f"first step and every {self.every}" if self.every else "off (train.verify = 0)"

    def due(self, step: int) -> bool:
        """Whether launches of this step are looked at."""
        return self.on and (self._first or step % self.apart == 0)

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._ns, self._looked = step, 0, 0
        if not self.due(step):
            return
        self._rng = np.random.default_rng([self._seed, step, self.rank])
        self._call, self._spot = -1, None
        self._gradients.clear()
        self._draw()
        self._executor.inspector = self

    def end(self, step: int) -> None:
        """Its results are there, and `wrote` was called."""
        checked = self.due(step)
        if checked:
            self._executor.inspector = None
            self._first = False
            self.tally.steps += 1
        self._settle()
        if checked:
            self._row(step, "", -1, "state", Look("hash", self.tally.hashed, 0.0), self._ns)

    def took(self, ns: int) -> None:
        """What the step took, checks included."""
        if self._looked:
            self._space()
        else:
            self._step_ns = ns - self._ns

    def _space(self) -> None:
        """Put checked steps of a device as far apart as this one's cost asks for; a first one looks at more than later ones."""
        if self.every < SPACED or not self._step_ns or not self._executor.digests.late:
            return
        cost = self._ns * min(1.0, DRAWN / self._looked)
        self.apart = self.every * max(1, ceil(cost / (SHARE * self.every * self._step_ns)))

    def _draw(self) -> None:
        """Which launches, as (call of the schedule, index), and what is hashed for them: (call, index) of a writer -> operands."""
        by: dict[str, list[tuple[int, int]]] = {}
        for n, call in enumerate(self._schedule):
            for i, launch in enumerate(self._plans[call.plan].launches):
                if row(launch.op).across is None:
                    by.setdefault(launch.component, []).append((n, i))
        names = sorted(by)
        if not self._first:
            names = [names[i] for i in self._rng.permutation(len(names))[:DRAWN]]
        self._drawn, self._looked = {by[name][int(self._rng.integers(len(by[name])))]: name for name in names}, len(names)
        for name in {call.plan for call in self._schedule} - set(self._flows):
            flow = self._flows[name] = {}
            launches = self._plans[name].launches
            for i, launch in enumerate(launches):
                for ref in launch.ins:
                    writer = next((j for j in reversed(range(i)) if any(_meet(ref, out) for out in launches[j].outs)), -1)
                    flow.setdefault(writer, set()).add(ref)
            self._left[name] = []
            for i, launch in enumerate(launches):
                for ref in launch.outs:
                    if ref.arena.startswith("state.") and not any(_meet(ref, out) for x in launches[i + 1 :] for out in x.outs):
                        self._left[name].append((i, ref))
                        flow.setdefault(i, set()).add(ref)

    def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        """A launch of a checked step comes next (alpha/backends/checks.py)."""
        began = perf_counter_ns()
        if index == 0:
            self._call += 1
            self._same(self._gradients, f"before plan {plan.name}", "it was written by an earlier plan of this step")
            self._operands.clear()
            self._keep(plan, -1)
            self._same(self._hashes, f"before plan {plan.name}", "the last update wrote it, or it was loaded or drawn")
        launch = plan.launches[index]
        for ref in launch.ins:
            self._unchanged(plan, index, "operand", ref)
        self._promptly()
        if (self._call, index) in self._drawn:
            self._spot = Spot(launch, read, self._rng)
        self._ns += perf_counter_ns() - began

    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        """It has run."""
        began = perf_counter_ns()
        if self._spot is not None:
            spot, self._spot = self._spot, None
            for look in spot.looks(read):
                self._note(plan, index, look, perf_counter_ns() - began)
        self._keep(plan, index)
        if index == len(plan.launches) - 1:
            for writer, ref in self._left[plan.name]:
                self._unchanged(plan, writer, "result", ref)
            wrote = {ref.arena.removeprefix("state.") for x in plan.launches for ref in x.outs}
            self._same({key: kept for key, kept in self._gradients.items() if key[0] not in wrote}, f"after plan {plan.name}",
                       "it was written by an earlier plan of this step")
            self._gradients |= {key: self._piece(*key) for key in self._sums if key[0] in wrote}
            self._executor.digests.wait()
            self._settle()
        self._promptly()
        self._ns += perf_counter_ns() - began

    def _unchanged(self, plan: Plan, index: int, what: str, ref: Ref) -> None:
        kept, writer = self._operands[ref]
        call = self._call

        def wrong(at: int) -> SpotCheckError:
            x = plan.launches[writer]
            since = f"{x.op} of {x.layer or 'no layer'} wrote it" if writer >= 0 else "this plan began"
            return self._error(plan, index, f"{what} {ref} changed since {since}", "the bits that were there", call)
        self._asked.append((kept, self._executor.digests.of(ref), wrong))

    def _keep(self, plan: Plan, writer: int) -> None:
        for ref in self._flows[plan.name].get(writer, ()):
            self._operands[ref] = self._executor.digests.of(ref), writer

    def _promptly(self) -> None:
        """Compare at once what is there at once."""
        if not self._executor.digests.late:
            self._settle()

    def _settle(self) -> None:
        """Compare what was asked for; all of it has been made. SpotCheckError for the first that differs."""
        asked, self._asked = self._asked, []
        digests = self._executor.digests if asked else None
        for kept, now, wrong in asked:
            assert digests is not None
            was, found = digests.read(kept), digests.read(now)
            if was != found:
                raise wrong(next(i for i, (a, b) in enumerate(zip(was, found)) if a != b))

    def _note(self, plan: Plan, index: int, look: Look, ns: int) -> None:
        launch, tally = plan.launches[index], self.tally
        tally.launches += 1
        tally.elements += look.elements
        if not look.ratio <= tally.worst:
            tally.worst, tally.op = look.ratio, launch.op
        self._row(self._step, plan.name, index, launch.op, look, ns)
        if not look.ratio <= 1 and self._executor.digests.late and not self.judged:
            tally.beyond += 1
        elif not look.ratio <= 1:
            raise self._error(plan, index, look.place, f"{look.ratio:.3g} times the tolerance at most 1 ({look.how} of {look.elements:,})")

    def _row(self, step: int, plan: str, index: int, op: str, look: Look, ns: int) -> None:
        self._metrics.add("spot_checks", {"step": step, "rank": self.rank, "plan": plan, "call": self._call, "launch": index, "op": op,
                                          "how": look.how, "elements": look.elements, "ratio": float(look.ratio), "ns": ns})

    def _error(self, plan: Plan, index: int, came: str, expected: str, at: int | None = None) -> SpotCheckError:
        x, call = plan.launches[index], self._schedule[self._call if at is None else at]
        where = (f"rank {self.rank}, step {self._step}, {x.op} ({x.component}) of {x.layer or 'no layer'}, {x.phase}, "
                 f"model line {x.source}; launch {index} of plan {plan.name}{_micro(call)}")
        return SpotCheckError(f"a spot check failed: {where}", came=came, expected=expected, do=_AGAIN)

    # -- the state -------------------------------------------------------------------------------------------------------------

    def restart(self, step: int) -> None:
        """The state was drawn or loaded, and `step` comes next: it is a first one."""
        self._first, self._step = True, step
        self._asked.clear()
        if self.on:
            self._metrics.checked_again(step, self._executor.program.ranks)
        self._written(step)

    def wrote(self, step: int) -> None:
        """The update of `step` has just been handed over: hash what is looked at before the next one."""
        if self.on:
            self._executor.check(lambda: self._written(step + 1))

    def _written(self, step: int) -> None:
        """The state has just been written, and `step` comes next."""
        self._hashes.clear()
        if not self.on:
            return
        digests, due = self._executor.digests, (self._first and step == self._step) or step % self.apart == 0
        timed = due or not digests.late
        if timed:
            digests.wait()
        began, keys = perf_counter_ns(), list(self._held)
        many = len(keys)
        if not due and self._each_ns:
            many = min(len(keys), max(1, int(BUDGET * self._step_ns / self._each_ns)))
        chosen = [keys[(self._turn + i) % len(keys)] for i in range(many)]
        self._turn = (self._turn + many) % len(keys)
        self._hashes = {key: self._piece(*key) for key in chosen}
        self.tally.hashed += sum(self._held[key] for key in chosen)
        if timed:
            digests.wait()
            self._each_ns = 2 * (perf_counter_ns() - began) / max(1, many)  # it is read once more
        self._ns += perf_counter_ns() - began

    def read(self, where: str, *, now: bool = True) -> None:
        """The state is about to be read: SpotCheckError, naming tensor and step, where it is not what was written. `now` False: where
        hashes are late it is raised when the step ends."""
        if not self._hashes:
            return
        began = perf_counter_ns()
        self._executor.check(lambda: self._same(self._hashes, where, "the last update wrote it, or it was loaded or drawn"))
        if now or not self._executor.digests.late:
            self._executor.digests.wait()
            self._settle()
        self._ns += perf_counter_ns() - began

    def _same(self, hashes: Mapping[tuple[str, int], Digest], where: str, wrote: str) -> None:
        step = self._step

        def wrong(kind: str, piece: int, at: int) -> SpotCheckError:
            words, names = self._place(kind, piece, at)
            return SpotCheckError(f"memory changed by itself: rank {self.rank}, step {step}, {kind}, seen {where}",
                                  came=f"piece {piece}, {words}: in {names}", expected=f"what was there when {wrote}", do=_AGAIN)
        for (kind, piece), kept in hashes.items():
            self._asked.append((kept, self._piece(kind, piece), partial(wrong, kind, piece)))

    def _place(self, kind: str, piece: int, at: int) -> tuple[str, str]:
        """Which 64-bit words of a piece byte `at` of its hash stands for, and the tensors that have one of them."""
        digests, layout = self._executor.digests, self._executor.program.states[kind]
        size, whole = ITEMSIZE[layout.dtype], digests.nbytes(kind)
        words = digests.words(min(digests.piece, whole - piece * digests.piece), at)
        step = int(words[1] - words[0]) if len(words) > 1 else 1
        said = f"64-bit words {int(words[0])} + {step} n up to {int(words[-1])}"
        each = 8 // size
        places = piece * digests.piece // size + words * each
        if whole != layout.size * size:
            return said, f"this rank's cut, elements {int(places[0])} + {step * each} n"
        found = [t.name for t in layout.tensors for first in [layout.offsets[t.name]]
                 if bool(((places + each > first) & (places < first + t.size)).any())]
        return said, (", ".join(found[:8]) + (f" or {len(found) - 8} more" if len(found) > 8 else "")) or "padding"

    def _pieces(self, kinds: Iterable[str]) -> Iterator[tuple[tuple[str, int], int]]:
        if not self.on:
            return
        digests = self._executor.digests
        for kind in kinds:
            nbytes = digests.nbytes(kind)
            for piece in range(-(-nbytes // digests.piece)):
                yield (kind, piece), min(digests.piece, nbytes - piece * digests.piece)

    def _piece(self, kind: str, piece: int) -> Digest:
        return self._executor.digests.of_state(kind, piece * self._executor.digests.piece)


def _meet(a: Ref, b: Ref) -> bool:
    return a.arena == b.arena and a.offset < b.stop and b.offset < a.stop


def _micro(call: Step) -> str:
    return "" if call.shard is None else f", shard {call.shard}, microbatch {call.micro}"
