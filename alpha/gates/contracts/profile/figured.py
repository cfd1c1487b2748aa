"""Cases of the figures as such (alpha/profile/figures.py): drawn facts, some missing: every value, text, verdict, reason. Floor 7."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs, words
from alpha.gates.contracts.profile.by_hand import alike
from alpha.gates.contracts.profile.support import Case
from alpha.profile.figures import BY_KEY, Facts, Figure, Target, bandwidth_bound, ceiling_ns, judge, shown, targets
from alpha.profile.phases import OVERLAPPING, PHASES

STEADY = "no steady step yet: unprofiled and after the warm-up of its session"
PLAIN, PROFILE, LASTED = "no unprofiled step", "no profiled step", "no session has lasted any time"
NEVER_TIMED = "not measured: no profiled step in which each kernel was timed"
DEVICES, PEAK = "the run does not say how many devices it used", "the run names no peak FLOP/s"
CACHED = "more than the peak that copies reach: operands stayed in a cache"
ALONE = "not measured: one device has nothing to communicate with"

LINES: dict[str, tuple[bool, float, bool]] = {
    "kernel_active": (True, 0.9, False), "bubble": (False, 0.1, False), "comm_exposed": (False, 0.15, False),
    "bandwidth_bound": (True, 0.6, False), "unexplained": (False, 0.01, True)}
"""Figure -> must it lie above, of what, and may it touch."""

LESS = ("bubble", "comm_exposed", "comm_total", "launch_overhead", "save_stall", "save_stall_foretold", "unexplained",
        "instrumented_slowdown")
"""Figures of which less is better."""


def drawn(rng: np.random.Generator, trial: int) -> Facts:
    """Facts of a run, some of which are not there."""
    def there(value: Any, without: Any, chance: float = 0.75) -> Any:
        return value if rng.random() < chance else without

    def ns(n: int, least: int = 0) -> np.ndarray:
        return rng.integers(least, 1 << 20, n)

    rows, ops, kernels, saves = (int(rng.integers(1, 9)) * int(rng.random() < 0.75) for _ in range(4))
    untimed = trial % 10 == 3
    kernels *= not untimed
    few = trial % 7 == 0  # rows that took no time
    step = ns(rows) * (not few)
    if trial % 13 == 0:  # as little time as there can be
        step = (np.arange(rows) == 0).astype(np.int64)
    some = trial // 2 % 2  # of both back ends
    slow = rng.choice([0.0, 0.01, 0.02, 0.021, 0.3, math.nan], kernels) if some else rng.choice([0.05, 0.3, math.nan], kernels)
    if trial % 9 == 0:
        slow = np.full(kernels, math.nan)
    share = 1.5 if trial % 11 == 0 else 0.95
    least = trial % 6 == 5
    session = 1 if least else there(int(rng.integers(1 << 28, 1 << 32)), 0)
    devices = there(int(rng.integers(1, 4)), None)
    steady = rng.random(rows) < (0.7, 0.0)[trial % 17 == 0]
    return Facts(
        backend=("cpu", "cuda")[trial % 2], devices=devices, flops_per_token=there(float(rng.uniform(1e3, 1e9)), None),
        executed_flops=there(float(rng.uniform(1e6, 1e12)), None), peak_flops=there(10.0 ** rng.uniform(12, 16), None),
        peak_bandwidth=there(10.0 ** rng.uniform(9, 12), None), steady_tokens=int(rng.integers(1, 1 << 20)),
        steady_ns=1 if least else there(int(rng.integers(1, 1 << 40)), 0), steady_steps=int(rng.integers(1, 99)), step_ns=step,
        steady=steady,
        wall_ns=(step + ns(rows)) * (not few), phases={p: (step * rng.uniform(0, 0.3, rows)).astype(np.int64) for p in PHASES},
        overlapped={p: ns(rows) for p in OVERLAPPING}, unexplained_ns=(step * rng.choice([0.001, 0.01, 0.1])).astype(np.int64),
        useful_ns=session if trial % 8 == 1 else int(rng.integers(1, 1 << 30)), session_ns=session,
        workflow_ns=1 if least else there(int(rng.integers(1, 1 << 40)), 0), tokens=int(rng.integers(1 << 20)),
        profiled_ns=1 if least else there(int(rng.integers(1, 1 << 30)), 0), profiled_mean_ns=there(float(rng.uniform(1, 1e9)), None),
        steady_mean_ns=there(float(rng.uniform(1, 1e9)), None), save_ns=ns(saves), save_foretold_ns=there(float(rng.uniform(1, 1e9)), None),
        op_device_ns=(np.arange(ops) == 0).astype(np.int64) if least else ns(ops) * int(trial % 5 > 0),
        op_flops=ns(ops) << int(rng.integers(0, 30)),
        op_nbytes=ns(ops) << int(rng.integers(0, 9)), op_enqueue_ns=ns(ops), op_wait_ns=ns(ops),
        exposed_enqueue_ns=there(int(rng.integers(1 << 20)), None),
        timeline_ns=1 if least else there(int(rng.integers(1 << 20, 1 << 24)), 0), kernel_step_ns=ns(kernels, 1 << 10) * (not few),
        kernel_busy_ns=(ns(kernels, 1 << 10) * share).astype(np.int64), kernel_idle_ns=ns(kernels) // 9, kernel_slowdown=slow,
        kernel_why="" if untimed else there("not measured: no instrument", ""))


def ratio(a: float, b: float, why: str) -> float | str:
    """A share, or why there is none."""
    return a / b if b > 0 else why


def account(f: Facts) -> dict[str, float | str]:
    """Every figure or why there is none, from lists."""
    step, phases = f.step_ns.tolist(), {p: f.phases[p].tolist() for p in PHASES}

    def share(*names: str) -> float | str:
        return ratio(sum(sum(phases[n]) for n in names), sum(step), PLAIN)

    rate = ratio(f.steady_tokens * 1e9, f.steady_ns, STEADY)
    peak: float | str = PEAK if f.peak_flops is None else DEVICES if f.devices is None else f.peak_flops * f.devices
    achieved: float | str = rate
    if not isinstance(rate, str):
        achieved = "the run names no FLOPs per token" if f.flops_per_token is None else rate * f.flops_per_token
    found: dict[str, float | str] = {"tokens_per_second": rate, "achieved_flops": achieved}
    found["tokens_per_second_device"] = rate if isinstance(rate, str) else DEVICES if f.devices is None else rate / f.devices
    found["workflow_tokens_per_second"] = ratio(f.tokens * 1e9, f.workflow_ns, LASTED)
    found["mfu"] = achieved if isinstance(achieved, str) else peak if isinstance(peak, str) else achieved / peak
    if f.steady_ns == 0:
        found["hfu"] = STEADY
    elif f.executed_flops is None:
        found["hfu"] = "the run names no executed FLOPs"
    else:
        found["hfu"] = peak if isinstance(peak, str) else f.executed_flops * f.steady_steps / (f.steady_ns / 1e9) / peak
    kernels = [x for x in zip(f.kernel_step_ns.tolist(), f.kernel_busy_ns.tolist(), f.kernel_idle_ns.tolist(), f.kernel_slowdown.tolist())]
    sound = [k for k in kernels if k[3] <= 0.02] or kernels
    for at, key, names in ((1, "kernel_active", ("forward", "backward", "grad_norm", "grad_clip", "optimizer")), (2, "bubble", ("idle",))):
        found[key] = share(*names) if f.backend == "cpu" else (f.kernel_why or NEVER_TIMED) if not kernels else \
            ratio(sum(k[at] for k in sound), sum(k[0] for k in sound), "the profiled steps took no time")
    own = [w - a - b - c for w, a, b, c in zip(f.wall_ns.tolist(), phases["eval"], phases["sample_gen"], phases["checkpoint"], strict=True)]
    rows = [r[:3] for r in zip(own, phases["comm"], f.overlapped["comm"].tolist(), f.steady.tolist(), strict=True) if r[3]]
    for key, told in (("comm_exposed", slice(1, 2)), ("comm_total", slice(1, 3))):
        found[key] = ALONE if f.devices == 1 else ratio(sum(sum(r[told]) for r in rows), sum(r[0] for r in rows), STEADY)
    ops = [*zip(f.op_device_ns.tolist(), f.op_flops.tolist(), f.op_nbytes.tolist())]
    for key, why in (("bandwidth_bound", "no launch is bound by bandwidth"), ("bandwidth", "the profile holds no device time")):
        if not ops:
            found[key] = PROFILE
        elif f.peak_bandwidth is None or f.peak_flops is None:
            found[key] = "the run names no peak bandwidth"
        else:
            some = [o for o in ops if key == "bandwidth" or o[2] * f.peak_flops > o[1] * f.peak_bandwidth]
            found[key] = ratio(1e9 * sum(o[2] for o in some), sum(o[0] for o in some) * f.peak_bandwidth, why)
    if f.backend == "cpu":
        found["launch_overhead"] = ratio(sum(f.op_enqueue_ns.tolist()) + sum(f.op_wait_ns.tolist()), f.profiled_ns, PROFILE)
    else:
        found["launch_overhead"] = ratio(f.exposed_enqueue_ns or 0, f.timeline_ns if f.exposed_enqueue_ns is not None else 0,
                                         "no profiled step with a timeline of the host and its streams")
    found["goodput"] = ratio(f.useful_ns, f.session_ns, LASTED)
    saves, usual = f.save_ns.tolist(), f.steady_mean_ns
    found["save_stall"] = "no save has a step behind it" if not saves else STEADY if usual is None else median(saves) / usual
    unsaid = "no save was rehearsed: none has a step behind it, or the release foretold none"
    found["save_stall_foretold"] = STEADY if usual is None else unsaid if f.save_foretold_ns is None else f.save_foretold_ns / usual
    found["unexplained"] = ratio(sum(f.unexplained_ns.tolist()), sum(f.wall_ns.tolist()), PLAIN)
    mine = f.profiled_mean_ns
    found["instrumented_slowdown"] = PROFILE if mine is None else STEADY if usual is None else (mine - usual) / usual
    return found


def said_of(f: Facts, key: str, value: float | str) -> tuple[float | None, str | None, str]:
    """Value, verdict and reason of a figure."""
    if f.why:
        return None, None, f.why
    if not isinstance(value, str) and value > 1 and key in ("mfu", "hfu", "kernel_active", "goodput"):
        value = f"the stored numbers give {value * 100:.2f} %, more than there is: the peak was measured too low, or the rows are wrong"
    if isinstance(value, str):
        return None, None, value
    remark = CACHED if value > 1 and key.startswith("bandwidth") else ""
    if key not in LINES:
        return value, None, remark or "no target"
    slow = f.kernel_slowdown.tolist()
    if f.backend != "cpu" and key in ("kernel_active", "bubble") and slow and not any(s <= 0.02 for s in slow):
        known = [s for s in slow if not math.isnan(s)]
        few = "not judged: the profiled steps have too few steady neighbours to say how much the instrument slowed them down"
        least_ = f"{100 * min(known or [0]):.2f} %"
        much = f"perturbed, not judged: the instrument slowed the profiled steps down by {least_} or more, above 2.00 %"
        return value, None, much if known else few
    least, line, touch = LINES[key]
    return value, "PASS" if (value > line if least else value < line) or (touch and value == line) else "FAIL", remark


def same_words(got: str, want: str) -> bool:
    """The same reason, a number in it to nine digits: more are a matter of the order of products."""
    one, other = (re.split(r"give (-?[\d.]+) %", x) for x in (got, want))
    numbers = zip(map(float, one[1::2]), map(float, other[1::2]))
    return one[::2] == other[::2] and all(math.isclose(x, y, rel_tol=1e-9, abs_tol=0.011) for x, y in numbers)


def figures(rng: np.random.Generator) -> Measured:
    """Figures of drawn facts: value, verdict and reason of each, whatever is missing."""
    checks, reasons, verdicts = [], Counter[str](), Counter[str]()
    for trial in range(140):
        facts = drawn(rng, trial) if trial else Facts()
        if not trial:
            facts = replace(facts, phases={p: np.zeros(0, np.int64) for p in PHASES}, overlapped={"comm": np.zeros(0, np.int64)})
        facts = replace(facts, why="" if trial % 20 != 10 else "an empty run")
        if trial == 15:  # whatever is drawn, one profile holds no device time
            flops, nbytes, enqueue, waits = rng.integers(1, 1 << 20, (4, 3))
            facts = replace(facts, op_device_ns=np.zeros(3, np.int64), op_flops=flops, op_nbytes=nbytes, op_enqueue_ns=enqueue,
                            op_wait_ns=waits, peak_flops=1e12, peak_bandwidth=1e9)
        want = account(facts)
        got = judge(facts)
        checks.append(differs("figures", [g.key for g in got], [*BY_KEY]))
        for g in got:
            value, verdict, reason = said_of(facts, g.key, want[g.key])
            sound = (g.value is None) == (value is None) and (value is None or alike(g.value, value))  # type: ignore[arg-type]
            checks.append((f"{g.key}: {g.value} {g.verdict} {g.reason} for {value} {verdict} {reason}",
                           sound and g.verdict == verdict and same_words(g.reason, reason)))
            checks.append(("text", g.text == ("—" if value is None else shown(g.value, g.unit))))  # type: ignore[arg-type]
            reasons[reason.partition(" give")[0].partition(" by ")[0]] += 1
            verdicts[str(verdict)] += 1
    for part in fields(Facts):
        there = getattr(Facts(), part.name)
        checks.append((f"{part.name} unsaid: {there}", there is None or len(there) == 0 if not isinstance(there, int) else there == 0)
                      if part.name != "backend" else differs("backend", there, "cpu"))
    no_number = replace(drawn(rng, 1), useful_ns=math.inf, session_ns=9, why="")  # type: ignore[arg-type]
    (g,) = (g for g in judge(no_number) if g.key == "goodput")
    checks.append(differs("no number", (g.value, g.reason), (None, "the stored numbers give inf")))
    expected = {STEADY, PLAIN, PROFILE, LASTED, NEVER_TIMED, DEVICES, PEAK, CACHED, ALONE, "", "no target", "an empty run",
                "not measured: no instrument", "the run names no FLOPs per token", "the run names no executed FLOPs",
                "the profiled steps took no time", "no launch is bound", "the profile holds no device time",
                "the run names no peak bandwidth", "no save has a step behind it", "the stored numbers"}
    checks.append((f"reasons without {expected - reasons.keys()}", expected <= reasons.keys()))
    checks.append((f"verdicts {verdicts}", verdicts.keys() == {"PASS", "FAIL", "None"}))
    return all_hold(checks)


def lines(rng: np.random.Generator) -> Measured:
    """Targets: a run's own instead of the usual ones, what holds at the line and beside it, and names and numbers that are none."""
    checks = []
    line = float(rng.uniform(0.1, 0.9))
    for least in (True, False):
        for touch in (True, False):
            target = Target(line, least, touch)
            want = [not least, touch, least]
            checks.append(differs(f"{target}", [target.holds(x) for x in (np.nextafter(line, 0), line, np.nextafter(line, 1))], want))
            sign = (">" if least else "<") + ("=" if touch else "")
            checks.append(differs("text", target.text("share"), f"{sign} {line * 100:.2f} %"))
    facts = drawn(rng, 2)
    keys = [str(k) for k in rng.choice([*BY_KEY], 5, replace=False)]
    own = targets({k: line for k in (*keys, "unexplained", "bubble", "mfu")}, "run.toml")
    for key, t in own.items():
        touch = LINES[key][2] if key in LINES else True
        checks.append(differs(key, t, Target(line, key not in LESS, touch, "run.toml")))
    for g in judge(facts, own):
        usual = Target(LINES[g.key][1], LINES[g.key][0], LINES[g.key][2]) if g.key in LINES else None
        want_target = own.get(g.key, usual)
        checks.append(differs(f"target of {g.key}", g.target, want_target))
        text = "" if want_target is None else want_target.text(g.unit)
        checks.append(differs("its text", g.target_text, text))
        if g.value is not None and g.key in own:
            holds = g.value >= line if g.key not in LESS else g.value <= line
            checks.append(differs(f"{g.key} {g.value} at {line}", g.verdict, "PASS" if holds else "FAIL"))
    checks.append(differs("a name", words(lambda: targets({"mfu": 0.5, "speed": 1.0}, "x")),
                          ("InputError", "no figure has this name", "speed", ", ".join(g.key for g in judge(facts)), "name one of these")))
    for bad in (math.nan, math.inf):
        want_words = ("InputError", "a target is a number", f"mfu = {bad}", "a finite number", "")
        checks.append(differs("a number", words(lambda bad=bad: targets({"mfu": bad}, "x")), want_words))  # type: ignore[misc]
    checks.append(differs("none", (targets({}, "x"), [g.target_text for g in judge(facts) if g.key == "mfu"]), ({}, [""])))
    return all_hold(checks)


def printed(rng: np.random.Generator) -> Measured:
    """How figures are printed, word by word; what no device is faster than, and which launches moving bytes binds."""
    checks = []
    for value, unit, text in ((0.5, "share", "50.00 %"), (1.23456, "share", "123.46 %"), (-0.031, "share", "-3.10 %"),
                              (2.0, "x", "2.000 x"), (0.12345, "x", "0.123 x"), (1.5e15, "FLOP/s", "1.5 PFLOP/s"),
                              (989.4e12, "FLOP/s", "989.4 TFLOP/s"),
                              (1e12, "FLOP/s", "1 TFLOP/s"), (2.5e9, "bytes/s", "2.5 GB/s"), (3.35e12, "bytes/s", "3.35 TB/s"),
                              (1e6, "bytes/s", "1 MB/s"), (1e3, "bytes/s", "1 kB/s"), (-2e3, "FLOP/s", "-2 kFLOP/s"),
                              (999.0, "FLOP/s", "999.0 FLOP/s"),
                              (999999.5, "FLOP/s", "1000 kFLOP/s"), (999999999999.5, "bytes/s", "1000 GB/s"),
                              (12.34567, "bytes/s", "12.35 bytes/s"), (0.5, "s", "0.5 s"),
                              (99.994, "s", "99.99 s"), (100.0, "s", "100.0 s"),
                              (9999.94, "tokens/s", "9,999.9 tokens/s"),
                              (10000.0, "tokens/s", "10,000 tokens/s"),
                              (1234567.8, "tokens/s", "1,234,568 tokens/s"),
                              (-12345.6, "tokens/s", "-12,346 tokens/s"),
                              (-100.0, "s", "-100.0 s"), (2e15, "tokens/s", "2,000,000,000,000,000 tokens/s")):
        checks.append(differs("shown", shown(value, unit), text))
        checks.append(differs("as text", Figure("k", "t", value, unit, "", None, None, "").text, text))
    peak, bandwidth = float(rng.uniform(1e12, 1e15)), float(rng.uniform(1e9, 1e12))
    flops, nbytes = rng.integers(0, 1 << 50, 30), rng.integers(0, 1 << 40, 30)
    bound, ceiling = bandwidth_bound(flops, nbytes, peak, bandwidth).tolist(), ceiling_ns(flops, nbytes, peak, bandwidth).tolist()
    for f, n, is_bound, ns in zip(flops.tolist(), nbytes.tolist(), bound, ceiling):
        times = 1e9 * f / peak, 1e9 * n / bandwidth
        checks.append((f"{f} FLOPs and {n} bytes: {ns} {is_bound}", alike(ns, max(times)) and is_bound == (times[1] > times[0])))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("figures", figures), ("lines", lines), ("printed", printed))
