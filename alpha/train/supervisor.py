"""Starts a job again that lost a rank: from its last good checkpoint, after a pause, a limited number of times. Floor 6."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from alpha.checkpoint import folders
from alpha.errors import AlphaError
from alpha.train.launch import Ended

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses before starts, doubled from one to the next."""

Start = Callable[[int, int, "Path | None", "int | None"], Ended]
"""(ranks, how often it was started before, run directory to go on in or None, checkpoint to go on from or None) -> how that ended. What it
is told under the name `path` is the run directory."""


def supervise(start: Start, ranks: int, *, restarts: int, fewest: int, resume: Path | None, at: int | None,
              report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> Ended:  # fmt: skip
    """Start a job of `ranks`, and again after each loss of a rank, at most `restarts` times.

    A job that twice got no further than one checkpoint goes on with half as many ranks, as long as those are `fewest` or more. What
    is no loss of a rank is not tried again, nor is a job of which every checkpoint is damaged. `resume`, `at`: what the first start goes
    on from, and the next one too where it was lost before it had taken the run back there; `report`: told why and how it goes on.
    """
    before: int | None = -1
    for number in range(restarts + 1):
        later = _behind(resume, at)
        ended = start(ranks, number, resume, at)
        if not ended.lost or number == restarts:
            break
        resume = Path(ended.told["path"]) if "path" in ended.told else resume
        reached = last_good(resume) if resume is not None else None
        if later & _behind(resume, at):  # it was lost before it took the run back to `at`: those are still to be set aside
            reached = at
        if reached is None and resume is not None and folders.steps(resume / "checkpoints"):
            report(f"not started again: every checkpoint in {resume / 'checkpoints'} is damaged")
            break
        if reached == before and ranks // 2 >= fewest:
            ranks //= 2
        before, at = reached, reached
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number)
        whence = "from the beginning" if reached is None else f"from the checkpoint of step {reached}"
        report(f"{ended.error}\n{ended.account}\nstart {number + 1} of {restarts}, {whence}, with {ranks} ranks, in {pause:g} s")
        sleep(pause)
    return ended


def _behind(run: Path | None, at: int | None) -> set[tuple[int, int]]:
    """(step, inode) of the checkpoints of a run behind step `at`: one that is saved anew is another folder."""
    if run is None or at is None:
        return set()
    folder = run / "checkpoints"
    return {(step, os.stat(folders.at(folder, step)).st_ino) for step in folders.steps(folder) if step > at}


def last_good(run: Path) -> int | None:
    """The last step of a run whose checkpoint is whole; None where it has none."""
    folder = run / "checkpoints"
    for step in reversed(folders.steps(folder)):
        try:
            folders.inspect(folders.at(folder, step))
            return step
        except AlphaError:
            continue  # torn or damaged: an earlier one may be whole
    return None
