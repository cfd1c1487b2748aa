"""What judges promise: the verdict that the raw numbers deserve, and never PASS for what is not a number or did not run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry import pinned as of_pins
from alpha.gates.contracts.registry import sorts
from alpha.gates.contracts.registry.common import GOOD, Case, make, parity_case, pin_of
from alpha.registry.distance import HOP, HOPS
from alpha.registry.gates import GATES
from alpha.registry.judge import AMBIGUOUS, BASELINE, FAIL, NOT_RUN, PASS, RATIO, Judgement, judge
from alpha.registry.pins import FEWEST, FLOOR, WIDEST, Pin, line_of
from alpha.registry.record import parse

NOT_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, "nan", "inf", "-inf", "0", None, True, False, [], {})


def _expect(checks: Checks, verdict: str, gate: str, cases: Sequence[Mapping[str, Any]], what: str, **more: Any) -> None:
    record = make(gate, cases)
    for form, r in (("", record), (", read back", parse(record.line(), "made up"))):
        came = judge(r, **more).verdict
        checks.that(came == verdict, f"{gate} {what}{form}: {came}, not {verdict}")


def _one(gate: str, **changes: Any) -> list[dict[str, Any]]:
    return [{**GOOD[gate][0], **changes}]


def _verdicts(rng: np.random.Generator) -> Measured:
    """The verdict of sound records, on both sides of every tolerance."""
    checks = Checks()
    for gate in GATES:
        _expect(checks, PASS, gate, GOOD[gate], "sound", pin=pin_of() if gate == "perf" else None)
    up = float(rng.uniform(1.01, 9.0))
    table: Sequence[tuple[str, str, list[dict[str, Any]], str]] = (
        (PASS, "parity", [parity_case(ratio=RATIO)], "at the tolerance"),
        (FAIL, "parity", [parity_case(ratio=RATIO * up)], "above the tolerance"),
        (FAIL, "parity", [parity_case(ratio=math.nextafter(RATIO, 9))], "just above the tolerance"),
        (FAIL, "parity", [parity_case(), parity_case("b", ratio=RATIO * up)], "one bad case among good ones"),
        (FAIL, "parity", [parity_case(ratio=-1.0)], "a negative error"),
        (PASS, "parity", [parity_case(floor=None)], "a single rounding"),
        (FAIL, "parity", [{"name": "e", "kind": "exact", "error": 1e-45}], "exact and not zero"),
        (PASS, "parity", [{"name": "c", "kind": "contract", "error": 1.0, "bound": 1.0, "cases": 3}], "contract at its bound"),
        (PASS, "parity", [{"name": "c", "kind": "contract", "error": 0.25, "bound": 0.5, "cases": 3}], "contract of a small bound"),
        (PASS, "parity", [{"name": "c", "kind": "contract", "error": 0.0, "bound": 0.0, "cases": 1}], "contract of one observation"),
        (PASS, "gradient", _one("gradient", directions=1), "one direction"),
        (PASS, "gradient", _one("gradient", error=0.05, bound=0.05), "the widest bound"),
        (PASS, "determinism", _one("determinism", runs=2), "two runs"),
        (FAIL, "parity", [{"name": "c", "kind": "contract", "error": up, "bound": 1.0, "cases": 3}], "contract above its bound"),
        (FAIL, "parity", [{"name": "c", "kind": "contract", "error": 0.0, "bound": 0.0, "cases": 0}], "contract in which nothing ran"),
        (FAIL, "parity", [{"name": "c", "kind": "unheard of", "error": 0.0}], "unknown kind"),
        (FAIL, "gradient", _one("gradient", error=1e-4 * up), "above its bound"),
        (FAIL, "gradient", _one("gradient", error=0.5, bound=1.0), "a bound that says nothing"),
        (FAIL, "gradient", _one("gradient", directions=0), "no direction"),
        (FAIL, "determinism", _one("determinism", distinct=2), "two outputs"),
        (FAIL, "determinism", _one("determinism", distinct=0), "no output"),
        (FAIL, "determinism", _one("determinism", runs=1), "one run"),
        (FAIL, "determinism", _one("determinism", digest=""), "nothing hashed"),
        (FAIL, "faults", _one("faults", error=1.0), "not handled"),
        (FAIL, "faults", _one("faults", error=1.0, bound=1.0), "a bound that allows it"),
    )
    for verdict, gate, cases, what in table:
        _expect(checks, verdict, gate, cases, what)
    _expect(checks, FAIL, "determinism", GOOD["determinism"], "too few runs", runs=301)
    halves = [*_one("determinism", runs=150), *_one("determinism", name="b", runs=150)]
    _expect(checks, PASS, "determinism", halves, "enough together", runs=300)
    for runs, verdict in ((2, PASS), (1, FAIL)):
        came = judge(make("determinism", _one("determinism", runs=runs))).verdict
        checks.that(came == verdict, f"{runs} runs where nobody says how many are needed: {came}")
    checks.that(judge(make("parity", [parity_case(ratio=9.0)])).reasons[0].startswith("a: "), "a reason does not name its case")
    return checks.measured()


def _perf(rng: np.random.Generator) -> Measured:
    """Both halves of the perf gate; impossible speed is no success; what a record says of a baseline counts for nothing."""
    checks = Checks()
    share = float(rng.uniform(0.2, 0.6))
    sound, noisy, wide = pin_of(share=share), pin_of(share=share, spread=0.2), pin_of(share=share, spread=0.0345)
    gpu = pin_of(share=share, spread=0.001, family="cuda")
    times = {"times_ns": [1000]}
    for verdict, what, pin, case in (
        (PASS, "at the pin", sound, {"share": share}),
        (PASS, "9 % slower", sound, {"share": 0.91 * share}),
        (FAIL, "11 % slower", sound, {"share": 0.89 * share}),
        (FAIL, "49 % slower", sound, {"share": 0.51 * share}),
        (FAIL, "1000 times slower", sound, {"share": share / 1000}),
        (FAIL, "50 times slower beside a baseline of its own", sound, {"share": share / 50, "baseline": share / 50}),
        (PASS, "14 % slower, a wide spread", wide, {"share": 0.86 * share}),
        (FAIL, "16 % slower, a wide spread", wide, {"share": 0.84 * share}),
        (PASS, "4 % slower, GPU", gpu, {"share": 0.96 * share}),
        (FAIL, "6 % slower, GPU", gpu, {"share": 0.94 * share}),
        (NOT_RUN, "a noisy pin", noisy, {"share": share}),
        (NOT_RUN, "a noisy pin, 49 % slower", noisy, {"share": 0.51 * share}),
        (FAIL, "a noisy pin, gross", noisy, {"share": 0.49 * share}),
        (PASS, "at the ceiling", sound, {"share": 1.0}),
        (FAIL, "above the ceiling", sound, {"share": 1.0 + share}),
        (FAIL, "just above the ceiling", sound, {"share": math.nextafter(1.0, 2.0)}),
        (FAIL, "above the ceiling, nothing pinned", None, {"share": 1.0 + share}),
        (BASELINE, "nothing pinned", None, {"share": share}),
        (BASELINE, "nothing pinned, a baseline of its own", None, {"share": share, "baseline": share}),
        (FAIL, "no speed", None, {"share": 0.0}),
        (FAIL, "no times", sound, {"times_ns": []}),
        (FAIL, "times of zero", sound, {"times_ns": [0, 1000]}),
    ):
        _expect(checks, verdict, "perf", _one("perf", **{"share": share, **times, **case}), what, pin=pin)
    two = [*_one("perf", share=share), *_one("perf", name="b", share=share)]
    came = judge(make("perf", two), pin=sound)
    checks.that(came.verdict == BASELINE and came.unpinned == ("b",), f"a case that is not pinned: {came}")
    came = judge(make("perf", _one("perf", share=share)), pin=pin_of(share=share, cases=("a", "b")))
    named = any("not measured: b" in reason for reason in came.reasons)
    checks.that(came.verdict == NOT_RUN and not came.satisfied and named, f"a pinned case that was not measured: {came}")
    came = judge(make("perf", _one("perf", share=share)), pin=noisy)
    checks.that(came.satisfied and came.noisy, f"noise is taken for a slowdown: {came}")
    came = judge(make("perf", _one("perf", share=share)), pin=pin_of(share=share, spread=0.2, cases=("a", "b")))
    checks.that(came.verdict == NOT_RUN and not came.satisfied, f"noise excuses a pinned case that was not measured: {came}")
    both = Pin("made.up", "cpu", {}, {"a": noisy.shares["a"], "b": sound.shares["a"]}, sound.times, "flops/made")
    came = judge(make("perf", [*_one("perf", share=share), *_one("perf", name="b", share=0.6 * share)]), pin=both)
    checks.that(came.verdict == FAIL and not came.satisfied, f"a slow case beside a noisy one: {came}")
    for factor, out in ((0.95, False), (1.09, False), (1.11, True), (1.6, True)):
        came = judge(make("perf", _one("perf", share=factor * share)), pin=sound)
        checks.that(bool(came.above_pin) == out and came.verdict == PASS, f"{factor} times the pinned share: {came}")
    line = sound.line("a")
    assert line is not None
    for most, out in ((line.most, False), (math.nextafter(line.most, 9), True)):
        came = judge(make("perf", _one("perf", share=most)), pin=sound)
        checks.that(bool(came.above_pin) == out, f"a share of {most!r} beside a most of {line.most!r}: {came}")
    for verdict, what, low, estimate, high, again in (
        (PASS, "no slowdown", -0.01, 0.0, 0.019, False), (FAIL, "slower", 0.01, 0.03, 0.05, True),
        (AMBIGUOUS, "slower, not reproduced", 0.01, 0.03, 0.05, False), (AMBIGUOUS, "wide", -0.01, 0.01, 0.03, True),
        (FAIL, "an interval upside down", 0.05, 0.03, 0.01, False),
    ):
        ab = {"name": "ab", "kind": "relative", "low": low, "estimate": estimate, "high": high, "reproduced": again}
        came = judge(make("perf", [*GOOD["perf"], ab]), pin=pin_of())
        checks.that(came.relative == verdict and came.verdict == PASS, f"relative half {what}: {came.relative}, not {verdict}")
    for _ in range(200):  # ends of intervals on either side of 0 and of the slowdown that counts
        low, estimate, high = np.sort(rng.choice([-0.03, -1e-4, 1e-4, 0.0199, 0.0201, 0.05], 3) + 1e-6 * rng.random(3)).tolist()
        again = bool(rng.integers(2))
        ab = {"name": "ab", "kind": "relative", "low": low, "estimate": estimate, "high": high, "reproduced": again}
        verdict = PASS if high < 0.02 else FAIL if low > 0 and estimate >= 0.02 and again else AMBIGUOUS
        came = judge(make("perf", [*GOOD["perf"], ab]), pin=pin_of())
        checks.that(came.relative == verdict, f"relative half of {low}, {estimate}, {high}, {again}: {came.relative}, not {verdict}")
    for factor, out in ((0.6, False), (1.9, False), (2.1, True)):  # shares are below 1: a low pin leaves room above
        came = judge(make("perf", _one("perf", share=0.3 * factor)), pin=pin_of(share=0.3, spread=0.2))
        checks.that(bool(came.above_pin) == out and came.verdict == NOT_RUN, f"{factor} times a noisy pin: {came}")
    checks.that(judge(make("perf")).relative == NOT_RUN, "a relative half that did not run has a verdict")
    checks.that(judge(make("perf", [{"name": "ab", "kind": "relative", "low": 0, "estimate": 0, "high": 0}])).verdict == NOT_RUN,
                "an absolute half that did not run has a verdict")
    return checks.measured()


def _distances(rng: np.random.Generator) -> Measured:
    """A share below its line where the cores stand elsewhere than where it was pinned is NOT_RUN; nothing passes by that."""
    checks = Checks()
    share, near, far = float(rng.uniform(0.2, 0.4)), float(rng.uniform(123, 138)), float(rng.uniform(280, 320))

    def said(hop: object, pinned: Sequence[object], shares: Sequence[float], pins: Mapping[str, Pin]) -> Judgement:
        environment = {HOPS: " ".join(map(str, pinned))} if pinned else {}
        pin = replace(pin_of(), shares={case: p.shares["a"] for case, p in pins.items()}, environment=environment)
        record = make("perf", [c for k, x in zip("ab", shares) for c in _one("perf", name=k, share=x * share)])
        return judge(replace(record, environment={**record.environment, **({} if hop is None else {HOP: str(hop)})}), pin=pin)

    sound, noisy, pinned_near = pin_of(share=share), pin_of(share=share, spread=0.2), [near] * FEWEST
    table: Sequence[tuple[str, str, object, Sequence[object], float]] = (
        (NOT_RUN, "far, pinned near", far, pinned_near, 0.34), (NOT_RUN, "near, pinned far", near, [far] * FEWEST, 0.45),
        (NOT_RUN, "far, just below its line", far, pinned_near, 0.89), (PASS, "far, over its line", far, pinned_near, 0.91),
        (NOT_RUN, "as slow as distances make it", far, pinned_near, 0.251), (FAIL, "slower than that", far, pinned_near, 0.249),
        (FAIL, "near, pinned near", 138, [123] * FEWEST, 0.89), (FAIL, "far, pinned far", 280, [320] * FEWEST, 0.89),
        (FAIL, "just of one distance", 299.9, [200] * FEWEST, 0.8), (NOT_RUN, "just of another", 300.1, [200] * FEWEST, 0.8),
        (FAIL, "the same, nearer", 200, [299.9] * FEWEST, 0.8), (NOT_RUN, "just of another, nearer", 200, [300.1] * FEWEST, 0.8),
        (FAIL, "a pin without hops", far, [], 0.8), (FAIL, "none of both", None, [], 0.8),
        *((FAIL, f"a hop of {hop!r}", hop, pinned_near, 0.8) for hop in (None, "", "nan", "inf", "0", "-300", "far", f"{far} {far}")),
        *((FAIL, f"a pin with a hop of {x!r}", far, [*pinned_near[1:], x], 0.8) for x in ("nan", "inf", 0, -near, "x", "", "130 130")),
        *((FAIL, "a pin of both distances", hop, [near, near, (near + far) / 2, far, far], 0.8) for hop in (near, far)),
        (NOT_RUN, "a third distance", 4 * far, [near, near, near, far, far], 0.8),
    )
    for verdict, what, hop, pinned, factor in table:
        came = said(hop, pinned, [factor], {"a": sound})
        checks.that(came.verdict == verdict and came.elsewhere == (verdict == NOT_RUN), f"{what}: {came}, not {verdict}")
        checks.that(came.satisfied == (verdict == PASS), f"{what}: {came}")
    text = f"the cores stand at another distance (a hop takes {far:.0f} ns, pinned at {near:.0f} ns)"
    came = said(far, pinned_near, [0.34], {"a": sound})
    checks.that(any(text in why for why in came.reasons), f"a reason without hops: {came.reasons}")
    for bad in (1.01, 0.0, math.nan):
        came = said(far, pinned_near, [bad / share], {"a": sound})
        checks.that(came.verdict == FAIL and not came.elsewhere, f"{bad}, far: {came}")
    for verdict, what, shares, pins, away, usable in (
        (NOT_RUN, "a gross slowness by a noisy pin", [0.4], {"a": noisy}, True, False),
        (NOT_RUN, "no gross one by a noisy pin", [0.6], {"a": noisy}, False, True),
        (NOT_RUN, "slow beside a sound one", [0.4, 1.0], {"a": sound, "b": sound}, True, False),
        (NOT_RUN, "slow beside a noisy one", [0.4, 1.0], {"a": sound, "b": noisy}, True, False),
        (NOT_RUN, "slow beside one that was not measured", [0.4], {"a": sound, "b": sound}, False, False),
        (FAIL, "slow beside one that became slower", [0.4, 0.2], {"a": sound, "b": sound}, False, False),
    ):
        came = said(far, pinned_near, shares, pins)
        checks.that((came.verdict, came.elsewhere, came.satisfied) == (verdict, away, usable), f"far, {what}: {came}")
    return checks.measured()


def _lines(rng: np.random.Generator) -> Measured:
    """A line follows the measured spread: at least the floor, never more than the widest allowance, tighter with more measurements."""
    checks = Checks()
    middle = float(rng.uniform(0.2, 0.9))
    for n, k in ((5, 4.29), (8, 3.28), (24, 2.58)):
        spread = 0.03
        shares = tuple(middle * (1 + spread * x / (np.std(range(n), ddof=1))) for x in np.arange(n) - (n - 1) / 2)
        line = line_of(shares, 0.01)
        checks.that(abs(line.spread - spread) < 1e-9 and abs(line.middle - middle) < 1e-9, f"{n} measurements: {line}")
        checks.that(abs(line.allowance - k * spread) < 0.0005, f"allowance from {n} measurements: {line.allowance}, not {k * spread}")
        checks.that(abs(line.least - middle * (1 - line.allowance)) < 1e-9, f"least {line.least}")
    for family, floor in FLOOR.items():
        line = line_of((middle,) * FEWEST, floor)
        checks.that(line.allowance == floor <= WIDEST and line.judged, f"{family}: shares without spread: {line}")
    draws = 1000
    alarms = 0
    for _ in range(draws):
        x = 0.5 * (1 + 0.03 * rng.standard_normal(9))
        line = line_of(tuple(x[:8]), 0.0)
        alarms += not float(x[8]) >= line.middle * (1 - line.allowance)
    checks.that(alarms <= 25, f"{alarms} alarms in {draws} draws of unchanged code, 10 expected")
    return checks.measured()


def _not_numbers(rng: np.random.Generator) -> Measured:
    """NaN, infinity, text, nothing: each fails in each place where a number decides."""
    checks = Checks()
    places = {"parity": ("ratio", "floor"), "gradient": ("error", "bound", "directions"), "determinism": ("runs", "distinct"),
              "faults": ("error", "bound"), "perf": ("share",)}
    for gate, keys in places.items():
        for key in keys:
            for value in NOT_NUMBERS:
                fine = key == "floor" and value in (None, "inf", math.inf)
                came = judge(make(gate, _one(gate, **{key: value}))).verdict
                checks.that((came in (PASS, BASELINE)) == fine, f"{gate} with {key} = {value!r}: {came}")
            missing = {k: v for k, v in GOOD[gate][0].items() if k != key}
            came = judge(make(gate, [missing])).verdict
            checks.that(came == FAIL, f"{gate} without {key}: {came}")
    once = judge(make("determinism", [{**GOOD["determinism"][0], "runs": 1}]), runs=1)
    checks.that(once.verdict == FAIL, f"one run that repeats nothing: {once.verdict}")
    for value in NOT_NUMBERS:
        checks.that(judge(make("parity", [{"name": "e", "kind": "exact", "error": value}])).verdict == FAIL, f"exact error {value!r}")
        for key in ("error", "bound", "cases"):
            case = {"name": "c", "kind": "contract", "error": 0.0, "bound": 0.0, "cases": 1, key: value}
            checks.that(judge(make("parity", [case])).verdict == FAIL, f"contract with {key} = {value!r}")
        checks.that(judge(make("perf", _one("perf", times_ns=[value]))).verdict == FAIL, f"time {value!r}")
    return checks.measured()


def _skipped(rng: np.random.Generator) -> Measured:
    """Cases that were skipped, renamed onto another, left nameless; gates that declared nothing."""
    checks = Checks()
    cases = [parity_case(name) for name in "abcd"]
    declared = len(cases)
    checks.that(judge(make("parity", cases, declared=declared)).verdict == PASS, "sound")
    for gate in GATES:
        for wrong in (declared + int(rng.integers(1, 9)), 0):
            checks.that(judge(make(gate, declared=wrong)).verdict == NOT_RUN, f"{gate}: {wrong} declared")
        checks.that(judge(make(gate, [], declared=0)).verdict == NOT_RUN, f"{gate}: nothing declared, nothing run")
        checks.that(judge(make(gate, [], declared=3)).verdict == NOT_RUN, f"{gate}: nothing run")
    checks.that(judge(make("parity", cases[:3], declared=declared)).verdict == NOT_RUN, "one case skipped")
    checks.that(judge(make("parity", [*cases[:3], cases[0]], declared=declared)).verdict == NOT_RUN, "one case renamed onto another")
    checks.that(judge(make("parity", [*cases[:3], parity_case("")], declared=declared)).verdict == NOT_RUN, "a case without a name")
    nameless = {"kind": "exact", "error": 0.0}
    checks.that(judge(make("parity", [nameless])).verdict == NOT_RUN, "a case whose name is missing")
    checks.that(judge(make("parity", [nameless | {"name": "a"}], declared=True)).verdict == NOT_RUN, "True declared")  # type: ignore[arg-type]
    checks.that(judge(make("parity", [nameless | {"name": "a"}], declared=1.0)).verdict == NOT_RUN, "1.0 declared")  # type: ignore[arg-type]
    return checks.measured()


def _powerless(rng: np.random.Generator) -> Measured:
    """A case that one precision lower would pass as well decides nothing, however small the error."""
    checks = Checks()
    for floor, verdict in ((RATIO, FAIL), (0.0, FAIL), (float(rng.uniform(0, RATIO)), FAIL), (math.nextafter(RATIO, 9), PASS),
                           (float(rng.uniform(3, 1e6)), PASS), (math.inf, PASS), (None, PASS), (-math.inf, FAIL)):
        _expect(checks, verdict, "parity", [parity_case(ratio=0.0, floor=floor)], f"floor {floor!r}")
    return checks.measured()


def _table(rng: np.random.Generator) -> Measured:
    """The same verdicts and reasons in every process."""
    lines = [f"{gate} {key} {value!r} {judge(make(gate, _one(gate, **{key: value})))}"
             for gate in GATES for key in GOOD[gate][0] for value in (0.0, 1.0, 3.0, math.nan, "inf", None)]
    return Measured(error=0.0, bound=0.0, cases=len(lines), digest=hashlib.sha256("\n".join(lines).encode()).hexdigest())


CASES: dict[str, dict[str, list[Case]]] = {
    "registry.judge": {
        "parity": [("verdicts", _verdicts), ("perf", _perf), ("distances", _distances), ("lines", _lines),
                   ("what is written of a case", sorts.written), ("pins that are kept", of_pins.kept), ("claims", of_pins.claimed),
                   ("where measurements stood", of_pins.stood)],
        "determinism": [("same verdicts", _table)],
        "faults": [("not numbers", _not_numbers), ("skipped or renamed cases", _skipped), ("a tolerance without power", _powerless),
                   ("what never passes", sorts.never_passes), ("damaged pins", of_pins.damaged)],
    },
}
