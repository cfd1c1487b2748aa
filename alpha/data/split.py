"""Split a corpus into train and validation by file, from the hash of the path alone, so that no file moves when others come.

Copies of one text lie on one side, else validation would measure memory. A group of copies is validation only if every one of
its paths says so: growing a corpus can then move a text out of validation, never into it. Where a corpus is so small that no text
is validation, the one that comes nearest is; where it is one text, its end is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from alpha.data.corpus import Corpus, Document, path_bytes
from alpha.data.files import sha256_hex
from alpha.errors import InputError


@dataclass(frozen=True)
class Split:
    """Two corpora that share no path and no content. `fraction` and `seed` are those it was made with."""

    train: Corpus
    validation: Corpus
    fraction: float
    seed: int


def path_position(relpath: str, seed: int) -> float:
    """A number in [0, 1) that depends on path and seed only: the first 8 bytes of SHA-256(seed, path) over 2^64, rounded down
    to 53 bits so that it is exact in a double."""
    digest = hashlib.sha256(b"alpha.split.v1\0%d\0" % seed + path_bytes(relpath)).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / float(1 << 53)


def split_by_file(corpus: Corpus, *, fraction: float = 0.05, seed: int = 0) -> Split:
    """Each file goes to validation with probability `fraction` (share of files, not of bytes), decided by `path_position`; if none
    does, the text of the lowest position. Of a corpus of one text the last `fraction` of its bytes goes, from a line's start on.

    InputError if `fraction` is not inside (0, 1) or if a side would be empty.
    """
    if not 0.0 < fraction < 1.0:
        raise InputError("the validation fraction is impossible", came=fraction, expected="a number above 0 and below 1")
    latest: dict[str, float] = {}
    for document in corpus.documents:
        position = path_position(document.relpath, seed)
        latest[document.sha256] = max(position, latest.get(document.sha256, 0.0))
    if len(latest) == 1:
        train, validation = ([side] for side in _cut(corpus, corpus.documents[0], fraction))
    else:
        held_out = {text for text, position in latest.items() if position < fraction} or {min(latest, key=lambda text: latest[text])}
        train = [document for document in corpus.documents if document.sha256 not in held_out]
        validation = [document for document in corpus.documents if document.sha256 in held_out]
    if not train:
        raise InputError("the train side of the split is empty",
                         came=f"{len(corpus.documents)} files, fraction {fraction}, split seed {seed}",
                         expected="at least one file on each side", do="take more files, another fraction or another split seed")
    return Split(train=corpus.subset(f"{corpus.name}:train", train),
                 validation=corpus.subset(f"{corpus.name}:validation", validation), fraction=fraction, seed=seed)


def _cut(corpus: Corpus, document: Document, fraction: float) -> tuple[Document, Document]:
    """The beginning and the end of a text. The end begins behind the first line end after (1 - fraction) of the bytes; failing that,
    behind the last one before; in a text of one line, where a UTF-8 character begins."""
    text = corpus.read(document)
    wanted = round(len(text) * (1 - fraction))
    at = text.find(b"\n", wanted) + 1
    if not 0 < at < len(text):
        at = text.rfind(b"\n", 0, wanted) + 1
    if not at:
        at = wanted
        while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
            at -= 1
    if not 0 < at < len(text):
        raise InputError("a side of the split is empty", came=f"one text of {len(text)} bytes, fraction {fraction}",
                         expected="at least one byte on each side", do="take more text or another fraction")
    begins, ends = document.part or (0, len(text))
    return (Document(document.relpath, sha256_hex(text[:at]), at, (begins, begins + at)),
            Document(document.relpath, sha256_hex(text[at:]), len(text) - at, (begins + at, ends)))
