"""The run directory: one folder a run, one process at a time in it. Floor 6.

config.toml      the resolved configuration       tokenizer.json   the tokenizer, so that sampling needs no corpus
manifest.json    what ran, and on what            metrics.sqlite   one row a step
checkpoints/     see alpha/checkpoint             .lock            held while a process trains in the folder
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import alpha
from alpha import config
from alpha.config import Config
from alpha.data.files import disk_error, read_file, write_atomic
from alpha.data.tokenizer import Tokenizer, load_tokenizer
from alpha.errors import BusyError, CorruptError, InputError

MANIFEST_FORMAT = 1
UNGATED = "UNGATED"


class RunDir:
    """A run directory that this process holds. Use as a context manager; the lock goes with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock of an existing folder. BusyError if another process holds it."""
        self.path = path
        try:
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(path / ".lock", error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip()
            os.close(self._lock)
            self._lock = -1
            raise BusyError(
                "another process trains in this run directory",
                came=f"{path} (process {holder or 'unknown'})",
                expected="one process at a time",
                do="wait for it, stop it, or give this run another name with --set run.name=...",
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.sqlite"

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Replace the manifest, whole or not at all."""
        write_atomic(
            self.path / "manifest.json", json.dumps({"format": MANIFEST_FORMAT, **content}, indent=2, sort_keys=True).encode() + b"\n"
        )


def create(cfg: Config, tokenizer: Tokenizer) -> RunDir:
    """Make `<run.out>/<run.name>`, or with -2, -3 ... behind it if that is taken, and hold it. MachineError if the disk refuses."""
    out = Path(cfg.run.out)
    for number in range(1, 1_000_000):
        path = out / (cfg.run.name if number == 1 else f"{cfg.run.name}-{number}")
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            if not out.is_dir():
                raise InputError("run.out is not a folder", came=out, expected="a folder", do="change run.out") from None
            continue
        except OSError as error:
            raise disk_error(path, error) from error
        held = RunDir(path)
        write_atomic(path / "config.toml", cfg.resolved().encode())
        tokenizer.save(path / "tokenizer.json")
        return held
    raise InputError("too many runs of this name", came=out / cfg.run.name, do="choose another run.name")


def find(cfg: Config) -> Path:
    """The newest run of this name: the one with the highest number. InputError if there is none."""
    out = Path(cfg.run.out)
    numbers = {1: out / cfg.run.name}
    if out.is_dir():
        for path in out.iterdir():
            tail = path.name.removeprefix(f"{cfg.run.name}-")
            if path.name != tail and tail.isdecimal():
                numbers[int(tail)] = path
    found = [path for _, path in sorted(numbers.items()) if (path / "config.toml").is_file()]
    if not found:
        raise InputError("there is no run to resume", came=out / cfg.run.name, expected="a run directory", do="start it without --resume")
    return found[-1]


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return (path / "config.toml").is_file()


def read_config(path: Path) -> Config:
    """The configuration that a run was started with. InputError if the folder is no run."""
    if not is_run(path):
        raise InputError("this is not a run directory", came=path, expected="a folder with config.toml, such as runs/demo",
                         do="give the folder that `alpha train` printed")  # fmt: skip
    return config.load(path / "config.toml")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a run, verified against its own hash."""
    return load_tokenizer(path / "tokenizer.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run; empty if the run was killed before it was written. CorruptError if it is no JSON object."""
    if not (path / "manifest.json").exists():
        return {}
    try:
        content = json.loads(read_file(path / "manifest.json", "the manifest of a run"))
    except ValueError as error:
        raise CorruptError(
            "the manifest of a run is damaged", came=f"{path / 'manifest.json'}: {error}", expected="a JSON object", do="restore it"
        ) from error
    if not isinstance(content, dict):
        raise CorruptError("the manifest of a run is no JSON object", came=path / "manifest.json", do="restore it")
    return content


def source_state() -> dict[str, str]:
    """Which code ran: commit, and sha256 of the difference of tracked files from it ('' when clean). 'unknown' outside git."""
    root = Path(alpha.__file__).parent.parent

    def git(*args: str) -> bytes | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, check=False, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return {"commit": "unknown", "dirty": "unknown", "version": alpha.__version__}
    difference = git("diff", "HEAD", "--binary", "--no-ext-diff")
    dirty = "unknown" if difference is None else hashlib.sha256(difference).hexdigest() if difference else ""
    return {"commit": commit.decode().strip(), "dirty": dirty, "version": alpha.__version__}
