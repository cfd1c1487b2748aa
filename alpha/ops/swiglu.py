"""SwiGLU without its projections: silu(gate) * up (Shazeer 2020, arXiv:2002.05202), and its backward; composed from SiLU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.silu import FLUSH, SATURATED, contents, sigmoid, silu, silu_bwd
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    same_dtype("swiglu", types)
    expect(types[0] == types[1], "swiglu", "gate and up agree", f"{types[0]} and {types[1]}", "equal types")
    return (types[0],)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    same_dtype("swiglu_bwd", types)
    expect(types[0] == types[1] == types[2], "swiglu_bwd", "dy, gate and up agree", ", ".join(map(str, types)), "equal types")
    return (types[1], types[2])


def _oracle(gate: np.ndarray, up: np.ndarray) -> Arrays:
    return (silu(gate) * up,)


def _oracle_bwd(dy: np.ndarray, gate: np.ndarray, up: np.ndarray) -> Arrays:
    return (silu_bwd(dy * up, gate), dy * silu(gate))


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return tuple(emit("swiglu_bwd", dy[0], *node.inputs))  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x in contents(rng):
        yield Sample(name=name, inputs=(x, rng.standard_normal(x.shape)))


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, x in contents(rng):
        yield Sample(name=name, inputs=(rng.standard_normal(x.shape), x, rng.standard_normal(x.shape)))


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="saturated", inputs=(SATURATED, rng.integers(-9, 10, 6).astype(float)))


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="saturated", inputs=(rng.integers(-9, 10, 6) * 2.0, SATURATED, rng.integers(-9, 10, 6).astype(float)))


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray]:
    """SiLU's bounds with one multiplication more (the factor up is folded into dy)."""
    dgate = np.abs(x[0] * x[2]) * (sigmoid(x[1]) * (17 + 17 * np.abs(x[1])) + FLUSH)
    return (dgate, np.abs(x[0]) * (12 * np.abs(silu(x[1])) + FLUSH))


ROWS = (
    OpSpec(
        name="swiglu",
        inputs=("gate", "up"),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: 5 * t[0].size,
        samples=_samples,
        exact=_exact,
        bound=lambda x, a: (np.abs(x[1]) * (12 * np.abs(silu(x[0])) + FLUSH),),
    ),  # SiLU's 11u and one multiplication
    OpSpec(
        name="swiglu_bwd",
        inputs=("dy", "gate", "up"),
        outputs=("dgate", "dup"),
        infer=_infer_bwd,
        oracle=_oracle_bwd,
        vjp=None,
        why_no_vjp="backward row",
        flops=lambda t, a: 10 * t[0].size,
        samples=_samples_bwd,
        exact=_exact_bwd,
        bound=_bound_bwd,
    ),
)
