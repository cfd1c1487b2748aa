"""Cases of the noise discipline (alpha/profile/noise.py): how times are taken, which count, what may be said of them. Floor 7.

Clocks move when they are told to, and what is said is counted again by hand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs
from alpha.gates.contracts.profile import by_hand
from alpha.gates.contracts.profile.by_hand import INF, NAN, alike, same
from alpha.gates.contracts.profile.support import Case, Clock
from alpha.profile import noise
from alpha.profile.noise import Interval


def taking(rng: np.random.Generator) -> Measured:
    """A block is the mean of its calls, without what comes before each; blocks last as long as asked; of a pair either may go first."""
    checks = []
    for _ in range(40):
        clock = Clock(int(rng.integers(1 << 40)))
        lasts = [int(x) for x in rng.integers(0, 1 << int(rng.integers(1, 20)), 64)]
        order: list[str] = []

        def call(clock: Clock = clock, lasts: list[int] = lasts, order: list[str] = order) -> None:
            clock.pass_(lasts[order.count("call")])
            order.append("call")

        def before(clock: Clock = clock, order: list[str] = order) -> None:
            clock.pass_(1 << 30)
            order.append("before")

        with mock.patch.object(noise, "CLOCK", clock):
            repeats, ahead = int(rng.integers(1, 9)), bool(rng.integers(2))
            took = noise.block(call, repeats, before if ahead else None)
            want = max(1, sum(lasts[:repeats]) // repeats)
            checks.append(differs(f"{repeats} calls", (took, order), (want, [*["before"] * ahead, "call"] * repeats)))
            order.clear()
            ns = int(rng.integers(1, 1 << int(rng.integers(1, 30))))
            best = min(max(1, x) for x in (lasts[1], lasts[2], (lasts[3] + lasts[4]) // 2))
            got = noise.repeats_for(call, ns)
            checks.append(differs(f"calls of {best} in {ns}", (got, order), (min(1000, max(1, round(ns / best))), ["call"] * 5)))
    first = Counter[tuple[int, ...]]()
    for arms, rounds in ((int(rng.integers(1, 9)), int(rng.integers(0, 9))), (3, 120)):
        found = list(noise.orders(arms, rounds, rng))
        first.update(tuple(x) for x in found if arms == 3)
        checks.append((f"{arms} arms", len(found) == rounds and all(sorted(x) == list(range(arms)) for x in found)))
        checks.append(("plain numbers", all(type(i) is int for x in found for i in x)))
    checks.append((f"orders {first}", len(first) == 6 and max(first.values()) < 60))
    said: list[str] = []
    times = {name: [int(x) for x in rng.integers(1, 1 << 30, 200)] for name in "ab"}

    def arm(name: str) -> int:
        said.append(name)
        return times[name][said.count(name) - 1]

    logs = noise.pairs_of(lambda: arm("a"), lambda: arm("b"), 200, rng)
    checks.append(("pairs", len(logs) == 200 and all(alike(x, math.log(b) - math.log(a)) for x, a, b in zip(logs, times["a"], times["b"]))))
    pairs = Counter("".join(said[i : i + 2]) for i in range(0, 400, 2))
    checks.append((f"who goes first {pairs}", pairs.keys() == {"ab", "ba"} and min(pairs.values()) > 50))
    return all_hold(checks)


def keeping(rng: np.random.Generator) -> Measured:
    """Samples of a machine that was throttled are left out: by the clock, by five reasons, by a probe; and the first steps of sessions."""
    checks = []
    for trial in range(60):
        n = trial % 12
        clocks = [float(x) for x in rng.choice([1500.0, 1980.0, 1975.0, 1930.0, 1920.7, 1920.5, 1410.0, NAN], n)]
        reasons = [int(x) if rng.random() < 0.4 else 0 for x in rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 12, 0x84], n)]
        if trial > 50:
            reasons = [8 for _ in reasons]
        forced = [any(r >> bit & 1 for bit in (3, 4, 5, 6, 7)) for r in reasons]
        free = [c for c, f in zip(clocks, forced) if not f and not math.isnan(c)]
        want = [f or not free or math.isnan(c) or c < median(free) * 0.97 for c, f in zip(clocks, forced)]
        got = noise.throttled_gpu(clocks, reasons)
        checks.append(differs(f"clocks {clocks} {reasons}", got.tolist(), want))
        probes = [float(x) for x in rng.choice([100, 101, 109, 111, 112, 120, 300] if trial % 2 else [10, 10, 10, 11, 12], n)]
        if trial == 7:
            n, probes = 200, rng.uniform(100, 120, 200).tolist()
        ordered = sorted(probes)
        at = (n - 1) / 4
        quartile = ordered[int(at)] + (at - int(at)) * (ordered[min(n - 1, int(at) + 1)] - ordered[int(at)]) if n else 0.0
        slow = noise.throttled_cpu(probes)
        checks.append(differs(f"probes {probes}", slow.tolist(), [p > quartile * 1.1 for p in probes]))
        kept, lost = noise.keep(got), sum(want)
        n = len(clocks)
        checks.append(differs("kept", (kept.mask.tolist(), kept.discarded, kept.believed),
                              ([not x for x in want], lost, n > 0 and 2 * lost <= n)))
        session, profiled = sorted(rng.integers(0, 4, 2 * n).tolist()), rng.integers(0, 2, 2 * n).tolist()
        want = [not p and i >= 3 and session[i - 3] == s for i, (s, p) in enumerate(zip(session, profiled))]
        checks.append(differs("steady", noise.steady(session, profiled).tolist(), want))
    return all_hold(checks)


def of_pairs(rng: np.random.Generator) -> Measured:
    """Intervals of medians by exact binomials, the chance of error shared out, and a rate's own interval by what defines it."""
    checks = []
    for trial in range(50):
        n, alpha = trial, 0.05 / int(rng.integers(1, 40))
        logs = (rng.standard_normal(n) * 10.0 ** float(rng.integers(-3, 1))).tolist()
        if trial % 7 == 1:
            logs[0] = float(rng.choice([700.0, 699.9, 1e300, INF]))
        checks.append(differs(f"rank of {n} at {alpha}", noise.rank(n, alpha), by_hand.enclosing(n, alpha)))
        if n:
            got, want = noise.interval(logs, alpha), by_hand.of_pairs(logs, alpha)
            checks.append((f"{got} for {want}", same(got, want)))
        rounds, family = (int(x) for x in rng.integers(1, 99, 2))
        checks.append(("share", alike(noise.share(alpha, rounds=rounds, family=family) * rounds * family, alpha)))
        won, z = int(rng.integers(0, n + 1)), float(rng.choice([1.0, 1.96, 2.58]))
        low, high = noise.wilson(won, n, z) if trial % 2 else noise.wilson(won, n)
        z = z if trial % 2 else 1.96
        ends = [(p, (won - n * p) ** 2, z * z * n * p * (1 - p)) for p in (low, high)]  # a rate whose own spread just reaches what came
        sound = all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) for p, x, y in ends)
        sound = sound and low - 1e-12 <= won / n <= high + 1e-12 and low < high if n else (low, high) == (0, 1)
        checks.append((f"{won} of {n}: {low} {high}", sound))
        checks.append(("certain", (low < 1e-12) == (won == 0) and (high > 1 - 1e-12) == (won == n)))
    ranks = [noise.rank(*x) for x in ((9, 0.05), (6, 2 / 64), (6, 0.031))]  # two values of 2^-6 are just allowed, or just not
    checks.append(differs("the whole chance", (noise.share(0.3), ranks), (0.3, [2, 1, 0])))
    large = [noise.interval([x] * 9, 0.05).estimate for x in (699.5, 700.0, 1000.0, -INF, NAN)]
    checks.append((f"large {large}", 1e303 < large[0] < 1e304 and large[1:4] == [INF, INF, -1.0] and math.isnan(large[4])))
    for low, estimate, line in ((0.01, 0.02, 0.02), (0.0, 0.03, 0.02), (1e-9, 0.0199, 0.02), (-0.01, 0.5, 0.02), (1e-9, 0.5, 0.02)):
        is_slower = low > 0 and not estimate < line
        checks.append(differs(f"slower {low} {estimate}", noise.slower(Interval(low, estimate, 1.0, 9), line), is_slower))
    return all_hold(checks)


def deciding(rng: np.random.Generator) -> Measured:
    """40 pairs, then as many again as there are, three rounds; no is said twice, the second time by a fresh process."""
    checks, ways = [], Counter[tuple[str, int]]()
    for _ in range(48):
        level, spread = float(rng.choice([-0.02, 0.0, 0.012, 0.019, 0.03, 0.06])), float(rng.choice([0.003, 0.03, 0.08, 0.3]))
        logs = (level + spread * rng.standard_normal(160)).tolist()
        again = [Interval(*x, 9) for x in [((-0.1, 0.1, 0.3), (0.001, 0.02, 0.03), (0.01, 0.019, 0.03))[i] for i in rng.integers(0, 3, 3)]]
        line, family = 0.02, int(rng.integers(1, 30))
        asked: list[int] = []
        fresh: list[Interval] = []

        def draw(n: int, asked: list[int] = asked, logs: list[float] = logs) -> list[float]:
            asked.append(n)
            return logs[sum(asked[:-1]) : sum(asked)]

        def reproduce(fresh: list[Interval] = fresh, again: list[Interval] = again) -> Interval:
            fresh.append(again[len(fresh)])
            return fresh[-1]

        got = noise.decide(draw, reproduce, line, family=family)
        verdict, rounds, i, said = "AMBIGUOUS", 0, by_hand.Between(-INF, 0.0, INF, 0), 0
        for n in (40, 80, 160):
            rounds, i = rounds + 1, by_hand.of_pairs(logs[:n], 0.05 / 3 / family)
            if i.high < line:
                verdict = "PASS"
                break
            if i.low > 0 and i.estimate >= line:
                said += 1
                if again[said - 1].low > 0 and again[said - 1].estimate >= line:
                    verdict = "FAIL"
                    break
        ways[verdict, rounds] += 1
        checks.append(differs("decided", (got.verdict, got.rounds, got.reproduced, asked, len(fresh)),
                              (verdict, rounds, verdict == "FAIL", [40, 40, 80][:rounds], said)))
        checks.append((f"on {got.interval} for {i}", same(got.interval, i)))
    checks.append((f"all three {ways}", {v for v, _ in ways} == {"PASS", "FAIL", "AMBIGUOUS"}))
    return all_hold(checks)


def of_series(rng: np.random.Generator) -> Measured:
    """Blocks, levels and shifts of series that drift, spike, stand still or hardly exist; Student's t by an integral of its density."""
    checks = []
    for trial in range(60):
        a, b = (_series(rng, trial), _series(rng, trial // 3)) if trial < 50 else (_series(rng, 20 + trial % 10), _series(rng, 29))
        for x in (a, b):
            for n in (int(rng.integers(1, 30)), 16):
                got = noise.blocks(x, n) if n != 16 else noise.blocks(np.array(x))
                want = by_hand.stretches(x, n)
                checks.append((f"blocks {got.tolist()} for {want}", len(got) == len(want) and all(map(alike, got.tolist(), want))))
            height, here = by_hand.height(x), noise.level(x)
            checks.append((f"{here} for {height}", all(alike(getattr(here, k), v) for k, v in height._asdict().items())))
        if (by_hand.height(a).square == 0) != (by_hand.height(b).square == 0):
            continue  # degrees of freedom are then those of one series, to the last bit of a quotient
        taken, square = (float(x) for x in (rng.standard_normal() * 0.1, rng.choice([0.0, 1e-4]))) if trial % 2 else (0.0, 0.0)
        alpha = float(rng.choice([0.05, 0.01, 0.1 / 3]))
        moved = noise.shift(a, b, alpha, taken=taken, square=square) if trial % 2 else noise.shift(a, b, alpha)
        by = by_hand.moved(a, b, alpha, taken, square)
        checks.append((f"{moved} for {by}", same(moved, by)))
    for df in (1, 2, *(int(x) for x in rng.integers(3, 60, 6))):
        p = float(rng.uniform(0.55, 0.999))
        t = noise.quantile(p, df)
        checks.append((f"t of {p} at {df}: {t}", alike(by_hand.below(t, df), p) and alike(t, by_hand.point(p, df), 1e-7)))
        checks.append((f"below {t} at {df}", alike(noise._below(t, df), by_hand.below(t, df))))
    p = float(rng.uniform(0.55, 0.99))
    checks.append(("one degree", alike(noise.quantile(p, 1), math.tan(math.pi * (p - 0.5)))))
    checks.append(("two degrees", alike(noise.quantile(p, 2), (2 * p - 1) * math.sqrt(2 / (1 - (2 * p - 1) ** 2)))))
    checks.append(("the farthest of one degree", noise.quantile(1.0, 1) == INF and noise.quantile(1 - 1e-9, 1) > 1e8))
    return all_hold(checks)


def _series(rng: np.random.Generator, trial: int) -> list[float]:
    """None, a few, a constant, white, drifting or alternating values."""
    n = (0, 1, 3, 4, 9, 10, 11, 16, 24, 40)[trial % 10]
    x = rng.standard_normal(n)
    x = (x, np.cumsum(x), np.zeros(n) + 0.25, x + 50 * (rng.random(n) < 0.1), x + 3 * (np.arange(n) % 2))[trial // 10 % 5]
    return _floats(0.01 * x + 1)


def _floats(x: np.ndarray) -> list[float]:
    return [float(v) for v in x]


PARITY: Sequence[tuple[str, Case]] = (("taking", taking), ("keeping", keeping), ("pairs", of_pairs), ("deciding", deciding),
                                      ("series", of_series))
