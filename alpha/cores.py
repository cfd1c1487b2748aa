"""How many cores there are for this process. Floor 0."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores that this process may use: those that it is bound to where the system tells, else the machine's; 1 where nobody counted."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
