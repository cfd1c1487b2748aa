"""A step of many ranks on paper: what it would take if each launch took the time that is given for it. Floor 3.

Order is that of the executor of ranks on GPUs (alpha/backends/cuda/ranks.py). A rank has two streams, compute and collectives, each in list
order. A collective waits for all compute that stands before it in the list. Compute waits for the collectives that it needs
(alpha/graph/order.py), and a plan ends when both streams have. A collective begins when its last member has come to it, takes the longest
of the members' times, and ends at all of them at once. While it runs, a member's compute has the multiprocessors that it leaves.

Left out: gaps between launches, what the host does, clocks, and the room that a collective keeps while it waits for a member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from alpha.errors import GraphError
from alpha.graph.order import COMM, Order
from alpha.graph.plan import MULTIPROCESSORS, Launch, Program

LEAST = 1e-6
"""ns: what is left of a launch when it has ended, by rounding."""


@dataclass(frozen=True)
class Cost:
    """Of a launch. `ns`: by itself; `blocks`: multiprocessors that it keeps from compute while it runs on the other stream."""

    ns: float
    blocks: int = 0


@dataclass
class RankTime:
    """A rank's step, in ns. `ns`: until its last call ends; `compute`: its compute by itself; `slowed`: what that lost to collectives that
    ran beside it; `communication`: in which a collective ran; `exposed`: in which compute waited for collectives, or for who is late to
    one; `waits`: the same by (unit, op) of the collective that was on its way."""

    ns: float = 0.0
    compute: float = 0.0
    slowed: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    waits: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """A step of all ranks."""

    ranks: tuple[RankTime, ...]

    @property
    def ns(self) -> float:
        """Until the last rank has ended."""
        return max(rank.ns for rank in self.ranks)


_Meeting = tuple[str, tuple[int, ...], str, int]
"""(group, its members, stream, which of them on it) of a collective: what members come to together."""


@dataclass(frozen=True)
class _Call:
    """`behind`: how many calls of the rank's other stream have ended when it begins."""

    launch: Launch
    cost: Cost
    behind: int
    meeting: _Meeting | None


def _calls(program: Program, rank: int, cost: Callable[[int, Launch], Cost]) -> tuple[list[_Call], list[_Call]]:
    """What a rank runs in a step: on the stream of compute, and on that of collectives."""
    compute, beside, met = list[_Call](), list[_Call](), Counter[tuple[str, str]]()
    plans = program.plans_of(rank)
    for step in program.role(rank).schedule:
        launches = plans[step.plan].launches
        order = Order([x.stream for x in launches], [x.after for x in launches])
        ended, places = len(beside), list[int]()  # the plan before has ended on both streams
        for i, launch in enumerate(launches):
            own, other = (beside, compute) if launch.stream == COMM else (compute, beside)
            behind = len(other) if own is beside else max([ended, *(places[j] + 1 for j in order.waits(i))])
            meeting = None
            if "group" in launch.attrs:
                group = str(launch.attrs["group"])
                members = next(m for m in program.groups[group] if rank in m)
                meeting = group, members, launch.stream, met[group, launch.stream]
                met[group, launch.stream] += 1
            places.append(len(own))
            own.append(_Call(launch, cost(rank, launch), behind, meeting))
    return compute, beside


class _Rank:
    """Where a rank is. Of each stream: its calls, how many have ended, and ns that are left of the one that runs, None where none does."""

    def __init__(self, calls: tuple[list[_Call], list[_Call]]) -> None:
        self.calls, self.ended, self.left = calls, [0, 0], list[float | None]([None, None])
        self.time = RankTime(compute=sum(call.cost.ns for call in calls[0] if call.meeting is None))

    def head(self, side: int) -> _Call | None:
        """The call of a stream that runs or comes next."""
        return self.calls[side][self.ended[side]] if self.ended[side] < len(self.calls[side]) else None

    def ready(self, side: int) -> _Call | None:
        """The next call of a stream, where it may begin."""
        call = self.head(side)
        return call if call is not None and self.left[side] is None and self.ended[1 - side] >= call.behind else None

    def speed(self, side: int, multiprocessors: int) -> float:
        """Share of the device that the running call of a stream has of what it needs."""
        call, beside = self.head(side), self.head(1)
        if side or call is None or call.meeting is not None or beside is None or self.left[1] is None:
            return 1.0
        return max(0, multiprocessors - beside.cost.blocks) / multiprocessors

    def passes(self, ns: float, multiprocessors: int) -> None:
        """Time goes by in which nothing begins."""
        compute, beside = self.head(0), self.head(1)
        if compute is None and beside is None:
            return
        self.time.ns += ns
        if any(call is not None and call.meeting and self.left[i] is not None for i, call in enumerate((compute, beside))):
            self.time.communication += ns
        met = compute is not None and compute.meeting is not None and self.ended[1] >= compute.behind
        awaited = compute if met else beside
        if (self.left[0] is None or met) and awaited is not None:
            self.time.exposed += ns
            at = awaited.launch.layer or awaited.launch.phase, awaited.launch.op
            self.time.waits[at] = self.time.waits.get(at, 0.0) + ns
        speeds = [self.speed(side, multiprocessors) for side in (0, 1)]
        for side, speed in enumerate(speeds):
            left = self.left[side]
            if left is not None:
                self.left[side] = left - ns * speed
                self.time.slowed += ns * (1 - speed)

    def end(self) -> None:
        """Whose time is over has ended."""
        for side in (0, 1):
            left = self.left[side]
            if left is not None and left <= LEAST:
                self.ended[side], self.left[side] = self.ended[side] + 1, None


def simulate(program: Program, cost: Callable[[int, Launch], Cost], multiprocessors: int = MULTIPROCESSORS) -> Timeline:
    """One step of all ranks. `cost`: of a launch of a rank. GraphError where members come to different collectives, or wait in a circle."""
    ranks = [_Rank(_calls(program, rank, cost)) for rank in range(program.ranks)]
    come: dict[_Meeting, dict[int, int]] = {}
    while any(rank.head(side) is not None for rank in ranks for side in (0, 1)):
        for number, rank in enumerate(ranks):
            for side in (0, 1):
                call = rank.ready(side)
                if call is not None and call.meeting is None:
                    rank.left[side] = call.cost.ns
                elif call is not None and call.meeting is not None:
                    come.setdefault(call.meeting, {})[number] = side
        for meeting in [m for m, there in come.items() if len(there) == len(m[1])]:
            there = come.pop(meeting)
            calls = [call for number, side in there.items() if (call := ranks[number].head(side)) is not None]
            if len({call.launch.op for call in calls}) > 1:
                raise GraphError("members come to different collectives", came=" and ".join(sorted({call.launch.op for call in calls})),
                                 expected=f"one, as number {meeting[3]} of group {meeting[0]}", do="run verify_program on the Program")
            for number, side in there.items():
                ranks[number].left[side] = max(call.cost.ns for call in calls)
        running = [(left, rank.speed(side, multiprocessors)) for rank in ranks for side in (0, 1) if (left := rank.left[side]) is not None]
        if not any(speed for _, speed in running):
            waiting = sorted({f"{m[0]} {m[3]} by ranks {sorted(there)}" for m, there in come.items()})
            raise GraphError("ranks wait in a circle", came="; ".join(waiting) or "no launch that can begin",
                             expected="every collective is reached by all its members", do="run verify_program on the Program")
        ns = min(left / speed for left, speed in running if speed)
        for rank in ranks:
            rank.passes(ns, multiprocessors)
        for rank in ranks:
            rank.end()
    return Timeline(tuple(rank.time for rank in ranks))
