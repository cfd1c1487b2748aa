"""How elementwise kernels are cut: one block size, so that one place decides what stays in cache. Floor 4.

A block is large enough that the fixed price of a NumPy call, and of handing the interpreter lock to the other worker, is a few percent
of its time, and small enough that three of them fit in a 1 MB L2 cache. Waking a worker costs about 20 microseconds, so kernels that
pass over their data once run small tensors on the caller alone. The cut depends on shapes only; who runs a block does not change bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from alpha.backends.cpu.lib import Cpu

BLOCK = 65536
"""Elements per block."""

LIGHT = 4 * BLOCK
"""Up to so many elements, one pass over memory is not shared with a worker."""


def single_pass(cpu: Cpu, n: int, elements: int, body: Callable[[int, int], None]) -> Callable[[], None]:
    """As `cpu.items` for a kernel that reads and writes `elements` once: on the caller alone up to LIGHT elements."""
    if elements > LIGHT:
        return cpu.items(n, body)

    def alone() -> None:
        for i in range(n):
            body(i, 0)

    return alone


def flat(cpu: Cpu, n: int, body: Callable[[slice, int], None], *, light: bool = False) -> Callable[[], None]:
    """Closure that calls `body(elements, worker)` for every block of a flat range of n elements. `light`: it is a single pass."""
    at = [slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]
    return single_pass(cpu, len(at), n if light else LIGHT + 1, lambda i, worker: body(at[i], worker))


def cuts(shape: Sequence[int]) -> list[Any]:
    """Indices that cut a tensor into blocks of about BLOCK elements along its first axis longer than 1."""
    axis = next((i for i, n in enumerate(shape) if n > 1), None)
    if axis is None:
        return [(...,)] if prod(shape) else []
    step = max(1, BLOCK * shape[axis] // max(1, prod(shape)))
    return [(slice(None),) * axis + (slice(s, min(s + step, shape[axis])), ...) for s in range(0, shape[axis], step)]


def zipped(cpu: Cpu, call: Callable[..., object], out: np.ndarray, *ins: np.ndarray) -> Callable[[], None]:
    """Closure of `call(*in blocks, out block)` over all blocks of `out`, inputs broadcast to its shape by NumPy's rule."""
    if all(x.shape == out.shape for x in ins) and out.flags.c_contiguous:
        ins, out = tuple(x.reshape(-1) for x in ins), out.reshape(-1)
    wide = [np.broadcast_to(x, out.shape) for x in ins]
    parts = [([x[at] for x in wide], out[at]) for at in cuts(out.shape)]

    def body(i: int, worker: int) -> None:
        call(*parts[i][0], parts[i][1])

    return single_pass(cpu, len(parts), out.size, body)
