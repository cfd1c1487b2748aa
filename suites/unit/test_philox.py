"""The two texts of Philox4x32-10, the oracle's and the CPU backend's, against the known answers of its authors and each other."""

from __future__ import annotations

import numpy as np
import pytest

from alpha.backends.cpu.kernels.dropout import _philox
from alpha.ops.random import KNOWN_ANSWERS, philox


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_oracle_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(int(x) for x in philox(tuple(np.array(c) for c in counter), key)) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_backend_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    lanes = _philox(counter[0] | counter[1] << 32, counter[2], counter[3], key, np.empty((6, 1), np.uint64))
    assert tuple(int(x[0]) for x in lanes) == words


def test_both_agree_on_many_lanes() -> None:
    key, first, sample, step = (12345, 0xFFFFFFFF), (7 << 32) + 11, 0x80000001, 0x7FFFFFFF
    group = first + np.arange(1000, dtype=np.int64)
    want = philox((group, group >> 32, np.full_like(group, sample), np.full_like(group, step)), key)
    got = _philox(first, sample, step, key, np.empty((6, 1000), np.uint64))
    for w, g in zip(want, got):
        np.testing.assert_array_equal(g, w)
