"""Split a corpus into train and validation by file, from the hash of the path alone, so that no file moves when others come.

Copies of one text lie on one side, else validation would measure memory. A group of copies is validation only if every one of
its paths says so: growing a corpus can then move a text out of validation, never into it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from alpha.data.corpus import Corpus, path_bytes
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
    """Each file goes to validation with probability `fraction` (share of files, not of bytes), decided by `path_position`.

    InputError if `fraction` is not inside (0, 1) or if a side would be empty.
    """
    if not 0.0 < fraction < 1.0:
        raise InputError("the validation fraction is impossible", came=fraction, expected="a number above 0 and below 1")
    latest: dict[str, float] = {}
    for document in corpus.documents:
        position = path_position(document.relpath, seed)
        latest[document.sha256] = max(position, latest.get(document.sha256, 0.0))
    train = [document for document in corpus.documents if latest[document.sha256] >= fraction]
    validation = [document for document in corpus.documents if latest[document.sha256] < fraction]
    if not train or not validation:
        raise InputError(
            f"the {'validation' if train else 'train'} side of the split is empty",
            came=f"{len(corpus.documents)} files, fraction {fraction}, split seed {seed}",
            expected="at least one file on each side",
            do="take a larger corpus (several files), another fraction or another split seed",
        )
    return Split(train=corpus.subset(f"{corpus.name}:train", train),
                 validation=corpus.subset(f"{corpus.name}:validation", validation), fraction=fraction, seed=seed)
