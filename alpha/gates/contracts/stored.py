"""Cases of the files of what a run measured: metrics.sqlite as it is written and read, and the trace that is made of it. Floor 7.

Rows are drawn, written and read back. A trace is read as JSON, and each row must be there to the nanosecond.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import AlphaError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.profile import files, timelines
from alpha.gates.contracts.profile.support import elsewhere
from alpha.gates.contracts.reference import hash_of
from alpha.profile import trace
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.profile.schema import COMMUNICATION, SOURCES, TABLES, VERSION, VIEWS
from alpha.profile.store import Store, connect, read

Case = Callable[[np.random.Generator], Measured]
TIMES = [f"{p}_ns" for p in PHASES] + [f"{p}_overlapped_ns" for p in OVERLAPPING]


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory(prefix="alpha-stored-") as root:
        yield Path(root)


def timing_row(rng: np.random.Generator, step: int, rank: int, session: int = 0, began: int = 0) -> dict[str, Any]:
    """A row of step_timing whose times add up, drawn."""
    spent = {name: int(x) for name, x in zip(TIMES, rng.integers(0, 1 << 20, len(TIMES)))}
    known, extra = sum(spent[f"{p}_ns"] for p in PHASES), int(rng.integers(0, 99))
    return {"step": step, "rank": rank, "session": session, "began_ns": began, "wall_ns": known + extra,
            "step_ns": int(rng.integers(1, known + extra)), "profiled": int(rng.integers(2)), "launches": 3, "enqueue_ns": 1, **spent,
            "unexplained_ns": extra}


def error_of(action: Callable[[], object]) -> str:
    """The class of an error that this project raises, '' where none came. Any other error is the case's own failure."""
    try:
        action()
    except AlphaError as error:
        return type(error).__name__
    return ""


# -- the store -----------------------------------------------------------------------------------------------------------------


def written(rng: np.random.Generator) -> Measured:
    """Rows of several ranks, one replaced and some made late, are read as they were said; the views are the rows in milliseconds."""
    checks = []
    with folder() as root:
        path, want = root / "m.sqlite", {}
        stores = [Store(path, rank) for rank in range(3)]
        for rank, store in enumerate(stores):
            store.begin(0, 5, 6, 7)
            for step in range(int(rng.integers(3, 9))):
                for _ in range(2):  # the second of a key replaces the first
                    want[step, rank] = row = timing_row(rng, step, rank)
                    if rng.random() < 0.5:
                        store.add("step_timing", row)
                    else:
                        store.later(lambda row=row: [("step_timing", row)])  # type: ignore[misc]
            store.describe({"a": rank, "b": 1.5})
        for store in stores:
            store.flush()
        names = list(next(iter(want.values())))
        with closing(connect(path)) as db:  # still open for writing
            found = {(r[0], r[1]): dict(zip(names, r)) for r in db.execute(f"SELECT {', '.join(names)} FROM step_timing")}
            shown = db.execute("SELECT step, rank, wall_ms, forward_ms, comm_overlapped_ms, unexplained_ms FROM step_timing_ms").fetchall()
            sessions = db.execute("SELECT session, rank, began_ns, clock_ns, unix_ns, ended FROM sessions ORDER BY rank").fetchall()
        checks.append((f"{len(found)} rows for {len(want)}", found == want))
        checks.append(("the view", {(s, r): rest for s, r, *rest in shown} == {
            key: [row[f"{x}_ns"] / 1e6 for x in ("wall", "forward", "comm_overlapped", "unexplained")] for key, row in want.items()}))
        checks.append((f"{sessions}", sessions == [(0, r, 5, 6, 7, None) for r in range(3)]))
        stores[0].mark(ended="finished", loop_ns=44)
        for store in stores:
            store.close()
        ends = read(path, "sessions", "rank, ended, loop_ns, seen_ns")
        checks.append((f"ends {ends}", [e[:3] for e in ends] == [(0, "finished", 44), (1, None, None), (2, None, None)]))
        checks.append(("last seen", all(e[3] > 6 for e in ends)))
        checks.append(("metadata", dict(read(path, "run_metadata")) == {"a": "2", "b": "1.5"}))
        with Store(path, 1) as again:
            again.begin(3, 50, 60, 70)
            checks.append((f"session {again.session}", again.session == 1 and again.next_session() == 2))
            again.renumber(4)
            again.mark(ended="stopped")
        checks.append(("renumbered", (4, 1, "stopped") in read(path, "sessions", "session, rank, ended")))
    return all_hold(checks)


STEPPED = {"step_metrics": False, "step_timing": True, "op_profile": True, "kernel_times": True, "kernel_profile": True,
           "gpu_timeline": True, "memory": True, "communication": True, "collectives": True, "calls": True}
"""Tables whose rows a step leaves, and whether each rank has its own."""


def any_row(db: sqlite3.Connection, table: str, step: int, rank: int) -> tuple[str, list[object]]:
    """A statement that writes a row of a table with this step and rank, and its values."""
    columns = [(name, kind) for _, name, kind, *_ in db.execute(f"PRAGMA table_info({table})")]
    values: list[object] = [{"step": step, "rank": rank}.get(name, "x" if kind == "TEXT" else 1) for name, kind in columns]
    return f"INSERT INTO {table} ({', '.join(name for name, _ in columns)}) VALUES ({', '.join('?' * len(columns))})", values


AFTER = ("evaluations", "samples", "source_evaluations")
"""Tables whose rows are of the steps before them."""


def taken_back(rng: np.random.Generator) -> Measured:
    """A run that goes back forgets what comes from that step on: every table of this rank, and on the first one those of ranks that are no
    longer there. Validations and samples are of the step before."""
    checks = []
    for rank in (0, int(rng.integers(1, 4))):
        with folder() as root:
            path, step, ranks = root / "m.sqlite", int(rng.integers(1, 6)), int(rng.integers(1, 3)) + rank
            Store(path).close()
            with closing(sqlite3.connect(path)) as db:
                db.executescript(COMMUNICATION)
                db.executescript(SOURCES)
                for table, own in STEPPED.items():
                    for s in range(7):
                        for r in range(5 if own else 1):
                            db.execute(*any_row(db, table, s, r))
                for table in AFTER:
                    for s in range(8):
                        db.execute(*any_row(db, table, s, 0))
                db.commit()
            with Store(path, rank) as store:
                store.rewind(step, ranks)
            gone = {rank, *(range(ranks, 5) if rank == 0 else ())}
            for table, own in STEPPED.items():
                left = set(read(path, table, "step, rank" if own else "step, 0"))
                want = {(s, r) for s in range(7) for r in range(5 if own else 1) if s < step or (own and r not in gone)}
                checks.append((f"{table} of rank {rank} of {ranks} at {step}", left == want))
            for table in AFTER:
                checks.append((f"{table} at {step}", {s for s, in read(path, table, "step")} == set(range(step + 1))))
    return all_hold(checks)


def refused_files(rng: np.random.Generator) -> Measured:
    """No file, no database, a newer schema, one that was never finished, a damaged page; and a writer that could not write says so at
    each call behind."""
    checks = []
    with folder() as root:
        def made(name: str, version: int) -> Path:
            with closing(sqlite3.connect(root / name)) as db:
                db.executescript(TABLES + f"PRAGMA user_version={version};")
            return root / name

        (root / "text").write_bytes(rng.bytes(4096))
        torn = made("torn", VERSION)
        raw = bytearray(torn.read_bytes())
        raw[100:4096] = rng.bytes(3996)
        torn.write_bytes(raw)
        for name, path, want in (("none", root / "none", "InputError"), ("text", root / "text", "CorruptError"), 
                                 ("torn", torn, "CorruptError"),
                                 ("newer", made("newer", VERSION + 1), "InputError"), ("begun", made("begun", 0), "CorruptError")):
            came = error_of(lambda path=path: connect(path).close())  # type: ignore[misc]
            checks.append((f"{name}: {came}", came == want))
        checks.append(("a writer of a newer schema", error_of(lambda: Store(root / "newer").close()) == "InputError"))
        store = Store(root / "dead")
        store.add("step_metrics", {"step": 1, "no_such_column": 2})
        errors = [error_of(say) for say in (store.flush, lambda: store.describe({"a": 1}), store.flush, store.close)]
        checks.append((f"a dead writer: {errors}", "" not in errors and len(set(errors)) == 1))
        store = Store(root / "rows")
        store.later(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        checks.append(("rows that cannot be made", error_of(store.flush) == error_of(store.close) == "GraphError"))
    return all_hold(checks)


def stored_hash(seed: int) -> str:
    """Of rows that were written and read."""
    rng = np.random.default_rng(seed)
    with folder() as root:
        with Store(root / "m.sqlite") as store:
            for step in range(9):
                store.add("step_timing", timing_row(rng, step, 0))
        return hash_of(np.array(read(root / "m.sqlite", "step_timing"), np.int64))


# -- the trace -----------------------------------------------------------------------------------------------------------------


class Made:
    """A drawn metrics.sqlite of several ranks and two sessions, each rank with a clock of its own. `events`: rows of gpu_timeline;
    `unix`: (step, rank) -> Unix ns less ns of that rank's clock; `status`: in the metadata."""

    def __init__(self, path: Path, rng: np.random.Generator, *, status: str = "GATED") -> None:
        self.path, self.ranks = path, int(rng.integers(1, 4))
        self.events: list[tuple[int, int, str, str, str, int, int, int | None]] = []
        self.unix: dict[tuple[int, int], int] = {}
        self.timing: dict[tuple[int, int], tuple[int, int]] = {}
        with closing(sqlite3.connect(path)) as db:
            db.executescript(TABLES + VIEWS + f"PRAGMA user_version={VERSION};")
            db.executemany("INSERT INTO run_metadata VALUES (?, ?)", [("status", status), ("hardware", "made")])
            for rank in range(self.ranks):
                clock = int(rng.integers(1 << 20, 1 << 40))
                for session, stamp in ((0, 10**18), (1, 10**18 + 10**12)):
                    zero = clock + session * 10**12
                    db.execute("INSERT INTO sessions VALUES (?, ?, 'made', 1, ?, ?, ?, ?, ?, ?, 'finished')",
                               (session, rank, 4 * session, stamp + rank * 77, zero, zero - 9, zero, zero + 10**9))
                    at = zero + 1000
                    for step in range(4 * session, 4 * session + 4):
                        self.unix[step, rank] = stamp - zero  # of the lowest rank: the moment is one and the same
                        row = timing_row(rng, step, rank, session, at)
                        at += row["wall_ns"]
                        self.timing[step, rank] = row["began_ns"], row["wall_ns"]
                        db.execute(f"INSERT INTO step_timing ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
                        if step % 4 != 1:
                            self._step(rng, step, rank, row["began_ns"])
            db.executemany("INSERT INTO gpu_timeline VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self.events)
            db.executemany("INSERT INTO memory VALUES (?, ?, ?, ?, ?)", [(2, r, "act", 7, 1000 + r) for r in range(self.ranks)])
            db.commit()

    def _step(self, rng: np.random.Generator, step: int, rank: int, began: int) -> None:
        at = free = began + int(rng.integers(0, 99))
        for flow in range(int(rng.integers(1, 7))):
            handed = int(rng.integers(1, 50))
            self.events.append((step, rank, "host enqueue", f"op{flow}", "forward", at, at + handed, flow))
            free = max(free, at) + int(rng.integers(0, 20))
            length = int(rng.integers(1, 90))
            self.events.append((step, rank, f"stream {flow % 2}", f"op{flow}", "forward", free, free + length, flow))
            free, at = free + length, at + handed + int(rng.integers(0, 9))
        if rng.random() < 0.5:
            self.events.append((step, rank, "gaps", "gap", "idle", free, free + 5, None))

    def edit(self, statement: str, values: Sequence[object] = ()) -> None:
        """Change a row."""
        with closing(sqlite3.connect(self.path)) as db:
            db.execute(statement, values)
            db.commit()


def traced(rng: np.random.Generator) -> Measured:
    """Every row of a timeline is in the trace at its own time, all ranks on one clock; arrows lead from each hand-over to what it ran."""
    checks = []
    for trial in range(4):
        with folder() as root:
            status = ("GATED", "UNGATED")[trial % 2]
            made = Made(root / "m.sqlite", rng, status=status)
            ranks = None if trial < 2 else [made.ranks - 1]
            steps = None if trial != 3 else [0, 6]
            out = root / ("t.json.gz" if trial % 2 else "t.json")
            done = trace.write(made.path, out, steps, ranks)
            raw = gzip.decompress(out.read_bytes()) if trial % 2 else out.read_bytes()
            content = json.loads(raw, parse_float=Decimal)
            events = content["traceEvents"]
            want = [e for e in made.events if (steps is None or e[0] in steps) and (ranks is None or e[1] in ranks)]
            cells = {(e[0], e[1]) for e in want}
            rows = [(s, r, f"step {s}", "step", b, b + w) for (s, r), (b, w) in made.timing.items() if (s, r) in cells]
            rows += [(s, r, name, category, a, b) for s, r, _, name, category, a, b, _ in want]
            zero = min(a + made.unix[s, r] for s, r, _, _, a, _ in rows)
            expected = Counter((s, r + 1, name, category, Decimal(a + made.unix[s, r] - zero) / 1000, Decimal(b - a) / 1000)
                               for s, r, name, category, a, b in rows)
            found = Counter((e["args"]["step"], e["pid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X")
            checks.append((f"{(found - expected) or (expected - found)}", found == expected))
            checks.append((f"zero {content['otherData']['zero_unix_ns']}", content["otherData"]["zero_unix_ns"] == str(zero)))
            pairs = [(s, r, f) for s, r, track, _, _, _, _, f in want if f is not None and track != "host enqueue"]
            starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
            checks.append((f"{done.arrows} arrows", len(starts) == len(ends) == done.arrows == len(pairs) and starts.keys() == ends.keys()))
            host = {(s, r, f): a for s, r, track, _, _, a, _, f in want if track == "host enqueue"}
            device = {(s, r, f): a for s, r, track, _, _, a, _, f in want if track.startswith("stream")}
            joined = Counter((e["pid"], e["ts"], ends[i]["ts"]) for i, e in starts.items() if i in ends)
            times = Counter((r + 1, *(Decimal(x[s, r, f] + made.unix[s, r] - zero) / 1000 for x in (host, device))) for s, r, f in pairs)
            checks.append(("where arrows lead", joined == times))
            memory = {e["pid"]: e["args"] for e in events if e["ph"] == "C"}
            checks.append((f"memory {memory}", memory == {r + 1: {"act": 1000 + r} for s, r in cells if s == 2}))
            names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
            checks.append((f"{names}",
                           len(names) == len({r for _, r in cells}) and all(("UNGATED" in n) == bool(trial % 2) for n in names)))
            checks.append((f"{done.events} events", done.events == len(events)))
    return all_hold(checks)


def no_trace(rng: np.random.Generator) -> Measured:
    """Rows that contradict each other make no trace, and no file is left of one: events without an end, that cross or begin before their
    session, clocks that step back, arrows without a start; nor do steps and ranks that are not there."""
    checks = []
    last = "(SELECT max(rowid) FROM gpu_timeline WHERE track = 'host enqueue')"
    for name, statement, want in (
        ("ends early", f"UPDATE gpu_timeline SET stop_ns = start_ns - 1 WHERE rowid = {last}", "CorruptError"),
        ("no end", f"UPDATE gpu_timeline SET stop_ns = 'x' WHERE rowid = {last}", "CorruptError"),
        ("before its session", f"UPDATE gpu_timeline SET start_ns = 3 WHERE rowid = {last}", "CorruptError"),
        ("two starts", "INSERT INTO gpu_timeline SELECT step, rank, track, name, category, stop_ns + 50000, stop_ns + 50001, flow "
                       f"FROM gpu_timeline WHERE rowid = {last}", "CorruptError"),
        ("crossing", "INSERT INTO gpu_timeline SELECT step, rank, track, name, category, start_ns + 1, stop_ns + 60, NULL "
                     f"FROM gpu_timeline WHERE rowid = {last} AND stop_ns > start_ns + 1", "CorruptError"),
        ("no session", "DELETE FROM sessions WHERE session = 1 AND rank = 0", "CorruptError"),
        ("sessions overlap", "UPDATE sessions SET seen_ns = seen_ns + 999500000000 WHERE session = 0 AND rank = 0", "CorruptError"),
        ("steps overlap", "UPDATE step_timing SET wall_ns = wall_ns + 1 WHERE step = 2 AND rank = 0", "CorruptError"),
        ("clock before its beginning", "UPDATE sessions SET began_ns = clock_ns + 1 WHERE session = 0 AND rank = 0", "CorruptError"),
        ("no timeline", "DELETE FROM gpu_timeline", "InputError"),
        ("before it was handed over", "UPDATE gpu_timeline SET start_ns = start_ns - 900, stop_ns = stop_ns - 900 "
                                      "WHERE track LIKE 'stream%' AND step = 0 AND rank = 0", "CorruptError"),
        ("schema without timing", "PRAGMA user_version=1", "InputError"),
    ):
        with folder() as root:
            made = Made(root / "m.sqlite", rng)
            made.edit(f"UPDATE gpu_timeline SET stop_ns = start_ns + 3 WHERE rowid = {last}")
            made.edit(statement)
            came = error_of(lambda made=made, root=root: trace.write(made.path, root / "t.json"))  # type: ignore[misc]
            checks.append((f"{name}: {came}", came == want and sorted(p.name for p in root.iterdir()) == ["m.sqlite"]))
    with folder() as root:
        made = Made(root / "m.sqlite", rng)
        for name, more in (("step", {"steps": [1]}), ("rank", {"ranks": [7]}), ("no step", {"steps": []})):
            came = error_of(lambda made=made, more=more: trace.write(made.path, root / "t.json", **more))  # type: ignore[misc]
            checks.append((f"{name}: {came}", came == "InputError"))
    return all_hold(checks)


def trace_hash(seed: int) -> str:
    """Of a trace of drawn rows."""
    with folder() as root:
        trace.write(Made(root / "m.sqlite", np.random.default_rng(seed)).path, root / "t.json.gz")
        return hash_of(np.frombuffer((root / "t.json.gz").read_bytes(), np.uint8))


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "profile.store": {"parity": [("written", written), ("taken back", taken_back), *files.PARITY],
                      "faults": [("refused files", refused_files), *files.FAULTS],
                      "determinism": [("elsewhere", elsewhere("stored_hash", stored_hash, __name__))]},
    "profile.trace": {"parity": [("traced", traced), *timelines.PARITY], "faults": [("no trace", no_trace), *timelines.FAULTS],
                      "determinism": [("elsewhere", elsewhere("trace_hash", trace_hash, __name__))]},
}
