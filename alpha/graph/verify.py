"""verify(graph): what every pass must leave true. Run between passes. Floor 2."""

from __future__ import annotations

from itertools import pairwise

from alpha.errors import GraphError
from alpha.graph.effects import Refusal, cannot_cross, no_extent, out_of_place, refused
from alpha.graph.ir import PHASES, Graph, Node, Value
from alpha.graph.order import STREAMS
from alpha.ops.table import row


def _crossing(node: Node) -> Refusal | None:
    return cannot_cross(node.op, node.phase, [(v.type, v.extent) for v in node.inputs], [(v.type, v.extent) for v in node.outputs])


def verify(graph: Graph, after: str) -> Graph:
    """Return the graph unchanged, or raise a GraphError that names the pass (`after`), the node and the broken invariant.

    Invariants: every operand is an input, a state or an output of an earlier node; types are what the rows infer; no value has two
    producers; outputs and updates exist; updated boxes have the value's type and overlap no other updated box; phases and streams are
    known; effects and extents are such as alpha/graph/effects.py allows.
    """
    def fail(what: str, came: object, expected: object = None) -> None:
        raise GraphError(f"after {after}: {what}", came=came, expected=expected,
                         do=f"the pass '{after}' is wrong; its gate should have said so")

    def effect(node: Node, found: Refusal | None) -> None:
        if found is not None:
            fail(found[0], f"{node!r}: {found[1]}", found[2])

    known: set[Value] = set(graph.inputs.values()) | set(graph.states.values())
    for v in known:
        if v.extent is not None and ((found := no_extent(v)) is not None or v.extent not in known):
            fail(*(found or ("an extent that the graph does not know", f"{v} with rows {v.extent.name}", "one of its inputs or states")))
    for node in graph.nodes:
        for v in node.inputs:
            if v not in known:
                fail("a node reads a value that nothing before it made", repr(node), v)
        if node.phase not in PHASES:
            fail("unknown phase", repr(node), PHASES)
        if node.stream not in STREAMS:
            fail("unknown stream", f"{node!r} on {node.stream!r}", STREAMS)
        for found in (refused(node), out_of_place(node), *map(no_extent, node.outputs), _crossing(node)):
            effect(node, found)
        inferred = row(node.op).infer([v.type for v in node.inputs], node.attrs)
        if tuple(v.type for v in node.outputs) != tuple(inferred):
            fail("a node's output types are not what its row infers", repr(node), ", ".join(map(str, inferred)))
        for v in node.outputs:
            if v in known or v.producer is not node:
                fail("a value has two producers", v)
            if v.extent is not None and v.extent not in known:
                fail("an extent that the graph does not know", f"{node!r}: rows {v.extent.name}", "one of its inputs or states")
            known.add(v)
    boxes = {(kind, offset, v.type): v.extent for (kind, offset, _), v in graph.states.items()}
    for (kind, offset), v in graph.updates.items():
        if v.extent is not None and boxes.get((kind, offset, v.type)) is not v.extent:
            fail("a state box takes a value of fewer rows than it has", f"{kind}+{offset} takes {v} with rows {v.extent.name}",
                 "a box with the same extent")
    for v in graph.roots():
        if v not in known:
            fail("an output or update was never made", v)
    spans = sorted((kind, offset, offset + v.type.size) for (kind, offset), v in graph.updates.items())
    for a, b in pairwise(spans):
        if a[0] == b[0] and b[1] < a[2]:
            fail("two updates overlap", f"{a} and {b}")
    return graph
