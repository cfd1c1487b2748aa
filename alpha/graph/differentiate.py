"""Reverse-mode differentiation of a graph through the rows' vjps. Floor 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alpha.errors import GraphError
from alpha.graph.ir import Graph, Value
from alpha.graph.trace import Tracer
from alpha.ops.numerics import ACCUMULATE
from alpha.ops.table import row
from alpha.types import TensorType


class _FromOne:
    """The Emit of vjps. The loss's own cotangent is 1, so a product with it is its other factor."""

    def __init__(self, t: Tracer, one: Value) -> None:
        self.t, self.one = t, one

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> Any:
        return inputs[0] if op == "scale_by" and inputs[1] is self.one else self.t(op, *inputs, **attrs)


def differentiate(t: Tracer, loss: Value, wrt: Sequence[Value]) -> list[Value]:
    """Append to `t`'s graph the gradient of the scalar `loss` with respect to each of `wrt` and return those values, in order.

    Nodes are visited in reverse order and several cotangents of one value are added in the order in which they arise, so the result
    is a function of the graph alone. Emitted nodes carry the layer, source, stage, microbatch and SM
    budget of the node they differentiate and phase 'backward'.
    The gradient of a parameter (one of `wrt`) has the type in which its compute type is summed, f32 for bf16.
    GraphError if the loss is not a scalar, does not depend on one of `wrt`, or passes through a row without a vjp, and if a gradient of
    a parameter arrives rounded to a narrower type.
    """
    return [grads[0] for grads in _gradients(t, loss, wrt, apart=False)]


def contributions(t: Tracer, loss: Value, wrt: Sequence[Value]) -> list[list[Value]]:
    """As `differentiate`, but for each of `wrt` the terms of its gradient, one per use of the parameter, in the order in which they
    arise: whoever sums them may do so in the memory of a buffer."""
    return _gradients(t, loss, wrt, apart=True)


def _gradients(t: Tracer, loss: Value, wrt: Sequence[Value], *, apart: bool) -> list[list[Value]]:
    if loss.type.shape != () or not loss.type.is_float:
        raise GraphError("a loss is a float scalar", came=loss.type, expected="f32[]", do="sum the per-token losses")
    graph: Graph = t.graph
    needs = set(wrt)
    for node in graph.nodes:
        if any(v in needs for v in node.inputs):
            needs.update(v for v in node.outputs if v.type.is_float)
    forward = list(graph.nodes)
    saved = t.layer, t.phase, t.source
    placed = t.stage, t.microbatch, t.sms
    t.phase = "backward"
    t.source = "loss"
    one = t("fill", shape=(), value=1.0, dtype=loss.type.dtype)
    cotangents: dict[Value, Value] = {loss: one}
    terms: dict[Value, list[Value]] = {v: [] for v in wrt}
    emit = _FromOne(t, one)
    for node in reversed(forward):
        if not any(v in needs for v in node.inputs) or not any(v in cotangents for v in node.outputs):
            continue
        spec = row(node.op)
        if spec.vjp is None:
            raise GraphError("the loss passes through a row that cannot be differentiated", came=repr(node),
                             expected=f"a row with a vjp ({spec.why_no_vjp})", do="use a differentiable op in the model")
        t.layer, t.source = node.layer, node.source
        t.stage, t.microbatch, t.sms = node.stage, node.microbatch, node.sms
        grads = spec.vjp(emit, node, [cotangents.get(v) for v in node.outputs])
        for value, grad in zip(node.inputs, grads, strict=True):
            if grad is None or value not in needs:
                continue
            assert isinstance(grad, Value)
            wide = TensorType(value.type.shape, ACCUMULATE[value.type.dtype])
            parameter = value in terms and value.producer is None
            if parameter and value.type != grad.type != wide:
                raise GraphError("a cotangent has another type than its value", came=f"{node.op}: {grad}", expected=wide)
            if parameter and grad.type != wide:
                raise GraphError("the gradient of a parameter is rounded before it is summed", came=f"{node.op}: {grad}", expected=wide,
                                 do="let the row's vjp give this operand's gradient in the accumulation type")
            if not parameter and grad.type == wide != value.type:  # wide in case the operand is a parameter; this one is an activation
                grad = t("cast", grad, dtype=value.type.dtype)
            if not parameter and grad.type != value.type:
                raise GraphError("a cotangent has another type than its value", came=f"{node.op}: {grad}", expected=value.type)
            if value in terms and apart:
                terms[value].append(grad)
            else:
                cotangents[value] = t("add", cotangents[value], grad) if value in cotangents else grad
    t.layer, t.phase, t.source = saved
    t.stage, t.microbatch, t.sms = placed
    missing = [v.name for v in wrt if not terms[v] and v not in cotangents]
    if missing:
        raise GraphError("the loss does not depend on a parameter", came=", ".join(missing),
                         do="remove the unused parameter from the model")
    return [terms[v] or [cotangents[v]] for v in wrt]
