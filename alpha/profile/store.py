"""metrics.sqlite: written by one thread per rank that no step waits for, read at any time. Floor 3.

WAL mode, one transaction a batch: after a kill -9 the file is sound and holds every batch that was written; at most the rows of the last
EVERY seconds are missing, and the loop flushes before it saves a checkpoint, so a missing row is one of a step that will run again.
Several ranks may write into one file: a writer that finds it locked waits, it does not give up its rows.
"""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from alpha.errors import AlphaError, BusyError, CorruptError, GraphError, InputError, MachineError
from alpha.profile.schema import COMMUNICATION, SOURCES, SPOT_CHECKS, TABLES, VERSION, VIEWS, WAITS

EVERY = 0.2
"""Seconds between batches."""

PATIENCE = 60.0
"""Seconds that a writer waits for another one's lock before it says so."""

STEPPED = ("step_metrics", "step_timing", "op_profile", "kernel_times", "kernel_profile", "gpu_timeline", "memory")
"""Tables that lose the rows of a step that runs again, with those of COMMUNICATION."""


_Statement = tuple[str, Sequence[Any]]
"""A statement and its values."""


def _insert(table: str, row: Mapping[str, Any]) -> _Statement:
    return f"INSERT OR REPLACE INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values())


class Store:
    """The writer of one rank. `add` and `describe` only enqueue; an error of the writer is raised by the next call.

    Use as a context manager.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Open or create. CorruptError if the file is no sound database, InputError for a newer schema, BusyError if it stays locked for
        PATIENCE seconds.

        Ranks that start together all switch a new file to WAL, and there SQLite calls no busy handler when two that read it both want to
        write: it refuses one at once, whatever the timeout. That one asks again.
        """
        self.path, self.rank, self.session = path, rank, -1
        self._queue: deque[_Statement | Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]] = deque()
        self._error: AlphaError | None = None
        self._wake, self._closed = threading.Event(), False
        self._asked = self._done = 0
        self._changed = threading.Condition()
        patience = time.monotonic() + PATIENCE
        while True:
            try:
                self._db = self._open()
                break
            except BusyError:
                if time.monotonic() >= patience:
                    raise
            time.sleep(0.01)
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"alpha-store-{rank}")
        self._thread.start()

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self.path, isolation_level=None, timeout=PATIENCE, check_same_thread=False)
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
        except sqlite3.DatabaseError as error:
            raise refused(self.path, error) from error
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("BEGIN IMMEDIATE")
        try:
            _check(self.path, db.execute("PRAGMA user_version").fetchone()[0], least=0)
            for statement in (TABLES + VIEWS).split(";\n"):
                db.execute(statement)
            if not any(name == "checks_ns" for _, name, *_ in db.execute("PRAGMA table_info(step_timing)")):
                db.execute("ALTER TABLE step_timing ADD COLUMN checks_ns INTEGER NOT NULL DEFAULT 0")  # younger than the schema
            db.execute(f"PRAGMA user_version={VERSION}")  # tables are only ever added, so an older file becomes a newer one
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(raising=error is None)

    # -- what a run says -------------------------------------------------------------------------------------------------------

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        """Enqueue one row; a row of the same key is replaced."""
        self._say(*_insert(table, row))

    def checked_again(self, step: int, ranks: int = 1) -> None:
        """Forget the spot checks of this rank from `step` on, as `rewind` does; the table is made where it is not there yet."""
        self._say(SPOT_CHECKS, ())
        gone = f" OR rank >= {int(ranks)}" if self.rank == 0 else ""
        self._say(f"DELETE FROM spot_checks WHERE step >= ? AND (rank = {int(self.rank)}{gone})", (step,))

    def waits_again(self, step: int, ranks: int = 1) -> None:
        """Forget the waits for data of this rank from `step` on, as `rewind` does; the table is made where it is not there yet."""
        self._say(WAITS, ())
        gone = f" OR rank >= {int(ranks)}" if self.rank == 0 else ""
        self._say(f"DELETE FROM data_waits WHERE step >= ? AND (rank = {int(self.rank)}{gone})", (step,))

    def of_sources(self, step: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """What a validation after `step` steps found, source -> columns of `source_evaluations`."""
        self._say(SOURCES, ())
        for source, row in rows.items():
            self.add("source_evaluations", {"step": step, "source": source, **row})

    def later(self, rows: Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]) -> None:
        """The same with rows, as (table, row), that are made where they are written: by the store's thread. `rows` may be called twice."""
        self._raise()
        self._queue.append(rows)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set rows of run_metadata."""
        for key, value in facts.items():
            self._say("INSERT OR REPLACE INTO run_metadata VALUES (?, ?)", (key, str(value)))

    def rewind(self, step: int, ranks: int = 1) -> None:
        """Forget what this rank measured from `step` on: those steps are about to run again. `ranks`: how many there are now; the first one
        forgets what others beyond them left."""
        for statement in COMMUNICATION.split(";\n"):
            self._say(statement, ())
        for table in (*STEPPED, "communication", "collectives", "calls"):
            gone = f" OR rank >= {int(ranks)}" if self.rank == 0 else ""
            mine = "" if table == "step_metrics" else f" AND (rank = {int(self.rank)}{gone})"
            self._say(f"DELETE FROM {table} WHERE step >= ?{mine}", (step,))
        self._say(SOURCES, ())
        for table in ("evaluations", "samples", "source_evaluations"):
            self._say(f"DELETE FROM {table} WHERE step > ?", (step,))

    def begin(self, first_step: int, began_ns: int, clock_ns: int, unix_ns: int) -> None:
        """A session of this rank begins; the times are those of the table `sessions`."""
        self.flush()
        with self._changed:
            found = self._db.execute("SELECT coalesce(max(session), -1) FROM sessions WHERE rank = ?", (self.rank,)).fetchone()[0]
            self.session = found + 1
        self.add("sessions", {"session": self.session, "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(),
                              "first_step": first_step, "unix_ns": unix_ns, "clock_ns": clock_ns, "began_ns": began_ns,
                              "seen_ns": clock_ns})

    def next_session(self) -> int:
        """The number after those of all ranks' sessions: some rank may have died before its own row was written. The first rank asks,
        before any rank begins."""
        self.flush()
        with self._changed:
            return int(self._db.execute("SELECT coalesce(max(session), -1) + 1 FROM sessions").fetchone()[0])

    def renumber(self, session: int) -> None:
        """Take another number for the session that has begun: one for all ranks, also those that an earlier session did not have."""
        self.mark(session=session)
        self.session = session

    def mark(self, **columns: Any) -> None:
        """Set columns of this session's row, such as loop_ns or ended."""
        sets = ", ".join(f"{name} = ?" for name in columns)
        self._say(f"UPDATE sessions SET {sets} WHERE session = ? AND rank = ?", (*columns.values(), self.session, self.rank))

    def flush(self) -> None:
        """Return when everything said so far is in the file."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._wake.set()
            while self._done < mine and self._error is None and self._thread.is_alive():
                self._changed.wait(0.1)
        self._raise()

    def close(self, raising: bool = True) -> None:
        """Write what is left and close the file."""
        if self._closed:
            return
        if self.session >= 0:
            self.mark(seen_ns=time.perf_counter_ns())
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._db.close()
        if raising:
            self._raise()

    # -- the writer ------------------------------------------------------------------------------------------------------------

    def _say(self, statement: str, values: Sequence[Any]) -> None:
        self._raise()
        self._queue.append((statement, values))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while True:
            self._wake.wait(EVERY)
            self._wake.clear()
            closed, asked = self._closed, self._asked
            try:
                self._batch()
            except sqlite3.DatabaseError as error:
                self._error = refused(self.path, error)
            except Exception as error:  # rows that cannot be made must not be lost in silence with this thread
                self._error = GraphError("the rows of a step could not be made", came=f"{type(error).__name__}: {error}")
            with self._changed:
                self._done = asked
                self._changed.notify_all()
            if closed or self._error is not None:
                return

    def _batch(self) -> None:
        n = len(self._queue)
        if not n:
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for i in range(n):
                entry = self._queue[i]
                for statement, values in [entry] if isinstance(entry, tuple) else (_insert(*row) for row in entry()):
                    self._db.execute(statement, values)
            if self.session >= 0:
                self._db.execute("UPDATE sessions SET seen_ns = max(seen_ns, ?) WHERE session = ? AND rank = ?",
                                 (time.perf_counter_ns(), self.session, self.rank))
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        for _ in range(n):
            self._queue.popleft()


def connect(path: Path, timeout: float = 5.0) -> sqlite3.Connection:
    """A connection that can only read, also while a run writes. InputError if there is no file or its schema is newer, CorruptError if it
    is no sound database or was never finished, BusyError if something holds it locked for `timeout` seconds.
    """
    if not path.is_file():
        raise InputError("there are no metrics", came=path, expected="metrics.sqlite of a run")
    try:
        db = _readable(path, timeout)
        try:
            _check(path, db.execute("PRAGMA user_version").fetchone()[0], least=1)
            db.execute("SELECT count(*) FROM run_metadata").fetchone()
        except BaseException:
            db.close()
            raise
    except sqlite3.DatabaseError as error:
        raise refused(path, error) from error
    except UnicodeDecodeError as error:  # of SQLite's own message, which quotes a damaged name
        raise refused(path, sqlite3.DatabaseError(str(error))) from error
    return db


def _readable(path: Path, timeout: float) -> sqlite3.Connection:
    """A connection to read. A reader of a file in WAL mode needs `-shm` beside it; where that is not there and cannot be made, nobody
    writes either. Then the file alone is read if it holds everything, else a copy that has taken in its `-wal`."""
    uri = path.resolve().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=timeout)
    try:
        db.execute("PRAGMA user_version").fetchone()
        return db
    except sqlite3.OperationalError as error:
        db.close()
        wal = path.with_name(f"{path.name}-wal")
        if not any(x in str(error) for x in ("unable to open", "readonly")) or os.access(path.parent, os.W_OK):
            raise
        if not wal.exists() or not wal.stat().st_size:
            return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="alpha-metrics-") as folder:
        for part in (path, wal):
            shutil.copyfile(part, Path(folder) / part.name)
        whole, copy = sqlite3.connect(":memory:"), sqlite3.connect(Path(folder) / path.name)
        try:
            copy.backup(whole)
        finally:
            copy.close()
    whole.execute("PRAGMA query_only=1")
    return whole


def read(path: Path, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    """Rows of a table in order of their first column. Errors as `connect`."""
    db = connect(path)
    try:
        return db.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()
    except sqlite3.DatabaseError as error:
        raise refused(path, error) from error
    finally:
        db.close()


def _check(path: Path, found: int, least: int) -> None:
    if found > VERSION:
        raise InputError("the metrics have a newer schema", came=f"{path}: {found}", expected=f"at most {VERSION}",
                         do="use the release that wrote it")
    if found < least:
        raise CorruptError("the metrics were never finished", came=f"{path}: schema {found}", expected=f"schema {least} to {VERSION}",
                           do="start the run again")


def refused(path: Path, error: sqlite3.DatabaseError) -> AlphaError:
    """What an error of SQLite means: BusyError, MachineError or CorruptError."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return BusyError("the metrics are locked", came=f"{path}: {text}", expected="a lock that is let go of",
                         do="end what holds it, then go on")
    if isinstance(error, sqlite3.OperationalError) and "malformed" not in text:
        return MachineError("the metrics cannot be read or written", came=f"{path}: {text}", expected="room and permission there",
                            do="free some space or check the folder, then go on")
    return CorruptError("the metrics are damaged", came=f"{path}: {text}", expected="a sound SQLite file", do="restore or remove it")
