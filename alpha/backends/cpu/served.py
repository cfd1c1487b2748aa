"""Kernels run for another process: single launches through the executor of a run, over memory that the other process owns. Floor 4.

`wait` forks: its process has imported all that a run imports but the kernels. Each fork imports these, then answers until the other
side closes. So a fork is as cheap as its imports, and knows of the other process what a launch says: types, attributes, places, workers.

A request is its length (8 bytes) and a pickle of (name, arguments), with a file of shared memory beside it where one is handed over. An
answer is its length and JSON, so that what answers cannot run code where it is read: {"ok": result} or {"error": [class, text]}.

    bind    number, component, workers, base, ins, outs, attrs [file of `base` bytes]: a Plan of one launch; its scratch is put behind
            `base` -> bytes of scratch
    call    number: run that Plan
    arm     calls: a Plan of many launches, of those that were bound; then watch the bell (below)
    seen    what the launches of the last armed Plan left, at the places that were asked for
    drop    numbers

The bell is shared memory that is handed over at the start: two words. The other side writes a number into the first, and the armed Plan
runs; then this side writes the same number into the second. That costs less than a message by a socket, and no sleep.
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
BELL = np.dtype(np.int64)
BELL_WORDS = 512

WATCHED = 200_000
"""Looks at the bell before the next request is waited for: some 10 ms."""

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

    def __init__(self, catalogue: Catalogue, bell: np.ndarray) -> None:
        self._catalogue, self._bell = catalogue, bell
        self._executors: dict[int, OneLaunch] = {}
        self._held: dict[int, OneLaunch] = {}
        self._armed: OneLaunch | None = None
        self._seen: list[Any] = []

    def bind(self, file: int | None, number: int, component: str, workers: int, base: int, ins: Sequence[Placed], outs: Sequence[Placed],
             attrs: Attrs) -> int:
        assert file is not None
        found = self._catalogue[component]
        need = scratch_bytes(found, [t for _, t in ins], attrs, workers)
        os.ftruncate(file, max(1, base + need))
        memory = np.frombuffer(mmap.mmap(file, max(1, base + need)), np.uint8)
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

    def call(self, file: int | None, number: int) -> None:
        self._held[number].enqueue((str(number),))

    def arm(self, file: int | None, calls: Sequence[Call]) -> None:
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
        """Until the bell rings, then the armed Plan; nothing if it does not ring for long."""
        assert self._armed is not None
        words, last = memoryview(self._bell), int(self._bell[1])
        for _ in range(WATCHED):
            if words[0] != last:
                self._armed.enqueue(("step",))
                words[1] = words[0]
                return

    def seen(self, file: int | None) -> list[float]:
        return self._seen

    def drop(self, file: int | None, numbers: Sequence[int]) -> None:
        for number in numbers:
            executor = self._held.pop(number, None)
            if executor is not None:
                executor.drop(str(number), f"act.{number}")


def _plan(name: str, *launches: Launch) -> Plan:
    return Plan(name, launches, {}, {}, {}, Memory(0, 0, 0))


def _flat(x: np.ndarray) -> memoryview:
    return memoryview(x.reshape(-1))


def _keep(seen: list[Any], out: memoryview, place: int) -> None:
    seen.append(out[place])


def answer(talk: socket.socket, catalogue: Catalogue, bell: np.ndarray) -> None:
    """Answer until the other side closes."""
    side = Side(catalogue, bell)
    failed: list[str] | None = None
    while (request := receive(talk)) is not None:
        data, file = request
        do, arguments = pickle.loads(data)
        try:
            if failed is not None:
                (name, text), failed = failed, None
                send(talk, json.dumps({"error": [name, text]}).encode())
                continue
            result = {"ok": getattr(side, do)(file, **arguments)}
        except Exception as error:  # the other side decides what a failure means
            result = {"error": _told(error)}
        finally:
            if file is not None:
                os.close(file)
        send(talk, json.dumps(result).encode())
        if do == "arm" and "ok" in result:
            try:
                side.run_armed()
            except Exception as error:
                failed = _told(error)
                bell[1] = bell[0]


def _told(error: Exception) -> list[str]:
    return [type(error).__name__, (error.what if isinstance(error, AlphaError) else str(error))[:2000]]


def send(talk: socket.socket, data: bytes, file: int | None = None) -> None:
    """A message, with a file."""
    if file is None:
        talk.sendall(HEAD.pack(len(data)) + data)
    else:
        talk.sendmsg([HEAD.pack(len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
        talk.sendall(data)


def receive(talk: socket.socket) -> tuple[bytes, int | None] | None:
    """The next message and the file that came with it; None when the other side has closed."""
    head, files = b"", list[int]()
    while len(head) < HEAD.size:
        try:
            more, came, _, _ = socket.recv_fds(talk, HEAD.size - len(head), 1)
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
    return b"".join(parts), files[0] if files else None


def shared(file: int) -> np.ndarray:
    """The bell in this file."""
    return np.frombuffer(mmap.mmap(file, BELL_WORDS * BELL.itemsize), BELL)


def as_in_a_run(talk: socket.socket, bell: int, catalogue: Catalogue) -> None:
    """The life of a fork."""
    np.seterr(all="ignore")
    answer(talk, catalogue, shared(bell))


def every_kernel() -> Catalogue:
    """All kernels of the CPU, as a run loads them."""
    catalogue = Catalogue()
    fill(catalogue)
    return catalogue


def wait(talk: socket.socket) -> None:
    """Fork for every two messages: the first brings a socket, the second the file of a bell. Answers the process id. When the other side
    closes, all forks are ended."""
    catalogue = every_kernel()
    table()
    OneLaunch(catalogue, 1).close()  # it finds libraries, once per process
    gc.collect()
    gc.freeze()
    forks: set[int] = set()
    while (first := receive(talk)) is not None and (second := receive(talk)) is not None:
        assert first[1] is not None and second[1] is not None
        forks -= {pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0]}
        pid = os.fork()
        if pid == 0:
            talk.close()
            try:
                as_in_a_run(socket.socket(fileno=first[1]), second[1], catalogue)
            finally:
                os._exit(0)
        os.close(first[1])
        os.close(second[1])
        forks.add(pid)
        send(talk, json.dumps(pid).encode())
    for pid in forks:  # of none has the number been given anew: nobody else waits for them
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
