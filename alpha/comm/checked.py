"""Debugging: every collective of a Program is done again by its row, on every rank, and the bits are compared. Floor 4.

All members' operands are gathered for it. So a job takes several times as long and holds them all in memory; it is off by default, and then
the kernels are the plain ones. Sends, receives and barriers have nothing to compare: their messages carry checksums always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import xxhash

from alpha.comm import collectives
from alpha.comm.catalogue import Arrays, HasWorld, Run
from alpha.component import Catalogue, Component
from alpha.errors import RankError
from alpha.ops.collectives import promised
from alpha.ops.table import row
from alpha.types import Attrs, TensorType

CHECKED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
"""Collectives whose results are compared."""


def checked(catalogue: Catalogue) -> Catalogue:
    """The same components, of which the collectives raise RankError on all members where the result of one is not what its row promises:
    with rank, op, step and the model's line."""
    found = Catalogue()
    found.broken = dict(catalogue.broken)
    for component in catalogue:
        found.add(_checked(component) if component.op in CHECKED and component.profile == "collective" else component)
    return found


def _checked(component: Component) -> Component:
    return replace(component, implementation=partial(_bind, str(component.op), component.implementation))


def _bind(op: str, plain: Callable[..., Run], cpu: HasWorld, ins: Arrays, outs: Arrays, attrs: Attrs) -> Run:
    run = plain(cpu, ins, outs, attrs)

    def call() -> None:
        operand = np.array(ins[0]).reshape(-1)
        run()
        _compare(cpu, op, operand, outs[0], attrs)

    return call


def _compare(cpu: HasWorld, op: str, operand: np.ndarray, result: np.ndarray, attrs: Attrs) -> None:
    world = cpu.world
    group = world.group(attrs["group"])
    every = np.empty((group.size, operand.size), operand.dtype)
    collectives.all_gather(group, operand, every)
    kind = TensorType((operand.size,), "f32")  # only of 16 bits would a sum be rounded, and none here has them
    want = promised(row(op), [(x,) for x in every], [kind], attrs)[group.index][0]
    own = np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(x).tobytes()) for x in (result, want)], np.uint64).view(np.int64)
    sums = np.empty((group.size, 2), np.int64)
    collectives.all_gather(group, own, sums)
    wrong = [i for i in range(group.size) if sums[i, 0] != sums[i, 1]]
    if wrong:
        rank = group.members[wrong[0]]
        line = f", {world.place.source}" if world.place.source else ""
        raise RankError(f"{op} of step {world.step} gave rank {rank} other bits than its row promises", rank=rank, op=op, step=world.step,
                        came="; ".join(f"rank {group.members[i]}: {_hex(sums[i, 0])}" for i in wrong) + f" (XXH3 of the result{line})",
                        expected="; ".join(f"rank {group.members[i]}: {_hex(sums[i, 1])}" for i in wrong),
                        do="run that collective alone: pytest suites/distributed/test_collectives.py")


def _hex(x: np.int64) -> str:
    return f"{int(x) & (1 << 64) - 1:016x}"
