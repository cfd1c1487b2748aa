"""Fuse: replace subgraphs by fused rows. The pattern table is the op table: a fused row carries its own pattern. Floor 3.

A fused row is a composition written once as a function of Emit (alpha/ops/compose.py; the rows are in alpha/ops/fused.py).
Its oracle, shape rule and costs are derived by running that function, and its pattern is what the same function traces. So a fused row
cannot differ from what it replaces.
"""

from __future__ import annotations

from dataclasses import replace

from alpha.component import Catalogue
from alpha.errors import ShapeError
from alpha.graph.ir import Graph, Node, Value, rebuild
from alpha.ops.compose import FusedSpec
from alpha.ops.table import table
from alpha.passes.select import kernel_for


def fuse(graph: Graph, catalogue: Catalogue, backend: str) -> Graph:
    """Replace every match of every fused row that `backend` has a kernel for, largest patterns first, first match in node order first.

    A match must be closed: values made inside and not among the fused row's outputs are read by nothing outside. Its nodes have the same
    effects, and the fused row has them.
    """
    rows = [s for s in table().values() if isinstance(s, FusedSpec) and catalogue.for_op(s.name, backend)]
    for spec in sorted(rows, key=lambda s: (-len(s.parts), s.name)):
        graph = _fuse_row(graph, spec, catalogue, backend)
    return graph


def _fuse_row(graph: Graph, spec: FusedSpec, catalogue: Catalogue, backend: str) -> Graph:
    readers = graph.readers()
    roots = set(graph.roots())
    position = {node: i for i, node in enumerate(graph.nodes)}
    used: set[Node] = set()
    replacement: dict[Node, Node] = {}  # last node of a match -> fused node
    dropped: set[Node] = set()
    values: dict[Value, Value] = {}
    for last in graph.nodes:
        for attrs, match, operands in spec.matches(last):
            nodes = list(match)
            phases = {n.phase for n in nodes}
            if used & set(nodes) or (len(phases) > 1 and not phases <= {"backward", "wgrad"}):
                continue  # forward work stays forward: recompute and the phase profile depend on it
            if len({n.effects() for n in nodes}) > 1 or any(v.extent is not None for n in nodes for v in n.outputs):
                continue  # one launch has one place, and no fused row knows extents
            results = spec.results(match)
            inside = {v for n in nodes for v in n.outputs}
            closed = all(v in results or (v not in roots and all(r in nodes for r in readers.get(v, ()))) for v in inside)
            # every reader of a result, and every operand, must be on the right side of the fused node's place (the last node's)
            place = max(position[n] for n in nodes)
            ordered = all(position[r] > place for v in results for r in readers.get(v, ()) if r not in nodes)
            if not closed or not ordered:
                continue
            types = [v.type for v in operands]
            try:
                inferred = spec.infer(types, attrs)
            except ShapeError:
                continue
            if kernel_for(catalogue, backend, spec.name, types, attrs) is None:
                continue
            end = graph.nodes[place]
            node = replace(end, op=spec.name, inputs=tuple(operands), attrs=attrs, outputs=())
            node.outputs = tuple(Value(t, old.name, "node", None, node, i)
                                 for i, (t, old) in enumerate(zip(inferred, results, strict=True)))
            values.update(zip(results, node.outputs))
            used |= set(nodes)
            dropped |= set(nodes)
            replacement[end] = node
            break
    out, first = [], {new: old for old, new in values.items()}
    for node in graph.nodes:
        node = replacement.get(node, node)
        if node in dropped:
            continue
        if any(v in values for v in node.inputs):
            new = node.over(tuple(values.get(v, v) for v in node.inputs))
            for v, renewed in zip(node.outputs, new.outputs):
                values[v] = renewed
                if v in first:  # v had replaced another value: that one is now `renewed`
                    values[first[v]] = renewed
            node = new
        out.append(node)
    return rebuild(graph, out, values)


