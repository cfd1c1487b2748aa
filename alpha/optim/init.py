"""Initial parameters, drawn per tensor from a counter-based generator keyed by (seed, tensor name). Floor 5.

Pair i of a tensor's numbers is a function of the key and of i alone, so pieces are drawn in any order, by any number of threads, and have
the same bits. A piece is all that a thread needs beside the array that is filled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from alpha.cores import cores
from alpha.errors import ConfigError
from alpha.graph.state import StateLayout, TensorSpec

PIECE = 1 << 17
"""Elements that are drawn at a time: HELD bytes of float64 on their way. A multiple of the 4 words that Philox makes of one counter. With
fewer, 16 threads wait for the interpreter between NumPy's calls: 9 ns an element at 2^15, 3 here, no less beyond."""

HELD = 48 * PIECE

MOST = 32
"""Threads at most: 200 MB of pieces."""


def draw(spec: TensorSpec, seed: int) -> np.ndarray:
    """float32 array of the tensor's shape; the same in every process, order and world size. ConfigError for an unknown Init."""
    flat = np.empty(spec.size, np.float32)
    for piece in _pieces(flat, spec, seed):
        piece()
    return flat.reshape(spec.shape)


def fill_initial(flat: np.ndarray, layout: StateLayout, seed: int, workers: int = 0) -> None:
    """Write every tensor's initial value into the flat parameter array; padding is zero. `workers`: threads, 0 for one on each core that
    this process may use. They change no bit. ConfigError for an unknown Init."""
    pieces, at = list[Callable[[], None]](), 0
    for spec in sorted(layout.tensors, key=lambda t: layout.offsets[t.name]):
        start = layout.offsets[spec.name]
        flat[at:start] = 0
        at = start + spec.size
        pieces += _pieces(flat[start:at], spec, seed)
    flat[at:] = 0
    workers = min(workers or cores(), MOST, len(pieces))
    if workers < 2:
        for piece in pieces:
            piece()
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(piece) for piece in pieces]:
            done.result()


def _pieces(flat: np.ndarray, spec: TensorSpec, seed: int) -> list[Callable[[], None]]:
    """What writes a tensor's elements, PIECE at a time."""
    starts = range(0, spec.size, PIECE)
    if spec.init.kind in ("zeros", "ones"):
        value = float(spec.init.kind == "ones")
        return [partial(flat[start : start + PIECE].fill, value) for start in starts]
    if spec.init.kind != "normal":
        raise ConfigError("unknown initialisation", came=spec.init.kind, expected="normal, zeros or ones")
    key = int.from_bytes(hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()[:16], "little")
    return [partial(_normal, flat[start : start + PIECE], key, start, spec.init.std) for start in starts]


def _normal(out: np.ndarray, key: int, start: int, std: float) -> None:
    """Normal numbers `start` and following of a key, times std, rounded to `out`."""
    bits = np.random.Philox(key=key, counter=start // 4).random_raw(out.size + out.size % 2)
    # Box-Muller on 53-bit uniforms, in float64: independent of NumPy's own normal sampler, which may change between versions
    bits >>= np.uint64(11)
    u = bits.astype(np.float64)
    u *= 2.0**-53
    radius, angle = np.log1p(-u[0::2]), 2 * np.pi * u[1::2]
    radius *= -2
    np.sqrt(radius, out=radius)
    np.multiply(radius, np.cos(angle), out=u[0::2])
    np.multiply(radius, np.sin(angle), out=u[1::2])
    u *= std
    out[...] = u[: out.size]
