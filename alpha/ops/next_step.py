"""Number of finished updates: step + finite, so a skipped update does not count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    for name, t in zip(("step", "finite"), types):
        expect(t == TensorType((), "i32"), "next_step", f"{name} is an i32 scalar", t, "i32[]")
    return (types[0],)


def _oracle(step: np.ndarray, finite: np.ndarray) -> Arrays:
    return (np.asarray(step + finite).astype(np.int32),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for step, finite in ((0, 0), (0, 1), (41, 1), (41, 0), (2**30, 1)):
        yield Sample(name=f"{step}-{finite}", inputs=(np.array(step, np.int32), np.array(finite, np.int32)))


ROWS = (
    OpSpec(name="next_step", inputs=("step", "finite"), outputs=("step",), infer=_infer, oracle=_oracle, vjp=None, why_no_vjp="integers",
           flops=lambda t, a: 0, samples=_samples, exact=_samples, undifferentiable=("step", "finite")),
)
