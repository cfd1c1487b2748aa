"""What each gradient is multiplied by before the update: the mean over tokens, and the clip of its global norm.

Gradients come as gradients of the SUM of token losses. With count tokens, the mean gradient is grads/count and its norm is norm/count:
coefficient = min(1, max_norm / (norm/count)) / count, and 1/count where max_norm is 0 (no clipping). Pascanu et al. 2013 (arXiv:1211.5063),
algorithm 1. A count of 0 (no valid target: all gradients are 0) counts as 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, OpSpec, Sample, expect, same_dtype
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    norm, count = types
    for name, t in (("norm", norm), ("count", count)):
        expect(t.shape == () and t.dtype in ("f32", "f64"), "clip_coefficient", f"{name} is a float scalar", t, "f32[]")
    expect(isinstance(attrs["max_norm"], float) and attrs["max_norm"] >= 0, "clip_coefficient", "max_norm is a float >= 0",
           attrs["max_norm"],
           "1.0, or 0.0 for no clipping")
    same_dtype("clip_coefficient", types)
    return (norm, norm)


def _oracle(norm: np.ndarray, count: np.ndarray, *, max_norm: float) -> Arrays:
    count = np.maximum(count, 1.0)
    mean_norm = norm / count
    clips = (mean_norm > max_norm) & (max_norm > 0)
    factor = np.where(clips, max_norm / np.where(clips, mean_norm, 1.0), 1.0)
    return factor / count, mean_norm


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    cases = [("below", 3.0, 7.0, 1.0), ("above", 30.0, 7.0, 1.0), ("off", 1e9, 3.0, 0.0), ("zero", 0.0, 5.0, 1.0),
             ("no-tokens-big", 5.0, 0.0, 0.5), ("huge", 1e30, 1023.0, 0.5), ("tiny", 1e-30, 13.0, 1e-3),
             ("typical", 913.7, 2048.0, 0.25)]
    for name, norm, count, max_norm in cases:
        yield Sample(name=name, inputs=(np.array(norm), np.array(count)), attrs={"max_norm": max_norm})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, norm, count, max_norm in (("below", 8.0, 16.0, 1.0), ("above", 64.0, 16.0, 1.0), ("at", 2.0, 2.0, 1.0),
                                       ("off", 64.0, 16.0, 0.0), ("no-tokens", 0.0, 0.0, 2.0)):
        yield Sample(name=name, inputs=(np.array(norm), np.array(count)), attrs={"max_norm": max_norm})


ROWS = (
    OpSpec(name="clip_coefficient", inputs=("norm", "count"), outputs=("coefficient", "mean_norm"), infer=_infer, oracle=_oracle, vjp=None,
           why_no_vjp="part of the update, which no gradient crosses", flops=lambda t, a: 3, samples=_samples, exact=_exact,
           # max_norm rounded, norm/count, max_norm/that, /count: 4 u of the coefficient; mean_norm is one division
           bound=lambda x, a: (4 * _oracle(*x, **a)[0], 0.0)),  # type: ignore[arg-type]
)
