"""Dropout on counter-based random numbers (alpha/ops/random.py). Srivastava et al. 2014, in the form that scales what is kept.

The mask is a function of (seed, purpose, step, sample id, position in the sample), so the same row on the cotangent is the vjp, and nothing
has to be kept or replayed for the backward pass, a recomputation, another number of ranks or a resumed run.
Legend: B batch; what follows B in the shape of x, flattened, is the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.random import drop_threshold, key_of, words
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, step, sample_ids = types
    expect(len(x.shape) >= 1 and x.is_float and x.size > 0, "dropout", "x is a float [B,...]", x, "a float [B,...] that is not empty")
    expect(step == TensorType((), "i32"), "dropout", "step is a device integer", step, "i32[]")
    expect(sample_ids == TensorType(x.shape[:1], "i32"), "dropout", "one i32 sample id per sample", sample_ids, TensorType(x.shape[:1],
                                                                                                                           "i32"))
    rate = attrs["rate"]
    expect(isinstance(rate, float) and 0 <= rate < 1, "dropout", "rate is a float in [0, 1)", rate, "0.1")
    key_of(attrs["seed"], attrs["purpose"])  # type: ignore[arg-type]
    return (x,)


def _oracle(x: np.ndarray, step: np.ndarray, sample_ids: np.ndarray, *, rate: float, seed: int, purpose: int | str) -> Arrays:
    random = words(seed, purpose, int(step), sample_ids, x[0].size).reshape(x.shape)
    return (np.where(random >= drop_threshold(rate), x * (1 / (1 - rate)), 0.0),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("dropout", dy[0], *node.inputs[1:], **node.attrs), None, None)  # type: ignore[arg-type]


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    def case(name: str, shape: tuple[int, ...], rate: float, step: int = 0, seed: int = 0, purpose: int | str = 0,
             first: int = 0) -> Sample:
        ids = first + rng.permutation(shape[0] * 3)[: shape[0]]
        return Sample(name=name, inputs=(rng.standard_normal(shape), np.array(step, np.int32), ids.astype(np.int32)),
                      attrs={"rate": rate, "seed": seed, "purpose": purpose})
    yield case("ragged", (3, 5, 7), 0.1, step=17, seed=1234, purpose="attention")
    yield case("keep-all", (2, 9), 0.0, step=1)
    yield case("rare", (2, 67), 0.9, seed=2**32 - 1, purpose=2**32 - 1)
    yield case("late", (2, 66), 0.25, step=2**31 - 1, seed=7, purpose="block 3", first=2**31 - 7)
    yield case("block+617", (2, 17001), 0.1, step=5, seed=99, purpose=3)
    yield case("batch", (37, 6), 0.3, step=2, seed=5, purpose=1)


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="one", inputs=(np.array([3.0]), np.array(0, np.int32), np.array([0], np.int32)),
                 attrs={"rate": 0.5, "seed": 0, "purpose": 0})
    for rate in (0.5, 0.75, 0.0):  # the scale is a power of two; kept or dropped is decided in integers
        yield Sample(name=f"rate-{rate}", inputs=(rng.integers(-99, 99, (3, 1025)).astype(float), np.array(3, np.int32),
                     np.array([5, 0, 2**31 - 1], np.int32)), attrs={"rate": rate, "seed": 11, "purpose": 2})


ROWS = (
    OpSpec(name="dropout", inputs=("x", "step", "sample_ids"), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp,
           flops=lambda t, a: t[0].size, samples=_samples, exact=_exact, undifferentiable=("step", "sample_ids"),
           # the scale rounded to the type and the product: 1 u each; half an ulp (the product's) is in the tolerance already
           bound=lambda x, a: (np.abs(x[0]) / (1 - a["rate"]),)),  # type: ignore[operator]
)
