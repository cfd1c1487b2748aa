"""How the gates call a kernel of the CPU: in a process of its own, over memory that the judge owns (process.py). Floor 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.gates.cpu import process
from alpha.gates.cpu.process import CpuBound
from alpha.ops.spec import Sample
from alpha.types import NUMPY, TensorType


def warm_up(*workers: int) -> None:
    """A gate begins: its kernel gets a process that no gate before it has used."""
    process.end()


def samples(component: Component, rng: np.random.Generator, which: str) -> list[Sample]:
    """Samples beyond the row's own: 'samples' that the component carries (backends/cpu/calls.py), no 'exact' ones."""
    return list(component.calls.further(rng)) if component.calls is not None and which == "samples" else []


def refused(component: Component, rng: np.random.Generator) -> list[Sample]:
    """Samples whose contents the kernel refuses when it is called."""
    return list(component.calls.refused(rng)) if component.calls is not None else []


def bind(component: Component, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Any, *, offset: int = 0,
         share: tuple[int, int] | None = None, workers: int = 1) -> CpuBound:
    """See subjects.bind. `offset`: elements."""
    starts: list[int] = []
    end = 0
    for i, t in enumerate([*ins, *outs]):
        item, number = NUMPY[t.dtype].itemsize, i - len(ins)
        if share is not None and number == share[0]:
            starts.append(starts[share[1]])
            continue
        starts.append(end + (offset * item if number < 0 else offset * 4 + 64 * number))
        end = -(-(starts[-1] + t.size * item) // 256) * 256
    return process.candidate(component).bind([*ins, *outs], len(ins), starts, end, attrs, workers)
