"""The statistics of comparisons again, number by number: lists, the standard library, fractions and an integral. Floor 7.

Nothing here is fast or clever. It says what alpha/profile/noise.py must say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

INF, NAN = math.inf, math.nan
_AT, _WEIGHT = np.polynomial.legendre.leggauss(96)


class Between(NamedTuple):
    """A slowdown as a fraction."""

    low: float
    estimate: float
    high: float
    n: int


class Height(NamedTuple):
    """A level, its squared error, the degrees of freedom of that."""

    mean: float
    square: float
    df: int


def alike(a: float, b: float, rel: float = 1e-9) -> bool:
    """The same number, infinity or no number."""
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rel, abs_tol=1e-12)


def fraction(log: float) -> float:
    """A log ratio as a slowdown."""
    return math.expm1(log) if log < 700 else log if math.isnan(log) else INF


def below(t: float, df: int) -> float:
    """P(T <= t) for t >= 0: Student's density, integrated over the angle whose tangent is t / sqrt(df)."""
    angle = math.atan(t / math.sqrt(df))
    whole = float(_WEIGHT @ np.cos(angle * (_AT + 1) / 2) ** (df - 1)) * angle / 2
    return 0.5 + whole * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)


@cache
def point(p: float, df: int) -> float:
    """The point that p of the mass of Student's t lies below."""
    low, high = 0.0, 1.0
    while below(high, df) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle, df) < p else (low, middle)
    return high


def enclosing(pairs: int, alpha: float) -> int:
    """How many values may lie outside on either side, and one more: the median is then missed with a chance of alpha at most."""
    allowed, found = Fraction(alpha), 0
    for k in range(1, pairs // 2 + 1):
        missed = 2 * Fraction(sum(math.comb(pairs, i) for i in range(k)), 2**pairs)
        if missed <= allowed:
            found = k
    return found


def of_pairs(logs: Sequence[float], alpha: float) -> Between:
    """The median and its interval of order statistics."""
    ordered, k = sorted(logs), enclosing(len(logs), alpha)
    low, high = (ordered[k - 1], ordered[len(logs) - k]) if k else (-INF, INF)
    return Between(fraction(low), fraction(median(ordered)), fraction(high), len(logs))


def stretches(values: Sequence[float], n: int = 16) -> list[float]:
    """Medians of stretches of a series, the first ones a value longer where it does not come out even."""
    n = min(n, len(values))
    found, at = [], 0
    for i in range(n):
        length = len(values) // n + (i < len(values) % n)
        found.append(median(values[at : at + length]))
        at += length
    return found


def height(values: Sequence[float]) -> Height:
    """A fifth left out at either end of ten and more; the error widened where neighbours go together."""
    n = len(values)
    if n < 4:
        return Height(fmean(values) if n else NAN, INF, 1)
    out = n // 5 if n >= 10 else 0
    ordered = sorted(values)
    kept = ordered[out : n - out]
    near = [min(max(x, kept[0]), kept[-1]) for x in values]
    away = [x - fmean(near) for x in near]
    spread = math.fsum(x * x for x in away)
    together = math.fsum(x * y for x, y in zip(away[1:], away)) / spread + 1 / n if spread else 0.0
    together = max(0.0, min(0.8, together))
    return Height(fmean(kept), spread / (len(kept) * (len(kept) - 1)) * (1 + together) / (1 - together), len(kept) - 1)


def moved(a: Sequence[float], b: Sequence[float], alpha: float, taken: float = 0.0, square: float = 0.0) -> Between:
    """By how much b's level lies above a's, less what is taken: Welch's interval."""
    one, two, n = height(a), height(b), min(len(a), len(b))
    by = two.mean - one.mean - taken
    whole = one.square + two.square + square
    if math.isinf(whole) or math.isnan(by):
        return Between(-1.0, fraction(by), INF, n)
    own = one.square + two.square
    if own:
        share = one.square / own
        df = min(one.df + two.df, int(1 / (share**2 / one.df + (1 - share) ** 2 / two.df)))
    else:
        df = one.df
    reach = point(1 - alpha / 2, df) * math.sqrt(whole)
    return Between(fraction(by - reach), fraction(by), fraction(by + reach), n)


def same(got: object, want: Between) -> bool:
    """Whether an interval of ours is this one."""
    return all(alike(getattr(got, name), x) for name, x in want._asdict().items())
