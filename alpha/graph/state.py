"""State in units, and Layout: where every element of every named tensor lives, so that resharding is arithmetic on boxes. Floor 2.

A *unit* (embedding, block i, head, expert) is contiguous; its tensors lie in canonical-name order, each 256-byte aligned; the unit is
padded with zeros to UNIT_MULTIPLE elements, a number that no world size changes. So a refactored graph does not move a checkpoint, and
a shard is a cut of each unit. Padding never enters a norm, a hash or a count.

*Leaves* are what a norm is summed over: every unit is PARTS equal parts, every part is pieces of at most LEAF elements. No cut of the units
over a number of ranks that divides PARTS splits a leaf, so one process and many ranks add the same numbers in the same order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from alpha.errors import GraphError, ShapeError
from alpha.types import ITEMSIZE

ALIGN_BYTES = 256
UNIT_MULTIPLE = 4096
"""Elements; a unit divides evenly, on 256-byte boundaries in 4-byte elements, over up to 64 shards."""

PARTS = 64
"""Equal parts of a unit, which leaves never cross."""

LEAF = 1 << 18
"""Most elements of a leaf. A plan lists all leaves: those of 70 billion parameters are still listed in seconds."""

Leaves = tuple[tuple[tuple[int, int], ...], ...]
"""Of each leaf, in order, the (offset, length) of what lies in it, padding left out; a leaf of padding alone is empty."""


@dataclass(frozen=True)
class Init:
    """How a parameter starts: 'normal' (std), 'zeros', 'ones'. Drawn from Philox keyed by (seed, tensor name), never by order."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor of the state. `decay`: weight decay applies; `lr_scale` multiplies the learning rate."""

    name: str
    shape: tuple[int, ...]
    unit: str
    init: Init = Init("zeros")
    decay: bool = False
    lr_scale: float = 1.0

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


def natural(name: str) -> tuple[object, ...]:
    """Sort key in which block.2 comes before block.10; the canonical order of units and of tensors in a unit."""
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part)


@dataclass(frozen=True)
class UnitRange:
    """Elements [start, stop) of a kind of state that belong to one unit, padding included."""

    name: str
    start: int
    stop: int


class StateLayout:
    """Offsets of named tensors in one flat array of `dtype`. `offsets[name]`: first element; `size`: elements, padding included."""

    def __init__(self, tensors: Iterable[TensorSpec], dtype: str = "f32") -> None:
        self.dtype = dtype
        self.tensors = tuple(sorted(tensors, key=lambda t: (natural(t.unit), natural(t.name))))
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            raise ShapeError("two state tensors share a name", came=sorted({n for n in names if names.count(n) > 1}))
        step = ALIGN_BYTES // ITEMSIZE[dtype]
        self.offsets: dict[str, int] = {}
        self.units: list[UnitRange] = []
        at = 0
        for i, t in enumerate(self.tensors):
            if i and self.tensors[i - 1].unit != t.unit:
                at = self._close(self.tensors[i - 1].unit, at)
            at = (at + step - 1) // step * step
            self.offsets[t.name] = at
            at += t.size
        self.size = self._close(self.tensors[-1].unit, at) if self.tensors else 0
        self.by_name = {t.name: t for t in self.tensors}
        self._starts = [self.offsets[t.name] for t in self.tensors]

    def _close(self, unit: str, at: int) -> int:
        start = self.units[-1].stop if self.units else 0
        stop = (at + UNIT_MULTIPLE - 1) // UNIT_MULTIPLE * UNIT_MULTIPLE
        self.units.append(UnitRange(unit, start, stop))
        return stop

    def kept_in(self, dtype: str) -> StateLayout:
        """The same offsets, in elements, of another element type: a narrower copy of the same tensors."""
        other = copy(self)
        other.dtype = dtype
        return other

    def segments(self) -> tuple[tuple[int, int, float, float], ...]:
        """(offset, length, decay flag, learning-rate scale) per tensor, in order: the table one optimizer launch walks."""
        return tuple((self.offsets[t.name], t.size, float(t.decay), float(t.lr_scale)) for t in self.tensors)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) per tensor: what enters a norm, a hash or a count."""
        return tuple((self.offsets[t.name], t.size) for t in self.tensors)

    def shard(self, ranks: int) -> ShardedLayout:
        """The flat cut over `ranks`: what each of them holds of this layout."""
        return ShardedLayout(self, ranks)

    def leaves(self, most: int = LEAF) -> Leaves:
        """What a norm is summed over, `most` elements at most: part after part, in each part unit after unit. So these are the leaves of
        any cut over ranks, rank after rank."""
        return self.shard(1).leaves(0, most)

    def runs(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of every tensor, cut where a part of its unit begins: the same elements as `ranges`, in the same order, of which
        no cut over a number of ranks that divides PARTS splits one."""
        found = []
        for unit in self.units:
            part = (unit.stop - unit.start) // PARTS
            for _, a, b in self.inside(unit.start, unit.stop):
                stops = [*range(unit.start + ((a - unit.start) // part + 1) * part, b, part), b]
                found += [(start, stop - start) for start, stop in zip([a, *stops], stops)]
        return tuple(found)

    def inside(self, start: int, stop: int) -> Iterator[tuple[TensorSpec, int, int]]:
        """(tensor, first, last + 1) of what lies of each tensor in the elements [start, stop) of the flat array, in order."""
        at = bisect_right(self._starts, start) - 1
        for t in self.tensors[max(at, 0) :]:
            offset = self.offsets[t.name]
            if offset >= stop:
                return
            if max(start, offset) < min(stop, offset + t.size):
                yield t, max(start, offset), min(stop, offset + t.size)


class ShardedLayout:
    """A flat cut of a StateLayout over ranks: rank r holds the r-th of `ranks` cuts of every unit, one after the other in unit order.

    Every rank's flat array has `size` elements of `dtype`, and a unit lies at the same place in each (`units`). A cut has a multiple of 64
    elements. Where `ranks` divides PARTS the cuts of a unit are exactly the unit, and no leaf is split. Any other number is for moving
    state only (`flat_shards`, `segments`, `ranges`): the last cuts of a unit are then padded, or all padding.
    """

    def __init__(self, whole: StateLayout, ranks: int) -> None:
        if ranks < 1:
            raise ShapeError("state is cut over one rank or more", came=ranks, expected="1, 2, 3, ...")
        self.whole, self.ranks, self.dtype = whole, ranks, whole.dtype
        self.units: list[UnitRange] = []
        step = UNIT_MULTIPLE // PARTS
        at = 0
        for unit in whole.units:
            cut = -(-(unit.stop - unit.start) // (ranks * step)) * step
            self.units.append(UnitRange(unit.name, at, at + cut))
            at += cut
        self.size = at

    def cuts(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(local start, first element, last + 1) of what this rank holds of each unit: elements of the whole flat array."""
        if not 0 <= rank < self.ranks:
            raise ShapeError("no such rank", came=rank, expected=f"0 to {self.ranks - 1}")
        for unit, local in zip(self.whole.units, self.units):
            cut = local.stop - local.start
            lo, hi = unit.start + rank * cut, unit.start + (rank + 1) * cut
            yield local.start, min(lo, unit.stop), min(hi, unit.stop)

    def segments(self, rank: int) -> tuple[tuple[int, int, float, float], ...]:
        """(local offset, length, decay flag, learning-rate scale) of what this rank holds of each tensor, in order."""
        return tuple((local + a - lo, b - a, float(t.decay), float(t.lr_scale))
                     for local, lo, hi in self.cuts(rank) for t, a, b in self.whole.inside(lo, hi))

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(local offset, length) of the same."""
        return tuple((offset, length) for offset, length, _, _ in self.segments(rank))

    def blocks(self, rank: int, blocks: Iterable[tuple[int, int]]) -> Leaves:
        """Of blocks (first element, last + 1) of the whole layout, what this rank holds, at local offsets: a leaf of one run for each block
        of its own, an empty one for each of another rank. ShapeError where a cut splits one of them."""
        held, found, at = [c for c in self.cuts(rank) if c[1] < c[2]], list[tuple[tuple[int, int], ...]](), 0
        for start, stop in blocks:
            while at + 1 < len(held) and held[at + 1][1] <= start:
                at += 1
            local, lo, hi = held[at]
            if max(start, lo) >= min(stop, hi):
                found.append(())
                continue
            if start < lo or stop > hi:
                raise ShapeError("a cut splits a block of the norm", came=f"elements {start} to {stop}, rank {rank} holds {lo} to {hi}",
                                 expected="blocks inside the parts of a unit", do="cut them from the layout's runs")
            found.append(((local + start - lo, stop - start),))
        return tuple(found)

    def leaves(self, rank: int, most: int = LEAF) -> Leaves:
        """This rank's leaves at local offsets. Every rank has as many; all ranks' in rank order are those of the whole layout. ShapeError
        where a cut would split leaves."""
        if PARTS % self.ranks:
            raise ShapeError("a cut over so many ranks splits leaves of the norm", came=self.ranks, expected=f"a divisor of {PARTS}")
        found = []
        own = range(rank * PARTS // self.ranks, (rank + 1) * PARTS // self.ranks)
        held = list(self.cuts(rank))
        for part in own:
            for unit, (local, lo, _) in zip(self.whole.units, held):
                length = (unit.stop - unit.start) // PARTS
                part_start = unit.start + part * length
                count = -(-length // most)
                step = -(-length // count)
                for k in range(count):
                    a, b = part_start + k * step, min(part_start + (k + 1) * step, part_start + length)
                    found.append(tuple((local + x - lo, y - x) for _, x, y in self.whole.inside(a, b)))
        return tuple(found)


Box = tuple[tuple[int, int], ...]
"""Half-open interval per dimension."""


@dataclass(frozen=True)
class Piece:
    """A box of a named global tensor held by one rank at local element `offset + sum((i_d - lo_d) * strides_d)`."""

    tensor: str
    box: Box
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Move the elements of `box` of `tensor` from one rank's piece to another's."""

    tensor: str
    box: Box
    source: int
    source_offset: int
    source_strides: tuple[int, ...]
    target: int
    target_offset: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Per rank, the pieces it holds. `covers` proves that every element of every tensor is held; replicas are allowed."""

    shapes: dict[str, tuple[int, ...]]
    ranks: tuple[tuple[Piece, ...], ...]

    def covers(self) -> None:
        """GraphError unless the boxes of each tensor cover it exactly or in whole replicas (every element held equally often, >= 1)."""
        for name, shape in self.shapes.items():
            boxes = [p.box for pieces in self.ranks for p in pieces if p.tensor == name]
            held = sum(prod(hi - lo for lo, hi in b) for b in boxes)
            distinct = _union_size(boxes)
            if distinct != prod(shape):
                raise GraphError("a layout does not cover a tensor", came=f"{name}: {distinct} of {prod(shape)} elements",
                                 expected="every element at least once", do="check the shard boundaries")
            if held % prod(shape):
                raise GraphError("a layout holds some elements of a tensor more often than others", came=f"{name}: {held} held",
                                 expected=f"a multiple of {prod(shape)}")


def flat_shards(layout: StateLayout, ranks: int) -> Layout:
    """The pieces of a flat cut over any number of ranks: the sharded optimizer's layout."""
    sharded = layout.shard(ranks)
    pieces = []
    for rank in range(ranks):
        mine = []
        for local, lo, hi in sharded.cuts(rank):
            for t, a, b in layout.inside(lo, hi):
                start = layout.offsets[t.name]
                mine += [Piece(t.name, box, local + (start + first) - lo, row_major(t.shape))
                         for box, first in flat_boxes(t.shape, a - start, b - start)]
        pieces.append(tuple(mine))
    return Layout({t.name: t.shape for t in layout.tensors}, tuple(pieces))


def tensor_shards(layout: StateLayout, axis: dict[str, int], ranks: int) -> Layout:
    """Cut each tensor named in `axis` along that axis over `ranks`; tensors not named are replicated. Local arrays are dense, in order."""
    out: list[tuple[Piece, ...]] = []
    for rank in range(ranks):
        at, mine = 0, []
        for t in layout.tensors:
            box: list[tuple[int, int]] = [(0, n) for n in t.shape]
            if t.name in axis:
                n = t.shape[axis[t.name]]
                if n % ranks:
                    raise ShapeError("a tensor cannot be cut evenly", came=f"{t.name} {t.shape} axis {axis[t.name]} over {ranks}")
                box[axis[t.name]] = (rank * n // ranks, (rank + 1) * n // ranks)
            shape = tuple(hi - lo for lo, hi in box)
            mine.append(Piece(t.name, tuple(box), at, row_major(shape)))
            at += prod(shape)
        out.append(tuple(mine))
    return Layout({t.name: t.shape for t in layout.tensors}, tuple(out))


def whole(layout: StateLayout) -> Layout:
    """One rank that holds everything at its StateLayout offsets."""
    return Layout({t.name: t.shape for t in layout.tensors},
                  (tuple(Piece(t.name, tuple((0, n) for n in t.shape), layout.offsets[t.name], row_major(t.shape))
                         for t in layout.tensors),))


def reshard(source: Layout, target: Layout) -> tuple[Copy, ...]:
    """Copies that fill every target piece, each element exactly once per target piece, from the lowest source rank that holds it.

    Arithmetic on boxes only: no data is touched. Near linear in the number of pieces where those of a tensor begin at different places
    along one of its axes. GraphError if a target element is held by no source rank.
    """
    held = _Held(source)
    copies: list[Copy] = []
    for rank, pieces in enumerate(target.ranks):
        for piece in pieces:
            missing = [piece.box]
            for other, p in held.meeting(piece):
                rest: list[Box] = []
                for box in missing:
                    common = intersect(box, p.box)
                    if common is None:
                        rest.append(box)
                        continue
                    copies.append(Copy(piece.tensor, common, other, local_offset(p, common), p.strides,
                                       rank, local_offset(piece, common), piece.strides))
                    rest += subtract(box, common)
                missing = rest
                if not missing:
                    break
            if missing:
                raise GraphError("a target piece is held by no source rank", came=f"{piece.tensor} {missing}")
    return tuple(copies)


class _Held:
    """The pieces of a layout by tensor, sorted by where they begin along the axis on which most of them begin apart. Of equal boxes only
    the lowest rank's is kept: the others would never be read."""

    def __init__(self, layout: Layout) -> None:
        found: dict[str, dict[Box, tuple[int, Piece]]] = {}
        for rank, pieces in enumerate(layout.ranks):
            for p in pieces:
                found.setdefault(p.tensor, {}).setdefault(p.box, (rank, p))
        self._axis: dict[str, int] = {}
        self._sorted: dict[str, list[tuple[int, Piece]]] = {}
        self._starts: dict[str, list[int]] = {}
        self._furthest: dict[str, list[int]] = {}
        for name, boxes in found.items():
            dims = len(next(iter(boxes)))
            if dims == 0:
                self._sorted[name] = list(boxes.values())
                continue
            axis = max(range(dims), key=lambda d: len({box[d][0] for box in boxes}))
            order = sorted(boxes.values(), key=lambda held: held[1].box[axis])
            self._axis[name], self._sorted[name] = axis, order
            self._starts[name] = [p.box[axis][0] for _, p in order]
            self._furthest[name] = list(accumulate((p.box[axis][1] for _, p in order), max))

    def meeting(self, piece: Piece) -> list[tuple[int, Piece]]:
        """(rank, piece) of all whose interval on the tensor's axis meets that of `piece`, lowest rank first."""
        order = self._sorted.get(piece.tensor, [])
        if piece.tensor in self._axis:
            lo, hi = piece.box[self._axis[piece.tensor]]
            order = order[bisect_right(self._furthest[piece.tensor], lo) : bisect_left(self._starts[piece.tensor], hi)]
        return sorted(order, key=lambda held: held[0])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense row-major array."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def local_offset(piece: Piece, box: Box) -> int:
    """Local element index at which the first element of `box` (inside the piece) lies."""
    return piece.offset + sum((b[0] - p[0]) * s for b, p, s in zip(box, piece.box, piece.strides))


def intersect(a: Box, b: Box) -> Box | None:
    """Common box, or None if empty."""
    out = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return None if any(lo >= hi for lo, hi in out) else out


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that make up a minus b, where b lies inside a."""
    out: list[Box] = []
    rest = list(a)
    for d, ((lo, hi), (blo, bhi)) in enumerate(zip(a, b)):
        if lo < blo:
            out.append((*rest[:d], (lo, blo), *a[d + 1 :]))
        if bhi < hi:
            out.append((*rest[:d], (bhi, hi), *a[d + 1 :]))
        rest[d] = (blo, bhi)
    return out


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Row-major elements [start, stop) of an array as at most 2*ndim - 1 boxes, each with the flat index of its first element."""
    if not shape:
        if start < stop:
            yield (), 0
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner if stop > start else start // inner
    if stop <= start:
        return
    if start % inner == 0 and stop % inner == 0:
        yield ((first, stop // inner), *((0, n) for n in shape[1:])), start
        return
    if first == last:
        for box, at in flat_boxes(shape[1:], start - first * inner, stop - first * inner):
            yield ((first, first + 1), *box), first * inner + at
        return
    cut_lo = first * inner if start % inner == 0 else (first + 1) * inner
    cut_hi = stop // inner * inner
    yield from flat_boxes(shape, start, cut_lo)
    yield from flat_boxes(shape, cut_lo, cut_hi)
    yield from flat_boxes(shape, cut_hi, stop)


def _union_size(boxes: list[Box]) -> int:
    seen: list[Box] = []
    total = 0
    for box in boxes:
        parts = [box]
        for other in seen:
            parts = [q for p in parts for q in _minus(p, intersect(p, other))]
        total += sum(prod(hi - lo for lo, hi in p) for p in parts)
        seen.append(box)
    return total


def _minus(box: Box, common: Box | None) -> list[Box]:
    return [box] if common is None else subtract(box, common)
