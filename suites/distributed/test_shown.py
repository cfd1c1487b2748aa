"""What a job of many ranks leaves for its readers: communication, a trace on one clock, a slowed rank that is named, scaling, debug modes.
Real runs of 1, 2 and 4 ranks, started by one process (suites/support/ranked_runs.py)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import warm
from trace_format import breaches
from trace_format import load as load_trace

from alpha.profile import trace
from alpha.profile.compare import SLOWER
from alpha.report import runs as reading
from alpha.report import views
from alpha.train import log

SCRIPT = Path(__file__).parents[1] / "support" / "ranked_runs.py"
STEPS = 75
SMALL = ["train.batch=4", "train.shards=4", "train.eval_every=0", "train.checkpoint_every=0", "train.profile=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    """Folder of three runs: one, four, and `slow` of two ranks with all debug modes, of which the second one is slowed."""
    folder = tmp_path_factory.mktemp("shown")
    small_corpus(folder / "text")
    jobs: list[dict[str, Any]] = [
        {"name": "one", "ranks": 1, "set": [*SMALL, "train.steps=12"]}, {"name": "four", "ranks": 4, "set": [*SMALL, "train.steps=12"]},
        {"name": "slow", "ranks": 2, "zero": 1, "set": [*SMALL, f"train.steps={STEPS}", 'machine.debug="all"'],
         "plant": "slow", "victim": 1, "step": 0}]
    done = warm.run([SCRIPT, folder, *map(json.dumps, jobs)], timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["code"] == 0, (found["error"], found["account"])
    return folder / "runs"


def test_communication_of_every_step_and_rank(runs: Path) -> None:
    """The reader checks that exposed and overlapped make up the total, and are no more than what the executor stamped."""
    with closing(sqlite3.connect(runs / "slow" / "metrics.sqlite")) as db:
        rows = db.execute("SELECT step, rank, calls, total_ms, exposed_ms, overlapped_ms FROM communication_per_step").fetchall()
    assert {(step, rank) for step, rank, *_ in rows} == {(step, rank) for step in range(STEPS) for rank in (0, 1)}
    assert all(calls > 5 and total > 0 and exposed > 0 and overlapped >= 0 for _, _, calls, total, exposed, overlapped in rows)
    assert len(reading.load(runs / "slow").tables["communication"]) >= 2 * STEPS
    assert not len(reading.load(runs / "one").tables["communication"])


def test_the_slowed_rank_is_named(runs: Path) -> None:
    found = views.ranks(reading.load(runs / "slow"))
    assert found["sentence"].startswith("rank 1 is slower than the others by +"), found
    assert [r["verdict"] == SLOWER for r in found["rows"]] == [False, True]
    assert found["rows"][0]["exposed_ns"] > found["rows"][1]["exposed_ns"], "the other one waits for it"


def test_scaling_over_ranks(runs: Path) -> None:
    found = views.scaling([reading.load(runs / name) for name in ("one", "four", "slow")])
    assert found["axis"] == "devices" and [r["workers"] for r in found["rows"]] == [1, 2, 4]
    one, two, four = found["rows"]
    assert one["efficiency"] == 1.0 and one["comm_exposed"] is None
    for row in (two, four):
        assert 0 < row["efficiency"] and row["low"] < row["high"] and 0 < row["comm_exposed"] < 1, row


def test_one_trace_of_all_ranks_on_one_clock(runs: Path, tmp_path: Path) -> None:
    """Writing it checks that nobody leaves a collective before the last one has come. With `trace` it has the collectives of all steps."""
    written = trace.write(runs / "slow" / "metrics.sqlite", tmp_path / "t.json")
    document = load_trace(tmp_path / "t.json")
    assert breaches(document) == []
    assert written.ranks == (0, 1) and written.steps == tuple(range(STEPS)) and written.waits > 3 * STEPS
    profiled = trace.write(runs / "four" / "metrics.sqlite", tmp_path / "four.json")
    assert profiled.ranks == (0, 1, 2, 3) and len(profiled.steps) == 2 and profiled.waits > 0


def test_a_trace_says_whose_text_each_launch_and_exchange_ran_with(runs: Path, tmp_path: Path) -> None:
    """Four ranks have a shard of the text each, so a rank's exchanges beside backward say its own one. What ranks agree on between two
    Plans is of no Plan, and the update reads no text."""
    trace.write(runs / "four" / "metrics.sqlite", tmp_path / "t.json")
    events = [e for e in load_trace(tmp_path / "t.json")["traceEvents"] if e["ph"] == "X"]
    with closing(sqlite3.connect(runs / "four" / "metrics.sqlite")) as db:
        calls = db.execute("SELECT step, rank, plan, shard, micro FROM calls ORDER BY step, rank, call").fetchall()
    assert len({(step, rank) for step, rank, *_ in calls}) == 2 * 4
    assert {rank: shard for _, rank, _, shard, _ in calls if shard is not None} == {rank: rank for rank in range(4)}
    assert {plan for _, _, plan, shard, _ in calls if shard is None} >= {"update"}
    comm = [e for e in events if e["cat"] == "comm"]
    assert {e["args"].get("plan") for e in comm if e["name"] == "comm"} == {None}
    reduced = {(e["name"], e["pid"] - 1, *(e["args"][key] for key in ("plan", "shard", "microbatch"))) for e in comm if e["name"] != "comm"}
    assert reduced == {("all_reduce", rank, "micro_last@0", rank, 0) for rank in range(4)}
    update = [e["args"] for e in events if e["args"].get("plan") == "update"]
    assert update and not any({"shard", "microbatch"} & args.keys() for args in update)


def test_each_collective_is_logged_by_its_rank(runs: Path) -> None:
    for rank in (0, 1):
        lines = [x for x in log.read(runs / "slow" / "logs" / f"rank{rank}.jsonl") if x["event"] == "collective"]
        assert {x["step"] for x in lines} >= set(range(STEPS)) and {"reduce_scatter", "all_gather"} <= {x["fields"]["op"] for x in lines}
        assert all(x["fields"]["us"] > 0 and x["fields"]["nbytes"] >= 0 for x in lines)
    assert not [x for x in log.read(runs / "four" / "logs" / "rank1.jsonl") if x["event"] == "collective"], "off by default"
