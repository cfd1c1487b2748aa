"""The folder of runs that a dashboard shows: which runs lie in it, and nothing outside it. Floor 8."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from alpha.data.files import MAKING
from alpha.errors import AlphaError, CorruptError, InputError, MachineError, visible
from alpha.train.rundir import GATED, UNGATED, is_run, read_manifest
from alpha.train.seal import why_ungated

MARKS = ("config.toml", "manifest.json", "metrics.sqlite")
"""A folder with one of these is shown as a run, whole or not."""


@dataclass(frozen=True)
class Entry:
    """A run as the picker lists it. `name`: of the folder, with escapes where a page cannot hold it; `status`: GATED, or UNGATED where its
    files do not show that; `error`: why its manifest cannot be read, or None; `changed`: Unix seconds of its latest metrics."""

    name: str
    status: str
    changed: float
    metrics: bool
    error: AlphaError | None = None


class Folder:
    """The runs directly under `root`. A name stands for a folder in it; one that leads elsewhere (.., links) is refused."""

    def __init__(self, root: Path) -> None:
        """`root` may be missing (no run was made yet). InputError if it is there and no folder. The folder of one run shows that run."""
        self.only: str | None = None
        if root.exists() and not root.is_dir():
            raise InputError("the folder of runs is not a folder", came=root, expected="a folder such as runs", do="give the folder")
        try:
            root.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise InputError("the folder of runs is a link that leads to itself", came=root, expected="a folder such as runs",
                                 do="give the folder") from error
        root = root.resolve()
        if is_run(root):
            root, self.only = root.parent, root.name
        self.root = root

    def path(self, name: str) -> Path:
        """The folder of a run. InputError if there is no such run, or the name leads out of the folder."""
        inside = bool(name) and name == os.path.basename(name) and name not in (".", "..") and "\0" not in name
        path = self.root / (self._named(name) if inside else "")
        if not inside or (self.only is not None and path.name != self.only) or not self._is_here(path):
            raise InputError("there is no such run", came=repr(name), expected=f"the name of a run in {self.root}", do="pick a listed run")
        return path

    def _named(self, name: str) -> str:
        """The entry that `entries` lists by this name, which is another one where its own is not fit to be shown."""
        if os.path.lexists(self.root / name):
            return name
        try:
            return next((n for n in os.listdir(self.root) if visible(n) == name), name)
        except OSError:
            return name

    def _is_here(self, path: Path) -> bool:
        try:
            here = path.resolve().parent == self.root and path.is_dir() and not path.name.startswith(MAKING)
            return here and any((path / mark).exists() for mark in MARKS)
        except (OSError, RuntimeError):  # the latter of a link that leads to itself, before Python 3.13
            return False

    def entries(self) -> list[Entry]:
        """Every run, the latest one first. MachineError if the folder may not be read."""
        if not self.root.is_dir():
            return []
        try:
            names = sorted(os.listdir(self.root))
        except OSError as error:
            raise MachineError("the folder of runs cannot be read", came=f"{self.root}: {error.strerror}", expected="permission to read it",
                               do="check the folder's owner and mode") from error
        found = [self._entry(n) for n in names if (self.only in (None, n)) and self._is_here(self.root / n)]
        return sorted(found, key=lambda e: (-e.changed, e.name))

    def _entry(self, name: str) -> Entry:
        path, wrong = self.root / name, None
        try:
            read_manifest(path)
        except (CorruptError, InputError, MachineError) as error:
            wrong = error
        status = UNGATED if wrong or why_ungated(path) else GATED
        metrics = path / "metrics.sqlite"
        return Entry(visible(name), status, max(stamp(metrics), stamp(Path(f"{metrics}-wal"))), metrics.is_file(), wrong)


def stamp(path: Path) -> float:
    """Unix seconds of a file's latest change; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def fingerprint(path: Path) -> tuple[tuple[int, int, int], ...]:
    """(inode, size, ns of change) of the files that a run's figures come from: equal iff nothing was written since.

    An empty file counts as none: SQLite makes an empty write-ahead log beside a database that is merely read.
    """
    found = []
    for name in ("metrics.sqlite", "metrics.sqlite-wal", "manifest.json", "config.toml"):
        try:
            stat = (path / name).stat()
        except OSError:
            stat = None
        found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat is not None and stat.st_size else (0, 0, 0))
    return tuple(found)
