"""A keyed permutation of 0 .. size-1 with random access: element i is computed, no table is stored or shuffled.

A balanced Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J.
Comput. 17(2), 1988) on the smallest domain 4^h >= size, walked along its cycle until it lands below `size` (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). The round function is the finaliser of SplitMix64 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014; constants "Mix13" by D. Stafford).

The order is a promise: runs resume by it. Changing it changes what every run sees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpha.errors import GraphError

ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
# At least 2^8 elements in the network: a Feistel network of one- or two-bit halves reaches few permutations.
_LEAST_HALF_BITS = 4

U64 = NDArray[np.uint64]


def mix64(z: U64) -> U64:
    """SplitMix64's finaliser, a bijection of 64-bit words: uint64 [n] -> uint64 [n]."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _words(values: NDArray[np.int64], factor: int = 1, plus: int = 0) -> U64:
    return values.astype(np.uint64) * np.uint64(factor) + np.uint64(plus & _MASK64)


def _network(value: U64, keys: list[U64], half_bits: int) -> U64:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (mix64(right + key) & mask)
    return (left << shift) | right


def permuted(indices: NDArray[np.int64], epochs: NDArray[np.int64], size: int, seed: int) -> NDArray[np.int64]:
    """Where the permutation of (seed, epochs[j]) sends indices[j]: int64 [n], each in 0 .. size-1.

    `indices`: int64 [n] in 0 .. size-1. `epochs`: int64 [n], each >= 0. `size`: 1 to 2^62. `seed`: 0 to 2^64 - 1.
    GraphError if the walk does not end, which a permutation's does.
    """
    half_bits = max(_LEAST_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    seed_word = mix64(np.array([seed], dtype=np.uint64) + np.uint64(_GOLDEN))
    epoch_key = mix64(seed_word + _words(epochs + 1, _GOLDEN))
    keys = [mix64(epoch_key + np.uint64((number * _GOLDEN) & _MASK64)) for number in range(1, ROUNDS + 1)]
    value = _network(_words(indices), keys, half_bits)
    outside = np.flatnonzero(value >= size)
    longest = (1 << 2 * half_bits) - size  # a cycle that starts inside is back before it has met every place outside
    while outside.size:
        if longest == 0:
            raise GraphError("the sampler's permutation is not a permutation: its walk does not end", came=f"size {size}, seed {seed}")
        longest -= 1
        value[outside] = _network(value[outside], [key[outside] for key in keys], half_bits)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)
