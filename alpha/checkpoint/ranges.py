"""Range files: what one rank holds of a checkpoint, in blocks with a checksum each, and the index that says what lies where. Floor 5.

    rank-00001-of-00004.state   dense boxes of named tensors, one after another at multiples of ALIGN bytes, zeros between them
    rank-00001-of-00004.json    size, bytes of a block, checksum of every block; kind, tensor, box and place of every piece

Checksums of blocks are XXH3 of 128 bits: they tell accidents apart at the speed of memory, so that the disk alone bounds a save. Seals
are SHA-256: the manifest holds that of every index. A block is the unit of reading: it is checked before a byte of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from alpha.checkpoint.disk import Disk
from alpha.errors import CorruptError, GraphError
from alpha.files import json_of, open_regular, read_regular
from alpha.graph.state import Box, Copy, Layout, Piece, StateLayout, flat_boxes, flat_shards, row_major, whole
from alpha.types import NUMPY

BLOCK = 1 << 22
"""Bytes of a block: large enough to be read at the disk's full rate, small enough to name what is damaged."""

ALIGN = 64
"""Bytes at whose multiples pieces and blocks begin: no element crosses a block."""

MOST_BLOCK = 1 << 26
"""Bytes of the largest block that is read: an index cannot ask for more memory."""

MOST_INDEX = 1 << 28
"""Bytes of the largest index: that of a terabyte in one file has a twentieth of it."""

STATE, INDEX = ".state", ".json"

States = Mapping[str, tuple[StateLayout, np.ndarray]]
"""Kind of state -> its layout and its flat array [layout.size]."""


class Flat(Protocol):
    """A flat array, or what stands for one that lies elsewhere."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


class Copies(Protocol):
    """How what is saved comes from where it lies into host memory. `begin`: the copies that follow are of the state as it is. `copy`:
    elements from `start` on to `target`, which holds them once `wait` has returned; what later changes the state does not show there.
    `room`: memory u8[nbytes] that copies may go to, zero elsewhere; that of the call before where it fits."""

    def room(self, nbytes: int) -> np.ndarray: ...
    def begin(self) -> None: ...
    def copy(self, source: Any, start: int, target: np.ndarray) -> None: ...
    def end(self) -> None: ...
    def wait(self) -> None: ...


class OfArrays:
    """Copies of arrays: each is there when `copy` returns."""

    def __init__(self) -> None:
        self._room: np.ndarray | None = None

    def room(self, nbytes: int) -> np.ndarray:
        """As Copies says."""
        if self._room is None or self._room.nbytes != nbytes:
            self._room = np.zeros(nbytes, np.uint8)
        return self._room

    def begin(self) -> None:
        """Nothing: a copy is of what the array is then."""

    def copy(self, source: np.ndarray, start: int, target: np.ndarray) -> None:
        """As Copies says."""
        target[...] = source[start : start + target.size]

    def end(self) -> None:
        """Nothing is on its way."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class Held:
    """A dense box of a tensor of one kind of state, from byte `at` of a range file on. `itemsize`: bytes of an element."""

    kind: str
    tensor: str
    box: Box
    at: int
    itemsize: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(hi - lo for lo, hi in self.box)

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.at + prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Range:
    """A range file as its index tells it. `sums`: XXH3-128 (hex) of every block; none where the whole file was checked when it was opened
    (alpha/checkpoint/npy.py)."""

    path: Path
    size: int
    block: int
    sums: tuple[str, ...]
    held: tuple[Held, ...]


def stem(rank: int, ranks: int) -> str:
    """The name of a rank's two files, without suffix."""
    return f"rank-{rank:05d}-of-{ranks:05d}"


def dtype_of(layout: StateLayout) -> np.dtype:
    """The type of elements on disk: little-endian."""
    return NUMPY[layout.dtype].newbyteorder("<")


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON that is the same for the same content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def corrupt(path: Path, why: str, came: object, expected: object) -> CorruptError:
    """The error for a checkpoint whose bytes are not those that were saved."""
    return CorruptError(
        f"checkpoint {path} is damaged: {why}",
        came=came,
        expected=expected,
        do="resume from an earlier one with --at STEP, or restore the folder from a copy",
    )


# -- arrays --------------------------------------------------------------------------------------------------------------------


def in_array(kind: str, layout: StateLayout, flat: Flat, rank: int, ranks: int) -> tuple[bool, tuple[Piece, ...]]:
    """Whether an array is a rank's cut of its kind (else it is whole), and the pieces that it holds, those without elements left out.

    GraphError if it is of neither size.
    """
    if flat.dtype == NUMPY[layout.dtype] and ranks > 1 and flat.shape == (layout.shard(ranks).size,):
        return True, flat_shards(layout, ranks).ranks[rank]
    if flat.shape != (layout.size,) or flat.dtype != NUMPY[layout.dtype]:
        raise GraphError(
            f"the array of state {kind} is not that of its layout",
            came=f"{flat.dtype}{list(flat.shape)}",
            expected=f"{NUMPY[layout.dtype]}[{layout.size}]",
        )
    return False, tuple(p for p in whole(layout).ranks[0] if prod(hi - lo for lo, hi in p.box))


def place(layouts: Mapping[str, StateLayout], rank: int, ranks: int) -> tuple[tuple[Held, ...], int]:
    """What rank `rank` of `ranks` writes, each piece of its cut at a place of its file, and the bytes of that file."""
    held, at = [], 0
    for kind, layout in sorted(layouts.items()):
        for piece in flat_shards(layout, ranks).ranks[rank]:
            held.append(Held(kind, piece.tensor, piece.box, at, dtype_of(layout).itemsize))
            at = -(-held[-1].stop // ALIGN) * ALIGN
    return tuple(held), at


def image(states: Mapping[str, tuple[StateLayout, Flat]], rank: int, ranks: int,
          copies: Copies | None = None) -> tuple[np.ndarray, tuple[Held, ...]]:  # fmt: skip
    """A copy of what this rank writes, u8[bytes of its file], and what lies where in it.

    An array of `states` is whole or this rank's cut. `copies`: how it comes there, by default from arrays; it is there once they have been
    waited for.
    """
    way: Copies = copies or OfArrays()
    held, size = place({kind: layout for kind, (layout, _) in states.items()}, rank, ranks)
    cut = {kind: in_array(kind, layout, flat, rank, ranks)[0] for kind, (layout, flat) in states.items()}
    local = {kind: iter(flat_shards(layout, ranks).ranks[rank]) for kind, (layout, _) in states.items()}
    out = way.room(size)
    way.begin()
    for h in held:
        (layout, flat), piece = states[h.kind], next(local[h.kind])
        start = piece.offset
        if not cut[h.kind]:
            start = layout.offsets[h.tensor] + sum(lo * stride for (lo, _), stride in zip(h.box, piece.strides))
        way.copy(flat, start, out[h.at : h.stop].view(dtype_of(layout)))
    way.end()
    return out, held


def elements(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bytes of a block as elements of a type; what is left over at its end belongs to another kind."""
    return data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype.newbyteorder("<"))


def move(copy: Copy, source: np.ndarray, target: np.ndarray) -> None:
    """Do one Copy between flat arrays."""
    shape = tuple(hi - lo for lo, hi in copy.box)

    def view(flat: np.ndarray, offset: int, strides: tuple[int, ...], writeable: bool) -> np.ndarray:
        return as_strided(flat[offset:], shape, tuple(s * flat.itemsize for s in strides), writeable=writeable)

    view(target, copy.target_offset, copy.target_strides, True)[...] = view(source, copy.source_offset, copy.source_strides, False)


# -- writing -------------------------------------------------------------------------------------------------------------------


def write(folder: Path, rank: int, ranks: int, chunks: Iterable[np.ndarray], held: Iterable[Held], disk: Disk, block: int = BLOCK) -> None:
    """Write a rank's two files. chunks: its bytes, `block` of them at a time, the last ones fewer. OSError if the disk refuses."""
    sums, sizes = [], []

    def summed() -> Iterator[memoryview]:
        for chunk in chunks:
            sums.append(xxhash.xxh3_128_hexdigest(chunk.data))
            sizes.append(chunk.nbytes)
            yield chunk.data

    disk.write(folder / (stem(rank, ranks) + STATE), summed())
    content = {"rank": rank, "ranks": ranks, "size": sum(sizes), "block": block, "sums": sums,
               "held": [[h.kind, h.tensor, h.box, h.at] for h in held]}
    disk.write(folder / (stem(rank, ranks) + INDEX), [canonical(content)])


def cut(data: np.ndarray, block: int = BLOCK) -> Iterator[np.ndarray]:
    """The blocks of a file's bytes."""
    for at in range(0, data.size, block):
        yield data[at : at + block]


# -- reading -------------------------------------------------------------------------------------------------------------------


def digest_of(index: Path) -> str:
    """SHA-256 (hex) of an index as it lies there. OSError if it cannot be read."""
    return hashlib.sha256(read_regular(index, MOST_INDEX)).hexdigest()


def read_index(index: Path, stated: str, layouts: Mapping[str, StateLayout]) -> Range:
    """An index whose SHA-256 is `stated`. CorruptError unless it is such a file, and says what a save writes of these kinds of state."""
    try:
        raw = read_regular(index, MOST_INDEX)
    except OSError as error:
        raise corrupt(index.parent, "a file cannot be read", f"{index.name} ({error.strerror})", "every index of the manifest") from error
    if hashlib.sha256(raw).hexdigest() != stated:
        raise corrupt(index.parent, f"{index.name} is not what the manifest says", f"sha256 {hashlib.sha256(raw).hexdigest()[:16]}",
                      f"sha256 {stated[:16]}")
    try:
        content = json_of(raw)
        found = Range(index.with_suffix(STATE), content["size"], content["block"], tuple(content["sums"]),
                      tuple(Held(kind, tensor, tuple((lo, hi) for lo, hi in box), at, dtype_of(layouts[kind]).itemsize)
                            for kind, tensor, box, at in content["held"]))
        problem = _unlike_a_range(found, layouts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise corrupt(index.parent, f"{index.name} is not one that a save writes", problem, "size, block, sums, and boxes of the tensors")
    return found


def _unlike_a_range(found: Range, layouts: Mapping[str, StateLayout]) -> str:
    """What of an index is not as a save writes it; '' when nothing."""
    whole_numbers = (found.size, found.block, *(x for h in found.held for x in (h.at, *(x for side in h.box for x in side))))
    if not all(type(x) is int and x >= 0 for x in whole_numbers):
        return "numbers of another type"
    if not 0 < found.block <= MOST_BLOCK or found.block % ALIGN:
        return f"blocks of {found.block} bytes"
    if len(found.sums) != -(-found.size // found.block) or not all(isinstance(x, str) for x in found.sums):
        return f"{len(found.sums)} checksums for {found.size} bytes"
    free = 0
    for h in found.held:
        shape = layouts[h.kind].by_name[h.tensor].shape
        if len(h.box) != len(shape) or not all(lo < hi <= n for (lo, hi), n in zip(h.box, shape)):
            return f"{h.kind} {h.tensor} {h.box}"
        if h.at < free or h.at % ALIGN:
            return f"{h.kind} {h.tensor} at {h.at}"
        free = h.stop
    return f"pieces up to byte {free} of {found.size}" if free > found.size else ""


def blocks(of: Range, numbers: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(number, u8[bytes]) of some blocks of a range file, each checked; what came before is overwritten by the next.

    CorruptError naming file, bytes and tensors where a block is not what was written.
    """
    folder, name = of.path.parent, of.path.name
    try:
        with open_regular(of.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != of.size:
                raise corrupt(folder, f"{name} has another size", f"{size} bytes", f"{of.size} bytes")
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
            buffer = np.empty(min(of.block, of.size), np.uint8)
            for number in numbers:
                start = number * of.block
                part = buffer[: min(of.block, of.size - start)]
                file.seek(start)
                got = file.readinto(part.data)  # type: ignore[attr-defined]  # of every file that open_regular opens
                if got != part.size or (of.sums and xxhash.xxh3_128_hexdigest(part.data) != of.sums[number]):
                    inside = [f"{h.kind} {h.tensor}" for h in of.held if h.at < start + part.size and h.stop > start]
                    raise corrupt(folder, f"{name}, bytes {start} to {start + part.size}, is not what its checksum says",
                                  f"XXH3-128 {xxhash.xxh3_128_hexdigest(part.data)[:16]}, in {', '.join(inside[:4]) or 'no tensor'}"
                                  + (f" and {len(inside) - 4} more" if len(inside) > 4 else ""),
                                  f"XXH3-128 {of.sums[number][:16] if of.sums else 'of the whole file'}")
                yield number, part
    except OSError as error:
        raise corrupt(folder, "a file cannot be read", f"{name} ({error.strerror})", "every file of the manifest") from error


def by_block(ranges: Sequence[Range], kind: str, layout: StateLayout) -> Layout:
    """Where the tensors of a kind lie, as if every block of all files were a rank, in order: what no block holds whole is cut."""
    ranks: list[list[Piece]] = []
    for of in ranges:
        first = len(ranks)
        ranks += [[] for _ in range(-(-of.size // of.block))]
        for h in of.held:
            if h.kind != kind:
                continue
            elements, strides = prod(h.shape), row_major(h.shape)
            for number in range(h.at // of.block, -(-h.stop // of.block)):
                skipped = (number * of.block - h.at) // h.itemsize
                for box, at in flat_boxes(h.shape, max(0, skipped), min(elements, skipped + of.block // h.itemsize)):
                    inside = tuple((a + lo, b + lo) for (a, b), (lo, _) in zip(box, h.box))
                    ranks[first + number].append(Piece(h.tensor, inside, at - skipped, strides))
    return Layout({t.name: t.shape for t in layout.tensors}, tuple(map(tuple, ranks)))


def numbered(ranges: Sequence[Range]) -> list[tuple[Range, int]]:
    """(file, number of a block in it) of every rank of `by_block`."""
    return [(of, number) for of in ranges for number in range(-(-of.size // of.block))]
