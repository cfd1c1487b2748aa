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
from contextlib import ExitStack

from alpha.comm.control import Control, control_bytes
from alpha.comm.flight import RING_BYTES, FlightRecorder
from alpha.comm.message import SPACE
from alpha.errors import InputError, MachineError

MOST_RANKS = 64
CHANNELS = 4
"""Groups that a job may have, besides the world itself."""
SLOTS, SLOTS_ACROSS = 4, 8
"""Messages on the way between two ranks of a group; in a job of several hosts, where that a slot is free comes over the network."""
MOST_STREAMS = 16
PAYLOAD_BYTES = 256 * 1024
"""Bytes of the longest message among up to 8 ranks: a slot and the next one stay in a cache of 1 MiB. More ranks have shorter ones."""

_MAGIC, _VERSION = 0x616C706861, 3
_HEADER = struct.Struct("<QIIIIIIQIII")
_PID, _BRIDGE_AT = struct.Struct("<Q"), 128
_PAGE = 4096
_COUNTERS = 128
"""Bytes of a ring's two counters: each on a cache line of its own, because each has one writer."""
RELEASED = 64
"""Where the second one begins."""


class Segment:
    """Shared memory of one job of `size` ranks on one host. `job`: 64 random bits. `epoch`: how often the job was started before.

    `here`: the ranks of this host. Words of ranks elsewhere are kept up to date by this host's bridge (bridge.py), rings between a rank
    here and one elsewhere by the rank here, over `streams` connections (streams.py).
    """

    def __init__(self, fd: int) -> None:
        """Over an open descriptor, which it owns from now on. InputError for what is no segment, which is closed then."""
        self.fd = fd
        try:
            self._map()
        except BaseException:
            os.close(fd)
            raise
        self.control = Control(self.memory, self._control_at, self.size, self.here)

    def _map(self) -> None:
        fd = self.fd
        head = os.pread(fd, _HEADER.size, 0)
        magic, version, size, self.epoch, self.slots, payload, channels, self.job, first, count, self.streams = \
            _HEADER.unpack(head) if len(head) == _HEADER.size else (0,) * 11
        if (magic, version) != (_MAGIC, _VERSION):
            raise InputError("this descriptor is no segment of a job", came=f"magic {magic:#x}, version {version}",
                             expected=f"magic {_MAGIC:#x}, version {_VERSION}", do="start all ranks with one version of Alpha")
        self.size, self.payload_bytes, self.channels, self.here = size, payload, channels, range(first, first + count)
        self._control_at = _PAGE
        self._flight_at = _paged(self._control_at + control_bytes(size))
        self._rings_at = _paged(self._flight_at + size * RING_BYTES)
        self.ring_size = ring_bytes(self.slots, payload)
        nbytes = self._rings_at + channels * size * size * self.ring_size
        try:
            self.memory = mmap.mmap(fd, nbytes)
        except OSError as error:
            raise MachineError("this process gets no address space for what ranks share", came=f"{nbytes:,} bytes ({error.strerror})",
                               expected="addresses alone; memory stands behind those of its own groups", do="raise `ulimit -v`") from error

    @classmethod
    def create(cls, size: int, *, epoch: int = 0, payload_bytes: int | None = None, slots: int | None = None, here: range | None = None,
               job: int | None = None, streams: int = 1) -> Segment:
        """A new segment of a new job, or of one that began on another host. InputError for a size that no job has; MachineError where the
        system has no such memory."""
        if not 1 <= size <= MOST_RANKS:
            raise InputError("a job has another number of ranks", came=size, expected=f"1 to {MOST_RANKS}")
        payload = payload_bytes or (PAYLOAD_BYTES if size <= 8 else PAYLOAD_BYTES // 8)
        here, job = range(size) if here is None else here, secrets.randbits(64) if job is None else job
        slots = slots or (SLOTS if len(here) == size else SLOTS_ACROSS)
        if not 1 <= streams <= MOST_STREAMS:
            raise InputError("two ranks have another number of connections", came=streams, expected=f"1 to {MOST_STREAMS}")
        if payload % 64 or slots < 2:
            raise InputError("messages are whole cache lines, and two or more are on the way", came=f"{payload} bytes, {slots} slots",
                             expected="a multiple of 64 bytes, 2 slots or more")
        if not hasattr(os, "memfd_create"):
            raise MachineError("ranks share memory without a name", came=sys.platform, expected="Linux 5.3 or newer")
        fixed = _paged(_paged(_PAGE + control_bytes(size)) + size * RING_BYTES)
        whole = fixed + (CHANNELS + 1) * size * size * ring_bytes(slots, payload)
        with ExitStack() as stack:
            try:
                fd = os.memfd_create("alpha-job")
                stack.callback(os.close, fd)
                os.ftruncate(fd, whole)
                os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, size, epoch, slots, payload, CHANNELS + 1, job, here.start, len(here),
                                           streams), 0)
            except OSError as error:
                raise MachineError("the ranks cannot share memory", came=f"{whole:,} bytes of addresses: {error.strerror}",
                                   do="start fewer ranks, or raise the limits on open files and on their size (ulimit -n, -f)") from error
            reserve(fd, 0, fixed)
            stack.pop_all()
        return cls(fd)

    def recorder(self, rank: int) -> FlightRecorder:
        """The flight recorder of a rank."""
        return FlightRecorder(self.memory, self._flight_at + rank * RING_BYTES)

    def ring(self, channel: int, source: int, to: int) -> int:
        """Where the ring from one rank to another begins, memory reserved. MachineError when there is none left."""
        at = self.ring_at(channel, source, to)
        reserve(self.fd, at, self.ring_size)
        return at

    def ring_at(self, channel: int, source: int, to: int) -> int:
        """The same, of memory that is reserved."""
        return self._rings_at + ((channel * self.size + source) * self.size + to) * self.ring_size

    def slot(self, ring: int, sequence: int) -> int:
        """Where the slot of message `sequence` of a ring begins."""
        return ring + _COUNTERS + sequence % self.slots * (SPACE + self.payload_bytes)

    @property
    def bridge(self) -> int:
        """The process of this host's bridge, 0 where there is none yet."""
        return int(_PID.unpack_from(self.memory, _BRIDGE_AT)[0])

    @bridge.setter
    def bridge(self, pid: int) -> None:
        _PID.pack_into(self.memory, _BRIDGE_AT, pid)

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
