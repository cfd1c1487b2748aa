"""The log of one rank: runs/<name>/logs/rank<N>.jsonl, one JSON object a line, written at once. Floor 6.

Each line is one write to a file opened for appending, so a killed process loses none and leaves none half written; a line that the disk cut
short is closed by the next session. Keys: `time` (UTC), `level` (info, warning, error), `event`, `step` (steps done, or null), `fields`.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from alpha.data.files import disk_error

LEVELS = ("info", "warning", "error")
EVENTS = {
    "start": "a new run begins", "resume": "a run goes on from a checkpoint", "evaluation": "a validation is done",
    "sample": "text was sampled", "checkpoint": "a checkpoint stands", "warning": "something that a person should know",
    "signal": "somebody asked the run to stop", "non-finite": "a step was refused, by which op", "end": "the session ends, why",
    "collective": "one ended (machine.debug): which, its bytes, and its time in us",
    "spot-checks": "what the session recomputed and hashed", "spot-check": "one of them failed, where",
}  # fmt: skip
"""Every event and what it means."""


class RankLog:
    """The log of one rank. Use as a context manager."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        """Open or go on with `folder`/rank<N>.jsonl. MachineError if the disk refuses."""
        self.path = folder / f"rank{rank}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except OSError as error:
            raise disk_error(self.path, error) from error

    def say(self, event: str, step: int | None = None, *, level: str = "info", **fields: Any) -> None:
        """Append one line. MachineError if the disk refuses."""
        assert event in EVENTS and level in LEVELS, (event, level)
        line = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "level": level, "event": event, "step": step,
                "fields": {k: _plain(v) for k, v in fields.items()}}  # fmt: skip
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(28, "only a part of the line was written")
        except OSError as error:
            raise disk_error(self.path, error) from error

    @contextmanager
    def warnings(self, step: Callable[[], int]) -> Iterator[None]:
        """Python's warnings inside are logged as well as shown; `step` says how many steps are done."""
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            self.say("warning", step(), level="warning", text=str(message), category=category.__name__, place=f"{filename}:{lineno}")
            before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.showwarning = before

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, oldest first; a line that was cut short is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _plain(value: Any) -> Any:
    """As JSON holds it: null where not finite, text for what JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
