"""CPU executor: a Program bound once to static buffers, then run by calling closures. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
from threadpoolctl import ThreadpoolController

from alpha.backends.checks import Inspector, check_finite, check_inputs, cut
from alpha.backends.cpu.lib import Cpu
from alpha.backends.cpu.observe import HandOver, ObservedWorkers, note, resident
from alpha.backends.cpu.stream import Stream
from alpha.backends.digest import HostDigests
from alpha.backends.world import World
from alpha.component import Catalogue, Component
from alpha.errors import GraphError, InputError, MachineError
from alpha.graph.effects import ROWWISE
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Plan, Program, Ref
from alpha.profile.recorder import Recorder
from alpha.registry.machine import environment, machine_class
from alpha.types import ITEMSIZE, NUMPY

_PAGE = 4096


class RankCpu(Cpu):
    """What binders are handed where there are ranks: collectives ask its `world`."""

    def __init__(self, workers: ObservedWorkers, scratch: np.ndarray, world: World | None) -> None:
        super().__init__(workers, scratch)
        self.world = world


class CpuExecutor:
    """Runs the Plans of one rank of a Program. Arenas are exactly as large as the Program says; BLAS is held to one thread while it lives.

    program: whose plans to bind; its fact `threads` is the number of workers (scratch is planned for it; bits do not depend on it).
    catalogue: the kernels. world: the rank among the others; None where the Program has one rank.
    Launches of the stream beside compute run on a thread of their own, in order; what depends on them waits. InputError for a world of
    another size than the Program.
    """

    runs_ahead = False
    """Whether a loop may hand over the next step before it asks for this one's results: here they are there when `enqueue` returns."""

    def __init__(self, program: Program, catalogue: Catalogue, world: World | None = None) -> None:
        rank, size = (world.rank, world.size) if world else (0, 1)
        if size != program.ranks:
            raise InputError(f"program {program.name} is for another number of ranks", came=size, expected=program.ranks,
                             do="build it for the ranks that run, and hand each its World")
        self.program, self.workers = program, ObservedWorkers(int(str(program.facts["threads"])))
        self.recorder, self.world = Recorder(), world
        self.inspector: Inspector | None = None
        """Told of every launch while it is set."""
        self._blas = ThreadpoolController().limit(limits=1, user_api="blas")
        self._plans = program.plans_of(rank)
        """The rank's plans, by the names of its schedule."""
        self.arenas = {name: _arena(name, n) for name, n in program.arenas(rank).items()}
        self.digests = HostDigests(self.arenas, self.view)
        self._bound = {name: self._bind(plan, catalogue) for name, plan in self._plans.items()}
        self._beside = {name for name, plan in self._plans.items() if any(x.stream != COMPUTE for x in plan.launches)}
        self._comm = Stream("alpha-comm") if self._beside else None
        self._staged: dict[tuple[str, ...], list[dict[str, np.ndarray]]] = {}

    def _bind(self, plan: Plan, catalogue: Catalogue) -> list[tuple[Launch, Callable[[], None]]]:
        bound = []
        for launch in plan.launches:
            component = catalogue[launch.component]
            scratch = self.view(launch.scratch).view(np.uint8) if launch.scratch else np.empty(0, np.uint8)
            cpu = RankCpu(self.workers, scratch, self.world)
            if any(r.extent is not None for r in (*launch.ins, *launch.outs)):
                bound.append((launch, self._cut_when_run(launch, component, cpu)))
                continue
            run = component.implementation(cpu, [self.view(r) for r in launch.ins], [self.view(r) for r in launch.outs], launch.attrs)
            if cpu.used != scratch.size:
                raise GraphError("a kernel took other scratch than was planned", came=f"{component.id}: {cpu.used}", expected=scratch.size)
            bound.append((launch, run))
        return bound

    def _cut_when_run(self, launch: Launch, component: Component, cpu: RankCpu) -> Callable[[], None]:
        """A call on as many rows as the extents say when it runs: bound then. InputError naming op and model line outside of the bounds.
        GraphError for another row, and for a kernel with scratch."""
        if launch.op not in ROWWISE or launch.scratch is not None:
            raise GraphError("a kernel takes no extent", came=f"{component.id}, model line {launch.source}",
                             expected=f"one without scratch, of {', '.join(ROWWISE)}")

        def call() -> None:
            for ref in (*launch.ins, *launch.outs):
                if ref.extent is not None:
                    cut(ref, np.empty(0), int(self.view(ref.extent)), f"{launch.op} of {launch.layer or 'no layer'}, line {launch.source}")
            component.implementation(cpu, [self.view(r) for r in launch.ins], [self.view(r) for r in launch.outs], launch.attrs)()
        return call

    def view(self, ref: Ref) -> np.ndarray:
        """The array at a planned place: shares memory with the arena. Where it has an extent, the rows that this says now."""
        dtype = NUMPY[ref.type.dtype]
        if dtype.itemsize != ITEMSIZE[ref.type.dtype]:
            raise GraphError("the CPU holds bf16 as float32: not inside plans", came=ref)
        x = self.arenas[ref.arena][ref.offset : ref.stop].view(dtype).reshape(ref.type.shape)
        return x if ref.extent is None else cut(ref, x, int(self.view(ref.extent)))

    def state(self, kind: str) -> np.ndarray:
        """The flat array of one kind of state, in elements, padding included; writes go to the run's state."""
        layout = self.program.states[kind]
        return self.arenas[f"state.{kind}"].view(NUMPY[layout.dtype])

    def look(self, kind: str) -> np.ndarray:
        """The same to read only."""
        return self.state(kind)

    def blank(self, kind: str) -> np.ndarray:
        """The same to be written whole: what it holds until then is of no use."""
        return self.state(kind)

    def clear(self, kind: str) -> None:
        """Zeros in place of what a kind of state holds."""
        self.state(kind)[...] = 0

    def run(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Run one Plan. `inputs` by name, of the planned shape and dtype. Returns views of the outputs, valid until the next run."""
        self.enqueue((plan,), [inputs or {}])
        return self.outputs(plan)

    def stage(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Keep copies of the inputs of the next `enqueue` of these plans; they take the place of those kept before."""
        for plan, given in zip(plans, inputs, strict=True):
            check_inputs(self._plans[plan], given)
        self._staged[plans] = [{name: np.array(x) for name, x in given.items()} for given in inputs]

    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None:
        """Run Plans to their end, one after the other. `inputs` of each; None: those that were staged."""
        staged = self._staged.pop(plans, [{} for _ in plans])
        for plan, given in zip(plans, staged if inputs is None else inputs, strict=True):
            self._run(self._plans[plan], given)

    def _run(self, found: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        if self.world is not None:
            self.world.advance()
        with self.recorder.span("host_to_device"):
            self._feed(found, inputs)
        if self.inspector is not None:
            self._run_inspected(found, self.inspector)
        elif found.name in self._beside:
            self._run_beside(found)
        elif not self.recorder.watching:
            for _, run in self._bound[found.name]:
                run()
        elif self.recorder.profiling:
            self._run_observed(found)
        else:
            clock, marks = self.recorder.clock, []
            for _, run in self._bound[found.name]:
                marks.append(clock())
                run()
                marks.append(clock())
            self.recorder.ran(found, marks)

    def _run_inspected(self, plan: Plan, inspector: Inspector) -> None:
        """The same launches in list order, all on this thread, with the inspector between them."""
        clock, marks = self.recorder.clock, list[int]()
        began = clock()
        for index, (launch, run) in enumerate(self._bound[plan.name]):
            inspector.before(plan, index, self.view)
            if self.world is not None:
                self.world.advance()
                self.world.place.source = launch.source
            marks.append(clock())
            run()
            marks.append(clock())
            inspector.after(plan, index, self.view)
        if self.recorder.watching:
            self.recorder.ran(plan, marks, checked=(began, clock()))

    def check(self, hashes: Callable[[], None]) -> None:
        """Call what hashes memory between plans; its time counts as checks."""
        with self.recorder.span("checks"):
            hashes()

    def outputs(self, plan: str) -> dict[str, np.ndarray]:
        """Views of the outputs of this plan as it last ran, valid until the next run."""
        return {k: self.view(r) for k, r in self._plans[plan].outputs.items()}

    def _run_observed(self, plan: Plan) -> None:
        """The same launches, the workers observed: what each hand-over cost, who ran when, who waited."""
        recorder, marks = self.recorder, []
        clock = recorder.clock
        with self.workers.observed(clock) as seen:
            for index, (launch, run) in enumerate(self._bound[plan.name]):
                seen.clear()
                start = clock()
                run()
                stop = clock()
                marks += [start, stop]
                note(recorder, plan, index, launch, start, stop, seen)
        recorder.ran(plan, marks)

    def _run_beside(self, plan: Plan) -> None:
        """The same with a stream beside compute: a collective begins when compute has come to it, and compute goes on until it needs what
        the collective gives, or the plan ends."""
        assert self._comm is not None
        recorder, comm, clock = self.recorder, self._comm, self.recorder.clock
        bound = self._bound[plan.name]
        marks, waits, given = [0] * (2 * len(bound)), [], dict[int, int]()

        def timed(index: int) -> Callable[[], None]:
            launch, run = bound[index]

            def call() -> None:
                if self.world is not None:
                    self.world.place.source = launch.source
                marks[2 * index] = clock()
                run()
                marks[2 * index + 1] = clock()
            return call

        def wait(number: int | None) -> None:
            start = clock()
            comm.wait(number)
            waits.append((start, clock()))

        handed: dict[int, Sequence[HandOver]] = {}
        seen: list[HandOver] = []
        profiled = recorder.watching and recorder.profiling
        with ExitStack() as observed:
            if profiled:
                seen = observed.enter_context(self.workers.observed(clock))
            try:
                for index, (launch, _) in enumerate(bound):
                    if launch.stream == COMM:
                        given[index] = comm.give(timed(index))
                        continue
                    for other in launch.after:
                        wait(given[other])
                    if self.world is not None:
                        self.world.advance()
                    seen.clear()
                    timed(index)()
                    handed[index] = tuple(seen)
            except BaseException:
                comm.drop()
                raise
            wait(None)
        if recorder.watching:
            for index, (launch, _) in enumerate(bound) if profiled else ():
                note(recorder, plan, index, launch, marks[2 * index], marks[2 * index + 1], handed.get(index, ()))
            recorder.ran(plan, marks, waits)

    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        """The same, eagerly: after each launch its float outputs are looked at; NonFiniteError names node, op and model line."""
        found = self._plans[plan]
        self._feed(found, inputs or {})
        for index, (_, run) in enumerate(self._bound[plan]):
            run()
            check_finite(found, index, self.view)

    def _feed(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        check_inputs(plan, inputs)
        for name, ref in plan.inputs.items():
            self.view(ref.whole)[...] = inputs[name]

    def resident(self) -> dict[str, int]:
        """Bytes of each arena that are in memory now (pages that were touched), and of the whole process under 'process'."""
        return resident({name: (a.ctypes.data, a.nbytes) for name, a in self.arenas.items()})

    def hardware(self) -> dict[str, str]:
        """What this runs on: 'hardware', 'machine' (class), 'version' (of what it is built on)."""
        here = environment()
        return {"hardware": here["cpu"], "machine": machine_class().key,
                "version": f"NumPy {here['numpy']}, {here['blas']}, Python {here['python']}"}

    def close(self) -> None:
        """End the threads and give BLAS its own back."""
        if self._comm is not None:
            self._comm.close()
        self.workers.close()
        self._blas.restore_original_limits()

    def __enter__(self) -> CpuExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _arena(name: str, nbytes: int) -> np.ndarray:
    """Zeroed bytes, page-aligned, exactly `nbytes` long. MachineError when memory is short."""
    try:
        raw = np.zeros(nbytes + _PAGE, np.uint8)
    except MemoryError:
        raise MachineError(f"no memory for arena {name}", came=f"{nbytes:,} bytes",
                           do="use a smaller micro_batch or recompute = 'block'") from None
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + nbytes]


