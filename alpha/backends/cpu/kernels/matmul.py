"""Matrix products on the CPU: BLAS on one thread each, the result cut into panels that the workers share.

A panel is a run of rows or columns of one result, or a run of whole results of a batch; which one, and how long, depends on shapes only,
so the bits do not depend on the number of workers. K is never cut. Every product writes straight into its panel of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs

_STEP = 16
"""Panel lengths are multiples of this, the row and column unrolling of the BLAS kernels on AVX-512 and AVX2."""


def panels(m: int, n: int, k: int) -> int:
    """Number of panels of one result: 1 while waking a worker would cost as much as the product, then about 0.25 GFLOP each."""
    flops = 2 * m * n * k
    return 1 if flops < 2**22 else 2 if flops < 2**28 else 4 if flops < 2**31 else 8


def _cut(length: int, parts: int) -> list[slice]:
    step = max(1, -(-length // parts))
    step = -(-step // _STEP) * _STEP if parts > 1 else step
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _products(a: np.ndarray, b: np.ndarray, y: np.ndarray, bias: np.ndarray | None) -> list[tuple]:
    """(a, b, bias, y) views of every panel; a [..., M, K], b [K, N] or [..., K, N], y [..., M, N]."""
    m, n = y.shape[-2:]
    k = a.shape[-1]
    if y.ndim > 2:
        lead = prod(y.shape[:-2])
        a, y = a.reshape(lead, m, k), y.reshape(lead, m, n)
        b = b.reshape(lead, k, n) if b.ndim > 2 else np.broadcast_to(b, (lead, k, n))
        if panels(m, n, k) == 1:  # small results: runs of whole ones
            return [(a[at], b[at], bias, y[at]) for at in _cut(lead, min(lead, panels(lead * m, n, k)))]
        return [p for i in range(lead) for p in _products(a[i], b[i], y[i], bias)]
    if n > m:
        return [(a, b[:, at], None if bias is None else bias[at], y[:, at]) for at in _cut(n, panels(m, n, k))]
    return [(a[at], b, bias, y[at]) for at in _cut(m, panels(m, n, k))]


def matmul(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = op(a) @ op(b) + bias; the bias is added to a panel right after its product."""
    a, b, y = ins[0], ins[1], outs[0]
    if attrs.get("trans_a", False):
        a = a.swapaxes(-1, -2)
    elif b.ndim == 2:  # one product over all leading axes
        a, y = a.reshape(-1, a.shape[-1]), y.reshape(-1, y.shape[-1])
    if attrs.get("trans_b", False):
        b = b.swapaxes(-1, -2)
    parts = _products(a, b, y, ins[2] if len(ins) == 3 else None)

    def body(i: int, worker: int) -> None:
        a_p, b_p, bias_p, y_p = parts[i]
        np.matmul(a_p, b_p, out=y_p)
        if bias_p is not None:
            np.add(y_p, bias_p, out=y_p)

    return cpu.items(len(parts), body)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    """A batch whose every product is worth more than one panel."""
    yield Sample(name="batch-of-panels", inputs=(rng.standard_normal((2, 160, 33)), rng.standard_normal((2, 33, 400))), wrt=())


KERNELS = (
    Component(id="matmul.f32.cpu", kind="kernel", backend="cpu", op="matmul", implementation=matmul,
              envelope=Envelope(dtypes=("f32", "f64")), calls=Calls(further=_samples)),
)
