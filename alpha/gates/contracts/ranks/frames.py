"""Cases of connections between hosts: frames and handshakes, sound, spoiled and made up, and what is said of one that fails. Floor 7."""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import permutations

import numpy as np

from alpha.comm import bridge as bridges
from alpha.comm import handshake, line
from alpha.comm import meet as meets
from alpha.comm.bridge import Bridge, Host
from alpha.comm.handshake import Door, knock
from alpha.comm.line import Broken, Line
from alpha.comm.process import Served
from alpha.comm.segment import Segment
from alpha.comm.streams import NOBODY, Streams
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts.ranks.network import SECRET
from alpha.gates.contracts.ranks.support import Case, measured

OF_RANKS = (line.DATA, line.CREDIT, line.RESUME)
"""Frames that ranks say to each other; the others bridges do."""


class Ends:
    """Two hosts with one rank each, in this process: their bridges, and the ranks' connections, over socket pairs."""

    def __init__(self, streams: int = 1, payload_bytes: int = 4096) -> None:
        doors = [Door(("127.0.0.1", 0), SECRET) for _ in range(2)]
        told = [Host("127.0.0.1", door.port, range(i, i + 1)) for i, door in enumerate(doors)]
        first = Segment.create(2, here=range(1), payload_bytes=payload_bytes, slots=4, streams=streams)
        self.segments = [first, Segment.create(2, here=range(1, 2), job=first.job, payload_bytes=payload_bytes, slots=4, streams=streams)]
        self.bridges = [Bridge(s, told, i, door, SECRET, 1.0) for i, (s, door) in enumerate(zip(self.segments, doors))]
        self.streams = [Streams(s, i, None) for i, s in enumerate(self.segments)]
        self.lanes = [s.lane(0, 1 - i) for i, s in enumerate(self.streams)]
        self.connect()

    def connect(self) -> None:
        """New connections, of bridges and of ranks, which both ends have resumed."""
        for connected in (self._of_bridges, *(partial(self._of_ranks, n) for n in range(self.segments[0].streams))):
            for i, end in enumerate(socket.socketpair()):
                end.setblocking(False)
                connected(i, handshake.Peer(end, 7))  # type: ignore[operator]
        self.turn()
        self.turn()

    def _of_bridges(self, i: int, peer: handshake.Peer) -> None:
        self.bridges[i]._connected((1 - i, NOBODY, NOBODY, 0), peer)

    def _of_ranks(self, number: int, i: int, peer: handshake.Peer) -> None:
        self.streams[i].connected(1 - i, number, peer)

    def turn(self) -> None:
        """Each end sends what it has and reads what came."""
        for bridge in self.bridges:
            link = bridge._links[0]
            bridge._carry(link, True)
            assert link.line is not None
            link.line.flush()
        for bridge in self.bridges:
            bridge._read(bridge._links[0])
        for streams in self.streams:
            streams.rest(0)

    def say(self, frame: bytes, *, to_bridge: bool, stream: int = 0) -> bool:
        """Host 0 says something to host 1's bridge, or its rank to that host's by one connection; whether the connection broke."""
        link = self.bridges[1]._links[0]
        near = self.bridges[0]._links[0].line if to_bridge else self.lanes[0].pair.streams[stream].line
        assert near is not None
        near.socket.send(frame)
        if not to_bridge:
            self.streams[1].rest(0)
            return self.lanes[1].pair.streams[stream].line is None
        try:
            self.bridges[1]._read(link)
        except Broken:
            return True
        return False

    def forget(self, count: int) -> None:
        """All have sent and released so many messages, nobody failed, and no connection is left."""
        for lane in self.lanes:
            lane.out.sent[0] = lane.out.released[0] = count if lane is self.lanes[0] else 0
        self.lanes[1].back.sent[0] = self.lanes[1].back.released[0] = count
        for segment in self.segments:
            segment.control._flags[:] = bytes(2)
        for bridge in self.bridges:
            link = bridge._links[0]
            if link.line is not None:
                bridge._break(link, "next")
            link.bye_heard = False

    def close(self) -> None:
        for bridge, streams, segment in zip(self.bridges, self.streams, self.segments):
            streams.close()
            bridge.close()
            segment.close()


def mutated(frames: int, rng: np.random.Generator) -> list[str]:
    """What is wrong with how one end takes frames with flipped bits, cut ends, other numbers, and noise, a doubled one and a whole one: a
    frame is refused with the connection, or is the one that was sent. What lies behind a message's own header the ranks check."""
    ends, wrong = Ends(), list[str]()
    try:
        taken, checked = 0, line.HEAD_BYTES + line.SPACE
        for i in range(frames):
            body = rng.integers(0, 256, int(rng.integers(line.SPACE, 600))).astype(np.uint8).tobytes()
            kind = int(rng.choice([k for k in range(line.DATA, line.WANT + 1) if k != line.BYE]))
            frame = bytearray(line.frame(7, kind, 0, 0, int(kind in OF_RANKS), taken, 0, body))
            what = int(rng.integers(6))
            if what == 0:
                frame[int(rng.integers(checked))] ^= 1 << int(rng.integers(8))
            elif what == 1:
                at = int(rng.integers(1, checked))
                frame = frame[:at] + bytes([frame[at] ^ int(rng.integers(1, 256))]) + rng.bytes(700)
            elif what == 2:
                at = int(rng.integers(line.FRAME.size))
                frame[at : at + 4] = rng.integers(0, 256, len(frame[at : at + 4])).astype(np.uint8).tobytes()
            elif what == 3:
                frame = bytearray(rng.integers(0, 256, int(rng.integers(line.HEAD_BYTES + 1, 900))).astype(np.uint8).tobytes())
            elif what == 4:
                frame = frame + frame
            before = ends.lanes[1].back.sent[0]
            broken = ends.say(bytes(frame), to_bridge=kind not in OF_RANKS)
            after = ends.lanes[1].back.sent[0]
            sound = kind == line.DATA and what in (4, 5)
            if after - before > sound or (after == before and sound):
                wrong.append(f"frame {i}, change {what} of kind {kind}: {after - before} messages delivered")
            taken = after
            if after - ends.lanes[1].back.released[0] >= 4:
                ends.lanes[1].back.released[0] = after
            if broken or what != 5:
                ends.forget(after)  # the sending side never sent them
                ends.connect()
        return wrong
    finally:
        ends.close()


def _unsound(rng: np.random.Generator) -> Measured:
    """Frames with a right checksum that no sound peer sends: each ends the connection, and nothing of it stays."""
    wrong, good = list[str](), rng.bytes(line.SPACE + 100)
    resume = np.zeros((5,), np.uint64)
    cases: tuple[tuple[str, bool, int, int, int, int, int, int, bytes], ...] = (
        ("a message too early", False, line.DATA, 0, 0, 1, 1, 0, good),
        ("a message too late", False, line.DATA, 0, 0, 1, 2**63, 0, good),
        ("a message longer than a slot", False, line.DATA, 0, 0, 1, 0, 0, rng.bytes(line.SPACE + 4096 + 64)),
        ("a message shorter than its header", False, line.DATA, 0, 0, 1, 0, 0, rng.bytes(line.SPACE - 1)),
        ("a message of a rank here", False, line.DATA, 0, 1, 0, 0, 0, good),
        ("a message for a rank elsewhere", False, line.DATA, 0, 0, 0, 0, 0, good),
        ("a message of nobody", False, line.DATA, 0, 2, 1, 0, 0, good),
        ("a message of no channel", False, line.DATA, 5, 0, 1, 0, 0, good),
        ("a message that releases what was never sent", False, line.DATA, 0, 0, 1, 0, 1, good),
        ("a release of what was never sent", False, line.CREDIT, 0, 0, 1, 0, 1, b""),
        ("a release by a rank here", False, line.CREDIT, 0, 1, 0, 0, 0, b""),
        ("counts of other rings", False, line.RESUME, 0, 0, 1, 0, 0, resume.tobytes() + bytes(8)),
        ("counts of messages that were never sent", False, line.RESUME, 0, 0, 1, 0, 0, (resume + np.uint64(3)).tobytes()),
        ("words to a rank", False, line.RECORD, 0, 0, 0, 0, 0, bytes(193)),
        ("a frame of no kind", False, 0, 0, 0, 0, 0, 0, b""),
        ("a frame of a kind to come", False, line.WANT + 1, 0, 0, 0, 0, 0, b""),
        ("a frame without bounds", False, line.RESUME, 0, 0, 0, 0, 0, bytes(line.MOST + 1)),
        ("words of a rank here", True, line.RECORD, 0, 1, 0, 0, 0, bytes(193)),
        ("words that are none", True, line.RECORD, 0, 0, 0, 0, 0, bytes(192)),
        ("an error without bounds", True, line.RECORD, 0, 0, 0, 0, 0, bytes([1]) + bytes(192) + bytes(2000)),
        ("a message to a bridge", True, line.DATA, 0, 0, 1, 0, 0, good),
        ("a release to a bridge", True, line.CREDIT, 0, 0, 1, 0, 0, b""),
        ("a wish for ranks of others", True, line.WANT, 0, 1, 1, 0, 0, b""),
        ("a wish for a stream too many", True, line.WANT, 0, 0, 1, 1, 0, b""),
        ("a frame without bounds to a bridge", True, line.RECORD, 0, 0, 0, 0, 0, bytes(line.MOST + 1)),
    )
    for name, to_bridge, *words, body in cases:
        ends = Ends()
        try:
            kind, channel, source, to, sequence, released = words
            whole = line.frame(7, kind, channel, source, to, sequence, released, body)
            if not ends.say(whole[: line.HEAD_BYTES + 4500], to_bridge=to_bridge):
                wrong.append(f"{name} is taken")
            lane = ends.lanes[1]
            if any(c[0] for ring in (lane.out, lane.back) for c in (ring.sent, ring.released)) or ends.segments[1].control.failed():
                wrong.append(f"{name} leaves a trace")
        finally:
            ends.close()
    return measured(wrong, len(cases))


def _framing(rng: np.random.Generator) -> Measured:
    """Frames of every length through a connection that takes a few KiB at a time: each comes whole and in order, and nothing breaks."""
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    room, came, sent = memoryview(bytearray(1 << 16)), list[tuple[int, int, bytes]](), list[tuple[int, int, bytes]]()

    def take(frame: line.Frame, body: memoryview) -> None:
        came.append((frame.kind, frame.sequence, bytes(room[: frame.length] if frame.kind == line.DATA else body)))

    out, back = (Line(handshake.Peer(end, 7), lambda frame: (room[: line.SPACE], room[line.SPACE : frame.length])) for end in pair)
    try:
        for i in range(120):
            body = rng.bytes(int(rng.integers(line.SPACE, (600, 9000)[i % 2])))
            sent.append((line.DATA if rng.integers(2) else line.RECORD, i, body))
            if sent[-1][0] == line.DATA:
                out.put_message(0, 0, 1, i, 0, memoryview(body)[: line.SPACE], memoryview(body)[line.SPACE :])
            else:
                out.put(line.RECORD, sequence=i, body=body)
        for _ in range(10_000):
            if out.flush() and len(came) == len(sent):
                break
            back.read(take)
        wrong = [f"frame {i} came otherwise" for i, (x, y) in enumerate(zip(sent, came)) if x != y]
        wrong += [] if len(came) == len(sent) else [f"{len(came)} of {len(sent)} frames came"]
    except Broken as error:
        wrong = [f"the connection broke: {error}"]
    finally:
        for end in pair:
            end.close()
    return measured(wrong, 120)


def _whole(rng: np.random.Generator) -> Measured:
    """A message counts when its last byte has come, wherever it and the next one are cut before."""
    wrong, said = list[str](), [line.frame(7, line.DATA, 0, 0, 1, i, 0, rng.bytes(line.SPACE + 700)) for i in range(2)]
    both, size, first = b"".join(said), len(said[0]), line.HEAD_BYTES + line.SPACE
    ends_at = (1, line.FRAME.size, line.HEAD_BYTES - 1, line.HEAD_BYTES, first, int(rng.integers(first, size)), size - 1)
    cuts = [i * size + at for i in range(2) for at in ends_at]
    for cut in cuts:
        ends = Ends()
        try:
            for part, count in ((both[:cut], cut // size), (both[cut:], 2)):
                if ends.say(part, to_bridge=False) or ends.lanes[1].back.sent[0] != count:
                    wrong.append(f"cut at byte {cut} of two of {size}: {ends.lanes[1].back.sent[0]} messages count, not {count}")
        finally:
            ends.close()
    return measured(wrong, len(cuts))


def _fastest(rng: np.random.Generator) -> Measured:
    """Messages count in their order, whichever of three connections is ahead."""
    wrong, said = list[str](), [line.frame(7, line.DATA, 0, 0, 1, i, 0, rng.bytes(line.SPACE + 100)) for i in range(3)]
    orders = list(permutations(range(3)))
    for order in orders:
        ends = Ends(streams=3)
        try:
            for i, n in enumerate(order):
                want = next((k for k in range(3) if k not in order[: i + 1]), 3)
                if ends.say(said[n], to_bridge=False, stream=n) or ends.lanes[1].back.sent[0] != want:
                    wrong.append(f"of messages {order[: i + 1]} {ends.lanes[1].back.sent[0]} count, not {want}")
        finally:
            ends.close()
    return measured(wrong, len(orders))


def _spoiled(rng: np.random.Generator) -> Measured:
    """A few hundred frames of any kind, spoiled in any way."""
    return measured(mutated(300, rng), 300)


def _handshakes(rng: np.random.Generator) -> Measured:
    """Whoever does not know the secret, says an answer again that was given before, or answers with the door's own words, stays out."""
    wrong, door = list[str](), Door(("127.0.0.1", 0), SECRET)
    try:
        def say(made: Callable[[bytes], bytes]) -> bool:
            with socket.create_connection(("127.0.0.1", door.port)) as link:
                until, offered, answered = time.monotonic() + 5, b"", False
                found: list[handshake.Peer] = []
                link.setblocking(False)
                while time.monotonic() < until and not found:
                    found += door.look()
                    try:
                        offered += link.recv(40) if len(offered) < 40 else b""
                    except BlockingIOError:
                        pass
                    if len(offered) == 40 and not answered:
                        link.send(made(offered[8:]))
                        answered = True
                    if answered and not found and not door._strangers:
                        break
                for peer in found:
                    peer.link.close()
                return bool(found)

        kept = list[bytes]()

        def right(drawn: bytes) -> bytes:
            own = rng.bytes(32)
            kept.append(handshake.MAGIC + own + hmac.digest(SECRET, b"guest" + drawn + own, "sha256"))
            return kept[-1]

        def other(drawn: bytes) -> bytes:
            own = rng.bytes(32)
            return handshake.MAGIC + own + hmac.digest(b"guess", b"guest" + drawn + own, "sha256")

        def mirrored(drawn: bytes) -> bytes:
            return handshake.MAGIC + drawn + hmac.digest(SECRET, b"door" + drawn + drawn, "sha256")

        def older(drawn: bytes) -> bytes:
            own = rng.bytes(32)
            return b"alpha\0\0\2" + own + hmac.digest(SECRET, b"guest" + drawn + own, "sha256")

        for name, made, let_in in (("who knows it", right, True), ("another secret", other, False), ("an answer given before",
                                   lambda drawn: kept[0], False), ("the door's own role", mirrored, False),
                                   ("another version", older, False), ("nothing but noise", lambda drawn: rng.bytes(72), False)):
            wrong += [] if say(made) == let_in else [f"{name} is {'kept out' if let_in else 'let in'}"]
    finally:
        door.close()
    return measured(wrong, 6)


def _crowd(rng: np.random.Generator) -> Measured:
    """Strangers who say nothing: no more than STRANGERS are heard at a time, and none for longer than PATIENCE_S."""
    wrong, door, links = list[str](), Door(("127.0.0.1", 0), SECRET), list[socket.socket]()
    try:
        for _ in range(handshake.STRANGERS + 20):
            links.append(socket.create_connection(("127.0.0.1", door.port)))
            door.look()
        wrong += [] if len(door._strangers) <= handshake.STRANGERS else [f"{len(door._strangers)} strangers are heard"]
        time.sleep(handshake.PATIENCE_S + 0.2)
        door.look()
        wrong += [] if not door._strangers else [f"{len(door._strangers)} strangers stay"]
    finally:
        for link in links:
            link.close()
        door.close()
    return measured(wrong, 2)


def _false_doors(rng: np.random.Generator) -> Measured:
    """Whoever listens and does not know the secret is no host; whoever knows it and is of another job, epoch or number of hosts is none."""
    wrong = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(handshake.MAGIC + rng.bytes(32))
                link.recv(100)
                link.sendall(rng.bytes(32))
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            knock(("127.0.0.1", int(server.getsockname()[1])), SECRET).link.close()
            wrong.append("whoever listens is taken for a host of the job")
        except RankError as error:
            wrong += [] if "does not know this job's secret" in str(error) else [str(error)]
        thread.join()
    ends = Ends()
    try:
        bridge, job, nobody = ends.bridges[0], ends.segments[0].job, (NOBODY, NOBODY, 0)
        for words, key in (((job, 0, 1, 2, 1, *nobody), (1, *nobody)), ((job, 0, 1, 2, 1, 1, 0, 0), (1, 0, 1, 0)),
                           ((job ^ 1, 0, 1, 2, 1, *nobody), None), ((job, 1, 1, 2, 1, *nobody), None), ((job, 0, 1, 3, 1, *nobody), None),
                           ((job, 0, 0, 2, 1, *nobody), None), ((job, 0, 7, 2, 1, *nobody), None), ((job, 0, 1, 2, 2, *nobody), None),
                           ((job, 0, 1, 2, 1, 0, 0, 0), None), ((job, 0, 1, 2, 1, 1, 1, 0), None), ((job, 0, 1, 2, 1, 1, 0, 1), None)):
            said = line.frame(7, line.HELLO, body=bridges.SAID.pack(*words))
            with socket.socket() as link:
                found = bridge._who(handshake.Peer(link, 7), said)
            wrong += [] if found == key else [f"who says {words} connects {found}"]
        ends.say(line.frame(7, line.WANT, source=0, to=1), to_bridge=True)
        wrong += [] if list(ends.bridges[1]._wanted) == [(0, 1, 0, 0)] else ["nobody hears what the earlier host asks for"]
    finally:
        ends.close()
    return measured(wrong, 13)


class _Set(Served):
    """A served clock that stands where it is set, ns."""

    def look(self) -> int:
        return self.ns


@contextmanager
def _lone_bridge(size: int, here: int) -> Iterator[tuple[Bridge, _Set, Segment]]:
    """The bridge of the second of two hosts, whose `here` ranks are there, with a clock that stands; the first host has all others."""
    segment, doors = Segment.create(size, here=range(size - here, size)), [Door(("127.0.0.1", 0), SECRET) for _ in range(2)]
    for rank in segment.here:
        segment.control.join(rank, os.getpid())
    parts = (range(size - here), segment.here)
    bridge = Bridge(segment, [Host("127.0.0.1", d.port, part) for d, part in zip(doors, parts)], 1, doors[1], SECRET, 1.0)
    clock = bridge._served = _Set(os.getpid())
    try:
        yield bridge, clock, segment
    finally:
        bridge.close()
        doors[0].close()
        segment.close()


def _limits(rng: np.random.Generator) -> Measured:
    """A host is lost when its connection has been broken for BROKEN_S, or was never there for BROKEN_S + SILENCE_S, and not before. Its
    ranks are named, one or several."""
    wrong, counted = list[str](), 0
    for size, named in ((2, "host 0 (rank 0, "), (3, "host 0 (ranks 0 to 1, "), (5, "host 0 (ranks 0 to 3, ")):
        for broke, limit in ((True, bridges.BROKEN_S), (False, bridges.BROKEN_S + bridges.SILENCE_S)):
            with _lone_bridge(size, 1) as (bridge, clock, segment):
                link, start = bridge._links[0], 0
                if broke:
                    with closing(socket.socket()) as near:
                        start = clock.ns = int(rng.integers(1 << 40))
                        link.line = Line(handshake.Peer(near, 7), bridges._no_messages)
                        bridge._break(link, "it was cut")
                for seconds, lost in ((limit - 0.001, False), (limit + 0.001, True)):
                    clock.ns, counted = start + int(1e9 * seconds), counted + 1
                    bridge._look_for_silence()
                    if segment.control.failed() != lost:
                        wrong.append(f"a host {'broken' if broke else 'absent'} for {seconds:g} s is {'kept' if lost else 'lost'}")
                wrong += [f"of {size - 1} ranks the host says {f.text}" for f in segment.control.failures() if named not in f.text]
    return measured(wrong, counted)


def _told(rng: np.random.Generator) -> Measured:
    """What ranks do is told when it is time to look at them, and once more before BYE, however early that comes; then nothing is."""
    ends, wrong, said = Ends(), list[str](), list[tuple[int, int]]()
    try:
        bridge, segment = ends.bridges[0], ends.segments[0]
        link = bridge._links[0]
        assert link.line is not None
        steps: tuple[tuple[str, Callable[[], object], bool, list[int]], ...] = (
            ("a rank that joined, not looked at", lambda: segment.control.join(0, os.getpid()), False, []),
            ("a rank that is looked at", lambda: None, True, [line.RECORD]),
            ("a rank that did nothing", lambda: None, True, []),
            ("a step, not looked at", lambda: segment.control.begin(0, int(rng.integers(1, 1000))), False, []),
            ("a rank that left, not looked at", lambda: segment.control.leave(0), False, [line.RECORD]),
            ("nobody, when all of it has gone out", lambda: None, False, [line.BYE]),
            ("whoever said BYE", lambda: segment.control.begin(0, 2000), False, []))
        for name, happens, look, expected in steps:
            happens()
            bridge._carry(link, look)
            link.line.flush()
            said.clear()
            far = ends.bridges[1]._links[0].line
            assert far is not None
            far.read(lambda frame, body: said.append((frame.kind, frame.source)))
            wrong += [] if [kind for kind, _ in said] == expected else [f"of {name} it says frames {said}, not {expected}"]
    finally:
        ends.close()
    return measured(wrong, len(steps))


def _slow_line(rng: np.random.Generator) -> Measured:
    """What a host is told when it meets the others comes whole, also where the connection takes a few KiB at a time and its reader is
    late. Nobody who does not read holds up whoever speaks, and a connection that was spoken to waits for nothing afterwards."""
    wrong, what = list[str](), {"places": [f"host {i} {int(rng.integers(1 << 60))}" for i in range(1500)]}
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        near.setblocking(False)
        came = bytearray()

        def late() -> None:
            time.sleep(0.1)
            far.settimeout(5.0)
            try:
                while not came.endswith(b"\n") and (more := far.recv(1 << 16)):
                    came.extend(more)
            except OSError:
                pass

        reader = threading.Thread(target=late)
        reader.start()
        meets._say(handshake.Peer(near, 7), what)
        wrong += [] if near.gettimeout() == 0.0 else [f"whoever was spoken to waits {near.gettimeout()} s for each word"]
        near.shutdown(socket.SHUT_WR)
        reader.join()
        wrong += [] if bytes(came) == json.dumps(what).encode() + b"\n" else [f"{len(came)} bytes came of a line to a slow host"]
    return measured(wrong, 2)


PARITY: list[tuple[str, Case]] = [("framing", _framing), ("whole", _whole), ("fastest", _fastest)]
FAULTS: list[tuple[str, Case]] = [
    ("frames", _spoiled), ("unsound", _unsound), ("handshakes", _handshakes), ("crowd", _crowd), ("false doors", _false_doors),
    ("limits", _limits), ("told", _told), ("slow line", _slow_line),
]
