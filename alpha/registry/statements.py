"""What a row of the op table says, told whole as text: calls that it takes and refuses, what it counts, its gradient, its tolerance, its
values, its parts. Floor 3.

Gates call a kernel on what its row takes. So a row that takes or refuses one call more, counts another number of FLOPs, or widens its own
tolerance would pass all of them. The digests of these texts are asked for by the merge gate (asked.py): one that changes needs a reason.

Calls are the row's own samples, the smallest of each sort, and what lies one step beside them: an operand of another type, or with an axis
more or less; an axis longer or shorter by one, or empty, alone and with all that are as long; an attribute one more or less, negated, at
zero, at the ends of integers, of another kind; an id that is no row. Data are drawn from one seed. Values are told as sums of five digits,
which no other library's rounding changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from alpha.errors import AlphaError, ShapeError
from alpha.ops.spec import OpSpec, Sample
from alpha.ops.table import row, table
from alpha.types import FLOATS, TensorType

INTEGERS = (0, -1, 2**31, 2**32 - 1, 2**32)
"""Integers that an attribute is tried at: zero, below it, and where words of 32 bits end."""
NUMBERS = (0.0, 1.0, 2.0, float("inf"), float("nan"))


@dataclass(frozen=True)
class _Value:
    """A value of a call that is only told: its name and type."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


@dataclass(frozen=True)
class _Node:
    op: str
    inputs: tuple[_Value, ...]
    outputs: tuple[_Value, ...]
    attrs: Mapping[str, object]


class _Emit:
    """Tells each node that is emitted as a line, with the types that its row infers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, op: str, *inputs: Any, **attrs: object) -> object:
        types = row(op).infer([v.type for v in inputs], attrs)
        made = tuple(_Value(f"t{len(self.lines)}.{i}", t) for i, t in enumerate(types))
        results, operands = " ".join(f"{v.name}:{v.type}" for v in made), ", ".join(v.name for v in inputs)
        self.lines.append(f"{results} = {op}({operands}; {_attributes(attrs)})")
        return made if len(made) != 1 or op == "split" else made[0]


def _attributes(attrs: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in sorted(attrs.items()))


def _types(spec: OpSpec, sample: Sample, compute: str) -> list[TensorType]:
    arrays = [np.asarray(x) for x in sample.inputs]
    return [TensorType(x.shape, spec.operand_dtype(i, compute) if x.dtype.kind == "f" else "i32") for i, x in enumerate(arrays)]


@dataclass(frozen=True)
class Statement:
    """Of one row. `texts`: aspect -> text."""

    spec: OpSpec

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The smallest sample of each sort: so many operands of so many axes, attributes of these kinds and signs. Those with axes of 1
        come last: much fits them."""
        found: dict[object, tuple[tuple[bool, int], Sample]] = {}
        for sample in self.spec.samples(np.random.default_rng(0)):
            shapes = [np.shape(x) for x in sample.inputs]
            sort = tuple(map(len, shapes)), tuple((k, _kind(v)) for k, v in sorted(sample.attrs.items()))
            size = any(1 in s for s in shapes), sum(int(np.prod(s)) for s in shapes)
            if sort not in found or size < found[sort][0]:
                found[sort] = size, sample
        return tuple(sample for _, sample in found.values())

    @cached_property
    def texts(self) -> dict[str, str]:
        tells = {"takes": self._takes, "counts": self._counts, "gradient": self._gradient, "within": self._within, "gives": self._gives,
                 "parts": self._parts}
        return {aspect: "\n".join(line for sample in self.samples for line in tell(sample)) for aspect, tell in tells.items()}

    def _call(self, sample: Sample, types: Sequence[TensorType]) -> str:
        return f"{sample.name}: {' '.join(map(str, types))}; {_attributes(sample.attrs)}"

    def _takes(self, sample: Sample) -> Iterator[str]:
        """Result types, or the words of the refusal."""
        spec, types = self.spec, _types(self.spec, sample, "f32")
        names = [*spec.inputs, "->", *spec.outputs, *spec.known_attributes, *sorted(spec.kept.items()), *spec.undifferentiable, spec.view]
        yield f"{self._call(sample, types)}; {names}; {spec.why_no_vjp}"
        calls = [("as it is", types, sample.attrs), ("one operand less", types[:-1], sample.attrs)]
        calls += [(f"{how} {dtype}", made, sample.attrs) for dtype in FLOATS for how, made in (
            ("computed in", _types(spec, sample, dtype)), ("all floats", [replace(t, dtype=dtype) if t.is_float else t for t in types]))]
        calls += [(f"operand {i} {new}", [*types[:i], new, *types[i + 1 :]], sample.attrs)
                  for i, t in enumerate(types) for new in _beside(t)]
        calls += [(f"{n} as {to} everywhere", [_resized(t, n, to) for t in types], sample.attrs)
                  for n in dict.fromkeys(n for t in types for n in t.shape) for to in (n + 1, n - 1, 0) if to >= 0]
        calls += [(f"{k} {new!r}", types, {**sample.attrs, k: new}) for k, v in sample.attrs.items() for new in _other(v)]
        calls += [(f"without {k}", types, {x: v for x, v in sample.attrs.items() if x != k}) for k in sample.attrs]
        for name, new_types, attrs in calls:
            yield f"{name}: {_told(lambda t=new_types, a=attrs: ' '.join(map(str, spec.infer(t, a))))}"  # type: ignore[misc]

    def _counts(self, sample: Sample) -> Iterator[str]:
        """FLOPs and bytes in each type."""
        for compute in FLOATS:
            types = _types(self.spec, sample, compute)
            yield f"{self._call(sample, types)}: {_told(lambda t=types: _counted(self.spec, t, sample))}"  # type: ignore[misc]

    def _gradient(self, sample: Sample) -> Iterator[str]:
        """The nodes that the gradient emits in each type: with every cotangent that it takes, without each, with one that it does not."""
        spec = self.spec
        for compute in FLOATS if spec.vjp else ():
            types = _types(spec, sample, compute)
            try:
                outs = spec.infer(types, sample.attrs)
            except ShapeError as error:  # a row of one type alone
                yield f"{self._call(sample, types)}: refused: {error.what}"
                continue
            takes = [spec.takes_cotangent(i, t) for i, t in enumerate(outs)]
            given = [takes, *([yes and j != i for j, yes in enumerate(takes)] for i in range(len(outs)) if takes[i] and sum(takes) > 1),
                     *([yes or j == i for j, yes in enumerate(takes)] for i in range(len(outs)) if not takes[i])]
            node = _Node(spec.name, tuple(_Value(f"x{i}", t) for i, t in enumerate(types)),
                         tuple(_Value(f"y{i}", t) for i, t in enumerate(outs)), sample.attrs)
            for which in given:
                yield f"{self._call(sample, types)}; cotangents {which}: {_told(lambda n=node, w=which: _pulled(spec, n, w))}"  # type: ignore[misc]

    def _within(self, sample: Sample) -> Iterator[str]:
        """The tolerance that the row asks for, summed over each result."""
        bound = self.spec.bound
        if bound is not None:
            yield f"{sample.name}: {' '.join(_summed(b) for b in bound(sample.inputs, sample.attrs))}"

    def _gives(self, sample: Sample) -> Iterator[str]:
        """What the oracle gives, summed over each result; for integers below, at and far above their least too; of a collective, the bits
        that 2, 3 and 5 members get."""
        yield f"{sample.name}: {self._given(sample.inputs, sample)}"
        for i, x in enumerate(map(np.asarray, sample.inputs)):
            for value in (-1, 0, 2**31 - 1) if x.dtype.kind == "i" and x.size else ():
                first = np.where(np.arange(x.size).reshape(x.shape) == 0, value, x)
                yield f"operand {i} begins with {value}: {self._given([*sample.inputs[:i], first, *sample.inputs[i + 1 :]], sample)}"
        for n in (2, 3, 5) if self.spec.across is not None else ():
            yield f"{sample.name}, {n} members: {_told(lambda n=n: _exchanged(self.spec, sample, n))}"  # type: ignore[misc]

    def _given(self, inputs: Sequence[np.ndarray], sample: Sample) -> str:
        with np.errstate(all="ignore"):
            return _told(lambda: " ".join(_summed(y) for y in self.spec.oracle(*inputs, **sample.attrs)))

    def _parts(self, sample: Sample) -> Iterator[str]:
        """The composition that stands for the row, and attributes of operands that are three times as long."""
        spec, types = self.spec, _types(self.spec, sample, "f32")
        if spec.compose is not None:
            yield f"{self._call(sample, types)}: {_told(lambda: _composed(spec, types, sample))}"
        if spec.stretch is not None:
            yield f"{sample.name}, three times as long: {_attributes(spec.stretch(sample.attrs, 3))}"


def _counted(spec: OpSpec, types: Sequence[TensorType], sample: Sample) -> str:
    return f"{spec.flops(types, sample.attrs)} FLOPs, {spec.min_bytes(types, sample.attrs)} B"


def _pulled(spec: OpSpec, node: _Node, which: Sequence[bool]) -> str:
    emit = _Emit()
    assert spec.vjp is not None
    found = spec.vjp(emit, node, [_Value(f"d{i}", v.type) if yes else None for i, (v, yes) in enumerate(zip(node.outputs, which))])
    return " | ".join([*emit.lines, f"-> {' '.join(getattr(v, 'name', 'none') for v in found)}"])


def _composed(spec: OpSpec, types: Sequence[TensorType], sample: Sample) -> str:
    emit = _Emit()
    assert spec.compose is not None
    found = spec.compose(emit, *(_Value(f"x{i}", t) for i, t in enumerate(types)), **sample.attrs)
    return " | ".join([*emit.lines, f"-> {' '.join(v.name for v in (found if isinstance(found, tuple) else (found,)))}"])


def _exchanged(spec: OpSpec, sample: Sample, n: int) -> str:
    """Uniform numbers, additions and divisions alone: their bits are the same everywhere."""
    assert spec.across is not None
    rng = np.random.default_rng(n)
    members = [tuple(10.0**i * (rng.random((30, 2)) - 0.5) for _ in sample.inputs) for i in range(n)]
    found = spec.across(members, **{**sample.attrs, "size": n})
    return " ".join(hashlib.sha256(b"".join(np.ascontiguousarray(y).tobytes() for y in ys)).hexdigest()[:16] for ys in found)


def _told(action: Callable[[], str]) -> str:
    """What it returns, or its refusal. Of an error that is none of ours the kind alone: its words are Python's."""
    try:
        return action()
    except AlphaError as error:
        return f"refused: {error.what}; came {error.came}; expected {error.expected}; do {error.do}"
    except Exception as error:  # a row that is given nonsense may fail in any way; which one is a statement too
        return f"fails: {type(error).__name__}"


def _summed(x: object) -> str:
    array = np.asarray(x, np.float64)
    return f"{array.size} {np.abs(array).sum():.5g}"


def _kind(value: object) -> object:
    """What two values of one attribute have in common where calls of one sort have them."""
    if isinstance(value, tuple):
        return tuple(sorted({repr(_kind(v)) for v in value}))
    return (type(value).__name__, (value > 0) - (value < 0)) if type(value) in (int, float) else value  # type: ignore[operator]


def _beside(t: TensorType) -> list[TensorType]:
    """Types one step beside this one."""
    found = [TensorType(t.shape, dtype) for dtype in (*FLOATS, "i32") if dtype != t.dtype]
    found += [TensorType((*t.shape, 1), t.dtype)] + ([TensorType(t.shape[:-1], t.dtype)] if t.shape else [])
    return found + [TensorType((*t.shape[:i], to, *t.shape[i + 1 :]), t.dtype) for i, n in enumerate(t.shape) for to in (n + 1, n - 1, 0)
                    if to >= 0]


def _resized(t: TensorType, n: int, to: int) -> TensorType:
    return TensorType(tuple(to if size == n else size for size in t.shape), t.dtype)


def _other(value: object, depth: int = 0) -> list[object]:
    """Values one step beside this one, at the ends of its kind, and of other kinds. `depth`: of the tuples that it lies in."""
    found: list[object] = [None, "other"]
    if isinstance(value, bool):
        found = [not value, int(value), None]
    elif isinstance(value, int):
        found += [value + 1, value - 1, -value, float(value), str(value), *(INTEGERS if depth < 2 else ())]
    elif isinstance(value, float):
        found += [-value, value / 2, int(value), *NUMBERS]
    elif isinstance(value, tuple):
        found += [(), list(value), value[:-1], (*value, *value[-1:]), value[::-1]]
        found += [(*value[:i], new, *value[i + 1 :]) for i, v in enumerate(value[:4]) for new in _other(v, depth + 1)]
        found += [(*value[:i], a + b + 1, -1, *value[i + 2 :]) for i, (a, b) in enumerate(pairwise(value[:4]))
                  if isinstance(a, int) and isinstance(b, int)]
    return [new for new in found if repr(new) != repr(value)]


@cache
def digests() -> dict[str, str]:
    """'ROW ASPECT' -> digest, of every row of the table."""
    return {f"{name} {aspect}": hashlib.sha256(text.encode()).hexdigest()[:16]
            for name, spec in table().items() for aspect, text in Statement(spec).texts.items()}
