"""Whole documents packed into sequences of T tokens, so that no document is cut that fits into one.

Every token of the stream is a target once an epoch, its end-of-document token included; its input is the token before it, for the first
token of a document the end of the one before (of the first document the end of the last). A document of more than T tokens is cut into
pieces of T and what is left. Pieces are taken GROUP at a time, in the order of the stream. In a group each is placed, the longest first
and of equals the earliest, where the least room is that holds it, of equals in the sequence that was begun first; else it begins one: best
fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973; of documents: Ding et al. 2024, arXiv:2404.10830). Behind the last
piece of a sequence stand end-of-document tokens as a document of their own, whose targets carry no loss.

The packing is the same in every epoch; the order of the sequences is not. It is a promise: runs resume by it. It takes 12 bytes a piece and
8 a sequence.

Legend: b rows of this call, T sequence length.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpha.data.files import sha256_hex
from alpha.data.sampler import Batch, PermutedSampler
from alpha.data.shards import TokenStream

GROUP = 4096
"""Pieces that are packed together: more fill sequences better, and take documents from farther apart."""
NO_TARGET = -1
"""Target that carries no loss: IGNORE of alpha/models/parts.py."""


@dataclass(frozen=True)
class Packing:
    """Pieces by sequence. Those of sequence i are `firsts[i]` to `firsts[i + 1]` - 1, in the order of the stream. `firsts`: int64
    [sequences + 1]; `starts`: int64 [pieces], the place of the first target; `lengths`: int32 [pieces], targets."""

    firsts: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.firsts) - 1


def pieces_of(starts: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(starts, lengths) of the pieces of documents that begin at `starts[:-1]` and end at the last: at most `sequence` tokens each."""
    sizes = np.diff(starts)
    counts = -(-sizes // sequence)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    begins = np.repeat(starts[:-1], counts) + number * sequence
    lengths = np.minimum(np.repeat(starts[1:], counts) - begins, sequence)
    return begins, lengths.astype(np.int32)


def best_fit(lengths: NDArray[np.int32], sequence: int) -> list[list[int]]:
    """Pieces of one group by sequence: places in `lengths`, ascending in each."""
    made: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, sequence) of those with room, ascending
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(rooms, (length, 0))
        room, own = rooms.pop(at) if at < len(rooms) else (sequence, len(made))
        if own == len(made):
            made.append([])
        made[own].append(piece)
        if room > length:
            insort(rooms, (room - length, own))
    return [sorted(pieces) for pieces in made]


def pack(starts: NDArray[np.int64], sequence: int) -> Packing:
    """The sequences of a stream whose documents begin at `starts[:-1]` and end at `starts[-1]`: int64 [documents + 1]."""
    begins, lengths = pieces_of(starts, sequence)
    counts, order = [0], list[int]()
    for first in range(0, len(begins), GROUP):
        for pieces in best_fit(lengths[first : first + GROUP], sequence):
            counts.append(len(pieces))
            order.extend(first + piece for piece in pieces)
    return Packing(np.cumsum(np.array(counts, np.int64)), begins[order], lengths[order])


class PackedSampler(PermutedSampler):
    """Training batches of packed documents, in an order that changes with each epoch, random access by step."""

    def __init__(self, stream: TokenStream, *, sequence: int, global_batch: int, seed: int) -> None:
        """As PermutedSampler, whose windows are the packed sequences. About 2 microseconds a document."""
        super().__init__(stream, sequence=sequence, global_batch=global_batch, seed=seed)
        self.packing = pack(stream.document_starts, sequence)
        self.windows = len(self.packing)
        self._end = stream.windows([len(stream) - 1], 1)[0]

    @property
    def hash(self) -> str:
        """Of the same, packed."""
        return sha256_hex(f"alpha.packing.v1\n{GROUP}\n{super().hash}\n".encode())

    def read(self, samples_b: NDArray[np.int64], documents: bool = False) -> Batch:
        """The packed sequences of these samples. Padding: the end-of-document token, no target, a document of its own."""
        shape = len(samples_b), self.sequence
        inputs_bT, targets_bT = np.full(shape, self._end[0], np.int32), np.full(shape, NO_TARGET, np.int32)
        documents_bT = np.full(shape, self.stream.documents, np.int32) if documents else None
        windows = self.window_of(samples_b)
        self._ahead(windows)
        for row, window in enumerate(windows.tolist()):
            at = 0
            for piece in range(self.packing.firsts[window], self.packing.firsts[window + 1]):
                start, stop = int(self.packing.starts[piece]), at + int(self.packing.lengths[piece])
                first = max(start - 1, 0)
                tokens = self.stream.windows([first], start + stop - at - first)[0]
                inputs_bT[row, at:stop] = tokens[:-1] if start else np.concatenate([self._end, tokens[:-1]])
                targets_bT[row, at:stop] = tokens[start - first :]
                if documents_bT is not None:
                    documents_bT[row, at:stop] = self.stream.document_ids([start], 1)[0, 0]
                at = stop
        return Batch(inputs_bT, targets_bT, samples_b, documents_bT)

    def _ahead(self, windows_b: NDArray[np.int64]) -> None:
        firsts, p = self.packing.firsts, self.packing
        pieces = np.concatenate([np.arange(a, b) for a, b in zip(firsts[windows_b], firsts[windows_b + 1])])
        first = np.maximum(p.starts[pieces] - 1, 0)
        self.stream.ahead(first, p.starts[pieces] + p.lengths[pieces] - first)


def waste(sampler: PermutedSampler) -> dict[str, float]:
    """What an epoch is made of: `sequences`; `documents`, and how many of them are `cut` into several sequences; `padding` and `left_out`,
    the shares of the sequences' places that hold no token, and of the stream's tokens that are no target."""
    starts, size = sampler.stream.document_starts, sampler.sequence
    places = sampler.windows * size
    if isinstance(sampler, PackedSampler):
        targets, cut = int(sampler.packing.lengths.sum()), int((np.diff(starts) > size).sum())
    else:  # window i has the targets i T + 1 to i T + T
        first, last = np.maximum(starts[:-1], 1) - 1, np.minimum(starts[1:] - 1, places) - 1
        targets, cut = places, int((first // size < last // size).sum())
    return {"sequences": sampler.windows, "documents": sampler.stream.documents, "cut": cut, "padding": 1 - targets / places,
            "left_out": 1 - targets / len(sampler.stream)}
