"""What operands an outside component takes: symbolic shapes, the sizes behind them, and samples drawn from both. Floor 7."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from alpha.errors import InputError, ShapeError
from alpha.ops.spec import Sample, expect
from alpha.types import Attrs, TensorType

Dimension = int | str

ODD = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)
"""Sizes that are tried: 1, primes, either side of the powers of two at which kernels cut tiles."""

FURTHER = 4
"""Sizes above those, drawn evenly over the logarithm."""

DRAWN = 48
"""Most samples: every size takes every value that is tried, one after the other, the others drawn beside it."""

ELEMENTS, LARGE = 8_000, 60_000
"""Most elements of all operands of a sample, and of one with a size at its most."""

CONTENTS: tuple[Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], ...] = (
    lambda rng, shape: rng.standard_normal(shape),
    lambda rng, shape: rng.uniform(-1, 1, shape) + 20.0 * rng.standard_normal((*shape[:-1], 1) if shape else ()),
    lambda rng, shape: rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape)),
    lambda rng, shape: 1e-3 * rng.standard_normal(shape),
    lambda rng, shape: np.where(rng.random(shape) < 0.5, rng.standard_normal(), rng.standard_normal(shape)),
)
"""Plain, with an offset common to a row, of many magnitudes, small, half of them equal."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A named size: any multiple of `multiple` in [least, most]. `timed`: its value in the timed call, None where it is grown."""

    least: int
    most: int
    multiple: int = 1
    timed: int | None = None

    def holds(self, n: int) -> bool:
        return self.least <= n <= self.most and n % self.multiple == 0

    def near(self, n: int) -> int:
        """The allowed size that is nearest to n from below, or the least one."""
        ends = [-(-self.least // self.multiple) * self.multiple, self.most // self.multiple * self.multiple]
        return min(max(n // self.multiple * self.multiple, ends[0]), ends[1])


@dataclass(frozen=True, kw_only=True)
class Operand:
    """shape: numbers and names of sizes (of an output: expressions of them). dtype: '' for the compute type, else i32 or i64, whose values
    lie in [least, below); `below` is an expression of sizes."""

    name: str
    shape: tuple[Dimension, ...]
    dtype: str = ""
    least: int = 0
    below: str = ""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """All operands of a component."""

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    sizes: Mapping[str, Size]

    def least(self) -> dict[str, int]:
        """The least value of each size."""
        return {name: s.near(s.least) for name, s in self.sizes.items()}

    def sizes_of(self, types: Sequence[TensorType]) -> dict[str, int]:
        """The value of each size in a call. ShapeError where operands do not fit the declared shapes."""
        expect(len(types) == len(self.inputs), self.name, "number of operands", len(types), len(self.inputs))
        found: dict[str, int] = {}
        floats = {t.dtype for t, o in zip(types, self.inputs) if not o.dtype}
        expect(len(floats) == 1 and all(t.is_float for t, o in zip(types, self.inputs) if not o.dtype), self.name,
               "float operands share one float type", [str(t) for t in types], "one type")
        for t, o in zip(types, self.inputs):
            expect(not o.dtype or t.dtype == o.dtype, self.name, f"element type of {o.name}", t.dtype, o.dtype)
            expect(len(t.shape) == len(o.shape), self.name, f"rank of {o.name}", str(t), list(o.shape))
            for n, d in zip(t.shape, o.shape):
                expect(n == (d if isinstance(d, int) else found.setdefault(d, n)), self.name, f"shape of {o.name}", str(t), list(o.shape))
        for name, n in found.items():
            expect(self.sizes[name].holds(n), self.name, f"size {name}", n, self.sizes[name])
        return found

    def types(self, sizes: Mapping[str, int], compute: str) -> tuple[TensorType, ...]:
        """Types of the inputs at these sizes."""
        return tuple(TensorType(shape_at(o, sizes), o.dtype or compute) for o in self.inputs)

    def infer(self, types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
        """Output types; ShapeError outside the declared shapes and sizes."""
        sizes = self.sizes_of(types)
        compute = next(t.dtype for t, o in zip(types, self.inputs) if not o.dtype)
        return tuple(TensorType(shape_at(o, sizes), o.dtype or compute) for o in self.outputs)

    def holds(self, types: Sequence[TensorType], attrs: Attrs) -> bool:
        """Whether a call fits; the limit of an envelope."""
        try:
            self.sizes_of(types)
        except ShapeError:
            return False
        return True

    def samples(self, rng: np.random.Generator, attrs: dict[str, object], *, whole: bool = False) -> Iterator[Sample]:
        """Samples of drawn sizes and contents. `whole`: of small integers."""
        seen = {tuple(s.near(s.least) for s in self.sizes.values()): None}
        fixed: list[dict[str, int]] = []
        for name, s in self.sizes.items():
            most = min(s.most, ELEMENTS)
            above = np.exp(rng.uniform(np.log(min(most, ODD[-1])), np.log(most), FURTHER)).astype(int)
            tried = [s.near(int(n)) for n in (*ODD, *above)]
            fixed += [{name: n} for n in dict.fromkeys(tried)]
            seen[tuple({**{k: z.near(3) for k, z in self.sizes.items()}, name: s.near(s.most)}.values())] = None
        for i in rng.permutation(len(fixed)):
            for limit in (257, 65, 17, 5, 1):  # the others are drawn the smaller, the larger this one is
                at = {k: s.near(int(rng.choice([n for n in ODD if n <= limit]))) for k, s in self.sizes.items()} | fixed[i]
                if self._elements(at) <= ELEMENTS:
                    seen[tuple(at.values())] = None
                    break
            if len(seen) >= DRAWN:
                break
        inside = [values for values in seen if self._elements(dict(zip(self.sizes, values))) <= LARGE]
        for i, values in enumerate(inside):
            yield self.sample(dict(zip(self.sizes, values)), rng, attrs, CONTENTS[i % len(CONTENTS)], whole)

    def sample(self, sizes: Mapping[str, int], rng: np.random.Generator, attrs: Attrs, make: Callable = CONTENTS[0],
               whole: bool = False) -> Sample:
        """One sample of these sizes."""
        name = "-".join(f"{k}{v}" for k, v in sizes.items()) or "fixed"
        return Sample(name=name, inputs=tuple(self._content(o, sizes, rng, make, whole) for o in self.inputs), attrs=dict(attrs))

    def grown(self, enough: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
        """Sizes from 16 on, the smallest doubled again and again until they are enough or all are at their most."""
        at = {name: s.near(16) for name, s in self.sizes.items()}
        while not enough(at):
            bigger = {name: s.near(2 * at[name]) for name, s in self.sizes.items() if s.near(2 * at[name]) > at[name]}
            if not bigger:
                break
            name = min(bigger, key=lambda n: at[n])
            at[name] = bigger[name]
        return at

    def timed(self) -> dict[str, int] | None:
        """The sizes of the timed call; None where component.toml says none. Those that it leaves out are at their most."""
        if all(s.timed is None for s in self.sizes.values()):
            return None
        return {name: s.near(s.most if s.timed is None else s.timed) for name, s in self.sizes.items()}

    def _elements(self, sizes: Mapping[str, int]) -> int:
        return sum(prod(shape_at(o, sizes)) for o in (*self.inputs, *self.outputs))

    @staticmethod
    def _content(o: Operand, sizes: Mapping[str, int], rng: np.random.Generator, make: Callable, whole: bool) -> np.ndarray:
        shape = shape_at(o, sizes)
        if o.dtype:
            return np.asarray(rng.integers(o.least, evaluated(o.below, sizes), shape), {"i32": np.int32, "i64": np.int64}[o.dtype])
        return rng.integers(-4, 5, shape).astype(np.float64) if whole else np.asarray(make(rng, shape), np.float64)


def shape_at(o: Operand, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an operand in a call."""
    return tuple(d if isinstance(d, int) else evaluated(d, sizes) for d in o.shape)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
              ast.Mod: operator.mod}


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """An integer expression of sizes: names, numbers, + - * // %, brackets. InputError for anything else."""
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(ast.unparse(node))

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise InputError("not an expression of sizes", came=f"{text!r}: {error}", expected=f"numbers, {', '.join(sizes)}, + - * // %",
                         do="mend component.toml") from error
