"""Row lookup in an embedding table and its transpose (kernels/embedding).

    problem = EmbeddingProblem(count=65536, vocabulary=50304, width=768)
    forward(problem, table=wte, ids=ids, y=x, positions=wpe, places=places, places_count=1024, sequence=1024)(stream)
    backward(problem, dy=dy, ids=ids, dtable=dwte, workspace=scratch, out="f32+=")(stream)

Envelope: width a multiple of 8; ids i32, 1 <= count < 2^31 - 2^15; vocabulary * width < 2^40, count * width < 2^39. An id outside the
table makes its row of y NaN and is skipped by the backward pass. Each row of dtable is the sum of its cotangents in the order in which
the ids come (in pieces of 64 where an id occurs more than 64 times), whatever the timing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from alpha.cuda_runtime.bandwidth import (
    MULTIPROCESSORS,
    OUTPUT_CODE,
    SIZE,
    Dtype,
    Operation,
    Output,
    addresses,
    ceil_div,
    kernel,
    launch,
    per,
    require,
    structure,
)
from alpha.cuda_runtime.memory import Span, aligned

CAPACITY = 64  # of a bucket, as in kernels/embedding/backward.cu
PIECE = 64  # of a long id's occurrences, as there
GROUP = 8  # ids that a warp takes together, as there
FEW = 4  # occurrences of those, as there
CLEAR_THREADS = ORDER_THREADS = 512  # as there
WARPS = 4 * 24 * MULTIPROCESSORS  # of embedding_sum at most, where what it has to do is known to the GPU alone ("f32+=")


@dataclass(frozen=True, kw_only=True)
class EmbeddingProblem:
    """`count` ids, a table [vocabulary, width]."""

    count: int
    vocabulary: int
    width: int
    dtype: Dtype = "bf16"

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
        return ceil_div(self.width, 32 * per(self.dtype))

    def _pieces(self) -> int:
        """Most pieces of long ids: one that is not full to each."""
        return self.count // PIECE + self.count // CAPACITY + 1

    def layout(self) -> tuple[dict[str, int], int]:
        """Offsets into the workspace of the backward pass, and its length in bytes. header, counts and done come first and are cleared."""
        longs, pieces = self.count // CAPACITY + 1, self._pieces()
        sizes = {"header": 8, "counts": self.vocabulary, "done": pieces * self.slabs()}
        sizes |= {"bucket": self.vocabulary * CAPACITY, "used": min(self.count, self.vocabulary), "middle_id": self.count // (FEW + 1) + 1}
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
    "dy ids dtable counts bucket used middle_id long_id long_at long_first piece_of ordered done partial header",
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
    defines = {"EMBEDDING_F32": int(problem.dtype == "f32"), "EMBEDDING_ADD": int(positions != 0), "EMBEDDING_DEEP": deep}
    of = kernel("embedding/forward.cu", "embedding_forward", defines)
    row = problem.width * SIZE[problem.dtype]
    run = launch(of, ceil_div(problem.count, 4 * each), 128, arguments)
    read = min(problem.count, problem.vocabulary) + min(problem.count, places_count)  # rows that differ, at most
    return Operation(f"embedding {problem}", (run,), (problem.count + read) * row + (8 if positions else 4) * problem.count)


def backward(
    problem: EmbeddingProblem, *, dy: int, ids: int, dtable: int, workspace: Span, out: Output = "f32", blocks: int = 0
) -> Operation:
    """dtable[id] = sum of dy[n] over ids[n] = id; "f32+=" adds to what is there. `workspace`: `problem.workspace_bytes()` bytes."""
    problem.check()
    offsets, length = problem.layout()
    addresses("embedding backward", dy=dy, dtable=dtable, workspace=workspace.address)
    addresses("embedding backward", 4, ids=ids)
    require("the embedding kernels", [(workspace.nbytes >= length, f"workspace of {workspace.nbytes} bytes", f"{length}")])
    at = {name: workspace.address + offset for name, offset in offsets.items()}
    defines: dict[str, object] = {"EMBEDDING_F32": int(problem.dtype == "f32"), "EMBEDDING_OUT": OUTPUT_CODE[out]}
    arguments = _Backward(
        dy, ids, dtable, at["counts"], at["bucket"], at["used"], at["middle_id"], at["long_id"], at["long_at"],
        at["long_first"], at["piece_of"], at["ordered"], at["done"], at["partial"], at["header"],
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
    row, table_row = problem.width * SIZE[problem.dtype], problem.width * (2 if out == "bf16" else 4)
    rows = min(problem.count, problem.vocabulary) * 2 if out == "f32+=" else problem.vocabulary
    nbytes = problem.count * (row + 4) + rows * table_row  # "f32+=": at most; the rows that occur are read and written
    return Operation(f"embedding backward {problem}", launches, nbytes)
