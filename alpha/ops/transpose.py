"""Permutation of axes: axis i of the result is axis perm[i] of x."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    perm: tuple[int, ...] = tuple(attrs["perm"])  # type: ignore[arg-type]
    rank = len(types[0].shape)
    expect(
        sorted(perm) == list(range(rank)),
        "transpose",
        "perm names every axis once",
        f"perm {perm} of {types[0]}",
        f"a permutation of {list(range(rank))}",
    )
    return (TensorType(tuple(types[0].shape[i] for i in perm), types[0].dtype),)


def _oracle(x: np.ndarray, *, perm: tuple[int, ...]) -> Arrays:
    return (np.transpose(x, perm),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    perm: tuple[int, ...] = tuple(node.attrs["perm"])  # type: ignore[arg-type]
    return (emit("transpose", dy[0], perm=tuple(perm.index(i) for i in range(len(perm)))),)  # type: ignore[arg-type]


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape, perm in (
        ("one", (1,), (0,)),
        ("same", (3, 5), (0, 1)),
        ("matrix", (37, 53), (1, 0)),
        ("block-1", (127, 65), (1, 0)),
        ("block+1", (129, 63), (1, 0)),
        ("heads", (2, 17, 3, 4), (0, 2, 1, 3)),
        ("cycle", (3, 5, 7), (2, 0, 1)),
        ("reverse", (2, 3, 5, 7), (3, 2, 1, 0)),
        ("tall", (1031, 17), (1, 0)),
        ("scalar", (), ()),
    ):
        yield Sample(name=name, inputs=(rng.integers(-9999, 10000, shape).astype(float),), attrs={"perm": perm})


ROWS = (
    OpSpec(
        name="transpose",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: 0,
        samples=_exact,
        exact=_exact,
    ),
)
