"""Plan and Program: what an executor runs, as plain data. Floor 2.

A Plan is one Segment made static: launches in order, every operand at a byte offset in a named arena. A Program is the Plans of all
Segments of a run over shared state arenas, and the order in which one training step runs them. Both print for people and hash the
same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from alpha.graph.ir import attrs_text
from alpha.graph.state import StateLayout
from alpha.types import Attrs, TensorType

MULTIPROCESSORS = 132
"""What plans and kernels of a GPU are made for: those of every Hopper part of the evidence. It decides partitions, hence bits, so it is
never read from a device, and a plan is the same on every machine."""


@dataclass(frozen=True)
class Ref:
    """A contiguous tensor at a byte offset of an arena."""

    arena: str
    offset: int
    type: TensorType

    @property
    def stop(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.type.nbytes

    def __str__(self) -> str:
        return f"{self.arena}+{self.offset}:{self.type}"


@dataclass(frozen=True)
class Launch:
    """One call of a component. `flops`: executed; `nbytes`: fewest that must move. `source` never enters a hash."""

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

    def text(self) -> str:
        """Canonical text without the source line."""
        return (f"{self.component} {' '.join(map(str, self.ins))} -> {' '.join(map(str, self.outs))} "
                f"{attrs_text(self.attrs)} {self.scratch} {self.layer} {self.phase}")


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


@dataclass(frozen=True)
class Step:
    """One call in a training step: run `plan`; if `shard` and `micro` are set, with the batch of that logical shard and microbatch."""

    plan: str
    shard: int | None = None
    micro: int | None = None


@dataclass(frozen=True)
class Program:
    """All Segments of a run. `states`: kind -> layout of the flat state arrays; `schedule`: one training step, in order; `replay`: the
    microbatches that are handed over at once, 0 for a step's. It moves no bit, so the hash does not cover it; `made_by`: ids of the
    components that made this Program and that execute it, which shows in its plans."""

    name: str
    plans: dict[str, Plan]
    schedule: tuple[Step, ...]
    states: dict[str, StateLayout]
    facts: dict[str, object] = field(default_factory=dict)
    replay: int = 1
    made_by: tuple[str, ...] = ()

    def replays(self) -> tuple[tuple[Step, ...], ...]:
        """The schedule in the pieces that are handed over at once, which a GPU replays as one graph each: `replay` microbatches with the
        trees that follow them; last the update by itself, because a loop that runs ahead hands it over later than the rest."""
        found: list[list[Step]] = [[]]
        for call in self.schedule[:-1]:
            held = sum(x.shard is not None for x in found[-1])
            if call.shard is not None and held == self.replay != 0:
                found.append([])
            found[-1].append(call)
        return tuple(tuple(calls) for calls in (*found, self.schedule[-1:]) if calls)

    def arenas(self) -> dict[str, int]:
        """Bytes per arena: the largest that any plan needs; arenas are shared by all plans."""
        out: dict[str, int] = {}
        for plan in self.plans.values():
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
        """sha256 over the plans, the schedule and the facts (shards, sizes); equal on every rank and in every process."""
        parts = [f"{name} {plan.hash()}" for name, plan in sorted(self.plans.items())]
        parts += [f"{s.plan} {s.shard} {s.micro}" for s in self.schedule]
        parts.append(attrs_text(self.facts))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe(plans: Iterable[Plan]) -> str:
    """All plans for a person."""
    return "\n\n".join(plan.table() for plan in plans)
