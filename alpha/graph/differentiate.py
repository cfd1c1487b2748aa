"""Reverse-mode differentiation of a graph through the rows' vjps. Floor 2."""

from __future__ import annotations

from collections.abc import Sequence

from alpha.errors import GraphError
from alpha.graph.ir import Graph, Value
from alpha.graph.trace import Tracer
from alpha.ops.table import row


def differentiate(t: Tracer, loss: Value, wrt: Sequence[Value]) -> list[Value]:
    """Append to `t`'s graph the gradient of the scalar `loss` with respect to each of `wrt` and return those values, in order.

    Nodes are visited in reverse order and several cotangents of one value are added in the order in which they arise, so the result
    is a function of the graph alone. Emitted nodes carry the layer and source of the node they differentiate and phase 'backward'.
    GraphError if the loss is not a scalar, does not depend on one of `wrt`, or passes through a row without a vjp.
    """
    if loss.type.shape != () or not loss.type.is_float:
        raise GraphError("a loss is a float scalar", came=loss.type, expected="f32[]", do="sum the per-token losses")
    graph: Graph = t.graph
    needs = set(wrt)
    for node in graph.nodes:
        if any(v in needs for v in node.inputs):
            needs.update(v for v in node.outputs if v.type.is_float)
    forward = list(graph.nodes)
    saved = t.layer, t.phase, t.source
    t.phase = "backward"
    t.source = "loss"
    cotangents: dict[Value, Value] = {loss: t("fill", shape=(), value=1.0, dtype=loss.type.dtype)}
    for node in reversed(forward):
        if not any(v in needs for v in node.inputs) or not any(v in cotangents for v in node.outputs):
            continue
        spec = row(node.op)
        if spec.vjp is None:
            raise GraphError("the loss passes through a row that cannot be differentiated", came=repr(node),
                             expected=f"a row with a vjp ({spec.why_no_vjp})", do="use a differentiable op in the model")
        t.layer, t.source = node.layer, node.source
        grads = spec.vjp(t, node, [cotangents.get(v) for v in node.outputs])
        for value, grad in zip(node.inputs, grads, strict=True):
            if grad is None or value not in needs:
                continue
            assert isinstance(grad, Value)
            if grad.type != value.type:
                raise GraphError("a cotangent has another type than its value", came=f"{node.op}: {grad}", expected=value.type)
            cotangents[value] = t("add", cotangents[value], grad) if value in cotangents else grad
    t.layer, t.phase, t.source = saved
    missing = [v.name for v in wrt if v not in cotangents]
    if missing:
        raise GraphError("the loss does not depend on a parameter", came=", ".join(missing),
                         do="remove the unused parameter from the model")
    return [cotangents[v] for v in wrt]
