"""Cases of the learning-rate schedules, for the optimizers that read them: every entry of SCHEDULES, found by looking."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from alpha.component import Measured
from alpha.errors import ConfigError
from alpha.gates.contracts.reference import refuses
from alpha.optim.schedules import SCHEDULES, ScheduleConfig, rates

Case = Callable[[np.random.Generator], Measured]

UNIT = 48
"""Steps that every fraction of a schedule's points divides."""


def _points(kind: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """The table at the points that the schedule's entry names, in its warm-up and in its length, against exact fractions."""
        worst, seen = 0.0, 0
        for warmup, span in ((0, UNIT), (8, UNIT), (1, 20 * UNIT), (int(rng.integers(2, 3000)), UNIT * int(rng.integers(2, 100)))):
            peak = 0.5 if warmup == 8 else float(10.0 ** rng.uniform(-5, -1))
            table = rates(ScheduleConfig(kind=kind, peak=peak, warmup=warmup, total=warmup + span, decay=span // 2, floor=0.25)).array()
            if len(table) != warmup + span + 1:
                return Measured(error=float("inf"), bound=1.0, note=f"{len(table)} entries for {warmup + span} steps")
            want = {i: Fraction(peak) * Fraction(i + 1, warmup) for i in range(warmup)}
            want |= {warmup + at * span // of: Fraction(peak) * Fraction(*share) for (at, of), share in SCHEDULES[kind].points}
            for step, value in want.items():
                ulp = 2.0 ** (np.frexp(float(value))[1] - 24)
                worst = max(worst, abs(float(Fraction(float(table[step])) - value)) / ulp)
            seen += len(want)
        return Measured(error=worst, bound=0.5 + 1e-6, cases=seen, note="ulps of float32; rounded once from float64")
    return check


def _named(rng: np.random.Generator) -> Measured:
    """A schedule names its first and its last point and one between; else its gate would see too little of it."""
    thin = [k for k, s in SCHEDULES.items() if len(s.points) < 3 or {(0, 1), (1, 1)} - {at for at, _ in s.points}]
    return Measured(error=float(len(thin)), bound=0.0, cases=len(SCHEDULES), note=f"points {thin or 'enough'}")


PARITY: list[tuple[str, Case]] = [*((f"schedule-{kind}", _points(kind)) for kind in SCHEDULES), ("schedule-points", _named)]

FAULTS: list[tuple[str, Case]] = [
    ("unknown-schedule", lambda rng: refuses(ConfigError, lambda: ScheduleConfig(kind="none", peak=1.0, warmup=0, total=1))),
    ("warmup-too-long", lambda rng: refuses(ConfigError, lambda: ScheduleConfig(kind="cosine", peak=1.0, warmup=9, total=9))),
    ("decay-too-long", lambda rng: refuses(ConfigError, lambda: ScheduleConfig(kind="wsd", peak=1.0, warmup=5, total=9, decay=5))),
]
