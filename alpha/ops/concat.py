"""Tensors joined along one axis, and its inverse, `split`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _axis(op: str, rank: int, attrs: Attrs) -> int:
    axis = attrs["axis"]
    expect(
        isinstance(axis, int) and -rank <= axis < rank, op, "axis names an axis of x", axis, f"an integer in [{-rank}, {rank})"
    )
    return axis % rank  # type: ignore[operator, return-value]


def _infer_concat(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    expect(len(types) >= 1, "concat", "there is something to join", "nothing", "one tensor or more")
    axis = _axis("concat", len(types[0].shape), attrs)
    expect(
        len({len(t.shape) for t in types}) == 1,
        "concat",
        "all tensors have as many axes",
        ", ".join(map(str, types)),
        "one number of axes",
    )
    rest = {(t.shape[:axis], t.shape[axis + 1 :], t.dtype) for t in types}
    expect(
        len(rest) == 1,
        "concat",
        f"all tensors agree but for axis {axis}",
        ", ".join(map(str, types)),
        "equal other axes and dtype",
    )
    shape = list(types[0].shape)
    shape[axis] = sum(t.shape[axis] for t in types)
    return (TensorType(tuple(shape), types[0].dtype),)


def _infer_split(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x = types[0]
    sizes: tuple[int, ...] = tuple(attrs["sizes"])  # type: ignore[arg-type]
    axis = _axis("split", len(x.shape), attrs)
    expect(
        len(sizes) >= 1 and sum(sizes) == x.shape[axis] and min(sizes) >= 0,
        "split",
        f"sizes add up to axis {axis} of x",
        f"sizes {sizes} (sum {sum(sizes)}) of {x}",
        f"sizes with sum {x.shape[axis]}",
    )
    return tuple(TensorType((*x.shape[:axis], n, *x.shape[axis + 1 :]), x.dtype) for n in sizes)


def _oracle_concat(*xs: np.ndarray, axis: int) -> Arrays:
    return (np.concatenate(xs, axis=axis),)


def _oracle_split(x: np.ndarray, *, axis: int, sizes: tuple[int, ...]) -> Arrays:
    stops = np.cumsum(sizes)
    return tuple(np.take(x, range(stop - n, stop), axis=axis) for n, stop in zip(sizes, stops))


def _vjp_concat(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    if len(node.inputs) == 1:
        return (dy[0],)
    axis = _axis("concat", len(node.inputs[0].type.shape), node.attrs)
    sizes = tuple(x.type.shape[axis] for x in node.inputs)
    return tuple(emit("split", dy[0], axis=axis, sizes=sizes))  # type: ignore[arg-type]


def _vjp_split(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    if len(node.outputs) == 1:
        return (dy[0],)
    parts = [
        emit("fill", shape=y.type.shape, value=0.0, dtype=y.type.dtype) if g is None else g  # a part that nobody used
        for g, y in zip(dy, node.outputs)
    ]
    return (emit("concat", *parts, axis=node.attrs["axis"]),)  # type: ignore[arg-type]


_CASES = (  # name, shape, axis, sizes
    ("one", (1,), 0, (1,)),
    ("heads", (5, 7, 12), -1, (4, 4, 4)),
    ("uneven", (33, 31), 1, (1, 17, 13)),
    ("first", (13, 5), 0, (6, 7)),
    ("middle", (3, 10, 7), 1, (3, 5, 2)),
    ("empty", (4, 6), 1, (0, 6)),
    ("block+1", (129, 130), 1, (65, 65)),
)


def _exact_concat(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, axis, sizes in _CASES:
        x = rng.integers(-9999, 10000, shape).astype(float)
        yield Sample(name=name, inputs=_oracle_split(x, axis=axis, sizes=sizes), attrs={"axis": axis})


def _exact_split(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, axis, sizes in _CASES:
        yield Sample(name=name, inputs=(rng.integers(-9999, 10000, shape).astype(float),), attrs={"axis": axis, "sizes": sizes})


ROWS = (
    OpSpec(
        name="concat",
        inputs=("*xs",),
        outputs=("y",),
        infer=_infer_concat,
        oracle=_oracle_concat,
        vjp=_vjp_concat,
        flops=lambda t, a: 0,
        samples=_exact_concat,
        exact=_exact_concat,
    ),
    OpSpec(
        name="split",
        inputs=("x",),
        outputs=("parts",),
        infer=_infer_split,
        oracle=_oracle_split,
        vjp=_vjp_split,
        flops=lambda t, a: 0,
        samples=_exact_split,
        exact=_exact_split,
    ),
)
