"""Softmax cross entropy with integer targets, per row, and the number of rows that count.

loss[n] = lse[n] - logits[n, target] + z_loss * lse[n]^2, and 0 where the target is `ignore_index`. The last term is the z-loss of
Chowdhery et al. 2022 (arXiv:2204.02311), section 5. lse (the log of the sum of exponentials, also of ignored rows) is kept for the
backward pass and takes no cotangent. Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import ACCUMULATE, growth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, sole_cotangent
from alpha.types import Attrs, TensorType


def _check(op: str, logits: TensorType, targets: TensorType, attrs: Attrs) -> TensorType:
    expect(len(logits.shape) == 2 and logits.is_float and logits.size > 0, op, "logits are a float [N,V]", logits, "f32[N,V]")
    expect(targets == TensorType(logits.shape[:1], "i32"), op, "one i32 target per row", targets, TensorType(logits.shape[:1], "i32"))
    expect(isinstance(attrs["ignore_index"], int), op, "ignore_index is an integer", attrs["ignore_index"], "-1")
    expect(isinstance(attrs["z_loss"], float) and attrs["z_loss"] >= 0, op, "z_loss is a float >= 0", attrs["z_loss"], "0.0 for none")
    return TensorType(logits.shape[:1], ACCUMULATE[logits.dtype])


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    per_row = _check("cross_entropy", types[0], types[1], attrs)
    return (per_row, per_row)


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dloss, logits, targets, lse = types
    per_row = _check("cross_entropy_bwd", logits, targets, attrs)
    expect(dloss == per_row and lse == per_row, "cross_entropy_bwd", "dloss and lse have one entry per row", f"{dloss} and {lse}", per_row)
    return (logits,)


def _pick(op: str, targets: np.ndarray, vocab: int, ignore_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows count, and their column (0 where ignored); ShapeError for a target that is neither a column nor ignored."""
    counts = targets != ignore_index
    column = np.where(counts, targets, 0)
    expect(bool(np.all((column >= 0) & (column < vocab))), op, "every target is a column or ignored", f"{targets.min()}..{targets.max()}",
           f"0..{vocab - 1} or {ignore_index}")
    return counts, column


def _oracle(logits: np.ndarray, targets: np.ndarray, *, ignore_index: int, z_loss: float) -> Arrays:
    counts, column = _pick("cross_entropy", targets, logits.shape[1], ignore_index)
    top = logits.max(-1)
    log_total = np.log(np.exp(logits - top[:, None]).sum(-1))
    lse = top + log_total
    nll = (top - logits[np.arange(len(column)), column]) + log_total  # the two large terms cancel first
    loss = nll + z_loss * lse * lse if z_loss else nll
    return np.where(counts, loss, 0.0), lse


def _oracle_bwd(dloss: np.ndarray, logits: np.ndarray, targets: np.ndarray, lse: np.ndarray, *, ignore_index: int, z_loss: float) -> Arrays:
    counts, column = _pick("cross_entropy_bwd", targets, logits.shape[1], ignore_index)
    p = np.exp(logits - lse[:, None])
    if z_loss:
        p = p * (1 + 2 * z_loss * lse)[:, None]
    onehot = np.arange(logits.shape[1])[None, :] == column[:, None]
    return (np.where(counts, dloss, 0.0)[:, None] * (p - onehot),)


def _vjp(emit: Emit, node: NodeLike, cotangents: Sequence[object]) -> Sequence[object]:
    logits, targets = node.inputs
    dloss = sole_cotangent("cross_entropy", cotangents)
    return (emit("cross_entropy_bwd", dloss, logits, targets, node.outputs[1], **node.attrs), None)  # type: ignore[arg-type]


def _infer_count(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(types[0].dtype == "i32", "count_valid", "targets are i32", types[0], "i32[...]")
    return (TensorType((), "f32"),)


def _oracle_count(targets: np.ndarray, *, ignore_index: int) -> Arrays:
    return (np.asarray((targets != ignore_index).sum(), dtype=np.float64),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    def case(name: str, logits: np.ndarray, targets: np.ndarray | None = None, ignore_index: int = -1, z_loss: float = 0.0) -> Sample:
        t = rng.integers(0, logits.shape[1], logits.shape[0]) if targets is None else targets
        return Sample(name=name, inputs=(logits, np.asarray(t, np.int32)), attrs={"ignore_index": ignore_index, "z_loss": z_loss},
                      wrt=() if name in ("one", "large", "far-below", "far-above") else None)  # no slope, or a step that scales with 1e4
    yield case("one", rng.standard_normal((1, 1)))
    yield case("ragged", rng.standard_normal((7, 13)))
    yield case("ends", rng.standard_normal((3, 5)), np.array([0, 4, 4]))
    yield case("z-loss", rng.standard_normal((5, 11)) * 2 + 1, z_loss=1e-2)
    yield case("ignored", rng.standard_normal((6, 9)), np.array([-1, 3, -1, 0, 8, -1]), z_loss=1e-3)
    yield case("ignored-column", rng.standard_normal((5, 6)), np.array([2, 1, 2, 5, 0]), ignore_index=2)
    yield case("all-ignored", rng.standard_normal((3, 4)), np.full(3, -100), ignore_index=-100, z_loss=1e-2)
    yield case("eights", rng.standard_normal((9, 136)) * 3, z_loss=1e-3)
    yield case("block+1", rng.standard_normal((65, 513)))
    yield case("wide", rng.standard_normal((3, 2049)) * 4)
    yield case("all-equal", np.full((4, 17), 0.3))
    yield case("large", rng.standard_normal((6, 8)) * 1e4)
    yield case("far-below", rng.standard_normal((5, 9)) - 120.0)  # where exp underflows f32
    yield case("far-above", rng.standard_normal((5, 9)) + 95.0, z_loss=1e-4)  # where exp overflows f32
    yield case("tiny", rng.standard_normal((4, 8)) * 1e-30)


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for s in _samples(rng):
        if s.name in ("one", "all-ignored", "large"):  # p is exactly 0 or 1: among the exact samples
            continue
        logits, targets = s.inputs
        lse = _oracle(logits, targets, **s.attrs)[1]  # type: ignore[arg-type]
        yield Sample(name=s.name, inputs=(rng.standard_normal(len(targets)), logits, targets, lse), attrs=s.attrs)


def _samples_count(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape in (("one", (1,)), ("ragged", (3, 7)), ("block+1", (129, 65))):
        yield Sample(name=name, inputs=(rng.integers(-1, 4, shape).astype(np.int32),), attrs={"ignore_index": -1})
    yield Sample(name="all-ignored", inputs=(np.full((5,), 7, np.int32),), attrs={"ignore_index": 7})
    yield Sample(name="none-ignored", inputs=(np.arange(9, dtype=np.int32),), attrs={"ignore_index": -100})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for n, v in ((1, 1), (5, 8), (130, 33)):  # one logit 1024 above the rest: lse = 1024; loss 0 where it is the target, else 1024
        hit, target = rng.integers(0, v, n), rng.integers(0, v, n).astype(np.int32)
        target[: n // 2] = hit[: n // 2]
        target[::3] = -1
        yield Sample(name=f"one-hot-{n}x{v}", inputs=(1024.0 * np.eye(v)[hit], target), attrs={"ignore_index": -1, "z_loss": 2.0**-10})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for s in _exact(rng):  # p is 1 or 0 exactly
        n = len(s.inputs[1])
        yield Sample(name=s.name, inputs=(rng.integers(-9, 9, n).astype(float), *s.inputs, np.full(n, 1024.0)), attrs=s.attrs)
    yield Sample(name="all-ignored", inputs=(np.ones(3), rng.standard_normal((3, 4)).round(3), np.full(3, -100, np.int32), np.full(3, 2.0)),
                 attrs={"ignore_index": -100, "z_loss": 0.0})


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: exp(x - top) is off by |x - top| + 5 relative, so the total by the weighted mean W of that + growth(V), its log by W absolute
    # and 1 relative; lse and loss add roundings of their terms; z_loss * lse^2 carries twice the error of lse
    logits, z = x[0], float(attrs["z_loss"])  # type: ignore[arg-type]
    loss, lse = _oracle(logits, x[1], **attrs)  # type: ignore[arg-type]
    top = logits.max(-1)
    p = np.exp(logits - lse[:, None])
    log_off = (p * (np.abs(logits - top[:, None]) + 5)).sum(-1) + growth(logits.shape[1]) + 2 * np.abs(lse - top)
    lse_off = log_off + np.abs(lse)
    column = np.where(x[1] == attrs["ignore_index"], 0, x[1])
    from_top = top - logits[np.arange(len(column)), column]
    loss_off = log_off + 2 * from_top + np.abs(loss) + 2 * z * np.abs(lse) * lse_off + 4 * z * lse * lse
    return np.where(x[1] == attrs["ignore_index"], 0.0, loss_off), lse_off


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # in u: p = exp(x - lse) is off by |x - lse| + 5 relative; then the z factor (2), two products and a difference
    dloss, logits, targets, lse = x
    distance = np.abs(logits - lse[:, None])
    p = np.exp(logits - lse[:, None]) * (1 + 2 * float(attrs["z_loss"]) * np.abs(lse))[:, None]  # type: ignore[arg-type]
    onehot = np.arange(logits.shape[1])[None, :] == targets[:, None]
    return (np.abs(dloss)[:, None] * (p * (distance + 10) + 2 * onehot),)


ROWS = (
    OpSpec(name="cross_entropy", inputs=("logits", "targets"), outputs=("loss", "lse"), infer=_infer, oracle=_oracle, vjp=_vjp,
           flops=lambda t, a: 5 * t[0].size, samples=_samples, exact=_exact, bound=_bound, undifferentiable=("targets", "lse"),
           kept={"loss": "accumulate", "lse": "accumulate"}),
    OpSpec(name="cross_entropy_bwd", inputs=("dloss", "logits", "targets", "lse"), outputs=("dlogits",), infer=_infer_bwd,
           oracle=_oracle_bwd,
           vjp=None, why_no_vjp="backward row", flops=lambda t, a: 4 * t[1].size, samples=_samples_bwd, exact=_exact_bwd, bound=_bound_bwd,
           undifferentiable=("targets",), kept={"dloss": "accumulate", "lse": "accumulate"}),
    OpSpec(name="count_valid", inputs=("targets",), outputs=("count",), infer=_infer_count, oracle=_oracle_count, vjp=None,
           why_no_vjp="counts integers", flops=lambda t, a: 0, samples=_samples_count, exact=_samples_count, undifferentiable=("targets",)),
)
