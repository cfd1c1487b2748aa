"""State in units, and Layout: where every element of every named tensor lives, so that resharding is arithmetic on boxes. Floor 2.

A *unit* (embedding, block i, head, expert) is contiguous; its tensors lie in canonical-name order, each 256-byte aligned; the unit is
padded with zeros to UNIT_MULTIPLE elements, a number that no world size changes. So a refactored graph does not move a checkpoint, and
a shard is a cut of each unit. Padding never enters a norm, a hash or a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod

from alpha.errors import GraphError, ShapeError
from alpha.types import ITEMSIZE

ALIGN_BYTES = 256
UNIT_MULTIPLE = 4096
"""Elements; a unit divides evenly, on 256-byte boundaries in 4-byte elements, over up to 64 shards."""


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
    """Cut each unit evenly over `ranks` (a divisor of 64): the sharded optimizer's layout. Local arrays are the concatenated cuts."""
    if ranks < 1 or 64 % ranks:
        raise ShapeError("a unit cannot be cut evenly", came=f"{ranks} shards", expected="a divisor of 64")
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    local = 0
    for unit in layout.units:
        cut = (unit.stop - unit.start) // ranks
        for rank in range(ranks):
            lo, hi = unit.start + rank * cut, unit.start + (rank + 1) * cut
            for t in layout.tensors:
                start = layout.offsets[t.name]
                a, b = max(lo, start), min(hi, start + t.size)
                if a < b:
                    for box, first in flat_boxes(t.shape, a - start, b - start):
                        pieces[rank].append(Piece(t.name, box, local + (start + first) - lo, row_major(t.shape)))
        local += cut
    return Layout({t.name: t.shape for t in layout.tensors}, tuple(map(tuple, pieces)))


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

    Arithmetic on boxes only: no data is touched. GraphError if a target element is held by no source rank.
    """
    copies: list[Copy] = []
    for rank, pieces in enumerate(target.ranks):
        for piece in pieces:
            missing = [piece.box]
            for other, held in enumerate(source.ranks):
                for p in held:
                    if p.tensor != piece.tensor or not missing:
                        continue
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
            if missing:
                raise GraphError("a target piece is held by no source rank", came=f"{piece.tensor} {missing}")
    return tuple(copies)


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
