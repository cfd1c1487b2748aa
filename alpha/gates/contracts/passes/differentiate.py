"""Cases of the backward pass: gradients beside finite differences, values of many readers, what is refused. Floor 7."""

from __future__ import annotations

import numpy as np

from alpha.component import Measured
from alpha.errors import GraphError, ShapeError
from alpha.gates.contracts.passes import effects, traced
from alpha.gates.contracts.passes.support import HASHES, Cases
from alpha.gates.contracts.reference import (
    VOCAB,
    Reference,
    batch,
    both,
    evaluate,
    layout_of,
    random_state,
    refuses,
    training_graph,
    yes,
)
from alpha.graph.ir import Graph, Value, prune
from alpha.graph.state import Init, StateLayout
from alpha.graph.trace import Tracer


def finite_difference(ref: Reference, rng: np.random.Generator) -> Measured:
    """Whole model: the gradient against central differences in float64 through the oracles, along each tensor and 4 mixed directions.

    h = 3e-6: truncation ~ h^2 and cancellation ~ 1e-16 * loss / h are both below 1e-9 of a directional derivative of order 1.
    """
    graph, layout, inputs, state = training_graph(ref), layout_of(ref), batch(ref, rng), random_state(ref, rng)
    _, updates = evaluate(graph, inputs, state)
    grad = np.zeros(layout.size)
    for (_kind, offset), x in updates.items():
        if offset < layout.size:
            grad[offset : offset + x.size] = x.ravel()
    forward = prune(Graph("loss", graph.inputs, graph.states, graph.nodes, {"loss": _stat(graph, layout)}, {}))

    def loss(flat: np.ndarray) -> float:
        return float(evaluate(forward, inputs, {**state, "param": flat})[0]["loss"])

    directions = []
    for offset, n in layout.ranges():
        d = np.zeros(layout.size)
        d[offset : offset + n] = rng.standard_normal(n)
        directions.append(d)
    directions = [directions[i] for i in rng.permutation(len(directions))[:12]] + [sum(directions), *(np.sign(d) for d in directions[:1])]
    worst, h = 0.0, 3e-6
    for d in directions:
        numeric = (loss(state["param"] + h * d) - loss(state["param"] - h * d)) / (2 * h)
        scale = max(float(np.abs(grad * d).sum()), 1e-3)
        worst = max(worst, abs(numeric - float(grad @ d)) / scale)
    return Measured(error=worst, bound=1e-7, cases=len(directions), note="relative to sum |g_i d_i|")


def _stat(graph: Graph, layout: StateLayout) -> Value:
    from alpha.passes.build import STATS, stats_layout

    return graph.updates[("grad0", stats_layout(layout).offsets[f"{STATS}.loss_sum"])]


def _shared_value(rng: np.random.Generator) -> Measured:
    """x is read three times (a residual and a product with itself): d/dx (x + x*x) = 1 + 2x, exactly on small integers."""
    from alpha.graph.differentiate import differentiate

    t = Tracer("shared")
    x = t.input("x", (5,), "f32")
    loss = t.sum(t.add(x, t.mul(x, x)), axis=(0,), keepdims=False)
    t.output("g", differentiate(t, loss, [x])[0])
    value = rng.integers(-9, 9, 5).astype(float)
    got = evaluate(t.graph, {"x": value}, {})[0]["g"]
    return Measured(error=float(np.abs(got - (1 + 2 * value)).max()), bound=0.0)


def _scaled_loss(ref: Reference, rng: np.random.Generator) -> Measured:
    """The gradient of four times the loss is four times that of the loss, to the bit under the oracles."""
    from alpha.graph.differentiate import differentiate

    inputs, state, found = batch(ref, rng), random_state(ref, rng), []
    for factor in (1.0, 4.0):
        t = Tracer("scaled", layout_of(ref))
        loss, _ = ref.model.loss(t, True)
        for i, grad in enumerate(differentiate(t, t.scale(loss, factor=factor), list(t.leaves.values()))):
            t.output(f"{i}", grad)
        found.append(evaluate(prune(t.graph), inputs, state)[0])
    wrong = sum(not np.array_equal(4 * x, found[1][name]) for name, x in found[0].items())
    return Measured(error=float(wrong), bound=0.0, cases=len(found[0]), note="parameters")


def _second_result(rng: np.random.Generator) -> Measured:
    """A gradient goes through a row of whose results the loss reads the second alone: exactly, on small integers."""
    from alpha.graph.differentiate import differentiate

    t = Tracer("second")
    x = t.input("x", (6,), "f32")
    _, second = t.split(t.scale(x, factor=2.0), sizes=(2, 4), axis=0)
    t.output("g", differentiate(t, t.sum(t.mul(second, second), axis=(0,), keepdims=False), [x])[0])
    value = rng.integers(-9, 9, 6).astype(float)
    got = evaluate(t.graph, {"x": value}, {})[0]["g"]
    return Measured(error=float(np.abs(got - np.where(np.arange(6) < 2, 0, 8 * value)).max()), bound=0.0)


def _told_where(ref: Reference, rng: np.random.Generator) -> Measured:
    """Work of the backward stands in the layer and at the line of the row that it is of: both are where the forward has them together."""
    nodes = training_graph(ref).nodes
    forward = {(n.layer, n.source) for n in nodes if n.phase == "forward"}
    backward = [(n.layer, n.source) for n in nodes if n.phase == "backward" and n.op != "fill"]
    astray = sorted({*backward} - forward)
    layers = {layer for layer, _ in forward if layer.startswith("block.")} - {layer for layer, _ in backward}
    return yes(bool(backward) and not astray and not layers, f"{astray[:2]} {sorted(layers)}", cases=len(backward))


def _refuse_no_vjp(rng: np.random.Generator) -> Measured:
    from alpha.graph.differentiate import differentiate

    t = Tracer("no vjp")
    x = t.input("x", (4, VOCAB), "f32")
    y = t.gelu_bwd(x, x, approximate="tanh")
    return refuses(GraphError, lambda: differentiate(t, t.sum(y, axis=(0, 1), keepdims=False), [x]))


def _refuse_unused(rng: np.random.Generator) -> Measured:
    from alpha.graph.differentiate import differentiate

    t = Tracer("unused")
    x, unused = t.input("x", (4,), "f32"), t.param("unused", (3,), Init("zeros"))
    return refuses(GraphError, lambda: differentiate(t, t.sum(x, axis=(0,), keepdims=False), [x, unused]))


def _refuse_shape(rng: np.random.Generator) -> Measured:
    t = Tracer("shape")
    return refuses(ShapeError, lambda: t.matmul(t.input("a", (2, 3), "f32"), t.input("b", (4, 5), "f32")))


CASES: Cases = {
    "differentiate.pass": {"parity": [*both(finite_difference), ("shared-value", _shared_value),
                                      *[(f"scaled-{n}", c) for n, c in both(_scaled_loss)],
                                      ("second-result", _second_result), *[(f"told-{n}", c) for n, c in both(_told_where)],
                                      ("placed", effects.backward_placed), ("types", traced.gradient_types)],
                           "determinism": HASHES,
                           "faults": [("no-vjp", _refuse_no_vjp), ("unused-parameter", _refuse_unused), ("shape", _refuse_shape)]},
}
