"""Cases of `split.by_file`."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np

from alpha.component import Measured
from alpha.data import corpus, split
from alpha.errors import InputError
from alpha.gates.contracts.data.support import Cases, Count, same_everywhere


def reference_position(relpath: str, seed: int) -> float:
    """The place of a path in [0, 1) by its definition, through hexadecimal digits."""
    digits = hashlib.sha256(f"alpha.split.v1\0{seed}\0{relpath}".encode()).hexdigest()[:16]
    return (int(digits, 16) // 2**11) / 2**53


def made_up(rng: np.random.Generator, files: int, copies: float = 0.2) -> list[corpus.Document]:
    """Documents without files; a share of them are copies of another's content."""
    contents = rng.integers(0, max(1, int(files * (1 - copies))), files)
    names = rng.permutation(10 * files)[:files]
    return [corpus.Document(f"d{n % 7}/f{n}.py", hashlib.sha256(str(c).encode()).hexdigest(), 10) for n, c in zip(names, contents)]


def _corpus(documents: list[corpus.Document]) -> corpus.Corpus:
    return corpus.Corpus("made up", Path("nowhere"), tuple(sorted(documents, key=lambda d: d.relpath.encode())))


def _paths(side: corpus.Corpus) -> set[str]:
    return {document.relpath for document in side.documents}


def _sides_as_reference(rng: np.random.Generator) -> Measured:
    count = Count()
    for _ in range(4):
        documents, seed, fraction = made_up(rng, 400), int(rng.integers(0, 1 << 40)), float(rng.uniform(0.1, 0.6))
        made = split.split_by_file(_corpus(documents), fraction=fraction, seed=seed)
        validation = _paths(made.validation)
        for d in documents:
            group = [reference_position(other.relpath, seed) for other in documents if other.sha256 == d.sha256]
            count.check((d.relpath in validation) == all(position < fraction for position in group), f"side of {d.relpath}")
        count.check(_paths(made.train) | validation == {d.relpath for d in documents}, "a file is on no side")
    return count.measured()


def _nothing_shared(rng: np.random.Generator) -> Measured:
    count = Count()
    for _ in range(10):
        made = split.split_by_file(_corpus(made_up(rng, 300, 0.5)), fraction=0.3, seed=int(rng.integers(1 << 30)))
        count.check(not _paths(made.train) & _paths(made.validation), "a path on both sides")
        contents = [{d.sha256 for d in side.documents} for side in (made.train, made.validation)]
        count.check(not contents[0] & contents[1], "a text on both sides")
        count.check(made.train.hash != made.validation.hash, "both sides share a hash")
    return count.measured()


def _share_of_files(rng: np.random.Generator) -> Measured:
    """The share of files in validation is `fraction` within 5 standard deviations of a binomial; another seed, other files."""
    files, fraction = 4000, float(rng.uniform(0.03, 0.3))
    whole, seeds = _corpus(made_up(rng, files, 0.0)), rng.integers(0, 1 << 30, 4).tolist()
    unique = len({d.sha256 for d in whole.documents})
    sides = [split.split_by_file(whole, fraction=fraction, seed=seed).validation for seed in seeds]
    worst = max(abs(len({d.sha256 for d in side.documents}) / unique - _expected(whole, fraction, unique)) for side in sides)
    same = sum(_paths(a) == _paths(b) for i, a in enumerate(sides) for b in sides[:i] if seeds[i] != seeds[sides.index(b)])
    bound = 5 * math.sqrt(fraction * (1 - fraction) / unique)
    return Measured(error=worst if not same else math.inf, bound=bound, cases=len(sides) * files, note="share of texts")


def _expected(whole: corpus.Corpus, fraction: float, unique: int) -> float:
    copies: dict[str, int] = {}
    for d in whole.documents:
        copies[d.sha256] = copies.get(d.sha256, 0) + 1
    return sum(fraction**n for n in copies.values()) / unique


def _growth_moves_nothing(rng: np.random.Generator) -> Measured:
    """Files come: the others keep their side, but for texts of which a copy came, and these never enter validation."""
    count = Count()
    for _ in range(6):
        documents = made_up(rng, 300)
        new = [d for d in made_up(rng, 200) if d.relpath not in {old.relpath for old in documents}]
        before = split.split_by_file(_corpus(documents), fraction=0.3, seed=5)
        after = split.split_by_file(_corpus(documents + new), fraction=0.3, seed=5)
        copied = {d.sha256 for d in new}
        for d in before.train.documents:
            count.check(d in after.train.documents, f"{d.relpath} moved into validation")
        for d in before.validation.documents:
            count.check(d in after.validation.documents or d.sha256 in copied, f"{d.relpath} moved")
    return count.measured()


def split_digest(data: bytes) -> str:
    """Hashes of the sides for file names made from `data` (also called in a fresh process)."""
    documents = [corpus.Document(f"{name:x}.py", hashlib.sha256(bytes([name % 97])).hexdigest(), 1) for name in set(data[:200])]
    made = split.split_by_file(_corpus(documents), fraction=0.4, seed=len(data))
    return f"{made.train.hash} {made.validation.hash}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(split_digest, rng.bytes(400), rng)


def _order_does_not_matter(rng: np.random.Generator) -> Measured:
    count = Count()
    documents = made_up(rng, 200)
    first = split.split_by_file(_corpus(documents), fraction=0.3, seed=1)
    count.add(f"{first.train.hash} {first.validation.hash}".encode())
    for _ in range(10):
        shuffled = corpus.Corpus("shuffled", Path("elsewhere"), tuple(documents[i] for i in rng.permutation(len(documents))))
        made = split.split_by_file(shuffled, fraction=0.3, seed=1)
        count.check((made.train.hash, made.validation.hash) == (first.train.hash, first.validation.hash), "order changed the split")
    return count.measured()


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Count()
    whole = _corpus(made_up(rng, 50, 0.0))
    for fraction in (0.0, 1.0, -0.1, 1.5, math.nan):
        count.refuses(InputError, split.split_by_file, f"{fraction}", whole, fraction=fraction)
    one = _corpus(made_up(rng, 1))
    count.refuses(InputError, lambda: split.split_by_file(one), "one file")
    count.refuses(InputError, lambda: split.split_by_file(whole, fraction=1e-12), "an empty validation side")
    count.refuses(InputError, lambda: split.split_by_file(whole, fraction=1 - 1e-12), "an empty train side")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("sides as the reference gives them", _sides_as_reference),
        ("the sides share no path and no text", _nothing_shared),
        ("the share of files is the fraction", _share_of_files),
        ("growth moves nothing", _growth_moves_nothing),
    ],
    "determinism": [
        ("the split is the same in a fresh process", _same_everywhere),
        ("the order of the files does not matter", _order_does_not_matter),
    ],
    "faults": [("impossible fractions and empty sides are refused", _bad_input)],
}
