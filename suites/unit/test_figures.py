"""Figures against numbers worked out by hand, from facts and from the rows of made runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import made_runs
import numpy as np
import pytest

from alpha.errors import InputError
from alpha.profile.figures import BY_KEY, FAIL, PASS, Facts, Figure, ceiling_ns, judge, shown, targets
from alpha.profile.intervals import gaps_of, uncovered_ns, union_ns
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.report import runs as reading
from alpha.report import views
from alpha.report.facts import facts, steps_of, timing
from alpha.report.series import buckets

MS = 1_000_000


def by_key(figures: list[Figure]) -> dict[str, Figure]:
    return {f.key: f for f in figures}


def hand_facts(**changed: object) -> Facts:
    """Two steady steps of 100 tokens in 10 ms each on 2 devices of 1 GFLOP/s and 1 GB/s."""
    phases = {p: np.zeros(2, np.int64) for p in PHASES}
    phases |= {"forward": np.array([3, 3]) * MS, "backward": np.array([5, 5]) * MS, "optimizer": np.array([1, 1]) * MS,
               "comm": np.array([MS // 2] * 2), "idle": np.array([MS // 4] * 2),
               "eval": np.array([0, 30]) * MS}
    given = {
        "devices": 2, "flops_per_token": 1e5, "executed_flops": 16e6, "peak_flops": 1e9, "peak_bandwidth": 1e9, "steady_tokens": 200,
        "steady_ns": 20 * MS, "steady_steps": 2, "step_ns": np.array([10, 10]) * MS, "wall_ns": np.array([10, 40]) * MS, "phases": phases,
        "overlapped": {p: np.array([MS, MS]) if p == "comm" else np.zeros(2, np.int64) for p in OVERLAPPING},
        "unexplained_ns": np.array([MS // 4] * 2), "steady": np.array([True, True]), "useful_ns": 20 * MS, "session_ns": 100 * MS,
        "workflow_ns": 100 * MS, "tokens": 200,
        "profiled_ns": 12 * MS, "profiled_mean_ns": 12.0 * MS, "steady_mean_ns": 10.0 * MS,
        "save_ns": np.array([2, 3, 7]) * MS, "save_foretold_ns": 2.5 * MS,
        "op_device_ns": np.array([4, 2]) * MS, "op_flops": np.array([3_000_000, 1_000]), "op_nbytes": np.array([1_000_000, 1_500_000]),
        "op_enqueue_ns": np.array([100_000, 200_000]), "op_wait_ns": np.array([300_000, 0]),
    }  # fmt: skip
    return Facts(**{**given, **changed})  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    found = by_key(judge(hand_facts()))
    expected = {
        "tokens_per_second": 10_000.0,  # 200 tokens in 20 ms
        "tokens_per_second_device": 5_000.0,
        "workflow_tokens_per_second": 2_000.0,  # 200 tokens in 100 ms
        "achieved_flops": 1e9,  # 10,000 tokens/s x 1e5
        "mfu": 0.5,  # 1e9 of 2 x 1e9
        "hfu": 0.8,  # 2 x 16e6 in 20 ms = 1.6e9
        "kernel_active": 0.9,  # 18 of 20 ms
        "bubble": 0.025, "comm_exposed": 0.05, "comm_total": 0.15,
        "bandwidth_bound": 0.75,  # only the second launch: 1.5 MB in 2 ms
        "bandwidth": 2.5e6 / 6e-3 / 1e9,
        "launch_overhead": 0.05,  # 0.6 of 12 ms
        "goodput": 0.2, "unexplained": 0.01,  # 0.5 of 50 ms
        "save_stall": 0.3, "save_stall_foretold": 0.25,  # 3 and 2.5 of 10 ms
        "instrumented_slowdown": 0.2,
    }  # fmt: skip
    assert set(expected) == set(found)
    for key, value in expected.items():
        assert found[key].value == pytest.approx(value, rel=1e-12), key
    verdicts = {k: f.verdict for k, f in found.items() if f.verdict}
    assert verdicts == {"kernel_active": FAIL, "bubble": PASS, "comm_exposed": PASS, "bandwidth_bound": PASS, "unexplained": PASS}
    assert all(f.reason == "no target" for f in found.values() if f.target is None)


@pytest.mark.parametrize(("changed", "key", "output"), [
    ({"steady_ns": 0, "steady_steps": 0, "steady_tokens": 0}, "mfu", "no steady step"),
    ({"peak_flops": None}, "mfu", "no peak"),
    ({"peak_flops": 1e8}, "mfu", "more than there is"),
    ({"executed_flops": None}, "hfu", "no executed FLOPs"),
    ({"devices": None}, "tokens_per_second_device", "how many devices"),
    ({"op_device_ns": np.zeros(0, np.int64)}, "bandwidth", "no profiled step"),
    ({"op_nbytes": np.array([1, 0])}, "bandwidth_bound", "no launch is bound"),
    ({"peak_bandwidth": None}, "bandwidth_bound", "no peak bandwidth"),
    ({"backend": "cuda"}, "launch_overhead", "timeline"),
    ({"session_ns": 10 * MS}, "goodput", "more than there is"),
    ({"save_ns": np.zeros(0, np.int64)}, "save_stall", "no save"),
    ({"steady_mean_ns": None}, "save_stall", "steady"),
    ({"save_foretold_ns": None}, "save_stall_foretold", "no save was rehearsed"),
    ({"steady_mean_ns": None}, "save_stall_foretold", "steady"),
    ({"step_ns": np.zeros(2, np.int64)}, "bubble", "no unprofiled step"),
    ({"why": "nothing measured"}, "tokens_per_second", "nothing measured"),
])
def test_a_figure_that_cannot_be_computed_says_why(changed: dict, key: str, output: str) -> None:
    figure = by_key(judge(hand_facts(**changed)))[key]
    assert figure.value is None and figure.verdict is None and figure.text == "—"
    assert output in figure.reason


def on_device(*, slowdown: tuple[float, ...] = (0.01, 0.03), **changed: object) -> Facts:
    """Two profiled steps of 10 and 20 ms whose kernels were timed: 9.5 and 10 ms busy, 0.25 and 8 ms idle."""
    given = {"backend": "cuda", "kernel_step_ns": np.array([10, 20]) * MS, "kernel_busy_ns": np.array([9.5 * MS, 10 * MS]).astype(np.int64),
             "kernel_idle_ns": np.array([MS // 4, 8 * MS]), "kernel_slowdown": np.array(slowdown)}
    return hand_facts(**{**given, **changed})


def test_gaps_of_a_device_come_from_its_kernels() -> None:
    """The steps that the instrument slowed down stay out; where it slowed down all of them the figures are shown and not judged."""
    found = by_key(judge(on_device()))
    assert (found["kernel_active"].value, found["bubble"].value) == (0.95, 0.025)
    assert (found["kernel_active"].verdict, found["bubble"].verdict) == (PASS, PASS)
    for slowdown, output in (((0.021, 0.5), "perturbed, not judged: the instrument slowed the profiled steps down by 2.10 % or more"),
                             ((0.5, 0.03), "by 3.00 % or more"), ((np.nan, np.nan), "too few steady neighbours")):
        found = by_key(judge(on_device(slowdown=slowdown)))
        for key, value in (("kernel_active", 19.5 / 30), ("bubble", 8.25 / 30)):
            assert found[key].value == pytest.approx(value) and found[key].verdict is None and output in found[key].reason
    wide = by_key(judge(on_device(kernel_idle_ns=np.array([2 * MS, 8 * MS]))))
    assert wide["bubble"].verdict == FAIL, "a fifth of the step idle"


def test_what_was_not_measured_says_so_and_is_not_judged() -> None:
    nothing = np.zeros(0, np.int64)
    none = {"kernel_step_ns": nothing, "kernel_busy_ns": nothing, "kernel_idle_ns": nothing, "kernel_slowdown": np.zeros(0)}
    for more, output in (({}, "no profiled step in which each kernel was timed"), ({"kernel_why": "not measured: no CUPTI"}, "no CUPTI")):
        found = by_key(judge(on_device(**{**none, **more})))
        for key in ("kernel_active", "bubble"):
            assert found[key].value is None and found[key].verdict is None
            assert "not measured" in found[key].reason and output in found[key].reason
    found = by_key(judge(hand_facts(devices=1), targets({"comm_total": 0.5}, "asked for")))
    for key in ("comm_exposed", "comm_total"):
        assert found[key].value is None and found[key].verdict is None and found[key].reason.startswith("not measured: one device")


def test_exposed_communication_is_a_share_of_the_rank_s_own_interval() -> None:
    """On a machine with too much to do a rank waits longer for the others' hashes, between two steps, than its step took."""
    phases = {**hand_facts().phases, "comm": np.array([25 * MS, 1 * MS]), "eval": np.array([0, 20 * MS])}
    found = by_key(judge(hand_facts(phases=phases, wall_ns=np.array([32, 32]) * MS)))
    assert found["comm_exposed"].value == pytest.approx(26 / (32 + 12))
    assert by_key(judge(hand_facts(phases={**phases, "comm": np.array([32, 12]) * MS}, wall_ns=np.array([32, 32]) * MS)))[
        "comm_exposed"].value == pytest.approx(1)


def test_targets() -> None:
    own = targets({"mfu": 0.5, "bubble": 0.02, "unexplained": 0.01}, "asked for")
    found = by_key(judge(hand_facts(), own))
    assert (found["mfu"].verdict, found["bubble"].verdict, found["unexplained"].verdict) == (PASS, FAIL, PASS)
    assert by_key(judge(hand_facts(), targets({"mfu": 0.5001}, "x")))["mfu"].verdict == FAIL
    assert by_key(judge(hand_facts(), targets({"comm_total": 0.2}, "x")))["comm_total"].verdict == PASS  # less is better there
    with pytest.raises(InputError, match="no figure has this name"):
        targets({"mfuu": 0.5}, "x")
    with pytest.raises(InputError, match="a number"):
        targets({"mfu": float("nan")}, "x")


def test_rooflines_and_intervals_by_hand() -> None:
    assert ceiling_ns(np.array([2e9, 10.0]), np.array([1e3, 4e9]), 1e9, 2e9).tolist() == [2e9, 2e9]
    host, device = (np.array([0, 5, 30]), np.array([10, 20, 40])), (np.array([8, 18, 35]), np.array([12, 25, 36]))
    assert uncovered_ns(*host, *device) == 8 + 6 + 5 + 4  # 0-8, 12-18, 30-35, 36-40
    none = np.zeros(0, np.int64)
    assert uncovered_ns(none, none, *device) == 0 and uncovered_ns(*host, none, none) == 30
    assert (shown(0.3322, "share"), shown(391e9, "FLOP/s"), shown(34.31e9, "bytes/s"), shown(12.5, "s")) == (
        "33.22 %", "391 GFLOP/s", "34.31 GB/s", "12.5 s")  # fmt: skip


def test_launch_overhead_of_a_device_counts_only_uncovered_enqueue(tmp_path: Path) -> None:
    run = made_runs.make(tmp_path / "gpu", steps=10, samples=1, timeline=0, backend="cuda")
    step = sqlite3.connect(run / "metrics.sqlite")
    at, length = step.execute("SELECT step, step_ns FROM step_timing WHERE profiled = 1").fetchone()
    step.close()
    for track, phase, start, stop in (("host enqueue", "forward", 0, 10), ("stream 0", "forward", 4, 100),
                                      ("host enqueue", "host_to_device", 90, 103), ("host enqueue", "eval", 104, 900)):
        made_runs.edit(run, "INSERT INTO gpu_timeline VALUES (?, 0, ?, 'x', ?, ?, ?, NULL)", (at, track, phase, start, stop))
    figure = next(f for f in judge(facts(reading.load(run))) if f.key == "launch_overhead")
    assert figure.value == (4 + 3) / length


def test_a_run_of_a_device_says_what_timed_its_kernels(tmp_path: Path) -> None:
    """From rows to figures: two profiled steps of three are timed, one of them 1.5 % slower than its neighbours; without any the run's own
    reason stands in the figure."""
    path = made_runs.make(tmp_path / "gpu", steps=40, samples=3, noise=0.0, backend="cuda",
                          metadata={"devices": 1, "kernel_times": "CUPTI"})  # fmt: skip
    run = reading.load(path)
    steady = int(np.median(timing(run).step_ns[timing(run).steady]))
    first, second, _ = sorted(set(run.step_timing.step[run.step_timing.profiled == 1]))
    made_runs.edit(path, "UPDATE step_timing SET step_ns = ? WHERE step = ?", (round(1.015 * steady), first))
    for step in (first, second):
        made_runs.edit(path, "INSERT INTO kernel_times VALUES (?, 0, 40, ?, 7, ?, 9, 3, 2, 5, 2, 10, 5, 1, 100, 4, -50, 30, 900)",
                       (step, round(0.96 * steady), round(0.05 * steady)))
    run = reading.load(path)
    found, view = by_key(judge(facts(run))), views.profiled(run)
    assert found["kernel_active"].value == pytest.approx(0.96 / 1.015, rel=1e-6) and found["kernel_active"].verdict == PASS
    assert found["bubble"].value == pytest.approx(0.05 / 1.015, rel=1e-6) and found["bubble"].verdict == PASS
    assert [r["judged"] for r in view["rows"]] == [True, False, False] and [r["kernels"] for r in view["rows"]] == [40, 40, None]
    assert view["rows"][0]["slowdown"] == pytest.approx(0.015, rel=1e-4) and view["measured"] == "CUPTI"
    assert view["rows"][0]["copy_overlapped"] == 0.5
    none = made_runs.make(tmp_path / "none", steps=20, samples=2, backend="cuda", metadata={"kernel_times": "not measured: no CUPTI"})
    figure = by_key(judge(facts(reading.load(none))))["bubble"]
    assert figure.value is None and figure.verdict is None and figure.reason == "not measured: no CUPTI"


def test_rates_leave_out_warm_up_and_profiled_steps(tmp_path: Path) -> None:
    run = reading.load(made_runs.make(tmp_path / "r", steps=40, samples=3, resumes=(20,), ranks=2))
    rows = timing(run)
    out = set(rows.step[~rows.steady])
    profiled = set(rows.step[rows.profiled == 1])
    assert profiled and out == {0, 1, 2, 20, 21, 22} | profiled
    slowest = rows[rows.steady].groupby("step").step_ns.max()
    found = by_key(judge(facts(run)))
    assert found["tokens_per_second"].value == pytest.approx(made_runs.TOKENS * len(slowest) / slowest.sum() * 1e9, rel=1e-12)
    assert found["mfu"].value == pytest.approx(found["tokens_per_second"].value * made_runs.FLOPS_PER_TOKEN / made_runs.PEAK_FLOPS / 2)
    late = rows[rows.steady]
    own = late.wall_ns - late.eval_ns - late.sample_gen_ns - late.checkpoint_ns
    for key, names in (("comm_exposed", ["comm_ns"]), ("comm_total", ["comm_ns", "comm_overlapped_ns"])):
        assert found[key].value == pytest.approx(late[names].to_numpy().sum() / own.sum(), rel=1e-12), key
    sessions = run.tables["sessions"]
    useful, lasted = (rows.step_ns - rows.checks_ns).sum(), (sessions.seen_ns - sessions.began_ns).sum()
    assert found["goodput"].value == pytest.approx(useful / lasted, rel=1e-12)
    longest = sum(max(s.seen_ns - s.began_ns for s in sessions.itertuples() if s.session == i) for i in (0, 1))
    assert found["workflow_tokens_per_second"].value == pytest.approx(40 * made_runs.TOKENS / longest * 1e9, rel=1e-12)


def test_a_save_s_stall_is_what_it_added_until_the_next_one(tmp_path: Path) -> None:
    """Two ranks, resumed at step 600: saves after 500 and 1000 steps, of which later steps paid a part; that of the last step pays none."""
    every = made_runs.SAVE_EVERY
    metadata = {"checkpoint_every": every, "save_foretold_ns": 2 * MS}
    path = made_runs.make(tmp_path / "r", steps=3 * every, resumes=(every + 100,), ranks=2, metadata=metadata)
    for step, ns in ((every - 2, 500), (every, 1000), (every + 50, 200), (every + 120, 10_000), (2 * every + 5, 300)):
        made_runs.edit(path, "UPDATE step_timing SET checkpoint_ns = checkpoint_ns + ?, unexplained_ns = unexplained_ns - ? WHERE step = ?",
                       (ns, ns, step))
    found = facts(reading.load(path))
    assert found.save_ns.tolist() == [made_runs.SAVE + 1200, made_runs.SAVE + 300] * 2
    assert by_key(judge(found))["save_stall_foretold"].value == pytest.approx(2 * MS / (found.steady_mean_ns or 0), rel=1e-12)


def test_checks_are_no_useful_time(tmp_path: Path) -> None:
    """Of the same steps, goodput falls by just the share of the wall time that was checks and no work."""
    path, took = made_runs.make(tmp_path / "r", steps=60, samples=2), MS
    quick = reading.load(path)
    made_runs.edit(path, "UPDATE step_timing SET checks_ns = checks_ns + ?, forward_ns = forward_ns - ? WHERE step % 10 = 0", (took, took))
    slow = reading.load(path)
    assert (timing(slow).step_ns == timing(quick).step_ns).all()
    (high, low), wall = (by_key(judge(facts(run)))["goodput"].value or 0.0 for run in (quick, slow)), facts(quick).session_ns
    assert high - low == pytest.approx(6 * took / wall, rel=1e-9) and low > 0


def test_a_refused_step_is_not_useful(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=30, samples=2)
    before = facts(reading.load(path))
    made_runs.edit(path, "UPDATE step_metrics SET finite = 0, loss = NULL WHERE step = 17")
    after = facts(reading.load(path))
    assert (after.steady_steps, after.tokens) == (before.steady_steps - 1, before.tokens - made_runs.TOKENS)
    assert after.useful_ns < before.useful_ns and after.session_ns == before.session_ns
    assert views.loss([reading.load(path)])["runs"][0]["refused"] == [17]


def test_the_waterfall_adds_up(tmp_path: Path) -> None:
    run_a = made_runs.make(tmp_path / "r", steps=600, seed=1)
    rows, found = timing(reading.load(run_a)), by_key(judge(facts(reading.load(run_a))))
    assert found["save_stall"].value == pytest.approx(made_runs.SAVE / rows.step_ns[rows.steady].mean(), rel=1e-12)
    view = views.waterfall(reading.load(run_a))
    assert [p["phase"] for p in view["phases"]] == [*PHASES, "unexplained"]
    assert sum(p["exclusive_ns"] for p in view["phases"]) == pytest.approx(view["wall_ns"], rel=1e-12)
    assert sum(p["share"] for p in view["phases"]) == pytest.approx(1.0, rel=1e-12)
    some = views.waterfall(reading.load(run_a), 100, 199)
    assert (some["first"], some["last"]) == (100, 199) and some["steps"] <= 100


def test_top_ops_by_hand(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=20, samples=2)
    made_runs.edit(path, "DELETE FROM op_profile")
    rows = [(4, "big", 2 * MS, 1_000_000_000, 1_000), (4, "big", 4 * MS, 1_000_000_000, 1_000), (4, "wide", 1 * MS, 10, 20_000_000),
            (19, "big", 6 * MS, 2_000_000_000, 2_000), (19, "wide", 3 * MS, 10, 20_000_000)]  # fmt: skip
    for i, (step, op, ns, flops, nbytes) in enumerate(rows):
        made_runs.edit(path, "INSERT INTO op_profile VALUES (?, 0, 'p', ?, ?, 'c', '', 'forward', 's', 'f32', 1, 10, ?, 20, ?, ?, 3)",
                       (step, i, op, ns, flops, nbytes))  # fmt: skip
    view = views.top_ops(reading.load(path))
    big, wide = view["ops"]
    assert (big["op"], big["device_ns"], big["runs"], big["dispatches"], big["bound"]) == ("big", 6.0 * MS, 1.5, 4.5, "compute")
    assert big["ceiling_ns"] == pytest.approx(2e9 / made_runs.PEAK_FLOPS * 1e9) and big["distance"] == pytest.approx(3.0)
    assert (wide["bound"], wide["share"]) == ("bandwidth", 4 / 16)
    assert wide["bandwidth"] == pytest.approx(40e6 / 4e-3) and wide["distance"] == pytest.approx(4.0)
    assert views.top_ops(reading.load(path), 1)["rest"] == {"ops": 1, "device_ns": 2.0 * MS, "share": 0.25}
    share = views.bandwidth([reading.load(path)])["runs"][0]
    assert share["x"] == [4, 19] and share["bound"] == pytest.approx([20e9, 20e6 / 3e-3]) and share["share"][0] == pytest.approx(0.5)


@pytest.mark.parametrize("until", [100, 60])
def test_a_run_resumed_on_fewer_ranks_stands_against_the_devices_that_its_steps_had(tmp_path: Path, until: int) -> None:
    path = made_runs.make(tmp_path / "r", steps=100, ranks=2, resumes=[60])
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db, db:
        for table in ("step_timing", "op_profile", "communication", "collectives", "calls", "data_waits", "memory", "gpu_timeline"):
            if db.execute("SELECT name FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                db.execute(f"DELETE FROM {table} WHERE step >= ? OR (step >= 60 AND rank = 1)", (until,))
        db.execute("DELETE FROM step_metrics WHERE step >= ?", (until,))
        db.execute("DELETE FROM sessions WHERE session = 1 AND rank = 1")
        db.execute("UPDATE run_metadata SET value = '1' WHERE key = 'devices'")
    run = reading.load(path)
    found, steady = by_key(judge(facts(run))), steps_of(run)
    of_devices = sum(int(ns) * (2 if step < 60 else 1) for step, ns in zip(steady.step, steady.step_ns))
    per_device = int(steady.tokens.sum()) / of_devices * 1e9
    assert found["tokens_per_second_device"].value == pytest.approx(per_device, rel=1e-12)
    assert found["mfu"].value == pytest.approx(per_device * (run.number("flops_per_token") or 0) / made_runs.PEAK_FLOPS, rel=1e-12)
    assert found["comm_exposed"].value is not None and any("2 and 1 ranks" in note for note in run.notes)
    drawn = views.utilisation([run])["runs"][0]["mfu"]["mean"]
    whole = steady.tokens.to_numpy() / steady.step_ns.to_numpy() * 1e9 * (run.number("flops_per_token") or 0) / made_runs.PEAK_FLOPS
    assert drawn == pytest.approx(whole / np.where(steady.step < 60, 2, 1))
    assert "devices" in views.scaling([run])["rows"][0]["why"]


def test_a_stall_of_a_device_is_said_to_be_the_mean_that_it_is() -> None:
    assert "CPU: median of" in BY_KEY["save_stall"].formula and "GPU: mean of" in BY_KEY["save_stall"].formula


def test_scaling(tmp_path: Path) -> None:
    made = [made_runs.make(tmp_path / f"r{n}", steps=60, noise=0.0, metadata={"devices": n}, speed_up=s)
            for n, s in ((4, 3.0), (1, 1.0), (2, 1.8))]  # fmt: skip
    view = views.scaling([reading.load(p) for p in made])
    assert view["axis"] == "devices" and [r["workers"] for r in view["rows"]] == [1, 2, 4]
    step = [sum(int(v / s) for v in made_runs.BASE.values()) + made_runs.GAP for s in (1.0, 1.8, 3.0)]
    assert [r["efficiency"] for r in view["rows"]] == pytest.approx([1.0, step[0] / step[1] / 2, step[0] / step[2] / 4], rel=1e-6)
    assert view["rows"][2]["ideal"] == pytest.approx(4 * view["rows"][0]["tokens_per_second"])
    again = reading.load(made_runs.make(tmp_path / "again", steps=60, noise=0.0, metadata={"devices": 1}, speed_up=0.5))
    same = views.scaling([reading.load(p) for p in made] + [again])["rows"]
    assert [r["efficiency"] for r in same if r["run"] != "again"] == [r["efficiency"] for r in view["rows"]], "the best of the smallest"
    for other, why in (({"flops_per_token": 123456.0}, "another model"), ({"machine": "cuda_sm90_H200x2-nvlink"}, "another machine")):
        made_runs.make(tmp_path / why, steps=20, metadata={"devices": 2, **other})
        rows = {r["run"]: r for r in views.scaling([reading.load(p) for p in (*made, tmp_path / why)])["rows"]}
        assert rows[why]["efficiency"] is None and why in rows[why]["why"] and rows["r4"]["efficiency"] is not None
    sizes = [made_runs.make(tmp_path / f"g{n}", steps=20, metadata={"devices": n, "machine": f"cuda_sm90_H200{x}"})
             for n, x in ((1, ""), (2, "x2-nvlink"), (4, "x4-pcie"))]
    assert all(r["why"] is None for r in views.scaling([reading.load(p) for p in sizes])["rows"]), "more devices are no other machine"
    halved = [reading.load(made_runs.make(tmp_path / f"h{n}", steps=20, threads=4 // n, devices=n)) for n in (1, 2)]
    assert [r["unlike"] for r in views.scaling(halved)["rows"]] == [
        None, "threads of a device: 2, not the 4 of h1, so its ideal is not that of equal devices"]
    assert all(r["unlike"] is None for r in view["rows"])
    threads = [reading.load(made_runs.make(tmp_path / f"t{n}", steps=20, threads=n)) for n in (1, 2)]
    assert views.scaling(threads)["axis"] == "threads"
    assert "all use 1 devices" in views.scaling([threads[0]])["why"]


def test_buckets_keep_what_stands_out() -> None:
    values = np.arange(1000.0)
    values[500], values[600] = 9999.0, np.nan
    s = buckets(np.arange(1000), values, 100)
    assert len(s["x"]) == 100 and s["x"][:2] == [0, 10] and max(s["max"]) == 9999.0 and min(s["min"]) == 0.0
    assert s["mean"][0] == 4.5 and s["mean"][60] == pytest.approx(np.mean(np.arange(601.0, 610.0)))
    assert buckets(np.arange(3), np.array([np.nan, 1.0, 2.0]), 10)["mean"] == [None, 1.0, 2.0]
    assert all(a < b for a, b in pairwise(buckets(np.arange(7), np.ones(7), 5)["x"]))


def test_intervals_are_those_of_every_instant() -> None:
    """Drawn intervals, nested ones, equal ones and ones that touch among them, held against a mark for each instant."""
    rng = np.random.default_rng(0)

    def drawn(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start = rng.integers(0, 60, n)
        stop = start + rng.integers(1, 30, n)
        marks = np.zeros(100, bool)
        for a, b in zip(start, stop):
            marks[a:b] = True
        return start, stop, marks

    nested = 0
    for _ in range(300):
        (start, stop, marks), (other, end, covers) = drawn(int(rng.integers(0, 8))), drawn(int(rng.integers(0, 8)))
        assert union_ns(start, stop) == marks.sum()
        assert uncovered_ns(start, stop, other, end) == (marks & ~covers).sum()
        inside = np.flatnonzero(marks)
        free = ~marks[inside[0] : inside[-1] + 1] if len(inside) else np.zeros(0, bool)
        gaps = gaps_of(start, stop)
        assert [t for a, b in gaps for t in range(a, b)] == (np.flatnonzero(free) + (inside[0] if len(inside) else 0)).tolist()
        assert all(b > a for a, b in gaps) and all(a[1] < b[0] for a, b in pairwise(gaps))
        nested += bool((np.diff(stop[np.argsort(start, kind="stable")]) < 0).any())
    assert nested > 20, "too few intervals lie in longer ones"
