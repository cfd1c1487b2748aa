"""What the cases of ranks share: how what is wrong becomes a measured case, and a case that runs in every rank of a job. Floor 7."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.ranks import memory
from alpha.gates.contracts.ranks.collectives import SOUND, seed_of, sound
from alpha.gates.contracts.ranks.members import members

Case = Callable[[np.random.Generator], Measured]
Found = tuple[list[str], int]


def measured(wrong: Sequence[str], cases: int, digest: str = "") -> Measured:
    """Nothing may be wrong. `digest`: of what every run must give."""
    return replace(memory.measured(list(wrong), cases), digest=digest)


def hash_of(*texts: object) -> str:
    """A digest of what was said, for `measured`."""
    return hashlib.sha256("\0".join(map(str, texts)).encode()).hexdigest()


def job(function: Callable[..., Found], *sizes: int) -> Case:
    """`function(world, seed)` among so many ranks, one number after another."""
    def case(rng: np.random.Generator) -> Measured:
        seed = seed_of(rng)
        return sound([partial(members().run, function, size, seed, deadlines=SOUND) for size in sizes])
    return case
