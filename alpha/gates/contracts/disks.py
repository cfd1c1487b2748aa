"""Disks that fail, for the cases of what is saved: at any operation, with the process, with the power, or slowly. Floor 5."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from alpha.checkpoint.disk import Disk


class Killed(BaseException):
    """The process ends here: no handler of the package may see it."""


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


class Failing(Disk):
    """Fails at operation number `at`: each call, and each chunk of a write, is one. `failure` makes what is raised."""

    def __init__(self, at: int, failure: Callable[[], BaseException]) -> None:
        self.at, self.failure, self.done = at, failure, 0

    def step(self) -> None:
        self.done += 1
        if self.done == self.at:
            raise self.failure()

    def make(self, folder: Path) -> None:
        self.step()
        super().make(folder)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        def counted() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                if len(chunk):
                    self.step()
                yield chunk

        self.step()
        super().write(path, counted())
        self.step()

    def sync_folder(self, folder: Path) -> None:
        self.step()
        super().sync_folder(folder)
        self.step()

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)
        self.step()

    def remove(self, folder: Path) -> None:
        self.step()
        for path in sorted(folder.iterdir()):
            path.unlink()
            self.step()
        super().remove(folder)


class Losing(Failing):
    """Also remembers what was never forced to the medium. `power_cut` takes it back.

    `journaled`: whether unforced renames survive (both happen on real file systems).
    """

    def __init__(self, at: int, journaled: bool) -> None:
        super().__init__(at, Killed)
        self.journaled = journaled
        self.loose_entries: set[Path] = set()  # files whose folder was not forced since they were made
        self.loose_names: list[tuple[Path, Path]] = []

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self.loose_entries.add(path)
        super().write(path, chunks)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.loose_entries = {p for p in self.loose_entries if p.parent != folder}
        self.loose_names = [n for n in self.loose_names if n[1].parent != folder]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.loose_names.append((source, target))
        self.loose_entries = {target / p.name if p.parent == source else p for p in self.loose_entries}

    def power_cut(self) -> None:
        for path in self.loose_entries:
            path.unlink(missing_ok=True)
        if not self.journaled:
            for source, target in reversed(self.loose_names):
                if target.exists() and not source.exists():
                    os.rename(target, source)


class Beside(Failing):
    """Lets another writer act before operation number `at`."""

    def __init__(self, at: int, other: Callable[[], object]) -> None:
        super().__init__(at, Killed)
        self.other = other

    def step(self) -> None:
        self.done += 1
        if self.done == self.at:
            self.other()


class ShortFile(io.RawIOBase):
    """A file of which one read gives `most(place)` bytes at most: few at a time, or none behind an end that its size does not tell."""

    def __init__(self, path: Path, most: Callable[[int], int]) -> None:
        self._file, self._most = open(path, "rb", buffering=0), most  # closed below

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        return self._file.seek(at, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(memoryview(buffer)[: self._most(self._file.tell())])

    def close(self) -> None:
        self._file.close()
        super().close()
