"""What Linux tells of another process: what it does, and for how long the machine served it. Floor 4."""

from __future__ import annotations

import os
import time
from pathlib import Path

SAMPLE_NS = 20_000_000
"""How often a process is looked at: not more often than the kernel's ticks, at which it counts what runs."""
LATE_NS = 10 * SAMPLE_NS
"""What one look counts for at most."""
_NAMES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced", "Z": "dead"}


def process_state(pid: int) -> str:
    """What a process does, in the words of proc(5)."""
    letter = _letter(Path(f"/proc/{pid}"))
    return _NAMES.get(letter, letter)


class Served:
    """A clock of the time in which the machine served a process, as another one sees it who looks at it often.

    A limit on it holds whatever else the machine does. Of all threads it is the time of the one that was served least: it stands while
    that waits for a processor. It stands too where looks come late, for then the one who looks was not served, or the whole machine was
    held. A process that is stopped, sleeps or runs is served. Where the kernel has no schedstat, so is one that waits.
    """

    def __init__(self, pid: int) -> None:
        self.ns, self._pid = 0, pid
        self._began = self._then = time.monotonic_ns()
        self._threads = {path: (found, 0, 0) for path, found in _threads(pid).items()}
        """Of each: what schedstat said, for how long it waits by now that schedstat does not say yet, and its time."""

    def look(self) -> int:
        """Nanoseconds so far."""
        now = time.monotonic_ns()
        passed = now - self._then
        if passed < SAMPLE_NS:
            return self.ns
        threads = {}
        for path, found in _threads(self._pid).items():
            before, charged, ns = self._threads.get(path, (found, 0, self.ns))
            waited = 0
            if found != before:
                waited, charged = found[1] - before[1] - charged, 0
            elif _letter(path) == "R":  # it could run and did not; schedstat says so when it runs
                waited, charged = passed, charged + passed
            threads[path] = found, charged, ns + min(passed - waited, LATE_NS)
        self.ns = max(self.ns, min((ns for *_, ns in threads.values()), default=self.ns + min(passed, LATE_NS)))
        self._then, self._threads = now, threads
        return self.ns

    @property
    def lost(self) -> int:
        """Nanoseconds up to the last look that do not count."""
        return self._then - self._began - self.ns


def _threads(pid: int) -> dict[Path, tuple[int, int]]:
    """/proc/PID/task/TID of each thread of a process: nanoseconds that it has run, and that it waited for a processor until it last ran."""
    found = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return {}
    for name in threads:
        path = Path(f"/proc/{pid}/task/{name}")
        try:
            ran, waited, _ = (path / "schedstat").read_text().split()
        except OSError:  # the thread has ended, or the kernel has no schedstat
            continue
        found[path] = int(ran), int(waited)
    return found


def _letter(folder: Path) -> str:
    """The state of a process or thread."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
