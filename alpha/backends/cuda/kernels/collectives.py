"""Collectives among GPUs as kernels: channels, launches, and which algorithm runs at which size. Floor 4.

A `Channel` is what the launches of one stream of one group share: each member's pad (kernels/collectives/link.cuh) and a record of how a
wait ended. Functions named as the ops make an `Operation` on fixed addresses, to be called with a stream or captured. Making one is
itself called by all members, in one order, because they tell each other where their operands lie; running one needs the host no more.

Bits: those of alpha/ops/collectives.py, whatever the algorithm, the number of blocks and the addresses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from alpha.backends.cuda import launches
from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.launches import Operation, ceil_div, structure
from alpha.backends.cuda.lib import Operand
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.device import stream_handle
from alpha.cuda_runtime.memory import Arena, Span, download, fill, upload
from alpha.cuda_runtime.peers import Peers
from alpha.cuda_runtime.priority import Fence, FirstStream
from alpha.errors import GraphError, RankError, ShapeError
from alpha.types import Attrs, TensorType

ITEM = {"bf16": 2, "f32": 4}
OPS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "receive")
"""Their places are what a record calls them."""
SUMS = ("all_reduce", "reduce_scatter")

BLOCKS, MEMBERS, THREADS, DEEP = 64, 8, 512, 2
"""As kernels/collectives/link.cuh has them."""
ROUND = THREADS * DEEP * 16
"""Bytes of payload that a block sends in a round of packets."""
SLOT = 2 * ROUND
LARGE = 1 << 62
_COUNTS = 3 * BLOCKS * MEMBERS * 4
"""Bytes of a pad before its slots."""
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


def sources(op: str, size: int) -> list[Source]:
    """Every compiled file that TABLE may load for an op among so many."""
    file = "sum" if op in SUMS else "move"
    loads = sorted({how.loads for _, how in TABLE[most(size)].get("send" if op == "receive" else op, ())} or {How.loads})
    return [source(file, size, dtype, n) for dtype in (ITEM if op in SUMS else ("",)) for n in loads]


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
        "Relayed": structure("Relayed", "", ("link", link), ("from_", ctypes.c_uint64), ("to", pointers), ("count", ctypes.c_uint64),
                             ("root", ctypes.c_uint32)),
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
        self.nbytes = _COUNTS + BLOCKS * self.size * 2 * SLOT
        most(self.size)
        self.arena = peers.arena(self.nbytes, name="channel")
        self.pads = [peers.windows[-1].bases[rank] for rank in self.members]
        self.staged, self._stages = 0, tuple[int, ...]()
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

    def stage(self, nbytes: int) -> tuple[int, ...]:
        """Where each member's stage lies in this process: `nbytes` or more of shared memory, one for all launches of the channel, for they
        follow one another. Grown where more is asked for; what was made before keeps the old one, which is freed with the peers' arenas.
        `staged`: how large it is. Called by all ranks of `peers`, by those that need none with 0."""
        most_bytes = max(int(told) for told in self.peers.exchange(b"%d" % nbytes))
        if most_bytes > self.staged:
            self.staged = self.peers.arena(most_bytes, name="stage of a channel").nbytes
            self._stages = tuple(self.peers.windows[-1].bases[rank] for rank in self.members)
        return self._stages

    @functools.cached_property
    def side(self) -> FirstStream:
        """A second stream, which launches of the channel fork and join back. Its blocks come first, as those of collectives do: peers wait
        for them."""
        return FirstStream()

    def close(self) -> None:
        """Gives back what is this member's own. Nothing may be under way; what peers see is freed with `peers`."""
        self.record.free()
        if "side" in self.__dict__:
            self.side.close()

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
        """Sets all counts, as if there had been so many meetings and rounds (modulo 2^32), and leaves the flags of a turn long ago in every
        slot. Called by all members, when nothing runs: for who looks at what happens when counts wrap."""
        self.reset()
        fill(Span(self.arena.address, self.nbytes), 0xAB)
        upload(Span(self.arena.address, _COUNTS), np.full(_COUNTS // 4, turn & 0xFFFFFFFF, np.uint32))
        _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize())
        self.peers.exchange(b"set")

    def flags(self, block: int, member: int) -> np.ndarray:
        """[2, positions]: the turn that each packet of this member's slots from a member says, both words alike."""
        at = self.arena.address + _COUNTS + (block * self.size + member) * 2 * SLOT
        words = download(Span(at, 2 * SLOT), (2, SLOT // 16, 2, 2), np.uint32)[..., 1]
        return np.where(words[..., 0] == words[..., 1], words[..., 0], np.uint32(0))


# -- what runs -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """algorithm: packets, direct, relayed (a broadcast that members hand on) or engine (a copy engine between two meetings; a sum: copy
    engines move, and a kernel adds); blocks: of the launch; pull: what moves directly or by an engine is read by who gets it, else written
    by who has it; loads: vectors of each member in flight in a thread, but of packets; parts: of a sum by engines, in how many the last
    piece is sent, added and handed on."""

    algorithm: str
    blocks: int = 1
    pull: bool = False
    loads: int = 4
    parts: int = 2


KIB, MIB = 1 << 10, 1 << 20
_Rows = tuple[tuple[int, How], ...]
_TWO: dict[str, _Rows] = {
    "all_reduce": ((MIB // 2, How("packets", 32)), (8 * MIB, How("direct", 32)), (64 * MIB, How("direct", 16)),
                   (LARGE, How("engine", 32))),
    "reduce_scatter": ((MIB, How("packets", 32)), (LARGE, How("direct", 32))),
    "all_gather": ((MIB // 2, How("packets", 32)), (8 * MIB, How("direct", 32)), (LARGE, How("direct", 64))),
    "all_to_all": ((MIB // 2, How("packets", 32)), (8 * MIB, How("direct", 32)), (LARGE, How("direct", 64))),
    "broadcast": ((MIB // 2, How("packets", 32)), (32 * MIB, How("direct", 32)), (LARGE, How("engine"))),
    "send": ((MIB // 2, How("packets", 32)), (32 * MIB, How("direct", 32)), (LARGE, How("engine"))),
}
_MORE: dict[str, _Rows] = {
    "all_reduce": ((64 * KIB, How("packets", 16)), (MIB, How("direct", 32, loads=2)), (8 * MIB, How("direct", 32)),
                   (48 * MIB, How("direct", 16)), (LARGE, How("engine", 64))),
    "reduce_scatter": ((64 * KIB, How("packets", 16)), (4 * MIB, How("direct", 32, loads=2)), (128 * MIB, How("direct", 64)),
                       (LARGE, How("engine", 64, parts=4))),
    "all_gather": ((64 * KIB, How("packets", 16)), (2 * MIB, How("direct", 16)), (LARGE, How("direct", 64))),
    "all_to_all": ((64 * KIB, How("packets", 16)), (2 * MIB, How("direct", 16)), (LARGE, How("direct", 64))),
    "broadcast": ((64 * KIB, How("packets", 16)), (MIB, How("direct", 32)), (LARGE, How("relayed", 64))),
    "send": _TWO["send"],
}
TABLE: dict[int, dict[str, _Rows]] = {2: _TWO, 4: _MORE, 8: _MORE}
"""Most members -> op -> (bytes up to which, how), by measurements on two and on four H200, of the longest sums on two and on four H100
(docs/collectives.md); eight were never measured. Between two a reduce-scatter by engines was little faster at 1 GiB and slower below, so
it stays direct. `nbytes` of an operand, of a gather's result."""


def choose(op: str, nbytes: int, size: int, whole: bool = True) -> How:
    """By TABLE; packets have no more blocks than one round needs. `whole`: all pieces are whole vectors at whole addresses, which only
    packets do without. The choice moves no bit."""
    rows = TABLE[most(size)][op]
    how = next(how for most_bytes, how in rows if nbytes <= most_bytes) if whole else rows[0][1]
    if how.algorithm != "packets":
        return how
    each = nbytes if op in ("all_reduce", "broadcast", "send") else ceil_div(nbytes, size)
    return replace(how, blocks=max(1, min(how.blocks, ceil_div(each, ROUND))))


def _chosen(channel: Channel, how: How | None, op: str, nbytes: int, *places: int) -> How:
    """`how`, or what the table says. `places`: addresses and lengths in bytes that must be whole vectors on every member: all tell each
    other, so that all choose alike. Called by all members."""
    told = channel.peers.exchange(b"" if all(place % 16 == 0 for place in places) else b"apart")
    return how or choose(op, nbytes, channel.size, whole=not any(told[rank] for rank in channel.members))


def all_reduce(channel: Channel, x: int, y: int, count: int, dtype: str, *, reduce: str = "sum", how: How | None = None) -> Operation:
    """y = sum, or average, of all members' x: `count` elements at device addresses. y may be x. Called by all members."""
    nbytes = count * ITEM[dtype]
    how = _chosen(channel, how, "all_reduce", nbytes, x, y)
    return _summed(channel, "all_reduce", x, y, count, 0, dtype, reduce, how)


def reduce_scatter(channel: Channel, x: int, y: int, count: int, dtype: str, *, reduce: str = "sum", how: How | None = None) -> Operation:
    """y [count] = this member's piece of the sum, or average, of all members' x [count size]. y may be this member's piece of x."""
    nbytes = count * channel.size * ITEM[dtype]
    how = _chosen(channel, how, "reduce_scatter", nbytes, x, y, count * ITEM[dtype])
    return _summed(channel, "reduce_scatter", x, y, count, count, dtype, reduce, how)


def _summed(channel: Channel, op: str, x: int, y: int, count: int, stride: int, dtype: str, reduce: str, how: How) -> Operation:
    n, me, per = channel.size, channel.me, 16 // ITEM[dtype]
    total = count * n if stride else count
    xs, ys = channel.everywhere(x, y)
    _agreed(channel, range(n), op, count, dtype, reduce, how)
    stages = channel.stage(staged(total * ITEM[dtype], n) if how.algorithm == "engine" else 0)
    divisor = n if reduce == "average" else 1
    words = {"stride": stride, "divisor": float(divisor), "factor": 0.0 if divisor & divisor - 1 else 1 / divisor}
    if how.algorithm in ("direct", "engine"):
        launches.addresses(op, x=x, y=y)
        if stride and count % per:
            raise ShapeError(f"{how.algorithm} sums want pieces of whole vectors", came=f"{count} {dtype}",
                             expected=f"a multiple of {per}", do="take packets")
        words |= {"count": total, "shift": count * me if stride else 0}
    elif how.algorithm == "packets":
        words |= {"count": count}
    else:
        raise GraphError(f"{op} has no such algorithm", came=how.algorithm, expected="packets, direct, engine")
    if how.algorithm == "engine":
        return _by_engines(channel, op, (x, y), ys, stages, total * ITEM[dtype], dtype, how, words)
    p: Any = _structures(most(n))["Sum"](link=channel.link(op), **words)
    if how.algorithm == "direct":
        p.begin, p.end = _piece(total * ITEM[dtype], n, me)
        p.x[:n] = xs
        p.y[:n] = [ys[j] if j == me or not stride else 0 for j in range(n)]
    else:
        p.x[me], p.y[me] = x, y
    return Operation(op, (launches.launch(_adding(n, dtype, how), _blocks(how), THREADS, p),), count * ITEM[dtype])


def _adding(n: int, dtype: str, how: How) -> Any:
    """The kernel of a sum."""
    name = "sum_packets" if how.algorithm == "packets" else "sum_direct"
    return launches.kernel("collectives/sum.cu", name, dict(source("sum", n, dtype, how.loads).defines))


def _piece(nbytes: int, size: int, owner: int, parts: int = 1, part: int = 0) -> tuple[int, int]:
    """The vectors, first and behind the last, of an operand of `nbytes` that a member owns; or of a part of them."""
    vectors = ceil_div(nbytes, 16)
    begin, end = vectors * owner // size, vectors * (owner + 1) // size
    return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts


def staged(nbytes: int, size: int) -> int:
    """Bytes of a member's stage that a sum by engines over an operand of `nbytes` takes: its piece, of each other member."""
    return (size - 1) * 16 * ceil_div(ceil_div(nbytes, 16), size)


def _by_engines(channel: Channel, op: str, own: tuple[int, int], ys: Sequence[int], stages: Sequence[int], nbytes: int, dtype: str,
                how: How, words: Mapping[str, float]) -> Operation:
    """A sum whose bytes copy engines move. `own`: operand and result of this member; `ys`, `stages`: of all, as this one sees them;
    `nbytes`: of an operand; `words`: of the kernel that adds.

    One engine sends to one peer after the other, each its piece of this member's operand, into the peer's stage. The kernel adds what the
    stage and the own operand hold, in the tree's order. The last piece is sent in parts, and each part is added on the side stream while
    the next one moves. Then the finished piece goes to all, to the next member in the same parts.

    Why nobody reads too early or writes too late. Copies of a member follow one another on its stream, and peers come in the order me + 1,
    me + 2, ..., so that a member's last peer is the one before it.
      A stage may be written from the start: the last user of it, an earlier launch of the channel, ended with a meeting behind all adds.
      Part q of a stage is whole when meeting q is over: every member comes to it behind its whole pieces and its parts up to q.
      A result at peer j may be overwritten behind add q, which comes behind meeting q. That peer has reached this launch, and has sent
        what its operand holds at the same place: it is the part q of its last piece for its predecessor, a whole piece for all others.
        Its own kernel reads its own piece alone. So results may lie on operands.
      Behind the last meeting all results are there, all stages are read, and all operands were sent: each may be used anew.
    Meetings stand on the side stream so that no copy waits for one. They keep one order on all members: each is in front of an add, and
    the last one is behind them all.
    """
    n, me = channel.size, channel.me
    if not 1 <= how.parts <= BLOCKS:
        raise ShapeError(f"{op} by engines", came=f"{how.parts} parts", expected=f"1 to {BLOCKS}")
    peers, (x, y), kernel = [(me + k) % n for k in range(1, n)], own, _adding(n, dtype, how)

    def slot(owner: int, sender: int) -> int:
        """Where the operand of a sender would begin, so that its piece for the owner lies in the owner's stage."""
        begin, _ = _piece(nbytes, n, owner)
        return stages[owner] + (sender - owner - 1) % n * (staged(nbytes, n) // (n - 1)) - 16 * begin

    def copy(to: int, at: int, owner: int, parts: int = 1, part: int = 0) -> _Engine:
        """Of the operand or result that begins at `at`, a part of an owner's piece."""
        begin, end = (min(16 * v, nbytes) for v in _piece(nbytes, n, owner, parts, part))
        return _Engine(to + begin, at + begin, end - begin)

    def add(part: int) -> launches.Launch:
        begin, end = _piece(nbytes, n, me, how.parts, part)
        p: Any = _structures(most(n))["Sum"](link=channel.link(op, ()), begin=begin, end=end, **words)
        p.x[:n] = [x if j == me else slot(me, j) for j in range(n)]
        p.y[me] = y
        return launches.launch(kernel, _blocks(how), THREADS, p)

    *others, last = peers
    meeting, parts = _meeting(channel, op, range(n)), range(how.parts)
    taken = peers if op == "all_reduce" else []
    sends = [copy(slot(j, me), x, j) for j in others]
    adds = _Adds(channel.side, [(copy(slot(last, me), x, last, how.parts, q), meeting, add(q)) for q in parts],
                 [copy(ys[j], y, me, how.parts, q) for j in taken[:1] for q in parts])
    results = [copy(ys[j], y, me) for j in taken[1:]]
    return Operation(op, (*sends, adds, *results, meeting), nbytes if taken else nbytes // n)  # type: ignore[arg-type]


class _Adds:
    """The parts of a sum by engines: (copy, meeting, add) of each, and the copies of what is done. Those of `parts` begin behind all that
    the stream of the call has; copies stay on it, meetings and adds run beside, and are joined back."""

    def __init__(self, side: FirstStream, parts: Sequence[tuple[_Engine, launches.Launch, launches.Launch]],
                 done: Sequence[_Engine]) -> None:
        self._side, self._parts, self._done = side, parts, done
        self._sent, self._added = [[Fence() for _ in parts] for _ in range(2)]

    def __call__(self, stream: Any = None) -> None:
        side = self._side.handle
        for (copy, meeting, add), sent, added in zip(self._parts, self._sent, self._added, strict=True):
            copy(stream)
            sent.record(stream)
            sent.hold(side)
            meeting(side)
            add(side)
            added.record(side)
        for copy, added in zip(self._done, self._added):
            added.hold(stream)
            copy(stream)
        self._added[-1].hold(stream)


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
    how = _chosen(channel, how, "all_gather", count * n * width, x, y, count * width)
    pieces = {j: (y + j * count * width, count * width // 2) for j in range(n)}
    return _moved(channel, "all_gather", _Move({j: (x, count * width // 2) for j in range(n)}, pieces, tuple(range(n))), how)


def broadcast(channel: Channel, x: int, y: int, count: int, dtype: str, *, root: int, how: How | None = None) -> Operation:
    """y = the root's x. y may be x. Called by all members."""
    n, me, halves = channel.size, channel.me, count * ITEM[dtype] // 2
    how = _chosen(channel, how, "broadcast", 2 * halves, x, y)
    if how.algorithm == "relayed":
        return _relayed(channel, x, y, halves, root, how)
    out = {j: (x, halves) for j in range(n)} if me == root else {}
    return _moved(channel, "broadcast", _Move(out, {root: (y, halves)}, tuple(range(n)) if me == root else (root,)), how, None, root)


def all_to_all(channel: Channel, x: int, y: int, count: int, dtype: str, *, how: How | None = None) -> Operation:
    """Piece i [count] of y = piece of member i's x that is meant for this one. y may be x where packets run. Called by all members."""
    n, width = channel.size, ITEM[dtype]
    how = _chosen(channel, how, "all_to_all", count * n * width, x, y, count * width, int(x == y))
    if x == y and how.algorithm != "packets":
        raise ShapeError("an exchange in place wants packets", came=how.algorithm, expected="packets, or another result than the operand")
    cut = [{j: (at + j * count * width, count * width // 2) for j in range(n)} for at in (x, y)]
    return _moved(channel, "all_to_all", _Move(cut[0], cut[1], tuple(range(n))), how)


def send(channel: Channel, x: int, count: int, dtype: str, *, to: int, how: How | None = None) -> Operation:
    """x goes to a member, which makes its `receive` meanwhile. Members that an exchange is not between make a `pass_by`."""
    halves = count * ITEM[dtype] // 2
    how = _chosen(channel, how, "send", 2 * halves, x)
    return _moved(channel, "send", _Move({to: (x, halves)}, {}, (to,)), how, (channel.me, to))


def receive(channel: Channel, y: int, count: int, dtype: str, *, source: int, how: How | None = None) -> Operation:
    """y = what a member sends."""
    halves = count * ITEM[dtype] // 2
    how = _chosen(channel, how, "send", 2 * halves, y)
    return _moved(channel, "receive", _Move({}, {source: (y, halves)}, (source,)), how, (source, channel.me))


def pass_by(channel: Channel) -> Operation:
    """Nothing: what a member makes while two others make a send and its receive, for all tell each other where operands lie."""
    return _moved(channel, "send", _Move({}, {}, ()), _chosen(channel, How("packets"), "send", 0), ())


def barrier(channel: Channel) -> Operation:
    """What the members' streams did before has happened everywhere when it ends."""
    return Operation("barrier", (_meeting(channel, "barrier", tuple(range(channel.size))),), 0)


def _meeting(channel: Channel, op: str, partners: Sequence[int]) -> launches.Launch:
    kernel = launches.kernel("collectives/move.cu", "meet", dict(source("move", channel.size).defines))
    return launches.launch(kernel, 1, 32, channel.link(op, partners))


def _relayed(channel: Channel, x: int, y: int, halves: int, root: int, how: How) -> Operation:
    n, me = channel.size, channel.me
    _agreed(channel, range(n), "broadcast", halves, root, how)
    at, (to,) = x if me == root else y, channel.everywhere(y)
    launches.addresses("broadcast", x=at, y=y)
    p: Any = _structures(most(n))["Relayed"](link=channel.link("broadcast"), from_=at, count=halves, root=root)
    p.to[:n] = to
    kernel = launches.kernel("collectives/move.cu", "move_relayed", dict(source("move", n, loads=how.loads).defines))
    return Operation("broadcast", (launches.launch(kernel, _blocks(how), THREADS, p),), 2 * halves)


def _moved(channel: Channel, op: str, move: _Move, how: How, pair: tuple[int, ...] | None = None, root: int = -1) -> Operation:
    """`pair`: the members of an exchange, sender first; () where this member is not of it. `root`: of a broadcast."""
    n, me = channel.size, channel.me
    halves = max((halves for _, halves in (*move.out.values(), *move.into.values())), default=0)
    nbytes = 2 * sum(halves for _, halves in move.out.values())
    _agreed(channel, range(n) if pair is None else pair, "send" if op == "receive" else op, halves, pair, root, how)
    make = _structures(most(n))
    # every member says where it takes what comes, so that the others can write there, and where lies what it sends, so that they can read
    # it: whatever the algorithm, for those that pass by do not know it
    nowhere = channel.arena.address, 0
    told = channel.everywhere(*(side.get(j, nowhere)[0] for side in (move.into, move.out) for j in range(n)))
    landing, kept = told[:n], told[n:]
    link = channel.link(op, move.partners)
    if how.algorithm == "packets":
        p: Any = make["Packed"](link=link)
        for j in {*move.partners, me}:
            p.from_[j], p.out[j] = move.out.get(j, (0, 0))
            p.to[j], p.in_[j] = move.into.get(j, (0, 0))
        p.out[me] = min(p.out[me], p.in_[me])
        kernel = launches.kernel("collectives/move.cu", "move_packets", dict(source("move", n).defines))
        return Operation(op, (launches.launch(kernel, _blocks(how), THREADS, p),), nbytes)
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
    engines = [_Engine(to, at, 2 * halves) for at, to, halves in copies.values()]
    return Operation(op, (first, *engines, last), nbytes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Engine:
    """One copy by a copy engine."""

    target: int
    source: int
    nbytes: int

    def __call__(self, stream: Any = None) -> None:
        if not self.nbytes:
            return
        driver = _bindings.driver()
        _bindings.check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(self.target, self.source, self.nbytes, stream_handle(stream)))


def _blocks(how: How) -> int:
    if not 1 <= how.blocks <= BLOCKS:
        raise ShapeError("a collective's launch", came=f"{how.blocks} blocks", expected=f"1 to {BLOCKS}")
    return how.blocks


def _agreed(channel: Channel, members: Sequence[int], *words: object) -> None:
    """These members make the same launch. GraphError naming who does not. Called by all ranks of `peers`."""
    told = channel.peers.exchange(repr(words).encode())
    ranks = [channel.members[j] for j in members]
    for rank in ranks:
        if told[rank] != told[ranks[0]]:
            raise GraphError("members make different collectives", came=f"rank {rank}: {told[rank].decode()}",
                             expected=f"as rank {ranks[0]}: {told[ranks[0]].decode()}", do="give all members the same op, size and type")


# -- components ------------------------------------------------------------------------------------------------------------------


class HasChannels(Protocol):
    """What a binder here needs of what it is handed."""

    channels: Mapping[str, Channel]
    """Group -> the channel of this rank's tuple."""


Run = Callable[[int], None]


def _channel(gpu: HasChannels, attrs: Attrs) -> Channel:
    """The channel of the group that a node names. GraphError where there is none, or it has another size."""
    channel = getattr(gpu, "channels", {}).get(attrs["group"])
    if channel is None:
        raise GraphError("a collective among GPUs runs over a channel", came=f"group {attrs['group']} without one",
                         expected="a channel of shared memory for each group", do="run on one GPU, or ranks on the CPU (--nproc)")
    if channel.size != attrs["size"]:
        raise GraphError(f"group {attrs['group']} has another size than the Program says", came=channel.size, expected=attrs["size"])
    return channel


def bind_all_reduce(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """y = sum, or average, of all members' x."""
    (x,), (y,), channel = ins, outs, _channel(gpu, attrs)
    return all_reduce(channel, x.address, y.address, x.type.size, x.type.dtype, reduce=str(attrs["reduce"]))


def bind_reduce_scatter(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """y = this member's piece of the sum, or average, of all members' x."""
    (x,), (y,), channel = ins, outs, _channel(gpu, attrs)
    return reduce_scatter(channel, x.address, y.address, y.type.size, y.type.dtype, reduce=str(attrs["reduce"]))


def bind_all_gather(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """y = all members' x, joined."""
    (x,), (y,), channel = ins, outs, _channel(gpu, attrs)
    return all_gather(channel, x.address, y.address, x.type.size, x.type.dtype)


def bind_broadcast(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """y = the root's x."""
    (x,), (y,), channel = ins, outs, _channel(gpu, attrs)
    return broadcast(channel, x.address, y.address, x.type.size, x.type.dtype, root=int(str(attrs["root"])))


def bind_all_to_all(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """Piece i of y = piece of member i's x that is meant for this one."""
    (x,), (y,), channel = ins, outs, _channel(gpu, attrs)
    return all_to_all(channel, x.address, y.address, x.type.size // channel.size, x.type.dtype)


def bind_send(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """x goes to a member."""
    (x,) = ins
    return send(_channel(gpu, attrs), x.address, x.type.size, x.type.dtype, to=int(str(attrs["to"])))


def bind_receive(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """y = what a member sends."""
    (y,) = outs
    return receive(_channel(gpu, attrs), y.address, y.type.size, y.type.dtype, source=int(str(attrs["source"])))


def bind_barrier(gpu: HasChannels, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
    """All members have come."""
    return barrier(_channel(gpu, attrs))


_GROUPS: Mapping[int, tuple[str, tuple[int, ...]]] = {2: ("sm90", (2,)), 4: ("x4.sm90", (3, 4))}
"""GPUs that a component requires -> how its id ends, and the groups that it takes. Each compiled limit of members is another file, with an
order of additions, slots and a table of its own, so it is gated among as many. Larger groups have no component."""


def groups_of(component: Component) -> tuple[int, ...]:
    """How many members a component's groups may have."""
    return next(groups for ending, groups in _GROUPS.values() if component.id == f"{component.op}.{ending}")


def _component(op: str, binder: Callable[..., Run], gpus: int, inplace: tuple[tuple[int, int], ...] = ()) -> Component:
    """What they owe their rows stands in their cases."""
    ending, groups = _GROUPS[gpus]
    limit = Limit(text=f"a group of {' or '.join(map(str, groups))}", holds=functools.partial(_fits, groups))
    return Component(id=f"{op}.{ending}", kind="program", profile="device_collective", backend="cuda", op=op, implementation=binder,
                     envelope=Envelope(dtypes=tuple(ITEM), limits=(limit,)), inplace=inplace,
                     requires=("sm_90a", *(f"gpus>={n}" for n in _GROUPS if n <= gpus)),
                     binaries=Binaries(functools.partial(sources, op, gpus)), contract="alpha.gates.contracts.device_ranks")


def _fits(groups: tuple[int, ...], types: Sequence[TensorType], attrs: Attrs) -> bool:
    return attrs["size"] in groups


KERNELS = tuple(_component(op, binder, gpus, inplace) for gpus in _GROUPS for op, binder, inplace in (
    ("all_reduce", bind_all_reduce, ((0, 0),)),
    ("reduce_scatter", bind_reduce_scatter, ()),
    ("all_gather", bind_all_gather, ()),
    ("broadcast", bind_broadcast, ((0, 0),)),
    ("all_to_all", bind_all_to_all, ()),
    ("send", bind_send, ()),
    ("receive", bind_receive, ()),
    ("barrier", bind_barrier, ()),
))
