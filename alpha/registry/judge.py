"""Judges: raw record in, verdict out. Pure functions; every comparison is written so that NaN, infinity and text fail. Floor 3.

Tolerances live here and nowhere else. They are not digested: the merge gate runs these judges over every raw record, those of planted
faults included, so a judge loose enough to pass a recorded fault is found without running anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from alpha.registry.pins import Line, Pin
from alpha.registry.record import Record

PASS, FAIL, AMBIGUOUS, NOT_RUN, BASELINE = "PASS", "FAIL", "AMBIGUOUS", "NOT_RUN", "BASELINE"

RATIO = 2.0
"""Parity: at most twice the error of the plainest implementation in the same precision; one precision lower must exceed it."""

GRADIENT_BOUND = 0.05
"""A derived gradient bound above this could not tell a wrong gradient from a right one, so it is refused."""

PHYSICAL = 1.0
"""Perf: the ceiling is measured in the same run on the same work; a larger share is impossible, so it was measured wrongly."""

SLOWDOWN = 0.02
"""Perf, relative half: the slowdown that must be excluded for PASS and reached for FAIL."""

_ORDER = (PASS, BASELINE, AMBIGUOUS, NOT_RUN, FAIL)
"""Of the cases of a perf record the worst verdict counts; one that is slow is FAIL, whatever could not be judged beside it."""


@dataclass(frozen=True)
class Judgement:
    """A verdict with the reasons for anything but PASS.

    Perf only. relative: the verdict of the relative half; noisy: NOT_RUN for the one reason that shares repeat too badly to be judged;
    unpinned: cases without a pin; outgrown: cases faster than their pin explains, so that it is of slower code, or was lowered.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    relative: str = NOT_RUN
    noisy: bool = False
    unpinned: tuple[str, ...] = ()
    outgrown: tuple[str, ...] = ()

    @property
    def satisfied(self) -> bool:
        """Whether the gate counts as passed for *usable*: PASS, a kind of machine without pins, or shares too noisy to judge that are no
        gross slowdown."""
        return self.verdict in (PASS, BASELINE) or (self.verdict == NOT_RUN and self.noisy)


def judge(record: Record, *, runs: int = 2, pin: Pin | None = None) -> Judgement:
    """The verdict of one record. `runs`: determinism runs that the component's kind needs, all cases together (policy.required_runs);
    `pin`: what a record of the perf gate is held against (pins.py), never anything that the record says itself."""
    unexecuted = _unexecuted(record)
    if unexecuted:
        return Judgement(NOT_RUN, (unexecuted,))
    if record.gate == "perf":
        return _perf(record, pin)
    if record.gate not in _CASE:
        return Judgement(FAIL, (f"no judge for the gate {record.gate!r}",))
    reasons = [f"{case['name']}: {why}" for case in record.cases if (why := _case(record.gate, case))]
    if record.gate == "determinism" and not any(_is_contract(c) for c in record.cases):
        total = sum(_number(c.get("runs")) for c in record.cases)
        if not total >= runs:
            reasons.append(f"{total:g} runs in total, {runs} needed")
    return Judgement(FAIL, tuple(reasons)) if reasons else Judgement(PASS)


def _unexecuted(record: Record) -> str:
    """Why the record does not hold what it declared; empty when it does."""
    names = [c.get("name") for c in record.cases]
    if not isinstance(record.declared, int) or isinstance(record.declared, bool) or record.declared < 1:
        return f"{record.declared!r} cases were declared: nothing was to run"
    if len(names) != record.declared:
        return f"{len(names)} cases ran of {record.declared} declared"
    if not all(isinstance(n, str) and n for n in names):
        return "a case has no name"
    doubles = sorted({str(n) for n in names if names.count(n) > 1})
    return f"cases ran under one name: {', '.join(doubles)}" if doubles else ""


def _number(value: Any) -> float:
    """A finite number as float; NaN for everything else (text, None, booleans, infinities), so that comparisons fail."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def _is_contract(case: Mapping[str, Any]) -> bool:
    return case.get("kind") == "contract"


def _case(gate: str, case: Mapping[str, Any]) -> str:
    """Why a case fails; empty when it passes."""
    return _contract(case) if _is_contract(case) else _CASE[gate](case)


def _contract(case: Mapping[str, Any]) -> str:
    error, bound, count = _number(case.get("error")), _number(case.get("bound")), _number(case.get("cases"))
    if not count > 0:
        return f"{case.get('cases')!r} cases ran inside it"
    if not bound >= 0:
        return f"the bound {case.get('bound')!r} is no number"
    if not (0 <= error <= bound):
        return f"error {case.get('error')!r} above {bound:g}" + (f" ({case['note']})" if case.get("note") else "")
    return ""


def _parity(case: Mapping[str, Any]) -> str:
    if case.get("kind") == "exact":
        return "" if _number(case.get("error")) == 0 else f"error {case.get('error')!r}, 0 needed (the result is exact)"
    if case.get("kind") != "relative":
        return f"unknown kind of case {case.get('kind')!r}"
    if not (0 <= _number(case.get("ratio")) <= RATIO):
        return f"error is {case.get('ratio')!r} times the plain implementation's, at most {RATIO:g} allowed"
    if "floor" not in case:
        return "the precision floor was not measured"
    floor = case["floor"]
    if floor is not None and floor not in ("inf", math.inf) and not _number(floor) > RATIO:
        return f"one precision lower gives {floor!r} times the plain error and would pass: the case has no power"
    return ""


def _gradient(case: Mapping[str, Any]) -> str:
    error, bound = _number(case.get("error")), _number(case.get("bound"))
    if not _number(case.get("directions")) >= 1:
        return f"{case.get('directions')!r} directions were tried"
    if not (0 <= bound <= GRADIENT_BOUND):
        return f"the bound {case.get('bound')!r} is outside [0, {GRADIENT_BOUND:g}]"
    return "" if 0 <= error <= bound else f"error {case.get('error')!r} above {bound:g}"


def _determinism(case: Mapping[str, Any]) -> str:
    if not _number(case.get("runs")) >= 2:
        return f"{case.get('runs')!r} runs cannot differ"
    if _number(case.get("distinct")) != 1:
        return f"{case.get('distinct')!r} distinct outputs in {case['runs']} runs" + (f": {case['note']}" if case.get("note") else "")
    return "" if case.get("digest") else "no output was hashed"


def _faults(case: Mapping[str, Any]) -> str:
    error, bound = _number(case.get("error")), _number(case.get("bound"))
    if bound != 0:
        return f"the bound of a fault is 0, came {case.get('bound')!r}"
    return "" if error == 0 else "the fault was not handled" + (f": {case['note']}" if case.get("note") else "")


_CASE: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "parity": _parity, "gradient": _gradient, "determinism": _determinism, "faults": _faults,
}


def _perf(record: Record, pin: Pin | None) -> Judgement:
    """Absolute half: every case that is not of kind 'relative', and every one that is pinned. Relative half: those of that kind."""
    relative: list[str] = []
    verdicts: list[str] = []
    reasons: list[str] = []
    unpinned: list[str] = []
    outgrown: list[str] = []
    noisy = False
    for case in record.cases:
        if case.get("kind") == "relative":
            verdict, why = _relative(case)
            relative.append(verdict)
        else:
            line = pin.line(case["name"]) if pin is not None else None
            verdict, why = _absolute(case, line)
            verdicts.append(verdict)
            noisy |= verdict == NOT_RUN
            if line is None:
                unpinned.append(case["name"])
            elif verdict in (PASS, NOT_RUN) and not _number(case.get("share")) <= line.most:
                outgrown.append(f"{case['name']}: {case['share']:.3g} of the ceiling, pinned {line.middle:.3g}")
        if why:
            reasons.append(f"{case['name']}: {why}")
    if not verdicts:
        return Judgement(NOT_RUN, ("the absolute half did not run",), _worst(relative))
    gone = sorted(set(pin.shares) - {c["name"] for c in record.cases}) if pin is not None else []
    if gone:
        verdicts.append(NOT_RUN)
        reasons.append(f"pinned, but not measured: {', '.join(gone)}")
    return Judgement(_worst(verdicts), tuple(reasons), _worst(relative), noisy and not gone, tuple(unpinned), tuple(outgrown))


def _worst(verdicts: list[str]) -> str:
    return max(verdicts, key=_ORDER.index, default=NOT_RUN)


def _absolute(case: Mapping[str, Any], line: Line | None) -> tuple[str, str]:
    share, times = _number(case.get("share")), case.get("times_ns")
    if not isinstance(times, list) or not times or not all(_number(t) > 0 for t in times):
        return FAIL, "no times, or times that are not positive"
    if not share > 0:
        return FAIL, f"the share of the ceiling is {case.get('share')!r}"
    if not share <= PHYSICAL:
        return FAIL, f"{share:.3g} of the ceiling is faster than the machine can be: it was measured wrongly"
    if line is None:
        return BASELINE, ""
    if not share >= line.least:
        return FAIL, f"{share:.3g} of the ceiling, pinned {line.middle:.3g} and at least {line.least:.3g} needed"
    if not line.judged:
        return NOT_RUN, f"too noisy to judge: pinned shares spread by {line.spread:.1%}, which asks for a line {line.allowance:.0%} below"
    return PASS, ""


def _relative(case: Mapping[str, Any]) -> tuple[str, str]:
    """`low`, `estimate`, `high`: slowdown against the pinned code with its confidence interval; `reproduced`: in a fresh process."""
    low, estimate, high = (_number(case.get(k)) for k in ("low", "estimate", "high"))
    if not low <= estimate <= high:
        return FAIL, "the interval of the slowdown is not one"
    if high < SLOWDOWN:
        return PASS, ""
    if low > 0 and estimate >= SLOWDOWN and case.get("reproduced") is True:
        return FAIL, f"{estimate:.1%} slower ({low:.1%} to {high:.1%}), reproduced"
    return AMBIGUOUS, f"slowdown between {low:.1%} and {high:.1%} cannot be told from {SLOWDOWN:.0%}"
