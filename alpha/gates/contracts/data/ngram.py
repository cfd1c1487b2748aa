"""Cases of `ngram.order2`: against dictionaries of counts and the formula, one byte at a time."""

from __future__ import annotations

import math

import numpy as np

from alpha.component import Measured
from alpha.data import ngram
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import Cases, any_bytes, same_everywhere, stdlib_texts, text_like


def reference_bits(train: list[bytes], texts: list[bytes]) -> float:
    """Bits per byte by the formula, from a dictionary context -> byte -> count for each order."""
    counts: dict[bytes, dict[int, int]] = {}
    for text in train:
        padded = b"\n\n" + text
        for i in range(2, len(padded)):
            for order in (0, 1, 2):
                followers = counts.setdefault(padded[i - order : i], {})
                followers[padded[i]] = followers.get(padded[i], 0) + 1

    def p(context: bytes, byte: int) -> float:
        shorter = p(context[1:], byte) if context else 1 / 256
        followers = counts.get(context, {})
        if not followers:
            return shorter
        return (followers.get(byte, 0) + len(followers) * shorter) / (sum(followers.values()) + len(followers))

    bits, total = 0.0, 0
    for text in texts:
        padded = b"\n\n" + text
        for i in range(2, len(padded)):
            bits -= math.log2(p(padded[i - 2 : i], padded[i]))
            total += 1
    return bits / total


def _bits_as_reference(rng: np.random.Generator) -> Measured:
    """Relative error; each of at most 4000 terms and the sum round at 2^-53, so 1e-11 leaves three digits of room."""
    worst, total = 0.0, 0
    for train, texts in (
        ([text_like(rng, 3000), b"", b"x"], [text_like(rng, 1000), b"y", b""]),
        (stdlib_texts(rng, 2, 3000), stdlib_texts(rng, 1, 1500)),
        ([any_bytes(rng, 2000)], [any_bytes(rng, 500)]),
        ([b"aaaa"], [b"aaab", b"zzz"]),
    ):
        expected = reference_bits(train, texts)
        came = ngram.Order2Model(train).bits_per_byte(texts)
        error = abs(came - expected) / expected
        worst, total = (error if not error <= worst else worst), total + 1
    return Measured(error=worst, bound=1e-11, cases=total, note="relative")


def _probabilities_sum_to_one(rng: np.random.Generator) -> Measured:
    """After every kind of context, seen or not, the 256 probabilities are positive and sum to 1 (256 roundings)."""
    model = ngram.Order2Model([text_like(rng, 2000)])
    contexts = np.concatenate([rng.integers(0, 1 << 16, 200), np.frombuffer(b"se\n\n  \xff\xfe", dtype="<u2")]).astype(np.int64)
    p = model.probabilities(((contexts[:, None] << 8) | np.arange(256)).ravel()).reshape(-1, 256)
    worst = float(np.abs(p.sum(axis=1) - 1.0).max()) if np.all(p > 0) else math.inf
    return Measured(error=worst, bound=256 * 2.0**-53, cases=len(contexts))


def _closed_forms(rng: np.random.Generator) -> Measured:
    """A uniform model costs 8 bits per byte; a model fitted on one byte has probabilities that can be written down."""
    size = int(rng.integers(1, 10_000))
    worst = abs(ngram.nats_to_bits_per_byte(size * math.log(256.0), size) - 8.0)
    model = ngram.Order2Model([b"a"])
    # Order 0: c = 1 of 1, D = 1: P(a) = (1 + 1/256) / 2; the same step twice more gives 1 - (255/256) / 8.
    worst = max(worst, abs(model.bits_per_byte(b"a") + math.log2(1 - 255 / 2048)))
    worst = max(worst, abs(model.bits_per_byte([b"b"]) - math.log2(2048)))
    return Measured(error=worst, bound=1e-12, cases=3, note="bits")


def _long_documents(rng: np.random.Generator) -> Measured:
    """A document beyond one block and one batch, against the formula from all its triples at once; relative error, summed pairwise."""
    pool = np.frombuffer(text_like(rng, 4000), dtype=np.uint8)
    text = pool[rng.integers(0, len(pool), (5 << 20) + 7)].tobytes()
    b = np.frombuffer(b"\n\n" + text, dtype=np.uint8).astype(np.int64)
    triples, times = np.unique((b[:-2] << 16) | (b[1:-1] << 8) | b[2:], return_counts=True)
    pairs = np.bincount(triples & 0xFFFF, weights=times, minlength=1 << 16).reshape(256, 256)
    p0 = (pairs.sum(axis=0) + np.count_nonzero(pairs.sum(axis=0)) / 256) / (len(text) + np.count_nonzero(pairs.sum(axis=0)))
    n1, d1 = pairs.sum(axis=1, keepdims=True), np.count_nonzero(pairs, axis=1)[:, None]
    p1 = np.where(n1 > 0, (pairs + d1 * p0) / np.maximum(n1 + d1, 1), p0).ravel()[triples & 0xFFFF]
    context = triples >> 8
    n2, d2 = np.bincount(context, weights=times)[context], np.bincount(context)[context]
    expected = -float((times * np.log2((times + d2 * p1) / (n2 + d2))).sum()) / len(text)
    error = abs(ngram.Order2Model([text]).bits_per_byte(text) - expected) / expected
    return Measured(error=error, bound=1e-11, cases=len(triples), note="relative")


def bits_digest(data: bytes) -> str:
    """The exact bits of a score (also called in a fresh process)."""
    return ngram.Order2Model([data[::2], data[1::3]]).bits_per_byte([data[: len(data) // 2], data]).hex()


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(bits_digest, text_like(rng, 5000), rng)


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Checks()
    model = ngram.Order2Model([b"a"])
    count.refuses(InputError, lambda: ngram.Order2Model([]), "no text")
    count.refuses(InputError, lambda: ngram.Order2Model([b"", b""]), "empty texts")
    count.refuses(InputError, lambda: model.bits_per_byte(b""), "bits per byte of nothing")
    count.refuses(InputError, lambda: model.bits_per_byte([]), "bits per byte of no documents")
    count.refuses(InputError, lambda: ngram.nats_to_bits_per_byte(1.0, 0), "no bytes")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("bits per byte as the reference", _bits_as_reference),
        ("probabilities sum to one", _probabilities_sum_to_one),
        ("closed forms", _closed_forms),
        ("long documents are counted in blocks", _long_documents),
    ],
    "determinism": [("scores are the same in a fresh process", _same_everywhere)],
    "faults": [("empty input is refused", _bad_input)],
}
