"""What the statement of a row promises: whatever of a row changes, its text of that aspect changes, and no other; of every row of the table
there is a digest of each aspect. Floor 7."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import ShapeError
from alpha.gates.contracts.checks import Checks
from alpha.ops.spec import Arrays, OpSpec, Sample, expect, sole_cotangent
from alpha.ops.table import table
from alpha.registry.statements import Statement, digests
from alpha.types import Attrs, TensorType

ASPECTS = ("counts", "gives", "gradient", "parts", "takes", "within")


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n in (1, 6, 4):
        yield Sample(name=f"of {n}", inputs=(rng.standard_normal((n, 3)), rng.standard_normal((n, 3))),
                     attrs={"key": 5, "at": ((0, 2), (2, 3))})
    yield Sample(name="none", inputs=(np.ones((2, 3)), np.ones((2, 3))), attrs={"key": 0, "at": ()})


def _infer(most: int = 2**32 - 1, words: str = "key is a word", even: bool = False, apart: bool = True, kept: str = "f32",
           overlap: int = 0, narrow: bool = True) -> Callable[[Sequence[TensorType], Attrs], tuple[TensorType, ...]]:
    def infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
        a, b = types
        key, at, end = attrs["key"], attrs["at"], 0
        expect(a.shape == b.shape and a.is_float and (a == b or not apart), "made", "two of a kind", f"{a}, {b}", "two tensors")
        expect(isinstance(key, int) and 0 <= key <= most, "made", words, key, f"0 to {most}")
        expect(narrow or a.dtype != "bf16", "made", "wide", a, "f32 or f64")
        expect(not even or a.size % 2 == 0, "made", "pairs", a, "an even number")
        for offset, length in sorted(at):  # type: ignore[call-overload]
            expect(offset >= end and length >= 0, "made", "pieces lie apart", at, "each behind the one before")
            end = offset + length - overlap
        return a, TensorType((), kept)
    return infer


def _oracle(times: float = 1.0) -> Callable[..., Arrays]:
    return lambda a, b, *, key, at: (times * a * b + key, np.zeros(()))


def _vjp(factor: float = 2.0, strict: bool = True, back: str = "a") -> Callable[..., Sequence[object]]:
    def vjp(emit: Any, node: Any, cotangents: Sequence[object]) -> Sequence[object]:
        a, b = node.inputs
        given = sole_cotangent("made", cotangents) if strict else cotangents[0]
        return emit("scale", given, factor=factor), emit("mul", given, a if back == "a" else b)
    return vjp


def _compose(factor: float = 1.0) -> Callable[..., object]:
    return lambda emit, a, b, *, key, at: emit("scale", emit("mul", a, b), factor=factor)


def _bound(times: float = 1.0, until: float = 1e9) -> Callable[[Arrays, Attrs], Sequence[np.ndarray | float]]:
    return lambda x, attrs: (times * np.abs(x[0]) if x[0].size < until else 2 * np.abs(x[0]), 0.0)


def _across(reverse: bool = False, last: int = 0) -> Callable[..., Sequence[Arrays]]:
    def across(members: Sequence[Arrays], *, key: int, at: object, size: int) -> Sequence[Arrays]:
        order = [a for a, _ in members]
        if len(order) == last:  # this many members add up in another order
            order = order[1:] + order[:1]
        total = order[0]
        for x in order[1:]:
            total = x + total if reverse else total + x
        return [(total,)] * size
    return across


MADE = OpSpec(name="made", inputs=("a", "b"), outputs=("y", "kept"), infer=_infer(), oracle=_oracle(), vjp=_vjp(), samples=_samples,
              flops=lambda t, a: 3 * t[0].size, nbytes=lambda t, a: 2 * t[0].nbytes, exact="made up", bound=_bound(),
              kept={"kept": "accumulate"}, undifferentiable=("kept",), across=_across(), compose=_compose(),
              stretch=lambda a, k: {**a, "key": k})
CHANGED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("nothing", {}, ()),
    ("a key one too large is taken", {"infer": _infer(most=2**32)}, ("takes",)),
    ("the largest key is refused", {"infer": _infer(most=2**32 - 2)}, ("takes",)),
    ("a refusal in other words", {"infer": _infer(words="key is a number")}, ("takes",)),
    ("odd sizes are refused", {"infer": _infer(even=True)}, ("takes",)),
    ("two types are taken", {"infer": _infer(apart=False)}, ("takes",)),
    ("one type is refused", {"infer": _infer(narrow=False)}, ("gradient", "takes")),
    ("pieces overlap by one", {"infer": _infer(overlap=1)}, ("takes",)),
    ("a result of another type", {"infer": _infer(kept="f64")}, ("takes",)),
    ("other values", {"oracle": _oracle(1.001)}, ("gives",)),
    ("sums turned round, which are the same", {"across": _across(reverse=True)}, ()),
    *((f"{n} members add up in another order", {"across": _across(last=n)}, ("gives",)) for n in (3, 5)),
    ("no collective", {"across": None}, ("gives",)),
    ("one FLOP more", {"flops": lambda t, a: 3 * t[0].size + 1}, ("counts",)),
    ("FLOPs of one type", {"flops": lambda t, a: (3 if t[0].dtype != "bf16" else 4) * t[0].size}, ("counts",)),
    ("bytes", {"nbytes": lambda t, a: 3 * t[0].nbytes}, ("counts",)),
    ("bytes by themselves", {"nbytes": None}, ("counts",)),
    ("a gradient by another factor", {"vjp": _vjp(factor=2.5)}, ("gradient",)),
    ("a gradient of the other operand", {"vjp": _vjp(back="b")}, ("gradient",)),
    ("a cotangent that nobody takes", {"vjp": _vjp(strict=False)}, ("gradient",)),
    ("no gradient", {"vjp": None, "why_no_vjp": "made up"}, ("gradient", "takes")),
    ("a wider tolerance", {"bound": _bound(1.01)}, ("within",)),
    ("a wider tolerance of one sample", {"bound": _bound(until=18)}, ()),  # the smallest without axes of 1 stands for its sort
    ("a wider tolerance from the smallest on", {"bound": _bound(until=12)}, ("within",)),
    ("no tolerance", {"bound": None}, ("within",)),
    ("another composition", {"compose": _compose(2.0)}, ("parts",)),
    ("no composition", {"compose": None}, ("parts",)),
    ("other places", {"stretch": lambda a, k: {**a, "key": k + 1}}, ("parts",)),
    ("nothing is kept", {"kept": {}}, ("takes",)),
    ("a result that takes a cotangent", {"undifferentiable": ()}, ("gradient", "takes")),
    ("an attribute more", {"attributes": ("at", "key", "more")}, ("takes",)),
    ("memory of the operand", {"view": True}, ("takes",)),
    ("other names", {"inputs": ("a", "c")}, ("takes",)),
)
"""What is changed of the made-up row; the aspects whose texts change."""


def statements(rng: np.random.Generator) -> Measured:
    """A change to a row shows where it belongs; samples of a sort are told by the smallest without axes of 1."""
    checks = Checks()
    was = Statement(MADE).texts
    checks.that(sorted(was) == list(ASPECTS) and all(was.values()), f"aspects {sorted(was)}")
    checks.that([s.name for s in Statement(MADE).samples] == ["of 4", "none"], f"samples {[s.name for s in Statement(MADE).samples]}")
    for name, change, aspects in CHANGED:
        now = Statement(replace(MADE, **change)).texts
        found = tuple(a for a in ASPECTS if now[a] != was[a])
        checks.that(found == aspects, f"{name}: {found}, not {aspects}")
    for word in ("refused: made: key is a word; came 4294967296; expected 0 to 4294967295; do check", "fails: ",
                 "of 4: f32[4,3] f32[4,3]; at=",
                 "as it is: f32[4,3] f32[]", "4 as 5 everywhere: f32[5,3] f32[]"):
        checks.that(word in was["takes"], f"{word!r} is not told")
    checks.that("of 4: bf16[4,3] bf16[4,3]; at=((0, 2), (2, 3)), key=5: 36 FLOPs, 48 B" in was["counts"], was["counts"][:200])
    checks.that("cotangents [True, False]: t0.0:f32[4,3] = scale(d0; factor=2.0) | t1.0:f32[4,3] = mul(d0, x0; ) | -> t0.0 t1.0" in
                was["gradient"] and "cotangents [True, True]: refused: made: only output 0" in was["gradient"], was["gradient"][:200])
    checks.that("t1.0:f32[4,3] = scale(t0.0; factor=1.0) | -> t1.0" in was["parts"] and "three times as long: at=((0, 2), (2, 3)), key=3" in
                was["parts"], was["parts"][:200])
    return checks.measured()


def of_the_table(rng: np.random.Generator) -> Measured:
    """Every row's aspects have digests of their texts; a row whose samples its own shape rule refuses is told, not raised."""
    checks = Checks()
    found = digests()
    checks.that(sorted(found) == sorted(f"{name} {aspect}" for name in table() for aspect in ASPECTS), "rows and aspects")
    for name in rng.permutation(sorted(table()))[:9].tolist():
        for aspect, text in Statement(table()[name]).texts.items():
            checks.that(found[f"{name} {aspect}"] == hashlib.sha256(text.encode()).hexdigest()[:16], f"{name} {aspect}")

    ids = table()["embedding"]
    lax = Statement(replace(ids, oracle=lambda table, ids: (table[ids],))).texts  # an id below zero is a row from the end
    checks.that([a for a in ASPECTS if lax[a] != Statement(ids).texts[a]] == ["gives"], "ids that are no row are not tried")

    def never(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
        raise ShapeError("never", came="anything")

    told = Statement(replace(MADE, infer=never)).texts
    checks.that("as it is: refused: never; came anything" in told["takes"] and "refused: never" in told["gradient"],
                "a row that takes nothing")
    return checks.measured()
