"""FLOPs that the launches of a Program execute in one step, part by part: what HFU counts, recompute included. Floor 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from alpha.flops.parts import ATTENTION, DIRECTIONS, EMBEDDING, LOGITS, OPTIMIZER, OTHERS, PARTS, part_of_weight
from alpha.flops.v1 import ModelFlops
from alpha.graph.plan import Launch, Program
from alpha.graph.state import StateLayout
from alpha.ops.table import row
from alpha.types import ITEMSIZE

Places = Mapping[tuple[str, int], str]

_DIRECTION = {"forward": "forward", "recompute": "recompute", "update": "update"}
"""Phase of a launch -> direction; every other phase is part of the backward, sums over logical shards included."""

_WITH_GRADIENT = {"linear_cross_entropy_grad": "linear_cross_entropy"}
"""Ops of the forward that make their gradient as well -> the op that makes none: what is above its FLOPs is backward."""


def executed(program: Program) -> dict[tuple[str, str], int]:
    """(part, direction) -> FLOPs of one step of all ranks. They add up to what its Plans say, exactly."""
    places, found = tensors_by_place(program.states), Counter[tuple[str, str]]()
    roles = [program.role(rank) for rank in range(program.ranks)]
    for name, runs in Counter(role.plans[call.plan] for role in roles for call in role.schedule).items():
        for launch in program.plans[name].launches:
            part, direction, ahead = part_of(launch, places), _DIRECTION.get(launch.phase, "backward"), 0
            if launch.op in _WITH_GRADIENT:
                types = [ref.type for ref in launch.ins]
                ahead = launch.flops - row(_WITH_GRADIENT[launch.op]).flops(types, launch.attrs)
                found[part, "backward"] += runs * ahead
            found[part, direction] += runs * (launch.flops - ahead)
    return dict(found)


def by_part(model: ModelFlops, program: Program, tokens: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(part, direction) -> FLOPs of one step of `tokens` tokens: by the FLOPS model, and executed. Rows that are 0 in both are left out."""
    times, left = divmod(tokens, model.tokens)
    assert not left, f"a step of {tokens} tokens is no multiple of the {model.tokens} that were counted"
    useful = {(part, "forward"): times * n for part, n in model.forward.items()}
    useful |= {(part, "backward"): times * n for part, n in model.backward.items()}
    done = executed(program)
    found = {(part, to): (useful.get((part, to), 0), done.get((part, to), 0)) for to in DIRECTIONS for part in PARTS}
    return {key: both for key, both in found.items() if any(both)}


def part_of(launch: Launch, places: Places) -> str:
    """The part of a launch. A product is told by the tensor that it reads, or whose gradient it writes."""
    if launch.phase == "update":
        return OPTIMIZER
    if launch.layer in (LOGITS, EMBEDDING):
        return launch.layer
    if launch.op.startswith("attention"):
        return ATTENTION
    for ref in (*launch.ins, *launch.outs):
        if len(ref.type.shape) > 1 and (name := places.get((ref.arena, ref.offset))):
            return part_of_weight(name)
    return OTHERS


def tensors_by_place(states: Mapping[str, StateLayout]) -> Places:
    """(arena, byte offset) -> name of the tensor that begins there."""
    return {(f"state.{kind}", layout.offsets[t.name] * ITEMSIZE[layout.dtype]): t.name for kind, layout in states.items()
            for t in layout.tensors}
