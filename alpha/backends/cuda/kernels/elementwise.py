"""Maps over elements on the GPU: sums, scalings, casts, fills, gated activations, dropout, and sums over leading axes
(kernels/elementwise). Every length for the maps; the rest in whole 16 bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.cubins_of import Call, cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Kernel, Operand, copy, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.elementwise import activation, column_bytes, column_sums, dropout, elementwise
from alpha.cuda_runtime.memory import aligned
from alpha.ops.random import key_of
from alpha.types import Attrs, TensorType


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
    nbytes = column_bytes(rows, width, "bf16")
    work = gpu.scratch(nbytes).address if nbytes else 0
    run = column_sums(rows, width, x=x.address, y=outs[0].address, out="f32+=" if into else "f32", partial=work, blocks=gpu.blocks)
    return in_place([(outs[0], into[0])], run) if into else run


def _total_scratch(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    x = types[-1]
    return aligned(column_bytes(prod(x.shape[:-1]), x.shape[-1], "bf16"))


def _leading(types: Sequence[TensorType], attrs: Attrs) -> bool:
    x, axis = types[-1], attrs["axis"]
    return (len(x.shape) >= 2 and bool(x.size) and axis == tuple(range(len(x.shape) - 1)) and attrs.get("keepdims") is False
            and attrs.get("wide") is True and x.shape[-1] % 8 == 0 and x.dtype == "bf16")


def _whole(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return bool(types[0].size) and all(t.shape and t.shape[-1] % 8 == 0 for t in types)



def _component(op: str, binder: Kernel, calls: Callable[[], Iterable[Call]], dtypes: tuple[str, ...], text: str,
               holds: Callable[[Sequence[TensorType], Attrs], bool], **more: object) -> Component:
    envelope = Envelope(dtypes=dtypes, limits=(Limit(text=text, holds=holds),))
    return Component(id=f"{op}.{dtypes[0]}.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
                     binaries=Binaries(cubins_of(op, binder, calls)), envelope=envelope, **more)  # type: ignore[arg-type]


def _alike(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return types[0].size > 0 and types[0].shape == types[1].shape


def _not_empty(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return all(t.size for t in types)


def _to_float(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return _not_empty(types, attrs) and attrs["dtype"] in ("bf16", "f32")


BF16 = ("bf16",)
_LINE = TensorType((64,), "bf16")
_FORMS: tuple[Attrs, ...] = ({"approximate": "tanh"}, {"approximate": "none"})
_PACKED: Call = [TensorType((8, 64), "bf16")], {}
KERNELS = (
    _component("add", add, lambda: [([TensorType((64,), "bf16")] * 2, {})], BF16, "two operands of one shape", _alike,
               inplace=((0, 0), (0, 1))),
    _component("accumulate", add, lambda: [([TensorType((64,), d) for d in ("f32", "bf16")], {})], ("bf16", "f32"),
               "a bf16 operand and an fp32 buffer of its shape",
               lambda types, attrs: _alike(types, attrs) and [t.dtype for t in types] == ["f32", "bf16"], inplace=((0, 0),)),
    _component("accumulate", add, lambda: [([TensorType((64,), "f32")] * 2, {})], ("f32",), "two operands of one shape", _alike,
               inplace=((0, 0),)),
    _component("scale", scale, lambda: [([TensorType((64,), "bf16")], {"factor": 2.0})], BF16, "elements", _not_empty, inplace=((0, 0),)),
    _component("cast", cast, lambda: [([TensorType((64,), "f32")], {"dtype": "bf16"})], ("f32",), "elements, to bf16 or fp32", _to_float),
    _component("cast", cast, lambda: [([TensorType((64,), "bf16")], {"dtype": "f32"})], BF16, "elements, to bf16 or fp32", _to_float),
    _component("gelu", gelu, lambda: [([_LINE], form) for form in _FORMS], BF16, "rows that are multiples of 8", _whole, inplace=((0, 0),)),
    _component("gelu_bwd", gelu_bwd, lambda: [([_LINE, _LINE], form) for form in _FORMS], BF16, "rows that are multiples of 8", _whole,
               inplace=((0, 0), (0, 1))),
    _component("swiglu_packed", swiglu_packed, lambda: [_PACKED], BF16, "halves of rows that are multiples of 8",
               lambda types, attrs: bool(types[0].size) and types[0].shape[-1] % 16 == 0),
    _component("swiglu_packed_bwd", swiglu_packed_bwd, lambda: [([TensorType((8, n), "bf16") for n in (32, 64)], {})], BF16,
               "rows that are multiples of 8", _whole),
    _component("dropout", drop, lambda: [([TensorType((2, n), "bf16"), TensorType((), "i32"), TensorType((2,), "i32")],
                                          {"rate": 0.5, "seed": 0, "purpose": 0}) for n in (64, 63)], BF16, "elements", _not_empty),
    _component("sum", total, lambda: [([TensorType((n, 64), "bf16")], {"axis": (0,), "keepdims": False, "wide": True}) for n in (4, 4000)],
               BF16, "all axes but the last summed, in fp32, over rows that are multiples of 8", _leading, scratch=_total_scratch),
    _component("sum_accumulate", total, lambda: [([TensorType((64,), "f32"), TensorType((n, 64), "bf16")],
                                                  {"axis": (0,), "keepdims": False, "wide": True}) for n in (4, 4000)],
               ("bf16", "f32"), "all axes but the last summed, in fp32, over rows that are multiples of 8", _leading,
               scratch=_total_scratch, inplace=((0, 0),)),
)
