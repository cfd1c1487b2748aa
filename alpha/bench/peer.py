"""The peers of a benchmark, seen from our side: a Python that has PyTorch, in a process of its own. Floor 8."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from alpha.profile.served import PATIENCE, Served, ServedError
from alpha.resources import ROOT
from alpha.train import forbidden

_SERVER = "import sys; sys.path.insert(0, sys.argv[1]); from alpha.bench.peer_process import main; main()"


SETTINGS = {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""Environment of the peer. torch.compile's cache of forward and backward knows a model by its code before SDPA has chosen its back end, and
the switches of variants.py are no part of its key: a variant could get what was compiled for another one."""


class Listed(Served):
    """A process whose failure is a line of a table, also where what started it wrote something else in the place of an answer."""

    def ask(self, do: str, *, patience: float = PATIENCE, meanwhile: Callable[[], object] | None = None, **arguments: Any) -> Any:
        """As Served's."""
        try:
            return super().ask(do, patience=patience, meanwhile=meanwhile, **arguments)
        except ValueError as error:
            raise ServedError(f"{self.name} gave no answer to {do!r}", came=f"something else on its output: {error}") from error


class Peer:
    """PyTorch of one Python, on 'cpu' or 'cuda'. `why`: why it is not there, else ''. Use as a context manager.

    In a process of its own on the GPU too: the gate that no forbidden library is mapped beside our kernels holds here as well, a peer that
    dies takes nothing with it, and its Python need not be ours. Contexts of two processes never run at the same moment, since blocks
    alternate, and each block begins with fills that are not timed.
    """

    def __init__(self, python: str, device: str, threads: int, *, command: list[str] | None = None) -> None:
        self.python, self._device, self._threads = python, device, threads
        self._command = command or [python, "-c", _SERVER, str(ROOT)]
        self.served: Served | None = None
        self.why, self.version, self.on = "", "", ""
        self.start()

    def start(self) -> None:
        """Start the process, a fresh one if there is one: after a failure that one may have lost its device."""
        self.close()
        forbidden.starts_peer()
        try:
            self.served = Listed(f"torch in {self.python}", self._command, {**os.environ, **SETTINGS})
            forbidden.starts_peer(self.served.pid)
            found = self.served.ask("open", device=self._device, threads=self._threads)
            self.version, self.on = str(found["version"]), str(found["on"])
        except ServedError as error:
            missing = "No module named 'torch'" in str(error.came)
            self.why = f"not installed in {self.python}" if missing else f"{error.what}: {error.came}"
            self.close()

    def close(self) -> None:
        """End the process."""
        if self.served is not None:
            self.served.__exit__(None, None, None)
            self.served = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
