"""The bridge of one host: it tells the other hosts of the ranks here, and makes the connections of those. Floor 4.

Each bridge is connected to that of every other host. They tell each other the words of the control block (control.py): who is there, gets
on, waits, has failed or left. So a watch on one host names a rank on another.

Messages do not come by here: ranks have connections of their own (streams.py). A bridge makes them, for it has the door and the secret. It
is asked by a rank here, or by the other bridge, for the later host always comes to the earlier one. What was proved it hands to its rank.

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
from collections.abc import Sequence
from dataclasses import dataclass

from alpha.comm.control import ABSENT, LEFT, Failure
from alpha.comm.handshake import Door, Peer, knock
from alpha.comm.line import ALIVE, BYE, HEAD_BYTES, HELLO, RECORD, WANT, Broken, Frame, Line, frame, unpacked
from alpha.comm.process import Served, process_state
from alpha.comm.segment import Segment
from alpha.comm.streams import ASK, HANDED, NOBODY, meeting_place

SAID = struct.Struct("<QIHHHHHH")
"""HELLO: job, epoch, host, hosts, streams; then of a connection of ranks source, receiver and stream, of bridges NOBODY twice."""

SILENCE_S = 2.0
"""A host that says nothing for so long has lost its connection. A bridge says something every ALIVE_S."""
BROKEN_S = 2.0
"""A host whose connection is not made again within so long is lost."""
ALIVE_S = 0.25
"""How often a bridge says that it is there: often enough that a few may be late."""
RECORD_S = 0.01
"""How often the state of ranks is looked at; it is sent when it has changed."""
_SERVED_S = 0.05
_AGAIN_S = 0.02
"""A connection that was just made is not made again: both ends may have asked for it."""
_KNOCKING = 16
"""Connections that are made at a time."""

Key = tuple[int, int, int, int]
"""A connection: the other host, the rank here, the rank there, which stream; between bridges NOBODY twice."""


@dataclass(frozen=True)
class Host:
    """Where a host's bridge listens, and its ranks."""

    address: str
    port: int
    ranks: range


class _Link:
    """The connection to the bridge of one other host, and what has to be known across those that break."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number
        self.line: Line | None = None
        self.down = self.heard = 0  # when the connection broke, and when something came last, by the served clock
        self.why = "it never connected"
        self.bye_heard = self.bye_said = self.lost = False
        self.broken = 0
        """How often a connection broke."""
        self.records = dict[int, bytes]()
        self.ahead = -(2**62)


class Bridge:
    """This host's. `hosts`: all, in order; `me`: this one's number; `door`: where the later ones connect; `abort`: seconds that a job which
    has failed may take to be told to all."""

    def __init__(self, segment: Segment, hosts: Sequence[Host], me: int, door: Door, secret: bytes, abort: float) -> None:
        self._segment, self._control, self._door, self._secret, self._abort = segment, segment.control, door, secret, abort
        self._hosts, self._me = tuple(hosts), me
        self._links = [_Link(h, i) for i, h in enumerate(hosts) if i != me]
        self._by_host = {link.number: link for link in self._links}
        self._host_of = {rank: i for i, h in enumerate(hosts) for rank in h.ranks}
        self._guests = list[tuple[Peer, bytearray, float]]()
        self._served = Served(os.getpid())
        self._ranks = dict[int, tuple[int, Served]]()  # rank here -> descriptor of its process, its clock
        self._wanted, self._knocking = dict[Key, None](), dict[Key, threading.Thread]()
        self._fresh, self._made = list[tuple[Key, Peer]](), dict[Key, float]()
        self._bell, self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), threading.Lock()
        self._place = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._place.bind(meeting_place(segment))
        self._place.listen(segment.size)
        self._place.setblocking(False)
        self._asking = dict[socket.socket, int]()  # the sockets of ranks here
        self._due_record = self._due_alive = self._due_served = 0.0
        self._failed_for: Served | None = None

    # -- the loop --

    def run(self) -> None:
        """Carry until all ranks here have left and all hosts know. What cannot be carried any more fails the job."""
        try:
            while not self._ended():
                self._look()
        finally:
            self.close()

    def close(self) -> None:
        """Give back what is open."""
        self._door.close()
        self._place.close()
        for link in self._links:
            if link.line is not None:
                link.line.socket.close()
                link.line = None
        for peer, _, _ in self._guests:
            peer.link.close()
        for asking in self._asking:
            asking.close()
        for fd, _ in self._ranks.values():
            if fd >= 0:
                os.close(fd)
        self._ranks.clear()
        with self._closing:
            os.close(self._bell)
            self._bell = -1
            for _, peer in self._fresh:
                peer.link.close()

    def _ended(self) -> bool:
        if self._control.failed():
            self._failed_for = self._failed_for or Served(os.getpid())
            if self._failed_for.look() > 1e9 * self._abort:
                return True
        return all(link.lost or (link.bye_said and link.bye_heard and not (link.line and link.line.out)) for link in self._links)

    def _look(self) -> None:
        """One turn: it waits until something comes, or it is time to look at the ranks here."""
        poll = select.poll()
        for fd in (self._bell, self._place.fileno(), *(a.fileno() for a in self._asking), *self._door.descriptors(),
                   *(p.link.fileno() for p, _, _ in self._guests)):
            poll.register(fd, select.POLLIN)
        for link in self._links:
            if link.line is not None:
                poll.register(link.line.socket.fileno(), select.POLLIN | (select.POLLOUT if link.line.out else 0))
        ready = {fd for fd, _ in poll.poll(1000 * RECORD_S)}
        if self._bell in ready:
            os.eventfd_read(self._bell)
        self._hear_ranks(ready)
        self._meet()
        self._look_after_ranks()
        now = time.monotonic()
        records, alive = now >= self._due_record, now >= self._due_alive
        self._due_record = now + RECORD_S if records else self._due_record
        self._due_alive = now + ALIVE_S if alive else self._due_alive
        for link in self._links:
            try:
                if link.line is not None and link.line.socket.fileno() in ready:
                    self._read(link)
                if link.line is not None:
                    self._carry(link, records)
                    if alive:
                        link.line.put(ALIVE, sequence=time.monotonic_ns())
                    link.line.flush()
            except (Broken, OSError) as error:
                self._break(link, str(error))
        self._look_for_silence()

    # -- connections --

    def _hear_ranks(self, ready: set[int]) -> None:
        """Ranks here that are new, and what they ask for. Processes of another user are not heard."""
        while self._place.fileno() in ready:
            try:
                link, _ = self._place.accept()
                _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                link.setblocking(False)
                if user == os.getuid():
                    self._asking[link] = NOBODY
                else:
                    link.close()
            except OSError:  # nobody more, or one that has gone again
                break
        for link in [a for a in self._asking if a.fileno() in ready]:
            try:
                said = link.recv(ASK.size + 1)
            except OSError:
                said = b""
            rank, peer, number = ASK.unpack(said) if len(said) == ASK.size else (NOBODY, NOBODY, 0)
            if rank not in self._segment.here:
                del self._asking[link]
                link.close()
                continue
            self._asking[link] = rank
            host = self._host_of.get(peer, self._me)
            if host < self._me:
                self._want((host, rank, peer, number))
            elif host > self._me and (line := self._by_host[host].line) is not None:
                line.put(WANT, source=rank, to=peer, sequence=number)

    def _want(self, key: Key) -> None:
        """A connection is to be made. One that was just made, or is about to be, is not made twice."""
        if key not in self._knocking and time.monotonic() - self._made.get(key, 0.0) > _AGAIN_S:
            self._wanted[key] = None

    def _meet(self) -> None:
        """New connections: an earlier host is connected to, a later one comes to the door and says which it is."""
        self._guests += [(peer, bytearray(), time.monotonic() + SILENCE_S) for peer in self._door.look()]
        for guest in list(self._guests):
            peer, said, until = guest
            length = HEAD_BYTES + SAID.size
            try:
                more = peer.link.recv(length - len(said))
            except BlockingIOError:
                if time.monotonic() < until:
                    continue
                more = b""
            except OSError:
                more = b""
            said += more
            key = self._who(peer, bytes(said)) if len(said) == length else None
            if len(said) == length or not more:
                self._guests.remove(guest)
                if key is None:
                    peer.link.close()
                else:
                    self._connected(key, peer)
        while self._fresh:
            key, peer = self._fresh.pop(0)
            self._connected(key, peer)
        for link in self._links:
            if link.number < self._me and link.line is None and not link.lost and not (link.bye_heard and link.bye_said):
                self._want((link.number, NOBODY, NOBODY, 0))
        self._knocking = {key: thread for key, thread in self._knocking.items() if thread.is_alive()}
        while self._wanted and len(self._knocking) < _KNOCKING:
            key = next(iter(self._wanted))
            del self._wanted[key]
            thread = self._knocking[key] = threading.Thread(target=self._knock, args=(key,), daemon=True)
            thread.start()

    def _who(self, peer: Peer, said: bytes) -> Key | None:
        """What a guest who says HELLO connects; None for whoever is of another job, or no host that connects to this one."""
        found = unpacked(peer.seed, said)
        if found is None or found[0].kind != HELLO:
            return None
        job, epoch, number, count, streams, source, to, stream = SAID.unpack(found[1])
        ours = (job, epoch, count, streams) == (self._segment.job, self._segment.epoch, len(self._hosts), self._segment.streams)
        if not ours or number not in self._by_host or number < self._me or self._by_host[number].lost:
            return None
        ranks = source in self._by_host[number].host.ranks and to in self._segment.here and stream < streams
        return (number, to, source, stream) if ranks or (source, to, stream) == (NOBODY, NOBODY, 0) else None

    def _knock(self, key: Key) -> None:
        time.sleep(0.02 if key[1] == NOBODY else 0.0)  # a door that refuses is not asked without a pause
        number, here, there, stream = key
        host = self._hosts[number]
        try:
            peer = knock((host.address, host.port), self._secret, SILENCE_S / 2)
            said = SAID.pack(self._segment.job, self._segment.epoch, self._me, len(self._hosts), self._segment.streams, here, there, stream)
            peer.link.send(frame(peer.seed, HELLO, body=said))  # it fits an empty buffer
        except Exception:  # it is tried again until the link is lost
            return
        with self._closing:
            if self._bell < 0:
                peer.link.close()
                return
            self._fresh.append((key, peer))
            os.eventfd_write(self._bell, 1)

    def _connected(self, key: Key, peer: Peer) -> None:
        self._made[key] = time.monotonic()
        number, here, there, stream = key
        if here != NOBODY:
            self._hand(here, HANDED.pack(there, stream, peer.seed), peer.link)
            return
        link = self._by_host[number]
        if link.line is not None:  # a connection that this end does not know to be broken yet
            link.line.socket.close()
        link.line = Line(peer, _no_messages)
        link.heard, link.bye_said, link.records = self._served.look(), False, {}
        link.line.put(ALIVE, sequence=time.monotonic_ns())

    def _hand(self, rank: int, told: bytes, link: socket.socket) -> None:
        """To a rank here. One that is not there, or hears nothing, asks again."""
        for asking, of in self._asking.items():
            if of == rank:
                try:
                    socket.send_fds(asking, [told], [link.fileno()])
                except OSError:
                    pass
        link.close()

    def _break(self, link: _Link, why: str) -> None:
        assert link.line is not None
        link.line.socket.close()
        link.line, link.why, link.down = None, why, self._served.look()
        link.broken += 1

    def _look_for_silence(self) -> None:
        now = self._served.look()
        for link in self._links:
            if link.lost:
                continue
            if link.line is not None:
                if now - link.heard > 1e9 * SILENCE_S:
                    self._break(link, f"it said nothing for {SILENCE_S:g} s")
            elif link.bye_heard:
                link.bye_said = link.bye_said or self._all_left()  # nobody there needs to hear it
            elif now - link.down > 1e9 * (BROKEN_S if link.broken else BROKEN_S + SILENCE_S):
                self._lose(link)

    def _lose(self, link: _Link) -> None:
        link.lost = True
        if self._all_left():  # nobody here needs it any more
            return
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

    # -- what bridges say --

    def _carry(self, link: _Link, look_at_records: bool) -> None:
        """Put what is new in line. A rank has left after its last message was there (streams.py)."""
        assert link.line is not None
        left = self._all_left()
        if look_at_records or (left and not link.bye_said):
            for rank in [*self._segment.here, *(r for other in self._links if other.lost for r in other.host.ranks)]:
                record = self._control.record(rank)
                if record != link.records.get(rank):
                    link.records[rank] = record
                    link.line.put(RECORD, source=rank, body=record)
        if left and not link.bye_said and not link.line.out:
            link.line.put(BYE)
            link.bye_said = True

    def _read(self, link: _Link) -> None:
        assert link.line is not None
        link.heard = self._served.ns
        link.line.read(lambda frame, body: self._take(link, frame, body))

    def _take(self, link: _Link, frame: Frame, body: memoryview) -> None:
        """A whole frame."""
        kind, source = frame.kind, frame.source
        if kind == RECORD:
            if source >= self._segment.size or source in self._segment.here:
                raise Broken("it told of ranks of this host")
            if source in link.host.ranks or body[:1] != b"\0":  # of a third host: that it is lost
                try:
                    self._control.mirror(source, bytes(body), link.ahead if source in link.host.ranks else 0)
                except ValueError as error:
                    raise Broken(f"it sent {error}") from None
        elif kind == ALIVE:
            link.ahead = max(link.ahead, frame.sequence - time.monotonic_ns())
        elif kind == WANT:
            if source not in link.host.ranks or frame.to not in self._segment.here or frame.sequence >= self._segment.streams:
                raise Broken("it wants a connection of other ranks")
            if link.number < self._me:
                self._want((link.number, frame.to, source, frame.sequence))
        elif kind == BYE:
            link.bye_heard = True
        else:
            raise Broken("it sent a frame that is of ranks")


def _no_messages(frame: Frame) -> tuple[memoryview, memoryview]:
    raise Broken("it sent a message, which is for ranks")
