"""A checkpoint laid out anew for another number of ranks, without a run, in the memory of a few blocks. Floor 5."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from alpha.checkpoint import folders, ranges
from alpha.checkpoint.disk import Disk
from alpha.errors import InputError
from alpha.graph.state import Copy, StateLayout, reshard

KEPT = 8
"""Blocks of the old files that are kept while the new ones are filled."""


def relay(path: Path, folder: Path, size: int, *, disk: Disk | None = None) -> Path:
    """Write the checkpoint `path` into `folder` as `size` ranks would have saved it, of the same step and facts; returns its folder.

    Every block is checked as it is read. InputError if it is there already or no rank is to hold it, CorruptError if it is damaged,
    MachineError if the disk refuses.
    """
    saved = folders.inspect(path, verify=False)
    if size < 1 or saved.step in folders.steps(folder):
        raise InputError("the checkpoint cannot be laid out anew like this", came=f"{size} ranks, into {folder}",
                         expected="one rank or more, and a folder without a checkpoint of this step", do="take a new folder")  # fmt: skip
    files, layouts = saved.files(), {kind: saved.layout(kind) for kind in saved.kinds}
    temporary = folders.begin(folder, saved.step, disk=disk)
    for rank in range(size):
        held, _ = ranges.place(layouts, rank, size)
        with folders.refusing(temporary, disk or Disk()):
            ranges.write(temporary, rank, size, stream(files, layouts, rank, size), held, disk or Disk())
    return folders.commit(temporary, saved.step, layouts, size, saved.facts, keep=1 << 30, disk=disk)


def stream(files: Sequence[ranges.Range], layouts: Mapping[str, StateLayout], rank: int, size: int) -> Iterator[np.ndarray]:
    """The bytes that rank `rank` of `size` would write of this state, block after block."""
    held, length = ranges.place(layouts, rank, size)
    target = ranges.Range(Path(), length, ranges.BLOCK, (), held)
    wanted: dict[int, list[tuple[np.dtype, Copy]]] = {}
    for kind, layout in layouts.items():
        for copy in reshard(ranges.by_block(files, kind, layout), ranges.by_block([target], kind, layout)):
            wanted.setdefault(copy.target, []).append((ranges.dtype_of(layout), copy))
    places, kept = ranges.numbered(files), OrderedDict[int, np.ndarray]()
    for number in range(-(-length // ranges.BLOCK)):
        out = np.zeros(min(ranges.BLOCK, length - number * ranges.BLOCK), np.uint8)
        for dtype, copy in wanted.get(number, ()):
            if copy.source not in kept:
                of, block = places[copy.source]
                kept[copy.source] = next(data for _, data in ranges.blocks(of, [block]))
                if len(kept) > KEPT:
                    kept.popitem(last=False)
            ranges.move(copy, ranges.elements(kept[copy.source], dtype), ranges.elements(out, dtype))
        yield out
