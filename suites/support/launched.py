"""A small job for tests of alpha/train/launch.py: `launched.py CASE SIZE VICTIM` starts it and prints how it ended, as JSON.

The body: twenty all-reduces, at number seven of which the victim does what the case says. Started as a rank of another launcher
(`launched.py rank CASE JOIN`), it is one rank, waits JOIN seconds for the others, and prints its own error.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from alpha import config
from alpha.comm import collectives
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.errors import AlphaError, InputError
from alpha.train import launch
from alpha.train.handshake import require_same_start

SHORT = Deadlines(stall=1.0, abort=1.0)
STEPS, AT = 20, 7
TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"


def body(world: World, tell: launch.Tell, case: str, victim: int) -> int:
    if world.rank == 0:
        tell(path="a run")
    cfg = config.load(TINY)
    if case == "config" and world.rank == victim:
        cfg = replace(cfg, optim=replace(cfg.optim, lr=0.5))
    require_same_start(world, cfg, "")
    x = np.ones(1000, np.float32)
    for step in range(STEPS):
        world.step = step
        if step == AT and world.rank == victim:
            misbehave(case)
        collectives.all_reduce(world.group(WORLD), x, x, reduce="average")
        if case in ("signal", "parent") and step == AT:
            os.write(1, f"pid {os.getpid()}\n".encode())  # whole: ranks share the pipe
            time.sleep(60)
    if case == "late" and world.rank == victim:  # all others have ended: nobody waits for it
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def misbehave(case: str) -> None:
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "raises":
        raise ValueError("planted")
    elif case == "refuses":
        raise InputError("planted", came="this", expected="that", do="nothing")
    elif case == "exits":
        os._exit(0)
    elif case == "deaf":  # the others fail; this one neither dies nor listens
        time.sleep(60)


def main(case: str, size: str, victim: str) -> None:
    def run(world: World, tell: launch.Tell) -> int:
        return body(world, tell, case, int(victim))

    if case == "cramped":  # as where there is no memory to share
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    elif case == "unwatched":  # as where a limit on open files is reached between two ranks
        os.pidfd_open = _not_for_the_second(os.pidfd_open)
    began = time.monotonic()
    try:
        ended = launch.launch(int(size), run, deadlines=SHORT)
    except AlphaError as error:
        ended = launch.Ended(error.exit_code, str(error))
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    print(json.dumps({**asdict(ended), "seconds": time.monotonic() - began, "left": left}))


def _not_for_the_second(pidfd_open: Callable[[int], int]) -> Callable[[int], int]:
    opened: list[int] = []

    def opening(pid: int) -> int:
        if opened:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        opened.append(pid)
        return pidfd_open(pid)

    return opening


def rank(case: str, seconds: str) -> int:
    limits = replace(SHORT, join=float(seconds))
    try:
        place = launch.seat(os.environ)
        assert place is not None
        with launch.join(place, limits) as world:
            return body(world, lambda **_: None, case, 1)
    except AlphaError as error:
        print(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(rank(*sys.argv[2:]) if sys.argv[1] == "rank" else main(*sys.argv[1:]))
