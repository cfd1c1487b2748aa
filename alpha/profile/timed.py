"""Metrics that hold timing: a read-only snapshot of one run, whatever it writes meanwhile. Floor 3."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alpha.errors import BusyError, CorruptError, InputError
from alpha.profile.store import connect

SINCE = 2
"""The first schema with timing."""


@contextmanager
def timed(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction on a run's metrics.sqlite. Errors as those of store.connect; InputError where the schema is older than timing."""
    db = connect(path)
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version < SINCE:
            raise InputError("the run was recorded without timing", came=f"{path}: schema {version}", expected=f"schema {SINCE} or newer",
                             do="run it again, or resume it, with this release")
        db.execute("BEGIN")
        yield db
    except sqlite3.DatabaseError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise BusyError("the metrics are locked", came=f"{path}: {error}", do="end what holds them, then try again") from error
        raise CorruptError("the metrics cannot be read", came=f"{path}: {error}", expected="the tables of a run") from error
    finally:
        db.close()
