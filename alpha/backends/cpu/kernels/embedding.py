"""Row lookup and its transpose on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.errors import InputError
from alpha.ops.spec import Sample
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def _inside(ids: np.ndarray, vocab: int) -> None:
    if not (ids.min() >= 0 and ids.max() < vocab):
        raise InputError("embedding: every id is a row of the table", came=f"{ids.min()}..{ids.max()}", expected=f"0..{vocab - 1}",
                         do="check that the token files were made with the tokenizer of this model")


def embedding(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """y[n] = table[ids[n]]; InputError for an id that is no row."""
    table, ids = ins[0], ins[1].reshape(-1)
    y = outs[0].reshape(-1, table.shape[1])

    def body(start: int, stop: int, worker: int) -> None:
        _inside(ids[start:stop], len(table))
        np.take(table, ids[start:stop], axis=0, out=y[start:stop], mode="clip")  # clip: the mode that writes without a copy

    return cpu.rows(len(ids), y.itemsize * max(1, y.shape[1]), body)


def embedding_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dtable[i] = sum of dy[n] over the n with ids[n] = i, in the order of n; zero for ids that do not occur.

    The rows are sorted by id, stably; ids that occur once are copied together, the others are one matrix-vector product each.
    """
    ids, dtable = ins[1].reshape(-1), outs[0]
    vocab, c = dtable.shape
    dy = ins[0].reshape(-1, c)
    n = len(dy)
    ordered = cpu.scratch((n, c), dy.dtype)
    ones = np.ones(n, dy.dtype)

    def clear(start: int, stop: int, worker: int) -> None:
        dtable[start:stop] = 0

    zero = cpu.rows(vocab, dy.itemsize * c, clear)

    def run() -> None:
        _inside(ids, vocab)
        zero()
        order = np.argsort(ids, kind="stable")
        by_id = ids[order]
        begins = np.flatnonzero(np.concatenate(([True], by_id[1:] != by_id[:-1])))
        counts = np.diff(np.append(begins, n))
        once = begins[counts == 1]
        np.take(dy, order[once], axis=0, out=ordered[: len(once)], mode="clip")
        dtable[by_id[once]] = ordered[: len(once)]
        np.take(dy, order, axis=0, out=ordered, mode="clip")
        for begin, count in zip(begins[counts > 1].tolist(), counts[counts > 1].tolist()):
            np.matmul(ones[:count], ordered[begin : begin + count], out=dtable[by_id[begin]])

    return run


def _outside(rng: np.random.Generator, shape: tuple[int, ...], attrs: dict[str, object]) -> Iterable[Sample]:
    """Ids past either end of a table of 11 rows."""
    for name, wrong in (("past-the-last", 11), ("negative", -1)):
        yield Sample(name=name, inputs=(rng.standard_normal(shape), np.array([3, wrong, 0], np.int32)), attrs=attrs)


def _far_rows(rng: np.random.Generator) -> Iterable[Sample]:
    """Ids beyond what 15 and 16 bits hold, each of which meets another in its lower bits."""
    ids = np.array([5, 65541, 40000, 105536, 40000, 65541], np.int32)
    yield Sample(name="far-rows", inputs=(rng.standard_normal((6, 3)), ids), attrs={"vocab": 110_000}, wrt=())


KERNELS = (
    Component(id="embedding.f32.cpu", kind="kernel", backend="cpu", op="embedding", implementation=embedding, envelope=_ENVELOPE,
              calls=Calls(refused=partial(_outside, shape=(11, 5), attrs={}))),
    Component(id="embedding_bwd.f32.cpu", kind="kernel", backend="cpu", op="embedding_bwd", implementation=embedding_bwd,
              envelope=_ENVELOPE, calls=Calls(further=_far_rows, repeated=_far_rows,
                                             refused=partial(_outside, shape=(3, 5), attrs={"vocab": 11}))),
)
