"""A rank's own connections to ranks on other hosts: messages and credits of its rings go through them. Floor 4.

The rank fills and empties rings in its host's memory as if the other rank were there too (shm.py). A message that was counted here is sent
from its slot, and received straight into the same slot there; that it was released there is told here. A slot is kept until then, so
whatever a broken connection has lost is sent again from it, and the count of each ring says what: every message is delivered once. There is
always a slot for what comes, so nobody stops reading.

A long payload is copied into no slot where that can be avoided. A sender may lend it from where it lies: what was not released when it
wants its memory back goes into its slot then. A receiver may say beforehand where a payload belongs: it comes in there, is checked there,
and counts for nothing before that.

Between two ranks are Segment.streams connections. Message n goes through number n mod streams, credits through the first one. The receiver
counts what came through each; up to the least of these counts all messages are there. So a ring is in order whatever overtakes what.

This host's bridge makes the connections, and makes them again (bridge.py): a rank asks for what it lacks over a socket of the abstract
namespace, and is handed what has been proved. The secret stays there.

Whoever waits looks after all connections, and so does the heartbeat of a rank that computes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import socket
import struct
import termios
import threading
import time

from alpha.comm.control import LEFT
from alpha.comm.handshake import Peer
from alpha.comm.line import CREDIT, DATA, RESUME, Broken, Frame, Line
from alpha.comm.message import SPACE, nbytes_of
from alpha.comm.process import Served, process_state
from alpha.comm.segment import RELEASED, Segment
from alpha.comm.shm import LENT_BYTES, in_order
from alpha.errors import RankError

ASK = struct.Struct("<HHH")
"""What a rank tells its bridge: its number, the rank that it has no connection to (NOBODY: it is there now), which stream."""
HANDED = struct.Struct("<HHQ")
"""What it is handed with a connection: the rank at the other end, which stream, the seed."""
NOBODY = 0xFFFF
UNACKNOWLEDGED_MS = 2000
"""A connection whose other end does not acknowledge what was sent is broken after so long."""
_ASK_S = 0.05
LISTEN_NS = 100_000
"""How long a wait listens before it sleeps."""
_MOST_MISSED = 6


def meeting_place(segment: Segment) -> bytes:
    """Where this host's bridge hears its ranks, in the abstract namespace of sockets."""
    told = f"{segment.job} {segment.epoch} {segment.here.start}"
    return b"\0alpha-bridge-" + hashlib.sha256(told.encode()).hexdigest()[:32].encode()


def call(segment: Segment, seconds: float) -> socket.socket:
    """A rank's socket to its bridge, which may only just begin. RankError where it has died, or is not there after so many seconds that
    this process was served."""
    clock, link = Served(os.getpid()), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            link.connect(meeting_place(segment))
            return link
        except OSError as error:
            if process_state(segment.bridge) in ("dead", "gone") or clock.look() > 1e9 * seconds:
                link.close()
                raise RankError("the bridge of this host died", rank=segment.here.start, came=str(error),
                                expected="that it carries until all ranks have left",
                                do="look at the log of this host, and for the kernel's out-of-memory killer") from error
        time.sleep(0.002)


class _Ring:
    """One direction between two ranks, as its connections see it. `told`: releases that the sender was told of. `payloads`: by message,
    where its payload lies that was lent, or where it belongs or has begun to come; by the lock of the connections."""

    def __init__(self, segment: Segment, channel: int, source: int, to: int) -> None:
        start, memory = segment.ring(channel, source, to), memoryview(segment.memory)
        self.sent, self.released = (memory[start + i : start + i + 8].cast("Q") for i in (0, RELEASED))
        at = [segment.slot(start, i) for i in range(segment.slots)]
        self.slots = [memory[a : a + SPACE + segment.payload_bytes] for a in at]
        self.told, self.payloads = 0, dict[int, memoryview]()

    def slot(self, sequence: int, nbytes: int) -> memoryview:
        """Room for so many bytes of payload in the slot of a message."""
        return self.slots[sequence % len(self.slots)][SPACE : SPACE + nbytes]


class Stream:
    """One of the connections to a rank, and what has to be known across those that break. `next`, `came`: by channel, the message that
    goes out next and the one that must come next."""

    def __init__(self, pair: _Pair, number: int, channels: int) -> None:
        self.pair, self.number = pair, number
        self.next, self.came = [number] * channels, [number] * channels
        self.line: Line | None = None
        self.resumed = False
        self.broken = 0
        """How often a connection broke."""


class _Pair:
    """This rank and one elsewhere: their connections, and by channel the rings that were used."""

    def __init__(self, segment: Segment, peer: int) -> None:
        self.peer = peer
        self.streams = [Stream(self, i, segment.channels) for i in range(segment.streams)]
        self.lanes = dict[int, Lane]()


class Lane:
    """The two rings between this rank and one elsewhere, of one channel (shm.py: Elsewhere)."""

    def __init__(self, all_: Streams, pair: _Pair, channel: int, out: _Ring, back: _Ring) -> None:
        self._all, self.pair, self.channel, self.out, self.back = all_, pair, channel, out, back
        self._missed = self._skip = 0

    def rest(self, seconds: float) -> None:
        """Wait so long at most for something to come, and take it. It listens first without sleep: waking up on another core takes longer
        than most answers. Where that was in vain, as with the other end on the same core, the next waits sleep at once, ever more of them.
        """
        if self._skip:
            self._skip -= 1
        else:
            came, end = (self.back.sent[0], self.out.released[0]), time.monotonic_ns() + LISTEN_NS
            while time.monotonic_ns() < end:
                with self._all.lock:
                    for stream in self.pair.streams:
                        if stream.line is not None:
                            self._all.turn(stream)
                if (self.back.sent[0], self.out.released[0]) != came:
                    self._missed = 0
                    return
            self._missed = min(self._missed + 1, _MOST_MISSED)
            self._skip = (1 << self._missed) - 1
        self._all.rest(seconds)

    def carry(self) -> bool:
        """Send what the ring to that rank holds that has not gone out; whether all of it is on its way by now."""
        with self._all.lock:
            gone, channel, sent = True, self.channel, self.out.sent[0]
            for stream in self.pair.streams:
                line = stream.line
                if stream.resumed and stream.next[channel] < sent:
                    self.send(stream, sent)
                if line is not None and line.out:
                    self._all.turn(stream, read=False)
                    gone &= not line.out
                gone &= stream.next[channel] >= sent
            return gone

    def credit(self) -> None:
        """A message of that rank was released. It is told with the next message the other way, and at the latest when half of its slots
        are free."""
        if self.back.released[0] - self.back.told >= len(self.back.slots) // 2:
            with self._all.lock:
                self.tell()
                self.carry()

    def lend(self, sequence: int, payload: memoryview) -> None:
        """The payload of a message that is not counted yet lies there, and not in its slot, until `keep`."""
        with self._all.lock:
            self.out.payloads[sequence] = payload

    def keep(self) -> bool:
        """What was lent and is not released goes into its slot; whether that was possible: nothing may be in line from where it lies."""
        with self._all.lock:
            for stream in self.pair.streams:
                if stream.line is not None and stream.line.out:
                    self._all.turn(stream, read=False)
                    if stream.line is not None and stream.line.out:
                        return False
            self._keep()
            return True

    def _keep(self) -> None:
        lent, released = self.out.payloads, self.out.released[0]
        for sequence, payload in lent.items():
            if sequence >= released:
                self.out.slot(sequence, len(payload))[:] = payload
        lent.clear()

    def expect(self, sequence: int, out: memoryview) -> None:
        """The payload of a message belongs there, unless it has begun to come."""
        with self._all.lock:
            self.back.payloads.setdefault(sequence, out)

    def came(self, sequence: int, nbytes: int) -> memoryview:
        """Where a payload of LENT_BYTES or more lies that has come; asked once. Nobody else has to do with it any more."""
        found = self.back.payloads.pop(sequence, None)
        return self.back.slot(sequence, nbytes) if found is None else found

    def withdraw(self) -> None:
        """Of a call that failed: nothing goes out from where it was lent any more, and nothing comes in where it was to belong. A
        connection that is about to is dropped, and what it lost sent again."""
        with self._all.lock:
            for stream in self.pair.streams:
                if stream.line is not None and any(map(stream.line.holds, (*self.out.payloads.values(), *self.back.payloads.values()))):
                    self._all.drop(stream)
            self.back.payloads.clear()
            self._keep()

    def tell(self) -> None:
        """Put in line how many messages of that rank were released."""
        first = self.pair.streams[0]
        if first.resumed:
            assert first.line is not None
            self.back.told = self.back.released[0]
            first.line.put(CREDIT, self.channel, self._all.rank, self.pair.peer, 0, self.back.told)

    def send(self, stream: Stream, sent: int) -> None:
        """All messages that go through this connection and have not gone out, from their slots."""
        assert stream.line is not None
        slots, channel, count, back = self.out.slots, self.channel, len(self.pair.streams), self.back
        for sequence in range(stream.next[channel], sent, count):
            header = slots[sequence % len(slots)][:SPACE]
            payload = self.out.payloads.get(sequence)
            if payload is None:
                payload = self.out.slot(sequence, nbytes_of(header, 0))
            back.told = back.released[0]
            stream.line.put_message(channel, self._all.rank, self.pair.peer, sequence, back.told, header, payload)
            stream.next[channel] = sequence + count


class Streams:
    """Of rank `rank`. `bridge`: the socket to this host's bridge; None where whoever calls hands the connections in.

    Any thread of the rank may call it. Nothing here waits but `rest` and `linger`.
    """

    def __init__(self, segment: Segment, rank: int, bridge: socket.socket | None) -> None:
        self._segment, self._control, self.rank, self._bridge = segment, segment.control, rank, bridge
        self.lock, self._epoll, self._due = threading.RLock(), select.epoll(), 0.0
        self._pairs, self._by_fd = dict[int, _Pair](), dict[int, Stream]()
        if bridge is not None:
            bridge.setblocking(False)
            bridge.send(ASK.pack(rank, NOBODY, 0))
            self._epoll.register(bridge.fileno(), select.EPOLLIN)

    def lane(self, channel: int, peer: int) -> Lane:
        """The rings to and from a rank elsewhere. Connections are asked for when they are first needed."""
        with self.lock:
            pair = self._pairs.get(peer)
            if pair is None:
                pair = self._pairs[peer] = _Pair(self._segment, peer)
            found = pair.lanes.get(channel)
            if found is None:
                out, back = _Ring(self._segment, channel, self.rank, peer), _Ring(self._segment, channel, peer, self.rank)
                found = pair.lanes[channel] = Lane(self, pair, channel, out, back)
            return found

    @property
    def broken(self) -> int:
        """How often connections broke."""
        return sum(stream.broken for pair in self._pairs.values() for stream in pair.streams)

    def nap(self, seconds: float) -> None:
        """Of a wait for ranks here: to the microsecond, which `rest` is not."""
        select.select([self._epoll], [], [], seconds)
        self.rest(0)

    def rest(self, seconds: float) -> None:
        """Wait so long at most for something to come, to the next millisecond, and look after all connections."""
        ready = self._epoll.poll(seconds)
        with self.lock:
            for fd, _ in ready:
                stream = self._by_fd.get(fd)
                if stream is not None:
                    self.turn(stream)
                elif self._bridge is not None and fd == self._bridge.fileno():
                    self._be_handed()
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + _ASK_S
                for pair in self._pairs.values():
                    for stream in pair.streams:
                        self._ask(stream)

    def settle(self) -> None:
        """Tell of all releases, and send again what connections lost: of a rank that computes, or is about to leave."""
        self.rest(0)
        with self.lock:
            for lane in [lane for pair in self._pairs.values() for lane in pair.lanes.values()]:
                if lane.back.told < lane.back.released[0]:
                    lane.tell()
                lane.carry()

    def linger(self, seconds: float) -> None:
        """Before this rank leaves: until all that it sent was released and has heard what it released, or no other rank is there to do so,
        the job has failed, or so many seconds of this process have passed."""
        clock = Served(os.getpid())
        while not self._control.failed() and clock.look() < 1e9 * seconds:
            self.settle()
            with self.lock:
                there = [pair for pair in self._pairs.values() if self._control.state(pair.peer) != LEFT]
                held = any(lane.out.released[0] < lane.out.sent[0] for pair in there for lane in pair.lanes.values())
                if not held and not any(_underway(stream) for pair in there for stream in pair.streams):
                    return
            self.rest(1e-3)

    def close(self) -> None:
        """Give back what is open."""
        with self.lock:
            for stream in list(self._by_fd.values()):
                self.drop(stream)
            if self._bridge is not None:
                self._bridge.close()
            self._epoll.close()

    # -- connections --

    def _ask(self, stream: Stream) -> None:
        if stream.line is None and self._bridge is not None and self._control.state(stream.pair.peer) != LEFT:
            try:
                self._bridge.send(ASK.pack(self.rank, stream.pair.peer, stream.number))
            except OSError:  # it is busy, and asked again; or it has died, which the watch sees
                pass

    def _be_handed(self) -> None:
        assert self._bridge is not None
        while True:
            try:
                said, fds, _, _ = socket.recv_fds(self._bridge, HANDED.size, 1)
            except OSError:
                return
            if not said:  # it has ended
                self._epoll.unregister(self._bridge.fileno())
                self._bridge.close()
                self._bridge = None
                return
            if fds:
                peer, number, seed = HANDED.unpack(said)
                link = socket.socket(fileno=fds[0])
                link.setblocking(False)
                self.connected(peer, number, Peer(link, seed))

    def connected(self, peer: int, number: int, proved: Peer) -> None:
        """A new connection. Both ends say first what has come."""
        with self.lock:
            if peer not in self._pairs:
                self._pairs[peer] = _Pair(self._segment, peer)
            stream = self._pairs[peer].streams[number]
            if stream.line is not None:  # one that this end does not know to be broken yet
                self.drop(stream)
            if proved.link.family == socket.AF_INET:
                proved.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
            stream.line = line = Line(proved, lambda frame: self._place(stream, frame))
            self._by_fd[line.socket.fileno()] = stream
            self._epoll.register(line.socket.fileno(), select.EPOLLIN)
            line.put(RESUME, source=self.rank, to=peer, body=struct.pack(f"<{len(stream.came)}Q", *stream.came))
            self.turn(stream)

    def drop(self, stream: Stream) -> None:
        """A connection is of no more use."""
        assert stream.line is not None
        fd = stream.line.socket.fileno()
        self._epoll.unregister(fd)
        del self._by_fd[fd]
        stream.line.socket.close()
        stream.line, stream.resumed = None, False
        stream.broken += 1

    def turn(self, stream: Stream, *, read: bool = True) -> None:
        """Send what one connection has in line, and take what has come. It is dropped where that shows it broken."""
        line = stream.line
        assert line is not None
        try:
            full = bool(line.out) and not line.flush()
            if read and line.read(lambda frame, body: self._take(stream, frame, body)) and line.out:
                full = not line.flush()
            if full != line.full:
                line.full = full
                self._epoll.modify(line.socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if full else 0))
        except (Broken, OSError):
            self.drop(stream)
            self._ask(stream)

    # -- frames --

    def _lane(self, stream: Stream, frame: Frame) -> Lane:
        """The rings that a frame is of. Broken for those of others."""
        if frame.channel >= self._segment.channels or frame.source != stream.pair.peer or frame.to != self.rank:
            raise Broken("it sent a frame of other ranks")
        return stream.pair.lanes.get(frame.channel) or self.lane(frame.channel, stream.pair.peer)

    def _place(self, stream: Stream, frame: Frame) -> tuple[memoryview, memoryview]:
        """Where header and payload of a message belong: the payload where it is expected with this length, else in its slot, also when it
        is sent again. Broken for what is not the next one."""
        ring, sequence, nbytes = self._lane(stream, frame).back, frame.sequence, frame.length - SPACE
        room = 0 <= nbytes <= self._segment.payload_bytes
        if not room or sequence != stream.came[frame.channel] or sequence - ring.released[0] >= len(ring.slots):
            raise Broken("it sent a message that is not the next one")
        payload = ring.payloads.get(sequence) if nbytes >= LENT_BYTES else ring.slot(sequence, nbytes)
        if payload is None or len(payload) != nbytes:
            payload = ring.payloads[sequence] = ring.slot(sequence, nbytes)
        return ring.slots[sequence % len(ring.slots)][:SPACE], payload

    def _take(self, stream: Stream, frame: Frame, body: memoryview) -> None:
        """A whole frame."""
        if frame.kind in (DATA, CREDIT):
            lane = self._lane(stream, frame)
            if frame.released > lane.out.released[0]:  # else another connection was faster
                if frame.released > lane.out.sent[0]:
                    raise Broken("it released a message that it does not have")
                in_order()
                lane.out.released[0] = frame.released
            if frame.kind == DATA:
                stream.came[frame.channel] = frame.sequence + len(stream.pair.streams)
                in_order()
                lane.back.sent[0] = min([s.came[frame.channel] for s in stream.pair.streams])
        elif frame.kind == RESUME:
            self._resume(stream, body)
        else:
            raise Broken("it sent a frame that is of a bridge")

    def _resume(self, stream: Stream, body: memoryview) -> None:
        """From here on what the other end does not have is sent."""
        if len(body) != 8 * len(stream.next):
            raise Broken("it counts other rings")
        found, pair = struct.unpack(f"<{len(stream.next)}Q", body), stream.pair
        for channel, come in enumerate(found):
            lane = pair.lanes.get(channel)
            released, sent = (lane.out.released[0], lane.out.sent[0]) if lane else (0, 0)
            if come % len(pair.streams) != stream.number or not released <= come < sent + len(pair.streams):
                raise Broken("it has messages that were never sent")
        stream.next, stream.resumed = list(found), True
        for lane in pair.lanes.values():
            lane.send(stream, lane.out.sent[0])
            if stream.number == 0:
                lane.tell()


def _underway(stream: Stream) -> bool:
    """Whether something was sent that the other machine has not acknowledged."""
    if stream.line is None:
        return False
    if stream.line.out:
        return True
    (count,) = struct.unpack("i", fcntl.ioctl(stream.line.socket.fileno(), termios.TIOCOUTQ, bytes(4)))
    return bool(count)
