"""Mixtures: which source each sample of a run comes from, computed from the sample's number alone.

Of k sources with weights a_0 .. a_(k-1), whole numbers that add up to D, sample n comes from the source that Tijdeman's rule names ("The
chairman assignment problem", Discrete Mathematics 32, 1980, 323-330): among those that are owed at least D / (2 k - 2) samples over D, the
one whose next sample falls due first. After any n samples each source has had n a_i / D, less than 1 - 1 / (2 k - 2) more or less. After D
samples that is exact and the sequence begins anew, so a table of D places answers for every n.

Each source has its own order and its own epochs: the j-th sample that falls to source i is sample j of that source's own sampler.

Legend: b samples of this call, k sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from alpha.data.corpus import Corpus, Document
from alpha.data.files import sha256_hex
from alpha.data.sampler import Batch, PermutedSampler, Sampler
from alpha.data.shards import TokenStream
from alpha.data.split import Split
from alpha.errors import ConfigError, InputError
from alpha.files import path_problem

MOST_SOURCES = 64
MOST_WEIGHT = 32
"""Characters of a weight, and its largest exponent of ten: 1e99999999 would be computed to its last digit."""
MOST_PARTS = 1 << 16
"""Of weights as whole numbers without a common factor: their sum, the length of the table."""


def sources_of(text: str) -> list[tuple[str, int]]:
    """`folderA:0.7, folderB:0.3` as [(folderA, 7), (folderB, 3)]: weights in lowest terms. A path holds no comma.

    ConfigError for what is no source, a weight that is no number above 0, a source twice, too many, and weights too fine for the table.
    """
    found: dict[str, Fraction] = {}
    for part in text.split(","):
        name, colon, number = part.strip().rpartition(":")
        try:
            weight = _weight(number.strip())
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not (colon and weight > 0) or path_problem(name.strip(), text_only=True) or name.strip() in found:
            why = "names a source twice" if name.strip() in found else "has a part that is no source with its weight"
            raise ConfigError(f"data.mixture {why}", came=repr(part.strip()), expected="PATH:WEIGHT, PATH:WEIGHT with weights above 0 "
                              f"of at most {MOST_WEIGHT} characters and a like exponent",
                              do='for example mixture = "texts/a:0.7, texts/b:0.3"')
        found[name.strip()] = weight
    scale = math.lcm(*(w.denominator for w in found.values()))
    whole = [int(w * scale) for w in found.values()]
    common = math.gcd(*whole)
    whole = [w // common for w in whole]
    if len(whole) > MOST_SOURCES or sum(whole) > MOST_PARTS:
        total = str(sum(whole)) if sum(whole) < 10**100 else "more than 10^100"
        raise ConfigError("data.mixture is too fine", came=f"{len(whole)} sources, weights that add up to {total} in lowest terms",
                          expected=f"at most {MOST_SOURCES} sources, a sum of at most {MOST_PARTS}",
                          do="round the weights, to three digits for example")
    return list(zip(found, whole))


def _weight(text: str) -> Fraction:
    """ValueError for what is no number, or one that is computed for ever."""
    exponent = text.lower().partition("e")[2]
    if len(text) > MOST_WEIGHT or abs(int(exponent or "0")) > MOST_WEIGHT:
        raise ValueError("too long")
    return Fraction(text)


class Turns:
    """Whose turn it is. `weights`: whole numbers above 0."""

    def __init__(self, weights: Sequence[int]) -> None:
        k, self.period = len(weights), sum(weights)
        self.weights_k = np.array(weights, dtype=np.int64)
        had = [0] * k
        self._source = np.zeros(self.period, dtype=np.int64)
        self._place = np.zeros(self.period, dtype=np.int64)
        least = max(2 * k - 2, 1)
        for n in range(self.period):
            source, late = -1, 0
            for i, a in enumerate(weights):
                owed = least * (a * (n + 1) - self.period * had[i])
                left = (least - 1) * self.period - owed  # left / a: the time until a sample of i is due, in some unit
                if owed >= self.period and (source < 0 or left * weights[source] < late * a):
                    source, late = i, left
            self._source[n], self._place[n] = source, had[source]
            had[source] += 1

    def of(self, samples_b: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, which of that source's samples it is) of each global sample: int64 [b] -> int64 [b], int64 [b]."""
        rounds_b, places_b = np.divmod(samples_b, self.period)
        source_b = self._source[places_b]
        return source_b, rounds_b * self.weights_k[source_b] + self._place[places_b]

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source has had."""
        rounds, rest = divmod(samples, self.period)
        had = np.bincount(self._source[:rest], minlength=len(self.weights_k))
        return [rounds * int(a) + int(x) for a, x in zip(self.weights_k, had)]


class MixedSampler(Sampler):
    """Training batches of several sources by their weights."""

    def __init__(self, samplers: Sequence[PermutedSampler], weights: Sequence[int]) -> None:
        """`samplers`: one a source, of equal sequence length and global batch. `weights`: theirs. InputError else."""
        shapes = {(s.sequence, s.global_batch) for s in samplers}
        if len(shapes) != 1 or len(samplers) != len(weights) or min(weights) < 1:
            raise InputError("impossible mixture", came=f"{len(samplers)} sources, weights {list(weights)[:4]}, shapes {sorted(shapes)}",
                             expected="one whole weight above 0 a source, one sequence length, one batch")
        self.samplers, self.turns = tuple(samplers), Turns(weights)
        self.global_batch = samplers[0].global_batch

    @property
    def hash(self) -> str:
        """Of the sources' samplers and weights."""
        parts = "".join(f"{a} {s.hash}\n" for a, s in zip(self.turns.weights_k, self.samplers))
        return sha256_hex(f"alpha.mixture.v1\n{parts}".encode())

    def read(self, samples_b: NDArray[np.int64], documents: bool = False) -> Batch:
        """The sequences of these samples, each from its source. Documents are numbered within their source."""
        source_b, place_b = self.turns.of(samples_b)
        shape = len(samples_b), self.samplers[0].sequence
        made = Batch(np.empty(shape, np.int32), np.empty(shape, np.int32), samples_b, np.empty(shape, np.int32) if documents else None)
        for source in np.unique(source_b):
            rows = np.flatnonzero(source_b == source)
            own = self.samplers[source].read(place_b[rows], documents)
            made.inputs_bT[rows], made.targets_bT[rows] = own.inputs_bT, own.targets_bT
            if made.documents_bT is not None:
                made.documents_bT[rows] = own.documents_bT
        return made


# -- the sources as one text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """One side of all sources, by name. `hash`: of all of them."""

    parts: tuple[tuple[str, TokenStream], ...]

    @property
    def hash(self) -> str:
        """SHA-256 (hex) over the names and streams in order."""
        return sha256_hex(f"alpha.streams.v1\n{[(name, s.hash) for name, s in self.parts]}\n".encode())


@dataclass(frozen=True)
class JoinedCorpus(Corpus):
    """Several corpora, one behind the other. The path of a document begins with the number of its source. `weights`: of the sources."""

    parts: tuple[Corpus, ...] = ()
    weights: tuple[int, ...] = ()

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over weights and sources in order: a sample hangs on both."""
        return sha256_hex(f"alpha.joined.v1\n{[(w, part.hash) for w, part in zip(self.weights, self.parts)]}\n".encode())

    def read(self, document: Document) -> bytes:
        """As Corpus."""
        number, _, relpath = document.relpath.partition("/")
        return self.parts[int(number)].read(replace(document, relpath=relpath))

    def sample(self, max_bytes: int) -> Corpus:
        """Of each source its sample of `max_bytes` by weight; a source that has no room adds none, unless all have none."""
        taken, refused = list[Corpus](), list[InputError]()
        for part, weight in zip(self.parts, self.weights):
            try:
                taken.append(part.sample(max_bytes * weight // sum(self.weights)))
            except InputError as error:
                taken.append(replace(part, documents=()))
                refused.append(error)
        if len(refused) == len(self.parts):
            raise refused[0]
        return joined(f"{self.name}[sample {max_bytes}]", taken, self.weights)


def joined(name: str, parts: Iterable[Corpus], weights: Iterable[int]) -> JoinedCorpus:
    """Corpora as one."""
    parts = tuple(parts)
    documents = tuple(replace(d, relpath=f"{i}/{d.relpath}") for i, part in enumerate(parts) for d in part.documents)
    return JoinedCorpus(name, Path(), documents, sum(part.left_out for part in parts), parts, tuple(weights))


def kept_apart(splits: Sequence[Split]) -> list[Split]:
    """The splits of the sources, where a text that one source holds out is left out of what all others train on.

    InputError where nothing is left to train on."""
    held = {d.sha256 for split in splits for d in split.validation.documents}
    apart = []
    for split in splits:
        left = split.train.subset(split.train.name, [d for d in split.train.documents if d.sha256 not in held])
        if not left.documents:
            raise InputError("all texts of a source are held out by the others", came=split.train.name,
                             expected="sources of different texts", do="take out the copies")
        apart.append(replace(split, train=left))
    return apart
