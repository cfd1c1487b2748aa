"""Value, Node, Graph: static single assignment over the op table. Floor 2.

A graph reads `inputs` (handed in by the host each call) and `states` (live in named arenas between calls), computes, and gives
`outputs`; `updates` say which state tensor takes which value when the graph has run. Nothing is mutated inside a graph: in-place work
is the memory pass's decision, made where it can be proved safe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from alpha.errors import GraphError
from alpha.graph.order import COMPUTE
from alpha.ops.table import row
from alpha.types import Attrs, Table, TensorType

PHASES = ("forward", "recompute", "backward", "wgrad", "reduce", "update")


@dataclass(eq=False)
class Value:
    """One tensor. `kind`: 'input', 'state' or 'node'. A state value names its box: `state` = (kind of state, element offset).

    `type` is a static bound. `extent`: the integer, an input or a state i32[], that says how many rows along the first axis the tensor has
    when the graph runs, from 0 to the bound; None: all of them. What lies behind these rows is rubbish (alpha/graph/effects.py)."""

    type: TensorType
    name: str
    kind: str
    state: tuple[str, int] | None = None
    producer: Node | None = None
    index: int = 0
    extent: Value | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(eq=False)
class Node:
    """One call of an op row. `source` is the model's file:line, for messages only: it never enters a hash.

    Its effects: `stream`, one of alpha/graph/order.py; what is not on the compute stream may run beside it. `stage` of a pipeline and
    `microbatch`, both from 0, None outside of any; `sms`, the SM budget: most multiprocessors that it takes, 0 for no limit."""

    op: str
    inputs: tuple[Value, ...]
    attrs: Attrs
    outputs: tuple[Value, ...] = ()
    layer: str = ""
    phase: str = "forward"
    source: str = ""
    stream: str = COMPUTE
    stage: int | None = None
    microbatch: int | None = None
    sms: int = 0

    @property
    def acts(self) -> bool:
        """Whether it acts on other ranks: then it is neither pruned nor computed twice, and keeps its place among those of its group."""
        return row(self.op).across is not None

    def over(self, inputs: tuple[Value, ...]) -> Node:
        """The same call of other operands, with results of its own."""
        new = replace(self, inputs=inputs, outputs=())
        new.outputs = tuple(Value(v.type, v.name, "node", None, new, v.index, v.extent) for v in self.outputs)
        return new

    def effects(self) -> tuple[object, ...]:
        """What it says beside its operands. Calls that become one have the same."""
        return self.stream, self.stage, self.microbatch, self.sms

    def __repr__(self) -> str:
        left = ", ".join(map(repr, self.outputs))
        attrs = "".join(f" {k}={v}" for k, v in self.attrs.items())
        return f"{left} = {self.op}({', '.join(v.name for v in self.inputs)}){attrs}  [{self.layer} {self.phase}] {self.source}"


@dataclass(eq=False)
class Graph:
    """Nodes in a valid order. `updates`: (kind, offset) of a state box -> the value it takes."""

    name: str
    inputs: dict[str, Value] = field(default_factory=dict)
    states: dict[tuple[str, int, tuple[int, ...]], Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Value] = field(default_factory=dict)
    updates: dict[tuple[str, int], Value] = field(default_factory=dict)

    def roots(self) -> Iterator[Value]:
        """Values that must exist at the end: outputs and updates."""
        yield from self.outputs.values()
        yield from self.updates.values()

    def readers(self) -> dict[Value, list[Node]]:
        """Value -> nodes that read it, in order (a node appears once per operand)."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in node.inputs:
                found.setdefault(v, []).append(node)
        return found

    def text(self) -> str:
        """Canonical text: numbers instead of names, so that it depends on structure only (not on sources or Python identities)."""
        number: dict[Value, str] = {}
        lines = []
        for name in sorted(self.inputs):
            number[self.inputs[name]] = f"in:{name}"
        for key, v in self.states.items():
            number[v] = f"state:{key[0]}+{key[1]}:{v.type}"

        def rows(v: Value) -> str:
            return f" rows {number[v.extent]}" if v.extent is not None else ""

        lines += [f"in:{name} {v.type}{rows(v)}" for name, v in sorted(self.inputs.items())]
        lines += [f"{number[v]}{rows(v)}" for v in self.states.values() if v.extent is not None]
        count = 0
        for node in self.nodes:
            outs = []
            for v in node.outputs:
                number[v] = f"%{count}"
                outs.append(f"%{count}:{v.type}{rows(v)}")
                count += 1
            attrs = attrs_text(node.attrs)
            lines.append(f"{' '.join(outs)} = {node.op} {' '.join(number[v] for v in node.inputs)} {attrs} {node.layer} {node.phase}"
                         + effects_text(node.stream, node.stage, node.microbatch, node.sms))
        lines += [f"out:{k} = {number[v]}" for k, v in sorted(self.outputs.items())]
        lines += [f"update:{k[0]}+{k[1]} = {number[v]}" for k, v in sorted(self.updates.items(), key=lambda item: item[0])]
        return "\n".join(lines)

    def hash(self) -> str:
        """sha256 of the canonical text."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def effects_text(stream: str, stage: int | None, microbatch: int | None, sms: int = 0) -> str:
    """Canonical text of effects: nothing for those that are as they are by default."""
    named = (("on", stream or None), ("stage", stage), ("microbatch", microbatch), ("sms", sms or None))
    return "".join(f" {name} {value}" for name, value in named if value is not None)


def attrs_text(attrs: Mapping[str, object]) -> str:
    """Canonical JSON of attributes: sorted keys, floats in hex. GraphError for values that do not hash."""
    return json.dumps(_attr(dict(attrs)), sort_keys=True)


def _attr(value: object) -> object:
    if isinstance(value, dict):
        return {k: _attr(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_attr(v) for v in value]
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, Table):
        return repr(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise GraphError("an attribute is not a plain value", came=repr(value), expected="int, float, str, bool, None, Table or tuples of them")


def prune(graph: Graph, roots: Iterable[Value] | None = None) -> Graph:
    """The same graph without nodes that nothing needs; order kept. Nodes that act on other ranks are needed by those. Returns a new Graph
    that shares Values and Nodes."""
    needed = set(roots if roots is not None else graph.roots())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.acts or any(v in needed for v in node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    needed.update([v.extent for v in (*needed, *graph.inputs.values()) if v.extent is not None])
    return Graph(graph.name, dict(graph.inputs), {k: v for k, v in graph.states.items() if v in needed}, kept[::-1],
                 dict(graph.outputs), dict(graph.updates))


def rebuild(graph: Graph, nodes: Iterable[Node], replace: dict[Value, Value] | None = None) -> Graph:
    """A new graph with these nodes and with outputs and updates mapped through `replace`."""
    new = replace or {}
    return Graph(graph.name, dict(graph.inputs), dict(graph.states), list(nodes),
                 {k: new.get(v, v) for k, v in graph.outputs.items()}, {k: new.get(v, v) for k, v in graph.updates.items()})
