"""What a page or a chart shows of runs, as plain data that JSON can hold. Floor 7.

Every view is a dict with `provenance` (a list, one entry a run), `why` (None, or the reason why there is nothing to show) and `notes`; the
static report and the dashboard draw the same dicts. Series over steps are cut to `points` buckets of equal step counts, each with its
mean, smallest and largest value (`x` is the bucket's first step), so nothing that stands out is lost. Times are in ns unless a key says
otherwise; a value that does not exist is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from alpha.flops.parts import DIRECTIONS, PARTS
from alpha.profile.figures import Target, bandwidth_bound, ceiling_ns, judge
from alpha.profile.figures import targets as make_targets
from alpha.profile.kernels import PERTURBED
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.registry.status import Registry
from alpha.report.across import comparison, scaling
from alpha.report.facts import facts, profiled_steps, steps_of, timing
from alpha.report.ranks import ranks
from alpha.report.reading import sources, waits
from alpha.report.runs import Run, same_axis
from alpha.report.series import POINTS, View, all_why, buckets, plain, view

# -- one run -------------------------------------------------------------------------------------------------------------------


def own_targets(run: Run, asked: Mapping[str, float] | None = None) -> dict[str, Target]:
    """Targets that replace the defaults: those of the manifest's `targets`, then those asked for."""
    stored = {str(k): float(v) for k, v in dict(run.manifest.get("targets", {})).items()}
    return {**make_targets(stored, "the run's own"), **make_targets(asked or {}, "asked for")}


def figures(run: Run, asked: Mapping[str, float] | None = None) -> View:
    """`figures`: every metric of alpha.profile.figures with value, text, target, verdict or reason."""
    made = judge(facts(run), own_targets(run, asked))
    rows = [{**asdict(f), "text": f.text, "target": f.target_text, "target_source": f.target.source if f.target else ""} for f in made]
    return view([run], None, figures=rows)


def waterfall(run: Run, first: int | None = None, last: int | None = None) -> View:
    """Mean ns a step of each phase over unprofiled steps in [first, last]: `phases` = [{phase, exclusive_ns, overlapped_ns, share}] in
    order, then `unexplained`; the exclusive entries add up to `wall_ns`. `about`: what each phase counts is in alpha.profile.phases.
    """
    rows = timing(run) if not run.why_untimed else None
    if rows is not None:
        rows = rows[(rows.profiled == 0) & (rows.step >= (first or 0)) & (rows.step <= (math.inf if last is None else last))]
    if rows is None or not len(rows):
        return view([run], run.why_untimed or "no unprofiled step in this range", phases=[], steps=0)
    n, wall = len(rows), int(rows.wall_ns.sum())
    entries = []
    for name in (*PHASES, "unexplained"):
        spent = int(rows[f"{name}_ns"].sum())
        beside = int(rows[f"{name}_overlapped_ns"].sum()) if name in OVERLAPPING else 0
        entries.append({"phase": name, "about": PHASES.get(name, "wall time that no phase accounts for"), "exclusive_ns": spent / n,
                        "overlapped_ns": beside / n, "share": spent / wall if wall else 0.0})  # fmt: skip
    return view([run], None, phases=entries, wall_ns=wall / n, step_ns=int(rows.step_ns.sum()) / n, steps=int(rows.step.nunique()),
                 ranks=sorted(int(r) for r in rows["rank"].unique()), first=int(rows.step.min()), last=int(rows.step.max()))


def phases_over_time(run: Run, points: int = POINTS) -> View:
    """`x` and, a phase, its mean exclusive ns in each bucket of unprofiled steps (rank 0): the waterfall over the run."""
    if run.why_untimed:
        return view([run], run.why_untimed, x=[], series={})
    rows = timing(run)
    rows = rows[(rows.profiled == 0) & (rows["rank"] == 0)]
    x = rows.step.to_numpy()
    series = {p: buckets(x, rows[f"{p}_ns"].to_numpy(), points) for p in (*PHASES, "unexplained")}
    return view([run], None if len(x) else "no unprofiled step", x=series["idle"]["x"], series={p: s["mean"] for p, s in series.items()})


def utilisation(runs: Sequence[Run], points: int = POINTS, *, mixed: bool = False) -> View:
    """`runs`: [{run, label, mfu, hfu, tokens_per_second}] as bucketed series over steady steps. InputError for runs of different FLOPS
    models unless `mixed`; then `notes` says so."""
    mixture = same_axis([r for r in runs if not r.why_untimed], mixed=mixed)
    made: list[View] = []
    for run in runs:
        if run.why_untimed:
            made.append({"run": run.shown, "label": run.label, "why": run.why_untimed})
            continue
        rows, f = steps_of(run), facts(run)
        x, seconds = rows.step.to_numpy(), rows.step_ns.to_numpy() / 1e9
        with np.errstate(divide="ignore", invalid="ignore"):
            peak = (f.peak_flops or math.nan) * rows.devices.to_numpy()
            speed = rows.tokens.to_numpy() / seconds
            mfu = speed * (f.flops_per_token or math.nan) / peak
            hfu = (f.executed_flops or math.nan) / seconds / peak
        why = None if len(x) else "no steady step yet"
        made.append({"run": run.shown, "label": run.label, "why": why, "mfu": buckets(x, mfu, points), "hfu": buckets(x, hfu, points),
                     "tokens_per_second": buckets(x, speed, points)})  # fmt: skip
    whole = view(runs, all_why(made), runs=made)
    whole["notes"] += [mixture] if mixture else []
    return whole


def top_ops(run: Run, n: int = 15, by: str = "op") -> View:
    """The ops that take the most device time on profiled steps. `by` 'op' joins launches of one op, component and shape; 'launch' keeps
    every launch apart. `ops`: [{op, component, phase, shape, dtype, layer, runs, dispatches, enqueue_ns, device_ns, wait_ns, flops,
    nbytes, intensity, flops_rate, bandwidth, ceiling_ns, distance, bound, share}], all a step; `distance` = device_ns / ceiling_ns
    (1 is the roofline) and `share` of all device time. `rest`: what is left out.
    """
    ops = run.tables["op_profile"] if run.version > 1 else None
    if ops is None or not len(ops):
        return view([run], run.why_untimed or "no step was profiled", ops=[], rest=None, steps=0)
    keys = [*(["plan", "launch", "layer"] if by == "launch" else []), "op", "component", "phase", "shape", "dtype"]
    sums = ["count", "enqueue_ns", "device_ns", "wait_ns", "flops", "nbytes", "dispatches"]
    pairs = len(ops[["step", "rank"]].drop_duplicates())
    table = ops.groupby(keys, sort=False)[sums].sum().reset_index().sort_values("device_ns", ascending=False, kind="stable")
    whole, peak, width = int(table.device_ns.sum()), run.number("peak_flops"), run.number("peak_bandwidth")
    device = table.device_ns.to_numpy(np.float64)
    ceiling: np.ndarray = np.full(len(table), np.nan)
    bound: np.ndarray = np.full(len(table), "", object)
    if peak and width:
        ceiling = ceiling_ns(table.flops.to_numpy(), table.nbytes.to_numpy(), peak, width)
        bound = np.where(bandwidth_bound(table.flops.to_numpy(), table.nbytes.to_numpy(), peak, width), "bandwidth", "compute")
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = {"intensity": table.flops / table.nbytes, "flops_rate": table.flops / device * 1e9,
                 "bandwidth": table.nbytes / device * 1e9, "distance": device / ceiling, "share": device / np.float64(whole)}  # fmt: skip
    made: list[View] = []
    for i in range(min(n, len(table))):
        row = table.iloc[i]
        made.append({**{k: row[k] if isinstance(row[k], str) else int(row[k]) for k in keys},
                     **{("runs" if k == "count" else k): int(row[k]) / pairs for k in sums},
                     **{k: plain(np.asarray(v)[i : i + 1])[0] for k, v in rates.items()},
                     "ceiling_ns": plain(ceiling[i : i + 1] / pairs)[0], "bound": str(bound[i])})  # fmt: skip
    left = table.iloc[n:]
    rest = {"ops": len(left), "device_ns": int(left.device_ns.sum()) / pairs, "share": int(left.device_ns.sum()) / whole if whole else None}
    return view([run], None, ops=made, rest=rest, steps=int(ops.step.nunique()), device_ns=whole / pairs,
                 peak_flops=peak, peak_bandwidth=width)


def profiled(run: Run) -> View:
    """`rows`: [{step, rank, slowdown, judged, kernels, busy, idle, gap, gap_sync, gap_copy, longest_gap_ns, copies, copy_ns,
    copy_overlapped, syncs, sync_ns, stamps, stamp_offset_ns, stamp_spread_ns}], one a profiled step. slowdown: against its steady
    neighbours, as a share; judged: its gaps may be held against a target. Shares are of the step, copy_overlapped of copy_ns; None where
    not measured. `measured`: what timed the kernels, or why nothing did."""
    if run.why_untimed:
        return view([run], run.why_untimed, rows=[], measured="")
    rows: list[View] = []
    for r in profiled_steps(run).to_dict("records"):
        of = {"step": int(r["step"]), "rank": int(r["rank"]), "slowdown": plain(np.array([r["slowdown"]]))[0],
              "judged": bool(r["slowdown"] <= PERTURBED)}
        timed = r["kernels"] == r["kernels"]
        whole = {k: int(r[k]) if timed else None for k in ("kernels", "longest_gap_ns", "copies", "copy_ns", "syncs", "sync_ns", "stamps",
                                                           "stamp_offset_ns", "stamp_spread_ns")}
        shares = {k: r[f"{k}_ns"] / r["step_ns"] if timed else None for k in ("busy", "idle", "gap", "gap_sync", "gap_copy")}
        beside = r["copy_overlapped_ns"] / r["copy_ns"] if timed and r["copy_ns"] else None
        rows.append({**of, **whole, **shares, "copy_overlapped": beside})
    on_device = run.metadata.get("backend", "cpu") != "cpu"
    measured = run.metadata.get("kernel_times") or "not measured: the run says of no instrument" if on_device else (
        "launches by the host's clock, on every step")
    return view([run], None if rows else "no step was profiled", rows=rows, measured=measured)


def flops(run: Run) -> View:
    """`parts`: [{part, about, <direction>_model, <direction>_executed ...}] in order: FLOPs of one step by the FLOPS model (MFU counts
    them) and executed (HFU), last the sums; `version` and `convention`."""
    rows = run.tables["flops_parts"]
    version, convention = run.flops_model
    if not len(rows):
        return view([run], "the run does not tell its FLOPs apart", parts=[], version=version, convention=convention)
    entries: list[View] = []
    for part, about in (*PARTS.items(), ("together", "what MFU and HFU count")):
        own = rows if part == "together" else rows[rows.part == part]
        entry: View = {"part": part, "about": about}
        for kind in ("model", "executed"):
            entry |= {f"{to}_{kind}": int(own[kind][own.direction == to].sum()) for to in DIRECTIONS}
            entry[kind] = int(own[kind].sum())
        entries.append(entry)
    return view([run], None, parts=entries, version=version, convention=convention)


def samples(run: Run) -> View:
    """`samples`: [{step, prompt, text, tokens, temperature, top_k, seed}], the earliest first."""
    rows = run.tables["samples"]
    why = None if len(rows) else "no text was sampled"
    return view([run], why, samples=rows.to_dict("records") if len(rows) else [])


def launches(runs: Sequence[Run], points: int = POINTS) -> View:
    """`runs`: launches a step over all steps of rank 0 (bucketed), and `dispatches` a profiled step: {x, value}."""
    made: list[View] = []
    for run in runs:
        if run.why_untimed:
            made.append({"run": run.shown, "label": run.label, "why": run.why_untimed})
            continue
        rows, ops = timing(run), run.tables["op_profile"]
        rows, ops = rows[rows["rank"] == 0], ops[ops["rank"] == 0]
        counted = ops.groupby("step", sort=True).dispatches.sum()
        series = buckets(rows.step.to_numpy(), rows.launches.to_numpy(), points)
        made.append({"run": run.shown, "label": run.label, "why": None, "launches": series,
                     "dispatches": {"x": counted.index.tolist(), "value": counted.tolist()}})  # fmt: skip
    return view(runs, all_why(made), runs=made)


def bandwidth(runs: Sequence[Run]) -> View:
    """`runs`: a profiled step, bytes/s over all launches and over those that bandwidth bounds: {x, all, bound, share}; `share` is `bound`
    over the run's peak."""
    made: list[View] = []
    for run in runs:
        ops, peak, ceiling = run.tables["op_profile"], run.number("peak_flops"), run.number("peak_bandwidth")
        if run.why_untimed or not len(ops):
            made.append({"run": run.shown, "label": run.label, "why": run.why_untimed or "no step was profiled"})
            continue
        limited = np.zeros(len(ops), bool)
        if peak and ceiling:
            limited = bandwidth_bound(ops.flops.to_numpy(), ops.nbytes.to_numpy(), peak, ceiling)
        every = ops.groupby("step", sort=True)[["nbytes", "device_ns"]].sum()
        own = ops[limited].groupby("step")[["nbytes", "device_ns"]].sum().reindex(every.index)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole, bound = (f.nbytes.to_numpy() / f.device_ns.to_numpy() * 1e9 for f in (every, own))
        made.append({"run": run.shown, "label": run.label, "why": None, "x": every.index.tolist(), "all": plain(whole),
                     "bound": plain(bound), "share": plain(bound / (ceiling or math.nan)), "peak_bandwidth": ceiling})  # fmt: skip
    return view(runs, all_why(made), runs=made)


def memory(run: Run, points: int = POINTS) -> View:
    """`arenas`: [{arena, planned, last, most}] in bytes over ranks (the largest), planned None for the whole process or device;
    `series`: arena -> bucketed bytes of rank 0 over the steps at which they were measured."""
    rows = run.tables["memory"] if run.version > 1 else None
    if rows is None or not len(rows):
        return view([run], run.why_untimed or "memory was not measured yet", arenas=[], series={})
    arenas, series = [], {}
    for arena, own in rows.groupby("arena", sort=False):
        planned = own.planned.max()
        arenas.append({"arena": arena, "planned": None if planned != planned else int(planned), "most": int(own.actual.max()),
                       "last": int(own[own.step == own.step.max()].actual.max())})  # fmt: skip
        zero = own[own["rank"] == 0]
        series[str(arena)] = buckets(zero.step.to_numpy(), zero.actual.to_numpy(), points)
    return view([run], None, arenas=sorted(arenas, key=lambda a: (a["planned"] is None, -a["most"])), series=series)


def memory_launches(run: Run, plan: str | None = None) -> View:
    """Live bytes of the activation arena over the launches of a Segment (default: the one that needs most): {plan, launch, live, op,
    layer, phase}; `plans`: all Segments there are."""
    rows = run.tables["memory_plan"] if run.version > 1 else None
    if rows is None or not len(rows):
        why = run.why_untimed if run.version < 2 else "the run stored no memory plan"
        return view([run], why, plan=None, plans=[], launch=[], live=[])
    plans = rows.groupby("plan").live.max()
    chosen = plan or str(plans.idxmax())
    own = rows[rows.plan == chosen]
    return view([run], None if len(own) else f"no Segment {chosen}", plan=chosen, plans=plans.index.tolist(), launch=own.launch.tolist(),
                 live=own.live.tolist(), op=own.op.tolist(), layer=own.layer.tolist(), phase=own.phase.tolist())


def loss(runs: Sequence[Run], points: int = POINTS) -> View:
    """`runs`: bucketed loss, gradient norm and learning rate over steps, and `evaluations` {x, bits_per_byte}. Schema 1 has it too."""
    made: list[View] = []
    for run in runs:
        rows, evals = run.tables["step_metrics"], run.tables["evaluations"]
        x = rows.step.to_numpy()
        made.append({"run": run.shown, "label": run.label, "why": None if len(x) else "no finished step yet",
                     **{k: buckets(x, rows[k].to_numpy(), points) for k in ("loss", "norm", "lr")},
                     "refused": rows.step[rows.finite == 0].tolist(),
                     "evaluations": {"x": evals.step.tolist(), "bits_per_byte": plain(evals.bits_per_byte.to_numpy())},
                     "order2_bits_per_byte": run.number("order2_bits_per_byte")})  # fmt: skip
    return view(runs, all_why(made), runs=made)


def gates(run: Run, registry: Registry | None = None) -> View:
    """`components`: every component that the run used, with the evidence it ran on (`evidence`: gate -> hash of the record, from the
    manifest) and, given a registry, its status for today's code: `usable`, `gates` {gate: verdict}, `missing` reasons."""
    used = run.manifest.get("components")
    if not isinstance(used, Mapping) or not used:
        return view([run], "the manifest names no components", components=[])
    made: list[View] = []
    for component, evidence in sorted(used.items()):
        entry: dict[str, Any] = {"component": component, "evidence": dict(evidence) if isinstance(evidence, Mapping) else {}}
        if registry is not None and component in registry.catalogue:
            status = registry.status(component)
            verdicts = {g.gate: "STALE" if g.verdict == "PASS" and not g.satisfied else g.verdict for g in status.gates.values()}
            entry |= {"usable": status.usable, "gates": verdicts,
                      "missing": [f"{g.gate}: {g.why}" for g in status.gates.values() if not g.satisfied]
                      + [f"presupposes {p}, which is not usable" for p in status.presupposed]}  # fmt: skip
        elif registry is not None:
            entry |= {"usable": False, "gates": {}, "missing": ["there is no such component today"]}
        made.append(entry)
    machine = registry.machine.key if registry is not None else None
    return view([run], None, components=made, machine=machine, then=run.metadata.get("machine", run.manifest.get("machine")))


__all__ = ["bandwidth", "comparison", "figures", "flops", "gates", "launches", "loss", "memory", "memory_launches", "own_targets",
           "phases_over_time", "ranks", "samples", "scaling", "sources", "top_ops", "utilisation", "waits", "waterfall"]
