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
from typing import Protocol

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


LENT_BYTES = 32 * 1024
"""From so many bytes on a payload between hosts is not copied into a slot where that can be avoided. A shorter one is copied in less time
than it takes to say where it lies."""


class Elsewhere(Protocol):
    """What carries the rings to and from one rank on another host, of one channel (streams.py)."""

    def lend(self, sequence: int, payload: memoryview) -> None:
        """The payload of a message that is not counted yet lies there, and not in its slot, until `keep`."""

    def keep(self) -> bool:
        """What was lent and is not released goes into its slot; whether that was possible by now."""

    def expect(self, sequence: int, out: memoryview) -> None:
        """The payload of a message belongs there, unless it has begun to come."""

    def came(self, sequence: int, nbytes: int) -> memoryview:
        """Where a payload of LENT_BYTES or more lies that has come; asked once."""

    def withdraw(self) -> None:
        """Of a call that failed: nothing is lent and nothing expected any more."""

    def carry(self) -> bool:
        """Send what the ring to that rank holds that has not gone out; whether all of it is on its way by now."""

    def credit(self) -> None:
        """A message of that rank was released."""

    def rest(self, seconds: float) -> None:
        """Wait so long at most for something to come, and take it."""


class _Ring:
    """One direction between two ranks. `peer`: the other one; `elsewhere`: what carries it, None on this host."""

    __slots__ = ("at", "count", "elsewhere", "memory", "payloads", "peer", "released", "sent", "slots")

    def __init__(self, segment: Segment, channel: int, source: int, to: int, peer: int, elsewhere: Elsewhere | None) -> None:
        start = segment.ring(channel, source, to)
        self.memory, self.slots = memoryview(segment.memory), segment.slots
        self.sent, self.released = (self.memory[start + i : start + i + 8].cast("Q") for i in (0, RELEASED))
        self.at = [segment.slot(start, i) for i in range(self.slots)]
        whole = np.frombuffer(segment.memory, np.uint8)
        self.payloads = [whole[a + SPACE : a + SPACE + segment.payload_bytes] for a in self.at]
        self.peer, self.elsewhere = peer, elsewhere
        self.count = 0  # messages that this side has sent, or released


class SharedMemory:
    """The links of one rank to the other members of a group (alpha/comm/transport.py: Transport).

    members: the ranks of the group, in order. channel: the group's number in the job. One thread uses it at a time. elsewhere: gives
    what fills and empties the other ends of the rings of a member on another host, by channel and rank.
    """

    def __init__(self, segment: Segment, watch: Watch, channel: int, members: Sequence[int],
                 elsewhere: Callable[[int, int], Elsewhere] | None = None) -> None:
        if channel >= segment.channels:
            raise GraphError("a job has too many groups", came=channel, expected=f"at most {segment.channels - 1} besides the world")
        self.payload_bytes = segment.payload_bytes
        self._watch, self._members, self._job, self._epoch = watch, tuple(members), segment.job, segment.epoch
        me, far = watch.rank, {r: elsewhere(channel, r) for r in members if r not in segment.here} if elsewhere else {}
        self._out = {i: _Ring(segment, channel, me, r, r, far.get(r)) for i, r in enumerate(members) if r != me}
        self._in = {i: _Ring(segment, channel, r, me, r, far.get(r)) for i, r in enumerate(members) if r != me}
        self._lent = dict[int, _Ring]()

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        """See Transport."""
        ring, nbytes = self._out[to], payload.size
        sequence, released, slots = ring.count, ring.released, ring.slots
        self._wait(lambda: sequence - released[0] < slots, ring, about)
        slot = sequence % slots
        head = header(about, job=self._job, epoch=self._epoch, sender=self._watch.rank, sequence=sequence, chunk=chunk, nbytes=nbytes)
        at = ring.at[slot]
        code = checksum(head, payload)  # of what was asked for, not of what was copied: the receiver sees whether the copy is right
        if kept and ring.elsewhere is not None and nbytes >= LENT_BYTES:
            ring.elsewhere.lend(sequence, payload.data)
            self._lent[to] = ring
        else:
            ring.payloads[slot][:nbytes] = payload
        ring.memory[at : at + HEADER.size] = head
        CHECKSUM.pack_into(ring.memory, at + HEADER.size, code)
        in_order()
        ring.count = ring.sent[0] = sequence + 1
        if ring.elsewhere is not None:
            self._carry(ring, ring.elsewhere, about)
        self._watch.control.advance(self._watch.rank)

    def done(self, about: About) -> None:
        """See Transport."""
        while self._lent:
            _, ring = self._lent.popitem()
            assert ring.elsewhere is not None
            if not ring.elsewhere.keep():
                self._watch.until(ring.elsewhere.keep, ring.peer, about.op, ring.elsewhere.rest)

    def withdraw(self) -> None:
        """See Transport."""
        self._lent.clear()
        for ring in self._in.values():
            if ring.elsewhere is not None:
                ring.elsewhere.withdraw()

    def expect(self, source: int, outs: Sequence[np.ndarray | None]) -> None:
        """See Transport."""
        ring = self._in[source]
        if ring.elsewhere is not None:
            for i, out in enumerate(outs):
                if out is not None and out.size >= LENT_BYTES:
                    ring.elsewhere.expect(ring.count + i, out.data)

    def receive(self, source: int, about: About, chunk: int, nbytes: int) -> np.ndarray:
        """See Transport."""
        ring = self._in[source]
        sequence, sent = ring.count, ring.sent
        self._wait(lambda: sent[0] > sequence, ring, about)
        slot = sequence % ring.slots
        expected = header(about, job=self._job, epoch=self._epoch, sender=self._members[source], sequence=sequence, chunk=chunk,
                          nbytes=nbytes)
        at, payload = ring.at[slot], ring.payloads[slot][:nbytes]
        if ring.elsewhere is not None and nbytes >= LENT_BYTES:
            payload = np.frombuffer(ring.elsewhere.came(sequence, nbytes), np.uint8)
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
        in_order()
        ring.released[0] = ring.count
        if ring.elsewhere is not None:
            ring.elsewhere.credit()
        self._watch.control.advance(self._watch.rank)

    def _wait(self, ready: Callable[[], bool], ring: _Ring, about: About) -> None:
        if not ready():
            self._watch.until(ready, ring.peer, about.op, None if ring.elsewhere is None else ring.elsewhere.rest)
        in_order()

    def _carry(self, ring: _Ring, elsewhere: Elsewhere, about: About) -> None:
        """A message is on its way once this machine has taken it over: a rank that computes sends nothing."""
        if not elsewhere.carry():
            self._watch.until(elsewhere.carry, ring.peer, about.op, elsewhere.rest)

    def _other_message(self, source: int, about: About, came: bytes, expected: bytes) -> RankError:
        found = differences(came, expected)
        rank = self._members[source]
        return RankError(f"rank {rank} runs another collective than rank {self._watch.rank}", rank=rank, op=about.op, step=self._watch.step,
                         came=", ".join(f"{name} {x}" for name, x, _ in found), expected=", ".join(f"{name} {y}" for name, _, y in found),
                         do="all members of a group run the same collectives in the same order")
