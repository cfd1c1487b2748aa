"""The recorder and the store: phases partition a step exactly, nothing blocks it, nothing is lost that was promised."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from alpha import config
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.observe import ObservedWorkers
from alpha.errors import BusyError, CorruptError, GraphError, InputError
from alpha.graph.plan import Launch, Program
from alpha.profile import recorder as recorder_module
from alpha.profile.live import live_bytes
from alpha.profile.partition import partition
from alpha.profile.phases import PHASES, phase_of
from alpha.profile.recorder import Recorder, sampled
from alpha.profile.store import PATIENCE, Store, connect, read
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue

RUN = """
[run]
name = "profile"
[model]
family = "gpt"
layers = 2
width = 32
heads = 2
[data]
sequence = 16
[train]
steps = 5
batch = 8
shards = 2
micro_batch = 2
recompute = "block"
[optim]
lr = 1e-3
[machine]
threads = 2
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return program_for(config.parse(RUN), 64, catalogue(), 2)


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now

    def pass_(self, ns: int) -> None:
        self.now += ns


def rows(path: Path, table: str) -> list[dict[str, object]]:
    db = connect(path)
    db.row_factory = sqlite3.Row
    try:
        return [dict(r) for r in db.execute(f"SELECT * FROM {table}")]
    finally:
        db.close()


def test_phases_partition_a_step_interval_exactly(tmp_path: Path, program: Program) -> None:
    """Known times through a clock of our own: each lands in its phase, gaps between launches in idle, the rest is unexplained."""
    clock, plan = Clock(), program.plans["update"]
    with Store(tmp_path / "m.sqlite") as store:
        store.begin(0, 0, 0, 0)
        r = Recorder(store, clock=clock)
        r.begin(0)
        clock.pass_(7)  # nobody says what this is
        with r.span("data_load"):
            clock.pass_(100)
            with r.span("host_to_device"):
                clock.pass_(30)
            clock.pass_(1)
        marks = []
        for i, _ in enumerate(plan.launches):
            marks.append(clock())
            clock.pass_(10 * (i + 1))
            marks.append(clock())
            clock.pass_(3)
        r.ran(plan, marks)
        assert r.end_step() == clock.now - 1000
        with r.span("eval"):
            clock.pass_(500)
            with r.span("host_to_device"):  # inside an evaluation nothing is told apart
                clock.pass_(50)
        r.overlapped("checkpoint", 77)
        clock.pass_(5)
        r.begin(1)
        clock.pass_(9)
        r.finish()
    first, second = rows(tmp_path / "m.sqlite", "step_timing")
    n = len(plan.launches)
    assert (first["data_load_ns"], first["host_to_device_ns"], first["eval_ns"]) == (101, 30, 550)
    assert first["idle_ns"] == 3 * (n - 1)
    for phase in ("grad_norm", "grad_clip", "optimizer"):
        assert first[f"{phase}_ns"] == sum(10 * (i + 1) for i, x in enumerate(plan.launches) if phase_of(x) == phase) > 0
    assert first["unexplained_ns"] == 7 + 3 + 5
    assert first["wall_ns"] == sum(int(str(first[f"{p}_ns"])) for p in PHASES) + 15 and first["launches"] == n
    assert first["checkpoint_overlapped_ns"] == 77 and first["checkpoint_ns"] == 0
    assert second["wall_ns"] == second["unexplained_ns"] == 9


def test_an_interval_of_a_loop_that_runs_ahead_ends_with_the_device(tmp_path: Path, program: Program) -> None:
    """Known times: the next step is handed over before this one has ended, and runs while the host still writes down what this one gave."""
    clock, plan = Clock(), program.plans["update"]
    whole = [(phase_of(plan.launches[0]), len(plan.launches))]
    with Store(tmp_path / "m.sqlite") as store:
        store.begin(0, 0, 0, 0)
        r = Recorder(store, clock=clock)
        r.begin(0)
        r.enqueued(7)
        with r.ahead():
            r.enqueued(11)
        with r.span("device_to_host"):
            clock.pass_(150)  # the device has ended 30 before
        r.ran_on_device(whole, [(1010, 1120)])
        assert r.end_step(ahead=True) == 120
        with r.span("data_load"):
            clock.pass_(20)
        clock.pass_(5)
        r.begin(1, ahead=True)
        clock.pass_(100)
        r.ran_on_device(whole, [(900, 1000)])  # of a step that was forgotten
        r.ran_on_device(whole, [(1125, 1260)])
        assert r.end_step() == 155
        r.finish()
    first, second = rows(tmp_path / "m.sqlite", "step_timing")
    phase = f"{phase_of(plan.launches[0])}_ns"
    assert (first["began_ns"], first["wall_ns"], first["step_ns"], first["enqueue_ns"]) == (1000, 120, 120, 7)
    assert (first[phase], first["device_to_host_ns"], first["device_to_host_overlapped_ns"], first["unexplained_ns"]) == (110, 10, 110, 0)
    assert (second["began_ns"], second["wall_ns"], second["enqueue_ns"]) == (1120, 155, 11)
    assert second["launches"] == first["launches"] == len(plan.launches)
    assert (second[phase], second["device_to_host_ns"], second["device_to_host_overlapped_ns"]) == (135, 5, 25)
    assert (second["data_load_ns"], second["data_load_overlapped_ns"], second["unexplained_ns"]) == (0, 20, 15)


def test_a_device_beside_the_host_counts_nothing_twice() -> None:
    """Known pieces: the device's time first, then what the host did in its gaps; the rest of the gaps is idle."""
    compute, load, idle = 0, 1, 2
    device = [(compute, 100, 200), (compute, 230, 300), (compute, 290, 400)]  # the third begins early: clocks are aligned to some ns
    host = [(load, 50, 120), (load, 195, 220), (load, 390, 450), (load, 900, 1200)]
    exclusive, overlapped = partition(0, 1000, host, device, 3, idle)
    assert exclusive[compute] == 100 + 70 + 100
    assert exclusive[load] == 50 + 20 + 50 + 100 and overlapped[load] == 20 + 5 + 10
    assert exclusive[idle] == 30 - 20 and overlapped[compute] == overlapped[idle] == 0
    assert partition(0, 10, [(load, 2, 5)], [], 3, idle) == ([0, 3, 0], [0, 0, 0])
    rng = np.random.default_rng(0)
    for _ in range(200):  # against counting nanosecond by nanosecond
        cuts = np.sort(rng.integers(0, 300, 20)).tolist()
        device = [(int(rng.integers(0, 2)), a, b) for a, b in zip(cuts[::2], cuts[1::2])]
        cuts = np.sort(rng.integers(-20, 320, 12)).tolist()
        host = [(int(rng.integers(3, 5)), a, b) for a, b in zip(cuts[::2], cuts[1::2])]
        exclusive, overlapped = partition(0, 300, host, device, 5, 2)
        line, over = np.full(300, -1), np.full(300, -1)
        for phase, a, b in host:
            line[max(a, 0) : max(b, 0)] = phase
        for phase, a, b in device:
            over[a:b] = np.where(line[a:b] > 2, line[a:b], -1)
            line[a:b] = phase
        used = [x for x in device if x[2] > x[1]]
        if used:
            inside = line[used[0][1] : used[-1][2]]
            inside[inside == -1] = 2
        assert exclusive == [int((line == i).sum()) for i in range(5)]
        assert overlapped == [int((over == i).sum()) for i in range(5)]


def test_a_gap_in_which_the_host_only_waits_is_idle() -> None:
    """The wait for the results covers the whole step: its gaps are the device's, what lies before and behind is the host's."""
    compute, load, idle, wait = 0, 1, 2, 3
    device = [(compute, 100, 200), (compute, 250, 300)]
    assert partition(0, 400, [(wait, 50, 350)], device, 4, idle, wait) == ([150, 0, 50, 100], [0, 0, 0, 150])
    assert partition(0, 400, [(load, 50, 350)], device, 4, idle, wait) == ([150, 150, 0, 0], [0, 150, 0, 0])


def test_every_launch_of_every_segment_has_a_phase(program: Program) -> None:
    found = {phase_of(x) for plan in program.plans.values() for x in plan.launches}
    assert found == {"forward", "backward", "grad_norm", "grad_clip", "optimizer"}


def test_a_profiled_step_changes_no_bit_and_sees_every_launch(tmp_path: Path, program: Program) -> None:
    """The same Segments run plainly, timed and observed: equal outputs; the profile has one row a launch with its full count."""
    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(0, 4, ref.type.shape).astype(np.int32) for name, ref in program.plans["micro_first@0"].inputs.items()}
    found = []
    for mode in ("plain", "timed", "profiled"):
        with CpuExecutor(program, catalogue()) as executor, Store(tmp_path / f"{mode}.sqlite") as store:
            executor.state("param")[...] = np.random.default_rng(1).standard_normal(executor.state("param").size) * 0.1
            store.begin(0, 0, 0, 0)
            r = executor.recorder = Recorder(store)
            if mode != "plain":
                r.begin(0, profiled=mode == "profiled")
            executor.run("micro_first@0", inputs)
            executor.run("micro@0", inputs)
            executor.run("micro@0", inputs)
            out = executor.run("update")
            r.end_step()
            r.finish()
            found.append((executor.state("param").tobytes(), *(out[k].tobytes() for k in sorted(out))))
    assert found[0] == found[1] == found[2]
    profile = rows(tmp_path / "profiled.sqlite", "op_profile")
    for name, count in (("micro_first@0", 1), ("micro@0", 2), ("update", 1)):
        mine = {int(str(r["launch"])): r for r in profile if r["plan"] == name}
        assert sorted(mine) == list(range(len(program.plans[name].launches)))
        for i, launch in enumerate(program.plans[name].launches):
            assert mine[i]["count"] == count and mine[i]["flops"] == launch.flops * count and mine[i]["op"] == launch.op
            assert 0 < int(str(mine[i]["device_ns"])) and 0 <= int(str(mine[i]["wait_ns"])) <= int(str(mine[i]["device_ns"]))
    step = rows(tmp_path / "profiled.sqlite", "step_timing")[0]
    assert step["profiled"] == 1 and rows(tmp_path / "timed.sqlite", "op_profile") == []
    in_launches = sum(int(str(r["device_ns"])) + int(str(r["enqueue_ns"])) for r in profile)
    assert in_launches == sum(int(str(step[f"{p}_ns"])) for p in ("forward", "backward", "grad_norm", "grad_clip", "optimizer"))
    events = rows(tmp_path / "profiled.sqlite", "gpu_timeline")
    tracks = {str(e["track"]) for e in events}  # whether the helper gets a task of so small a step is the scheduler's affair
    assert {"host enqueue", "worker 0"} <= tracks <= {"host enqueue", "worker 0", "worker 1"}
    assert all(int(str(e["stop_ns"])) >= int(str(e["start_ns"])) for e in events)


def test_each_task_of_an_observed_hand_over_has_its_worker_and_its_time() -> None:
    workers, both = ObservedWorkers(2), threading.Barrier(2, timeout=60)
    with workers.observed(time.perf_counter_ns) as seen:
        workers.run([lambda: both.wait() and None, lambda: both.wait() and None])  # so each thread has one
    workers.close()
    (over,) = seen
    assert sorted(worker for worker, _, _ in over.tasks) == [0, 1]
    assert all(over.called <= start <= stop <= over.returned for _, start, stop in over.tasks)
    assert max(start for _, start, _ in over.tasks) <= min(stop for _, _, stop in over.tasks), "they met"


def test_rows_of_a_profiled_step_are_made_off_the_step(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the store's thread; where they cannot be made, the next call says so."""
    makers: list[str] = []

    def shape(launch: Launch) -> str:
        makers.append(threading.current_thread().name)
        return "x" if len(makers) <= len(plan.launches) else str(1 / 0)

    monkeypatch.setattr(recorder_module, "shape_text", shape)
    plan = program.plans["update"]
    with pytest.raises(GraphError, match="could not be made"), Store(tmp_path / "m.sqlite") as store:
        store.begin(0, 0, 0, 0)
        r = Recorder(store)
        for step in range(2):
            r.begin(step, profiled=True)
            for i in range(len(plan.launches)):
                r.profiled(plan, i, enqueue=1, device=2, wait=0, dispatches=1)
            r.finish()
            store.flush()
    assert set(makers) == {"alpha-store-0"} and len(makers) == len(plan.launches) + 1
    assert {x["step"] for x in rows(tmp_path / "m.sqlite", "op_profile")} == {0}


def test_sampled_steps_are_spread_and_do_not_depend_on_a_resume() -> None:
    for steps, samples in ((1000, 20), (50, 20), (10, 20), (4, 1), (100_000, 7)):
        found = [s for s in range(steps) if sampled(s, steps, samples)]
        assert len(found) == min(samples, steps - recorder_module.WARM_UP)
        assert min(found) >= recorder_module.WARM_UP
        gaps = np.diff(found)
        assert gaps.size == 0 or gaps.max() - gaps.min() <= 1
    assert not any(sampled(s, 3, 20) or sampled(s, 100, 0) for s in range(100))


def test_live_bytes_stay_under_the_planned_peak(program: Program) -> None:
    for plan in program.plans.values():
        live = live_bytes(plan)
        assert len(live) == len(plan.launches)
        assert max(live, default=0) <= plan.memory.lower <= plan.memory.peak
    live = live_bytes(program.plans["micro_first@0"])
    assert max(live) > 0.9 * program.plans["micro_first@0"].memory.lower  # a timeline that forgets values would pass the bound too


def test_resident_bytes_are_the_pages_that_were_touched() -> None:
    from alpha.backends.cpu.observe import PAGE, resident

    raw = np.zeros(300 * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    arena = raw[start : start + 256 * PAGE]
    place = {"a": (arena.ctypes.data, arena.nbytes)}
    if not resident(place):
        pytest.skip("NOT_RUN: this system has no /proc/self/pagemap")
    before = resident(place)["a"]
    arena[: 100 * PAGE] = 1
    assert resident(place)["a"] - before in range(0, 101 * PAGE) and resident(place)["a"] >= 100 * PAGE
    arena[...] = 1
    assert resident(place)["a"] == arena.nbytes and resident(place)["process"] > arena.nbytes


# -- the store -----------------------------------------------------------------------------------------------------------------

STEP = {"loss": 1.0, "norm": 1.0, "lr": 0.1, "coefficient": 1.0, "tokens": 1, "seconds": 0.1, "finite": 1}


def test_a_locked_file_blocks_no_step_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    with Store(path) as store:
        store.begin(0, 0, 0, 0)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.perf_counter()
        for step in range(1000):
            store.add("step_metrics", {"step": step, **STEP})
        assert time.perf_counter() - began < PATIENCE / 4, "a step waited for the file"
        time.sleep(0.5)
        assert len(read(path, "step_metrics")) == 0
        other.execute("ROLLBACK")
        other.close()
        store.flush()
        assert [r[0] for r in read(path, "step_metrics", "step")] == list(range(1000))


WRITER = """
import sys
from pathlib import Path
from alpha.profile.store import Store
path, rank, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with Store(path, rank) as store:
    store.begin(0, 0, 0, 0)
    print("ready", flush=True)
    for step in range(n):
        store.add("memory", {"step": step, "rank": rank, "arena": "a", "planned": 1, "actual": 1})
        if step % 50 == 0:
            store.flush()
            print(step, flush=True)
"""


def test_several_ranks_write_one_file_and_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    ranks = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(r), "2000"], stdout=subprocess.DEVNULL) for r in range(3)]
    assert [p.wait(120) for p in ranks] == [0, 0, 0]
    found = read(path, "memory", "rank, step")
    assert sorted(found) == [(r, s) for r in range(3) for s in range(2000)]
    assert sorted(read(path, "sessions", "rank, session")) == [(0, 0), (1, 0), (2, 0)]


def test_a_session_has_a_number_that_no_rank_had_before(tmp_path: Path) -> None:
    """Rank 0 died before its row was written: rank 1 has one of a session that rank 0 does not know."""
    with Store(tmp_path / "m.sqlite", 1) as store:
        store.begin(0, 0, 0, 0)
    with Store(tmp_path / "m.sqlite", 0) as store:
        assert store.next_session() == 1


def test_a_rank_waits_while_another_one_makes_the_file(tmp_path: Path) -> None:
    """SQLite refuses the switch to WAL at once, whatever the timeout, while another connection is about to write."""
    path = tmp_path / "m.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    made = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    began = time.perf_counter()
    made.start()
    with Store(path):
        assert time.perf_counter() - began >= 0.3
    made.join()
    other.close()


def test_a_file_that_stays_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpha.profile.store.PATIENCE", 0.2)
    path = tmp_path / "m.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError, match="locked"):
            Store(path)


def test_after_kill_9_the_file_is_sound_and_holds_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    p = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "0", "1000000"], stdout=subprocess.PIPE, text=True)
    assert p.stdout is not None
    output = [p.stdout.readline().strip() for _ in range(12)]
    p.kill()
    p.wait()
    p.stdout.close()
    assert output[0] == "ready"
    db = connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    steps = [s for s, in read(path, "memory", "step")]
    assert steps == list(range(len(steps))) and len(steps) > int(output[-1])
    assert read(path, "sessions", "session, ended") == [(0, None)]
    with Store(path) as store:  # and the next session goes on
        store.begin(5, 0, 0, 0)
        store.rewind(5)
        store.mark(ended="finished")
    assert [s for s, in read(path, "memory", "step")] == list(range(5))
    assert read(path, "sessions", "session, first_step, ended") == [(0, 0, None), (1, 5, "finished")]


def test_readers_refuse_what_is_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no metrics"):
        connect(tmp_path / "none.sqlite")
    (tmp_path / "empty.sqlite").write_bytes(b"")
    with pytest.raises(CorruptError, match="never finished"):
        connect(tmp_path / "empty.sqlite")
    (tmp_path / "torn.sqlite").write_bytes(b"SQLite format 3\0" + b"torn" * 2000)
    with pytest.raises(CorruptError, match="damaged"):
        connect(tmp_path / "torn.sqlite")
    with Store(tmp_path / "locked.sqlite"):
        pass
    other = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    other.execute("PRAGMA journal_mode=DELETE")
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(BusyError, match="locked"):
            connect(tmp_path / "locked.sqlite", timeout=0.1)
    finally:
        other.close()


def test_a_writer_that_fails_is_heard(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"no such table|no column"), Store(tmp_path / "m.sqlite") as store:
        store.add("step_metrics", {"step": 0, "no_such_column": 1})
        store.flush()
