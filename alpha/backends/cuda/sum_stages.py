"""Stages of sums that copy engines move: shared memory of a rank beside its channels, and whether a run has room for it. Floor 4."""

from __future__ import annotations

from alpha.backends.cuda.kernels.collectives import SUMS, choose, staged
from alpha.backends.cuda.memory_check import GIB, RESERVE, channels_of, needed
from alpha.cuda_runtime.peers import WHOLE
from alpha.errors import MachineError
from alpha.graph.plan import Program


def stages_of(program: Program, rank: int = 0) -> dict[tuple[str, str], int]:
    """(group, stream) of every channel -> bytes that its sums by engines take of this rank's device, in whole allocations of the driver:
    one stage, of the largest of them. 0 where the table chooses engines for none."""
    plans = program.plans_of(rank).values()
    members = {name: next(len(t) for t in tuples if rank in t) for name, tuples in program.groups.items()}
    found = dict.fromkeys(channels_of(plans), 0)
    for x in (x for plan in plans for x in plan.launches if "group" in x.attrs and x.op in SUMS):
        group, nbytes = str(x.attrs["group"]), x.ins[0].type.nbytes
        if choose(x.op, nbytes, members[group]).algorithm == "engine":
            found[group, x.stream] = max(found[group, x.stream], -(-staged(nbytes, members[group]) // WHOLE) * WHOLE)
    return found


def require_stages(program: Program, free: int, rank: int = 0) -> None:
    """MachineError where the rest of a run fits into `free` bytes (memory_check.py), and its stages beside it do not."""
    n, stages = needed(program, rank), sum(stages_of(program, rank).values())
    if n.total + RESERVE <= free < n.total + stages + RESERVE:
        raise MachineError(
            "the run does not fit into the GPU's memory",
            came=f"{(n.total + stages) / GIB:.2f} GiB planned, {stages / GIB:.2f} of them for stages of sums between ranks",
            expected=f"at most {(free - RESERVE) / GIB:.2f} GiB: {free / GIB:.2f} are free, {RESERVE / GIB:.2f} are kept for the driver",
            do="take a smaller train.micro_batch, or train.recompute = 'block'")
