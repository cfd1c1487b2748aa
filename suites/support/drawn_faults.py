"""Planted faults that a session draws and runs: those of timed gates, which nothing may disturb, apart from all others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from alpha.gates.adversarial import catches
from alpha.registry import distance
from alpha.registry.faults import Fault, load_faults
from alpha.registry.gates import PINNED
from alpha.registry.pins import shipped_pins
from alpha.train.catalogue import catalogue


@dataclass(frozen=True)
class Sort:
    """Faults that are drawn together.

    label   what the draw adds to the session's seed, so that the sorts are drawn independently
    timed   whether their gates are judged by pinned shares of a ceiling: beside another worker a sound gate may miss its line
    drawn   how many are run although their catch is current: it binds all that decides whether the gate says FAIL, so they are a sample of
            what it does not see
    """

    label: str
    timed: bool
    drawn: int

    def faults(self) -> list[Fault]:
        """All of them that this machine can run."""
        return [f for f in runnable() if (f.gate in PINNED) == self.timed]


TIMED = Sort("timed catches", timed=True, drawn=1)
OTHERS = Sort("catches", timed=False, drawn=17)


UNJUDGED = ("too noisy to judge", distance.ELSEWHERE)
"""What each reason says of a fault that this machine cannot judge now."""


@cache
def every() -> tuple[Fault, ...]:
    """The whole catalogue of faults, each of a component that owes the gate."""
    return load_faults(catalogue=catalogue())


@cache
def runnable() -> tuple[Fault, ...]:
    """Those of components that can run on this machine, and are pinned for it where pins judge them."""
    return tuple(f for f in every() if not catches.why_not(f, catalogue()[f.component]))


def _unjudged(result: catches.Result) -> bool:
    """Whether this machine cannot judge a fault of speed now: each case is too noisy or stood at another distance than its pin's, or all
    passed there. A hop that takes longer raises the ceiling of a short call, and with it the share of one that became slower."""
    record = result.catch.record
    if result.why == "PASS" and record is not None:
        pin = shipped_pins().of(record)
        return pin is not None and bool(distance.elsewhere(record.environment, pin))
    parts = result.why.removeprefix("NOT_RUN: ").split("; ")
    return result.why.startswith("NOT_RUN: ") and all(any(why in part for why in UNJUDGED) for part in parts)


def reject(sort: Sort, seed: int) -> None:
    """Runs the drawn faults of a sort, and those without a current catch. AssertionError naming each that survives. All of them take
    hours, so no session runs them: `alpha gate catches --all` does.

    On a machine class without any recorded catch the drawn ones are run, not all: which gate sees what is settled on the reference class.
    """
    faults, keep = sort.faults(), [f.id for f in runnable()]
    again = random.Random(f"{seed} {sort.label}").sample(faults, min(sort.drawn, len(faults)))
    results = catches.run(catalogue(), again, stale=False, keep=keep)
    rest = [f for f in faults if f not in again]
    if rest and len(catches.known()) > len(keep) // 2:
        results += catches.run(catalogue(), rest, stale=True, keep=keep)
    fresh = sum(r.fresh for r in results)
    assert fresh >= len(again), "fewer faults were run than were drawn"
    noisy = [r for r in results if not r.caught and r.fault.gate == "perf" and _unjudged(r)]
    if noisy:
        print(f"NOT_RUN: {[r.fault.id for r in noisy]}: the pins of this kind of machine are too noisy to judge by, or its cores moved")
    survivors = [f"{r.fault.id} ({r.fault.gate} of {r.fault.component}): {r.why}" for r in results if not r.caught and r not in noisy]
    assert not survivors, f"seed {seed}: survived\n" + "\n".join(survivors)
