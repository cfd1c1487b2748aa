"""verify(graph): what every pass must leave true. Run between passes. Floor 2."""

from __future__ import annotations

from itertools import pairwise

from alpha.errors import GraphError
from alpha.graph.ir import PHASES, Graph, Value
from alpha.graph.order import STREAMS
from alpha.ops.table import row


def verify(graph: Graph, after: str) -> Graph:
    """Return the graph unchanged, or raise a GraphError that names the pass (`after`), the node and the broken invariant.

    Invariants: every operand is an input, a state or an output of an earlier node; types are what the rows infer; no value has two
    producers; outputs and updates exist; updated boxes have the value's type and overlap no other updated box; phases and streams are
    known.
    """
    def fail(what: str, came: object, expected: object = None) -> None:
        raise GraphError(f"after {after}: {what}", came=came, expected=expected,
                         do=f"the pass '{after}' is wrong; its gate should have said so")

    known: set[Value] = set(graph.inputs.values()) | set(graph.states.values())
    for node in graph.nodes:
        for v in node.inputs:
            if v not in known:
                fail("a node reads a value that nothing before it made", repr(node), v)
        if node.phase not in PHASES:
            fail("unknown phase", repr(node), PHASES)
        if node.stream not in STREAMS:
            fail("unknown stream", f"{node!r} on {node.stream!r}", STREAMS)
        inferred = row(node.op).infer([v.type for v in node.inputs], node.attrs)
        if tuple(v.type for v in node.outputs) != tuple(inferred):
            fail("a node's output types are not what its row infers", repr(node), ", ".join(map(str, inferred)))
        for v in node.outputs:
            if v in known or v.producer is not node:
                fail("a value has two producers", v)
            known.add(v)
    for v in graph.roots():
        if v not in known:
            fail("an output or update was never made", v)
    spans = sorted((kind, offset, offset + v.type.size) for (kind, offset), v in graph.updates.items())
    for a, b in pairwise(spans):
        if a[0] == b[0] and b[1] < a[2]:
            fail("two updates overlap", f"{a} and {b}")
    return graph
