"""The learning rate on the CPU: one entry of the Program's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component
from alpha.types import Attrs, Table


def learning_rate(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """lr = rates[step], after the last entry that entry; used = step."""
    table = attrs["rates"]
    assert isinstance(table, Table)
    step, (lr, used), rates, last = ins[0], outs, table.array(), len(table) - 1

    def run() -> None:
        lr[...] = rates[min(int(step), last)]
        used[...] = step

    return run


KERNELS = (Component(id="learning_rate.f32.cpu", kind="kernel", backend="cpu", op="learning_rate", implementation=learning_rate),)
