"""How long a gate may take. A hang becomes a failed case; what no signal reaches is ended, with all stacks. Floor 7."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FACTOR, LEAST = 20.0, 600.0
"""A gate may take so many times what the table of gates says, and at least so many seconds: cores may be shared with much else."""

AGAIN = 30.0
"""Seconds after which the alarm comes again, for Python drops what is raised in a destructor."""

GRACE = 120.0
"""Seconds from the first alarm to the end of the process, where the thread sits in a call that never returns, as drivers have."""


def patience(seconds: float) -> float:
    """How long a gate may take that should take `seconds`."""
    return max(LEAST, FACTOR * seconds)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TimeoutError in what runs here for more than `seconds`. Signals reach the main thread alone, so others have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"the gate did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
