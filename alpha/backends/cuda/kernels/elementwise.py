"""Maps over elements on the GPU: sums, scalings, casts, gated activations, dropout, and sums over leading axes (kernels/elementwise).

Every length for the maps; the rest in whole 16 bytes. Addresses are 16-byte aligned, tensors have no gaps unless a stride is named, and
outputs may lie on inputs of the same shape and type. `add` with y on a is accumulation (fp32 += bf16 too).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, bf16, f32, i32, plain
from alpha.backends.cuda.cubins_of import Signature, cubins_of
from alpha.backends.cuda.launches import (
    MULTIPROCESSORS,
    PER_VECTOR,
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
    require,
    structure,
)
from alpha.backends.cuda.lib import SM90A, Gpu, Kernel, Operand, copy, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.launch import Launch
from alpha.cuda_runtime.memory import aligned
from alpha.ops.random import key_of
from alpha.ops.spec import Sample
from alpha.types import Attrs, TensorType

THREADS = 256
DROPOUT_THREADS = 128  # each with 4 vectors, as in kernels/elementwise/dropout.cu
_MAP = {"add": 0, "scale": 1, "cast": 2}
_Map = structure("_Map", "a b y unused", ("count", ctypes.c_int64), ("factor", ctypes.c_float))


def elementwise(
    op: Literal["add", "scale", "cast"],
    count: int,
    *,
    y: int,
    y_dtype: Dtype,
    a: int,
    a_dtype: Dtype,
    b: int = 0,
    b_dtype: Dtype = "bf16",
    factor: float = 0.0,
) -> Operation:
    """y = a + b; a * factor; a in y's type. `count` elements, any number."""
    require(f"elementwise {op}", [(1 <= count < 2**38, f"{count} elements", "1 to 2^38 - 1")])
    used = [(y, y_dtype), (a, a_dtype)] + ([(b, b_dtype)] if op == "add" else [])
    for address, _ in used:
        addresses(f"elementwise {op}", operand=address)
    wide = {"bf16": 0, "f32": 1}
    defines = {"MAP_OP": _MAP[op], "MAP_A": wide[a_dtype], "MAP_B": wide[b_dtype] if op == "add" else 0, "MAP_Y": wide[y_dtype]}
    grid = max(1, ceil_div(count // (16 // SIZE[y_dtype]), THREADS))
    run = launch(kernel("elementwise/map.cu", "elementwise_map", defines), grid, THREADS, _Map(a, b, y, 0, count, factor))
    return Operation(f"{op} {count}", (run,), count * sum(SIZE[dtype] for _, dtype in used))


_ACT = {"gelu": 0, "gelu_bwd": 1, "swiglu": 2, "swiglu_bwd": 3}
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
    approximate: Literal["tanh", "none"] = "tanh",
    dy: int = 0,
    b: int = 0,
    y2: int = 0,
    dy_stride: int = 0,
    a_stride: int = 0,
    b_stride: int = 0,
    y_stride: int = 0,
    y2_stride: int = 0,
) -> Operation:
    """gelu: y of a. gelu_bwd: y = dy gelu'(a). swiglu: y = silu(a) b, a the gate and b the up projection. swiglu_bwd: y the gradient
    of the gate, y2 of up. bf16; strides in elements between rows (0: `columns`), multiples of 16 bytes; columns a multiple of 8. A thread
    has one vector: many short blocks beat more loads in flight."""
    strides = [s or columns for s in (dy_stride, a_stride, b_stride, y_stride, y2_stride)]
    vectors = rows * columns // PER_VECTOR
    require(
        f"{op} {rows}x{columns}",
        [
            (rows >= 1 and columns >= 8 and columns % 8 == 0, f"{rows}x{columns}", "columns a multiple of 8"),
            (vectors < 2**31 - 4096, f"{rows}x{columns}", f"fewer than 2^31 - 4096 vectors of {PER_VECTOR}"),
            (all(s % PER_VECTOR == 0 and s >= columns for s in strides), f"strides {strides}",
             f"multiples of {PER_VECTOR}, at least {columns}"),
        ],
    )
    addresses(op, a=a, y=y)
    if op.endswith("_bwd"):
        addresses(op, dy=dy)
    if op.startswith("swiglu"):
        addresses(op, b=b)
    if op == "swiglu_bwd":
        addresses(op, y2=y2)
    defines = {"ACT_OP": _ACT[op], "ACT_ERF": int(approximate == "none" and op.startswith("gelu"))}
    arguments = _Act(dy, a, b, y, y2, *strides, vectors, Divisor.of(columns // PER_VECTOR))
    run = launch(kernel("elementwise/activation.cu", "activation_map", defines), ceil_div(vectors, THREADS), THREADS, arguments)
    tensors = {"gelu": 2, "gelu_bwd": 3, "swiglu": 3, "swiglu_bwd": 5}[op]
    return Operation(f"{op} {rows}x{columns}", (run,), 2 * tensors * rows * columns)


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
) -> Operation:
    """y = dropout of x [samples, positions], bf16. `step`: i32 on the device; `sample_ids`: i32 [samples]; `key`: (seed, purpose), 32 bits
    each. Any number of positions; multiples of 8 run vectorised."""
    count = samples * positions
    require(
        f"dropout {samples}x{positions}",
        [
            (samples >= 1 and positions >= 1, f"{samples}x{positions}", "sizes of at least 1"),
            (count // PER_VECTOR < 2**31 - 4096, f"{samples}x{positions}", f"fewer than 2^31 - 4096 vectors of {PER_VECTOR}"),
            (0 <= rate and round(rate * 2.0**32) < 2**32, f"rate {rate}", "in [0, 1)"),
            (all(0 <= word < 2**32 for word in key), f"key {key}", "two 32-bit numbers"),
        ],
    )
    addresses("dropout", x=x, y=y)
    addresses("dropout", 4, step=step, sample_ids=sample_ids)
    whole = positions % PER_VECTOR == 0
    arguments = _Dropout(
        x, y, step, sample_ids, positions, count, *key, round(rate * 2.0**32), 1 / (1 - rate), Divisor.of(max(1, positions // PER_VECTOR))
    )
    name = "dropout_map" if whole else "dropout_ragged"
    grid = ceil_div(count // PER_VECTOR, 4 * DROPOUT_THREADS) if whole else ceil_div(count, DROPOUT_THREADS)
    run = launch(kernel("elementwise/dropout.cu", name, {}), grid, DROPOUT_THREADS, arguments)
    return Operation(f"dropout {samples}x{positions}", (run,), 4 * count + 4 * samples)


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
    defines = {"COLUMNS_ACCUMULATE": int(out == "f32+=")}
    grid = (ceil_div(width, 32), len(outs), 1)
    return launch(kernel("elementwise/columns.cu", "columns_finish", defines), grid, 1024, arguments, overlap_previous=True)


def column_parts(rows: int, width: int) -> int:
    """Runs of rows that are summed apart; one where the width alone fills the chip. Part of the problem: it decides bits."""
    slabs = ceil_div(width, 32 * PER_VECTOR)
    return max(1, min(ceil_div(2 * MULTIPROCESSORS, slabs), ceil_div(rows, 128)))


def column_bytes(rows: int, width: int) -> int:
    """Scratch memory of `column_sums` (0 where there is one run)."""
    parts = column_parts(rows, width)
    return 4 * parts * width if parts > 1 else 0


def column_sums(rows: int, width: int, *, x: int, y: int, out: Output = "f32", partial: int = 0, blocks: int = 0) -> Operation:
    """y[width] = sum over the rows of x, bf16: bias gradients; with [batch, T * C] the gradient of position embeddings. `partial`:
    `column_bytes` of scratch. Width a multiple of 16 bytes."""
    parts = column_parts(rows, width)
    require(
        f"column sums {rows}x{width}",
        [
            (1 <= rows < 2**31 - 128, f"{rows} rows", "1 to 2^31 - 129"),
            (width >= PER_VECTOR and width % PER_VECTOR == 0, f"width {width}", f"a multiple of {PER_VECTOR}"),
            (parts == 1 or width < 2**31, f"width {width}", "below 2^31"),
        ],
    )
    addresses("column sums", x=x)
    addresses("column sums", 4, y=y)
    if parts > 1:
        addresses("column sums", partial=partial)
    defines = {"COLUMNS_ACCUMULATE": int(out == "f32+=")}
    slabs = ceil_div(width, 32 * PER_VECTOR)
    down = limit(parts, ceil_div(blocks, slabs))
    arguments = _Columns(x, partial if parts > 1 else 0, y, rows, parts, ceil_div(rows, parts), width, width)
    launches = [launch(kernel("elementwise/columns.cu", "columns_partial", defines), (slabs, down, 1), THREADS, arguments)]
    if parts > 1:
        launches.append(finish_columns(partial, parts, width, (y,), out))
    return Operation(f"column sums {rows}x{width}", tuple(launches), 2 * rows * width + 4 * width)


# Binders --------------------------------------------------------------------------------------------------------------------------------


def add(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = a + b; also `accumulate`, whose first operand is fp32 and whose second may be bf16."""
    a, b = ins
    y = outs[0]
    return elementwise("add", a.type.size, a=a.address, a_dtype=_of(a), b=b.address, b_dtype=_of(b), y=y.address, y_dtype=_of(y))


def scale(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = factor x."""
    x, y = ins[0], outs[0]
    factor = float(attrs["factor"])  # type: ignore[arg-type]
    return elementwise("scale", x.type.size, a=x.address, a_dtype=_of(x), y=y.address, y_dtype=_of(y), factor=factor)


def cast(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = x in another type."""
    x, y = ins[0], outs[0]
    if x.type == y.type:
        return lambda stream: copy(y.address, x.address, x.type.nbytes, stream)
    return elementwise("cast", x.type.size, a=x.address, a_dtype=_of(x), y=y.address, y_dtype=_of(y))


def _of(x: Operand):  # type: ignore[no-untyped-def]
    return x.type.dtype


def gelu(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = gelu(x), tanh or erf form."""
    x, y = ins[0], outs[0]
    return activation("gelu", prod(x.type.shape[:-1]), x.type.shape[-1], a=x.address, y=y.address,
                      approximate=attrs["approximate"])  # type: ignore[arg-type]


def gelu_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dx = dy gelu'(x)."""
    dy, x = ins
    return activation("gelu_bwd", prod(x.type.shape[:-1]), x.type.shape[-1], dy=dy.address, a=x.address, y=outs[0].address,
                      approximate=attrs["approximate"])  # type: ignore[arg-type]


def swiglu_packed(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = silu(gate) up; gate and up are the halves of each row of x."""
    x, y = ins[0], outs[0]
    columns = y.type.shape[-1]
    return activation("swiglu", prod(y.type.shape[:-1]), columns, a=x.address, b=x.address + 2 * columns, y=y.address,
                      a_stride=2 * columns, b_stride=2 * columns)


def swiglu_packed_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dx, the gradients of gate and up side by side."""
    dy, x = ins
    columns = dy.type.shape[-1]
    wide, y = 2 * columns, outs[0].address
    return activation("swiglu_bwd", prod(dy.type.shape[:-1]), columns, dy=dy.address, a=x.address, b=x.address + 2 * columns, y=y,
                      y2=y + 2 * columns, a_stride=wide, b_stride=wide, y_stride=wide, y2_stride=wide)


def drop(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """Dropout keyed by (seed, purpose), step and sample."""
    x, step, samples = ins
    count = samples.type.size
    key = key_of(attrs["seed"], attrs["purpose"])  # type: ignore[arg-type]
    return dropout(count, x.type.size // count, x=x.address, y=outs[0].address, step=step.address, sample_ids=samples.address,
                   rate=float(attrs["rate"]), key=key)  # type: ignore[arg-type]


def total(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = sum of x over all axes but the last, in fp32; with a buffer as first operand, added to it where it lies."""
    *into, x = ins
    rows, width = prod(x.type.shape[:-1]), x.type.shape[-1]
    nbytes = column_bytes(rows, width)
    work = gpu.scratch(nbytes).address if nbytes else 0
    run = column_sums(rows, width, x=x.address, y=outs[0].address, out="f32+=" if into else "f32", partial=work, blocks=gpu.blocks)
    return in_place([(outs[0], into[0])], run) if into else run


def _total_scratch(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    x = types[-1]
    return aligned(column_bytes(prod(x.shape[:-1]), x.shape[-1]))


def _leading(types: Sequence[TensorType], attrs: Attrs) -> bool:
    x, axis = types[-1], attrs["axis"]
    return (len(x.shape) >= 2 and bool(x.size) and axis == tuple(range(len(x.shape) - 1)) and attrs.get("keepdims") is False
            and attrs.get("wide") is True and x.shape[-1] % 8 == 0 and x.dtype == "bf16")


def _whole(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return bool(types[0].size) and all(t.shape and t.shape[-1] % 8 == 0 for t in types)


def _alike(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return types[0].size > 0 and types[0].shape == types[1].shape


def _not_empty(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return all(t.size for t in types)


def _to_float(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return _not_empty(types, attrs) and attrs["dtype"] in ("bf16", "f32")


# Calls ----------------------------------------------------------------------------------------------------------------------------------


def _dropout_samples(rng: np.random.Generator) -> Iterable[Sample]:
    """Whole vectors, which the row's samples have none of."""
    for name, shape, first in (("whole", (3, 1032), 4), ("whole-narrow", (37, 8), 0)):
        ids = first + rng.permutation(3 * shape[0])[: shape[0]]
        yield Sample(name=f"gpu-{name}", inputs=(rng.standard_normal(shape), np.array(9, np.int32), ids.astype(np.int32)),
                     attrs={"rate": 0.2, "seed": 77, "purpose": 3})


_ROWS, _WIDE, _FLAT = bf16(32768, 1024), bf16(16384, 16384), 1 << 27
_COLUMN_ATTRS: dict[str, Any] = {"axis": (0,), "keepdims": False, "wide": True}


# Components -----------------------------------------------------------------------------------------------------------------------------


def _component(op: str, binder: Kernel, compiled: Callable[[], Iterable[Signature]], dtypes: tuple[str, ...], text: str,
               holds: Callable[[Sequence[TensorType], Attrs], bool], calls: Calls, **more: object) -> Component:
    """`compiled`: calls that ask for every compiled file."""
    envelope = Envelope(dtypes=dtypes, limits=(Limit(text=text, holds=holds),))
    return Component(id=f"{op}.{dtypes[0]}.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
                     binaries=Binaries(cubins_of(op, binder, compiled)), envelope=envelope, calls=calls, **more)  # type: ignore[arg-type]


def _gelu_component(op: str, binder: Kernel, operands: int, **more: object) -> Component:
    line = bf16(64)
    forms: tuple[Attrs, ...] = ({"approximate": "tanh"}, {"approximate": "none"})
    calls = Calls(timed=(plain(*[_ROWS] * operands, approximate="tanh"),))
    return _component(op, binder, lambda: [([line] * operands, form) for form in forms], BF16, "rows that are multiples of 8", _whole,
                      calls, **more)


BF16 = ("bf16",)
_SUMMED = "all axes but the last summed, in fp32, over rows that are multiples of 8"
KERNELS = (
    _component("add", add, lambda: [([bf16(64)] * 2, {})], BF16, "two operands of one shape", _alike, Calls(timed=(plain(_ROWS, _ROWS),)),
               inplace=((0, 0), (0, 1))),
    _component("accumulate", add, lambda: [([f32(64), bf16(64)], {})], ("bf16", "f32"), "a bf16 operand and an fp32 buffer of its shape",
               lambda types, attrs: _alike(types, attrs) and [t.dtype for t in types] == ["f32", "bf16"],
               Calls(timed=(plain(f32(_FLAT), bf16(_FLAT), name="model-1"),)), inplace=((0, 0),)),
    _component("accumulate", add, lambda: [([f32(64)] * 2, {})], ("f32",), "two operands of one shape", _alike,
               Calls(timed=(plain(f32(_FLAT), f32(_FLAT)),)), inplace=((0, 0),)),
    _component("scale", scale, lambda: [([bf16(64)], {"factor": 2.0})], BF16, "elements", _not_empty,
               Calls(timed=(plain(_ROWS, factor=0.5),)), inplace=((0, 0),)),
    _component("cast", cast, lambda: [([f32(64)], {"dtype": "bf16"})], ("f32",), "elements, to bf16 or fp32", _to_float,
               Calls(timed=(plain(f32(_FLAT), dtype="bf16"),))),
    _component("cast", cast, lambda: [([bf16(64)], {"dtype": "f32"})], BF16, "elements, to bf16 or fp32", _to_float,
               Calls(timed=(plain(bf16(_FLAT), name="model-1", dtype="f32"),))),
    _gelu_component("gelu", gelu, 1, inplace=((0, 0),)),
    _gelu_component("gelu_bwd", gelu_bwd, 2, inplace=((0, 0), (0, 1))),
    _component("swiglu_packed", swiglu_packed, lambda: [([bf16(8, 64)], {})], BF16, "halves of rows that are multiples of 8",
               lambda types, attrs: bool(types[0].size) and types[0].shape[-1] % 16 == 0, Calls(timed=(plain(_WIDE),))),
    _component("swiglu_packed_bwd", swiglu_packed_bwd, lambda: [([bf16(8, n) for n in (32, 64)], {})], BF16,
               "rows that are multiples of 8", _whole, Calls(timed=(plain(bf16(16384, 8192), _WIDE),))),
    _component("dropout", drop, lambda: [([bf16(2, n), i32(), i32(2)], {"rate": 0.5, "seed": 0, "purpose": 0}) for n in (64, 63)], BF16,
               "elements", _not_empty,
               Calls(further=_dropout_samples, timed=(plain(bf16(16, 2048, 1024), i32(), i32(16), below=9, rate=0.1, seed=1, purpose=2),))),
    _component("sum", total, lambda: [([bf16(n, 64)], _COLUMN_ATTRS) for n in (4, 4000)], BF16, _SUMMED, _leading,
               Calls(timed=(plain(_ROWS, **_COLUMN_ATTRS),)), scratch=_total_scratch),
    _component("sum_accumulate", total, lambda: [([f32(64), bf16(n, 64)], _COLUMN_ATTRS) for n in (4, 4000)], ("bf16", "f32"), _SUMMED,
               _leading, Calls(timed=(plain(f32(1024), _ROWS, **_COLUMN_ATTRS),)), scratch=_total_scratch, inplace=((0, 0),)),
)
