"""Memory: storage for every value, from lifetimes. Floor 3.

Values that are views of one another, or that a kernel may overwrite in place, share one *storage class*. A class lives from its first
write to its last read; what runs on a stream beside compute may do so at any place of its window (alpha/graph/order.py). Classes that
are inputs, outputs or state have fixed homes; the rest are packed into the activation arena, largest first, at the lowest offset free over
their lifetime. A bucket lies in the state box that it becomes, and its operands lie in it. A part of a flat value lies in that value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from alpha.component import Component
from alpha.errors import GraphError
from alpha.graph.ir import Graph, Node, Value
from alpha.graph.order import Order
from alpha.graph.plan import Launch, Memory, Plan, Ref
from alpha.ops.table import row
from alpha.types import ITEMSIZE, TensorType

ALIGN = 256


@dataclass(eq=False)
class _Class:
    """One storage: its members, fixed home if any, bytes, first write and last read (indices in the schedule). `at`: first byte of members
    that do not begin with it."""

    home: tuple[str, int] | None = None
    nbytes: int = 0
    first: int = 1 << 60
    last: int = -1
    members: list[Value] = field(default_factory=list)
    offset: int = -1
    at: dict[Value, int] = field(default_factory=dict)


def layout(graph: Graph, chosen: Mapping[Node, Component], threads: int, state_bytes: Mapping[str, int]) -> Plan:
    """The Plan of a scheduled graph. `state_bytes`: size of each state arena. GraphError if a state update cannot be made in place."""
    order = _order(graph, chosen)
    of = _classes(graph, chosen, order)
    scratch: list[tuple[int, int]] = []  # (launch index, bytes)
    for i, node in enumerate(graph.nodes):
        if node in chosen and chosen[node].scratch is not None:
            n = chosen[node].scratch([v.type for v in node.inputs], node.attrs, threads)  # type: ignore[misc]
            if n:
                scratch.append((i, n))
    classes = list(dict.fromkeys(of.values()))
    free = [c for c in classes if c.home is None]
    extra = {i: _Class(nbytes=n, first=order.window(i)[0], last=order.window(i)[1]) for i, n in scratch}
    memory = pack([*free, *extra.values()])

    def ref(v: Value) -> Ref:
        c = of[v]
        arena, base = c.home if c.home is not None else ("act", c.offset)
        return Ref(arena, base + c.at.get(v, 0), v.type, None if v.extent is None else ref(v.extent))

    launches: list[Launch] = []
    number: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node not in chosen:
            continue
        number[i] = len(launches)
        spec, types = row(node.op), [v.type for v in node.inputs]
        where = Ref("act", extra[i].offset, TensorType((extra[i].nbytes,), "bool")) if i in extra else None
        launches.append(Launch(node.op, chosen[node].id, tuple(map(ref, node.inputs)), tuple(map(ref, node.outputs)), dict(node.attrs),
                               where, node.layer, node.phase, node.source, spec.flops(types, node.attrs),
                               spec.min_bytes(types, node.attrs), node.stream, tuple(number[j] for j in order.waits(i)),
                               node.stage, node.microbatch, node.sms))
    inputs = {k: ref(v) for k, v in graph.inputs.items()}
    outputs = {k: ref(v) for k, v in graph.outputs.items()}
    arenas = {f"state.{k}": n for k, n in state_bytes.items()}
    arenas["act"] = memory.peak
    arenas["io"] = max((r.stop for r in inputs.values()), default=0)
    arenas["out"] = max((r.stop for r in outputs.values() if r.arena == "out"), default=0)
    return Plan(graph.name, tuple(launches), inputs, outputs, arenas, memory)


def _order(graph: Graph, chosen: Mapping[Node, Component]) -> Order:
    """What runs before what: a launch follows what made its operands, and the one before it of the same group."""
    at = {node: i for i, node in enumerate(graph.nodes)}

    def makers(node: Node) -> Iterator[int]:
        for v in node.inputs:
            if v.producer is not None:
                yield from (at[v.producer],) if v.producer in chosen else makers(v.producer)

    last: dict[object, int] = {}
    after: list[set[int]] = []
    for i, node in enumerate(graph.nodes):
        after.append(set(makers(node)) if node in chosen else set())
        if node.acts:
            group = node.attrs["group"]
            after[-1] |= {last[group]} if group in last else set()
            last[group] = i
    return Order([node.stream if node in chosen else None for node in graph.nodes], after)


def _classes(graph: Graph, chosen: Mapping[Node, Component], order: Order) -> dict[Value, _Class]:
    of: dict[Value, _Class] = {}
    reads: dict[Value, list[int]] = {}
    until: dict[Value, int] = {}
    buckets = [node for node in graph.nodes if node.op == "bucket"]
    for i, node in enumerate(graph.nodes):
        counts = [v.extent for v in (*node.inputs, *node.outputs) if v.extent is not None]
        for v in (*node.inputs, *counts) if node.op != "bucket" else ():
            reads.setdefault(v, []).append(i)
            until[v] = max(until.get(v, -1), order.window(i)[1])
    end = len(graph.nodes)
    parts = {v for node in buckets for v in node.inputs}
    kept = {*graph.roots(), *parts}
    at = 0
    for name in sorted(graph.inputs):
        v = graph.inputs[name]
        of[v] = _Class(home=("io", at), nbytes=v.type.nbytes, first=-1, last=end, members=[v])
        at = _up(at + v.type.nbytes)
    for v in graph.states.values():
        assert v.state is not None
        kind, offset = v.state
        of[v] = _Class(home=(f"state.{kind}", offset * ITEMSIZE[v.type.dtype]), nbytes=v.type.nbytes, first=-1, last=end, members=[v])
    target = _targets(graph, kept)
    for i, node in enumerate(graph.nodes):
        if node.op == "bucket":
            of[node.outputs[0]] = _Class(nbytes=node.outputs[0].type.nbytes, first=i, members=[node.outputs[0]])
            continue
        if node not in chosen:  # a view
            c = of[node.inputs[0]]
            of[node.outputs[0]] = c
            c.members.append(node.outputs[0])
            c.at[node.outputs[0]] = c.at.get(node.inputs[0], 0) + _offset(node)
            continue
        taken: set[int] = set()
        for index, v in enumerate(node.outputs):
            found: _Class | None = None
            for out, operand in chosen[node].inplace:
                if out == index and operand not in taken and _may_overwrite(node, i, operand, v, of, reads, order, kept, target):
                    found = of[node.inputs[operand]]
                    taken.add(operand)
                    break
            c = found or _Class(nbytes=v.type.nbytes, first=order.window(i)[0])
            of[v] = c
            c.last = max(c.last, order.window(i)[1])
            c.members.append(v)
    for node in buckets:
        _still_there(graph, node, chosen, of, reads, order)
    _homes(graph, of, until, end, buckets)
    for v, c in of.items():
        c.last = max(c.last, until.get(v, c.first), end if v in kept else -1)
    return of


def _offset(node: Node) -> int:
    """Bytes from the first of what a view is of to its own first one."""
    return int(str(node.attrs["offset"])) * ITEMSIZE[node.outputs[0].type.dtype] if node.op == "part" else 0


def _may_overwrite(node: Node, i: int, operand: int, out: Value, of: Mapping[Value, _Class], reads: Mapping[Value, list[int]], order: Order,
                   kept: set[Value], target: Mapping[Value, tuple[str, int]]) -> bool:
    """Whether `out` may take the storage of `node.inputs[operand]`: whatever else reads it has run, and no fixed home is broken."""
    source = node.inputs[operand]
    c = of[source]
    if not source.type.nbytes == out.type.nbytes == c.nbytes or any(of[v] is c for k, v in enumerate(node.inputs) if k != operand):
        return False
    if any(m in kept or any(j != i and not order.before(j, i) for j in reads.get(m, ())) for m in c.members):
        return False
    if c.home is not None:  # only the state box that `out` is to become
        return out in target and c.home == (f"state.{target[out][0]}", target[out][1] * ITEMSIZE[out.type.dtype])
    return out not in target or target[out] == target.get(source)


def _still_there(graph: Graph, bucket: Node, chosen: Mapping[Node, Component], of: Mapping[Value, _Class], reads: Mapping[Value, list[int]],
                 order: Order) -> None:
    """GraphError where a part of a bucket, or what shares its storage as a view of it or as what it is a view of, is read when what takes
    the bucket's place may have been written."""
    makers = {m.producer for m in of[bucket.outputs[0]].members}
    over = [i for i, node in enumerate(graph.nodes) if node in chosen and node in makers]
    for v in (m for part in bucket.inputs for m in of[part].members) if over else ():
        late = [graph.nodes[j] for j in reads.get(v, ()) if not all(order.before(j, i) for i in over)]
        if late or v in graph.roots():
            raise GraphError("a part of a bucket, or what it is a view of, is read after the bucket is overwritten",
                             came=f"{v}, read by {late[0] if late else 'the plan as a result'}", expected="readings before that",
                             do="give the bucket a copy")


def _targets(graph: Graph, kept: set[Value]) -> dict[Value, tuple[str, int]]:
    """The state box of every update, and of what becomes one on the way and may live in it already: by rows that add to their
    first operand, `into`, by collectives that give what they take, and by buckets."""
    readers = graph.readers()
    target = {v: box for box, v in graph.updates.items()}
    waiting = list(target.items())
    while waiting:
        value, (kind, offset) = waiting.pop()
        node = value.producer
        if node is None:
            continue
        if node.op == "bucket":
            offsets: tuple[int, ...] = node.attrs["offsets"]  # type: ignore[assignment]
            found = [(v, (kind, offset + at)) for v, at in zip(node.inputs, offsets, strict=True)]
        elif row(node.op).inputs[:1] == ("into",) or (node.acts and node.inputs and node.inputs[0].type == value.type):
            source = node.inputs[0]
            alone = source.producer is not None and source not in kept and len(readers[source]) == 1
            found = [(source, (kind, offset))] if alone else []
        else:
            found = []
        target.update(found)
        waiting += found
    return target


def _homes(graph: Graph, of: dict[Value, _Class], until: Mapping[Value, int], end: int, buckets: list[Node]) -> None:
    """Give updates their state boxes, buckets' operands their places in these, and outputs theirs, checking that no old value is read after
    it is overwritten."""
    for (kind, offset), v in graph.updates.items():
        _settle(graph, of, until, end, v, (f"state.{kind}", offset * ITEMSIZE[v.type.dtype]))
    for node in reversed(buckets):
        home = of[node.outputs[0]].home
        if home is None:
            raise GraphError("a bucket has no place of its own", came=repr(node), expected="a bucket that becomes a state box",
                             do="let an update take it, through kernels that work in place")
        offsets: tuple[int, ...] = node.attrs["offsets"]  # type: ignore[assignment]
        for v, at in zip(node.inputs, offsets, strict=True):
            _settle(graph, of, until, end, v, (home[0], home[1] + at * ITEMSIZE[v.type.dtype]))
    at = 0
    for name in sorted(graph.outputs):
        v = graph.outputs[name]
        c = of[v]
        if c.home is None:
            c.home = ("out", at)
            at = _up(at + c.nbytes)
        c.last = end


def _settle(graph: Graph, of: dict[Value, _Class], until: Mapping[Value, int], end: int, v: Value, home: tuple[str, int]) -> None:
    """Give the class of `v` its home, a place of a state arena."""
    c = of[v]
    if c.home == home and c.nbytes == v.type.nbytes:
        return
    span = (home[1], home[1] + v.type.nbytes)
    if c.home is not None or c.nbytes != v.type.nbytes:
        raise GraphError("a state update would need a copy", came=f"{v} lives in {c.home or 'a part of a buffer'}", expected=f"{home}",
                         do="let a node produce the new value, not a leaf or another state box")
    for s in graph.states.values():
        assert s.state is not None
        lo = s.state[1] * ITEMSIZE[s.type.dtype]
        overlaps = f"state.{s.state[0]}" == home[0] and lo < span[1] and span[0] < lo + s.type.nbytes
        if overlaps and max(until.get(m, -1) for m in of[s].members) >= c.first:
            raise GraphError("a state box is read after its update is written", came=f"{s} updated by {v}",
                             do="declare an in-place pair in the kernel's component, or read the box earlier")
    c.home, c.first, c.last = home, -1, end


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
