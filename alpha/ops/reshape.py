"""The same elements in the same order under another shape: a view, no kernel runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    shape: tuple[int, ...] = tuple(attrs["shape"])  # type: ignore[arg-type]
    known = prod(n for n in shape if n != -1)
    open_axes = sum(n == -1 for n in shape)
    size = types[0].size
    expect(
        open_axes <= 1 and all(n >= -1 for n in shape),
        "reshape",
        "at most one axis is -1, the others are sizes",
        shape,
        "one -1",
    )
    fits = known > 0 and size % known == 0 if open_axes else known == size
    expect(
        fits,
        "reshape",
        "the number of elements stays",
        f"{types[0]} ({size} elements) to {list(shape)}",
        f"a product of {size}",
    )
    return (TensorType(tuple(size // known if n == -1 else n for n in shape), types[0].dtype),)


def _oracle(x: np.ndarray, *, shape: tuple[int, ...]) -> Arrays:
    return (x.reshape(shape),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("reshape", dy[0], shape=node.inputs[0].type.shape),)  # type: ignore[arg-type]


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    for name, old, new in (
        ("one", (1,), (1, 1)),
        ("flat", (3, 5, 7), (-1,)),
        ("fold", (6, 35), (2, -1, 7)),
        ("scalar", (1, 1), ()),
        ("heads", (2, 17, 12), (2, 17, 3, 4)),
    ):
        yield Sample(name=name, inputs=(rng.integers(-999, 1000, old).astype(float),), attrs={"shape": new})


ROWS = (
    OpSpec(
        name="reshape",
        inputs=("x",),
        outputs=("y",),
        infer=_infer,
        oracle=_oracle,
        vjp=_vjp,
        flops=lambda t, a: 0,
        nbytes=lambda t, a: 0,
        samples=_exact,
        exact=_exact,
        view=True,
    ),
)
