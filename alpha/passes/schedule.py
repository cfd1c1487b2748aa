"""Schedule: the order of launches on one stream. Floor 3."""

from __future__ import annotations

import heapq

from alpha.errors import GraphError
from alpha.graph.ir import Graph, Node, rebuild


def schedule(graph: Graph) -> Graph:
    """Nodes in dependency order; among ready nodes the one that comes first in the graph goes first, except that gradients go to their
    buffers (phase 'wgrad') as soon as they are complete, so that they and what they are made of live briefly.

    Deterministic: a function of the graph alone. GraphError on a cycle.
    """
    readers = graph.readers()
    position = {node: i for i, node in enumerate(graph.nodes)}

    def key(node: Node) -> int:
        if node.phase != "wgrad":
            return position[node]
        return max((position[v.producer] for v in node.inputs if v.producer in position), default=0)

    waiting = {node: len({v.producer for v in node.inputs if v.producer is not None}) for node in graph.nodes}
    ready = [(key(n), position[n]) for n in graph.nodes if waiting[n] == 0]
    heapq.heapify(ready)
    out: list[Node] = []
    while ready:
        node = graph.nodes[heapq.heappop(ready)[1]]
        out.append(node)
        for reader in {r for v in node.outputs for r in readers.get(v, ())}:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (key(reader), position[reader]))
    if len(out) != len(graph.nodes):
        raise GraphError("the graph has a cycle", came=f"{len(graph.nodes) - len(out)} nodes never became ready")
    return rebuild(graph, out)
