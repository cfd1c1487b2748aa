"""Parity of GPU kernels at the sizes of a model, where a sequential walk is out of reach: each case brings how it is drawn and how its
outputs are judged (ops/large.py). An entry's error is the worst over its tolerance. Floor 7."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpha.component import Component
from alpha.gates.cuda.calls import large
from alpha.gates.cuda.subjects import CudaBound
from alpha.gates.subjects import crash, generator, short, spec_of
from alpha.registry.cases import CaseRecord, Contract
from alpha.types import Attrs, TensorType


def entries(component: Component, nonce: str) -> list[CaseRecord]:
    """Run every large case; one entry each."""
    found: list[CaseRecord] = []
    for name, case in large(component).items():
        rng = generator(nonce, component.id, name)
        try:
            operands, attrs = case.draw(rng)
            inputs = [x for x, _ in operands]
            error, cases = case.error(rng, inputs, attrs, _run(component, inputs, [d for _, d in operands], attrs))
            found.append(Contract(name=name, error=short(error, 3), bound=1.0, cases=cases))
        except Exception as problem:  # a kernel that raises inside its envelope
            found.append(Contract(name=name, error=float("inf"), bound=1.0, cases=1, note=crash(problem)))
    return found


def _run(component: Component, inputs: Sequence[np.ndarray], dtypes: Sequence[str], attrs: Attrs) -> list[np.ndarray]:
    """Outputs of one call on fresh poisoned buffers; GraphError if a guard was hit."""
    types = [TensorType(x.shape, d) for x, d in zip(inputs, dtypes, strict=True)]
    why = component.envelope.why_outside(types, attrs)
    assert why is None, why
    bound = CudaBound(component, types, spec_of(component).infer(types, attrs), attrs)
    bound.fill(inputs)
    bound.run()
    return bound.outs
