"""The bridge of one host: it carries messages, credits and the state of ranks to the bridges of the other hosts. Floor 4.

Ranks know one way to each other: rings in shared memory, and the control block (shm.py, control.py). Where the other rank is on another
host, the bridges of both keep the two copies of the ring alike. A message that was sent here is copied from its slot to the same slot
there; that it was released there is told here. A slot is kept until then, so whatever a broken connection has lost is sent again from it,
and the count of each ring says what: every message is delivered once. There is always a slot for what comes, so nobody stops reading.

A frame is checked over its header and the header of the message, with a seed of the connection. What fails that, or comes out of order,
ends the connection, not the job. The payload has the checksum of the message, which the receiving rank checks (J. H. Saltzer, D. P. Reed
and D. D. Clark, End-to-end arguments in system design, ACM TOCS 2(4), 1984).

A host that says nothing for SILENCE_S, or whose connection stays broken for BROKEN_S, is lost, and the job with it. Only time counts in
which this process was served (process.py).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from alpha.comm.control import ABSENT, LEFT, Failure
from alpha.comm.handshake import Door, Peer, knock
from alpha.comm.message import SPACE, nbytes_of
from alpha.comm.process import Served, process_state
from alpha.comm.segment import Segment, reserve
from alpha.comm.shm import in_order

FRAME = struct.Struct("<IBBHHHQI")
"""Magic, version, kind, channel, source, receiver, sequence, bytes that follow the digest."""
DIGEST_BYTES = 16
_HEAD_BYTES = FRAME.size + DIGEST_BYTES
_MAGIC, _VERSION = 0x65676472, 1
DATA, CREDIT, RECORD, ALIVE, RESUME, HELLO, BYE = range(1, 8)
_HELLO = struct.Struct("<QIHH")
"""Job, epoch, host, hosts."""
_MOST = 1 << 20
"""Bytes of the longest frame that is not a message."""

SILENCE_S, BROKEN_S = 2.0, 2.0
ALIVE_S = 0.25
RECORD_S = 0.01
"""How often the state of ranks is looked at; it is sent when it has changed."""
_SERVED_S = 0.05
_SPIN_S = 100e-6
"""How long the bridge looks again and again before it sleeps: as long as a rank's wait."""
_SLEEP_S = 0.01
_PARTS = 64
"""Pieces of memory that one system call sends."""


@dataclass(frozen=True)
class Host:
    """Where a host's bridge listens, and its ranks."""

    address: str
    port: int
    ranks: range


class _Broken(Exception):
    """This connection is of no more use."""


class _Link:
    """The connection to one other host, and what has to be known across connections."""

    def __init__(self, segment: Segment, host: Host, number: int) -> None:
        self.host, self.number = host, number
        here, there = segment.here, host.ranks
        sent, released = segment.counters()
        pick = (slice(None), slice(here.start, here.stop), slice(there.start, there.stop))
        back = (slice(None), slice(there.start, there.stop), slice(here.start, here.stop))
        self.sent, self.out_released = sent[pick], released[pick]  # by channel, rank here, rank there
        self.arrived, self.released = sent[back], released[back]  # by channel, rank there, rank here
        self.link: socket.socket | None = None
        self.down = self.heard = 0  # when the connection broke, and when something came last, by the served clock
        self.why = "it never connected"
        self.bye_heard = self.lost = False
        self.broken = 0
        """How often a connection broke."""
        self.reset(0)

    def reset(self, seed: int) -> None:
        """For a new connection."""
        self.seed, self.resumed, self.bye_said = seed, False, False
        self.next = np.zeros(self.sent.shape, np.uint64)
        self.credited = np.full(self.released.shape, 2**64 - 1, np.uint64)
        self.records = dict[int, bytes]()
        self.out: deque[memoryview] = deque()
        self.head, self.body = bytearray(_HEAD_BYTES), memoryview(b"")
        self.got = 0  # bytes of head and body so far
        self.parsed: tuple[int, int, int, int, int] | None = None
        self.ahead = -(2**62)

    @property
    def up(self) -> bool:
        return self.link is not None


class Bridge:
    """This host's. `hosts`: all, in order; `me`: this one's number; `door`: where the later ones connect; `abort`: seconds that a job which
    has failed may take to be told to all."""

    def __init__(self, segment: Segment, hosts: Sequence[Host], me: int, door: Door, secret: bytes, abort: float) -> None:
        self._segment, self._control, self._door, self._secret, self._abort = segment, segment.control, door, secret, abort
        self._memory = memoryview(segment.memory)
        self._hosts, self._me = tuple(hosts), me
        self._links = [_Link(segment, h, i) for i, h in enumerate(hosts) if i != me]
        self._by_host = {link.number: link for link in self._links}
        self._reserved = set[int]()
        self._guests = list[tuple[Peer, bytearray, float]]()
        self._served = Served(os.getpid())
        self._ranks = dict[int, tuple[int, Served]]()  # rank here -> descriptor of its process, its clock
        self._knocking = dict[int, threading.Thread]()
        self._fresh = list[tuple[int, Peer]]()
        self._due_record = self._due_alive = self._due_served = 0.0
        self._failed_for: Served | None = None

    # -- the loop --

    def run(self) -> None:
        """Carry until all ranks here have left and all hosts know. What cannot be carried any more fails the job."""
        try:
            busy = 0.0
            while not self._ended():
                now = time.monotonic()
                moved = self._look(0.0 if now < busy else _SLEEP_S)
                if moved:
                    busy = time.monotonic() + _SPIN_S
        finally:
            self.close()

    def close(self) -> None:
        """Give back what is open."""
        self._door.close()
        for link in self._links:
            if link.link is not None:
                link.link.close()
                link.link = None
        for peer, _, _ in self._guests:
            peer.link.close()
        for fd, _ in self._ranks.values():
            if fd >= 0:
                os.close(fd)
        self._ranks.clear()

    def _ended(self) -> bool:
        if self._control.failed():
            self._failed_for = self._failed_for or Served(os.getpid())
            if self._failed_for.look() > 1e9 * self._abort:
                return True
        return all(link.lost or (link.bye_said and link.bye_heard and not link.out) for link in self._links)

    def _look(self, sleep: float) -> bool:
        """One turn; whether anything moved."""
        poll = select.poll()
        for fd in (self._segment.bell, *self._door.descriptors(), *(p.link.fileno() for p, _, _ in self._guests)):
            poll.register(fd, select.POLLIN)
        for link in self._links:
            if link.link is not None:
                poll.register(link.link.fileno(), select.POLLIN | (select.POLLOUT if link.out else 0))
        ready = {fd for fd, _ in poll.poll(1000 * sleep)}
        if self._segment.bell in ready:
            os.eventfd_read(self._segment.bell)
        self._meet()
        self._look_after_ranks()
        moved, now = False, time.monotonic()
        records, alive = now >= self._due_record, now >= self._due_alive
        self._due_record = now + RECORD_S if records else self._due_record
        self._due_alive = now + ALIVE_S if alive else self._due_alive
        for link in self._links:
            try:
                if link.link is not None and link.link.fileno() in ready:
                    moved |= self._read(link)
                if link.link is not None:
                    moved |= self._carry(link, records)
                    if alive:
                        link.out += self._frame(link, ALIVE, sequence=time.monotonic_ns())
                    self._flush(link)
            except (_Broken, OSError) as error:
                self._break(link, str(error))
        self._look_for_silence()
        return moved

    # -- connections --

    def _meet(self) -> None:
        """New connections: an earlier host is connected to, a later one comes to the door and says which it is."""
        self._guests += [(peer, bytearray(), time.monotonic() + SILENCE_S) for peer in self._door.look()]
        for guest in list(self._guests):
            peer, said, until = guest
            length = _HEAD_BYTES + _HELLO.size
            try:
                more = peer.link.recv(length - len(said))
            except BlockingIOError:
                if time.monotonic() < until:
                    continue
                more = b""
            except OSError:
                more = b""
            said += more
            number = self._who(peer, bytes(said)) if len(said) == length else None
            if len(said) == length or not more:
                self._guests.remove(guest)
                if number is None:
                    peer.link.close()
                else:
                    self._connected(self._by_host[number], peer)
        while self._fresh:
            number, peer = self._fresh.pop()
            self._connected(self._by_host[number], peer)
            hello = _HELLO.pack(self._segment.job, self._segment.epoch, self._me, len(self._hosts))
            # before anything else
            self._by_host[number].out.extendleft(reversed(self._frame(self._by_host[number], HELLO, body=hello)))
        for link in self._links:
            if link.number < self._me and not link.up and not link.lost and not link.bye_heard:
                thread = self._knocking.get(link.number)
                if thread is None or not thread.is_alive():
                    thread = self._knocking[link.number] = threading.Thread(target=self._knock, args=(link,), daemon=True)
                    thread.start()

    def _who(self, peer: Peer, said: bytes) -> int | None:
        """The host that says HELLO; None for whoever is of another job, or no host that connects to this one."""
        head, digest, body = said[: FRAME.size], said[FRAME.size : _HEAD_BYTES], said[_HEAD_BYTES:]
        if digest != _digest(peer.seed, head, body) or FRAME.unpack(head)[:3] != (_MAGIC, _VERSION, HELLO):
            return None
        job, epoch, number, count = _HELLO.unpack(body)
        ours = (job, epoch, count) == (self._segment.job, self._segment.epoch, len(self._hosts))
        return number if ours and number in self._by_host and number > self._me and not self._by_host[number].lost else None

    def _knock(self, link: _Link) -> None:
        time.sleep(0.02)  # a door that refuses is not asked without a pause
        try:
            peer = knock((link.host.address, link.host.port), self._secret, SILENCE_S / 2)
        except Exception:  # it is tried again until the link is lost
            return
        self._fresh.append((link.number, peer))
        self._segment.ring_bell()

    def _connected(self, link: _Link, peer: Peer) -> None:
        if link.link is not None:  # a connection that this end does not know to be broken yet
            link.link.close()
        link.link = peer.link
        link.reset(peer.seed)
        link.heard = self._served.look()
        link.out += self._frame(link, ALIVE, sequence=time.monotonic_ns())
        link.out += self._frame(link, RESUME, body=np.ascontiguousarray(link.arrived).tobytes())

    def _break(self, link: _Link, why: str) -> None:
        assert link.link is not None
        link.link.close()
        link.link, link.why, link.down = None, why, self._served.look()
        link.broken += 1
        link.out.clear()

    def _look_for_silence(self) -> None:
        now = self._served.look()
        for link in self._links:
            if link.lost:
                continue
            if link.link is not None:
                if now - link.heard > 1e9 * SILENCE_S:
                    self._break(link, f"it said nothing for {SILENCE_S:g} s")
            elif link.bye_heard:
                link.bye_said = True  # it has all, said so and closed
            elif now - link.down > 1e9 * (BROKEN_S if link.broken else BROKEN_S + SILENCE_S):
                self._lose(link)

    def _lose(self, link: _Link) -> None:
        link.lost = True
        ranks = link.host.ranks
        named = f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
        text = f"host {link.number} ({named}, {link.host.address}:{link.host.port}) is out of reach: {link.why}"
        self._control.fail(Failure(ranks.start, ranks.start, "", self._control.step(ranks.start), time.monotonic_ns(), text))

    # -- ranks of this host --

    def _look_after_ranks(self) -> None:
        """Who has joined is watched: its end, its stops, and for how long it was served."""
        now = time.monotonic()
        if now < self._due_served:
            return
        self._due_served = now + _SERVED_S
        for rank in self._segment.here:
            if rank not in self._ranks and self._control.state(rank) != ABSENT:
                pid = self._control.pid(rank)
                try:
                    fd = os.pidfd_open(pid)
                except OSError:
                    fd = -1
                self._ranks[rank] = fd, Served(pid)
        for rank, (fd, clock) in self._ranks.items():
            frozen = process_state(self._control.pid(rank)) == "stopped"
            self._control.serve(rank, clock.look(), frozen)
            gone = fd < 0 or bool(select.select([fd], [], [], 0)[0])
            if gone and self._control.state(rank) != LEFT and not self._control.failed():
                self._control.fail(Failure(rank, rank, "", self._control.step(rank), time.monotonic_ns(), f"rank {rank} died"))

    def _all_left(self) -> bool:
        """Whether no rank here will send any more."""
        if self._control.failed():
            return True
        return all(self._control.state(r) == LEFT for r in self._segment.here)

    # -- what goes out --

    def _carry(self, link: _Link, look_at_records: bool) -> bool:
        """Put what is new in line. The state of ranks is read before the counts of their messages and sent after the messages, so that
        nobody is seen to have left before its last word is there."""
        moved, left, records = False, self._all_left(), []
        if look_at_records or (left and not link.bye_said):
            ours = [*self._segment.here, *(r for other in self._links if other.lost for r in other.host.ranks)]
            records = [(rank, record) for rank in ours if (record := self._control.record(rank)) != link.records.get(rank)]
        in_order()
        if link.resumed:
            for c, i, j in np.argwhere(link.sent > link.next):
                moved = True
                self._messages(link, int(c), int(i), int(j))
            for c, i, j in np.argwhere(link.released != link.credited):
                moved = True
                value = link.credited[c, i, j] = link.released[c, i, j]
                link.out += self._frame(link, CREDIT, int(c), link.host.ranks[i], self._segment.here[j], int(value))
            for rank, record in records:
                link.records[rank] = record
                link.out += self._frame(link, RECORD, source=rank, body=record)
            if left and not link.bye_said and not link.out:
                link.out += self._frame(link, BYE)
                link.bye_said = True
        return moved

    def _messages(self, link: _Link, c: int, i: int, j: int) -> None:
        """All messages of one ring that have not gone out: from their slots, where they stay until they are released."""
        segment, source, to = self._segment, self._segment.here[i], link.host.ranks[j]
        ring = segment.ring_at(c, source, to)
        sent = int(link.sent[c, i, j])  # read once: more may be sent meanwhile
        for sequence in range(int(link.next[c, i, j]), sent):
            at = segment.slot(ring, sequence)
            length = SPACE + min(nbytes_of(self._memory, at), segment.payload_bytes)
            head = FRAME.pack(_MAGIC, _VERSION, DATA, c, source, to, sequence, length)
            link.out.append(memoryview(head + _digest(link.seed, head, self._memory[at : at + SPACE])))
            link.out.append(self._memory[at : at + length])
        link.next[c, i, j] = sent

    def _frame(self, link: _Link, kind: int, channel: int = 0, source: int = 0, to: int = 0, sequence: int = 0,
               body: bytes = b"") -> list[memoryview]:
        head = FRAME.pack(_MAGIC, _VERSION, kind, channel, source, to, sequence, len(body))
        return [memoryview(head + _digest(link.seed, head, body) + body)]

    def _flush(self, link: _Link) -> None:
        assert link.link is not None
        while link.out:
            parts = [link.out[i] for i in range(min(_PARTS, len(link.out)))]
            try:
                count = link.link.sendmsg(parts)
            except BlockingIOError:
                return
            while count:
                first = link.out.popleft()
                if len(first) > count:
                    link.out.appendleft(first[count:])
                count -= min(count, len(first))

    # -- what comes in --

    def _read(self, link: _Link) -> bool:
        """Take what has come, straight into its slot. Whether messages did."""
        assert link.link is not None
        moved = False
        while True:
            try:
                if link.parsed is None:
                    count = link.link.recv_into(memoryview(link.head)[link.got :])
                else:
                    count = link.link.recv_into(link.body[link.got :])
            except BlockingIOError:
                return moved
            if not count:
                raise _Broken("it closed the connection")
            link.heard = self._served.ns
            link.got += count
            if link.parsed is None and link.got == _HEAD_BYTES:
                self._parse(link)
                link.got = 0
            if link.parsed is not None and link.got == len(link.body):
                self._take(link)
                moved = moved or link.parsed[0] in (DATA, CREDIT)
                link.parsed, link.got = None, 0
            if link.bye_heard:
                return moved

    def _parse(self, link: _Link) -> None:
        """The header of a frame, and where its body goes. _Broken for what no sound peer sends."""
        magic, version, kind, channel, source, to, sequence, length = FRAME.unpack_from(link.head)
        if (magic, version) != (_MAGIC, _VERSION) or not DATA <= kind <= BYE:
            raise _Broken("it sent something that is no frame")
        if kind in (DATA, CREDIT):
            ranks = (source, to) if kind == DATA else (to, source)
            if channel >= self._segment.channels or ranks[0] not in link.host.ranks or ranks[1] not in self._segment.here:
                raise _Broken("it sent a frame of other ranks")
        link.parsed = kind, channel, source, to, sequence
        if kind != DATA:
            if length > _MOST:
                raise _Broken("it sent a frame without bounds")
            link.body = memoryview(bytearray(length))
            return
        ring = self._segment.ring_at(channel, source, to)
        i, j = link.host.ranks.index(source), self._segment.here.index(to)
        room = SPACE <= length <= SPACE + self._segment.payload_bytes
        if not room or sequence != link.arrived[channel, i, j] or sequence - int(link.released[channel, i, j]) >= self._segment.slots:
            raise _Broken("it sent a message that is not the next one")
        if ring not in self._reserved:
            reserve(self._segment.fd, ring, self._segment.ring_size)
            self._reserved.add(ring)
        at = self._segment.slot(ring, sequence)
        link.body = self._memory[at : at + length]

    def _take(self, link: _Link) -> None:
        """A whole frame."""
        assert link.parsed is not None
        kind, channel, source, to, sequence = link.parsed
        head, digest = bytes(link.head[: FRAME.size]), bytes(link.head[FRAME.size :])
        if digest != _digest(link.seed, head, link.body[:SPACE] if kind == DATA else link.body):
            raise _Broken("it sent a frame with another checksum")
        if kind == DATA:
            in_order()
            link.arrived[channel, link.host.ranks.index(source), self._segment.here.index(to)] = sequence + 1
        elif kind == CREDIT:
            i, j = self._segment.here.index(source), link.host.ranks.index(to)
            if not int(link.out_released[channel, i, j]) <= sequence <= int(link.sent[channel, i, j]):
                raise _Broken("it released a message that it does not have")
            in_order()
            link.out_released[channel, i, j] = sequence
        elif kind == RECORD:
            if source >= self._segment.size or source in self._segment.here:
                raise _Broken("it told of ranks of this host")
            if source in link.host.ranks or link.body[0]:  # of a third host: that it is lost
                try:
                    self._control.mirror(source, bytes(link.body), link.ahead if source in link.host.ranks else 0)
                except ValueError as error:
                    raise _Broken(f"it sent {error}") from None
        elif kind == ALIVE:
            link.ahead = max(link.ahead, sequence - time.monotonic_ns())
        elif kind == RESUME:
            self._resume(link)
        elif kind == BYE:
            link.bye_heard = True

    def _resume(self, link: _Link) -> None:
        """From here on what the other end does not have is sent."""
        if len(link.body) != link.next.nbytes:
            raise _Broken("it counts other rings")
        found = np.frombuffer(link.body, np.uint64).reshape(link.next.shape)
        if (found < link.out_released).any() or (found > link.sent).any():
            raise _Broken("it has messages that were never sent")
        link.next, link.resumed = found.copy(), True


def _digest(seed: int, head: bytes, body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(body, xxhash.xxh3_64_intdigest(head, seed))
