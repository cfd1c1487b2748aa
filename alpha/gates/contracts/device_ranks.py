"""Cases of the collectives among GPUs: bits, adjoints, repetition, faults. Floor 7.

Functions named `at_*` run in every rank, a process with a GPU of its own, and return (what was wrong, how many calls were held to it).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.backends.cuda.kernels import collectives
from alpha.backends.cuda.kernels.collectives import ITEM, Channel, How
from alpha.backends.cuda.launches import Operation
from alpha.backends.cuda.lib import copy, in_order
from alpha.comm import collectives as on_host
from alpha.comm.group import Group
from alpha.comm.watch import Deadlines
from alpha.comm.words import exchanged
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.cuda_runtime import Arena, Device, Span, capture, download, fill, upload
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.peers import Peers, devices_of
from alpha.errors import RankError
from alpha.gates.contracts.ranks.calls import BY_NAME, drawn
from alpha.gates.contracts.ranks.collectives import Case, seed_of, sound
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.ops.collectives import promised
from alpha.ops.numerics import UNIT_ROUNDOFF, round_to
from alpha.types import TensorType

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
COUNTS = (1, 31, 601, 8192, 20011)
"""Elements of a piece: one, primes, a whole round of a block, several with a rest."""
ROOM = 4 << 20
"""Bytes of an operand, or a result."""
SOUND_S = 10.0
"""Patience of waits that nobody is to try."""
GUARD = 4096
"""Bytes before and behind a result that nobody may write."""

Found = tuple[list[str], int]


def hows(op: str, count: int, dtype: str, in_place: bool) -> list[How]:
    """The algorithms that take a call."""
    found = [How("packets", 1), How("packets", 3)]
    whole = count * ITEM[dtype] % 16 == 0 or op in ("all_reduce", "broadcast", "send", "receive")
    if whole and not (in_place and op == "all_to_all"):
        found += [How("direct", 1), How("direct", 2)]
        if op in collectives.SUMS:
            found += [How("engine", 2), How("engine", 1, parts=1), How("engine", 3, parts=3)]
        else:
            found += [How("direct", 2, pull=True), How("engine"), How("engine", pull=True)]
        if op == "broadcast":
            found += [How("relayed", 1), How("relayed", 2)]
    return found


def bits_of(x: np.ndarray, dtype: str) -> np.ndarray:
    """Host array (bf16: float32 that bf16 holds) as the bytes that the device holds."""
    if dtype == "bf16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(x).view(np.uint8)


class Bench:
    """A channel, and shared memory for an operand and a result, of this rank."""

    def __init__(self, peers: Peers, patience_s: float | None = None, room: int = ROOM) -> None:
        self.device = Device.open(0)
        self.channel = Channel(peers, patience_s=patience_s or SOUND_S)
        self.x, self.y = (peers.arena(room + 2 * GUARD) for _ in range(2))
        self.stream = self.device.stream()
        self.meet = collectives.barrier(self.channel)

    def made(self, op: str, x: int, y: int, count: int, dtype: str, how: How | None, reduce: str, root: int) -> Operation:
        """The operation on these addresses."""
        c = self.channel
        if op == "receive":
            op = "send"
        if op in collectives.SUMS:
            return getattr(collectives, op)(c, x, y, count, dtype, reduce=reduce, how=how)
        if op == "broadcast":
            return collectives.broadcast(c, x, y, count, dtype, root=root, how=how)
        if op == "send":
            to = (root + 1) % c.size
            return collectives.send(c, x, count, dtype, to=to, how=how) if c.me == root else \
                collectives.receive(c, y, count, dtype, source=root, how=how) if c.me == to else collectives.pass_by(c)
        if op == "barrier":
            return collectives.barrier(c)
        return getattr(collectives, op)(c, x, y, count, dtype, how=how)

    def run(self, operation: Operation) -> None:
        operation(self.stream)
        self.stream.synchronize()
        self.channel.check()


def one(bench: Bench, op: str, dtype: str, count: int, how: How | None, *, reduce: str = "sum", in_place: bool = False, seed: int = 0,
        shift: int = 0, before: Callable[[], None] = lambda: None) -> str:
    """One call against the row's promise, between guards: '' or what was wrong. `shift`: by how many bytes operands begin off 256;
    `before`: what this member does ahead of its launch."""
    n, me, root = bench.channel.size, bench.channel.me, (seed + count) % bench.channel.size
    op = "send" if op == "receive" else op
    pieces = op in ("reduce_scatter", "all_to_all")
    operand, result = count * n if pieces else count, count * n if op in ("all_gather", "all_to_all") else count
    xs = [drawn(np.random.default_rng((seed, count, i)), dtype, operand, i) for i in range(n)]
    want = promised_to(op, xs, dtype, reduce, root, me)
    width, x, y = ITEM[dtype], bench.x.address + GUARD + shift, bench.y.address + GUARD + shift
    if in_place and op == "all_gather":
        x = y + me * count * width
    elif in_place and op == "reduce_scatter":
        y = x + me * count * width
    elif in_place:
        y = x
    upload(Span(bench.y.address, ROOM), np.full(ROOM, 0xFF - me, np.uint8))  # what a member copies beyond its result shows at its peer
    if not in_place or op == "all_gather":
        upload(Span(bench.x.address, ROOM), np.full(ROOM, 0xFF, np.uint8))
    own = bits_of(xs[me], dtype)
    upload(Span(x, own.nbytes), own)
    guarded = y - GUARD
    around = download(Span(guarded, ROOM), (result * width + 2 * GUARD,), np.uint8)
    bench.channel.peers.exchange(b"laid out")
    made = bench.made(op, x, y, count, dtype, how, reduce, root)
    before()
    bench.run(made)
    said = f"{op} {dtype} {count} {how} {reduce} in_place={in_place} shift={shift} among {n}, member {me}"
    found = download(Span(guarded, ROOM), (result * width + 2 * GUARD,), np.uint8)
    if want is not None:
        around[GUARD:-GUARD] = bits_of(want, dtype)
    if not np.array_equal(around, found):
        return f"{said}: {int((around != found).sum())} bytes differ, the first at {int(np.nonzero(around != found)[0][0]) - GUARD}"
    if not in_place and not np.array_equal(download(Span(x, own.nbytes), own.shape, np.uint8), own):
        return f"{said}: the operand was written"
    return ""


def promised_to(op: str, xs: list[np.ndarray], dtype: str, reduce: str, root: int, me: int) -> np.ndarray | None:
    """What this member's result is owed; None where it has none."""
    n = len(xs)
    if op in ("send", "receive"):
        return xs[root] if me == (root + 1) % n else None
    attrs: dict[str, object] = {"group": "dp", "size": n}
    if op in collectives.SUMS:
        attrs["reduce"] = reduce
    elif op == "broadcast":
        attrs["root"] = root
    return promised(BY_NAME[op], [(x,) for x in xs], [TensorType(xs[0].shape, dtype)], attrs)[me][0]  # type: ignore[arg-type]


def at_bits(peers: Peers, world: World, op: str, seed: int, counts: Sequence[int] = COUNTS) -> Found:
    """Every type, algorithm, reduction and count, in place and not, at addresses off 256 and off 16 bytes too."""
    bench, wrong, calls = Bench(peers), list[str](), 0
    rng = np.random.default_rng(seed)
    for dtype in ITEM:
        for count in counts:
            for reduce in ("sum", "average") if op in collectives.SUMS else ("sum",):
                in_place = bool(rng.integers(2)) and op != "send"
                for how in (None, *hows(op, count, dtype, in_place)):
                    anywhere = how is None or how.algorithm == "packets"
                    shift = int(rng.choice((0, 16, 2 * ITEM[dtype]) if anywhere else (0, 16)))
                    wrong.append(one(bench, op, dtype, count, how, reduce=reduce, in_place=in_place, seed=seed + calls, shift=shift))
                    calls += 1
    return [w for w in wrong if w], calls


STREAMED = 32768
"""Elements of a piece in calls that follow one another without the host."""


def at_streamed(peers: Peers, world: World, op: str, seed: int, count: int = STREAMED) -> Found:
    """Calls that follow one another on the stream, operand and result written and read there and nowhere else: an operand comes late and is
    overwritten at once, a result is taken at once. So nobody may read before its peers have written, nor write before they have read."""
    bench, wrong, calls, own = Bench(peers), list[str](), 0, np.random.default_rng()
    n, me, rounds = bench.channel.size, bench.channel.me, 4
    operand, result = count * (n if op in ("reduce_scatter", "all_to_all") else 1), count * (n if op in ("all_gather", "all_to_all") else 1)
    given, taken = Arena(rounds * operand * 4, name="operands"), Arena(rounds * result * 4, name="results")
    noise, root, x, y = Arena(32 << 20, name="noise"), seed % n, bench.x.address, bench.y.address
    for how in hows(op, count, "f32", False):
        xs = [[drawn(np.random.default_rng((seed, calls, i, k)), "f32", operand, i) for i in range(n)] for k in range(rounds)]
        upload(Span(given.address, given.nbytes), np.stack([each[me] for each in xs]))
        for span in (Span(taken.address, taken.nbytes), Span(x, operand * 4), Span(y, result * 4)):
            fill(span, 0xFF)
        made = bench.made(op, x, y, count, "f32", how, "sum", root)
        bench.device.synchronize()
        peers.exchange(b"poisoned")
        for k in range(rounds):
            if own.random() < 0.5:
                fill(Span(noise.address, int(own.integers(1, noise.nbytes))), k, bench.stream)
            copy(x, given.address + k * operand * 4, operand * 4, bench.stream)
            made(bench.stream)
            copy(taken.address + k * result * 4, y, result * 4, bench.stream)
            fill(Span(x, operand * 4), 0xFF, bench.stream)
        bench.stream.synchronize()
        bench.channel.check()
        found = download(Span(taken.address, taken.nbytes), (rounds, result), np.float32)
        for k in range(rounds):
            want = promised_to(op, xs[k], "f32", "sum", root, me)
            if want is not None and want.tobytes() != found[k].tobytes():
                wrong.append(f"{op} {how} among {n}, member {me}, call {k}: {int((bits_of(want, 'f32') != found[k].view(np.uint8)).sum())} "
                             "bytes differ where the host does not wait between calls")
        calls += rounds
    return wrong, calls


GROWN = 5 << 18
"""Elements of an operand whose stage is larger than the least that a driver shares."""


def at_grown(peers: Peers, world: World, op: str, seed: int) -> Found:
    """Sums by engines on one channel, over a short, a long, a shorter operand, and over the first again: the stage grows for the second,
    and what was made before keeps its own."""
    bench, wrong, sizes, kept = Bench(peers, room=GROWN * 4), list[str](), list[int](), dict[int, Operation]()
    n, me = bench.channel.size, bench.channel.me
    for total in (8192, GROWN, 4096, 8192):
        count = total // (4 * n) * 4 if op == "reduce_scatter" else total
        operand = count * n if op == "reduce_scatter" else count
        if total not in kept:
            kept[total] = bench.made(op, bench.x.address, bench.y.address, count, "f32", How("engine", 4), "sum", 0)
        sizes.append(bench.channel.staged - collectives.staged(4 * operand, n))
        xs = [drawn(np.random.default_rng((seed, total, i)), "f32", operand, i) for i in range(n)]
        got, want = _result(bench, op, xs[me], "f32", count, None, 0, made=kept[total]), promised_to(op, xs, "f32", "sum", 0, me)
        if want is None or got is None or want.tobytes() != got.tobytes():
            wrong.append(f"{op} among {n}, member {me}: other bits of {total} elements, call {len(sizes)}")
    wrong += [] if min(sizes) >= 0 else [f"{op} among {n}: a stage is {-min(sizes)} bytes too small"]
    return wrong, len(sizes)


def at_oracle(peers: Peers, world: World, op: str, seed: int) -> Found:
    """Against the row's float64 oracle over all members' operands, and bit for bit against what the CPU's collectives make of the same
    operands (alpha/comm): a sum within d u sum|x|, where d counts roundings (ranks/collectives.py), in bf16 and half an ulp of the end."""
    bench, group, wrong, calls = Bench(peers), world.group(WORLD), list[str](), 0
    n, me = bench.channel.size, bench.channel.me
    for dtype in ITEM:
        for count in (601, 8192):
            pieces = op in ("reduce_scatter", "all_to_all")
            operand, root = count * n if pieces else count, seed % n
            xs = [round_to(np.random.default_rng((seed, count, i)).standard_normal(operand), dtype).astype(np.float32) for i in range(n)]
            for how in (None, *hows(op, count, dtype, False)):
                got, same = _result(bench, op, xs[me], dtype, count, how, root), _on_cpu(group, op, xs[me], dtype, count, root)
                calls += 1
                if got is None:
                    continue
                exact: list[np.ndarray] = [x.astype(np.float64) for x in xs]
                want = _exactly(op, exact, root, me)
                size = _exactly(op, [np.abs(x) for x in exact], root, me)
                unit = UNIT_ROUNDOFF["f32"] * (n - 1).bit_length() * (op in collectives.SUMS)
                bound = unit * size + (UNIT_ROUNDOFF["bf16"] * np.abs(want) * 1.01 if dtype == "bf16" and unit else 0.0)
                if not np.all(np.abs(got - want) <= bound):
                    wrong.append(f"{op} {dtype} {count} {how}: {float(np.max(np.abs(got - want) - bound)):.3g} beyond its bound")
                if same is not None and same.astype(np.float32).tobytes() != got.astype(np.float32).tobytes():
                    wrong.append(f"{op} {dtype} {count} {how}: other bits than the CPU's collective")
    return wrong, calls


def _result(bench: Bench, op: str, x: np.ndarray, dtype: str, count: int, how: How | None, root: int, reduce: str = "sum",
            made: Operation | None = None) -> np.ndarray | None:
    """What this member gets, as float32; None where it gets nothing. `made`: is run, and nothing new."""
    n, me = bench.channel.size, bench.channel.me
    result = count * n if op in ("all_gather", "all_to_all") else count
    upload(Span(bench.x.address, bench.x.nbytes), bits_of(x, dtype))
    upload(Span(bench.y.address, bench.y.nbytes), np.full(result * ITEM[dtype], 0xFF, np.uint8))
    bench.run(made or bench.made(op, bench.x.address, bench.y.address, count, dtype, how, reduce, root))
    if op == "send" and me != (root + 1) % n:
        return None
    raw = download(Span(bench.y.address, bench.y.nbytes), (result,), np.uint16 if dtype == "bf16" else np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype == "bf16" else raw


def _exactly(op: str, xs: list[np.ndarray], root: int, me: int) -> np.ndarray:
    if op == "send":
        return xs[root]
    n = len(xs)
    attrs: dict[str, Any] = {"group": "dp", "size": n} | ({"reduce": "sum"} if op in collectives.SUMS else {})
    across = BY_NAME[op].across
    assert across is not None
    return across([(x,) for x in xs], **attrs, **({"root": root} if op == "broadcast" else {}))[me][0]


def _on_cpu(group: Group, op: str, x: np.ndarray, dtype: str, count: int, root: int) -> np.ndarray | None:
    """The same by alpha/comm; None where this member gets nothing."""
    out = np.empty(count * group.size if op in ("all_gather", "all_to_all") else count, np.float32)
    if op == "send":
        if group.index == root:
            on_host.send(group, x, to=(root + 1) % group.size, dtype=dtype)
        elif group.index == (root + 1) % group.size:
            on_host.receive(group, out, source=root, dtype=dtype)
            return out
        return None
    getattr(on_host, op)(group, x, out, dtype=dtype, **({"root": root} if op == "broadcast" else {}))
    return out


def at_adjoint(peers: Peers, world: World, op: str, seed: int) -> Found:
    """Over all members, <g, f(v)> = <vjp(g), v>, where the row's vjp runs on the device too: on small integers both sides are exact. A sum
    on one rank alone, which no kernel here makes, is an all-reduce of which the others take nothing."""
    bench, group, wrong = Bench(peers), world.group(WORLD), list[str]()
    n, me, count = bench.channel.size, bench.channel.me, 1024
    root = seed % n
    pieces = op in ("reduce_scatter", "all_to_all")
    for turn, how in enumerate(hows(op, count, "f32", False)):
        rng = np.random.default_rng((seed, turn, me))
        v = rng.integers(-9, 10, count * n if pieces else count).astype(np.float32)
        y = _result(bench, op, v, "f32", count, how, root)
        g = rng.integers(-9, 10, y.size if y is not None else 0).astype(np.float32)
        if op == "send":  # who received sends its cotangent back
            back = (root + 1) % n
            own = _returned(bench, g, count, how, root, back)
        else:
            run = {"all_reduce": "all_reduce", "reduce_scatter": "all_gather", "all_gather": "reduce_scatter", "broadcast": "all_reduce",
                   "all_to_all": "all_to_all"}[op]
            own = _result(bench, run, g, "f32", count, None if op == "broadcast" else how, root)
            if op == "broadcast" and me != root:
                own = np.zeros_like(v)
        sides = np.array([float(np.dot(g.astype(np.float64), y)) if y is not None else 0.0,
                          float(np.dot(own.astype(np.float64), v)) if own is not None else 0.0])
        totals = np.empty(2)
        on_host.all_reduce(group, sides, totals)
        if totals[0] != totals[1]:
            wrong.append(f"{op} {how}: <g, f(v)> is {totals[0]:g}, <vjp(g), v> {totals[1]:g}")
    return wrong, len(hows(op, count, "f32", False))


def _returned(bench: Bench, g: np.ndarray, count: int, how: How, root: int, back: int) -> np.ndarray | None:
    """The vjp of an exchange: from who received to who sent."""
    c = bench.channel
    if c.me == back:
        upload(Span(bench.x.address, bench.x.nbytes), g)
        bench.run(collectives.send(c, bench.x.address, count, "f32", to=root, how=how))
        return None
    if c.me != root:
        bench.run(collectives.pass_by(c))
        return None
    bench.run(collectives.receive(c, bench.y.address, count, "f32", source=back, how=how))
    return download(Span(bench.y.address, bench.y.nbytes), (count,), np.float32)


# -- determinism -------------------------------------------------------------------------------------------------------------------

RUNS = 60


def at_repeated(peers: Peers, world: World, op: str, seed: int, runs: int = RUNS) -> tuple[list[str], int, str]:
    """The same operands, whatever the algorithm, the blocks, the addresses, who is late and by how much, what else the device does, and
    whether launches are replayed from a graph or the counts wrap: one set of bits."""
    bench, hashes, rng, own = Bench(peers), set[str](), np.random.default_rng(seed), np.random.default_rng()
    n, me, count, wrong = bench.channel.size, bench.channel.me, 5000, list[str]()
    width, noise, busy = 4, Arena(8 << 20, name="noise"), bench.device.stream()
    root = seed % n
    operand = count * n if op in ("reduce_scatter", "all_to_all") else count
    x = drawn(np.random.default_rng((seed, me)), "f32", operand, 0)
    result = count * n if op in ("all_gather", "all_to_all") else count
    gets = op != "send" or me == (root + 1) % n
    for run in range(runs):
        if run == runs // 2:
            bench.channel.begin_at(0xFEFFFFFF)  # the next rounds renew every position
        elif run == runs * 3 // 4:
            bench.channel.begin_at(0xFFFFFFFB)  # the counts wrap meanwhile
        shift = int(rng.integers(0, 64)) * 16
        at, to = bench.x.address + shift, bench.y.address + shift
        ways = hows(op, count, "f32", False)
        how = ways[int(rng.integers(len(ways)))]
        how = replace(how, blocks=int(rng.integers(1, 1 + (8 if how.algorithm != "engine" or op in collectives.SUMS else 1))))
        upload(Span(at, operand * width), x)
        upload(Span(to, result * width), np.full(result * width, 0xFF, np.uint8))
        made = bench.made(op, at, to, count, "f32", how, "sum", root)
        if own.random() < 0.3:
            time.sleep(own.random() * 2e-3)
        if own.random() < 0.5:
            fill(Span(noise.address, noise.nbytes), int(own.integers(256)), busy)
        if run % 5 == 4:
            graph = capture(in_order([made] * 3), bench.stream)
            for _ in range(2):
                graph.launch(bench.stream)
            bench.stream.synchronize()
            bench.channel.check()
        else:
            bench.run(made)
        if gets:
            hashes.add(hashlib.sha256(download(Span(to, result * width), (result,), np.float32).tobytes()).hexdigest())
    wrong += [] if len(hashes) == gets else [f"{op} among {n}: {len(hashes)} results of one operand"]
    return wrong, runs, next(iter(hashes), "")


# -- faults ------------------------------------------------------------------------------------------------------------------------

COUNT = 601
PATIENCE_S = 0.4
BOUND_S = 1.0
"""In which a launch must have ended whose peers do not come, beyond its patience."""


def _any(op: str) -> list[How]:
    """One way of each algorithm that an op has."""
    found: dict[str, How] = {}
    for how in hows(op, 8192, "f32", False):
        found.setdefault(how.algorithm, how)
    return list(found.values())


def _root(bench: Bench, op: str) -> int:
    """The member from which data come, so that some member waits for the last."""
    return {"receive": bench.channel.size - 1, "send": bench.channel.size - 2}.get(op, 0)


def _waiting(bench: Bench, op: str, how: How) -> list[int]:
    """The members that wait for the last one where that does not come: of an exchange the other one, of a broadcast that nobody hands on
    the root; of anything else all."""
    if op in ("send", "receive"):
        return [bench.channel.size - 2 if op == "send" else 0]
    return [0] if op == "broadcast" and how.algorithm != "relayed" else list(range(bench.channel.size - 1))


def _sound(bench: Bench, op: str, how: How, seed: int, *, calls: int = 2) -> list[str]:
    """Calls of a sound channel have the promised bits."""
    return [w for w in (one(bench, op, "f32", 8192, how, seed=seed + i) for i in range(calls)) if w]


def _timed(bench: Bench, operation: Operation) -> float:
    """Seconds of a launch, however it ends."""
    start = time.monotonic()
    operation(bench.stream)
    bench.stream.synchronize()
    return time.monotonic() - start


def _named(bench: Bench, op: str, how: How, seconds: float, patience_s: float, missing: int) -> list[str]:
    """What is wrong about how a launch ended whose peer `missing` did not come."""
    lost, said = bench.channel.lost(), f"{op} {how.algorithm}"
    if lost is None:
        return [f"{said}: nothing is told of a peer that did not come"]
    kind = "packet" if how.algorithm == "packets" and op != "barrier" else "meeting"
    wrong = [] if (lost.op, lost.member, lost.kind) == (op, missing, kind) else [f"{said}: told {lost}"]
    wrong += [] if (lost.wanted - lost.seen) % (1 << 32) else [f"{said}: saw what it waited for: {lost}"]
    wrong += [] if patience_s <= seconds <= patience_s + BOUND_S else [f"{said}: ended after {seconds:.2f} s, patience {patience_s}"]
    try:
        bench.channel.check()
        wrong.append(f"{said}: no error")
    except RankError as error:
        wrong += [] if error.rank == bench.channel.members[missing] and error.op == op else [f"{said}: names rank {error.rank}"]
    return wrong


def at_absent(peers: Peers, world: World, op: str, seed: int, patience_s: float = PATIENCE_S) -> Found:
    """The last member does not launch: the others are told so in time, the device is sound, and a reset channel has the bits again."""
    bench, wrong, calls = Bench(peers, patience_s), list[str](), 0
    away = bench.channel.size - 1
    for how in [How("packets")] if op == "barrier" else _any(op):
        made = bench.made(op, bench.x.address, bench.y.address, 8192, "f32", how, "sum", _root(bench, op))
        wrong += [] if op == "barrier" else _sound(bench, op, how, seed)
        if bench.channel.me != away:
            seconds = _timed(bench, made)
        if bench.channel.me in _waiting(bench, op, how):
            wrong += _named(bench, op, how, seconds, patience_s, away)
            start = time.monotonic()
            for _ in range(3):
                made(bench.stream)
            bench.stream.synchronize()
            late = time.monotonic() - start
            wrong += [] if late < patience_s else [f"{op} {how.algorithm}: a channel that gave up takes {late:.2f} s a launch"]
        bench.channel.reset()
        wrong += [] if bench.channel.lost() is None else ["a reset channel still tells of a fault"]
        wrong += _sound(bench, "all_reduce" if op == "barrier" else op, how, seed + 9)
        calls += 1
    return wrong, calls


def at_slow(peers: Peers, world: World, op: str, seed: int) -> Found:
    """A member that is late, but within the patience of the others, is waited for, and nothing is told."""
    bench, wrong = Bench(peers), list[str]()
    for i, how in enumerate([How("packets")] if op == "barrier" else _any(op)):
        late = (i + seed) % bench.channel.size

        def lag(late: int = late) -> None:
            if bench.channel.me == late:
                time.sleep(0.05)

        wrong += [w for w in (one(bench, op, "f32", 8192, how, seed=seed + i, before=lag),) if w] if op != "barrier" else \
            _held_back(bench)
        wrong += [] if bench.channel.lost() is None else [f"{op} {how.algorithm}: told of a member that came late: {bench.channel.lost()}"]
    return wrong, len(_any(op)) if op != "barrier" else 1


def _held_back(bench: Bench) -> list[str]:
    """Nobody passes a barrier before the last has come, whoever that is. All ranks read one clock (CLOCK_MONOTONIC of one host)."""
    barrier, wrong = collectives.barrier(bench.channel), list[str]()
    for turn in range(2 * bench.channel.size):
        late = turn % bench.channel.size
        bench.channel.peers.exchange(b"begin")
        if bench.channel.me == late:
            time.sleep(0.05)
        came = time.monotonic()
        bench.run(barrier)
        ended = time.monotonic()
        told = bench.channel.peers.exchange(repr(came).encode())
        last = max(float(told[rank]) for rank in bench.channel.members)
        wrong += [] if ended >= last else [f"a barrier let go {last - ended:.3f} s before member {late} had come"]
    return wrong


def at_aborted(peers: Peers, world: World, op: str, seed: int) -> Found:
    """A member that waits and is told to abort ends its launches, also those of a captured graph, within milliseconds; a reset channel is
    sound."""
    bench, wrong, calls = Bench(peers, 30.0), list[str](), 0
    other = bench.device.stream()
    for how in [How("packets")] if op == "barrier" else _any(op):
        made = bench.made(op, bench.x.address, bench.y.address, 8192, "f32", how, "sum", _root(bench, op))
        if bench.channel.me == _waiting(bench, op, how)[0]:
            graph = capture(in_order([made] * 5), bench.stream)
            graph.launch(bench.stream)
            time.sleep(0.05)
            start = time.monotonic()
            bench.channel.abort(other)
            bench.stream.synchronize()
            seconds = time.monotonic() - start
            wrong += [] if seconds < 0.1 else [f"{op} {how.algorithm}: ended {seconds:.3f} s after it was told to"]
            wrong += [] if bench.channel.lost() is None else [f"{op} {how.algorithm}: an abort names a member: {bench.channel.lost()}"]
        bench.channel.reset()
        wrong += _sound(bench, "all_reduce" if op == "barrier" else op, how, seed)
        calls += 1
    return wrong, calls


def at_lost(peers: Peers, world: World, op: str, what: str, seed: int) -> Found:
    """The last member dies, or is stopped, among calls that it takes part in: the others are told in time whom they wait for, and their
    device computes on. The member at fault never returns."""
    bench, how = Bench(peers, PATIENCE_S), How("packets") if op == "barrier" else _any(op)[seed % len(_any(op))]
    away, wrong = bench.channel.size - 1, list[str]()
    made = bench.made(op, bench.x.address, bench.y.address, 8192, "f32", how, "sum", _root(bench, op))
    for _ in range(3):
        made(bench.stream)
    if bench.channel.me == away:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[what])
    bench.stream.synchronize()
    start = time.monotonic()
    while bench.channel.lost() is None and time.monotonic() - start < PATIENCE_S + BOUND_S:
        made(bench.stream)
        bench.stream.synchronize()
    lost, seconds = bench.channel.lost(), time.monotonic() - start
    waiting = bench.channel.me in _waiting(bench, op, how)
    if waiting and (lost is None or lost.member != away or lost.op != op or seconds > PATIENCE_S + BOUND_S):
        wrong.append(f"{op} {how.algorithm}, {what}: told {lost} after {seconds:.2f} s")
    fresh, block = Arena(1 << 20, name="after a fault"), np.arange(1 << 18, dtype=np.uint32)
    upload(Span(fresh.address, fresh.nbytes), block)
    if not np.array_equal(download(Span(fresh.address, fresh.nbytes), block.shape, np.uint32), block):
        wrong.append(f"{op}, {what}: the device is not sound")
    return wrong, 1


# -- jobs --------------------------------------------------------------------------------------------------------------------------

HERE = "alpha.gates.contracts.device_ranks"


def on_device(world: World, kernels: str, cache: str, where: str, *arguments: Any) -> Any:
    """What a rank runs: the function `where` (module:name), with the GPU of its number, and device code from a folder of kernels."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices_of(world.rank, world.size)
    Device.open(0)
    group = world.group(WORLD)
    peers = Peers(world.rank, world.size, partial(exchanged, group))
    module, name = where.split(":")
    with nvcc.compiling(kernels=Path(kernels), cache=Path(cache)):
        found = getattr(importlib.import_module(module), name)(peers, world, *arguments)
    if name != "at_lost":
        peers.close()
    return found


def job(ranks: int, where: str, *arguments: Any, limit_s: float = 60.0, deadlines: Deadlines | None = None) -> list[Ended]:
    """How all ranks ended that ran a function. What it compiles comes from where this process compiles from."""
    return members().run(on_device, ranks, str(nvcc.KERNELS), str(nvcc.CACHE), where, *arguments, limit_s=limit_s,
                         deadlines=deadlines or PATIENT)


PATIENT = Deadlines(stall=30.0)
"""A rank that waits for its device is not stuck."""


def _case(name: str, groups: Sequence[int], *arguments: Any) -> Case:
    """`groups`: how many members, one job for each."""
    def case(rng: np.random.Generator) -> Measured:
        return sound([partial(job, ranks, f"{HERE}:{name}", *arguments, seed_of(rng)) for ranks in groups])
    return case


def _lost(op: str, ranks: int, what: str) -> Case:
    """Ranks that are left and wait name the one at fault; then as many new ranks have the promised bits on the same devices."""
    def case(rng: np.random.Generator) -> Measured:
        ended = job(ranks, f"{HERE}:at_lost", op, what, seed_of(rng), limit_s=20.0)
        found = sound([lambda: ended[:-1]])
        status = {"killed": -signal.SIGKILL, "stopped": -signal.SIGKILL}[what]
        wrong = found.note or ("" if ended[-1].status == status else f"the rank at fault ended with {ended[-1].status}")
        again = sound([lambda: job(ranks, f"{HERE}:at_slow", op, seed_of(rng))])
        wrong = wrong or again.note
        return Measured(error=float(bool(wrong)), bound=0.0, cases=2, note=wrong[:120])
    return case


def _repeated(op: str, ranks: int) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        ended = job(ranks, f"{HERE}:at_repeated", op, seed_of(rng))
        found = sound([lambda: [Ended(e.status, e.result[:2] if e.result else None, e.error) for e in ended]])
        hashes = [e.result[2] for e in ended if e.result]
        apart = op in ("all_reduce", "all_gather", "broadcast") and len(set(hashes)) > 1
        return Measured(error=found.error + apart, bound=0.0, cases=found.cases, digest="".join(h[:16] for h in hashes),
                        note=found.note or ("members hold different bits" if apart else ""))
    return case


def _met(ranks: int) -> Case:
    """A barrier has no result: what repeats is that it holds."""
    return lambda rng: replace(sound([lambda: job(ranks, f"{HERE}:at_slow", "barrier", seed_of(rng))]), digest="met")


def _cases(op: str, groups: Sequence[int]) -> dict[str, list[tuple[str, Case]]]:
    """`groups`: members that a component takes; parity is of each, the rest of the most."""
    moved, most = "send" if op == "receive" else op, max(groups)
    found: dict[str, list[tuple[str, Case]]] = {
        "parity": [("held", _case("at_slow", groups, op))] if op == "barrier" else [
            (name, _case(f"at_{name}", groups, moved)) for name in ("bits", "streamed", "oracle", *("grown",) * (op in collectives.SUMS))],
        "determinism": [("repeated", _met(most) if op == "barrier" else _repeated(moved, most))],
        "faults": [*((name, _case(f"at_{name}", (most,), op)) for name in ("absent", "slow", "aborted")),
                   ("killed", _lost(op, most, "killed")), ("stopped", _lost(op, most, "stopped"))],
    }
    return found if op == "barrier" else {**found, "gradient": [("adjoint", _case("at_adjoint", (most,), moved))]}


CASES = {c.id: _cases(str(c.op), collectives.groups_of(c)) for c in collectives.KERNELS}
