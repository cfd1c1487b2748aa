"""Cases of which rank holds up the others (alpha/profile/slow_rank.py), held against the same told with lists. Floor 7."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs
from alpha.gates.contracts.profile.account import PHASES
from alpha.gates.contracts.profile.by_hand import moved, same, stretches
from alpha.gates.contracts.profile.support import Case
from alpha.profile.slow_rank import OWN, standings

DRAWN: tuple[tuple[dict[int, tuple[float, float]], int], ...] = (
    ({}, 200), ({1: (1.06, 1.06)}, 200), ({0: (0.93, 0.93)}, 90), ({1: (1.06, 1.0)}, 200), ({1: (1.0, 1.06)}, 200),
    ({0: (0.93, 1.0)}, 160), ({1: (1.01, 1.01)}, 120), ({1: (1.06, 1.06)}, 50), ({0: (1.0, 0.93)}, 128), ({}, 3),
    ({1: (0.99, 0.99)}, 200), ({0: (1.018, 1.03)}, 300), ({1: (0.97, 0.982)}, 300), ({1: (1.06, 1.06)}, 64), ({0: (1.06, 1.06)}, 63),
    *(({1: (1.0205, 1.0205)}, 160),) * 8, *(({0: (0.8, 0.8)}, 70),) * 4)
"""(rank -> how many times as long it takes in each half, steps)."""


def standing(rng: np.random.Generator) -> Measured:
    """Own times of two ranks and more, in which one is slow, fast, slow for a while, or none: every field of each standing."""
    checks, said = [], Counter[str]()
    for trial, (slow, steps) in enumerate((*DRAWN, *DRAWN)):
        count, spread = (2, 3, 5)[trial % 3], 0.004 if trial < len(DRAWN) else (0.15, 0.6)[trial % 2]
        usual = 0.9 if trial == 1 else 1e6  # ns: any time is one
        shared, own = np.exp(0.1 * rng.standard_normal(steps)), np.empty((count, steps))
        for i in range(count):
            by = np.repeat(slow.get(i, (1.0, 1.0)), (steps // 2, steps - steps // 2))
            own[i] = usual * shared * by * np.exp(spread * rng.standard_normal(steps))
        names = [int(x) for x in rng.permutation(9)[:count]]
        got = standings(names, own)
        checks.append(differs("ranks", [s.rank for s in got], names))
        typical = [stretches([math.log(x) for x in row]) for row in own.tolist()]
        for i, s in enumerate(got):
            others = [row for j, row in enumerate(typical) if j != i]
            away = [x - median(at) for x, at in zip(typical[i], zip(*others))]
            alpha, half = 0.05 / count, len(away) // 2
            apart = moved([0.0] * len(away), away, alpha)
            halves = [moved([0.0] * len(part), part, alpha).estimate for part in (away[:half], away[half:])]
            if apart.low > 0 and all(x >= 0.02 for x in (apart.estimate, *halves)):
                verdict = "SLOWER"
            elif apart.high < 0 and all(x <= -0.02 for x in (apart.estimate, *halves)):
                verdict = "FASTER"
            else:
                verdict = "SAME" if abs(apart.low) < 0.02 and abs(apart.high) < 0.02 else "UNDECIDED"
            reason = f"{steps} steady steps, fewer than 64" if steps < 64 else ""
            want = ("UNDECIDED" if reason else verdict, reason, median(own[i].tolist()))
            checks.append(differs(f"trial {trial}, rank {i}", (s.verdict, s.reason, s.own_ns), want))
            checks.append((f"trial {trial}, rank {i}: {s.apart} for {apart}", same(s.apart, apart)))
            said[s.verdict] += 1
    checks.append((f"verdicts {said}", said.keys() == {"SLOWER", "FASTER", "SAME", "UNDECIDED"}))
    nothing = rng.random((3, 70)) + 1.0
    nothing[int(rng.integers(3)), int(rng.integers(70))] = 0.0
    checks.append(differs("nobody", [standings([4], rng.random((1, 70)) + 1.0), standings([], np.zeros((0, 0))),
                                     standings([0, 1], np.zeros((2, 0))), standings([0, 1, 2], nothing)], [[], [], [], []]))
    checks.append(differs("own", OWN, tuple(p for p in PHASES if p not in ("comm", "checkpoint", "eval", "sample_gen"))))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("standing", standing),)
