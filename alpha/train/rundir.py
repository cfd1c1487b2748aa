"""The run directory: one folder a run, one process at a time in it. Floor 6.

logs/            one JSON line an event, a file a rank
config.toml      the resolved configuration       tokenizer.json   the tokenizer, so that sampling needs no corpus
manifest.json    what ran, and on what            metrics.sqlite   one row a step
checkpoints/     see alpha/checkpoint             .lock            held, like the folder itself, while a process trains in it

The folder is made under another name and renamed when it is whole, so that one with config.toml has a tokenizer and a manifest too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import alpha
from alpha import config
from alpha.config import Config
from alpha.data.files import MAKING, disk_error, hold, read_file, sha256_hex, sweep, sync_folder, write_atomic
from alpha.data.tokenizer import Tokenizer
from alpha.data.tokenizer_file import load_tokenizer
from alpha.errors import BusyError, CorruptError, InputError
from alpha.files import MOST_TEXT, json_of

MANIFEST_FORMAT = 2
"""Format 1 had neither identity nor hash; what it says is shown, and not taken for GATED."""

GATED, UNGATED = "GATED", "UNGATED"


class RunFolder:
    """A run directory as a rank uses it that does not hold it: another one does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.sqlite"


class RunDir(RunFolder):
    """A run directory that this process holds. Use as a context manager; the lock goes with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Lock an existing folder, and `.lock` in it, which names the holder and is all that some file systems can lock.

        BusyError if another process holds either.
        """
        super().__init__(path)
        self._folder = self._file = -1
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            hold(self._folder)
            self._lock()
        except BlockingIOError:
            raise self._busy() from None
        except OSError as error:
            self.close()
            raise disk_error(path / ".lock", error) from error
        sweep(path)

    def _lock(self) -> None:
        self._file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        hold(self._file)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _busy(self) -> BusyError:
        """The error that names who holds the folder; this process lets go of it."""
        try:
            holder = (self.path / ".lock").read_text(errors="replace")[:64].strip()
        except OSError:
            holder = ""
        self.close()
        return BusyError(
            "another process trains in this run directory",
            came=f"{self.path} (process {holder or 'unknown'})",
            expected="one process at a time",
            do="wait for it, stop it, or give this run another name with --set run.name=...",
        )

    def check(self) -> None:
        """Before anything is saved: BusyError unless this process still holds the folder. A `.lock` that was deleted is taken again."""
        try:
            if not os.path.samestat(os.fstat(self._folder), os.stat(self.path)):
                raise self._busy()
            try:
                mine = os.path.samestat(os.fstat(self._file), os.stat(self.path / ".lock"))
            except FileNotFoundError:
                mine = False
            if not mine:
                os.close(self._file)
                self._lock()
        except BlockingIOError:
            raise self._busy() from None
        except OSError as error:
            raise disk_error(self.path / ".lock", error) from error

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        for handle in (self._file, self._folder):
            if handle >= 0:
                os.close(handle)
        self._file = self._folder = -1

    def write_config(self, cfg: Config) -> None:
        """Replace the configuration where it changed: a run that lasts longer than it was meant to goes on so when it is resumed again."""
        text = cfg.resolved().encode()
        if read_file(self.path / "config.toml", "the configuration of a run", MOST_TEXT) != text:
            write_atomic(self.path / "config.toml", text)

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Write the tokenizer again where its file is gone: whoever samples from the run or exports it has no other."""
        if not (self.path / "tokenizer.json").exists():
            tokenizer.save(self.path / "tokenizer.json")

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Replace the manifest, whole or not at all, with the hash of its content."""
        write_atomic(self.path / "manifest.json", json.dumps(sealed(content), indent=2, sort_keys=True).encode() + b"\n")


def create(cfg: Config, tokenizer: Tokenizer, status: str = UNGATED) -> RunDir:
    """Make `<run.out>/<run.name>`, or with -2, -3 ... behind it if that is taken, and hold it. MachineError if the disk refuses.

    `status`: what the first session is, for the manifest.
    """
    out = Path(cfg.run.out)
    part, held = out / f"{MAKING}{cfg.run.name}-{os.getpid()}", None
    try:
        out.mkdir(parents=True, exist_ok=True)
        sweep(out)
        part.mkdir()
        held = RunDir(part)
        tokenizer.save(part / "tokenizer.json")
        held.write_manifest({"run": os.urandom(16).hex(), "status": status, "sessions": [], "folder": os.getcwd()})
        write_atomic(part / "config.toml", cfg.resolved().encode())
        held.path = _named(part, out, cfg.run.name)
        sync_folder(out)
        return held
    except BaseException as error:
        if held is not None:
            held.close()
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, FileExistsError) and not out.is_dir():
            raise InputError("run.out is not a folder", came=out, expected="a folder", do="change run.out") from None
        if isinstance(error, OSError):
            raise disk_error(part, error) from error
        raise


def _named(part: Path, out: Path, name: str) -> Path:
    """Give a whole run directory the first name that is free."""
    for number in range(1, 1_000_000):
        path = out / (name if number == 1 else f"{name}-{number}")
        if os.path.lexists(path):
            continue
        try:
            os.rename(part, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                continue  # taken meanwhile
            raise
        return path
    raise InputError("too many runs of this name", came=out / name, do="choose another run.name")


def _content_hash(content: Mapping[str, Any]) -> str:
    return sha256_hex(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run with its format and the hash of its content."""
    whole = {"format": MANIFEST_FORMAT, **content}
    return {**whole, "sha256": _content_hash(whole)}


def is_sound(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is as it was written, in a format that carries its hash."""
    content = dict(manifest)
    stated = content.pop("sha256", None)
    return content.get("format") == MANIFEST_FORMAT and stated == _content_hash(content)


def find(cfg: Config) -> Path:
    """The newest run of this name: the one with the highest number. A run that calls itself something else is none of them: `demo-7` may
    be the seventh of `demo`, or the first of `demo-7`. InputError if there is none."""
    out = Path(cfg.run.out)
    numbered = [(1, out / cfg.run.name)]
    if out.is_dir():
        for path in out.iterdir():
            tail = path.name.removeprefix(f"{cfg.run.name}-")
            if path.name != tail and tail.isdecimal():
                numbered.append((int(tail), path))
    for _, path in sorted(numbered, reverse=True):
        if is_run(path) and read_config(path).run.name == cfg.run.name:
            return path
    raise InputError("there is no run to resume", came=out / cfg.run.name, expected="a run directory", do="start it without --resume")


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return not path.name.startswith(MAKING) and (path / "config.toml").is_file()


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
        content = json_of(read_file(path / "manifest.json", "the manifest of a run", MOST_TEXT))
    except ValueError as error:
        raise CorruptError(
            "the manifest of a run is damaged", came=f"{path / 'manifest.json'}: {error}", expected="a JSON object", do="restore it"
        ) from error
    if not isinstance(content, dict):
        raise CorruptError("the manifest of a run is no JSON object", came=path / "manifest.json", do="restore it")
    wrong = _wrong_in(content)
    if wrong:
        raise CorruptError("the manifest of a run is not one that a run writes", came=f"{path / 'manifest.json'}: {wrong}",
                           expected="tables where a run writes tables", do="restore it")
    return content


def _wrong_in(content: Mapping[str, Any]) -> str:
    """What of a manifest is of another type than readers lean on; '' when nothing."""
    sessions = content.get("sessions", [])
    if not isinstance(sessions, list) or not all(isinstance(s, dict) and isinstance(s.get("source", {}), dict) for s in sessions):
        return f"sessions = {sessions!r}"
    if not isinstance(content.get("flops", {}), dict):
        return f"flops = {content['flops']!r}"
    lines = content.get("targets", {})
    if not isinstance(lines, dict) or not all(type(x) in (int, float) and abs(x) <= sys.float_info.max for x in lines.values()):
        return f"targets = {lines!r}"
    for name in ("status", "folder"):
        if not isinstance(content.get(name, ""), str):
            return f"{name} = {content[name]!r}"
    return ""


@cache
def source_state() -> Mapping[str, str]:
    """Which code ran: commit, and sha256 of the difference of tracked files from it ('' when clean). 'unknown' outside git. It is looked
    at once in a process, and holds for those that are forked then: their code is the one that was imported."""
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
