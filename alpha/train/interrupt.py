"""Signals that ask a run to end: it finishes its step and saves first. Floor 6."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

ONCE = (signal.SIGINT, signal.SIGTERM)
"""The second one of a kind acts as it did before: it ends the process at once. SIGHUP never does: a terminal that goes away often sends
two, one from the kernel and one from the shell."""

EXIT = 128
"""Exit code of a run that a signal ended: this plus the signal's number (POSIX shells): 129 SIGHUP, 130 SIGINT, 143 SIGTERM."""

_SAID = b"\nfinishing this step, then saving; once more to end at once\n"


class Interrupt:
    """A context manager that listens while a loop runs; asked by calling it. `number`: the first signal that came, 0 if none did.

    Where nothing is to be saved, before and after the loop, signals act as they always do. One that the process was started to ignore
    (nohup) stays ignored. `silent`: it says nothing on standard error; another rank does.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.number, self._silent = 0, silent
        self._before: dict[int, Any] = {}

    def __call__(self) -> int:
        return self.number

    def __enter__(self) -> Interrupt:
        for number in (*ONCE, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)
        self._before = {}

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number in ONCE:
            signal.signal(number, self._before[number])
        if self._silent:
            return
        try:
            os.write(2, _SAID)  # a print may be under way in this very thread
        except OSError:
            pass  # nobody is left to read it
