"""Hashes of an executor's memory, by which a spot check sees that it changed. Floor 4.

A host has them at once. A device makes them beside what follows: `of` enqueues, `read` fetches what has been made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alpha.graph.plan import Ref

WORDS = 1024
"""Columns of 64-bit words that a hash on the host adds up."""


@dataclass(eq=False)
class Digest:
    """A hash. `place`, `many`: where a device puts it, in 64-bit numbers. `value`: None until it is read."""

    place: int = 0
    many: int = 0
    value: bytes | None = None


class Digests(Protocol):
    """What every executor has. `piece`: bytes of a state that are hashed at a time; `late`: whether hashes are made beside the host."""

    piece: int
    late: bool

    def nbytes(self, kind: str) -> int:
        """Of this rank's part of a kind of state."""
    def of(self, ref: Ref) -> Digest:
        """Of the tensor at a planned place."""
    def of_state(self, kind: str, start: int) -> Digest:
        """Of the piece of a kind of state that begins at byte `start`."""
    def wait(self) -> None:
        """Until all that was asked for has been made."""
    def behind(self) -> Callable[[], None]:
        """What waits until all that has been asked for so far has been made, and for nothing that is enqueued behind it."""
    def read(self, one: Digest) -> bytes:
        """The value of one that has been made."""
    def words(self, nbytes: int, at: int) -> np.ndarray:
        """Which 64-bit words of a piece of `nbytes` bytes byte `at` of its hash stands for."""


class HostDigests:
    """Of arenas that are arrays of bytes. A hash is the sums modulo 2^64 of WORDS columns, and what is left over: one word that changes
    shows for certain, as do any that do not cancel out in one column."""

    piece, late = 1 << 19, False

    def __init__(self, arenas: Mapping[str, np.ndarray], view: Callable[[Ref], np.ndarray]) -> None:
        self._arenas, self._view = arenas, view

    def nbytes(self, kind: str) -> int:
        """Of this rank's part of a kind of state."""
        return self._arenas[f"state.{kind}"].nbytes

    def of(self, ref: Ref) -> Digest:
        """Of the tensor at a planned place."""
        return Digest(value=columns(self._view(ref)))

    def of_state(self, kind: str, start: int) -> Digest:
        """Of the piece of a kind of state that begins at byte `start`."""
        return Digest(value=columns(self._arenas[f"state.{kind}"][start : start + self.piece]))

    def wait(self) -> None:
        """They are there."""

    def behind(self) -> Callable[[], None]:
        """They are there."""
        return self.wait

    def read(self, one: Digest) -> bytes:
        """Its value."""
        assert one.value is not None
        return one.value

    def words(self, nbytes: int, at: int) -> np.ndarray:
        """Which 64-bit words of a piece of `nbytes` bytes byte `at` of its hash stands for."""
        column, last = at // 8, nbytes // 8
        return np.arange(column, last, WORDS) if column < WORDS else np.array([last // WORDS * WORDS + column - WORDS])


def columns(x: np.ndarray) -> bytes:
    """The hash of a contiguous array on the host."""
    raw = x.reshape(-1).view(np.uint8)
    whole = raw.size // (8 * WORDS) * 8 * WORDS
    sums = np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, WORDS), axis=0)
    return sums.tobytes() + raw[whole:].tobytes()
