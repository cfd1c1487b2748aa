"""What prepared data holds: lengths of documents, entropy of tokens, exact duplicates, and samples. Reads every token once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from alpha.data.prepared import SIDES, Prepared
from alpha.data.shards import TokenStream

_SHOWN = 400
"""Bytes of a document that a sample shows."""
_AT_ONCE = 1 << 14
"""Documents that are hashed at a time."""


@dataclass(frozen=True)
class Side:
    """Statistics of one stream. `lengths`: tokens of a document without its end: fewest, median, mean, of 95 %, most. `entropy`: of single
    tokens, bits a token. `used`: ids that occur. `duplicates`: documents whose tokens an earlier one has too."""

    documents: int
    tokens: int
    text_bytes: int
    shards: int
    lengths: tuple[float, float, float, float, float]
    entropy: float
    used: int
    vocabulary: int
    duplicates: int


def entropy_of(counts: NDArray[np.int64]) -> float:
    """Entropy in bits of the distribution that `counts` [n] are drawn from, as observed: -sum p log2 p."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def _again(digests_n2: NDArray[np.uint64]) -> int:
    """How many of these digests, uint64 [n, 2], an earlier one equals."""
    ordered = digests_n2[np.lexsort(digests_n2.T)]
    return int((ordered[1:] == ordered[:-1]).all(axis=1).sum())


def measure(stream: TokenStream) -> Side:
    """The statistics of a stream. Some 60 bytes of memory a document, and a shard. CorruptError where a block is damaged."""
    counts = np.zeros(stream.vocab_size, dtype=np.int64)
    seen = bytearray()
    for shard in stream.shards:
        shard.verify()
        counts += np.bincount(shard.tokens, minlength=stream.vocab_size)
        tokens = shard.tokens
        for first in range(0, len(shard.starts) - 1, _AT_ONCE):
            bounds = shard.starts[first : first + _AT_ONCE + 1].tolist()
            seen += b"".join(xxhash.xxh3_128_digest(tokens[a:b].data) for a, b in pairwise(bounds))
    lengths = np.diff(stream.document_starts) - 1
    spread = (lengths.min(), np.median(lengths), lengths.mean(), np.percentile(lengths, 95), lengths.max())
    return Side(
        documents=stream.documents, tokens=len(stream), text_bytes=stream.text_bytes, shards=len(stream.shards),
        lengths=tuple(float(x) for x in spread), entropy=entropy_of(counts), used=int((counts > 0).sum()),  # type: ignore[arg-type]
        vocabulary=stream.vocab_size, duplicates=_again(np.frombuffer(seen, dtype=np.uint64).reshape(-1, 2)))  # fmt: skip


def statistics(data: Prepared) -> dict[str, Side]:
    """side -> its statistics."""
    return {side: measure(data.streams[side]) for side in SIDES}


def samples(data: Prepared, number: int) -> list[bytes]:
    """The beginnings of `number` training documents, evenly spread."""
    stream = data.streams["train"]
    bounds, number = stream.document_starts.tolist(), min(number, stream.documents)
    chosen = [i * stream.documents // number for i in range(number)]
    tokens = [stream.windows([bounds[i]], min(bounds[i + 1] - 1 - bounds[i], _SHOWN))[0] for i in chosen]
    return [data.tokenizer.decode(ids)[:_SHOWN] for ids in tokens]
