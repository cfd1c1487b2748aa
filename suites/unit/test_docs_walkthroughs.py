"""Each page that says how to add something, pasted into a copy of the repository and done to the end: surfaces, gates, training.

`made` and `edited` are the places that an addition touches. They are counted here, so a page that grows is seen.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import walkthrough


def rates(place: Path, run: str = "tiny") -> list[float]:
    """The learning rate of each step of a run."""
    with closing(sqlite3.connect(place / "runs" / run / "metrics.sqlite")) as db:
        return [lr for (lr,) in db.execute("SELECT lr FROM step_metrics ORDER BY step")]


def test_a_schedule(tmp_path: Path) -> None:
    place = walkthrough.copy(tmp_path)
    done = walkthrough.follow("docs/add-a-schedule.md", place)
    assert done.made == []
    assert done.edited == ["alpha/optim/schedules.py", "alpha/config.py", "docs/config.md", "alpha/optim/schedules.faults.toml"]
    seen = rates(place)
    steps = [b - a for a, b in pairwise(seen[2:])]  # behind the warm-up of two steps
    assert len(seen) == 20 and max(steps) < 0 and max(steps) - min(steps) < 1e-3 * abs(steps[0])  # a line down
