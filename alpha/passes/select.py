"""Select: one component per node, from a catalogue. Never a silent fallback. Floor 3."""

from __future__ import annotations

from collections.abc import Sequence

from alpha.component import Catalogue, Component
from alpha.errors import InputError
from alpha.graph.ir import Graph, Node
from alpha.ops.table import row
from alpha.types import Attrs, TensorType

CUT_WHEN_RUN = ("cpu",)
"""Back ends whose executor cuts operands to their extents when it runs, so that every kernel of a row that goes by rows takes them."""


def kernel_for(catalogue: Catalogue, backend: str, op: str, types: Sequence[TensorType], attrs: Attrs) -> Component | None:
    """The first kernel by id whose envelope covers the call, or None. What expands and what fuses asks this too."""
    return next((c for c in catalogue.for_op(op, backend) if c.envelope.why_outside(types, attrs) is None), None)


def select(graph: Graph, catalogue: Catalogue, backend: str) -> dict[Node, Component]:
    """The component for every node that launches one (views launch nothing): `kernel_for` its call.

    InputError naming the op, the call and why each candidate refuses it, or the effect that the kernel does not take.
    """
    chosen: dict[Node, Component] = {}
    for node in graph.nodes:
        if row(node.op).view:
            continue
        types = [v.type for v in node.inputs]
        component = kernel_for(catalogue, backend, node.op, types, node.attrs)
        if component is None:
            refusals = [f"{c.id}: {c.envelope.why_outside(types, node.attrs)}" for c in catalogue.for_op(node.op, backend)]
            raise InputError(f"no {backend} kernel covers {node.op} at {node.source} in {node.layer or 'no layer'}",
                             came=", ".join(map(str, types)), expected="; ".join(refusals) or f"a kernel for {node.op} in the catalogue",
                             do="change the shape or dtype, or add a kernel")
        where = f"{node.op} at {node.source} in {node.layer or 'no layer'}"
        if node.sms and not component.budgeted:
            raise InputError(f"{component.id} keeps to no SM budget: {where}", came=f"at most {node.sms} multiprocessors",
                             expected="a kernel that is `budgeted`", do="leave the budget out here, or let the kernel keep to it")
        if backend not in CUT_WHEN_RUN and any(v.extent is not None for v in (*node.inputs, *node.outputs)):
            raise InputError(f"{component.id} takes no extent: {where}", came=repr(node), do="run it on that back end",
                             expected=f"the back end {', '.join(CUT_WHEN_RUN)}")
        chosen[node] = component
    return chosen
