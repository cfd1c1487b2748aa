"""Cases of comparisons: drawn pairs held against the account of them (account.py), whole texts, runs that are no pair. Floor 7."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs, words
from alpha.gates.contracts.profile.account import accounted, series
from alpha.gates.contracts.profile.by_hand import Between, alike, same
from alpha.gates.contracts.profile.measured import Made, made
from alpha.gates.contracts.profile.support import Case
from alpha.profile.compare import Common, Comparison, Row, compare, procedure
from alpha.profile.known import Known, known
from alpha.profile.noise import Interval

Ways = dict[str, Any]
PAIRS: tuple[tuple[Ways, Ways], ...] = (
    ({}, {}),
    ({}, {"slow": {"backward": 1.06, "adamw": 1.3}}),
    ({"ranks": 1}, {"ranks": 1, "slow": {"forward": 0.93, "matmul": 0.93}}),
    ({"ranks": 1, "peaks": 9}, {"ranks": 1, "machine": 1.07, "peaks": 9, "clock": 1 / 1.07}),
    ({"ranks": 1, "peaks": 9}, {"ranks": 1, "machine": 0.92, "peaks": 8, "clock": 1 / 0.92}),
    ({"ranks": 1, "peaks": 6}, {"ranks": 1, "machine": 1.06, "peaks": 9}),
    ({"ranks": 1, "peaks": 5}, {"ranks": 1, "machine": 0.93, "peaks": 6}),
    ({"peaks": 5, "rough": 0.1}, {"machine": 1.05, "peaks": 5, "rough": 0.1}),
    ({"peaks": 5}, {"machine": 1.05, "peaks": 3, "clock": 0.9}),
    ({"ranks": 1}, {"ranks": 1, "slow": {"forward": 1.09, "backward": 1.08, "optimizer": 1.001, "grad_norm": 1.0}}),
    ({"ranks": 1}, {"ranks": 1, "slow": {"forward": 0.92, "backward": 0.93, "optimizer": 1.001, "grad_norm": 1.0}}),
    ({"ranks": 1}, {"ranks": 1, "slow": {"forward": 1.035, "backward": 1.034, "optimizer": 1.033}}),
    ({}, {"slow": {"rank 1": 1.06}}),
    ({}, {"slow": {"rank 0": 0.94, "rank 1": 0.97}}),
    ({"ranks": 4}, {"ranks": 4, "slow": {"rank 2": 1.05}}),
    ({"ranks": 3, "spread": 0.05}, {"ranks": 3, "spread": 0.05}),
    ({"steps": 60}, {"steps": 66, "slow": {"forward": 1.2}}),
    ({"few": {"checkpoint": 3, "eval": 30}}, {"few": {"checkpoint": 4, "sample_gen": 30}, "slow": {"checkpoint": 1.5}}),
    ({"few": {"optimizer": 11}, "ranks": 1}, {"few": {"optimizer": 11}, "ranks": 1, "slow": {"optimizer": 1.2}}),
    ({"without": ("backward", "grad_norm", "optimizer"), "ranks": 1}, {"without": ("backward", "grad_norm", "optimizer"), "ranks": 1}),
    ({"without": ("gelu",)}, {"without": ("adamw",), "profiled": 5}),
    ({"profiled": 200}, {"slow": {"data_load": 1.8}}),
    ({"profiled": 1}, {"machine": 1.01}),
    ({"profiled": 1}, {"profiled": 1, "slow": {"matmul": 1.3}}),
    ({"profiled": 30, "ranks": 1}, {"profiled": 40, "slow": {"matmul": 1.4}, "ranks": 1}),
    ({"ranks": 1, "without": ("forward",)}, {"ranks": 1, "machine": 1.0165}),
    ({"ranks": 1, "peaks": 4}, {"ranks": 1, "peaks": 5, "clock": 1 / 1.05, "machine": 1.05, "slow": {"forward": 0.955}}),
    ({"without": ("forward", "backward", "grad_norm", "grad_clip", "optimizer")}, {"without": ("matmul", "adamw", "gelu")}),
    ({"ranks": 3, "without": ("backward", "grad_norm", "grad_clip", "optimizer")},
     {"ranks": 3, "without": ("backward", "grad_norm", "grad_clip", "optimizer"), "machine": 1.01}),
    ({"steps": 30, "few": {"optimizer": 15}}, {"steps": 30, "few": {"optimizer": 15}, "machine": 1.01}),
    ({"peaks": 5, "rough": 0.1}, {"machine": 0.95, "peaks": 5, "rough": 0.1}),
    ({"ranks": 1, "slow": {"gelu": 0.0}}, {"ranks": 1, "slow": {"gelu": 0.0}, "machine": 0.99}),
    ({"steps": 70, "ranks": 1, "slow": {"data_load": -1.0, "adamw": -1.0}}, {"steps": 70, "ranks": 1, "slow": {"data_load": -1.0}}),
)
"""How run a and run b are made. Each kind of verdict, cause and reason comes of some of them (`pairs` counts them)."""

VERDICTS = {("SAME", ""), ("SLOWER", ""), ("FASTER", ""), ("UNDECIDED", "too noisy"), ("UNDECIDED", "too few samples"),
            ("UNDECIDED", "only in one of the runs"), ("UNDECIDED", "fewer than 64 steady steps"),
            ("UNDECIDED", "it moved apart from the others, but hardly as measured: either it or they moved")}


def wrong(got: Comparison, want: dict[str, Any]) -> list[str]:
    """What a comparison says otherwise than the account of it."""
    found = []
    for row, by in zip(got.rows, want["rows"]):
        for key, value in by.items():
            has: Any = getattr(row, key)
            fits = same(has, value) if isinstance(value, Between) else alike(has, value) if isinstance(value, float) else has == value
            found += [] if fits else [f"{row.name} {key}: {has} for {value}"]
        half = (by["own"].high - by["own"].low) / 2 * min(1.0, by["share"] / 0.02 if by["share"] > 0 else 1.0)
        kind = "rank of 2" if row.kind == "rank" and want["ranks"] == 2 else row.kind
        found += [] if row.known == known(kind, half, procedure()) else [f"{row.name} rates {row.known}"]
    names = [r.name for r in got.rows], [r["name"] for r in want["rows"]]
    found += [] if names[0] == names[1] else [f"rows {names}"]
    c, peaks = got.common, want["peaks"]
    said: tuple[Any, ...] = (c.shift, c.verdict, c.cause, c.taken, c.reason)
    agrees = all(alike(x, y) if isinstance(y, float) else x == y for x, y in zip(said, want["common"]))
    found += [] if agrees else [f"common {said} for {want['common']}"]
    found += [] if (c.peaks is None if peaks is None else same(c.peaks, peaks)) else [f"clock {c.peaks} for {peaks}"]
    return found + [f"{k}: {getattr(got, k)}" for k in ("steps", "stalls") if getattr(got, k) != want[k]]


def pairs(rng: np.random.Generator) -> Measured:
    """Pairs of runs that differ in a phase, a rank, an op, a machine, in nothing or in everything; every field of every row."""
    checks, said, causes = [], Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for i, (ways_a, ways_b) in enumerate(PAIRS):
        a, b = made(rng, "a", **ways_a), made(rng, "b", **ways_b)
        for bad in ((0.0, math.inf, -1.0, math.nan) if i == 5 else ()):  # a clock that gives no rate says nothing
            b.peaks[1]["bandwidth"] = bad
            checks.append((f"a rate of {bad}", compare(a.left(), b.left()).common.peaks is None))
            b.peaks[1]["bandwidth"] = a.peaks[1]["bandwidth"]
        if i == 0:  # columns that one of them does not have
            for rows, column in ((a.timing, "checks_ns"), (b.timing, "comm_ns")):
                for r in rows:
                    del r[column]
        if i == 14:  # steps that some rank did not write down
            for run in (a, b):
                run.timing = [r for r in run.timing if r["step"] % 7 != r["rank"]]
        if i == 8:
            stalled = a.timing[: int(rng.integers(1, 9))]
            taken, last = {r["step"] for r in stalled}, [*series(a).values()][-1]
            alone = [r for r in last if r["step"] not in taken]  # those drawn may be the first rank's, or of steps that count nothing
            for r in (*stalled, alone[int(rng.integers(len(alone)))]):
                r["step_ns"] *= 3
        by, interest = (("launch", 0.03) if i % 5 == 4 else ("op", 0.02))
        got = compare(a.left(), b.left(), by=by, interest=interest) if i % 5 == 4 else compare(a.left(), b.left())
        want = accounted(a, b, by, interest)
        checks.append(("; ".join([f"pair {i}", *wrong(got, want)[:3]]), not wrong(got, want)))
        said.update((r.verdict, r.reason) for r in got.rows)
        causes[got.common.verdict, got.common.cause] += 1
    checks.append((f"verdicts without {VERDICTS - said.keys()}", VERDICTS <= said.keys()))
    missing = {("SAME", "none"), ("UNDECIDED", "none"),
               *((v, c) for v in ("SLOWER", "FASTER") for c in ("machine", "program", "unknown"))} - causes.keys()
    checks.append((f"causes without {missing}", not missing))
    return all_hold(checks)


def _interval(low: float, estimate: float, high: float) -> Interval:
    return Interval(low, estimate, high, 16)


def texts(rng: np.random.Generator) -> Measured:
    """A comparison for a person, word by word; and which rows differ, the largest change of the step's time first."""
    at = int(rng.integers(10, 90))  # what is drawn stands in the text as it is
    known_ = Known(0.0125, 0.0275, {"2%": 0.4, "5%": 0.99}, 400)
    wide, sure = _interval(-1.0, 0.01, math.inf), _interval(0.0101, 0.03, 0.0519)
    rows = (Row("step", "step", at * 1e6, 2.5e6, 1.0, sure, sure, 0.02, "SLOWER", "", known_),
            Row("phase", "idle", 1500.0, 0.0, 0.001, wide, wide, 0.4, "UNDECIDED", "only in one of the runs", None),
            Row("op", "gelu f32[8] forward", 9e5, 8e5, 0.3, sure, _interval(-0.21, -0.2, -0.19), 0.02, "FASTER", "",
                replace(known_, beside=None, power={}, why="not measured")),
            Row("phase", "comm", 3e6, 3e6, 0.5, sure, _interval(-0.01, 0.0, 0.01), 0.02, "SAME", "", None),
            Row("rank", "rank 3", 3e6, 3e6, 0.5, sure, _interval(0.1, 0.2, 0.3), 0.02, "SLOWER", "late", replace(known_, false_alarm=None)))
    common = Common(-0.0123, "FASTER", "machine", 0.0, None, "of the machine")
    c = Comparison("old", "new", common, rows, (at, 70), (4, 1), ("new is UNGATED", "a note"))
    want = f"""\
new against old: 70 and {at} steps, 1 and 4 stalls
new is UNGATED
a note
in common: -1.2% FASTER (of the machine)
SLOWER    step  step                                         {at}.000 ms      2.500 ms   +3.00% (+1.01% to +5.19%)  line 2.0%  \
[false alarms 1.2%, 2.8% beside a slower row; power 40% at 2%, 99% at 5%]
UNDECIDED phase idle                                          0.002 ms      0.000 ms   +1.00% (no interval)  line 40.0%  \
only in one of the runs
FASTER    op    gelu f32[8] forward                           0.900 ms      0.800 ms  -20.00% (-21.00% to -19.00%)  line 2.0%  \
[false alarms 1.2%; power not measured]
SAME      phase comm                                          3.000 ms      3.000 ms   +0.00% (-1.00% to +1.00%)  line 2.0%
SLOWER    rank  rank 3                                        3.000 ms      3.000 ms  +20.00% (+10.00% to +30.00%)  line 2.0%  late  \
[false alarms ; power 40% at 2%, 99% at 5%]"""
    names = ["rank 3", "gelu f32[8] forward", "step"]
    checks = [differs("text", c.text(), want), differs("differing", [r.name for r in c.differing()], names)]
    for _ in range(9):
        drawn = [replace(rows[0], share=float(x), own=_interval(0.0, float(y), 1.0)) for x, y in rng.random((9, 2))]
        order = sorted(drawn, key=lambda r: r.share * r.own.estimate, reverse=True)
        checks.append(("order", list(replace(c, rows=tuple(drawn)).differing()) == order))
    return all_hold(checks)


def unlike(rng: np.random.Generator) -> Measured:
    """Runs of another Program, machine or FLOPS model, with other ranks or without steps are no pair: what came, what was expected and
    what to do. Asked for anyway they are compared, and notes say what differs."""
    checks = []
    a, b = made(rng, "a", steps=20, ranks=2), made(rng, "b", steps=20, ranks=3)

    def pair(x: Made, y: Made, anyway: bool = False) -> Comparison:
        return compare(x.left(), y.left(), anyway=anyway)

    def like(run: Made, **facts: str | None) -> Made:
        return replace(run, metadata={k: v for k, v in {**run.metadata, **facts}.items() if v is not None})

    asked = "ask for it anyway (the comparison will say that they differ)"
    for key in ("program", "flops_version", "machine", "hardware", "devices", "threads"):
        must = key in ("program", "flops_version", "machine")
        for mine, theirs in (("1", "2"), ("1", None), (None, "2"), (None, None), ("2", "2")):
            one, two = like(a, **{key: mine}), like(a, **{key: theirs})
            said = [x or "not recorded" for x in (mine, theirs)]
            fits = (mine == theirs and (not must or mine is not None)) or (not must and None in (mine, theirs))
            what = f"two runs are compared only when their {key} is the same"
            want = () if fits else ("InputError", what, f"a: {said[1]}", f"a: {said[0]}", asked)
            checks.append(differs(f"{key} {mine} {theirs}", words(lambda one=one, two=two: pair(one, two)), want))  # type: ignore[misc]
            said = [x or "none recorded" for x in (mine, theirs)]
            notes = () if fits else (f"different {key}: a has {said[0]}, a has {said[1]}",)
            checks.append(differs("anyway", pair(one, two, True).notes, notes))
    checks.append(differs("ranks", words(lambda: pair(a, b)), ("InputError", "the runs have different ranks", "b: [0, 1, 2]", "a: [0, 1]",
                                                               "compare runs on equally many devices, or ask for it anyway")))
    two = like(b, status=None)
    for one, other, note in ((a, two, "different ranks: [0, 1] and [0, 1, 2]"), (two, a, "different ranks: [0, 1, 2] and [0, 1]")):
        got, whole = pair(one, other, True), accounted(one, other)
        checks.append(differs("notes", got.notes, (f"{note}; only those in both are compared", "b is UNGATED")))
        checks.append((f"ranks of both: {wrong(got, whole)[:3]}", not wrong(got, whole)))
    checks.append(differs("gated", pair(a, a).notes, ()))
    last = replace(a, timing=[{**r, "rank": 7} for r in a.timing])
    none = Made("none", a.metadata, [], [])
    ends = ("rows of step_timing of a rank that both have", "train on until there are some")
    for one, other, came in ((a, last, "a: ranks [0, 1], a: ranks [7]"), (none, none, "none: ranks [], none: ranks []"),
                             (none, a, "none: ranks [], a: ranks [0, 1]")):
        got_ = words(lambda one=one, other=other: pair(one, other, True))  # type: ignore[misc]
        checks.append(differs("no step", got_, ("InputError", "there is no timed step to compare", came, *ends)))
    few = [made(rng, name, steps=4, ranks=1) for name in "ab"]
    checks.append(differs("no steady step", words(lambda: pair(few[0], few[1])), (
        "InputError", "there is no timed step to compare", "a: 0 steady steps, b: 0", "steady steps or profiled ones", ends[1])))
    by_name = words(lambda: compare(a.left(), a.left(), by="name"))
    checks.append(differs("by", by_name, ("InputError", "ops are matched in one of two ways", "name", "'op' or 'launch'", "")))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("compared", pairs), ("comparison texts", texts))
FAULTS: Sequence[tuple[str, Case]] = (("no pair", unlike),)
