"""Norm of a flat gradient buffer on the CPU: one dot product per block of 64K elements, then a binary tree over the blocks in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

BLOCK = 65536


def global_norm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """sqrt of the sum of squares over the segments; neighbours of the tree are blocks (0,1), (2,3), ..., an odd one is carried."""
    grads, norm = ins[0], outs[0]
    segments: tuple[tuple[int, int], ...] = attrs["segments"]  # type: ignore[assignment]
    blocks = [grads[at : min(at + BLOCK, start + length)] for start, length in segments for at in range(start, start + length, BLOCK)]
    partial = cpu.scratch((max(1, len(blocks)),), np.float64)

    def body(i: int, worker: int) -> None:
        partial[i] = np.dot(blocks[i], blocks[i])

    squares = cpu.items(len(blocks), body)

    def run() -> None:
        partial[0] = 0
        squares()
        n = len(blocks)
        while n > 1:
            half = n // 2
            np.add(partial[0 : 2 * half : 2], partial[1 : 2 * half : 2], out=partial[:half])
            if n % 2:
                partial[half] = partial[n - 1]
            n = half + n % 2
        norm[...] = np.sqrt(partial[0])

    return run


KERNELS = (
    Component(id="global_norm.f32.cpu", kind="kernel", backend="cpu", op="global_norm", implementation=global_norm,
              envelope=Envelope(dtypes=("f32", "f64"))),
)
