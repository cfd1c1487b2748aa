"""Scaling and filling with constants, and casts, on the CPU: one pass over a flat array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from alpha.backends.cpu.blocks import BLOCK, flat
from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs


def scale(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x * factor, the factor rounded to x's type."""
    x, y = ins[0].reshape(-1), outs[0].reshape(-1)
    factor = x.dtype.type(attrs["factor"])

    def body(at: slice, worker: int) -> None:
        np.multiply(x[at], factor, out=y[at])

    return flat(cpu, x.size, body, light=True)


def fill(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Every element of y is the value, rounded to y's type."""
    y = outs[0].reshape(-1)
    value = np.asarray(attrs["value"]).astype(y.dtype).reshape(1)
    if attrs["dtype"] == "bf16":
        _to_bf16(value, value.copy(), np.empty(1, np.uint32), np.empty(1, np.bool_))

    def body(at: slice, worker: int) -> None:
        y[at] = value

    return flat(cpu, y.size, body, light=True)


def _to_bf16(out: np.ndarray, x: np.ndarray, bits: np.ndarray, nan: np.ndarray) -> None:
    """float32 x rounded to nearest even with 8 significand bits. Adding 0x7fff, and one more when the last bit kept is odd, carries into
    the kept bits exactly when rounding goes up; NaN is written as NaN, since a carry could turn it into something else."""
    source = x.view(np.uint32)
    np.right_shift(source, 16, out=bits)
    np.bitwise_and(bits, 1, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    np.add(bits, source, out=bits)
    np.isnan(x, out=nan)
    np.bitwise_and(bits, 0xFFFF0000, out=out.view(np.uint32))
    np.copyto(out, np.nan, where=nan)


def cast(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x in another float type, to nearest even."""
    x, y = ins[0].reshape(-1), outs[0].reshape(-1)
    if attrs["dtype"] != "bf16":
        def body(at: slice, worker: int) -> None:
            np.copyto(y[at], x[at], casting="same_kind")
    else:
        block = min(BLOCK, x.size)
        narrow = cpu.scratch((cpu.threads, block), np.float32)
        bits, nan = cpu.scratch((cpu.threads, block), np.uint32), cpu.scratch((cpu.threads, block), np.bool_)

        def body(at: slice, worker: int) -> None:
            n = at.stop - at.start
            np.copyto(narrow[worker, :n], x[at], casting="same_kind")
            _to_bf16(y[at], narrow[worker, :n], bits[worker, :n], nan[worker, :n])

    return flat(cpu, x.size, body)


def _nan(rng: np.random.Generator) -> Iterable[Sample]:
    """NaN of any payload, of either sign, is NaN in the narrower type; infinities and what is next to them stay what they are."""
    words = np.array([0, 1 << 44, 1 << 45, (1 << 51) - 1, *rng.integers(0, 1 << 51, 4)], np.uint64)
    words |= np.uint64(1 << 51)  # those that are quiet
    odd = np.concatenate([words | np.uint64(0x7FF << 52), words | np.uint64(0xFFF << 52)]).view(np.float64)
    ends = [np.inf, -np.inf, 3.38e38, -3.38e38, 0.0, -0.0]
    yield Sample(name="nan-payloads", inputs=(np.concatenate([odd, ends]),), attrs={"dtype": "bf16"}, wrt=())


KERNELS = (
    Component(id="scale.f32.cpu", kind="kernel", backend="cpu", op="scale", implementation=scale, envelope=Envelope(dtypes=("f32", "f64")),
              inplace=((0, 0),)),
    Component(id="fill.f32.cpu", kind="kernel", backend="cpu", op="fill", implementation=fill),
    Component(id="cast.f32.cpu", kind="kernel", backend="cpu", op="cast", implementation=cast,
              envelope=Envelope(dtypes=("f32", "f64", "bf16")), calls=Calls(further=_nan)),
)
