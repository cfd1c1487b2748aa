"""The fused rows. Each is its composition; everything else about it is derived (compose.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from alpha.ops.compose import fused
from alpha.ops.spec import Sample


def matmul_accumulate(emit: Any, into: Any, a: Any, b: Any, *, trans_a: Any = False, trans_b: Any = False) -> Any:
    """into + a b: a weight gradient added to its buffer."""
    return (emit("accumulate", into, emit("matmul", a, b, trans_a=trans_a, trans_b=trans_b)),)


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


def _wgrad_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for k, m, n in ((1, 1, 1), (7, 3, 5), (129, 65, 33), (31, 128, 127)):
        into, a, b = rng.standard_normal((m, n)), rng.standard_normal((k, m)), rng.standard_normal((k, n))
        yield Sample(name=f"wgrad-{k}x{m}x{n}", inputs=(into, a, b), attrs={"trans_a": True})
    yield Sample(name="plain", inputs=(rng.standard_normal((9, 4)), rng.standard_normal((9, 6)), rng.standard_normal((6, 4))), attrs={})


def _wgrad_exact(rng: np.random.Generator) -> Iterable[Sample]:
    draw = lambda *s: rng.integers(-8, 8, s).astype(float)  # noqa: E731
    yield Sample(name="integers", inputs=(draw(65, 33), draw(257, 65), draw(257, 33)), attrs={"trans_a": True})


def _linear_gelu_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for approximate in ("tanh", "none"):
        for lead, k, n in (((1,), 1, 1), ((3, 5), 7, 9), ((2, 65), 33, 129), ((257,), 16, 31)):
            yield Sample(name=f"{approximate}-{'x'.join(map(str, lead))}-{k}-{n}", attrs={"trans_b": True, "approximate": approximate},
                         inputs=(rng.standard_normal((*lead, k)), rng.standard_normal((n, k)) / np.sqrt(k), rng.standard_normal(n)))


def _matmul_gelu_bwd_samples(rng: np.random.Generator) -> Iterable[Sample]:
    for approximate in ("tanh", "none"):
        for lead, k, n in (((1,), 1, 1), ((3, 5), 7, 9), ((2, 65), 33, 129), ((257,), 16, 31)):
            yield Sample(name=f"{approximate}-{'x'.join(map(str, lead))}-{k}-{n}", attrs={"approximate": approximate},
                         inputs=(rng.standard_normal((*lead, k)), rng.standard_normal((k, n)) / np.sqrt(k),
                                 rng.standard_normal((*lead, n))))


def _norm_samples(beta: bool) -> Any:
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        for shape in ((1, 8), (5, 7), (3, 43, 128), (129, 65)):
            c = shape[-1]
            scales = (rng.standard_normal(c), rng.standard_normal(c))[: 2 if beta else 1]
            yield Sample(name="x".join(map(str, shape)), attrs={"eps": 1e-5},
                         inputs=(rng.standard_normal(shape), 3 * rng.standard_normal(shape) + 1, *scales))
    return samples


def _gelu_bound(x: tuple[np.ndarray, ...], attrs: Any) -> Any:
    """As in gelu.py: up to 4 ulp of the vector library's tanh or erf, times |h| (h itself: 0)."""
    h = np.matmul(x[0], x[1].swapaxes(-1, -2)) + x[2]
    return 0.0, 4 * np.abs(h)


ROWS = (
    fused("matmul_accumulate", ("into", "a", "b"), ("y",), matmul_accumulate, samples=_wgrad_samples, exact=_wgrad_exact),
    fused("linear_gelu", ("x", "weight", "bias"), ("h", "y"), linear_gelu, samples=_linear_gelu_samples, bound=_gelu_bound,
          exact="GELU of a sum is exact only where it saturates; the parts have those samples"),
    fused("matmul_gelu_bwd", ("dy", "weight", "h"), ("dh",), matmul_gelu_bwd, samples=_matmul_gelu_bwd_samples,
          bound=lambda x, a: (4 * np.abs(np.matmul(x[0], x[1])) * (1 + np.abs(x[2])),),
          exact="GELU' is exact only where it saturates; the parts have those samples"),
    fused("add_layernorm", ("a", "b", "gamma", "beta"), ("s", "y", "mean", "rstd"), add_layernorm, samples=_norm_samples(True),
          exact="a mean and a root are not exact; the parts have what exact samples there are"),
    fused("add_rmsnorm", ("a", "b", "gamma"), ("s", "y", "rstd"), add_rmsnorm, samples=_norm_samples(False),
          exact="a root is not exact; the parts have what exact samples there are"),
)
