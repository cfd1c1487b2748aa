"""The cases that the gates run for the components of this package.

CASES[component id][gate] is a list of (name of the case, function of a random generator that measures it). Every input derives
from the generator. A case judges nothing: it reports an error and a bound, and counts what it compared.
"""

from __future__ import annotations

from alpha.gates.contracts.data import (
    bucketed,
    corpus,
    mixture,
    ngram,
    packing,
    prefetch,
    prepared,
    sampler,
    shards,
    split,
    tokenizer_bpe,
    tokenizer_bytes,
    tokenizer_hf,
)
from alpha.gates.contracts.data.support import Cases

CASES: dict[str, Cases] = {
    "corpus.folder": corpus.FOLDER_CASES,
    "corpus.prepared": prepared.CASES,
    "corpus.stdlib": corpus.CASES,
    "ngram.order2": ngram.CASES,
    "sampler.bucketed": bucketed.CASES,
    "sampler.mixed": mixture.CASES,
    "sampler.ordered": sampler.ORDERED_CASES,
    "sampler.packed": packing.CASES,
    "sampler.permuted": sampler.CASES,
    "sampler.prefetched": prefetch.CASES,
    "shards.v2": shards.CASES,
    "split.by_file": split.CASES,
    "tokenizer.bpe": tokenizer_bpe.CASES,
    "tokenizer.bytes": tokenizer_bytes.CASES,
    "tokenizer.hf": tokenizer_hf.CASES,
}
