"""Rotary position embedding of the leading heads of each row, in place or not (kernels/rope).

    table(4096, 128, base=500000.0, out=turns)(stream)                                   # once
    problem = RopeProblem(rows=32768, heads=40, head_dim=128, table_rows=4096, stride=6144)
    rope(problem, x=qkv, y=qkv, positions=positions, turns=turns)(stream)                # query and key heads of packed QKV

Envelope: head_dim a multiple of 16, 16 to 512; positions i32 [rows], below `table_rows` (else the row becomes NaN); strides in
elements between rows, multiples of 16 bytes. `turns`: float2 [table_rows, head_dim / 2].
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

from alpha.cuda_runtime.bandwidth import SIZE, Dtype, Operation, addresses, ceil_div, kernel, launch, per, require, structure

THREADS = 128  # as in kernels/rope/rope.cu


@dataclass(frozen=True, kw_only=True)
class RopeProblem:
    """What is computed. `inverse` turns back (the backward pass). Strides 0: heads * head_dim."""

    rows: int
    heads: int
    head_dim: int
    table_rows: int
    stride: int = 0
    out_stride: int = 0
    dtype: Dtype = "bf16"
    layout: Literal["half", "interleaved"] = "half"
    inverse: bool = False

    def check(self) -> None:
        """ShapeError naming the limit that this problem breaks."""
        n, dense = per(self.dtype), self.heads * self.head_dim
        strides = [self.stride or dense, self.out_stride or self.stride or dense]
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
                (all(s >= dense and s % n == 0 for s in strides), f"strides {strides}", f"multiples of {n}, at least {dense}"),
            ],
        )


_Rope = structure(
    "_Rope",
    "x y positions table",
    ("x_stride", ctypes.c_int64),
    ("y_stride", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("rows", "heads", "head_dim", "table_rows", "lanes")),
)


def _defines(dtype: Dtype, layout: str, inverse: bool, deep: int = 1) -> dict[str, object]:
    interleaved = int(layout == "interleaved")
    defines: dict[str, object] = {"ROPE_F32": int(dtype == "f32"), "ROPE_LAYOUT": interleaved, "ROPE_INVERSE": int(inverse)}
    return defines | {"ROPE_DEEP": deep}


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
        kernel("rope/rope.cu", "rope_table", _defines("bf16", "half", False)),
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
    dense = p.heads * p.head_dim
    stride = p.stride or dense
    lanes = p.head_dim // (2 * per(p.dtype))
    arguments = _Rope(
        x, y, positions, turns, stride, p.out_stride or stride, p.rows, p.heads, p.head_dim, p.table_rows, lanes
    )
    of = kernel("rope/rope.cu", "rope", _defines(p.dtype, p.layout, p.inverse, _deep(ceil_div(p.heads, 32 // lanes))))
    return Operation(f"rope {p}", (launch(of, ceil_div(p.rows, THREADS // 32), THREADS, arguments),), 2 * p.rows * dense * SIZE[p.dtype])
