"""Cases of a job on several hosts: what bridges carry, what they survive, and what they name. Floor 7.

Hosts are on this machine (network.py): each has a segment, a bridge and its ranks; connections between them go over the loopback device.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count as counting
from typing import Any

import numpy as np

from alpha.comm import bridge as bridges
from alpha.comm import collectives, handshake
from alpha.comm.bridge import Bridge, Host
from alpha.comm.handshake import Door, knock
from alpha.comm.meet import Across, Met, meet
from alpha.comm.segment import Segment
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import AlphaError, InputError, RankError
from alpha.gates.contracts.ranks.calls import OPS
from alpha.gates.contracts.ranks.collectives import SHORT, SMALL, SOUND, at_groups, at_random, seed_of, sound
from alpha.gates.contracts.ranks.jobs import Case, Found, _hash, _measured, at_channels
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.gates.contracts.ranks.network import SECRET, Network, Wire

ALONE_AND_APART: tuple[dict[str, Any], ...] = ({}, {"hosts": 2}, {"hosts": 4})
LOST_S = bridges.SILENCE_S + bridges.BROKEN_S + 4.0
"""From the moment when a host falls silent until all ranks have ended, without waits for processors."""


# -- what is carried ---------------------------------------------------------------------------------------------------------------


def _random(rng: np.random.Generator) -> Measured:
    """Collectives back to back have the bits of their rows, with one rank a host or several, in short messages and long ones."""
    seed, op = seed_of(rng), OPS[int(rng.integers(len(OPS)))]
    return sound([partial(members().run, at_random, size, op, seed, hosts=hosts, deadlines=SOUND, **layout)
                  for size, hosts, layout in ((2, 2, {}), (3, 2, SMALL), (3, 3, {}), (4, 2, {}))])


def _groups(rng: np.random.Generator) -> Measured:
    """Groups that lie across hosts otherwise than the ranks do."""
    seed = seed_of(rng)
    return sound([partial(members().run, at_groups, 6, "all_reduce", seed, hosts=hosts, deadlines=SOUND) for hosts in (2, 3)])


def _channels(rng: np.random.Generator) -> Measured:
    return sound([partial(members().run, at_channels, 2, seed_of(rng), hosts=2, deadlines=SOUND)])


def at_streams(world: World, seed: int, count: int) -> Found:
    """Messages of every length, as fast as they go, both ways at once: each is delivered once, in order, whole."""
    group, rng, wrong = world.group(WORLD), np.random.default_rng(seed), list[str]()
    for i, n in enumerate(map(int, rng.integers(0, 200_000, count))):
        x = np.random.default_rng((seed, i)).integers(0, 1 << 30, n).astype(np.int32)
        out = np.empty_like(x)
        if (world.rank + i) % 2:
            collectives.send(group, x, to=1 - world.rank)
        else:
            collectives.receive(group, out, source=1 - world.rank)
            wrong += [] if out.tobytes() == x.tobytes() else [f"message {i} of {n} elements came otherwise"]
    return wrong, count


def _streams(rng: np.random.Generator) -> Measured:
    return sound([partial(members().run, at_streams, 2, seed_of(rng), 40, hosts=2, deadlines=SOUND)])


def at_leaving_early(world: World, seed: int) -> Found:
    """One rank sends and leaves; the other one receives when a host that is gone would long have been given up. On the way the connection
    broke, so what was sent has to be sent again."""
    group, x = world.group(WORLD), np.random.default_rng(seed).standard_normal(150_000).astype(np.float32)
    out = np.empty_like(x)
    if world.rank == 0:
        collectives.send(group, x, to=1)
    else:
        time.sleep(bridges.BROKEN_S + 0.6)
        collectives.receive(group, out, source=0)
    return ([] if world.rank == 0 or out.tobytes() == x.tobytes() else ["what was sent before leaving came otherwise"]), 1


def _early(rng: np.random.Generator) -> Measured:
    seed = next(s for s in counting(seed_of(rng)) if random.Random(s).randrange(2))  # what breaks is the way to the one that receives
    wire = Wire(cuts=1, most=500_000, seed=seed)
    return sound([partial(members().run, at_leaving_early, 2, seed, hosts=2, wire=wire, deadlines=SOUND)])


def at_sum(world: World, seed: int) -> str:
    """The digest of sums and gathers of all ranks."""
    group, found = world.group(WORLD), hashlib.sha256()
    for i, count in enumerate((1, 5003, 70_000)):
        x = np.random.default_rng((seed, i, world.rank)).standard_normal(count).astype(np.float32)
        out, every = np.empty_like(x), np.empty(count * world.size, np.float32)
        collectives.all_reduce(group, x, out)
        collectives.all_gather(group, x, every)
        found.update(out.tobytes() + every.tobytes())
    return found.hexdigest()


def _bits(rng: np.random.Generator) -> Measured:
    """Four ranks on one, two and four hosts: the same bits."""
    seed = seed_of(rng)
    jobs = [members().run(at_sum, 4, seed, deadlines=SOUND, **layout) for layout in ALONE_AND_APART]
    found, errors = {e.result for ended in jobs for e in ended}, [e.error[-80:] for ended in jobs for e in ended if e.error]
    wrong = [] if len(found) == 1 and None not in found else [f"{len(found)} digests; {errors[:1]}"]
    return _measured(wrong, 12, _hash(*sorted(map(str, found))))


# -- what is survived --------------------------------------------------------------------------------------------------------------


def _cut(rng: np.random.Generator) -> Measured:
    """Connections that break again and again: what was lost is sent again, once, and no bit moves."""
    seed = seed_of(rng)
    wire = Wire(cuts=6, most=int(rng.integers(2_000, 80_000)), seed=seed)
    return sound([partial(members().run, at_random, size, "all_reduce", seed, hosts=size, wire=wire, deadlines=SOUND) for size in (2, 3)])


def _flipped(rng: np.random.Generator) -> Measured:
    """A bit that is flipped on its way: the connection begins anew, or the ranks name the damaged message. Nobody gets a wrong bit."""
    wrong = list[str]()
    for _ in range(3):
        seed = seed_of(rng)
        wire = Wire(flips=3, most=int(rng.integers(300, 40_000)), seed=seed)
        ended = members().run(at_random, 2, "all_gather", seed, hosts=2, wire=wire, deadlines=SOUND)
        for rank, e in enumerate(ended):
            right = e.result is not None and not e.result[0]
            if not right and "was damaged on its way" not in e.error:
                wrong.append(f"rank {rank}: {e.result or e.error.splitlines()[:1]}")
    return _measured(wrong, 6)


def _strangers(rng: np.random.Generator) -> Measured:
    """Garbage, silence, another secret and a flood at the ports of both hosts: all are sent away, and the job does not notice."""
    wrong, seed, network = list[str](), seed_of(rng), Network(2, 2)
    ports, stop = [d.port for d in network.told], threading.Event()
    sent = [0, 0]

    def besiege() -> None:
        links = list[socket.socket]()
        own = np.random.default_rng(seed)
        while not stop.is_set():
            port = ports[int(own.integers(2))]
            try:
                link = socket.create_connection(("127.0.0.1", port), timeout=1)
                link.send(own.integers(0, 256, int(own.integers(1, 400))).astype(np.uint8).tobytes())
                sent[0] += 1
                links.append(link)
                if len(links) > 80:
                    links.pop(0).close()
                if not own.integers(10):
                    knock(("127.0.0.1", port), b"another secret", 1.0)
                    wrong.append("somebody with another secret was let in")
            except (OSError, RankError):
                sent[1] += 1
        for link in links:
            link.close()

    thread = threading.Thread(target=besiege)
    thread.start()
    try:
        ended = run_on(network, at_random, "all_reduce", seed)
    finally:
        stop.set()
        thread.join()
        wrong += network.close()
    wrong += [f"rank {r}: {e.error[-100:]}" for r, e in enumerate(ended) if e.result is None or e.result[0]]
    wrong += [] if sent[0] else ["no stranger came"]
    return _measured(wrong, 2)


def run_on(network: Network, function: Callable[..., Found], *arguments: object) -> list[Ended]:
    """`function(world, *arguments)` of every rank in a thread of its own."""
    size = network.segments[0].size
    found = [Ended(0) for _ in range(size)]

    def member(rank: int) -> None:
        try:
            with World(network.segment(rank), rank, deadlines=SOUND) as world:
                found[rank].result = function(world, *arguments)
        except Exception as error:
            found[rank].error = str(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


# -- what is named -----------------------------------------------------------------------------------------------------------------


def _silent(rng: np.random.Generator) -> Measured:
    """A partition, one way or both, while all connections stay open: each side names the host that it lost."""
    ways = ("to", "from", "both")[int(rng.integers(3))]
    wire = Wire(silent=int(rng.integers(5_000, 40_000)), ways=ways)
    ended = members().run(at_random, 2, "all_reduce", seed_of(rng), hosts=2, wire=wire, deadlines=SOUND)
    return _named(ended, "out of reach", {0: 1, 1: 0})


def at_death(world: World, victim: int, what: str) -> None:
    """Rank `victim` dies, or takes its whole host with it; the others would go on for long."""
    group, x = world.group(WORLD), np.ones(5000, np.float32)
    for i in range(100_000):
        collectives.all_reduce(group, x, x, reduce="average")
        if i == 20 and world.rank == victim:
            if what == "host":
                os.kill(world.bridge, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _died(what: str, says: str) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        victim = int(rng.integers(2))
        ended = members().run(at_death, 2, victim, what, hosts=2, deadlines=SHORT)
        return _named(ended, says.format(victim), {1 - victim: victim})
    return case


def _named(ended: Sequence[Ended], says: str, names: dict[int, int]) -> Measured:
    wrong = list[str]()
    for rank, name in names.items():
        e = ended[rank]
        if e.hung or e.rank != name or says not in e.error or e.served - e.beat > LOST_S + 1.0:
            wrong.append(f"rank {rank} says after {e.served:.1f} s: {e.error.splitlines()[:1]}")
    return _measured(wrong, len(names), _hash(says))


# -- frames ------------------------------------------------------------------------------------------------------------------------


class Ends:
    """The bridges of two hosts with one rank each, in this process, and a socket pair between them."""

    def __init__(self) -> None:
        doors = [Door(("127.0.0.1", 0), SECRET) for _ in range(2)]
        told = [Host("127.0.0.1", door.port, range(i, i + 1)) for i, door in enumerate(doors)]
        first = Segment.create(2, here=range(1), payload_bytes=4096, slots=4)
        self.segments = [first, Segment.create(2, here=range(1, 2), job=first.job, payload_bytes=4096, slots=4)]
        self.bridges = [Bridge(s, told, i, door, SECRET, 1.0) for i, (s, door) in enumerate(zip(self.segments, doors))]
        for segment in self.segments:
            segment.ring(0, 0, 1)
        self.connect()

    def connect(self) -> None:
        """A new connection, which both ends have resumed."""
        pair = socket.socketpair()
        for bridge, end in zip(self.bridges, pair):
            end.setblocking(False)
            bridge._connected(bridge._links[0], handshake.Peer(end, 7))
        self.turn()
        self.turn()

    def turn(self) -> None:
        """Each end sends what it has and reads what came."""
        for bridge in self.bridges:
            bridge._carry(bridge._links[0], True)
            bridge._flush(bridge._links[0])
        for bridge in self.bridges:
            bridge._read(bridge._links[0])

    def close(self) -> None:
        for bridge, segment in zip(self.bridges, self.segments):
            bridge.close()
            segment.close()


def mutated(frames: int, rng: np.random.Generator) -> list[str]:
    """What is wrong with how one end takes frames with flipped bits, cut ends, other numbers, and noise, a doubled one and a whole one: a
    frame is refused with the connection, or is the one that was sent. What lies behind a message's own header the ranks check."""
    ends, wrong = Ends(), list[str]()
    try:
        sender, receiver = (b._links[0] for b in ends.bridges)
        taken = 0
        for i in range(frames):
            body = rng.integers(0, 256, int(rng.integers(bridges.SPACE, 600))).astype(np.uint8).tobytes()
            kind = int(rng.integers(bridges.DATA, bridges.BYE))
            to = int(kind in (bridges.DATA, bridges.CREDIT))
            head = bridges.FRAME.pack(bridges._MAGIC, 1, kind, 0, 0, to, taken, len(body))
            frame = bytearray(head + bridges._digest(7, head, body[: bridges.SPACE] if kind == bridges.DATA else body) + body)
            what = int(rng.integers(6))
            if what == 0:
                frame[int(rng.integers(bridges.FRAME.size + 16 + bridges.SPACE))] ^= 1 << int(rng.integers(8))
            elif what == 1:
                at = int(rng.integers(1, bridges.FRAME.size + 16 + bridges.SPACE))
                frame = frame[:at] + bytes([frame[at] ^ int(rng.integers(1, 256))]) + rng.bytes(700)
            elif what == 2:
                at = int(rng.integers(bridges.FRAME.size))
                frame[at : at + 4] = rng.integers(0, 256, len(frame[at : at + 4])).astype(np.uint8).tobytes()
            elif what == 3:
                frame = bytearray(rng.integers(0, 256, int(rng.integers(41, 900))).astype(np.uint8).tobytes())
            elif what == 4:
                frame = frame + frame
            assert sender.link is not None
            before = int(ends.segments[1].counters()[0][0, 0, 1])
            try:
                sender.link.send(frame)
                ends.bridges[1]._read(receiver)
                broken = False
            except bridges._Broken:
                broken = True
            after = int(ends.segments[1].counters()[0][0, 0, 1])
            sound = kind == bridges.DATA and what in (4, 5)
            if after - before > sound or (after == before and sound):
                wrong.append(f"frame {i}, change {what} of kind {kind}: {after - before} messages delivered")
            taken = after
            if after - int(ends.segments[1].counters()[1][0, 0, 1]) >= 4:
                ends.segments[1].counters()[1][0, 0, 1] = after
            if broken or receiver.parsed is not None or receiver.got or what != 5:
                for segment in ends.segments:  # the sending side never sent them
                    segment.counters()[0][0, 0, 1] = after
                    segment.counters()[1][0, 0, 1] = after
                    segment.control._flags[:] = bytes(2)
                for bridge in ends.bridges:
                    bridge._break(bridge._links[0], "next")
                    bridge._links[0].bye_heard = False
                ends.connect()
        return wrong
    finally:
        ends.close()


def _unsound(rng: np.random.Generator) -> Measured:
    """Frames with a right checksum that no sound peer sends: each ends the connection, and nothing of it stays."""
    wrong, good = list[str](), rng.bytes(bridges.SPACE + 100)
    resume = np.zeros((5, 1, 1), np.uint64)
    for name, kind, channel, source, to, sequence, body in (
        ("a message too early", bridges.DATA, 0, 0, 1, 1, good),
        ("a message too late", bridges.DATA, 0, 0, 1, 2**63, good),
        ("a message longer than a slot", bridges.DATA, 0, 0, 1, 0, rng.bytes(bridges.SPACE + 4096 + 64)),
        ("a message shorter than its header", bridges.DATA, 0, 0, 1, 0, rng.bytes(bridges.SPACE - 1)),
        ("a message of a rank here", bridges.DATA, 0, 1, 0, 0, good),
        ("a message of nobody", bridges.DATA, 0, 2, 1, 0, good),
        ("a message of no channel", bridges.DATA, 5, 0, 1, 0, good),
        ("a release of what was never sent", bridges.CREDIT, 0, 1, 0, 1, b""),
        ("a release by a rank here", bridges.CREDIT, 0, 0, 1, 0, b""),
        ("words of a rank here", bridges.RECORD, 0, 1, 0, 0, bytes(193)),
        ("words that are none", bridges.RECORD, 0, 0, 0, 0, bytes(192)),
        ("an error without bounds", bridges.RECORD, 0, 0, 0, 0, bytes([1]) + bytes(192) + bytes(2000)),
        ("counts of other rings", bridges.RESUME, 0, 0, 0, 0, resume.tobytes() + bytes(8)),
        ("counts of messages that were never sent", bridges.RESUME, 0, 0, 0, 0, (resume + np.uint64(3)).tobytes()),
        ("a frame of no kind", 0, 0, 0, 0, 0, b""),
        ("a frame of a kind to come", bridges.BYE + 1, 0, 0, 0, 0, b""),
        ("a frame without bounds", bridges.RECORD, 0, 0, 0, 0, bytes(bridges._MOST + 1)),
    ):
        ends = Ends()
        try:
            sender, receiver = (b._links[0] for b in ends.bridges)
            head = bridges.FRAME.pack(bridges._MAGIC, 1, kind, channel, source, to, sequence, len(body))
            assert sender.link is not None
            sender.link.send(head + bridges._digest(7, head, body[: bridges.SPACE] if kind == bridges.DATA else body) + body[:4500])
            try:
                ends.bridges[1]._read(receiver)
                wrong.append(f"{name} is taken")
            except bridges._Broken:
                pass
            if any(c.any() for c in ends.segments[1].counters()) or ends.segments[1].control.failed():
                wrong.append(f"{name} leaves a trace")
        finally:
            ends.close()
    return _measured(wrong, 17)


def _frames(rng: np.random.Generator) -> Measured:
    """A few hundred frames of any kind, spoiled in any way."""
    return _measured(mutated(300, rng), 300)


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
    return _measured(wrong, 6)


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
    return _measured(wrong, 2)


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
        bridge, job = ends.bridges[0], ends.segments[0].job
        for words, known in (((job, 0, 1, 2), True), ((job ^ 1, 0, 1, 2), False), ((job, 1, 1, 2), False), ((job, 0, 1, 3), False),
                             ((job, 0, 0, 2), False), ((job, 0, 7, 2), False)):
            hello = bridges._HELLO.pack(*words)
            said = b"".join(bridge._frame(bridge._links[0], bridges.HELLO, body=hello))
            found = bridge._who(handshake.Peer(socket.socket(), bridge._links[0].seed), said)
            wrong += [] if found == (1 if known else None) else [f"who says {words} is host {found}"]
    finally:
        ends.close()
    return _measured(wrong, 7)


# -- meeting -----------------------------------------------------------------------------------------------------------------------


def _meeting(*hosts: tuple[int, int, int, bytes], deadline: float = 20.0) -> list[Met | AlphaError]:
    """What each of these (number, hosts, ranks, secret) comes to, all at once on this machine."""
    found: list[Met | AlphaError] = [InputError("nothing")] * len(hosts)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])

    def come(i: int) -> None:
        number, count, ranks, secret = hosts[i]
        try:
            found[i] = meet(Across(number, count, "127.0.0.1", port, secret), ranks, i, 1000 + i, deadline)
            found[i].door.close()  # type: ignore[union-attr]
        except AlphaError as error:
            found[i] = error

    threads = [threading.Thread(target=come, args=(i,)) for i in range(len(hosts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def _met(rng: np.random.Generator) -> Measured:
    """Three hosts with 2, 1 and 3 ranks: all know the same job, the most starts that one had, and whose ranks are whose."""
    secret = secrets.token_bytes(16)
    found = _meeting((0, 3, 2, secret), (1, 3, 1, secret), (2, 3, 3, secret))
    parts = [range(2), range(2, 3), range(3, 6)]
    wrong = [f"host {i}: {m}" for i, m in enumerate(found)
             if not isinstance(m, Met) or (m.job, m.epoch, m.size, [h.ranks for h in m.hosts]) != (1000, 2, 6, parts)]
    wrong += [] if len({m.hosts for m in found if isinstance(m, Met)}) == 1 else ["hosts were told of different ports"]
    return _measured(wrong, 3)


def _not_met(rng: np.random.Generator) -> Measured:
    """A host that never comes, two of one number, another count, another secret: each is named, on all hosts that are there."""
    a, b = secrets.token_bytes(16), secrets.token_bytes(16)
    wrong = list[str]()
    for name, hosts, says in (
        ("one is missing", [(0, 3, 1, a), (1, 3, 1, a)], ["hosts never came: 2", "not all hosts came"]),
        ("two of one number", [(0, 3, 1, a), (1, 3, 1, a), (1, 3, 1, a)], ["hosts never came: 2", None, None]),
        ("another count", [(0, 2, 1, a), (1, 3, 1, a)], ["hosts never came: 1", "host 1 was told of 3 hosts, host 0 of 2"]),
        ("another secret", [(0, 2, 1, a), (1, 2, 1, b)], ["hosts never came: 1", "host 0 was never met"]),
    ):
        found = [str(f) for f in _meeting(*hosts, deadline=1.5)]
        wrong += [f"{name}: {f.splitlines()[0]}" for f, said in zip(found, says) if said is not None and said not in f]
        if name == "two of one number" and not any("no place for a host 1" in f for f in found[1:]):
            wrong.append(f"{name}: {found[1:]}")
    return _measured(wrong, 8)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "transport.tcp": {"parity": [("random", _random), ("groups", _groups), ("channels", _channels), ("streams", _streams),
                                 ("early", _early), ("met", _met)],
                      "determinism": [("bits", _bits)],
                      "faults": [("cut", _cut), ("flipped", _flipped), ("strangers", _strangers), ("silent", _silent),
                                 ("rank", _died("rank", "rank {} died")), ("host", _died("host", "out of reach")), ("frames", _frames),
                                 ("unsound", _unsound),
                                 ("handshakes", _handshakes), ("crowd", _crowd), ("false doors", _false_doors), ("not met", _not_met)]},
}
