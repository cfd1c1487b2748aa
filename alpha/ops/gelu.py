"""GELU and its backward. Hendrycks and Gimpel 2016 (arXiv:1606.08415): x*Phi(x); the tanh form is their section 2 approximation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import pi, sqrt

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype
from alpha.ops.special import erf
from alpha.types import Attrs, TensorType

_C = sqrt(2 / pi)


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(attrs["approximate"] in ("tanh", "none"), "gelu", "approximate is known", attrs["approximate"], "'tanh' or 'none'")
    same_dtype("gelu", types)
    return (types[-1],)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0] == types[1], "gelu_bwd", "dy and x agree", f"{types[0]} and {types[1]}", "equal types")
    return _infer(types, attrs)


def _oracle(x: np.ndarray, *, approximate: str) -> Arrays:
    if approximate == "tanh":
        return (0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x * x * x))),)
    return (0.5 * x * (1 + erf(x * sqrt(0.5))),)


def _oracle_bwd(dy: np.ndarray, x: np.ndarray, *, approximate: str) -> Arrays:
    if approximate == "tanh":
        t = np.tanh(_C * (x + 0.044715 * x * x * x))
        return (dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)),)
    return (dy * (0.5 * (1 + erf(x * sqrt(0.5))) + x * np.exp(-0.5 * x * x) / sqrt(2 * pi)),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("gelu_bwd", dy[0], node.inputs[0], **node.attrs),)  # type: ignore[arg-type]


def _contents(rng: np.random.Generator) -> Iterable[tuple[str, np.ndarray]]:
    yield "ragged", rng.standard_normal((7, 13))
    yield "one", rng.standard_normal((1,))
    yield "block+1", rng.standard_normal((3, 2731)) * 3
    yield "blocks", rng.standard_normal((3, 43777)) * 3
    tails = np.concatenate([np.linspace(-12, 12, 97), [1e-30, -1e-30, 0.0, 40.0, -40.0]])
    yield "tails", tails
    # rows of whole 16-byte vectors, which some back ends alone accept
    yield "rows-narrow", rng.standard_normal((37, 8))
    yield "rows-wide", rng.standard_normal((3, 2056)) * 3
    yield "rows-blocks", rng.standard_normal((2, 5, 7, 1032)) * 3
    yield "rows-tails", np.resize(tails, (4, 104))


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for approximate in ("tanh", "none"):
        for name, x in _contents(rng):
            yield Sample(name=f"{approximate}-{name}", inputs=(x,), attrs={"approximate": approximate})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for approximate in ("tanh", "none"):
        for name, x in _contents(rng):
            yield Sample(name=f"{approximate}-{name}", inputs=(rng.standard_normal(x.shape), x), attrs={"approximate": approximate})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    x = np.array([0.0, 32.0, 64.0, 1024.0, -32.0, -64.0])  # saturated: the result is x or 0, exactly
    for approximate in ("tanh", "none"):
        yield Sample(name=f"{approximate}-saturated", inputs=(x,), attrs={"approximate": approximate})
        yield Sample(name=f"{approximate}-saturated-rows", inputs=(np.resize(x, (3, 8)),), attrs={"approximate": approximate})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    saturated = np.array([64.0, 1024.0, -64.0, -1024.0])  # the slope is 1 or 0, exactly
    for approximate in ("tanh", "none"):
        for name, x in (("saturated", saturated), ("saturated-rows", np.resize(saturated, (3, 8)))):
            yield Sample(name=f"{approximate}-{name}", inputs=(rng.integers(-9, 9, x.shape).astype(float), x),
                         attrs={"approximate": approximate})


ROWS = (
    OpSpec(name="gelu", inputs=("x",), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp,
           flops=lambda t, a: 10 * t[0].size, samples=_samples, exact=_exact,
           # tanh and erf of a vector library: up to 4 ulp of the factor (1 + t), times |x|/2
           bound=lambda x, a: (4 * np.abs(x[0]),)),
    OpSpec(name="gelu_bwd", inputs=("dy", "x"), outputs=("dx",), infer=_infer_bwd, oracle=_oracle_bwd, vjp=None,
           why_no_vjp="backward row", flops=lambda t, a: 20 * t[0].size, samples=_samples_bwd, exact=_exact_bwd,
           bound=lambda x, a: (4 * np.abs(x[0]) * (1 + np.abs(x[1])),)),
)
