"""Ranks that read a run's batches and are killed: what each sequence held, so that any order can be compared with one rank's, to the token.

    python suites/support/killed_readers.py KIND FOLDER RANK RANKS MICROS DEPTH FIRST FILE

One rank of RANKS reads the steps from FIRST on, its share in MICROS microbatches, DEPTH of them made ahead by a thread, 0 for none. A line
of FILE is a sequence: step, sample, hash of its tokens. KIND: windows, packed, bucketed, mixture (of all). FOLDER holds a folder a source.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from alpha.data.bucketed import BucketedSampler
from alpha.data.mixture import MixedSampler
from alpha.data.packing import PackedSampler
from alpha.data.prefetch import Prefetcher
from alpha.data.sampler import Batch, PermutedSampler, Sampler
from alpha.data.shards import TokenStream, open_shard

STEPS, BATCH, SEQUENCE = 60, 24, 16
WEIGHTS = (3, 2, 5)
PAUSE_S = 0.001
"""Of each step, so that a kill finds a rank on its way."""


def sampler(kind: str, folder: Path) -> Sampler:
    """Over the streams in the folders of `folder`, in the order of their names."""
    streams = [TokenStream([open_shard(path) for path in sorted(source.glob("*.tokens"))]) for source in sorted(folder.iterdir())]
    bucketed = partial(BucketedSampler, buckets=4)
    kinds: Sequence[Callable[..., PermutedSampler]] = {"windows": [PermutedSampler], "packed": [PackedSampler], "bucketed": [bucketed],
                                                       "mixture": [PermutedSampler, PackedSampler, bucketed]}[kind]
    made = [one(stream, sequence=SEQUENCE, global_batch=BATCH, seed=7 + i) for i, (one, stream) in enumerate(zip(kinds, streams))]
    return made[0] if len(made) == 1 else MixedSampler(made, WEIGHTS)


def rows(step: int, batch: Batch) -> Iterator[str]:
    """A line for each sequence of a batch."""
    assert batch.documents_bT is not None
    for held in zip(batch.samples_b.tolist(), batch.inputs_bT, batch.targets_bT, batch.documents_bT):
        digest = hashlib.sha256(b"".join(array.tobytes() for array in held[1:])).hexdigest()
        yield f"{step} {held[0]} {digest}\n"


def read(kind: str, folder: Path, rank: int, ranks: int, micros: int, depth: int, first: int, file: Path) -> None:
    """Read to the end, or until killed. What a step's lines say is written at once, so no line is torn."""
    made, out = sampler(kind, folder), os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ahead = Prefetcher(made, [(rank, ranks, m, micros, True) for m in range(micros)], depth=depth, steps=STEPS) if depth else None
    for step in range(first, STEPS):
        batches = [(ahead or made).batch(step, rank, ranks, micro=m, n_micro=micros, documents=True) for m in range(micros)]
        os.write(out, "".join(line for batch in batches for line in rows(step, batch)).encode())
        time.sleep(PAUSE_S)
    if ahead is not None:
        ahead.close()


if __name__ == "__main__":
    read(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:8]), Path(sys.argv[8]))  # type: ignore[arg-type]
