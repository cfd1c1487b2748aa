"""A failure in words that lead to it: element, what came, what was expected, tolerance. Floor 7."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from alpha.component import Component
from alpha.gates.subjects import Case, cases, crash, once, spec_of
from alpha.gates.tolerance import ALL, allowance
from alpha.ops.numerics import round_to
from alpha.registry.cases import CaseRecord, Exact, Relative, Share, Slope
from alpha.registry.gates import cases_of
from alpha.registry.judge import RATIO, Judgement, judge
from alpha.registry.record import Record

BEHAVIOURS = {
    "inputs unchanged": "it wrote into its inputs",
    "outputs final": "outputs changed after the call had ended",
    "later calls": "a later call on the same inputs gave other bits",
    "content": "outputs do not follow the contents of the inputs",
    "in place": "in place it gives other bits",
    "spread": "the samples cannot tell it from a constant",
    "many calls": "calls gave different bits",
    "one element": "outputs stay as they were when one element of an input changes",
    "late writes": "outputs changed after the call had ended",
    "left running": "it left threads or processes running behind a call",
}
"""Entry of the parity gate -> what it means that it counts more than zero."""


def difference(component: Component, case: Case, nonce: str) -> str:
    """The element of a case that is furthest beyond its tolerance, from one more call; '' where that call is right."""
    spec = spec_of(component)
    try:
        got = [y.copy() for y in once(component, case)]
    except Exception as error:
        return crash(error)
    allowed = allowance(spec, case, nonce, ALL)
    worst, words = 0.0, ""
    for name, y, want, naive, slack, t in zip(spec.outputs, got, allowed.want, allowed.naive, allowed.slack, case.out_types(spec)):
        is_float = want.dtype.kind == "f"
        target = round_to(want, t.dtype) if is_float else want
        tolerance = np.zeros(want.shape) if case.exact or allowed.single or not is_float else np.maximum(RATIO * naive, slack)
        with np.errstate(all="ignore"):
            off = np.abs(np.asarray(y, np.float64) - np.asarray(want if is_float and not case.exact else target, np.float64))
            right = (y == target) | (np.isnan(np.asarray(y, np.float64)) & np.isnan(np.asarray(want, np.float64))) | (off <= tolerance)
            excess = np.where(right, 0.0, np.where(np.isfinite(off), off / np.maximum(tolerance, 1e-300), np.inf))
        if excess.size and float(excess.max()) > worst:
            at = np.unravel_index(int(excess.argmax()), excess.shape)
            worst = float(excess.max())
            place = ",".join(str(int(i)) for i in at)
            words = f"{name}[{place}]: got {float(y[at]):.9g}, expected {float(want[at]):.9g}, tolerance {float(tolerance[at]):.3g}"
    return words


def told(component: Component, record: Record) -> Record:
    """A parity record whose failing cases say in their notes the element, what came, what was expected and the tolerance."""
    todo = {c.name: c for c in cases(component, record.nonce)}
    found = []
    for raw, case in zip(record.cases, cases_of(record)):
        alone = judge(replace(record, cases=[raw], declared=1))
        of = todo.get(case.worst or case.name)
        words = "" if alone.satisfied or case.note or of is None else difference(component, of, record.nonce)[:120]
        found.append({**raw, "note": words} if words else raw)
    return replace(record, cases=found)


def reasons(record: Record, judgement: Judgement) -> list[str]:
    """Why a record fails, a line a case; never a ratio to what nobody sees."""
    if judgement.satisfied:
        return []
    found = [f"{case.worst or case.name}: {why}" for case in cases_of(record) if (why := _why(record, case))]
    return found or [re.sub(r"\binf\b", "no number", r) for r in judgement.reasons]


def _why(record: Record, case: CaseRecord) -> str:
    raw = next(c for c in record.cases if c.get("name") == case.name)
    alone = judge(replace(record, cases=[raw], declared=1), runs=0)
    if alone.satisfied:
        return ""
    if isinstance(case, Exact) and (case.worst or case.name) in BEHAVIOURS:
        return case.note or BEHAVIOURS[case.worst or case.name]
    if isinstance(case, (Exact, Relative, Share)) and case.note:
        return case.note
    if isinstance(case, Exact) or (isinstance(case, Relative) and not case.ratio <= RATIO):
        return "wrong when the gate called it, right when the same call came again"
    if isinstance(case, Slope):
        error = f"off by {case.error:.3g} of the gradient's size" if math.isfinite(case.error) else "no number where the gradient is one"
        return f"{error}, tolerance {case.bound:.3g}" + (f" ({case.note})" if case.note else "")
    return re.sub(r"\binf\b", "no number", alone.reasons[0].removeprefix(f"{case.name}: ")) if alone.reasons else alone.verdict
