"""Cases of messages through shared memory. Floor 7.

Ranks are processes of a warm server (members.py). Functions named `at_*` run in each of them.
"""

from __future__ import annotations

import hashlib
from functools import reduce
from operator import and_, or_

import numpy as np

from alpha.comm import collectives
from alpha.comm.message import About
from alpha.comm.segment import Segment
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts.ranks import memory
from alpha.gates.contracts.ranks.messages import FAULTS, Link, faulty
from alpha.gates.contracts.ranks.support import Case, Found, job, measured


def _both_ways(rng: np.random.Generator) -> Measured:
    """Messages of every length from 0 to the longest, both ways, more than a ring holds: each is delivered once, in order, whole."""
    link, about, wrong, digest = Link(), About("all_reduce", "f32", 7, 3, 1000, "direct", "sum"), list[str](), hashlib.sha256()
    link.fresh()
    ends = link.sender, link.receiver
    sizes = [0, 1, 63, 64, 65, 4095, 4096, *map(int, rng.integers(0, 4097, 33))]
    for i, n in enumerate(sizes):
        for one, other in ((0, 1), (1, 0)):
            payload = rng.integers(0, 256, n).astype(np.uint8)
            given, progress = payload.copy(), [link.segment.control.progress(rank) for rank in (0, 1)]
            ends[one].send(other, about, i, given)
            said = [link.segment.control.progress(rank) - before for rank, before in enumerate(progress)]
            wrong += [] if said[one] > 0 == said[other] else [f"who sends gets on, and nobody else: {said}"]
            given[...] = 0  # what was handed over may be written again
            came = ends[other].receive(one, about, i, n)
            wrong += [] if came.tobytes() == payload.tobytes() else [f"message {i} of {n} bytes from {one}"]
            digest.update(came.tobytes())
            progress = [link.segment.control.progress(rank) for rank in (0, 1)]
            ends[other].release(one)
            said = [link.segment.control.progress(rank) - before for rank, before in enumerate(progress)]
            wrong += [] if said[other] > 0 == said[one] else [f"who releases gets on, and nobody else: {said}"]
    link.segment.close()
    return measured(wrong, 2 * len(sizes), digest.hexdigest())


def _full(rng: np.random.Generator) -> Measured:
    """A ring whose slots are all taken takes no more, and goes on once one is released; nothing that was taken is overwritten."""
    link, about, wrong = Link(), About("send", "f32", 7, 3, 1000), list[str]()
    link.fresh()
    payloads = [rng.integers(0, 256, 4096).astype(np.uint8) for _ in range(5)]
    for i in range(4):
        link.sender.send(1, about, i, payloads[i])
    held = link.receiver.receive(0, about, 0, 4096)
    try:
        link.sender.send(1, about, 4, payloads[4])
        wrong.append("a fifth message went into four slots")
    except RankError:
        pass
    wrong += [] if held.tobytes() == payloads[0].tobytes() else ["what was being read was overwritten"]
    link.segment.close()
    return measured(wrong, 2)


def _planted(fault: str) -> Case:
    """Faults in the memory between both ends: each is seen, its sender named, and nothing wrong delivered."""
    def case(rng: np.random.Generator) -> Measured:
        link, number = Link(), 20 if fault == "dropped" else 60  # of those that are dropped a third is waited for
        wrong = [w for w in (faulty(link, fault, rng) for _ in range(number)) if w]
        link.segment.close()
        return measured(wrong, number)
    return case


def _honest(rng: np.random.Generator) -> Measured:
    """The same harness without a fault sees none."""
    link = Link()
    found = {faulty(link, "none", rng) for _ in range(20)}
    link.segment.close()
    return measured(sorted(found - {"none: nobody saw it"}), 20)


def _numbers(rng: np.random.Generator) -> Measured:
    """Groups are told apart by all 32 bits of their number: among many names each bit is both 0 and 1, and no two numbers are equal."""
    found = list[int]()
    for _ in range(16):
        with World(Segment.create(1), 0) as world:
            found += [world.add_group(f"group {int(rng.integers(1 << 60))}", [(0,)]).number for _ in range(3)]
    every, some = reduce(and_, found), reduce(or_, found)
    wrong = [] if (every, some) == (0, 0xFFFFFFFF) else [f"bits {every | ~some & 0xFFFFFFFF:#x} of {len(found)} numbers never differ"]
    wrong += [] if len(set(found)) == len(found) else ["two groups have one number"]
    return measured(wrong, len(found))


def at_channels(world: World, seed: int) -> Found:
    """Groups of the same ranks have rings of their own: what one holds back, another passes."""
    first, second = world.group(WORLD), world.add_group("again", [range(world.size)])
    other, mine = (world.rank + 1) % 2, np.full(100, world.rank, np.float32)
    theirs, later = np.empty(100, np.float32), np.empty(100, np.float32)
    collectives.send(first, mine, to=other)
    collectives.send(second, mine + 10, to=other)
    collectives.receive(second, later, source=other)
    collectives.receive(first, theirs, source=other)
    wrong = [] if (theirs == other).all() and (later == other + 10).all() else ["a message went to another group"]
    return wrong, 2


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "transport.shm": {"parity": [("both-ways", _both_ways), ("full", _full), ("channels", job(at_channels, 2)), ("honest", _honest),
                                 ("numbers", _numbers), ("segments", memory.segments), ("fences", memory.fences),
                                 ("groups", memory.channels), ("copies", memory.copies)],
                      "determinism": [("both-ways", _both_ways)],
                      "faults": [*((fault, _planted(fault)) for fault in FAULTS), ("no memory", memory.no_memory)]},
}
