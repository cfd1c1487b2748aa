"""FusedSpec: a row that is a composition of other rows, written once as a function of Emit. Floor 1.

From that one function come the oracle (run with the parts' oracles), the shape rule (run with their shape rules), the FLOPs (summed)
and the pattern that the fusion pass looks for (run with a recorder). So none of them can differ from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import numpy as np

from alpha.ops import table as op_table
from alpha.ops.numerics import Walked, stored
from alpha.ops.spec import OpSpec, Samples, keywords
from alpha.types import Attrs, TensorType


@dataclass(frozen=True)
class Hole:
    """An attribute of the fused row inside its pattern, or one of its operands."""

    name: str
    operand: int = -1


@dataclass(frozen=True)
class Part:
    """One node of a pattern. `inputs`: Hole (operand) or (part index, output index)."""

    op: str
    inputs: tuple[Any, ...]
    attrs: Mapping[str, Any]


class _Recorder:
    def __init__(self) -> None:
        self.parts: list[Part] = []

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> Any:
        self.parts.append(Part(op, inputs, attrs))
        n = len(op_table.row(op).outputs)
        out = tuple((len(self.parts) - 1, i) for i in range(n))
        return out if n > 1 else out[0]


class _Infer:
    def __init__(self) -> None:
        self.flops = 0

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> Any:
        spec = op_table.row(op)
        out = tuple(spec.infer(inputs, attrs))
        self.flops += spec.flops(inputs, attrs)
        return out if len(out) > 1 else out[0]


def _oracle_emit(op: str, *inputs: Any, **attrs: Any) -> Any:
    spec = op_table.row(op)
    out = spec.oracle(*inputs, **attrs)
    names = [n.strip("?*") for n in spec.outputs]
    if not attrs.get("wide", False):  # a walk's parts hand on tensors of the compute type, but for those that the row keeps in another
        walked = (isinstance(y, Walked) and names[min(i, len(names) - 1)] not in spec.kept for i, y in enumerate(out))
        out = tuple(stored(y) if w else y for w, y in zip(walked, out))
    return out if len(out) > 1 else out[0]


@dataclass(frozen=True, kw_only=True)
class FusedSpec(OpSpec):
    """`compose(emit, *operands, **attrs)` returns the tuple of results. Attributes with defaults may be absent from the nodes matched."""

    compose: Callable[..., Any]  # given always: it is the pattern

    @property
    def parts(self) -> tuple[Part, ...]:
        """The pattern's nodes, in order; looked up lazily because they are rows of the table that this row is in."""
        return self._pattern[0]

    @cached_property
    def _pattern(self) -> tuple[tuple[Part, ...], tuple[Any, ...], dict[str, Any]]:
        recorder = _Recorder()
        names = [p for p in signature(self.compose).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
        operands = [Hole(n, i) for i, n in enumerate(self.inputs)]
        results = self.compose(recorder, *operands, **{p.name: Hole(p.name) for p in names})
        return tuple(recorder.parts), results, {p.name: p.default for p in names if p.default is not Parameter.empty}

    def matches(self, last: Any) -> Iterator[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]]:
        """(attributes, nodes in part order, operands) for the match whose last part is the node `last`, if there is one."""
        parts, _, defaults = self._pattern
        nodes: dict[int, Any] = {}
        bound: dict[str, Any] = {}
        attrs: dict[str, Any] = {}

        def unify(index: int, node: Any) -> bool:
            part = parts[index]
            if index in nodes:
                return nodes[index] is node
            if node is None or node.op != part.op or len(node.inputs) != len(part.inputs):
                return False
            nodes[index] = node
            for key, want in part.attrs.items():
                if isinstance(want, Hole):
                    have = node.attrs.get(key, defaults.get(want.name))
                    if have is None or attrs.setdefault(want.name, have) != have:
                        return False
                elif node.attrs.get(key) != want:
                    return False
            if set(node.attrs) - set(part.attrs):
                return False
            for value, want in zip(node.inputs, part.inputs):
                if isinstance(want, Hole):
                    if bound.setdefault(want.name, value) is not value:
                        return False
                elif value.producer is None or value.index != want[1] or not unify(want[0], value.producer):
                    return False
            return True

        if unify(len(parts) - 1, last) and len(nodes) == len(parts):
            yield attrs, tuple(nodes[i] for i in range(len(parts))), tuple(bound[n] for n in self.inputs)

    def results(self, match: Sequence[Any]) -> tuple[Any, ...]:
        """The matched nodes' values that are the fused row's outputs, in order."""
        return tuple(match[part].outputs[index] for part, index in self._pattern[1])


def derived(compose: Callable[..., Any]) -> dict[str, Any]:
    """Shape rule, oracle, FLOPs and attributes of a composition, for a row that is traced by its own name."""

    def infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
        return tuple(compose(_Infer(), *types, **attrs))

    def oracle(*arrays: np.ndarray, **attrs: Any) -> tuple[np.ndarray, ...]:
        return tuple(compose(_oracle_emit, *arrays, **attrs))

    def flops(types: Sequence[TensorType], attrs: Attrs) -> int:
        counter = _Infer()
        compose(counter, *types, **attrs)
        return counter.flops

    return {"infer": infer, "oracle": oracle, "flops": flops, "compose": compose, "attributes": keywords(compose)}


def fused(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], compose: Callable[..., Any], *, samples: Samples,
          exact: Samples | str, undifferentiable: tuple[str, ...] = (), kept: Mapping[str, str] | None = None,
          bound: Callable[[tuple[np.ndarray, ...], Attrs], Sequence[Any]] | None = None) -> FusedSpec:
    """The row of a composition. It has no vjp: fusion happens after differentiation."""
    return FusedSpec(name=name, inputs=inputs, outputs=outputs, vjp=None, why_no_vjp="fused after differentiation", samples=samples,
                     exact=exact, bound=bound, undifferentiable=undifferentiable, kept=kept or {}, **derived(compose))
