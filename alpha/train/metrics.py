"""metrics.sqlite: what a run measured, one row a step. Floor 6.

WAL mode and one transaction a row: after a kill -9 every row that was written is there and the file is sound. A resumed run replaces
the rows from its first step on. `PRAGMA user_version` is the schema's version; readers refuse another one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from alpha.errors import CorruptError, InputError, MachineError

VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS run_metadata (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS step_metrics (
    step INTEGER PRIMARY KEY,      -- counted from 0
    loss REAL,                     -- mean over valid targets, nats a token; NULL where not finite
    norm REAL,                     -- gradient norm of the mean loss before clipping; NULL where not finite
    lr REAL,                       -- learning rate of this step
    coefficient REAL,              -- factor that clipping and the mean applied to the summed gradient
    tokens INTEGER NOT NULL,       -- tokens of this step
    seconds REAL NOT NULL,         -- wall time of this step
    finite INTEGER NOT NULL        -- 0: the step was refused and the state left as it was
);
CREATE TABLE IF NOT EXISTS evaluations (
    step INTEGER PRIMARY KEY,      -- steps done before it
    nats REAL NOT NULL,            -- summed loss of the validation tokens
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, windows INTEGER NOT NULL, bits_per_byte REAL NOT NULL
);
"""


class Metrics:
    """The store of one run, opened for writing by the process that holds the run directory."""

    def __init__(self, path: Path) -> None:
        """Open or create. CorruptError if the file is no sound database, InputError for another schema version."""
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise
        except sqlite3.DatabaseError as error:
            raise self._refused(error) from error

    def _prepare(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise InputError(
                "the metrics have another schema", came=f"{self.path}: {found}", expected=VERSION, do="use the release that wrote it"
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)
        self._db.execute(f"PRAGMA user_version={VERSION}")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set rows of run_metadata."""
        for key, value in facts.items():
            self._write("INSERT OR REPLACE INTO run_metadata VALUES (?, ?)", (key, str(value)))

    def rewind(self, step: int) -> None:
        """Forget what was measured from `step` on: those steps are about to run again."""
        self._write("DELETE FROM step_metrics WHERE step >= ?", (step,))
        self._write("DELETE FROM evaluations WHERE step > ?", (step,))

    def step(self, **row: Any) -> None:
        """One row of step_metrics."""
        self._insert("step_metrics", row)

    def evaluation(self, **row: Any) -> None:
        """One row of evaluations."""
        self._insert("evaluations", row)

    def _insert(self, table: str, row: Mapping[str, Any]) -> None:
        marks = ", ".join("?" * len(row))
        self._write(f"INSERT OR REPLACE INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise self._refused(error) from error

    def _refused(self, error: sqlite3.DatabaseError) -> CorruptError | MachineError:
        if isinstance(error, sqlite3.OperationalError):
            return MachineError(
                "the metrics cannot be written",
                came=f"{self.path}: {error}",
                expected="room and permission to write there",
                do="free some space or check the folder, then resume",
            )
        return CorruptError(
            "the metrics are damaged", came=f"{self.path}: {error}", expected="a sound SQLite file", do="restore or remove it"
        )


def read(path: Path, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    """Rows of a table in order of their key, for readers: also while the run writes. InputError if there is no such file."""
    if not path.is_file():
        raise InputError("there are no metrics", came=path, expected="metrics.sqlite of a run")
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0)
    try:
        return db.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()
    finally:
        db.close()
