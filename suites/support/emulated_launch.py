"""The command line on emulated GPUs, with ranks that it starts itself: `emulated_launch.py FOLDER JOB -- ARGUMENTS OF alpha...`.

As on a machine with GPUs: nvidia-smi (a program in FOLDER/bin) tells of them, the process that starts the ranks has no driver at all, and
each rank finds its own GPU behind CUDA_VISIBLE_DEVICES. JOB is JSON: {"gpus": how many there are, "plant": what goes wrong (`kill`, `stop`,
`raise`, `import`, `interrupt`, `context`, `abort`, `slow`), "victim": on which rank, "step": before which step, "once": only in the first
start, "real": on the GPUs of this machine}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from device_rank_faults import lose_context

from alpha import cli
from alpha.cli import training
from alpha.comm import links
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime import compile as nvcc
from alpha.errors import MachineError, RankError
from alpha.resources import ROOT
from alpha.train import catalogue as catalogues
from alpha.train import forbidden, launch
from alpha.train.loop import Loop

SMI = """#!/bin/sh
case "$*" in
*query-gpu*) for i in $(seq {gpus}); do echo "NVIDIA H100 80GB HBM3, 9.0, 580.159.04"; done;;
*) {matrix};;
esac
"""


def told(folder: Path, gpus: int) -> None:
    """A program that answers like nvidia-smi of a machine with so many GPUs, all joined by NVLink."""
    lines = ["        " + " ".join(f"GPU{i}" for i in range(gpus))]
    lines += [f"GPU{i} " + " ".join("X" if i == j else "NV18" for j in range(gpus)) + " 0-31 0" for i in range(gpus)]
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "nvidia-smi"
    program.write_text(SMI.format(gpus=gpus, matrix="; ".join(f"echo '{line}'" for line in lines)))
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"


def planted(job: dict[str, Any], world: World, folder: Path) -> None:
    """Make this rank go wrong before a step."""
    what, mark = job.get("plant"), folder / "planted"
    if what is None or world.rank != job["victim"] or (job.get("once") and mark.exists()):
        return
    advance = Loop.advance

    def acting(loop: Loop, *, ahead: bool = False) -> Any:
        if loop.step == job["step"] and not (job.get("once") and mark.exists()):
            if job.get("once"):
                mark.touch()
            act(what, loop, bool(job.get("real")))
        return advance(loop, ahead=ahead)

    Loop.advance = acting  # type: ignore[method-assign]


def act(what: str, loop: Loop, real: bool) -> None:
    if what == "context":
        lose_context(not real)
    elif what == "abort":
        loop.executor._abort()  # type: ignore[attr-defined]
        raise RankError("a captured graph was aborted, as it was told to", rank=loop.ranks.rank, step=loop.step)
    elif what == "slow":
        time.sleep(0.6)
    elif what in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
    elif what == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
    elif what == "import":
        sys.modules["torch"] = sys
    else:
        raise MemoryError("planted")


@contextmanager
def devices(memory: Any, world: World | None) -> Iterator[None]:
    from emulated_gpu import emulated_gpu
    from emulated_peers import emulated_peers

    with emulated_gpu() if memory is None or world is None else emulated_peers(memory, world.rank, nvcc.KERNELS):
        yield


def on_gpus(folder: Path, job: dict[str, Any], arguments: list[str]) -> int:
    """The same with what this machine has, and with the deadlines of a job as they are."""
    session = training._session

    def within(args: Any, cfg: Any, resume: Any, at: Any, world: World | None = None, *rest: Any, **more: Any) -> int:
        if world is not None:
            planted(job, world, folder)
        return session(args, cfg, resume, at, world, *rest, **more)

    with mock.patch.object(training, "_session", within):
        return cli.main(arguments)


def main(folder: Path, job: dict[str, Any], arguments: list[str]) -> int:
    if job.get("real"):
        return on_gpus(folder, job, arguments)
    from emulated_gpu import emulated  # what runs on GPUs holds none of this
    from emulated_peers import EACH, Memory

    told(folder, job.get("gpus", 2))
    forbidden.watch_tests([folder, ROOT / ".alpha" / "emulated"])
    kernels, ranks = emulated(catalogues.catalogue()), int(arguments[arguments.index("--nproc") + 1]) if "--nproc" in arguments else 1
    memory, session = Memory(ranks, EACH) if ranks > 1 else None, training._session
    links.LARGE, links.ADDED, links._TIMES = 1 << 14, 1 << 16, {links.SMALL: 5, 1 << 14: 3}

    def within(args: Any, cfg: Any, resume: Any, at: Any, world: World | None = None, *rest: Any, **more: Any) -> int:
        if world is not None:
            planted(job, world, folder)
        with devices(memory, world):
            return session(args, cfg, resume, at, world, *rest, **more)

    def no_driver() -> Any:
        raise MachineError("the process that starts ranks asks for a driver", came="a fork of it could not use one")

    started = launch.launch

    def start(size: int, body: Any, **more: Any) -> Any:
        return started(size, body, **{**more, "deadlines": Deadlines(join=60.0, stall=3.0, abort=3.0)})

    compiling = mock.patch.object(forbidden, "TOOLS", forbidden.TOOLS | {"g++"})  # in place of nvcc, which a rank may call
    with compiling, mock.patch.multiple(_bindings, driver=no_driver, pycuda_driver=no_driver), mock.patch.object(launch, "launch", start), \
            mock.patch.multiple(training, _session=within, catalogue=lambda: kernels):
        return cli.main(arguments)


if __name__ == "__main__":
    at = sys.argv.index("--")
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[at + 1 :]))
