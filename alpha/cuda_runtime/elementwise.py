"""Elementwise maps, activations, dropout and column sums (kernels/elementwise).

Addresses 16-byte aligned; tensors without gaps unless a stride is named; outputs may lie on inputs of the same shape and type.
`add` with y on a is accumulation (fp32 += bf16 too).
"""

from __future__ import annotations

import ctypes
from typing import Literal

from alpha.cuda_runtime.bandwidth import (
    MULTIPROCESSORS,
    OUTPUT_CODE,
    SIZE,
    Divisor,
    Dtype,
    Operation,
    Output,
    addresses,
    ceil_div,
    kernel,
    launch,
    limit,
    per,
    require,
    structure,
)
from alpha.cuda_runtime.launch import Launch

THREADS = 256
DROPOUT_THREADS = 128  # each with 4 vectors, as in kernels/elementwise/dropout.cu
_MAP = {"add": 0, "scale": 1, "cast": 2, "fill": 3, "scale_by": 4}
_Map = structure("_Map", "a b y scalar", ("count", ctypes.c_int64), ("factor", ctypes.c_float))


def elementwise(
    op: Literal["add", "scale", "cast", "fill", "scale_by"],
    count: int,
    *,
    y: int,
    y_dtype: Dtype,
    a: int = 0,
    a_dtype: Dtype = "bf16",
    b: int = 0,
    b_dtype: Dtype = "bf16",
    factor: float = 0.0,
    scalar: int = 0,
) -> Operation:
    """y = a + b; a * factor; a in y's type; factor; a * the fp32 at `scalar` on the device. `count` elements, any number."""
    require(f"elementwise {op}", [(1 <= count < 2**38, f"{count} elements", "1 to 2^38 - 1")])
    used = [(y, y_dtype)] + ([(a, a_dtype)] if op != "fill" else []) + ([(b, b_dtype)] if op == "add" else [])
    for address, _ in used:
        addresses(f"elementwise {op}", operand=address)
    if op == "scale_by":
        addresses(f"elementwise {op}", 4, scalar=scalar)
    wide = {"bf16": 0, "f32": 1}
    defines = {
        "MAP_OP": _MAP[op],
        "MAP_A": wide[a_dtype] if op != "fill" else 0,
        "MAP_B": wide[b_dtype] if op == "add" else 0,
        "MAP_Y": wide[y_dtype],
    }
    grid = max(1, ceil_div(count // per(y_dtype), THREADS))
    run = launch(
        kernel("elementwise/map.cu", "elementwise_map", defines), grid, THREADS, _Map(a, b, y, scalar, count, factor)
    )
    return Operation(f"{op} {count}", (run,), count * sum(SIZE[dtype] for _, dtype in used))


_ACT = {"gelu": 0, "gelu_bwd": 1, "swiglu": 2, "swiglu_bwd": 3}
_ACT_DEEP = {"gelu": 1, "gelu_bwd": 1, "swiglu": 1, "swiglu_bwd": 1}  # measured: many short CTAs beat more loads in flight
_Act = structure(
    "_Act",
    "dy a b y y2",
    *((name, ctypes.c_int64) for name in ("dy_stride", "a_stride", "b_stride", "y_stride", "y2_stride")),
    ("vectors", ctypes.c_uint32),
    ("per_row", Divisor),
)


def activation(
    op: Literal["gelu", "gelu_bwd", "swiglu", "swiglu_bwd"],
    rows: int,
    columns: int,
    *,
    a: int,
    y: int,
    dtype: Dtype = "bf16",
    approximate: Literal["tanh", "none"] = "tanh",
    dy: int = 0,
    b: int = 0,
    y2: int = 0,
    dy_stride: int = 0,
    a_stride: int = 0,
    b_stride: int = 0,
    y_stride: int = 0,
    y2_stride: int = 0,
    deep: int = 0,
) -> Operation:
    """gelu: y of a. gelu_bwd: y = dy gelu'(a). swiglu: y = silu(a) b, a the gate and b the up projection. swiglu_bwd: y the gradient
    of the gate, y2 of up. Strides in elements between rows (0: `columns`), multiples of 16 bytes; columns a multiple of 8.
    `deep`: vectors of a thread (0: the chosen number)."""
    n = per(dtype)
    deep = deep or _ACT_DEEP[op]
    strides = [s or columns for s in (dy_stride, a_stride, b_stride, y_stride, y2_stride)]
    require(
        f"{op} {rows}x{columns} {dtype}",
        [
            (rows >= 1 and columns >= 8 and columns % 8 == 0, f"{rows}x{columns}", "columns a multiple of 8"),
            (rows * columns // n < 2**31 - 4096, f"{rows}x{columns}", f"fewer than 2^31 - 4096 vectors of {n}"),
            (all(s % n == 0 and s >= columns for s in strides), f"strides {strides}", f"multiples of {n}, at least {columns}"),
        ],
    )
    addresses(op, a=a, y=y)
    if op.endswith("_bwd"):
        addresses(op, dy=dy)
    if op.startswith("swiglu"):
        addresses(op, b=b)
    if op == "swiglu_bwd":
        addresses(op, y2=y2)
    defines = {"ACT_OP": _ACT[op], "ACT_ERF": int(approximate == "none" and op.startswith("gelu")), "ACT_F32": int(dtype == "f32")}
    defines["ACT_DEEP"] = deep
    vectors = rows * columns // n
    grid = ceil_div(vectors, THREADS * deep)
    arguments = _Act(dy, a, b, y, y2, *strides, vectors, Divisor.of(columns // n))
    run = launch(kernel("elementwise/activation.cu", "activation_map", defines), grid, THREADS, arguments)
    tensors = {"gelu": 2, "gelu_bwd": 3, "swiglu": 3, "swiglu_bwd": 5}[op]
    return Operation(f"{op} {rows}x{columns} {dtype}", (run,), tensors * rows * columns * SIZE[dtype])


_Dropout = structure(
    "_Dropout",
    "x y step samples",
    ("positions", ctypes.c_int64),
    ("count", ctypes.c_int64),
    *((name, ctypes.c_uint32) for name in ("seed", "purpose", "threshold")),
    ("scale", ctypes.c_float),
    ("per_sample", Divisor),
)


def dropout(
    samples: int,
    positions: int,
    *,
    x: int,
    y: int,
    step: int,
    sample_ids: int,
    rate: float,
    key: tuple[int, int],
    dtype: Dtype = "bf16",
) -> Operation:
    """y = dropout of x [samples, positions]. `step`: i32 on the device; `sample_ids`: i32 [samples]; `key`: (seed, purpose), 32 bits
    each. Any number of positions; multiples of 8 (fp32: 4) run vectorised."""
    n, count = per(dtype), samples * positions
    require(
        f"dropout {samples}x{positions}",
        [
            (samples >= 1 and positions >= 1, f"{samples}x{positions}", "sizes of at least 1"),
            (count // n < 2**31 - 4096, f"{samples}x{positions}", f"fewer than 2^31 - 4096 vectors of {n}"),
            (0 <= rate and round(rate * 2.0**32) < 2**32, f"rate {rate}", "in [0, 1)"),
            (all(0 <= word < 2**32 for word in key), f"key {key}", "two 32-bit numbers"),
        ],
    )
    addresses("dropout", x=x, y=y)
    addresses("dropout", 4, step=step, sample_ids=sample_ids)
    whole = positions % n == 0
    arguments = _Dropout(
        x, y, step, sample_ids, positions, count, *key, round(rate * 2.0**32), 1 / (1 - rate), Divisor.of(max(1, positions // n))
    )
    name = "dropout_map" if whole else "dropout_ragged"
    grid = ceil_div(count // n, 4 * DROPOUT_THREADS) if whole else ceil_div(count, DROPOUT_THREADS)
    run = launch(kernel("elementwise/dropout.cu", name, {"DROPOUT_F32": int(dtype == "f32")}), grid, DROPOUT_THREADS, arguments)
    return Operation(f"dropout {samples}x{positions} {dtype}", (run,), 2 * count * SIZE[dtype] + 4 * samples)


_Columns = structure(
    "_Columns",
    "x partial out",
    *((name, ctypes.c_int32) for name in ("rows", "parts", "run")),
    ("width", ctypes.c_int64),
    ("stride", ctypes.c_int64),
)


class _Finish(ctypes.Structure):
    _fields_ = [("partial", ctypes.c_uint64), ("out", ctypes.c_uint64 * 2), ("parts", ctypes.c_int32), ("width", ctypes.c_int32)]


def finish_columns(partial: int, parts: int, width: int, outs: tuple[int, ...], out: Output) -> Launch:
    """Adds partial[set][part][width] over parts into outs[set], in the order of parts."""
    arguments = _Finish(partial, (ctypes.c_uint64 * 2)(*outs), parts, width)
    defines = {"COLUMNS_F32": 0, "COLUMNS_OUT": OUTPUT_CODE[out]}
    grid = (ceil_div(width, 32), len(outs), 1)
    return launch(kernel("elementwise/columns.cu", "columns_finish", defines), grid, 1024, arguments, overlap_previous=True)


def column_parts(rows: int, width: int, dtype: Dtype) -> int:
    """Runs of rows that are summed apart; one where the width alone fills the chip. Part of the problem: it decides bits."""
    slabs = ceil_div(width, 32 * per(dtype))
    return max(1, min(ceil_div(2 * MULTIPROCESSORS, slabs), ceil_div(rows, 128)))


def column_bytes(rows: int, width: int, dtype: Dtype) -> int:
    """Scratch memory of `column_sums` (0 where there is one run)."""
    parts = column_parts(rows, width, dtype)
    return 4 * parts * width if parts > 1 else 0


def column_sums(
    rows: int,
    width: int,
    *,
    x: int,
    y: int,
    dtype: Dtype = "bf16",
    out: Output = "f32",
    stride: int = 0,
    partial: int = 0,
    blocks: int = 0,
) -> Operation:
    """y[width] = sum over the rows of x: bias gradients; with [batch, T * C] the gradient of position embeddings. `partial`:
    `column_bytes` of scratch. width and stride multiples of 16 bytes."""
    n, stride = per(dtype), stride or width
    require(
        f"column sums {rows}x{width} {dtype}",
        [
            (1 <= rows < 2**31 - 128, f"{rows} rows", "1 to 2^31 - 129"),
            (width >= n and width % n == 0, f"width {width}", f"a multiple of {n}"),
            (stride >= width and stride % n == 0, f"stride {stride}", f"a multiple of {n}, at least the width"),
        ],
    )
    parts = column_parts(rows, width, dtype)
    require(f"column sums {rows}x{width}", [(parts == 1 or width < 2**31, f"width {width}", "below 2^31")])
    addresses("column sums", x=x)
    addresses("column sums", 4, y=y)
    if parts > 1:
        addresses("column sums", partial=partial)
    defines = {"COLUMNS_F32": int(dtype == "f32"), "COLUMNS_OUT": OUTPUT_CODE[out]}
    slabs = ceil_div(width, 32 * n)
    down = limit(parts, ceil_div(blocks, slabs))
    arguments = _Columns(x, partial if parts > 1 else 0, y, rows, parts, ceil_div(rows, parts), width, stride)
    launches = [launch(kernel("elementwise/columns.cu", "columns_partial", defines), (slabs, down, 1), THREADS, arguments)]
    if parts > 1:
        launches.append(finish_columns(partial, parts, width, (y,), out))
    return Operation(f"column sums {rows}x{width} {dtype}", tuple(launches), rows * width * SIZE[dtype] + 4 * width)
