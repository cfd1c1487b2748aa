"""The noise discipline: order, warm-up, throttling, intervals that cover, and rules that say no when they should."""

from math import comb, erf, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpha.profile import noise
from alpha.registry import judge


def test_one_line_and_one_set_of_words() -> None:
    """The judge stands apart from what measures, so it keeps its own; both must say the same."""
    assert noise.INTEREST == judge.SLOWDOWN
    assert (noise.PASS, noise.FAIL, noise.AMBIGUOUS) == (judge.PASS, judge.FAIL, judge.AMBIGUOUS)


# Taking


def test_blocks_time_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(noise, "CLOCK", lambda: now[0])

    def spend(ns: int) -> None:
        now[0] += ns

    assert noise.block(lambda: spend(70), 5, lambda: spend(1000)) == 70
    assert noise.block(lambda: None, 3) == 1  # never 0: ratios are taken
    assert noise.repeats_for(lambda: spend(100), 4000) == 40
    assert noise.repeats_for(lambda: spend(10**9), 4000) == 1 and noise.repeats_for(lambda: spend(1), 10**9) == 1000


def test_orders_are_permutations_and_random() -> None:
    found = list(noise.orders(4, 400, np.random.default_rng(0)))
    assert len(found) == 400 and all(sorted(o) == [0, 1, 2, 3] for o in found)
    first = np.bincount([o[0] for o in found])
    assert first.min() > 60  # each arm goes first about a quarter of the time
    assert len({tuple(o) for o in found}) == 24


def test_pairs_change_places_and_keep_their_sign() -> None:
    order: list[str] = []

    def arm(name: str, ns: int) -> int:
        order.append(name)
        return ns

    logs = noise.pairs_of(lambda: arm("a", 100), lambda: arm("b", 150), 200, np.random.default_rng(1))
    assert logs == pytest.approx([np.log(1.5)] * 200)
    firsts = order[::2].count("a")
    assert 70 < firsts < 130 and order.count("a") == order.count("b") == 200


def test_an_order_fixed_by_drift_would_be_wrong() -> None:
    """A machine that slows steadily: in random order the median ratio stays near 1, in a fixed order it does not."""
    def drifting() -> "tuple[list[float], list[float]]":
        now = [1_000_000.0]

        def arm() -> int:
            now[0] *= 1.01
            return int(now[0])

        mixed = noise.pairs_of(arm, arm, 160, np.random.default_rng(2))
        now[0] = 1_000_000.0
        fixed = [-float(np.log(arm() / arm())) for _ in range(160)]
        return mixed, fixed

    mixed, fixed = drifting()
    i, j = noise.interval(mixed, 0.05), noise.interval(fixed, 0.05)
    assert i.low <= 0 <= i.high and not noise.slower(i, 0.02)
    assert j.low > 0.009


# Keeping


def test_gpu_samples_are_discarded_by_clock_and_reason() -> None:
    mhz = np.full(20, 1980.0)
    mhz[3] = 1755  # dropped without a reason given
    reasons = [0] * 20
    reasons[5] = 0x40  # hardware thermal
    reasons[6] = 0x04  # power cap at full clock: how a loaded GPU runs
    reasons[7] = 0x01 | 0x02  # idle, clocks set by an application
    mhz[8] = np.nan  # a reading that failed proves nothing
    kept = noise.keep(noise.throttled_gpu(mhz, reasons))
    assert np.flatnonzero(~kept.mask).tolist() == [3, 5, 8] and kept.discarded == 3 and kept.believed
    assert not noise.keep(noise.throttled_gpu(mhz, [0x80] * 20)).believed


def test_cpu_samples_are_discarded_by_the_probe_alone() -> None:
    rng = np.random.default_rng(0)
    probe = 1000 * (1 + 0.02 * rng.random(200))
    probe[::10] *= 1.5
    assert np.array_equal(np.flatnonzero(noise.throttled_cpu(probe)), np.arange(0, 200, 10))
    busy = noise.keep(noise.throttled_cpu(np.r_[np.full(30, 1000.0), np.full(70, 2000.0)]))
    assert busy.discarded == 70 and not busy.believed
    assert not noise.keep(noise.throttled_cpu([])).believed


def test_discarding_does_not_bend_the_result() -> None:
    """Times that go with the probe are thinned, times that do not keep their distribution: the rule never looks at the time."""
    rng = np.random.default_rng(3)
    times, probe = rng.exponential(1.0, 20_000), 1000 * (1 + 0.3 * (rng.random(20_000) < 0.2))
    kept = noise.keep(noise.throttled_cpu(probe))
    assert abs(times[kept.mask].mean() - 1.0) < 0.03 and 3_500 < kept.discarded < 4_500


def test_steady_steps() -> None:
    sessions, profiled = [0] * 6 + [1] * 5, [0, 0, 0, 0, 1, 0] + [0] * 5
    assert np.flatnonzero(noise.steady(sessions, profiled)).tolist() == [3, 5, 9, 10]
    assert noise.steady([], []).size == 0 and not noise.steady([0, 1, 2], [0, 0, 0]).any()


# Saying


@pytest.mark.parametrize("draw", [lambda r, n: r.standard_normal(n), lambda r, n: r.standard_cauchy(n),
                                  lambda r, n: r.exponential(1, n) - np.log(2)])
def test_the_interval_covers_the_median_of_any_distribution(draw: object) -> None:
    rng, missed = np.random.default_rng(4), 0
    for _ in range(1000):
        i = noise.interval((0.01 * draw(rng, 40)).tolist(), 0.05)  # type: ignore[operator]
        missed += not (i.low <= 0 <= i.high)
    assert noise.wilson(missed, 1000)[0] <= 0.05


def test_error_is_split_over_rounds_and_family() -> None:
    assert noise.share(0.06, rounds=3, family=2) == pytest.approx(0.01)
    one, many = noise.rank(40, noise.share(0.05)), noise.rank(40, noise.share(0.05, rounds=3, family=10))
    assert many < one

    def outside(k: int) -> float:
        return 2 * sum(comb(40, i) for i in range(k)) / 2.0**40

    assert outside(one) <= 0.05 < outside(one + 1)


@pytest.mark.parametrize("line", [0.02, 0.10])
def test_the_line_decides(line: float) -> None:
    def go(true: float, seed: int, again: float | None = None) -> str:
        rng = np.random.default_rng(seed)

        def draw(n: int) -> list[float]:
            return (np.log1p(true) + 0.005 * rng.standard_normal(n)).tolist()

        second = noise.interval([float(np.log1p(true if again is None else again))] * 160, 0.01)
        return noise.decide(draw, lambda: second, line).verdict

    assert [go(line + 0.03, s) for s in range(5)] == [noise.FAIL] * 5
    assert [go(line - 0.015, s) for s in range(5)] == [noise.PASS] * 5
    assert go(line + 0.03, 9, again=0.0) == noise.AMBIGUOUS


def test_quantiles_of_t() -> None:
    for p, df, known in ((0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 5, 2.57058), (0.995, 15, 2.94671), (0.9995, 19, 3.88341),
                         (0.9995, 18, 3.92165)):  # printed tables
        assert noise.quantile(p, df) == pytest.approx(known, rel=1e-5)
    # Of the normal distribution from so many on, to these places; it takes as long as there are degrees of freedom.
    assert noise.quantile(0.9999, 10**4) == pytest.approx(3.719, abs=2e-3)
    assert (1 + erf(noise.quantile(0.9, 10**5) / sqrt(2))) / 2 == pytest.approx(0.9, abs=1e-5)


def test_blocks_are_medians_of_stretches() -> None:
    series = np.repeat(np.arange(16.0), 30)
    series[::31] = 1e9  # spikes
    assert np.array_equal(noise.blocks(series), np.arange(16.0))
    assert noise.blocks([3.0, 1.0]).tolist() == [3.0, 1.0] and noise.blocks([]).size == 0


def _ar(n: int, rho: float, rng: np.random.Generator) -> np.ndarray:
    x, out = rng.standard_normal(), np.empty(n)
    for i, e in enumerate(rng.standard_normal(n) * sqrt(1 - rho**2)):
        x = out[i] = rho * x + e
    return out


@pytest.mark.parametrize("rho", [0.0, 0.8, 0.95])
def test_series_with_a_memory_are_not_trusted_too_much(rho: float) -> None:
    """Two equal AR(1) series of 480 steps: at level 5 % the interval misses 0 in about 5 %, where single steps taken for independent
    would miss it in most."""
    rng, missed, naive = np.random.default_rng(5), 0, 0
    for _ in range(400):
        a, b = 10 + 0.05 * _ar(480, rho, rng), 10 + 0.05 * _ar(480, rho, rng)
        i = noise.shift(np.log(noise.blocks(a)), np.log(noise.blocks(b)), 0.05)
        missed += not (i.low <= 0 <= i.high)
        naive += abs(a.mean() - b.mean()) > 1.96 * sqrt((a.var() + b.var()) / 480)
    assert noise.wilson(missed, 400)[0] <= (0.05 if rho < 0.9 else 0.08)
    assert naive > 120 or rho == 0.0


def test_a_burst_spoils_a_few_blocks_and_not_the_estimate() -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.normal(1.0, 0.01, 480) for _ in range(2))
    b[100:160] *= 3
    i = noise.shift(np.log(noise.blocks(a)), np.log(noise.blocks(b)), 0.01)
    assert abs(i.estimate) < 0.005 and i.high < 0.02


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=0, max_size=40), st.lists(st.floats(-1, 1), min_size=0, max_size=40), st.floats(-0.3, 0.3))
def test_intervals_are_in_order_and_turn_round(a: list[float], b: list[float], taken: float) -> None:
    i = noise.shift(a, b, 0.05, taken=taken)
    if min(len(a), len(b)) < 4:
        assert i.low == -1.0 and i.high == np.inf
        return
    assert i.low <= i.estimate <= i.high
    j = noise.shift(b, a, 0.05, taken=-taken)
    assert (1 + i.estimate) * (1 + j.estimate) == pytest.approx(1)
    assert (1 + i.low) * (1 + j.high) == pytest.approx(1)
    wider = noise.shift(a, b, 0.01, taken=taken, square=0.01)
    assert wider.low <= i.low and wider.high >= i.high


def test_slower_needs_both_an_effect_and_its_size() -> None:
    assert noise.slower(noise.Interval(0.001, 0.03, 0.06, 40), 0.02)
    assert not noise.slower(noise.Interval(-0.001, 0.03, 0.06, 40), 0.02)  # may be nothing
    assert not noise.slower(noise.Interval(0.001, 0.01, 0.06, 40), 0.02)  # may be little
    assert not noise.slower(noise.Interval(np.nan, np.nan, np.nan, 40), 0.02)
