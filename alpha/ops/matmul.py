"""Matrix product with every transposition, batches and an optional bias. FLOPs: 2*M*N*K per matrix (multiply-add = 2).

With `wide` the result keeps the type in which it is summed (f32 for bf16 operands): gradients of weights, logits to sample from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from alpha.ops.numerics import depth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, accumulated, expect, same_dtype
from alpha.types import Attrs, TensorType


def _mnk(types: Sequence[TensorType], attrs: Attrs) -> tuple[tuple[int, ...], int, int, int]:
    """(leading dims of a, M, N, K); ShapeError when the operands do not fit."""
    a, b = types[0].shape, types[1].shape
    expect(len(a) >= 2, "matmul", "a has at least two axes", types[0], "[..., M, K] (or [..., K, M] with trans_a)")
    expect(len(b) >= 2, "matmul", "b has at least two axes", types[1], "[K, N] (or [N, K] with trans_b), or batched like a")
    expect(
        len(b) == 2 or b[:-2] == a[:-2],
        "matmul",
        "b has two axes or the leading axes of a",
        f"a {types[0]}, b {types[1]}",
        f"b of shape [K,N] or [{','.join(map(str, a[:-2]))},K,N]",
    )
    m, k = (a[-1], a[-2]) if attrs.get("trans_a", False) else (a[-2], a[-1])
    n, k_b = (b[-2], b[-1]) if attrs.get("trans_b", False) else (b[-1], b[-2])
    expect(
        k == k_b,
        "matmul",
        "the contracted axes of a and b agree",
        f"K={k} in a {types[0]}, K={k_b} in b {types[1]}, attrs {dict(attrs)}",
        f"K={k} in both",
    )
    return a[:-2], m, n, k


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dtype = same_dtype("matmul", types)
    expect(all(t.is_float for t in types), "matmul", "operands are floats", ", ".join(map(str, types)), "f64, f32 or bf16")
    lead, m, n, _ = _mnk(types, attrs)
    if len(types) == 3:
        expect(types[2].shape == (n,), "matmul", "the bias has one entry per output column", types[2], f"{dtype}[{n}]")
    return (TensorType((*lead, m, n), accumulated("matmul", dtype, attrs)),)


def _oracle(a: np.ndarray, b: np.ndarray, *bias: np.ndarray, trans_a: bool = False, trans_b: bool = False, wide: bool = False) -> Arrays:
    y = np.matmul(a.swapaxes(-1, -2) if trans_a else a, b.swapaxes(-1, -2) if trans_b else b)
    return (y + bias[0] if bias else y,)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    """dA = dY B^T and dB = A^T dY, each in the layout of its operand.

    A 2-D b sees all leading axes as one long M axis, so that its gradient is one product over all of them. The gradients of b and bias,
    which are parameters as a rule, are wide.
    """
    a, b = node.inputs[0], node.inputs[1]
    g: object = dy[0]
    dtype, wide = a.type.dtype, {"wide": True}
    if node.outputs[0].type.dtype != dtype:
        g = emit("cast", g, dtype=dtype)  # type: ignore[arg-type]
    trans_a, trans_b = bool(node.attrs.get("trans_a", False)), bool(node.attrs.get("trans_b", False))
    shape_a, lead = a.type.shape, a.type.shape[:-2]
    n = node.outputs[0].type.shape[-1]

    def mm(x: object, y: object, ta: bool, tb: bool, **wide: object) -> object:
        return emit("matmul", x, y, trans_a=ta, trans_b=tb, **wide)  # type: ignore[arg-type]

    if lead and len(b.type.shape) == 2:
        swap = (*range(len(lead)), len(lead) + 1, len(lead))
        rows: object = emit("transpose", a, perm=swap) if trans_a else a
        m, k = (shape_a[-1], shape_a[-2]) if trans_a else shape_a[-2:]
        total = prod(lead) * m
        x_RK = emit("reshape", rows, shape=(total, k))  # type: ignore[arg-type]
        dy_RN = emit("reshape", g, shape=(total, n))  # type: ignore[arg-type]
        da = mm(g, b, False, not trans_b)
        if trans_a:
            da = emit("transpose", da, perm=swap)  # type: ignore[arg-type]
        db = mm(dy_RN, x_RK, True, False, **wide) if trans_b else mm(x_RK, dy_RN, True, False, **wide)
    else:
        da = mm(b, g, trans_b, True) if trans_a else mm(g, b, False, not trans_b)
        db = mm(g, a, True, trans_a, **wide) if trans_b else mm(a, g, not trans_a, False, **wide)
    if len(node.inputs) == 2:
        return (da, db)
    axes = tuple(range(len(node.outputs[0].type.shape) - 1))
    return (da, db, emit("sum", g, axis=axes, keepdims=False, **wide))  # type: ignore[arg-type]


def _bound(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray]:
    """K products of one rounding each, added in a tree (numerics.depth), and the bias: all on the scale of |a| |b| + |bias|."""
    scale = _oracle(*(np.abs(v) for v in x), **attrs)[0]  # type: ignore[arg-type]
    return ((depth(x[0].shape[-2 if attrs.get("trans_a", False) else -1]) + 2) * scale,)


def _flops(types: Sequence[TensorType], attrs: Attrs) -> int:
    lead, m, n, k = _mnk(types, attrs)
    return prod(lead) * m * n * (2 * k + (len(types) == 3))


_SHAPES = (  # name, leading axes, M, N, K, b batched
    ("one", (), 1, 1, 1, False),
    ("row", (), 1, 37, 19, False),
    ("column", (), 41, 1, 23, False),
    ("outer", (), 17, 29, 1, False),
    ("prime", (), 31, 43, 53, False),
    ("panel-1", (), 127, 64, 65, False),
    ("panel", (), 128, 96, 64, False),
    ("panel+1", (), 129, 65, 97, False),
    ("tall", (), 389, 33, 31, False),
    ("wide", (), 5, 517, 67, False),
    ("deep", (), 33, 35, 400, False),
    ("lead", (3, 5), 7, 11, 13, False),
    ("wide-panels", (), 33, 1030, 65, False),
    ("panels", (), 259, 131, 63, False),
    ("batch", (5,), 9, 17, 8, True),
    ("batch2", (2, 3), 33, 16, 31, True),
)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, lead, m, n, k, batched in _SHAPES:
        for ta in (False, True):
            for tb in (False, True):
                a = rng.standard_normal((*lead, *((k, m) if ta else (m, k))))
                b = rng.standard_normal((*(lead if batched else ()), *((n, k) if tb else (k, n))))
                inputs = (a, b, rng.standard_normal(n)) if ta == tb else (a, b)
                yield Sample(
                    name=f"{name}-{'T' if ta else 'N'}{'T' if tb else 'N'}", inputs=inputs, attrs={"trans_a": ta, "trans_b": tb}
                )
    yield Sample(name="wide", inputs=(rng.standard_normal((72, 40)), rng.standard_normal((72, 136))), attrs={"trans_a": True, "wide": True})
    m, n, k = 136, 72, 200  # multiples of 8, as kernels for 16-byte vectors need
    for name, ta, tb in (("forward", False, True), ("dgrad", False, False), ("wgrad", True, False)):
        a = rng.standard_normal((k, m) if ta else (m, k))
        yield Sample(name=f"eights-{name}", inputs=(a, rng.standard_normal((n, k) if tb else (k, n))), attrs={"trans_a": ta, "trans_b": tb})
    yield Sample(name="equal", inputs=(np.full((19, 33), 0.7), np.full((33, 21), -1.3), np.full(21, 0.1)), attrs={})
    yield Sample(name="large", inputs=(1e15 * rng.standard_normal((13, 40)), 1e15 * rng.standard_normal((40, 9))), attrs={})
    yield Sample(name="tiny", inputs=(1e-22 * rng.standard_normal((13, 40)), 1e-20 * rng.standard_normal((40, 9))), attrs={})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    """Small integers: every partial sum is below 2^24, so any order gives the same bits."""
    for name, lead, m, n, k, batched in (*_SHAPES, ("k-block", (), 33, 40, 513, False)):
        for ta in (False, True):
            for tb in (False, True):
                a = rng.integers(-8, 9, (*lead, *((k, m) if ta else (m, k)))).astype(float)
                b = rng.integers(-8, 9, (*(lead if batched else ()), *((n, k) if tb else (k, n)))).astype(float)
                inputs = (a, b, rng.integers(-99, 100, n).astype(float)) if ta == tb else (a, b)
                yield Sample(
                    name=f"{name}-{'T' if ta else 'N'}{'T' if tb else 'N'}", inputs=inputs, attrs={"trans_a": ta, "trans_b": tb}
                )
    a, b = rng.integers(-8, 9, (264, 72)).astype(float), rng.integers(-8, 9, (264, 136)).astype(float)
    yield Sample(name="wide", inputs=(a, b), attrs={"trans_a": True, "wide": True})


ROWS = (
    OpSpec(
        name="matmul",
        inputs=("a", "b", "bias?"),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=_flops,
        samples=_samples,
        exact=_exact,
        bound=_bound,
    ),
)
