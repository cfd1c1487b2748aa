"""Cases of metrics.sqlite beside a run: what a comparison reads of it, locks, folders that nobody may write, damage. Floor 7.

A lock or a disk of another machine is a stand-in: what SQLite would say of it is said in its place.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs, words
from alpha.gates.contracts.profile.measured import made
from alpha.gates.contracts.profile.support import Case, folder
from alpha.profile import compare, store
from alpha.profile.phases import PHASES
from alpha.profile.schema import TABLES, VERSION
from alpha.profile.store import Store, connect
from alpha.profile.timed import timed

CONNECT = sqlite3.connect
LOCKED = "end what holds it, then go on"
ROOM = "free some space or check the folder, then go on"


def rows_of(path: Path, query: str) -> list[tuple[Any, ...]]:
    """What a query of SQLite itself gives."""
    with closing(CONNECT(path)) as db:
        return db.execute(query).fetchall()


def closed(db: sqlite3.Connection) -> bool:
    """Whether a connection was closed."""
    try:
        db.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return True
    return False


def write(path: Path, *statements: str) -> None:
    """Statements, with SQLite itself."""
    with closing(CONNECT(path)) as db:
        for statement in statements:
            db.executescript(statement)


def runs_read(rng: np.random.Generator) -> Measured:
    """A comparison reads the rows of a run as they were written: columns, name and facts; of an older file, no checks; and it is one
    moment's, whatever is written meanwhile."""
    checks = []
    for trial in range(4):
        with folder() as root:
            path = root / "run" / "metrics.sqlite"
            path.parent.mkdir()
            run = made(rng, "drawn", ranks=1 + trial % 2, steps=12, peaks=(0, 5)[trial % 2], profiled=(4, 99)[trial // 2])
            facts = {k: v for k, v in run.metadata.items() if k != "name" or trial % 2}
            with Store(path) as s:
                s.describe(facts)
                for r in run.timing:
                    s.add("step_timing", {**r, "began_ns": 0, "wall_ns": 9, "launches": 1, "enqueue_ns": 1})
                more = {"component": "c", "layer": "", "dtype": "f32", "count": 1, "enqueue_ns": 1, "wait_ns": 1, "flops": 1, "nbytes": 1,
                        "dispatches": 1}
                for r in run.ops:
                    s.add("op_profile", {**r, **more})
                for r in run.peaks:
                    s.add("peaks", {"clock_ns": 1, "rank": 0, **r})
            if trial == 1:
                write(path, "DROP VIEW step_timing_ms; ALTER TABLE step_timing DROP COLUMN checks_ns; PRAGMA user_version=2;")
                run.timing = [{**r, "checks_ns": 0} for r in run.timing]
            got = compare.read(path)
            checks.append(differs("name and facts", (got.name, got.metadata), ("drawn" if trial % 2 else "run", facts)))
            columns = ("step", "rank", "session", "profiled", "step_ns", "unexplained_ns", *(f"{p}_ns" for p in PHASES))
            of_ops = ("step", "rank", "plan", "launch", "op", "shape", "phase", "device_ns")
            for name, found, rows, names in (("timing", got.timing, run.timing, columns), ("ops", got.ops, run.ops, of_ops),
                                             ("peaks", got.peaks, run.peaks, ("flops", "bandwidth"))):
                there = sorted(zip(*(np.asarray(found[n]).tolist() for n in names))) if found else []
                checks.append((f"{name}: {len(there)}", there == sorted(tuple(r[n] for n in names) for r in rows)))
                checks.append((f"{name}: {list(found)}", list(found) == (list(names) if rows else [])))
            with timed(path) as db, Store(path) as s:
                before = db.execute("SELECT count(*) FROM step_metrics").fetchone()
                s.add("step_metrics", {"step": 1, "tokens": 1, "seconds": 1.0, "finite": 1})
                s.flush()
                after = db.execute("SELECT count(*) FROM step_metrics").fetchone()
            checks.append(differs("one moment", (before, after, rows_of(path, "SELECT count(*) FROM step_metrics")), ((0,), (0,), [(1,)])))
    return all_hold(checks)


def not_timed(rng: np.random.Generator) -> Measured:
    """A schema without timing, a lock and a damaged table met while reading are told apart; the connection is closed in the end."""
    checks = []
    with folder() as root:
        old, path = root / "old.sqlite", root / "m.sqlite"
        for name, version in ((old, 1), (path, int(rng.integers(2, VERSION + 1)))):
            write(name, TABLES, f"PRAGMA user_version={version};")

        def inside(text: str, where: Path = path) -> tuple[tuple[str, ...], bool]:
            opened: list[sqlite3.Connection] = []

            def go_on() -> None:
                with timed(where) as db:
                    opened.append(db)
                    if text:
                        raise sqlite3.OperationalError(text) if rng.integers(2) else sqlite3.DatabaseError(text)

            return words(go_on), all(map(closed, opened))

        checks.append(differs("old", inside("", old), (("InputError", "the run was recorded without timing", f"{old}: schema 1",
                                                        "schema 2 or newer", "run it again, or resume it, with this release"), True)))
        checks.append(differs("sound", inside(""), ((), True)))
        for text in ("database is locked", "it is busy"):
            want = ("BusyError", "the metrics are locked", f"{path}: {text}", "", "end what holds them, then try again")
            checks.append(differs(text, inside(text), (want, True)))
        want = ("CorruptError", "the metrics cannot be read", f"{path}: no such table", "the tables of a run", "")
        checks.append(differs("damaged", inside("no such table"), (want, True)))
    return all_hold(checks)


def meanings(rng: np.random.Generator) -> Measured:
    """What SQLite says is a lock, a machine without room, or damage; so says who writes, who connects and who reads."""
    checks = []
    busy, room = ("the metrics are locked", "a lock that is let go of", LOCKED), \
        ("the metrics cannot be read or written", "room and permission there", ROOM)
    damage = ("the metrics are damaged", "a sound SQLite file", "restore or remove it")
    with folder() as root:
        path = root / "m.sqlite"
        for kind, text, name, (what, expected, do) in (
                (sqlite3.OperationalError, "database is locked", "BusyError", busy), (sqlite3.DatabaseError, "busy", "BusyError", busy),
                (sqlite3.OperationalError, "disk I/O error", "MachineError", room),
                (sqlite3.OperationalError, "database disk image is malformed", "CorruptError", damage),
                (sqlite3.DatabaseError, "file is not a database", "CorruptError", damage),
                (sqlite3.IntegrityError, "no room", "CorruptError", damage)):
            e = store.refused(path, kind(text))
            want = (name, what, f"{path}: {text}", expected, do)
            checks.append(differs(text, (type(e).__name__, e.what, e.came, e.expected, e.do), want))
        Store(path).close()
        want = ("MachineError", room[0], f"{path}: no such table: no_table", *room[1:])
        checks.append(differs("read", words(lambda: store.read(path, "no_table")), want))
        names = [f"k{i}" for i in rng.permutation(9)]
        with Store(path) as s:
            s.describe(dict.fromkeys(names, 1.5))
        checks.append(differs("rows", store.read(path, "run_metadata", "key, value"), [(n, "1.5") for n in sorted(names)]))
        wrong = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")  # SQLite quotes a damaged name
        with mock.patch.object(sqlite3, "connect", lambda *a, **k: Standing(CONNECT(*a, **k), lambda text: wrong)):
            came = f"{path}: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
            checks.append(differs("a name", words(lambda: connect(path)), ("CorruptError", damage[0], came, *damage[1:])))
    return all_hold(checks)


class Standing:
    """A connection that may say another thing: `fails(statement)` is what it raises, None where it does as asked."""

    def __init__(self, db: sqlite3.Connection, fails: Callable[[str], Exception | None]) -> None:
        self.db, self.fails = db, fails

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        error = self.fails(statement)
        if error is not None:
            raise error
        return self.db.execute(statement, *values)

    def close(self) -> None:
        self.db.close()


def opening(rng: np.random.Generator) -> Measured:
    """A file that others hold is asked for again until patience ends, each time afresh; any other error ends it at once. The file of an
    older release gets its column; a store that died does not hide another error, and is closed once."""
    checks = []
    for refusals, error in ((int(rng.integers(1, 5)), "database is locked"), (99, "database is locked"), (1, "disk I/O error")):
        with folder() as root:
            opened: list[Standing] = []
            naps: list[float] = []
            now = [float(rng.integers(1000))]
            began = now[0]

            def fails(text: str, opened: list[Standing] = opened, refusals: int = refusals, error: str = error) -> Exception | None:
                return sqlite3.OperationalError(error) if "BEGIN" in text and len(opened) <= refusals else None

            def standing(*a: Any, opened: list[Standing] = opened, fails: Callable[[str], Exception | None] = fails, **how: Any) -> Any:
                opened.append(Standing(CONNECT(*a, **how), fails))
                return opened[-1] if len(opened) <= refusals else opened[-1].db  # noqa: B023

            def nap(seconds: float, naps: list[float] = naps, now: list[float] = now) -> None:
                naps.append(seconds)
                now[0] += 6.0

            made_: list[Store] = []
            with mock.patch.object(sqlite3, "connect", standing), mock.patch.object(store.time, "sleep", nap), \
                    mock.patch.object(store.time, "monotonic", lambda now=now: now[0]):
                said = words(lambda: made_.append(Store(root / "m.sqlite")))  # noqa: B023
            for s in made_:
                s.describe({"a": 1})
                s.close()
            if refusals == 99:
                checks.append(differs("patience", (said[0], naps, now[0] - began, len(opened)), ("BusyError", [0.01] * 10, 60.0, 11)))
            elif error == "disk I/O error":
                checks.append(differs("at once", (said, naps), (("MachineError", "the metrics cannot be read or written",
                                                                 f"{root / 'm.sqlite'}: {error}", "room and permission there", ROOM), [])))
            else:
                there = rows_of(root / "m.sqlite", "SELECT value FROM run_metadata")
                checks.append(differs("again", (said, len(naps), len(opened), there), ((), refusals, refusals + 1, [("1",)])))
            checks.append(("each is closed", all(closed(s.db) for s in opened)))
    with folder() as root:
        path = root / "m.sqlite"
        write(path, TABLES.replace("    checks_ns INTEGER NOT NULL DEFAULT 0,\n", ""), "PRAGMA user_version=2;")
        for _ in range(2):
            Store(path).close()
            names = [str(row[1]) for row in rows_of(path, "PRAGMA table_info(step_timing)")]
            version = rows_of(path, "PRAGMA user_version")
            checks.append(differs("the younger column", (names.count("checks_ns"), version), (1, [(VERSION,)])))

        def dying() -> None:
            with Store(path) as s:
                s.add("step_metrics", {"no_such_column": 1})
                raise KeyError("the run's own error")

        try:
            dying()
        except KeyError as error:
            checks.append(differs("its own error", error.args, ("the run's own error",)))
        s = Store(path)
        s.begin(0, 1, 2, 3)
        s.flush()
        early = rows_of(path, "SELECT seen_ns FROM sessions")
        s.close()
        seen = rows_of(path, "SELECT seen_ns FROM sessions")
        s.close()
        s.flush()  # nobody writes any more, and nothing is left to write
        checks.append(("closed once", seen == rows_of(path, "SELECT seen_ns FROM sessions") and seen[0][0] > early[0][0] > 2))
    return all_hold(checks)


def gone_back(rng: np.random.Generator) -> Measured:
    """Spot checks, waits for data and validations by source of a run that went back are forgotten, of ranks that are gone by the first
    one; tables that only some runs have are made when they are needed."""
    checks = []
    for rank in (0, int(rng.integers(1, 4))):
        with folder() as root:
            path, step, ranks = root / "m.sqlite", int(rng.integers(1, 6)), int(rng.integers(1, 3)) + rank
            with Store(path, rank) as s:
                for _ in range(2):
                    s.checked_again(step, ranks)
                    s.waits_again(step, ranks)
                    for at, r in itertools.product(range(7), range(5)):
                        s.add("spot_checks", {"step": at, "rank": r, "call": 0, "plan": "p", "launch": 0, "op": "o", "how": "rows",
                                              "elements": 1, "ratio": 0.5, "ns": 1})
                        s.add("data_waits", {"step": at, "rank": r, "batches": 1, "ready": 1, "wait_ns": 1, "made_ns": 1})
                alone = bool(rng.integers(2))
                for forget in (s.checked_again, s.waits_again):
                    forget(step) if alone else forget(step, ranks)
                sources = {f"s{i}": {"nats": float(i), "tokens": i, "bytes": i, "windows": i, "bits_per_byte": 0.5} for i in range(3)}
                for at in range(7):
                    s.of_sources(at, sources)
                s.rewind(step)
            gone = {rank, *(range(1 if alone else ranks, 5) if rank == 0 else ())}
            want = [(a, r) for a, r in itertools.product(range(7), range(5)) if a < step or r not in gone]
            for table in ("spot_checks", "data_waits"):
                left = rows_of(path, f"SELECT step, rank FROM {table} ORDER BY step, rank")
                checks.append((f"{table} of rank {rank} of {ranks} at {step}: {left}", left == want))
            left = rows_of(path, "SELECT step, source, tokens, nats FROM source_evaluations ORDER BY step, source")
            by = [(a, f"s{i}", i, float(i)) for a in range(step + 1) for i in range(3)]
            checks.append((f"sources at {step}: {left}", left == by))
    return all_hold(checks)


@contextmanager
def unwritable(text: str = "unable to open database file", writable: bool = False) -> Iterator[list[str]]:
    """SQLite in a folder that this process may not write: it cannot make what lies beside a file in WAL mode. Which files were opened."""
    opened: list[str] = []

    def standing(name: Any, *a: Any, **how: Any) -> Any:
        opened.append(str(name))
        db = CONNECT(name, *a, **how)
        if str(name).endswith("?mode=ro"):
            return Standing(db, lambda statement: sqlite3.OperationalError(text))
        return db

    with mock.patch.object(sqlite3, "connect", standing), mock.patch.object(store.os, "access", lambda path, mode: writable):
        yield opened


def nobody_writes(rng: np.random.Generator) -> Measured:
    """In a folder that nobody may write, a file is read as it is, or with what its log holds, from a copy that cannot be written; where
    one may write there, or the disk fails, SQLite's own word counts."""
    checks = []
    with folder() as root:
        live, done, left = root / "live", root / "done", root / "left"
        for place in (live, done, left):
            place.mkdir()
        with Store(live / "m.sqlite") as s:
            s.describe({"a": int(rng.integers(1 << 30))})
            s.flush()
            for part in live.iterdir():
                if not part.name.endswith("-shm"):
                    shutil.copyfile(part, left / part.name)  # as another machine left it: all is in the log
        shutil.copyfile(live / "m.sqlite", done / "m.sqlite")
        want = rows_of(live / "m.sqlite", "SELECT key, value FROM run_metadata")
        checks.append(("in the log", (left / "m.sqlite-wal").stat().st_size > 0))
        before = sorted(p.name for p in left.iterdir())
        for name, place in (("done", done), ("an empty log", done), ("left", left)):
            if name == "an empty log":
                (done / "m.sqlite-wal").write_bytes(b"")
            path = place / "m.sqlite"
            with unwritable() as opened, closing(connect(path)) as db:
                got = db.execute("SELECT key, value FROM run_metadata").fetchall()
                try:
                    db.execute("INSERT INTO run_metadata VALUES ('b', '1')")
                    checks.append(("it was written", False))
                except sqlite3.OperationalError as error:
                    checks.append((f"{error}", "readonly" in str(error)))
                uri = path.resolve().as_uri()
                second = f"{uri}?mode=ro&immutable=1" if place is done else ":memory:"
                checks.append(differs("opened", opened[:2], [f"{uri}?mode=ro", second]))
                checks.append(("copies are gone", all(not Path(x).exists() for x in opened[2:])))
            checks.append(differs(name, got, want))
        checks.append(differs("nothing is left", sorted(p.name for p in left.iterdir()), before))
        read_only = "attempt to write a readonly database"
        for text, writable, name in (("unable to open database file", True, "MachineError"), (read_only, True, "MachineError"),
                                     ("disk I/O error", False, "MachineError"), ("database is locked", False, "BusyError")):
            with unwritable(text, writable) as opened:
                said = words(lambda: connect(done / "m.sqlite"))
            checks.append(differs(text, (said[:1], said[2:3], len(opened)), ((name,), (f"{done / 'm.sqlite'}: {text}",), 1)))
        with unwritable(read_only) as opened:
            connect(done / "m.sqlite").close()
        checks.append(differs("read only", len(opened), 2))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("read by a comparison", runs_read), ("gone back", gone_back))
FAULTS: Sequence[tuple[str, Case]] = (("not timed", not_timed), ("meanings", meanings), ("opening", opening),
                                      ("nobody writes", nobody_writes))
