"""The head and its loss in one row: the sum of cross entropies of x W^T, with the gradient of that sum or without.

`linear_cross_entropy_grad` gives the gradient together with the loss, because a loss is the end of the graph: its cotangent is 1, and a
chunk of logits can die as soon as both are known. `chunk` is the number of rows whose logits exist at a time; it fixes the order in which
dweight is summed, so it is part of the row and not a kernel's choice. Logits and their gradients have the compute type, everything summed
over rows the accumulation type. A sum of chunks as a pattern of graph nodes would need a fusion that moves backward work into the forward,
and a schedule that promises to keep it there; a row needs neither, and its memory is one scratch buffer.

Legend: N rows, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from alpha.ops.numerics import ACCUMULATE, stored
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, sole_cotangent
from alpha.ops.table import row
from alpha.types import Attrs, TensorType


def _check(op: str, types: Sequence[TensorType], attrs: Attrs) -> TensorType:
    x, weight, targets = types
    expect(len(x.shape) == 2 and len(weight.shape) == 2 and x.shape[1] == weight.shape[1], op, "x is [N,C] and weight [V,C]",
           f"{x} and {weight}", "equal C")
    chunk = attrs["chunk"]
    expect(isinstance(chunk, int) and chunk > 0, op, "chunk is a positive number of rows", chunk, "8192")
    (logits,) = row("matmul").infer((x, weight), {"trans_b": True})
    row("cross_entropy").infer((logits, targets), _loss_attrs(attrs))
    return TensorType((), ACCUMULATE[x.dtype])


def _loss_attrs(attrs: Attrs) -> dict[str, Any]:
    return {"ignore_index": attrs["ignore_index"], "z_loss": attrs["z_loss"]}


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return (_check("linear_cross_entropy", types, attrs),)


def _infer_grad(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    total = _check("linear_cross_entropy_grad", types, attrs)
    return total, types[0], TensorType(types[1].shape, total.dtype)


def _losses(x: np.ndarray, weight: np.ndarray, targets: np.ndarray, attrs: Attrs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits = stored(np.matmul(x, weight.swapaxes(-1, -2)))
    loss, lse = row("cross_entropy").oracle(logits, targets, **attrs)
    return logits, loss, lse


def _oracle(x: np.ndarray, weight: np.ndarray, targets: np.ndarray, *, ignore_index: int, z_loss: float, chunk: int) -> Arrays:
    return (_losses(x, weight, targets, {"ignore_index": ignore_index, "z_loss": z_loss})[1].sum(-1),)


def _oracle_grad(x: np.ndarray, weight: np.ndarray, targets: np.ndarray, *, ignore_index: int, z_loss: float, chunk: int) -> Arrays:
    attrs: dict[str, Any] = {"ignore_index": ignore_index, "z_loss": z_loss}
    logits, loss, lse = _losses(x, weight, targets, attrs)
    dlogits = stored(row("cross_entropy_bwd").oracle(np.ones(len(targets)), logits, targets, lse, **attrs)[0])
    return loss.sum(-1), np.matmul(dlogits, weight), np.matmul(dlogits.swapaxes(-1, -2), x)


def _compose(emit: Any, x: Any, weight: Any, targets: Any, *, ignore_index: int, z_loss: float, chunk: int) -> Any:
    """All rows as one chunk, for back ends without a kernel: the sum over rows has another order than the row promises to kernels."""
    logits = emit("matmul", x, weight, trans_b=True)
    loss, _ = emit("cross_entropy", logits, targets, ignore_index=ignore_index, z_loss=z_loss)
    return (emit("sum", loss, axis=(0,), keepdims=False),)


def _compose_grad(emit: Any, x: Any, weight: Any, targets: Any, *, ignore_index: int, z_loss: float, chunk: int) -> Any:
    logits = emit("matmul", x, weight, trans_b=True)
    loss, lse = emit("cross_entropy", logits, targets, ignore_index=ignore_index, z_loss=z_loss)
    ones = emit("fill", shape=tuple(loss.shape), value=1.0, dtype=loss.type.dtype)
    dlogits = emit("cross_entropy_bwd", ones, logits, targets, lse, ignore_index=ignore_index, z_loss=z_loss)
    dx, dweight = emit("matmul", dlogits, weight), emit("matmul", dlogits, x, trans_a=True, wide=True)
    return emit("sum", loss, axis=(0,), keepdims=False), dx, dweight


def _vjp(emit: Emit, node: NodeLike, cotangents: Sequence[object]) -> Sequence[object]:
    dloss = sole_cotangent("linear_cross_entropy_grad", cotangents)
    _, dx, dweight = node.outputs
    return emit("scale_by", dx, dloss), emit("scale_by", dweight, dloss), None  # type: ignore[arg-type]


def _flops(types: Sequence[TensorType], attrs: Attrs) -> int:
    (n, c), v = types[0].shape, types[1].shape[0]
    return 2 * n * v * c + 5 * n * v


def _flops_grad(types: Sequence[TensorType], attrs: Attrs) -> int:
    (n, c), v = types[0].shape, types[1].shape[0]
    return 6 * n * v * c + 9 * n * v


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    def case(name: str, n: int, c: int, v: int, chunk: int, z_loss: float = 0.0, ignored: float = 0.0, scale: float = 1.0) -> Sample:
        targets = rng.integers(0, v, n).astype(np.int32)
        targets[rng.random(n) < ignored] = -1
        return Sample(name=name, inputs=(rng.standard_normal((n, c)), rng.standard_normal((v, c)) * scale / c**0.5, targets),
                      attrs={"ignore_index": -1, "z_loss": z_loss, "chunk": chunk})
    yield case("one", 1, 8, 8, 1)
    yield case("one-chunk", 37, 16, 24, 64)
    yield case("chunks", 130, 24, 40, 32, scale=3.0)
    yield case("z-loss", 65, 40, 136, 64, z_loss=1e-3)
    yield case("ignored", 96, 16, 72, 32, ignored=0.4)
    yield case("wide", 33, 72, 520, 16)
    below = case("below", 7, 16, 13, 4)  # all logits near -32, where one column too many, though its logit be 0, is all there is
    x, weight, _ = below.inputs
    x[:, 0], weight[:, 0] = 4.0, -8.0
    yield below


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for n, c, chunk in ((9, 8, 4), (70, 64, 32)):  # as in cross_entropy.py: one logit 1024 above the rest, so p is 1 or 0
        hit, target = rng.integers(0, c, n), rng.integers(0, c, n).astype(np.int32)
        target[: n // 2] = hit[: n // 2]
        target[::3] = -1
        yield Sample(name=f"one-hot-{n}x{c}", inputs=(np.eye(c)[hit], 1024.0 * np.eye(c), target),
                     attrs={"ignore_index": -1, "z_loss": 0.0, "chunk": chunk})


ROWS = (
    OpSpec(name="linear_cross_entropy", inputs=("x", "weight", "targets"), outputs=("loss_sum",), infer=_infer, oracle=_oracle,
           compose=_compose, vjp=None, why_no_vjp="evaluation only: training takes linear_cross_entropy_grad", flops=_flops,
           samples=_samples, exact=_exact, undifferentiable=("targets",), kept={"loss_sum": "accumulate"}),
    OpSpec(name="linear_cross_entropy_grad", inputs=("x", "weight", "targets"), outputs=("loss_sum", "dx", "dweight"), infer=_infer_grad,
           oracle=_oracle_grad, vjp=_vjp, compose=_compose_grad, flops=_flops_grad, samples=_samples, exact=_exact,
           undifferentiable=("targets", "dx", "dweight"), kept={"loss_sum": "accumulate", "dweight": "accumulate"}),
)
