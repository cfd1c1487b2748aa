"""Counter-based random numbers: Philox4x32-10. Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A number is a function of (seed, purpose, step, global sample id, position in the sample), never of a rank, an address or the order of
calls. Key: (seed, purpose). Counter: (group low, group high, sample id, step), where group = position // 4; word position % 4 of the result
belongs to the position. This text is the plain one that oracles use; a backend has its own.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from alpha.errors import InputError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

KNOWN_ANSWERS = (
    # (counter, key, result), from kat_vectors of the authors' Random123 library
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Four uint64 arrays that hold the 32-bit words of the result, from four integer arrays of equal (or broadcastable) shape."""
    c = [np.asarray(word).astype(np.uint64) & _LOW for word in counter]
    k = list(key)
    for _ in range(ROUNDS):
        product0, product1 = c[0] * np.uint64(MULTIPLIERS[0]), c[2] * np.uint64(MULTIPLIERS[1])
        c = [(product1 >> _HALF) ^ c[1] ^ np.uint64(k[0]), product1 & _LOW, (product0 >> _HALF) ^ c[3] ^ np.uint64(k[1]), product0 & _LOW]
        k = [(word + step) & 0xFFFFFFFF for word, step in zip(k, WEYL)]
    return tuple(np.broadcast_arrays(*c))


def key_of(seed: int, purpose: int | str) -> tuple[int, int]:
    """The 2 x 32-bit key; a purpose given by name counts as the CRC-32 of its UTF-8 bytes."""
    word = crc32(purpose.encode()) if isinstance(purpose, str) else purpose
    for name, value in (("seed", seed), ("purpose", word)):
        if not 0 <= value < 2**32:
            raise InputError(f"{name} is a 32-bit number", came=value, expected="0 to 4294967295")
    return seed, word


def words(seed: int, purpose: int | str, step: int, sample_ids: np.ndarray, n: int) -> np.ndarray:
    """uint64 [B, n] of 32-bit words: row b holds the numbers of positions 0..n-1 of sample `sample_ids[b]` at `step`."""
    group = np.arange((n + 3) // 4, dtype=np.int64)[None, :]
    sample = np.asarray(sample_ids).astype(np.int64)[:, None]
    result = philox((group, group >> 32, sample, np.full_like(group, step)), key_of(seed, purpose))
    return np.stack(result, axis=-1).reshape(sample.shape[0], -1)[:, :n]


def drop_threshold(rate: float) -> int:
    """A position is dropped iff its word is below this: rate * 2^32 rounded to nearest."""
    return round(rate * 2.0**32)
