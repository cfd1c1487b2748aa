"""CUDA executor: a Program bound once to static device buffers, each replay captured into a CUDA graph. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

import numpy as np

from alpha.backends.checks import Inspector, check_finite
from alpha.backends.cuda.downloads import Downloads
from alpha.backends.cuda.lib import Gpu, Operand
from alpha.backends.cuda.memory_check import check_memory
from alpha.backends.cuda.observe import Ran, Watch, stamps_of
from alpha.backends.cuda.spot import DeviceMemory
from alpha.backends.cuda.staging import Results, Staging
from alpha.backends.cuda.values import device_bytes, from_device, to_device
from alpha.component import Catalogue
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.graph import Graph, capture
from alpha.cuda_runtime.manifest import COMPILER
from alpha.cuda_runtime.mark import PLACES
from alpha.cuda_runtime.memory import Arena, Span, download, fetch, fill, upload
from alpha.errors import GraphError
from alpha.graph.plan import Launch, Plan, Program, Ref
from alpha.profile.recorder import Recorder
from alpha.registry.gpu import gpu_class
from alpha.types import NUMPY, TensorType


class CudaExecutor:
    """Runs the Plans of one Program on one GPU. Arenas are exactly as large as the Program says, at addresses that never change.

    program: whose plans to bind. catalogue: the kernels. index: which GPU. `captured` False runs every launch by itself, for
    comparison: same kernels, same addresses, same bits. MachineError, before anything is allocated, where the Program does not fit.

    `run` waits for the outputs of plans that have any. A loop that has better to do calls `enqueue`, then `stage` with the next inputs,
    which are copied while the device computes, or the next `enqueue` itself, then `outputs`, which waits for those of its plan and for
    nothing that was enqueued behind it. Plans that are enqueued together are one graph.
    """

    def __init__(self, program: Program, catalogue: Catalogue, *, index: int = 0, captured: bool = True) -> None:
        self.program, self.device, self.captured = program, Device.open(index), captured
        self.plans = self._own_plans()
        self.stream, self.recorder = self.device.stream(), Recorder()
        self._watch: Watch | None = None
        self.inspector: Inspector | None = None
        """Told of every launch while it is set: no graph is launched then, each launch is enqueued by itself."""
        self._seen: DeviceMemory | None = None
        self._base = self.device.free_memory()
        check_memory(program, self._base, self._rank)
        self.arenas = {name: Arena(n, name=f"arena {name}") for name, n in program.arenas(self._rank).items()}
        for arena in self.arenas.values():
            fill(Span(arena.address, arena.nbytes), 0, self.stream)
        self._lent: dict[str, np.ndarray] = {}
        self._constants: dict[Hashable, Arena] = {}
        self._bound = {name: self._bind(plan, catalogue) for name, plan in self.plans.items()}
        self._graphs: dict[tuple[tuple[str, ...], bool], tuple[Graph, list[list[Ran]]]] = {}
        self._staging = Staging(self.device, program)
        self._places = {name: {k: self.span(r) for k, r in plan.inputs.items()} for name, plan in self.plans.items()}
        self._results = {name: Results.of(self.device, plan) for name, plan in self.plans.items()}
        self._stamps = stamps_of(self._bound[call.plan] for call in program.schedule)
        held = {k: (self._elements(k), s.dtype) for k, s in program.states.items()}
        self.downloads = Downloads(self.device, self.stream, held, self.arenas, self._return)
        self._writes = {name: {out.arena for x in plan.launches for out in x.outs} for name, plan in self.plans.items()}
        self.stream.synchronize()

    @property
    def _rank(self) -> int:
        """Whose part of the Program runs here."""
        return 0

    def _own_plans(self) -> Mapping[str, Plan]:
        """What is bound: every plan by its name."""
        return self.program.plans

    def _elements(self, kind: str) -> int:
        """How many elements of a kind of state lie here: all, or of one that ranks share this one's cut."""
        layout = self.program.states[kind]
        return layout.shard(self.program.ranks).size if kind in self.program.sharded else layout.size

    def _bind(self, plan: Plan, catalogue: Catalogue) -> list[tuple[Launch, Callable[[int], None]]]:
        bound = []
        for launch in plan.launches:
            component = catalogue[launch.component]
            if any(r.extent is not None for r in (*launch.ins, *launch.outs)):
                raise GraphError("no kernel of the GPU takes an extent", came=f"{component.id}, model line {launch.source}",
                                 expected="tensors of all their rows", do="run it on the CPU")
            gpu = Gpu(self.device, self.span(launch.scratch) if launch.scratch else None, blocks=launch.sms, constants=self._constants)
            run = component.implementation(gpu, [self.operand(r) for r in launch.ins], [self.operand(r) for r in launch.outs], launch.attrs)
            planned = launch.scratch.type.nbytes if launch.scratch else 0
            if gpu.used != planned:
                raise GraphError("a kernel took other scratch than was planned", came=f"{component.id}: {gpu.used}", expected=planned)
            bound.append((launch, run))
        return bound

    def span(self, ref: Ref) -> Span:
        """The device memory at a planned place."""
        return Span(self.arenas[ref.arena].address + ref.offset, ref.type.nbytes)

    def operand(self, ref: Ref) -> Operand:
        """The same with its type, as binders take it."""
        return Operand(self.span(ref).address, ref.type)

    @property
    def digests(self) -> DeviceMemory:
        """Hashes of this memory, and its tensors to look at."""
        if self._seen is None:
            self._seen = DeviceMemory(self.arenas, self.program.arenas(self._rank), self.stream)
        return self._seen

    def read(self, ref: Ref) -> np.ndarray:
        """A copy of the tensor at a planned place (bf16 as float32 values); waits for the stream."""
        self.stream.synchronize()
        return from_device(download(self.span(ref), *device_bytes(ref.type)), ref.type)

    def state(self, kind: str) -> np.ndarray:
        """The flat array of one kind of state, padding included, as it is now: a host copy. What is written into it before the next run,
        replay or state of the same kind goes to the device then, so that it serves like the memory itself."""
        self._lent[kind] = self.look(kind)
        return self._lent[kind]

    def look(self, kind: str) -> np.ndarray:
        """The same to read only: nothing goes back."""
        self._return(kind)
        flat = TensorType((self._elements(kind),), self.program.states[kind].dtype)
        self.stream.synchronize()
        return from_device(download(Span(self.arenas[f"state.{kind}"].address, flat.nbytes), *device_bytes(flat)), flat)

    def blank(self, kind: str) -> np.ndarray:
        """An array of zeros that takes the place of a kind of state, as `state` does: what the device holds is not fetched."""
        self._lent[kind] = np.zeros(self._elements(kind), NUMPY[self.program.states[kind].dtype])
        return self._lent[kind]

    def clear(self, kind: str) -> None:
        """Zeros in place of what a kind of state holds, and of what was handed out of it."""
        self._lent.pop(kind, None)
        arena = self.arenas[f"state.{kind}"]
        fill(Span(arena.address, arena.nbytes), 0, self.stream)

    def _return(self, kind: str | None = None) -> None:
        """Upload what `state` has handed out since the last run, of one kind or of all; those of other kinds stay handed out."""
        for k in list(self._lent) if kind is None else [kind] * (kind in self._lent):
            array, arena = self._lent.pop(k), self.arenas[f"state.{k}"]
            flat = TensorType(array.shape, self.program.states[k].dtype)
            with self.downloads.writing({f"state.{k}"}):
                upload(Span(arena.address, arena.nbytes), to_device(array, flat), self.stream)

    def run(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Run one Plan. `inputs` by name, of the planned shape and dtype. Returns copies of the outputs when they are there."""
        self.enqueue((plan,), [inputs or {}])
        with self.recorder.span("device_to_host"):
            return self.outputs(plan)

    @property
    def runs_ahead(self) -> bool:
        """Whether a loop may hand over the next step before it asks for the results of this one: not where the clocks are to be set, which
        takes an idle stream, nor where there is no room for the time stamps of two steps."""
        return self._watch is None or (not self._watch.due and 2 * self._stamps <= PLACES)

    def stage(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Begin to copy the inputs of the next `enqueue` of these plans, beside what runs."""
        self._staging.send([self.plans[p] for p in plans], inputs)

    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None:
        """Run Plans one after the other without waiting for results: one upload, then one graph launch. `inputs` of each; None: those that
        were staged. The largest `enqueue` is what the Program replays at once."""
        found = [self.plans[p] for p in plans]
        self._return()
        with self.recorder.span("host_to_device"):
            self._feed(found, inputs)
        if any(self._bound[p] for p in plans):
            with self.downloads.writing({arena for p in plans for arena in self._writes[p]}):
                self._launch(found)
        for plan in found:
            results = self._results[plan.name]
            if results is not None:
                for name, ref in plan.outputs.items():
                    fetch(results.host(name), self.span(ref), self.stream)
                results.there.record(self.stream)
                results.segments = self._watch.launched if self._watch is not None else 0

    def outputs(self, plan: str) -> dict[str, np.ndarray]:
        """Copies of the outputs of this plan as it was last enqueued; waits for them."""
        found, results = self.plans[plan].outputs, self._results[plan]
        if not found:
            return {}
        if results is None:
            self.stream.synchronize()
            return {k: self.read(r) for k, r in found.items()}
        results.there.synchronize()
        read = {k: from_device(results.host(k).reshape(r.type.shape).copy(), r.type) for k, r in found.items()}
        if self._watch is not None:
            self._watch.collect(self.recorder, results.segments)
        return read

    def _launch(self, plans: Sequence[Plan]) -> None:
        """Enqueue the plans' launches: one graph, or on a profiled step without an instrument each by itself."""
        recorder, stream = self.recorder, int(self.stream.handle)
        began, watched = recorder.clock(), recorder.watching
        if watched and self._watch is None:
            self._watch = Watch(self.stream, recorder)
        profiled = watched and recorder.profiling
        if self.inspector is not None:
            self._launch_inspected(plans, self.inspector)
            return
        if profiled and self.watch.instrument is None:
            for index, plan in enumerate(plans):
                self.watch.make_room([self._bound[plan.name]], recorder)
                self._lay(plans, index)
                self.watch.launch_each(plan, self._bound[plan.name], stream)
            return
        if watched:
            self.watch.make_room([self._bound[plan.name] for plan in plans], recorder)
        if profiled:
            self.watch.observe(recorder)
        called = recorder.clock()
        if self.captured:
            graph, ran = self._captured(plans, watched)
            graph.launch(self.stream)
        else:
            ran = self._launch_all(plans, watched)
        returned = recorder.clock()
        if watched:
            self.watch.enqueued(plans, ran)
            recorder.enqueued(returned - began)
        if profiled:
            self.watch.handed_over(plans, called, returned)

    def _launch_inspected(self, plans: Sequence[Plan], inspector: Inspector) -> None:
        """Enqueue every launch by itself, the inspector between them."""
        for index, plan in enumerate(plans):
            bound = self._bound[plan.name]
            if self.recorder.watching:
                self.watch.make_room([bound] * 3, self.recorder)
            self._lay(plans, index)
            read = cast(Callable[[Ref], np.ndarray], self.digests.at)  # what looks like an array, and is asked for little
            look = partial(inspector.before, plan, read=read), partial(inspector.after, plan, read=read)
            if self.recorder.watching:
                self.watch.launch_inspected(plan, bound, int(self.stream.handle), look, self.recorder.profiling)
                continue
            for launch, (_, run) in enumerate(bound):
                look[0](launch)
                run(int(self.stream.handle))
                look[1](launch)

    def check(self, hashes: Callable[[], None]) -> None:
        """Call what enqueues hashes of memory between plans; their time counts as checks."""
        watched = self.recorder.watching and self._watch is not None
        with self.recorder.span("checks"):
            if watched:
                self.watch.make_room([()], self.recorder)
                self.watch.checked(self.plans[self.program.schedule[-1].plan], hashes, int(self.stream.handle))
            else:
                hashes()

    def _captured(self, plans: Sequence[Plan], watched: bool) -> tuple[Graph, list[list[Ran]]]:
        """The graph of these plans, and its kernels; captured when it is first asked for."""
        key = tuple(plan.name for plan in plans), watched
        if key not in self._graphs:
            ran: list[list[Ran]] = []
            self._graphs[key] = self._capture(lambda _: ran.extend(self._launch_all(plans, watched))), ran
        return self._graphs[key]

    def _capture(self, record: Callable[[Any], None]) -> Graph:
        return capture(record, self.stream)

    @property
    def watch(self) -> Watch:
        """What collects the device's time stamps."""
        assert self._watch is not None, "a watched step makes it before the first launch"
        return self._watch

    def _launch_all(self, plans: Sequence[Plan], watched: bool) -> list[list[Ran]]:
        """Enqueue the plans' launches one by one; the kernels of each plan, where they are watched."""
        stream, ran = int(self.stream.handle), []
        for index, plan in enumerate(plans):
            self._lay(plans, index)
            if watched:
                ran.append(self.watch.launch_all(plan, self._bound[plan.name], stream))
                continue
            for _, run in self._bound[plan.name]:
                run(stream)
        return ran

    def _lay(self, plans: Sequence[Plan], index: int) -> None:
        self._staging.lay(plans, index, self._places[plans[index].name], int(self.stream.handle))

    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        """The same, eagerly: after each launch its float outputs are looked at; NonFiniteError names node, op and model line."""
        self._return()
        found = self.plans[plan]
        self._feed([found], [inputs or {}])
        self._lay([found], 0)
        with self.downloads.writing(self._writes[plan]):
            for index, (_, run) in enumerate(self._bound[plan]):
                run(int(self.stream.handle))
                check_finite(found, index, self.read)

    def _feed(self, plans: Sequence[Plan], inputs: Sequence[Mapping[str, np.ndarray]] | None) -> None:
        if inputs is not None or not self._staging.holds(plans):
            self._staging.send(plans, [{} for _ in plans] if inputs is None else inputs)
        self._staging.deliver(plans, self.stream)

    def resident(self) -> dict[str, int]:
        """Bytes allocated for each arena, and under 'device' what this process took of the device since the executor was opened."""
        return {**{name: arena.nbytes for name, arena in self.arenas.items()}, "device": self._base - self.device.free_memory()}

    def hardware(self) -> dict[str, str]:
        """What this runs on: 'hardware', 'machine' (class), 'version' (of what it is built on)."""
        found, properties = gpu_class(), self.device.properties
        return {"hardware": properties.name, "machine": found.key if found else "",
                "version": f"CUDA driver API {properties.driver}, kernels by nvcc {COMPILER}"}

    def close(self) -> None:
        """Free graphs and arenas once the stream is idle."""
        self.stream.synchronize()
        for graph, _ in self._graphs.values():
            graph.destroy()
        if self._watch is not None:
            self._watch.free()
        if self._seen is not None:
            self._seen.free()
        self._staging.free()
        self.downloads.free()
        for arena in (*self.arenas.values(), *self._constants.values()):
            arena.free()

    def __enter__(self) -> CudaExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
