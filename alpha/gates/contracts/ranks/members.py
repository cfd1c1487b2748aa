"""Ranks for gates and tests: a warm server process that forks the members of a job, so that a case costs milliseconds. Floor 7.

`Members().run(function, size, ...)` calls `function(world, *arguments)` of a module in `size` processes and returns one `Ended` each.
A function may end its own process as it likes. What does not end by itself is killed and told.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from alpha.comm.process import Served
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.errors import RankError
from alpha.gates.contracts.engine import child_environment
from alpha.gates.contracts.ranks.network import Network

LIMIT_S = 60.0


@dataclass
class Ended:
    """How one member ended. `status`: exit status, negative for a signal; `result`: what its function returned; `error`: the traceback, or
    the text of a RankError; `rank`, `op`: whom and what that names; `seconds`: from the start of the job; `served`: the same without all
    that any member had to wait for a processor (alpha/comm/process.py); `beat`: seconds to its last heartbeat, half a second at most
    before it died or stopped; `hung`: it was killed at the limit."""

    status: int
    result: Any = None
    error: str = ""
    rank: int | None = None
    op: str = ""
    seconds: float = 0.0
    served: float = 0.0
    beat: float = 0.0
    hung: bool = False


class Members:
    """The server, started once for many cases.

    `apart`: it has a process group of its own. When a shell ends, Linux wakes whoever is stopped in the group of what it left behind
    (SIGCONT to a group that nobody controls any more, setpgid(2)): a member that was to stay stopped would go on.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._server = subprocess.Popen([sys.executable, "-c", f"from {__name__} import serve; serve({apart})"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=child_environment())

    def run(self, function: Callable[..., Any], size: int, *arguments: Any, limit_s: float = LIMIT_S, deadlines: Deadlines | None = None,
            absent: Sequence[int] = (), **layout: Any) -> list[Ended]:
        """`absent`: ranks that never start. `layout`: of the segment (payload_bytes, slots), and `hosts` that the ranks are on, each with
        its bridge, and the `wire` between those (network.py).
        `limit_s`: seconds in which the machine serves each."""
        return self._ask(function, size, arguments, limit_s, deadlines, tuple(absent), layout)

    def apart(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Ended:
        """`function(*arguments)` in one process of one thread, which is no rank: it may start ranks."""
        return self._ask(function, 0, arguments, limit_s, None, (), {})[0]

    def _ask(self, function: Callable[..., Any], *how: Any) -> list[Ended]:
        name = function.__module__
        assert self._server.stdin and self._server.stdout
        _tell(self._server.stdin, (name, sys.modules[name].__file__ or "", function.__name__, *how))
        answer: list[Ended] = _heard(self._server.stdout)
        return answer

    def close(self) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@cache
def members() -> Members:
    """The server of this process."""
    started = Members()
    atexit.register(started.close)
    return started


def _tell(pipe: IO[bytes], what: Any) -> None:
    body = pickle.dumps(what)
    pipe.write(struct.pack("<Q", len(body)) + body)
    pipe.flush()


def _heard(pipe: IO[bytes]) -> Any:
    head = pipe.read(8)
    return pickle.loads(pipe.read(struct.unpack("<Q", head)[0])) if head else None


def serve(apart: bool = False) -> None:
    """The server's whole life: jobs from standard input, how they ended to standard output."""
    if apart:
        os.setpgid(0, 0)
    while (request := _heard(sys.stdin.buffer)) is not None:
        _tell(sys.stdout.buffer, _job(*request))


def _job(module: str, file: str, name: str, size: int, arguments: tuple[Any, ...], limit_s: float, deadlines: Deadlines | None,
         absent: tuple[int, ...], layout: dict[str, Any]) -> list[Ended]:
    """`size` 0: one process that is no rank."""
    if "." not in module:  # of a folder of tests
        folder, stem = os.path.split(file)
        module = stem.removesuffix(".py")
        if folder not in sys.path:
            sys.path.insert(0, folder)
    function = getattr(importlib.import_module(module), name)
    network = Network(size, **layout) if layout.get("hosts") else None
    one = None if network else Segment.create(max(size, 1), **layout)
    segments = [one or network.segment(r) for r in range(max(size, 1))]  # type: ignore[union-attr]
    start, clock = time.monotonic(), time.monotonic_ns()
    children, ended = {}, [Ended(0) for _ in range(max(size, 1))]
    for rank in range(max(size, 1)):
        if rank in absent:
            continue
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                with os.fdopen(write, "wb") as pipe:
                    _tell(pipe, _member(segments[rank] if size else None, rank, function, arguments, deadlines))
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        children[pid] = (rank, read)
    bodies: dict[int, bytes] = {read: b"" for _, read in children.values()}
    left, clocks = set(bodies), [Served(pid) for pid in children]
    while left and min(c.look() for c in clocks) < 1e9 * limit_s:
        for fd in select.select(list(left), [], [], 0.05)[0]:
            more = os.read(fd, 1 << 20)
            bodies[fd] += more
            if not more:
                left.discard(fd)
                for rank, read in children.values():
                    if read == fd:
                        ended[rank].seconds = time.monotonic() - start
                        ended[rank].served = ended[rank].seconds - sum(c.lost for c in clocks) / 1e9
        # a stopped member holds its pipe: when all others have ended, nobody waits for it
        if left and all(_stopped(pid) for pid, (_, read) in children.items() if read in left):
            break
    for pid, (rank, read) in children.items():
        hung = read in left
        stopped = hung and _stopped(pid)
        if hung:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(read)
        if bodies[read]:
            told = pickle.loads(bodies[read][8:])
            told.seconds, told.served = ended[rank].seconds, ended[rank].served
            ended[rank] = told
        ended[rank].status = os.waitstatus_to_exitcode(status)
        ended[rank].hung = hung and not stopped
        ended[rank].beat = (segments[rank].control.heartbeat(rank) - clock) / 1e9
    if one:
        one.close()
    for wrong in network.close() if network else ():
        ended[0] = Ended(1, None, wrong)
    return ended


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _member(segment: Segment | None, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...],
            deadlines: Deadlines | None) -> Ended:
    try:
        if segment is None:
            return Ended(0, function(*arguments))
        with World(segment, rank, deadlines=deadlines) as world:
            return Ended(0, function(world, *arguments))
    except RankError as error:
        return Ended(0, None, str(error), error.rank, error.op)
    except BaseException:
        return Ended(0, None, traceback.format_exc())


def in_threads(size: int, function: Callable[[World], Any], *, deadlines: Deadlines | None = None, **layout: Any) -> list[Any]:
    """The same within this process: `function(world)` of each rank in a thread of its own; what each returned or raised."""
    segment, found = Segment.create(size, **layout), list[Any]([None] * size)

    def member(rank: int) -> None:
        try:
            with World(segment, rank, deadlines=deadlines) as world:
                found[rank] = function(world)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not any(t.is_alive() for t in threads), "a member hangs"
    segment.close()
    return found
