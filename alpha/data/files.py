"""Reading whole files with a clear error, and writing them so that a reader sees the old file or the new one, never half."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from alpha.errors import InputError, MachineError
from alpha.files import read_regular


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


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file in the same folder, fsync and rename (POSIX rename is atomic).

    MachineError if the disk refuses; then the temporary file is removed and an older `path` still stands.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # the folder itself may not exist
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error
