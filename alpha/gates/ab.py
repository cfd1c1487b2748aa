"""The perf gate, relative half: is B slower than A? A verdict with a stated error rate. Floor 7.

Blocks of A and B alternate in random order; each pair gives one log ratio of times, and the slowdown of B is their median. Its confidence
interval comes from the order statistics of the pairs (the number of pairs below the median is binomial with p = 1/2), so nothing is
assumed about how the times are distributed.

PASS: the upper bound is under 2 %. FAIL: the lower bound is above 0 and the estimate at least 2 %, and a fresh process says so as well.
Else the pairs are doubled, at most three rounds; the chance of error is split evenly over the rounds (and over the comparisons of one
session, `family`). Then AMBIGUOUS.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, exp

import numpy as np

from alpha.component import Component
from alpha.errors import MachineError
from alpha.gates.perf import block, repeats_for, representative
from alpha.gates.subjects import bind, fresh_nonce, pin_blas
from alpha.registry.judge import AMBIGUOUS, FAIL, PASS, SLOWDOWN

ALPHA = 0.05
ROUNDS = 3
PAIRS = 40
"""Pairs of the first round; 40, 80, 160 in all after each."""

BLOCK_NS = 400_000


@dataclass(frozen=True)
class Interval:
    """Slowdown of B against A as a fraction: low, estimate, high, from `pairs` pairs of blocks."""

    low: float
    estimate: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Verdict:
    """What the procedure decided, on which interval, after how many rounds; `reproduced`: in a fresh process."""

    verdict: str
    interval: Interval
    rounds: int
    reproduced: bool

    def case(self, name: str) -> dict[str, object]:
        """The entry of a perf record that the judge reads."""
        i = self.interval
        return {"name": name, "kind": "relative", "low": i.low, "estimate": i.estimate, "high": i.high, "pairs": i.pairs,
                "rounds": self.rounds, "reproduced": self.reproduced}


def rank(pairs: int, alpha: float) -> int:
    """Largest k such that the k-th smallest and k-th largest of `pairs` values enclose the median with probability >= 1 - alpha.

    0 when even the extremes do not.
    """
    tail, k = 0.0, 0
    while k < pairs // 2:
        tail += comb(pairs, k) / 2.0**pairs
        if not 2 * tail <= alpha:
            break
        k += 1
    return k


def interval(logs: Sequence[float], alpha: float) -> Interval:
    """The median slowdown of log ratios with its order-statistic interval at level 1 - alpha."""
    ordered = sorted(logs)
    k = rank(len(ordered), alpha)
    low, high = (ordered[k - 1], ordered[-k]) if k else (-np.inf, np.inf)
    return Interval(exp(low) - 1, exp(float(np.median(ordered))) - 1, exp(high) - 1 if high < 700 else np.inf, len(ordered))


def slower(i: Interval) -> bool:
    """Whether an interval says 2 % or more."""
    return i.low > 0 and i.estimate >= SLOWDOWN


def decide(draw: Callable[[int], Sequence[float]], reproduce: Callable[[], Interval], *, family: int = 1) -> Verdict:
    """The procedure. `draw(n)` gives n more log ratios; `reproduce` measures again in a fresh process."""
    logs: list[float] = []
    i = Interval(-np.inf, 0.0, np.inf, 0)
    for rounds in range(1, ROUNDS + 1):
        logs += draw(PAIRS if rounds == 1 else len(logs))
        i = interval(logs, ALPHA / ROUNDS / family)
        if i.high < SLOWDOWN:
            return Verdict(PASS, i, rounds, False)
        if slower(i) and slower(reproduce()):
            return Verdict(FAIL, i, rounds, True)
    return Verdict(AMBIGUOUS, i, ROUNDS, False)


def pairs_of(a: Callable[[], int], b: Callable[[], int], n: int, rng: np.random.Generator) -> list[float]:
    """n log ratios of b's block time to a's, the order inside each pair random."""
    logs = []
    for _ in range(n):
        if rng.random() < 0.5:
            ta, tb = a(), b()
        else:
            tb, ta = b(), a()
        logs.append(float(np.log(tb / ta)))
    return logs


def slowed(call: Callable[[], object], repeats: int, slowdown: float = 0.0) -> Callable[[], int]:
    """A block of calls, and a busy wait that makes it longer by the given fraction; gives its nanoseconds."""
    def run() -> int:
        start = time.perf_counter_ns()
        block(call, repeats)
        end = start + (time.perf_counter_ns() - start) * (1 + slowdown)
        while time.perf_counter_ns() < end:
            pass
        return time.perf_counter_ns() - start

    return run


def arms(a: Component, b: Component, case_name: str, nonce: str, slowdown: float = 0.0) -> tuple[Callable[[], int], Callable[[], int]]:
    """Blocks of two components on one representative case, equally many calls each, both warmed up."""
    pin_blas()
    case = representative(a, nonce)[case_name]
    calls = []
    for component in (a, b):
        bound = bind(component, case)
        bound.fill(case.arrays())
        bound.run()
        calls.append(bound.call)
    repeats = repeats_for(calls[0], BLOCK_NS)
    return slowed(calls[0], repeats), slowed(calls[1], repeats, slowdown)


def ab(a: Component, b: Component, *, case_name: str = "cache", family: int = 1, slowdown: float = 0.0) -> Verdict:
    """Compare B with the pinned best A. Both ids must be in the house, so that a fresh process can find them."""
    nonce = fresh_nonce()
    rng = np.random.default_rng(int(nonce[:8], 16))
    first, second = arms(a, b, case_name, nonce, slowdown)
    return decide(lambda n: pairs_of(first, second, n, rng), lambda: _fresh(a, b, case_name, slowdown), family=family)


def once_more(a: Component, b: Component, case_name: str, slowdown: float) -> Interval:
    """One interval from as many pairs as three rounds have, at the same level; what the fresh process runs."""
    nonce = fresh_nonce()
    first, second = arms(a, b, case_name, nonce, slowdown)
    return interval(pairs_of(first, second, PAIRS * 2 ** (ROUNDS - 1), np.random.default_rng(int(nonce[:8], 16))), ALPHA / ROUNDS)


_AGAIN = """
import sys
from alpha.gates.ab import once_more
from alpha.train.house import house
a, b, case, slowdown = sys.argv[1:]
i = once_more(house()[a], house()[b], case, float(slowdown))
print(i.low, i.estimate, i.high, i.pairs)
"""


def _fresh(a: Component, b: Component, case_name: str, slowdown: float) -> Interval:
    from alpha.gates.contracts import child_environment

    command = [sys.executable, "-c", _AGAIN, a.id, b.id, case_name, str(slowdown)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, env=child_environment(), check=False)
    if child.returncode != 0:
        raise MachineError("the A/B comparison could not be repeated in a fresh process", came=child.stderr.strip().rsplit("\n", 1)[-1],
                           do="run `alpha bench` on the component to see the error")
    low, estimate, high, pairs = child.stdout.split()[-4:]
    return Interval(float(low), float(estimate), float(high), int(pairs))
