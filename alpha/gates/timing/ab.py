"""The perf gate, relative half: is B slower than A? A verdict with a stated error rate. Floor 7.

Blocks of A and B alternate in random order; each pair gives one log ratio of times, and the slowdown of B is their median. Pairing,
interval and the sequential rule are those of alpha/profile/noise.py: its confidence interval comes from the order statistics of the
pairs (the number of pairs below the median is binomial with p = 1/2), so nothing is assumed about how the times are distributed.

PASS: the upper bound is under 2 %. FAIL: the lower bound is above 0 and the estimate at least 2 %, and a fresh process says so as well.
Else the pairs are doubled, at most three rounds; the chance of error is split evenly over the rounds (and over the comparisons of one
session, `family`). Then AMBIGUOUS.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from alpha.component import Component
from alpha.errors import MachineError
from alpha.gates.perf import representative
from alpha.gates.subjects import bind, fresh_nonce, pin_blas
from alpha.profile import noise
from alpha.profile.noise import ALPHA, PAIRS, ROUNDS, Interval, Verdict, block, interval, pairs_of, repeats_for
from alpha.registry.cases import Slowdown
from alpha.registry.judge import SLOWDOWN

BLOCK_NS = 400_000

MOST = PAIRS * 2 ** (ROUNDS - 1)
"""Pairs after all rounds; what the fresh process takes at once."""


def case_of(verdict: Verdict, name: str) -> Slowdown:
    """The entry of a perf record that the judge reads."""
    i = verdict.interval
    return Slowdown(name=name, low=i.low, estimate=i.estimate, high=i.high, pairs=i.n, rounds=verdict.rounds,
                    reproduced=verdict.reproduced)


def decide(draw: Callable[[int], Sequence[float]], reproduce: Callable[[], Interval], *, family: int = 1) -> Verdict:
    """The procedure, at the judge's line. `draw(n)` gives n more log ratios; `reproduce` measures again in a fresh process."""
    return noise.decide(draw, reproduce, SLOWDOWN, family=family)


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
    """Compare B with the pinned best A. Both ids must be in the catalogue, so that a fresh process can find them."""
    nonce = fresh_nonce()
    rng = np.random.default_rng(int(nonce[:8], 16))
    first, second = arms(a, b, case_name, nonce, slowdown)
    return decide(lambda n: pairs_of(first, second, n, rng), lambda: _fresh(a, b, case_name, slowdown), family=family)


def once_more(a: Component, b: Component, case_name: str, slowdown: float) -> Interval:
    """One interval from as many pairs as three rounds have, at the same level; what the fresh process runs."""
    nonce = fresh_nonce()
    first, second = arms(a, b, case_name, nonce, slowdown)
    return interval(pairs_of(first, second, MOST, np.random.default_rng(int(nonce[:8], 16))), noise.share(ALPHA, rounds=ROUNDS))


_AGAIN = """
import sys
from alpha.gates.timing.ab import once_more
from alpha.train import forbidden
from alpha.train.catalogue import catalogue
forbidden.watch()
a, b, case, slowdown = sys.argv[1:]
i = once_more(catalogue()[a], catalogue()[b], case, float(slowdown))
print(i.low, i.estimate, i.high, i.n)
forbidden.check("at the end of a fresh process")
"""


def _fresh(a: Component, b: Component, case_name: str, slowdown: float) -> Interval:
    from alpha.gates.contracts.engine import child_environment

    command = [sys.executable, "-c", _AGAIN, a.id, b.id, case_name, str(slowdown)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, env=child_environment(), check=False)
    if child.returncode != 0:
        raise MachineError("the A/B comparison could not be repeated in a fresh process", came=child.stderr.strip().rsplit("\n", 1)[-1],
                           do="run `alpha bench` on the component to see the error")
    low, estimate, high, pairs = child.stdout.split()[-4:]
    return Interval(float(low), float(estimate), float(high), int(pairs))
