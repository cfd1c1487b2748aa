"""The tables of metrics.sqlite as checked frames, read in one transaction. Floor 7."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from alpha.errors import BusyError, CorruptError
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.profile.schema import COMMUNICATION, SOURCES, TABLES, WAITS
from alpha.profile.store import connect
from alpha.report.extra import pandas as pd

EXCLUSIVE = [f"{name}_ns" for name in PHASES]
OVERLAPPED = [f"{name}_overlapped_ns" for name in OVERLAPPING]
KEYS = {"step_metrics": "step", "evaluations": "step", "sessions": "rank, session", "step_timing": "rank, step",
        "op_profile": "step, rank, plan, launch", "memory": "step, rank, arena", "memory_plan": "plan, launch", "schedule": "plan",
        "peaks": "rank, clock_ns", "run_peak": "session", "flops_parts": "part, direction", "samples": "step",
        "kernel_times": "step, rank", "kernel_profile": "step, rank, plan, launch, place",
        "communication": "step, rank, op, stream", "data_waits": "step, rank", "source_evaluations": "step, source"}
"""Table -> order of its frame."""
SINCE = {"run_peak": 3, "flops_parts": 3, "samples": 3, "kernel_times": 3, "kernel_profile": 3}
"""Tables of KEYS that older schemas lack."""
LATER = ("communication", "data_waits", "source_evaluations")
"""Tables of KEYS that a run of today's schema may lack: a release added them."""
VERSION_1 = ("step_metrics", "evaluations")
"""Those of KEYS that schema 1 has."""
REALS = {"loss", "norm", "lr", "coefficient", "seconds", "nats", "bits_per_byte", "flops", "bandwidth", "planned", "loop_ns", "temperature"}
TEXT = {"host", "ended", "plan", "op", "kernel", "component", "layer", "phase", "shape", "dtype", "arena", "source", "part", "direction",
        "prompt", "text", "stream"}
INTEGER_FLOPS = ("op_profile", "schedule")
"""Tables whose column `flops` counts; elsewhere it is a rate."""


class Reader:
    """One consistent look at the metrics: everything inside the block is read in one transaction."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self.timeout = path, timeout

    def __enter__(self) -> Reader:
        self.db = connect(self.path, self.timeout)
        self.db.isolation_level = None
        self.db.execute("BEGIN")
        self.version = int(self.rows("PRAGMA user_version")[0][0])
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def cursor(self, statement: str, values: Sequence[Any] = ()) -> tuple[list[str], list[tuple]]:
        """(column names, rows)."""
        try:
            done = self.db.execute(statement, values)
            return [d[0] for d in done.description], done.fetchall()
        except sqlite3.OperationalError as error:
            if "no such" in str(error):
                raise CorruptError("the metrics lack a table or column of their schema", came=f"{self.path}: {error}",
                                   expected="every table of its schema", do="restore the file") from error
            if "locked" in str(error) or "busy" in str(error):
                raise BusyError("the metrics are locked", came=f"{self.path}: {error}", expected="a lock that is let go of",
                                do="end what holds it, then go on") from error
            raise CorruptError("the metrics cannot be read", came=f"{self.path}: {error}", expected="a sound SQLite file",
                               do="restore it from a copy") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a damaged name, or of a message that quotes one
            raise CorruptError("the metrics are damaged", came=f"{self.path}: {error}", expected="a sound SQLite file",
                               do="restore it from a copy") from error

    def check(self) -> None:
        """Look at every page. CorruptError if one is damaged."""
        found = self.rows("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise CorruptError("the metrics are damaged", came=f"{self.path}: {found[0][0]}", expected="a sound SQLite file",
                               do="restore it from a copy")

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple]:
        """All rows."""
        return self.cursor(statement, values)[1]


YOUNGER = {"step_timing": ("checks_ns",)}
"""Table -> columns that a file of today's schema may lack: a release added them."""


@cache
def _columns_of(table: str) -> tuple[str, ...]:
    """Of a table of KEYS, in today's schema."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(";".join((TABLES, COMMUNICATION, WAITS, SOURCES)))
        return tuple(name for _, name, *_ in db.execute(f"PRAGMA table_info({table})"))


def frame(db: Reader, table: str, after: int | None = None) -> pd.DataFrame:
    """A whole table; with `after` its rows of later steps only. Empty where the schema is older than the table."""
    absent = table in LATER and not db.rows("SELECT 1 FROM sqlite_master WHERE name = ?", (table,))
    if absent or db.version < SINCE.get(table, 1):
        return pd.DataFrame()
    later = "" if after is None else f" WHERE step > {int(after)}"
    names, rows = db.cursor(f"SELECT * FROM {table}{later} ORDER BY {KEYS[table]}")
    missing = [c for c in _columns_of(table) if c not in (*names, *YOUNGER.get(table, ()))]
    if missing:
        raise CorruptError("the metrics lack a column of their schema", came=f"{db.path}: {table} without {', '.join(missing)}",
                           expected="every column of its schema", do="restore the file")
    columns = list(zip(*rows)) if rows else [()] * len(names)
    if table == "step_timing" and "checks_ns" not in names:  # younger than the schema
        names, columns = [*names, "checks_ns"], [*columns, (0,) * len(rows)]
    return pd.DataFrame({name: _column(db.path, table, name, values) for name, values in zip(names, columns)})


def _column(path: Path, table: str, name: str, values: Sequence[Any]) -> Any:
    """A column as its type: int64, float64 (NULL is NaN) or text. SQLite lets any value into any column, so this is checked."""
    if name in TEXT:
        return pd.Series(list(values), dtype=object)
    real = name in REALS and not (name == "flops" and table in INTEGER_FLOPS)
    found = np.array(values if values else [0][:0])
    if found.dtype.kind == "i" or not values:
        return found.astype(np.float64 if real else np.int64)
    wrong = [v for v in values if not (isinstance(v, int) or (real and (v is None or isinstance(v, float))))]
    if wrong:
        raise CorruptError("the metrics hold a value of the wrong type", came=f"{path}: {table}.{name} = {wrong[0]!r}",
                           expected="a number" if real else "an integer", do="restore the file")
    return np.array(values, np.float64)
