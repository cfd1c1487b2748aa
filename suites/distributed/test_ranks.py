"""Whole runs on many ranks: the bits of one process, resumed on other numbers of ranks, and ranks that are lost, differ or are stopped.

One process starts all jobs of a test (suites/support/ranked_runs.py), so that what they import is imported once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from shm import nothing_left

SCRIPT = str(Path(__file__).parents[1] / "support" / "ranked_runs.py")
SAME = ("steps", "evaluations", "samples", "checkpoints")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    small_corpus(path / "text")
    return path


def run(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    with nothing_left():
        done = warm.run([SCRIPT, folder, *map(json.dumps, jobs)], timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process leaves."""
    found, = run(folder, {"name": "alone", "ranks": 1})
    assert found["code"] == 0 and len(found["steps"]) == 6 and list(found["checkpoints"]) == ["2", "4", "6"]
    return found


def test_any_number_of_ranks_has_the_bits_of_one_process(folder: Path, alone: dict[str, Any]) -> None:
    """The bit table: ranks by ZeRO-1, then each resumed by another number of ranks, with the other setting."""
    jobs = [{"name": f"n{n}z{zero}", "ranks": n, "zero": zero} for n in (2, 4, 8) for zero in (0, 1)]
    jobs += [{"name": f"{source}-n{n}z{zero}", "from": source, "at": 2, "ranks": n, "zero": zero}
             for source, n, zero in (("alone", 4, 1), ("n2z1", 8, 0), ("n4z1", 2, 1), ("n8z1", 1, 0), ("n8z0", 4, 1))]
    for job, found in zip(jobs, run(folder, *jobs)):
        assert found["code"] == 0, (job, found["error"], found["account"])
        for what in SAME:
            assert found[what] == alone[what], (job, what)
        n = job["ranks"]
        assert {(r, s) for r, s in found["timed"] if s >= 2} == {(r, s) for r in range(n) for s in range(2, 6)}, job
        assert set(found["logs"]) >= {f"rank{r}.jsonl" for r in range(n)}
        session = max(s for s, *_ in found["moments"])
        moments = [(rank, *at) for s, rank, *at in found["moments"] if s == session]
        assert [rank for rank, *_ in moments] == list(range(n)) and len({tuple(at) for _, *at in moments}) == 1, moments
        assert found["folders"].count(job["name"]) == 1 and not [f for f in found["folders"] if f.startswith(f"{job['name']}-2")]


def test_a_rank_that_dies_is_named_and_the_run_goes_on(folder: Path, alone: dict[str, Any]) -> None:
    kill = {"plant": "kill", "victim": 2, "ranks": 4, "settled": True}
    lost, kept, early = run(folder, {"name": "lost", **kill, "zero": 1, "step": 3},
                            {"name": "kept", **kill, "zero": 1, "step": 3, "restarts": 2},
                            {"name": "early", **kill, "step": 0, "restarts": 1})
    assert lost["code"] == 1 and lost["lost"] and lost["error"].startswith("rank 2 died")
    lines = lost["account"].splitlines()
    assert re.match(r"rank 2 ended \(killed by SIGKILL\) in step 3: had done all_gather .*, step 2\b", lines[2]), lines
    assert all(re.match(rf"rank {r} ended \(.*\) in step [23]: ", lines[r]) for r in (0, 1, 3)), lines  # step 2 ended for rank 2 alone
    assert list(lost["checkpoints"]) == ["2"]
    went_on(kept, alone, "rank 2 died", "from the checkpoint of step 2, with 4 ranks")
    went_on(early, alone, "rank 2 died", "from the beginning")


def test_a_rank_that_stops_is_named_and_the_run_goes_on(folder: Path, alone: dict[str, Any]) -> None:
    """In a step; and while it saves: then it is waited for, but not when its process is stopped."""
    stepping, saving = run(folder, {"name": "stop", "ranks": 4, "zero": 1, "plant": "stop", "victim": 2, "step": 3, "restarts": 2,
                            "settled": True},
                           {"name": "saving", "ranks": 2, "plant": "stop-saving", "victim": 0, "step": 2, "restarts": 1})
    went_on(stepping, alone, "rank 2 (gets on with nothing|is stopped)", "from the checkpoint of step 2, with 4 ranks")
    went_on(saving, alone, "rank 0 (gets on with nothing|is stopped)", "with 2 ranks")


def went_on(found: dict[str, Any], alone: dict[str, Any], why: str, whence: str) -> None:
    """It was started again once, for this reason (a pattern), and has the bits of one process."""
    assert found["code"] == 0 and len(found["said"]) == 1 and re.match(why, found["said"][0]) and whence in found["said"][0], found
    assert all(found[what] == alone[what] for what in SAME)


def test_a_flipped_bit_is_named(folder: Path) -> None:
    found, = run(folder, {"name": "flip", "ranks": 4, "plant": "flip", "victim": 1, "step": 3})
    first, came, expected, _ = found["error"].splitlines()
    assert found["code"] == 1 and first == "rank 1 has other bits than the others after step 3"
    assert "parameter block.1.mlp.up.weight of rank 1" in came and "parameter block.1.mlp.up.weight of rank 0" in expected


def test_an_error_of_one_rank_is_told_once(folder: Path) -> None:
    raised, poisoned, stopped = run(
        folder,
        {"name": "raise", "ranks": 2, "plant": "raise", "victim": 1, "step": 3},
        {"name": "poison", "ranks": 2, "plant": "poison", "victim": 1, "step": 3, "set": ["train.verify=0"]},  # no spot check sees it
        {"name": "interrupt", "ranks": 2, "plant": "interrupt", "victim": 1, "step": 3},
    )
    assert raised["code"] == 1 and raised["error"].startswith("rank 1: ") and "MemoryError: planted" in raised["error"]
    assert poisoned["code"] == 1 and poisoned["error"].startswith("rank 1: step 3 was refused and changed nothing"), poisoned
    assert stopped["code"] == 130 and not stopped["error"] and list(stopped["checkpoints"])[-1] in ("3", "4"), stopped
