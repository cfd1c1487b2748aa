"""Kernels run for another process: single launches through the executor of a run, over memory that the other process owns. Floor 4.

`wait` forks: its process has imported all that a run imports, kernels among it. Each fork answers until the other side closes, and knows
of that what a launch says: types, attributes, places, workers.

A request is its length (8 bytes) and a pickle of (name, arguments), with files beside it where they are handed over. An
answer is its length and JSON, so that what answers cannot run code where it is read: {"ok": result} or {"error": [class, text]}.

    ready   nothing: whatever starts once per process has started
    bind    number, component, workers, base, ins, outs, attrs, drop [file of `base` bytes]: a Plan of one launch, its scratch put behind
            `base`; Plans of the numbers in `drop` are let go -> bytes of scratch
    call    number: run that Plan
    arm     calls: a Plan of many launches, of those that were bound
    seen    what the launches of the last armed Plan left, at the places that were asked for

Two pipes are handed over at the start. A byte on the first starts the armed Plan; the same byte comes back on the second when it has run.
That is a third of what a request costs, and nothing but the Plan happens in between.
"""

from __future__ import annotations

import array
import gc
import json
import mmap
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import fill, scratch_bytes
from alpha.backends.cpu.executor import CpuExecutor
from alpha.component import Catalogue
from alpha.errors import AlphaError
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref
from alpha.ops.table import table
from alpha.types import NUMPY, Attrs, TensorType

HEAD = struct.Struct("<q")
Placed = tuple[int, TensorType]
"""An operand: its offset in the shared memory, its type."""

Call = tuple[int, tuple[tuple[int, int, float], ...], tuple[int, int] | None]
"""A launch of an armed Plan: number; elements of its operands to write before it (operand, place, value); the element of an output to
keep after it (output, place)."""


class OneLaunch(CpuExecutor):
    """An executor whose Plans come and go, each with an arena of its own."""

    def __init__(self, catalogue: Catalogue, workers: int) -> None:
        super().__init__(Program("step", {}, (), {}, {"threads": workers}), catalogue)
        self._catalogue = catalogue

    def load(self, plan: Plan, arena: str, memory: np.ndarray) -> None:
        """Bind a Plan over this arena."""
        self.arenas[arena] = memory
        self._bound[plan.name] = self._bind(plan, self._catalogue)
        self._plans[plan.name] = plan

    def view(self, ref: Ref) -> np.ndarray:
        """The array at a place; bf16 as float32, which no run's plan holds and kernels are called on all the same."""
        if ref.type.dtype != "bf16":
            return super().view(ref)
        held = NUMPY["bf16"]
        return self.arenas[ref.arena][ref.offset : ref.offset + ref.type.size * held.itemsize].view(held).reshape(ref.type.shape)

    def drop(self, name: str, arena: str) -> None:
        """Let go of a Plan and its arena."""
        self._bound.pop(name, None)
        self._plans.pop(name, None)
        self.arenas.pop(arena, None)

    def chain(self, plan: Plan, steps: Sequence[tuple[Launch, Callable[[], object]]]) -> None:
        """A Plan out of launches that are bound already, and of what stands between them."""
        self._bound[plan.name] = list(steps)  # type: ignore[arg-type]
        self._plans[plan.name] = plan

    def only(self, name: str) -> tuple[Launch, Callable[[], None]]:
        """The launch of a Plan of one."""
        return self._bound[name][0]


class Side:
    """The handlers."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._executors: dict[int, OneLaunch] = {}
        self._held: dict[int, OneLaunch] = {}
        self._armed: OneLaunch | None = None
        self._seen: list[Any] = []

    def bind(self, file: int, number: int, component: str, workers: int, base: int, ins: Sequence[Placed], outs: Sequence[Placed],
             attrs: Attrs, drop: Sequence[int]) -> int:
        self._drop(drop)
        found = self._catalogue[component]
        need = scratch_bytes(found, [t for _, t in ins], attrs, workers)
        os.ftruncate(file, max(1, base + need))
        memory = np.frombuffer(mapped(file, max(1, base + need)), np.uint8)
        memory[base:] = 0xFF
        arena = f"act.{number}"
        scratch = Ref(arena, base, TensorType((need,), "bool")) if need else None
        launch = Launch(str(found.op), component, tuple(Ref(arena, at, t) for at, t in ins), tuple(Ref(arena, at, t) for at, t in outs),
                        attrs, scratch, "blocks.0", "forward", "", 0, 0)
        if workers not in self._executors:
            self._executors[workers] = OneLaunch(self._catalogue, workers)
        executor = self._executors[workers]
        executor.load(_plan(str(number), launch), arena, memory)
        self._held[number] = executor
        return need

    def ready(self) -> None:
        """All threads that a process with one worker has are there afterwards."""
        self._executors[1] = OneLaunch(self._catalogue, 1)
        np.dot(np.ones((2, 2)), np.ones((2, 2)))

    def call(self, number: int) -> None:
        self._held[number].enqueue((str(number),))

    def arm(self, calls: Sequence[Call]) -> None:
        """Every launch gets its own steps: elements written, the launch, an element kept."""
        self._seen = []
        steps: list[tuple[Launch, Callable[[], object]]] = []
        for number, writes, keep in calls:
            self._armed = self._held[number]
            launch, run = self._armed.only(str(number))
            for operand, place, value in writes:
                steps.append((launch, partial(_flat(self._armed.view(launch.ins[operand])).__setitem__, place, value)))
            steps.append((launch, run))
            if keep is not None:
                steps.append((launch, partial(_keep, self._seen, _flat(self._armed.view(launch.outs[keep[0]])), keep[1])))
        if self._armed is None:
            raise KeyError("nothing is bound")
        self._armed.chain(_plan("step", *(launch for launch, _ in steps)), steps)

    def run_armed(self) -> None:
        """The armed Plan."""
        assert self._armed is not None
        self._armed.enqueue(("step",))

    def seen(self) -> list[float]:
        return self._seen

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            executor = self._held.pop(number, None)
            if executor is not None:
                executor.drop(str(number), f"act.{number}")


def _plan(name: str, *launches: Launch) -> Plan:
    return Plan(name, launches, {}, {}, {}, Memory(0, 0, 0))


def mapped(file: int, nbytes: int, offset: int = 0) -> mmap.mmap:
    """Shared memory, its pages fetched at once rather than one by one when they are first touched."""
    return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), offset=offset)


def _flat(x: np.ndarray) -> memoryview:
    return memoryview(x.reshape(-1))  # type: ignore[arg-type]


def _keep(seen: list[Any], out: memoryview, place: int) -> None:
    seen.append(out[place])


def answer(talk: socket.socket, start: int, done: int, catalogue: Catalogue) -> None:
    """Answer until the other side closes. `start`, `done`: the pipes."""
    side, failed = Side(catalogue), list[str]()
    while (request := receive(talk)) is not None:
        data, files = request
        do, arguments = pickle.loads(data)
        try:
            if failed:
                result: dict[str, Any] = {"error": failed}
                failed = []
            else:
                result = {"ok": getattr(side, do)(*files, **arguments)}
        except Exception as error:  # the other side decides what a failure means
            result = {"error": _told(error)}
        finally:
            for file in files:
                os.close(file)
        send(talk, json.dumps(result).encode())
        if do == "arm" and "ok" in result:
            word = os.read(start, 1)
            try:
                side.run_armed()
            except Exception as error:  # told when the next request comes
                failed = _told(error)
            os.write(done, word)


def _told(error: Exception) -> list[str]:
    return [type(error).__name__, (error.what if isinstance(error, AlphaError) else str(error))[:2000]]


def send(talk: socket.socket, data: bytes, *files: int) -> None:
    """A message, with files."""
    if files:
        talk.sendmsg([HEAD.pack(len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        talk.sendall(data)
    else:
        talk.sendall(HEAD.pack(len(data)) + data)


def receive(talk: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next message and the files that came with it; None when the other side has closed."""
    head, files = b"", list[int]()
    while len(head) < HEAD.size:
        try:
            more, came, _, _ = socket.recv_fds(talk, HEAD.size - len(head), 3)
        except ConnectionResetError:
            return None
        if not more:
            return None
        head, files = head + more, files + came
    left, parts = HEAD.unpack(head)[0], []
    while left:
        part = talk.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts), files


def as_in_a_run(ends: Sequence[int], catalogue: Catalogue) -> None:
    """The life of a fork. What it is handed: a socket, the end of one pipe to read, of another to write."""
    talk, start, done = ends
    np.seterr(all="ignore")
    answer(socket.socket(fileno=talk), start, done, catalogue)


def every_kernel() -> Catalogue:
    """All kernels of the CPU, as a run loads them."""
    catalogue = Catalogue()
    fill(catalogue)
    return catalogue


def wait(talk: socket.socket) -> None:
    """Fork for every message: it brings what `as_in_a_run` is handed. Answers the process id. When the other side closes, all forks are
    ended."""
    catalogue = every_kernel()
    table()
    OneLaunch(catalogue, 1).close()  # it finds libraries, once per process
    gc.collect()
    gc.freeze()
    forks: set[int] = set()
    while (request := receive(talk)) is not None:
        ends = request[1]
        forks -= {pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0]}
        pid = os.fork()
        if pid == 0:
            talk.close()
            try:
                as_in_a_run(ends, catalogue)
            finally:
                os._exit(0)
        for end in ends:
            os.close(end)
        forks.add(pid)
        send(talk, json.dumps(pid).encode())
    for pid in forks:  # of none has the number been given anew: nobody else waits for them
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
