"""Rotary position embedding on the CPU: y = x * cos + swapped(x) * (-sin, +sin), over whole rows of heads.

The partner of each entry is copied into place first, so that the three arithmetic passes run along rows of H x D entries. Cosines and
sines of positions 0..T-1 are a table made once per shape from float64; consecutive positions read it in place, others are gathered, and
positions beyond it are computed on the spot, from the same formula and so to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs


def _turns(positions: np.ndarray, frequencies: tuple[float, ...], layout: str, heads: int, inverse: bool, dtype: np.dtype) -> np.ndarray:
    """[2, positions, heads * d]: cosines, and sines with the sign that each entry of a pair needs."""
    angle = positions[:, None] * np.array(frequencies)
    cos, sin = np.cos(angle), -np.sin(angle) if inverse else np.sin(angle)
    pairs = np.stack([np.stack([cos, cos], 1), np.stack([-sin, sin], 1)])  # [2, positions, first or second of the pair, d/2]
    row = pairs if layout == "half" else pairs.swapaxes(2, 3)
    return np.tile(row.reshape(2, len(positions), 2 * len(frequencies)), (1, 1, heads)).astype(dtype)


@lru_cache(maxsize=16)
def _table(rows: int, frequencies: tuple[float, ...], layout: str, heads: int, inverse: bool, dtype: np.dtype) -> np.ndarray:
    table = _turns(np.arange(rows), frequencies, layout, heads, inverse, dtype)
    table.flags.writeable = False
    return table


def rope(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Turn each pair by position * base^(-2i/D); `inverse` turns back."""
    d = ins[0].shape[-1]
    return turn(cpu, ins, outs, attrs, tuple((float(attrs["base"]) ** (-2.0 * np.arange(d // 2) / d)).tolist()))  # type: ignore[arg-type]


def turn(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs,
         frequencies: tuple[float, ...]) -> Callable[[], None]:
    """Turn pair i by position * frequencies[i]; `inverse` turns back."""
    b, t, h, d = ins[0].shape
    x, y, positions = ins[0].reshape(b * t, h * d), outs[0].reshape(b * t, h * d), ins[1].reshape(-1)
    half = attrs["layout"] == "half"
    what = frequencies, str(attrs["layout"]), h, bool(attrs.get("inverse", False)), x.dtype
    table = _table(t, *what)
    block = min(t, cpu.block_rows(b * t, x.itemsize * h * d))
    starts = [(s, min(s + block, (s // t + 1) * t)) for first in range(0, b * t, t) for s in range(first, first + t, block)]
    partners = cpu.scratch((cpu.threads, block, h * d), x.dtype)
    gathered = cpu.scratch((cpu.threads, 2, block, h * d), x.dtype)

    def turns(at: np.ndarray, worker: int) -> np.ndarray:
        n, first = len(at), int(at[0])
        if 0 <= first and first + n <= t and int(at[-1]) == first + n - 1 and bool((at[1:] - at[:-1] == 1).all()):
            return table[:, first : first + n]
        if 0 <= int(at.min()) and int(at.max()) < t:
            return np.take(table, at, axis=1, out=gathered[worker, :, :n], mode="clip")
        return _turns(at, *what)

    def body(i: int, worker: int) -> None:
        start, stop = starts[i]
        xb, yb, partner = x[start:stop], y[start:stop], partners[worker, : stop - start]
        shape = (stop - start, h, 2, d // 2) if half else (stop - start, h, d // 2, 2)
        source = xb.reshape(shape)
        np.copyto(partner.reshape(shape), source[:, :, ::-1] if half else source[..., ::-1])
        cos, sin = turns(positions[start:stop], worker)
        np.multiply(partner, sin, out=partner)
        np.multiply(xb, cos, out=yb)
        np.add(yb, partner, out=yb)

    return cpu.items(len(starts), body)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    """Two bases in one process; positions before the first, and past those that the table holds, in a row and apart."""
    count = np.arange(9, dtype=np.int32)
    for name, positions, base in (
        ("base", count, 10000.0), ("other-base", count, 500000.0), ("from-one", count + 1, 10000.0), ("negative", count - 3, 10000.0),
        ("negative-apart", -2 * count, 10000.0), ("past-apart", 2 * count, 10000.0),
        ("swapped", np.array([0, 2, 1, *range(3, 9)], np.int32), 10000.0), ("apart", (5 * count % 9).astype(np.int32), 10000.0)):
        yield Sample(name=name, inputs=(rng.standard_normal((1, 9, 2, 6)), positions[None]), attrs={"base": base, "layout": "half"}, wrt=())
    # samples longer than a block of rows, and no multiple of one: what begins in one sample ends there, also where it is turned in place
    yield Sample(name="blocks-of-samples", inputs=(rng.standard_normal((2, 9, 1, 1 << 14)), np.stack([count, count + 1])),
                 attrs={"base": 10000.0, "layout": "half"}, wrt=())


KERNELS = (
    Component(id="rope.f32.cpu", kind="kernel", backend="cpu", op="rope", implementation=rope, envelope=Envelope(dtypes=("f32", "f64")),
              inplace=((0, 0),), calls=Calls(further=_samples)),
)
