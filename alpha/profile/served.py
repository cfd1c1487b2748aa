"""Blocks that another process times: a peer's library, or the same code from another source tree. Floor 3.

One JSON object a line each way. The caller sends {"do": name, ...} and waits; the server answers {"ok": result} or {"error": text}. Only
one side computes at a time, so blocks of two processes alternate like blocks of one. The server imports what the caller must not hold: no
library of a peer is ever mapped in a process that has loaded a kernel of ours.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from types import TracebackType
from typing import Any

from alpha.errors import MachineError

PATIENCE = 300.0
"""Seconds that an answer may take: a compilation is the longest."""


class ServedError(MachineError):
    """The other process refused, failed, fell silent or died; `came` holds its words."""


class Served:
    """The caller's side. Use as a context manager: the process ends with the block."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it. ServedError if there is no such program."""
        self.name = name
        self._words = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words,
                                             env=dict(environment) if environment is not None else None)
        except OSError as error:
            self._words.close()
            raise ServedError(f"{name} cannot be started", came=f"{command[0]}: {error}", expected="a program that runs") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._rest = b""

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, do: str, *, patience: float = PATIENCE, meanwhile: Callable[[], object] | None = None, **arguments: Any) -> Any:
        """The result of one request. ServedError otherwise; after silence of `patience` seconds the process is ended. `meanwhile` is called
        every millisecond until the answer is there."""
        line = json.dumps({"do": do, **arguments}) + "\n"
        try:
            self._in.write(line.encode())
            self._in.flush()
        except (OSError, ValueError):  # ValueError: it was ended here
            raise self._dead(do) from None
        answer = json.loads(self._line(do, patience, meanwhile))
        if not isinstance(answer, dict) or not answer.keys() & {"ok", "error"}:
            raise ServedError(f"{self.name} gave no answer to {do!r}", came=f"something else on its output: {str(answer)[:80]}")
        if "error" in answer:
            raise ServedError(f"{self.name} failed at {do!r}", came=answer["error"])
        return answer["ok"]

    def _line(self, do: str, patience: float, meanwhile: Callable[[], object] | None) -> bytes:
        end = time.monotonic() + patience
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = max(0.0, end - time.monotonic())
                if not waiting.select(left if meanwhile is None else min(left, 1e-3)):
                    if meanwhile is not None and left > 0:
                        meanwhile()
                        continue
                    self.close()
                    raise ServedError(f"{self.name} gave no answer to {do!r} and was ended", came=f"silence for {patience:g} s")
                more = os.read(self._out.fileno(), 1 << 16)
                if not more:
                    raise self._dead(do)
                self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _dead(self, do: str) -> ServedError:
        code = self._process.wait()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        return ServedError(f"{self.name} ended at {do!r}", came=f"exit code {code}: {words[-1] if words else 'no words'}")

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._in, self._out):
            try:
                stream.close()
            except OSError:
                pass  # it died with a request half written

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        self._words.close()


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """The server's side: answer requests until the caller closes. What a library prints goes to the error stream, not between answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": handlers[request.pop("do")](**request)}
            except Exception as error:  # the caller decides what a failure means
                answer = {"error": f"{type(error).__name__}: {error}".strip()[:2000]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
