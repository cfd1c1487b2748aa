"""Views over several runs: scaling, and one run against another. Floor 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alpha.profile import noise
from alpha.profile.compare import RARE, SAME, Common, Comparison, Measured, Row, compare
from alpha.profile.figures import judge
from alpha.profile.noise import Interval
from alpha.registry.gpu import GpuClass, family_of
from alpha.report.extra import pandas as pd
from alpha.report.facts import facts, steps_of
from alpha.report.runs import Run, same_axis
from alpha.report.series import View, view


def scaling(runs: Sequence[Run]) -> View:
    """`rows`, one a run, by `workers` (devices, or threads where all runs have as many devices): tokens_per_second, efficiency against
    the smallest run scaled ideally, its interval `low` to `high`, comm_exposed; None with `why` where a figure does not exist. `unlike`:
    how its devices differ from those of the smallest run. `axis`: what workers are."""
    devices = {r.number("devices") for r in runs if not r.why_untimed}
    axis = "devices" if len(devices) > 1 else "threads"
    if len({r.number(axis) for r in runs if not r.why_untimed}) < 2:
        axis = "devices"
    rows: list[View] = []
    for run in runs:
        found = {f.key: f for f in judge(facts(run))}
        speed, exposed, workers = found["tokens_per_second"], found["comm_exposed"], run.number(axis)
        why = speed.reason if speed.value is None else None if workers else f"the run does not say how many {axis} it used"
        rows.append({"run": run.shown, "label": run.label, "workers": None if workers is None else int(workers),
                     "tokens_per_second": speed.value, "low": None, "high": None, "comm_exposed": exposed.value, "why": why,
                     "unlike": None})  # fmt: skip
    for run, row in zip(runs, rows):
        row["why"] = row["why"] or _other_work(run, runs) or _resized(run)
    known = [r for r in rows if r["why"] is None]
    known.sort(key=lambda r: (r["workers"], r["run"]))
    sizes = {r["workers"] for r in known}
    why = None if len(sizes) > 1 else f"all use {sizes.pop():g} {axis}" if sizes else "no run with a steady step"
    smallest = [r for r in known if r["workers"] == known[0]["workers"]]
    base = max(r["tokens_per_second"] / r["workers"] for r in smallest) if smallest else None
    for row in rows:
        row["efficiency"] = row["tokens_per_second"] / row["workers"] / base if base and row["why"] is None else None
        row["ideal"] = base * row["workers"] if base and row["why"] is None else None
    times = {run.shown: _per_token(run) for run in runs if not run.why_untimed}
    alpha = noise.share(noise.ALPHA, family=max(1, len(known) - 1))
    threads = {run.shown: run.number("threads") for run in runs if axis == "devices" and run.metadata.get("backend", "cpu") == "cpu"}
    for row in rows:
        if row["efficiency"] is None:
            continue
        first = max(smallest, key=lambda r: r["tokens_per_second"])
        own, others = threads.get(row["run"]), threads.get(first["run"])
        if own and others and own != others:
            row["unlike"] = f"threads of a device: {own:g}, not the {others:g} of {first['run']}, so its ideal is not that of equal devices"
        longer, ideal = noise.shift(times[first["run"]], times[row["run"]], alpha), first["workers"] / row["workers"]
        row["low"], row["high"] = (ideal / (1 + x) if row is not first and -1 < x < math.inf else None for x in (longer.high, longer.low))
    rows.sort(key=lambda r: (r["workers"] is None, r["workers"] or 0, r["run"]))
    return view(runs, why, axis=axis, rows=rows)


def _other_work(run: Run, runs: Sequence[Run]) -> str | None:
    """Why a run is no point of the others' curve: more devices do the same work on devices of one model, or nothing follows."""
    first = next((r for r in runs if not r.why_untimed), run)
    flops, others = run.number("flops_per_token"), first.number("flops_per_token")
    if flops and others and flops != others:
        return f"another model than {first.shown}: {flops:,.0f} FLOPs a token, not {others:,.0f}"
    kinds = [_kind(str(r.metadata.get("machine", ""))) for r in (run, first)]
    return None if kinds[0] == kinds[1] else f"on another machine than {first.shown}: {kinds[0]}, not {kinds[1]}"


def _resized(run: Run) -> str | None:
    """Why a run is no point at all: its steady steps had unlike numbers of devices, or not that of its latest session."""
    had = [int(n) for n in dict.fromkeys(steps_of(run).devices.dropna())]
    return None if had in ([], [run.number("devices")]) else f"its steps ran on {' and '.join(map(str, had))} devices"


def _kind(key: str) -> str:
    """The key of a machine's class, of one device where it has several."""
    return replace(GpuClass.from_key(key), devices=1, link="").key if family_of(key) == "cuda" else key


def _per_token(run: Run) -> np.ndarray:
    """float64[blocks]: logarithms of the typical time a token over the run's steady steps."""
    steady = steps_of(run)
    return np.log(noise.blocks(steady.step_ns.to_numpy(np.float64) / steady.tokens.to_numpy(np.float64)))


def comparison(a: Run, b: Run, *, anyway: bool = False, mixed: bool = False, by: str = "op") -> View:
    """Run b against run a by alpha.profile.compare: `rows` [{kind, name, a_ns, b_ns, share, low, estimate, high, raw, line, verdict,
    reason}], `common` shift of all, `differing` names, `verdict` of the whole and `sentence` in words. InputError when the runs are
    of different Programs or machines unless `anyway`, of different FLOPS models unless `mixed`.
    """
    for run in (a, b):
        if run.why_untimed:
            return view([a, b], f"{run.shown}: {run.why_untimed}", rows=[], a=a.label, b=b.label)
    mixture = same_axis([a, b], mixed=mixed)
    found = compare(_measured(a), _measured(b), anyway=anyway or bool(mixture), by=by)
    out = [_row(r) for r in found.differing()]
    whole = view([a, b], None, a=a.label, b=b.label, steps=list(found.steps), stalls=list(found.stalls), rows=[_row(r) for r in found.rows],
                 common=_common(found.common), differing=out, verdict=_verdict(found), sentence=_sentence(found, a, b))
    whole["notes"] += [*([mixture] if mixture else []), *found.notes]
    return whole


def _measured(run: Run) -> Measured:
    def columns(frame: pd.DataFrame) -> dict[str, np.ndarray]:
        return {str(c): frame[c].to_numpy() for c in frame.columns} if len(frame) else {}

    return Measured(run.shown, run.metadata, columns(run.tables["step_timing"]), columns(run.tables["op_profile"]),
                    columns(run.tables["peaks"]))


def _interval(i: Interval | None) -> dict[str, float | None] | None:
    if i is None:
        return None
    return {k: v if math.isfinite(v) else None for k, v in (("low", i.low), ("estimate", i.estimate), ("high", i.high))}


def _row(r: Row) -> View:
    return {"kind": r.kind, "name": r.name, "a_ns": r.a_ns, "b_ns": r.b_ns, "share": r.share if math.isfinite(r.share) else None,
            **(_interval(r.own) or {}), "raw": _interval(r.raw), "line": r.line if math.isfinite(r.line) else None, "verdict": r.verdict,
            "reason": r.reason, "false_alarms": r.known.alarms_text() if r.known else "", "power": r.known.power_text() if r.known else "",
            "trials": r.known.trials if r.known else 0}  # fmt: skip


def _common(c: Common) -> View:
    return {"shift": c.shift, "verdict": c.verdict, "cause": c.cause, "taken": c.taken, "peaks": _interval(c.peaks), "reason": c.reason}


def _verdict(found: Comparison) -> str:
    """DIFFERENT if anything stands out; SAME only if every row that occurs often enough is, the step and what all have in common
    included; else UNDECIDED. Where too few rows compute to tell what they have in common, the step itself says it."""
    if found.differing() or found.common.verdict not in (SAME, "UNDECIDED"):
        return "DIFFERENT"
    return SAME if {r.verdict for r in found.rows if r.reason != RARE} == {SAME} else "UNDECIDED"


def _sentence(found: Comparison, a: Run, b: Run) -> str:
    verdict, out = _verdict(found), found.differing()
    parts = [f"{b.label} against {a.label}: {verdict}."]
    if found.common.verdict not in (SAME, "UNDECIDED"):
        parts.append(f"Everything is {found.common.shift:+.1%} ({found.common.reason}).")
    for r in out[:5]:
        what = r.name if r.kind in ("rank", "step") else f"{r.kind} {r.name}"
        parts.append(f"{what} is {r.verdict} by {r.own.estimate:+.1%} ({r.own.low:+.1%} to {r.own.high:+.1%}).")
    if len(out) > 5:
        parts.append(f"{len(out) - 5} more rows stand out.")
    rare = [r.name for r in found.rows if r.reason == RARE]
    undecided = [f"{r.name} ({r.reason})" for r in found.rows if r.verdict == "UNDECIDED" and r.reason != RARE]
    if undecided:
        parts.append(f"{len(undecided)} of {len(found.rows) - len(rare)} rows are UNDECIDED: {', '.join(undecided[:3])}"
                     f"{' and others' if len(undecided) > 3 else ''}.")
    if rare:
        parts.append(f"Too rare to be judged: {', '.join(rare)}.")
    return " ".join(parts)
