"""Judges: raw record in, verdict out. Pure functions; every comparison is written so that NaN fails, as which text and infinity are read
(cases.py). One judge for each sort of case; the gate table says which sorts a gate writes. Floor 3.

Tolerances live here and nowhere else. They are not digested: the merge gate runs these judges over every raw record, those of planted
faults included, so a judge loose enough to pass a recorded fault is found without running anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpha.registry.cases import CaseRecord, Contract, Exact, Refusal, Relative, Repeats, Share, Slope, Slowdown, Unknown
from alpha.registry.distance import LEFT, elsewhere
from alpha.registry.gates import GATES, cases_of, gate_of
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
    unpinned: cases without a pin; above_pin: cases faster than their pin explains, so that it is of slower code, or was lowered;
    elsewhere: NOT_RUN, which satisfies nobody, because the cores of ranks stand at another distance than where they were pinned.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    relative: str = NOT_RUN
    noisy: bool = False
    unpinned: tuple[str, ...] = ()
    above_pin: tuple[str, ...] = ()
    elsewhere: bool = False

    @property
    def satisfied(self) -> bool:
        """Whether the gate counts as passed for *usable*: PASS, a kind of machine without pins, or shares too noisy to judge that are no
        gross slowdown."""
        return self.verdict in (PASS, BASELINE) or (self.verdict == NOT_RUN and self.noisy)


def judge(record: Record, *, runs: int = 2, pin: Pin | None = None) -> Judgement:
    """The verdict of one record. `runs`: runs that the component's profile needs of a gate that repeats, all cases together
    (policy.required_runs); `pin`: what a record of the perf gate is held against (pins.py), never anything that the record says itself. Its
    hop may turn FAIL into NOT_RUN, and nothing into PASS (distance.py)."""
    unexecuted = _unexecuted(record)
    if unexecuted:
        return Judgement(NOT_RUN, (unexecuted,))
    if record.gate not in GATES:
        return Judgement(FAIL, (f"no judge for the gate {record.gate!r}",))
    gate, cases = gate_of(record.gate), cases_of(record)
    if gate.pinned:
        return _perf(cases, pin, elsewhere(record.environment, pin) if pin is not None else "")
    reasons = [f"{case.name}: {why}" for case in cases if (why := _why(case))]
    if gate.repeats:
        total = sum(case.runs for case in cases if isinstance(case, Repeats))
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


def _why(case: CaseRecord) -> str:
    """Why a case fails; empty when it passes."""
    why = _JUDGES[type(case)](case)
    return f"{why} ({case.note})" if why and case.note else why


def _unknown(case: Unknown) -> str:
    return f"unknown kind of case {case.came}"


def _contract(case: Contract) -> str:
    if not case.cases > 0:
        return f"{case.cases:g} cases ran inside it"
    if not case.bound >= 0:
        return f"the bound {case.bound:g} is no number"
    return "" if 0 <= case.error <= case.bound else f"error {case.error:g} above {case.bound:g}"


def _exact(case: Exact) -> str:
    return "" if case.error == 0 else f"error {case.error:g}, 0 needed (the result is exact)"


def _relative(case: Relative) -> str:
    if not (0 <= case.ratio <= RATIO):
        return f"error is {case.ratio:g} times the plain implementation's, at most {RATIO:g} allowed"
    if case.floor is not None and not case.floor > RATIO:
        return f"one precision lower gives {case.floor:g} times the plain error and would pass, or was not measured: the case has no power"
    return ""


def _slope(case: Slope) -> str:
    if not case.directions >= 1:
        return f"{case.directions:g} directions were tried"
    if not (0 <= case.bound <= GRADIENT_BOUND):
        return f"the bound {case.bound:g} is outside [0, {GRADIENT_BOUND:g}]"
    return "" if 0 <= case.error <= case.bound else f"error {case.error:g} above {case.bound:g}"


def _repeats(case: Repeats) -> str:
    if not case.runs >= 2:
        return f"{case.runs:g} runs cannot differ"
    if case.distinct != 1:
        return f"{case.distinct:g} distinct outputs in {case.runs:g} runs"
    return "" if case.digest else "no output was hashed"


def _refusal(case: Refusal) -> str:
    if case.bound != 0:
        return f"the bound of a fault is 0, came {case.bound:g}"
    return "" if case.error == 0 else "the fault was not handled"


_JUDGES: Mapping[type[CaseRecord], Callable[[Any], str]] = {
    Unknown: _unknown, Contract: _contract, Exact: _exact, Relative: _relative, Slope: _slope, Repeats: _repeats, Refusal: _refusal,
}
"""One judge for each sort of case that is judged by itself."""


def _perf(cases: Sequence[CaseRecord], pin: Pin | None, away: str) -> Judgement:
    """Absolute half: shares, and every case that is pinned. Relative half: slowdowns. `away`: see `_share`."""
    relative: list[str] = []
    verdicts: list[str] = []
    reasons: list[str] = []
    unpinned: list[str] = []
    above_pin: list[str] = []
    noisy = moved = False
    for case in cases:
        if isinstance(case, Slowdown):
            verdict, why = _slowdown(case)
            relative.append(verdict)
        elif isinstance(case, Share):
            line = pin.line(case.name) if pin is not None else None
            verdict, why = _share(case, line, away)
            verdicts.append(verdict)
            below = line is not None and not case.share >= line.least
            noisy |= verdict == NOT_RUN and not below
            moved |= verdict == NOT_RUN and below
            if line is None:
                unpinned.append(case.name)
            elif verdict in (PASS, NOT_RUN) and not case.share <= line.most:
                above_pin.append(f"{case.name}: {case.share:.3g} of the ceiling, pinned {line.middle:.3g}")
        else:
            verdicts.append(FAIL)
            why = _JUDGES[type(case)](case)
        if why:
            reasons.append(f"{case.name}: {why}" + (f" ({case.note})" if case.note else ""))
    if not verdicts:
        return Judgement(NOT_RUN, ("the absolute half did not run", *reasons), _worst(relative))
    gone = sorted(set(pin.shares) - {c.name for c in cases}) if pin is not None else []
    if gone:
        verdicts.append(NOT_RUN)
        reasons.append(f"pinned, but not measured: {', '.join(gone)}")
    verdict = _worst(verdicts)
    return Judgement(verdict, tuple(reasons), _worst(relative), noisy and not gone and not moved, tuple(unpinned), tuple(above_pin),
                     moved and not gone and verdict == NOT_RUN)


def _worst(verdicts: list[str]) -> str:
    return max(verdicts, key=_ORDER.index, default=NOT_RUN)


def _share(case: Share, line: Line | None, away: str = "") -> tuple[str, str]:
    """`away`: why a share may be below its line though the code is not slower; '' where nothing says so."""
    share = case.share
    if not case.times_ns or not all(t > 0 for t in case.times_ns):
        return FAIL, "no times, or times that are not positive"
    if not share > 0:
        return FAIL, f"the share of the ceiling is {share:g}"
    if not share <= PHYSICAL:
        return FAIL, f"{share:.3g} of the ceiling is faster than the machine can be: it was measured wrongly"
    if line is None:
        return BASELINE, ""
    if not share >= line.least:
        slow = f"{share:.3g} of the ceiling, pinned {line.middle:.3g}"
        if away and share >= LEFT * line.middle:
            return NOT_RUN, f"{away}: {slow}"
        return FAIL, f"{slow} and at least {line.least:.3g} needed"
    if not line.judged:
        return NOT_RUN, f"too noisy to judge: pinned shares spread by {line.spread:.1%}, which asks for a line {line.allowance:.0%} below"
    return PASS, ""


def _slowdown(case: Slowdown) -> tuple[str, str]:
    low, estimate, high = case.low, case.estimate, case.high
    if not low <= estimate <= high:
        return FAIL, "the interval of the slowdown is not one"
    if high < SLOWDOWN:
        return PASS, ""
    if low > 0 and estimate >= SLOWDOWN and case.reproduced:
        return FAIL, f"{estimate:.1%} slower ({low:.1%} to {high:.1%}), reproduced"
    return AMBIGUOUS, f"slowdown between {low:.1%} and {high:.1%} cannot be told from {SLOWDOWN:.0%}"
