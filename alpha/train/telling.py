"""What takes long without a step is told while it lasts: a checkpoint that a slow disk delivers. Floor 6."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
"""Seconds of silence before the first word, and between two."""

Told = Callable[[int, int], None]
"""(bytes that are there, bytes of all)."""


@contextmanager
def telling(what: str, say: Callable[[str], None], *, every: float = EVERY_S,
            clock: Callable[[], float] = time.monotonic) -> Iterator[Told]:  # fmt: skip
    """Within it `say` is called every so many seconds with how far `what` has come, also where nothing comes any more; nothing is said of
    what ends sooner. A thread says it, and does nothing else."""
    began, over, at = clock(), threading.Event(), (0, 0, clock())

    def told(done: int, total: int) -> None:
        nonlocal at
        at = done, total, clock()

    def watch() -> None:
        while not over.wait(every):
            (done, total, last), now = at, clock()
            silent = f"; nothing came for {now - last:.0f} s: the disk is slow, or does not answer" if now - last >= every else ""
            say(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB after {now - began:.0f} s, "
                f"{done / 1e6 / max(now - began, 1e-9):,.1f} MB/s{silent}")

    thread = threading.Thread(target=watch, name="telling", daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()
