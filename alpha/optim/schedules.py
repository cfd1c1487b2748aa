"""Learning-rate schedules: each is one function of a step, in float64, and one entry of SCHEDULES. Floor 5.

A run's schedule becomes a table when its Program is built (`rates`): entry i is the rate of the update that i finished updates precede,
rounded once to float32. The device reads the entry of its step counter (alpha/ops/learning_rate.py), so a schedule has no device code.

A new schedule: its function and its entry here, its name and the keys of [optim] that it alone reads in alpha/config.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from math import cos, pi

from alpha.errors import ConfigError
from alpha.types import Table


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the steps. `kind`: a name of SCHEDULES; `peak`: highest rate; `warmup`, `total`, `decay`: steps, `decay` those of
    the fall at the end; `floor`: rate at the end as a share of the peak. ConfigError for an unknown kind or numbers that do not fit."""

    kind: str
    peak: float
    warmup: int
    total: int
    decay: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ConfigError("unknown schedule", came=self.kind, expected=", ".join(SCHEDULES), do="set [optim] schedule")
        if not (self.peak >= 0 and 0 <= self.warmup < self.total and 0 <= self.decay <= self.total - self.warmup and 0 <= self.floor <= 1):
            raise ConfigError("a schedule's numbers do not fit", came=self, do="change [optim] lr, warmup, decay or floor",
                              expected="peak >= 0, 0 <= warmup < total, decay after the warm-up, floor from 0 to 1")


@dataclass(frozen=True)
class Schedule:
    """`share(step, config)`: share of the peak at a step from the end of the warm-up to the last one. `points`: (part of the way from the
    end of the warm-up to the last step, share) as fractions (n, d), with `floor` a quarter and `decay` half of that way: what its gate
    holds the table against, worked out by hand."""

    share: Callable[[int, ScheduleConfig], float]
    points: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def cosine(step: int, c: ScheduleConfig) -> float:
    """Half a cosine down to the floor. Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5 without restarts."""
    x = (step - c.warmup) / (c.total - c.warmup)
    return c.floor + (1 - c.floor) * 0.5 * (1 + cos(pi * x))


def wsd(step: int, c: ScheduleConfig) -> float:
    """Stable, then a line down to the floor over the last `decay` steps. Hu et al. 2024 (arXiv:2404.06395), section 4.1."""
    x = max((step - (c.total - c.decay)) / max(c.decay, 1), 0.0)
    return 1 - (1 - c.floor) * x


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule(cosine, (((0, 1), (1, 1)), ((1, 3), (13, 16)), ((1, 2), (5, 8)), ((2, 3), (7, 16)), ((1, 1), (1, 4)))),
    "wsd": Schedule(wsd, (((0, 1), (1, 1)), ((1, 2), (1, 1)), ((2, 3), (3, 4)), ((3, 4), (5, 8)), ((1, 1), (1, 4)))),
}
"""Name -> schedule: what `optim.schedule` may be."""


def rates(c: ScheduleConfig) -> Table:
    """The rate at steps 0 to `total`: a line up to the peak over the warm-up, whose first step has peak / warmup, then the schedule's.
    4 bytes a step."""
    share = SCHEDULES[c.kind].share
    rising = (c.peak * (step + 1) / c.warmup for step in range(c.warmup))
    return Table.of(chain(rising, (c.peak * share(step, c) for step in range(c.warmup, c.total + 1))))
