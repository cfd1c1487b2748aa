"""1 iff norm and loss are both finite. The update is predicated on it, so a bad step leaves the state untouched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect, same_dtype
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    for name, t in zip(("norm", "loss"), types):
        expect(t.shape == () and t.dtype in ("f32", "f64"), "finite_flag", f"{name} is a float scalar", t, "f32[]")
    same_dtype("finite_flag", types)
    return (TensorType((), "i32"),)


def _oracle(norm: np.ndarray, loss: np.ndarray) -> Arrays:
    return (np.asarray(np.isfinite(norm) & np.isfinite(loss)).astype(np.int32),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    bad = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}
    yield Sample(name="both-finite", inputs=(np.array(2.5), np.array(-3.0)))
    yield Sample(name="zeros", inputs=(np.array(0.0), np.array(0.0)))
    yield Sample(name="largest", inputs=(np.array(3.4e38), np.array(-3.4e38)))
    for name, value in bad.items():
        yield Sample(name=f"norm-{name}", inputs=(np.array(value), np.array(1.0)))
        yield Sample(name=f"loss-{name}", inputs=(np.array(1.0), np.array(value)))
    yield Sample(name="both-bad", inputs=(np.array(np.nan), np.array(np.inf)))


ROWS = (
    OpSpec(name="finite_flag", inputs=("norm", "loss"), outputs=("finite",), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="a yes or no", flops=lambda t, a: 0, samples=_samples, exact=_samples),
)
