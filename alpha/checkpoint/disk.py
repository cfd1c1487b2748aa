"""The few file operations that a checkpoint is made of, one method each, so that a test can make any one of them fail. Floor 5."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from alpha.errors import MachineError


class Disk:
    """The real thing. Every method may raise OSError."""

    def make(self, folder: Path) -> None:
        """Create one folder (and its parents)."""
        folder.mkdir(parents=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Create a file, write the chunks and force them to the medium."""
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        """Force a folder's entries (new files, renames) to the medium."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder its new name in one step (POSIX rename); `target` does not exist."""
        os.rename(source, target)

    def remove(self, folder: Path) -> None:
        """Delete a folder and what is in it."""
        shutil.rmtree(folder)


def refused(path: Path, error: OSError) -> MachineError:
    """The error to raise when the disk refused to write `path`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return MachineError(
        "the disk is full: the checkpoint was not saved" if full else "the checkpoint cannot be written",
        came=f"{path} ({error.strerror or error})",
        expected="room and permission to write there",
        do=f"{'free some space' if full else 'check the folder'} and resume; every earlier checkpoint is untouched",
    )
