"""Row lookup in an embedding table on the GPU, and its gradient (kernels/embedding). bf16 table; gradient fp32.

Envelope: width a multiple of 8; ids i32, 1 <= count < 2^31 - 2^15; vocabulary * width < 2^40, count * width < 2^39. An id outside the
table makes its row of y NaN and is skipped by the backward pass. Each row of dtable is the sum of its cotangents in the order in which
the ids come (in pieces of 64 where an id occurs more than 64 times), whatever the timing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Call, Calls, Drawn, Large, alike, bf16, f32, i32, plain
from alpha.backends.cuda.cubins_of import Signature, cubins_of
from alpha.backends.cuda.launches import (
    MULTIPROCESSORS,
    PER_VECTOR,
    Operation,
    Output,
    addresses,
    ceil_div,
    kernel,
    launch,
    require,
    structure,
)
from alpha.backends.cuda.lib import SM90A, Gpu, Kernel, Operand, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.memory import Span, aligned
from alpha.ops.spec import Sample
from alpha.types import Attrs, TensorType

WIDEST = 8192
CAPACITY = 64  # of a bucket, as in kernels/embedding/backward.cu
PIECE = 64  # of a long id's occurrences, as there
GROUP = 8  # ids that a warp takes together, as there
RARE = 4  # occurrences of those at most, as there
CLEAR_THREADS = ORDER_THREADS = 512  # as there
WARPS = 4 * 24 * MULTIPROCESSORS  # of embedding_sum at most, where what it has to do is known to the GPU alone ("f32+=")


@dataclass(frozen=True, kw_only=True)
class EmbeddingProblem:
    """`count` ids, a table [vocabulary, width]."""

    count: int
    vocabulary: int
    width: int

    def check(self) -> None:
        """ShapeError naming the limit that this problem breaks."""
        require(
            f"the embedding kernels: {self}",
            [
                (1 <= self.count < 2**31 - 2**15, f"{self.count} ids", "1 to 2^31 - 2^15 - 1"),
                (1 <= self.vocabulary < 2**31 // CAPACITY, f"vocabulary {self.vocabulary}", "1 to 2^25 - 1"),
                (self.width >= 8 and self.width % 8 == 0, f"width {self.width}", "a multiple of 8"),
                (self.vocabulary * self.width < 2**40, f"{self.vocabulary} x {self.width}", "fewer than 2^40 elements"),
                (self.count * self.width < 2**39, f"{self.count} ids of width {self.width}", "fewer than 2^39 elements"),
            ],
        )

    def slabs(self) -> int:
        """Parts of a row of 32 vectors of 16 bytes."""
        return ceil_div(self.width, 32 * PER_VECTOR)

    def _pieces(self) -> int:
        """Most pieces of long ids: one that is not full to each."""
        return self.count // PIECE + self.count // CAPACITY + 1

    def layout(self) -> tuple[dict[str, int], int]:
        """Offsets into the workspace of the backward pass, and its length in bytes. header, counts and done come first and are cleared."""
        longs, pieces = self.count // CAPACITY + 1, self._pieces()
        sizes = {"header": 8, "counts": self.vocabulary, "done": pieces * self.slabs()}
        sizes |= {"bucket": self.vocabulary * CAPACITY, "used": min(self.count, self.vocabulary), "middle_id": self.count // (RARE + 1) + 1}
        sizes |= {"long_id": longs, "long_at": longs, "long_first": longs, "piece_of": pieces, "ordered": self.count}
        sizes["partial"] = pieces * self.width
        offsets, end = {}, 0
        for name, words in sizes.items():
            offsets[name] = end
            end += aligned(4 * words)
        return offsets, end

    def workspace_bytes(self) -> int:
        """Scratch memory of the backward pass."""
        return self.layout()[1]


_Forward = structure(
    "_Forward",
    "table positions ids places y",
    *((name, ctypes.c_int32) for name in ("rows", "width", "vocabulary", "places_count", "each", "turns", "apart")),
)
_Backward = structure(
    "_Backward",
    "dy ids dtable counts bucket used middle_id long_id long_at long_first piece_of ordered done partial header factors",
    *((name, ctypes.c_int32) for name in ("count", "vocabulary", "width")),
)


def forward(
    problem: EmbeddingProblem,
    *,
    table: int,
    ids: int,
    y: int,
    positions: int = 0,
    places: int = 0,
    places_count: int = 0,
    sequence: int = 0,
) -> Operation:
    """y[n] = table[ids[n]], plus positions[places[n]] (i32) of a table of `places_count` positions. Rows that are `sequence` rows from one
    another (0: none are) most often have one position: it decides speed alone."""
    problem.check()
    addresses("embedding forward", table=table, y=y)
    addresses("embedding forward", 4, ids=ids)
    if positions:
        addresses("embedding forward", positions=positions)
        addresses("embedding forward", 4, places=places)
        require("the embedding kernels", [(places_count >= 1, f"{places_count} positions", "at least 1")])
    vectors = problem.slabs()
    whole = bool(positions) and sequence > 0 and problem.count % sequence == 0
    turns, apart = (problem.count // sequence, sequence) if whole else (problem.count, 1)
    # rows of a warp: one, or beside narrow positions about 6 KiB, if all warps get some
    narrow = bool(positions) and vectors < 8
    each = max(2, min(ceil_div(12, vectors), problem.count // (24 * MULTIPROCESSORS))) if narrow else 1
    deep = min((3, 2) if narrow else (4, 3, 2), key=lambda n: n * ceil_div(vectors, n)) if vectors > 1 else 1
    arguments = _Forward(
        table, positions, ids, places, y,
        problem.count, problem.width, problem.vocabulary, places_count, each, turns, apart,
    )  # fmt: skip
    defines = {"EMBEDDING_ADD": int(positions != 0), "EMBEDDING_DEEP": deep}
    of = kernel("embedding/forward.cu", "embedding_forward", defines)
    row = 2 * problem.width
    run = launch(of, ceil_div(problem.count, 4 * each), 128, arguments)
    read = min(problem.count, problem.vocabulary) + min(problem.count, places_count)  # rows that differ, at most
    return Operation(f"embedding {problem}", (run,), (problem.count + read) * row + (8 if positions else 4) * problem.count)


def backward(
    problem: EmbeddingProblem, *, dy: int, ids: int, dtable: int, workspace: Span, out: Output = "f32", factors: int = 0, blocks: int = 0
) -> Operation:
    """dtable[id] = sum of dy[n] over ids[n] = id; "f32+=" adds to what is there. `workspace`: `problem.workspace_bytes()` bytes.
    `factors`: fp32 [count], how often each row counts; 0: each counts once."""
    problem.check()
    offsets, length = problem.layout()
    addresses("embedding backward", dy=dy, dtable=dtable, workspace=workspace.address)
    addresses("embedding backward", 4, ids=ids)
    require("the embedding kernels", [(workspace.nbytes >= length, f"workspace of {workspace.nbytes} bytes", f"{length}")])
    at = {name: workspace.address + offset for name, offset in offsets.items()}
    defines = {"EMBEDDING_ACCUMULATE": int(out == "f32+="), "EMBEDDING_FACTORS": int(factors != 0)}
    arguments = _Backward(
        dy, ids, dtable, at["counts"], at["bucket"], at["used"], at["middle_id"], at["long_id"], at["long_at"],
        at["long_first"], at["piece_of"], at["ordered"], at["done"], at["partial"], at["header"], factors,
        problem.count, problem.vocabulary, problem.width,
    )  # fmt: skip
    of = {name: kernel("embedding/backward.cu", f"embedding_{name}", defines) for name in ("clear", "place", "order", "sum")}
    wide = min(blocks or MULTIPROCESSORS, MULTIPROCESSORS)
    summed = min(problem.count, problem.vocabulary) if out == "f32+=" else problem.vocabulary  # ids in groups, at most
    warps = max(ceil_div(summed, GROUP), problem._pieces()) * problem.slabs()
    if out == "f32+=":
        warps = min(WARPS, warps)
    cleared = ceil_div(offsets["bucket"], 16 * CLEAR_THREADS)
    launches = (
        launch(of["clear"], min(wide, cleared), CLEAR_THREADS, arguments, overlap_previous=True),
        launch(of["place"], ceil_div(problem.count, 256), 256, arguments, overlap_previous=True),
        launch(of["order"], wide, ORDER_THREADS, arguments, overlap_previous=True),
        launch(of["sum"], ceil_div(warps, 4), 128, arguments, overlap_previous=True),
    )
    row, table_row = 2 * problem.width, 4 * problem.width
    rows = min(problem.count, problem.vocabulary) * 2 if out == "f32+=" else problem.vocabulary
    nbytes = problem.count * (row + 4) + rows * table_row  # "f32+=": at most; the rows that occur are read and written
    return Operation(f"embedding backward {problem}", launches, nbytes)


# Binders --------------------------------------------------------------------------------------------------------------------------------


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


def _scratch(at: int, types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    return _backward_problem(types[at], attrs).workspace_bytes()


def _compiled(op: str) -> Iterable[Signature]:
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


# Calls ----------------------------------------------------------------------------------------------------------------------------------

TABLES = (264, 520, 776, 1032)
"""Widths between which the choice of a compiled file moves."""


def _ids(rng: np.random.Generator, n: int, vocab: int) -> np.ndarray:
    """Ids of which 0 comes often enough to be cut into pieces, 1 into one."""
    ids = rng.integers(2, vocab, n).astype(np.int32)
    ids[rng.permutation(n)[: n // 2]] = 0
    ids[rng.permutation(n)[: n // 6]] = 1
    return ids


def _samples(op: str, rng: np.random.Generator) -> Iterable[Sample]:
    if op == "take_row":
        for t, width, at in ((1, 8, 0), (7, 16, 6), (9, 520, 3), (130, 64, 129)):
            yield Sample(name=f"gpu-{t}x{width}", inputs=(rng.standard_normal((1, t, width)), np.array([at], np.int32)), attrs={})
    for width in TABLES:
        n = 21 if width < TABLES[-1] else 70  # the widest has more elements than 16 bits count
        table, ids = rng.standard_normal((9, width)), rng.integers(0, 9, n).astype(np.int32)
        more = (rng.standard_normal((5, width)), rng.integers(0, 5, n).astype(np.int32)) if op == "embedding_add" else ()
        if op == "take_row":
            yield Sample(name=f"gpu-{width}", inputs=(table[None], ids[:1]), attrs={})
        elif "_bwd" not in op:
            yield Sample(name=f"gpu-{width}", inputs=(table, ids, *more), attrs={})
        else:
            n = 700 if width == TABLES[0] else 24
            into = (rng.standard_normal((11, width)),) if op.endswith("_accumulate") else ()
            yield Sample(name=f"gpu-{width}", inputs=(*into, rng.standard_normal((n, width)), _ids(rng, n, 11)), attrs={"vocab": 11})


ASTRAY = (-1, -(2**31), 9, 2**31 - 1)
"""Ids that are no row of a table of 9."""


def _draw_astray(op: str, rng: np.random.Generator) -> Drawn:
    """Ids of which some are no row, by which a lookup gives NaN and a gradient is left out. So many, and a width so large, that lanes walk
    over whole rounds of ids; in the gradient one id comes more often than there is room for in one part."""
    n, width = (9000, 16) if "_bwd" in op else (70, 72)
    ids = _ids(rng, n, 9)
    ids[rng.permutation(n)[: 3 * len(ASTRAY)]] = 3 * ASTRAY
    if op == "take_row":
        return [(rng.integers(-99, 99, (1, 9, 72)).astype(float), "bf16"), (rng.choice(ASTRAY, 1).astype(np.int32), "i32")], {}
    if "_bwd" in op:
        into = [(rng.integers(-9, 9, (9, width)).astype(float), "f32")] if op.endswith("_accumulate") else []
        return [*into, (rng.integers(-9, 9, (n, width)).astype(float), "bf16"), (ids, "i32")], {"vocab": 9}
    found: Drawn = [(rng.integers(-99, 99, (9, width)).astype(float), "bf16"), (ids, "i32")], {}
    if op == "embedding_add":
        places = rng.integers(0, 9, n).astype(np.int32)
        places[rng.permutation(n)[: 2 * len(ASTRAY)]] = 2 * ASTRAY
        found[0].extend([(rng.integers(-99, 99, (9, width)).astype(float), "bf16"), (places, "i32")])
    return found


def _astray_error(op: str, rng: np.random.Generator, inputs: Sequence[np.ndarray], attrs: Attrs,
                  outs: Sequence[np.ndarray]) -> tuple[float, int]:
    """Sums of small integers are exact."""
    if "_bwd" in op:
        *into, dy, ids = inputs
        want = into[0].copy() if into else np.zeros(outs[0].shape)
        good = (ids >= 0) & (ids < len(want))
        np.add.at(want, ids[good], dy[good])
        return alike(want, outs[0])
    total = np.zeros(())
    for table, ids in zip(inputs[::2], inputs[1::2]):
        rows = table.reshape(-1, table.shape[-1])
        total = total + np.where(((ids >= 0) & (ids < len(rows)))[:, None], rows[np.clip(ids, 0, len(rows) - 1)], np.nan)
    return alike(total.reshape(outs[0].shape), outs[0])


_TOKENS, _TABLE, _TOKEN_GRADIENT = i32(65536), bf16(50304, 768), bf16(65536, 768)


def _paths(op: str) -> tuple[Call, ...]:
    """Every token the same: long ids, in ten pieces."""
    into = [f32(8, 72)] if op.endswith("_accumulate") else []
    return (plain(*into, bf16(600, 72), i32(600), name="one-id", vocab=8),) if op.startswith("embedding_bwd") else ()


def _timed(op: str) -> Call:
    if op == "take_row":
        return plain(bf16(1, 1024, 2048), i32(1), below=1024)
    if op.startswith("embedding_bwd"):
        into = [f32(50304, 768)] if op.endswith("_accumulate") else []
        return plain(*into, _TOKEN_GRADIENT, _TOKENS, below=50304, vocab=50304)
    return plain(*[_TABLE, _TOKENS] * (2 if op == "embedding_add" else 1), below=50304)


# Components -----------------------------------------------------------------------------------------------------------------------------


def _component(op: str, binder: Kernel, **more: object) -> Component:
    back = op.startswith("embedding_bwd")
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
        binaries=Binaries(cubins_of(op, binder, partial(_compiled, op))),
        envelope=Envelope(dtypes=("bf16", "f32") if "accumulate" in op else ("bf16",), limits=(
            Limit(text="rows of at most 8192 elements that are multiples of 8, and i32 ids", holds=_fits),
            *([Limit(text="an fp32 buffer and bf16 cotangents", holds=_buffered)] if "accumulate" in op else []),
            *([Limit(text="as many ids of either table", holds=lambda types, attrs: types[1].shape == types[3].shape)]
              if op == "embedding_add" else []),
            *([Limit(text="one sequence", holds=lambda types, attrs: types[0].shape[0] == 1)] if op == "take_row" else []),
            *([Limit(text="fewer than 2^25 rows", holds=lambda types, attrs: 1 <= attrs["vocab"] < 2**25)] if back else []),  # type: ignore[operator]
        )),
        calls=Calls(further=partial(_samples, op), differentiated=partial(_samples, "embedding"), timed=(_timed(op),), paths=_paths(op),
                    large={"astray": Large(partial(_draw_astray, op), partial(_astray_error, op))}),
        **more)  # type: ignore[arg-type]


KERNELS = (
    _component("embedding", embedding), _component("embedding_add", embedding), _component("take_row", take_row),
    _component("embedding_bwd", embedding_bwd, scratch=partial(_scratch, 0)),
    _component("embedding_bwd_accumulate", embedding_bwd, scratch=partial(_scratch, 1), inplace=((0, 0),)),
)
