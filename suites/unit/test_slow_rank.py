"""Which rank is named slow: the stated rate of false alarms and the power, measured on made-up runs with the noise of real machines."""

from pathlib import Path
from typing import Any

import compare_runs
import made_runs
import numpy as np
import pytest

from alpha.profile import noise
from alpha.profile.compare import LEAST_STEPS, SLOWER, UNDECIDED
from alpha.profile.slow_rank import OWN, standings
from alpha.report import runs as reading
from alpha.report import views

TRIALS = 150


def own(rng: np.random.Generator, ranks: int, **how: Any) -> np.ndarray:
    """f64[ranks, steps]: own times of the steady steps of a made-up run."""
    t = {k: np.asarray(v) for k, v in compare_runs.made(rng, ranks=ranks, **how).timing.items()}
    mine = [np.flatnonzero(t["rank"] == r) for r in range(ranks)]
    mine = [i[noise.steady(t["session"][i], t["profiled"][i])] for i in mine]
    return np.array([np.sum([t[f"{p}_ns"][i] for p in OWN], axis=0) for i in mine], np.float64)


def named(times: np.ndarray) -> list[int]:
    return [s.rank for s in standings(range(len(times)), times) if s.verdict == SLOWER]


@pytest.mark.parametrize("ranks, how", [(2, {}), (4, {}), (2, {"level": 6.0}), (4, {"level": 6.0}), (2, {"steps": 100})])
def test_no_rank_is_named_more_often_than_stated(ranks: int, how: dict[str, Any]) -> None:
    """`level` 6: so much noise that an estimate alone would often reach the line."""
    rng = np.random.default_rng(ranks)
    drawn = [own(rng, ranks, **how) for _ in range(TRIALS)]
    alarms = sum(bool(named(times)) for times in drawn)
    assert noise.wilson(alarms, TRIALS)[0] <= noise.ALPHA, alarms
    if "level" in how:
        estimates = [max(s.apart.estimate for s in standings(range(ranks), times)) for times in drawn]
        assert sum(x >= noise.INTEREST for x in estimates) > 3 * max(alarms, noise.ALPHA * TRIALS), "these runs could not be wrong"


@pytest.mark.parametrize("ranks, slow", [(2, 1), (4, 3), (8, 0)])
def test_a_rank_that_is_5_percent_slower_is_named(ranks: int, slow: int) -> None:
    rng = np.random.default_rng(ranks)
    found = [named(own(rng, ranks, slow={f"rank {slow}": 1.05})) for _ in range(30)]
    assert sum(f == [slow] for f in found) >= 27, found


def test_a_rank_is_named_for_what_stays_in_both_halves_of_a_run() -> None:
    """1.8 % slower in one half and 2.6 % in the other is as much as matters in all, but not in each half: that may pass by itself."""
    for halves, found in (((1.018, 1.026), []), ((1.026, 1.018), []), ((1.022, 1.026), [1])):
        rng = np.random.default_rng(3)
        times = 1e6 * np.exp(0.002 * rng.standard_normal((4, 1600)))
        times[1] *= np.repeat(halves, 800)
        (mine,) = (s for s in standings(range(4), times) if s.rank == 1)
        assert named(times) == found, (halves, mine)
        assert mine.apart.estimate > noise.INTEREST and mine.apart.low > 0, "this run says nothing of halves"


def test_few_steps_name_nobody_and_one_rank_has_nobody_beside_it() -> None:
    rng = np.random.default_rng(1)
    short = own(rng, 2, steps=60, slow={"rank 1": 2.0})
    assert short.shape[1] < LEAST_STEPS and [s.verdict for s in standings((0, 1), short)] == [UNDECIDED] * 2
    assert standings((0,), short[:1]) == [] == standings((0, 1), short[:, :0])


def test_a_report_names_the_slow_rank(tmp_path: Path) -> None:
    slow = views.ranks(reading.load(made_runs.make(tmp_path / "slow", steps=300, ranks=4, slow={"rank:2": 1.05})))
    assert slow["sentence"].startswith("rank 2 is slower than the others by +") and [r["verdict"] for r in slow["rows"]].count(SLOWER) == 1
    even = views.ranks(reading.load(made_runs.make(tmp_path / "even", steps=300, ranks=4)))
    assert even["sentence"].startswith("No rank is slower than the others") and "5% of all runs" in even["sentence"]
    assert views.ranks(reading.load(made_runs.make(tmp_path / "one", steps=30)))["why"] == "one rank has nobody beside it"


def test_efficiency_has_an_interval(tmp_path: Path) -> None:
    """Two ranks at 1.8 times the speed of one: 90 % of ideal, and the interval says how well that is known."""
    runs = [reading.load(made_runs.make(tmp_path / f"r{n}", steps=400, seed=n, ranks=n, speed_up=s, noise=0.02))
            for n, s in ((1, 1.0), (2, 1.8))]
    one, two = views.scaling(runs)["rows"]
    assert one["efficiency"] == 1.0 and one["low"] is None
    assert two["low"] < two["efficiency"] < two["high"] and two["high"] - two["low"] < 0.02
