"""SGD with momentum and decoupled decay on a flat buffer. Loshchilov and Hutter (arXiv:1711.05101), algorithm 1 (SGDW); the velocity as in
Sutskever et al. 2013 without dampening.

Per element, with g = grad * coefficient: velocity <- momentum velocity + g;  p <- p - lr lr_scale (velocity + weight_decay decay p).
`segments` and `finite` as in alpha/ops/adamw.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.adamw import ParameterSegments, check_update, per_element, update_cases
from alpha.ops.spec import Arrays, OpSpec, Sample, expect, stretched
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    check_update("sgd", types[:3], types[3:5], types[5:], attrs)
    expect(0 <= attrs["momentum"] < 1, "sgd", "momentum is in [0, 1)", attrs["momentum"], "0.9")  # type: ignore[operator]
    return (types[0], types[2])


def _oracle(param: np.ndarray, grad: np.ndarray, velocity: np.ndarray, coefficient: np.ndarray, lr: np.ndarray, finite: np.ndarray, *,
            momentum: float, weight_decay: float, segments: ParameterSegments) -> Arrays:
    inside, decay, scale = per_element(len(param), segments)
    changes = inside & (finite != 0)
    velocity2 = momentum * velocity + np.where(changes, grad, 0.0) * np.where(finite != 0, coefficient, 0.0)
    updated = param - lr * scale * (velocity2 + weight_decay * decay * param)
    return np.where(changes, updated, param), np.where(changes, velocity2, velocity)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, n, segments, coefficient, lr, _, finite, size in update_cases(rng):
        with np.errstate(invalid="ignore"):
            grad = rng.standard_normal(n) * size
        yield Sample(name=name, inputs=(rng.standard_normal(n), grad, rng.standard_normal(n), np.array(coefficient), np.array(lr),
                     np.array(finite, np.int32)), attrs={"momentum": 0.9 if n % 2 else 0.0, "weight_decay": 0.1, "segments": segments})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    def whole(n: int) -> np.ndarray:
        return rng.integers(-64, 64, n).astype(float)
    for name, finite in (("integers", 1), ("not-finite", 0)):  # every factor a power of two
        yield Sample(name=name, inputs=(whole(80), whole(80), whole(80), np.array(0.5), np.array(0.25), np.array(finite, np.int32)),
                     attrs={"momentum": 0.5, "weight_decay": 0.5, "segments": ((0, 33, 1.0, 1.0), (40, 7, 0.0, 0.5), (64, 16, 0.0, 2.0))})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: g 1, momentum 2, sum 1: 3 of the absolute terms; the step size 2, product and decay 3 more; p one difference
    param, grad, velocity, coefficient, lr, finite = x
    if not finite:
        return 0.0, 0.0
    _, decay, scale = per_element(len(param), attrs["segments"])  # type: ignore[arg-type]
    total = float(attrs["momentum"]) * np.abs(velocity) + np.abs(grad * coefficient)  # type: ignore[arg-type]
    decayed = float(attrs["weight_decay"]) * decay * np.abs(param)  # type: ignore[arg-type]
    return np.abs(param) + lr * scale * (8 * total + 6 * decayed), 3 * total


ROWS = (
    OpSpec(name="sgd", inputs=("param", "grad", "velocity", "coefficient", "lr", "finite"), outputs=("param", "velocity"), infer=_infer,
           oracle=_oracle, vjp=None, why_no_vjp="an update, which no gradient crosses", flops=lambda t, a: 6 * t[0].size,
           samples=_samples, exact=_exact, bound=_bound, stretch=stretched),
)
