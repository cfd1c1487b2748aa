"""Collectives over the links of a group. Rows: alpha/ops/collectives.py, which says the bits. Floor 4.

Every function takes the caller's Group and flat or shaped C-contiguous arrays, writes every element of `out`, and returns when `out` may be
read and `x` may be written. Counts may be 0. All members call the same function with the same words; whoever does not is named.
Operands travel in blocks of one message. All members go through the blocks in one order, and hand over a block before they wait for one,
so two messages of room on a link are enough and nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpha.comm.group import Call, Group, move
from alpha.errors import GraphError, ShapeError
from alpha.ops.numerics import round_to
from alpha.types import FLOATS, NUMPY

_SUMMED = (*FLOATS, "i64", "i32")


# -- public ----------------------------------------------------------------------------------------------------------------------


def all_reduce(group: Group, x: np.ndarray, out: np.ndarray, *, reduce: str = "sum", dtype: str = "", algorithm: str = "") -> None:
    """out = the tree's sum, or average, of all members' x. `out` may be x.

    reduce: sum, average, or unordered (a sum around a ring, whose order of additions depends on the owner of a piece).
    dtype: where the array does not say it, as bf16. algorithm: direct, whole, halving, hosts; default: the group's rule.
    """
    dtype = _checked("all_reduce", x, out, (1, 1), dtype, reduce)
    if reduce == "unordered":
        algorithm = "ring"
    algorithm = algorithm or group.rule.choose("all_reduce", group.size, x.nbytes, group.together)
    if algorithm not in _ALL_REDUCE:
        raise GraphError("all_reduce has no such algorithm", came=algorithm, expected=", ".join(_ALL_REDUCE))
    with group.call("all_reduce", dtype, x.size, x.nbytes, algorithm=algorithm, reduce=reduce) as call, np.errstate(all="ignore"):
        _ALL_REDUCE[algorithm](call, x.reshape(-1), out.reshape(-1))


def reduce_scatter(group: Group, x: np.ndarray, out: np.ndarray, *, reduce: str = "sum", dtype: str = "", algorithm: str = "") -> None:
    """out [n / size] = this member's piece of the tree's sum, or average, of all members' x [n]. `out` may be this member's piece of x.
    reduce: as of `all_reduce`. algorithm: direct, hosts."""
    dtype = _checked("reduce_scatter", x, out, (group.size, 1), dtype, reduce)
    algorithm = "ring" if reduce == "unordered" else algorithm or group.rule.choose("reduce_scatter", group.size, x.nbytes, group.together)
    if algorithm not in _REDUCE_SCATTER:
        raise GraphError("reduce_scatter has no such algorithm", came=algorithm, expected=", ".join(_REDUCE_SCATTER))
    x, out = x.reshape(-1), out.reshape(-1)
    with group.call("reduce_scatter", dtype, x.size, x.nbytes, algorithm=algorithm, reduce=reduce) as call, np.errstate(all="ignore"):
        _REDUCE_SCATTER[algorithm](call, x, out, _even(x.size, group.size))


def all_gather(group: Group, x: np.ndarray, out: np.ndarray, *, dtype: str = "", algorithm: str = "") -> None:
    """out [n size] = the x [n] of all members, in order. `x` may be this member's piece of out. algorithm: direct, ring, hosts."""
    dtype = _checked("all_gather", x, out, (1, group.size), dtype)
    algorithm = algorithm or group.rule.choose("all_gather", group.size, x.nbytes, group.together)
    if algorithm not in _ALL_GATHER:
        raise GraphError("all_gather has no such algorithm", came=algorithm, expected=", ".join(_ALL_GATHER))
    out = out.reshape(-1)
    with group.call("all_gather", dtype, out.size, out.nbytes, algorithm=algorithm) as call:
        pieces = _even(out.size, group.size)
        move(x.reshape(-1), out[pieces[group.index]])
        _ALL_GATHER[algorithm](call, out, pieces)


def broadcast(group: Group, x: np.ndarray, out: np.ndarray, *, root: int, dtype: str = "", algorithm: str = "") -> None:
    """out = the root's x. `out` may be x. algorithm: direct, halving (a binomial tree), ring (a chain).

    Tree and chain come to each host once: members stand in them host by host, the root first."""
    dtype = _checked("broadcast", x, out, (1, 1), dtype)
    algorithm = algorithm or group.rule.choose("broadcast", group.size, x.nbytes, group.together)
    if algorithm not in _FROM_ROOT:
        raise GraphError("broadcast has no such algorithm", came=algorithm, expected=", ".join(_FROM_ROOT))
    x, out, hosts = x.reshape(-1), out.reshape(-1), Hosts(group)
    root = _member(group, "root", root)
    line = hosts.line(root)
    behind = line.index(group.index)
    parent, children = _FROM_ROOT[algorithm](behind, group.size)
    with group.call("broadcast", dtype, x.size, x.nbytes, algorithm=algorithm, place=root) as call:
        blocks = _blocks(call, out, slice(0, out.size))
        if behind:
            call.expect(line[parent], [out[block] for block in blocks])
        for block in blocks:
            if behind:
                call.take(line[parent], out[block])
            else:
                move(x[block], out[block])
            for child in children:
                call.send(line[child], out[block], kept=True)


def reduce(group: Group, x: np.ndarray, out: np.ndarray, *, root: int, dtype: str = "") -> None:
    """out = the tree's sum of all members' x on the root, zeros elsewhere. `out` may be x. On each host the member at the root's place adds
    first, so a host sends what it has added."""
    dtype = _checked("reduce", x, out, (1, 1), dtype, "sum")
    x, out, hosts = x.reshape(-1), out.reshape(-1), Hosts(group)
    root = _member(group, "root", root)
    first = hosts.column(root)[hosts.mine]
    with group.call("reduce", dtype, x.size, x.nbytes, reduce="sum", place=root) as call, np.errstate(all="ignore"):
        for block in _blocks(call, x, slice(0, x.size)):
            if group.index == first:
                _sum(call, hosts.here, x[block], out[block])
            if group.index == root:
                if hosts.count > 1:
                    _sum(call, hosts.column(root), out[block], out[block])
                _finish(call, out[block])
            else:
                call.send(*((root, out[block]) if group.index == first else (first, x[block])))
                out[block] = 0


def all_to_all(group: Group, x: np.ndarray, out: np.ndarray, *, dtype: str = "") -> None:
    """Piece j of x goes to member j; piece j of out comes from member j. `out` may be x."""
    dtype = _checked("all_to_all", x, out, (1, 1), dtype)
    if x.size % group.size:
        raise ShapeError("all_to_all cuts its operand in equal pieces", came=x.size, expected=f"a multiple of {group.size}")
    x, out = x.reshape(-1), out.reshape(-1)
    with group.call("all_to_all", dtype, x.size, x.nbytes) as call:
        pieces = _even(x.size, group.size)
        move(x[pieces[group.index]], out[pieces[group.index]])
        blocks = [_blocks(call, x, p) for p in pieces]
        for k in range(len(blocks[0])):
            for j in call.others():
                call.send(j, x[blocks[j][k]])
            for j in call.others():
                call.take(j, out[blocks[j][k]])


def send(group: Group, x: np.ndarray, *, to: int, dtype: str = "") -> None:
    """Hand x to a member, which receives as many elements."""
    dtype, x = _dtype("send", x, dtype), x.reshape(-1)
    if _member(group, "to", to) == group.index:
        raise GraphError("nobody sends to itself", came=f"member {to}", expected="another member")
    with group.call("send", dtype, x.size, x.nbytes, pair=(group.index, to)) as call:
        for block in _blocks(call, x, slice(0, x.size)):
            call.send(to, x[block], kept=True)


def receive(group: Group, out: np.ndarray, *, source: int, dtype: str = "") -> None:
    """out = what a member sends."""
    dtype, out = _dtype("receive", out, dtype), out.reshape(-1)
    if _member(group, "source", source) == group.index:
        raise GraphError("nobody receives from itself", came=f"member {source}", expected="another member")
    with group.call("send", dtype, out.size, out.nbytes, pair=(source, group.index)) as call:
        blocks = _blocks(call, out, slice(0, out.size))
        call.expect(source, [out[block] for block in blocks])
        for block in blocks:
            call.take(source, out[block])


def barrier(group: Group) -> None:
    """Return once all members have called it: dissemination in log2 rounds (Hensgen, Finkel and Manber, Two algorithms for barrier
    synchronization, International Journal of Parallel Programming 17(1), 1988)."""
    with group.call("barrier", "bool", 0, 0) as call:
        me, n, distance = group.index, group.size, 1
        while distance < n:
            call.send((me + distance) % n, _NOTHING)
            call.take((me - distance) % n, _NOTHING)
            distance *= 2


_NOTHING = np.empty(0, np.bool_)


# -- operands --------------------------------------------------------------------------------------------------------------------


def _dtype(op: str, x: np.ndarray, dtype: str) -> str:
    """The element type's name, when the array can be one."""
    name = dtype or next((name for name, held in NUMPY.items() if held == x.dtype), str(x.dtype))
    if NUMPY.get(name) != x.dtype or not x.flags.c_contiguous:
        raise ShapeError(f"{op} takes contiguous arrays of a known type", came=f"{x.dtype}{list(x.shape)}, strides {x.strides}",
                         expected=", ".join(NUMPY))
    return name


def _checked(op: str, x: np.ndarray, out: np.ndarray, ratio: tuple[int, int], dtype: str, reduce: str = "") -> str:
    """The element type's name. `ratio`: sizes of operand and result are as these."""
    name = _dtype(op, x, dtype)
    _dtype(op, out, dtype)
    if x.dtype != out.dtype or x.size * ratio[1] != out.size * ratio[0]:
        raise ShapeError(f"{op}: operand and result do not fit", came=f"{x.dtype}{list(x.shape)} and {out.dtype}{list(out.shape)}",
                         expected=f"elements of one type, {ratio[0]} to {ratio[1]}")
    if reduce and (name not in _SUMMED or (reduce == "average" and name not in FLOATS)):
        raise ShapeError(f"{op}: no {reduce} of this type", came=name, expected="floats, or integers and reduce = 'sum'")
    return name


def _member(group: Group, word: str, place: int) -> int:
    if not 0 <= place < group.size:
        raise GraphError(f"{word} is the place of a member", came=place, expected=f"0 to {group.size - 1}")
    return place


def _even(count: int, n: int) -> list[slice]:
    """n pieces of [0, count) whose sizes differ by one at most."""
    return [slice(count * i // n, count * (i + 1) // n) for i in range(n)]


def _blocks(call: Call, x: np.ndarray, piece: slice) -> list[slice]:
    """A piece of x in messages: at least one, so that members meet even over nothing."""
    most = call.group.transport.payload_bytes // x.itemsize
    return [slice(i, min(i + most, piece.stop)) for i in range(piece.start, max(piece.stop, piece.start + 1), most)]


class Hosts:
    """Members of a group by host: `count` hosts of as many members each, one after the other; where the rule knows of none that could add
    first, one host or a host for each (Rule.together).

    mine: the host of this member. here: the members there. near: the others of them, the next one first. far: those at this member's place
    on the other hosts, the next one first.
    """

    def __init__(self, group: Group) -> None:
        self._size, self._each = group.size, group.together
        self.count, (self.mine, place) = group.size // self._each, divmod(group.index, self._each)
        self.here = range(self.mine * self._each, (self.mine + 1) * self._each)
        self.near = [self.here[(place + i) % self._each] for i in range(1, self._each)]
        self.far = self.column(group.index)[self.mine + 1 :] + self.column(group.index)[: self.mine]

    def column(self, member: int) -> list[int]:
        """The members at a member's place on each host, in order."""
        return list(range(member % self._each, self._size, self._each))

    def turned(self, member: int) -> list[int]:
        """The same, from that on this member's host on."""
        column = self.column(member)
        return column[self.mine :] + column[: self.mine]

    def line(self, root: int) -> list[int]:
        """All members host by host, counted from the root on, whose host is the first."""
        host, place = divmod(root, self._each)
        return [(host + s) % self.count * self._each + (place + i) % self._each for s in range(self.count) for i in range(self._each)]


# -- sums ------------------------------------------------------------------------------------------------------------------------


def _total(call: Call, own: np.ndarray, out: np.ndarray) -> None:
    """out = the finished sum of one block of all members."""
    _sum(call, range(call.group.size), own, out)
    _finish(call, out)


def _sum(call: Call, members: Sequence[int], own: np.ndarray, out: np.ndarray) -> None:
    """out = the sum of one block: this member's and the next message of every other one of these, read where they lie."""
    group = call.group
    parts = [own if j == group.index else call.receive(j, own) for j in members]
    _add(group, parts, out, 0)
    for j in members:
        if j != group.index:
            call.release(j)


def _add(group: Group, parts: Sequence[np.ndarray], out: np.ndarray, level: int) -> None:
    """out = the sum of the parts in the tree: left half the largest power of two below their number. `out` may be one of them."""
    n = len(parts)
    if n == 1:
        out[...] = parts[0]
        return
    half = 1 << ((n - 1).bit_length() - 1)
    sums = []
    for side, into in zip((parts[:half], parts[half:]), group.partials(level, out)):
        if len(side) > 1:
            _add(group, side, into, level + 1)
        sums.append(into if len(side) > 1 else side[0])
    np.add(sums[0], sums[1], out=out)


def _finish(call: Call, out: np.ndarray) -> None:
    """What follows the additions: one division, one rounding, one pattern for what is no number."""
    about = call.about
    if about.dtype not in FLOATS:
        return
    if about.reduce == "average":
        np.divide(out, call.group.size, out=out)
    if about.dtype == "bf16":
        out[...] = round_to(out, "bf16")
    canonical(out)


def canonical(out: np.ndarray) -> None:
    """Give every NaN of floats the one pattern."""
    if out.size and np.isnan(out.min()):  # min passes NaN on, and is one pass without a result of its own size
        out[np.isnan(out)] = np.nan


# -- algorithms of all_reduce ----------------------------------------------------------------------------------------------------


def _direct(call: Call, x: np.ndarray, out: np.ndarray) -> None:
    """Each member owns a piece: it adds what all others send of theirs, and sends the sum to all."""
    me = call.group.index
    blocks = [_blocks(call, x, p) for p in _even(x.size, call.group.size)]
    for k in range(max(map(len, blocks))):
        for j in call.others():
            if k < len(blocks[j]):
                call.send(j, x[blocks[j][k]])
        if k < len(blocks[me]):
            own = blocks[me][k]
            _total(call, x[own], out[own])
            for j in call.others():
                call.send(j, out[own])
        for j in call.others():
            if k < len(blocks[j]):
                call.take(j, out[blocks[j][k]])


def _whole(call: Call, x: np.ndarray, out: np.ndarray) -> None:
    """Each member sends all of its operand to all others, and adds everything: one hop."""
    for block in _blocks(call, x, slice(0, x.size)):
        for j in call.others():
            call.send(j, x[block])
        _total(call, x[block], out[block])


def _halving(call: Call, x: np.ndarray, out: np.ndarray) -> None:
    """Recursive halving, then recursive doubling, among all."""
    move(x, out)
    _halve(call, out, slice(0, out.size), range(call.group.size))


def _hosts(call: Call, x: np.ndarray, out: np.ndarray) -> None:
    """Each member owns a piece among those of its host, and adds what they send of it. Those who own the same piece on each host halve and
    double it among themselves, so each byte of a host's sum leaves it once. Then the piece goes to all on the host.

    The sum of a host is a subtree of the tree of all members (Rule.together), and the hosts' sums are added as that tree adds them.
    """
    me, hosts = call.group.index, Hosts(call.group)
    pieces = dict(zip(hosts.here, _even(x.size, len(hosts.here))))
    blocks = {j: _blocks(call, x, piece) for j, piece in pieces.items()}
    for k in range(max(map(len, blocks.values()))):
        for j in hosts.near:
            if k < len(blocks[j]):
                call.send(j, x[blocks[j][k]])
        if k < len(blocks[me]):
            own = blocks[me][k]
            _sum(call, hosts.here, x[own], out[own])
    _halve(call, out, pieces[me], hosts.column(me))
    for k in range(max(map(len, blocks.values()))):
        for j in hosts.near:
            if k < len(blocks[me]):
                call.send(j, out[blocks[me][k]])
        for j in hosts.near:
            if k < len(blocks[j]):
                call.take(j, out[blocks[j][k]])


def _halve(call: Call, out: np.ndarray, whole: slice, members: Sequence[int]) -> None:
    """A range of `out` becomes the finished sum of that of these members, nearest neighbour first: bits of the tree.

    The tree of n members is a chain of full subtrees, whose sizes are the powers of two in n, largest first: T0 + (T1 + (T2 + ...)).
    Each subtree halves within itself, at distance 1, 2, 4 and so on. Then the last subtree hands its sums to the one before, and so on to
    the first, which finishes. The way back is the same, reversed.
    """
    starts, bits = _subtrees(len(members))
    me = members.index(call.group.index)
    mine = max(i for i, start in enumerate(starts) if start <= me)
    local, here = me - starts[mine], bits[mine]
    ranges = [whole]  # before each halving, and after the last
    for k in range(here):
        low, high = _halves(ranges[-1])
        keep, give = (high, low) if local >> k & 1 else (low, high)
        partner = members[starts[mine] + (local ^ 1 << k)]
        _exchange(call, partner, partner, out, give, keep, add=True)
        ranges.append(keep)
    above, below = [], []
    if mine:  # members of the subtree before, each of which owns a part of this member's range
        above = [(members[starts[mine - 1] + other], _range(whole, other, bits[mine - 1]))
                 for other in range(local, 1 << bits[mine - 1], 1 << here)]
    if mine + 1 < len(starts):
        below = [(members[starts[mine + 1] + local % (1 << bits[mine + 1])], ranges[-1])]
    for member, part in below:
        _receive_blocks(call, member, out, part, add=True)
    for member, part in above:
        _send_blocks(call, member, out, part)
    if not mine:
        for block in _blocks(call, out, ranges[-1]):
            _finish(call, out[block])
    for member, part in above:
        _receive_blocks(call, member, out, part, add=False)
    for member, part in below:
        _send_blocks(call, member, out, part)
    for k in reversed(range(here)):
        low, high = _halves(ranges[k])
        own, other = (high, low) if local >> k & 1 else (low, high)
        partner = members[starts[mine] + (local ^ 1 << k)]
        _exchange(call, partner, partner, out, own, other, add=False)


def _subtrees(n: int) -> tuple[list[int], list[int]]:
    """First members and log2 sizes of the full subtrees of the tree of n, largest first."""
    bits = [k for k in reversed(range(n.bit_length())) if n >> k & 1]
    return [sum(1 << b for b in bits[:i]) for i in range(len(bits))], bits


def _halves(whole: slice) -> tuple[slice, slice]:
    middle = (whole.start + whole.stop) // 2
    return slice(whole.start, middle), slice(middle, whole.stop)


def _range(whole: slice, local: int, bits: int) -> slice:
    """What a member of a subtree of 2^bits members owns after halving."""
    found = whole
    for k in range(bits):
        found = _halves(found)[local >> k & 1]
    return found


def _exchange(call: Call, to: int, source: int, out: np.ndarray, give: slice, take: slice, *, add: bool) -> None:
    """Send one range of `out` to a member and receive another one from a member, block by block."""
    sent, taken = _blocks(call, out, give), _blocks(call, out, take)
    for k in range(max(len(sent), len(taken))):
        if k < len(sent):
            call.send(to, out[sent[k]])
        if k < len(taken):
            _into(call, source, out[taken[k]], add)


def _into(call: Call, source: int, block: np.ndarray, add: bool) -> None:
    if add:
        np.add(block, call.receive(source, block), out=block)
        call.release(source)
    else:
        call.take(source, block)


def _send_blocks(call: Call, to: int, out: np.ndarray, part: slice) -> None:
    for block in _blocks(call, out, part):
        call.send(to, out[block])


def _receive_blocks(call: Call, source: int, out: np.ndarray, part: slice, *, add: bool) -> None:
    for block in _blocks(call, out, part):
        _into(call, source, out[block], add)


def _ring(call: Call, x: np.ndarray, out: np.ndarray) -> None:
    """Sums around a ring, then the finished pieces around it once more: unordered."""
    move(x, out)
    pieces = _even(out.size, call.group.size)
    _ring_sums(call, out, pieces)
    _finish(call, out[pieces[call.group.index]])
    _ring_gather(call, out, pieces)


def _ring_sums(call: Call, sums: np.ndarray, pieces: Sequence[slice]) -> None:
    """Each piece travels around the ring to its owner, and each member on its way adds its own."""
    me, n = call.group.index, call.group.size
    for step in range(1, n):
        _exchange(call, (me + 1) % n, (me - 1) % n, sums, pieces[(me - step) % n], pieces[(me - step - 1) % n], add=True)


def _ring_gather(call: Call, out: np.ndarray, pieces: Sequence[slice]) -> None:
    """Each member's piece travels around the ring."""
    me, n = call.group.index, call.group.size
    for step in range(n - 1):
        _exchange(call, (me + 1) % n, (me - 1) % n, out, pieces[(me - step) % n], pieces[(me - step - 1) % n], add=False)


# -- algorithms of scatters and gathers ------------------------------------------------------------------------------------------


def _scatter(call: Call, x: np.ndarray, out: np.ndarray, pieces: Sequence[slice]) -> None:
    """Each member sends all others their pieces, and adds what it gets of its own."""
    blocks = [_blocks(call, x, p) for p in pieces]
    start = pieces[call.group.index].start
    for k, own in enumerate(blocks[call.group.index]):
        for j in call.others():
            call.send(j, x[blocks[j][k]], kept=True)
        _total(call, x[own], out[own.start - start : own.stop - start])


def _ring_scatter(call: Call, x: np.ndarray, out: np.ndarray, pieces: Sequence[slice]) -> None:
    """Sums around a ring: unordered."""
    sums = x.copy()
    _ring_sums(call, sums, pieces)
    out[...] = sums[pieces[call.group.index]]
    _finish(call, out)


def _host_scatter(call: Call, x: np.ndarray, out: np.ndarray, pieces: Sequence[slice]) -> None:
    """Each member adds on its host what goes to the members at its place on all hosts, and sends them the sums. So of the sum for a member
    one message comes from each other host, not one from each member there. Bits: as of `_hosts`."""
    me, hosts = call.group.index, Hosts(call.group)
    blocks = [_blocks(call, x, p) for p in pieces]
    start, spare = pieces[me].start, np.empty_like(x[blocks[me][0]])
    for k, mine in enumerate(blocks[me]):
        own = out[mine.start - start : mine.stop - start]
        for s in (*range(1, hosts.count), 0):
            for j in hosts.near:
                call.send(j, x[blocks[hosts.turned(j)[s]][k]], kept=True)
            to = hosts.turned(me)[s]
            added = own if to == me else spare[: own.size]
            _sum(call, hosts.here, x[blocks[to][k]], added)
            if to != me:
                call.send(to, added)
        if hosts.count > 1:
            _sum(call, hosts.column(me), own, own)
        _finish(call, own)


def _gather(call: Call, out: np.ndarray, pieces: Sequence[slice]) -> None:
    """Each member sends its piece to all others."""
    blocks = [_blocks(call, out, p) for p in pieces]
    for j in call.others():
        call.expect(j, [out[block] for block in blocks[j]])
    for k, own in enumerate(blocks[call.group.index]):
        for j in call.others():
            call.send(j, out[own], kept=True)
        for j in call.others():
            call.take(j, out[blocks[j][k]])


def _host_gather(call: Call, out: np.ndarray, pieces: Sequence[slice]) -> None:
    """Each member sends its piece to those at its place on other hosts, and all that it has to those on its own. So each piece comes to a
    host once."""
    me, hosts = call.group.index, Hosts(call.group)
    blocks = [_blocks(call, out, p) for p in pieces]
    for j in hosts.far:
        call.expect(j, [out[block] for block in blocks[j]])
    for j in hosts.near:
        call.expect(j, [out[blocks[i][k]] for k in range(len(blocks[me])) for i in hosts.turned(j)])
    for k, own in enumerate(blocks[me]):
        for j in hosts.far:
            call.send(j, out[own], kept=True)
        for s, source in enumerate(hosts.turned(me)):
            if source != me:
                call.take(source, out[blocks[source][k]])
            for j in hosts.near:
                call.send(j, out[blocks[source][k]], kept=True)
            for j in hosts.near:
                call.take(j, out[blocks[hosts.turned(j)[s]][k]])


_ALL_REDUCE = {"direct": _direct, "whole": _whole, "halving": _halving, "ring": _ring, "hosts": _hosts}
_REDUCE_SCATTER = {"direct": _scatter, "ring": _ring_scatter, "hosts": _host_scatter}
_ALL_GATHER = {"direct": _gather, "ring": _ring_gather, "hosts": _host_gather}

# Of a broadcast: (member behind the root, members) -> (who gives to it, to whom it gives), all counted from the root.
_FROM_ROOT = {
    "direct": lambda v, n: (0, [] if v else list(range(1, n))),
    "halving": lambda v, n: (v & (v - 1), [v + (1 << k) for k in reversed(range(n.bit_length()))
                                           if (not v or 1 << k < v & -v) and v + (1 << k) < n]),
    "ring": lambda v, n: (v - 1, [v + 1] if v + 1 < n else []),
}
