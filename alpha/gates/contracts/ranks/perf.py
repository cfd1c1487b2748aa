"""The perf gate of collectives: the share of the ceiling that a call among two ranks reaches, both measured in the same job. Floor 7.

Each rank has a core of its own: two that wait for each other on one core take turns by the scheduler's clock, which is then what is timed.
The ceiling of a call is the larger of two times. One is that of a hop: a rank writes a counter in the memory that both share, and the other
one sees it. The other is that of its bytes: those that must cross (`wire_bytes`), at the rate at which each core copies while both do, over
half as many bytes. Calls follow each other so that each needs the one before: roots, senders and receivers take turns.

Blocks of calls and of probes alternate in random order. A block is a drawn number of calls, end to end, from when both ranks have met over
the counters; it lasts from the first rank's start to the last rank's end. Only blocks count in which neither rank lost its core to other
work (getrusage(2), ru_nivcsw), for a rank that waits lets others have it: a rule that never looks at the times. Of those the fastest block
counts, as in gates/perf.py, and the best of several tries in fresh processes. Where they are too few, the case has no entry, so the judge
says NOT_RUN, and the record's environment says why (`not_measured`).

Cores of a virtual machine move, and shares with them. So the environment holds the fastest hop of all cases too (`hop_ns`): the judge takes
no slowness for the code's where that is another distance than the pinned one (registry/distance.py). A hop calls nothing of a collective.

Operands are new in each block and change in one place before every call, results are poisoned, and after some blocks, drawn, and the last
the results are held against the bits that the row promises. The rule that chooses algorithms is the default one, not one of links measured
at that moment.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from alpha.comm import catalogue
from alpha.comm.shm import SharedMemory
from alpha.comm.world import WORLD, World
from alpha.component import Component
from alpha.flops.v1 import VERSION as FLOPS
from alpha.gates import perf
from alpha.gates.contracts.ranks.calls import BY_NAME
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.gates.subjects import fresh_nonce, generator, make_record, poison, short
from alpha.ops.collectives import promised, wire_bytes
from alpha.profile.noise import CLOCK, orders
from alpha.registry import distance
from alpha.registry.cases import CaseRecord, Share
from alpha.registry.record import Record
from alpha.types import TensorType

RANKS = 2
"""More of them share cores on small machines, where nothing of a collective's time repeats."""

SIZES = {"short": 1 << 10, "long": 1 << 20}
"""Case name -> bytes of the longer of operand and result: far less than one message, and several messages. A barrier has none."""

CALLS = {"short": 4, "long": 2}
"""Calls of a block, before the draw of up to half as many more; two at least, so that both ranks get something."""

HOPS, COPIES = 400, 8
"""The same of the probes."""

BLOCKS = 40
"""Blocks of a job."""

FEWEST, JOBS = 5, 10
"""Undisturbed blocks of calls and of each probe without which a case is not measured, and jobs after which it is given up."""

KEPT = 20
"""Times of the fastest blocks that a record holds."""

LATE = 0.0002
"""Seconds by which a rank comes late to the barriers that are looked at: far longer than one takes."""

SPINS = 2000
"""Looks at a counter before a rank lets others have its core."""

TOUCHED = 64
"""Places that calls change, in turn."""


class Disturbed(Exception):
    """Other work took the ranks' cores too often for what is left to be believed."""


def measure(component: Component, nonce: str | None = None, *, tries: int | None = None) -> Record:
    """Run the gate; the verdict is the judge's. `tries`: see `perf.best_of`; given, results are not held against the row."""
    nonce, op, todo = nonce or fresh_nonce(), str(component.op), sizes(component)
    line, found, having, hops = perf.lines(component), list[Share](), cores(), list[float]()
    refused = [] if len(having) >= RANKS else [f"{RANKS} ranks need a core each, and this process may use {len(having)}"]
    for name, nbytes in todo.items() if not refused else ():
        rng = generator(nonce, component.id, "perf", name)
        try:
            once = partial(_case, op, name, nbytes, having[:RANKS], rng, tries is None, hops)
            found.append(perf.best_of(line.get(name), tries, once))
        except Disturbed as error:
            refused.append(f"{name}: {error}")
    more = {"not_measured": "; ".join(refused)} if refused else {}
    more |= {distance.HOP: f"{min(hops):.0f}"} if hops else {}
    return make_record(component, "perf", nonce, len(todo), found, flops=FLOPS, **more)


def sizes(component: Component) -> Mapping[str, int]:
    """Case name -> bytes."""
    return {"short": 0} if component.op == "barrier" else SIZES


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record holds (expected.py)."""
    return [(Share, name) for name in sizes(component)]


def cores() -> list[int]:
    """Processors that this process may use, those that share a core with one named before behind all others."""
    seen: set[str] = set()
    alone, sharing = list[int](), list[int]()
    for i in sorted(os.sched_getaffinity(0)):
        at = Path(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list")
        siblings = at.read_text() if at.is_file() else str(i)
        (sharing if siblings in seen else alone).append(i)
        seen.add(siblings)
    return alone + sharing


def _case(op: str, name: str, nbytes: int, on: list[int], rng: np.random.Generator, checked: bool, hops: list[float]) -> Share:
    """Jobs of two ranks until enough of their blocks were undisturbed, and what these say. `hops`: gets ns of the fastest hop. Disturbed
    where they never are."""
    times: dict[str, list[float]] = {}
    for _ in range(JOBS):
        ended = members().run(at_speed, RANKS, op, name, nbytes, int(rng.integers(1 << 30)), on, checked)
        wrong = [why for e in sorted(ended, key=_told) if (why := _why(e))]
        if wrong:
            return Share(name=name, share=0.0, times_ns=(), note=wrong[0][:120])
        for arm in ended[0].result["blocks"]:
            times.setdefault(arm, []).extend(_undisturbed([e.result["blocks"][arm] for e in ended]))
        if min(map(len, times.values())) >= FEWEST:
            break
    else:
        raise Disturbed(f"other work took a core in all but {min(map(len, times.values()))} of {JOBS * BLOCKS} blocks")
    hop = min(times["hop"])
    hops.append(hop)
    moved = _crossing(op, nbytes) * min(times["copy"]) / _copied(nbytes) if "copy" in times else 0.0
    taken = sorted(round(t) for t in times["calls"])
    return Share(name=name, share=short(max(hop, moved) / taken[0], 4), times_ns=tuple(taken[:KEPT]),
                 ceiling_ns=round(max(hop, moved)), limit="bytes" if moved >= hop else "hops",
                 shape=" ".join(map(str, _types(op, nbytes)))[:120])


def _undisturbed(ranks: list[list[Block]]) -> Iterator[float]:
    """Nanoseconds of a call in each block in which no rank lost its core: from the first one's start to the last one's end."""
    for same in zip(*ranks):
        if not any(b.lost for b in same):
            yield (max(b.end for b in same) - min(b.start for b in same)) / same[0].calls


def _told(ended: Ended) -> bool:
    """Whether a member ended because another one did: its own text says less."""
    return ended.rank is not None


def _why(ended: Ended) -> str:
    """What went wrong with a member; '' where nothing did."""
    if ended.result is None:
        lines = ended.error.strip().splitlines() or [f"a rank ended with status {ended.status}"]
        return lines[0 if _told(ended) else -1]
    return str(ended.result["wrong"])


# -- operands ------------------------------------------------------------------------------------------------------------------------


def _types(op: str, nbytes: int) -> tuple[TensorType, ...]:
    """Of a member's operand, as the row counts it; a receiver's is what is sent to it."""
    count = nbytes // 4 // (RANKS if op == "all_gather" else 1)
    return () if op == "barrier" else (TensorType((count,), "f32"),)


def _crossing(op: str, nbytes: int) -> int:
    """Bytes that must go from one member to another in one call."""
    return wire_bytes("send" if op == "receive" else op, _types(op, nbytes), {"size": RANKS}, "direct")


def _copied(nbytes: int) -> int:
    """Bytes that the probe copies: half as many, so that it lives in the same level of cache or a nearer one."""
    return nbytes // 2


def attributes(op: str, turn: int, me: int) -> dict[str, Any]:
    """Of call number `turn` of a block as member `me` makes it: roots and senders take turns."""
    found: dict[str, Any] = {"group": WORLD, "size": RANKS}
    if op in ("all_reduce", "reduce_scatter"):
        found["reduce"] = "sum"
    elif op in ("broadcast", "reduce"):
        found["root"] = turn % RANKS
    elif op in ("send", "receive"):
        found["to" if turn % RANKS == me else "source"] = 1 - me
    return found


# -- what the ranks do ---------------------------------------------------------------------------------------------------------------


class Counters:
    """A counter of each of two ranks, in memory that both share: the least by which one can tell the other anything. They are those of a
    link over which nothing is sent.

    said, heard: one more number of each rank, its own and the other one's.
    """

    def __init__(self, world: World) -> None:
        transport, other = world.add_group("counters", [range(RANKS)]).transport, 1 - world.rank
        assert isinstance(transport, SharedMemory)
        self._world, self._turn = world, 0
        self._own, self._other = transport._out[other].sent, transport._in[other].sent
        self.said, self.heard = transport._out[other].released, transport._in[other].released

    def hop(self, times: int) -> None:
        """So many times one rank tells the other, in turns."""
        me, own = self._world.rank, self._own
        for turn in range(self._turn + 1, self._turn + 1 + times):
            if turn % RANKS == me:
                own[0] = turn
            else:
                self._wait(turn)
        self._turn += times

    def _wait(self, turn: int) -> None:
        other, spins = self._other, 0
        while other[0] < turn:
            spins += 1
            if spins == SPINS:
                spins = 0
                self._world.advance()  # RankError where the other one failed
                os.sched_yield()


class Calls:
    """Calls of one collective as this rank makes them, and what they must leave behind."""

    def __init__(self, world: World, op: str, nbytes: int, counters: Counters, rng: np.random.Generator) -> None:
        self._op, self._me, self._types, self._counters, self._early = op, world.rank, _types(op, nbytes), counters, 0
        count = self._types[0].size if self._types else 0
        self._bases = [rng.standard_normal(count).astype(np.float32) for _ in range(RANKS)]
        self._places = rng.integers(0, max(count, 1), TOUCHED).tolist()
        self._x = np.zeros(max(count, 1), np.float32)
        self._out = np.zeros({"all_gather": count * RANKS, "reduce_scatter": count // RANKS}.get(op, count), np.float32)
        cpu = SimpleNamespace(world=world)
        self._runs = [getattr(catalogue, side)(cpu, [self._x[:count]], [self._out], attributes(op, turn, self._me))
                      for turn in range(RANKS) for side in [self._side(turn)]]
        if op == "barrier":
            self._runs = [partial(self._met, run) for run in self._runs]

    def _met(self, barrier: Callable[[], None]) -> None:
        """A barrier leaves no result: count those that let this rank go before the other one has come as often."""
        said = self._counters.said
        said[0] += 1
        barrier()
        self._early += self._counters.heard[0] < said[0]

    def _side(self, turn: int) -> str:
        if self._op not in ("send", "receive"):
            return self._op
        return "send" if turn % RANKS == self._me else "receive"

    def renew(self, rng: np.random.Generator) -> None:
        """Other contents, the same draw on both ranks, and no result."""
        self._factor = np.float32(1 + 0.5 * rng.random())
        self._x[: self._bases[0].size] = self._bases[self._me] * self._factor
        poison(self._out)

    def __call__(self, times: int) -> None:
        """So many calls; before each one place of the operand changes."""
        x, places, runs = self._x, self._places, self._runs
        for turn in range(times):
            x[places[turn % TOUCHED]] = turn
            runs[turn % RANKS]()

    def wrong(self, times: int) -> str:
        """What is wrong with the result of the last call that gave this rank one; '' where nothing is."""
        if self._op == "barrier":
            for late in range(RANKS):  # two that go in step see no barrier that holds nobody
                if late == self._me:
                    time.sleep(LATE)
                self._runs[0]()
            return f"a rank left {self._early} barriers before the other one came" if self._early else ""
        exchange = self._op in ("send", "receive")
        turn = times - 1 - (exchange and (times - 1) % RANKS == self._me)  # of an exchange, the last one that came here
        xs = [b * self._factor for b in self._bases]
        for x in xs:
            for k in range(turn + 1):
                x[self._places[k % TOUCHED]] = k
        op, place, sender = self._op, self._me, 1 - self._me
        given: list[tuple[np.ndarray, ...]] = [(x,) for x in xs]
        if exchange:  # the row counts the sender first
            op, given, place = "send", [(xs[sender],), ()], 1
        want = promised(BY_NAME[op], given, self._types, attributes(op, turn, sender if exchange else self._me))[place][0]
        return "" if want.tobytes() == self._out.tobytes() else "timed calls gave wrong results"


class Block(NamedTuple):
    """One block on one rank. start, end: ns of a clock that both ranks share; lost: how often another process got this rank's core though
    it could have gone on."""

    start: int
    end: int
    calls: int
    lost: int


def at_speed(world: World, op: str, name: str, nbytes: int, seed: int, on: list[int], checked: bool) -> dict[str, Any]:
    """blocks: arm -> its blocks on this rank, in order; wrong: what was, or ''."""
    os.sched_setaffinity(0, {on[world.rank]})
    rng, counters = np.random.default_rng(seed), Counters(world)
    calls = Calls(world, op, nbytes, counters, rng)
    arms: dict[str, tuple[Callable[[int], None], int]] = {"calls": (calls, CALLS[name]), "hop": (counters.hop, HOPS)}
    if name == "long":
        arms["copy"] = partial(_copy, np.ones(_copied(nbytes), np.uint8), np.zeros(_copied(nbytes), np.uint8)), COPIES
    taken: dict[str, list[Block]] = {arm: [] for arm in arms}
    wrong = ""
    for order in orders(len(arms), BLOCKS + 1, rng):
        for i in order:
            arm, (call, fewest) = list(arms)[i], list(arms.values())[i]
            times = fewest + int(rng.integers(0, fewest // 2 + 1))  # the same draw on both ranks
            if arm == "calls":
                calls.renew(rng)
            taken[arm].append(_block(counters, call, times))
            if arm == "calls" and checked and (rng.random() < 0.3 or len(taken[arm]) > BLOCKS):
                found = calls.wrong(times)  # of all ranks, whatever one of them has found before: barriers are held in it
                wrong = wrong or found
    if time.perf_counter_ns is not CLOCK:
        wrong = "the clock was patched"
    return {"blocks": {arm: blocks[1:] for arm, blocks in taken.items()}, "wrong": wrong}  # the first block warms up


def _block(counters: Counters, call: Callable[[int], None], times: int) -> Block:
    counters.hop(2 * RANKS)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    counters.hop(RANKS)
    start = CLOCK()
    call(times)
    end = CLOCK()
    return Block(start, end, times, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - before)


def _copy(source: np.ndarray, target: np.ndarray, times: int) -> None:
    for _ in range(times):
        np.copyto(target, source)
