"""Plan and Program: what an executor runs, as plain data. Floor 2.

A Plan is one Segment made static: launches in order, every operand at a byte offset in a named arena. A Program is the Plans of all
Segments of a run over shared state arenas, and the order in which one training step runs them. Both print for people and hash the
same in every process.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from alpha.errors import InputError
from alpha.graph.ir import attrs_text, effects_text
from alpha.graph.order import COMPUTE
from alpha.graph.state import StateLayout
from alpha.types import Attrs, TensorType

MULTIPROCESSORS = 132
"""What plans and kernels of a GPU are made for: those of every Hopper part of the evidence. It decides partitions, hence bits, so it is
never read from a device, and a plan is the same on every machine."""


@dataclass(frozen=True)
class Ref:
    """A contiguous tensor at a byte offset of an arena. `extent`: where the integer lies that says how many of its rows hold something when
    the plan runs, from 0 to those of the type; None: all."""

    arena: str
    offset: int
    type: TensorType
    extent: Ref | None = None

    @property
    def stop(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.type.nbytes

    @property
    def whole(self) -> Ref:
        """The tensor up to its bound."""
        return self if self.extent is None else replace(self, extent=None)

    @property
    def kind(self) -> str:
        """Its type, and its extent where it has one."""
        return f"{self.type}" + (f" rows {self.extent}" if self.extent is not None else "")

    def __str__(self) -> str:
        return f"{self.arena}+{self.offset}:{self.kind}"


@dataclass(frozen=True)
class Launch:
    """One call of a component. `flops`: executed; `nbytes`: fewest that must move. `source` never enters a hash.

    `stream`: one of alpha/graph/order.py; `after`: earlier launches of the plan, on other streams, that it waits for. A plan has run when
    all its streams have. Whoever has one stream runs the launches in order. `stage`, `microbatch`, `sms`: as its Node says."""

    op: str
    component: str
    ins: tuple[Ref, ...]
    outs: tuple[Ref, ...]
    attrs: Attrs
    scratch: Ref | None
    layer: str
    phase: str
    source: str
    flops: int
    nbytes: int
    stream: str = COMPUTE
    after: tuple[int, ...] = ()
    stage: int | None = None
    microbatch: int | None = None
    sms: int = 0

    def text(self) -> str:
        """Canonical text without the source line."""
        beside = effects_text(self.stream, None, None)
        beside += f" after {' '.join(map(str, self.after))}" if self.after else ""
        beside += effects_text(COMPUTE, self.stage, self.microbatch, self.sms)
        return (f"{self.component} {' '.join(map(str, self.ins))} -> {' '.join(map(str, self.outs))} "
                f"{attrs_text(self.attrs)} {self.scratch} {self.layer} {self.phase}{beside}")


@dataclass(frozen=True)
class Memory:
    """Bytes of the activation arena: `peak` as laid out; `total` if nothing were shared; `lower` the most that is ever live at once."""

    peak: int
    total: int
    lower: int


@dataclass(frozen=True)
class Plan:
    """One Segment. `arenas`: bytes that each arena must have for this plan."""

    name: str
    launches: tuple[Launch, ...]
    inputs: dict[str, Ref]
    outputs: dict[str, Ref]
    arenas: dict[str, int]
    memory: Memory

    def components(self) -> tuple[str, ...]:
        """Ids of every component it launches, sorted."""
        return tuple(sorted({launch.component for launch in self.launches}))

    def text(self) -> str:
        """Canonical text: what the hash covers."""
        lines = [f"in {k} {r}" for k, r in sorted(self.inputs.items())] + [launch.text() for launch in self.launches]
        lines += [f"out {k} {r}" for k, r in sorted(self.outputs.items())] + [f"arena {k} {n}" for k, n in sorted(self.arenas.items())]
        return "\n".join(lines)

    def hash(self) -> str:
        """sha256 of the canonical text."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def computation(self) -> str:
        """Canonical text without places of activations: of each operand there stands which launches made it. So it says what is computed,
        and not for how many workers scratch was planned. SM budgets move no bit and are left out."""
        held = _Held()
        lines = [f"in {k} {r}" for k, r in sorted(self.inputs.items())]
        for number, x in enumerate(self.launches):
            ins = " ".join(map(held.read, x.ins))
            outs = " ".join(held.write(ref, f"{number}.{i}") for i, ref in enumerate(x.outs))
            lines.append(replace(x, ins=(), outs=(), scratch=None, sms=0).text() + f" {ins} -> {outs}")
        lines += [f"out {k} {held.read(r)}" for k, r in sorted(self.outputs.items())]
        lines += [f"arena {k} {n}" for k, n in sorted(self.arenas.items()) if k != _ACTIVATIONS]
        return "\n".join(lines)

    def flops(self) -> int:
        """Executed floating-point operations of one run."""
        return sum(launch.flops for launch in self.launches)

    def table(self, limit: int | None = None) -> str:
        """The plan for a person: one line a launch, then memory."""
        lines = [f"plan {self.name}  {len(self.launches)} launches  {self.flops() / 1e9:.3f} GFLOP  hash {self.hash()[:12]}"]
        for i, x in enumerate(self.launches[:limit]):
            ins = " ".join(f"{r.arena}+{r.offset}:{r.type}" for r in x.ins)
            lines.append(f"{i:4d} {x.phase:9s} {x.layer:12s} {x.component:28s} {ins} -> {' '.join(map(str, x.outs))}  {x.source}")
        if limit is not None and len(self.launches) > limit:
            lines.append(f"     ... {len(self.launches) - limit} more")
        m = self.memory
        lines.append(f"activations: peak {m.peak:,} B, lower bound {m.lower:,} B, without sharing {m.total:,} B")
        return "\n".join(lines)


_ACTIVATIONS = "act"
"""The arena whose places the planner chooses; all others lie as the state, the inputs and the outputs are declared."""


class _Held:
    """What lies in the arena of activations, by who wrote it last: sorted, and nothing overlaps."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[tuple[int, int, str, int]] = []
        """First byte, end, the writer, and the first byte of what that wrote."""

    def read(self, ref: Ref) -> str:
        """Which bytes of whose results an operand is."""
        if ref.arena != _ACTIVATIONS:
            return str(ref)
        lo, hi = self._within(ref)
        parts = [f"{name}[{max(start, ref.offset) - origin}:{min(stop, ref.stop) - origin}]"
                 for start, stop, name, origin in self._parts[lo:hi]]
        return f"{'+'.join(parts)}:{ref.kind}"

    def write(self, ref: Ref, name: str) -> str:
        """A result takes its place; what it overlaps is gone."""
        if ref.arena != _ACTIVATIONS:
            return str(ref)
        lo, hi = self._within(ref)
        gone = self._parts[lo:hi]
        kept = [(start, ref.offset, n, o) for start, _, n, o in gone[:1] if start < ref.offset]
        kept.append((ref.offset, ref.stop, name, ref.offset))
        kept += [(ref.stop, stop, n, o) for _, stop, n, o in gone[-1:] if stop > ref.stop]
        self._parts[lo:hi] = kept
        self._starts[lo:hi] = [start for start, *_ in kept]
        return f"{name}:{ref.kind}"

    def _within(self, ref: Ref) -> tuple[int, int]:
        """The parts that overlap a tensor: from, to."""
        lo = bisect_right(self._starts, ref.offset)
        lo -= lo > 0 and self._parts[lo - 1][1] > ref.offset
        return lo, max(lo, bisect_left(self._starts, ref.stop))


@dataclass(frozen=True)
class Step:
    """One call in a training step: run `plan`; if `shard` and `micro` are set, with the batch of that logical shard and microbatch."""

    plan: str
    shard: int | None = None
    micro: int | None = None


@dataclass(frozen=True)
class Role:
    """What one rank runs. `schedule`: its training step, by the names that every rank has for its plans, with shard numbers of the whole
    job; `plans`: name -> key in the Program's plans, where equal ones are kept once."""

    schedule: tuple[Step, ...]
    plans: Mapping[str, str]


Groups = Mapping[str, tuple[tuple[int, ...], ...]]
"""Name of a group -> tuples of ranks; each rank is in exactly one tuple of a group."""


@dataclass(frozen=True)
class Program:
    """All Segments of a run. `states`: kind -> layout of the flat state arrays; `schedule`: one training step, in order; `replay`: the
    microbatches that are handed over at once, 0 for a step's. It moves no bit, so the hash does not cover it; `made_by`: ids of the
    components that made this Program and that execute it, which shows in its plans.

    Of many ranks: `schedule` is that of rank 0, whose plans have their own names; `others`: the roles of rank 1 and on; `groups`: what its
    collectives name; `sharded`: kinds of state of which each rank holds its cut (StateLayout.shard)."""

    name: str
    plans: dict[str, Plan]
    schedule: tuple[Step, ...]
    states: dict[str, StateLayout]
    facts: dict[str, object] = field(default_factory=dict)
    replay: int = 1
    made_by: tuple[str, ...] = ()
    others: tuple[Role, ...] = ()
    groups: Groups = field(default_factory=dict)
    sharded: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks run it."""
        return 1 + len(self.others)

    def role(self, rank: int) -> Role:
        """What a rank runs; InputError for a rank that the Program has not."""
        if not 0 <= rank < self.ranks:
            raise InputError(f"program {self.name} has no such rank", came=rank, expected=f"0 to {self.ranks - 1}")
        if rank:
            return self.others[rank - 1]
        elsewhere = {key for role in self.others for name, key in role.plans.items() if name != key}
        return Role(self.schedule, {name: name for name in self.plans if name not in elsewhere})

    def plans_of(self, rank: int) -> dict[str, Plan]:
        """The plans that a rank runs, by the names of its schedule."""
        return {name: self.plans[key] for name, key in self.role(rank).plans.items()}

    def replays(self, rank: int = 0) -> tuple[tuple[Step, ...], ...]:
        """The rank's schedule in the pieces that are handed over at once, which a GPU replays as one graph each: `replay` microbatches with
        the trees that follow them; last the update by itself, because a loop that runs ahead hands it over later than the rest."""
        found: list[list[Step]] = [[]]
        schedule = self.role(rank).schedule
        for call in schedule[:-1]:
            held = sum(x.shard is not None for x in found[-1])
            if call.shard is not None and held == self.replay != 0:
                found.append([])
            found[-1].append(call)
        return tuple(tuple(calls) for calls in (*found, schedule[-1:]) if calls)

    def arenas(self, rank: int = 0) -> dict[str, int]:
        """Bytes per arena of a rank: the largest that any of its plans needs; arenas are shared by all of them."""
        out: dict[str, int] = {}
        for plan in self.plans_of(rank).values():
            for name, n in plan.arenas.items():
                out[name] = max(out.get(name, 0), n)
        return dict(sorted(out.items()))

    def kernels(self) -> tuple[str, ...]:
        """Ids of every component that any plan launches, sorted."""
        return tuple(sorted({c for plan in self.plans.values() for c in plan.components()}))

    def components(self) -> tuple[str, ...]:
        """Ids of every component that it rests on, sorted: what its plans launch, and what made it and executes it."""
        return tuple(sorted({*self.kernels(), *self.made_by}))

    def hash(self) -> str:
        """sha256 over what the plans compute, the schedules of all ranks and the facts (shards, sizes); equal on every rank, in every
        process and on every host: neither the number of workers nor what follows from it is in it."""
        parts = [f"{name} {hashlib.sha256(plan.computation().encode()).hexdigest()}" for name, plan in sorted(self.plans.items())]
        parts += [f"{s.plan} {s.shard} {s.micro}" for s in self.schedule]
        parts.append(attrs_text({key: fact for key, fact in self.facts.items() if key != "threads"}))
        for role in self.others:
            parts += [f"{s.plan} {s.shard} {s.micro}" for s in role.schedule]
            parts += [f"{name} is {key}" for name, key in sorted(role.plans.items())]
        parts += [f"group {name} {members}" for name, members in sorted(self.groups.items())]
        parts += [f"sharded {kind}" for kind in sorted(self.sharded)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe(plans: Iterable[Plan]) -> str:
    """All plans for a person."""
    return "\n\n".join(plan.table() for plan in plans)
