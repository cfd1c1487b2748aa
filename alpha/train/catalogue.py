"""The whole catalogue: every component that there is, collected from the packages that make them. Floor 6."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from alpha.backends.cpu.catalogue import fill as fill_cpu
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda import spot
from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.catalogue import fill as fill_cuda
from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.lib import SM90A
from alpha.backends.cuda.ranks import CudaRank
from alpha.checkpoint.components import fill as fill_checkpoint
from alpha.comm.catalogue import fill as fill_comm
from alpha.component import Catalogue, Component
from alpha.config import FAMILIES
from alpha.cuda_runtime import mark
from alpha.data.catalogue import fill as fill_data
from alpha.errors import CorruptError
from alpha.flops.v1 import count
from alpha.models.family import family
from alpha.optim.schedules import SCHEDULES
from alpha.optim.update import adamw, sgd
from alpha.parallel.data import DataParallel
from alpha.passes.build import build_program
from alpha.passes.components import fill as fill_passes
from alpha.profile.components import fill as fill_profile
from alpha.registry.components import fill as fill_registry
from alpha.train.components import fill as fill_train

_OPTIMIZERS, _MODELS = "alpha.gates.contracts.optimizers", "alpha.gates.contracts.models"
OWN = (
    Component(id="executor.cpu", kind="executor", profile="program", backend="cpu", implementation=CpuExecutor,
              contract="alpha.gates.contracts.executor"),
    Component(id="executor.cuda", kind="executor", profile="program", backend="cuda", implementation=CudaExecutor, requires=SM90A,
              binaries=Binaries(lambda: (mark.SOURCE, spot.SOURCE)), contract="alpha.gates.contracts.cuda_executor"),
    Component(id="executor.cuda_ranks", kind="executor", profile="program", backend="cuda", implementation=CudaRank,
              presupposes=("executor.cuda", "all_reduce.sm90", "watch.progress"), requires=("sm_90a", "gpus>=2"),
              binaries=Binaries(lambda: (mark.SOURCE, spot.SOURCE)), contract="alpha.gates.contracts.cuda_ranks"),
    Component(id="program.step", kind="program", profile="program", implementation=build_program, contract="alpha.gates.contracts.program"),
    Component(id="data_parallel.pass", kind="pass", profile="host", implementation=DataParallel,
              contract="alpha.gates.contracts.data_parallel",
              presupposes=("verify_program.pass", "launch.ranks", "handshake.ranks", "decisions.ranks", "saver.ranks",
                           "supervisor.restarts")),
    Component(id="optimizer.adamw", kind="optimizer", profile="program", implementation=adamw, contract=_OPTIMIZERS),
    Component(id="optimizer.sgd", kind="optimizer", profile="program", implementation=sgd, contract=_OPTIMIZERS),
    *(Component(id=f"schedule.{name}", kind="schedule", profile="host", implementation=schedule.share,
                contract="alpha.gates.contracts.schedules") for name, schedule in SCHEDULES.items()),
    *(Component(id=f"model.{name}", kind="model", profile="model", implementation=family(name).loss, contract=_MODELS)
      for name in FAMILIES),
    Component(id="flops.v1", kind="flops", profile="count", implementation=count, contract=_MODELS),
)

SEVERAL = "gpus>=2"
"""The requirement of what runs on several GPUs: what itself runs on one launches no such kernel, and its evidence binds to none."""

RUN_PROGRAMS = ("pass", "executor", "program", "optimizer")
"""Kinds whose gates run whole Programs, by the kernels of their back end: evidence binds to those that their Programs may launch."""


def catalogue() -> Catalogue:
    """Every component that owes gates.

    CorruptError naming the file where one cannot be loaded: nothing runs beside a file that is broken.
    """
    catalogue = loadable_catalogue()
    if catalogue.broken:
        raise CorruptError("a file of kernels cannot be loaded", came="; ".join(f"{m}: {why}" for m, why in catalogue.broken.items()),
                           expected="Python that can be imported", do="mend the file; `alpha doctor` lists what else is missing")
    return catalogue


@cache
def loadable_catalogue() -> Catalogue:
    """The components of the files that can be loaded, once per process; the others are in its `broken`. For commands that only tell."""
    catalogue, others = Catalogue(), Catalogue()
    for fill in (fill_cpu, fill_comm, fill_cuda):
        fill(catalogue)
    kernels = tuple(catalogue)
    for fill in (fill_passes, fill_data, fill_checkpoint, fill_registry, fill_profile, fill_train):
        fill(others)
    for component in (*others, *OWN):
        where = "cuda" if component.backend == "cuda" else "cpu"
        own = tuple(k for k in kernels if k.backend == where and (SEVERAL in component.requires or SEVERAL not in k.requires))
        catalogue.add(replace(component, launches=partial(tuple, own)) if component.kind in RUN_PROGRAMS else component)
    return catalogue
