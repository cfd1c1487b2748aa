"""SwiGLU of gate and up side by side on the CPU, and its backward: blocks of rows, all passes of a block in cache. See silu.py.

Legend: N rows, F columns of each half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.kernels.silu import denominator, slope
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def swiglu_packed(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = silu(gate) * up."""
    f = outs[0].shape[-1]
    x_N2F, y_NF = ins[0].reshape(-1, 2 * f), outs[0].reshape(-1, f)
    gate, up, (n, row_bytes) = x_N2F[:, :f], x_N2F[:, f:], (len(y_NF), f * y_NF.itemsize)
    t = cpu.scratch((cpu.threads, cpu.block_rows(n, row_bytes), f), y_NF.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        gb, u = gate[start:stop], t[worker, : stop - start]
        denominator(gb, u)
        np.divide(gb, u, out=u)
        np.multiply(u, up[start:stop], out=y_NF[start:stop])

    return cpu.rows(n, row_bytes, body)


def swiglu_packed_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx: dgate = dy * up * s * (1 + gate - gate * s) beside dup = dy * gate * s, s = sigmoid(gate); may be written over x."""
    f = ins[0].shape[-1]
    dy_NF, x_N2F, dx_N2F = ins[0].reshape(-1, f), ins[1].reshape(-1, 2 * f), outs[0].reshape(-1, 2 * f)
    gate, up, dgate, dup = x_N2F[:, :f], x_N2F[:, f:], dx_N2F[:, :f], dx_N2F[:, f:]
    n, row_bytes = len(dy_NF), f * dy_NF.itemsize
    t = cpu.scratch((cpu.threads, 3, cpu.block_rows(n, row_bytes), f), dy_NF.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        gb, dyb = gate[start:stop], dy_NF[start:stop]
        u, v, w = t[worker, :, : stop - start]
        np.multiply(dyb, up[start:stop], out=w)
        denominator(gb, u)
        np.divide(gb, u, out=v)
        np.multiply(v, dyb, out=dup[start:stop])  # up was read
        slope(gb, u, v)
        np.multiply(v, w, out=dgate[start:stop])

    return cpu.rows(n, row_bytes, body)


KERNELS = (
    Component(id="swiglu_packed.f32.cpu", kind="kernel", backend="cpu", op="swiglu_packed", implementation=swiglu_packed,
              envelope=_ENVELOPE),
    Component(id="swiglu_packed_bwd.f32.cpu", kind="kernel", backend="cpu", op="swiglu_packed_bwd", implementation=swiglu_packed_bwd,
              envelope=_ENVELOPE, inplace=((0, 1),)),
)
