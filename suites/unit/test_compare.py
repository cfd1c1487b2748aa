"""Two runs compared: what is slower is named, what is not is not, and runs that cannot be compared are refused."""

import json
import sqlite3
from pathlib import Path

import compare_runs
import made_runs
import numpy as np
import pytest
from compare_runs import NULL, PUBLISHED, SLOWED, made, tally

from alpha.errors import CorruptError, InputError
from alpha.profile import compare, noise
from alpha.profile.compare import FASTER, SAME, SLOWER, UNDECIDED, Comparison
from alpha.profile.known import known

FRESH = int(np.random.SeedSequence().generate_state(1)[0])
"""Another seed on every run: the published rates must hold for noise that nobody has seen."""


def verdicts(c: Comparison, kind: str) -> dict[str, str]:
    return {r.name: r.verdict for r in c.rows if r.kind == kind}


# What the table promises --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> dict:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_the_published_table_is_of_this_procedure(published: dict) -> None:
    assert published["procedure"] == compare_runs.procedure(), "run suites/support/compare_runs.py again"
    assert set(published["null"]) == set(NULL) and set(published["slowed"]) == set(SLOWED)
    assert all(row["trials"] >= 400 for part in ("null", "slowed") for row in published[part].values())


def test_false_alarms_and_power_as_promised(published: dict) -> None:
    for name, row in published["null"].items():
        assert row["alarm_rate"] <= noise.ALPHA, name
    for name in ("forward 5 %", "backward 5 %", "optimizer 5 %", "rank 3 of 4 5 %", "op of half the time 5 %", "step 5 %"):
        assert published["slowed"][name]["power"] >= 0.9, name
    assert published["slowed"]["rank 1 of 2 5 %"]["power"] >= 0.8
    for name, row in published["slowed"].items():  # a row that is slower accuses no innocent one; the weak conditions do it more often
        assert row["alarm_rate"] <= (0.12 if "twice the noise" in name or name == "rank 1 of 2 2 %" else 0.05), name
    assert published["slowed"]["forward 2 %"]["power"] >= 0.3  # a verdict needs an estimate of 2 % too: half would be the most


def test_an_innocent_rank_of_two_is_hardly_ever_accused() -> None:
    n = tally(60, FRESH, **SLOWED["rank 1 of 2 5 %"])  # type: ignore[arg-type]
    assert noise.wilson(int(n["alarms"]), 60)[0] <= 0.06 and noise.wilson(int(n["named"]), 60)[1] >= 0.8, (n, FRESH)


def test_two_ranks_judged_by_their_phases_accuse_the_innocent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the common shift of two ranks is taken between them, and what is named need not have moved as measured."""
    monkeypatch.setattr(compare, "_of_two", lambda references, interest: compare._common(references, None, interest))
    monkeypatch.setattr(compare, "LEAST_RAW", 0.0)
    monkeypatch.setattr(compare, "_shorth", lambda ordered: float(np.median(ordered)))
    n = tally(60, 5, **SLOWED["rank 1 of 2 5 %"])  # type: ignore[arg-type]
    assert n["alarms"] >= 12  # a fifth and more


def test_the_closest_majority_does_not_see_the_one_that_moved() -> None:
    assert compare._shorth(np.array([0.0, 0.01, 0.05])) == pytest.approx(0.005)
    assert compare._shorth(np.array([-0.08, 0.0, 0.01])) == pytest.approx(0.005)
    assert compare._shorth(np.array([0.0, 0.0, 0.0, 0.0, 0.05, 0.05])) == 0.0


def test_what_moved_only_because_of_what_was_taken_out_is_not_named() -> None:
    """A row that stood still beside others that went 3 % slower: nobody knows whether the machine did, unless its own clock says so."""
    still = [1e6 * (1 + 1e-3 * np.random.default_rng(i).standard_normal(16)) for i in range(2)]
    row = compare._Todo("phase", "x", still[0], still[1], 0.3)
    for cause, verdict, reason in (("unknown", UNDECIDED, compare.TAKEN), ("machine", FASTER, "")):
        common = compare._Shift({}, np.log1p(0.03), 0.0, compare.Common(0.03, SLOWER, cause, 0.03, None, ""))
        found = compare._judge(row, 0.01, common, noise.INTEREST, True)
        assert (found.verdict, found.reason) == (verdict, reason)


# Every verdict with its rates ---------------------------------------------------------------------------------------------------------


def test_every_row_prints_its_measured_rates(published: dict) -> None:
    c = compare.compare(made(1, ranks=2), made(2, ranks=2))
    assert {r.kind for r in c.rows} == {"step", "phase", "rank", "op"}
    for r in c.rows:
        assert r.known is not None and r.known.alarms_text() and r.known.power_text()
        if r.kind == "rank":
            null, slowed = published["null"]["ranks, 2"], published["slowed"]
            assert r.known.false_alarm == null["alarm_rate"]
            assert r.known.beside == max(slowed[f"rank 1 of 2 {x} %"]["alarm_rate"] for x in (2, 5))
            assert r.known.power == {"2%": slowed["rank 1 of 2 2 %"]["power"], "5%": slowed["rank 1 of 2 5 %"]["power"]}
    lines = c.text().splitlines()
    assert sum("false alarms" in line and "power" in line for line in lines) == len(c.rows)


def test_rates_of_another_procedure_or_of_quieter_runs_are_not_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planted: a constant is changed without measuring again; a run noisier than all that were measured; no table, or a damaged one."""
    quiet = known("phase", 0.01, compare.procedure())
    twice = known("phase", 0.03, compare.procedure())
    assert quiet.false_alarm is not None and twice.false_alarm is not None and twice.power["5%"] < quiet.power["5%"]
    assert known("phase", 0.2, compare.procedure()).alarms_text() == "not measured: noisier than the measured runs"
    assert known("phase", float("inf"), compare.procedure()).false_alarm is None
    monkeypatch.setattr(compare, "CLEARLY", 3.0)
    assert known("phase", 0.01, compare.procedure()).power_text() == "not measured since the procedure changed"
    monkeypatch.undo()
    assert known("phase", 0.01, compare.procedure(), tmp_path / "none.json").alarms_text().startswith("not measured")
    table = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    del table["null"]["phases"]
    (tmp_path / "half.json").write_text(json.dumps(table))
    (tmp_path / "torn.json").write_bytes(PUBLISHED.read_bytes()[:-40])
    for name in ("half.json", "torn.json"):
        with pytest.raises(CorruptError, match="damaged"):
            known("phase", 0.01, compare.procedure(), tmp_path / name)


@pytest.mark.parametrize("name", ["phases", "phases, the machine 10 % slower", "ops", "ranks, 4"])
def test_false_alarms_on_a_fresh_seed(name: str) -> None:
    n = tally(24, FRESH, **NULL[name])  # type: ignore[arg-type]
    assert noise.wilson(n["alarms"], n["trials"])[0] <= noise.ALPHA, (n, FRESH)


@pytest.mark.parametrize("name", ["forward 5 %", "backward 5 %", "optimizer 5 %", "rank 3 of 4 5 %", "op of half the time 5 %"])
def test_power_on_a_fresh_seed(name: str) -> None:
    n = tally(16, FRESH, **SLOWED[name])  # type: ignore[arg-type]
    assert noise.wilson(n["named"], n["trials"])[1] >= 0.9, (n, FRESH)


# What is told -------------------------------------------------------------------------------------------------------------------------


def test_the_same_run_twice_is_the_same_everywhere() -> None:
    c = compare.compare(made(1, ranks=2), made(1, ranks=2))
    assert {r.verdict for r in c.rows if r.kind != "op"} == {SAME} and not c.differing()
    assert all(r.own.estimate == pytest.approx(0, abs=1e-12) for r in c.rows)
    assert c.common.shift == 0 and c.common.cause == "none" and c.notes == ()


def test_quiet_runs_of_one_seed_give_every_phase_same(tmp_path: Path) -> None:
    paths = [made_runs.make(tmp_path / f"r{i}", steps=600, seed=i, ranks=2) for i in range(2)]
    c = compare.compare(*(compare.read(p / "metrics.sqlite") for p in paths))
    assert {k: v for k, v in verdicts(c, "phase").items() if v != SAME and k not in ("eval", "checkpoint")} == {}
    assert set(verdicts(c, "rank").values()) == {SAME} == set(verdicts(c, "op").values())
    assert "SAME" in c.text() and "rank 1" in c.text() and "r1 against r0" in c.text()


@pytest.mark.parametrize(("slow", "kind", "name"), [({"backward": 1.05}, "phase", "backward"), ({"rank:1": 1.05}, "rank", "rank 1"),
                                                    ({"op:adamw": 1.05}, "op", "adamw"), ({"data_load": 1.3}, "phase", "data_load")])
def test_what_is_slowed_in_a_stored_run_is_named(tmp_path: Path, slow: dict[str, float], kind: str, name: str) -> None:
    a = made_runs.make(tmp_path / "a", steps=500, seed=1, ranks=4)
    b = made_runs.make(tmp_path / "b", steps=500, seed=2, ranks=4, slow=slow)
    there = compare.compare(compare.read(a / "metrics.sqlite"), compare.read(b / "metrics.sqlite"))
    back = compare.compare(compare.read(b / "metrics.sqlite"), compare.read(a / "metrics.sqlite"))
    for c, verdict in ((there, SLOWER), (back, FASTER)):
        rows = [r for r in c.differing() if r.kind == kind]
        assert [r.name.split(" f32")[0] for r in rows] == [name] and rows[0].verdict == verdict, c.text()
        low, estimate, high = rows[0].own.low, rows[0].own.estimate, rows[0].own.high
        assert low <= estimate <= high and rows[0].line >= noise.INTEREST


def test_ops_by_launch(tmp_path: Path) -> None:
    runs = [compare.read(made_runs.make(tmp_path / n, steps=300, seed=1, slow=s) / "metrics.sqlite")
            for n, s in (("a", {}), ("b", {"op:gelu": 1.2}))]
    slower = [r.name for r in compare.compare(*runs, by="launch").rows if r.kind == "op" and r.verdict == SLOWER]
    assert len(slower) == made_runs.LAYERS and all(n.startswith("micro_first@0 ") and n.endswith(" gelu") for n in slower)
    with pytest.raises(InputError, match="two ways"):
        compare.compare(*runs, by="layer")


# Machine or program -------------------------------------------------------------------------------------------------------------------


def test_a_slower_machine_is_common_and_nobody_stands_out() -> None:
    c = compare.compare(made(1, peaks=8), made(2, peaks=8, every=1.10))
    assert c.common.verdict == SLOWER and c.common.cause == "machine" and c.common.shift == pytest.approx(0.10, abs=0.03)
    assert c.common.taken == c.common.shift and c.common.peaks is not None and c.common.peaks.low > 0.05
    assert [r.name for r in c.rows if r.kind == "phase" and r.verdict in (SLOWER, FASTER)] == []
    assert all(r.raw.estimate > 0.05 for r in c.rows if r.name in ("forward", "backward", "step"))


def test_a_slower_program_on_an_equal_machine_stays_in() -> None:
    c = compare.compare(made(1, peaks=8), made(2, peaks=8, every=1.10, machine=(1.0, 1.0)))
    assert c.common.cause == "program" and c.common.taken == 0
    assert {verdicts(c, "phase")[p] for p in ("forward", "backward", "optimizer")} == {SLOWER} == set(verdicts(c, "step").values())


def test_without_the_machines_clock_the_cause_is_unknown() -> None:
    c = compare.compare(made(1), made(2, every=1.10))
    assert c.common.cause == "unknown" and c.common.peaks is None and "cannot be told apart" in c.common.reason


def test_one_slow_phase_beside_a_slower_machine() -> None:
    c = compare.compare(made(3, peaks=8, level=0.5), made(4, peaks=8, level=0.5, every=1.08, slow={"optimizer": 1.06}))
    assert c.common.cause == "machine" and c.common.shift == pytest.approx(0.08, abs=0.02)
    assert [r.name for r in c.differing() if r.kind == "phase"] == ["optimizer"], c.text()


def test_two_slow_phases_of_three_blame_not_the_third() -> None:
    """Most computing rows moved, but not all: without the machine's clock no more is taken out than could name a row by itself."""
    c = compare.compare(made(3, level=0.3), made(4, level=0.3, slow={"forward": 1.08, "backward": 1.08}))
    found = verdicts(c, "phase")
    assert found["forward"] == found["backward"] == SLOWER and found["optimizer"] != FASTER, c.text()
    assert abs(c.common.taken) <= compare.LEAST_PART * noise.INTEREST


def test_no_row_enters_its_own_reference() -> None:
    rng = np.random.default_rng(0)
    logs = rng.standard_normal((3, 16))
    other = logs.copy()
    other[1] = rng.standard_normal(16)
    one, two = compare._wobble(logs, ["a", "b", "c"]), compare._wobble(other, ["a", "b", "c"])
    assert np.array_equal(one["b"], two["b"]) and not np.array_equal(one["a"], two["a"]) and not np.array_equal(one[""], two[""])
    both = compare._wobble(logs, ["x", "x", "y"])  # rows of one name go together
    assert np.array_equal(both["x"], logs[2] - np.median(logs[2]))
    assert not compare._wobble(logs[:1], ["x"])["x"].any()


def test_a_slow_rank_is_no_slower_machine() -> None:
    c = compare.compare(made(3, ranks=4), made(4, ranks=4, slow={"rank 2": 1.05}))
    assert [r.name for r in c.differing() if r.kind == "rank"] == ["rank 2"]


def test_small_rows_alarm_nobody() -> None:
    c = compare.compare(made(1), made(2, slow={"grad_clip": 1.5}))
    assert verdicts(c, "phase")["grad_clip"] == SAME  # 10 us in a step of 100 ms
    row = next(r for r in c.rows if r.name == "grad_clip")
    assert row.line > 1 and row.own.estimate == pytest.approx(0.5, abs=0.1)


def test_stalls_are_counted_and_move_no_typical_time() -> None:
    a, b = made(1, level=0.3), made(2, level=0.3)
    timing = {k: np.array(v) for k, v in b.timing.items()}
    timing["step_ns"][50::50] *= 10
    timing["backward_ns"][50::50] *= 10
    c = compare.compare(a, compare.Measured(b.name, b.metadata, timing, b.ops, b.peaks))
    assert c.stalls[1] >= c.stalls[0] + 8 and verdicts(c, "phase")["backward"] == SAME


# What cannot be compared, or not yet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["program", "flops_version", "machine", "hardware", "devices"])
def test_other_runs_are_refused_unless_asked(key: str) -> None:
    meta = {"hardware": "x", "devices": "1"}
    a, b = made(1, meta=meta), made(2, meta={**meta, key: "other"})
    with pytest.raises(InputError, match=key):
        compare.compare(a, b)
    c = compare.compare(a, b, anyway=True)
    assert len(c.notes) == 1 and key in c.notes[0] and "other" in c.text()


def test_a_run_that_does_not_say_what_it_was_is_refused() -> None:
    a, b = made(1), made(2)
    silent = compare.Measured("silent", {"machine": "m", "program": "p"}, b.timing, b.ops, b.peaks)
    with pytest.raises(InputError, match="not recorded"):
        compare.compare(a, silent)
    with pytest.raises(InputError, match="not recorded"):
        compare.compare(silent, silent)


def test_ungated_runs_are_marked() -> None:
    c = compare.compare(made(1), made(1, meta={"status": "UNGATED"}))
    assert any("UNGATED" in n for n in c.notes)


def test_other_ranks_are_refused_unless_asked() -> None:
    a, b = made(1, ranks=2), made(2, ranks=1)
    with pytest.raises(InputError, match="ranks"):
        compare.compare(a, b)
    assert any("ranks" in n for n in compare.compare(a, b, anyway=True).notes)


def test_a_short_run_is_undecided() -> None:
    c = compare.compare(made(1, steps=40), made(2, steps=40, slow={"forward": 2.0}))
    assert set(verdicts(c, "phase").values()) == {UNDECIDED} and "fewer than" in c.rows[0].reason


def test_phases_that_only_one_run_has_are_undecided(tmp_path: Path) -> None:
    runs = [made_runs.make(tmp_path / n, steps=s, seed=1) for n, s in (("a", 200), ("b", 600))]  # the first evaluation is after step 250
    c = compare.compare(*(compare.read(r / "metrics.sqlite") for r in runs))
    row = next(r for r in c.rows if r.name == "eval")
    assert row.verdict == UNDECIDED and "only in one" in row.reason


def test_warm_up_and_profiled_steps_are_left_out() -> None:
    a, b = made(1), made(1)
    timing = {k: np.array(v) for k, v in b.timing.items()}
    out = (timing["profiled"] == 1) | (timing["step"] < noise.WARM_UP)
    timing["forward_ns"][out] *= 50
    c = compare.compare(a, compare.Measured(b.name, b.metadata, timing, {}, {}))
    assert c.steps == (477, 477) and verdicts(c, "phase")["forward"] == SAME


def test_rows_in_any_order_give_the_same(tmp_path: Path) -> None:
    a, b = made(1, ranks=2), made(2, ranks=2, slow={"forward": 1.05})
    mixed = np.random.default_rng(0).permutation(len(b.timing["step"]))
    shuffled = compare.Measured(b.name, b.metadata, {k: np.asarray(v)[mixed].tolist() for k, v in b.timing.items()}, b.ops, b.peaks)
    assert compare.compare(a, b) == compare.compare(a, shuffled)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no metrics"):
        compare.read(tmp_path / "metrics.sqlite")
    old = made_runs.make(tmp_path / "old", steps=20, version=1)
    with pytest.raises(InputError, match="without timing"):
        compare.read(old / "metrics.sqlite")
    empty = made_runs.make(tmp_path / "empty", steps=0)
    run = compare.read(empty / "metrics.sqlite")
    with pytest.raises(InputError, match="no timed step"):
        compare.compare(run, run)
    db = sqlite3.connect(empty / "metrics.sqlite")
    db.execute("DROP TABLE op_profile")
    db.close()
    with pytest.raises(CorruptError):
        compare.read(empty / "metrics.sqlite")
