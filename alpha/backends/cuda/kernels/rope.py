"""Rotary position embedding of packed query and key heads on the GPU (kernels/rope). bf16; turns in fp32, computed once per plan.

The leading heads of each row are turned, in place or not. Envelope: head_dim a multiple of 16, 16 to 512; positions i32 [rows], below
`table_rows` (else the row becomes NaN); strides in elements between rows, multiples of 16 bytes. Turns: float2 [table_rows, head_dim / 2].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, Drawn, Large, alike, bf16, i32, plain
from alpha.backends.cuda.cubins_of import Signature, cubins_of
from alpha.backends.cuda.launches import PER_VECTOR, Operation, addresses, ceil_div, kernel, launch, require, structure
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, in_place
from alpha.component import Component, Envelope, Limit
from alpha.ops.spec import Sample
from alpha.types import Attrs, TensorType

TURNS = 8192
"""Positions that a table of turns covers at least: a row beyond its table becomes NaN."""

THREADS = 128  # as in kernels/rope/rope.cu


@dataclass(frozen=True, kw_only=True)
class RopeProblem:
    """What is computed. `inverse` turns back (the backward pass). `stride`: elements from one row of x, and of y, to the next."""

    rows: int
    heads: int
    head_dim: int
    table_rows: int
    stride: int
    layout: Literal["half", "interleaved"] = "half"
    inverse: bool = False

    def check(self) -> None:
        """ShapeError naming the limit that this problem breaks."""
        n, dense = PER_VECTOR, self.heads * self.head_dim
        require(
            f"the rope kernel: {self}",
            [
                (min(self.rows, self.heads, self.table_rows) >= 1, str(self), "sizes of at least 1"),
                (self.rows < 2**31 and dense < 2**31, str(self), "sizes below 2^31"),
                (
                    16 <= self.head_dim <= 64 * n and self.head_dim % 16 == 0,
                    f"head_dim {self.head_dim}",
                    f"a multiple of 16, 16 to {64 * n}",
                ),
                (self.stride >= dense and self.stride % n == 0, f"stride {self.stride}", f"a multiple of {n}, at least {dense}"),
            ],
        )


_Rope = structure(
    "_Rope",
    "x y positions table",
    ("x_stride", ctypes.c_int64),
    ("y_stride", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("rows", "heads", "head_dim", "table_rows", "lanes")),
)


def _defines(layout: str, inverse: bool, deep: int = 1) -> dict[str, object]:
    return {"ROPE_LAYOUT": int(layout == "interleaved"), "ROPE_INVERSE": int(inverse), "ROPE_DEEP": deep}


def _deep(rounds: int) -> int:
    """Heads in flight of a thread that walks over `rounds` of them: up to 5, with few left over."""
    return rounds if rounds <= 5 else min((5, 4, 3), key=lambda deep: rounds % deep)


def table_bytes(table_rows: int, head_dim: int) -> int:
    """Length of the table of turns."""
    return 4 * table_rows * head_dim


def table(table_rows: int, head_dim: int, *, base: float, out: int) -> Operation:
    """Writes cos and sin of position * base^(-2i/head_dim) for all positions below `table_rows`."""
    require("the table of rope", [(table_rows >= 1 and head_dim >= 2 and base > 0, f"{table_rows}, {head_dim}, {base}", "positive")])
    addresses("rope table", out=out)
    half = head_dim // 2
    run = launch(
        kernel("rope/rope.cu", "rope_table", _defines("half", False)),
        ceil_div(table_rows * half, 256),
        256,
        ctypes.c_uint64(out),
        ctypes.c_double(base),
        ctypes.c_int32(table_rows),
        ctypes.c_int32(half),
    )
    return Operation(f"rope table {table_rows}x{head_dim}", (run,), table_bytes(table_rows, head_dim))


def rope(problem: RopeProblem, *, x: int, y: int, positions: int, turns: int) -> Operation:
    """y = x turned, the first `heads` heads of each row; x and y may be one. Other columns of y are left alone."""
    problem.check()
    addresses("rope", x=x, y=y, turns=turns)
    addresses("rope", 4, positions=positions)
    p = problem
    lanes = p.head_dim // (2 * PER_VECTOR)
    arguments = _Rope(x, y, positions, turns, p.stride, p.stride, p.rows, p.heads, p.head_dim, p.table_rows, lanes)
    of = kernel("rope/rope.cu", "rope", _defines(p.layout, p.inverse, _deep(ceil_div(p.heads, 32 // lanes))))
    return Operation(f"rope {p}", (launch(of, ceil_div(p.rows, THREADS // 32), THREADS, arguments),), 4 * p.rows * p.heads * p.head_dim)


# Binder ---------------------------------------------------------------------------------------------------------------------------------


def _problem(x: TensorType, attrs: Attrs) -> RopeProblem:
    heads, kv_heads = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    width = x.shape[-1]
    return RopeProblem(rows=prod(x.shape[:-1]), heads=heads + kv_heads, head_dim=width // (heads + 2 * kv_heads), stride=width,
                       table_rows=max(TURNS, x.shape[-2]), layout=attrs["layout"], inverse=bool(attrs["inverse"]))  # type: ignore[arg-type]


def rope_packed(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = qkv with its query and key heads turned."""
    x, positions = ins
    problem, base = _problem(x.type, attrs), float(attrs["base"])  # type: ignore[arg-type]
    rows, dim = problem.table_rows, problem.head_dim

    def write(address: int, stream: int) -> None:
        table(rows, dim, base=base, out=address)(stream)

    turns = gpu.constant(("rope turns", rows, dim, base), lambda: (table_bytes(rows, dim), write))
    y = outs[0].address
    return in_place([(outs[0], x)], rope(problem, x=y, y=y, positions=positions.address, turns=turns.address))


def _compiled() -> Iterable[Signature]:
    """Head counts, on which the number of heads in flight depends, both layouts, both directions."""
    for layout in ("half", "interleaved"):
        for inverse in (False, True):
            for heads in range(1, 65):
                types = [TensorType((1, 8, (heads + 2) * 128), "bf16"), TensorType((1, 8), "i32")]
                yield types, {"heads": heads, "kv_heads": 1, "base": 1e4, "layout": layout, "inverse": inverse}


def _fits(types: Sequence[TensorType], attrs: Attrs) -> bool:
    x = types[0]
    parts = int(attrs["heads"]) + 2 * int(attrs["kv_heads"])  # type: ignore[call-overload]
    dim = x.shape[-1] // parts
    return bool(x.size) and dim % 16 == 0 and 16 <= dim <= 512 and types[1].dtype == "i32" and parts <= 129


# Calls ----------------------------------------------------------------------------------------------------------------------------------

HEADS = (2, 6, 10, 14, 18, 40)
"""Between these numbers the choice of a compiled file moves."""


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, h, g, d, layout, inverse in (
        ("small", 2, 5, 2, 1, 16, "half", False), ("small-pairs", 1, 7, 3, 1, 32, "interleaved", True),
        ("heads", 1, 3, 5, 2, 64, "half", True), ("wide", 2, 9, 33, 8, 128, "half", False),
    ):
        places = np.asarray(rng.integers(0, 4096, (b, t)), np.int32)
        attrs: dict[str, object] = {"heads": h, "kv_heads": g, "base": 5e5, "layout": layout, "inverse": inverse}
        yield Sample(name=f"gpu-{name}", inputs=(rng.standard_normal((b, t, (h + 2 * g) * d)), places), attrs=attrs)
    for heads in HEADS:
        for layout in ("half", "interleaved"):
            for inverse in (False, True):
                attrs = {"heads": heads, "kv_heads": 1, "base": 1e4, "layout": layout, "inverse": inverse}
                places = np.asarray(rng.integers(0, 64, (1, 3)), np.int32)
                yield Sample(name=f"gpu-{heads}-{layout}{'-back' if inverse else ''}", attrs=attrs,
                             inputs=(rng.standard_normal((1, 3, (heads + 2) * 128)), places))


ASTRAY = (-1, -(2**31), TURNS, 2**31 - 1)
"""Positions that the table of turns lacks."""


def _draw_astray(layout: str, rng: np.random.Generator) -> Drawn:
    """Rows at position 0, which turns nothing, and at positions past the table, whose turned heads are NaN; heads of 48, which leave a
    warp's last lanes idle."""
    places = np.zeros((1, 21), np.int32)
    places[0, rng.permutation(21)[: 2 * len(ASTRAY)]] = 2 * ASTRAY
    attrs: dict[str, object] = {"heads": 12, "kv_heads": 1, "base": 1e4, "layout": layout, "inverse": False}
    return [(rng.integers(-99, 99, (1, 21, 14 * 48)).astype(float), "bf16"), (places, "i32")], attrs


def _astray_error(rng: np.random.Generator, inputs: Sequence[np.ndarray], attrs: Attrs, outs: Sequence[np.ndarray]) -> tuple[float, int]:
    want = inputs[0].copy()
    want[..., : 13 * 48][inputs[1] != 0] = np.nan
    return alike(want, outs[0])


LARGE = {f"astray-{layout}": Large(partial(_draw_astray, layout), _astray_error) for layout in ("half", "interleaved")}
CALLS = Calls(further=_samples, large=LARGE, timed=(
    plain(bf16(2, 4096, 48 * 64), i32(2, 4096), below=4096, base=5e5, layout="half", inverse=False, heads=32, kv_heads=8),))

KERNELS = (
    Component(id="rope_packed.bf16.sm90", kind="kernel", backend="cuda", op="rope_packed", implementation=rope_packed, requires=SM90A,
              binaries=Binaries(cubins_of("rope_packed", rope_packed, _compiled)), inplace=((0, 0),), calls=CALLS,
              envelope=Envelope(dtypes=("bf16",), limits=(
                  Limit(text="head widths from 16 to 512 in steps of 16, at most 129 heads in all", holds=_fits),))),
)
