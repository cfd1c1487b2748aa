"""A small eager evaluator of the Emit protocol: runs what a vjp writes, with oracles or with kernels, without a graph. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from alpha.errors import GraphError
from alpha.ops.spec import OpSpec, ValueLike
from alpha.ops.table import row, table
from alpha.types import Attrs, TensorType

Runner = Callable[[str, Sequence["Value"], Attrs, Sequence[TensorType]], Sequence[np.ndarray]]
"""(op, inputs, attrs, output types) -> output arrays."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor type with its content; float contents are float64."""

    type: TensorType
    array: np.ndarray


@dataclass(frozen=True, eq=False)
class Node:
    """What a vjp reads of the node that it differentiates."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Attrs


@dataclass
class Eager:
    """Emit that evaluates at once. `runner` computes a node; `seen` collects the ops in order of emission."""

    runner: Runner
    seen: list[str] = field(default_factory=list)

    def __call__(self, op: str, *inputs: ValueLike, **attrs: object) -> object:
        self.seen.append(op)
        spec = row(op)
        values: list[Value] = []
        for x in inputs:
            if not isinstance(x, Value):
                raise GraphError("a vjp emitted an operand that is no value", came=f"{op}: {type(x).__name__}",
                                 do="use the values of the node and those that emit returned")
            values.append(x)
        types = spec.infer([x.type for x in values], attrs)
        arrays = self.runner(op, values, attrs, types)
        results = tuple(Value(t, np.asarray(a).reshape(t.shape)) for t, a in zip(types, arrays))
        return results[0] if len(results) == 1 else results


def oracles(op: str, inputs: Sequence[Value], attrs: Attrs, types: Sequence[TensorType]) -> Sequence[np.ndarray]:
    """Runner: every node by its row's oracle, in float64."""
    with np.errstate(all="ignore"):
        return row(op).oracle(*(x.array for x in inputs), **attrs)


def shapes_only(op: str, inputs: Sequence[Value], attrs: Attrs, types: Sequence[TensorType]) -> Sequence[np.ndarray]:
    """Runner: no arithmetic; zeros of the right shapes."""
    return [np.zeros(t.shape) for t in types]


def node(spec: OpSpec, inputs: Sequence[np.ndarray], types: Sequence[TensorType], attrs: Attrs,
         outputs: Sequence[np.ndarray] | None = None) -> Node:
    """A node with its inputs' and (by the oracle, unless given) outputs' values."""
    values = tuple(Value(t, np.asarray(x)) for t, x in zip(types, inputs))
    out_types = spec.infer(list(types), attrs)
    if outputs is None:
        outputs = oracles(spec.name, values, attrs, out_types)
    return Node(spec.name, values, tuple(Value(t, np.asarray(y)) for t, y in zip(out_types, outputs)), attrs)


def vjp(spec: OpSpec, at: Node, cotangents: Sequence[np.ndarray], runner: Runner) -> list[np.ndarray | None]:
    """The row's vjp evaluated at a node: one float64 array, or None, per input. GraphError where a shape is wrong."""
    assert spec.vjp is not None
    emit = Eager(runner)
    given = [Value(o.type, np.asarray(c)) if spec.takes_cotangent(i, o.type) else None
             for i, (o, c) in enumerate(zip(at.outputs, cotangents))]
    results = list(spec.vjp(emit, at, given))
    if len(results) != len(at.inputs):
        raise GraphError(f"{spec.name}: a vjp gives one cotangent or None per input", came=len(results), expected=len(at.inputs))
    found: list[np.ndarray | None] = []
    for x, g in zip(at.inputs, results):
        if g is not None and (not isinstance(g, Value) or g.type.shape != x.type.shape):
            raise GraphError(f"{spec.name}: a cotangent has the shape of its input", came=getattr(g, "type", g), expected=x.type)
        found.append(None if g is None else np.asarray(g.array, np.float64))
    return found


@cache
def emitted() -> dict[str, frozenset[str]]:
    """For every row with a vjp: the ops that it emits on its samples, found by running it on shapes alone."""
    from alpha.gates.subjects import case_of, generator

    found: dict[str, frozenset[str]] = {}
    for name, spec in table().items():
        if spec.vjp is None:
            continue
        seen: set[str] = set()
        for sample in spec.samples(generator("00", name, "emitted")):
            case = case_of(sample, "f64")
            emit = Eager(shapes_only, [])
            zeros = [np.zeros(t.shape) for t in case.out_types(spec)]
            at = node(spec, case.inputs, case.types, case.attrs, zeros)
            spec.vjp(emit, at, [o if spec.takes_cotangent(i, o.type) else None for i, o in enumerate(at.outputs)])
            seen.update(emit.seen)
        found[name] = frozenset(seen)
    return found
