"""Reference executor: all ranks of a Program in lockstep in one process, as the oracle of whatever runs them apart. Floor 4.

Each rank has arenas of its own and runs the launches of its role in list order, which is one of the orders that streams allow. At a
collective it stands until all members of its tuple stand there too. Their calls are held against each other; then the row's `across` gives
all results at once. A send does not wait; a receive takes what was sent first. Before every launch its results and scratch are overwritten
with rubbish, so what is not written shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType

import numpy as np

from alpha.backends.checks import check_inputs
from alpha.backends.reference.memory import KernelRank, OracleRank, Rank
from alpha.component import Catalogue
from alpha.errors import GraphError, InputError
from alpha.graph.plan import Launch, Program, Step
from alpha.ops.spec import Arrays
from alpha.ops.table import row

MODES = ("oracle", "kernels")
"""oracle: float64 throughout, by the rows' oracles, nothing rounded. kernels: the CPU's components; collectives with the bits that their
rows promise."""

Call = tuple[str, Mapping[str, np.ndarray]]
"""A plan and its inputs."""

Batch = Callable[[int, int], Mapping[str, np.ndarray]]
"""(logical shard, microbatch) -> inputs by name."""


class ReferenceExecutor:
    """All ranks of one Program. `mode`: one of MODES; `catalogue`: the CPU's kernels, for that mode alone."""

    def __init__(self, program: Program, catalogue: Catalogue | None = None, *, mode: str = "oracle") -> None:
        if mode not in MODES or (mode == "kernels") == (catalogue is None):
            raise InputError("no such mode of the reference executor", came=f"{mode}, catalogue: {catalogue is not None}",
                             expected="oracle without a catalogue, or kernels with one")
        self.program = program
        self._plans = [program.plans_of(rank) for rank in range(program.ranks)]
        self._ranks: list[Rank] = [OracleRank(program, list(plans.values())) if catalogue is None else
                                   KernelRank(program, list(plans.values()), catalogue) for plans in self._plans]
        self._sent: dict[tuple[int, int, str], deque[tuple[Launch, Arrays]]] = {}

    def state(self, rank: int, kind: str) -> np.ndarray:
        """The flat array of one kind of a rank's state, padding included; writes go to the state. oracle: float64."""
        return self._ranks[rank].state(kind)

    def step(self, batch: Batch) -> list[dict[str, np.ndarray]]:
        """One training step: every rank its own schedule. The outputs of each rank's last plan."""
        schedules = [self.program.role(rank).schedule for rank in range(self.program.ranks)]
        return self.run([[(call.plan, _text(batch, call)) for call in schedule] for schedule in schedules])

    def run(self, calls: Sequence[Sequence[Call]]) -> list[dict[str, np.ndarray]]:
        """The plans of each rank, in order; copies of the outputs of each rank's last plan.

        GraphError, naming ranks, op and model line, where calls of a tuple differ, a member never comes, all wait for each other, or what
        was sent is not received.
        """
        if len(calls) != len(self._ranks):
            raise InputError("every rank is given its calls", came=len(calls), expected=len(self._ranks))
        scripts = [self._script(r, own) for r, own in enumerate(calls)]
        waiting: dict[int, Launch] = {}
        going = list(range(len(scripts)))
        while going:
            for rank in going:
                launch = next(scripts[rank], None)
                if launch is not None:
                    waiting[rank] = launch
            going = self._meet(waiting)
        for (source, to, group), left in self._sent.items():
            if left:
                raise GraphError("what was sent is never received", came=f"{_where(source, left[0][0])} to rank {to} of {group}")
        return [self._ranks[r].outputs(self._plans[r][own[-1][0]]) if own else {} for r, own in enumerate(calls)]

    def _script(self, rank: int, calls: Sequence[Call]) -> Generator[Launch, None, None]:
        """A rank's calls; it yields each launch that needs other ranks, and goes on when that has been done."""
        memory = self._ranks[rank]
        for name, inputs in calls:
            plan = self._plans[rank][name]
            check_inputs(plan, inputs)
            memory.feed(plan, inputs)
            for index, launch in enumerate(plan.launches):
                if row(launch.op).across is None:
                    memory.launch(plan, index)
                elif launch.op == "send":
                    self._send(rank, launch)
                else:
                    yield launch

    def _members(self, rank: int, launch: Launch) -> tuple[int, ...]:
        """The ranks of the tuple in which this rank calls a collective. GraphError where the Program has no such group, or it has another
        size."""
        name, size = str(launch.attrs["group"]), launch.attrs["size"]
        found = next((t for t in self.program.groups.get(name, ()) if rank in t), ())
        if len(found) != size:
            raise GraphError("a collective names a group that the Program has not", came=_where(rank, launch),
                             expected=f"one of {dict(self.program.groups)}")
        return found

    def _send(self, rank: int, launch: Launch) -> None:
        to = self._members(rank, launch)[launch.attrs["to"]]  # type: ignore[call-overload]
        held = self._sent.setdefault((rank, to, str(launch.attrs["group"])), deque())
        held.append((launch, tuple(self._ranks[rank].read(r) for r in launch.ins)))

    def _meet(self, waiting: dict[int, Launch]) -> list[int]:
        """Run every collective for which all that it needs is there; the ranks that go on. GraphError where some wait and none goes on."""
        freed: list[int] = []
        for rank, launch in list(waiting.items()):
            if rank in freed:
                continue
            found = self._received(rank, launch) if launch.op == "receive" else self._collected(rank, launch, waiting)
            for member in found:
                freed.append(member)
                del waiting[member]
        if waiting and not freed:
            raise GraphError("ranks wait for what never comes", came="; ".join(_where(r, x) for r, x in sorted(waiting.items())),
                             expected="every member of a group at the same call",
                             do="the Program is wrong; verify_program should have said so")
        return freed

    def _received(self, rank: int, launch: Launch) -> tuple[int, ...]:
        source = self._members(rank, launch)[launch.attrs["source"]]  # type: ignore[call-overload]
        held = self._sent.get((source, rank, str(launch.attrs["group"])))
        if not held:
            return ()
        other, operands = held.popleft()
        if [r.type for r in other.ins] != [r.type for r in launch.outs]:
            raise GraphError("what is sent is not what is received", came=f"{_where(source, other)}; {_where(rank, launch)}")
        self._same_rows([source, rank], [operands, tuple(self._ranks[rank].read(r) for r in launch.outs)], launch)
        self._run(launch, [source, rank], [operands, ()], [[], [launch]])
        return (rank,)

    def _collected(self, rank: int, launch: Launch, waiting: Mapping[int, Launch]) -> tuple[int, ...]:
        members = self._members(rank, launch)
        if any(m not in waiting for m in members):
            return ()
        calls = [waiting[m] for m in members]
        if any(x.attrs.get("group") != launch.attrs["group"] for x in calls):
            return ()  # a member is at a call of another group, and comes later
        for m, x in zip(members, calls):
            if (x.op, x.attrs, [r.type for r in x.ins]) != (launch.op, launch.attrs, [r.type for r in launch.ins]):
                raise GraphError("members of a group make different calls", came=f"{_where(rank, launch)}; {_where(m, x)}",
                                 expected="the same op, attributes and types")
        operands = [tuple(self._ranks[m].read(r) for r in x.ins) for m, x in zip(members, calls)]
        self._same_rows(members, operands, launch)
        self._run(launch, members, operands, [[x] for x in calls])
        return members

    def _same_rows(self, members: Sequence[int], operands: Sequence[Arrays], launch: Launch) -> None:
        """GraphError where the extents of members differ: none would have what another one counts on."""
        counts = [[x.shape for x in own] for own in operands]
        for m, own in zip(members, counts):
            if own != counts[0]:
                raise GraphError("members of a group count other rows", came=f"{_where(m, launch)}: {own}",
                                 expected=f"as rank {members[0]}: {counts[0]}", do="let the extents of all members say the same")

    def _run(self, launch: Launch, members: Sequence[int], operands: Sequence[Arrays], calls: Sequence[Sequence[Launch]]) -> None:
        """The results of all members, each into what its own calls name."""
        types = [r.type for r in launch.ins]
        results = self._ranks[members[0]].across(row(launch.op), operands, types, launch.attrs)
        for m, own, ys in zip(members, calls, results, strict=True):
            for x in own:
                for ref, y in zip(x.outs, ys, strict=True):
                    self._ranks[m].poison(ref)
                    self._ranks[m].write(ref, y)

    def close(self) -> None:
        """End what the ranks run on."""
        for rank in self._ranks:
            rank.close()

    def __enter__(self) -> ReferenceExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _text(batch: Batch, call: Step) -> Mapping[str, np.ndarray]:
    return batch(call.shard, call.micro) if call.shard is not None and call.micro is not None else {}


def _where(rank: int, launch: Launch) -> str:
    types = ", ".join(str(r.type) for r in (*launch.ins, *launch.outs))
    return f"rank {rank}: {launch.op} {dict(launch.attrs)} {types} at {launch.source}"
