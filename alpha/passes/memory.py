"""Memory: storage for every value, from lifetimes. Floor 3.

Values that are views of one another, or that a kernel may overwrite in place, share one *storage class*. A class lives from its first
write to its last read in the schedule (one stream: list order is the happens-before order). Classes that are inputs, outputs or state
have fixed homes; the rest are packed into the activation arena, largest first, at the lowest offset free over their lifetime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alpha.component import Component
from alpha.errors import GraphError
from alpha.graph.ir import Graph, Node, Value
from alpha.graph.plan import Launch, Memory, Plan, Ref
from alpha.ops.table import row
from alpha.types import ITEMSIZE, TensorType

ALIGN = 256


@dataclass(eq=False)
class _Class:
    """One storage: its members, fixed home if any, bytes, first write and last read (indices in the schedule)."""

    home: tuple[str, int] | None = None
    nbytes: int = 0
    first: int = 1 << 60
    last: int = -1
    members: list[Value] = field(default_factory=list)
    offset: int = -1


def layout(graph: Graph, chosen: Mapping[Node, Component], threads: int, state_bytes: Mapping[str, int]) -> Plan:
    """The Plan of a scheduled graph. `state_bytes`: size of each state arena. GraphError if a state update cannot be made in place."""
    of = _classes(graph, chosen)
    scratch: list[tuple[int, int]] = []  # (launch index, bytes)
    for i, node in enumerate(graph.nodes):
        if node in chosen and chosen[node].scratch is not None:
            n = chosen[node].scratch([v.type for v in node.inputs], node.attrs, threads)  # type: ignore[misc]
            if n:
                scratch.append((i, n))
    classes = list(dict.fromkeys(of.values()))
    free = [c for c in classes if c.home is None]
    extra = {i: _Class(nbytes=n, first=i, last=i) for i, n in scratch}
    memory = pack([*free, *extra.values()])

    def ref(v: Value) -> Ref:
        c = of[v]
        arena, base = c.home if c.home is not None else ("act", c.offset)
        return Ref(arena, base, v.type)

    launches = []
    for i, node in enumerate(graph.nodes):
        if node not in chosen:
            continue
        spec, types = row(node.op), [v.type for v in node.inputs]
        where = Ref("act", extra[i].offset, TensorType((extra[i].nbytes,), "bool")) if i in extra else None
        launches.append(Launch(node.op, chosen[node].id, tuple(map(ref, node.inputs)), tuple(map(ref, node.outputs)), dict(node.attrs),
                               where, node.layer, node.phase, node.source, spec.flops(types, node.attrs),
                               spec.min_bytes(types, node.attrs)))
    inputs = {k: ref(v) for k, v in graph.inputs.items()}
    outputs = {k: ref(v) for k, v in graph.outputs.items()}
    arenas = {f"state.{k}": n for k, n in state_bytes.items()}
    arenas["act"] = memory.peak
    arenas["io"] = max((r.stop for r in inputs.values()), default=0)
    arenas["out"] = max((r.stop for r in outputs.values() if r.arena == "out"), default=0)
    return Plan(graph.name, tuple(launches), inputs, outputs, arenas, memory)


def _classes(graph: Graph, chosen: Mapping[Node, Component]) -> dict[Value, _Class]:
    of: dict[Value, _Class] = {}
    last_read: dict[Value, int] = {}
    for i, node in enumerate(graph.nodes):
        for v in node.inputs:
            last_read[v] = i
    end = len(graph.nodes)
    kept = set(graph.roots())
    at = 0
    for name in sorted(graph.inputs):
        v = graph.inputs[name]
        of[v] = _Class(home=("io", at), nbytes=v.type.nbytes, first=-1, last=end, members=[v])
        at = _up(at + v.type.nbytes)
    for v in graph.states.values():
        assert v.state is not None
        kind, offset = v.state
        of[v] = _Class(home=(f"state.{kind}", offset * ITEMSIZE[v.type.dtype]), nbytes=v.type.nbytes, first=-1, last=end, members=[v])
    target = {v: box for box, v in graph.updates.items()}
    target |= _sums_on_the_way(graph, target, kept)
    for i, node in enumerate(graph.nodes):
        if node not in chosen:  # a view
            c = of[node.inputs[0]]
            of[node.outputs[0]] = c
            c.members.append(node.outputs[0])
            continue
        taken: set[int] = set()
        for index, v in enumerate(node.outputs):
            found: _Class | None = None
            for out, operand in chosen[node].inplace:
                if out == index and operand not in taken and _may_overwrite(graph, node, i, operand, v, of, last_read, kept, target):
                    found = of[node.inputs[operand]]
                    taken.add(operand)
                    break
            c = found or _Class(nbytes=v.type.nbytes, first=i)
            of[v] = c
            c.members.append(v)
    _homes(graph, of, last_read, end)
    for v, c in of.items():
        c.last = max(c.last, last_read.get(v, c.first), end if v in kept else -1)
    return of


def _may_overwrite(graph: Graph, node: Node, i: int, operand: int, out: Value, of: Mapping[Value, _Class], last_read: Mapping[Value, int],
                   kept: set[Value], target: Mapping[Value, tuple[str, int]]) -> bool:
    """Whether `out` may take the storage of `node.inputs[operand]`: nothing reads it later, and no fixed home is broken."""
    source = node.inputs[operand]
    c = of[source]
    if source.type.nbytes != out.type.nbytes or any(of[v] is c for k, v in enumerate(node.inputs) if k != operand):
        return False
    if any(last_read.get(m, -1) > i or m in kept for m in c.members):
        return False
    if c.home is not None:  # only the state box that `out` is to become
        return out in target and c.home == (f"state.{target[out][0]}", target[out][1] * ITEMSIZE[out.type.dtype])
    return out not in target or target[out] == target.get(source)


def _sums_on_the_way(graph: Graph, target: Mapping[Value, tuple[str, int]], kept: set[Value]) -> dict[Value, tuple[str, int]]:
    """Values that become a state box by way of rows that add to their first operand, `into`: they may live in the box already."""
    readers = graph.readers()
    found: dict[Value, tuple[str, int]] = {}
    for value, box in target.items():
        at = value
        while at.producer is not None and row(at.producer.op).inputs[:1] == ("into",):
            source = at.producer.inputs[0]
            if source.producer is None or source in kept or len(readers[source]) != 1:
                break
            found[source] = box
            at = source
    return found


def _homes(graph: Graph, of: dict[Value, _Class], last_read: Mapping[Value, int], end: int) -> None:
    """Give updates their state boxes and outputs their places, checking that no old value is read after it is overwritten."""
    for (kind, offset), v in graph.updates.items():
        c = of[v]
        home = (f"state.{kind}", offset * ITEMSIZE[v.type.dtype])
        if c.home == home:
            continue
        span = (home[1], home[1] + v.type.nbytes)
        if c.home is not None:
            raise GraphError("a state update would need a copy", came=f"{v} lives in {c.home}", expected=f"{home}",
                             do="let a node produce the new value, not a leaf or another state box")
        for s in graph.states.values():
            assert s.state is not None
            lo = s.state[1] * ITEMSIZE[s.type.dtype]
            overlaps = f"state.{s.state[0]}" == home[0] and lo < span[1] and span[0] < lo + s.type.nbytes
            if overlaps and max(last_read.get(m, -1) for m in of[s].members) >= c.first:
                raise GraphError("a state box is read after its update is written", came=f"{s} updated by {v}",
                                 do="declare an in-place pair in the kernel's component, or read the box earlier")
        c.home, c.first, c.last = home, -1, end
    at = 0
    for name in sorted(graph.outputs):
        v = graph.outputs[name]
        c = of[v]
        if c.home is None:
            c.home = ("out", at)
            at = _up(at + c.nbytes)
        c.last = end


def _up(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN


def pack(classes: list[_Class]) -> Memory:
    """Set `offset` of every class; classes whose lifetimes meet never overlap. Largest first, lowest free offset, ties by first write."""
    placed: list[_Class] = []
    for c in sorted(classes, key=lambda c: (-c.nbytes, c.first, c.last)):
        at = 0
        for other in sorted((p for p in placed if p.first <= c.last and c.first <= p.last), key=lambda p: p.offset):
            if other.offset - at >= c.nbytes:
                break
            at = max(at, _up(other.offset + other.nbytes))
        c.offset = at
        placed.append(c)
    peak = max((c.offset + c.nbytes for c in classes), default=0)
    edges: dict[int, int] = {}
    for c in classes:
        edges[c.first] = edges.get(c.first, 0) + c.nbytes
        edges[c.last + 1] = edges.get(c.last + 1, 0) - c.nbytes
    live = lower = 0
    for t in sorted(edges):
        live += edges[t]
        lower = max(lower, live)
    return Memory(peak, sum(_up(c.nbytes) for c in classes), lower)
