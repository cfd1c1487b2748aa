"""Kernels run for another process: single launches through the executor of a run, over memory that both share. Floor 4.

`wait` forks: its process has imported all that a run imports, kernels among it. Each fork answers until the other side closes, and knows
of that what a launch says: types, attributes, places, workers.

A request is its length (8 bytes) and a pickle of (name, arguments). An answer is its length and JSON, so that what answers cannot run code
where it is read: {"ok": result} or {"error": [class, text]}. A length below zero is a call of the launch of that number, the most frequent
request by far; where it returns, the answer is a length of zero and nothing more.

    ready    nothing: whatever starts once per process has started
    scratch  component, ins, outs, attrs, workers -> bytes of scratch that a launch of them takes
    bind     number, component, workers, ins, outs, attrs, scratch, size, drop: a Plan of one launch over the shared memory, which is
             `size` bytes long by now; Plans of the numbers in `drop` are let go
    declared component -> what the component says of itself: op, dtypes, limits, inplace, requires, and whether it has calls
    holds    component, limit, types, attrs -> whether that limit of its envelope holds
    samples  component, which, rng -> its further samples, or those that it refuses
    many     number, keeps: a Plan of that launch as often as there are keeps, after each of which an element of an output is kept
             -> these elements
"""

from __future__ import annotations

import array
import base64
import gc
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Cpu
from alpha.backends.cpu.observe import ObservedWorkers
from alpha.component import Catalogue
from alpha.errors import AlphaError, CorruptError, GraphError
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref
from alpha.ops.table import table
from alpha.types import NUMPY, Attrs, TensorType

HEAD = struct.Struct("<q")
ARENA = "act"
Typed = tuple[tuple[int, ...], str]
"""An operand's shape and element type."""

Placed = tuple[int, Typed]
"""An operand: its offset in the shared memory in bytes, its type."""


class OneLaunch(CpuExecutor):
    """An executor whose Plans come and go. All lie in one arena."""

    def __init__(self, catalogue: Catalogue, workers: int) -> None:
        super().__init__(Program("step", {}, (), {}, {"threads": workers}), catalogue)
        self._catalogue = catalogue

    def beside(self, workers: int) -> OneLaunch:
        """Another one with so many workers, without looking for libraries again."""
        other = copy(self)
        other.workers = ObservedWorkers(workers)
        other.arenas, other._bound, other._plans = {}, {}, {}
        return other

    def load(self, plan: Plan, memory: np.ndarray) -> None:
        """Bind a Plan over this memory."""
        self.arenas[ARENA] = memory
        self._bound[plan.name] = self._bind(plan, self._catalogue)
        self._plans[plan.name] = plan

    def drop(self, name: str) -> None:
        """Let go of a Plan."""
        self._bound.pop(name, None)
        self._plans.pop(name, None)

    def repeat(self, name: str, after: Sequence[Callable[[], object]]) -> Plan:
        """The Plan `many`: the launch of a Plan of one as often as there are steps after it, each followed by its own."""
        launch, run = self._bound[name][0]
        steps = [(launch, step) for own in after for step in (run, own)]
        plan = _plan("many", *(launch for launch, _ in steps))
        self._bound[plan.name] = steps  # type: ignore[assignment]
        self._plans[plan.name] = plan
        return plan


class Side:
    """The handlers of a fork. `file`: the shared memory."""

    def __init__(self, catalogue: Catalogue, file: int, alone: OneLaunch) -> None:
        self._catalogue, self._file = catalogue, file
        self._executors = {1: alone}
        self._held: dict[int, tuple[OneLaunch, Launch]] = {}
        self._memory: np.ndarray = np.empty(0, np.uint8)

    def ready(self) -> None:
        """All threads that a process with one worker has are there afterwards."""
        np.dot(np.ones((2, 2)), np.ones((2, 2)))

    def declared(self, component: str) -> dict[str, Any]:
        if self._catalogue.broken:
            raise CorruptError("; ".join(f"{module} cannot be loaded: {why}" for module, why in self._catalogue.broken.items()))
        c = self._catalogue[component]
        return {"op": c.op, "dtypes": c.envelope.dtypes, "limits": [x.text for x in c.envelope.limits], "inplace": c.inplace,
                "requires": c.requires, "calls": c.calls is not None}

    def holds(self, component: str, limit: int, types: Sequence[Typed], attrs: Attrs) -> bool:
        return bool(self._catalogue[component].envelope.limits[limit].holds([TensorType(*t) for t in types], attrs))

    def samples(self, component: str, which: str, rng: np.random.Generator) -> list[dict[str, Any]]:
        return [{"name": s.name, "inputs": [_written(np.asarray(x)) for x in s.inputs], "attrs": _plain(s.attrs), "wrt": s.wrt}
                for s in getattr(self._catalogue[component].calls, which)(rng)]

    def scratch(self, component: str, ins: Sequence[Typed], outs: Sequence[Typed], attrs: Attrs, workers: int) -> int:
        cpu = Cpu(self._executor(workers).workers)
        arrays = [np.empty(shape, NUMPY[dtype]) for shape, dtype in (*ins, *outs)]
        self._catalogue[component].implementation(cpu, arrays[: len(ins)], arrays[len(ins) :], attrs)
        return cpu.used

    def bind(self, number: int, component: str, workers: int, ins: Sequence[Placed], outs: Sequence[Placed], attrs: Attrs,
             scratch: tuple[int, int] | None, size: int, drop: Sequence[int]) -> None:
        for old in drop:
            executor, _ = self._held.pop(old, (None, None))
            if executor is not None:
                executor.drop(str(old))
        if size > self._memory.nbytes:
            self._memory = np.frombuffer(mapped(self._file, size), np.uint8)
        found, executor = self._catalogue[component], self._executor(workers)
        region = Ref(ARENA, scratch[0], TensorType((scratch[1],), "bool")) if scratch else None
        launch = Launch(str(found.op), component, tuple(Ref(ARENA, at, TensorType(*t)) for at, t in ins),
                        tuple(Ref(ARENA, at, TensorType(*t)) for at, t in outs), attrs, region, "blocks.0", "forward", "", 0, 0)
        executor.load(_plan(str(number), launch), self._memory)
        self._held[number] = executor, launch

    def call(self, number: int) -> None:
        """Run the Plan of one launch."""
        self._held[number][0].enqueue((str(number),))

    def many(self, number: int, keeps: Sequence[tuple[int, int]]) -> list[Any]:
        executor, launch = self._held[number]
        kept: list[Any] = []
        flat = [memoryview(executor.view(ref).reshape(-1)) for ref in launch.outs]  # type: ignore[arg-type]
        executor.repeat(str(number), [partial(_keep, kept, flat[output], place) for output, place in keeps])
        executor.enqueue(("many",))
        executor.drop("many")
        return kept

    def _executor(self, workers: int) -> OneLaunch:
        if workers not in self._executors:
            self._executors[workers] = self._executors[1].beside(workers)
        return self._executors[workers]


def _written(x: np.ndarray) -> dict[str, Any]:
    """An array for JSON."""
    return {"dtype": x.dtype.str, "shape": x.shape, "bytes": base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()}


def _plain(value: Any) -> Any:
    """Attributes for JSON, which writes a tuple as a list. A list would come back as a tuple, so there is none."""
    if isinstance(value, list):
        raise GraphError("an attribute is a list", came=value, do="make it a tuple")
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _plan(name: str, *launches: Launch) -> Plan:
    return Plan(name, launches, {}, {}, {}, Memory(0, 0, 0))


def _keep(kept: list[Any], out: memoryview, place: int) -> None:
    kept.append(out[place])


def mapped(file: int, nbytes: int) -> mmap.mmap:
    """Shared memory, its pages fetched at once rather than one by one when they are first touched."""
    return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def answer(talk: socket.socket, side: Side) -> None:
    """Answer until the other end closes."""
    called = HEAD.pack(0)
    while len(head := read(talk, HEAD.size)) == HEAD.size:
        length = HEAD.unpack(head)[0]
        try:
            if length < 0:
                side.call(-length)
                talk.sendall(called)
                continue
            do, arguments = pickle.loads(read(talk, length))
            result: dict[str, Any] = {"ok": getattr(side, do)(**arguments)}
        except Exception as error:  # the other side decides what a failure means
            result = {"error": [type(error).__name__, (error.what if isinstance(error, AlphaError) else str(error))[:2000]]}
        send(talk, json.dumps(result).encode())


def send(talk: socket.socket, data: bytes) -> None:
    """A message."""
    talk.sendall(HEAD.pack(len(data)) + data)


def read(talk: socket.socket, nbytes: int) -> bytes:
    """So many bytes; fewer when the other side has closed."""
    parts, left = list[bytes](), nbytes
    while left:
        try:
            part = talk.recv(min(left, 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def as_in_a_run(talk: int, file: int, catalogue: Catalogue, alone: OneLaunch | None = None) -> None:
    """The life of a fork. `talk`: a socket; `file`: the shared memory; `alone`: an executor of one worker that is there already."""
    np.seterr(all="ignore")
    answer(socket.socket(fileno=talk), Side(catalogue, file, alone or OneLaunch(catalogue, 1)))


def every_kernel() -> Catalogue:
    """All kernels of the CPU, as a run loads them."""
    catalogue = Catalogue()
    fill(catalogue)
    return catalogue


def wait(talk: socket.socket) -> None:
    """Fork for every message: it is one byte, and brings what `as_in_a_run` is handed. Answers the process id. When the other side closes,
    all forks are ended."""
    catalogue = every_kernel()
    table()
    alone = OneLaunch(catalogue, 1)  # it finds libraries, once per process, and has no thread that a fork would lack
    gc.collect()
    gc.freeze()
    forks: set[int] = set()
    while True:
        message, handed, _, _ = socket.recv_fds(talk, 1, 2)
        if not message:
            break
        forks -= {pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0]}
        pid = os.fork()
        if pid == 0:
            talk.close()
            try:
                as_in_a_run(handed[0], handed[1], catalogue, alone)
            finally:
                os._exit(0)
        for file in handed:
            os.close(file)
        forks.add(pid)
        talk.sendall(HEAD.pack(pid))
    for pid in forks:  # of none has the number been given anew: nobody else waits for them
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def waiting(*files: int) -> tuple[socket.socket, int]:
    """A socket to a fork of this process that waits, and its process id. `files`: what this process alone keeps open."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            for file in files:
                os.close(file)
            sys.argv[:] = ["alpha", "train", "run.toml"]
            wait(theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


def hand_over(talk: socket.socket, *files: int) -> int:
    """What `wait` answers to a message that brings these: the id of the new process; 0 when the other side has closed."""
    talk.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    told = read(talk, HEAD.size)
    return int(HEAD.unpack(told)[0]) if len(told) == HEAD.size else 0
