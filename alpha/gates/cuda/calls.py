"""What the gates call a kernel of the GPU on: what its component carries (backends/cuda/calls.py), as far as it lies inside the envelope.
Floor 7.

A row's own samples are small and odd; most of them are outside what the copy engine can address, and of a dozen compiled files of a
normalisation they launch two. With the further ones every file is launched; suites/unit/test_cuda_faults.py counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from alpha.backends.cuda.calls import Call, Calls, Drawn, Large
from alpha.component import Component
from alpha.ops.spec import Sample

NONE = Calls()


def calls_of(component: Component) -> Calls:
    """What the component carries; a kernel of an example may carry nothing."""
    found: Calls = component.calls or NONE
    return found


def further(component: Component, rng: np.random.Generator, which: str) -> list[Sample]:
    """Samples beyond the row's own: 'samples', or 'exact' ones."""
    calls = calls_of(component)
    return list(calls.exactly(rng) if which == "exact" else calls.further(rng))


def differentiated(component: Component, row: str, rng: np.random.Generator) -> list[Sample]:
    """Samples of a forward row: of the component's own, or of the one whose backward it is."""
    calls = calls_of(component)
    return list(calls.further(rng) if row == component.op else calls.differentiated(rng))


def large(component: Component) -> dict[str, Large]:
    """Entry of parity -> the case of a model's size."""
    return {f"large:{name}": case for name, case in calls_of(component).large.items()}


def repeated(component: Component) -> Mapping[str, Callable[[np.random.Generator], Drawn]]:
    """Name -> what draws (operands with their types, attributes) of a call of a model's size that determinism repeats."""
    return calls_of(component).repeated


def timed(component: Component) -> list[Call]:
    """The calls that perf times."""
    return _inside(component, calls_of(component).timed)


def compared(component: Component) -> list[Call]:
    """More calls on which a benchmark holds the kernel against its peers."""
    return _inside(component, calls_of(component).compared)


def _inside(component: Component, calls: tuple[Call, ...]) -> list[Call]:
    return [c for c in calls if component.envelope.why_outside(c.types, c.attrs) is None]
