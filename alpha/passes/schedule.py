"""Schedule: the order of launches. Floor 3."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import inf

from alpha.errors import GraphError
from alpha.graph.ir import Graph, Node, Value, rebuild
from alpha.graph.order import COMM, COMPUTE
from alpha.ops.table import row

PROMPT = ("wgrad", "reduce")
"""Phases of nodes that go as soon as they can."""

ROOMY: Mapping[str, frozenset[str]] = {"cuda": frozenset({"attention_bwd", "attention_packed_bwd"})}
"""Back end -> ops whose kernels hand out their tiles as blocks come free. A collective that keeps some multiprocessors costs no more than
that share of the device. A kernel that dealt out its tiles beforehand would end late by as long as the collective takes."""

HIDES: Mapping[str, float] = {"cuda": 12_000.0}
"""Back end -> FLOPs of compute beside which a byte is moved: 54 GB/s at 650 TFLOP/s, as measured on two GPUs with nothing more exposed than
where all go at once. Links that carry nothing for 50 ms sleep, which spares 26 W of a GPU's 700; so collectives go late, in one row."""


def schedule(graph: Graph, roomy: Collection[str] = (), hides: float = inf) -> Graph:
    """Nodes in dependency order; among ready nodes the one that comes first in the graph goes first, except that gradients go to their
    buffers (phase 'wgrad') as soon as they are complete, so that they and what they are made of live briefly, and that what follows from
    them (phase 'reduce') goes as soon as it can, so that it runs beside the rest. Nodes that act on one group keep their order. What runs
    on the stream beside compute then waits for a node of a `roomy` op, where one comes before what needs it: the last behind which `hides`
    FLOPs a byte are left for it and for what follows it there, or else the first.

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
    return rebuild(graph, _beside(out, readers, roomy, hides))


def _beside(nodes: Sequence[Node], readers: Mapping[Value, list[Node]], roomy: Collection[str], hides: float) -> list[Node]:
    """The nodes with those of the stream beside compute moved to places before nodes of `roomy` ops. Where none comes before what needs
    them, or what needs one that comes behind them, they stay. Those of one stream keep their order.

    Time is counted in FLOPs of compute. From the last to the first, each has to end where it is needed or the next one has to begin."""
    at = {node: i for i, node in enumerate(nodes)}
    theirs = [node for node in nodes if node.stream == COMM]
    limits, limit = {}, len(nodes)
    for node in reversed(theirs):
        limit = limits[node] = min([limit, *(at[r] for v in node.outputs for r in readers.get(v, ()) if r.stream == COMPUTE)])
    before = [0, *accumulate(_flops(node) if node.stream == COMPUTE else 0 for node in nodes)] if theirs else []
    chosen, due = dict[Node, int](), inf
    for node in reversed(theirs):
        due = min(due, before[limits[node]]) - hides * _nbytes(node)
        rooms = [i for i in range(at[node], limits[node]) if nodes[i].stream == COMPUTE and nodes[i].op in roomy] or [at[node]]
        chosen[node] = max((i for i in rooms if before[i] <= due), default=rooms[0])
        due = max(due, before[chosen[node]])
    places: dict[int, list[Node]] = {}
    for node in theirs:  # none overtakes an earlier one: it meets the same room
        places.setdefault(chosen[node], []).append(node)
    out: list[Node] = []
    for i, node in enumerate(nodes):
        out += places.get(i, ())
        out += [node] if node.stream != COMM else []
    return out


def _flops(node: Node) -> int:
    return row(node.op).flops([v.type for v in node.inputs], node.attrs)


def _nbytes(node: Node) -> int:
    """Of what is handed in or made, whichever is more."""
    return max(sum(v.type.nbytes for v in values) for values in (node.inputs, node.outputs))
