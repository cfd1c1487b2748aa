"""Cases of bridges, one question at a time: who is heard, whose connection is made, who is lost, and what is taken of what other bridges
say. Floor 7.

The bridge does not run: the case calls it, over sockets of its own, with a served clock that stands where it is set.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from unittest import mock

import numpy as np

from alpha.comm import bridge as bridges
from alpha.comm import line
from alpha.comm.bridge import SAID, Bridge, Host
from alpha.comm.control import ABSENT, Failure
from alpha.comm.handshake import Door, Peer
from alpha.comm.line import Broken, Line
from alpha.comm.process import Served
from alpha.comm.segment import Segment
from alpha.comm.streams import ASK, HANDED, NOBODY, meeting_place
from alpha.component import Measured
from alpha.gates.contracts.ranks.doors import MOMENT_S, SECRET, reset
from alpha.gates.contracts.ranks.joining import ended
from alpha.gates.contracts.ranks.memory import descriptors, measured


class Standing(Served):
    """A served clock that stands where it is set, ns."""

    def look(self) -> int:
        return self.ns


class Middle:
    """The bridge of the second of three hosts with two ranks each, and its ends: `far` of the connection to each other host."""

    def __init__(self) -> None:
        self.segment = Segment.create(6, here=range(2, 4), payload_bytes=4096, slots=4, streams=2)
        self.doors = [Door(("127.0.0.1", 0), SECRET) for _ in range(3)]
        told = [Host("127.0.0.1", door.port, range(2 * i, 2 * i + 2)) for i, door in enumerate(self.doors)]
        self.bridge = Bridge(self.segment, told, 1, self.doors[1], SECRET, 1.0)
        self.clock = self.bridge._served = Standing(os.getpid())
        self.far, self.open = dict[int, socket.socket](), list[socket.socket]()
        for rank in self.segment.here:
            self.segment.control.join(rank, os.getpid())

    def connect(self, *hosts: int) -> None:
        """Connections to these, as if they had just been made."""
        for host in hosts:
            near, self.far[host] = socket.socketpair()
            near.setblocking(False)
            self.far[host].setblocking(False)
            self.open.append(self.far[host])
            self.bridge._connected((host, NOBODY, NOBODY, 0), Peer(near, 7))

    def link(self, host: int) -> bridges._Link:
        return self.bridge._by_host[host]

    def said(self, host: int) -> list[tuple[line.Frame, bytes]]:
        """What it has said to a host."""
        found, end = list[tuple[line.Frame, bytes]](), Line(Peer(self.far[host], 7), bridges._no_messages)
        with suppress(Broken):
            end.read(lambda frame, body: found.append((frame, bytes(body))))
        return found

    def rank(self) -> socket.socket:
        """A rank's socket to it."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(MOMENT_S)
        link.connect(meeting_place(self.segment))
        self.open.append(link)
        return link

    def hear(self) -> None:
        """It hears whatever ranks have said by now."""
        self.bridge._hear_ranks({self.bridge._place.fileno()})
        self.bridge._hear_ranks({a.fileno() for a in self.bridge._asking if _readable(a)})

    def close(self) -> None:
        self.bridge.close()
        for door in self.doors:
            door.close()
        for link in self.open:
            link.close()
        self.segment.close()


def _readable(link: socket.socket) -> bool:
    return bool(bridges.select.select([link], [], [], 0)[0])


@contextmanager
def middle(*hosts: int) -> Iterator[Middle]:
    """Such a bridge, with connections to these hosts."""
    made = Middle()
    try:
        made.connect(*hosts)
        yield made
    finally:
        made.close()


def asked(rng: np.random.Generator) -> Measured:
    """Ranks here are heard, and nobody else: to an earlier host's rank a connection is to be made, a later host is asked for one where it
    is connected. Who goes away with words unread is forgotten, and the others are heard. One that is handed a connection gets it; where
    nobody is there any more it is closed."""
    wrong = list[str]()
    with middle(0) as m:
        two, three, odd = m.rank(), m.rank(), m.rank()
        stream = int(rng.integers(2))
        two.send(ASK.pack(2, NOBODY, 0))
        three.send(ASK.pack(3, 0, stream))
        odd.send(ASK.pack(0, 2, 0))  # a rank of another host
        m.hear()
        wrong += [] if sorted(m.bridge._asking.values()) == [2, 3] else [f"ranks {sorted(m.bridge._asking.values())} are heard"]
        wrong += [] if list(m.bridge._wanted) == [(0, 3, 0, stream)] else [f"wanted: {list(m.bridge._wanted)}"]
        two.send(ASK.pack(2, 5, stream))
        m.hear()  # its host is not connected: it is asked again
        m.connect(2)
        two.send(ASK.pack(2, 4, 1 - stream))
        m.hear()
        line_ = m.link(2).line
        assert line_ is not None
        line_.flush()
        wants = [(f.source, f.to, f.sequence) for f, _ in m.said(2) if f.kind == line.WANT]
        wrong += [] if wants == [(2, 4, 1 - stream)] else [f"the later host is asked for {wants}"]
        with mock.patch.object(bridges.os, "getuid", lambda: -1):
            stranger = m.rank()
            stranger.send(ASK.pack(2, 0, 0))
            m.hear()
        wrong += [] if len(m.bridge._asking) == 2 and m.bridge._place.fileno() >= 0 else ["another user is heard"]
        m.bridge._hear_ranks({m.bridge._place.fileno()})  # whoever woke it has gone
        near, far = socket.socketpair()
        with far:
            m.bridge._hand(3, HANDED.pack(0, 1, 9), near)
            said, fds, _, _ = socket.recv_fds(three, 64, 4)
            wrong += [] if said == HANDED.pack(0, 1, 9) and len(fds) == 1 else ["a connection is not handed"]
            for fd in fds:
                os.close(fd)
        for there in (3, 7):
            near, far = socket.socketpair()
            three.close()
            with far:
                m.bridge._hand(there, HANDED.pack(0, 1, 9), near)
                wrong += [] if far.recv(1) == b"" else [f"a connection for rank {there}, which is gone, stays open"]
        gone = m.rank()
        gone.send(ASK.pack(3, NOBODY, 0))
        m.hear()
        for asking in [a for a, rank in m.bridge._asking.items() if rank == 3]:
            with suppress(OSError):
                asking.send(b"unread")
        gone.close()
        m.hear()
        left = sorted(m.bridge._asking.values())
        wrong += [] if left == [2] else [f"of ranks 2 and 3, which has gone, {left} are heard"]
    return measured(wrong, 8)


def guests(rng: np.random.Generator) -> Measured:
    """Who has proved itself has to say whose connection it is, whole, in time and of this job: words in parts are waited for; who is late,
    says something else or goes away is sent away."""
    wrong = list[str]()
    names = {"whole": True, "in parts": True, "another frame": False, "another checksum": False, "an earlier host": False,
             "a lost host": False, "late": False, "gone": False, "half": False}
    for name, taken in names.items():
        with middle() as m:
            near, far = socket.socketpair() if name != "gone" else _tcp()
            near.setblocking(False)
            far.settimeout(MOMENT_S)
            m.open += [near, far]
            job, host = m.segment.job, 0 if name == "an earlier host" else 2
            words = SAID.pack(job, 0, host, 3, 2, NOBODY, NOBODY, 0)
            said = line.frame(7, line.ALIVE if name == "another frame" else line.HELLO, body=words)
            said = said[:-1] + bytes([said[-1] ^ 1]) if name == "another checksum" else said
            m.link(2).lost = name == "a lost host"
            until = time.monotonic() + (MOMENT_S if name != "late" else -1.0)
            m.bridge._guests.append((Peer(near, 7), bytearray(), until))
            cut = int(rng.integers(1, len(said)))
            if name == "gone":
                reset(far)
            elif name in ("in parts", "half"):
                far.send(said[:cut])
                m.bridge._meet()
                wrong += [] if len(m.bridge._guests) == 1 else [f"{name}: {cut} of {len(said)} bytes are enough"]
                far.send(said[cut:]) if taken else far.shutdown(socket.SHUT_WR)
            elif name != "late":
                far.send(said)
            m.bridge._wanted.clear()
            with mock.patch.object(m.bridge, "_want", lambda key: None):
                m.bridge._meet()
            good = (m.link(2).line is not None) == taken and not m.bridge._guests and (near.fileno() >= 0) == taken
            wrong += [] if good else [f"{name}: taken {m.link(2).line is not None}, {len(m.bridge._guests)} guests"]
    with middle() as m:
        near, far = socket.socketpair()
        near.setblocking(False)
        m.open += [near, far]
        m.bridge._guests.append((Peer(near, 7), bytearray(), time.monotonic() + MOMENT_S))
        with mock.patch.object(m.bridge, "_want", lambda key: None):
            m.bridge._meet()
        wrong += [] if len(m.bridge._guests) == 1 else ["who has said nothing yet is sent away"]
    return measured(wrong, len(names) + 1)


def _tcp() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return server.accept()[0], far


def knocks(rng: np.random.Generator) -> Measured:
    """No more than _KNOCKING connections are made at a time, the others when there is room; none that was just made; and one that is made
    behind the bridge's end is closed."""
    wrong, more, hold = list[str](), int(rng.integers(1, 5)), threading.Event()
    with middle() as m:
        keys = [(0, 2 + i % 2, i // 2, 0) for i in range(bridges._KNOCKING + more)]
        begun = list[bridges.Key]()

        def knock(key: bridges.Key) -> None:
            begun.append(key)
            hold.wait(MOMENT_S)

        with mock.patch.object(m.bridge, "_knock", knock):
            m.link(0).lost = True  # its bridge is not connected to meanwhile
            for key in keys:
                m.bridge._want(key)
            for _ in range(3):
                m.bridge._meet()
            wrong += [] if len(m.bridge._knocking) == bridges._KNOCKING else [f"{len(m.bridge._knocking)} are made at a time"]
            m.bridge._want(keys[0])  # that is about to be made
            wrong += [] if list(m.bridge._wanted) == keys[bridges._KNOCKING :] else [f"{len(m.bridge._wanted)} wait"]
            hold.set()
            for thread in m.bridge._knocking.values():
                thread.join(MOMENT_S)
            m.bridge._meet()
            for thread in m.bridge._knocking.values():
                thread.join(MOMENT_S)
        wrong += [] if sorted(begun) == sorted(keys) and not m.bridge._wanted else [f"{len(begun)} of {len(keys)} are made"]
        m.bridge._made[keys[0]] = time.monotonic() + MOMENT_S
        m.bridge._want(keys[0])
        wrong += [] if not m.bridge._wanted else ["one that was just made is made again"]
    made = Middle()
    before, proved = descriptors(), list[Peer]()
    bell, made.bridge._bell = made.bridge._bell, -1
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            bridges.select.select(made.doors[0].descriptors(), [], [], 0.01)
            proved.extend(made.doors[0].look())

    thread = threading.Thread(target=answer)
    thread.start()
    made.bridge._knock((0, 2, 0, 0))
    stop.set()
    thread.join()
    for peer in proved:
        peer.link.close()
    wrong += [] if not made.bridge._fresh and len(proved) == 1 else ["behind the end a connection is kept"]
    wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    made.bridge._bell = bell
    near, far = socket.socketpair()
    far.settimeout(MOMENT_S)
    made.bridge._fresh.append(((0, 2, 0, 0), Peer(near, 7)))
    made.close()
    with far:
        wrong += [] if far.recv(1) == b"" else ["a connection that was just made stays open behind the end"]
    return measured(wrong, 7)


def lost(rng: np.random.Generator) -> Measured:
    """A host that is silent for SILENCE_S has its connection broken, not before; one that is lost stays so, and is named once. Where all
    here have left nobody is named, and a connection that breaks behind the other's last word is not made again. The state of ranks of a
    host that is lost is told to the others."""
    wrong = list[str]()
    with middle(0, 2) as m:
        m.clock.ns = int(1e9 * (bridges.SILENCE_S - 0.001))
        m.bridge._look_for_silence()
        wrong += [] if m.link(0).line and m.link(2).line else ["a host is given up before its time"]
        m.link(2).heard = m.clock.ns
        m.clock.ns = int(1e9 * (bridges.SILENCE_S + 0.001))
        m.bridge._look_for_silence()
        wrong += [] if m.link(0).line is None and m.link(2).line else ["a host that says nothing is kept, or another one given up"]
        m.clock.ns += int(1e9 * (bridges.BROKEN_S + 0.001))
        m.link(2).heard = m.clock.ns
        m.bridge._look_for_silence()
        failures = m.segment.control.failures()
        m.segment.control._flags[0] = 0
        m.bridge._look_for_silence()
        wrong += ["a host that is lost is named again"] if m.segment.control.failed() else []
        m.segment.control._flags[0] = 1
        named = [(f.teller, f.text.partition(" is out")[0][:20]) for f in failures]
        wrong += [] if named == [(0, "host 0 (ranks 0 to 1")] and "it said nothing for 2 s" in failures[0].text else [f"told of {named}"]
        line_ = m.link(2).line
        assert line_ is not None
        m.bridge._carry(m.link(2), True)
        line_.flush()
        told = sorted({f.source for f, _ in m.said(2) if f.kind == line.RECORD})
        wrong += [] if told == [0, 1, 2, 3] else [f"another host is told of ranks {told}"]
    for everybody in (False, True):
        with middle(0, 2) as m:
            for rank in (2, 3) if everybody else (2,):
                m.segment.control.leave(rank)
            m.link(0).bye_heard = True
            m.bridge._break(m.link(0), "it was cut")
            m.bridge._break(m.link(2), "it was cut")
            m.clock.ns = int(1e9 * (bridges.BROKEN_S + 0.001))
            for _ in range(1 + everybody):
                m.bridge._look_for_silence()
            wrong += [] if m.link(0).bye_said == everybody else [f"left {everybody}: behind the last word {m.link(0).bye_said}"]
            wrong += [] if m.link(2).lost and not m.link(0).lost else ["a host is lost that is not, or is not"]
            wrong += [] if m.segment.control.failed() == (not everybody) else [f"left {everybody}: told {m.segment.control.failed()}"]
            wrong += [] if m.bridge._ended() == everybody else [f"left {everybody}: ended {m.bridge._ended()}"]
    return measured(wrong, 13)


def ends(rng: np.random.Generator) -> Measured:
    """A bridge of a job that has failed ends when others were told, or after the time that a job may take to be told; what is in line goes
    out before, though the other end reads late."""
    wrong = list[str]()
    with middle(0, 2) as m:
        m.segment.control.fail(Failure(2, 2, "", 0, 0, "told"))
        wrong += ["it ends before others are told"] if m.bridge._ended() else []
        m.bridge._failed_for = clock = Standing(os.getpid())
        for seconds, over in ((0.999, False), (1.001, True)):
            clock.ns = int(1e9 * seconds)
            wrong += [] if m.bridge._ended() == over else [f"after {seconds} s of 1 s it {'goes on' if over else 'ends'}"]
    with middle(0, 2) as m:
        for host in (0, 2):
            link = m.link(host)
            link.bye_said = link.bye_heard = True
            assert link.line is not None
            link.line.out.clear()
        wrong += [] if m.bridge._ended() else ["it goes on when all is said"]
        link = m.link(2)
        assert link.line is not None
        link.line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        said = rng.bytes(100_000)
        link.line.put(line.RESUME, body=said)
        link.line.flush()
        wrong += [] if link.line.out and not m.bridge._ended() else ["it ends with words in line"]
        came, begun = list[bytes](), time.monotonic()
        end = Line(Peer(m.far[2], 7), bridges._no_messages)
        m.bridge._due_alive = begun + 1e6
        with mock.patch.object(m.bridge, "_wanted", {}), mock.patch.object(bridges, "RECORD_S", MOMENT_S):
            m.bridge._due_record = begun + 1e6
            while link.line is not None and link.line.out and time.monotonic() < begun + MOMENT_S:
                end.read(lambda frame, body: came.append(bytes(body)))
                m.bridge._look()
        end.read(lambda frame, body: came.append(bytes(body)))
        wrong += [] if came == [said] else [f"{len(came)} words come of one that was in line"]
        wrong += [] if time.monotonic() - begun < MOMENT_S else ["it is not woken when there is room"]
    return measured(wrong, 7)


def processes(rng: np.random.Generator) -> Measured:
    """A rank that died is told of, whether its number was free or not when it was first looked at; one that has left, or that told why, is
    not; one that is stopped is said to be. Nothing stays open."""
    wrong, before = list[str](), descriptors()
    for reaped in (True, False):
        for what in ("died", "left", "told"):
            with ended(reaped) as gone, middle(0) as m:
                m.segment.control.join(2, gone)
                if what == "left":
                    m.segment.control.leave(2)
                if what == "told":
                    m.segment.control.fail(Failure(2, 3, "send", 1, 5, "it told why"))
                for _ in range(2):
                    m.bridge._due_served = 0.0
                    m.bridge._look_after_ranks()
                said = [(f.teller, f.rank, f.text) for f in m.segment.control.failures()]
                wanted = {"died": [(2, 2, "rank 2 died")], "left": [], "told": [(2, 3, "it told why")]}[what]
                wrong += [] if said == wanted else [f"{what}, reaped {reaped}: {said}"]
    with middle(0) as m:
        sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        m.segment.control.join(3, sleeper.pid)
        m.segment.control._words[2][0] = ABSENT
        m.bridge._look_after_ranks()
        wrong += [] if list(m.bridge._ranks) == [3] else [f"ranks {list(m.bridge._ranks)} are looked after, of which 3 has come"]
        found = [m.segment.control.frozen(rank) for rank in (2, 3)]
        wrong += [] if found == [False, True] and not m.segment.control.failed() else [f"stopped are {found}"]
        sleeper.kill()
        sleeper.wait()
    del m
    wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    return measured(wrong, 9)


def words(rng: np.random.Generator) -> Measured:
    """A bridge takes from another one what that says of its own ranks, by this host's clock; of those of a third host that it is lost, and
    nothing else; of ranks that there are not, or are here, nothing. A later host does not ask for connections, for it makes them. Of all
    that was heard of another clock what travelled least counts."""
    wrong, step = list[str](), int(rng.integers(1, 1000))
    there = Segment.create(6)
    there.control.join(4, 77)
    there.control.begin(4, step)
    quiet, ahead = there.control.record(4), int(rng.integers(1, 1 << 40))
    there.control.fail(Failure(4, 4, "", 0, 1 << 50, "lost"))
    loud = there.control.record(4)
    there.close()

    def take(m: Middle, host: int, kind: int, source: int, body: bytes = b"", *, to: int = 0, sequence: int = 0) -> str:
        try:
            m.bridge._take(m.link(host), line.Frame(kind, 0, source, to, sequence, 0, len(body)), memoryview(body))
            return ""
        except Broken as error:
            return str(error)

    with middle(0, 2) as m:
        control = m.segment.control
        m.link(2).ahead = m.link(0).ahead = ahead
        told: Sequence[tuple[str, int, int, bytes, str, Callable[[], bool]]] = (
            ("its own rank", 2, 4, quiet, "", lambda: control.step(4) == step and control.heartbeat(4) == max(1, _beat(quiet) - ahead)),
            ("a third host's rank", 0, 5, quiet, "", lambda: control.state(5) == ABSENT),
            ("a third host that is lost", 0, 5, loud, "",
             lambda: [(f.teller, f.when, f.text) for f in control.failures()] == [(5, 1 << 50, "lost")]),
            ("a rank here", 2, 3, loud, "ranks of this host", lambda: control.pid(3) == os.getpid()),
            ("a rank too many", 2, 6, quiet, "ranks of this host", lambda: control.step(4) == step))
        for name, host, source, body, refused, holds in told:
            came = take(m, host, line.RECORD, source, body)
            wrong += [] if refused in came and bool(came) == bool(refused) and holds() else [f"{name}: {came!r}"]
        wants = ((2, 4, 2, False), (0, 1, 3, True))
        for host, source, to, wanted in wants:
            m.bridge._wanted.clear()
            came = take(m, host, line.WANT, source, to=to, sequence=1)
            good = not came and list(m.bridge._wanted) == ([(host, to, source, 1)] if wanted else [])
            wrong += [] if good else [f"host {host} asks: {came!r}"]
        clocks, link = [int(x) for x in rng.permutation(5) * 10**13 + 10**15], m.link(2)
        link.ahead = -(2**62)
        for i, clock in enumerate(clocks):
            before, now = link.ahead, time.monotonic_ns()
            came = take(m, 2, line.ALIVE, 0, sequence=now + clock)
            most = max(clocks[: i + 1])
            good = not came and (0 <= most - link.ahead < 10**12 if clock == most else link.ahead == before)
            wrong += [] if good else [f"a clock that is {most} ns ahead is taken for {link.ahead}"]
    return measured(wrong, len(told) + len(wants) + len(clocks))


def told_anew(rng: np.random.Generator) -> Measured:
    """What has changed of ranks here is told once on a connection, and all of it on the next one, however much was said before."""
    wrong = list[str]()
    with middle(0) as m:
        control = m.segment.control

        def told() -> list[tuple[int, bytes]]:
            m.bridge._carry(m.link(0), True)
            near = m.link(0).line
            assert near is not None
            near.flush()
            return [(frame.source, body) for frame, body in m.said(0) if frame.kind == line.RECORD]

        for connection in range(3):
            changed, step = list[int](), int(rng.integers(1, 1000))
            if connection:
                m.connect(0)
            for expected in ((2, 3), (), changed):
                came, all_ = told(), [(rank, control.record(rank)) for rank in expected]
                wrong += [] if came == all_ else [f"connection {connection}: of ranks {[*expected]} was told {[rank for rank, _ in came]}"]
                if not expected:
                    changed.append(int(rng.integers(2, 4)))
                    control.begin(changed[0], step)
    return measured(wrong, 9)


def _beat(record: bytes) -> int:
    return int.from_bytes(record[1 + 8 * 2 : 1 + 8 * 3], "little")


