"""The progress of a run: how far it is and whether it still goes, from a few indexed look-ups; cheap enough for every second. Floor 8."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from alpha.errors import AlphaError, CorruptError
from alpha.profile.store import connect, refused

SILENT_S = 30.0
"""A session without an end that wrote nothing for so long is called silent: killed, or in something long such as an evaluation."""

TAIL = 200
"""Most rows of step_metrics that one answer carries."""


def progress(path: Path, since: int = -1, *, now_ns: int | None = None) -> dict[str, Any]:
    """Steps, sessions and the newest losses (steps after `since`, at most TAIL of them) of the run in `path`.

    `state`: 'empty' (no step yet), 'running', 'silent', 'finished', 'stopped' or 'failed'. Errors as `alpha.profile.store.connect`.
    """
    metrics = path / "metrics.sqlite"
    with closing(connect(metrics, timeout=1.0)) as db:
        try:
            return _read(db, since, time.time_ns() if now_ns is None else now_ns)
        except sqlite3.DatabaseError as error:
            raise refused(metrics, error) from error


def _read(db: sqlite3.Connection, since: int, now_ns: int) -> dict[str, Any]:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    old = "step_timing" not in tables  # schema 1: losses only
    last, steps = db.execute("SELECT max(step), count(*) FROM step_metrics").fetchone()
    timed = None if old else db.execute("SELECT max(step) FROM step_timing").fetchone()[0]
    columns = "session, rank, host, pid, first_step, unix_ns + (seen_ns - clock_ns), ended"
    sessions = [] if old else db.execute(f"SELECT {columns} FROM sessions ORDER BY session, rank").fetchall()
    tail = db.execute("SELECT step, loss, lr, tokens, seconds FROM step_metrics WHERE step > ? ORDER BY step DESC LIMIT ?", (since, TAIL))
    keys = ("session", "rank", "host", "pid", "first_step", "seen_unix_ns", "ended")
    newest = [s for s in sessions if s[0] == sessions[-1][0]]
    return {"state": _state(newest, steps, now_ns), "last_step": last, "steps": steps, "timed_step": timed,
            "sessions": [dict(zip(keys, s)) for s in sessions[-16:]], "session_count": len({s[0] for s in sessions}),
            "silent_s": (now_ns - max(s[5] for s in newest)) / 1e9 if newest else None,
            "tail": [list(row) for row in reversed(tail.fetchall())], "has_timing": not old}


def _state(newest: list[tuple[Any, ...]], steps: int, now_ns: int) -> str:
    ends = [s[6] for s in newest]
    if not newest:
        return "unknown" if steps else "empty"
    for end in ends:
        if end is not None and str(end).startswith("failed"):
            return "failed"
    if all(end is not None for end in ends):
        return "finished" if set(ends) == {"finished"} else "stopped"
    if now_ns - max(s[5] for s in newest) > SILENT_S * 1e9:
        return "silent"
    return "running" if steps else "empty"


def error_body(error: AlphaError) -> dict[str, Any]:
    """An error as the page shows it."""
    kind = "corrupt" if isinstance(error, CorruptError) else type(error).__name__.removesuffix("Error").lower()
    return {"kind": kind, "what": error.what, "came": None if error.came is None else str(error.came),
            "expected": None if error.expected is None else str(error.expected), "do": error.do}
