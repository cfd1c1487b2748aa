"""The client's side, `python -m alpha.trackers.follow NAME`: told run directories on standard input, it writes on what their metrics say.

It ends when standard input does, which is when no process of the run is left, and all rows are written. Floor 7.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from alpha.errors import InputError
from alpha.profile.store import connect
from alpha.trackers.clients import CLIENTS, Client

EVERY_S = 1.0
"""Between looks at the metrics."""
AT_ONCE = 4096
"""Rows of one look: no transaction stays open while a client writes, so the run's file does not grow by it."""
LAST_S = 120.0
"""After the run a client that still hangs ends itself: whoever would end it may be gone."""

_STEPS = "SELECT step, loss, norm, lr, tokens / seconds FROM step_metrics WHERE step > ? ORDER BY step LIMIT ?"
_EVALUATIONS = "SELECT step, bits_per_byte FROM evaluations WHERE step > ? ORDER BY step LIMIT ?"
_SOURCES = "SELECT step, source, bits_per_byte FROM source_evaluations WHERE step = ? ORDER BY source"


class Follower:
    """Reads what one session of a run adds to its metrics. Rows of steps before it were written by the session that made them."""

    def __init__(self, path: Path, begun: int, client: Client) -> None:
        """`begun`: the latest session before this one, -1 for none."""
        self.path, self._begun, self._client = path, begun, client
        self._step = self._evaluation = -1
        self._first: int | None = None

    def look(self) -> None:
        """Write what is new."""
        try:
            rows = self._new()
            while rows:
                for step, values in rows:
                    self._client.write(step, values)
                rows = self._new()
        except InputError:
            return  # the session has not written anything yet

    def _new(self) -> list[tuple[int, Mapping[str, float]]]:
        with closing(connect(self.path / "metrics.sqlite")) as db:
            if self._first is None:
                found = db.execute("SELECT min(first_step) FROM sessions WHERE session > ?", (self._begun,)).fetchone()[0]
                if found is None:
                    return []
                self._first, self._step, self._evaluation = found, found - 1, found - 1
                self._client.begin(self.path, found)
            steps = db.execute(_STEPS, (self._step, AT_ONCE)).fetchall()
            rows: list[tuple[int, Mapping[str, float]]] = [
                (step, {name: float("nan") if x is None else x for name, x in zip(("train/loss", "train/norm", "train/lr",
                                                                                   "train/tokens_per_second"), values)})
                for step, *values in steps]  # fmt: skip
            by_source = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'source_evaluations'").fetchone()
            for step, bits in db.execute(_EVALUATIONS, (self._evaluation, AT_ONCE)).fetchall():
                each = {f"validation/bits_per_byte/{name}": x for _, name, x in db.execute(_SOURCES, (step,))} if by_source else {}
                rows.append((step, {"validation/bits_per_byte": bits, **each}))
                self._evaluation = step
            self._step = steps[-1][0] if steps else self._step
        return rows


def _listen(told: SimpleQueue[dict[str, Any]], ended: threading.Event) -> None:
    for line in sys.stdin:
        told.put(json.loads(line))
    ended.set()
    threading.Event().wait(LAST_S)
    os._exit(1)


def main(name: str) -> int:
    """Follow until standard input ends."""
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_listen, args=(told, ended), daemon=True).start()
    client, follower = CLIENTS[name](), None
    while True:
        last = ended.is_set()  # asked before the look, which then is one after the end
        while not told.empty():
            one = told.get()
            if follower is None:
                _write_to(Path(one["path"]) / "logs" / f"{name}.log")
            else:
                follower.look()
            follower = Follower(Path(one["path"]), one["begun"], client)
        if follower is not None:
            follower.look()
        if last:
            client.close()
            return 0
        ended.wait(EVERY_S)


def _write_to(path: Path) -> None:
    """What this process and its library say goes into a file of the run."""
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
