"""Where the console scripts begin, and `python -m alpha`. Floor 10: imports nothing before Ctrl-C has an answer.

Importing what a command needs takes most of a second. Nothing has begun by then, so an interrupt ends the process on the spot, with 130 and
one word; later `exit_code` answers it. Where SIGINT is ignored (a script's background job), it stays so.

Python drops what is raised in a destructor or in a callback of C, an interrupt too. That one comes again, a moment later.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence

INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""

AGAIN = 0.02
"""Seconds after which an interrupt that Python dropped comes again."""


YOUNG = 20_000
"""Objects after which Python looks for cycles. Of what a command imports and reads nearly all stays: after each 700, as Python has it,
that takes two fifths of the time of digests."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `alpha`; returns its exit code."""

    def load() -> Callable[[Sequence[str] | None], int]:
        from alpha.cli import main as run

        return run

    return begin(load, argv)


def report(argv: Sequence[str] | None = None) -> int:
    """The console script `alpha-report`; returns its exit code."""

    def load() -> Callable[[Sequence[str] | None], int]:
        from alpha.report.command import main as run

        return run

    return begin(load, argv)


def begin(load: Callable[[], Callable[[Sequence[str] | None], int]], argv: Sequence[str] | None) -> int:
    """Run the command that `load` imports. Standard output takes any text: what it cannot encode is written as an escape."""
    gc.set_threshold(YOUNG)
    _stand_in()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    sys.unraisablehook = _dropped
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        run = load()
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        return run(argv)
    except KeyboardInterrupt:
        _leave()
    return INTERRUPTED


def _stand_in() -> None:
    """Standard streams that were closed by whoever started this lead nowhere: else the next file that is opened has their number, and gets
    what is written to them; and a rank that flushes them finds none."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _dropped(what: sys.UnraisableHookArgs) -> None:
    """Python's own answer to what nobody can catch, but for interrupts: from another thread, as one raised here would be dropped too."""
    if not isinstance(what.exc_value, KeyboardInterrupt):
        return sys.__unraisablehook__(what)
    import threading

    again = threading.Timer(AGAIN, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    again.daemon = True
    again.start()


def _leave(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
