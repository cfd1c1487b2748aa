"""The memory that the ranks of one job share: its header, the control block, the flight recorders, and rings for every ordered pair.

Floor 4. It is a file in memory without a name (memfd_create(2)), handed from process to process as an open descriptor. So nothing can stay
behind when processes die, no other job can open it by chance, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import sys

from alpha.comm.control import Control, control_bytes
from alpha.comm.flight import RING_BYTES, FlightRecorder
from alpha.comm.message import SPACE
from alpha.errors import InputError, MachineError

MOST_RANKS = 64
CHANNELS = 4
"""Groups that a job may have, besides the world itself."""
SLOTS = 4
"""Messages on the way between two ranks of a group."""
PAYLOAD_BYTES = 256 * 1024
"""Bytes of the longest message among up to 8 ranks: a slot and the next one stay in a cache of 1 MiB. More ranks have shorter ones."""

_MAGIC, _VERSION = 0x616C706861, 1
_HEADER = struct.Struct("<QIIIIIIQ")
_PAGE = 4096
_COUNTERS = 128
"""Bytes of a ring's two counters: each on a cache line of its own, because each has one writer."""


class Segment:
    """Shared memory of one job of `size` ranks. `job`: 64 random bits. `epoch`: how often the job was started before."""

    def __init__(self, fd: int) -> None:
        """Over an open descriptor, which it owns from now on. InputError for what is no segment."""
        self.fd = fd
        head = os.pread(fd, _HEADER.size, 0)
        magic, version, size, self.epoch, self.slots, payload, channels, self.job = \
            _HEADER.unpack(head) if len(head) == _HEADER.size else (0,) * 8
        if (magic, version) != (_MAGIC, _VERSION):
            raise InputError("this descriptor is no segment of a job", came=f"magic {magic:#x}, version {version}",
                             expected=f"magic {_MAGIC:#x}, version {_VERSION}", do="start all ranks with one version of Alpha")
        self.size, self.payload_bytes, self.channels = size, payload, channels
        self._control_at = _PAGE
        self._flight_at = _paged(self._control_at + control_bytes(size))
        self._rings_at = _paged(self._flight_at + size * RING_BYTES)
        self._ring_bytes = ring_bytes(self.slots, payload)
        nbytes = self._rings_at + channels * size * size * self._ring_bytes
        try:
            self.memory = mmap.mmap(fd, nbytes)
        except OSError as error:
            raise MachineError("this process gets no address space for what ranks share", came=f"{nbytes:,} bytes ({error.strerror})",
                               expected="addresses alone; memory stands behind those of its own groups", do="raise `ulimit -v`") from error
        self.control = Control(self.memory, self._control_at, size)

    @classmethod
    def create(cls, size: int, *, epoch: int = 0, payload_bytes: int | None = None, slots: int = SLOTS) -> Segment:
        """A new segment. InputError for a size that no job has; MachineError where the system has no such memory."""
        if not 1 <= size <= MOST_RANKS:
            raise InputError("a job has another number of ranks", came=size, expected=f"1 to {MOST_RANKS}")
        payload = payload_bytes or (PAYLOAD_BYTES if size <= 8 else PAYLOAD_BYTES // 8)
        if payload % 64 or slots < 2:
            raise InputError("messages are whole cache lines, and two or more are on the way", came=f"{payload} bytes, {slots} slots",
                             expected="a multiple of 64 bytes, 2 slots or more")
        if not hasattr(os, "memfd_create"):
            raise MachineError("ranks share memory without a name", came=sys.platform, expected="Linux 5.3 or newer")
        fixed = _paged(_paged(_PAGE + control_bytes(size)) + size * RING_BYTES)
        whole = fixed + (CHANNELS + 1) * size * size * ring_bytes(slots, payload)
        try:
            fd = os.memfd_create("alpha-job")
            os.ftruncate(fd, whole)
            os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, size, epoch, slots, payload, CHANNELS + 1, secrets.randbits(64)), 0)
        except OSError as error:
            raise MachineError("the ranks cannot share memory", came=f"{whole:,} bytes of addresses: {error.strerror}",
                               do="start fewer ranks, or raise the limits on open files and on their size (ulimit -n, -f)") from error
        reserve(fd, 0, fixed)
        return cls(fd)

    def recorder(self, rank: int) -> FlightRecorder:
        """The flight recorder of a rank."""
        return FlightRecorder(self.memory, self._flight_at + rank * RING_BYTES)

    def ring(self, channel: int, source: int, to: int) -> int:
        """Where the ring from one rank to another begins, memory reserved. MachineError when there is none left."""
        at = self._rings_at + ((channel * self.size + source) * self.size + to) * self._ring_bytes
        reserve(self.fd, at, self._ring_bytes)
        return at

    def close(self) -> None:
        """Give the descriptor back. The memory goes with the last process that maps it."""
        os.close(self.fd)


def reserve(fd: int, at: int, nbytes: int) -> None:
    """Have memory behind a range, so that writing there cannot kill the process later. MachineError when there is none."""
    try:
        os.posix_fallocate(fd, at, nbytes)
    except OSError as error:
        raise MachineError("no memory for the ranks to share", came=f"{nbytes:,} bytes: {error.strerror}",
                           do="start fewer ranks, or give the job more memory") from error


def ring_bytes(slots: int, payload_bytes: int) -> int:
    """Bytes of one ring: counters, then slots."""
    return _paged(_COUNTERS + slots * (SPACE + payload_bytes))


def _paged(n: int) -> int:
    return -(-n // _PAGE) * _PAGE
