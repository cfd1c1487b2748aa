"""Norms of flat gradient buffers on the CPU: dot products of blocks or of leaves, then a binary tree over them in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

BLOCK = 65536


def global_norm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """sqrt of the sum of squares over the segments."""
    grads, norm = ins[0], outs[0]
    segments: tuple[tuple[int, int], ...] = attrs["segments"]  # type: ignore[assignment]
    blocks = [grads[at : min(at + BLOCK, start + length)] for start, length in segments for at in range(start, start + length, BLOCK)]
    partial = cpu.scratch((max(1, len(blocks)),), np.float64)

    def body(i: int, worker: int) -> None:
        partial[i] = np.dot(blocks[i], blocks[i])

    squares = cpu.items(len(blocks), body)

    def run() -> None:
        squares()
        _added(partial, len(blocks))
        norm[...] = np.sqrt(partial[0])

    return run


def square_sums(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """The sum of squares of each leaf. Small leaves go to a worker together, which changes no bit."""
    x, sums = ins[0], outs[0]
    leaves: tuple[tuple[tuple[int, int], ...], ...] = attrs["leaves"]  # type: ignore[assignment]
    dealt: list[list[tuple[int, list[np.ndarray]]]] = [[]]
    held = 0
    for i, leaf in enumerate(leaves):
        if held >= BLOCK:
            dealt.append([])
            held = 0
        dealt[-1].append((i, [x[at : min(at + BLOCK, start + n)] for start, n in leaf for at in range(start, start + n, BLOCK)]))
        held += sum(length for _, length in leaf)

    def body(k: int, worker: int) -> None:
        for i, runs in dealt[k]:
            sums[i] = sum(float(np.dot(run, run)) for run in runs)

    return cpu.items(len(dealt), body)


def norm_of_squares(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """sqrt of the sum of sums of squares."""
    sums, norm = ins[0], outs[0]
    partial = cpu.scratch((max(1, sums.size),), np.float64)

    def run() -> None:
        partial[: sums.size] = sums
        _added(partial, sums.size)
        norm[...] = np.sqrt(partial[0])

    return run


def _added(partial: np.ndarray, n: int) -> None:
    """The sum of the first n elements into the first: neighbours are (0,1), (2,3), ..., an odd one is carried. Of none: 0."""
    if n == 0:
        partial[0] = 0
    while n > 1:
        half = n // 2
        np.add(partial[0 : 2 * half : 2], partial[1 : 2 * half : 2], out=partial[:half])
        if n % 2:
            partial[half] = partial[n - 1]
        n = half + n % 2


KERNELS = tuple(
    Component(id=f"{kernel.__name__}.f32.cpu", kind="kernel", backend="cpu", op=kernel.__name__, implementation=kernel,
              envelope=Envelope(dtypes=("f32", "f64")))
    for kernel in (global_norm, square_sums, norm_of_squares)
)
