"""Runs of one small model on any number of ranks, for tests: `ranked_runs.py FOLDER JOB...` prints what each left, a line of JSON each.

A JOB is JSON: {"name", "ranks", "hosts": how many they are on, each a process that starts its own, "zero", "from": name of the job whose
run is copied and resumed, "at": from which checkpoint, "plant": what goes wrong, "victim": on which rank (modulo their number), "step":
after how many steps, or "after": after how many seconds of that rank's processor time, or "save" and "point": at which moment of which of
its saves, "faults": of each start its own such words, "restarts", "fewest", "deadlines": others than SHORT, "set": other keys of the run
file}. FOLDER holds a small corpus `text`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console

from alpha import config
from alpha.checkpoint import folders
from alpha.checkpoint.disk import Disk
from alpha.comm import links
from alpha.comm.meet import Across
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.profile.store import read
from alpha.train import launch, peak, session
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.interrupt import Interrupt
from alpha.train.loop import Loop
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver
from alpha.train.supervisor import supervise

RUN = """
[run]
name = "{name}"
out = "{folder}/runs"
[model]
family = "gpt"
layers = 2
width = 16
heads = 2
[data]
corpus = "{folder}/text"
tokenizer = "bytes"
validation = 0.3
sequence = 16
cache = "{folder}/cache"
[train]
steps = 6
batch = 16
shards = 8
micro_batch = 1
zero = {zero}
eval_every = 2
eval_windows = 8
final_windows = 8
checkpoint_every = 2
keep = 9
profile = 1
[optim]
lr = 1e-2
warmup = 2
clip = 0.5
[machine]
threads = 1
"""
SHORT = Deadlines(join=20.0, stall=2.0, abort=2.0)


def main(folder: str, *jobs: str) -> None:
    peak.REPEATS, peak.COPIES, peak.COPY_BYTES = 2, 1, 1 << 20
    links.LARGE, links.ADDED, links._TIMES = 1 << 14, 1 << 16, {links.SMALL: 5, 1 << 14: 3}  # a seventh of such a short run, otherwise
    for job in jobs:
        print(json.dumps(ran(Path(folder), json.loads(job))), flush=True)


def ran(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job to its end; what it left."""
    cfg = config.parse(RUN.format(folder=folder.as_posix(), name=job["name"], zero=job.get("zero", 0)), job.get("set", ()))
    path = folder / "runs" / job["name"]
    if "from" in job:
        shutil.copytree(folder / "runs" / job["from"], path)
        for own in ("config.toml",):
            (path / own).write_text(cfg.resolved())

    def start(ranks: int, number: int, resume: Path | None, at: int | None) -> launch.Ended:
        ready = prepared(cfg, ranks)

        def one(world: World | None, tell: launch.Tell) -> int:
            plant(faults[number] if number < len(faults) else {}, world, path)
            world = world if ranks > 1 else None
            found = session.train(cfg, catalogue(), Printer(Console(quiet=True)), admit=None, resume=resume, at=at, world=world,
                                  interrupt=Interrupt(silent=True),
                                  made=lambda made: tell(path=str(made)), prepared=ready)
            return 0 if found.finished else 128 + found.ended_by

        if job["ranks"] == 1 and "faults" not in job:
            return launch.Ended(one(None, lambda **_: None), told={"path": str(path)})
        ended = _launched(job.get("hosts", 1), ranks, one, number, replace(SHORT, **job.get("deadlines", {})))
        ends.append(time.monotonic())
        return ended

    faults, ends, said = job.get("faults", [job]), list[float](), list[str]()
    began = time.monotonic()
    ended = supervise(start, job["ranks"], restarts=job.get("restarts", 0), fewest=job.get("fewest", job["ranks"]),
                      resume=path if "from" in job else None, at=job.get("at"), report=said.append, sleep=lambda s: None)
    seconds, path = time.monotonic() - began, Path(ended.told.get("path", path))
    return {"code": ended.code, "error": ended.error, "account": ended.account, "lost": ended.lost, "said": said, "seconds": seconds,
            "ended": ends, **(left(path) if path.is_dir() else {})}


def _launched(hosts: int, ranks: int, one: launch.Body, number: int, limits: Deadlines) -> launch.Ended:
    """How the first host says that the job ended. The others are forks of this process."""
    if hosts == 1:
        return launch.launch(ranks, one, epoch=number, deadlines=limits)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    across = [Across(i, hosts, "127.0.0.1", port, b"a secret of this test") for i in range(hosts)]
    others = list[int]()
    for i in range(1, hosts):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = launch.launch(ranks // hosts, one, epoch=number, deadlines=limits, across=across[i]).code
            finally:
                os._exit(code)
        others.append(pid)
    ended = launch.launch(ranks // hosts, one, epoch=number, deadlines=limits, across=across[0])
    for pid in others:
        os.waitpid(pid, 0)
    return ended


@cache
def prepared(cfg: config.Config, ranks: int) -> session.Prepared:
    """Data and Program, made once for all starts of one configuration."""
    return session.prepare(cfg, catalogue(), Printer(Console(quiet=True)), Ranks(), ranks)


def left(path: Path) -> dict[str, Any]:
    """The numbers of every step, validations, samples, the bits of every checkpoint, and which ranks measured which steps."""
    folder, database = path / "checkpoints", path / "metrics.sqlite"
    return {
        "steps": sorted(read(database, "step_metrics", "step, loss, norm, lr, coefficient")),
        "evaluations": sorted(read(database, "evaluations", "step, nats, tokens, bytes, windows")),
        "samples": sorted(read(database, "samples", "step, text")),
        "timed": sorted(read(database, "step_timing", "rank, step")),
        "moments": sorted(read(database, "sessions", "session, rank, clock_ns, unix_ns")),
        "checkpoints": {step: {kind: xxhash.xxh3_128_hexdigest(x.data) for kind, (_, x) in folders.read(folders.at(folder, step)).items()}
                        for step in folders.steps(folder)},
        "logs": sorted(p.name for p in (path / "logs").iterdir()),
        "held": sorted(p.name for p in folder.iterdir()),
        "folders": sorted(p.name for p in path.parent.iterdir()),
    }  # fmt: skip


def plant(job: dict[str, Any], world: World | None, path: Path) -> None:
    """Make one rank go wrong after so many steps. `settled`: saves are waited for, so that it is known which checkpoints stand then.
    A rank that is struck by a signal writes its number and the moment (CLOCK_MONOTONIC, seconds) into `path`.struck just before."""
    if job.get("settled"):
        begin = Loop.begin_save

        def begin_and_wait(loop: Loop) -> None:
            begin(loop)
            loop.saver.finish()

        Loop.begin_save = begin_and_wait  # type: ignore[method-assign]
    what = job.get("plant")
    if what is None or world is None or world.rank != job["victim"] % world.size:
        return
    if what in SIGNALS:
        strike = partial(_strike, SIGNALS[what], world.rank, path.with_suffix(".struck"))
        if "save" in job:
            _in_a_save(job["save"], job["point"], strike)
        else:
            threading.Thread(target=_once_used, args=(job["after"], strike), daemon=True).start()
        return
    advance = Loop.advance

    def planted(loop: Loop, *, ahead: bool = False) -> Any:
        if loop.step == job["step"] and what in FAULTS:
            loop.ranks.begin(loop.step)  # it is in this step, whatever the others are in
            FAULTS[what](loop)
        result = advance(loop, ahead=ahead)
        if loop.step == job["step"] + 1 and what == "flip":
            flat = loop.executor.state("param").view(np.uint32)
            flat[loop.program.states["param"].offsets["block.1.mlp.up.weight"] + 5] ^= 1
        return result

    Loop.advance = planted  # type: ignore[method-assign]


def _strike(number: int, rank: int, note: Path) -> None:
    with open(note, "a") as file:
        print(rank, time.monotonic(), file=file)
    os.kill(os.getpid(), number)


def _once_used(seconds: float, strike: Callable[[], None]) -> None:
    """Strike when this process has used so much processor time, whatever it does then."""
    while time.process_time() < seconds:
        time.sleep(0.001)
    strike()


def _in_a_save(save: int, point: int, strike: Callable[[], None]) -> None:
    """Strike at moment number `point` of save number `save` that this process starts: before or behind a file operation, or inside a write.
    Where a save has fewer moments, those of the next ones count."""
    start, saves, moments = Saver.start, [0], [0]

    def counted(saver: Saver, *given: Any) -> None:
        saves[0] += 1
        start(saver, *given)

    def moment() -> None:
        moments[0] += saves[0] >= save
        if moments[0] == point + 1:
            strike()

    def around(operation: Callable[..., None]) -> Callable[..., None]:
        def operate(disk: Disk, *given: Any) -> None:
            moment()
            operation(disk, *given)
            moment()

        return operate

    def halved(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk[: len(chunk) // 2]
            moment()
            yield chunk[len(chunk) // 2 :]

    write = Disk.write
    Disk.write = lambda disk, path, chunks: write(disk, path, halved(chunks))  # type: ignore[method-assign]
    for name in ("make", "write", "sync_folder", "rename", "remove"):
        setattr(Disk, name, around(getattr(Disk, name)))
    Saver.start = counted  # type: ignore[method-assign]


SIGNALS = {"kill-after": signal.SIGKILL, "stop-after": signal.SIGSTOP}


def _raise(loop: Loop) -> None:
    raise MemoryError("planted")


def _poison(loop: Loop) -> None:
    loop.executor.state("param")[: loop.program.states["param"].size // 2] = np.inf


def _stop_while_saving(loop: Loop) -> None:
    def save(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    folders.write = save  # type: ignore[assignment]


def _slow(loop: Loop) -> None:
    """Every launch of the compute stream takes a third of a millisecond longer."""
    for bound in loop.executor._bound.values():  # type: ignore[attr-defined]
        bound[:] = [(launch, run if launch.stream else partial(_late, run)) for launch, run in bound]


def _late(run: Callable[[], None]) -> None:
    time.sleep(0.0003)
    run()


FAULTS: dict[str, Callable[[Loop], None]] = {
    "slow": _slow,
    "kill": lambda loop: os.kill(os.getpid(), signal.SIGKILL),
    "kill-host": lambda loop: os.kill(os.getppid(), signal.SIGKILL),
    "stop": lambda loop: os.kill(os.getpid(), signal.SIGSTOP),
    "stop-saving": _stop_while_saving,
    "interrupt": lambda loop: os.kill(os.getppid(), signal.SIGINT),
    "raise": _raise,
    "poison": _poison,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
