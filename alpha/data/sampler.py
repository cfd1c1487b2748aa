"""From a step to its batch: the only state of the data is the step.

A stream of n tokens has (n - 1) // T windows of T inputs and T targets, side by side from the start; fewer than T tokens at the
end of the stream are left over. Sample g of a run is the window at place g mod windows in the order of epoch g // windows, an
order keyed by (seed, epoch). Step s is samples s * global_batch to (s + 1) * global_batch - 1, whatever the number of ranks.

Shapes: b rows of this call, T sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpha.data.files import sha256_hex
from alpha.data.permutation import permuted
from alpha.data.shards import TokenStream
from alpha.errors import InputError


@dataclass(frozen=True)
class Batch:
    """`inputs_bT`, `targets_bT`: int32, the target is the next token. `documents_bT`: int32, the document of each input token,
    if asked for. `samples_b`: int64, global sample ids, the keys of random numbers.
    """

    inputs_bT: NDArray[np.int32]
    targets_bT: NDArray[np.int32]
    samples_b: NDArray[np.int64]
    documents_bT: NDArray[np.int32] | None = None


def window_count(stream: TokenStream, sequence: int) -> int:
    """Windows of `sequence` tokens and their targets in the stream. InputError if there is none."""
    if sequence < 1:
        raise InputError("impossible sequence length", came=sequence, expected="at least 1")
    count = (len(stream) - 1) // sequence
    if count < 1:
        raise InputError("the data is shorter than one sequence", came=f"{len(stream)} tokens",
                         expected=f"at least {sequence + 1}", do="use more text or a shorter sequence")
    return count


def _cut(stream: TokenStream, windows_b: NDArray[np.int64], samples_b: NDArray[np.int64], sequence: int,
         documents: bool) -> Batch:
    starts = windows_b * sequence
    tokens = stream.windows(starts, sequence + 1)
    return Batch(
        inputs_bT=np.ascontiguousarray(tokens[:, :-1]),
        targets_bT=np.ascontiguousarray(tokens[:, 1:]),
        samples_b=samples_b,
        documents_bT=stream.document_ids(starts, sequence) if documents else None,
    )


class Sampler(ABC):
    """Batches by step: sample g of a run is whatever `read` makes of g, so an order is a function of g alone. `global_batch`: sequences per
    step, all ranks."""

    global_batch: int

    @property
    @abstractmethod
    def hash(self) -> str:
        """SHA-256 (hex) of all that decides which tokens a step sees: resume compares it, the rest of the state is the step."""

    @abstractmethod
    def read(self, samples_b: NDArray[np.int64], documents: bool = False) -> Batch:
        """What these global samples read: int64 [b] -> b rows in their order."""

    def batch(self, step: int, shard: int = 0, n_shards: int = 1, *, micro: int = 0, n_micro: int = 1,
              documents: bool = False) -> Batch:
        """Rows of `step` that `shard` of `n_shards` owns, a contiguous range; part `micro` of `n_micro` of it.

        b = global_batch / (n_shards * n_micro). InputError if that is no whole number or a number is out of range.
        """
        parts = n_shards * n_micro
        if step < 0 or not 0 <= shard < n_shards or not 0 <= micro < n_micro or self.global_batch % parts:
            raise InputError("impossible share of a batch",
                             came=f"step {step}, shard {shard} of {n_shards}, microbatch {micro} of {n_micro}",
                             expected=f"counted from 0; shards x microbatches divide the global batch of {self.global_batch}",
                             do="change the global batch, the shards or the microbatches")
        rows = self.global_batch // parts
        first = step * self.global_batch + (shard * n_micro + micro) * rows
        samples_b = np.arange(first, first + rows, dtype=np.int64)
        return self.read(samples_b, documents)


class PermutedSampler(Sampler):
    """Training batches in an order that changes with each epoch, random access by step."""

    def __init__(self, stream: TokenStream, *, sequence: int, global_batch: int, seed: int) -> None:
        """`sequence`: T in tokens. `global_batch`: sequences per step, all ranks. `seed`: 0 to 2^64 - 1. InputError else."""
        if global_batch < 1:
            raise InputError("impossible global batch", came=global_batch, expected="at least 1")
        if not 0 <= seed < 1 << 64:
            raise InputError("impossible sampler seed", came=seed, expected="0 to 2^64 - 1")
        self.stream, self.sequence, self.global_batch, self.seed = stream, sequence, global_batch, seed
        self.windows = window_count(stream, sequence)

    @property
    def hash(self) -> str:
        """Of the stream, the window's length, the batch and the seed."""
        facts = f"alpha.sampler.v1\n{self.stream.hash}\n{self.sequence}\n{self.global_batch}\n{self.seed}\n"
        return sha256_hex(facts.encode())

    def epoch(self, step: int) -> float:
        """Epochs seen before `step` begins."""
        return step * self.global_batch / self.windows

    def window_of(self, samples_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window that each global sample reads: int64 [b] -> int64 [b]."""
        return permuted(samples_b % self.windows, samples_b // self.windows, self.windows, self.seed)

    def read(self, samples_b: NDArray[np.int64], documents: bool = False) -> Batch:
        """The windows of these samples."""
        return _cut(self.stream, self.window_of(samples_b), samples_b, self.sequence, documents)


def ordered_batches(stream: TokenStream, *, sequence: int, batch: int, documents: bool = False) -> Iterator[tuple[Batch, int]]:
    """Every window of the stream once, in order, for evaluation: (batch of exactly `batch` rows, how many of them count).

    The rows behind the counting ones repeat the last window, so that the shape is always the same.
    """
    count = window_count(stream, sequence)
    if batch < 1:
        raise InputError("impossible batch", came=batch, expected="at least 1")
    for first in range(0, count, batch):
        windows_b = np.minimum(np.arange(first, first + batch, dtype=np.int64), count - 1)
        yield _cut(stream, windows_b, windows_b, sequence, documents), min(batch, count - first)
