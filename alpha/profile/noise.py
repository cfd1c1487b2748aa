"""The noise discipline that benchmark, gate and report share: how times are taken, which are kept, what may be said of them. Floor 3.

Taking: calls are warmed up, then timed in blocks; blocks of everything that is compared alternate in random order, so that drift of the
clock hits all alike (`block`, `repeats_for`, `orders`, `pairs_of`). Keeping: what ran while the machine was throttled is discarded and
counted, by a rule that never looks at the time itself (`throttled_gpu`, `throttled_cpu`, `keep`); the first steps of a session and the
instrumented ones are not what a step costs (`steady`). Saying: intervals that assume nothing about the distribution (`interval`, for
pairs), or that know of autocorrelation, drift and spikes (`shift`, for series); the chance of error is split over rounds and over all
that is looked at together (`share`); the verdict needs an effect that is both there and large enough to matter (`decide`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import atan, comb, cos, exp, pi, sin, sqrt

import numpy as np

PASS, FAIL, AMBIGUOUS = "PASS", "FAIL", "AMBIGUOUS"

ALPHA = 0.05
"""Chance of a false alarm, of everything that is judged together."""

INTEREST = 0.02
"""The smallest difference that anybody should care about, as a fraction."""

ROUNDS = 3
PAIRS = 40
"""Pairs of the first round; 40, 80, 160 in all after each."""

WARM_UP = 3
"""First steps of a session that enter no rate and are never profiled: caches, page faults and clocks settle."""

_Floats = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Interval:
    """A slowdown as a fraction: low, estimate, high, from `n` independent values (pairs, or blocks of the smaller series)."""

    low: float
    estimate: float
    high: float
    n: int


# Taking ------------------------------------------------------------------------------------------------------------------------------

CLOCK = time.perf_counter_ns
"""The clock, taken when this module is imported: a kernel that patches the time module later changes nothing here, and is named."""


def block(call: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> int:
    """Nanoseconds per call over a block of calls, each timed by itself. `before` runs ahead of each, untimed."""
    total = 0
    for _ in range(repeats):
        if before is not None:
            before()
        start = CLOCK()
        call()
        total += CLOCK() - start
    return max(1, total // repeats)


def repeats_for(call: Callable[[], object], ns: int) -> int:
    """Calls per block so that a block lasts about `ns`. The five calls that it takes to find out warm the callee up."""
    call()
    return max(1, min(1000, round(ns / min(block(call, 1), block(call, 1), block(call, 2)))))


def orders(arms: int, rounds: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """For each round the order in which `arms` blocks run: each arm once, shuffled."""
    for _ in range(rounds):
        yield [int(i) for i in rng.permutation(arms)]


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


# Keeping -----------------------------------------------------------------------------------------------------------------------------

CLOCK_DROP = 0.03
"""A GPU sample whose SM clock lies this far below the median of its samples ran on another machine, so to speak."""

FORCED = 0x08 | 0x10 | 0x20 | 0x40 | 0x80
"""NVML throttle reasons that discard a sample whatever its clock: hardware slowdown, sync boost, software and hardware thermal slowdown,
power brake. The software power cap (0x04) is how a loaded GPU runs all the time: it counts only through the clock."""

PROBE_RISE = 0.10
"""A CPU sample whose reference probe took this much longer than the probes' lower quartile had less than a core to itself."""

MOST_DISCARDED = 0.5
"""When more than this part of the samples is discarded, what is left is not believed."""


@dataclass(frozen=True)
class Kept:
    """Which samples count (bool, one a sample), how many were discarded, and whether enough are left to be believed."""

    mask: np.ndarray
    discarded: int
    believed: bool


def throttled_gpu(sm_mhz: _Floats, reasons: Sequence[int]) -> np.ndarray:
    """bool per sample, from its SM clock in MHz and its NVML throttle reasons (bit mask), both read while it ran."""
    clocks = np.asarray(sm_mhz, np.float64)
    forced = np.asarray([int(r) & FORCED != 0 for r in reasons], bool)
    free = clocks[~forced & np.isfinite(clocks)]
    return forced | ~(clocks >= (1 - CLOCK_DROP) * (float(np.median(free)) if free.size else np.inf))


def throttled_cpu(probe_ns: _Floats) -> np.ndarray:
    """bool per sample, from the time of one fixed piece of work (the reference probe) that ran beside each."""
    probes = np.asarray(probe_ns, np.float64)
    return ~(probes <= (1 + PROBE_RISE) * (float(np.percentile(probes, 25)) if probes.size else 0.0))


def keep(throttled: np.ndarray) -> Kept:
    """Discard and count. Of a pair, hand in `throttled(a) | throttled(b)`: a pair goes as a whole."""
    lost = int(np.count_nonzero(throttled))
    return Kept(~throttled, lost, bool(throttled.size) and lost <= MOST_DISCARDED * throttled.size)


def steady(session: Sequence[int] | np.ndarray, profiled: Sequence[int] | np.ndarray) -> np.ndarray:
    """bool per step of one rank, in order: not instrumented, and not among the first WARM_UP of its session."""
    sessions = np.asarray(session, np.int64)
    if not sessions.size:
        return np.zeros(0, bool)
    starts = np.flatnonzero(np.r_[True, sessions[1:] != sessions[:-1]])
    since = np.arange(sessions.size) - np.repeat(starts, np.diff(np.r_[starts, sessions.size]))
    return (since >= WARM_UP) & (np.asarray(profiled) == 0)


# Saying: pairs -----------------------------------------------------------------------------------------------------------------------


def share(alpha: float, *, rounds: int = 1, family: int = 1) -> float:
    """The chance of error left for one look at one thing: split evenly over sequential rounds and over a family (Bonferroni)."""
    return alpha / rounds / family


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
    return Interval(_fraction(low), _fraction(float(np.median(ordered))), _fraction(high), len(ordered))


def _fraction(log_ratio: float) -> float:
    return np.inf if log_ratio >= 700 else exp(log_ratio) - 1  # NaN stays NaN


@dataclass(frozen=True)
class Verdict:
    """What the procedure decided, on which interval, after how many rounds; `reproduced`: in a fresh process."""

    verdict: str
    interval: Interval
    rounds: int
    reproduced: bool


def slower(i: Interval, line: float) -> bool:
    """Whether an interval says: slower (its lower bound is above 0), and by as much as matters (the estimate reaches `line`)."""
    return i.low > 0 and i.estimate >= line


def decide(draw: Callable[[int], Sequence[float]], reproduce: Callable[[], Interval], line: float, *, family: int = 1) -> Verdict:
    """The sequential procedure. `draw(n)` gives n more log ratios; `reproduce` measures again in a fresh process.

    PASS: the upper bound is under `line`. FAIL: `slower`, and a fresh process says so as well. Else the pairs are doubled, at most ROUNDS
    rounds, ALPHA split evenly over them and over the comparisons of one session (`family`). Then AMBIGUOUS.
    """
    logs: list[float] = []
    i = Interval(-np.inf, 0.0, np.inf, 0)
    for rounds in range(1, ROUNDS + 1):
        logs += draw(PAIRS if rounds == 1 else len(logs))
        i = interval(logs, share(ALPHA, rounds=ROUNDS, family=family))
        if i.high < line:
            return Verdict(PASS, i, rounds, False)
        if slower(i, line) and slower(reproduce(), line):
            return Verdict(FAIL, i, rounds, True)
    return Verdict(AMBIGUOUS, i, ROUNDS, False)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a rate; (0, 1) without trials. Wilson 1927, J. Am. Stat. Assoc. 22."""
    if trials == 0:
        return 0.0, 1.0
    p, n = successes / trials, trials
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * float(np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)))
    return max(0.0, middle - half), min(1.0, middle + half)


# Saying: series ----------------------------------------------------------------------------------------------------------------------

BLOCKS = 16
"""Blocks that a series is cut into: long against its autocorrelation, many enough for a spread."""

TRIM = 0.2
"""Part of the blocks left out at either end: a burst of a neighbour spoils a few blocks, not the estimate."""


def blocks(values: _Floats, n: int = BLOCKS) -> np.ndarray:
    """float64[min(n, size)]: medians of contiguous stretches of equal length. A median, because single steps are hit by spikes."""
    series = np.asarray(values, np.float64)
    n = min(n, series.size)
    if not n:
        return np.zeros(0)
    length, longer = divmod(series.size, n)  # as np.array_split: the first `longer` stretches are one step longer
    cut = longer * (length + 1)
    parts = [x.reshape(-1, w) for x, w in ((series[:cut], length + 1), (series[cut:], length)) if x.size]
    return np.concatenate([np.median(x, axis=1) for x in parts])


@dataclass(frozen=True)
class Level:
    """The level of a series: trimmed mean of its blocks, the square of its standard error, and that error's degrees of freedom."""

    mean: float
    square: float
    df: int


def level(values: _Floats) -> Level:
    """Trimmed mean with Winsorized standard error (Tukey and McLaughlin 1963), widened where neighbouring blocks go together.

    With a lag-1 correlation r > 0 between blocks (slow drift, a long memory) the variance of their mean is about (1 + r) / (1 - r) times
    that of independent ones; r is corrected for its bias of about -1/n and cut at 0.8. Fewer than 4 blocks have no error: infinity.
    """
    x = np.asarray(values, np.float64)
    n = x.size
    cut = int(TRIM * n) if n >= 10 else 0
    if n < 4:
        return Level(float(np.mean(x)) if n else np.nan, np.inf, 1)
    ordered = np.sort(x)
    kept = n - 2 * cut
    wins = np.clip(x, ordered[cut], ordered[n - 1 - cut])
    centred = wins - wins.mean()
    spread = float(centred @ centred)
    r = float(centred[1:] @ centred[:-1]) / spread + 1 / n if spread > 0 else 0.0
    r = min(max(r, 0.0), 0.8)
    return Level(float(ordered[cut : n - cut].mean()), spread / (kept * (kept - 1)) * (1 + r) / (1 - r), kept - 1)


def shift(a: _Floats, b: _Floats, alpha: float, *, taken: float = 0.0, square: float = 0.0) -> Interval:
    """Slowdown of series b against a, both logarithms of block times: Welch's interval on trimmed means (Yuen 1974, Biometrika 61).

    `taken`: a log ratio to subtract (a shift that everything shares), `square`: the square of its standard error.
    """
    one, two = level(a), level(b)
    n = min(len(a), len(b))
    total = one.square + two.square + square
    estimate = two.mean - one.mean - taken
    if not np.isfinite(total) or not np.isfinite(estimate):
        return Interval(-1.0, _fraction(estimate), np.inf, n)
    parts = one.square**2 / one.df + two.square**2 / two.df
    df = min(one.df + two.df, int((one.square + two.square) ** 2 / parts)) if parts > 0 else one.df
    half = quantile(1 - alpha / 2, max(1, df)) * sqrt(total)
    return Interval(_fraction(estimate - half), _fraction(estimate), _fraction(estimate + half), n)


@cache
def quantile(p: float, df: int) -> float:
    """Student's t: the point that p > 1/2 of the mass lies below, for `df` degrees of freedom."""
    low, high = 0.0, 10.0
    while _below(high, df) < p:
        high *= 2
        if high > 1e12:
            return np.inf
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, df) < p else (low, middle)
    return high


def _below(t: float, df: int) -> float:
    """P(T <= t) for t >= 0: the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = atan(t / sqrt(df))
    c, s = cos(angle), sin(angle)
    term, total = (c, c) if df % 2 else (1.0, 1.0)
    for i in range(3 if df % 2 else 2, df - 1, 2):
        term *= c * c * (i - 1) / i
        total += term
    if df % 2:
        inside = 2 / pi * (angle + (s * total if df > 1 else 0.0))
    else:
        inside = s * total
    return 0.5 + inside / 2
