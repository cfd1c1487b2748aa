"""SiLU, SwiGLU and their backwards on the CPU: blocks of a flat array, all passes of a block in cache.

The sigmoid is 1/(1 + exp(-x)). Where exp overflows (x < -88.7 in float32) it is 0: silu is flushed to 0 below 2.7e-37.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.blocks import BLOCK, flat
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def silu(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x * sigmoid(x)."""
    x, y = ins[0].reshape(-1), outs[0].reshape(-1)
    t = cpu.scratch((cpu.threads, min(BLOCK, x.size)), x.dtype)

    def body(at: slice, worker: int) -> None:
        xb = x[at]
        u = t[worker, : xb.size]
        denominator(xb, u)
        np.divide(xb, u, out=y[at])

    return flat(cpu, x.size, body)


def denominator(xb: np.ndarray, u: np.ndarray) -> None:
    """u = 1 + exp(-x)."""
    np.negative(xb, out=u)
    with np.errstate(over="ignore"):
        np.exp(u, out=u)
    np.add(u, 1, out=u)


def slope(xb: np.ndarray, u: np.ndarray, y: np.ndarray) -> None:
    """y = silu(x) becomes its derivative (1 + x - y) / u, with u = 1 + exp(-x)."""
    np.subtract(xb, y, out=y)
    np.add(y, 1, out=y)
    np.divide(y, u, out=y)


def silu_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx = dy * s * (1 + x - x * s), s = sigmoid(x)."""
    dy, x, dx = ins[0].reshape(-1), ins[1].reshape(-1), outs[0].reshape(-1)
    t = cpu.scratch((cpu.threads, 2, min(BLOCK, x.size)), x.dtype)

    def body(at: slice, worker: int) -> None:
        xb = x[at]
        u, v = t[worker, 0, : xb.size], t[worker, 1, : xb.size]
        denominator(xb, u)
        np.divide(xb, u, out=v)
        slope(xb, u, v)
        np.multiply(v, dy[at], out=dx[at])

    return flat(cpu, x.size, body)


def swiglu(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = silu(gate) * up."""
    gate, up, y = ins[0].reshape(-1), ins[1].reshape(-1), outs[0].reshape(-1)
    t = cpu.scratch((cpu.threads, min(BLOCK, gate.size)), gate.dtype)

    def body(at: slice, worker: int) -> None:
        gb = gate[at]
        u = t[worker, : gb.size]
        denominator(gb, u)
        np.divide(gb, u, out=u)
        np.multiply(u, up[at], out=y[at])

    return flat(cpu, gate.size, body)


def swiglu_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dgate = dy * up * s * (1 + gate - gate * s), dup = dy * gate * s, s = sigmoid(gate)."""
    dy, gate, up, dgate, dup = (x.reshape(-1) for x in (*ins, *outs))
    t = cpu.scratch((cpu.threads, 3, min(BLOCK, gate.size)), gate.dtype)

    def body(at: slice, worker: int) -> None:
        gb, dyb = gate[at], dy[at]
        u, v, w = t[worker, 0, : gb.size], t[worker, 1, : gb.size], t[worker, 2, : gb.size]
        np.multiply(dyb, up[at], out=w)
        denominator(gb, u)
        np.divide(gb, u, out=v)
        np.multiply(v, dyb, out=dup[at])  # dy and up were read, gate is read once more: dup may lie on either of the two
        slope(gb, u, v)
        np.multiply(v, w, out=dgate[at])

    return flat(cpu, gate.size, body)


KERNELS = (
    Component(id="silu.f32.cpu", kind="kernel", backend="cpu", op="silu", implementation=silu, envelope=_ENVELOPE, inplace=((0, 0),)),
    Component(id="silu_bwd.f32.cpu", kind="kernel", backend="cpu", op="silu_bwd", implementation=silu_bwd, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
    Component(id="swiglu.f32.cpu", kind="kernel", backend="cpu", op="swiglu", implementation=swiglu, envelope=_ENVELOPE,
              inplace=((0, 0), (0, 1))),
    Component(id="swiglu_bwd.f32.cpu", kind="kernel", backend="cpu", op="swiglu_bwd", implementation=swiglu_bwd, envelope=_ENVELOPE,
              inplace=((0, 1), (1, 2), (0, 0), (1, 0))),
)
