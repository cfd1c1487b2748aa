"""Length bucketing: the sequences of a step cost attention about the same, so no rank waits for another's long documents.

Attention that stays in its document computes, of a document of n tokens, each query's pairs with the keys up to it: n (n + 1) / 2, or fewer
if a query sees a bounded number of keys. So of two sequences of T tokens the one of longer documents costs more. A packed sequence keeps
what it holds; what changes is the step that reads it. An epoch's order is that of PermutedSampler, taken `buckets` steps at a time: a pool.
Its sequences are sorted by their pairs, of equals the earlier first, and cut into one bucket a step. In a bucket they stand in the order of
before. Which step of the pool reads which bucket is a permutation keyed by (seed, the pool's first sample). So does `group_by_length` of
Hugging Face Transformers with its mega-batches; here each sample is computed by itself.

A pool lies in one epoch and begins where a step does; the last of an epoch has the steps that are left. Samples of a step that lies in two
epochs keep their places. The order is a promise: runs resume by it. It takes 8 bytes a sequence, and 8 bytes a sequence of one pool.

Legend: b samples of this call, W sequences, P pieces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpha.data.files import sha256_hex
from alpha.data.packing import PackedSampler
from alpha.data.permutation import permuted
from alpha.data.sampler import PermutedSampler
from alpha.data.shards import TokenStream
from alpha.errors import InputError

TOLD_STEPS = 1000
"""Steps from which `attention` tells how uneven they are, at most."""


def pairs_of(lengths: NDArray[np.int64], most: int = 0) -> NDArray[np.int64]:
    """Pairs of a query and a key, itself included, in documents of these lengths: int64 [n] -> int64 [n]. `most`: keys that a query sees,
    0 for all before it."""
    short = np.minimum(lengths, most) if most else lengths
    return short * (short + 1) // 2 + (lengths - short) * most


def sequence_pairs(sampler: PermutedSampler, most: int = 0) -> NDArray[np.int64]:
    """Pairs of each sequence when attention stays in its document: int64 [W]. Padding is a document, as the kernels compute it."""
    size = sampler.sequence
    if isinstance(sampler, PackedSampler):
        packing = sampler.packing
        lengths, firsts = packing.lengths.astype(np.int64), packing.firsts[:-1]
        padding = size - np.add.reduceat(lengths, firsts)
        return np.add.reduceat(pairs_of(lengths, most), firsts) + pairs_of(padding, most)
    edges = np.arange(sampler.windows + 1) * size
    starts = sampler.stream.document_starts
    cuts = np.union1d(edges, starts[starts < edges[-1]])
    return np.add.reduceat(pairs_of(np.diff(cuts), most), np.searchsorted(cuts, edges[:-1]))


class BucketedSampler(PackedSampler):
    """Training batches of packed documents whose sequences cost about the same attention, random access by step."""

    def __init__(self, stream: TokenStream, *, sequence: int, global_batch: int, seed: int, buckets: int, most: int = 0) -> None:
        """As PackedSampler. `buckets`: steps of a pool, at least 2. `most`: keys that a query sees, 0 for all. InputError else."""
        if buckets < 2 or most < 0:
            raise InputError("impossible buckets", came=f"{buckets} buckets, queries that see {most} keys",
                             expected="at least 2 buckets; keys counted from 1, or 0 for all")
        super().__init__(stream, sequence=sequence, global_batch=global_batch, seed=seed)
        self.buckets, self.most = buckets, most
        self.pairs = sequence_pairs(self, most)
        self._kept: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    @property
    def hash(self) -> str:
        """Of the same, bucketed."""
        return sha256_hex(f"alpha.bucketed.v1\n{self.buckets}\n{self.most}\n{super().hash}\n".encode())

    def window_of(self, samples_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """The packed sequence that each global sample reads: int64 [b] -> int64 [b]."""
        made, batch, pool = super().window_of(samples_b), self.global_batch, self.buckets * self.global_batch
        begins_b = samples_b // self.windows * self.windows
        first_b = begins_b + -begins_b % batch  # the epoch's first step that lies in it alone
        end_b = (begins_b + self.windows) // batch * batch
        pool_b = first_b + (samples_b - first_b) // pool * pool
        inside_b = (samples_b >= first_b) & (samples_b < end_b)
        for first in np.unique(pool_b[inside_b]).tolist():
            rows = np.flatnonzero(inside_b & (pool_b == first))
            made[rows] = self._pool(first, min(first + pool, int(end_b[rows[0]])))[samples_b[rows] - first]
        return made

    def _pool(self, first: int, end: int) -> NDArray[np.int64]:
        """Sequences that samples `first` to `end` - 1 read, whole steps of one epoch: int64 [end - first]."""
        if self._kept is None or self._kept[0] != (first, end):
            windows = super().window_of(np.arange(first, end, dtype=np.int64))
            steps = len(windows) // self.global_batch
            buckets = np.sort(np.argsort(self.pairs[windows], kind="stable").reshape(steps, self.global_batch), axis=1)
            turns = permuted(np.arange(steps), np.full(steps, first), steps, self.seed)
            self._kept = (first, end), windows[buckets[turns].ravel()]
        return self._kept[1]


def attention(sampler: PermutedSampler, most: int = 0, documents: bool = True) -> dict[str, float]:
    """What attention computes. `attended`: pairs of an epoch over those that there were if attention crossed documents. `heaviest`: pairs
    of a step's heaviest sequence over the mean of its sequences, both summed over the first steps of the run, TOLD_STEPS or an epoch's:
    what ranks of one sequence each wait for. Both are 1 where attention crosses documents (`documents` false)."""
    if not documents:
        return {"attended": 1.0, "heaviest": 1.0}
    pairs, whole, batch = sequence_pairs(sampler, most), int(pairs_of(np.array([sampler.sequence]), most)[0]), sampler.global_batch
    steps = max(1, min(sampler.windows // batch, TOLD_STEPS))
    read = pairs[sampler.window_of(np.arange(steps * batch, dtype=np.int64))].reshape(steps, batch)
    return {"attended": float(pairs.mean()) / whole, "heaviest": float(read.max(axis=1).sum() / read.mean(axis=1).sum())}
