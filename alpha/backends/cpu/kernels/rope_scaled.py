"""Rotary position embedding of packed heads by given frequencies on the CPU: as rope_packed.py, the table made from the frequencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.kernels.rope import turn
from alpha.backends.cpu.kernels.rope_packed import packed
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs


def _turned(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    return turn(cpu, ins, outs, {**attrs, "layout": "half"}, attrs["frequencies"])  # type: ignore[arg-type]


def rope_scaled(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Turn the H + G heads of queries and keys by position * frequencies[i]; the G value heads stay."""
    return packed(cpu, ins, outs, attrs, _turned)


KERNELS = (
    Component(id="rope_scaled.f32.cpu", kind="kernel", backend="cpu", op="rope_scaled", implementation=rope_scaled,
              envelope=Envelope(dtypes=("f32", "f64")), inplace=((0, 0),)),
)
