"""The judge's side of a CPU kernel's process: memory that the judge owns, calls, the clock. Floor 7.

Kernels run where no gate is loaded: a process that has imported what a run imports waits, and is forked for each gate
(alpha/backends/cpu/served.py). There a kernel is bound and called by the executor of a run. What it is judged by (contents, answers,
tolerances, clock, probes of the ceiling, statistics) is here, where it is never called.

A kernel that is not the catalogue's own (a test has made it) is called in a fork of this process, which is all that differs.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import alpha
from alpha import errors
from alpha.component import Catalogue, Component
from alpha.errors import VerdictError
from alpha.profile.noise import CLOCK
from alpha.types import NUMPY, TensorType

PATIENCE = 60.0
"""Seconds that an answer may take; then the process is ended and the case fails."""

LOOKED_FOR = 16
"""After one run of so many on the same operands, processes that the kernel has started are looked for; threads after each."""

ORDINARY = 1021
"""Elements of the block that outputs are filled with, again and again, where they are to look like results."""

_FORKS = """
import socket, sys
talk = socket.socket(fileno=int(sys.argv[1]))
sys.argv[:] = ["alpha", "train", "run.toml"]
import alpha.train.session
from alpha.backends.cpu.served import wait
wait(talk)
"""


def _served() -> Any:
    """Found by name: evidence of a kernel does not bind to the executor's text, which has gates of its own."""
    return importlib.import_module("alpha.backends.cpu.served")


class Forks:
    """The process that is forked: one for the life of this one. `talk`: a socket to it, where somebody has started it already."""

    def __init__(self, talk: socket.socket | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._talk = talk if talk is not None else self._started()

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        paths = [str(Path(alpha.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        one = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", _FORKS, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             env={**told, **one, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
        return ours

    def let_go(self) -> None:
        """Close this side's socket alone: in a fork of this process."""
        self._talk.close()

    def close(self) -> None:
        """End it."""
        self._talk.close()
        if self._process is not None:
            self._process.wait()

    def fork(self, *ends: int) -> int:
        """Fork; the fork is handed these (served.as_in_a_run). Its process id."""
        served = _served()
        served.send(self._talk, b"", *ends)
        self._talk.settimeout(PATIENCE)
        answer = served.receive(self._talk)
        if answer is None:
            raise errors.MachineError("the process that runs kernels ended", do="look at what it wrote to the error stream")
        return int(json.loads(answer[0]))


_FORKED: dict[int, Forks] = {}
"""By process: a fork of this one has none."""


def use(talk: socket.socket) -> None:
    """Fork the process at the other end of this socket from now on."""
    _FORKED[os.getpid()] = Forks(talk)


def _forks() -> Forks:
    if os.getpid() not in _FORKED:
        _FORKED[os.getpid()] = Forks()
    return _FORKED[os.getpid()]


def _of_the_catalogue(component: Component) -> bool:
    from alpha.train.catalogue import loadable_catalogue

    known = loadable_catalogue()
    return component.id in known and known[component.id].implementation is component.implementation


class Candidate:
    """The process of one kernel."""

    def __init__(self, component: Component) -> None:
        self.component, self._served = component, _served()
        self._next, self._dropped, self._pools, self._closed = 0, list[int](), set[int](), ""
        self._talk, theirs = socket.socketpair()
        start, self._start = os.pipe()
        self._done, done = os.pipe()
        ends = theirs.fileno(), start, done
        self._own = not _of_the_catalogue(component)
        try:
            self.pid = self._forked(ends) if self._own else _forks().fork(*ends)
        finally:
            theirs.close()
            os.close(start)
            os.close(done)
        self._talk.settimeout(PATIENCE)
        self.ask("ready")
        self._threads = len(self._tasks())

    def _tasks(self) -> list[str]:
        """Its threads, as the operating system counts them."""
        try:
            return os.listdir(f"/proc/{self.pid}/task")
        except OSError:
            return []

    def _forked(self, ends: tuple[int, int, int]) -> int:
        """A fork of this process, for a kernel that only lives here."""
        pid = os.fork()
        if pid == 0:
            try:
                for held in (self, *_RUNNING.values()):
                    held.let_go()
                for forks in _FORKED.values():
                    forks.let_go()
                catalogue = Catalogue()
                catalogue.add(self.component)
                self._served.as_in_a_run(ends, catalogue)
            finally:
                os._exit(0)
        return pid

    def let_go(self) -> None:
        """Close this side's socket alone: in a fork of this process."""
        self._talk.close()
        for end in (self._start, self._done):
            try:
                os.close(end)
            except OSError:
                pass  # closed before

    def ask(self, do: str, *files: int, **arguments: Any) -> Any:
        """The result of a request; what the kernel raised is raised here under its name. VerdictError when its process is gone."""
        if self._closed:
            raise VerdictError(self._closed)
        try:
            self._served.send(self._talk, pickle.dumps((do, arguments)), *files)
            answer = self._served.receive(self._talk)
        except TimeoutError:
            raise self._gone(f"the kernel did not come back within {PATIENCE:g} s") from None
        except OSError as error:
            raise self._gone(f"the kernel's process ended: {error.strerror}") from None
        if answer is None:
            raise self._gone("the kernel's process ended")
        found = json.loads(answer[0])
        if "error" in found:
            raise raised(*found["error"])
        return found["ok"]

    def _gone(self, why: str) -> VerdictError:
        self.close()
        self._closed = why
        return VerdictError(why)

    def bind(self, types: Sequence[TensorType], inputs: int, starts: Sequence[int], end: int, attrs: Any, workers: int) -> CpuBound:
        """Operands at these offsets of memory of their own, and the kernel bound to them."""
        base = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        file = _memory(max(base, 1))
        try:
            memory = self._served.mapped(file, max(base, 1))
            arrays: list[np.ndarray] = [np.ndarray(t.shape, NUMPY[t.dtype], memory, at) for t, at in zip(types, starts)]
            for x in arrays[:inputs]:
                x[...] = np.nan if x.dtype.kind == "f" else 0
            self._next += 1
            number, placed = self._next, list(zip(starts, types))
            self._pools.add(workers)
            need = self.ask("bind", file, number=number, component=self.component.id, workers=workers, base=base, ins=placed[:inputs],
                            outs=placed[inputs:], attrs=attrs, drop=[self._dropped.pop() for _ in range(len(self._dropped))])
            scratch = np.frombuffer(self._served.mapped(file, need, base), np.uint8) if need else np.empty(0, np.uint8)
        finally:
            os.close(file)
        bound = CpuBound(self, number, arrays[:inputs], arrays[inputs:], scratch)
        weakref.finalize(bound, self._dropped.append, number)
        return bound

    def left_running(self, whole: bool) -> str:
        """What the kernel has started beside the workers of its process, as the operating system counts it; '' where that is nothing.
        `whole`: processes as well, which costs more to find out."""
        threads, children = self._tasks(), ""
        for thread in threads if whole else ():
            with suppress(OSError):  # it has ended
                children += Path(f"/proc/{self.pid}/task/{thread}/children").read_text()
        more = len(threads) - self._threads - sum(n - 1 for n in self._pools)
        if more > 0 or children:
            return f"the kernel left {max(0, more)} threads and {len(children.split())} processes running"
        return ""

    @contextmanager
    def on_one_core(self, rng: np.random.Generator) -> Iterator[None]:
        """Within it this thread and the kernel's share one core, drawn: what one of them does is then the other's only wait, and a message
        takes 6 us where it may take 40 between two cores."""
        if not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        core = {int(rng.choice(sorted(before)))}
        try:
            os.sched_setaffinity(self.pid, core)
            os.sched_setaffinity(0, core)
            yield
        finally:
            os.sched_setaffinity(0, before)
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, before)

    def batch(self, calls: Sequence[Any]) -> int:
        """Nanoseconds from the order to run these calls as one Plan until its end is told, by this process's clock."""
        self.ask("arm", calls=list(calls))
        start = CLOCK()
        os.write(self._start, b"!")
        told = os.read(self._done, 1)
        took = CLOCK() - start
        if not told:
            raise self._gone("the kernel's process ended in a timed batch")
        return took

    def close(self) -> None:
        """End the process."""
        if self._closed:
            return
        self._closed = "the kernel's process has been ended"
        self.let_go()
        try:
            os.kill(self.pid, signal.SIGKILL)
            if self._own:
                os.waitpid(self.pid, 0)
        except OSError:
            pass  # it had ended

    @property
    def runs(self) -> bool:
        """Whether it can still be asked."""
        return not self._closed


def raised(name: str, text: str) -> Exception:
    """An exception of this name, as what handles it knows it."""
    known = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(text)
        except TypeError:
            pass
    return type(name, (RuntimeError,), {})(text)


@dataclass
class CpuBound:
    """A kernel bound to operands in memory that this process owns (subjects.Bound)."""

    candidate: Candidate
    number: int
    ins: list[np.ndarray]
    outs: list[np.ndarray]
    scratch: np.ndarray
    _runs: int = 0

    def fill(self, contents: Iterable[np.ndarray]) -> None:
        """Write contents into the input buffers."""
        for buffer, x in zip(self.ins, contents):
            buffer[...] = x

    def run(self, garbage: int | None = None, *, keep: int | None = None) -> None:
        """Poison outputs (but number `keep`) and scratch, then call once. Without a given byte outputs hold NaN at the first, third ...
        run and ordinary-looking numbers at the others, so that neither tells a kernel that nobody has computed yet. VerdictError where
        the kernel leaves anything running."""
        self._runs += 1
        poison = 0xFF if garbage is None else garbage
        for i, out in enumerate(self.outs):
            if i != keep:
                if garbage is None and self._runs % 2 == 0:
                    ordinary(out)
                else:
                    np.ndarray((out.nbytes,), np.uint8, out.data)[...] = poison if out.dtype != np.bool_ else 1
        self.scratch[...] = poison
        self.call()
        if left := self.candidate.left_running(self._runs % LOOKED_FOR == 1):
            raise VerdictError(left)

    def call(self) -> None:
        """Call once."""
        self.candidate.ask("call", number=self.number)


def ordinary(out: np.ndarray) -> None:
    """Fill an output with what looks like results."""
    block = _looks_like_results()
    out[...] = np.resize((block if out.dtype.kind == "f" else block > 0).astype(out.dtype), out.shape)


@cache
def _looks_like_results() -> np.ndarray:
    return np.random.default_rng(int.from_bytes(os.urandom(8), "little")).standard_normal(ORDINARY)


def _memory(nbytes: int) -> int:
    """A file that lies in memory alone."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("operands")
    else:
        with tempfile.TemporaryFile() as held:
            file = os.dup(held.fileno())
    os.ftruncate(file, nbytes)
    return file


_RUNNING: dict[int, Candidate] = {}
"""The one candidate whose process runs, by the process that runs it."""


def candidate(component: Component) -> Candidate:
    """The process of a kernel: that which runs, where it is this kernel's."""
    running = _RUNNING.get(os.getpid())
    if running is not None and running.component is component and running.runs:
        return running
    end()
    _RUNNING[os.getpid()] = Candidate(component)
    return _RUNNING[os.getpid()]


def end() -> None:
    """End the process that runs: the next call starts another."""
    running = _RUNNING.pop(os.getpid(), None)
    if running is not None:
        running.close()


def _leave() -> None:
    end()
    forks = _FORKED.pop(os.getpid(), None)
    if forks is not None:
        forks.close()


atexit.register(_leave)
