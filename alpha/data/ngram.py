"""The baseline: an order-2 byte model, which predicts a byte from the two before it. A trained model has to win clearly.

Interpolated Witten-Bell smoothing (Witten and Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 37(4), 1991; in the
form of Chen and Goodman, "An empirical study of smoothing techniques for language modeling", TR-10-98, Harvard, 1998):

    P(w | h) = (c(h, w) + D(h) P(w | h')) / (c(h) + D(h))

c: counts; D(h): number of distinct bytes seen after context h; h': h without its oldest byte. Below order 0 stands 1/256.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from alpha.errors import InputError

# The context before the first two bytes of a document: line ends, which most texts start after.
_BEFORE = b"\n\n"

_BATCH, _BLOCK = 1 << 22, 1 << 20
"""Bytes of text that are counted, and cut, at once: memory does not grow with a corpus, nor with its longest document."""


def nats_to_bits_per_byte(total_nats: float, total_bytes: int) -> float:
    """Bits per byte of a text of `total_bytes` bytes on which a model loses `total_nats`: total_nats / ln 2 / total_bytes.

    With tokens: the sum of the token losses (not their mean) over the bytes that the same tokens stand for.
    InputError without bytes.
    """
    if total_bytes < 1:
        raise InputError("bits per byte of no bytes", came=total_bytes, expected="at least 1 byte")
    return total_nats / float(np.log(2.0)) / total_bytes


def _codes(texts: Iterable[bytes]) -> Iterator[NDArray[np.int64]]:
    """For each byte: (oldest context byte) * 65536 + (last byte) * 256 + the byte itself, int64 [n], n at most _BLOCK, of one document."""
    for text in texts:
        for first in range(0, len(text), _BLOCK):
            before = text[first - 2 : first] if first else _BEFORE
            b = np.frombuffer(before + text[first : first + _BLOCK], dtype=np.uint8).astype(np.int64)
            yield (b[:-2] << 16) | (b[1:-1] << 8) | b[2:]


class Order2Model:
    """Counts of byte triples and what follows from them. Holds 128 MiB of int64 counts."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        """Fit on `texts`, one item per document. InputError if there is not one byte."""
        self._c2, waiting, size = np.zeros((1 << 16, 256), dtype=np.int64), list[NDArray[np.int64]](), 0
        for codes in _codes(texts):
            waiting.append(codes)
            size += len(codes)
            if size >= _BATCH:
                self._count(waiting)
                waiting, size = [], 0
        self._count(waiting)
        if not self._c2.any():
            raise InputError("the order-2 model has no text to be fitted on", came="0 bytes", expected="at least 1 byte")
        self._c1 = self._c2.reshape(256, 256, 256).sum(axis=0, dtype=np.int64)
        c0 = self._c1.sum(axis=0)
        self._n2, self._d2 = self._c2.sum(axis=1, dtype=np.int64), np.count_nonzero(self._c2, axis=1)
        n1, d1 = self._c1.sum(axis=1), np.count_nonzero(self._c1, axis=1)
        n0, d0 = int(c0.sum()), int(np.count_nonzero(c0))
        p0 = (c0 + d0 / 256.0) / (n0 + d0)
        # A context that never came has n = d = 0: all its weight goes to the shorter context.
        self._p1 = np.where(n1[:, None] > 0, (self._c1 + d1[:, None] * p0) / np.maximum(n1 + d1, 1)[:, None], p0)

    def _count(self, codes: list[NDArray[np.int64]]) -> None:
        if codes:
            self._c2 += np.bincount(np.concatenate(codes), minlength=1 << 24).reshape(1 << 16, 256)

    def probabilities(self, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        """P(byte | two bytes before it) for codes (older << 16 | last << 8 | byte): int64 [n] -> float64 [n]."""
        context, byte = codes >> 8, codes & 255
        shorter = self._p1[context & 255, byte]
        n, d = self._n2[context], self._d2[context]
        return np.where(n > 0, (self._c2[context, byte] + d * shorter) / np.maximum(n + d, 1), shorter)

    def bits_per_byte(self, data: bytes | Iterable[bytes]) -> float:
        """Mean of -log2 P over the bytes of `data`: one document, or an iterable of documents. InputError without bytes."""
        texts = [data] if isinstance(data, bytes) else data
        nats, total = 0.0, 0
        for codes in _codes(texts):
            nats -= float(np.log(self.probabilities(codes)).sum())
            total += len(codes)
        return nats_to_bits_per_byte(nats, total)
