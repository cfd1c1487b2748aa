"""The components of this package, for the catalogue that the caller hands in."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.data.bucketed import BucketedSampler
from alpha.data.corpus import open_corpus, stdlib_corpus
from alpha.data.mixture import MixedSampler
from alpha.data.ngram import Order2Model
from alpha.data.packing import PackedSampler
from alpha.data.prefetch import Prefetcher
from alpha.data.prepared import open_prepared
from alpha.data.sampler import PermutedSampler, ordered_batches
from alpha.data.shards import token_stream
from alpha.data.split import split_by_file
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer
from alpha.data.tokenizer_file import open_tokenizer

_CONTRACT = "alpha.gates.contracts.data"
COMPONENTS = (
    Component(id="corpus.folder", kind="corpus", profile="host", implementation=open_corpus, contract=_CONTRACT),
    Component(id="corpus.prepared", kind="corpus", profile="host", implementation=open_prepared, contract=_CONTRACT),
    Component(id="corpus.stdlib", kind="corpus", profile="host", implementation=stdlib_corpus, contract=_CONTRACT),
    Component(id="ngram.order2", kind="baseline", profile="host", implementation=Order2Model, contract=_CONTRACT),
    Component(id="sampler.bucketed", kind="sampler", profile="host", implementation=BucketedSampler, contract=_CONTRACT,
              presupposes=("sampler.packed",)),
    Component(id="sampler.mixed", kind="sampler", profile="host", implementation=MixedSampler, contract=_CONTRACT,
              presupposes=("sampler.permuted",)),
    Component(id="sampler.ordered", kind="sampler", profile="host", implementation=ordered_batches, contract=_CONTRACT),
    Component(id="sampler.packed", kind="sampler", profile="host", implementation=PackedSampler, contract=_CONTRACT,
              presupposes=("sampler.permuted",)),
    Component(id="sampler.permuted", kind="sampler", profile="host", implementation=PermutedSampler, contract=_CONTRACT),
    Component(id="sampler.prefetched", kind="sampler", profile="host", implementation=Prefetcher, contract=_CONTRACT),
    Component(id="shards.v2", kind="shards", profile="host", implementation=token_stream, contract=_CONTRACT),
    Component(id="split.by_file", kind="split", profile="host", implementation=split_by_file, contract=_CONTRACT),
    Component(id="tokenizer.bpe", kind="tokenizer", profile="host", implementation=BPETokenizer, contract=_CONTRACT),
    Component(id="tokenizer.bytes", kind="tokenizer", profile="host", implementation=ByteTokenizer, contract=_CONTRACT),
    Component(id="tokenizer.hf", kind="tokenizer", profile="host", implementation=open_tokenizer, contract=_CONTRACT),
)


def fill(catalogue: Catalogue) -> None:
    """Add every data component to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
