"""What several commands need: the Config of a run file or directory, how the user calls this program, how verdicts look. Floor 9."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from alpha import config
from alpha.config import Config
from alpha.errors import ConfigError, MachineError
from alpha.registry.judge import AMBIGUOUS, BASELINE, FAIL, NOT_RUN, PASS
from alpha.train import rundir
from alpha.train.home import at_home

FEW = 64
"""Open files: of a lower limit it is supposed that it was met where nothing says why a file cannot be opened. A run has about 15 open."""

_COLOUR = {PASS: "green", BASELINE: "cyan", AMBIGUOUS: "yellow", FAIL: "bold red", NOT_RUN: "dim"}


def load_source(source: str, overrides: Sequence[str]) -> Config:
    """The Config of a run file or of a run directory, with overrides."""
    path = Path(source)
    if path.is_dir():
        if not rundir.is_run(path):
            rundir.read_config(path)  # raises
        return config.load(path / "config.toml", overrides)
    return config.load(path, overrides)


@contextmanager
def in_its_folder(source: str, cfg: Config) -> Iterator[None]:
    """Of a run directory: work where its relative paths start from, as `at_home`; of a run file: here."""
    with at_home(cfg, Path(source)) if Path(source).is_dir() else nullcontext():
        yield


@contextmanager
def enough_files() -> Iterator[None]:
    """MachineError in place of whatever comes of the limit on open files, be it an error of one file, which says nothing of the limit, or
    one that nobody foresaw."""
    try:
        yield
    except Exception as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        came = _of_the_limit(error, limit)
        if not came:
            raise
        raise MachineError("this process may open no more files", came=f"{came}, with a limit of {limit}",
                           expected="a limit that leaves room for them; 1024 is usual", do="raise it: `ulimit -n 1024`") from error


def _of_the_limit(error: BaseException | None, limit: int) -> str:
    """Which file could not be opened for want of a number, where that is behind an error; '' where it is not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return str(error.filename or error.strerror)
        if isinstance(error, ImportError) and os.strerror(errno.EMFILE) in str(error):  # of a library, which the loader opens
            return str(error.path or error.name or error)
        unsaid = isinstance(error, sqlite3.OperationalError) and "unable to open" in str(error)
        unsaid |= isinstance(error, FileNotFoundError) and "temporary directory" in str(error)  # tempfile tries some, and says no more
        if unsaid and limit < FEW:
            return str(error.strerror if isinstance(error, OSError) else error)
        error = error.__cause__ or error.__context__
    return ""


def this_command() -> str:
    """How the user calls this program: `alpha` if that is what the shell would run, else the path it was called by, as a shell reads it."""
    called = Path(sys.argv[0])
    found = shutil.which("alpha")
    if called.name == "__main__.py" or not called.exists():
        return "python -m alpha"
    if found is not None and os.path.samefile(found, called):
        return "alpha"
    return shlex.quote(shown(called))


def shown(path: Path) -> str:
    """A path as seen from here, whole where it lies elsewhere."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def console_or(console: Console | None) -> Console:
    """The console given, else standard output: as wide as its terminal, 160 columns where it is none. No emoji: `a.cu:100:` is a place."""
    return console or Console(soft_wrap=True, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)


def coloured(verdict: str) -> str:
    """A verdict in rich's markup."""
    return f"[{_COLOUR[verdict]}]{verdict}[/]"


def require_ranks(cfg: Config, ranks: int) -> None:
    """ConfigError where the ranks do not share the logical shards evenly, or a GPU's are to be checked."""
    if cfg.machine.backend == "cuda" and cfg.machine.debug in ("check", "all"):
        raise ConfigError("collectives among GPUs are not checked by their rows yet", came=f'machine.debug = "{cfg.machine.debug}"',
                          expected='"off", "log" or "trace"', do="set machine.debug, or run these ranks on the CPU")
    require_even_ranks(cfg, ranks)


def require_even_ranks(cfg: Config, ranks: int) -> None:
    """ConfigError where the ranks do not share the logical shards evenly."""
    if ranks < 1 or cfg.train.shards % ranks:
        fitting = [n for n in range(2, cfg.train.shards + 1) if cfg.train.shards % n == 0]
        raise ConfigError("the ranks do not divide the logical shards", came=f"{ranks} ranks, train.shards = {cfg.train.shards}",
                          expected=f"--nproc out of {', '.join(map(str, fitting))}" if fitting else "one rank",
                          do="take such a number, or set train.shards; it is part of the numerics")  # fmt: skip
