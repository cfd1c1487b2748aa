"""Learning rate: linear warm-up, stable, linear decay. Hu et al. 2024 (arXiv:2404.06395), section 4.1 (warmup-stable-decay).

step < warmup: peak (step + 1) / warmup; then peak; over the last `decay` steps before `total` linearly from peak to floor * peak, where it
stays. `step` counts finished updates, on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.lr_cosine import bound, check_schedule, steps
from alpha.ops.spec import Arrays, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    out = check_schedule("lr_wsd", types, attrs)
    decay, span = attrs["decay"], attrs["total"] - attrs["warmup"]  # type: ignore[operator]
    expect(isinstance(decay, int) and 0 < decay <= span, "lr_wsd", "decay fits after the warm-up", decay, f"1 to {span}")
    return out


def _oracle(step: np.ndarray, *, peak: float, warmup: int, total: int, decay: int, floor: float) -> Arrays:
    x = np.minimum(np.maximum((step - (total - decay)) / decay, 0.0), 1.0)
    after = peak * (1 - (1 - floor) * x)
    return (np.where(step < warmup, peak * (step + 1) / max(warmup, 1), after),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for warmup, total, decay, floor, peak in ((10, 100, 20, 0.1, 3e-4), (0, 17, 17, 0.01, 1e-3), (1, 1000, 1, 1.0, 2e-2),
                                              (2000, 100000, 10000, 0.05, 6e-4)):
        for step in steps(0, warmup, total - decay, total, total * 2):
            yield Sample(name=f"{warmup}-{total}-{step}", inputs=(np.array(step, np.int32),),
                         attrs={"peak": peak, "warmup": warmup, "total": total, "decay": decay, "floor": floor})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for step in (0, 3, 7, 8, 15, 16, 17, 18, 24, 100):  # powers of two
        yield Sample(name=f"dyadic-{step}", inputs=(np.array(step, np.int32),),
                     attrs={"peak": 0.5, "warmup": 8, "total": 24, "decay": 8, "floor": 0.25})
    yield Sample(name="to-zero", inputs=(np.array(17, np.int32),), attrs={"peak": 0.5, "warmup": 0, "total": 17, "decay": 17, "floor": 0.0})


ROWS = (
    OpSpec(name="lr_wsd", inputs=("step",), outputs=("lr",), infer=_infer, oracle=_oracle, vjp=None, why_no_vjp="a schedule of an integer",
           flops=lambda t, a: 5, samples=_samples, exact=_exact, undifferentiable=("step",),
           bound=bound),
)
