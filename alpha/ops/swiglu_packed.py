"""SwiGLU of gate and up side by side, x[..., 2F] -> silu(x[..., :F]) * x[..., F:], and its backward: one product makes both halves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.ops.compose import derived
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.ops.table import row
from alpha.types import Attrs


def _halves(emit: Any, op: str, x: Any) -> tuple[Any, Any]:
    expect(len(x.shape) >= 1 and x.shape[-1] % 2 == 0, op, "x is [...,2F]", x.shape, "an even last axis")
    gate, up = emit("split", x, axis=-1, sizes=(x.shape[-1] // 2,) * 2)
    return gate, up


def _compose(emit: Any, x: Any) -> Any:
    return (emit("swiglu", *_halves(emit, "swiglu_packed", x)),)


def _compose_bwd(emit: Any, dy: Any, x: Any) -> Any:
    return (emit("concat", *emit("swiglu_bwd", dy, *_halves(emit, "swiglu_packed_bwd", x)), axis=-1),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("swiglu_packed_bwd", dy[0], node.inputs[0]),)  # type: ignore[arg-type]


def _pack(sample: Sample) -> Sample:
    return Sample(name=sample.name, inputs=(*sample.inputs[:-2], np.concatenate(sample.inputs[-2:], axis=-1)))


def _of(op: str, which: str) -> Any:
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        for sample in getattr(row(op), which)(rng):
            yield _pack(sample)
            if which == "exact":  # again in a multiple of 8 columns
                yield _pack(replace(sample, name=f"{sample.name}-eights", inputs=tuple(np.tile(x, 4) for x in sample.inputs)))
        if which == "samples":
            x = rng.standard_normal((67, 272)) * 2
            yield Sample(name="eights", inputs=(x,) if op == "swiglu" else (rng.standard_normal((67, 136)), x))
    return samples


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    parts = (*x[:-1], *np.split(x[-1], 2, axis=-1))
    found = row("swiglu" if len(x) == 1 else "swiglu_bwd").bound
    assert found is not None
    each = found(parts, attrs)
    return (np.concatenate([np.broadcast_to(b, parts[-1].shape) for b in each], axis=-1),)


ROWS = (
    OpSpec(name="swiglu_packed", inputs=("x",), outputs=("y",), vjp=_vjp, samples=_of("swiglu", "samples"), exact=_of("swiglu", "exact"),
           bound=_bound, **derived(_compose)),
    OpSpec(name="swiglu_packed_bwd", inputs=("dy", "x"), outputs=("dx",), vjp=None, why_no_vjp="backward row",
           samples=_of("swiglu_bwd", "samples"), exact=_of("swiglu_bwd", "exact"), bound=_bound, **derived(_compose_bwd)),
)
