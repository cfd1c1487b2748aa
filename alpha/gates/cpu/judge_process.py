"""The process that judges kernels of the CPU: it never loads their files. Floor 7.

Whoever runs gates has loaded all components, to know what they owe. So a gate of a kernel is handed over, as its id: to a process that has
loaded the gates alone, measures there with the kernel in a process of its own (process.py), judges, and keeps the record where it is told
to. It is started with the first gate and ends with the process that asks.

The process that is forked for kernels branches off from it before it loads gates (served.wait).
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import alpha
import alpha.backends.cpu.kernels as kernels_folder
from alpha.component import Component
from alpha.errors import AlphaError, MachineError, VerdictError
from alpha.gates import subjects
from alpha.gates.cpu import process
from alpha.gates.cpu.declared import Declarations
from alpha.registry.evidence import save
from alpha.registry.record import Record

_JUDGE = """
import os, socket, sys
talk = socket.socket(fileno=int(sys.argv[1]))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
import alpha.train.session
from alpha.backends.cpu.served import waiting
kernels, pid = waiting(talk.fileno())
from alpha.gates.cpu.judge_process import answer
from alpha.gates.run import measure
answer(talk, kernels, measure)
kernels.close()
os.waitpid(pid, 0)
"""
"""Read from the standard input, so that no command line has it."""

_HEAD = struct.Struct("<q")

_KEEP = "keep"
"""Asks for the last record to be kept; no component has this id."""


class JudgeProcess:
    """The judging process of this one."""

    def __init__(self) -> None:
        self._talk, theirs = socket.socketpair()
        paths = [str(Path(alpha.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        one = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                             stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                             env={**told, **one, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
        assert self._process.stdin is not None
        with self._process.stdin as program:
            program.write(_JUDGE.encode())

    def ask(self, *request: Any) -> Any:
        """What `measure` of run.py returns there. MachineError when the process has ended."""
        try:
            _send(self._talk, request)
            found = _received(self._talk)
        except (OSError, EOFError):
            raise MachineError("the process that judges ended", do="look at what it wrote to the error stream") from None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End it."""
        self._talk.close()
        self._process.wait()


_JUDGES: dict[int, JudgeProcess] = {}
"""By process: a fork of this one has none."""


def measure(component: Component, gate: str, nonce: str | None) -> Any:
    """The record and the verdict on it. What the record binds to is read here: the other process has no component to look at."""
    digests = subjects.component_digests(component, gate, package=subjects._package())
    if os.getpid() not in _JUDGES:
        _JUDGES[os.getpid()] = JudgeProcess()
    try:
        return _JUDGES[os.getpid()].ask(component.id, gate, nonce, digests)
    except MachineError:
        _leave()
        raise


def keep(record: Record, root: Path) -> bool:
    """Let the judging process keep this record under `root`, as it made it, whatever this one takes it for. False where the last one that
    it made is of another gate or nonce: this one was measured elsewhere, and nothing is kept."""
    ours = _JUDGES.get(os.getpid())
    return ours is not None and bool(ours.ask(_KEEP, record.component, record.gate, record.nonce, str(root.absolute())))


@atexit.register
def _leave() -> None:
    ours = _JUDGES.pop(os.getpid(), None)
    if ours is not None:
        ours.close()


def answer(talk: socket.socket, kernels: socket.socket, measure: Callable[..., Any]) -> None:
    """The life of the judging process. `kernels`: a socket to what is forked for kernels."""
    process.use(kernels)
    declarations = Declarations()
    made: Record | None = None
    while True:
        try:
            request = _received(talk)
        except (OSError, EOFError):
            break
        if request[0] == _KEEP:
            _send(talk, _kept(made, *request[1:]))
            continue
        component_id, gate, nonce, digests = request
        made = None
        subjects.component_digests = lambda *a, digests=digests, **k: dict(digests)
        try:
            found = measure(declarations.of(component_id), gate, nonce)
            if loaded := [m for m in sys.modules if m.startswith(f"{kernels_folder.__name__}.")]:
                raise VerdictError("the process that judges has loaded a kernel's file", came=", ".join(loaded),
                                   do="find what has imported it: kernels are called in processes of their own")
            made = found[0]
        except Exception as error:  # of whoever asks
            found = error
        _send(talk, found)
    declarations.close()


def _kept(made: Record | None, component_id: str, gate: str, nonce: str, root: str) -> bool | Exception:
    if made is None or (made.component, made.gate, made.nonce) != (component_id, gate, nonce):
        return False
    try:
        save([made], Path(root))
    except AlphaError as error:  # of whoever asks
        return error
    return True


def _send(talk: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    talk.sendall(_HEAD.pack(len(data)) + data)


def _received(talk: socket.socket) -> Any:
    """EOFError when the other side has closed."""
    return pickle.loads(_read(talk, _HEAD.unpack(_read(talk, _HEAD.size))[0]))


def _read(talk: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        part = talk.recv(nbytes - len(found))
        if not part:
            raise EOFError
        found += part
    return found
