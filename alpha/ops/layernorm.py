"""Layer normalisation over the last axis. Ba, Kiros and Hinton 2016 (arXiv:1607.06450), equations 3 and 4, biased variance.

mean and rstd are kept for the backward pass; they take no cotangent. They, dgamma and dbeta have the accumulation type.
Legend: N rows (the product of the leading axes), C width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import ACCUMULATE, growth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype, sole_cotangent
from alpha.types import Attrs, TensorType


def _check(op: str, x: TensorType, *parameters: TensorType) -> None:
    expect(len(x.shape) >= 1 and x.is_float and x.size > 0, op, "x is a float [...,C]", x, "a float [...,C] that is not empty")
    for p in parameters:
        expect(p.shape == x.shape[-1:], op, "parameters have the width of x", f"{p} for x {x}", f"[{x.shape[-1]}]")
    same_dtype(op, (x, *parameters))


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _check("layernorm", *types)
    expect(isinstance(attrs["eps"], float) and attrs["eps"] >= 0, "layernorm", "eps is a float >= 0", attrs["eps"], "1e-5")
    statistic = TensorType(types[0].shape[:-1], ACCUMULATE[types[0].dtype])
    return (types[0], statistic, statistic)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dy, x, gamma, mean, rstd = types
    _check("layernorm_bwd", x, gamma)
    expect(dy == x, "layernorm_bwd", "dy and x agree", f"{dy} and {x}", "equal types")
    statistic = TensorType(x.shape[:-1], ACCUMULATE[x.dtype])
    expect(mean == statistic and rstd == statistic, "layernorm_bwd", "mean and rstd have one entry per row", f"{mean} and {rstd}",
           statistic)
    parameter = TensorType(gamma.shape, ACCUMULATE[gamma.dtype])
    return (x, parameter, parameter)


def _oracle(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, eps: float) -> Arrays:
    mean = x.sum(-1) / x.shape[-1]
    centred = x - mean[..., None]
    var = (centred * centred).sum(-1) / x.shape[-1]
    rstd = 1 / np.sqrt(var + eps)
    return centred * rstd[..., None] * gamma + beta, mean, rstd


def _oracle_bwd(dy: np.ndarray, x: np.ndarray, gamma: np.ndarray, mean: np.ndarray, rstd: np.ndarray) -> Arrays:
    c = x.shape[-1]
    xhat = (x - mean[..., None]) * rstd[..., None]
    g = dy * gamma
    dx = rstd[..., None] * (g - (g.sum(-1) / c)[..., None] - xhat * ((g * xhat).sum(-1) / c)[..., None])
    return dx, (dy * xhat).reshape(-1, c).sum(0), dy.reshape(-1, c).sum(0)


def _vjp(emit: Emit, node: NodeLike, cotangents: Sequence[object]) -> Sequence[object]:
    x, gamma, _ = node.inputs
    _, mean, rstd = node.outputs
    return emit("layernorm_bwd", sole_cotangent("layernorm", cotangents), x, gamma, mean, rstd)  # type: ignore[arg-type, return-value]


def contents(rng: np.random.Generator) -> Iterable[tuple[str, np.ndarray, float]]:
    """(name, x, eps) of the normalisation rows."""
    yield "one", rng.standard_normal((1, 1)), 1e-5
    yield "vector", rng.standard_normal((13,)), 1e-5
    yield "ragged", rng.standard_normal((3, 7, 13)), 1e-5
    yield "block+1", rng.standard_normal((257, 129)), 1e-5
    yield "eights", rng.standard_normal((67, 136)), 1e-5
    yield "offset", rng.standard_normal((5, 64)) + 3, 1e-6
    yield "far", rng.standard_normal((9, 64)) + 30, 1e-6  # a variance as the difference of two sums loses 900 u here
    yield "all-equal", np.full((4, 33), 0.1), 1e-5
    yield "large", rng.standard_normal((5, 24)) * 1e4, 1e-5
    yield "tiny", rng.standard_normal((5, 24)) * 1e-3, 1e-5
    yield "zero-row", np.concatenate([np.zeros((1, 16)), rng.standard_normal((2, 16))]), 1e-3


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x, eps in contents(rng):
        c = x.shape[-1]
        yield Sample(name=name, inputs=(x, 1 + 0.5 * rng.standard_normal(c), rng.standard_normal(c)), attrs={"eps": eps})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x, eps in contents(rng):
        gamma = 1 + 0.5 * rng.standard_normal(x.shape[-1])
        _, mean, rstd = _oracle(x, gamma, gamma, eps=eps)
        yield Sample(name=name, inputs=(rng.standard_normal(x.shape), x, gamma, mean, rstd))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for n, c in ((1, 2), (5, 8), (129, 64)):  # half of each row +1, half -1: mean 0, variance 1, rstd 1/sqrt(1 + 3) = 1/2
        x = rng.permuted(np.tile(np.repeat([1.0, -1.0], c // 2), (n, 1)), axis=1)
        yield Sample(name=f"signs-{n}x{c}", inputs=(x, rng.integers(-9, 9, c).astype(float), rng.integers(-9, 9, c).astype(float)),
                     attrs={"eps": 3.0})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(float)
    for n, c in ((1, 1), (5, 8), (129, 64)):  # integers, rstd a power of two, C a power of two: every value is a short dyadic fraction
        yield Sample(name=f"integers-{n}x{c}", inputs=(whole(n, c), whole(n, c), whole(c), whole(n), np.full(n, 0.5)))


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # first order, in u: mean is off by M = (growth(C) + 1) * mean|x|, the same for the whole row, which cancels in the variance because
    # the centred row sums to 0; variance is off by growth(C) + 4 relative, rstd by half of it + 2; then two products and a sum
    v, gamma, beta = x
    y, mean, rstd = _oracle(v, gamma, beta, eps=attrs["eps"])  # type: ignore[arg-type]
    grown = growth(v.shape[-1])
    off = (grown + 1) * np.abs(v).mean(-1)
    xhat = np.abs(v - mean[..., None]) * rstd[..., None]
    return np.abs(gamma) * ((rstd * off)[..., None] + xhat * (grown / 2 + 8)) + np.abs(y), off, rstd * (grown / 2 + 4)


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: xhat 2 relative, g 1; sums of C terms growth(C) + 2 (mean of g), + 5 (mean of g*xhat); then products and differences
    dy, v, gamma, _, rstd = (np.abs(a) for a in x)
    c = v.shape[-1]
    xhat = np.abs(x[1] - x[3][..., None]) * rstd[..., None]
    g, grown, rows = dy * gamma, growth(c), growth(v.size // c)
    dx = rstd[..., None] * (5 * g + (grown + 7) * g.mean(-1)[..., None] + xhat * (grown + 10) * (g * xhat).mean(-1)[..., None])
    return dx, (rows + 3) * (dy * xhat).reshape(-1, c).sum(0), rows * dy.reshape(-1, c).sum(0)


ROWS = (
    OpSpec(name="layernorm", inputs=("x", "gamma", "beta"), outputs=("y", "mean", "rstd"), infer=_infer, oracle=_oracle, vjp=_vjp,
           flops=lambda t, a: 8 * t[0].size, samples=_samples, exact=_exact, bound=_bound, undifferentiable=("mean", "rstd"),
           kept={"mean": "accumulate", "rstd": "accumulate"}),
    OpSpec(name="layernorm_bwd", inputs=("dy", "x", "gamma", "mean", "rstd"), outputs=("dx", "dgamma", "dbeta"), infer=_infer_bwd,
           oracle=_oracle_bwd, vjp=None, why_no_vjp="backward row", flops=lambda t, a: 14 * t[0].size, samples=_samples_bwd,
           exact=_exact_bwd, bound=_bound_bwd, kept=dict.fromkeys(("mean", "rstd", "dgamma", "dbeta"), "accumulate")),
)
