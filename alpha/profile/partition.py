"""How a step interval is shared out when launches run on a device while the host does other things. Floor 3.

The device comes first: what it was busy with counts as that phase, whatever the host did meanwhile. What the host did while the device
was idle is *exposed* and counts as the host's phase; what it did while the device was busy is *overlapped*. The device's remaining gaps
between its first and last launch are idle, those in which the host did nothing but wait for the device among them; the rest of the
interval is left unexplained. So nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpha.profile.intervals import apart

Piece = tuple[int, int, int]
"""(index of a phase, start ns, stop ns), both clocks aligned."""


def partition(began: int, ended: int, host: Sequence[Piece], device: Sequence[Piece], phases: int,
              idle: int, waiting: int = -1) -> tuple[list[int], list[int]]:
    """(exclusive ns, overlapped ns) of each of `phases` phases in the interval from `began` to `ended`. `idle`: index of that phase;
    `waiting`: of the one in which the host waits for the device.

    Host pieces do not overlap one another; device pieces are in order, and where the aligned clocks let one begin before the last
    has ended, it begins at that end. Pieces are cut at the interval's ends.
    """
    overlapped = [0] * phases
    phase_of, start_of, stop_of = np.array(device, np.int64).reshape(-1, 3).T
    begin, end = apart(np.clip(start_of, began, ended), np.clip(stop_of, began, ended))
    exclusive = np.bincount(phase_of, end - begin, phases).astype(np.int64).tolist()
    begin, end = begin[end > begin], end[end > begin]
    total = np.concatenate(([0], np.cumsum(end - begin)))

    def busy(t: int) -> int:
        """Device time before t."""
        k = int(np.searchsorted(begin, t, side="right"))
        return int(total[k]) - max(0, int(end[k - 1]) - t) if k else 0

    gaps = int((begin[1:] - end[:-1]).sum()) if len(begin) else 0
    for phase, start, stop in host:
        start, stop = max(start, began), min(stop, ended)
        if stop <= start:
            continue
        covered = busy(stop) - busy(start)
        overlapped[phase] += covered
        exclusive[phase] += stop - start - covered
        if len(begin):  # the part of it that lies in a gap of the device is no idle time
            a, b = max(start, int(begin[0])), min(stop, int(end[-1]))
            inside = max(0, b - a - (busy(b) - busy(a))) if b > a else 0
            if phase == waiting:
                exclusive[phase] -= inside
            else:
                gaps -= inside
    exclusive[idle] += gaps
    return exclusive, overlapped
