"""Collectives among GPUs as kernels: channels, launches, and which algorithm runs at which size. Floor 4.

A `Channel` is what the launches of one stream of one group share: each member's pad (kernels/collectives/link.cuh) and a record of how a
wait ended. Functions named as the ops make an `Operation` on fixed addresses, to be called with a stream or captured. Making one is
itself called by all members, in one order, because they tell each other where their operands lie; running one needs the host no more.

Bits: those of alpha/ops/collectives.py, whatever the algorithm, the number of blocks and the addresses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.backends.cuda import launches
from alpha.backends.cuda.launches import Operation, ceil_div, structure
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.device import stream_handle
from alpha.cuda_runtime.memory import Arena, Span, download, fill, upload
from alpha.cuda_runtime.peers import Peers
from alpha.errors import GraphError, RankError, ShapeError

ITEM = {"bf16": 2, "f32": 4}
OPS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "receive")
"""Their places are what a record calls them."""
SUMS = ("all_reduce", "reduce_scatter")

BLOCKS, MEMBERS, THREADS, DEEP = 64, 8, 512, 2
"""As kernels/collectives/link.cuh has them."""
ROUND = THREADS * DEEP * 16
"""Bytes of payload that a block sends in a round of packets."""
SLOT = 2 * ROUND
OWN_BLOCKS = 16
"""Blocks that copy what stays on a member while others move the rest."""
PATIENCE_S = 30.0
"""How long a wait lasts before it gives up, by default."""


def most(size: int) -> int:
    """The compiled limit of members for a group of `size`: 2, 4 or 8."""
    if not 2 <= size <= MEMBERS:
        raise ShapeError("collectives among GPUs of one host", came=f"{size} members", expected=f"2 to {MEMBERS}")
    return 2 if size == 2 else 4 if size <= 4 else 8


def source(file: str, size: int, dtype: str = "", loads: int = 4) -> Source:
    """The compiled file of `sum` or `move`. `loads`: as in `How`; of sums among more than two members fewer fit into registers."""
    found: dict[str, object] = {"MOST": most(size), "DIRECT_LOADS": max(1, 2 * loads // most(size)) if file == "sum" else loads}
    if file == "sum":
        found["IS_F32"] = int(dtype == "f32")
    return Source.of(f"collectives/{file}.cu", found)


def sources(op: str) -> list[Source]:
    """Every compiled file that an op may load, for groups of 2 to 8."""
    sizes = (2, 4, 8)
    return [source("sum", n, dtype) for n in sizes for dtype in ITEM] if op in SUMS else [source("move", n) for n in sizes]


# -- channels --------------------------------------------------------------------------------------------------------------------


@functools.cache
def _structures(limit: int) -> dict[str, type[ctypes.Structure]]:
    """The parameter structs of kernels/collectives for groups of at most `limit`."""
    pointers = ctypes.c_uint64 * limit
    link = structure("Link", "", ("pad", pointers), ("record", ctypes.c_uint64), ("patience", ctypes.c_uint64), ("size", ctypes.c_uint32),
                     ("me", ctypes.c_uint32), ("op", ctypes.c_uint32), ("partners", ctypes.c_uint32))
    longs = {name: ctypes.c_uint64 for name in ("count", "stride", "begin", "end", "shift")}
    floats = {name: ctypes.c_float for name in ("divisor", "factor")}
    return {
        "Link": link,
        "Sum": structure("Sum", "", ("link", link), ("x", pointers), ("y", pointers), *longs.items(), *floats.items()),
        "Packed": structure("Packed", "", ("link", link), ("from_", pointers), ("to", pointers), ("out", pointers), ("in_", pointers)),
        "Direct": structure("Direct", "", ("link", link), ("from_", pointers), ("to", pointers), ("count", pointers),
                            ("moving", ctypes.c_uint32)),
    }


class _Record(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("abort", "state", "op", "member", "kind", "block", "wanted", "seen")]


@dataclass(frozen=True)
class Lost:
    """What a wait that ended without its end wrote down. `member`: whom it waited for; `kind`: meeting or packet; `wanted`, `seen`: the
    count that it waited for and the one that it saw."""

    op: str
    member: int
    kind: str
    block: int
    wanted: int
    seen: int


class Channel:
    """The pad of this member and those of its peers, for the launches of one stream of one group. Called by all members.

    `members`: ranks of `peers`, in the group's order (default: all). `patience_s`: of each wait. A channel has one stream: launches of two
    streams that shared a pad would take each other's signals.
    """

    def __init__(self, peers: Peers, *, members: Sequence[int] | None = None, patience_s: float = PATIENCE_S) -> None:
        self.peers = peers
        self.members = tuple(members if members is not None else range(peers.size))
        if peers.rank not in self.members:
            raise GraphError("a channel is of the members that make it", came=f"rank {peers.rank} of {self.members}")
        self.size, self.me, self.patience_s = len(self.members), self.members.index(peers.rank), patience_s
        words = 3 * BLOCKS * MEMBERS * 4
        self.nbytes = words + BLOCKS * self.size * 2 * SLOT
        most(self.size)
        self.arena = peers.arena(self.nbytes, name="channel")
        self.pads = [peers.windows[-1].bases[rank] for rank in self.members]
        self.record = Arena(ctypes.sizeof(_Record), name="record of a channel")
        fill(Span(self.record.address, self.record.nbytes), 0)
        _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize())
        peers.exchange(b"ready")

    def link(self, op: str, partners: Sequence[int] | None = None) -> ctypes.Structure:
        """What a launch is given. `partners`: members that take part with this one; default: all others."""
        others = [j for j in (range(self.size) if partners is None else partners) if j != self.me]
        make = _structures(most(self.size))["Link"]
        found = make(record=self.record.address, patience=int(self.patience_s * 1e9), size=self.size, me=self.me, op=OPS.index(op),
                     partners=sum(1 << j for j in others))
        found.pad[: self.size] = self.pads  # type: ignore[attr-defined]
        return found

    def everywhere(self, *addresses: int) -> list[tuple[int, ...]]:
        """Where the members' addresses lie in this process. Called by all members."""
        return [tuple(each[rank] for rank in self.members) for each in self.peers.everywhere(*addresses)]

    def lost(self) -> Lost | None:
        """How the first wait ended that did not get what it waited for; None where none did. Waits for the device's default stream."""
        raw = download(Span(self.record.address, ctypes.sizeof(_Record)), (ctypes.sizeof(_Record),), np.uint8)
        found = _Record.from_buffer_copy(raw.tobytes())
        if found.state == 0:
            return None
        return Lost(OPS[found.op], found.member, "packet" if found.kind == 2 else "meeting", found.block, found.wanted, found.seen)

    def check(self) -> None:
        """RankError where a wait of this channel gave up: it names the rank that did not come, the op, and how far it was."""
        lost = self.lost()
        if lost is None:
            return
        rank = self.members[lost.member]
        raise RankError(f"rank {rank} did not come to {lost.op}", came=f"{lost.kind} {lost.seen} of block {lost.block}",
                        expected=f"number {lost.wanted} within {self.patience_s:g} s", do=f"look at the log of rank {rank}",
                        rank=rank, op=lost.op)

    def abort(self, stream: Any) -> None:
        """Ends every wait of this member within microseconds: what is launched on this channel ends, with rubbish for results. `stream`:
        another one than the channel's, which waits. Launches that follow end too, until `reset`."""
        one = np.ones(1, np.uint32)
        _bindings.check("cuMemsetD32Async", _bindings.driver().cuMemsetD32Async(self.record.address, int(one[0]), 1, stream_handle(stream)))

    def reset(self) -> None:
        """Makes the channel new after an abort. Called by all members, when nothing runs on it anywhere."""
        _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize())
        self.peers.exchange(b"quiet")
        fill(Span(self.arena.address, self.nbytes), 0)
        fill(Span(self.record.address, self.record.nbytes), 0)
        _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize())
        self.peers.exchange(b"new")

    def begin_at(self, turn: int) -> None:
        """Sets all counts, as if there had been so many meetings and rounds (modulo 2^32). Called by all members, when nothing runs."""
        self.reset()
        upload(Span(self.arena.address, 3 * BLOCKS * MEMBERS * 4), np.full(3 * BLOCKS * MEMBERS, turn & 0xFFFFFFFF, np.uint32))
        _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize())
        self.peers.exchange(b"set")


# -- what runs -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """algorithm: packets, direct or engine (a copy engine between two meetings); blocks: of the launch; pull: what moves directly or by an
    engine is read by who gets it, else written by who has it; loads: vectors of each member in flight in a thread of `direct`."""

    algorithm: str
    blocks: int = 1
    pull: bool = False
    loads: int = 4


def choose(op: str, nbytes: int, size: int) -> How:
    """By the table. `nbytes`: of the operand (of an all-gather: of its result)."""
    return How("packets", max(1, min(32, ceil_div(nbytes, ROUND)))) if nbytes <= 512 << 10 else How("direct", 32)


def all_reduce(channel: Channel, x: int, y: int, count: int, dtype: str, *, reduce: str = "sum", how: How | None = None) -> Operation:
    """y = sum, or average, of all members' x: `count` elements at device addresses. y may be x. Called by all members."""
    nbytes = count * ITEM[dtype]
    how = how or choose("all_reduce", nbytes, channel.size)
    return _summed(channel, "all_reduce", x, y, count, 0, dtype, reduce, how)


def reduce_scatter(channel: Channel, x: int, y: int, count: int, dtype: str, *, reduce: str = "sum", how: How | None = None) -> Operation:
    """y [count] = this member's piece of the sum, or average, of all members' x [count size]. y may be this member's piece of x."""
    nbytes = count * channel.size * ITEM[dtype]
    how = how or choose("reduce_scatter", nbytes, channel.size)
    return _summed(channel, "reduce_scatter", x, y, count, count, dtype, reduce, how)


def _summed(channel: Channel, op: str, x: int, y: int, count: int, stride: int, dtype: str, reduce: str, how: How) -> Operation:
    n, me, per = channel.size, channel.me, 16 // ITEM[dtype]
    xs, ys = channel.everywhere(x, y)
    _agreed(channel, op, count, dtype, reduce, how)
    divisor = n if reduce == "average" else 1
    p: Any = _structures(most(n))["Sum"](link=channel.link(op), count=count, stride=stride, divisor=float(divisor),
                                         factor=0.0 if divisor & divisor - 1 else 1 / divisor)
    if how.algorithm == "direct":
        whole = ceil_div(count * n if stride else count, per)
        if stride and count % per:
            raise ShapeError("direct sums want pieces of whole vectors", came=f"{count} {dtype}", expected=f"a multiple of {per}",
                             do="take packets")
        p.x[:n] = xs
        p.begin, p.end = (whole * me // n, whole * (me + 1) // n)
        p.count = count * n if stride else count
        p.shift = count * me if stride else 0
        p.y[:n] = [ys[j] if j == me or not stride else 0 for j in range(n)]
    elif how.algorithm == "packets":
        p.x[me], p.y[me] = x, y
    else:
        raise GraphError(f"{op} has no such algorithm", came=how.algorithm, expected="packets, direct")
    kernel = launches.kernel("collectives/sum.cu", f"sum_{how.algorithm}", dict(source("sum", n, dtype, how.loads).defines))
    return Operation(op, (launches.launch(kernel, _blocks(how), THREADS, p),), count * ITEM[dtype])


@dataclass(frozen=True)
class _Move:
    """What one member does. `out`: member -> (own address, halves) that it is sent; `into`: member -> (own address, halves) that come from
    it. `partners`: members that take part with this one."""

    out: dict[int, tuple[int, int]]
    into: dict[int, tuple[int, int]]
    partners: tuple[int, ...]


def all_gather(channel: Channel, x: int, y: int, count: int, dtype: str, *, how: How | None = None) -> Operation:
    """y [count size] = the x [count] of all members. x may be this member's piece of y. Called by all members."""
    n, width = channel.size, ITEM[dtype]
    how = how or choose("all_gather", count * n * width, n)
    pieces = {j: (y + j * count * width, count * width // 2) for j in range(n)}
    return _moved(channel, "all_gather", _Move({j: (x, count * width // 2) for j in range(n)}, pieces, tuple(range(n))), how)


def broadcast(channel: Channel, x: int, y: int, count: int, dtype: str, *, root: int, how: How | None = None) -> Operation:
    """y = the root's x. y may be x. Called by all members."""
    n, me, halves = channel.size, channel.me, count * ITEM[dtype] // 2
    how = how or choose("broadcast", 2 * halves, n)
    out = {j: (x, halves) for j in range(n)} if me == root else {}
    return _moved(channel, "broadcast", _Move(out, {root: (y, halves)}, tuple(range(n)) if me == root else (root,)), how, root)


def all_to_all(channel: Channel, x: int, y: int, count: int, dtype: str, *, how: How | None = None) -> Operation:
    """Piece i [count] of y = piece of member i's x that is meant for this one. y may be x where packets run. Called by all members."""
    n, width = channel.size, ITEM[dtype]
    how = how or choose("all_to_all", count * n * width, n)
    if x == y and how.algorithm != "packets":
        raise ShapeError("an exchange in place wants packets", came=how.algorithm, expected="packets, or another result than the operand")
    cut = [{j: (at + j * count * width, count * width // 2) for j in range(n)} for at in (x, y)]
    return _moved(channel, "all_to_all", _Move(cut[0], cut[1], tuple(range(n))), how)


def send(channel: Channel, x: int, count: int, dtype: str, *, to: int, how: How | None = None) -> Operation:
    """x goes to a member, which makes its `receive` meanwhile. All members make an exchange, also those that it is not between: `pass_by`."""
    halves = count * ITEM[dtype] // 2
    return _moved(channel, "send", _Move({to: (x, halves)}, {}, (to,)), how or choose("send", 2 * halves, 2))


def receive(channel: Channel, y: int, count: int, dtype: str, *, source: int, how: How | None = None) -> Operation:
    """y = what a member sends."""
    halves = count * ITEM[dtype] // 2
    return _moved(channel, "receive", _Move({}, {source: (y, halves)}, (source,)), how or choose("send", 2 * halves, 2))


def pass_by(channel: Channel, how: How | None = None) -> Operation:
    """Nothing: what a member makes while two others make a send and its receive, for all tell each other where operands lie."""
    return _moved(channel, "send", _Move({}, {}, ()), how or How("packets"))


def barrier(channel: Channel) -> Operation:
    """What the members' streams did before has happened everywhere when it ends."""
    return Operation("barrier", (_meeting(channel, "barrier", tuple(range(channel.size))),), 0)


def _meeting(channel: Channel, op: str, partners: Sequence[int]) -> launches.Launch:
    kernel = launches.kernel("collectives/move.cu", "meet", dict(source("move", channel.size).defines))
    return launches.launch(kernel, 1, 32, channel.link(op, partners))


def _moved(channel: Channel, op: str, move: _Move, how: How, words: object = None) -> Operation:
    n, me = channel.size, channel.me
    nbytes = 2 * sum(halves for _, halves in move.out.values())
    _agreed(channel, "send" if op == "receive" else op, words, how)
    make = _structures(most(n))
    # every member says where it takes what comes, so that the others can write there
    landing = channel.everywhere(*(move.into.get(j, (channel.arena.address, 0))[0] for j in range(n)))
    link = channel.link(op, move.partners)
    if how.algorithm == "packets":
        p: Any = make["Packed"](link=link)
        for j in {*move.partners, me}:
            p.from_[j], p.out[j] = move.out.get(j, (0, 0))
            p.to[j], p.in_[j] = move.into.get(j, (0, 0))
        p.out[me] = min(p.out[me], p.in_[me])
        kernel = launches.kernel("collectives/move.cu", "move_packets", dict(source("move", n).defines))
        return Operation(op, (launches.launch(kernel, _blocks(how), THREADS, p),), nbytes)
    kept = channel.everywhere(*(move.out.get(j, (channel.arena.address, 0))[0] for j in range(n)))
    if how.pull:
        copies = {j: (kept[me][j], to, halves) for j, (to, halves) in move.into.items()}
    else:
        copies = {j: (at, landing[me][j], halves) for j, (at, halves) in move.out.items()}
    copies = {j: (at, to, halves) for j, (at, to, halves) in copies.items() if at != to}
    if any(at % 16 or to % 16 for at, to, _ in copies.values()):
        raise ShapeError(f"{op}: direct copies want whole vectors", came="an address off 16 bytes", expected="multiples of 16 bytes",
                         do="take packets")
    if how.algorithm == "direct":
        own = OWN_BLOCKS if me in copies else 0
        d: Any = make["Direct"](link=link, moving=_blocks(how))
        for j, (at, to, halves) in copies.items():
            d.from_[j], d.to[j], d.count[j] = at, to, halves
        kernel = launches.kernel("collectives/move.cu", "move_direct", dict(source("move", n, loads=how.loads).defines))
        return Operation(op, (launches.launch(kernel, how.blocks + own, THREADS, d),), nbytes)
    if how.algorithm != "engine":
        raise GraphError(f"{op} has no such algorithm", came=how.algorithm, expected="packets, direct, engine")
    first, last = (_meeting(channel, op, move.partners) for _ in range(2))
    engines = [_Engine(to, at, 2 * halves) for at, to, halves in copies.values() if halves]
    return Operation(op, (first, *engines, last), nbytes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Engine:
    """One copy by a copy engine."""

    target: int
    source: int
    nbytes: int

    def __call__(self, stream: Any = None) -> None:
        driver = _bindings.driver()
        _bindings.check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(self.target, self.source, self.nbytes, stream_handle(stream)))


def _blocks(how: How) -> int:
    if not 1 <= how.blocks <= BLOCKS:
        raise ShapeError("a collective's launch", came=f"{how.blocks} blocks", expected=f"1 to {BLOCKS}")
    return how.blocks


def _agreed(channel: Channel, *words: object) -> None:
    """All members of the channel make the same launch. GraphError naming who does not. Called by all ranks of `peers`."""
    text = repr(words)
    told = channel.peers.exchange(text.encode())
    wrong = [(rank, told[rank].decode()) for rank in channel.members if told[rank] != told[channel.members[0]]]
    if wrong:
        raise GraphError("members make different collectives", came=f"rank {wrong[0][0]}: {wrong[0][1]}",
                         expected=f"as rank {channel.members[0]}: {told[channel.members[0]].decode()}")
