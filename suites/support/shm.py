"""What jobs leave in /dev/shm, told apart from what others make and hold there meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHM = Path("/dev/shm")


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
