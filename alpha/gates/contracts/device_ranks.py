"""Cases of the collectives among GPUs: bits, adjoints, repetition, faults. Floor 7.

Functions named `at_*` run in every rank, a process with a GPU of its own, and return (what was wrong, how many calls were held to it).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from alpha.backends.cuda.kernels import collectives
from alpha.backends.cuda.kernels.collectives import ITEM, Channel, How
from alpha.backends.cuda.launches import Operation
from alpha.comm.words import exchanged
from alpha.comm.world import WORLD, World
from alpha.cuda_runtime import Device, Span, download, upload
from alpha.cuda_runtime.peers import Peers, devices_of
from alpha.gates.contracts.ranks.calls import BY_NAME, drawn
from alpha.ops.collectives import promised
from alpha.types import TensorType

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
COUNTS = (1, 31, 601, 8192, 20011)
"""Elements of a piece: one, primes, a whole round of a block, several with a rest."""
ROOM = 4 << 20
"""Bytes of an operand, or a result."""
GUARD = 4096
"""Bytes before and behind a result that nobody may write."""

Found = tuple[list[str], int]


def hows(op: str, count: int, dtype: str, in_place: bool) -> list[How]:
    """The algorithms that take a call."""
    found = [How("packets", 1), How("packets", 3)]
    whole = count * ITEM[dtype] % 16 == 0 or op in ("all_reduce", "broadcast", "send")
    if whole and not (in_place and op == "all_to_all"):
        found += [How("direct", 1), How("direct", 2)]
        if op not in collectives.SUMS:
            found += [How("direct", 2, pull=True), How("engine"), How("engine", pull=True)]
    return found


def bits_of(x: np.ndarray, dtype: str) -> np.ndarray:
    """Host array (bf16: float32 that bf16 holds) as the bytes that the device holds."""
    if dtype == "bf16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(x).view(np.uint8)


class Bench:
    """A channel, and shared memory for an operand and a result, of this rank."""

    def __init__(self, peers: Peers, patience_s: float = 20.0) -> None:
        self.device = Device.open(0)
        self.channel = Channel(peers, patience_s=patience_s)
        self.x, self.y = (peers.arena(ROOM + 2 * GUARD) for _ in range(2))
        self.stream = self.device.stream()

    def made(self, op: str, x: int, y: int, count: int, dtype: str, how: How | None, reduce: str, root: int) -> Operation:
        """The operation on these addresses."""
        c = self.channel
        if op in collectives.SUMS:
            return getattr(collectives, op)(c, x, y, count, dtype, reduce=reduce, how=how)
        if op == "broadcast":
            return collectives.broadcast(c, x, y, count, dtype, root=root, how=how)
        if op == "send":
            to = (root + 1) % c.size
            return collectives.send(c, x, count, dtype, to=to, how=how) if c.me == root else \
                collectives.receive(c, y, count, dtype, source=root, how=how) if c.me == to else collectives.pass_by(c, how)
        return getattr(collectives, op)(c, x, y, count, dtype, how=how)

    def run(self, operation: Operation) -> None:
        operation(self.stream)
        self.stream.synchronize()
        self.channel.check()


def one(bench: Bench, op: str, dtype: str, count: int, how: How, *, reduce: str = "sum", in_place: bool = False, seed: int = 0,
        shift: int = 0) -> str:
    """One call against the row's promise, between guards: '' or what was wrong. `shift`: by how many bytes operands begin off 256."""
    n, me, root = bench.channel.size, bench.channel.me, (seed + count) % bench.channel.size
    pieces = op in ("reduce_scatter", "all_to_all")
    operand, result = count * n if pieces else count, count * n if op in ("all_gather", "all_to_all") else count
    xs = [drawn(np.random.default_rng((seed, count, i)), dtype, operand, i) for i in range(n)]
    want = _promised(op, xs, dtype, reduce, root, me)
    width, x, y = ITEM[dtype], bench.x.address + GUARD + shift, bench.y.address + GUARD + shift
    if in_place and op == "all_gather":
        x = y + me * count * width
    elif in_place and op == "reduce_scatter":
        y = x + me * count * width
    elif in_place:
        y = x
    upload(Span(bench.y.address, ROOM), np.full(ROOM, 0xFF, np.uint8))
    if not in_place or op == "all_gather":
        upload(Span(bench.x.address, ROOM), np.full(ROOM, 0xFF, np.uint8))
    before = bits_of(xs[me], dtype)
    upload(Span(x, before.nbytes), before)
    guarded = y - GUARD
    around = download(Span(guarded, ROOM), (result * width + 2 * GUARD,), np.uint8)
    bench.channel.peers.exchange(b"laid out")
    bench.run(bench.made(op, x, y, count, dtype, how, reduce, root))
    said = f"{op} {dtype} {count} {how} {reduce} in_place={in_place} shift={shift} among {n}, member {me}"
    found = download(Span(guarded, ROOM), (result * width + 2 * GUARD,), np.uint8)
    if want is not None:
        around[GUARD:-GUARD] = bits_of(want, dtype)
    if not np.array_equal(around, found):
        return f"{said}: {int((around != found).sum())} bytes differ, the first at {int(np.nonzero(around != found)[0][0]) - GUARD}"
    if not in_place and not np.array_equal(download(Span(x, before.nbytes), before.shape, np.uint8), before):
        return f"{said}: the operand was written"
    return ""


def _promised(op: str, xs: list[np.ndarray], dtype: str, reduce: str, root: int, me: int) -> np.ndarray | None:
    """What this member's result is owed; None where it has none."""
    n = len(xs)
    if op == "send":
        return xs[root] if me == (root + 1) % n else None
    attrs: dict[str, object] = {"group": "dp", "size": n}
    if op in collectives.SUMS:
        attrs["reduce"] = reduce
    elif op == "broadcast":
        attrs["root"] = root
    return promised(BY_NAME[op], [(x,) for x in xs], [TensorType(xs[0].shape, dtype)], attrs)[me][0]  # type: ignore[arg-type]


def at_bits(peers: Peers, world: World, op: str, seed: int) -> Found:
    """Every type, algorithm, reduction and count, in place and not, at addresses off 256 and off 16 bytes too."""
    bench, wrong, calls = Bench(peers), list[str](), 0
    rng = np.random.default_rng(seed)
    for dtype in ITEM:
        for count in COUNTS:
            for reduce in ("sum", "average") if op in collectives.SUMS else ("sum",):
                in_place = bool(rng.integers(2)) and op != "send"
                for how in hows(op, count, dtype, in_place):
                    shift = int(rng.choice((0, 16, 2 * ITEM[dtype]) if how.algorithm == "packets" else (0, 16)))
                    wrong.append(one(bench, op, dtype, count, how, reduce=reduce, in_place=in_place, seed=seed + calls, shift=shift))
                    calls += 1
    return [w for w in wrong if w], calls


def on_device(world: World, name: str, *arguments: Any) -> Any:
    """What a rank runs: the function of this name here, with the GPU of its number."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices_of(world.rank, world.size)
    Device.open(0)
    group = world.group(WORLD)
    peers = Peers(world.rank, world.size, lambda words: exchanged(group, words))
    try:
        return globals()[name](peers, world, *arguments)
    finally:
        peers.close()
