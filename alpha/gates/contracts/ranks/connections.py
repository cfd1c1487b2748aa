"""Cases of a rank's connections to ranks elsewhere: how it comes to them, what is kept while they are full or broken, and what is taken of
those that come. Two hosts with one rank each in this process (frames.py: Ends). Floor 7."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from unittest import mock

import numpy as np

from alpha.comm import line
from alpha.comm import streams as connections
from alpha.comm.control import LEFT, Failure
from alpha.comm.handshake import Peer
from alpha.comm.message import HEADER, SPACE, About
from alpha.comm.message import header as make_header
from alpha.comm.segment import Segment
from alpha.comm.shm import LENT_BYTES
from alpha.comm.streams import ASK, HANDED, NOBODY, Streams, call, meeting_place
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts.ranks.frames import Ends
from alpha.gates.contracts.ranks.joining import ended
from alpha.gates.contracts.ranks.memory import descriptors, measured

LONG = LENT_BYTES + 4096
MOMENT_S = 10.0


def ready(ends: Ends, sequence: int, body: bytes) -> None:
    """A message of rank 0 lies in its slot, header and payload, and counts."""
    ring = ends.lanes[0].out
    about = About("send", "bool", 0, 1, len(body))
    ring.slots[sequence % len(ring.slots)][: HEADER.size] = make_header(about, job=0, epoch=0, sender=0, sequence=sequence, chunk=0,
                                                                        nbytes=len(body))
    ring.slot(sequence, len(body))[:] = body
    ring.sent[0] = sequence + 1


@contextmanager
def slow(streams: int = 1) -> Iterator[Ends]:
    """Both ends, whose connections take a few KiB at a time."""
    ends = Ends(streams=streams, payload_bytes=1 << 16)
    for end in ends.lanes:
        for stream in end.pair.streams:
            assert stream.line is not None
            stream.line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    try:
        yield ends
    finally:
        ends.close()


def out(ends: Ends, stream: int = 0) -> int:
    """Bytes that rank 0 has in line for one connection."""
    found = ends.lanes[0].pair.streams[stream].line
    return sum(map(len, found.out)) if found else 0


def calls(rng: np.random.Generator) -> Measured:
    """A rank waits for a bridge that only just begins; one that has died, or is there and never listens, is named after no more than that
    rank may wait. Nothing stays open."""
    wrong, before = list[str](), descriptors()
    segment = Segment.create(2, here=range(1))
    segment.bridge, place_ = os.getpid(), meeting_place(segment)

    def late() -> None:
        time.sleep(0.03)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as place:
            place.bind(place_)
            place.listen(1)
            heard, _ = place.accept()
            with heard:
                came.append(heard.recv(16))

    came = list[bytes]()
    thread = threading.Thread(target=late)
    thread.start()
    try:
        with closing(call(segment, MOMENT_S)) as link:
            link.send(b"here")
    except RankError as error:
        wrong.append(f"a bridge that begins late: {error}")
    thread.join(MOMENT_S)
    wrong += [] if came == [b"here"] else [f"a bridge that begins late hears {came}"]
    with ended(reaped=bool(rng.integers(2))) as gone:
        for name, pid, seconds in (("that died", gone, 1.2 * MOMENT_S), ("that never listens", os.getpid(), 0.03)):
            segment.bridge, begun = pid, time.monotonic()
            try:
                call(segment, seconds).close()
                wrong.append(f"a bridge {name} is heard")
            except RankError as error:
                good = error.rank == 0 and "the bridge of this host died" in str(error) and "Connection refused" in str(error)
                good &= time.monotonic() - begun < MOMENT_S
                wrong += [] if good else [f"a bridge {name}: {error}"]
    segment.close()
    del segment
    wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    return measured(wrong, 4)


def kept(rng: np.random.Generator) -> Measured:
    """What was lent is not given back while a connection still sends from it; from then on it may be written, and the other end gets the
    bytes that were lent, also where the connection breaks in between and all is sent again."""
    wrong = list[str]()
    for breaks in ("never", "before", "while it is asked"):
        with slow() as ends:
            near, far = ends.lanes
            lent, body = np.frombuffer(bytearray(rng.bytes(LONG)), np.uint8).copy(), b""
            body = lent.tobytes()
            ready(ends, 0, b"")
            near.out.slots[0][: HEADER.size] = make_header(About("send", "bool", 0, 1, LONG), job=0, epoch=0, sender=0, sequence=0,
                                                           chunk=0, nbytes=LONG)
            near.lend(0, lent.data)
            wrong += ["all of it is on its way at once"] if near.carry() else []
            if near.keep():
                wrong.append(f"{breaks}: {out(ends)} bytes are in line from where they were lent, and they are given back")
            if breaks == "before":
                ends.streams[0].drop(near.pair.streams[0])
            elif breaks != "never":
                there = ends.lanes[1].pair.streams[0].line
                assert there is not None
                there.socket.close()
            turns = 0
            while not near.keep() and turns < 1000:
                turns += 1
                ends.streams[1].rest(0)
            wrong += [] if turns < 1000 and (turns > 0) == (breaks == "never") else [f"{breaks}: given back after {turns} turns"]
            wrong += [] if (near.pair.streams[0].line is None) == (breaks != "never") else [f"{breaks}: the connection is another one"]
            lent.fill(0)
            if breaks != "never":
                if breaks == "while it is asked":
                    ends.streams[1]._by_fd.clear()
                    ends.streams[1]._epoll.close()
                    ends.streams[1]._epoll = connections.select.epoll()
                    far.pair.streams[0].line, far.pair.streams[0].resumed = None, False
                ends.connect()
            for _ in range(1000):
                near.carry()
                ends.streams[1].rest(0)
                if far.back.sent[0]:
                    break
            wrong += [] if far.back.sent[0] == 1 and bytes(far.came(0, LONG)) == body else [f"{breaks}: it came otherwise"]
    return measured(wrong, 12)


def withdrawn(rng: np.random.Generator) -> Measured:
    """A call that fails while what it lent is in line takes it back: its connection is dropped, and what was counted is sent again from its
    slot. What was released by then goes into no slot; and where no connection is all that holds, too."""
    wrong = list[str]()
    with slow() as ends:
        near, far = ends.lanes
        lent = np.frombuffer(bytearray(rng.bytes(LONG)), np.uint8).copy()
        body, stream = lent.tobytes(), near.pair.streams[0]
        ready(ends, 0, body)
        near.out.slot(0, LONG)[:] = bytes(LONG)
        near.lend(0, lent.data)
        near.carry()
        wrong += [] if out(ends) else ["nothing is in line"]
        near.withdraw()
        wrong += [] if stream.line is None and stream.broken == 1 else ["what was taken back is in line"]
        near.withdraw()
        lent.fill(0)
        ends.connect()
        for _ in range(1000):
            near.carry()
            ends.streams[1].rest(0)
        wrong += [] if far.back.sent[0] == 1 and bytes(far.came(0, LONG)) == body else ["it came otherwise"]
        near.out.released[0] = 1
        near.out.slot(0, LONG)[:] = bytes(LONG)
        near.lend(0, lent.data)
        lent.fill(1)
        wrong += [] if near.keep() and not any(near.out.slot(0, LONG)) else ["what was released goes into its slot again"]
    return measured(wrong, 4)


def _released(slots: int) -> list[str]:
    """What is wrong with when the sender of messages, each released once it came, hears of that, where rings have so many slots."""
    create, heard, late = Segment.create, list[int](), slots // 2
    with mock.patch.object(Segment, "create", lambda *args, **given: create(*args, **{**given, "slots": slots})):
        ends = Ends()
    try:
        near, far = ends.lanes
        for i in range(3 * slots):
            ready(ends, i, b"told")
            near.carry()
            ends.streams[1].rest(0)
            far.back.released[0] += 1
            far.credit()
            ends.streams[0].rest(0)
            heard.append(near.out.released[0])
    finally:
        ends.close()
    good = len(near.out.slots) == slots and heard == [(i + 1) // late * late for i in range(3 * slots)]
    return [] if good else [f"of {len(near.out.slots)} slots {late} free are to be told: {heard}"]


def freed(rng: np.random.Generator) -> Measured:
    """Releases are told when half of the slots are free, not before and not later, where no message goes that way. One that a broken
    connection lost is told on the next one, also where no message goes that way: the slot is free again. It was told before, so nobody
    tells it of itself."""
    wrong = [w for slots in (2, 3, 4, 5, 8) for w in _released(slots)]
    for streams in (1, 2):
        ends = Ends(streams=streams)
        try:
            near, far = ends.lanes
            sent = int(rng.integers(1, 5))
            for i in range(sent):
                ready(ends, i, rng.bytes(10))
            near.carry()
            ends.streams[1].rest(0)
            wrong += [] if far.back.sent[0] == sent else [f"{far.back.sent[0]} messages of {sent} came"]
            far.back.released[0] = sent
            far.tell()
            far.carry()
            wrong += [] if (near.out.released[0], far.back.told) == (0, sent) else ["the release was not on its way"]
            ends.connect()
            for of in ends.streams:
                of.settle()
            wrong += [] if ends.streams[0].broken == streams else ["no connection broke"]
            wrong += [] if near.out.released[0] == sent else [f"of {sent} slots {sent - near.out.released[0]} stay taken"]
        finally:
            ends.close()
    return measured(wrong, 13)


def unasked(rng: np.random.Generator) -> Measured:
    """A long payload for which no place was given lies in its slot, also when the call that waited for it has failed; a message of a
    channel that was not used here yet finds its ring; a rank elsewhere has one lane a channel."""
    wrong, ends = list[str](), Ends(payload_bytes=1 << 16)
    try:
        body = rng.bytes(LONG)
        ready(ends, 0, body)
        ends.lanes[0].carry()
        for _ in range(100):
            ends.streams[1].rest(0)
        far = ends.lanes[1]
        far.withdraw()
        wrong += [] if far.back.sent[0] == 1 and bytes(far.came(0, LONG)) == body else ["what came is not in its slot"]
        said = rng.bytes(100)
        message = line.frame(7, line.DATA, 1, 0, 1, 0, 0, bytes(SPACE) + said)
        wrong += ["a message of a new channel breaks the connection"] if ends.say(message, to_bridge=False) else []
        lane = ends.streams[1].lane(1, 0)
        wrong += [] if lane.back.sent[0] == 1 and bytes(lane.back.slot(0, 100)) == said else ["a message of a new channel came otherwise"]
        same = ends.streams[1].lane(1, 0) is lane and ends.streams[1].lane(0, 0) is far
        wrong += [] if same and ends.streams[0].lane(0, 1) is ends.lanes[0] else ["a channel has two lanes"]
    finally:
        ends.close()
    return measured(wrong, 4)


def listened(rng: np.random.Generator) -> Measured:
    """Who waits listens first, and takes a message or a release that comes in that time without sleep. After k waits in vain one after the
    other, the next 2^k - 1 sleep at once, of k at most `_MOST_MISSED`."""
    wrong, ends, looks, now, turned, slept = list[str](), Ends(), 8, [0], [0], list[float]()
    near, far = ends.lanes

    def turning(of: Streams) -> Callable[..., None]:
        turn = of.turn

        def counted(stream: connections.Stream, *, read: bool = True) -> None:
            now[0] += read * connections.LISTEN_NS // looks
            turned[0] += read
            turn(stream, read=read)
        return counted

    def waits(lane: connections.Lane, seconds: float) -> tuple[int, list[float]]:
        turned[0] = 0
        slept.clear()
        lane.rest(seconds)
        return turned[0], list(slept)

    sent, missed, skip, waiting, count = 0, 0, 0, False, 0
    vain = sum(2**k for k in range(1, connections._MOST_MISSED + 1)) + 2**connections._MOST_MISSED
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(connections.time, "monotonic_ns", lambda: now[0]))
            for of in ends.streams:
                stack.enter_context(mock.patch.multiple(of, rest=slept.append, turn=turning(of)))
            for count in range(1, vain + 100):
                if count > vain and not waiting and rng.random() < 0.3:
                    ready(ends, sent, rng.bytes(100))
                    sent, waiting = sent + 1, near.carry()
                found = waits(far, float(count))
                if skip:
                    skip, wanted = skip - 1, (0, [float(count)])
                elif waiting:
                    missed, waiting, wanted = 0, False, (1, [])
                    far.back.released[0] = sent
                    far.tell()
                    far.carry()
                    back = waits(near, float(count))
                    wrong += [] if back == (1, []) else [f"a release is there: {back[0]} looks, then {back[1]} s of sleep"]
                else:
                    missed = min(missed + 1, connections._MOST_MISSED)
                    skip, wanted = 2**missed - 1, (looks, [float(count)])
                wrong += [] if found == wanted else [f"wait {count}: {found[0]} looks, then {found[1]} s of sleep, not {wanted}"]
    finally:
        ends.close()
    wrong += [] if sent else ["no message was drawn"]
    return measured(wrong, count)


def overrun(rng: np.random.Generator) -> Measured:
    """Who sends more than there are slots, or has messages of another connection when it comes again, has its connection broken; what
    fits is taken, and what was taken stays."""
    wrong, free = list[str](), int(rng.integers(1, 4))
    ends = Ends()
    try:
        bodies = [rng.bytes(100) for _ in range(4 + free + 1)]
        for i, body in enumerate(bodies):
            if i == 4:
                ends.lanes[1].back.released[0] = free
            broken = ends.say(line.frame(7, line.DATA, 0, 0, 1, i, 0, bytes(SPACE) + body), to_bridge=False)
            wrong += [] if broken == (i == 4 + free) else [f"message {i} of four slots, {free} of them released: broken {broken}"]
        wrong += [] if ends.lanes[1].back.sent[0] == 4 + free else [f"{ends.lanes[1].back.sent[0]} messages count"]
        kept_ = all(bytes(ends.lanes[1].back.slot(i, 100)) == bodies[i] for i in range(free, 4 + free))
        wrong += [] if kept_ else ["a message that was not released is overwritten"]
    finally:
        ends.close()
    for number in range(2):
        for come in (number, 1 - number, 2 + number):
            ends = Ends(streams=2)
            try:
                counts = struct.pack("<5Q", come, *[number] * 4)
                broken = ends.say(line.frame(7, line.RESUME, source=0, to=1, body=counts), to_bridge=False, stream=number)
                wrong += [] if broken == (come != number) else [f"connection {number} says that {come} messages came: broken {broken}"]
            finally:
                ends.close()
    return measured(wrong, 4 + free + 7)


def room(rng: np.random.Generator) -> Measured:
    """Whoever has more to send than a connection takes is woken when it takes more, and no more once all has gone; and it does not leave
    before."""
    wrong = list[str]()
    with slow() as ends:
        near, streams = ends.lanes[0], ends.streams[0]
        stream = near.pair.streams[0]
        ready(ends, 0, rng.bytes(LONG))
        near.carry()
        left = out(ends)
        wrong += [] if left and stream.line is not None and stream.line.full else ["nobody waits for room"]
        wrong += [] if connections._underway(stream) else ["what is in line is not underway"]
        while out(ends):
            ends.streams[1].rest(0)
            left, end = out(ends), time.monotonic() + MOMENT_S
            streams.rest(MOMENT_S / 2)
            if out(ends) == left and time.monotonic() > end - MOMENT_S / 2:
                wrong.append(f"with {left} bytes in line nobody is woken when there is room")
                break
        wrong += [] if stream.line is not None and not stream.line.full else ["somebody waits for room with nothing in line"]
        wrong += [] if not streams._epoll.poll(0) else ["whoever has nothing to send is woken for it"]
        wrong += [] if connections._underway(stream) else ["what was not taken is not underway"]
        ends.streams[1].rest(0)
        ends.streams[1].rest(0)
        wrong += [] if not connections._underway(stream) else ["what was taken is underway"]
        streams.drop(stream)
        wrong += [] if not connections._underway(stream) else ["something is underway where no connection is"]
    return measured(wrong, 7)


def lingering(rng: np.random.Generator) -> Measured:
    """A rank does not leave while another one has not released what it sent, for so long as it was told; it does where the job has failed,
    where that rank has left, and where all was released."""
    wrong, seconds = list[str](), 0.15
    for what in ("nobody releases", "failed", "left", "released", "released late"):
        ends = Ends()
        try:
            ready(ends, 0, rng.bytes(10))
            ends.lanes[0].carry()
            ends.streams[1].rest(0)
            control = ends.segments[0].control
            if what == "failed":
                control.fail(Failure(1, 1, "", 0, 0, "told"))
            elif what == "left":
                control._words[1][0] = LEFT
            elif what == "released":
                ends.lanes[0].out.released[0] = 1
            elif what == "released late":
                timer = threading.Timer(0.02, lambda ends=ends: ends.lanes[0].out.released.__setitem__(0, 1))  # type: ignore[misc]
                timer.start()
            begun = time.monotonic()
            ends.streams[0].linger(seconds if what == "nobody releases" else MOMENT_S)
            took = time.monotonic() - begun
            good = {"nobody releases": seconds <= took < MOMENT_S}.get(what, took < MOMENT_S)
            wrong += [] if good else [f"{what}: it left after {took:.3f} s"]
            wrong += ["it left with a message that was not released"] * (what == "released late" and ends.lanes[0].out.released[0] != 1)
        finally:
            ends.close()
    return measured(wrong, 5)


def handed(rng: np.random.Generator) -> Measured:
    """A rank says to its bridge that it is there, and asks for what it lacks again and again, but not for a rank that has left. It takes
    what it is handed, also of a rank that it never asked for and in place of what it has; a word without a connection is none; and it goes
    on where the bridge is busy, or has ended."""
    wrong, segment = list[str](), Segment.create(3, here=range(1), payload_bytes=4096, slots=4, streams=2)
    near, bridge = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bridge.setblocking(False)
    streams, far = Streams(segment, 0, near), list[socket.socket]()

    def heard() -> list[tuple[int, ...]]:
        found = list[tuple[int, ...]]()
        while True:
            try:
                found.append(ASK.unpack(bridge.recv(16)))
            except BlockingIOError:
                return found

    def hand(peer: int, number: int) -> None:
        mine, theirs = socket.socketpair()
        far.append(theirs)
        with mine:
            socket.send_fds(bridge, [HANDED.pack(peer, number, 7)], [mine.fileno()])

    def due() -> None:
        streams._due = 0.0
        streams.rest(0)

    try:
        wrong += [] if heard() == [(0, NOBODY, 0)] else ["it does not say that it is there"]
        streams.lane(0, 1)
        streams.lane(0, 2)
        due()
        asked = heard()
        wrong += [] if asked == [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)] else [f"it asks for {asked}"]
        streams._due += 1000.0  # it is not yet time
        streams.rest(0)
        wrong += [] if not heard() else ["it asks at every turn"]
        segment.control.leave(2)
        bridge.send(HANDED.pack(1, 0, 7))  # the descriptor was lost
        due()
        hand(1, 1)
        hand(1, 1)
        due()
        asked = heard()
        wrong += [] if asked == [(0, 1, 0), (0, 1, 1), (0, 1, 0)] else [f"of connections 0 and 1, the second handed, it asks for {asked}"]
        lines = [s.line for s in streams._pairs[1].streams]
        good = lines[0] is None and lines[1] is not None and streams.broken == 1
        wrong += [] if good else [f"connections {lines}, {streams.broken} broke"]
        other = Streams(segment, 0, None)
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        far.append(theirs)
        other.connected(2, 0, Peer(mine, 7))
        wrong += [] if other._pairs[2].streams[0].line is not None else ["a connection that nobody asked for is lost"]
        lane = other.lane(0, 2)
        wrong += [] if lane.pair.streams[0].line is not None else ["a lane has another connection than came for it"]
        lane.back.released[0] = 2
        lane.tell()  # not resumed: that is told then
        wrong += [] if lane.back.told == 0 else ["releases are told where nobody hears them"]
        stray = os.eventfd(1)  # of a connection that another thread dropped since it was seen
        for one in (other, streams):
            one._epoll.register(stray, connections.select.EPOLLIN)
            one.rest(0)
            one._epoll.unregister(stray)
        os.close(stray)
        other.close()
        for _ in range(2000):  # a bridge that does not listen
            due()
        bridge.close()
        due()
        streams._pairs[1].streams[0].resumed = False
        due()
        wrong += [] if streams._bridge is None else ["a bridge that has ended is asked"]
    except OSError as error:
        wrong.append(f"it ends with {error!r}")
    finally:
        streams.close()
        for link in far:
            link.close()
        segment.close()
    return measured(wrong, 8)


