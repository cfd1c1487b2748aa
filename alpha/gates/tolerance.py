"""What the parity gate compares errors with: all of it derived from the row, none of it set by hand. Floor 7.

For one case, element i of an output passes when its error is at most

    max(2 * naive(tile of i), half an ulp of the output + bound_i * u)

`naive(tile)` is the largest error, within a tile of 256 to 511 consecutive elements (all of them where there are fewer) and the tiles on
either side of it, of the row's own oracle walked sequentially with the type's rounding after each operation (numerics.walk). That error
is a random variable, so the largest of 48 draws counts: every float input is multiplied by a common factor within 2**-8 of 1, which
keeps zeros, equal rows and signs, and is rounded again. The first draws (three, for small outputs up to 24) settle it where a kernel stays
within them, and where it errs by more than SMALL times twice what they allow; only in between are the others taken. Of an output of few
numbers the first draws may be near nothing, all of them; of one of millions some tile's are: with independent roundings, one of 4,096 tiles
lay beyond twice RATIO times three draws in 19 to 72 % of 120 simulated runs, and with 39 draws in none of 40.

The walk is mixed (numerics.walk): in bf16 its sums run in f32, as the kernels' do, and an output in f32 is held to the walk in f32, so a
bf16 intermediate shows in a statistic or a gradient. u is that of the accumulation type.

In f64 the oracle rounds as the kernel does, so there is nothing exact to walk against. Rounding errors are linear in the unit roundoff to
first order; the f32 walk's error, scaled by u64 / u32 and doubled because the oracle errs as well, takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpha.gates.subjects import Case, generator
from alpha.ops.numerics import ACCUMULATE, LOWER, UNIT_ROUNDOFF, round_to, ulp, walk
from alpha.ops.spec import Arrays, OpSpec
from alpha.registry.judge import RATIO
from alpha.types import TensorType

TILE = 256
DRAWS = 4096
"""Output elements times repetitions, about."""

WALKED = 60_000
"""Input elements times repetitions, at most, beyond the least number: the walk adds them one by one."""

FIRST, ALL = 3, 48
"""Least number of draws, at first and where those leave it open. With three alone, 14 of 1,600 runs of four sound kernels were refused."""


SMALL = 32
"""What a tolerance from the first draws may be too small by: of one loss of a sound kernel 3.6 % lay beyond twice it, 1.3 % beyond 8 times,
none of 60,000 beyond 32 times."""


@dataclass(frozen=True)
class Allowance:
    """Per float output: the oracle's value, the slack (half ulp + bound), the naive error per element. `single`: every draw of the walk
    is the correctly rounded result, so the computation is one rounding and the kernel owes the same bits."""

    want: list[np.ndarray]
    slack: list[np.ndarray]
    naive: list[np.ndarray]
    single: bool

    def ratios(self, got: Sequence[np.ndarray], dtypes: Sequence[str]) -> list[float]:
        """Of each output, the worst error over the naive one, among elements beyond the slack: 0.0 if none, inf where finiteness or an
        integer differs."""
        return [_ratio(*each) for each in zip(got, self.want, self.slack, self.naive, dtypes)]

    def ratio(self, got: Sequence[np.ndarray], dtypes: Sequence[str]) -> float:
        """The largest of `ratios`."""
        return max(self.ratios(got, dtypes), default=0.0)


def allowance(spec: OpSpec, case: Case, nonce: str, least: int = FIRST) -> Allowance:
    """Evaluate oracle and walks of one case, with `least` draws or more; more draws contain the fewer."""
    dtypes = [t.dtype for t in case.out_types(spec)]
    want = case.oracle(spec)
    u = UNIT_ROUNDOFF[ACCUMULATE[case.dtype]]
    bounds = spec.bound(case.inputs, case.attrs) if spec.bound else [0.0] * len(want)
    slack = [np.broadcast_to(0.5 * ulp(w, d) + np.asarray(b) * u, w.shape) if w.dtype.kind == "f" else np.zeros(w.shape)
             for w, b, d in zip(want, bounds, dtypes)]
    coarse = case if case.dtype != "f64" else _as(case, "f32")
    precision = [ACCUMULATE[coarse.dtype] if d == ACCUMULATE[coarse.dtype] else coarse.dtype for d in dtypes]
    scale = 1.0 if case.dtype != "f64" else 2.0 * UNIT_ROUNDOFF["f64"] / UNIT_ROUNDOFF["f32"]
    rng = generator(nonce, "draws", case.name)
    errors: list[np.ndarray] = [np.zeros(w.shape) for w in want]
    single = not any(np.any(np.asarray(b) != 0) for b in bounds)
    size = max((w.size for w in want), default=0)
    walked_elements = sum(np.size(x) for x in case.inputs)
    for draw in range(max(least, min(24, DRAWS // max(1, size), WALKED // max(1, walked_elements)))):
        drawn = coarse if draw == 0 else _nudged(coarse, rng)
        exact = drawn.oracle(spec)
        walks = {d: walk(spec.oracle, d, drawn.inputs, drawn.attrs, mixed=coarse.dtype) for d in sorted(set(precision))}
        for i, (e, d) in enumerate(zip(exact, dtypes)):
            if e.dtype.kind != "f":
                continue
            w = walks[precision[i]][i]
            d = "f32" if case.dtype == "f64" and d == "f64" else d
            rounded = round_to(w, d)
            single = single and np.array_equal(rounded, round_to(e, d), equal_nan=True)
            with np.errstate(all="ignore"):
                error = np.abs(rounded - e)
            errors[i] = np.maximum(errors[i], np.where(np.isfinite(error), error, 0.0))
    return Allowance(list(want), slack, [_per_tile(e) * scale for e in errors], single)


def slack_alone(spec: OpSpec, case: Case) -> Allowance:
    """The part of the allowance that needs no walk: what lies within it lies within the whole."""
    want = case.oracle(spec)
    u = UNIT_ROUNDOFF[ACCUMULATE[case.dtype]]
    bounds = spec.bound(case.inputs, case.attrs) if spec.bound else [0.0] * len(want)
    slack = [np.broadcast_to(0.5 * ulp(w, t.dtype) + np.asarray(b) * u, w.shape) if w.dtype.kind == "f" else np.zeros(w.shape)
             for w, b, t in zip(want, bounds, case.out_types(spec))]
    return Allowance(list(want), slack, [np.zeros(w.shape) for w in want], False)


def weighed(allowed: Allowance, spec: OpSpec, case: Case, nonce: str, got: Sequence[np.ndarray]) -> tuple[float, Allowance]:
    """(worst error of `got` over the naive one, the allowance that says so): with ALL draws where those of `allowed` leave it open."""
    dtypes = [t.dtype for t in case.out_types(spec)]
    ratio = allowed.ratio(got, dtypes)
    if RATIO < ratio <= 2 * RATIO * SMALL:
        allowed = allowance(spec, case, nonce, ALL)
        ratio = allowed.ratio(got, dtypes)
    return ratio, allowed


def lower(spec: OpSpec, case: Case) -> list[np.ndarray]:
    """The same computation one precision lower, as float64 arrays rounded to the outputs' type of that precision."""
    out = [LOWER[t.dtype] if t.dtype in LOWER else t.dtype for t in case.out_types(spec)]
    return [round_to(y, d) if np.asarray(y).dtype.kind == "f" else y
            for y, d in zip(walk(spec.oracle, LOWER[case.dtype], case.inputs, case.attrs), out)]


def exact_below(want: Sequence[np.ndarray], dtypes: Sequence[str]) -> bool:
    """Whether the rounded results are all exact one precision lower (zeros, say): such a case cannot tell the precisions apart."""
    rounded = [(round_to(w, d), d) for w, d in zip(want, dtypes) if w.dtype.kind == "f"]
    return all(np.array_equal(round_to(r, LOWER.get(d, d)), r, equal_nan=True) for r, d in rounded)


def exact_error(got: Sequence[np.ndarray], want: Arrays, dtypes: Sequence[str]) -> float:
    """Largest difference from the oracle's values rounded to the outputs' types; inf where finiteness differs."""
    worst = 0.0
    for g, w, d in zip(got, want, dtypes):
        target = round_to(w, d) if w.dtype.kind == "f" else w
        with np.errstate(all="ignore"):
            difference = np.abs(np.asarray(g, np.float64) - np.asarray(target, np.float64))
        same = (np.asarray(g) == target) | (np.isnan(np.asarray(g, np.float64)) & np.isnan(np.asarray(target, np.float64)))
        difference = np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))
        worst = max(worst, float(np.max(difference, initial=0.0)))
    return worst


def _ratio(got: np.ndarray, want: np.ndarray, slack: np.ndarray, naive: np.ndarray, dtype: str) -> float:
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(got, want) else np.inf
    got = np.asarray(got, np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
        rounded = round_to(want, dtype)
        agree = (got == rounded) | (np.isnan(got) & np.isnan(want))
        error = np.where(agree & ~np.isfinite(rounded), 0.0, np.where(np.isfinite(error), error, np.inf))
        ratio = np.where(~(error <= slack), np.where(naive > 0, error / naive, np.inf), 0.0)
    return float(np.max(ratio, initial=0.0))


def _as(case: Case, dtype: str) -> Case:
    types = tuple(TensorType(t.shape, dtype) if t.is_float else t for t in case.types)
    inputs = tuple(round_to(x, dtype) if np.asarray(x).dtype.kind == "f" else x for x in case.inputs)
    return replace(case, dtype=dtype, types=types, inputs=inputs)


def _nudged(case: Case, rng: np.random.Generator) -> Case:
    factors = 1 + 2.0**-8 * rng.uniform(-1, 1, len(case.inputs))
    return replace(case, inputs=tuple(round_to(x * f, t.dtype) if np.asarray(x).dtype.kind == "f" else x
                                      for x, t, f in zip(case.inputs, case.types, factors)))


def _per_tile(error: np.ndarray) -> np.ndarray:
    """The largest of each tile and its neighbours, at every element of it; the remainder belongs to the last whole tile."""
    flat = error.reshape(-1)
    if flat.size < 2 * TILE:
        return np.full(error.shape, flat.max(initial=0.0))
    tile = np.minimum(np.arange(flat.size) // TILE, flat.size // TILE - 1)
    own = np.maximum.reduceat(flat, np.flatnonzero(np.diff(tile, prepend=-1)))
    largest = own.copy()
    largest[1:] = np.maximum(largest[1:], own[:-1])
    largest[:-1] = np.maximum(largest[:-1], own[1:])
    return largest[tile].reshape(error.shape)
