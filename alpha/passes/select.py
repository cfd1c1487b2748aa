"""Select: one component per node, from a catalogue. Never a silent fallback. Floor 3."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.errors import InputError
from alpha.graph.ir import Graph, Node
from alpha.ops.table import row


def select(graph: Graph, catalogue: Catalogue, backend: str) -> dict[Node, Component]:
    """The component for every node that launches one (views launch nothing).

    The first kernel by id whose envelope covers the call. InputError naming the op, the call and why each candidate refuses it.
    """
    chosen: dict[Node, Component] = {}
    for node in graph.nodes:
        if row(node.op).view:
            continue
        types = [v.type for v in node.inputs]
        refusals = []
        for component in catalogue.for_op(node.op, backend):
            why = component.envelope.why_outside(types, node.attrs)
            if why is None:
                chosen[node] = component
                break
            refusals.append(f"{component.id}: {why}")
        else:
            raise InputError(f"no {backend} kernel covers {node.op} at {node.source} in {node.layer or 'no layer'}",
                             came=", ".join(map(str, types)), expected="; ".join(refusals) or f"a kernel for {node.op} in the catalogue",
                             do="change the shape or dtype, or add a kernel")
    return chosen
