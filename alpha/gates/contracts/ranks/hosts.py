"""Cases of a job on several hosts: what bridges carry, what they survive, and what they name. Floor 7.

Hosts are on this machine (network.py): each has a segment, a bridge and its ranks; connections between them go over the loopback device.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from alpha.comm import bridge as bridges
from alpha.comm import collectives, handshake, line
from alpha.comm import meet as meets
from alpha.comm.bridge import Bridge, Host
from alpha.comm.handshake import Door, knock
from alpha.comm.line import Broken, Line
from alpha.comm.links import measure
from alpha.comm.meet import Across, Met, meet
from alpha.comm.message import HEADER, SPACE, About
from alpha.comm.message import header as make_header
from alpha.comm.process import Served
from alpha.comm.segment import Segment
from alpha.comm.shm import LENT_BYTES, SharedMemory
from alpha.comm.streams import NOBODY, Streams
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts import of_settings
from alpha.gates.contracts.ranks.calls import DTYPES, OPS, Mute, one, summed
from alpha.gates.contracts.ranks.collectives import SHORT, SMALL, SOUND, at_groups, at_random, at_vjp, seed_of, sound
from alpha.gates.contracts.ranks.ends import carried
from alpha.gates.contracts.ranks.jobs import Case, Found, _hash, _measured, at_channels
from alpha.gates.contracts.ranks.members import Ended, at_once, in_threads, members
from alpha.gates.contracts.ranks.network import SECRET, Network, Wire

ALONE_AND_APART: tuple[dict[str, Any], ...] = ({}, {"hosts": 2}, {"hosts": 4})
COUNTED = 240_000
"""Elements of a sum whose bytes between hosts are counted: all pieces are equal."""
OF_RANKS = (line.DATA, line.CREDIT, line.RESUME)
"""Frames that ranks say to each other; the others bridges do."""
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


def at_streams(world: World, seed: int, count: int, breaks: bool) -> Found:
    """Messages of every length, as fast as they go, both ways at once: each is delivered once, in order, whole. `breaks`: connections may
    break on the way; else none does, for nobody but this code could be the cause."""
    group, rng, wrong = world.group(WORLD), np.random.default_rng(seed), list[str]()
    for i, n in enumerate(map(int, rng.integers(0, 200_000, count))):
        x = np.random.default_rng((seed, i)).integers(0, 1 << 30, n).astype(np.int32)
        out = np.empty_like(x)
        if (world.rank + i) % 2:
            collectives.send(group, x, to=1 - world.rank)
            x.fill(-1)  # it is the sender's again, whatever has to be sent again
        else:
            collectives.receive(group, out, source=1 - world.rank)
            wrong += [] if out.tobytes() == x.tobytes() else [f"message {i} of {n} elements came otherwise"]
    wrong += [] if breaks or not world.broken else [f"{world.broken} connections broke by themselves"]
    return wrong, count


def _streams(rng: np.random.Generator) -> Measured:
    """Through one connection, and through several that overtake each other."""
    return sound([partial(members().run, at_streams, 2, seed_of(rng), 40, False, hosts=2, streams=streams, deadlines=SOUND)
                  for streams in (1, 4)])


def at_other_lengths(world: World) -> None:
    """A long message comes where another length is expected."""
    group, x = world.group(WORLD), np.ones(40_000 + 20_000 * world.rank, np.float32)
    if world.rank == 0:
        collectives.send(group, x, to=1)
        collectives.barrier(group)
    else:
        collectives.receive(group, x, source=0)


def _other_lengths(rng: np.random.Generator) -> Measured:
    return _named(members().run(at_other_lengths, 2, hosts=2, deadlines=SHORT), "runs another collective", {0: 0, 1: 0})


def _straight(rng: np.random.Generator) -> Measured:
    """A payload comes in where it is expected, unless it has begun to come, and counts when all of it has come. What was lent goes out from
    where it lies. After a call that failed nobody reads or writes there any more, and what was on its way comes again."""
    wrong, n = list[str](), LENT_BYTES + 4096
    for begun, fails in ((False, False), (True, False), (False, True)):
        ends = Ends(payload_bytes=1 << 16)
        try:
            near, far = ends.lanes
            lent, out, body = (np.frombuffer(bytearray(rng.bytes(n)), np.uint8) for _ in range(3))
            about = About("send", "bool", 0, 1, n)
            header, payload = near.out.slots[0][:SPACE], lent.tobytes()
            header[: HEADER.size] = make_header(about, job=0, epoch=0, sender=0, sequence=0, chunk=0, nbytes=n)
            said, kept = line.frame(7, line.DATA, 0, 0, 1, 0, 0, bytes(header) + payload), out.tobytes()
            cut = int(rng.integers(line.HEAD_BYTES + SPACE + 1, len(said)))
            if not begun:
                far.expect(0, out.data)
            wrong += ["it broke"] if ends.say(said[:cut], to_bridge=False) else []
            far.expect(0, body.data)
            if fails:
                far.withdraw()
                kept = out.tobytes()
                with suppress(OSError):  # that connection was dropped
                    ends.say(said[cut:], to_bridge=False)
                near.lend(0, lent.data)
                near.out.sent[0] = 1
                near.withdraw()
                lent.fill(0)
                ends.connect()
            else:
                wrong += ["it counts early"] if far.back.sent[0] else []
                ends.say(said[cut:], to_bridge=False)
            wrong += [] if far.back.sent[0] == 1 else [f"{far.back.sent[0]} messages came"]
            wrong += [] if bytes(far.came(0, n)) == payload else ["it came otherwise"]
            if (out.tobytes() == payload) == (begun or fails) or (begun or fails) != (out.tobytes() == kept):
                wrong.append(f"what was expected {'late' if begun else 'and withdrawn' if fails else 'in time'} is elsewhere")
        finally:
            ends.close()
    return _measured(wrong, 3)


def at_leaving_early(world: World, seed: int) -> Found:
    """One rank sends and leaves, while the connection breaks: what was sent is sent again before that rank is gone. The other one receives
    late, and goes on when a host that is gone would long have been given up."""
    group, x = world.group(WORLD), np.random.default_rng(seed).standard_normal(150_000).astype(np.float32)
    out = np.empty_like(x)
    if world.rank == 0:
        collectives.send(group, x, to=1)
    else:
        time.sleep(0.5)
        collectives.receive(group, out, source=0)
        time.sleep(bridges.BROKEN_S + 0.6)
        world.advance()
    return ([] if world.rank == 0 or out.tobytes() == x.tobytes() else ["what was sent before leaving came otherwise"]), 1


def _early(rng: np.random.Generator) -> Measured:
    """Also of several connections, of which some break."""
    return sound([partial(members().run, at_leaving_early, 2, seed_of(rng), hosts=2, streams=streams,
                          wire=Wire(cuts=3, most=500_000, seed=seed_of(rng)), deadlines=SOUND) for streams in (1, 3)])


def at_silence_between(world: World, seed: int) -> Found:
    """Messages that are sent and taken while the rank at the other end computes, so that nobody waits for what the connection lost."""
    group, wrong = world.group(WORLD), list[str]()
    for i in range(6):
        x = np.random.default_rng((seed, i)).standard_normal(9000).astype(np.float32)
        out = np.empty_like(x)
        if world.rank == i % 2:
            collectives.send(group, x, to=1 - world.rank)
            time.sleep(0.2)
        else:
            collectives.receive(group, out, source=1 - world.rank)
            wrong += [] if out.tobytes() == x.tobytes() else [f"message {i} came otherwise"]
    return wrong, 6


def at_computing(world: World) -> Found:
    """Ranks that compute for longer than a host may be out of reach, while bridges alone talk, over connections that break early."""
    end = time.monotonic() + bridges.BROKEN_S + 1.5
    while time.monotonic() < end:
        time.sleep(0.1)
        world.advance()
    collectives.barrier(world.group(WORLD))
    return [], 1


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


class Counted(Mute):
    """A transport that counts the bytes of payloads that leave this host."""

    def __init__(self, transport: SharedMemory, away: Sequence[bool]) -> None:
        super().__init__(transport)
        self._away, self.nbytes = away, 0

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        """Counted and sent."""
        self.nbytes += payload.size * self._away[to]
        self._transport.send(to, about, chunk, payload, kept=kept)


TOWARDS = {"all_reduce": (2, ("direct",), ("hosts",)), "reduce_scatter": (1, ("direct",), ("hosts",)),
           "all_gather": (1, ("direct",), ("hosts",)), "broadcast": (1, ("direct",), ("halving", "ring")), "reduce": (1, (), ("",))}
"""Op -> (how often its longest operand goes from a host to each other one, algorithms that are flat, algorithms that are not)."""


def at_hosts(world: World, seed: int) -> tuple[list[str], dict[tuple[str, str], int], tuple[int, ...]]:
    """Collectives that add or gather inside hosts first have the bits of the tree: short ones, long ones, of all types, in place or not.
    Then what leaves this host, by op and algorithm, where the longest operand has COUNTED elements, and the host of each rank as it was
    found."""
    group, rng = world.group(WORLD), np.random.default_rng(seed)
    world.rule = measure(world).rule()
    kinds = [(dtype, reduce) for dtype in DTYPES for reduce in ("sum", "average") if summed("all_reduce", dtype, reduce)]
    asked = [("all_reduce", "hosts", *kind) for kind in 2 * kinds] + [("reduce_scatter", "hosts", *kind) for kind in kinds]
    asked += [(op, name, DTYPES[rng.integers(5)], "sum") for op in ("all_gather", "broadcast", "reduce") for name in 2 * TOWARDS[op][2]]
    wrong = [one(group, op, dtype, int(rng.integers(1, 70_000)), algorithm=name, reduce=reduce, in_place=bool(rng.integers(2)),
                 seed=seed + i) for i, (op, name, dtype, reduce) in enumerate(asked)]
    whole, sent = group.transport, dict[tuple[str, str], int]()
    assert isinstance(whole, SharedMemory)
    x = np.ones(COUNTED, np.float32)
    piece = x[COUNTED // group.size * group.index :][: COUNTED // group.size]
    for op, (_, flat, by_hosts) in TOWARDS.items():
        ins, outs = piece if op == "all_gather" else x, piece if op == "reduce_scatter" else x
        for name in (*flat, *by_hosts):
            group.transport = counted = Counted(whole, [r not in world.here for r in group.members])
            more: dict[str, Any] = {"algorithm": name} if name else {}
            more |= {"root": world.size - 1} if op in ("broadcast", "reduce") else {}
            getattr(collectives, op)(group, ins, outs, **more)
            sent[op, name] = counted.nbytes
    group.transport = whole
    return [w for w in wrong if w], sent, world.rule.hosts


def _by_hosts(rng: np.random.Generator) -> Measured:
    """Two and three hosts with one, two and four ranks each, and two with unlike numbers. Of m ranks on each of k hosts 2 n (k - 1) bytes
    of a sum of n leave hosts, n (k - 1) of other ops, and m times as many where they are flat. Where the numbers are unlike no host adds
    or gathers first."""
    wrong, total = list[str](), 4 * COUNTED
    for size, hosts, together in ((4, 2, 2), (6, 3, 2), (8, 2, 4), (3, 3, 1), (5, 2, 1)):
        ended = members().run(at_hosts, size, seed_of(rng), hosts=hosts, deadlines=SOUND)
        wrong += [f"rank {r} of {size}: {(e.result[0] if e.result else e.error)[-200:]}" for r, e in enumerate(ended)
                  if e.result is None or e.result[0]]
        if any(e.result is None for e in ended):
            continue
        by = {asked: sum(e.result[1][asked] for e in ended) for asked in ended[0].result[1]}
        layout = ended[0].result[2]
        wrong += [] if len(set(layout)) == hosts and all(e.result[2] == layout for e in ended) else [f"hosts are taken to be {layout}"]
        if size == hosts * max(together, 1):
            expected = {(op, name): times * total * (hosts - 1) * (together if name in flat else 1)
                        for op, (times, flat, by_hosts) in TOWARDS.items() for name in (*flat, *by_hosts)}
            wrong += [f"among {size} on {hosts} hosts {by[asked]} bytes of {' '.join(asked)} leave hosts, not {expected[asked]}"
                      for asked in expected if by[asked] != expected[asked]]
    return _measured(wrong, 5)


def _adjoint(rng: np.random.Generator) -> Measured:
    """Gradients: the rows' vjps, run over two hosts, stand against central differences of their oracles."""
    return sound([partial(members().run, at_vjp, 2 if op in ("send", "receive") else 3, op, seed_of(rng), hosts=2, deadlines=SOUND)
                  for op in OPS if op != "barrier"])


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
    jobs: list[Callable[[], list[Ended]]]
    jobs = [partial(members().run, at_random, size, "all_reduce", seed, hosts=size, wire=wire, deadlines=SOUND) for size in (2, 3)]
    jobs += [partial(members().run, at_silence_between, 2, seed, hosts=2, wire=wire, deadlines=SOUND),
             partial(members().run, at_computing, 2, hosts=2, wire=Wire(cuts=3, most=1500, seed=seed), deadlines=SOUND),
             partial(members().run, at_streams, 2, seed, 40, True, hosts=2, streams=4, wire=Wire(cuts=12, most=400_000, seed=seed),
                     deadlines=SOUND)]
    return sound(jobs)


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
        ended = in_threads(2, partial(at_random, op="all_reduce", seed=seed), segments=network.segments, deadlines=SOUND)
    finally:
        stop.set()
        thread.join()
        wrong += network.close()
    wrong += [f"rank {r}: {str(e)[-100:]}" for r, e in enumerate(ended) if isinstance(e, Exception) or e[0]]
    wrong += [] if sent[0] else ["no stranger came"]
    return _measured(wrong, 2)


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
    return _measured(wrong, len(cases))


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
    return _measured(wrong, 120)


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
    return _measured(wrong, len(cuts))


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
    return _measured(wrong, len(orders))


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
    return _measured(wrong, 13)


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
    return _measured(wrong, counted)


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
    return _measured(wrong, len(steps))


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
    return _measured(wrong, 2)


# -- meeting -----------------------------------------------------------------------------------------------------------------------


def _meeting(*hosts: tuple[int, int, int, bytes], deadline: float = 20.0) -> list[Met | Exception]:
    """What each of these (number, hosts, ranks, secret) comes to, all at once on this machine. Host 0 is the last to give up: the others
    hear nothing until their own deadline."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])

    def come(i: int) -> Met:
        number, count, ranks, secret = hosts[i]
        met = meet(Across(number, count, "127.0.0.1", port, secret, 3 + i), ranks, i, 1000 + i, deadline if number else deadline + 1.0)
        met.door.close()
        return met

    return at_once([partial(come, i) for i in range(len(hosts))])


def _met(rng: np.random.Generator) -> Measured:
    """Three hosts with 2, 1 and 3 ranks: all know the same job, the most starts that one had, the streams of the first, and whose
    ranks are whose."""
    secret = secrets.token_bytes(16)
    found = _meeting((0, 3, 2, secret), (1, 3, 1, secret), (2, 3, 3, secret))
    parts = [range(2), range(2, 3), range(3, 6)]
    wrong = [f"host {i}: {m}" for i, m in enumerate(found)
             if not isinstance(m, Met) or (m.job, m.epoch, m.size, m.streams, [h.ranks for h in m.hosts]) != (1000, 2, 6, 3, parts)]
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
                                 ("early", _early), ("straight", _straight), ("carried", carried), ("met", _met),
                                 ("framing", _framing), ("whole", _whole), ("connection", of_settings.connection),
                                 ("together", of_settings.together), ("fastest", _fastest), ("hosts", _by_hosts), ("adjoint", _adjoint)],
                      "determinism": [("bits", _bits)],
                      "faults": [("cut", _cut), ("flipped", _flipped), ("strangers", _strangers), ("silent", _silent),
                                 ("rank", _died("rank", "rank {} died")), ("host", _died("host", "out of reach")), ("frames", _frames),
                                 ("unsound", _unsound), ("other lengths", _other_lengths),
                                 ("handshakes", _handshakes), ("crowd", _crowd), ("false doors", _false_doors), ("not met", _not_met),
                                 ("limits", _limits), ("told", _told), ("slow line", _slow_line)]},
}
