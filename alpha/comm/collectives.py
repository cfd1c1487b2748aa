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


def reduce_scatter(group: Group, x: np.ndarray, out: np.ndarray, *, reduce: str = "sum", dtype: str = "") -> None:
    """out [n / size] = this member's piece of the tree's sum, or average, of all members' x [n]. `out` may be this member's piece of x."""
    dtype = _checked("reduce_scatter", x, out, (group.size, 1), dtype, reduce)
    x, out = x.reshape(-1), out.reshape(-1)
    algorithm = "ring" if reduce == "unordered" else "direct"
    with group.call("reduce_scatter", dtype, x.size, x.nbytes, algorithm=algorithm, reduce=reduce) as call, np.errstate(all="ignore"):
        pieces = _even(x.size, group.size)
        if reduce == "unordered":
            sums = x.copy()
            _ring_sums(call, sums, pieces)
            out[...] = sums[pieces[group.index]]
            _finish(call, out)
            return
        blocks = [_blocks(call, x, p) for p in pieces]
        start = pieces[group.index].start
        for k, own in enumerate(blocks[group.index]):
            for j in call.others():
                call.send(j, x[blocks[j][k]], kept=True)
            _total(call, x[own], out[own.start - start : own.stop - start])


def all_gather(group: Group, x: np.ndarray, out: np.ndarray, *, dtype: str = "", algorithm: str = "") -> None:
    """out [n size] = the x [n] of all members, in order. `x` may be this member's piece of out. algorithm: direct, ring."""
    dtype = _checked("all_gather", x, out, (1, group.size), dtype)
    algorithm = algorithm or group.rule.choose("all_gather", group.size, x.nbytes)
    out, n = out.reshape(-1), group.size
    with group.call("all_gather", dtype, out.size, out.nbytes, algorithm=algorithm) as call:
        pieces = _even(out.size, n)
        move(x.reshape(-1), out[pieces[group.index]])
        if algorithm == "direct":
            blocks = [_blocks(call, out, p) for p in pieces]
            for j in call.others():
                call.expect(j, [out[block] for block in blocks[j]])
            for k, own in enumerate(blocks[group.index]):
                for j in call.others():
                    call.send(j, out[own], kept=True)
                for j in call.others():
                    call.take(j, out[blocks[j][k]])
        elif algorithm == "ring":
            _ring_gather(call, out, pieces)
        else:
            raise GraphError("all_gather has no such algorithm", came=algorithm, expected="direct, ring")


def broadcast(group: Group, x: np.ndarray, out: np.ndarray, *, root: int, dtype: str = "", algorithm: str = "") -> None:
    """out = the root's x. `out` may be x. algorithm: direct, halving (a binomial tree), ring (a chain)."""
    dtype = _checked("broadcast", x, out, (1, 1), dtype)
    algorithm = algorithm or group.rule.choose("broadcast", group.size, x.nbytes)
    if algorithm not in _FROM_ROOT:
        raise GraphError("broadcast has no such algorithm", came=algorithm, expected=", ".join(_FROM_ROOT))
    x, out, n = x.reshape(-1), out.reshape(-1), group.size
    behind = (group.index - _member(group, "root", root)) % n
    parent, children = _FROM_ROOT[algorithm](behind, n)
    with group.call("broadcast", dtype, x.size, x.nbytes, algorithm=algorithm, place=root) as call:
        blocks = _blocks(call, out, slice(0, out.size))
        if behind:
            call.expect((parent + root) % n, [out[block] for block in blocks])
        for block in blocks:
            if behind:
                call.take((parent + root) % n, out[block])
            else:
                move(x[block], out[block])
            for child in children:
                call.send((child + root) % n, out[block], kept=True)


def reduce(group: Group, x: np.ndarray, out: np.ndarray, *, root: int, dtype: str = "") -> None:
    """out = the tree's sum of all members' x on the root, zeros elsewhere. `out` may be x."""
    dtype = _checked("reduce", x, out, (1, 1), dtype, "sum")
    x, out = x.reshape(-1), out.reshape(-1)
    root = _member(group, "root", root)
    with group.call("reduce", dtype, x.size, x.nbytes, reduce="sum", place=root) as call, np.errstate(all="ignore"):
        for block in _blocks(call, x, slice(0, x.size)):
            if group.index == root:
                _total(call, x[block], out[block])
            else:
                call.send(root, x[block])
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
    group = call.group
    host, local = divmod(group.index, group.together)
    here = range(host * group.together, (host + 1) * group.together)
    others = [here[(local + i) % len(here)] for i in range(1, len(here))]
    pieces = _even(x.size, len(here))
    blocks = [_blocks(call, x, piece) for piece in pieces]
    for k in range(max(map(len, blocks))):
        for j in others:
            if k < len(blocks[j - here.start]):
                call.send(j, x[blocks[j - here.start][k]])
        if k < len(blocks[local]):
            own = blocks[local][k]
            _sum(call, here, x[own], out[own])
    _halve(call, out, pieces[local], range(local, group.size, group.together))
    for k in range(max(map(len, blocks))):
        for j in others:
            if k < len(blocks[local]):
                call.send(j, out[blocks[local][k]])
        for j in others:
            if k < len(blocks[j - here.start]):
                call.take(j, out[blocks[j - here.start][k]])


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


_ALL_REDUCE = {"direct": _direct, "whole": _whole, "halving": _halving, "ring": _ring, "hosts": _hosts}

# Of a broadcast: (member behind the root, members) -> (who gives to it, to whom it gives), all counted from the root.
_FROM_ROOT = {
    "direct": lambda v, n: (0, [] if v else list(range(1, n))),
    "halving": lambda v, n: (v & (v - 1), [v + (1 << k) for k in reversed(range(n.bit_length()))
                                           if (not v or 1 << k < v & -v) and v + (1 << k) < n]),
    "ring": lambda v, n: (v - 1, [v + 1] if v + 1 < n else []),
}
