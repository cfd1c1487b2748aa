"""Cases of the measured rates of comparisons (alpha/profile/known.py): drawn tables, looked up again by hand. Floor 7."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs, words
from alpha.gates.contracts.profile.support import Case, folder
from alpha.profile.known import Known, known

Conditions = tuple[str, list[str], dict[str, list[str]]]


def _of(null: str, small: list[str], large: list[str], both: bool = True) -> Conditions:
    return null, [*small, *large] if both else [], {"2%": small, "5%": large}


NOISY = "twice the noise"
CONDITIONS: dict[str, list[Conditions]] = {
    "step": [_of("step", ["step 2 %"], ["step 5 %"], both=False)],
    "phase": [_of("phases", ["forward 2 %"], ["forward 5 %", "backward 5 %", "optimizer 5 %"]),
              _of(f"phases, {NOISY}", [f"forward 2 %, {NOISY}"], [f"forward 5 %, {NOISY}"])],
    "rank of 2": [_of("ranks, 2", ["rank 1 of 2 2 %"], ["rank 1 of 2 5 %"])],
    "rank": [_of("ranks, 4", ["rank 3 of 4 2 %"], ["rank 3 of 4 5 %"])],
    "op": [_of("ops", ["op of half the time 2 %"], ["op of half the time 5 %", "op of 3 % of the time 5 %"])],
}
"""Kind of row -> under which conditions its rates were measured, the quietest first: nothing differs; another row does; the row itself
is slower by 2 or 5 %."""


def _table(rng: np.random.Generator, procedure: dict[str, Any]) -> dict[str, Any]:
    rates = [[{"alarm_rate": float(rng.random()), "power": float(rng.random()), "half_width": float(rng.uniform(0.001, 0.1)),
               "trials": int(rng.integers(1, 999))} for _ in range(40)] for _ in range(2)]
    every = [c for conditions in CONDITIONS.values() for c in conditions]
    nulls, slowed = [c[0] for c in every], [name for c in every for names in c[2].values() for name in names]
    return {"procedure": {**procedure, "noise": {"more": 1}}, "null": dict(zip(nulls, rates[0])), "slowed": dict(zip(slowed, rates[1]))}


def looked_up(rng: np.random.Generator) -> Measured:
    """Rates of a row are those of the quietest conditions that were noisy enough: the worst of each; and how they are printed."""
    checks = []
    procedure = {"version": int(rng.integers(9)), "alpha": 0.05}
    with folder() as root:
        for trial in range(6):
            table, path = _table(rng, procedure), root / f"{trial}.json"
            path.write_text(json.dumps(table))
            for kind, conditions in CONDITIONS.items():
                for null, beside, power in conditions:
                    edge = 1.5 * table["null"][null]["half_width"]
                    for half in (edge * 0.999, edge, edge * 1.001):
                        want = Known(None, None, {}, 0, "not measured: noisier than the measured runs")
                        for null, beside, power in conditions:
                            row = table["null"][null]
                            if half <= 1.5 * row["half_width"]:
                                worst = [table["slowed"][n]["alarm_rate"] for n in beside]
                                least = {size: min(table["slowed"][n]["power"] for n in names) for size, names in power.items()}
                                want = Known(row["alarm_rate"], max(worst) if worst else None, least, row["trials"])
                                break
                        checks.append(differs(f"{kind} at {half}", known(kind, half, procedure, path), want))
        for other in ({**procedure, "alpha": 0.06}, {**procedure, "more": 1}):
            changed = known("op", 0.0, other, path)
            checks.append(differs("changed", changed, Known(None, None, {}, 0, "not measured since the procedure changed")))
        checks.append(differs("less is asked", known("op", 0.0, {"alpha": 0.05}, path), known("op", 0.0, procedure, path)))
        none = known("op", 0.0, procedure, root / "none.json")
        checks.append(differs("no table", none, Known(None, None, {}, 0, "not measured: no table ships here")))
    for rates, alarms, seen in (
            (Known(0.005, 0.0284, {"2%": 0.384, "5%": 0.98}, 9), "0.5%, 2.8% beside a slower row", "38% at 2%, 98% at 5%"),
            (Known(0.5, None, {}, 9, "no"), "50.0%", "no"), (Known(None, 0.1, {"2%": 1.0}, 0, "never"), "never", "100% at 2%"),
            (Known(0.0, 0.0, {"5%": 0.0}, 1), "0.0%, 0.0% beside a slower row", "0% at 5%")):
        checks.append(differs("printed", (rates.alarms_text(), rates.power_text()), (alarms, seen)))
    return all_hold(checks)


def damaged(rng: np.random.Generator) -> Measured:
    """A table that is torn, no table, or lacks what a row needs is refused by its path."""
    checks = []
    procedure = {"version": 1}
    with folder() as root:
        def tried(name: str, text: str) -> tuple[str, ...]:
            path = root / name
            path.write_text(text)
            return words(lambda: known("phase", 0.0, procedure, path))

        def want(name: str, came: str) -> tuple[str, ...]:
            return ("CorruptError", "the measured rates of comparisons are damaged", f"{Path(root, name)}: {came}",
                    "a table of all conditions", "restore it, or run suites/support/compare_runs.py")

        table = _table(rng, procedure)
        for part, key, field in (("null", "phases", ""), ("slowed", str(rng.choice(["forward 2 %", "backward 5 %", "optimizer 5 %"])), ""),
                                 ("null", "phases", "half_width"), ("null", "phases", "trials"), ("slowed", "backward 5 %", "power"),
                                 ("slowed", "forward 2 %", "alarm_rate")):
            cut = json.loads(json.dumps(table))
            gone = field or key
            del (cut[part][key] if field else cut[part])[gone]
            name = f"{part} {key} {field}"
            checks.append(differs(name, tried(name, json.dumps(cut)), want(name, f"KeyError: {gone!r}")))
        wordy = {**table, "null": {"phases": {**table["null"]["phases"], "alarm_rate": "x"}}}
        for name, text, kind in (("torn", json.dumps(table)[:-9], "JSONDecodeError"), ("list", "[1]", "TypeError"),
                                 ("word", '"abc"', "ValueError"), ("flat", '{"procedure": 1}', "AttributeError"),
                                 ("none", '{"procedure": {"version": 1}, "null": 3, "slowed": {}}', "TypeError"),
                                 ("text", json.dumps(wordy), "ValueError")):
            said = tried(name, text)
            error, what, came, *rest = want(name, f"{kind}: ")
            checks.append((f"{name}: {said}", said[:2] == (error, what) and said[2].startswith(came) and [*said[3:]] == rest))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("rates", looked_up),)
FAULTS: Sequence[tuple[str, Case]] = (("damaged rates", damaged),)
