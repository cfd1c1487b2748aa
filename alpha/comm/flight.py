"""The flight recorder: the last collectives of each rank, in memory that outlives it. Floor 4.

Each rank writes a ring of records of its own. Whoever holds the segment reads all rings, also after their writers died.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from dataclasses import dataclass

from alpha.comm.message import DTYPES, OPS

RECORDS = 512
"""Collectives that are kept of each rank."""

_RECORD = struct.Struct("<QIBBHQQQQQ96s")
RING_BYTES = 64 + RECORDS * _RECORD.size
_STARTED, _FINISHED = 40, 48
_SOURCE = 96


@dataclass(frozen=True)
class Record:
    """One collective of one rank. Times are nanoseconds of CLOCK_MONOTONIC, 0 for what has not happened.

    `call`: its number in the group; `created`: when it was asked for; `started`: when its first message was handed over;
    `source`: the model's source line.
    """

    group: int
    call: int
    op: str
    dtype: str
    nbytes: int
    step: int
    created: int
    started: int
    finished: int
    source: str


class FlightRecorder:
    """The ring of one rank over `memory` at `start`. Threads of the rank may share it."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._all = memoryview(memory)[start : start + RING_BYTES]
        self._written = self._all[:8].cast("Q")
        self._lock = threading.Lock()

    def create(self, group: int, call: int, op: str, dtype: str, nbytes: int, step: int, source: str) -> int:
        """Begin a record; what `start` and `finish` are told."""
        with self._lock:
            number = self._written[0]
            at = self._at(number)
            _RECORD.pack_into(self._all, at, number + 1, group, OPS.index(op), DTYPES.index(dtype), 0, call, nbytes, time.monotonic_ns(),
                              0, 0, struct.pack("<q", step) + source.encode()[-(_SOURCE - 8) :])
            self._written[0] = number + 1
        return at

    def start(self, at: int) -> None:
        """Its first message goes out."""
        self._stamp(at + _STARTED)

    def finish(self, at: int) -> None:
        """It is done."""
        self._stamp(at + _FINISHED)

    @property
    def written(self) -> int:
        """How many collectives were ever asked for."""
        return int(self._written[0])

    def records(self, first: int = 0) -> list[Record]:
        """What the ring holds, oldest first, of collective number `first` (from 0) and later ones."""
        written = self._written[0]
        found = []
        for number in range(max(first, written - RECORDS), written):
            serial, group, op, dtype, _, call, nbytes, created, started, finished, rest = _RECORD.unpack_from(self._all, self._at(number))
            if serial == number + 1:  # else its writer has gone round meanwhile
                (step,) = struct.unpack_from("<q", rest)
                found.append(Record(group, call, OPS[op], DTYPES[dtype], nbytes, step, created, started, finished,
                                    rest[8:].rstrip(b"\0").decode("utf-8", "replace")))
        return found

    def _at(self, number: int) -> int:
        return 64 + number % RECORDS * _RECORD.size

    def _stamp(self, at: int) -> None:
        struct.pack_into("<Q", self._all, at, time.monotonic_ns())
