"""What engines write of each case comes back as it was written; what an engine that failed writes passes nowhere; which gates are owed, how
long they take, and what evidence carries over, each by a dull account. Floor 7."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Component, Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import BASE, GOOD, HERE, KERNEL, SINGLE, TOP, TWO, make, parity_case, pin_of
from alpha.registry import cases, policy
from alpha.registry.cases import CaseRecord, Contract, Exact, Refusal, Relative, Repeats, Share, Slope, Slowdown, Unknown, failed, read
from alpha.registry.gates import GATES, TABLE, engine_of, gate_of, measured_by, seconds_of
from alpha.registry.gpu import AnyClass
from alpha.registry.judge import FAIL, NOT_RUN, PASS, Judgement, judge

SORTS: Mapping[type[CaseRecord], str] = {Contract: "contract", Exact: "exact", Relative: "relative", Slope: "", Repeats: "", Refusal: "",
                                         Share: "", Slowdown: "relative"}
"""Sorts of cases, with the kind that each writes."""
OPTIONAL: Mapping[str, Any] = {"note": "", "n": 1, "worst": "", "ceiling_ns": None, "limit": "", "shape": None, "copy": None,
                               "product": None, "throttled": None, "tries": None, "pairs": None, "rounds": None}
"""Fields that are left out at these values."""


def _drawn(rng: np.random.Generator, sort: type[CaseRecord]) -> dict[str, Any]:
    """Values of all fields of a sort; those that may be left out are at their default half of the time."""
    values: dict[str, Any] = {}
    for name, annotation in ((f.name, str(f.type)) for f in fields(sort)):
        number = float(rng.integers(1, 99)) / 8
        made: dict[str, Any] = {"float": number, "str": f"text {number}", "bool": bool(rng.integers(2)), "str | None": f"shape {number}",
                                "float | None": (number, None, math.inf)[int(rng.integers(3))],
                                "tuple[float, ...]": tuple((rng.integers(1, 9, int(rng.integers(4))) / 2.0).tolist())}
        values[name] = OPTIONAL[name] if name in OPTIONAL and rng.random() < 0.5 else made[annotation]
    return values


def written(rng: np.random.Generator) -> Measured:
    """Cases of every sort with drawn values: what is written, and that it comes back; what is no number, text or list, anywhere."""
    checks = Checks()
    for sort, kind in SORTS.items():
        for _ in range(6):
            values = _drawn(rng, sort)
            case = sort(**values)
            wanted = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if k not in OPTIONAL or v != OPTIONAL[k]}
            wanted |= {"kind": kind} if kind else {}
            checks.that(case.plain() == wanted, f"{case.plain()}, not {wanted}")
            back = read([other for other in (Exact, sort, Contract) if other is sort or other.kind != kind], wanted)
            checks.that(back == case and type(back) is sort, f"{back}, not {case}")
            for name, value in wanted.items():
                spoiled = read([sort], {**wanted, name: {}})
                came = spoiled.came if isinstance(spoiled, Unknown) else getattr(spoiled, name)
                if name == "kind":
                    checks.that(isinstance(spoiled, Unknown) and came == "{}", f"a kind that is none: {spoiled}")
                elif isinstance(value, bool):
                    checks.that(came is False, f"{name} that is none: {came}")
                elif isinstance(value, list):
                    checks.that(came == (), f"{name} that is no list: {came}")
                elif isinstance(value, str):
                    checks.that(came == (None if name == "shape" else ""), f"{name} that is no text: {came}")
                else:
                    checks.that(isinstance(came, float) and came != came, f"{name} that is no number: {came}")
    strange = read([Exact, Relative], {"kind": "odd" * 20, "name": 3, "note": "why"})
    checks.that(strange == Unknown(name="", note="why", came=repr("odd" * 20)[:40]), f"an unknown kind: {strange}")
    for value in ("1", None, True, math.inf, math.nan, [1], 1 << 70, 10**400):
        found = cases.number(value)
        checks.that(found == float(value) if value == 1 << 70 else found != found, f"{value!r} is {found}")
    return checks.measured()


def never_passes(rng: np.random.Generator) -> Measured:
    """What stands for an engine that failed is no pass; nor is a gate without a judge, or a case of a sort that its gate does not write."""
    checks = Checks()
    worst = {Exact: {"error": math.inf}, Slope: {"error": math.inf, "bound": math.inf, "directions": math.inf},
             Repeats: {"runs": 0.0, "distinct": 0.0, "digest": ""}, Refusal: {"error": math.inf, "bound": math.inf},
             Share: {"share": 0.0, "times_ns": ()}, Contract: {"error": math.inf, "bound": math.inf, "cases": math.inf},
             Relative: {"ratio": math.inf, "floor": 0.0}}
    for gate in TABLE:
        for sort in gate.cases:
            if sort is not Slowdown:  # no engine begins with one
                case = failed(sort, "a", "it broke")
                checks.that(case == sort(name="a", note="it broke", **worst[sort]), f"{case}")  # type: ignore[arg-type]
                for runs in (0, 2):
                    came = judge(make(gate.name, [case.plain()]), runs=runs, pin=pin_of() if gate.pinned else None)
                    told = any(reason.startswith("a: ") and reason.endswith("(it broke)") for reason in came.reasons)
                    checks.that(came.verdict == FAIL and not came.satisfied and told, f"{gate.name} by {sort.__name__}: {came}")
        strange = [{"name": "b", "kind": "odd", "note": "so"}]
        came = judge(make(gate.name, [*GOOD[gate.name], *strange]), pin=pin_of() if gate.pinned else None)
        wanted = "b: unknown kind of case 'odd' (so)"
        checks.that(came.verdict == FAIL and came.reasons == (wanted,), f"{gate.name}: {came}")
    runs = int(rng.integers(3, 99))
    mixed = [{**GOOD["determinism"][0], "runs": runs}, {"name": "b", "kind": "odd"}]
    came = judge(make("determinism", mixed), runs=runs + 1)
    checks.that(came.reasons == ("b: unknown kind of case 'odd'", f"{runs} runs in total, {runs + 1} needed"), f"runs of others: {came}")
    none = judge(replace(make("parity"), gate="speed"))
    checks.that(none == Judgement(FAIL, ("no judge for the gate 'speed'",)), f"a gate without a judge: {none}")
    shares = [{"name": "a", "share": 0.1, "times_ns": [9], "note": "hot"}, {"name": "b", "share": 0.2, "times_ns": [9], "note": ""}]
    came = judge(make("perf", shares), pin=pin_of(cases=("a", "b"), share=0.6))
    least = pin_of(share=0.6).line("a")
    assert least is not None
    slow = [f"{share:.3g} of the ceiling, pinned 0.6 and at least {least.least:.3g} needed" for share in (0.1, 0.2)]
    checks.that(came.reasons == (f"a: {slow[0]} (hot)", f"b: {slow[1]}"), f"notes of shares: {came.reasons}")
    both = [judge(make("parity", [parity_case()] * n)).verdict for n in (1, 0)]
    checks.that(both == [PASS, NOT_RUN], f"sound, and nothing: {both}")
    return checks.measured()


def owed(rng: np.random.Generator) -> Measured:
    """What measures each gate, and how long, exemptions, and what carries over, for every gate and pair of classes."""
    checks = Checks()
    slow = Component(id="executor.cuda", kind="executor", profile="program", implementation=owed, contract="alpha.types")
    for gate in TABLE:
        wanted = gate.slow.get("executor.cuda", gate.seconds)
        checks.that((seconds_of(gate.name, KERNEL), seconds_of(gate.name, slow)) == (gate.seconds, wanted), f"seconds of {gate.name}")
    checks.that(seconds_of("parity", slow) > seconds_of("perf", slow) == gate_of("perf").seconds, "nothing takes longer")
    checks.tells(InputError, ("no such gate", "speed", ", ".join(GATES), None), lambda: seconds_of("speed", KERNEL))
    ranks = replace(TOP, kind="executor", profile="collective")
    devices = replace(ranks, backend="cuda", profile="device_collective")
    for gate_name, component, measured in (
        ("parity", KERNEL, "cpu.parity cpu:warm_up cpu:samples cpu:bind"),
        ("parity", SINGLE, "cuda.parity cuda:warm_up cuda:samples cuda:bind"),
        ("gradient", SINGLE, "gradient cuda:warm_up cuda:samples cuda:bind"), ("perf", KERNEL, "perf cpu:warm_up cpu:bind"),
        ("faults", KERNEL, "cpu.faults cpu:warm_up cpu:samples cpu:refused cpu:bind"), ("parity", TOP, "parity"),
        ("perf", replace(KERNEL, backend="made"), "perf cpu:warm_up cpu:bind"), ("perf", ranks, "contracts.ranks.perf"),
        ("perf", devices, "contracts.device_perf"), ("parity", devices, "parity"), ("parity", replace(TOP, profile="cpu"), "cpu.parity"),
    ):
        engine, *calls = measured.split(" ")
        wanted_by = [f"alpha.gates.{engine}:measure", *(f"alpha.gates.{call.replace(':', '.subjects:')}" for call in calls)]
        found_by = measured_by(gate_name, component)
        checks.that(found_by == wanted_by and engine_of(gate_name, component) == wanted_by[0], f"{gate_name} of {component.id}: {found_by}")
    here, one = HERE, replace(TWO, devices=1, link="")
    near: Sequence[AnyClass] = (here, replace(here, blas="openblas-Zen"), replace(here, threads=2), replace(here, numpy="2.3"),
                                replace(here, isa="arm64-neon"), one, replace(one, model="H100"), replace(one, capability="sm100"), TWO,
                                replace(TWO, link="pcie"), replace(TWO, model="H100"))
    differ = ("isa", "numpy", "blas", "threads", "capability", "model", "devices", "link")
    components, pairs = (BASE, TOP, KERNEL, SINGLE), [*itertools.product(near, near)]
    for name, component, blas, (a, b) in itertools.product(GATES, components, (True, False), pairs):
        other = {x for x in differ if getattr(a, x, None) != getattr(b, x, None)}
        carried = name in ("parity", "gradient")
        if type(a) is not type(b):
            wanted = False
        elif "model" in vars(a):
            wanted = other <= {"model"}
        elif component in (BASE, TOP):
            wanted = "numpy" not in other
        else:
            wanted = other <= {"blas"} and not blas
        found = policy.carries(component, name, a, b, blas=blas)
        checks.that(found == (not other or (carried and wanted)), f"{component.id} {name} from {a.key} to {b.key}, BLAS {blas}: {found}")
    reasons = {("gelu", "perf"): "so", ("silu", "perf"): ""}
    with mock.patch.object(policy, "EXEMPT", reasons), mock.patch.object(policy, "EXEMPT_ON", {("", "gelu", "parity"): "of no back end"}):
        without = replace(KERNEL, backend="")
        said = [policy.exemption(c, g) for c, g in ((KERNEL, "perf"), (KERNEL, "parity"), (without, "parity"), (TOP, "perf"))]
        checks.that(said == ["so", None, "of no back end", None], f"exemptions: {said}")
        checks.that(policy.exempt(without) == {"perf": "so", "parity": "of no back end"} and policy.exempt(TOP) == {}, "exempt")
        checks.that(policy.owed(without) == ("gradient", "determinism", "faults"), f"owed: {policy.owed(without)}")
    return checks.measured()
