"""Data movement on the CPU: transpose, split, concat, broadcast, row gather. Nothing is computed, so every result is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod

import numpy as np

from alpha.backends.cpu.blocks import cuts, single_pass, zipped
from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.errors import InputError
from alpha.ops.spec import Sample
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64", "bf16"))
_TILE = 128
"""Side of the square tiles of a transposition that moves the contiguous axis."""

_ALIASED = 1024
"""Rows a multiple of this many bytes apart fall into the same few cache sets: tiles are then long and only 16 rows of x wide."""


def _assign(src: np.ndarray, dst: np.ndarray) -> None:
    np.copyto(dst, src)


def _copies(cpu: Cpu, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Callable[[], None]:
    """Closure of `dst[...] = src` for (dst, src) of equal shapes, in blocks."""
    parts = [(dst[at], src[at]) for dst, src in pairs for at in cuts(dst.shape)]
    def body(i: int, worker: int) -> None:
        np.copyto(*parts[i])

    return single_pass(cpu, len(parts), sum(dst.size for dst, _ in pairs), body)


def transpose(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x with its axes permuted."""
    perm: tuple[int, ...] = tuple(attrs["perm"])  # type: ignore[arg-type]
    x, y = ins[0].transpose(perm), outs[0]
    last = len(perm) - 1
    if last < 1 or perm[last] == last:
        return _copies(cpu, [(y, x)])
    inner = perm.index(last)  # the axis of y along which x is contiguous
    tall, wide = (1024, 16) if x.strides[last] % _ALIASED == 0 else (_TILE, _TILE)
    pairs = []
    for start in range(0, y.shape[inner], tall):
        rows = (slice(None),) * inner + (slice(start, start + tall),)
        for left in range(0, y.shape[last], wide):
            at = (*rows, ..., slice(left, left + wide))
            pairs.append((y[at], x[at]))
    return _copies(cpu, pairs)


def _joined(parts: Sequence[np.ndarray], whole: np.ndarray, axis: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(part, its place in the whole) as matrices: axes before `axis`, then the rest."""
    axis %= whole.ndim
    outer = prod(whole.shape[:axis])
    wide = whole.reshape(outer, prod(whole.shape[axis:]))
    pairs, start = [], 0
    for p in parts:
        width = prod(p.shape[axis:])
        pairs.append((p.reshape(outer, width), wide[:, start : start + width]))
        start += width
    return pairs


def concat(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = the inputs joined along `axis`."""
    return _copies(cpu, [(place, part) for part, place in _joined(ins, outs[0], int(attrs["axis"]))])  # type: ignore[call-overload]


def split(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """The outputs are consecutive pieces of x along `axis`."""
    return _copies(cpu, _joined(outs, ins[0], int(attrs["axis"])))  # type: ignore[call-overload]


def broadcast_to(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y = x repeated along its stretched axes."""
    return zipped(cpu, _assign, outs[0], ins[0])


def _flat_rows(cpu: Cpu, index: np.ndarray, t: int) -> tuple[np.ndarray, Callable[[], None]]:
    """(row numbers in [B*T] as scratch, closure that fills them from `index` and refuses positions outside [0, T))."""
    at = cpu.scratch((index.size,), np.int64)
    base = np.arange(index.size, dtype=np.int64) * t

    def update() -> None:
        low, high = index.min(), index.max()
        if low < 0 or high >= t:
            raise InputError("take_row: a position is outside its sequence", came=int(low if low < 0 else high), expected=f"0 to {t - 1}")
        np.add(base, index, out=at)

    return at, update


def take_row(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y[b] = x[b, index[b]]."""
    x, y = ins[0].reshape(-1, ins[0].shape[2]), outs[0]
    at, update = _flat_rows(cpu, ins[1], ins[0].shape[1])

    def run() -> None:
        update()
        np.take(x, at, axis=0, out=y, mode="clip")  # positions are checked; other modes copy the output

    return run


def take_row_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dx[b, index[b]] = dy[b], zero elsewhere."""
    dy, dx = ins[0], outs[0].reshape(-1, outs[0].shape[2])
    at, update = _flat_rows(cpu, ins[1], outs[0].shape[1])

    def run() -> None:
        update()
        dx.fill(0)
        dx[at] = dy

    return run


def _aliased(rng: np.random.Generator) -> Iterable[Sample]:
    """Rows 1024 bytes apart, and one more than a tall tile of them."""
    yield Sample(name="aliased", inputs=(rng.standard_normal((1025, 256)),), attrs={"perm": (1, 0)}, wrt=())


def _empty(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="no-rows", inputs=(np.zeros((0, 3)), np.zeros((0, 2))), attrs={"axis": 1}, wrt=())
    yield Sample(name="no-elements", inputs=(np.zeros((1, 0)), np.zeros((1, 0))), attrs={"axis": 1}, wrt=())


def _empty_pieces(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="no-rows", inputs=(np.zeros((0, 5)),), attrs={"axis": 1, "sizes": (3, 2)}, wrt=())


def _outside(rng: np.random.Generator, shape: tuple[int, ...], attrs: dict[str, object]) -> Iterable[Sample]:
    """Positions past either end of a sequence of 7."""
    for name, wrong in (("past-the-last", 7), ("negative", -1)):
        yield Sample(name=name, inputs=(rng.standard_normal(shape), np.array([3, wrong, 0], np.int32)), attrs=attrs)


KERNELS = (
    Component(id="transpose.f32.cpu", kind="kernel", backend="cpu", op="transpose", implementation=transpose, envelope=_ENVELOPE,
              calls=Calls(further=_aliased)),
    Component(id="concat.f32.cpu", kind="kernel", backend="cpu", op="concat", implementation=concat, envelope=_ENVELOPE,
              calls=Calls(further=_empty)),
    Component(id="split.f32.cpu", kind="kernel", backend="cpu", op="split", implementation=split, envelope=_ENVELOPE,
              calls=Calls(further=_empty_pieces)),
    Component(id="broadcast_to.f32.cpu", kind="kernel", backend="cpu", op="broadcast_to", implementation=broadcast_to, envelope=_ENVELOPE),
    Component(id="take_row.f32.cpu", kind="kernel", backend="cpu", op="take_row", implementation=take_row, envelope=_ENVELOPE,
              calls=Calls(refused=partial(_outside, shape=(3, 7, 5), attrs={}))),
    Component(id="take_row_bwd.f32.cpu", kind="kernel", backend="cpu", op="take_row_bwd", implementation=take_row_bwd, envelope=_ENVELOPE,
              calls=Calls(refused=partial(_outside, shape=(3, 5), attrs={"rows": 7}))),
)
