"""GELU and its backward on the CPU: blocks of a flat array, all passes of a block in cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt

import numpy as np

from alpha.backends.cpu.blocks import BLOCK, flat
from alpha.backends.cpu.lib import Cpu
from alpha.backends.cpu.special import erf_into
from alpha.component import Component, Envelope
from alpha.types import Attrs

_C = sqrt(2 / pi)
_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def gelu(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x * Phi(x); `approximate` is 'tanh' or 'none' (erf)."""
    x, y = ins[0].reshape(-1), outs[0].reshape(-1)
    t = cpu.scratch((cpu.threads, 3, min(BLOCK, x.size)), x.dtype)

    def body(at: slice, worker: int) -> None:
        xb, yb = x[at], y[at]
        u = t[worker, 0, : xb.size]
        if attrs["approximate"] == "tanh":
            np.multiply(xb, xb, out=u)
            np.multiply(u, 0.044715 * _C, out=u)
            np.add(u, _C, out=u)
            np.multiply(u, xb, out=u)
            np.tanh(u, out=u)
        else:
            np.multiply(xb, sqrt(0.5), out=u)
            erf_into(u, t[worker, 1:3, : xb.size])
        np.add(u, 1, out=u)
        np.multiply(u, 0.5, out=u)
        np.multiply(u, xb, out=yb)

    return flat(cpu, x.size, body)


def gelu_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx = dy * (Phi(x) + x * phi(x)), in the form that `approximate` names."""
    dy, x, dx = ins[0].reshape(-1), ins[1].reshape(-1), outs[0].reshape(-1)
    t = cpu.scratch((cpu.threads, 4, min(BLOCK, x.size)), x.dtype)

    def body(at: slice, worker: int) -> None:
        xb, dyb, dxb = x[at], dy[at], dx[at]
        u, v = t[worker, 0, : xb.size], t[worker, 1, : xb.size]
        if attrs["approximate"] == "tanh":
            np.multiply(xb, xb, out=v)
            np.multiply(v, 0.044715 * _C, out=u)
            np.add(u, _C, out=u)
            np.multiply(u, xb, out=u)
            np.tanh(u, out=u)  # u = tanh(inner)
            np.multiply(v, 3 * 0.044715 * _C, out=v)
            np.add(v, _C, out=v)
            np.multiply(v, xb, out=v)  # v = x * inner'
            w = t[worker, 2, : xb.size]
            np.multiply(u, u, out=w)
            np.subtract(1, w, out=w)
            np.multiply(v, w, out=v)  # v = x * inner' * (1 - tanh^2)
            np.add(u, 1, out=u)
            np.add(u, v, out=u)
            np.multiply(u, 0.5, out=u)
        else:
            np.multiply(xb, sqrt(0.5), out=u)
            erf_into(u, t[worker, 1:4, : xb.size])
            np.add(u, 1, out=u)
            np.multiply(u, 0.5, out=u)
            np.multiply(xb, xb, out=v)
            np.multiply(v, -0.5, out=v)
            np.exp(v, out=v)
            np.multiply(v, 1 / sqrt(2 * pi), out=v)
            np.multiply(v, xb, out=v)
            np.add(u, v, out=u)
        np.multiply(u, dyb, out=dxb)

    return flat(cpu, x.size, body)


KERNELS = (
    Component(id="gelu.f32.cpu", kind="kernel", backend="cpu", op="gelu", implementation=gelu, envelope=_ENVELOPE, inplace=((0, 0),)),
    Component(id="gelu_bwd.f32.cpu", kind="kernel", backend="cpu", op="gelu_bwd", implementation=gelu_bwd, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
)
