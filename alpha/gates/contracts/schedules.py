"""Cases of the learning-rate schedules: every entry of SCHEDULES, found by looking."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import ConfigError
from alpha.gates.contracts.reference import hash_of, in_new_process, refuses, yes
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


def _enough(kind: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """The entry names the first point, the last one and one between; else its gate would see too little of it."""
        at = {point for point, _ in SCHEDULES[kind].points}
        return yes(len(at) >= 3 and {(0, 1), (1, 1)} <= at, f"points at {sorted(at)}")
    return check


def table_hash(kind: str, seed: int) -> str:
    """Hash of a table of numbers drawn by `seed`."""
    rng = np.random.default_rng(seed)
    warmup, span = int(rng.integers(0, 3000)), int(rng.integers(2, 9000))
    return hash_of(rates(ScheduleConfig(kind=kind, peak=float(rng.random()), warmup=warmup, total=warmup + span, decay=span // 2,
                                        floor=float(rng.random()))).array())


def _same_elsewhere(kind: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """A new process makes the same bits."""
        seed = int(rng.integers(1 << 30))
        here = table_hash(kind, seed)
        there = in_new_process(f"table_hash({kind!r}, {seed})", "alpha.gates.contracts.schedules")
        return Measured(error=float(there != here), bound=0.0, digest=here)
    return check


BEYOND = (("peak", -1e-9), ("warmup", -1), ("decay", -1), ("floor", -1e-9), ("floor", 1 + 1e-9), ("total", 0))
"""Numbers of a schedule one step beyond what fits."""


def _refused(kind: str, **numbers: Any) -> Case:
    given: dict[str, Any] = {"peak": 1.0, "warmup": 5, "total": 9, **numbers}
    return lambda rng: refuses(ConfigError, lambda: rates(ScheduleConfig(kind=kind, **given)))


def _cases(kind: str) -> dict[str, list[tuple[str, Case]]]:
    return {"parity": [("table", _points(kind)), ("points", _enough(kind))], "determinism": [("elsewhere", _same_elsewhere(kind))],
            "faults": [("warmup-too-long", _refused(kind, warmup=9)), ("decay-too-long", _refused(kind, decay=5)),
                       ("floor-above-peak", _refused(kind, floor=1.5)), ("peak-not-finite", _refused(kind, peak=float("nan"))),
                       ("unknown-kind", _refused(f"{kind} of nobody")),
                       *((f"{key}-{value}", _refused(kind, **{key: value})) for key, value in BEYOND)]}


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {f"schedule.{kind}": _cases(kind) for kind in SCHEDULES}
