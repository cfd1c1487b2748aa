"""All numbers of one update from sums of squares: the row update_scalars for a gradient that nobody holds whole.

`sums` are those of the blocks of global_norm, in their order, each made by who holds the block (square_sums). So norm, clip coefficient and
all else are those of update_scalars over the whole gradient, by the same additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from alpha.ops.compose import derived
from alpha.ops.spec import Arrays, OpSpec, Sample
from alpha.ops.table import row
from alpha.types import Attrs, Table


def _compose(emit: Any, sums: Any, count: Any, loss_sum: Any, step: Any, *, max_norm: Any, rates: Any) -> Any:
    norm = emit("norm_of_squares", sums)
    coefficient, mean_norm = emit("clip_coefficient", norm, count, max_norm=max_norm)
    finite = emit("finite_flag", norm, loss_sum)
    lr, used = emit("learning_rate", step, rates=rates)
    return norm, mean_norm, coefficient, finite, lr, used, emit("next_step", step, finite)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    many, few = (Table.of(10.0 ** rng.uniform(-6, -2, n)) for n in (101, 3))
    for name, n, size, max_norm, step, rates in (
        ("one", 1, 1.0, 1.0, 0, many), ("odd", 7, 9e5, 1.0, 5, many), ("late", 33, 1.0, 0.0, 100, many), ("many", 4097, 0.1, 0.5, 40, many),
        ("tiny", 64, 1e-30, 1.0, 2, few), ("past-the-end", 16, 1.0, 1.0, 3, few),
    ):
        yield Sample(name=name, inputs=(rng.random(n) * size, np.array(2048.0), np.array(7000.25), np.array(step, np.int32)),
                     attrs={"max_norm": max_norm, "rates": rates})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    rates = Table.of(rng.random(24))
    for name, sums, loss, step in (("three-four-five", [9.0, 0.0, 16.0], 2.0, 8), ("not-finite", [9.0, 16.0], np.inf, 3)):
        yield Sample(name=name, inputs=(np.array(sums), np.array(4.0), np.array(loss), np.array(step, np.int32)),
                     attrs={"max_norm": 0.0, "rates": rates})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    sums, count, _, _ = x
    norm = row("norm_of_squares").oracle(sums)[0]
    coefficient, mean_norm = row("clip_coefficient").oracle(norm, count, max_norm=attrs["max_norm"])
    bounds = row("norm_of_squares").bound, row("clip_coefficient").bound
    assert bounds[0] is not None and bounds[1] is not None
    norm_off = bounds[0]((sums,), {})[0]
    relative = float(norm_off) / float(norm) if norm else 0.0  # both quotients of the norm carry its error
    clip = bounds[1]((norm, count), {"max_norm": attrs["max_norm"]})
    return norm_off, clip[1] + (relative + 1) * np.abs(mean_norm), clip[0] + relative * np.abs(coefficient), 0.0, 0.0, 0.0, 0.0


ROWS = (
    OpSpec(name="scalars_of_squares", inputs=("sums", "count", "loss_sum", "step"),
           outputs=("norm", "mean_norm", "coefficient", "finite", "lr", "used", "next"), vjp=None,
           why_no_vjp="part of the update, which no gradient crosses", samples=_samples, exact=_exact, bound=_bound, **derived(_compose)),
)
