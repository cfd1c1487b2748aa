"""A folder of prepared data: the shards of documents to train and to validate on, their tokenizer, and where they came from.

    prepared.json    what was read, by what rules, with which tokenizer, under which licence; the hashes of the three below
    tokenizer.json   as `Tokenizer.save` wrote it
    train/           a stream (alpha/data/shards.py)
    validation/      a stream

One hash leads to the next, from prepared.json down to each block of 64 KiB, so no byte of the folder can change unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from alpha.data.files import sha256_hex
from alpha.data.hashed import load_hashed
from alpha.data.shards import TokenStream, open_stream
from alpha.data.tokenizer import Tokenizer
from alpha.data.tokenizer_file import load_tokenizer
from alpha.data.walk import MANIFEST, UNFINISHED, is_prepared
from alpha.errors import CorruptError, InputError

FORMAT, VERSION = "alpha.data", 1
TOKENIZER = "tokenizer.json"
SIDES = ("train", "validation")


@dataclass(frozen=True)
class PreparedText:
    """The text behind streams, where a run asks for that of a corpus."""

    streams: tuple[TokenStream, ...]
    tokenizer: Tokenizer
    left_out: int = 0

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the documents of each stream, as it has it."""
        return sha256_hex("\n".join(stream.corpus_hash for stream in self.streams).encode())

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(stream.text_bytes for stream in self.streams)

    @property
    def documents(self) -> Sequence[Any]:
        """The documents, by number."""
        return range(sum(stream.documents for stream in self.streams))

    def texts(self) -> Iterator[bytes]:
        """The bytes of every document, in order, out of its tokens."""
        for stream in self.streams:
            for begin, end in pairwise(stream.document_starts.tolist()):
                yield self.tokenizer.decode(stream.windows([begin], end - begin - 1)[0])


@dataclass(frozen=True)
class PreparedSplit:
    """What is trained and what is validated on, where a run asks for the split of a corpus."""

    train: PreparedText
    validation: PreparedText


@dataclass(frozen=True)
class Prepared:
    """An open folder. `facts`: what prepared.json says."""

    folder: Path
    facts: Mapping[str, Any]
    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]


def open_prepared(folder: Path, *, verify: bool = False) -> Prepared:
    """Open what `alpha data prepare` made. `verify`: read every block now, and hold every id against the vocabulary; else each block is
    checked when it is first read.

    InputError: nothing there, not finished, or of a version that this program does not know. CorruptError: damaged, or parts that do not
    belong together.
    """
    if not (folder / MANIFEST).is_file():
        begun = (folder / UNFINISHED).is_file()
        raise InputError("the data is not prepared to its end" if begun else "no data is prepared here", came=folder,
                         expected=f"a folder with {MANIFEST}",
                         do="run the same `alpha data prepare` again: it goes on" if begun else "run `alpha data prepare` first")
    facts = load_hashed(folder / MANIFEST, "the description of prepared data", FORMAT, VERSION)
    try:
        tokenizer_hash, listings = str(facts["tokenizer"]), {side: str(facts["streams"][side]) for side in SIDES}
    except (KeyError, TypeError) as error:
        raise CorruptError("the description of prepared data lacks a fact", came=f"{folder / MANIFEST}: {error!r}",
                           expected="tokenizer, streams", do="prepare the data again") from error
    tokenizer = load_tokenizer(folder / TOKENIZER)
    streams = {side: open_stream(folder / side, verify=verify, expected=listings[side]) for side in SIDES}
    for side, stream in streams.items():
        if not tokenizer.hash == tokenizer_hash == stream.tokenizer_hash or tokenizer.vocab_size != stream.vocab_size:
            raise CorruptError("the tokenizer does not match the shards", came=f"{folder / TOKENIZER}: {tokenizer.hash[:16]}",
                               expected=f"{tokenizer_hash[:16]}, of which {side} was made with {stream.tokenizer_hash[:16]}",
                               do="restore the tokenizer, or prepare the data again")
        if verify:
            _require_known_ids(stream)
    return Prepared(folder, facts, tokenizer, streams)


def _require_known_ids(stream: TokenStream) -> None:
    for shard in stream.shards:
        highest = int(np.max(shard.tokens))
        if highest >= stream.vocab_size:
            raise CorruptError("a token shard holds an id beyond its vocabulary", came=f"{shard.path}: id {highest}",
                               expected=f"below {stream.vocab_size}", do="prepare the data again")


__all__ = ["FORMAT", "MANIFEST", "SIDES", "TOKENIZER", "UNFINISHED", "VERSION", "Prepared", "PreparedSplit", "PreparedText", "is_prepared",
           "open_prepared"]
