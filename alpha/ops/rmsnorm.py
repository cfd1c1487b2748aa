"""Root mean square normalisation over the last axis. Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4; eps inside the root.

rstd is kept for the backward pass; it takes no cotangent. It and dgamma have the accumulation type.
Legend: N rows (the product of the leading axes), C width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.layernorm import contents
from alpha.ops.numerics import ACCUMULATE, growth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype, sole_cotangent
from alpha.types import Attrs, TensorType


def _check(op: str, x: TensorType, gamma: TensorType) -> None:
    expect(len(x.shape) >= 1 and x.is_float and x.size > 0, op, "x is a float [...,C]", x, "a float [...,C] that is not empty")
    expect(gamma.shape == x.shape[-1:], op, "gamma has the width of x", f"{gamma} for x {x}", f"[{x.shape[-1]}]")
    same_dtype(op, (x, gamma))


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _check("rmsnorm", *types)
    expect(isinstance(attrs["eps"], float) and attrs["eps"] >= 0, "rmsnorm", "eps is a float >= 0", attrs["eps"], "1e-5")
    return (types[0], TensorType(types[0].shape[:-1], ACCUMULATE[types[0].dtype]))


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dy, x, gamma, rstd = types
    _check("rmsnorm_bwd", x, gamma)
    expect(dy == x, "rmsnorm_bwd", "dy and x agree", f"{dy} and {x}", "equal types")
    statistic = TensorType(x.shape[:-1], ACCUMULATE[x.dtype])
    expect(rstd == statistic, "rmsnorm_bwd", "rstd has one entry per row", rstd, statistic)
    return (x, TensorType(gamma.shape, ACCUMULATE[gamma.dtype]))


def _oracle(x: np.ndarray, gamma: np.ndarray, *, eps: float) -> Arrays:
    rstd = 1 / np.sqrt((x * x).sum(-1) / x.shape[-1] + eps)
    return x * rstd[..., None] * gamma, rstd


def _oracle_bwd(dy: np.ndarray, x: np.ndarray, gamma: np.ndarray, rstd: np.ndarray) -> Arrays:
    c = x.shape[-1]
    xhat = x * rstd[..., None]
    g = dy * gamma
    dx = rstd[..., None] * (g - xhat * ((g * xhat).sum(-1) / c)[..., None])
    return dx, (dy * xhat).reshape(-1, c).sum(0)


def _vjp(emit: Emit, node: NodeLike, cotangents: Sequence[object]) -> Sequence[object]:
    x, gamma = node.inputs
    return emit("rmsnorm_bwd", sole_cotangent("rmsnorm", cotangents), x, gamma, node.outputs[1])  # type: ignore[arg-type, return-value]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x, eps in contents(rng):
        yield Sample(name=name, inputs=(x, 1 + 0.5 * rng.standard_normal(x.shape[-1])), attrs={"eps": eps})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x, eps in contents(rng):
        gamma = 1 + 0.5 * rng.standard_normal(x.shape[-1])
        yield Sample(name=name, inputs=(rng.standard_normal(x.shape), x, gamma, _oracle(x, gamma, eps=eps)[1]))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for n, c in ((1, 1), (5, 8), (129, 63)):  # entries +1 and -1: mean square 1, rstd 1/sqrt(1 + 3) = 1/2
        yield Sample(name=f"signs-{n}x{c}", inputs=(rng.choice([-1.0, 1.0], (n, c)), rng.integers(-9, 9, c).astype(float)),
                     attrs={"eps": 3.0})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(float)
    for n, c in ((1, 1), (5, 8), (129, 64)):  # integers, rstd and C powers of two: every value is a short dyadic fraction
        yield Sample(name=f"integers-{n}x{c}", inputs=(whole(n, c), whole(n, c), whole(c), np.full(n, 0.5)))


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: mean square growth(C) + 3 relative (with eps), rstd half of it + 2, then two products
    y, rstd = _oracle(*x, eps=attrs["eps"])  # type: ignore[arg-type]
    relative = growth(x[0].shape[-1]) / 2 + 4
    return np.abs(y) * (relative + 2), rstd * relative


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: xhat 1 relative, g 1; the sum of C terms growth(C) + 4; then products and differences
    dy, v, gamma, rstd = (np.abs(a) for a in x)
    c = v.shape[-1]
    xhat, g, grown = v * rstd[..., None], dy * gamma, growth(c)
    dx = rstd[..., None] * (4 * g + xhat * (grown + 9) * (g * xhat).mean(-1)[..., None])
    return dx, (growth(v.size // c) + 2) * (dy * xhat).reshape(-1, c).sum(0)


ROWS = (
    OpSpec(name="rmsnorm", inputs=("x", "gamma"), outputs=("y", "rstd"), infer=_infer, oracle=_oracle, vjp=_vjp,
           flops=lambda t, a: 4 * t[0].size, samples=_samples, exact=_exact, bound=_bound, undifferentiable=("rstd",),
           kept={"rstd": "accumulate"}),
    OpSpec(name="rmsnorm_bwd", inputs=("dy", "x", "gamma", "rstd"), outputs=("dx", "dgamma"), infer=_infer_bwd, oracle=_oracle_bwd,
           vjp=None,
           why_no_vjp="backward row", flops=lambda t, a: 10 * t[0].size, samples=_samples_bwd, exact=_exact_bwd, bound=_bound_bwd,
           kept={"rstd": "accumulate", "dgamma": "accumulate"}),
)
