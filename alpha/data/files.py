"""Reading whole files with a clear error, writing them whole or not at all, and sweeping what was half made."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from alpha.errors import InputError, MachineError
from alpha.files import read_regular

MAKING, TEMPORARY = ".alpha-making-", ".alpha-tmp"
"""Folders that are being made begin so, and temporary files end so: names that nobody else gives, for what is left of them is swept."""

GRACE, ABANDONED = 10.0, 86400.0
"""Seconds that what nobody holds is left alone: a maker locks it just after it made it; and where the file system has no locks."""


def sha256_hex(data: bytes | memoryview) -> str:
    """SHA-256 of `data` as 64 lower-case hexadecimal digits (FIPS 180-4)."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path, what: str, most: int | None = None) -> bytes:
    """The bytes of `path`, at most `most` of them. `what` names the kind of file in the error. InputError if it is missing, unreadable,
    larger, or no regular file."""
    try:
        return read_regular(path, most)
    except OSError as error:
        raise InputError(
            f"{what} cannot be read", came=f"{path} ({error.strerror})", expected="a readable file", do="check the path"
        ) from error


def disk_error(path: Path, error: OSError) -> MachineError:
    """The error to raise when writing `path` failed; names the full disk when that is the reason."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return MachineError(
        "the disk is full" if full else "the file cannot be written",
        came=f"{path} ({error.strerror})",
        expected="room and permission to write there",
        do="free some space and run again; what was saved before is untouched" if full else "check the folder",
    )


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (new files, renames) to the medium."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hold(handle: int) -> bool:
    """Lock an open file or folder until it is closed (flock, so it goes with the process). False where the file system has no such lock.

    BlockingIOError if another process holds it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # NFS locks no folder
        return False
    return True


def sweep(folder: Path) -> None:
    """Remove the temporary files and half-made folders in `folder` that nobody makes any more: their makers hold them locked."""
    for path in (*folder.glob(f".*{TEMPORARY}"), *folder.glob(f"{MAKING}*")):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue  # renamed or removed meanwhile, or not ours to read
        try:
            if time.time() - os.fstat(handle).st_mtime > (GRACE if hold(handle) else ABANDONED):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        except OSError:
            pass  # held by its maker, or not ours to remove
        finally:
            os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file in the same folder, rename (atomic by POSIX), both forced to the medium.

    MachineError if the disk refuses; then the temporary file is removed, and unless it was the last step an older `path` still stands.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            hold(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the folder itself may not exist
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error
