"""Expand: a row that the back end has no kernel for becomes the composition that it is. Floor 3.

Models emit the same packed rows for every back end. This is the one place that decides what a back end without a kernel for one of them
runs: the row's own composition (`OpSpec.compose`), whose parts may be expanded in turn. A row that is no composition stays as it is, and
selection names it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alpha.component import Catalogue
from alpha.graph.ir import Graph, Node, Value, rebuild
from alpha.ops.table import row
from alpha.passes.select import kernel_for
from alpha.types import Attrs


class _Parts:
    """The Emit of compositions: appends to `nodes` what `backend` has kernels for, or what has no composition, with `like`'s layer, phase,
    source and effects."""

    def __init__(self, catalogue: Catalogue, backend: str) -> None:
        self.catalogue, self.backend = catalogue, backend
        self.nodes: list[Node] = []
        self.like: Node | None = None

    def whole(self, op: str, inputs: tuple[Value, ...], attrs: Attrs) -> bool:
        """Whether a call stays one node."""
        return row(op).compose is None or kernel_for(self.catalogue, self.backend, op, [v.type for v in inputs], attrs) is not None

    def apart(self, op: str, inputs: tuple[Value, ...], attrs: Attrs) -> tuple[Value, ...]:
        """The results of a call by its row's composition."""
        compose = row(op).compose
        assert compose is not None
        return tuple(compose(self, *inputs, **attrs))

    def __call__(self, op: str, *inputs: Value, **attrs: Any) -> Any:
        if not self.whole(op, inputs, attrs):
            made = self.apart(op, inputs, attrs)
        else:
            assert self.like is not None
            node = replace(self.like, op=op, inputs=inputs, attrs=attrs, outputs=())
            types = row(op).infer([v.type for v in inputs], attrs)
            made = node.outputs = tuple(Value(t, f"{self.like.outputs[0].name}.{op}", "node", None, node, i) for i, t in enumerate(types))
            self.nodes.append(node)
        return made if len(made) > 1 else made[0]


def expand(graph: Graph, catalogue: Catalogue, backend: str) -> Graph:
    """The graph with every node that no kernel of `backend` covers replaced by its row's composition, where the row has one.

    The parts stand where the node stood, in its layer and phase, with its effects. A new Graph; the same nodes where nothing is to be
    replaced.
    """
    parts = _Parts(catalogue, backend)
    values: dict[Value, Value] = {}
    for node in graph.nodes:
        ins = tuple(values.get(v, v) for v in node.inputs)
        if not parts.whole(node.op, ins, node.attrs):
            parts.like = node
            values.update(zip(node.outputs, parts.apart(node.op, ins, node.attrs), strict=True))
        elif ins == node.inputs:
            parts.nodes.append(node)
        else:
            new = node.over(ins)
            values.update(zip(node.outputs, new.outputs))
            parts.nodes.append(new)
    return rebuild(graph, parts.nodes, values)
