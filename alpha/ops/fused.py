"""The fused rows. Each is its composition; everything else about it is derived (compose.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.ops.compose import fused
from alpha.ops.spec import Sample
from alpha.ops.table import row


def matmul_accumulate(emit: Any, into: Any, a: Any, b: Any, *, trans_a: Any = False, trans_b: Any = False, wide: Any = False) -> Any:
    """into + a b: a weight gradient added to its buffer."""
    return (emit("accumulate", into, emit("matmul", a, b, trans_a=trans_a, trans_b=trans_b, wide=wide)),)


def sum_accumulate(emit: Any, into: Any, x: Any, *, axis: Any, keepdims: Any, wide: Any = False) -> Any:
    """into + sum of x: a bias gradient added to its buffer."""
    return (emit("accumulate", into, emit("sum", x, axis=axis, keepdims=keepdims, wide=wide)),)


def embedding_bwd_accumulate(emit: Any, into: Any, dy: Any, ids: Any, *, vocab: Any) -> Any:
    """into + the gradient of an embedding table."""
    return (emit("accumulate", into, emit("embedding_bwd", dy, ids, vocab=vocab)),)


def embedding_add(emit: Any, table: Any, ids: Any, table2: Any, ids2: Any) -> Any:
    """The sum of two lookups: tokens and positions."""
    return (emit("add", emit("embedding", table, ids), emit("embedding", table2, ids2)),)


def linear_swiglu(emit: Any, x: Any, weight: Any, *, trans_b: Any, trans_a: Any = False) -> Any:
    """pre = x W, gate and up side by side, and swiglu of the two; pre is kept for the backward."""
    pre = emit("matmul", x, weight, trans_a=trans_a, trans_b=trans_b)
    return pre, emit("swiglu_packed", pre)


def linear_gelu(emit: Any, x: Any, weight: Any, bias: Any, *, trans_b: Any, approximate: Any, trans_a: Any = False) -> Any:
    """h = x W + bias and gelu(h); h is kept for the backward."""
    h = emit("matmul", x, weight, bias, trans_a=trans_a, trans_b=trans_b)
    return h, emit("gelu", h, approximate=approximate)


def matmul_gelu_bwd(emit: Any, dy: Any, weight: Any, h: Any, *, approximate: Any, trans_a: Any = False, trans_b: Any = False) -> Any:
    """gelu'(h) * (dy W): the gradient through a linear layer and the GELU before it."""
    return (emit("gelu_bwd", emit("matmul", dy, weight, trans_a=trans_a, trans_b=trans_b), h, approximate=approximate),)


def add_layernorm(emit: Any, a: Any, b: Any, gamma: Any, beta: Any, *, eps: Any) -> Any:
    """s = a + b (the residual stream) and layernorm(s)."""
    s = emit("add", a, b)
    return (s, *emit("layernorm", s, gamma, beta, eps=eps))


def add_rmsnorm(emit: Any, a: Any, b: Any, gamma: Any, *, eps: Any) -> Any:
    """s = a + b (the residual stream) and rmsnorm(s)."""
    s = emit("add", a, b)
    return (s, *emit("rmsnorm", s, gamma, eps=eps))


def layernorm_bwd_add(emit: Any, residual: Any, dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any) -> Any:
    """The gradient through a layernorm, added to that of the residual stream beside it."""
    dx, dgamma, dbeta = emit("layernorm_bwd", dy, x, gamma, mean, rstd)
    return emit("add", residual, dx), dgamma, dbeta


def rmsnorm_bwd_add(emit: Any, residual: Any, dy: Any, x: Any, gamma: Any, rstd: Any) -> Any:
    """The gradient through an rmsnorm, added to that of the residual stream beside it."""
    dx, dgamma = emit("rmsnorm_bwd", dy, x, gamma, rstd)
    return emit("add", residual, dx), dgamma


def _wgrad_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for k, m, n in ((1, 1, 1), (7, 3, 5), (129, 65, 33), (31, 128, 127)):
        into, a, b = rng.standard_normal((m, n)), rng.standard_normal((k, m)), rng.standard_normal((k, n))
        yield Sample(name=f"wgrad-{k}x{m}x{n}", inputs=(into, a, b), attrs={"trans_a": True})
    for wide in (False, True):
        inputs = (rng.standard_normal((72, 136)), rng.standard_normal((200, 72)), rng.standard_normal((200, 136)))
        yield Sample(name=f"eights-{'wide' if wide else 'own'}", inputs=inputs, attrs={"trans_a": True, "wide": wide})
    yield Sample(name="plain", inputs=(rng.standard_normal((9, 4)), rng.standard_normal((9, 6)), rng.standard_normal((6, 4))), attrs={})


def _wgrad_exact(rng: np.random.Generator) -> Iterable[Sample]:
    draw = lambda *s: rng.integers(-8, 8, s).astype(float)  # noqa: E731
    yield Sample(name="integers", inputs=(draw(65, 33), draw(257, 65), draw(257, 33)), attrs={"trans_a": True})
    yield Sample(name="integers-wide", inputs=(draw(72, 40), draw(264, 72), draw(264, 40)), attrs={"trans_a": True, "wide": True})


_LINEAR = (((1,), 1, 1), ((3, 5), 7, 9), ((2, 65), 33, 129), ((257,), 16, 31), ((2, 67), 72, 136), ((33,), 8, 24), ((129,), 264, 40))
"""(leading axes, K, N) of the products with GELU; the last ones in multiples of 8."""


def _linear_gelu_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for approximate in ("tanh", "none"):
        for lead, k, n in _LINEAR:
            yield Sample(name=f"{approximate}-{'x'.join(map(str, lead))}-{k}-{n}", attrs={"trans_b": True, "approximate": approximate},
                         inputs=(rng.standard_normal((*lead, k)), rng.standard_normal((n, k)) / np.sqrt(k), rng.standard_normal(n)))


def _matmul_gelu_bwd_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for approximate in ("tanh", "none"):
        for lead, k, n in _LINEAR:
            yield Sample(name=f"{approximate}-{'x'.join(map(str, lead))}-{k}-{n}", attrs={"approximate": approximate},
                         inputs=(rng.standard_normal((*lead, k)), rng.standard_normal((k, n)) / np.sqrt(k),
                                 rng.standard_normal((*lead, n))))


def _norm_samples(beta: bool) -> Any:
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        for shape in ((1, 8), (5, 7), (3, 43, 128), (129, 65), (67, 136)):
            c = shape[-1]
            scales = (rng.standard_normal(c), rng.standard_normal(c))[: 2 if beta else 1]
            yield Sample(name="x".join(map(str, shape)), attrs={"eps": 1e-5},
                         inputs=(rng.standard_normal(shape), 3 * rng.standard_normal(shape) + 1, *scales))
    return samples


def _sum_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for shape in ((1, 1), (7, 5), (3, 70, 136), (257, 72)):
        yield Sample(name="x".join(map(str, shape)), inputs=(rng.standard_normal(shape[-1:]), rng.standard_normal(shape)),
                     attrs={"axis": tuple(range(len(shape) - 1)), "keepdims": False, "wide": shape[-1] % 8 == 0})


def _sum_exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="integers", inputs=(rng.integers(-99, 100, 72).astype(float), rng.integers(-99, 100, (300, 72)).astype(float)),
                 attrs={"axis": (0,), "keepdims": False, "wide": True})


def _accumulated(op: str, which: str) -> Any:
    """Samples of a row that makes a gradient, with a buffer that it is added to."""
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        for s in getattr(row(op), which)(rng):
            shape = row(op).oracle(*s.inputs, **s.attrs)[0].shape
            into = rng.integers(-9, 10, shape).astype(float) if which == "exact" else rng.standard_normal(shape)
            yield replace(s, inputs=(into, *s.inputs))
    return samples


def _embedding_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for v, p, c, shape in ((1, 1, 8, (1,)), (11, 7, 13, (3, 7)), (40, 33, 72, (2, 33)), (129, 65, 136, (257,)), (3, 2, 2048, (5,))):
        yield Sample(name=f"{v}x{c}", inputs=(rng.standard_normal((v, c)), rng.integers(0, v, shape).astype(np.int32),
                                              rng.standard_normal((p, c)), rng.integers(0, p, shape).astype(np.int32)))


def _embedding_exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="integers", inputs=(rng.integers(-99, 100, (40, 72)).astype(float), rng.integers(0, 40, (3, 9)).astype(np.int32),
                                          rng.integers(-99, 100, (9, 72)).astype(float), rng.integers(0, 9, (3, 9)).astype(np.int32)))


def _linear_swiglu_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for lead, k, f in (((1,), 1, 1), ((3, 5), 7, 9), ((2, 67), 72, 136), ((257,), 16, 32)):
        yield Sample(name=f"{'x'.join(map(str, lead))}-{k}-{f}", attrs={"trans_b": True},
                     inputs=(rng.standard_normal((*lead, k)), rng.standard_normal((2 * f, k)) / np.sqrt(k)))


def _norm_bwd_samples(op: str) -> Any:
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        for s in row(op).samples(rng):
            yield replace(s, inputs=(rng.standard_normal(s.inputs[0].shape), *s.inputs))
    return samples


def _norm_bwd_exact(op: str) -> Any:
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        for s in row(op).exact(rng):  # type: ignore[operator]
            yield replace(s, inputs=(rng.integers(-4, 5, s.inputs[0].shape).astype(float), *s.inputs))
    return samples


def _norm_bwd_bound(op: str) -> Any:
    def bound(x: tuple[np.ndarray, ...], attrs: Any) -> Any:
        found = row(op).bound
        assert found is not None
        dx, *rest = found(x[1:], attrs)
        return dx + np.abs(row(op).oracle(*x[1:], **attrs)[0]) + np.abs(x[0]), *rest  # one addition more
    return bound


def _swiglu_bound(x: tuple[np.ndarray, ...], attrs: Any) -> Any:
    pre = np.matmul(x[0], x[1].swapaxes(-1, -2))
    found = row("swiglu_packed").bound
    assert found is not None
    return 0.0, found((pre,), {})[0]


def _gelu_bound(x: tuple[np.ndarray, ...], attrs: Any) -> Any:
    """As in gelu.py: up to 4 ulp of the vector library's tanh or erf, times |h| (h itself: 0)."""
    h = np.matmul(x[0], x[1].swapaxes(-1, -2)) + x[2]
    return 0.0, 4 * np.abs(h)


_BUFFER = {"into": "accumulate", "y": "accumulate"}

def _accumulate_bound(x: tuple[np.ndarray, ...], attrs: Any) -> Any:
    """The product's own bound (matmul.py): the buffer adds one rounding, which is the result's."""
    product = row("matmul").bound
    return product(x[1:], attrs) if product is not None else (0.0,)


def _norm_bound(norm: str) -> Any:
    def bound(x: tuple[np.ndarray, ...], attrs: Any) -> Any:
        # the norm's own bound over s, and what one rounding e <= u |s| of each element of s moves: rstd by rstd^2 mean(xhat e), the mean
        # by mean(e), y by gamma rstd (e - mean(e) - xhat mean(xhat e)), where rmsnorm has no mean
        a, b, gamma = x[:3]
        s, spec = np.asarray(a + b), row(norm)
        _, *kept = spec.oracle(s, *x[2:], **attrs)
        rstd, size = np.asarray(kept[-1])[..., None], np.abs(s)
        mean = np.asarray(kept[0])[..., None] if norm == "layernorm" else 0.0
        moved, xhat = size.mean(-1, keepdims=True) * (norm == "layernorm"), np.abs(s - mean) * rstd
        turned = (xhat * size).mean(-1, keepdims=True)
        assert spec.bound is not None
        y, *rest = spec.bound((s, *x[2:]), attrs)
        more = [moved[..., 0]] * (norm == "layernorm") + [(rstd**2 * turned)[..., 0]]
        return (0.0, y + np.abs(gamma) * rstd * (size + moved + xhat * turned), *(r + m for r, m in zip(rest, more, strict=True)))

    return bound


ROWS = (
    fused("matmul_accumulate", ("into", "a", "b"), ("y",), matmul_accumulate, samples=_wgrad_samples, exact=_wgrad_exact,
          bound=_accumulate_bound, kept=_BUFFER),
    fused("sum_accumulate", ("into", "x"), ("y",), sum_accumulate, samples=_sum_samples, exact=_sum_exact, kept=_BUFFER),
    fused("embedding_bwd_accumulate", ("into", "dy", "ids"), ("y",), embedding_bwd_accumulate, kept=_BUFFER, undifferentiable=("ids",),
          samples=_accumulated("embedding_bwd", "samples"), exact=_accumulated("embedding_bwd", "exact")),
    fused("embedding_add", ("table", "ids", "table2", "ids2"), ("y",), embedding_add, samples=_embedding_samples, exact=_embedding_exact,
          undifferentiable=("ids", "ids2")),
    fused("linear_swiglu", ("x", "weight"), ("pre", "y"), linear_swiglu, samples=_linear_swiglu_samples, bound=_swiglu_bound,
          exact="SwiGLU of a sum is exact only where it saturates; the parts have those samples"),
    fused("layernorm_bwd_add", ("residual", "dy", "x", "gamma", "mean", "rstd"), ("dx", "dgamma", "dbeta"), layernorm_bwd_add,
          samples=_norm_bwd_samples("layernorm_bwd"), exact=_norm_bwd_exact("layernorm_bwd"), bound=_norm_bwd_bound("layernorm_bwd"),
          kept=dict.fromkeys(("mean", "rstd", "dgamma", "dbeta"), "accumulate")),
    fused("rmsnorm_bwd_add", ("residual", "dy", "x", "gamma", "rstd"), ("dx", "dgamma"), rmsnorm_bwd_add,
          samples=_norm_bwd_samples("rmsnorm_bwd"), exact=_norm_bwd_exact("rmsnorm_bwd"), bound=_norm_bwd_bound("rmsnorm_bwd"),
          kept=dict.fromkeys(("rstd", "dgamma"), "accumulate")),
    fused("linear_gelu", ("x", "weight", "bias"), ("h", "y"), linear_gelu, samples=_linear_gelu_samples, bound=_gelu_bound,
          exact="GELU of a sum is exact only where it saturates; the parts have those samples"),
    fused("matmul_gelu_bwd", ("dy", "weight", "h"), ("dh",), matmul_gelu_bwd, samples=_matmul_gelu_bwd_samples,
          bound=lambda x, a: (4 * np.abs(np.matmul(x[0], x[1])) * (1 + np.abs(x[2])),),
          exact="GELU' is exact only where it saturates; the parts have those samples"),
    fused("add_layernorm", ("a", "b", "gamma", "beta"), ("s", "y", "mean", "rstd"), add_layernorm, samples=_norm_samples(True),
          bound=_norm_bound("layernorm"), kept={"mean": "accumulate", "rstd": "accumulate"},
          exact="a mean and a root are not exact; the parts have what exact samples there are"),
    fused("add_rmsnorm", ("a", "b", "gamma"), ("s", "y", "rstd"), add_rmsnorm, samples=_norm_samples(False),
          bound=_norm_bound("rmsnorm"), kept={"rstd": "accumulate"},
          exact="a root is not exact; the parts have what exact samples there are"),
)
