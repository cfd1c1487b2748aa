"""Row lookup in an embedding table on the GPU, and its gradient (kernels/embedding). bf16 table; gradient fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.cubins_of import Call, cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Kernel, Operand, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.embedding import EmbeddingProblem, backward, forward
from alpha.types import Attrs, TensorType

WIDEST = 8192


def embedding(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = table[ids], plus table2[ids2] where these are given."""
    table, ids, *second = ins
    problem = EmbeddingProblem(count=ids.type.size, vocabulary=table.type.shape[0], width=table.type.shape[1])
    if not second:
        return forward(problem, table=table.address, ids=ids.address, y=outs[0].address)
    positions, places = second
    return forward(problem, table=table.address, ids=ids.address, y=outs[0].address, positions=positions.address, places=places.address,
                   places_count=positions.type.shape[0], sequence=ids.type.shape[-1] if ids.type.shape else 0)


def take_row(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = x[0, index]: a lookup in the rows of the one sequence."""
    x, index = ins
    problem = EmbeddingProblem(count=1, vocabulary=x.type.shape[1], width=x.type.shape[2])
    return forward(problem, table=x.address, ids=index.address, y=outs[0].address)


def _backward_problem(dy: TensorType, attrs: Attrs) -> EmbeddingProblem:
    width = dy.shape[-1]
    return EmbeddingProblem(count=dy.size // width, vocabulary=int(attrs["vocab"]), width=width)  # type: ignore[call-overload]


def embedding_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dtable[id] = sum of dy over its ids, in fp32; with a buffer as first operand, added to it where it lies."""
    *into, dy, ids = ins
    problem = _backward_problem(dy.type, attrs)
    run = backward(problem, dy=dy.address, ids=ids.address, dtable=outs[0].address, workspace=gpu.scratch(problem.workspace_bytes()),
                   out="f32+=" if into else "f32", blocks=gpu.blocks)
    return in_place([(outs[0], into[0])], run) if into else run


def _scratch(at: int, types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    return _backward_problem(types[at], attrs).workspace_bytes()


def _calls(op: str) -> Iterable[Call]:
    """Widths between which the choice moves: it goes by 16-byte vectors over 32 lanes."""
    ids = TensorType((64,), "i32")
    for width in (8, *range(128, WIDEST + 1, 128)):
        table, dy = TensorType((32, width), "bf16"), TensorType((64, width), "bf16")
        if op == "take_row":
            yield [TensorType((1, 8, width), "bf16"), TensorType((1,), "i32")], {}
        elif op == "embedding_bwd":
            yield [dy, ids], {"vocab": 32}
        elif op == "embedding_bwd_accumulate":
            yield [TensorType((32, width), "f32"), dy, ids], {"vocab": 32}
        else:
            yield [table, ids, *([table, ids] if op == "embedding_add" else [])], {}


def _fits(types: Sequence[TensorType], attrs: Attrs) -> bool:
    tables = [t for t in types if t.is_float]
    return (all(t.size for t in types) and all(t.dtype == "i32" for t in types if not t.is_float)
            and all(t.shape[-1] % 8 == 0 and t.shape[-1] <= WIDEST for t in tables))


def _buffered(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return (types[0].dtype, types[1].dtype) == ("f32", "bf16")


def _component(op: str, binder: Kernel, **more: object) -> Component:
    back = op.startswith("embedding_bwd")
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
        binaries=Binaries(cubins_of(op, binder, partial(_calls, op))),
        envelope=Envelope(dtypes=("bf16", "f32") if "accumulate" in op else ("bf16",), limits=(
            Limit(text="rows of at most 8192 elements that are multiples of 8, and i32 ids", holds=_fits),
            *([Limit(text="an fp32 buffer and bf16 cotangents", holds=_buffered)] if "accumulate" in op else []),
            *([Limit(text="as many ids of either table", holds=lambda types, attrs: types[1].shape == types[3].shape)]
              if op == "embedding_add" else []),
            *([Limit(text="one sequence", holds=lambda types, attrs: types[0].shape[0] == 1)] if op == "take_row" else []),
            *([Limit(text="fewer than 2^25 rows", holds=lambda types, attrs: 1 <= attrs["vocab"] < 2**25)] if back else []),  # type: ignore[operator]
        )), **more)  # type: ignore[arg-type]


KERNELS = (
    _component("embedding", embedding), _component("embedding_add", embedding), _component("take_row", take_row),
    _component("embedding_bwd", embedding_bwd, scratch=partial(_scratch, 0)),
    _component("embedding_bwd_accumulate", embedding_bwd, scratch=partial(_scratch, 1), inplace=((0, 0),)),
)
