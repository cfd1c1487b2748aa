"""SiLU (x times its logistic sigmoid; Elfwing, Uchibe and Doya 2017, arXiv:1702.03118) and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype
from alpha.types import Attrs, TensorType


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), elementwise, without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1 + e)


def contents(rng: np.random.Generator) -> Iterable[tuple[str, np.ndarray]]:
    """Shapes and contents for activations."""
    yield "one", rng.standard_normal((1,))
    yield "ragged", rng.standard_normal((7, 13))
    yield "block-1", rng.standard_normal((8191,)) * 3
    yield "block+1", rng.standard_normal((3, 2731)) * 3
    yield "blocks", rng.standard_normal((3, 43777)) * 3
    yield "equal", np.full((5, 7), -0.3)
    yield "tails", np.concatenate([np.linspace(-30, 30, 97), [1e-30, -1e-30, 0.0, 60.0, -60.0, 100.0, -100.0]])


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0].is_float, "silu", "x is a float tensor", types[0], "f64, f32 or bf16")
    return (types[0],)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    same_dtype("silu_bwd", types)
    expect(types[0] == types[1], "silu_bwd", "dy and x agree", f"{types[0]} and {types[1]}", "equal types")
    return (types[1],)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def silu_bwd(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dy times the derivative s + x*s*(1-s), with s the sigmoid and 1-s written as the sigmoid of -x."""
    return dy * sigmoid(x) * (1 + x * sigmoid(-x))


def _oracle(x: np.ndarray) -> Arrays:
    return (silu(x),)


def _oracle_bwd(dy: np.ndarray, x: np.ndarray) -> Arrays:
    return (silu_bwd(dy, x),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("silu_bwd", dy[0], node.inputs[0]),)  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x in contents(rng):
        yield Sample(name=name, inputs=(x,))


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x in contents(rng):
        yield Sample(name=name, inputs=(rng.standard_normal(x.shape), x))


FLUSH = 2.0**-97
"""In units of u: silu may be flushed to 0 where exp(-x) overflows in float32 (x < -88.72): |x| exp(x) is below 2^-121 there."""

SATURATED = np.array([0.0, 64.0, 128.0, 1024.0, -1024.0, -8192.0])
"""Where the sigmoid is 0 or 1 to the last bit of every type (and x = 0)."""


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="saturated", inputs=(SATURATED,))


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="saturated", inputs=(rng.integers(-9, 10, 6) * 2.0, SATURATED), wrt=(0,))


ROWS = (
    OpSpec(
        name="silu",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: 4 * t[0].size,
        samples=_samples,
        exact=_exact,
        # exp(-x) of a vector library, up to 4 ulp = 8u, enters 1/(1+exp(-x)) with weight 1-s <= 1; three roundings more
        bound=lambda x, a: (11 * np.abs(silu(x[0])) + FLUSH,),
    ),
    OpSpec(
        name="silu_bwd",
        inputs=("dy", "x"),
        outputs=("dx",),
        infer=_infer_bwd,
        oracle=_oracle_bwd,
        vjp=None,
        why_no_vjp="backward row",
        flops=lambda t, a: 8 * t[0].size,
        samples=_samples_bwd,
        exact=_exact_bwd,
        # s carries 10u (above); in s*(1 + x*(1-s)), 1-s carries as much, times |x|; six roundings of terms up to 1+|x|
        bound=lambda x, a: (np.abs(x[0]) * (sigmoid(x[1]) * (16 + 16 * np.abs(x[1])) + FLUSH),),
    ),
)
