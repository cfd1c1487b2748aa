"""What runs a Program: the surface that the loop needs, and the back end that the Program was built for. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Catalogue
from alpha.errors import InputError
from alpha.graph.plan import Program
from alpha.profile.recorder import Recorder
from alpha.train import memory_check


class Executor(Protocol):
    """A Program bound to memory. Both back ends have this surface; what each method promises stands there.

    `enqueue` hands Plans over, to run one after the other, and may return before they have: then `stage` sends the inputs of later ones
    meanwhile, and `outputs` waits. `run` is both, for one Plan. Where `behind`, the Plans of the next step may be handed over before
    `outputs` is asked for those of this one. On the CPU a Plan has run when `enqueue` returns.
    """

    program: Program
    recorder: Recorder

    @property
    def behind(self) -> bool: ...
    def state(self, kind: str) -> np.ndarray: ...
    def look(self, kind: str) -> np.ndarray: ...
    def run(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]: ...
    def stage(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]]) -> None: ...
    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None: ...
    def outputs(self, plan: str) -> dict[str, np.ndarray]: ...
    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None: ...
    def resident(self) -> dict[str, int]: ...
    def hardware(self) -> dict[str, str]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Executor: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


_EXECUTORS: dict[str, Callable[[Program, Catalogue], Executor]] = {"cpu": CpuExecutor, "cuda": CudaExecutor}


def open_executor(program: Program, catalogue: Catalogue) -> Executor:
    """The executor of the back end that `program` was built for; the caller closes it. MachineError if this machine lacks the back end or
    the memory."""
    backend = str(program.facts["backend"])
    if backend not in _EXECUTORS:
        raise InputError("no such back end", came=backend, expected=", ".join(_EXECUTORS))
    memory_check.require(program)
    return _EXECUTORS[backend](program, catalogue)


def refresh(executor: Executor) -> None:
    """After parameters were drawn or loaded: make what the kernels read from them (a bf16 program's copy of the f32 weights)."""
    if "narrow" in executor.program.plans:
        executor.run("narrow")
