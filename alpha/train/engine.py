"""What runs a Program: the surface that the loop needs, and the back end that the Program was built for. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Catalogue
from alpha.errors import InputError
from alpha.graph.plan import Program
from alpha.profile.recorder import Recorder


class Executor(Protocol):
    """A Program bound to memory. Both back ends have this surface; what each method promises stands there."""

    program: Program
    recorder: Recorder

    def state(self, kind: str) -> np.ndarray: ...
    def run(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]: ...
    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None: ...
    def resident(self) -> dict[str, int]: ...
    def hardware(self) -> dict[str, str]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Executor: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


_EXECUTORS: dict[str, Callable[[Program, Catalogue], Executor]] = {"cpu": CpuExecutor, "cuda": CudaExecutor}


def open_executor(program: Program, catalogue: Catalogue) -> Executor:
    """The executor of the back end that `program` was built for. MachineError if this machine lacks it; the caller closes it."""
    backend = str(program.facts["backend"])
    if backend not in _EXECUTORS:
        raise InputError("no such back end", came=backend, expected=", ".join(_EXECUTORS))
    return _EXECUTORS[backend](program, catalogue)


def beside(executor: Executor) -> CudaExecutor | None:
    """The executor, if it computes beside the host: its `enqueue`, `stage` and `outputs` let the next batch be made meanwhile."""
    return executor if isinstance(executor, CudaExecutor) else None


def look(executor: Executor, kind: str) -> np.ndarray:
    """The flat array of one kind of state to read only: of a device, a copy that does not go back."""
    device = beside(executor)
    return executor.state(kind) if device is None else device.look(kind)


def refresh(executor: Executor) -> None:
    """After parameters were drawn or loaded: make what the kernels read from them (a bf16 program's copy of the f32 weights)."""
    if "narrow" in executor.program.plans:
        executor.run("narrow")
