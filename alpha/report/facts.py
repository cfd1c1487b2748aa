"""From the rows of a run to the facts that figures are made of. Floor 7."""

from __future__ import annotations

import numpy as np

from alpha.profile.figures import Facts
from alpha.profile.intervals import uncovered_ns
from alpha.profile.kernels import slowdowns
from alpha.profile.phases import OVERLAPPING, PHASES, STEP_PHASES
from alpha.profile.recorder import WARM_UP
from alpha.report.extra import pandas as pd
from alpha.report.runs import Run, ranks_of

STEADY = "steady"


def timing(run: Run) -> pd.DataFrame:
    """step_timing with the columns `steady` (bool: enters rates), `tokens` (of the whole step, NaN where its loss row is missing) and
    `devices` (that its session had, NaN where the run does not say).

    Steps that were refused (finite 0) are left out: they moved nothing.
    """
    if STEADY in run.cache:
        return run.cache[STEADY]
    rows, steps = run.tables["step_timing"], run.tables["step_metrics"].set_index("step")
    refused = set(steps.index[steps.finite == 0])
    rows = rows[~rows.step.isin(refused)] if refused else rows
    began = run.tables["sessions"].set_index(["session", "rank"]).first_step
    first = began.reindex(pd.MultiIndex.from_frame(rows[["session", "rank"]])).to_numpy(np.int64) if len(rows) else np.zeros(0, np.int64)
    measured = (rows.profiled.to_numpy() == 0) & (rows.step.to_numpy() >= first + WARM_UP)
    tokens = steps.tokens.reindex(rows.step).to_numpy(np.float64)
    had = rows.session.map(devices_of(run)).to_numpy(np.float64)
    run.cache[STEADY] = rows.assign(steady=measured & ~np.isnan(tokens), tokens=tokens, devices=had)
    return run.cache[STEADY]


def steps_of(run: Run) -> pd.DataFrame:
    """One row a steady step (steady on every rank that wrote it): `step`, `step_ns` of the slowest rank, `tokens`, `devices`."""
    rows = timing(run)
    each = rows.groupby("step", sort=True)
    one = each.agg(step_ns=("step_ns", "max"), tokens=("tokens", "first"), steady=("steady", "all"), devices=("devices", "max"))
    one = one.reset_index()
    return one[one.steady]


def devices_of(run: Run) -> pd.Series:
    """Devices of each session. The metadata know those of the latest: where sessions had unlike numbers of ranks, each rank is one."""
    ranks = ranks_of(run.tables["sessions"]).astype(np.float64)
    stated = run.number("devices")
    return ranks if stated is not None and ranks.nunique() > 1 else ranks * 0 + (np.nan if stated is None else int(stated))


def _devices(steady: pd.DataFrame, stated: float | None) -> float | None:
    """That the steady steps had: where they differ, their mean over time, so that what is divided by it is divided by time of devices."""
    if stated is None or not len(steady):
        return None if stated is None else int(stated)
    if steady.devices.nunique() == 1:
        return int(steady.devices.iloc[0])
    return float((steady.devices * steady.step_ns).sum() / steady.step_ns.sum())


def profiled_steps(run: Run) -> pd.DataFrame:
    """One row a profiled (step, rank): `step_ns`, `slowdown` against its steady neighbours (a share, NaN where there are too few), and the
    columns of kernel_times, NaN where its kernels were not timed."""
    rows = timing(run)
    group = rows.groupby(["rank", "session"], sort=False).ngroup().to_numpy()
    slow = slowdowns(rows.step.to_numpy(), group, rows.step_ns.to_numpy(), rows.steady.to_numpy(), rows.profiled.to_numpy() == 1)
    chosen = rows.assign(slowdown=slow)[rows.profiled == 1][["step", "rank", "step_ns", "slowdown"]]
    times = run.tables["kernel_times"]
    return chosen.merge(times, on=["step", "rank"], how="left") if len(times) else chosen.assign(kernels=np.nan)


def why_no_kernels(run: Run) -> str:
    """Why no kernel was timed, as the run says it; '' where it says none."""
    reason = run.metadata.get("kernel_times", "")
    return reason if reason.startswith("not measured") else ""


def facts(run: Run) -> Facts:
    """The facts of a run. With `why` set when it holds no timing."""
    if run.why_untimed:
        return Facts(why=run.why_untimed)
    rows, steady, ops, sessions = timing(run), steps_of(run), run.tables["op_profile"], run.tables["sessions"]
    plain, instrumented = rows[rows.profiled == 0], rows[rows.profiled == 1]
    lasted = sessions.seen_ns - sessions.began_ns
    profiled = rows.set_index(["step", "rank"]).step_ns
    have = pd.MultiIndex.from_frame(ops[["step", "rank"]].drop_duplicates())
    enqueue, timeline_ns = _exposed_enqueue(run, profiled) if run.metadata.get("backend", "cpu") != "cpu" else (None, 0)
    timed = profiled_steps(run).dropna(subset="kernels")
    one_step = rows.drop_duplicates("step")
    last = rows.groupby(["rank", "session"]).step.transform("max")
    return Facts(
        backend=run.metadata.get("backend", "cpu"), devices=_devices(steady, run.number("devices")),
        flops_per_token=run.number("flops_per_token"), executed_flops=run.number("executed_flops"), peak_flops=run.number("peak_flops"),
        peak_bandwidth=run.number("peak_bandwidth"), steady_tokens=int(steady.tokens.sum()), steady_ns=int(steady.step_ns.sum()),
        steady_steps=len(steady), step_ns=plain.step_ns.to_numpy(), wall_ns=plain.wall_ns.to_numpy(), steady=plain.steady.to_numpy(bool),
        phases={p: plain[f"{p}_ns"].to_numpy() for p in PHASES},
        overlapped={p: plain[f"{p}_overlapped_ns"].to_numpy() for p in OVERLAPPING},
        unexplained_ns=plain.unexplained_ns.to_numpy(), useful_ns=int((rows.step_ns - rows.checks_ns).sum()), session_ns=int(lasted.sum()),
        save_ns=_stalls(run, rows[rows.step < last]), save_foretold_ns=run.number("save_foretold_ns"),
        workflow_ns=int(lasted.groupby(sessions.session).max().sum()), tokens=int(np.nansum(one_step.tokens)),
        profiled_ns=int(profiled[profiled.index.isin(have)].sum()),
        profiled_mean_ns=float(instrumented.step_ns.mean()) if len(instrumented) else None,
        steady_mean_ns=float(rows.step_ns[rows.steady].mean()) if rows.steady.any() else None,
        op_device_ns=ops.device_ns.to_numpy(), op_flops=ops.flops.to_numpy(), op_nbytes=ops.nbytes.to_numpy(),
        op_enqueue_ns=ops.enqueue_ns.to_numpy(), op_wait_ns=ops.wait_ns.to_numpy(), exposed_enqueue_ns=enqueue, timeline_ns=timeline_ns,
        kernel_step_ns=timed.step_ns.to_numpy(), kernel_slowdown=timed.slowdown.to_numpy(), kernel_why=why_no_kernels(run),
        **{f"kernel_{x}_ns": timed[f"{x}_ns"].to_numpy(np.int64) for x in ("busy", "idle") if len(timed)},
    )  # fmt: skip


def _stalls(run: Run, rows: pd.DataFrame) -> np.ndarray:
    """ns that each save added to the steps from it to the next one. `rows`: those with steps behind them in their session."""
    every, beside = run.number("checkpoint_every"), run.number("save_measured_ns")
    if beside is not None:  # copied beside steps of a device: no phase of theirs holds it
        return np.array([beside], np.int64)
    if every is None:
        return rows.checkpoint_ns[rows.checkpoint_ns > 0].to_numpy(np.int64)
    saved = rows.assign(save=(rows.step + 1) // int(every), of=(rows.groupby(["rank", "session"]).step.transform("min")) // int(every))
    sums = saved[saved.save > saved.of].groupby(["rank", "session", "save"]).checkpoint_ns.sum()
    return sums.to_numpy(np.int64)


def _exposed_enqueue(run: Run, step_ns: pd.Series) -> tuple[int | None, int]:
    """Over the profiled steps with a timeline of host and streams: (ns of host enqueue while no stream is busy, ns of those steps)."""
    total, whole, seen = 0, 0, False
    for step, rank in run.timeline_steps():
        events = run.timeline(step, rank)
        # what happens between two steps stands on the host's track of the first
        host = events[(events.track == "host enqueue") & events.category.isin(STEP_PHASES)]
        device = events[events.track.str.startswith("stream")]
        if not len(host) or not len(device) or (step, rank) not in step_ns.index:
            continue
        seen = True
        total += uncovered_ns(host.start_ns.to_numpy(np.int64), host.stop_ns.to_numpy(np.int64), device.start_ns.to_numpy(np.int64),
                              device.stop_ns.to_numpy(np.int64))
        whole += int(step_ns.loc[(step, rank)])
    return (total, whole) if seen else (None, 0)
