"""Each line that a judge draws is where it is said to be: beside it a record is refused, and with a looser line the same record passes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from alpha.gates import audit
from alpha.gates.contracts.registry.common import make, parity_case
from alpha.registry import judge as judges
from alpha.registry import policy
from alpha.registry.judge import AMBIGUOUS, FAIL, PASS, Judgement, judge
from alpha.train.catalogue import catalogue

Case = dict[str, Any]


def slope(bound: float) -> Case:
    return {"name": "a", "error": 0.0, "bound": bound, "directions": 8}


def share(value: float) -> Case:
    return {"name": "a", "share": value, "times_ns": [1000]}


def slower(low: float, estimate: float, high: float) -> Case:
    return {"name": "a", "kind": "relative", "low": low, "estimate": estimate, "high": high, "reproduced": True}


def relative(found: Judgement) -> str:
    return found.relative


def absolute(found: Judgement) -> str:
    return PASS if found.satisfied else FAIL


LINES = [
    ("RATIO", 2.0, "parity", parity_case(ratio=2.0), parity_case(ratio=2.0001), absolute, 4.0),
    ("RATIO", 2.0, "parity", parity_case(floor=2.0001), parity_case(floor=2.0), absolute, 1.5),
    ("GRADIENT_BOUND", 0.05, "gradient", slope(0.05), slope(0.0501), absolute, 0.5),
    ("PHYSICAL", 1.0, "perf", share(1.0), share(1.0001), absolute, 1.5),
    ("SLOWDOWN", 0.02, "perf", slower(0.0, 0.01, 0.0199), slower(0.001, 0.0201, 0.03), relative, 0.05),
]


@pytest.mark.parametrize(("name", "value", "gate", "inside", "outside", "of", "looser"), LINES)
def test_lines(name: str, value: float, gate: str, inside: Case, outside: Case, of: Any, looser: float) -> None:
    assert getattr(judges, name) == value
    assert of(judge(make(gate, [inside]))) == PASS and of(judge(make(gate, [outside]))) == FAIL
    with mock.patch.object(judges, name, looser):
        assert of(judge(make(gate, [outside]))) == PASS, f"{name} does not decide"


def test_a_slowdown_that_is_not_reproduced_or_excluded_is_ambiguous() -> None:
    for case in (slower(0.0, 0.03, 0.05), slower(0.001, 0.0199, 0.03), {**slower(0.01, 0.03, 0.05), "reproduced": False}):
        assert judge(make("perf", [case])).relative == AMBIGUOUS, case


@pytest.mark.parametrize(("component", "runs"), [("gelu.f32.cpu", 100), ("gelu.bf16.sm90", 300), ("tokenizer.bpe", 2)])
def test_runs(component: str, runs: int) -> None:
    asked = policy.required_runs(catalogue()[component], "determinism")
    assert asked == runs
    for ran, verdict in ((runs, PASS), (runs - 1, FAIL)):
        cases = [{"name": "a", "runs": ran, "distinct": 1, "digest": "ab12"}]
        assert judge(make("determinism", cases), runs=asked).verdict == verdict


def test_the_tripwire_of_audits() -> None:
    """A share may fall to half of the recorded one and no further."""
    old = make("perf", [share(0.6)])
    assert audit.differences(old, make("perf", [share(0.3)])) == []
    assert audit.differences(old, make("perf", [share(0.2999)])) and audit.differences(old, make("perf", [slower(0, 0, 0)]))
