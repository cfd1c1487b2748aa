"""The run's side: clients are started, told the run directory, and ended. Nothing here raises for what a client does. Floor 7."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from alpha.config import Log
from alpha.errors import AlphaError
from alpha.profile.store import connect
from alpha.train import forbidden

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Key of [log], which is the extra's name too -> the package that its client imports."""

PATIENCE_S = 30.0
"""How long a client may take to write the rest once the run has ended."""

Made = Callable[[Path], None]
"""Called with the run directory by the process that made it, before it opens the metrics."""


class Tracker:
    """One client's process."""

    def __init__(self, name: str) -> None:
        forbidden.starts_peer()
        self.name, self._path = name, Path()
        self._process = subprocess.Popen([sys.executable, "-m", "alpha.trackers.follow", name], stdin=subprocess.PIPE,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        forbidden.starts_peer(self._process.pid)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def tell(self, path: Path) -> None:
        """A session begins in this run directory. A client that does not read, or has ended, is none the wiser."""
        begun = -1
        with suppress(AlphaError), closing(connect(path / "metrics.sqlite")) as db:
            begun = int(db.execute("SELECT coalesce(max(session), -1) FROM sessions").fetchone()[0])
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, json.dumps({"path": str(path.resolve()), "begun": begun}).encode() + b"\n")

    def end(self) -> str:
        """Let it write the rest and end, or end it; what there is to say, '' for nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(PATIENCE_S)
        except BaseException as error:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started
            self._process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"log.{self.name}: its client hung and was ended {PATIENCE_S:g} s after the run; nothing of the run hangs on it"
            raise
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"log.{self.name}: its client ended {how}, see logs/{self.name}.log; nothing of the run hangs on it" if code else ""


@contextmanager
def trackers(log: Log, say: Callable[[str], None]) -> Iterator[Made]:
    """The clients that [log] asks for, around a run; yields what is to be called with its directory. `say`: told of each client that is
    missing, died or hung, a line each."""
    begun: list[Tracker] = []
    for name, module in MODULES.items():
        if not getattr(log, name):
            continue
        if importlib.util.find_spec(module) is None:
            say(f"log.{name}: {module} is not installed, so nothing is written; python3 -m pip install --editable '.[{name}]'")
            continue
        try:
            begun.append(Tracker(name))
        except OSError as error:
            say(f"log.{name}: its client cannot be started ({error.strerror}), so nothing is written")

    def made(path: Path) -> None:
        for one in begun:
            one.tell(path)

    try:
        yield made
    finally:
        for one in begun:
            if said := one.end():
                say(said)
