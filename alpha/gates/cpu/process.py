"""The judge's side of a CPU kernel's process: calls over memory that is copied in and out. Floor 7.

Kernels run where no gate is loaded: a process that has imported what a run imports waits, and is forked for each gate
(alpha/backends/cpu/served.py). There a kernel is bound and called by the executor of a run. What it is judged by (contents, answers,
tolerances, statistics) is here, where its file is never loaded: what that declares is asked of another fork (declared.py).

The gates' engines see a component like any other (`Candidate.stand_in`). Its binder hands each bind and each call over. Before each call
operands and scratch are copied into memory that both processes share, and operands are copied back behind it: what the kernel writes at
any other time is not seen.

A kernel that is not the catalogue's own (a test has made it) is called in a fork of this process, which is all that differs.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import pickle
import signal
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import alpha
from alpha import errors
from alpha.backends.cpu.lib import ALIGN, Cpu
from alpha.component import Catalogue, Component
from alpha.errors import VerdictError
from alpha.graph.ir import attrs_text
from alpha.types import NUMPY, Attrs

PATIENCE = 60.0
"""Seconds that an answer may take; then the process is ended and the case fails."""

LOOKED_FOR = 64
"""After one call of so many, processes that the kernel has started are looked for; threads after each."""

LEAST = 1 << 18
"""Bytes of shared memory at first. It grows by doubling."""

REMEMBERED = 8
"""Launches that are kept though nobody holds them."""

STARTS = 256
"""Places, ALIGN bytes apart, at which the first operand of a launch may lie."""


def in_its_process(*arguments: Any) -> Any:
    """The implementation of a component of which only what its file declares is known here (declared.py)."""
    raise VerdictError("a kernel is called where it is judged")


def is_declared(component: Component) -> bool:
    """Whether the kernel's file is loaded in other processes alone."""
    return component.implementation is in_its_process


def _served() -> Any:
    """Found by name: evidence of a kernel does not bind to the executor's text, which has gates of its own."""
    return importlib.import_module(f"{alpha.__name__}.backends.cpu.served")


_FORKED: list[socket.socket] = []
"""A socket to the process that is forked, where there is one."""


def use(talk: socket.socket) -> None:
    """Fork the process at the other end of this socket from now on (served.wait)."""
    _FORKED[:] = [talk]
    talk.settimeout(PATIENCE)


def _fork(*files: int) -> int:
    """The process id of a new fork, which is handed these (served.as_in_a_run). MachineError where there is nothing to fork."""
    try:
        pid = int(_served().hand_over(_FORKED[0], *files)) if _FORKED else 0
    except OSError:
        pid = 0
    if not pid:
        raise errors.MachineError("the process that runs kernels ended", do="look at what it wrote to the error stream")
    return pid


Typed = tuple[tuple[int, ...], str]
"""An operand's shape and element type, as the other side takes it."""


class Fork:
    """A fork that answers requests, and a file in memory that it shares with this process."""

    def __init__(self) -> None:
        self._served, self._closed = _served(), ""
        self._file = _memory()
        self._talk, theirs = socket.socketpair()
        with theirs:
            self.pid = self._forked(theirs)
        self._talk.settimeout(PATIENCE)

    def _forked(self, theirs: socket.socket) -> int:
        return _fork(theirs.fileno(), self._file)

    @property
    def ended(self) -> bool:
        """Whether it answers no more."""
        return bool(self._closed)

    def ask(self, do: str, **arguments: Any) -> Any:
        """The result of a request; what the kernel raised is raised here under its name. VerdictError when its process is gone."""
        data = pickle.dumps((do, arguments))
        return self._asked(self._served.HEAD.pack(len(data)) + data)

    def _asked(self, request: bytes) -> Any:
        if self._closed:
            raise VerdictError(self._closed)
        head = self._served.HEAD
        try:
            self._talk.sendall(request)
            told = self._served.read(self._talk, head.size)
            length = head.unpack(told)[0] if len(told) == head.size else -1
            data = self._served.read(self._talk, length) if length > 0 else b""
        except TimeoutError:
            raise self._gone(f"the kernel did not come back within {PATIENCE:g} s") from None
        except OSError as error:
            raise self._gone(f"the kernel's process ended: {error.strerror}") from None
        if length == 0:
            return None
        try:
            found = json.loads(data)
            if "error" not in found:
                return found["ok"]
            name, text = map(str, found["error"])
        except (ValueError, TypeError, KeyError):  # it ended, or what answered is not what was started
            raise self._gone("the kernel's process ended") from None
        raise raised(name, text)

    def _gone(self, why: str) -> VerdictError:
        self.close()
        self._closed = why
        return VerdictError(why)

    def close(self) -> None:
        """End the process."""
        if self._closed:
            return
        self._closed = "the kernel's process has been ended"
        self._talk.close()
        os.close(self._file)
        with suppress(OSError):  # it had ended
            os.kill(self.pid, signal.SIGKILL)


class Candidate(Fork):
    """The process of one kernel. One that a test has made is called in a fork of this process."""

    def __init__(self, component: Component) -> None:
        self.component, self._own = component, not is_declared(component)
        self._next, self._calls, self._dropped, self._pools = 0, 0, list[int](), set[int]()
        self._rng = np.random.default_rng()
        self._recent: dict[object, Placed] = {}
        self.afresh = False
        """Whether each bind is one."""
        self.latest: Launched | None = None
        """What was bound last."""
        self._memory: np.ndarray = np.empty(0, np.uint8)
        super().__init__()
        self.ask("ready")
        self._threads = self._running()

    def _forked(self, theirs: socket.socket) -> int:
        if not self._own:
            return super()._forked(theirs)
        pid = os.fork()
        if pid == 0:
            try:
                self._talk.close()
                catalogue = Catalogue()
                catalogue.add(self.component)
                self._served.as_in_a_run(theirs.detach(), self._file, catalogue)
            finally:
                os._exit(0)
        return pid

    def _running(self) -> int:
        """Threads of its process, as the operating system counts them."""
        try:
            return os.stat(f"/proc/{self.pid}/task").st_nlink
        except OSError:
            return 0

    def stand_in(self, workers: int = 1) -> Component:
        """The component for the gates' engines: with so many workers its kernel is called in its process."""
        return replace(self.component, implementation=partial(_handed_over, self, workers))

    def scratch(self, ins: Sequence[Typed], outs: Sequence[Typed], attrs: Attrs, workers: int) -> int:
        """Bytes of scratch that a launch takes."""
        return int(self.ask("scratch", component=self.component.id, ins=ins, outs=outs, attrs=attrs, workers=workers))

    def bind(self, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], scratch: np.ndarray, types: Sequence[Typed],
             attrs: Attrs, workers: int) -> Launched:
        """The kernel bound to copies of these arrays, which lie as these do within ALIGN bytes, and apart or together as these do. Where
        one of the last (REMEMBERED) was like it, that one is called again, as a run calls what it has bound once: unless `afresh`."""
        arrays = [*ins, *outs, scratch]
        addresses = [x.__array_interface__["data"][0] for x in arrays]
        alike = (tuple(types), attrs_text(attrs), workers, scratch.nbytes,
                 tuple((a % ALIGN, addresses.index(a)) for a in addresses))
        placed = None if self.afresh else self._recent.get(alike)
        if placed is None:
            placed = self._recent[alike] = self._placed(arrays, addresses, types, len(ins), attrs, workers)
            if len(self._recent) > REMEMBERED:
                del self._recent[next(iter(self._recent))]
        self.latest = Launched(self, placed, [(x, np.ndarray(x.shape, x.dtype, self._memory, at)) for x, at in zip(arrays, placed.starts)])
        return self.latest

    def _placed(self, arrays: Sequence[np.ndarray], addresses: Sequence[int], types: Sequence[Typed], inputs: int,
                attrs: Attrs, workers: int) -> Placed:
        at = ALIGN * int(self._rng.integers(STARTS))
        lying: dict[int, int] = {}
        starts: list[int] = []
        for x, address in zip(arrays, addresses):
            if address not in lying or not x.nbytes:
                lying[address] = at + address % ALIGN
                at = -(-(lying[address] + x.nbytes) // ALIGN) * ALIGN
            starts.append(lying[address])
        self._reach(at)
        for x, start in zip(arrays, starts):
            np.ndarray(x.shape, x.dtype, self._memory, start)[...] = x
        self._next += 1
        number, where, scratch = self._next, list(zip(starts, types)), arrays[-1].nbytes
        self._pools.add(workers)
        self.ask("bind", number=number, component=self.component.id, workers=workers, ins=where[:inputs], outs=where[inputs:], attrs=attrs,
                 scratch=(starts[-1], scratch) if scratch else None, size=self._memory.nbytes,
                 drop=[self._dropped.pop() for _ in range(len(self._dropped))])
        placed = Placed(number, starts)
        weakref.finalize(placed, self._dropped.append, number)
        return placed

    def _reach(self, nbytes: int) -> None:
        """As much shared memory at least. What is bound already keeps its own view of it."""
        if nbytes > self._memory.nbytes:
            size = max(LEAST, 1 << (nbytes - 1).bit_length())
            os.ftruncate(self._file, size)
            self._memory = np.frombuffer(self._served.mapped(self._file, size), np.uint8)

    def call(self, number: int) -> None:
        """Call once. VerdictError where the kernel leaves anything running."""
        self._asked(self._served.HEAD.pack(-number))
        self.look()

    def look(self) -> None:
        """VerdictError where the kernel has left anything running."""
        self._calls += 1
        more, children = self._running() - self._threads - sum(n - 1 for n in self._pools), ""
        for thread in os.listdir(f"/proc/{self.pid}/task") if self._threads and self._calls % LOOKED_FOR == 1 else ():
            with suppress(OSError):  # it has ended
                children += Path(f"/proc/{self.pid}/task/{thread}/children").read_text()
        if more > 0 or children:
            raise VerdictError(f"the kernel left {max(0, more)} threads and {len(children.split())} processes running")

    def close(self) -> None:
        """End the process."""
        alive = not self._closed
        super().close()
        if alive and self._own:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


class Placed:
    """A launch that is bound in the kernel's process. `starts`: where its operands lie in the shared memory, its scratch last."""

    def __init__(self, number: int, starts: Sequence[int]) -> None:
        self.number, self.starts = number, starts


class Launched:
    """A kernel bound in its process: called, it is called there. `pairs`: each array with its copy; scratch last."""

    def __init__(self, candidate: Candidate, placed: Placed, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._candidate, self._placed, self._pairs = candidate, placed, pairs

    def __call__(self) -> None:
        self.over(lambda: self._candidate.call(self._placed.number))

    def many(self, keeps: Sequence[tuple[int, int]]) -> list[Any]:
        """Call as often as there are keeps, in one Plan. The elements, at (output, place), that each left."""
        kept: list[Any] = []
        self.over(lambda: kept.extend(self._candidate.ask("many", number=self._placed.number, keeps=list(keeps))))
        self._candidate.look()
        return kept

    def over(self, call: Callable[[], None]) -> None:
        """Call over the copies. What is there afterwards comes back, whether the call fails or not."""
        for x, shared in self._pairs:
            shared[...] = x
        try:
            call()
        finally:
            for x, shared in self._pairs[:-1]:
                x[...] = shared


def _handed_over(candidate: Candidate, workers: int, cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray],
                 attrs: Attrs) -> Callable[[], None]:
    """The binder of a stand-in. A dry bind, which has no scratch yet, is told how much there must be."""
    types = [(x.shape, _NAMES[x.dtype]) for x in (*ins, *outs)]
    if cpu._scratch is None:
        cpu.scratch((candidate.scratch(types[: len(ins)], types[len(ins) :], attrs, workers),), np.uint8)
        return _nothing
    return candidate.bind(ins, outs, cpu._scratch, types, attrs, workers)


_NAMES = {NUMPY[name]: name for name in NUMPY if name != "bf16"}
"""The element type that a plan has for an array: bf16 is held as f32."""


def _nothing() -> None:
    """A call that was bound without memory."""


def raised(name: str, text: str) -> Exception:
    """An exception of this name, as what handles it knows it."""
    known = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):
            return known(text)
    return type(name, (RuntimeError,), {})(text)


@contextmanager
def apart(component: Component) -> Iterator[Candidate]:
    """Within it the kernel has a process of its own, which no gate before it has used."""
    candidate = Candidate(component)
    try:
        yield candidate
    finally:
        candidate.close()


def _memory() -> int:
    """A file that lies in memory alone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("operands")
    with tempfile.TemporaryFile() as held:
        return os.dup(held.fileno())
