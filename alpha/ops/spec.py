"""OpSpec: what a row of the op table says, and the protocol that vjps write through. Floor 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, Protocol

import numpy as np

from alpha.errors import ShapeError
from alpha.ops.numerics import ACCUMULATE
from alpha.types import Attrs, TensorType

SHAPE = 1
"""Version of the fields of the data classes here, raised by hand: evidence binds to it in their place (alpha/registry/package.py)."""

Arrays = tuple[np.ndarray, ...]


class ValueLike(Protocol):
    """What a vjp may read of a graph value."""

    @property
    def type(self) -> TensorType: ...


class NodeLike(Protocol):
    """What a vjp may read of a node."""

    @property
    def op(self) -> str: ...
    @property
    def inputs(self) -> Sequence[ValueLike]: ...
    @property
    def outputs(self) -> Sequence[ValueLike]: ...
    @property
    def attrs(self) -> Attrs: ...


class Emit(Protocol):
    """Writes one node; returns its output, or the tuple of its outputs when the row has several."""

    def __call__(self, op: str, *inputs: ValueLike, **attrs: object) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One test case of a row. `inputs`: float64 arrays for float operands (already representable in the narrowest dtype tested is not
    required: the gate rounds them to the kernel's dtype first and gives the oracle the rounded values), int32/int64 arrays for integers.
    `wrt`: indices of inputs that the gradient gate perturbs (default: every float input that the row does not name undifferentiable).
    """

    name: str
    inputs: Arrays
    attrs: dict[str, object] = field(default_factory=dict)
    wrt: tuple[int, ...] | None = None


Samples = Callable[[np.random.Generator], Iterable[Sample]]


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """One row.

    name            snake_case, the field's standard term
    inputs          operand names in order; a trailing '?' marks an optional operand (absent ones are simply not passed, last first);
                    a single name with a leading '*' takes any number
    outputs         result names in order
    infer           (input types, attrs) -> output types; raises ShapeError with what came and what was expected
    oracle          (*float64/integer arrays, **attrs) -> tuple of arrays: plain NumPy, imports nothing from any backend. It is written
                    with ufuncs, matmul, sum/max/mean, indexing and reshapes only, so that `numerics.walk` can run the same text
                    sequentially with the type's rounding after each operation: that is the row's `naive`, derived, never rewritten.
    vjp             (emit, node, cotangents) -> one cotangent (or None) per input; None where the row is not differentiable
    why_no_vjp      reason when vjp is None (backward rows, integer rows, updates)
    flops           (input types, attrs) -> executed floating-point operations (multiply-add = 2), the field's convention
    nbytes          fewest bytes moved; default: each input read once, each output written once
    samples         shapes with 1, primes, tile size +-1, ragged; contents equal, large, denormal-ish; every attr used at least once
    exact           samples whose result is exact in f32 (integers for linear ops, one-hot, powers of two), or the reason why none exist
    bound           (inputs, attrs) -> per-output arrays or floats, in units of the compute type's unit roundoff u, added to the parity
                    tolerance: for functions that a library may round up to k ulp: k*|result scale|; default 0
    kept            float operands and results that do not have the compute type: name -> 'accumulate' (ACCUMULATE of the compute type:
                    statistics, losses, gradient buffers) or a fixed dtype; all others have the compute type (docs/numerics.md), but
                    for results of a row with the attribute `wide`, which have the accumulation type when it is set
    undifferentiable names of inputs without a gradient (ids, masks, positions) and of outputs that take no cotangent (mean, rstd, lse)
    view            true when the output is the input's memory under another shape (reshape): no kernel runs
    stretch         (attrs, k) -> attrs for operands k times as long, where attributes name places in them; default: the same attrs
    compose         (emit, *operands, **attrs) -> results: the row as a composition of other rows, None where it is none. A back end without
                    a kernel for the row runs this (alpha/passes/expand.py). Operands have `shape`
    across          collectives: (operands of every member, in the group's order, **attrs) -> results of every member. The oracle stands
                    for a group of one member. A row that has it acts on other ranks, so a node of it is neither pruned, repeated nor
                    moved past another of its group
    attributes      names of the attributes, where the oracle takes any (`**attrs`); default: the oracle's keyword-only parameters
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    infer: Callable[[Sequence[TensorType], Attrs], tuple[TensorType, ...]]
    oracle: Callable[..., Arrays]
    vjp: Callable[[Emit, NodeLike, Sequence[object]], Sequence[object]] | None
    why_no_vjp: str = ""
    flops: Callable[[Sequence[TensorType], Attrs], int]
    nbytes: Callable[[Sequence[TensorType], Attrs], int] | None = None
    samples: Samples
    exact: Samples | str
    bound: Callable[[Arrays, Attrs], Sequence[np.ndarray | float]] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    undifferentiable: tuple[str, ...] = ()
    view: bool = False
    stretch: Callable[[Attrs, int], Attrs] | None = None
    compose: Callable[..., Any] | None = None
    across: Callable[..., Sequence[Arrays]] | None = None
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.vjp is None) == (not self.why_no_vjp):
            raise ShapeError("a row has either a vjp or a reason why not", came=self.name)

    @cached_property
    def known_attributes(self) -> tuple[str, ...]:
        """Names of every attribute that a call may give, sorted."""
        return tuple(sorted(self.attributes or keywords(self.oracle)))

    def operand_dtype(self, index: int, compute: str) -> str:
        """Element type of float operand number `index` when the row computes in `compute`."""
        kept = self.kept.get(self.inputs[min(index, len(self.inputs) - 1)].strip("?*"), "")
        return compute if not kept else ACCUMULATE[compute] if kept == "accumulate" else kept

    def compute_dtype(self, types: Sequence[TensorType]) -> str | None:
        """The compute type of a call: that of its first float operand that is not kept in another; None where there is none."""
        names = [n.strip("?*") for n in self.inputs]
        return next((t.dtype for i, t in enumerate(types) if t.is_float and names[min(i, len(names) - 1)] not in self.kept), None)

    def takes_cotangent(self, output: int, of: TensorType) -> bool:
        """Whether output number `output`, of type `of`, is differentiable: a float that the row does not name undifferentiable."""
        return of.is_float and self.outputs[min(output, len(self.outputs) - 1)] not in self.undifferentiable

    def min_bytes(self, types: Sequence[TensorType], attrs: Attrs) -> int:
        """Fewest bytes that must move for one call."""
        if self.nbytes is not None:
            return self.nbytes(types, attrs)
        return sum(t.nbytes for t in types) + sum(t.nbytes for t in self.infer(types, attrs))


def keywords(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of the keyword-only parameters of an oracle or a composition, in order."""
    return tuple(p.name for p in signature(function).parameters.values() if p.kind is Parameter.KEYWORD_ONLY)


def stretched(attrs: Attrs, k: int) -> Attrs:
    """`stretch` of rows over a flat buffer: (offset, length, ...) of every segment become k times as large."""
    segments: tuple[tuple[int, ...], ...] = attrs["segments"]  # type: ignore[assignment]
    return {**attrs, "segments": tuple((offset * k, length * k, *rest) for offset, length, *rest in segments)}


def expect(condition: bool, op: str, invariant: str, came: object, expected: object) -> None:
    """Raise a ShapeError that names the op and the invariant unless `condition` holds."""
    if not condition:
        raise ShapeError(f"{op}: {invariant}", came=came, expected=expected, do="check the shapes given to this op in the model")


def same_dtype(op: str, types: Sequence[TensorType]) -> str:
    """The common dtype of all float operands; ShapeError if they differ."""
    dtypes = {t.dtype for t in types if t.is_float}
    expect(len(dtypes) == 1, op, "float operands share one dtype", sorted(dtypes), "one dtype")
    return dtypes.pop()


def accumulated(op: str, dtype: str, attrs: Attrs) -> str:
    """The result type of a row that sums: the compute type, or with the attribute `wide` the accumulation type, unrounded."""
    wide = attrs.get("wide", False)
    expect(isinstance(wide, bool), op, "wide is a bool", wide, "True or False")
    return ACCUMULATE[dtype] if wide else dtype


def sole_cotangent(op: str, cotangents: Sequence[object]) -> object:
    """The cotangent of output 0 of a row whose other outputs take none; ShapeError if one of those has one: its gradient is not taken."""
    expect(all(c is None for c in cotangents[1:]), op, "only output 0 is differentiable",
           f"a cotangent for output {next((i for i, c in enumerate(cotangents[1:], 1) if c is not None), 0)}", "None")
    return cotangents[0]
