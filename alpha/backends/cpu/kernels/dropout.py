"""Dropout on the CPU: Philox4x32-10 in blocks of uint64 lanes (the function is that of alpha/ops/random.py, the text its own).

A lane is one group of four positions. In round 1 the words c1, c2, c3 are the same in all lanes and in round 2 one product still is, so
those two rounds are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from zlib import crc32

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

_GROUPS = 4096
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def _philox(group: int, sample: int, step: int, key: tuple[int, int], lanes: np.ndarray) -> list[np.ndarray]:
    """Words 0 to 3 of groups `group`, `group` + 1, ... (one per lane) as uint64 lanes; `lanes` [6, n] is scratch and holds the result."""
    a, b, p, q, s, t = lanes
    k0, k1 = key
    high = group >> 32  # a block of lanes never crosses a multiple of 2^32
    np.add(np.arange(len(a), dtype=np.uint64), np.uint64(group & _LOW), out=a)
    # round 1
    one = sample * _M1
    np.multiply(a, np.uint64(_M0), out=p)
    c0, c1 = (one >> 32) ^ high ^ k0, one & _LOW
    np.right_shift(p, np.uint64(32), out=b)
    np.bitwise_xor(b, np.uint64(step ^ k1), out=b)  # c2
    np.bitwise_and(p, np.uint64(_LOW), out=p)  # c3
    k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    # round 2
    one = c0 * _M0
    np.multiply(b, np.uint64(_M1), out=q)
    np.right_shift(q, np.uint64(32), out=a)
    np.bitwise_xor(a, np.uint64(c1 ^ k0), out=a)  # c0
    np.bitwise_and(q, np.uint64(_LOW), out=q)  # c1
    np.bitwise_xor(p, np.uint64((one >> 32) ^ k1), out=b)  # c2
    p[...] = one & _LOW  # c3
    for _ in range(2, _ROUNDS):
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        np.multiply(a, np.uint64(_M0), out=s)
        np.multiply(b, np.uint64(_M1), out=t)
        np.right_shift(t, np.uint64(32), out=a)
        np.bitwise_xor(a, q, out=a)
        np.bitwise_xor(a, np.uint64(k0), out=a)
        np.right_shift(s, np.uint64(32), out=b)
        np.bitwise_xor(b, p, out=b)
        np.bitwise_xor(b, np.uint64(k1), out=b)
        np.bitwise_and(t, np.uint64(_LOW), out=q)
        np.bitwise_and(s, np.uint64(_LOW), out=p)
    return [a, q, b, p]


def dropout(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x / (1 - rate) where the word of (seed, purpose, step, sample, position) is at least rate * 2^32, else 0."""
    n = prod(ins[0].shape[1:])
    x, y, step, samples = ins[0].reshape(-1, n), outs[0].reshape(-1, n), ins[1], ins[2]
    rate, purpose = float(attrs["rate"]), attrs["purpose"]  # type: ignore[arg-type]
    key = int(attrs["seed"]), crc32(purpose.encode()) if isinstance(purpose, str) else int(purpose)  # type: ignore[call-overload]
    threshold, scale = np.uint64(round(rate * 2.0**32)), 1 / (1 - rate)
    per_sample = (n + 4 * _GROUPS - 1) // (4 * _GROUPS)
    most = min(_GROUPS, (n + 3) // 4)
    lanes = cpu.scratch((cpu.threads, 6, most), np.uint64)
    dropped = cpu.scratch((cpu.threads, most, 4), np.bool_)

    def body(i: int, worker: int) -> None:
        row, first = i // per_sample, i % per_sample * _GROUPS
        at = slice(4 * first, min(4 * (first + _GROUPS), n))
        groups = (at.stop - at.start + 3) // 4
        words = _philox(first, int(samples[row]) & _LOW, int(step) & _LOW, key, lanes[worker, :, :groups])
        drop = dropped[worker, :groups]
        for j, word in enumerate(words):
            np.less(word, threshold, out=drop[:, j])
        yb = y[row, at]
        np.multiply(x[row, at], scale, out=yb)
        np.copyto(yb, 0, where=drop.reshape(-1)[: len(yb)])

    return cpu.items(len(x) * per_sample, body)


KERNELS = (
    Component(id="dropout.f32.cpu", kind="kernel", backend="cpu", op="dropout", implementation=dropout,
              envelope=Envelope(dtypes=("f32", "f64")),
              inplace=((0, 0),)),
)
