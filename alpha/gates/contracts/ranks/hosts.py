"""Cases of a job on several hosts: what bridges carry, what they survive, and what they name. Floor 7.

Hosts are on this machine (network.py): each has a segment, a bridge and its ranks; connections between them go over the loopback device.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from alpha.comm import bridge as bridges
from alpha.comm import collectives, line
from alpha.comm.handshake import knock
from alpha.comm.links import measure
from alpha.comm.meet import Across, Met, meet
from alpha.comm.message import HEADER, SPACE, About
from alpha.comm.message import header as make_header
from alpha.comm.shm import LENT_BYTES, SharedMemory
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts import of_settings
from alpha.gates.contracts.ranks import bridging, connections, doors, frames, places
from alpha.gates.contracts.ranks.calls import DTYPES, OPS, Mute, one, summed
from alpha.gates.contracts.ranks.collectives import SHORT, SMALL, SOUND, at_groups, at_random, at_vjp, seed_of, sound
from alpha.gates.contracts.ranks.ends import carried
from alpha.gates.contracts.ranks.members import Ended, at_once, in_threads, members
from alpha.gates.contracts.ranks.network import Network, Wire
from alpha.gates.contracts.ranks.support import Case, Found, hash_of, measured
from alpha.gates.contracts.ranks.transports import at_channels

ALONE_AND_APART: tuple[dict[str, Any], ...] = ({}, {"hosts": 2}, {"hosts": 4})
COUNTED = 240_000
"""Elements of a sum whose bytes between hosts are counted: all pieces are equal."""
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


def at_lent_lengths(world: World, seed: int) -> Found:
    """Messages there and back of exactly the length from which memory is lent, and of one element less and more."""
    group, wrong = world.group(WORLD), list[str]()
    for more in (-1, 0, 1):
        for sender in (0, 1):
            x = np.random.default_rng((seed, more + 1, sender)).standard_normal(LENT_BYTES // 4 + more).astype(np.float32)
            out = np.empty_like(x)
            if world.rank == sender:
                collectives.send(group, x, to=1 - sender)
            else:
                collectives.receive(group, out, source=sender)
                wrong += [] if out.tobytes() == x.tobytes() else [f"{x.nbytes} bytes came otherwise"]
    return wrong, 6


def _lent_lengths(rng: np.random.Generator) -> Measured:
    return sound([partial(members().run, at_lent_lengths, 2, seed_of(rng), hosts=2, deadlines=SOUND)])


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
        ends = frames.Ends(payload_bytes=1 << 16)
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
    return measured(wrong, 3)


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
    """Several connections that break anywhere, and one that breaks in the last bytes, when the sender has nothing to do but stay."""
    wires = [(3, Wire(cuts=3, most=500_000, seed=seed_of(rng))), (1, Wire(cuts=3, least=580_000, most=600_000, seed=seed_of(rng)))]
    return sound([partial(members().run, at_leaving_early, 2, seed_of(rng), hosts=2, streams=streams, wire=wire, deadlines=SOUND)
                  for streams, wire in wires])


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
    return measured(wrong, 5)


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
    return measured(wrong, 12, hash_of(*sorted(map(str, found))))


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
    return measured(wrong, 6)


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
    return measured(wrong, 2)


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
    return measured(wrong, len(names), hash_of(says))


# -- meeting -----------------------------------------------------------------------------------------------------------------------


def _meeting(*hosts: tuple[int, int, int, bytes], deadline: float = 20.0, most: int = 0) -> list[Met | Exception]:
    """What each of these (number, hosts, ranks, secret) comes to, all at once on this machine. Host 0 is the last to give up: the others
    hear nothing until their own deadline. Each was started as often as its number says, host 0 `most` times."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])

    def come(i: int) -> Met:
        number, count, ranks, secret = hosts[i]
        met = meet(Across(number, count, "127.0.0.1", port, secret, 3 + i), ranks, i or most, 1000 + i,
                   deadline if number else deadline + 1.0)
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
    again = [m.epoch if isinstance(m, Met) else m for m in _meeting((0, 2, 1, secret), (1, 2, 1, secret), most=7)]
    wrong += [] if again == [7, 7] else [f"the first was started 7 times more often: {again}"]
    return measured(wrong, 4)


def _not_met(rng: np.random.Generator) -> Measured:
    """A host that never comes, two of one number, another count, another secret, more ranks than a job has: each is named, on all hosts
    that are there."""
    a, b = secrets.token_bytes(16), secrets.token_bytes(16)
    wrong = list[str]()
    for name, hosts, says in (
        ("one is missing", [(0, 3, 1, a), (1, 3, 1, a)], ["hosts never came: 2", "not all hosts came"]),
        ("two of one number", [(0, 3, 1, a), (1, 3, 1, a), (1, 3, 1, a)], ["hosts never came: 2", None, None]),
        ("another count", [(0, 2, 1, a), (1, 3, 1, a)], ["hosts never came: 1", "host 1 was told of 3 hosts, host 0 of 2"]),
        ("another secret", [(0, 2, 1, a), (1, 2, 1, b)], ["hosts never came: 1", "host 0 was never met"]),
        ("ranks too many", [(0, 2, 40, a), (1, 2, 25, a)], ["a job has another number of ranks\n  came:     65 on 2 hosts",
                                                            "host 0 has no place for this host\n  came:     a job has another number"]),
    ):
        found = [str(f) for f in _meeting(*hosts, deadline=1.5)]
        wrong += [f"{name}: {f.splitlines()[0]}" for f, said in zip(found, says) if said is not None and said not in f]
        if name == "two of one number" and not any("no place for a host 1" in f for f in found[1:]):
            wrong.append(f"{name}: {found[1:]}")
    return measured(wrong, 10)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "transport.tcp": {"parity": [("random", _random), ("groups", _groups), ("channels", _channels), ("streams", _streams),
                                 ("lent lengths", _lent_lengths),
                                 ("early", _early), ("straight", _straight), ("carried", carried), ("met", _met), ("hosts", _by_hosts),
                                 ("connection", of_settings.connection), ("together", of_settings.together), ("adjoint", _adjoint),
                                 ("machines", places.machines), ("ways", places.ways), ("links", places.links), ("timed", places.timed),
                                 ("lines", doors.lines),
                                 ("called", connections.calls), ("kept", connections.kept), ("withdrawn", connections.withdrawn),
                                 ("freed", connections.freed), ("unasked", connections.unasked), ("listened", connections.listened),
                                 ("room", connections.room), ("handed", connections.handed), ("asked", bridging.asked),
                                 ("knocks", bridging.knocks), ("said of ranks", bridging.words), ("told anew", bridging.told_anew),
                                 *frames.PARITY],
                      "determinism": [("bits", _bits)],
                      "faults": [("lingering", connections.lingering), ("cut", _cut), ("flipped", _flipped),
                                 ("strangers", _strangers), ("silent", _silent), ("rank", _died("rank", "rank {} died")),
                                 ("host", _died("host", "out of reach")), ("other lengths", _other_lengths), ("not met", _not_met),
                                 ("strangers at a door", doors.strangers), ("other doors", doors.false_doors),
                                 ("hellos", doors.frames), ("numbers", doors.places), ("turned away", doors.turned_away),
                                 ("overrun", connections.overrun), ("guests", bridging.guests), ("lost", bridging.lost),
                                 ("ends", bridging.ends), ("processes", bridging.processes), *frames.FAULTS]},
}
