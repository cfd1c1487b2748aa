"""All numbers of one update in one row: the gradient's norm, the clip coefficient, whether the step counts, the learning rate, the next
step. A composition of global_norm, clip_coefficient, finite_flag, learning_rate and next_step.

`used` is the step that the bias corrections read; `next` may take the memory of `step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from alpha.ops.compose import derived
from alpha.ops.spec import Arrays, OpSpec, Sample
from alpha.ops.table import row
from alpha.types import Attrs, Table


def _compose(emit: Any, grad: Any, count: Any, loss_sum: Any, step: Any, *, segments: Any, max_norm: Any, rates: Any) -> Any:
    norm = emit("global_norm", grad, segments=segments)
    coefficient, mean_norm = emit("clip_coefficient", norm, count, max_norm=max_norm)
    finite = emit("finite_flag", norm, loss_sum)
    lr, used = emit("learning_rate", step, rates=rates)
    return norm, mean_norm, coefficient, finite, lr, used, emit("next_step", step, finite)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    many, few = (Table.of(10.0 ** rng.uniform(-6, -2, n)) for n in (101, 3))
    for name, n, segments, size, max_norm, step, rates in (
        ("one", 1, ((0, 1),), 1.0, 1.0, 0, many), ("padding", 200, ((0, 13), (64, 7), (128, 65)), 900.0, 1.0, 5, many),
        ("late", 33, ((0, 33),), 1.0, 0.0, 100, many), ("blocks", 200_000, ((0, 70_001), (70_016, 129_000)), 0.1, 0.5, 40, many),
        ("tiny", 64, ((0, 64),), 1e-15, 1.0, 2, few), ("past-the-end", 16, ((0, 16),), 1.0, 1.0, 3, few),
    ):
        yield Sample(name=name, inputs=(rng.standard_normal(n) * size, np.array(2048.0), np.array(7000.25), np.array(step, np.int32)),
                     attrs={"segments": segments, "max_norm": max_norm, "rates": rates})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    rates = Table.of(rng.random(24))
    for name, grad, loss, step in (("three-four-five", [3.0, 100.0, 4.0, 0.0], 2.0, 8), ("not-finite", [3.0, 0.0, 4.0, 0.0], np.inf, 3),
                                   ("overflows", [3e25, 0.0, -4e25, 0.0], 2.0, 9)):
        yield Sample(name=name, inputs=(np.array(grad), np.array(4.0), np.array(loss), np.array(step, np.int32)),
                     attrs={"segments": ((0, 1), (2, 2)), "max_norm": 0.0, "rates": rates})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    def of(op: str, inputs: Arrays, **more: Any) -> Sequence[Any]:
        found = row(op).bound
        return found(inputs, more) if found else [0.0] * len(row(op).outputs)
    grad, count, _, _ = x
    norm = row("global_norm").oracle(grad, segments=attrs["segments"])[0]
    coefficient, mean_norm = row("clip_coefficient").oracle(norm, count, max_norm=attrs["max_norm"])
    norm_off = of("global_norm", (grad,), segments=attrs["segments"])[0]
    relative = float(norm_off) / float(norm) if 0 < norm < np.inf else 0.0  # both quotients of the norm carry its error
    clip = of("clip_coefficient", (norm, count), max_norm=attrs["max_norm"])
    mean_off, coefficient_off = (relative + 1) * np.abs(mean_norm), relative * np.abs(coefficient)
    return norm_off, clip[1] + mean_off, clip[0] + coefficient_off, 0.0, 0.0, 0.0, 0.0


ROWS = (
    OpSpec(name="update_scalars", inputs=("grad", "count", "loss_sum", "step"),
           outputs=("norm", "mean_norm", "coefficient", "finite", "lr", "used", "next"), vjp=None,
           why_no_vjp="part of the update, which no gradient crosses", samples=_samples, exact=_exact, bound=_bound, **derived(_compose)),
)
