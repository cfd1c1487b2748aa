"""Row lookup in a table, and its transpose: the sum of the cotangents of each id, in the order in which the ids come.

The table's gradient has the accumulation type.

Legend: V vocabulary, C width, N number of ids (the product of their shape).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.numerics import ACCUMULATE, growth
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import ITEMSIZE, Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    table, ids = types
    expect(len(table.shape) == 2 and table.is_float, "embedding", "table is a float matrix [V,C]", table, "a float [V,C]")
    expect(ids.dtype == "i32", "embedding", "ids are i32", ids, "i32[...]")
    return (TensorType((*ids.shape, table.shape[1]), table.dtype),)


def _nbytes(types: Sequence[TensorType], attrs: Attrs) -> int:
    """ids, a row of y for each, and as many rows of the table as can differ."""
    table, ids = types
    row = table.shape[1] * ITEMSIZE[table.dtype]
    return ids.nbytes + (ids.size + min(ids.size, table.shape[0])) * row


def _infer_bwd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    dy, ids = types
    expect(ids.dtype == "i32", "embedding_bwd", "ids are i32", ids, "i32[...]")
    expect(dy.is_float and dy.shape[:-1] == ids.shape and dy.shape != (), "embedding_bwd", "dy is ids' shape and C", f"{dy} for ids {ids}",
           f"a float [{','.join(map(str, (*ids.shape, 'C')))}]")
    vocab = attrs["vocab"]
    expect(isinstance(vocab, int) and vocab > 0, "embedding_bwd", "vocab is a positive integer", vocab, "the table's V")
    return (TensorType((vocab, dy.shape[-1]), ACCUMULATE[dy.dtype]),)  # type: ignore[arg-type]


def _oracle(table: np.ndarray, ids: np.ndarray) -> Arrays:
    expect(bool(np.all((ids >= 0) & (ids < table.shape[0]))), "embedding", "every id is a row of the table",
           f"{ids.min()}..{ids.max()}", f"0..{table.shape[0] - 1}")
    return (table[ids],)


def _oracle_bwd(dy: np.ndarray, ids: np.ndarray, *, vocab: int) -> Arrays:
    expect(bool(np.all((ids >= 0) & (ids < vocab))), "embedding_bwd", "every id is a row of the table", f"{ids.min()}..{ids.max()}",
           f"0..{vocab - 1}")
    dtable = np.zeros((vocab, dy.shape[-1]))
    np.add.at(dtable, ids.reshape(-1), dy.reshape(ids.size, dy.shape[-1]))
    return (dtable,)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    table, ids = node.inputs
    return (emit("embedding_bwd", dy[0], ids, vocab=table.type.shape[0]), None)  # type: ignore[arg-type]


def _cases(rng: np.random.Generator) -> Iterable[tuple[str, int, int, np.ndarray]]:
    yield "one", 1, 1, np.zeros((1,), np.int32)
    yield "scalar-id", 5, 3, np.array(4, np.int32)
    yield "ragged", 11, 13, rng.integers(0, 11, (3, 7)).astype(np.int32)
    yield "ends", 7, 5, np.array([0, 6, 6, 0, 3], np.int32)
    yield "all-equal", 9, 33, np.full((2, 65), 5, np.int32)
    yield "eights", 40, 72, np.minimum(rng.geometric(0.1, (3, 100)) - 1, 39).astype(np.int32)
    yield "block+1", 129, 65, rng.integers(0, 129, (257,)).astype(np.int32)
    yield "skewed", 40, 16, np.minimum(rng.geometric(0.2, (4, 50)) - 1, 39).astype(np.int32)
    yield "often", 4, 8, rng.permutation(np.repeat(np.arange(3), (540, 70, 3))).astype(np.int32)  # more than 8 * 64, and than 64
    yield "wide", 3, 2056, rng.integers(0, 3, (2, 5)).astype(np.int32)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, vocab, c, ids in _cases(rng):
        yield Sample(name=name, inputs=(rng.standard_normal((vocab, c)), ids))


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, vocab, c, ids in _cases(rng):
        yield Sample(name=name, inputs=(rng.standard_normal((*ids.shape, c)), ids), attrs={"vocab": vocab})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, vocab, c, ids in _cases(rng):
        yield Sample(name=name, inputs=(rng.integers(-99, 99, (vocab, c)).astype(float), ids))


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for name, vocab, c, ids in _cases(rng):
        yield Sample(name=name, inputs=(rng.integers(-9, 9, (*ids.shape, c)).astype(float), ids), attrs={"vocab": vocab})


def _bound_bwd(x: Arrays, attrs: Attrs) -> Sequence[np.ndarray | float]:
    # one sum per row of the table, of as many terms as its id occurs: growth(n) * sum|terms|
    total = _oracle_bwd(np.abs(x[0]), x[1], vocab=attrs["vocab"])[0]  # type: ignore[arg-type]
    return (growth(int(np.bincount(x[1].reshape(-1)).max())) * total,)


ROWS = (
    OpSpec(name="embedding", inputs=("table", "ids"), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp, flops=lambda t, a: 0,
           nbytes=_nbytes,
           samples=_samples, exact=_exact, undifferentiable=("ids",)),
    OpSpec(name="embedding_bwd", inputs=("dy", "ids"), outputs=("dtable",), infer=_infer_bwd, oracle=_oracle_bwd, vjp=None,
           why_no_vjp="backward row", flops=lambda t, a: t[0].size, samples=_samples_bwd, exact=_exact_bwd, bound=_bound_bwd,
           undifferentiable=("ids",), kept={"dtable": "accumulate"}),
)
