"""Whether a run fits in this machine's memory, asked before anything of it is allocated. Floor 6.

Linux promises memory that it does not have: a run that does not fit is killed without a word, or hangs in a BLAS that asks for its buffers
again and again. So what a Program needs is added up and held against everything that limits this process: what is free in the machine,
control groups (versions 1 and 2) and resource limits. Swap counts for nothing: training in it would not end. What a GPU holds is its
executor's business; of the host's memory such a run is asked for what saves are copied to, which is page-locked.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpha.backends.spot import held
from alpha.checkpoint import ranges
from alpha.comm.segment import PAYLOAD_BYTES
from alpha.errors import MachineError
from alpha.graph.plan import Program
from alpha.optim.init import HELD

MIB = 1 << 20

ORDER2_MODEL = 384 * MIB
"""The order-2 model with its counts, while it is fitted (alpha/data/ngram.py)."""

LOOK = 64 * MIB
"""A worker's share of what the machine's speed is measured with (alpha/train/peak.py)."""

BUFFERS = 40 * MIB
"""A thread's packing buffers in BLAS, and NumPy's."""

RESERVED = 144 * MIB
"""Addresses that a thread reserves beyond what it touches: its stack, and the C library's heap for it with its alignment."""

REST = 64 * MIB
"""Everything else that comes after the plan: bound launches, metrics, the tokens of a batch, the interpreter."""


@dataclass(frozen=True)
class Need:
    """Bytes of a run beside what the process holds already. `state`, `activations`: the Program's arenas; `beside`: what the host needs
    while it draws, measures and multiplies; `reserved`: addresses that are taken and never touched."""

    state: int
    activations: int
    beside: int
    reserved: int

    @property
    def touched(self) -> int:
        """What has to be there physically."""
        return self.state + self.activations + self.beside

    @property
    def mapped(self) -> int:
        """What a limit on addresses has to grant."""
        return self.touched + self.reserved


@dataclass(frozen=True)
class Limit:
    """Something that bounds memory. `left`: bytes that it leaves this process; `addresses`: it counts what is mapped, touched or not."""

    name: str
    left: int
    addresses: bool = False


def need(program: Program, rank: int = 0, *, checked: bool = False) -> Need:
    """What a rank of this Program takes on the CPU. A save copies what the rank writes (alpha/train/saving.py). `checked`: its
    collectives are done again by their rows (alpha/comm/checked.py). Rings have their memory before this is asked: they are not left."""
    arenas = program.arenas(rank)
    state = sum(n for name, n in arenas.items() if name.startswith("state."))
    saved = saves(program, rank)
    threads = int(str(program.facts["threads"]))
    plans = program.plans_of(rank)
    spots = max((held(x) for step in program.role(rank).schedule for x in plans[step.plan].launches), default=0) + state // 64
    beside = max(HELD * threads, ORDER2_MODEL, LOOK * threads, spots) + BUFFERS * threads + REST
    beside += saved + _collectives(program, rank, checked)
    return Need(state, sum(arenas.values()) - state, beside, RESERVED * (threads + 1))


def saves(program: Program, rank: int = 0) -> int:
    """Bytes that a save of this rank copies: those of its file."""
    return ranges.place({kind: program.states[kind] for kind in program.plans["snapshot"].outputs}, rank, program.ranks)[1]


def _collectives(program: Program, rank: int, checked: bool) -> int:
    """Bytes beside the rings: two partial sums a level of the tree in each group, and where collectives are checked all members' operands
    and results of the largest one."""
    sizes = {name: next(len(t) for t in tuples if rank in t) for name, tuples in program.groups.items()}
    partials = sum(2 * (n - 1).bit_length() * PAYLOAD_BYTES for n in sizes.values())
    launches = [x for plan in program.plans_of(rank).values() for x in plan.launches if checked and "group" in x.attrs]
    copies = [sum(r.stop - r.offset for r in (*x.ins, *x.outs)) * (1 + sizes[str(x.attrs["group"])]) for x in launches]
    return partials + max(copies, default=0)


def require(program: Program, ranks: Sequence[int] = (0,), *, checked: bool = False) -> None:
    """MachineError where these ranks of a Program for the CPU do not fit side by side: what they need, what there is, and which keys make
    it smaller."""
    if program.facts["backend"] != "cpu":
        return
    each = [need(program, rank, checked=checked) for rank in ranks]
    together = Need(*(sum(of) for of in zip(*((n.state, n.activations, n.beside, n.reserved) for n in each))))
    for limit in limits():
        wanted = max(each, key=lambda n: n.mapped) if limit.addresses else together
        bytes_ = wanted.mapped if limit.addresses else wanted.touched
        if bytes_ > limit.left:
            raise MachineError(
                "this run does not fit in memory",
                came=f"{_gib(bytes_)}: state {_gib(wanted.state)}, activations {_gib(wanted.activations)}, beside them "
                     f"{_gib(bytes_ - wanted.state - wanted.activations)}",
                expected=f"at most {_gib(limit.left)}, which is what {limit.name} leaves",
                do="lower train.micro_batch or set train.recompute = \"block\" (activations), make the model smaller (state), lower "
                   "machine.threads or --nproc, or raise the limit; `alpha plan` tells the bytes apart",
            )  # fmt: skip


def require_room_for_saves(program: Program, ranks: Sequence[int] = (0,)) -> None:
    """MachineError where the host of a GPU has no room for what saves are copied to. On the CPU `require` counts it."""
    if program.facts["backend"] == "cpu":
        return
    wanted = sum(saves(program, rank) for rank in ranks) + REST
    for limit in limits():
        if not limit.addresses and wanted > limit.left:
            raise MachineError(
                "the host has no room for what a save is copied to", came=f"{_gib(wanted)}, page-locked",
                expected=f"at most {_gib(limit.left)}, which is what {limit.name} leaves",
                do="raise the limit, free host memory, or train a smaller model: 12 bytes a parameter with AdamW",
            )  # fmt: skip


def _gib(n: int) -> str:
    return f"{n / 2**30:,.2f} GiB"


def limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Limit]:
    """Everything known that limits this process's memory, the tightest first; empty where there is no /proc."""
    status = _fields(proc / "self" / "status")
    found = [*_of_groups(proc, groups)]
    free = _fields(proc / "meminfo").get("MemAvailable")
    if free is not None:
        found.append(Limit("the machine's free memory (MemAvailable)", free))
    for name, what, used in (("addresses (ulimit -v)", resource.RLIMIT_AS, "VmSize"), ("data (ulimit -d)", resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(what)[0]
        if soft != resource.RLIM_INFINITY and used in status:
            found.append(Limit(f"the limit on {name}", soft - status[used], addresses=True))
    return sorted(found, key=lambda limit: limit.left)


def _of_groups(proc: Path, groups: Path) -> Iterator[Limit]:
    """Limits of the control groups that this process is in, and of those around them."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            roots, names = [groups, groups / "unified"], ("memory.max", "memory.current", "active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            roots = [groups / "memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for root in roots:
            for folder in (root / inside, *(root / p for p in inside.parents)):
                most, used = _text(folder / names[0]).strip(), _text(folder / names[1]).strip()
                if most.isdecimal() and used.isdecimal() and int(most) < 1 << 60:
                    cached = _fields(folder / "memory.stat")  # file pages go where memory is wanted
                    shown = f"the control group {'/' / folder.relative_to(root)}"
                    yield Limit(shown, int(most) - int(used) + sum(cached.get(name, 0) for name in names[2:]))


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name[:] number [kB]`, in bytes."""
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0]] = int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
