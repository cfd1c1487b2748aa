"""What runs a Program: the surface that the loop needs, and the back end that the Program was built for. Floor 6."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from alpha.backends.checks import Inspector
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.downloads import Downloads
from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.ranks import CudaRank
from alpha.backends.digest import Digests
from alpha.comm.world import World
from alpha.component import Catalogue
from alpha.cuda_runtime.peers import devices_of
from alpha.errors import InputError, MachineError
from alpha.graph.plan import Program
from alpha.profile.recorder import Recorder
from alpha.registry.gpu import asked
from alpha.train import memory_check


class Executor(Protocol):
    """A Program bound to memory. Both back ends have this surface; what each method promises stands there.

    `enqueue` hands Plans over, to run one after the other, and may return before they have: then `stage` sends the inputs of later ones
    meanwhile, and `outputs` waits. `run` is both, for one Plan. Where `runs_ahead`, the Plans of the next step may be handed over before
    `outputs` is asked for those of this one. On the CPU a Plan has run when `enqueue` returns. An `inspector` sees every launch while it is
    set; `check` calls what hashes memory, by `digests`, between Plans.
    """

    program: Program
    recorder: Recorder
    inspector: Inspector | None

    @property
    def digests(self) -> Digests: ...
    @property
    def runs_ahead(self) -> bool: ...
    def state(self, kind: str) -> np.ndarray: ...
    def look(self, kind: str) -> np.ndarray: ...
    def blank(self, kind: str) -> np.ndarray: ...
    def clear(self, kind: str) -> None: ...
    def run(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]: ...
    def stage(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]]) -> None: ...
    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None: ...
    def outputs(self, plan: str) -> dict[str, np.ndarray]: ...
    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None: ...
    def check(self, hashes: Callable[[], None]) -> None: ...
    def resident(self) -> dict[str, int]: ...
    def hardware(self) -> dict[str, str]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Executor: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


_EXECUTORS: dict[str, Callable[[Program, Catalogue], Executor]] = {"cpu": CpuExecutor, "cuda": CudaExecutor}


def open_executor(program: Program, catalogue: Catalogue, world: World | None = None) -> Executor:
    """The executor of the back end that `program` was built for; the caller closes it. `world`: this rank among those of a job; None where
    the Program has one rank. MachineError if this machine lacks the back end or the memory, or if ranks of it do not reach each other."""
    backend = str(program.facts["backend"])
    if backend not in _EXECUTORS:
        raise InputError("no such back end", came=backend, expected=", ".join(_EXECUTORS))
    memory_check.require(program, [world.rank if world else 0])
    if world is None:
        return _EXECUTORS[backend](program, catalogue)
    if backend == "cpu":
        return CpuExecutor(program, catalogue, world)
    if len(world.here) < world.size:
        raise MachineError("collectives among GPUs reach those of one host", came=f"{world.size} ranks, {len(world.here)} of this host",
                           expected="all ranks on one host", do="run as many ranks as this host has GPUs")
    return CudaRank(program, catalogue, world)


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use, as VISIBLE names them: those that it names, else all that there are."""
    named = environment.get(VISIBLE)
    return [str(i) for i in range(len(asked().gpus))] if named is None else [x.strip() for x in named.split(",") if x.strip()]


def require_devices(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """MachineError where there are fewer GPUs than ranks on this host: each computes on one of its own."""
    there = len(visible_devices(environment))
    if ranks > there:
        raise MachineError("each rank computes on a GPU of its own", came=f"{ranks} ranks, {there} GPU{'s' * (there != 1)}",
                           expected=f"at most {there} ranks", do=f"take --nproc {there}" if there > 1 else "leave out --nproc")


def take_device(world: World, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make a rank's own GPU the first that its process sees, the others behind it; before the driver starts there. MachineError where there
    are fewer than ranks."""
    require_devices(len(world.here), environment)
    devices = visible_devices(environment)
    environment[VISIBLE] = ",".join(devices[int(i)] for i in devices_of(world.local_rank, len(devices)).split(","))


def downloads_of(executor: Executor) -> Downloads | None:
    """Where the state lies on a device: how a save copies it, beside Plans that only read it. None where `look` is the state itself."""
    return executor.downloads if isinstance(executor, CudaExecutor) else None


def facts_of(executor: Executor) -> dict[str, str]:
    """What an executor says of itself for the run's metadata: of ranks on GPUs the priority of the stream of collectives."""
    return {"comm_priority": executor.priority} if isinstance(executor, CudaRank) else {}


REFRESH = ("narrow", "shard")
"""Plans that make copies of the parameters: in bf16 those that the model reads; of many ranks the cut that a rank updates."""


def refresh(executor: Executor) -> None:
    """After parameters were drawn or loaded: make what kernels read from them."""
    for plan in REFRESH:
        if plan in executor.program.plans:
            executor.run(plan)
