"""What is known of a comparison's verdicts: how often they accuse an innocent row, and what they see, as measured. Floor 3.

suites/support/compare_runs.py measures both on made-up runs whose truth is known and writes baselines/perf/compare.json. Here the figures
that belong to a row are looked up, so that no verdict stands without them. Where a row is noisier than the runs they were measured on, or
the procedure was changed since, they are said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from alpha.errors import CorruptError
from alpha.resources import ROOT

PATH = ROOT / "baselines" / "perf" / "compare.json"

NOISIER = 1.5
"""A row whose interval is so many times as wide as in the measured runs is noisier than they."""


@dataclass(frozen=True)
class Conditions:
    """Names of conditions in the table. `null`: nothing differs; `beside`: one other row is slower, by 2 or 5 %; `power`: slowdown -> the
    row itself is slower by that much."""

    null: str
    beside: tuple[str, ...]
    power: Mapping[float, tuple[str, ...]]


_PHASE = Conditions("phases", ("forward 2 %", "forward 5 %", "backward 5 %", "optimizer 5 %"),
                    {0.02: ("forward 2 %",), 0.05: ("forward 5 %", "backward 5 %", "optimizer 5 %")})  # fmt: skip
KINDS: dict[str, tuple[Conditions, ...]] = {
    "step": (Conditions("step", (), {0.02: ("step 2 %",), 0.05: ("step 5 %",)}),),
    "phase": (_PHASE, Conditions("phases, twice the noise", ("forward 2 %, twice the noise", "forward 5 %, twice the noise"),
                                 {0.02: ("forward 2 %, twice the noise",), 0.05: ("forward 5 %, twice the noise",)})),
    "rank of 2": (Conditions("ranks, 2", ("rank 1 of 2 2 %", "rank 1 of 2 5 %"),
                             {0.02: ("rank 1 of 2 2 %",), 0.05: ("rank 1 of 2 5 %",)}),),
    "rank": (Conditions("ranks, 4", ("rank 3 of 4 2 %", "rank 3 of 4 5 %"), {0.02: ("rank 3 of 4 2 %",), 0.05: ("rank 3 of 4 5 %",)}),),
    "op": (Conditions("ops", ("op of half the time 2 %", "op of half the time 5 %", "op of 3 % of the time 5 %"),
                      {0.02: ("op of half the time 2 %",), 0.05: ("op of half the time 5 %", "op of 3 % of the time 5 %")}),),
}  # fmt: skip
"""Kind of row -> its conditions, the quietest first. 'rank of 2': a rank that has one other beside it."""


@dataclass(frozen=True)
class Known:
    """Measured rates of one kind of row; None: not measured under such noise. `false_alarm`: share of comparisons in which a row of this
    kind is named though nothing differs; `beside`: though only another row differs, at worst; `power`: slowdown -> share in which it is
    named SLOWER, the worst of the conditions; `trials`: comparisons behind each rate."""

    false_alarm: float | None
    beside: float | None
    power: Mapping[str, float]
    trials: int
    why: str = ""

    def alarms_text(self) -> str:
        """Such as '0.5 %, 2.8 % beside a slower row'."""
        if self.false_alarm is None:
            return self.why
        return f"{self.false_alarm:.1%}" + (f", {self.beside:.1%} beside a slower row" if self.beside is not None else "")

    def power_text(self) -> str:
        """Such as '38 % at 2 %, 98 % at 5 %'."""
        return ", ".join(f"{rate:.0%} at {size}" for size, rate in self.power.items()) or self.why


def known(kind: str, half_width: float, procedure: Mapping[str, Any], path: Path = PATH) -> Known:
    """The rates of a row of `kind` (of KINDS) whose interval reaches `half_width` to either side. `procedure`: today's constants, which
    must be those that the table was measured with. CorruptError if the table is damaged."""
    table = _load(path)
    if table is None:
        return Known(None, None, {}, 0, "not measured: no table ships here")
    try:
        if {k: table["procedure"].get(k) for k in procedure} != dict(procedure):
            return Known(None, None, {}, 0, "not measured since the procedure changed")
        rows = {**table["null"], **table["slowed"]}
        for c in KINDS[kind]:
            null = rows[c.null]
            if half_width <= NOISIER * null["half_width"]:
                power = {f"{size:.0%}": float(min(rows[n]["power"] for n in names)) for size, names in c.power.items()}
                beside = max((float(rows[n]["alarm_rate"]) for n in c.beside), default=None)
                return Known(float(null["alarm_rate"]), beside, power, int(null["trials"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    return Known(None, None, {}, 0, "not measured: noisier than the measured runs")


@cache
def _load(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CorruptError:
    return CorruptError("the measured rates of comparisons are damaged", came=f"{path}: {type(error).__name__}: {error}",
                        expected="a table of all conditions", do="restore it, or run suites/support/compare_runs.py")  # fmt: skip
