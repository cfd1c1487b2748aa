"""Learning rate of a step: an entry of a table that was made when the Program was built (alpha/optim/schedules.py).

`rates`: float32, one entry for each number of finished updates, from 0. After the last entry the rate stays what it is there. `step` counts
finished updates, on the device; `used` is a copy of it, which the update still reads when the counter has moved on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, Table, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0] == TensorType((), "i32"), "learning_rate", "step is an i32 scalar", types[0], "i32[]")
    expect(isinstance(attrs["rates"], Table), "learning_rate", "rates is a table", type(attrs["rates"]).__name__, "alpha.types.Table")
    return TensorType((), "f32"), types[0]


def _oracle(step: np.ndarray, *, rates: Table) -> Arrays:
    return rates.array().astype(np.float64)[np.minimum(step, len(rates) - 1)], np.asarray(step)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for n in (1, 2, 9, 101, 70_001):
        rates = Table.of(10.0 ** rng.uniform(-7, -1, n))
        for step in sorted({0, 1, n // 3, n - 1, n, n + 1, 2**30}):
            yield Sample(name=f"{n}-{step}", inputs=(np.array(step, np.int32),), attrs={"rates": rates})


ROWS = (
    OpSpec(name="learning_rate", inputs=("step",), outputs=("lr", "used"), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="an entry of a table, by an integer", flops=lambda t, a: 0, samples=_samples, exact=_samples,
           undifferentiable=("step",)),
)
