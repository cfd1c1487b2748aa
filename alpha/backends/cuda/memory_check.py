"""Whether a Program fits into the GPU's memory: asked before anything is allocated, answered with what would fit. Floor 4."""

from __future__ import annotations

from alpha.backends.cuda.staging import staging_bytes
from alpha.cuda_runtime.memory import aligned
from alpha.errors import MachineError
from alpha.graph.plan import Program

RESERVE = 384 << 20
"""Bytes beside the arenas: loaded kernels, captured graphs, tables, time stamps."""

GIB = 1 << 30


def needed(program: Program) -> tuple[int, int]:
    """(bytes of state, bytes of everything else) that a Program takes on the device."""
    sizes = {name: aligned(max(n, 1)) for name, n in program.arenas().items()}
    state = sum(n for name, n in sizes.items() if name.startswith("state."))
    return state, sum(sizes.values()) - state + staging_bytes(program)


def check_memory(program: Program, free: int) -> None:
    """MachineError if the Program needs more than `free` bytes, naming the largest microbatch that would fit."""
    state, rest = needed(program)
    if state + rest + RESERVE <= free:
        return
    micro, micros = (int(str(program.facts[k])) for k in ("micro_batch", "micros"))
    share = (free - RESERVE - state) / rest * micro
    fitting = max((n for n in range(1, micro) if micro * micros % n == 0 and n <= share), default=0)
    if fitting:
        do = f"take train.micro_batch = {fitting}, or train.recompute = 'block'; the step's result does not need the larger microbatch"
    elif state + RESERVE > free:
        do = "the state alone does not fit: take a smaller model"
    else:
        do = "no microbatch fits: take train.recompute = 'block', a shorter data.sequence or a smaller model"
    raise MachineError(
        "the run does not fit into the GPU's memory",
        came=f"{(state + rest) / GIB:.2f} GiB planned: {state / GIB:.2f} of state, {rest / GIB:.2f} for microbatches of {micro} sequences",
        expected=f"at most {max(0, free - RESERVE) / GIB:.2f} GiB: {free / GIB:.2f} are free, {RESERVE / GIB:.2f} are kept for the driver",
        do=do,
    )
