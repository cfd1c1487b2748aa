"""Fused kernels on the CPU: the parts' own kernels, run one after the other on a panel of rows while it is in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.kernels.add import add
from alpha.backends.cpu.kernels.gelu import gelu, gelu_bwd
from alpha.backends.cpu.kernels.layernorm import layernorm
from alpha.backends.cpu.kernels.matmul import matmul
from alpha.backends.cpu.kernels.rmsnorm import rmsnorm
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope, Limit
from alpha.ops.spec import Sample
from alpha.types import Attrs

_PANEL_BYTES = 1 << 20
_ENVELOPE = Envelope(dtypes=("f32", "f64"))
_PLAIN_LEFT = Envelope(dtypes=("f32", "f64"), limits=(
    Limit(text="a left operand that is not transposed and a right one of two axes",
          holds=lambda types, attrs: not attrs.get("trans_a", False) and len(types[1].shape) == 2),))


def _rows(x: np.ndarray, columns: int) -> np.ndarray:
    return x.reshape(-1, columns)


def _cut(rows: int, row_bytes: int) -> list[slice]:
    step = max(16, _PANEL_BYTES // max(1, row_bytes) // 16 * 16)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def linear_gelu(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """h = x W + bias; y = gelu(h): GELU on each panel of h right after its product."""
    x, h, y = _rows(ins[0], ins[0].shape[-1]), _rows(outs[0], outs[0].shape[-1]), _rows(outs[1], outs[1].shape[-1])
    parts = _cut(h.shape[0], h.shape[1] * h.itemsize)

    def bind(serial: Cpu, i: int) -> Sequence[Callable[[], None]]:
        at = parts[i]
        return (matmul(serial, [x[at], ins[1], ins[2]], [h[at]], {"trans_b": attrs["trans_b"]}),
                gelu(serial, [h[at]], [y[at]], {"approximate": attrs["approximate"]}))

    return cpu.panels(len(parts), bind)


def matmul_gelu_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dh = gelu'(h) * (dy W): the product goes to its place in dh, which GELU' then overwrites."""
    dy, h, dh = _rows(ins[0], ins[0].shape[-1]), _rows(ins[2], ins[2].shape[-1]), _rows(outs[0], outs[0].shape[-1])
    parts = _cut(h.shape[0], h.shape[1] * h.itemsize)

    def bind(serial: Cpu, i: int) -> Sequence[Callable[[], None]]:
        at = parts[i]
        return (matmul(serial, [dy[at], ins[1]], [dh[at]], {"trans_b": attrs.get("trans_b", False)}),
                gelu_bwd(serial, [dh[at], h[at]], [dh[at]], {"approximate": attrs["approximate"]}))

    return cpu.panels(len(parts), bind)


def matmul_accumulate(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = into + a b: each panel of the product is made in scratch and added while in cache."""
    into, a, b, y = ins[0], ins[1], ins[2], outs[0]
    if y.ndim != 2:
        product = cpu.scratch(y.shape, y.dtype)
        multiply, sum_up = matmul(cpu, [a, b], [product], attrs), add(cpu, [into, product], [y], {})

        def whole() -> None:
            multiply()
            sum_up()
        return whole
    left = a.T if attrs.get("trans_a", False) else a
    right = b.T if attrs.get("trans_b", False) else b
    parts = _cut(y.shape[0], y.shape[1] * y.itemsize)
    if len(parts) < 2 and y.shape[0] >= 32:  # two panels at least, so that two workers share one product
        half = (y.shape[0] // 2 + 15) // 16 * 16
        parts = [slice(0, half), slice(half, y.shape[0])]
    product = cpu.scratch((cpu.threads, max(p.stop - p.start for p in parts), y.shape[1]), y.dtype)

    def body(i: int, worker: int) -> None:
        at = parts[i]
        p = product[worker, : at.stop - at.start]
        np.matmul(left[at], right, out=p)
        np.add(into[at], p, out=y[at])

    return cpu.items(len(parts), body)


def _add_norm(norm: Callable[..., Callable[[], None]], scales: int) -> Callable[..., Callable[[], None]]:
    def add_norm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        c = ins[0].shape[-1]
        a, b, s = (_rows(x, c) for x in (ins[0], ins[1], outs[0]))
        y, stats = _rows(outs[1], c), [x.reshape(-1) for x in outs[2:]]
        step = cpu.block_rows(a.shape[0], c * a.itemsize)
        parts = [slice(start, min(start + step, a.shape[0])) for start in range(0, a.shape[0], step)]

        def bind(serial: Cpu, i: int) -> Sequence[Callable[[], None]]:
            at = parts[i]
            return (add(serial, [a[at], b[at]], [s[at]], {}),
                    norm(serial, [s[at], *ins[2 : 2 + scales]], [y[at], *(x[at] for x in stats)], attrs))

        return cpu.panels(len(parts), bind)
    return add_norm


def add_layernorm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """s = a + b; y, mean, rstd = layernorm(s), panel by panel."""
    return _add_norm(layernorm, 2)(cpu, ins, outs, attrs)


def add_rmsnorm(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """s = a + b; y, rstd = rmsnorm(s), panel by panel."""
    return _add_norm(rmsnorm, 1)(cpu, ins, outs, attrs)


def _accumulated(rng: np.random.Generator) -> Iterable[Sample]:
    """A batch; and a sum of more than one block of rows."""
    yield Sample(name="batch", inputs=tuple(rng.standard_normal(x) for x in ((2, 5, 7), (2, 5, 3), (2, 3, 7))), wrt=())
    yield Sample(name="trans-b", inputs=tuple(rng.standard_normal(x) for x in ((37, 7), (37, 3), (7, 3))), attrs={"trans_b": True}, wrt=())
    yield Sample(name="blocks", inputs=tuple(rng.standard_normal(x) for x in ((33, 8200), (33, 3), (3, 8200))), wrt=())


def _panels(rng: np.random.Generator) -> Iterable[Sample]:
    """A result of more than one panel."""
    yield Sample(name="panels", inputs=tuple(rng.standard_normal(x) for x in ((530, 3), (510, 3), (510,))),
                 attrs={"trans_b": True, "approximate": "tanh"}, wrt=())


def _panels_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    """A result of more than one panel."""
    yield Sample(name="panels", inputs=tuple(rng.standard_normal(x) for x in ((530, 3), (3, 510), (530, 510))),
                 attrs={"approximate": "tanh"}, wrt=())


_SAME = Envelope(dtypes=("f32", "f64"), limits=(
    Limit(text="two addends of one shape", holds=lambda types, attrs: types[0].shape == types[1].shape),))

KERNELS = (
    Component(id="linear_gelu.f32.cpu", kind="kernel", backend="cpu", op="linear_gelu", implementation=linear_gelu, envelope=_PLAIN_LEFT,
              calls=Calls(repeated=_panels)),
    Component(id="matmul_gelu_bwd.f32.cpu", kind="kernel", backend="cpu", op="matmul_gelu_bwd", implementation=matmul_gelu_bwd,
              envelope=_PLAIN_LEFT, calls=Calls(repeated=_panels_bwd)),
    Component(id="matmul_accumulate.f32.cpu", kind="kernel", backend="cpu", op="matmul_accumulate", implementation=matmul_accumulate,
              envelope=_ENVELOPE, inplace=((0, 0),), calls=Calls(further=_accumulated)),
    Component(id="add_layernorm.f32.cpu", kind="kernel", backend="cpu", op="add_layernorm", implementation=add_layernorm, envelope=_SAME,
              inplace=((0, 0),)),
    Component(id="add_rmsnorm.f32.cpu", kind="kernel", backend="cpu", op="add_rmsnorm", implementation=add_rmsnorm, envelope=_SAME,
              inplace=((0, 0),)),
)
