"""Collectives of the CPU: binders of the rows in alpha/ops/collectives.py. Floor 4.

A binder gets the rank's World as `cpu.world`. It asks for its group when it runs, because a Plan is bound before ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from alpha.comm import collectives
from alpha.comm.group import Group
from alpha.component import Catalogue, Component, Envelope
from alpha.errors import GraphError
from alpha.types import Attrs


class HasWorld(Protocol):
    """What a binder here needs of what it is handed."""

    world: Any
    """The rank's World (alpha/comm/world.py); None while a Plan is bound without one."""


Arrays = Sequence[np.ndarray]
Run = Callable[[], None]


def _group(cpu: HasWorld, attrs: Attrs) -> Group:
    """The caller's tuple of the group that the node names. GraphError where its size is another one, or there is no world."""
    if cpu.world is None:
        raise GraphError("a collective runs among ranks", came="an executor without a World", expected="one for each rank",
                         do="hand the World to the executor")
    group: Group = cpu.world.group(attrs["group"])
    if group.size != attrs["size"]:
        raise GraphError(f"group {group.name} has another size than the Program says", came=group.size, expected=attrs["size"])
    return group


def all_reduce(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """y = sum, or average, of all members' x."""
    x, y, reduce = ins[0], outs[0], str(attrs["reduce"])
    return lambda: collectives.all_reduce(_group(cpu, attrs), x, y, reduce=reduce)


def reduce_scatter(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """y = this member's piece of the sum, or average, of all members' x."""
    x, y, reduce = ins[0], outs[0], str(attrs["reduce"])
    return lambda: collectives.reduce_scatter(_group(cpu, attrs), x, y, reduce=reduce)


def all_gather(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """y = all members' x, joined."""
    x, y = ins[0], outs[0]
    return lambda: collectives.all_gather(_group(cpu, attrs), x, y)


def broadcast(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """y = the root's x."""
    x, y, root = ins[0], outs[0], int(str(attrs["root"]))
    return lambda: collectives.broadcast(_group(cpu, attrs), x, y, root=root)


def reduce(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """y = the sum of all members' x on the root, zeros elsewhere."""
    x, y, root = ins[0], outs[0], int(str(attrs["root"]))
    return lambda: collectives.reduce(_group(cpu, attrs), x, y, root=root)


def all_to_all(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """Piece i of y = piece of member i's x that is meant for this one."""
    x, y = ins[0], outs[0]
    return lambda: collectives.all_to_all(_group(cpu, attrs), x, y)


def send(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """x goes to a member."""
    x, to = ins[0], int(str(attrs["to"]))
    return lambda: collectives.send(_group(cpu, attrs), x, to=to)


def receive(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """y = what a member sends."""
    y, source = outs[0], int(str(attrs["source"]))
    return lambda: collectives.receive(_group(cpu, attrs), y, source=source)


def barrier(cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    """All members have come."""
    return lambda: collectives.barrier(_group(cpu, attrs))


_ENVELOPE = Envelope(dtypes=("f32", "f64"))
_IN_PLACE = ((0, 0),)


def _collective(op: str, implementation: Callable[..., Run], inplace: tuple[tuple[int, int], ...] = ()) -> Component:
    return Component(id=f"{op}.cpu", kind="program", profile="collective", backend="cpu", op=op, implementation=implementation,
                     envelope=_ENVELOPE, requires=("ranks>=2",), inplace=inplace, presupposes=("transport.shm", "watch.progress"),
                     contract="alpha.gates.contracts.ranks.collectives")


COLLECTIVES = (
    _collective("all_reduce", all_reduce, _IN_PLACE),
    _collective("reduce_scatter", reduce_scatter),
    _collective("all_gather", all_gather),
    _collective("broadcast", broadcast, _IN_PLACE),
    _collective("reduce", reduce, _IN_PLACE),
    _collective("all_to_all", all_to_all, _IN_PLACE),
    _collective("send", send),
    _collective("receive", receive),
    _collective("barrier", barrier),
)


def fill(catalogue: Catalogue) -> None:
    """Add the collectives to the catalogue."""
    for component in COLLECTIVES:
        catalogue.add(component)
