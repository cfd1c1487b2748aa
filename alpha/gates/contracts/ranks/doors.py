"""Cases of how hosts come in: strangers at a door who go away, come in crowds or say their words in parts; doors that are none; what hosts
say of themselves when they meet. Floor 7."""

from __future__ import annotations

import hmac
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from alpha.comm import handshake, line
from alpha.comm import meet as meets
from alpha.comm.handshake import STRANGERS, Door, Peer, knock
from alpha.comm.meet import Across, Met, meet
from alpha.component import Measured
from alpha.errors import AlphaError, BusyError, InputError, RankError
from alpha.gates.contracts.edges import told
from alpha.gates.contracts.ranks.memory import descriptors, measured

SECRET = b"of those who may come in"
MOMENT_S = 10.0
"""What happens on this machine at once has come within so long, however busy it is."""


def reset(link: socket.socket) -> None:
    """The other end goes away as a process does that dies with words unread."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


@contextmanager
def opened() -> Iterator[tuple[Door, Callable[[], socket.socket]]]:
    """A door, and who comes to it as a stranger."""
    door, links = Door(("127.0.0.1", 0), SECRET), list[socket.socket]()

    def come() -> socket.socket:
        links.append(socket.create_connection(("127.0.0.1", door.port), timeout=MOMENT_S))
        return links[-1]

    try:
        yield door, come
    finally:
        for link in links:
            link.close()
        door.close()


def looked(door: Door, enough: Callable[[list[Peer]], bool]) -> list[Peer]:
    """Who has proved itself by when that is enough, or a moment has passed."""
    found, until = list[Peer](), time.monotonic() + MOMENT_S
    while not enough(found) and time.monotonic() < until:
        select.select(door.descriptors(), [], [], 0.01)
        found += door.look()
    return found


def _answer(link: socket.socket, rng: np.random.Generator) -> bytes:
    """What somebody answers who knows the secret."""
    offered = b""
    while len(offered) < 40:
        offered += link.recv(40 - len(offered))
    own = rng.bytes(32)
    return handshake.MAGIC + own + hmac.digest(SECRET, b"guest" + offered[8:] + own, "sha256")


def strangers(rng: np.random.Generator) -> Measured:
    """Who goes away before it is heard, while it is or behind its last word is forgotten, and stops nobody who comes after it. Words that
    come in parts are waited for. Of a crowd no more than STRANGERS are let in at a look."""
    wrong = list[str]()
    with opened() as (door, come):
        reset(come())
        honest = come()  # behind one that has gone
        door.look()
        wrong += [] if len(door._strangers) == 1 else [f"{len(door._strangers)} are heard behind one that has gone"]
        said = _answer(honest, rng)
        cuts = sorted({0, int(rng.integers(1, 8)), 8, int(rng.integers(9, 70)), 71})
        for start, end in pairwise(cuts):
            honest.send(said[start:end])
            early = looked(door, lambda _, end=end: any(len(s.said) == end for s in door._strangers.values()))  # type: ignore[misc]
            wrong += [] if not early and len(door._strangers) == 1 else [f"of 72 bytes {end} are enough to judge by"]
        honest.send(said[71:])
        found = looked(door, bool)
        wrong += [] if len(found) == 1 and door.refused == 0 else [f"{len(found)} come in, {door.refused} are sent away"]
        for peer in found:
            peer.link.close()
    for behind in (False, True):
        with opened() as (door, come):
            gone = come()
            looked(door, lambda _: bool(door._strangers))
            said = _answer(gone, rng)
            gone.send(said if behind else said[: int(rng.integers(8, 72))])
            reset(gone)
            time.sleep(0.01)
            found = looked(door, lambda _: not door._strangers)
            wrong += [] if not found and door.refused == 1 else [f"one goes away, {len(found)} came in, behind {behind}"]
    with opened() as (door, come):
        for _ in range(STRANGERS + 1):
            come()
        door.look()
        count = len(door._strangers), door.refused
        wrong += [] if count == (STRANGERS, 0) else [f"of {STRANGERS + 1} {count[0]} are let in at a look, {count[1]} sent away"]
        looked(door, lambda _: door.refused > 0)
        count = len(door._strangers), door.refused
        wrong += [] if count == (STRANGERS, 1) else [f"of {STRANGERS + 1} {count[0]} stay, {count[1]} are sent away"]
    return measured(wrong, 6)


def false_doors(rng: np.random.Generator) -> Measured:
    """Two jobs do not listen at one port. Whoever listens there and speaks otherwise is told from one that knows another secret, by what it
    said; nothing of a knock stays open."""
    before = descriptors()
    with opened() as (door, _):
        result = told(("a port that is taken", lambda: Door(("127.0.0.1", door.port), SECRET), BusyError,
                       ("cannot listen there", f"127.0.0.1:{door.port} (Address already in use", "a port of its own")))
    wrong, words = [result.note] if result.error else [], b"SSH-2.0-" + rng.bytes(40)
    for said, expected in ((words, ("no host of this job", repr(words[:8]), repr(handshake.MAGIC))),
                           (b"alpha\0\0\2" + rng.bytes(32), ("another version of Alpha", repr(b"alpha\0\0\2"), repr(handshake.MAGIC)))):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])

            def answer(server: socket.socket = server, said: bytes = said) -> None:
                link, _ = server.accept()
                with link:
                    link.sendall(said)
                    with suppress(OSError):  # it goes away at once
                        link.recv(100)

            thread = threading.Thread(target=answer)
            thread.start()
            result = told(("who listens", lambda port=port: knock(("127.0.0.1", port), SECRET), RankError,  # type: ignore[misc]
                           (*expected, f"127.0.0.1:{port}")))
            thread.join()
        wrong += [result.note] if result.error else []
    wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    return measured(wrong, 4)


def _no_place(frame: line.Frame) -> tuple[memoryview, memoryview]:
    """There is no message."""
    raise line.Broken("it sent a message")


def frames(rng: np.random.Generator) -> Measured:
    """A whole frame is unpacked as it was packed; one of another magic, version or length, and one with a byte that is otherwise, is none,
    though its checksum is right for what it says. A look reads all frames that have come."""
    wrong, seed, body = list[str](), int(rng.integers(1 << 60)), rng.bytes(int(rng.integers(1, 60)))
    words = (line.HELLO, 1, 2, 3, int(rng.integers(1 << 60)), 4)
    whole = line.frame(seed, *words, body)
    wrong += [] if line.unpacked(seed, whole) == (line.Frame(*words, len(body)), body) else ["a sound frame comes otherwise"]
    wrong += ["what nobody says of a frame is not 0"] * (line.frame(seed, line.BYE) != line.frame(seed, line.BYE, 0, 0, 0, 0, 0, b""))
    for name, magic, version, length in (("magic", line.MAGIC ^ 1, line.VERSION, len(body)), ("version", line.MAGIC, 3, len(body)),
                                         ("length", line.MAGIC, line.VERSION, len(body) + 1)):
        head = line.FRAME.pack(magic, version, *words, length)
        wrong += [f"a frame of another {name} is taken"] * (line.unpacked(seed, head + line._digest(seed, head, body) + body) is not None)
    for at in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << int(rng.integers(8))
        wrong += [f"byte {at} of {len(whole)} is not looked at"] * (line.unpacked(seed, bytes(spoiled)) is not None)
    for more in (0, 1, int(rng.integers(2, 200))):  # what is read ahead ends with a frame, or within the next one
        with pair() as (peer, far):
            bodies = [rng.bytes(line._AHEAD - line.HEAD_BYTES), rng.bytes(more)]
            far.send(b"".join(line.frame(7, line.RESUME, body=body) for body in bodies))
            came = list[bytes]()
            line.Line(peer, _no_place).read(lambda frame, body, came=came: came.append(bytes(body)))  # type: ignore[misc]
            wrong += [] if came == bodies else [f"of two frames that had come {len(came)} are read"]
    wrong += ["a frame of another connection is taken"] * (line.unpacked(seed ^ 1, whole) is not None)
    return measured(wrong, len(whole) + 8)


@contextmanager
def pair() -> Iterator[tuple[Peer, socket.socket]]:
    """A proved connection, and its other end."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.settimeout(MOMENT_S)
        yield Peer(near, 7), far


def lines(rng: np.random.Generator) -> Measured:
    """A line that comes in parts is heard when it is whole. What is none, has no end within MOST bytes or comes from an end that goes away
    is nobody's word; and whoever has gone is told nothing."""
    wrong, what = list[str](), {"host": int(rng.integers(9)), "text": "x" * int(rng.integers(1, 200))}
    said = json.dumps(what).encode() + b"\n"
    with pair() as (peer, far):
        came, cut = bytearray(), int(rng.integers(1, len(said)))
        wrong += [] if meets._heard(peer, came) is None else ["nothing is heard as a word"]
        far.send(said[:cut])
        wrong += [] if meets._heard(peer, came) is None else [f"{cut} of {len(said)} bytes are heard as a word"]
        far.send(said[cut:])
        heard = meets._heard(peer, came)
        wrong += [] if heard == what else [f"{heard} is heard, {what} was said"]
    for name, words in (("noise", b"\xff\xfe" + rng.bytes(20).replace(b"\n", b"") + b"\n"), ("no table", b"[1, 2]\n"),
                        ("a number", b"7\n"), ("brackets", b"[" * 60_000 + b"\n"), ("half a line", said[:-2])):
        with pair() as (peer, far):
            far.sendall(words)
            far.shutdown(socket.SHUT_WR)
            came, heard = bytearray(), None
            for _ in range(9):
                heard = meets._heard(peer, came) if heard is None else heard
            wrong += [] if heard == {} else [f"{name} is heard as {heard}"]
    with pair() as (peer, far):
        far.setblocking(False)
        came, heard, sent = bytearray(), None, 0
        while heard is None and sent < 4 * meets.MOST:
            with suppress(BlockingIOError):
                sent += far.send(b" " * 4096)
            heard = meets._heard(peer, came)
        wrong += [] if heard == {} and sent <= 2 * meets.MOST else [f"{sent} bytes without an end are heard as {heard}"]
    with pair() as (peer, far):
        meets._say(peer, {"word": 1})
        far.close()  # with a word unread
        for _ in range(2):
            meets._say(peer, what)
        heard = meets._heard(peer, bytearray())
        wrong += [] if heard == {} else [f"{heard} is heard of one that has gone"]
    return measured(wrong, 10)


def places(rng: np.random.Generator) -> Measured:
    """A host is taken in where its number is free, its count of hosts the same and its ranks some; else it is told which of these not."""
    wrong, count, other = list[str](), int(rng.integers(3, 9)), int(rng.integers(2, 1 << 20))
    sound: dict[str, Any] = {"host": 1, "hosts": count, "ranks": 2, "port": 9, "epoch": 0}
    there = "there is no place for a host {}, or somebody has it"
    for changed, said in (
        ({}, ""), ({"host": count - 1}, ""), ({"ranks": (1 << 32) - 1}, ""),
        ({"host": "1"}, "it does not say who it is"), ({"port": None}, "it does not say who it is"),
        ({"epoch": 0.0}, "it does not say who it is"),
        ({"ranks": -1}, "it does not say who it is"), ({"epoch": 1 << 32}, "it does not say who it is"),
        ({"hosts": other + count}, f"host 1 was told of {other + count} hosts, host 0 of {count}"),
        ({"host": 0}, there.format(0)), ({"host": count}, there.format(count)), ({"host": 2}, there.format(2)),
        ({"ranks": 0}, "host 1 has no ranks"),
    ):
        if count == 3 and changed == {"host": count - 1}:
            continue  # that is the one that has come
        with pair() as (peer, far):
            taken = meets._fits({**sound, **changed}, Across(0, count, "127.0.0.1", 1, SECRET), {2: None}, peer)
            peer.link.close()
            heard = far.recv(1 << 12)
            text = json.loads(heard)["error"] if heard else ""
        good = taken == (not said) and text.startswith(said) and bool(text) == bool(said)
        wrong += [] if good else [f"{changed}: taken {taken}, told {text!r}"]
    return measured(wrong, 13)


def turned_away(rng: np.random.Generator) -> Measured:
    """A host whose connections host 0 closes without a word, as the bridge of a start does that is not over, comes again and is taken in
    once the new start begins; where none does, it says so. Nothing of the attempts stays open."""
    wrong, refusals, said = list[str](), int(rng.integers(1, 4)), {"job": 5, "epoch": 2, "ranks": [1, 1], "streams": 1}
    for ends in (True, False):
        before = descriptors()
        with closing(Door(("127.0.0.1", 0), SECRET)) as door:
            stop, closed = threading.Event(), [0]

            def serve(door: Door = door, stop: threading.Event = stop, closed: list[int] = closed, ends: bool = ends) -> None:
                while not stop.is_set():
                    select.select(door.descriptors(), [], [], 0.01)
                    for peer in door.look():
                        if ends and closed[0] == refusals:
                            meets._say(peer, {**said, "places": [["127.0.0.1", 1], ["127.0.0.1", 2]]})
                        closed[0] += 1
                        peer.link.close()

            thread = threading.Thread(target=serve)
            thread.start()
            came: Met | AlphaError | None = None
            most = refusals + ends
            clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda closed=closed, most=most: 99.0 if closed[0] > most else 0.0)
            try:
                with mock.patch.object(meets, "time", clock):  # time passes when host 0 has closed more than it should
                    came = meet(Across(1, 2, "127.0.0.1", door.port, SECRET), 1, 0, 0, MOMENT_S)
                came.door.close()
            except AlphaError as error:
                came = error
            stop.set()
            thread.join()
        if ends:
            good = isinstance(came, Met) and (came.job, came.epoch, came.size) == (5, 2, 2) and closed[0] == refusals + 1
            wrong += [] if good else [f"after {closed[0]} of {refusals} refusals: {came}"]
        else:
            text = str(came)
            wrong += [] if type(came) is RankError and "host 0 never took this host in" in text and "within 10 s" in text else [text]
        wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    result = told(("an address elsewhere", lambda: meet(Across(0, 2, "192.0.2.7", 0, SECRET), 1, 0, 0, 1.0), InputError,
                   ("an address of its own", "192.0.2.7 (Cannot assign requested address)", "an address of this host")))
    wrong += [result.note] if result.error else []
    return measured(wrong, 5)
