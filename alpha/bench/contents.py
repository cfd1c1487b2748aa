"""Operands of a timed call that fit together: a backward row is given statistics and outputs that a forward pass made. Floor 8.

The perf gate fills every operand with numbers of its own, which is enough to time a kernel. A peer computes the backward from its own
forward, so here what a forward pass leaves (o, lse, mean, rstd, y) belongs to the operands beside it. Weights are scaled so that sums keep
the size of their terms, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.bench.peers_torch import EPS
from alpha.ops.table import row
from alpha.types import Attrs

Forward = Callable[[str, Sequence[np.ndarray], Attrs], Sequence[np.ndarray]]
"""(row, operands, attributes) -> its outputs by our own kernel; host arrays, bf16 as float32."""


def follows(op: str, operands: int) -> bool:
    """Whether `fitted` may change an operand of such a call."""
    names = {n.rstrip("?") for n in row(op).inputs[:operands]}
    return bool(names & {"finite", "weight"}) or "_bwd" in op


def fitted(op: str, xs: Sequence[np.ndarray], attrs: Attrs, forward: Forward) -> list[np.ndarray]:
    """The operands of a call, those replaced that follow from others. Host arrays; float32 and wider, bf16 as float32 to be rounded."""
    names = [n.rstrip("?").lstrip("*") for n in row(op).inputs]
    at = {name: i for i, name in enumerate(names[: len(xs)])}
    found = [np.asarray(x) for x in xs]

    def put(**values: object) -> None:
        for name, value in values.items():
            old = found[at[name]]
            found[at[name]] = np.asarray(value, old.dtype).reshape(old.shape)

    x = dict(zip(at, found))
    if "finite" in at:
        put(finite=1, lr=1e-3, coefficient=1.0)
    if op == "adamw":
        put(v=np.square(x["v"]), step=9)
    elif op.startswith(("layernorm_bwd", "rmsnorm_bwd")):
        wide = x["x"].astype(np.float32)
        if "mean" in at:
            put(mean=wide.mean(-1), rstd=1 / np.sqrt(wide.var(-1) + EPS))
        else:
            put(rstd=1 / np.sqrt(np.square(wide).mean(-1) + EPS))
    elif op == "attention_bwd":
        put(**dict(zip(("o", "lse"), forward("attention", [x["q"], x["k"], x["v"], *found[6:]], attrs))))
    elif op == "attention_packed_bwd":
        put(**dict(zip(("o", "lse"), forward("attention_packed", [x["qkv"], *found[4:]], attrs))))
    elif op == "cross_entropy_bwd":
        top = x["logits"].max(-1, keepdims=True)
        put(lse=top[:, 0] + np.log(np.exp(x["logits"] - top).sum(-1)))
    elif op == "softmax_bwd":
        axis = int(attrs.get("axis", -1))  # type: ignore[call-overload]
        p = np.exp(x["y"] - x["y"].max(axis, keepdims=True))
        put(y=p / p.sum(axis, keepdims=True))
    elif "weight" in at:
        terms = x["weight"].shape[-1 if attrs.get("trans_b") or op.startswith("linear_cross") else -2]
        put(weight=x["weight"] * 2.0 ** -round(np.log2(terms) / 2))  # a power of two rounds nothing
    return found
