"""The components of this package, for the catalogue that the caller hands in."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.data.corpus import open_corpus, stdlib_corpus
from alpha.data.ngram import Order2Model
from alpha.data.sampler import PermutedSampler, ordered_batches
from alpha.data.shards import token_stream
from alpha.data.split import split_by_file
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer

_CONTRACT = "alpha.gates.contracts.data"
COMPONENTS = (
    Component(id="corpus.folder", kind="corpus", profile="host", implementation=open_corpus, contract=_CONTRACT),
    Component(id="corpus.stdlib", kind="corpus", profile="host", implementation=stdlib_corpus, contract=_CONTRACT),
    Component(id="ngram.order2", kind="yardstick", profile="host", implementation=Order2Model, contract=_CONTRACT),
    Component(id="sampler.ordered", kind="sampler", profile="host", implementation=ordered_batches, contract=_CONTRACT),
    Component(id="sampler.permuted", kind="sampler", profile="host", implementation=PermutedSampler, contract=_CONTRACT),
    Component(id="shards.v1", kind="shards", profile="host", implementation=token_stream, contract=_CONTRACT),
    Component(id="split.by_file", kind="split", profile="host", implementation=split_by_file, contract=_CONTRACT),
    Component(id="tokenizer.bpe", kind="tokenizer", profile="host", implementation=BPETokenizer, contract=_CONTRACT),
    Component(id="tokenizer.bytes", kind="tokenizer", profile="host", implementation=ByteTokenizer, contract=_CONTRACT),
)


def fill(catalogue: Catalogue) -> None:
    """Add every data component to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
