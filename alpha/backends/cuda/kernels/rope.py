"""Rotary position embedding of packed query and key heads on the GPU (kernels/rope). bf16; turns in fp32, computed once per plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.cubins_of import Call, cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.rope import RopeProblem, rope, table, table_bytes
from alpha.types import Attrs, TensorType

TURNS = 8192
"""Positions that a table of turns covers at least: a row beyond its table becomes NaN."""


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


def _calls() -> Iterable[Call]:
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


KERNELS = (
    Component(id="rope_packed.bf16.sm90", kind="kernel", backend="cuda", op="rope_packed", implementation=rope_packed, requires=SM90A,
              binaries=Binaries(cubins_of("rope_packed", rope_packed, _calls)), inplace=((0, 0),),
              envelope=Envelope(dtypes=("bf16",), limits=(
                  Limit(text="head widths from 16 to 512 in steps of 16, at most 129 heads in all", holds=_fits),))),
)
