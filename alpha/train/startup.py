"""What the time from a command to its first step went to. Floor 6."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_began_ns() -> int:
    """When this process was started, in nanoseconds of CLOCK_MONOTONIC, to a hundredth of a second: proc(5), field 22 of `stat`. Where
    there is no such file: now."""
    now = time.perf_counter_ns()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return now
    return now - max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))


class Startup:
    """Phases of a start, one behind the other without a gap. A process that forks ranks hands each the phases so far. Times: nanoseconds
    of CLOCK_MONOTONIC."""

    counted = False
    """Whether a session of this process has counted from the process's beginning: the next one does not."""

    def __init__(self) -> None:
        """The phase `command` began with the process, or begins now."""
        self._marks = [("command", time.perf_counter_ns() if Startup.counted else process_began_ns())]
        self._ended_ns: int | None = None
        Startup.counted = True

    def phase(self, name: str) -> None:
        """The phase before ends, `name` begins."""
        self._marks.append((name, time.perf_counter_ns()))

    def end(self) -> None:
        """The last phase ends."""
        self._ended_ns = time.perf_counter_ns()

    def seconds(self) -> dict[str, float]:
        """Of each phase, in their order; of one that came twice the sum."""
        ends = [at for _, at in self._marks[1:]] + [time.perf_counter_ns() if self._ended_ns is None else self._ended_ns]
        found: dict[str, float] = {}
        for (name, began), ended in zip(self._marks, ends):
            found[name] = found.get(name, 0.0) + (ended - began) * 1e-9
        return found

    def text(self) -> str:
        """'12.3 s from the command: command 0.9, text 1.2, ...'."""
        each = self.seconds()
        return f"{sum(each.values()):.1f} s from the command: {', '.join(f'{name} {s:.1f}' for name, s in each.items())}"
