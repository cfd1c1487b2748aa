"""CUDA executor: a Program bound once to static device buffers, each Plan captured into a CUDA graph and replayed. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np

from alpha.backends.cuda.lib import Gpu, Operand
from alpha.backends.cuda.values import device_bytes, from_device, to_device
from alpha.component import Catalogue
from alpha.cudart.device import Device
from alpha.cudart.graph import Graph, capture
from alpha.cudart.memory import Arena, Span, download, fill, upload
from alpha.errors import GraphError, InputError, NonFiniteError
from alpha.graph.plan import Launch, Plan, Program, Ref
from alpha.types import NUMPY


class CudaExecutor:
    """Runs the Plans of one Program on one GPU. Arenas are exactly as large as the Program says, at addresses that never change.

    program: whose plans to bind. catalogue: the kernels. index: which GPU. `captured` False runs every launch by itself, for
    comparison: same kernels, same addresses, same bits.
    """

    def __init__(self, program: Program, catalogue: Catalogue, *, index: int = 0, captured: bool = True) -> None:
        self.program, self.device, self.captured = program, Device.open(index), captured
        self.stream = self.device.stream()
        self.arenas = {name: Arena(n, name=f"arena {name}") for name, n in program.arenas().items()}
        for arena in self.arenas.values():
            fill(Span(arena.address, arena.nbytes), 0, self.stream)
        self._lent: dict[str, np.ndarray] = {}
        self._bound = {name: self._bind(plan, catalogue) for name, plan in program.plans.items()}
        self._graphs: dict[str, Graph] = {}
        self.stream.synchronize()

    def _bind(self, plan: Plan, catalogue: Catalogue) -> list[tuple[Launch, Callable[[int], None]]]:
        bound = []
        for launch in plan.launches:
            component = catalogue[launch.component]
            gpu = Gpu(self.device, self.span(launch.scratch) if launch.scratch else None)
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

    def read(self, ref: Ref) -> np.ndarray:
        """A copy of the tensor at a planned place (bf16 as float32 values); waits for the stream."""
        self.stream.synchronize()
        return from_device(download(self.span(ref), *device_bytes(ref.type)), ref.type)

    def state(self, kind: str) -> np.ndarray:
        """The flat array of one kind of state, padding included, as it is now: a host copy. What is written into it before the next run,
        replay or state of the same kind goes to the device then, so that it serves like the memory itself."""
        self._return()
        layout = self.program.states[kind]
        arena = self.arenas[f"state.{kind}"]
        self.stream.synchronize()
        self._lent[kind] = download(Span(arena.address, arena.nbytes), (layout.size,), NUMPY[layout.dtype])
        return self._lent[kind]

    def _return(self) -> None:
        """Upload what `state` has handed out since the last run."""
        for kind, array in self._lent.items():
            arena = self.arenas[f"state.{kind}"]
            upload(Span(arena.address, arena.nbytes), array, self.stream)
        self._lent = {}

    def run(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Run one Plan. `inputs` by name, of the planned shape and dtype. Returns copies of the outputs when they are there."""
        self.enqueue(plan, inputs)
        return {k: self.read(r) for k, r in self.program.plans[plan].outputs.items()}

    def enqueue(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        """The same without waiting for the result: uploads the inputs, then one graph launch."""
        self._return()
        self._feed(self.program.plans[plan], inputs or {})
        if not self._bound[plan]:
            return
        if not self.captured:
            self._launch_all(plan)
            return
        if plan not in self._graphs:
            self._graphs[plan] = capture(lambda stream: self._launch_all(plan), self.stream)
        self._graphs[plan].launch(self.stream)

    def _launch_all(self, plan: str) -> None:
        stream = int(self.stream.handle)
        for _, run in self._bound[plan]:
            run(stream)

    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        """The same, eagerly: after each launch its float outputs are looked at; NonFiniteError names node, op and model line."""
        self._return()
        self._feed(self.program.plans[plan], inputs or {})
        for index, (launch, run) in enumerate(self._bound[plan]):
            run(int(self.stream.handle))
            for k, ref in enumerate(launch.outs):
                if not ref.type.is_float:
                    continue
                found = self.read(ref)
                if not np.isfinite(found).all():
                    where = np.argwhere(~np.isfinite(found))[0].tolist()
                    raise NonFiniteError(
                        f"{launch.op} made a non-finite value: plan {plan}, launch {index}, {launch.layer or 'no layer'} {launch.phase}, "
                        f"model line {launch.source}", came=f"output {k} {ref.type} at {where}: {found[tuple(where)]}",
                        expected="finite values", do="look at the inputs of this op: learning rate, data, initialisation")

    def _feed(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        if set(inputs) != set(plan.inputs):
            raise InputError(f"plan {plan.name} needs other inputs", came=sorted(inputs), expected=sorted(plan.inputs))
        for name, ref in plan.inputs.items():
            x = np.asarray(inputs[name])
            if x.shape != ref.type.shape or x.dtype != NUMPY[ref.type.dtype]:
                raise InputError(f"input {name} of plan {plan.name} has another type", came=f"{x.dtype}{list(x.shape)}", expected=ref.type)
        for name, ref in plan.inputs.items():
            upload(self.span(ref), to_device(np.asarray(inputs[name]), ref.type), self.stream)

    def close(self) -> None:
        """Free graphs and arenas once the stream is idle."""
        self.stream.synchronize()
        for graph in self._graphs.values():
            graph.destroy()
        for arena in self.arenas.values():
            arena.free()

    def __enter__(self) -> CudaExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
