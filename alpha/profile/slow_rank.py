"""Which rank of one run holds up the others. Floor 3.

Ranks that meet in every step take equally long for it, so the step's time names nobody. What differs is a rank's *own* time: its step
less what it spent waiting in collectives. Its logarithm, less the median of those of the other ranks in the same block of steps
(noise.blocks), has lost the drift that all share. A rank is named SLOWER where the interval of that difference lies above 0, and the
estimate reaches noise.INTEREST in the whole run and in each half of it: what wanders by chance does not stay. The chance that any rank is
named although all are alike is noise.ALPHA at most, shared out over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpha.profile import noise
from alpha.profile.compare import FASTER, LEAST_STEPS, SAME, SLOWER, UNDECIDED
from alpha.profile.noise import Interval
from alpha.profile.phases import STEP_PHASES

OWN = tuple(name for name in STEP_PHASES if name != "comm")
"""Phases of a step in which a rank waits for nobody."""


@dataclass(frozen=True)
class Standing:
    """A rank beside the others of its run. own_ns: its typical own time a step; apart: by how much that is longer than the others'."""

    rank: int
    own_ns: float
    apart: Interval
    verdict: str
    reason: str = ""


def standings(ranks: Sequence[int], own: np.ndarray) -> list[Standing]:
    """own: f64[ranks, steps], ns of each rank's own time over the same steady steps. Nothing for one rank."""
    if len(ranks) < 2 or not own.size or not (own > 0).all():
        return []
    blocks = np.array([noise.blocks(np.log(x)) for x in own])
    alpha = noise.share(noise.ALPHA, family=len(ranks))
    found = []
    for i, rank in enumerate(ranks):
        difference = blocks[i] - np.median(np.delete(blocks, i, axis=0), axis=0)
        apart, half = _apart(difference, alpha), len(difference) // 2
        halves = [_apart(part, alpha).estimate for part in (difference[:half], difference[half:])]
        verdict, reason = _verdict(apart, halves), ""
        if own.shape[1] < LEAST_STEPS:
            verdict, reason = UNDECIDED, f"{own.shape[1]} steady steps, fewer than {LEAST_STEPS}"
        found.append(Standing(rank, float(np.median(own[i])), apart, verdict, reason))
    return found


def _apart(difference: np.ndarray, alpha: float) -> Interval:
    return noise.shift(np.zeros(len(difference)), difference, alpha)


def _verdict(apart: Interval, halves: Sequence[float]) -> str:
    line = noise.INTEREST
    if noise.slower(apart, line) and min(halves) >= line:
        return SLOWER
    if apart.high < 0 and apart.estimate <= -line and max(halves) <= -line:
        return FASTER
    return SAME if -line < apart.low and apart.high < line else UNDECIDED
