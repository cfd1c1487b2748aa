"""What a rank spends in collectives: exposed and overlapped by hand-made times, by real ranks with and without overlap, and refused where
the rows contradict one another."""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pytest

from alpha.backends.cpu.executor import CpuExecutor
from alpha.comm import collectives
from alpha.comm.flight import RECORDS, Record
from alpha.comm.world import WORLD, World
from alpha.errors import AlphaError, CorruptError
from alpha.gates.contracts.ranks.members import in_threads
from alpha.gates.contracts.reference import BATCH, SCHEDULE, SEQ, batches_of, references
from alpha.graph.order import COMM
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Step
from alpha.optim.update import adamw
from alpha.parallel.data import DataParallel
from alpha.passes.build import StepShape, build_program
from alpha.profile.schema import COMMUNICATION
from alpha.profile.store import Store
from alpha.report import runs as reading
from alpha.train.catalogue import catalogue
from alpha.train.communication import RankRecorder, called, rows, spent
from alpha.types import TensorType


def record(created: int, finished: int, op: str = "all_reduce", call: int = 1) -> Record:
    return Record(7, call, op, "f32", 64, 3, created, created, finished, "parts.py:9")


def test_exposed_and_overlapped_by_hand() -> None:
    """Beside compute [5, 30] and [30, 44]; compute waits in [20, 32] and [40, 50]; [60, 66] ran on the computing thread, [80, 90] in a
    validation, [95, 0] has not ended."""
    records = [record(6, 28), record(31, 44, call=2), record(61, 66, "all_gather", 3), record(80, 90, call=4), record(95, 0, call=5)]
    found = spent(records, [(5, 30), (30, 44)], [(20, 32), (40, 50)], [(60, 66)])
    assert [(x.record.call, x.stream, x.exposed, x.overlapped) for x in found] == [
        (1, "comm", 8, 14), (2, "comm", 1 + 4, 8), (3, "compute", 5, 0)]
    told = list(rows(found, 3, 1, each=True))
    assert [row["call"] for table, row in told if table == "collectives"] == [1, 2, 3]
    sums = [tuple(row.values()) for table, row in told if table == "communication"]
    assert sums == [(3, 1, "all_reduce", "comm", 2, 128, 35, 13, 22), (3, 1, "all_gather", "compute", 1, 64, 5, 5, 0)]
    assert spent([], [], [], []) == [] == spent(records, [], [], [])


def test_a_step_with_more_collectives_than_are_kept_is_refused(tmp_path: Path) -> None:
    def body(world: World) -> None:
        with Store(tmp_path / "metrics.sqlite", world.rank) as store:
            recorder = RankRecorder(store, world, ())
            recorder.begin(0)
            for _ in range(RECORDS + 1):
                collectives.barrier(world.group(WORLD))
            with pytest.raises(AlphaError, match="more collectives than the flight recorder keeps"):
                recorder.begin(1)

    assert in_threads(1, body) == [None]


def test_a_plan_that_ran_on_one_thread_hides_nothing(tmp_path: Path) -> None:
    """As where launches are looked at one by one: there are no waits, for compute itself ran the collective."""
    x = Ref("act", 0, TensorType((4,), "f32"))
    launch = Launch("barrier", "made", (x,), (x,), {}, None, "", "reduce", "", 0, 0, COMM)

    def body(world: World) -> None:
        with Store(tmp_path / "metrics.sqlite", world.rank) as store:
            store.rewind(0)
            recorder = RankRecorder(store, world, ())
            recorder.begin(0)
            start = recorder.clock()
            collectives.barrier(world.group(WORLD))
            recorder.ran(Plan("made", (launch,), {}, {}, {}, Memory(0, 0, 0)), [start, recorder.clock()])
            recorder.finish()

    assert in_threads(1, body) == [None]
    with closing(sqlite3.connect(tmp_path / "metrics.sqlite")) as db:
        ((stream, total, exposed),) = db.execute("SELECT stream, total_ns, exposed_ns FROM communication").fetchall()
        ((stamped,),) = db.execute("SELECT comm_ns FROM step_timing").fetchall()
    assert stream == "compute" and 0 < total == exposed <= stamped


# -- real ranks --------------------------------------------------------------------------------------------------------------------


def serial(program: Program) -> Program:
    """The planted fault: every launch waits for the collectives before it, so nothing runs beside compute."""
    plans = {}
    for name, plan in program.plans.items():
        before: tuple[int, ...] = ()
        launches = []
        for i, launch in enumerate(plan.launches):
            launches.append(launch if launch.stream == COMM else replace(launch, after=before))
            before += (i,) if launch.stream == COMM else ()
        plans[name] = replace(plan, launches=tuple(launches))
    return replace(program, plans=plans)


def steps(program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, n: int = 3) -> list[dict[str, Any]]:
    """`n` steps of two ranks, the second one late by 4 ms at each sum: the rows of communication_per_step of the first."""
    honest: Callable[..., None] = collectives.all_reduce

    def late(group: Any, *operands: Any, **words: Any) -> None:
        time.sleep(0.004 * group.index)
        honest(group, *operands, **words)

    monkeypatch.setattr(collectives, "all_reduce", late)
    rng, family = np.random.default_rng(1), references()["gpt"]
    text = batches_of(family, rng, 4, 1)

    def body(world: World) -> None:
        world.add_groups(program.groups)
        with CpuExecutor(program, catalogue(), world) as executor, Store(folder / f"{world.rank}.sqlite", world.rank) as store:
            store.rewind(0, 2)
            executor.recorder = RankRecorder(store, world, program.role(world.rank).schedule)
            for step in range(n):
                executor.recorder.begin(step)
                for call in program.role(world.rank).schedule:
                    executor.run(call.plan, text[call.shard, call.micro] if call.shard is not None and call.micro is not None else {})
                executor.recorder.end_step()
            executor.recorder.finish()

    failed = [error for error in in_threads(2, body) if error is not None]
    assert not failed, failed
    monkeypatch.undo()
    with closing(sqlite3.connect(folder / "0.sqlite")) as db:
        db.row_factory = sqlite3.Row
        return [dict(x) for x in db.execute("SELECT c.*, t.comm_ms, t.comm_overlapped_ms FROM communication_per_step c JOIN "
                                            "step_timing_ms t USING (step, rank)")]


TURNS = 20
"""So often at most overlap is looked for."""


def test_overlap_that_is_disabled_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = references()["gpt"]
    program = build_program(name="gpt", model=family.model, optimizer=adamw(SCHEDULE, max_norm=0.2), catalogue=catalogue(),
                            threads=1, shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=4, micros=1), over=DataParallel(2, 0))
    found: dict[str, list[dict[str, float]]] = {"as built": [], "disabled": []}
    for turn in range(2 * TURNS):  # on a crowded machine the threads of two ranks may never run beside each other in one turn
        name, made = (("as built", program), ("disabled", serial(program)))[turn % 2]
        if turn > 1 and any(row["overlapped_ms"] for row in found["as built"]):
            break
        (tmp_path / f"{name} {turn}").mkdir()
        found[name] += steps(made, tmp_path / f"{name} {turn}", monkeypatch)
        for row in found[name]:
            assert row["calls"] == 5 and row["exposed_ms"] >= 0 <= row["overlapped_ms"] and row["total_ms"] > 0
            assert abs(row["exposed_ms"] + row["overlapped_ms"] - row["total_ms"]) < 1e-6
            assert row["exposed_ms"] <= row["comm_ms"] and row["overlapped_ms"] <= row["comm_overlapped_ms"]
    hidden = {name: [row["overlapped_ms"] / row["total_ms"] for row in rows] for name, rows in found.items()}
    assert min(hidden["disabled"]) < 0.2 * max(hidden["as built"]), hidden


# -- readers -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A made-up run of two ranks, which says its communication: half a millisecond exposed and half beside, of what was stamped."""
    path = made_runs.make(tmp_path / "run", steps=20, ranks=2)
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        db.executescript(COMMUNICATION)
        db.execute("INSERT INTO communication SELECT step, rank, 'all_reduce', 'comm', 5, 99, 1000000, 500000, 500000 FROM step_timing")
        db.commit()
    return path


def test_a_run_says_its_communication(run: Path) -> None:
    assert len(reading.load(run).tables["communication"]) == 40


@pytest.mark.parametrize("change, words", [
    ("total_ns = total_ns + 1", "exposed \\+ overlapped = total"),
    ("exposed_ns = -1, overlapped_ns = 1000001", "nothing below 0"),
    ("total_ns = 90500000, exposed_ns = 90000000", "at most comm_ns"),
    ("total_ns = 1500001, overlapped_ns = 1000001", "at most comm_overlapped_ns"),
])
def test_communication_that_cannot_be_is_refused(run: Path, change: str, words: str) -> None:
    with closing(sqlite3.connect(run / "metrics.sqlite")) as db:
        assert db.execute(f"UPDATE communication SET {change} WHERE step = 7 AND rank = 1").rowcount == 1
        db.commit()
    with pytest.raises(CorruptError, match=f"(?s)step 7, rank 1.*{words}"):
        reading.load(run)


def test_a_plan_that_ran_is_a_call_of_the_schedule() -> None:
    schedule = (Step("micro_first", 3, 0), Step("micro_last", 3, 1), Step("update"))
    ran = [("micro_first", 10, 20), ("micro_last", 25, 40), ("update", 41, 50)]
    found = [(r["call"], r["plan"], r["shard"], r["micro"], r["began_ns"], r["ended_ns"]) for r in called(schedule, ran, 5, 1)]
    assert found == [(0, "micro_first", 3, 0, 10, 20), (1, "micro_last", 3, 1, 25, 40), (2, "update", None, None, 41, 50)]
    for other in (ran[1:], [*ran, ("update", 51, 52)]):
        with pytest.raises(AlphaError, match="another Plan than its schedule"):
            called(schedule, other, 5, 1)
