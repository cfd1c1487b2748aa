"""Messages through shared memory: a ring of slots for every ordered pair of a group's members. Floor 4.

A ring has two counters, messages sent and messages released, each written by one side. The sender fills the slot of message n once message
n - slots has been released, then counts it. A slot is header, checksum, payload. Readers may compute straight from the slot.

Order in memory. A counter must not be seen before what it stands for. x86-64 keeps stores in order, and no store passes an earlier load
(total store order), so nothing is needed there. Arm keeps neither. There `_fence` comes before each store of a counter and after each load
of one that lets a rank go on: a lock is taken and released twice. Release and acquire of one lock are ordered among themselves on Arm
(RCsc), so nothing passes the pair of them. A reader who saw a slot too early all the same would find a wrong checksum.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence

import numpy as np

from alpha.comm.message import CHECKSUM, HEADER, SPACE, About, checksum, differences, header
from alpha.comm.segment import RELEASED, Segment
from alpha.comm.watch import Watch
from alpha.errors import GraphError, RankError

_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
_FENCE = threading.Lock()


def _fence() -> None:
    for _ in range(2):
        _FENCE.acquire()
        _FENCE.release()


def in_order() -> None:
    """No load or store moves from one side to the other, on machines that would let it."""
    if not _STORES_IN_ORDER:
        _fence()


class _Ring:
    """One direction between two ranks."""

    __slots__ = ("at", "count", "elsewhere", "memory", "payloads", "released", "sent", "slots")

    def __init__(self, segment: Segment, channel: int, source: int, to: int) -> None:
        start = segment.ring(channel, source, to)
        self.memory, self.slots = memoryview(segment.memory), segment.slots
        self.sent, self.released = (self.memory[start + i : start + i + 8].cast("Q") for i in (0, RELEASED))
        self.at = [segment.slot(start, i) for i in range(self.slots)]
        whole = np.frombuffer(segment.memory, np.uint8)
        self.payloads = [whole[a + SPACE : a + SPACE + segment.payload_bytes] for a in self.at]
        self.elsewhere = source not in segment.here or to not in segment.here
        self.count = 0  # messages that this side has sent, or released


class SharedMemory:
    """The links of one rank to the other members of a group (alpha/comm/transport.py: Transport).

    members: the ranks of the group, in order. channel: the group's number in the job. One thread uses it at a time. Of members on other
    hosts the bridge is what fills and empties the other ends of the rings (bridge.py).
    """

    def __init__(self, segment: Segment, watch: Watch, channel: int, members: Sequence[int]) -> None:
        if channel >= segment.channels:
            raise GraphError("a job has too many groups", came=channel, expected=f"at most {segment.channels - 1} besides the world")
        self.payload_bytes = segment.payload_bytes
        self._watch, self._members, self._job, self._epoch = watch, tuple(members), segment.job, segment.epoch
        self._tell, me = segment.ring_bell, watch.rank
        self._out = {i: _Ring(segment, channel, me, r) for i, r in enumerate(members) if r != me}
        self._in = {i: _Ring(segment, channel, r, me) for i, r in enumerate(members) if r != me}

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray) -> None:
        """See Transport."""
        ring, nbytes = self._out[to], payload.size
        sequence, released, slots = ring.count, ring.released, ring.slots
        self._wait(lambda: sequence - released[0] < slots, to, about)
        slot = sequence % slots
        head = header(about, job=self._job, epoch=self._epoch, sender=self._watch.rank, sequence=sequence, chunk=chunk, nbytes=nbytes)
        at = ring.at[slot]
        code = checksum(head, payload)  # of what was asked for, not of what was copied: the receiver sees whether the copy is right
        ring.payloads[slot][:nbytes] = payload
        ring.memory[at : at + HEADER.size] = head
        CHECKSUM.pack_into(ring.memory, at + HEADER.size, code)
        if not _STORES_IN_ORDER:
            _fence()
        ring.count = ring.sent[0] = sequence + 1
        if ring.elsewhere:
            self._tell()
        self._watch.control.advance(self._watch.rank)

    def receive(self, source: int, about: About, chunk: int, nbytes: int) -> np.ndarray:
        """See Transport."""
        ring = self._in[source]
        sequence, sent = ring.count, ring.sent
        self._wait(lambda: sent[0] > sequence, source, about)
        slot = sequence % ring.slots
        expected = header(about, job=self._job, epoch=self._epoch, sender=self._members[source], sequence=sequence, chunk=chunk,
                          nbytes=nbytes)
        at, payload = ring.at[slot], ring.payloads[slot][:nbytes]
        came = ring.memory[at : at + HEADER.size]
        if came != expected:
            raise self._watch.fail(self._other_message(source, about, bytes(came), expected))
        (code,) = CHECKSUM.unpack_from(ring.memory, at + HEADER.size)
        if code != checksum(expected, payload):
            raise self._watch.fail(RankError(
                f"a message from rank {self._members[source]} was damaged on its way", rank=self._members[source], op=about.op,
                step=self._watch.step, came=f"message {sequence} of the link, {nbytes:,} bytes, with another checksum",
                expected=f"{code:#018x}", do="start again from the last checkpoint; if it comes back, test the memory of this machine"))
        return payload

    def release(self, source: int) -> None:
        """See Transport."""
        ring = self._in[source]
        ring.count += 1
        if not _STORES_IN_ORDER:
            _fence()
        ring.released[0] = ring.count
        if ring.elsewhere:
            self._tell()
        self._watch.control.advance(self._watch.rank)

    def _wait(self, ready: Callable[[], bool], peer: int, about: About) -> None:
        if not ready():
            self._watch.until(ready, self._members[peer], about.op)
        if not _STORES_IN_ORDER:
            _fence()

    def _other_message(self, source: int, about: About, came: bytes, expected: bytes) -> RankError:
        found = differences(came, expected)
        rank = self._members[source]
        return RankError(f"rank {rank} runs another collective than rank {self._watch.rank}", rank=rank, op=about.op, step=self._watch.step,
                         came=", ".join(f"{name} {x}" for name, x, _ in found), expected=", ".join(f"{name} {y}" for name, _, y in found),
                         do="all members of a group run the same collectives in the same order")
