"""What the cases of this room share: a clock that moves when it is told to, a second process, a folder. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.reference import in_new_process

Case = Callable[[np.random.Generator], Measured]


class Clock:
    """It moves when it is told to."""

    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def pass_(self, ns: int) -> int:
        """Move; when it was before."""
        before, self.now = self.now, self.now + ns
        return before


def elsewhere(name: str, here: Callable[[int], str], module: str) -> Case:
    """A case: the function of this name of a module says the same of a drawn seed in a new process."""
    def check(rng: np.random.Generator) -> Measured:
        seed = int(rng.integers(1 << 30))
        mine = here(seed)
        there = in_new_process(f"{name}({seed})", module)
        return Measured(float(there != mine), 0.0, 1, mine, "" if there == mine else there[-100:])
    return check


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one case."""
    with TemporaryDirectory(prefix="alpha-profile-") as root:
        yield Path(root)
