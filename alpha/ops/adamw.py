"""AdamW on a flat buffer. Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1; decoupled decay: Loshchilov and Hutter (arXiv:1711.05101),
algorithm 2 line 12.

Per element, with t = step + 1 and g = grad * coefficient:
  m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
  p <- p - lr lr_scale ( (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay decay p )
`segments`: (offset, length, decay 0.0 or 1.0, lr_scale) of each tensor; elements outside keep their values. finite == 0 leaves param, m
and v untouched, bit for bit, whatever the gradient holds. `copy`, if there is one, holds the parameters in bf16 and is kept in step:
what changes is the rounded new p; what does not, stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect, same_dtype, stretched
from alpha.types import Attrs, TensorType

ParameterSegments = tuple[tuple[int, int, float, float], ...]


def check_update(op: str, buffers: Sequence[TensorType], floats: Sequence[TensorType], integers: Sequence[TensorType],
                 attrs: Attrs) -> None:
    """What all update rows ask of their operands: flat buffers of one type, scalars, segments inside and apart."""
    expect(len(buffers[0].shape) == 1 and buffers[0].dtype in ("f32", "f64"), op, "buffers are flat f32", buffers[0], "f32[N]")
    expect(all(b == buffers[0] for b in buffers), op, "buffers agree", ", ".join(map(str, buffers)), "equal types")
    for t in floats:
        expect(t.shape == () and t.dtype in ("f32", "f64"), op, "coefficient and lr are float scalars", t, "f32[]")
    for t in integers:
        expect(t == TensorType((), "i32"), op, "step and finite are i32 scalars", t, "i32[]")
    same_dtype(op, (*buffers, *floats))
    end = 0
    for offset, length, decay, _ in sorted(attrs["segments"]):  # type: ignore[call-overload]
        expect(offset >= end and length >= 0 and offset + length <= buffers[0].shape[0], op, "segments lie inside the buffer and apart",
               (offset, length), f"(offset, length, decay, lr_scale) inside {end}..{buffers[0].shape[0]}")
        expect(decay in (0.0, 1.0), op, "decay of a segment is a flag", decay, "0.0 or 1.0")
        end = offset + length


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    check_update("adamw", types[:4], types[4:6], types[6:8], attrs)
    copy = tuple(types[8:])
    narrow = TensorType(types[0].shape, "bf16")
    expect(copy in ((), (narrow,)), "adamw", "copy has the parameters' shape, in bf16", ", ".join(map(str, copy)), narrow)
    for name in ("beta1", "beta2"):
        expect(0 <= attrs[name] < 1, "adamw", f"{name} is in [0, 1)", attrs[name], "0.9, 0.95")  # type: ignore[operator]
    return (types[0], types[2], types[3], *copy)


def per_element(n: int, segments: ParameterSegments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inside a segment, decay, lr_scale) of each of n elements."""
    inside, decay, scale = np.zeros(n, bool), np.zeros(n), np.zeros(n)
    for offset, length, flag, lr_scale in segments:
        at = slice(offset, offset + length)
        inside[at], decay[at], scale[at] = True, flag, lr_scale
    return inside, decay, scale


def _oracle(param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray, coefficient: np.ndarray, lr: np.ndarray, step: np.ndarray,
            finite: np.ndarray, *copy: np.ndarray, beta1: float, beta2: float, eps: float, weight_decay: float,
            segments: ParameterSegments) -> Arrays:
    inside, decay, scale = per_element(len(param), segments)
    t, changes = int(step) + 1, inside & (finite != 0)
    grad = np.where(changes, grad, 0.0) * np.where(finite != 0, coefficient, 0.0)
    m2 = beta1 * m + (1 - beta1) * grad
    v2 = beta2 * v + (1 - beta2) * (grad * grad)
    ratio = (m2 / (1 - beta1**t)) / np.where(changes, np.sqrt(v2 / (1 - beta2**t)) + eps, 1.0)
    updated = param - lr * scale * (ratio + weight_decay * decay * param)
    param = np.where(changes, updated, param)
    return param, np.where(changes, m2, m), np.where(changes, v2, v), *(np.where(changes, param, c) for c in copy)


def update_cases(rng: np.random.Generator) -> Iterable[tuple[str, int, ParameterSegments, float, float, int, int, float]]:
    """(name, N, segments, coefficient, lr, step, finite, scale of the gradient) of the update rows."""
    yield "one", 1, ((0, 1, 1.0, 1.0),), 1.0, 1e-2, 0, 1, 1.0
    yield "padding", 200, ((0, 13, 1.0, 1.0), (64, 7, 0.0, 1.0), (128, 65, 1.0, 0.5)), 1 / 2048, 3e-2, 5, 1, 900.0
    yield "late", 33, ((0, 33, 0.0, 2.0),), 0.25, 1e-3, 100000, 1, 1.0
    yield "blocks", 20011, ((0, 8193, 1.0, 1.0), (8200, 11800, 0.0, 0.25)), 0.5, 1e-2, 2, 1, 1.0
    yield "tiny-gradient", 64, ((0, 64, 1.0, 1.0),), 1.0, 1e-2, 0, 1, 1e-9
    yield "zero-gradient", 16, ((0, 16, 1.0, 1.0),), 1.0, 1e-2, 3, 1, 0.0
    yield "not-finite", 70, ((0, 33, 1.0, 1.0), (64, 6, 0.0, 1.0)), np.nan, 1e-2, 3, 0, np.inf
    yield "no-segments", 9, (), 1.0, 1e-2, 3, 1, 1.0


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, n, segments, coefficient, lr, step, finite, size in update_cases(rng):
        with np.errstate(invalid="ignore"):
            grad = rng.standard_normal(n) * size
        scale = size * coefficient if np.isfinite(size * coefficient) else 1.0
        yield Sample(name=name, inputs=(rng.standard_normal(n), grad, rng.standard_normal(n) * 0.3 * scale, rng.random(n) * 0.5 * scale**2,
                     np.array(coefficient), np.array(lr), np.array(step, np.int32), np.array(finite, np.int32)),
                     attrs={"beta1": 0.9, "beta2": 0.95 if n % 2 else 0.999, "eps": 1e-8, "weight_decay": 0.1, "segments": segments})
        if name in ("padding", "blocks", "not-finite"):
            attrs = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "segments": segments}
            yield Sample(name=f"{name}-copy", attrs=attrs, inputs=(rng.standard_normal(n), grad, rng.standard_normal(n) * 0.3 * scale,
                         rng.random(n) * 0.5 * scale**2, np.array(coefficient), np.array(lr), np.array(step, np.int32),
                         np.array(finite, np.int32), rng.standard_normal(n)))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    def case(name: str, finite: int, step: int, beta: float, segments: ParameterSegments, *copy: np.ndarray) -> Sample:
        # gradients +-2^j, moments 0, beta 0 or first step: v_hat = g^2, its root is a power of two, eps 0, so the ratio is +-1
        n = 80
        sign, size = rng.choice([-1.0, 1.0], n), 2.0 ** rng.integers(-3, 4, n)
        return Sample(name=name, inputs=(rng.integers(-64, 64, n).astype(float), sign * size, np.zeros(n), np.zeros(n), np.array(0.5),
                      np.array(0.25), np.array(step, np.int32), np.array(finite, np.int32), *copy),
                      attrs={"beta1": beta, "beta2": beta, "eps": 0.0, "weight_decay": 0.5, "segments": segments})
    apart: ParameterSegments = ((0, 33, 1.0, 1.0), (40, 7, 0.0, 0.5), (64, 16, 0.0, 2.0))
    yield case("signs", 1, 0, 0.0, apart)
    yield case("signs-late", 1, 1000, 0.0, apart)
    yield case("first-step", 1, 0, 0.75, apart)
    yield case("not-finite", 0, 3, 0.5, apart)
    yield case("signs-copy", 1, 0, 0.0, apart, rng.integers(-64, 64, 80).astype(float))


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: g 1 relative; m: coefficients 1, products 1, sum 1, so 4 of its absolute terms; v: 6; root and division 3 + 3; the step size 2.
    # A v that is all eps keeps the bound of m over eps. Then p: one difference, and the decay factor 3.
    param, grad, m, v, coefficient, lr, step, finite, *copy = x
    b1, b2 = float(attrs["beta1"]), float(attrs["beta2"])  # type: ignore[arg-type]
    _, decay, scale = per_element(len(param), attrs["segments"])  # type: ignore[arg-type]
    if not finite:
        return (0.0,) * (3 + len(copy))
    t = int(step) + 1
    g = np.abs(grad * coefficient)
    m2, v2 = b1 * np.abs(m) + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    denominator = np.sqrt(v2 / (1 - b2**t)) + float(attrs["eps"])  # type: ignore[arg-type]
    ratio = m2 / (1 - b1**t) / np.where(denominator > 0, denominator, 1.0)
    change = lr * scale * (14 * ratio + 6 * float(attrs["weight_decay"]) * decay * np.abs(param))  # type: ignore[arg-type]
    return np.abs(param) + change, 4 * m2, 6 * v2, *(np.abs(param) + change for _ in copy)


ROWS = (
    OpSpec(name="adamw", inputs=("param", "grad", "m", "v", "coefficient", "lr", "step", "finite", "copy?"),
           outputs=("param", "m", "v", "copy?"), infer=_infer, kept={"copy": "bf16"},
           oracle=_oracle, vjp=None, why_no_vjp="an update, which no gradient crosses", flops=lambda t, a: 16 * t[0].size,
           samples=_samples, exact=_exact, bound=_bound, stretch=stretched),
)
