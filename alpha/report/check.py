"""What must hold of the rows of a run before any figure is made from them. Floor 7.

Each check raises a CorruptError that names the row; what a reader should merely know goes into `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alpha.errors import CorruptError
from alpha.profile.phases import PHASES
from alpha.report.extra import pandas as pd
from alpha.report.tables import EXCLUSIVE, OVERLAPPED

Frames = Mapping[str, pd.DataFrame]


def check(path: Path, version: int, tables: Frames, notes: list[str]) -> None:
    """All checks of a run's tables."""
    _steps(path, tables, notes)
    if version > 1:
        _sessions(path, tables, notes)
        _timing(path, tables)
        _profile(path, tables)
        _communication(path, tables)
        _waits(path, tables)


def check_sums(path: Path, metadata: Mapping[str, str], manifest: Mapping[str, Any], tables: Frames) -> None:
    """What is stated in more than one place is stated alike: one peak, and FLOPs whose parts add up to their totals."""
    peak = tables["run_peak"]
    if len(peak) > 1:
        raise wrong("the run has more than one peak", path, f"{len(peak)} rows in run_peak: "
                    + ", ".join(f"{x / 1e9:.1f} GFLOP/s" for x in peak.flops), "one, which every utilisation stands against")  # fmt: skip
    for name, stated in (("flops", metadata.get("peak_flops")), ("bandwidth", metadata.get("peak_bandwidth")),
                         ("flops", dict(manifest.get("flops", {})).get("peak"))):  # fmt: skip
        if not len(peak) or stated in (None, ""):
            continue
        try:
            alike = float(stated) == peak[name].iloc[0]  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise wrong("the peak of a run is no number", path, f"{stated!r} ({name})", "a number") from None
        if not alike:
            raise wrong("the run states two peaks", path, f"{stated} beside {peak[name].iloc[0]} ({name}) in run_peak", "one number")
    parts = tables["flops_parts"]
    if not len(parts):
        return
    totals = {"model": _product(metadata, "flops_per_token", "tokens_per_step"), "executed": _product(metadata, "executed_flops")}
    for name, total in totals.items():
        if total is not None and not abs(int(parts[name].sum()) - total) <= 1e-12 * total:
            raise wrong(f"the parts of the {name} FLOPs do not add up to their total", path, f"{int(parts[name].sum())} in flops_parts",
                        f"{total:.0f} a step, as run_metadata says")  # fmt: skip


def _product(metadata: Mapping[str, str], *keys: str) -> float | None:
    try:
        return float(np.prod([float(metadata[k]) for k in keys]))
    except (KeyError, TypeError, ValueError):
        return None  # not stated; what is no number is refused where it is read


def wrong(what: str, path: Path, came: str, expected: str) -> CorruptError:
    return CorruptError(what, came=f"{path}: {came}", expected=expected, do="restore metrics.sqlite from a copy, or leave this run out")


def clock_error(path: Path, came: str) -> CorruptError:
    return wrong("a clock of the run steps backwards", path, came, "times that only grow within a session and rank")


def _steps(path: Path, tables: Frames, notes: list[str]) -> None:
    steps = tables["step_metrics"]
    for name in ("step", "tokens", "seconds"):
        if (steps[name] < 0).any():
            bad = steps[steps[name] < 0].iloc[0]
            raise wrong("the metrics hold a negative quantity", path, f"step_metrics: {name} = {bad[name]} at step {int(bad.step)}",
                         "nothing below 0")  # fmt: skip
    gaps = np.flatnonzero(np.diff(steps.step.to_numpy()) > 1)
    if len(gaps) or (len(steps) and steps.step.iloc[0] > 0):
        first = int(steps.step.iloc[gaps[0]]) + 1 if len(gaps) else 0
        lost = int(steps.step.iloc[-1]) + 1 - len(steps)
        notes.append(f"{lost} step rows are missing, the first of them step {first} (a killed run loses what was not written yet)")


def _sessions(path: Path, tables: Frames, notes: list[str]) -> None:
    sessions = tables["sessions"]
    for s in sessions.itertuples():
        who = f"session {s.session}, rank {s.rank}"
        if s.seen_ns < s.began_ns:
            raise clock_error(path, f"{who} was last seen {s.began_ns - s.seen_ns} ns before it began")
        if s.loop_ns == s.loop_ns and s.loop_ns < s.began_ns:
            raise clock_error(path, f"{who} began its first step {s.began_ns - s.loop_ns:.0f} ns before it began")
    own = sessions[sessions["rank"] == 0]
    if (np.diff(own.unix_ns.to_numpy()) < 0).any():
        notes.append("the clock of the day was set back between two sessions; durations use the monotonic clock and are not affected")


def _timing(path: Path, tables: Frames) -> None:
    timing = tables["step_timing"]
    if not len(timing):
        return
    counted = ["step", "rank", "began_ns", "wall_ns", "step_ns", "launches", "enqueue_ns", *EXCLUSIVE, *OVERLAPPED]
    values = timing[counted].to_numpy()
    if (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise wrong("the metrics hold a negative duration", path, f"{counted[column]} = {values[row, column]} at {_at(timing, row)}",
                     "nothing below 0: a clock stepped backwards, or the file was edited")  # fmt: skip
    wall, known = timing.wall_ns.to_numpy(), timing[EXCLUSIVE].to_numpy().sum(axis=1)
    for bad, what, came in (
        (known > wall, "the phases of a step sum to more than its wall time", known),
        (timing.step_ns.to_numpy() > wall, "a step is longer than its interval", timing.step_ns.to_numpy()),
    ):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise wrong(what, path, f"{came[row]} ns at {_at(timing, row)}", f"at most its wall_ns, {wall[row]}")
    off = timing.unexplained_ns.to_numpy() != wall - known
    if off.any():
        row = int(np.flatnonzero(off)[0])
        raise wrong("the unexplained time of a step is not what its phases leave", path,
                     f"{timing.unexplained_ns.iloc[row]} ns at {_at(timing, row)}", f"{wall[row] - known[row]}")  # fmt: skip
    _order(path, timing, tables["sessions"])


def _order(path: Path, timing: pd.DataFrame, sessions: pd.DataFrame) -> None:
    """Rows are sorted by (rank, step): within a rank sessions may not go down, within a session a step begins when the one before ends."""
    rank, session = timing["rank"].to_numpy(), timing.session.to_numpy()
    began, end = timing.began_ns.to_numpy(), (timing.began_ns + timing.wall_ns).to_numpy()
    same_rank = rank[1:] == rank[:-1]
    back = same_rank & (session[1:] < session[:-1])
    if back.any():
        row = int(np.flatnonzero(back)[0]) + 1
        raise wrong("the steps of a run are out of order", path,
                     f"{_at(timing, row)} is of session {session[row]}, the step before it of session {session[row - 1]}",
                     "later steps in later sessions")  # fmt: skip
    same = same_rank & (session[1:] == session[:-1])
    early = same & (began[1:] < end[:-1])
    if early.any():
        row = int(np.flatnonzero(early)[0]) + 1
        if began[row] < began[row - 1]:
            raise clock_error(path, f"{_at(timing, row)} began {began[row - 1] - began[row]} ns before the step before it: out of order")
        raise wrong("two steps of a rank overlap", path, f"{_at(timing, row)} began {end[row - 1] - began[row]} ns too early",
                    "a step begins when the one before it has ended")  # fmt: skip
    seen = {(int(s.session), int(s.rank)): (int(s.began_ns), int(s.seen_ns)) for s in sessions.itertuples()}
    for (r, s), rows in timing.groupby(["rank", "session"], sort=False).indices.items():
        if (int(s), int(r)) not in seen:
            raise wrong("steps of a session that never began", path, f"session {s}, rank {r}", "a row in the table sessions")
        low, high = seen[int(s), int(r)]
        if began[rows[0]] < low or end[rows[-1]] > high:
            raise clock_error(path, f"steps of session {s}, rank {r} lie outside of the session: {began[rows[0]]} to {end[rows[-1]]}, "
                         f"session {low} to {high}")  # fmt: skip


def _profile(path: Path, tables: Frames) -> None:
    ops = tables["op_profile"]
    counted = ["count", "enqueue_ns", "device_ns", "wait_ns", "flops", "nbytes", "dispatches"]
    values = ops[counted].to_numpy()
    if (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise wrong("the profile holds a negative quantity", path, f"{counted[column]} = {values[row, column]} at {_at(ops, row)}, "
                     f"launch {ops['launch'].iloc[row]} of {ops['plan'].iloc[row]}", "nothing below 0")  # fmt: skip
    unknown = sorted(set(ops.phase) - set(PHASES))
    if unknown:
        raise wrong("the profile names a phase that there is not", path, unknown[0], ", ".join(PHASES))


def _communication(path: Path, tables: Frames) -> None:
    """Exposed and overlapped make up the total. By the flight recorder neither is more than what the executor stamped for the step."""
    rows, times = tables["communication"], ["total_ns", "exposed_ns", "overlapped_ns"]
    if not len(rows):
        return
    for bad, expected in (((rows[[*times, "calls", "nbytes"]] < 0).any(axis=1), "nothing below 0"),
                          (rows.exposed_ns + rows.overlapped_ns != rows.total_ns, "exposed + overlapped = total")):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            came = ", ".join(f"{name} = {rows[name].iloc[row]}" for name in times)
            raise wrong("the communication of a step contradicts itself", path, f"{came} at {_at(rows, row)}", expected)
    known = rows.groupby(["step", "rank"])[times].sum().reset_index().merge(tables["step_timing"], on=["step", "rank"])
    for name, column in (("exposed_ns", "comm_ns"), ("overlapped_ns", "comm_overlapped_ns")):
        row = int((known[name] - known[column]).to_numpy().argmax()) if len(known) else 0
        if len(known) and known[name].iloc[row] > known[column].iloc[row]:
            raise wrong("a step has more communication than its executor stamped", path, f"{name} = {known[name].iloc[row]} at "
                        f"{_at(known, row)}", f"at most {column} of step_timing, {known[column].iloc[row]}")  # fmt: skip


def _waits(path: Path, tables: Frames) -> None:
    rows = tables["data_waits"]
    for bad, expected in (((rows[["batches", "ready", "wait_ns", "made_ns"]] < 0).any(axis=1), "nothing below 0"),
                          (rows.ready > rows.batches, "at most all batches ready"),
                          ((rows.ready == rows.batches) & (rows.wait_ns > 0), "no wait where all were ready")) if len(rows) else ():
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            came = ", ".join(f"{name} = {rows[name].iloc[row]}" for name in ("batches", "ready", "wait_ns", "made_ns"))
            raise wrong("the waits of a step for data contradict themselves", path, f"{came} at {_at(rows, row)}", expected)


def _at(frame: pd.DataFrame, row: int) -> str:
    return f"step {frame['step'].iloc[row]}, rank {frame['rank'].iloc[row]}"
