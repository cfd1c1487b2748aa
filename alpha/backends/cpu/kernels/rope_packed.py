"""Rotary position embedding of packed heads on the CPU: the kernel of rope.py on a view of the queries and keys; value heads are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.blocks import zipped
from alpha.backends.cpu.kernels.rope import rope
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

Kernel = Callable[[Cpu, Sequence[np.ndarray], Sequence[np.ndarray], Attrs], Callable[[], None]]


def _copy(x: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, x)


def rope_packed(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Turn the H + G heads of queries and keys; the G value heads stay."""
    return packed(cpu, ins, outs, attrs, rope)


def packed(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs, kernel: Kernel) -> Callable[[], None]:
    """`kernel` on the H + G heads of queries and keys; the G value heads are copied, and left alone where y is qkv's memory."""
    (qkv, positions), y = ins, outs[0]
    h, g = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    b, t, width = qkv.shape
    x_BTHD, y_BTHD = (a.reshape(b, t, h + 2 * g, width // (h + 2 * g)) for a in (qkv, y))
    turn = kernel(cpu, [x_BTHD[:, :, : h + g], positions], [y_BTHD[:, :, : h + g]], attrs)
    if np.may_share_memory(qkv, y):
        return turn
    stay = zipped(cpu, _copy, y_BTHD[:, :, h + g :], x_BTHD[:, :, h + g :])

    def run() -> None:
        turn()
        stay()

    return run


KERNELS = (
    Component(id="rope_packed.f32.cpu", kind="kernel", backend="cpu", op="rope_packed", implementation=rope_packed,
              envelope=Envelope(dtypes=("f32", "f64")), inplace=((0, 0),)),
)
