"""Cases of `split.by_file`."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np

from alpha.component import Measured
from alpha.data import corpus, split
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import Cases, any_bytes, folder, same_everywhere, text_like, write_texts


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
    count = Checks()
    for _ in range(4):
        documents, seed, fraction = made_up(rng, 400), int(rng.integers(0, 1 << 40)), float(rng.uniform(0.1, 0.6))
        made = split.split_by_file(_corpus(documents), fraction=fraction, seed=seed)
        validation = _paths(made.validation)
        for d in documents:
            group = [reference_position(other.relpath, seed) for other in documents if other.sha256 == d.sha256]
            count.that((d.relpath in validation) == all(position < fraction for position in group), f"side of {d.relpath}")
        count.that(_paths(made.train) | validation == {d.relpath for d in documents}, "a file is on no side")
    return count.measured()


def _nothing_shared(rng: np.random.Generator) -> Measured:
    count = Checks()
    for _ in range(10):
        made = split.split_by_file(_corpus(made_up(rng, 300, 0.5)), fraction=0.3, seed=int(rng.integers(1 << 30)))
        count.that(not _paths(made.train) & _paths(made.validation), "a path on both sides")
        contents = [{d.sha256 for d in side.documents} for side in (made.train, made.validation)]
        count.that(not contents[0] & contents[1], "a text on both sides")
        count.that(made.train.hash != made.validation.hash, "both sides share a hash")
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
    """Files come: the others keep their side, but for texts of which a copy came, and the one of a corpus too small for its fraction.
    None enters validation."""
    count = Checks()
    for files in (2, 2, 3, 5, 300, 300, 300):
        documents, fraction = made_up(rng, files, 0.0 if files < 300 else 0.2), 0.01 if files < 300 else 0.3
        if len({d.sha256 for d in documents}) == 1:
            continue
        new = [d for d in made_up(rng, 200) if d.relpath not in {old.relpath for old in documents}]
        before = split.split_by_file(_corpus(documents), fraction=fraction, seed=5)
        after = split.split_by_file(_corpus(documents + new), fraction=fraction, seed=5)
        copied = {d.sha256 for d in new}
        forced = {d.sha256 for d in before.validation.documents if reference_position(d.relpath, 5) >= fraction}
        held_out = {d.sha256 for d in before.validation.documents}
        count.that(not forced or len(held_out) == 1, "more than one text is validation without a reason")
        for d in before.train.documents:
            count.that(d in after.train.documents, f"{d.relpath} moved into validation")
        for d in before.validation.documents:
            count.that(d in after.validation.documents or d.sha256 in copied | forced, f"{d.relpath} moved")
    return count.measured()


HALVED = b"xx" + "𝄞".encode() * 50
"""Its middle lies inside a character."""


def _one_text_is_cut(rng: np.random.Generator) -> Measured:
    """The sides of one text join to it, about as the fraction says; the end begins a line, or at least a character."""
    count = Checks()
    with folder() as root:
        for text in (text_like(rng, 3000), text_like(rng, 900) + b"\n", b"a\nbc\ndef\n" + b"one line to the end " * 40,
                     any_bytes(rng, 500) + b"\n.", "äöü€𝄞".encode() * 40, HALVED, b"no line end at all " * 9, b"ab"):
            write_texts(root, {"one.txt": text})
            whole = corpus.corpus_of_files("one", root, ["one.txt"])
            fraction = float(rng.uniform(0.05, 0.5)) if len(text) > 2 and text != HALVED else 0.5
            made = split.split_by_file(whole, fraction=fraction, seed=1)
            train, validation = (b"".join(side.texts()) for side in (made.train, made.validation))
            count.that(train + validation == text and bool(train) and bool(validation), f"{text[:20]!r} does not come whole")
            lines = b"\n" in text[:-1]
            count.that(train.endswith(b"\n") if lines else validation[0] & 0xC0 != 0x80, "cut inside a line or a character")
            off = abs(len(validation) - fraction * len(text))
            count.that(off <= (max(map(len, text.split(b"\n"))) + 1 if lines else 4), f"{off} bytes away from the fraction {fraction}")
            ends = [i + 1 for i, byte in enumerate(text[:-1]) if byte == 10]
            behind = [end for end in ends if end > round(len(text) * (1 - fraction))]
            count.that(not ends or len(train) == (behind or ends[-1:])[0], "another line end is nearer")
            count.that(len({whole.hash, made.train.hash, made.validation.hash}) == 3, "two of whole, train and validation share a hash")
            for side, own in ((made.train, train), (made.validation, validation)):  # a part of a part, whichever end it lies at
                again = split.split_by_file(side, fraction=0.5, seed=1) if len(own) > 40 and b"\n" in own[:-1] else None
                count.that(again is None or b"".join((*again.train.texts(), *again.validation.texts())) == own, "a part of a part")
    return count.measured()


def _small_corpora_have_two_sides(rng: np.random.Generator) -> Measured:
    """However few texts, one at least is validation: that of the lowest position (the highest among a text's copies)."""
    count = Checks()
    for files in rng.integers(2, 12, 20).tolist():
        documents, seed = made_up(rng, files, 0.3), int(rng.integers(1 << 30))
        latest: dict[str, float] = {}
        for d in documents:
            latest[d.sha256] = max(latest.get(d.sha256, 0.0), reference_position(d.relpath, seed))
        if len(latest) > 1:
            made = split.split_by_file(_corpus(documents), fraction=0.01, seed=seed)
            held_out = {text for text, position in latest.items() if position < 0.01} or {min(latest, key=lambda text: latest[text])}
            count.that({d.sha256 for d in made.validation.documents} == held_out, f"{files} files: {made.validation.documents}")
            count.that({d.sha256 for d in made.train.documents} == latest.keys() - held_out, f"{files} files: {made.train.documents}")
    return count.measured()


def split_digest(data: bytes) -> str:
    """Hashes of the sides for file names made from `data` (also called in a fresh process)."""
    documents = [corpus.Document(f"{name:x}.py", hashlib.sha256(bytes([name % 97])).hexdigest(), 1) for name in set(data[:200])]
    made = split.split_by_file(_corpus(documents), fraction=0.4, seed=len(data))
    return f"{made.train.hash} {made.validation.hash}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(split_digest, rng.bytes(400), rng)


def _order_does_not_matter(rng: np.random.Generator) -> Measured:
    count = Checks()
    documents = made_up(rng, 200)
    first = split.split_by_file(_corpus(documents), fraction=0.3, seed=1)
    count.add(f"{first.train.hash} {first.validation.hash}".encode())
    for _ in range(10):
        shuffled = corpus.Corpus("shuffled", Path("elsewhere"), tuple(documents[i] for i in rng.permutation(len(documents))))
        made = split.split_by_file(shuffled, fraction=0.3, seed=1)
        count.that((made.train.hash, made.validation.hash) == (first.train.hash, first.validation.hash), "order changed the split")
    return count.measured()


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Checks()
    whole = _corpus(made_up(rng, 50, 0.0))
    for fraction in (0.0, 1.0, -0.1, 1.5, math.nan):
        count.refuses(InputError, split.split_by_file, f"{fraction}", whole, fraction=fraction)
    with folder() as root:
        write_texts(root, {"one.txt": b"x", "character.txt": "€".encode()})
        for name in ("one.txt", "character.txt"):
            one = corpus.corpus_of_files("one", root, [name])
            count.refuses(InputError, lambda one: split.split_by_file(one, fraction=0.5), f"a text of one character, {name}", one)
    count.refuses(InputError, lambda: split.split_by_file(whole, fraction=1 - 1e-12), "an empty train side")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("sides as the reference gives them", _sides_as_reference),
        ("the sides share no path and no text", _nothing_shared),
        ("the share of files is the fraction", _share_of_files),
        ("growth moves nothing", _growth_moves_nothing),
        ("one text is cut", _one_text_is_cut),
        ("small corpora have two sides", _small_corpora_have_two_sides),
    ],
    "determinism": [
        ("the split is the same in a fresh process", _same_everywhere),
        ("the order of the files does not matter", _order_does_not_matter),
    ],
    "faults": [("impossible fractions and empty sides are refused", _bad_input)],
}
