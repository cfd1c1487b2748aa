"""Recompute: trade forward work for memory by computing again what the backward needs instead of keeping it. Floor 3."""

from __future__ import annotations

from dataclasses import replace

from alpha.errors import InputError
from alpha.graph.ir import Graph, Node, Value, rebuild

POLICIES = ("none", "block", "ops")


def recompute(graph: Graph, policy: str, ops: tuple[str, ...] = ()) -> Graph:
    """A graph whose backward reads recomputed copies of forward values.

    policy 'none': unchanged. 'block': every forward value made in a layer `block.*` is recomputed from the layer's inputs. 'ops': only
    values made by the named op rows are (selective, Korthikanti et al. 2022, arXiv:2205.05198). Copies carry phase 'recompute' and the
    attributes of the original, so counter-based random numbers are the same; they stand just before the first backward node of their
    layer, so that the originals can die early. What acts on other ranks is not done twice: its results are kept. InputError for an unknown
    policy, or an op that no forward node is of.
    """
    if policy not in POLICIES:
        raise InputError("unknown recompute policy", came=policy, expected=", ".join(POLICIES))
    if policy == "none":
        return graph
    made = {node.op for node in graph.nodes if node.phase == "forward"}
    if policy == "ops" and not (ops and made.issuperset(ops)):
        raise InputError("recompute names an op that the forward pass has not",
                         came=", ".join(op for op in ops if op not in made) or "no name",
                         expected=", ".join(sorted(made)), do="name ops of this model in [train] recompute")

    def chosen(node: Node) -> bool:
        if node.phase != "forward" or node.acts:
            return False
        return node.layer.startswith("block.") if policy == "block" else node.op in ops

    copies: dict[Value, Value] = {}
    order: list[Node] = []

    def copy_of(value: Value, layer: str) -> Value:
        producer = value.producer
        if producer is None or not chosen(producer) or producer.layer != layer:
            return value  # a leaf, a layer boundary or a value that is kept
        if value not in copies:
            ins = tuple(copy_of(v, layer) for v in producer.inputs)
            node = replace(producer, inputs=ins, outputs=(), phase="recompute")
            node.outputs = tuple(Value(v.type, v.name + "'", "node", None, node, v.index, v.extent) for v in producer.outputs)
            copies.update(zip(producer.outputs, node.outputs))
            order.append(node)
        return copies[value]

    crossing = {v for node in graph.nodes if node.phase == "forward" for v in node.inputs
                if v.producer is not None and v.producer.layer != node.layer}
    out: list[Node] = []
    replaced: dict[Node, Node] = {}
    values: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.phase == "forward":
            out.append(node)
            continue
        ins = []
        for v in node.inputs:
            v = values.get(v, v)
            # a value that another layer's forward reads is a checkpoint already
            keep = v in crossing and policy == "block"
            ins.append(v if keep else copy_of(v, v.producer.layer if v.producer else ""))
        out += order
        order.clear()
        if tuple(ins) == node.inputs:
            out.append(node)
            continue
        new = node.over(tuple(ins))
        values.update(zip(node.outputs, new.outputs))
        replaced[node] = new
        out.append(new)
    return rebuild(graph, out, values)
