"""The timeline as trace-event JSON: judged by trace_format.py, event by event against the rows, and refused where a row cannot be true."""

import copy
import json
import sqlite3
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import made_runs
import pytest
from trace_format import breaches, load

from alpha.errors import AlphaError, CorruptError, InputError, MachineError
from alpha.profile import trace
from alpha.profile.phases import PHASES
from alpha.profile.schema import COMMUNICATION, TABLES, VERSION

CLOCKS = (5_000_000_000, 900_000_000_123)
"""Monotonic clock of ranks 0 and 1 at the barrier; the wall clocks differ as well, by 40 ms."""
UNIX = 1_700_000_000_000_000_007


def metrics(path: Path, *, status: str = "GATED") -> Path:
    """Two ranks, profiled steps 4 and 9: nested host events, three workers' worth of arrows, overlapping communication, a late writer."""
    db = sqlite3.connect(path)
    db.executescript(TABLES)
    db.execute(f"PRAGMA user_version={VERSION}")
    for key, value in {"status": status, "name": "made", "program": "ab", "commit": "c0", "hardware": 'a "quoted" CPU \u2603'}.items():
        db.execute("INSERT INTO run_metadata VALUES (?, ?)", (key, value))
    for rank, clock in enumerate(CLOCKS):
        unix = UNIX + rank * 40_000_000
        db.execute("INSERT INTO sessions VALUES (0, ?, 'h', 1, 0, ?, ?, ?, ?, ?, 'finished')",
                   (rank, unix, clock, clock - 10**9, clock, clock + 10**10))
        for step in range(12):
            began = clock + step * 10_000_001
            timing = {"step": step, "rank": rank, "session": 0, "began_ns": began, "wall_ns": 10_000_001, "step_ns": 9_000_000,
                      "profiled": int(step in (4, 9)), "launches": 3, "enqueue_ns": 3_000, "unexplained_ns": 0}
            timing |= {f"{p}_ns": 0 for p in PHASES}
            db.execute(f"INSERT INTO step_timing ({', '.join(timing)}) VALUES ({', '.join('?' * len(timing))})", tuple(timing.values()))
            if step not in (4, 9):
                continue
            rows: list[tuple[str, str, str, int, int, int | None]] = []
            rows.append(("host enqueue", "device_to_host", "device_to_host", 8_000_000, 8_100_001, None))
            for i in range(3):
                at = 1_000_003 + i * 2_000_001
                rows.append(("host enqueue", "matmul", "forward", at, at + 5_001, i))
                rows += [(f"worker {w}", "matmul", "forward", at + 1_000 + w, at + 1_900_000 + w, i) for w in (0, 1, 10)]
            rows.append(("host enqueue", "inner", "forward", 1_000_004, 1_000_005, None))
            rows += [("comm", "all_reduce", "comm", 100_000, 600_000, None), ("comm", "all_reduce", "comm", 500_000, 900_000, None)]
            rows.append(("data loading", "batch", "data_load", 0, 0, None))
            rows.append(("checkpoint writer", "write", "checkpoint", 9_000_000, 30_000_000, None))
            for track, name, phase, start, stop, flow in rows:
                db.execute("INSERT INTO gpu_timeline VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                           (step, rank, track, name, phase, began + start, began + stop, flow))
            db.execute("INSERT INTO memory VALUES (?, ?, 'activations', 10, 10), (?, ?, 'process', NULL, 77)", (step, rank, step, rank))
    db.commit()
    db.close()
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return metrics(tmp_path / "metrics.sqlite")


def change(run: Path, statement: str) -> None:
    db = sqlite3.connect(run)
    assert db.execute(statement).rowcount > 0, "the test changed nothing"
    db.commit()
    db.close()


def of(document: Any, ph: str) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == ph]


def test_time_begins_with_the_first_event_though_its_step_begins_later(run: Path, tmp_path: Path) -> None:
    """What was handed over ahead begins before its step: no time of the trace is below nothing."""
    change(run, "UPDATE gpu_timeline SET start_ns = start_ns - 150000 WHERE step = 4 AND rank = 0 AND track = 'comm' AND "
                "start_ns = (SELECT min(start_ns) FROM gpu_timeline WHERE step = 4 AND rank = 0 AND track = 'comm')")
    trace.write(run, tmp_path / "t.json")
    events = of(load(tmp_path / "t.json"), "X")
    first = min(events, key=lambda e: e["ts"])
    assert (first["ts"], first["pid"], first["name"]) == (0, 1, "all_reduce")
    assert {e["ts"] for e in events if e["name"] == "step 4"} == {50}


def test_a_step_says_its_slowdown_and_whether_its_gaps_are_judged(run: Path, tmp_path: Path) -> None:
    """Steps of 9 ms; the neighbours of step 4 are 3, 5, 6, 7, 8 and 10, those of step 9 alike. Alone in its session a step says nothing."""
    for step, ns in ((4, 9_100_000), (9, 9_270_000)):
        change(run, f"UPDATE step_timing SET step_ns = {ns} WHERE step = {step} AND rank = 0")
    change(run, "UPDATE step_timing SET profiled = 1 WHERE rank = 1")
    trace.write(run, tmp_path / "t.json")
    output = {(e["pid"], e["name"]): e["args"] for e in of(load(tmp_path / "t.json"), "X") if e["cat"] == "step"}
    assert output[1, "step 4"] == {"step": 4, "slowdown": "+1.11 %", "gaps": "judged"}
    assert output[1, "step 9"] == {"step": 9, "slowdown": "+3.00 %", "gaps": "perturbed, not judged"}
    assert output[2, "step 4"] == {"step": 4, "slowdown": "not known: too few steady neighbours", "gaps": "not judged"}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_keeps_the_format_and_every_nanosecond(run: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    written = trace.write(run, out)
    document = load(out)
    assert breaches(document) == []
    assert (out.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert written.ranks == (0, 1) and written.steps == (4, 9) and written.events == len(document["traceEvents"])
    assert written.arrows == 2 * 2 * 9 == len(of(document, "s")) == len(of(document, "f")) and written.unmatched == 0
    zero = int(document["otherData"]["zero_unix_ns"])
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(document, "M") if e["name"] == "thread_name"}
    shown = sorted((e["pid"] - 1, e["args"]["step"], threads[e["pid"], e["tid"]].removesuffix(" (2)"), e["name"], e["cat"],
                    int(Decimal(e["ts"]) * 1000) + zero, int(Decimal(e["dur"]) * 1000)) for e in of(document, "X") if e["cat"] != "step")
    db = sqlite3.connect(run)
    rows = db.execute("SELECT rank, step, track, name, category, start_ns, stop_ns FROM gpu_timeline").fetchall()
    db.close()
    assert shown == sorted((r, s, t, n, c, start - CLOCKS[r] + UNIX, stop - start) for r, s, t, n, c, start, stop in rows)
    assert all(float(e["ts"]) * 1000 == pytest.approx(int(Decimal(e["ts"]) * 1000), abs=0.25) for e in of(document, "X"))


def test_ranks_are_named_in_order_and_aligned_at_the_barrier(run: Path, tmp_path: Path) -> None:
    trace.write(run, tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    names = {e["pid"]: e["args"]["name"] for e in of(document, "M") if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    order = {e["tid"]: e["args"]["sort_index"] for e in of(document, "M") if e["name"] == "thread_sort_index" and e["pid"] == 1}
    tracks = {e["tid"]: e["args"]["name"] for e in of(document, "M") if e["name"] == "thread_name" and e["pid"] == 1}
    assert [tracks[t] for t in sorted(order, key=lambda t: order[t]) if "(2)" not in tracks[t]] == [
        "steps", "host enqueue", "worker 0", "worker 1", "worker 10", "comm", "data loading", "checkpoint writer"]
    assert {t for t in tracks.values() if "(2)" in t} == {"comm (2)"}  # collectives that overlap
    began = {pid: [e["ts"] for e in of(document, "X") if e["pid"] == pid and e["name"] == "step 4"] for pid in (1, 2)}
    assert began[1] == began[2]  # the same moment on clocks that read differently
    assert [e["args"] for e in of(document, "C")] == [{"activations": 10, "process": 77}] * 4


def test_choice_of_steps_and_ranks(run: Path, tmp_path: Path) -> None:
    written = trace.write(run, tmp_path / "t.json", steps=[9], ranks=[1])
    document = load(tmp_path / "t.json")
    assert breaches(document) == [] and written.steps == (9,) and written.ranks == (1,)
    assert {e["args"]["step"] for e in of(document, "X")} == {9} and {e["pid"] for e in of(document, "X")} == {2}
    assert min(Decimal(e["ts"]) for e in of(document, "X")) == 0


def test_provenance_and_the_mark(tmp_path: Path) -> None:
    trace.write(metrics(tmp_path / "m.sqlite", status="UNGATED"), tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    assert document["otherData"]["status"] == "UNGATED" and document["otherData"]["commit"] == "c0"
    assert document["otherData"]["hardware"] == 'a "quoted" CPU \u2603'
    assert all(e["args"]["name"].endswith("UNGATED") for e in of(document, "M") if e["name"] == "process_name")


def test_a_made_run_too(tmp_path: Path) -> None:
    run = made_runs.make(tmp_path / "run", steps=200, ranks=2, resumes=(100,), timeline=15)
    written = trace.write(run / "metrics.sqlite", tmp_path / "t.json.gz")
    assert breaches(load(tmp_path / "t.json.gz")) == []
    assert len(written.steps) == 15 and min(written.steps) < 100 <= max(written.steps)  # both sessions
    assert written.arrows == 15 * 2 * len(made_runs.ops())


def test_events_of_one_start_nest_and_those_of_no_length_have_no_arrow(run: Path, tmp_path: Path) -> None:
    began = CLOCKS[0] + 4 * 10_000_001
    host = f"INSERT INTO gpu_timeline VALUES (4, 0, 'host enqueue', '%s', 'forward', {began} + %d, {began} + %d, %s)"
    change(run, host % ("inside", 8_200_000, 8_200_100, "NULL"))
    change(run, host % ("around", 8_200_000, 8_300_000, "77"))
    change(run, f"INSERT INTO gpu_timeline VALUES (4, 0, 'worker 0', 'instant', 'forward', {began} + 8250000, {began} + 8250000, 77)")
    change(run, host % ("alone", 8_400_000, 8_400_010, "78"))  # a launch whose execution was never written
    written = trace.write(run, tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    assert breaches(document) == [] and written.arrows == 36 and written.unmatched == 1
    names = [e["name"] for e in of(document, "X")]
    assert names.index("around") < names.index("inside") and "instant" in names


def test_a_launch_that_found_its_stream_idle_is_drawn_from_its_hand_over(run: Path, tmp_path: Path) -> None:
    """A device stamps between launches: the stamp that such a launch begins with was taken when the one before it ended."""
    began = CLOCKS[0] + 4 * 10_000_001 + 8_200_000
    event = f"INSERT INTO gpu_timeline VALUES (4, 0, '%s', 'late', 'forward', {began} + %d, {began} + %d, 77)"
    change(run, event % ("host enqueue", 5_000, 6_000))
    change(run, event % ("stream 0", 2_000, 20_000))
    trace.write(run, tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    assert breaches(document) == []
    late = sorted((e for e in of(document, "X") if e["name"] == "late"), key=lambda e: e["dur"])
    assert late[0]["ts"] == late[1]["ts"] and [e["dur"] for e in late] == [1.0, 15.0]
    change(run, f"UPDATE gpu_timeline SET stop_ns = {began} + 4000 WHERE track = 'stream 0' AND flow = 77")
    with pytest.raises(CorruptError, match="before it was enqueued"):  # over before it was handed over: that is the clocks
        trace.write(run, tmp_path / "t.json")


# What cannot be true is refused, and nothing is left behind ---------------------------------------------------------------------------

HOST = "track = 'host enqueue' AND name = 'matmul' AND step = 9 AND rank = 1 AND flow = 1"
BROKEN: dict[str, tuple[str, type[AlphaError], str]] = {
    "no end": ("UPDATE gpu_timeline SET stop_ns = 'soon' WHERE " + HOST, CorruptError, "no end"),
    "an end before the start": ("UPDATE gpu_timeline SET stop_ns = start_ns - 1 WHERE " + HOST, CorruptError, "ends before it starts"),
    "crossing events of a worker": ("UPDATE gpu_timeline SET stop_ns = stop_ns + 200000 WHERE track = 'worker 1' AND flow = 0 AND step = 4",
                                    CorruptError, "cross"),
    "execution before its enqueue": ("UPDATE gpu_timeline SET start_ns = start_ns - 50000 WHERE track = 'worker 10' AND flow = 2",
                                     CorruptError, "before it was enqueued"),
    "an arrow without a start": ("DELETE FROM gpu_timeline WHERE " + HOST, CorruptError, "arrow"),
    "an event before its session": (f"UPDATE gpu_timeline SET start_ns = {CLOCKS[1] - 2 * 10**9} WHERE " + HOST, CorruptError, "backwards"),
    "a step that begins before the last one ended": ("UPDATE step_timing SET began_ns = began_ns - 5000 WHERE step = 7", CorruptError,
                                                     "backwards"),
    "a step of negative length": ("UPDATE step_timing SET wall_ns = -1 WHERE step = 3", CorruptError, "backwards"),
    "a session seen before it began": ("UPDATE sessions SET seen_ns = began_ns - 1 WHERE rank = 0", CorruptError, "backwards"),
    "a step without timing": ("DELETE FROM step_timing WHERE step = 4 AND rank = 1", CorruptError, "no session"),
    "a rank without a session": ("DELETE FROM sessions WHERE rank = 1", CorruptError, "no session"),
    "no timeline": ("DELETE FROM gpu_timeline", InputError, "no timeline"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_rows_that_cannot_be_true_are_refused(run: Path, tmp_path: Path, fault: str) -> None:
    statement, error, words = BROKEN[fault]
    change(run, statement)
    with pytest.raises(error, match=words):
        trace.write(run, tmp_path / "t.json")
    assert [p.name for p in tmp_path.iterdir() if "json" in p.name] == []


def test_a_missing_end_in_a_table_without_the_rule(run: Path, tmp_path: Path) -> None:
    """A writer that is not ours may leave NULL where our schema does not allow it."""
    db = sqlite3.connect(run)
    db.executescript("CREATE TABLE other AS SELECT * FROM gpu_timeline; DROP TABLE gpu_timeline; ALTER TABLE other RENAME TO gpu_timeline;"
                     "UPDATE gpu_timeline SET stop_ns = NULL WHERE track = 'comm' AND step = 9;")
    db.close()
    with pytest.raises(CorruptError, match="no end"):
        trace.write(run, tmp_path / "t.json")


def test_crossing_is_seen_behind_a_nested_event_too(run: Path, tmp_path: Path) -> None:
    """The first event holds a short one; the third begins after the short one and outlives the first."""
    began = CLOCKS[0] + 4 * 10_000_001 + 8_200_000
    for start, stop in ((0, 50_000), (10_000, 20_000), (30_000, 90_000)):
        change(run, f"INSERT INTO gpu_timeline VALUES (4, 0, 'host enqueue', 'x', 'forward', {began + start}, {began + stop}, NULL)")
    with pytest.raises(CorruptError, match="cross"):
        trace.write(run, tmp_path / "t.json")


def test_a_second_session_before_the_end_of_the_first(run: Path, tmp_path: Path) -> None:
    later = f"INSERT INTO sessions VALUES (1, 0, 'h', 2, 12, {UNIX - 10**10}, 1000, 0, 1000, 5000, NULL)"
    change(run, later)
    assert trace.write(run, tmp_path / "t.json").steps == (4, 9)  # nothing of that session is drawn
    change(run, "UPDATE step_timing SET session = 1 WHERE step = 9 AND rank = 0")
    with pytest.raises(CorruptError, match=r"backwards.*\n.*\n.*\n.*take steps before 9"):
        trace.write(run, tmp_path / "t.json")
    for step in (4, 9):
        assert trace.write(run, tmp_path / "t.json", steps=[step], ranks=[0]).steps == (step,)


@pytest.mark.parametrize(("asked", "words"), [({"steps": [5]}, "step"), ({"ranks": [2]}, "rank"), ({"steps": []}, "no step")])
def test_unknown_steps_and_ranks(run: Path, tmp_path: Path, asked: dict[str, list[int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        trace.write(run, tmp_path / "t.json", **asked)


def test_unknown_runs_old_runs_and_full_disks(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no metrics"):
        trace.write(tmp_path / "nowhere.sqlite", tmp_path / "t.json")
    (tmp_path / "torn.sqlite").write_bytes(run.read_bytes()[:5000])
    with pytest.raises(CorruptError):
        trace.write(tmp_path / "torn.sqlite", tmp_path / "t.json")
    old = made_runs.make(tmp_path / "old", steps=20, version=1)
    with pytest.raises(InputError, match="without timing"):
        trace.write(old / "metrics.sqlite", tmp_path / "t.json")
    change(run, "INSERT OR REPLACE INTO run_metadata VALUES ('x', 'y')")
    db = sqlite3.connect(run)
    db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()
    with pytest.raises(InputError, match="newer"):
        trace.write(run, tmp_path / "t.json")
    with pytest.raises(MachineError, match="cannot be written"):
        trace.write(metrics(tmp_path / "m.sqlite"), tmp_path / "no" / "folder.json")


# The judge itself: a good trace, broken in one place ----------------------------------------------------------------------------------

Document = dict[str, Any]


def _first(document: Document, ph: str, **has: Any) -> dict[str, Any]:
    return next(e for e in document["traceEvents"] if e["ph"] == ph and all(e.get(k) == v for k, v in has.items()))


def _drop(document: Document, event: dict[str, Any]) -> None:
    document["traceEvents"].remove(event)


def _crossed(d: Document) -> None:
    e = _first(d, "X", cat="forward")
    d["traceEvents"].append({**e, "ts": e["ts"] + e["dur"] / 2})


def _unbalanced(d: Document) -> None:
    e = _first(d, "X", cat="forward")
    d["traceEvents"].append({"ph": "B", "name": "b", "pid": e["pid"], "tid": e["tid"], "ts": e["ts"]})


def _stray_end(d: Document) -> None:
    e = _first(d, "X", cat="forward")
    d["traceEvents"].insert(0, {"ph": "E", "pid": e["pid"], "tid": e["tid"], "ts": Decimal(0)})


def _twin_thread(d: Document) -> None:
    names = [e for e in of(d, "M") if e["name"] == "thread_name" and e["pid"] == 1]
    names[0]["args"]["name"] = names[1]["args"]["name"]


def _twin_process(d: Document) -> None:
    for e in of(d, "M"):
        if e["name"] == "process_name":
            e["args"]["name"] = "rank 0"


FAULTS: dict[str, Callable[[Document], object]] = {
    "an event without its end": lambda d: _first(d, "X").pop("dur"),
    "an event without its start": lambda d: _first(d, "X").pop("ts"),
    "a negative length": lambda d: _first(d, "X").update(dur=Decimal(-1)),
    "a time as text": lambda d: _first(d, "X").update(ts="12"),
    "crossed slices": _crossed,
    "a beginning that never ends": _unbalanced,
    "an end without a beginning": _stray_end,
    "an arrow without a start": lambda d: _drop(d, _first(d, "s")),
    "an arrow without an end": lambda d: _drop(d, _first(d, "f")),
    "an arrow from nowhere": lambda d: _first(d, "s").update(ts=Decimal("0.001"), tid=1),
    "an arrow to a moment outside every slice": lambda d: _first(d, "f").update(ts=Decimal(10) ** 9),
    "an arrow back in time": lambda d: _first(d, "s").update(ts=_first(d, "f")["ts"] + 1000),
    "two arrows of one number": lambda d: [e.update(id=1) for e in of(d, "s")],
    "two threads of one name": _twin_thread,
    "two processes of one name": _twin_process,
    "a thread without a name": lambda d: _drop(d, _first(d, "M", name="thread_name")),
    "a process without a name": lambda d: _drop(d, _first(d, "M", name="process_name")),
    "a thread named twice": lambda d: d["traceEvents"].append(dict(_first(d, "M", name="thread_name"))),
    "two threads in one place": lambda d: [e["args"].update(sort_index=0) for e in of(d, "M") if e["name"] == "thread_sort_index"],
    "a counter of text": lambda d: _first(d, "C").update(args={"x": "1"}),
    "an unknown type": lambda d: _first(d, "X").update(ph="x"),
    "another unit": lambda d: d.update(displayTimeUnit="s"),
    "no events": lambda d: d.pop("traceEvents"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_sees(run: Path, tmp_path: Path, fault: str) -> None:
    trace.write(run, tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    broken = copy.deepcopy(document)
    FAULTS[fault](broken)
    assert broken != document and breaches(broken), fault


def test_the_judge_reads_the_file_strictly(tmp_path: Path) -> None:
    for text in ('{"traceEvents": [{"ts": NaN}]}', '{"traceEvents": [], "traceEvents": []}', '{"traceEvents": ['):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(ValueError):
            load(tmp_path / "t.json")
    assert breaches(json.loads('{"traceEvents": []}')) == []


def test_the_judge_knows_both_ways_to_draw_a_slice() -> None:
    head = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "p"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "t"}}]

    def at(ph: str, ts: int, **more: Any) -> dict[str, Any]:
        return {"ph": ph, "name": "a", "pid": 1, "tid": 2, "ts": ts, **more}

    assert breaches([*head, at("B", 0), at("X", 2, dur=3), at("E", 9)]) == []
    assert breaches([*head, at("B", 0), at("X", 2, dur=30), at("E", 9)])  # the inner one outlives the outer
    assert breaches([*head, at("X", 5, dur=2), at("s", 0, cat="c", id=1), at("f", 1, cat="c", id=1)])  # the start hangs on nothing
    next_slice = at("f", 3, cat="c", id=1)
    assert breaches([*head, at("X", 0, dur=1), at("X", 5, dur=2), at("s", 0, cat="c", id=1), next_slice]) == []
    assert breaches([*head, at("X", 0, dur=1), at("X", 5, dur=2), at("s", 0, cat="c", id=1), {**next_slice, "bp": "e"}])


# Between ranks ------------------------------------------------------------------------------------------------------------------------


def meet(run: Path, late_ns: int) -> None:
    """Step 4: both ranks in the slice [100, 600] us of `comm`; rank 1 comes `late_ns` after rank 0, both end at 590 us."""
    db = sqlite3.connect(run)
    db.executescript(COMMUNICATION)
    for rank in (0, 1):
        began = CLOCKS[rank] + 4 * 10_000_001
        db.execute("INSERT INTO collectives VALUES (4, ?, 9, 3, 'all_reduce', 'comm', 'f32', 64, ?, ?, '')",
                   (rank, began + 110_000 + late_ns * rank, began + 590_000))
    db.commit()
    db.close()


def test_an_arrow_leads_from_the_rank_that_came_last(run: Path, tmp_path: Path) -> None:
    meet(run, late_ns=200_000)
    written = trace.write(run, tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    assert breaches(document) == [] and written.waits == 1
    start, end = (next(e for e in of(document, ph) if e["cat"] == "collective") for ph in "sf")
    assert (start["pid"], end["pid"]) == (2, 1)
    zero = min(e["ts"] for e in of(document, "X") if e["name"] == "step 4")
    assert start["ts"] - zero == end["ts"] - zero == Decimal("310")
    assert trace.write(run, tmp_path / "one.json", ranks=[1]).waits == 0


def test_clocks_that_do_not_fit_are_refused(run: Path, tmp_path: Path) -> None:
    """A rank cannot leave a sum before the last one has come: so much for a clock that stands 0.6 ms elsewhere."""
    meet(run, late_ns=200_000)
    change(run, "UPDATE sessions SET clock_ns = clock_ns - 600000 WHERE rank = 1")
    with pytest.raises(CorruptError, match=r"(?s)clocks of two ranks do not fit.*rank 0 left it 320000 ns before rank 1 came"):
        trace.write(run, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_what_a_plan_launches_names_its_microbatch(run: Path, tmp_path: Path) -> None:
    """Of step 4 of rank 0: two Plans with text and one without; the first product lies in the first, the second and third in the others."""
    db = sqlite3.connect(run)
    db.executescript(COMMUNICATION)
    began = CLOCKS[0] + 4 * 10_000_001
    for call, (plan, shard, micro, start) in enumerate((("micro_first@0", 2, 0, 0), ("micro_last@0", 2, 1, 3), ("update", None, None, 5))):
        db.execute("INSERT INTO calls VALUES (4, 0, ?, ?, ?, ?, ?, ?)",
                   (call, plan, shard, micro, began + start * 10**6, began + start * 10**6 + 2_000_000 + 1_000_000 * (call == 0)))
    db.commit()
    db.close()
    trace.write(run, tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    assert breaches(document) == []
    mine = [e for e in of(document, "X") if e["pid"] == 1 and e["args"]["step"] == 4]
    said = [e["args"] for e in sorted(mine, key=lambda e: float(e["ts"])) if e["name"] == "matmul" and e["cat"] == "forward"]
    first, last = {"plan": "micro_first@0", "shard": 2, "microbatch": 0}, {"plan": "micro_last@0", "shard": 2, "microbatch": 1}
    assert said == [{"step": 4, **words} for words in (first, last, {"plan": "update"}) for _ in range(4)]
    assert [e["args"] for e in mine if e["cat"] == "comm"] == [{"step": 4, **first}] * 2
    assert all("plan" not in e["args"] for e in of(document, "X") if e["pid"] == 2 or e["cat"] == "step")
