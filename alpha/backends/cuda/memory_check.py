"""Whether a Program fits into the GPU's memory: asked before anything is allocated, answered with what would fit. Floor 4."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alpha.backends.cuda.kernels.collectives import BLOCKS, MEMBERS, SLOT
from alpha.backends.cuda.staging import staging_bytes
from alpha.cuda_runtime.memory import aligned
from alpha.cuda_runtime.peers import WHOLE
from alpha.errors import MachineError
from alpha.graph.plan import Plan, Program

RESERVE = 384 << 20
"""Bytes beside the arenas: loaded kernels, captured graphs, tables, time stamps."""

GIB = 1 << 30


@dataclass(frozen=True)
class Needed:
    """Bytes that a rank of a Program takes on its device: the kinds of state, everything else by which it computes, and of many ranks what
    their collectives share beside the arenas."""

    state: int
    rest: int
    channels: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.rest + self.channels


def channels_of(plans: Iterable[Plan]) -> list[tuple[str, str]]:
    """(group, stream) of every channel that the collectives of these plans take, in the order in which ranks make them."""
    return sorted({(str(x.attrs["group"]), x.stream) for plan in plans for x in plan.launches if "group" in x.attrs})


def channel_bytes(size: int) -> int:
    """What a channel among `size` ranks takes of each one's device: three counts a block and member, and two slots, in whole allocations of
    the driver."""
    return -(-(3 * BLOCKS * MEMBERS * 4 + BLOCKS * size * 2 * SLOT) // WHOLE) * WHOLE


def needed(program: Program, rank: int = 0) -> Needed:
    """What a rank takes."""
    sizes = {name: aligned(max(n, 1)) for name, n in program.arenas(rank).items()}
    state = sum(n for name, n in sizes.items() if name.startswith("state."))
    members = {name: next(len(t) for t in tuples if rank in t) for name, tuples in program.groups.items()}
    channels = sum(channel_bytes(members[group]) for group, _ in channels_of(program.plans_of(rank).values()))
    return Needed(state, sum(sizes.values()) - state + staging_bytes(program), channels)


def check_memory(program: Program, free: int, rank: int = 0) -> None:
    """MachineError if a rank of the Program needs more than `free` bytes, naming the largest microbatch that would fit."""
    n = needed(program, rank)
    if n.total + RESERVE <= free:
        return
    micro, micros = (int(str(program.facts[k])) for k in ("micro_batch", "micros"))
    fixed = n.state + n.channels + RESERVE
    share = (free - fixed) / n.rest * micro
    fitting = max((k for k in range(1, micro) if micro * micros % k == 0 and k <= share), default=0)
    if fitting:
        do = f"take train.micro_batch = {fitting}, or train.recompute = 'block'; the step's result does not need the larger microbatch"
    elif fixed > free:
        cut = ", or train.zero = 1" if program.ranks > 1 and not program.sharded else ""
        do = f"the state alone does not fit: take a smaller model{cut}"
    else:
        do = "no microbatch fits: take train.recompute = 'block', a shorter data.sequence or a smaller model"
    beside = f", {n.channels / GIB:.2f} for channels between ranks" if n.channels else ""
    raise MachineError(
        "the run does not fit into the GPU's memory",
        came=f"{n.total / GIB:.2f} GiB planned: {n.state / GIB:.2f} of state, {n.rest / GIB:.2f} for microbatches of {micro} sequences"
             + beside,
        expected=f"at most {max(0, free - RESERVE) / GIB:.2f} GiB: {free / GIB:.2f} are free, {RESERVE / GIB:.2f} are kept for the driver",
        do=do,
    )
