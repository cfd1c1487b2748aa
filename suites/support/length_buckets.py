"""What length bucketing costs and saves, on drawn lengths: padding, pairs attended, how uneven steps are, and how fast batches are made.

    python suites/support/length_buckets.py [--documents 20000] [--write docs/data.md]

Documents have log-normal lengths (sigma 1) of a few medians. A row tells of one order of sequences. `windows`: of the stream. `packed`:
data.packing = "documents". `buckets`: that with data.buckets = 64. `like lengths alone`, which Alpha does not offer: a sequence is packed
from pieces whose lengths lie between the same two powers of two, and read in the packed order. Attention stays in documents.

Heaviest over mean: as `alpha-report` tells it, and of RANKS ranks with the same number of sequences each; over an epoch's steps. Blocks:
those of BLOCK queries and BLOCK keys that a kernel walks which leaves out only whole ones. `--write` puts the table into a Markdown file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from data_speed import put

from alpha.data import shards
from alpha.data.bucketed import BucketedSampler, attention, sequence_pairs
from alpha.data.mixture import MixedSampler
from alpha.data.packing import GROUP, PackedSampler, Packing, best_fit, pieces_of, waste
from alpha.data.sampler import PermutedSampler
from alpha.registry.machine import machine_class

MEDIANS, SEQUENCES = (150, 400, 900), (1024, 2048)
BATCH, RANKS, BUCKETS, BLOCK = 64, 8, 64, 128
STEPS = 50
"""Whose batches are timed."""
MARKS = "<!-- length_buckets.py -->", "<!-- /length_buckets.py -->"


def stream_of(folder: Path, documents: int, median: float) -> shards.TokenStream:
    """Documents of drawn lengths and tokens in shards of a few documents."""
    rng, opened = np.random.default_rng(19), []
    sizes = np.maximum(1, rng.lognormal(np.log(median), 1.0, documents)).astype(np.int64)
    for index, own in enumerate(np.array_split(sizes, 8)):
        path = folder / f"{median:.0f}-{index}.tokens"
        starts = np.concatenate([[0], np.cumsum(own)])
        facts = {"index": index, "last": index == 7, "corpus": "c" * 64, "tokenizer": "t" * 64, "vocab_size": 1 << 16,
                 "text_bytes": int(starts[-1])}
        shards.write_shard(path, rng.integers(0, 1 << 16, starts[-1], dtype=np.uint16), starts, facts)
        opened.append(shards.open_shard(path))
    return shards.TokenStream(opened)


def like_lengths(starts: np.ndarray, sequence: int) -> Packing:
    """Pieces of each power of two packed apart from the others: what `pack` does to all of them."""
    begins, lengths = pieces_of(starts, sequence)
    counts, order = [0], list[int]()
    power = np.ceil(np.log2(lengths)).astype(int)
    for own in (np.flatnonzero(power == p) for p in np.unique(power)):
        for first in range(0, len(own), GROUP):
            for pieces in best_fit(lengths[own[first : first + GROUP]], sequence):
                counts.append(len(pieces))
                order.extend(own[first + piece] for piece in pieces)
    return Packing(np.cumsum(np.array(counts, np.int64)), begins[order], lengths[order])


class LikeLengths(PackedSampler):
    """Batches of `like_lengths`."""

    def __init__(self, stream: shards.TokenStream, *, sequence: int, global_batch: int, seed: int) -> None:
        super().__init__(stream, sequence=sequence, global_batch=global_batch, seed=seed)
        self.packing = like_lengths(stream.document_starts, sequence)
        self.windows = len(self.packing)


def blocks(documents_bT: np.ndarray) -> np.ndarray:
    """Blocks of BLOCK keys from a tile's first document to its last query, summed over the tiles of BLOCK queries: [b, T] -> [b]."""
    rows, size = documents_bT.shape
    begins = np.concatenate([np.ones((rows, 1), bool), np.diff(documents_bT, axis=1) != 0], axis=1)
    start_bT = np.maximum.accumulate(np.where(begins, np.arange(size), 0), axis=1)
    return (np.arange(0, size, BLOCK) // BLOCK - start_bT[:, ::BLOCK] // BLOCK + 1).sum(axis=1)


def uneven(work_b: np.ndarray, ranks: int) -> float:
    """The most that one of the ranks has over the mean, summed over steps: work of the sequences of whole steps, in their order."""
    of_ranks = work_b.reshape(-1, ranks, BATCH // ranks).sum(axis=2)
    return float(of_ranks.max(axis=1).sum() / of_ranks.mean(axis=1).sum())


def row(name: str, sampler: PermutedSampler) -> list[str]:
    """What is told of one order."""
    steps = sampler.windows // BATCH
    order = sampler.window_of(np.arange(steps * BATCH, dtype=np.int64))
    told, held = {**waste(sampler), **attention(sampler)}, []
    for step in range(steps):
        documents_bT = sampler.batch(step, documents=True).documents_bT
        assert documents_bT is not None
        held.append(blocks(documents_bT))
    begins = time.thread_time()
    for step in range(steps, steps + STEPS):
        sampler.batch(step, documents=True)
    rate = STEPS * BATCH * sampler.sequence / (time.thread_time() - begins) / 1e6
    return [name, f"{told['padding']:.2%}", f"{told['cut'] / told['documents']:.1%}", f"{told['attended']:.1%}", f"{told['heaviest']:.3f}",
            f"{uneven(sequence_pairs(sampler)[order], RANKS):.3f}", f"{uneven(np.concatenate(held), RANKS):.3f}", f"{rate:.1f}"]


def table(documents: int) -> str:
    """The measurements, as Markdown."""
    columns = ("median length", "sequence", "order", "padding", "documents cut", "pairs attended", "heaviest sequence over mean",
               f"most of {RANKS} ranks over mean, pairs", "the same, blocks", "M tokens/s")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for median in MEDIANS:
        with tempfile.TemporaryDirectory(prefix="alpha-buckets-") as folder:
            stream = stream_of(Path(folder), documents, median)
            for sequence in SEQUENCES:
                how = {"sequence": sequence, "global_batch": BATCH, "seed": 1}
                for name, sampler in (("windows", PermutedSampler(stream, **how)), ("packed", PackedSampler(stream, **how)),
                                      ("packed, buckets", BucketedSampler(stream, **how, buckets=BUCKETS)),
                                      ("like lengths alone", LikeLengths(stream, **how))):
                    lines.append("| " + " | ".join([str(median), str(sequence), *row(name, sampler)]) + " |")
                    print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def mixtures(documents: int) -> str:
    """Of mixtures of the shortest and the longest median, as Markdown."""
    head = "| weights | sequence | order | heaviest sequence over mean | most of {} ranks over mean, pairs |"
    lines = [head.format(RANKS), "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="alpha-buckets-") as folder:
        streams = [stream_of(Path(folder), documents, median) for median in (MEDIANS[0], MEDIANS[-1])]
        for weights in ((1, 1), (7, 3)):
            for sequence in SEQUENCES:
                how = {"sequence": sequence, "global_batch": BATCH, "seed": 1}
                for name, each in (("packed", [PackedSampler(s, **how) for s in streams]),
                                   ("packed, buckets", [BucketedSampler(s, **how, buckets=BUCKETS) for s in streams])):
                    steps = min(one.windows for one in each) // BATCH
                    source_b, place_b = MixedSampler(each, weights).turns.of(np.arange(steps * BATCH, dtype=np.int64))
                    work_b = np.zeros(steps * BATCH, np.int64)
                    for number, one in enumerate(each):
                        own = source_b == number
                        work_b[own] = sequence_pairs(one)[one.window_of(place_b[own])]
                    lines.append(f"| {weights[0]} : {weights[1]} | {sequence} | {name} | {uneven(work_b, BATCH):.3f} "
                                 f"| {uneven(work_b, RANKS):.3f} |")  # fmt: skip
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000, help="of each median")
    parser.add_argument("--write", type=Path, help="a Markdown file with the two marks")
    asked = parser.parse_args(arguments)
    text = (f"{asked.documents:,} documents of each median, steps of {BATCH} sequences, pools of {BUCKETS} steps, blocks of {BLOCK}, one "
            f"thread's processor time on `{machine_class().key}`:\n\n{table(asked.documents)}\n\n"
            f"Mixtures of the medians {MEDIANS[0]} and {MEDIANS[-1]}:\n\n{mixtures(asked.documents)}")  # fmt: skip
    print(text)
    return put(asked.write, MARKS, text) if asked.write else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
