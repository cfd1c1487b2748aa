"""One rank of a Program of many on its GPU: collectives are launches like others, on a stream of their own. Floor 4.

The arenas that collectives name are shared with the peers' GPUs (alpha/cuda_runtime/peers.py), and each pair of a group and a stream has a
channel. The stream of collectives comes first: where blocks of both wait for room, its blocks get it, for other ranks wait for them. A step
is still one graph for each `enqueue`: its branch of collectives is forked and joined by events, which are captured as dependencies. A
collective waits for all compute that stands before it in the list, so that it begins beside the launch for which it was put there
(alpha/passes/schedule.py). Compute goes on until it needs what a collective gives, and a plan ends when both streams have come to its end
(alpha/graph/order.py).

Where launches are looked at one by one, they run in list order on the one stream: under an inspector, in a replay and on profiled steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, cast

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.kernels.collectives import Channel
from alpha.backends.cuda.lib import Parts
from alpha.backends.cuda.memory_check import channels_of
from alpha.backends.cuda.observe import Ran
from alpha.backends.cuda.sum_stages import require_stages, stages_of
from alpha.backends.world import DeviceWorld
from alpha.component import Catalogue, Component
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.graph import Graph, capture
from alpha.cuda_runtime.lost import context_lost
from alpha.cuda_runtime.mark import Marks
from alpha.cuda_runtime.peers import Peers
from alpha.cuda_runtime.priority import NODE_PRIORITIES, Fence, FirstStream
from alpha.errors import GraphError, InputError, RankError
from alpha.graph.order import COMM, Order
from alpha.graph.plan import Launch, Plan, Program, Ref

PATIENCE_S = 660.0
"""How long a device waits for another one. Host threads look after ranks that die, stop or hang, within seconds; this is for a device that
hangs by itself, and longer than any rank asks the others to wait (alpha/train/ranks.py, PATIENCE_S)."""

LOOK_S = 0.02
"""How often the others are looked at while the device works."""

Run = Callable[[int], None]


@dataclass(frozen=True)
class _Told:
    """Collectives of Segments that were enqueued, whose stamps are to be read: the first one's number, and after which Segment."""

    launches: tuple[Launch, ...]
    first: int
    segments: int


class CudaRank(CudaExecutor):
    """Runs the plans of rank `world.rank` of a Program of as many ranks, each a process with a GPU; called by all of them, in one order.

    The surface is CudaExecutor's. While this process waits for its device, a thread looks after the other ranks. Where one has failed, the
    device's waits are ended, and the wait raises its RankError, with rank, op and step. `patience_s`: of the device itself.

    InputError for a world of another size than the Program, GraphError where ranks have other plans or arenas, MachineError where
    the GPUs do not share memory, or have no room for the run.
    """

    def __init__(self, program: Program, catalogue: Catalogue, world: DeviceWorld, *, index: int = 0, captured: bool = True,
                 patience_s: float = PATIENCE_S) -> None:
        if world.size != program.ranks:
            raise InputError(f"program {program.name} is for another number of ranks", came=world.size, expected=program.ranks,
                             do="build it for the ranks that run, and hand each its World")
        for rank in range(program.ranks):
            if program.arenas(rank) != program.arenas(0) or program.role(rank).plans.keys() != program.role(0).plans.keys():
                raise GraphError("ranks on GPUs have arenas and plans alike", came=f"rank {rank} has others than rank 0",
                                 expected="the same names, and arenas of the same bytes", do="run these ranks on the CPU")
        self.program, self.world, self.peers, self._patience_s = program, world, Peers(world.rank, world.size, world.exchange), patience_s
        self.channels: dict[tuple[str, str], Channel] = {}
        """(group, stream) -> what the launches of that group on that stream share."""
        self._shared, self._inline, self._pending, self._lost = False, True, False, False
        self._stamping, self._op = False, ""
        self._comm_marks: _MarksBeside | None = None
        self._told: deque[_Told] = deque()
        self._lines: dict[tuple[tuple[str, ...], bool], tuple[Graph, list[list[Ran]]]] = {}
        self._calls = {name: tuple(x for x in plan.launches if x.stream == COMM) for name, plan in self._own_plans().items()}
        require_stages(program, Device.open(index).free_memory(), world.rank)
        super().__init__(program, catalogue, index=index, captured=captured)

    @property
    def _rank(self) -> int:
        return self.world.rank

    def _own_plans(self) -> Mapping[str, Plan]:
        """Those of this rank's role, in an order that all ranks have: they bind their collectives together."""
        return dict(sorted(self.program.plans_of(self.world.rank).items()))

    # -- binding -------------------------------------------------------------------------------------------------------------------

    def _bind(self, plan: Plan, catalogue: Catalogue) -> list[tuple[Launch, Run]]:
        if not self._shared:
            self._share()
        bound: list[tuple[Launch, Run]] = []
        for launch in plan.launches:
            own = {group: channel for (group, stream), channel in self.channels.items() if stream == launch.stream}
            bound += super()._bind(replace(plan, launches=(launch,)), cast(Catalogue, _Handed(catalogue, own)))
        return self._on_streams(plan, bound)

    def _share(self) -> None:
        """Show the peers what collectives name, and make their channels. Called by all ranks."""
        self._shared = True
        self.beside, self._aside = FirstStream(), self.device.stream()
        self._context = _bindings.check("cuCtxGetCurrent", _bindings.driver().cuCtxGetCurrent())
        self.stream.synchronize()  # the arenas are zeroed before their first bytes are tried
        calls = [x for plan in self.plans.values() for x in plan.launches if "group" in x.attrs]
        for name in sorted({r.arena for x in calls for r in (*x.ins, *x.outs)}):
            self.peers.share(self.arenas[name])
        stages = stages_of(self.program, self.world.rank)
        for group, stream in channels_of(self.plans.values()):
            members = next(t for t in self.program.groups[group] if self.world.rank in t)
            self.channels[group, stream] = channel = Channel(self.peers, members=members, patience_s=self._patience_s)
            channel.stage(stages[group, stream])  # the largest first: one that grew would keep the smaller ones

    def _on_streams(self, plan: Plan, bound: Sequence[tuple[Launch, Run]]) -> list[tuple[Launch, Run]]:
        """The same, each launch on its stream, behind what it waits for."""
        if not self._calls[plan.name]:
            return list(bound)
        order = Order([x.stream for x in plan.launches], [x.after for x in plan.launches])
        waits: list[tuple[int, ...]] = []
        compute: tuple[int, ...] = ()
        for i, launch in enumerate(plan.launches):
            waits.append(compute if launch.stream == COMM else order.waits(i))
            compute = compute if launch.stream == COMM else (i,)
        there = {j: Fence() for each in waits for j in each}
        begun, ended = Fence(), Fence()
        found: list[tuple[Launch, Run]] = []
        for i, (launch, run) in enumerate(bound):
            before, after = [there[j] for j in waits[i]], there.get(i)
            parts: list[tuple[str | None, Run]] = []
            if i == 0:
                parts.append((None, partial(self._pass_on, begun, self.stream, self.beside)))
            if launch.stream == COMM:
                parts.append((None, partial(self._run_beside, run, before, after)))
            else:
                if before:
                    parts.append(("comm", partial(self._wait, before)))
                parts += run.parts if isinstance(run, Parts) else ((None, run),)
                if after is not None:
                    phase, last = parts[-1]
                    parts[-1] = phase, partial(self._then_record, last, after)
            if i == len(bound) - 1:
                parts.append(("comm", partial(self._pass_on, ended, self.beside, self.stream)))
            found.append((launch, Parts(*parts)))
        return found

    def _pass_on(self, fence: Fence, source: Any, target: Any, stream: int) -> None:
        """`target` goes on when `source` has come here."""
        if not self._inline:
            fence.record(source)
            fence.hold(target)

    def _wait(self, fences: Sequence[Fence], stream: int) -> None:
        """Compute waits for collectives."""
        if not self._inline:
            for fence in fences:
                fence.hold(self.stream)

    def _then_record(self, run: Run, fence: Fence, stream: int) -> None:
        """A launch of compute that collectives wait for."""
        run(stream)
        if not self._inline:
            fence.record(self.stream)

    def _run_beside(self, run: Run, before: Sequence[Fence], after: Fence | None, stream: int) -> None:
        """A collective beside compute."""
        if self._inline:
            run(stream)
            return
        for fence in before:
            fence.hold(self.beside)
        handle = self.beside.handle
        if self._stamping:
            self._stamps_beside.mark(handle)
        run(handle)
        if self._stamping:
            self._stamps_beside.mark(handle)
        if after is not None:
            after.record(self.beside)

    # -- running -------------------------------------------------------------------------------------------------------------------

    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None:
        """As of every executor; the others see that this rank gets on. RankError where one has failed."""
        self.world.advance()
        with self._looked_after():
            super().enqueue(plans, inputs)

    def _launch(self, plans: Sequence[Plan]) -> None:
        recorder = self.recorder
        self._inline = self.inspector is not None or (recorder.watching and recorder.profiling)
        ops = [x.op for plan in plans for x in plan.launches if "group" in x.attrs]
        if ops:
            self._pending, self._op = True, ops[0]
        super()._launch(plans)
        calls = tuple(x for plan in plans for x in self._calls[plan.name])
        if calls and recorder.watching and not self._inline:
            self._told.append(_Told(calls, self._stamps_beside.number(2 * len(calls)), self.watch.launched))

    def _launch_all(self, plans: Sequence[Plan], watched: bool) -> list[list[Ran]]:
        self._stamping = watched and not self._inline
        try:
            return super()._launch_all(plans, watched)
        finally:
            self._stamping = False

    def _capture(self, record: Callable[[Any], None]) -> Graph:
        return capture(record, self.stream, NODE_PRIORITIES)

    def _captured(self, plans: Sequence[Plan], watched: bool) -> tuple[Graph, list[list[Ran]]]:
        """The graph of these plans; one in list order has a place of its own."""
        if watched and not self._inline and any(self._calls[plan.name] for plan in plans):
            self._stamps_beside  # noqa: B018  its ring is made outside of a capture
        if not self._inline:
            return super()._captured(plans, watched)
        kept, self._graphs = self._graphs, self._lines
        try:
            return super()._captured(plans, watched)
        finally:
            self._graphs = kept

    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        """As of every executor, in list order on one stream. All ranks replay the same plans."""
        self._inline = self._pending = True
        with self._looked_after():
            super().replay(plan, inputs)

    def outputs(self, plan: str) -> dict[str, np.ndarray]:
        """As of every executor. RankError where another rank did not do its part."""
        with self._looked_after():
            found = super().outputs(plan)
        if self._watch is not None and self._told:
            results = self._results[plan]
            self._collect(results.segments if results is not None else self._told[-1].segments)
        return found

    def look(self, kind: str) -> np.ndarray:
        """As of every executor; it waits for the device."""
        with self._looked_after():
            return super().look(kind)

    def read(self, ref: Ref) -> np.ndarray:
        """As of every executor; it waits for the device."""
        with self._looked_after():
            return super().read(ref)

    @property
    def _stamps_beside(self) -> _MarksBeside:
        """Time stamps of the collectives' own stream."""
        if self._comm_marks is None:
            self._comm_marks = _MarksBeside(self.beside)
        return self._comm_marks

    def _collect(self, segments: int) -> None:
        """Tell when the collectives ran of Segments that have ended."""
        self._stamps_beside.follow(self.watch.marks)
        while self._told and self._told[0].segments <= segments:
            told = self._told.popleft()
            stamps = self._stamps_beside.take(told.first, 2 * len(told.launches))
            self.recorder.ran_beside(told.launches, list(zip(stamps[::2], stamps[1::2], strict=True)))

    @property
    def priority(self) -> str:
        """That of the stream of collectives, as the driver has it, among those that there are; for the run's facts."""
        return f"{self.beside.priority} of {self.beside.least} to {self.beside.greatest}"

    # -- the others ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _looked_after(self) -> Iterator[None]:
        """While the block may wait for the device, which may wait for others: see whether these live and get on. Nested: once."""
        if not self._pending:
            yield
            return
        self._pending, done, failed = False, threading.Event(), list[RankError]()
        op = self._op
        thread = threading.Thread(target=self._look_after, args=(done, op, failed), daemon=True, name="alpha-ranks")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._pending = True
            if failed:
                raise failed[0]
        self._check()

    def _look_after(self, done: threading.Event, op: str, failed: list[RankError]) -> None:
        _bindings.check("cuCtxSetCurrent", _bindings.driver().cuCtxSetCurrent(self._context))
        try:
            self.world.until(done.is_set, op, lambda seconds: done.wait(LOOK_S))
        except RankError as error:
            failed.append(error)
            self._abort()

    def _abort(self) -> None:
        """End the device's waits. Where the context is lost they have ended, and the error that is under way says so."""
        self._lost = True
        try:
            for channel in self.channels.values():
                channel.abort(self._aside)
        except _bindings.CudaError as error:
            if not context_lost(error):
                raise

    def _check(self) -> None:
        """RankError where the device gave up; all ranks are told."""
        for channel in self.channels.values():
            try:
                channel.check()
            except RankError as error:
                self._lost = True
                error.step = self.world.step
                raise self.world.fail(error) from None

    # -- the end -------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap and free what was shared, once all ranks have come here. Of a job that failed nothing is freed that a peer may still read:
        it ends with the process."""
        if self._lost:
            return
        with self._looked_after():
            self.stream.synchronize()
        self.peers.exchange(b"done")
        self.peers.close()
        for channel in self.channels.values():
            channel.close()
        for graph, _ in self._lines.values():
            graph.destroy()
        if self._comm_marks is not None:
            self._comm_marks.free()
        self.beside.close()
        super().close()

    def __enter__(self) -> CudaRank:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._abort()
        self.close()


class _MarksBeside(Marks):
    """Stamps of a second stream of a device, whose one clock is set by those of the first: so times of both can be compared."""

    def follow(self, other: Marks) -> None:
        """Take over how the device's clock stands against the host's."""
        self._rate, self._pair = other._rate, other._pair


class _Handed:
    """A catalogue whose collectives find their channels where binders look for them: as `gpu.channels`, by group."""

    def __init__(self, catalogue: Catalogue, channels: Mapping[str, Channel]) -> None:
        self._catalogue, self._channels = catalogue, channels

    def __getitem__(self, component_id: str) -> Component:
        found = self._catalogue[component_id]
        if found.profile != "device_collective":
            return found

        def bind(gpu: Any, *rest: Any) -> Run:
            gpu.channels = self._channels
            return cast(Run, found.implementation(gpu, *rest))

        return replace(found, implementation=bind)
