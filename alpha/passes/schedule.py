"""Schedule: the order of launches. Floor 3."""

from __future__ import annotations

import heapq

from alpha.errors import GraphError
from alpha.graph.ir import Graph, Node, rebuild

PROMPT = ("wgrad", "reduce")
"""Phases of nodes that go as soon as they can."""


def schedule(graph: Graph) -> Graph:
    """Nodes in dependency order; among ready nodes the one that comes first in the graph goes first, except that gradients go to their
    buffers (phase 'wgrad') as soon as they are complete, so that they and what they are made of live briefly, and that what follows from
    them (phase 'reduce') goes as soon as it can, so that it runs beside the rest. Nodes that act on one group keep their order.

    Deterministic: a function of the graph alone. GraphError on a cycle.
    """
    readers = graph.readers()
    position = {node: i for i, node in enumerate(graph.nodes)}
    due: dict[Node, int] = {}

    def key(node: Node) -> int:
        if node.phase not in PROMPT:
            return position[node]
        if node not in due:
            made = (v.producer for v in node.inputs)
            due[node] = max((key(n) if node.phase == "reduce" else position[n] for n in made if n in position), default=0)
        return due[node]

    followers = {n: list(dict.fromkeys(r for v in n.outputs for r in readers.get(v, ()))) for n in graph.nodes}
    waiting = {node: len({v.producer for v in node.inputs if v.producer is not None}) for node in graph.nodes}
    last: dict[object, Node] = {}
    for node in graph.nodes:
        if node.acts:
            earlier = last.get(node.attrs["group"])
            if earlier is not None and node not in followers[earlier]:
                followers[earlier].append(node)
                waiting[node] += 1
            last[node.attrs["group"]] = node
    ready = [(key(n), position[n]) for n in graph.nodes if waiting[n] == 0]
    heapq.heapify(ready)
    out: list[Node] = []
    while ready:
        node = graph.nodes[heapq.heappop(ready)[1]]
        out.append(node)
        for reader in followers[node]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (key(reader), position[reader]))
    if len(out) != len(graph.nodes):
        raise GraphError("the graph has a cycle", came=f"{len(graph.nodes) - len(out)} nodes never became ready")
    return rebuild(graph, out)
