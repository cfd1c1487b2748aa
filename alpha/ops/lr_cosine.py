"""Learning rate: linear warm-up, then half a cosine. Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5 without restarts.

step < warmup: peak (step + 1) / warmup. Then, with x = (step - warmup) / (total - warmup) held at 1 after `total`:
peak (floor + (1 - floor) (1 + cos(pi x)) / 2). `floor` is a share of the peak. `step` counts finished updates, on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import pi

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def check_schedule(op: str, types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """What all schedules ask: an i32 scalar, and peak, warmup, total, floor that make sense; gives the type of the learning rate."""
    expect(types[0] == TensorType((), "i32"), op, "step is an i32 scalar", types[0], "i32[]")
    peak, warmup, total, floor = (attrs[name] for name in ("peak", "warmup", "total", "floor"))
    expect(isinstance(peak, float) and peak >= 0, op, "peak is a float >= 0", peak, "3e-4")
    expect(isinstance(warmup, int) and isinstance(total, int) and 0 <= warmup < total, op, "warmup is below total", f"{warmup}, {total}",
           "0 <= warmup < total")
    expect(isinstance(floor, float) and 0 <= floor <= 1, op, "floor is a share of the peak", floor, "0.0 to 1.0")
    return (TensorType((), "f32"),)


def _oracle(step: np.ndarray, *, peak: float, warmup: int, total: int, floor: float) -> Arrays:
    x = np.minimum((step - warmup) / (total - warmup), 1.0)
    after = peak * (floor + (1 - floor) * 0.5 * (1 + np.cos(pi * x)))
    return (np.where(step < warmup, peak * (step + 1) / max(warmup, 1), after),)


def steps(*edges: int) -> Iterable[int]:
    """Steps around each edge, and some between."""
    yield from sorted({max(0, e + d) for e in edges for d in (-1, 0, 1)} | {max(edges) * k // 7 for k in (1, 2, 3, 5)})


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for warmup, total, floor, peak in ((10, 100, 0.1, 3e-4), (0, 17, 0.01, 1e-3), (1, 1000, 1.0, 2e-2), (2000, 100000, 0.05, 6e-4)):
        for step in steps(0, warmup, total, total * 2):
            yield Sample(name=f"{warmup}-{total}-{step}", inputs=(np.array(step, np.int32),),
                         attrs={"peak": peak, "warmup": warmup, "total": total, "floor": floor})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    # powers of two: the warm-up, the peak (cos 0 = 1), the floor (cos pi = -1)
    for step in (0, 3, 7, 8, 24, 100):
        yield Sample(name=f"dyadic-{step}", inputs=(np.array(step, np.int32),), attrs={"peak": 0.5, "warmup": 8, "total": 24,
                                                                                       "floor": 0.25})
    yield Sample(name="to-zero", inputs=(np.array(17, np.int32),), attrs={"peak": 0.5, "warmup": 0, "total": 17, "floor": 0.0})


def bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    """Warm-up: a product, a quotient, the peak rounded: 3 u of the result. Then, with a cosine good to 4 u of 1, 8 u of the peak."""
    peak, warmup = float(attrs["peak"]), int(attrs["warmup"])  # type: ignore[arg-type, call-overload]
    return (np.where(x[0] < warmup, 3 * peak * (x[0] + 1) / max(warmup, 1), 8 * peak),)


ROWS = (
    OpSpec(name="lr_cosine", inputs=("step",), outputs=("lr",), infer=lambda t, a: check_schedule("lr_cosine", t, a), oracle=_oracle,
           vjp=None,
           why_no_vjp="a schedule of an integer", flops=lambda t, a: 8, samples=_samples, exact=_exact, undifferentiable=("step",),
           bound=bound),
)
