"""Rounding and the sequential walk, from their definitions."""

import numpy as np
import pytest

from alpha.ops.numerics import round_to, walk

RNG = np.random.default_rng(7)
WIDE = RNG.standard_normal(20000) * np.exp(RNG.uniform(-12, 12, 20000))


def _numbers(significand: int, least: int, most: int) -> np.ndarray:
    """Every number >= 0 of a small type, in order: its place in the list has the parity of its last bit."""
    subnormal = np.arange(2 ** (significand - 1)) * 2.0 ** (least - significand + 1)
    normal = [(2 ** (significand - 1) + np.arange(2 ** (significand - 1))) * 2.0 ** (e - significand + 1) for e in range(least, most + 1)]
    return np.concatenate([subnormal, *normal])


@pytest.mark.parametrize(("dtype", "numbers"), [("e4m3", _numbers(4, -6, 8)[:-1]), ("f16", _numbers(11, -14, 15)),
                                                ("bf16", _numbers(8, -24, 40))], ids=["e4m3", "f16", "bf16"])
def test_rounding_is_to_the_nearest_and_ties_to_even(dtype: str, numbers: np.ndarray) -> None:
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf), np.abs(WIDE)])
    x = x[(x <= numbers[-1]) & (x >= (numbers[1] if dtype != "bf16" else 2.0**-24))]
    if dtype == "bf16":
        x = round_to(x, "f32")
    above = np.searchsorted(numbers, x)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - x, x - numbers[below]
    want = np.where((up < down) | ((up == down) & (above % 2 == 0)), numbers[above], numbers[below])
    assert np.array_equal(round_to(x, dtype), want) and np.array_equal(round_to(-x, dtype), -want)


def test_what_is_not_finite_stays_so_but_e4m3_saturates() -> None:
    ends = np.array([np.nan, np.inf, -np.inf])
    for dtype in ("f64", "f32", "bf16", "f16"):
        assert np.array_equal(round_to(ends, dtype), ends, equal_nan=True)
    assert np.array_equal(round_to(ends, "e4m3"), [np.nan, 448, -448], equal_nan=True)


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "e4m3"])
@pytest.mark.parametrize("k", [1, 5, 3000])  # 3000: more terms than results
def test_a_walk_adds_one_term_after_the_other(dtype: str, k: int) -> None:
    a, b = (round_to(RNG.standard_normal(s) * np.exp(RNG.uniform(-4, 4, s)), dtype) for s in ((2, 3, k), (k, 4)))
    (product,) = walk(lambda a, b: (a @ b,), dtype, (a, b), {})
    (total,) = walk(lambda a: (np.sum(a, axis=(0, 2)),), dtype, (a,), {})
    want, sums = np.zeros((2, 3, 4)), np.zeros(3)
    for i in range(k):
        want = round_to(want + round_to(a[..., i, None] * b[i], dtype), dtype)
    for batch in a:
        for i in range(k):
            sums = round_to(sums + batch[:, i], dtype)
    assert np.array_equal(product, want) and np.array_equal(total, sums)
