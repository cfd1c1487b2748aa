"""What jobs leave in /dev/shm, told apart from what others make and hold there meanwhile."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHM = Path("/dev/shm")
_NEWNS, _PRIVATE, _REC = 0x20000, 1 << 18, 1 << 14
"""Of unshare(2) and mount(2)."""


def apart() -> bool:
    """Give this process and all that it starts an empty /dev/shm of their own, for good; whether the system allowed it, which it does for
    root. Then every name there is theirs, and what others make and leave meanwhile is not seen."""
    libc = ctypes.CDLL(None)
    return not (libc.unshare(_NEWNS) or libc.mount(b"none", b"/", None, _REC | _PRIVATE, None)
                or libc.mount(b"tmpfs", os.fsencode(SHM), b"tmpfs", 0, None))


@contextmanager
def nothing_left(wait_s: float = 30.0) -> Iterator[None]:
    """AssertionError where a name appears within the block that stays `wait_s` seconds and that no living process has open or mapped."""
    before, until = set(os.listdir(SHM)), 0.0
    yield
    while found := set(os.listdir(SHM)) - before - _held():
        until = until or time.monotonic() + wait_s
        assert time.monotonic() < until, f"something stays behind in {SHM}: {sorted(found)}"
        time.sleep(0.2)


def _held() -> set[str]:
    """Names in SHM under which some process of this user holds a file."""
    paths: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            paths.update(line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if str(SHM) in line)
            paths.update(os.readlink(fd) for fd in (process / "fd").iterdir())
    return {Path(path).relative_to(SHM).parts[0] for path in paths if path.startswith(f"{SHM}/")}
