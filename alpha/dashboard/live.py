"""Runs kept in memory between requests and brought up to date by the rows that were added since. Floor 8.

A run that goes on only ever adds rows of later steps, so a reload reads those alone; a new session (a resume replaces rows) or any file
that was put in place of another one is read whole. What is kept is checked as a whole after every reading.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict, replace
from typing import Any

from alpha.dashboard import palette
from alpha.dashboard.folder import Folder, fingerprint
from alpha.dashboard.progress import error_body, progress
from alpha.errors import InputError
from alpha.profile.compare import Measured, compare
from alpha.profile.phases import PHASES
from alpha.report import views
from alpha.report.extra import pandas as pd
from alpha.report.runs import Run, checked, load
from alpha.report.tables import KEYS, Reader, frame
from alpha.train.rundir import UNGATED
from alpha.train.seal import why_ungated

KEPT = 6
"""Runs in memory; about 30 MB for 100,000 steps each."""

GROWING = ("step_metrics", "step_timing", "op_profile", "memory", "communication", "data_waits")
"""Tables whose rows of a step are final once two later steps are there (a step's rows may come in two batches)."""

TOP = 30
COMPARED = ("step", "rank", "session", "profiled", "step_ns", "unexplained_ns")


class Live:
    """Answers about the runs of a folder. Safe to ask from several threads; a run is read by one at a time."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._kept: OrderedDict[str, tuple[Any, Run]] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Any]:
        """The runs, the latest first, and how phases are coloured."""
        found = [{"name": e.name, "status": e.status, "changed": e.changed, "metrics": e.metrics,
                  "error": None if e.error is None else error_body(e.error)} for e in self.folder.entries()]
        return {"root": str(self.folder.root), "exists": self.folder.root.is_dir(), "runs": found, "phases": palette.phases()}

    def progress(self, name: str, since: int) -> dict[str, Any]:
        """See alpha.dashboard.progress; `stamp` changes whenever the run's files do."""
        path = self.folder.path(name)
        stamp = str(hash(fingerprint(path)))
        if not (path / "metrics.sqlite").is_file():
            load(path)  # says what is missing
        return {"stamp": stamp, **progress(path, since)}

    def view(self, name: str, *, points: int, first: int | None = None, last: int | None = None,
             beside: str | None = None) -> dict[str, Any]:  # fmt: skip
        """All charts of a run over steps `first` to `last` (None: to its ends), series in at most `points` buckets. `beside`: a second run
        for the charts over steps. The figures are those of the whole run."""
        whole = self._run(name)
        run = within(whole, first, last)
        runs, apart = [run], []
        if beside is not None and beside != name:
            runs.append(within(self._run(beside), first, last))
        try:
            used = views.utilisation(runs, points)
        except InputError as error:  # different FLOPS models have no common axis
            used = views.utilisation(runs[:1], points)
            apart = [f"{beside} is not drawn here: {error.what}; {error.came}"]
        return {
            "run": whole.name, "ungated": whole.ungated, "provenance": whole.provenance(), "notes": whole.notes, "schema": whole.version,
            "figures": views.figures(whole), "waterfall": views.waterfall(run), "phases": views.phases_over_time(run, points),
            "utilisation": {**used, "notes": used["notes"] + apart}, "ops": views.top_ops(run, TOP),
            "launches": views.launches(runs, points), "bandwidth": views.bandwidth(runs), "memory": views.memory(run, points),
            "memory_launches": views.memory_launches(run), "loss": views.loss(runs, points), "gates": views.gates(whole),
            "ranks": views.ranks(run), "waits": {**views.waits(run, points), "sources": views.sources(run)["sources"]},
        }  # fmt: skip

    def compare(self, a: str, b: str, *, anyway: bool = False) -> dict[str, Any]:
        """Run b against run a: verdicts with intervals, what stands out first. `anyway`: also where they are not comparable."""
        runs = [self._run(a), self._run(b)]
        made = compare(*map(measured, runs), anyway=anyway)
        return {**asdict(made), "differing": [f"{r.kind} {r.name}" for r in made.differing()],
                "provenance": [r.provenance() for r in runs]}

    def _run(self, name: str) -> Run:
        path = self.folder.path(name)
        with self._lock:
            own = self._locks.setdefault(name, threading.Lock())
        with own:
            mark = fingerprint(path)
            with self._lock:
                kept = self._kept.get(name)
            if kept is not None and kept[0] == mark:
                return kept[1]
            run = (grown(kept[1]) if kept is not None and kept[0][0][0] == mark[0][0] else None) or load(path)
            with self._lock:
                self._kept[name] = (mark, run)
                self._kept.move_to_end(name)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return run


def grown(run: Run) -> Run | None:
    """The same run with the rows that were added since; None where more than that changed and it must be read whole."""
    if run.version < 2 or run.why_untimed:
        return None
    with Reader(run.path / "metrics.sqlite", 5.0) as db:
        sessions = frame(db, "sessions")
        same = ["session", "rank", "pid", "first_step", "began_ns"]
        if db.version != run.version or not sessions[same].equals(run.tables["sessions"][same]):
            return None
        ends = [int(run.tables["step_metrics"].step.max()), *map(int, run.tables["step_timing"].groupby("rank").step.max())]
        last = min(ends) - 2
        metadata = dict(db.rows("SELECT key, value FROM run_metadata"))
        tables = {"sessions": sessions}
        for name in KEYS:
            if name in GROWING:
                tables[name] = _joined(run.tables[name], frame(db, name, last), last, KEYS[name])
            elif name != "sessions":
                tables[name] = frame(db, name)
    unsealed = why_ungated(run.path)
    if unsealed:
        metadata["status"] = UNGATED
    return checked(replace(run, metadata=metadata, unsealed=unsealed, tables=tables, cache={}))


def _joined(old: pd.DataFrame, new: pd.DataFrame, last: int, order: str) -> pd.DataFrame:
    kept = old[old.step <= last] if len(old) else old
    if not len(kept) or not len(new):
        return (new if not len(kept) else kept).reset_index(drop=True)
    both = pd.concat([kept, new], ignore_index=True)
    return both if order.startswith("step") else both.sort_values(order.split(", "), kind="stable", ignore_index=True)


def within(run: Run, first: int | None, last: int | None) -> Run:
    """The run with the rows of steps `first` to `last` alone."""
    if first is None and last is None:
        return run
    low, high = -1 if first is None else first, 2**62 if last is None else last
    if low > high:
        raise InputError("the range of steps is empty", came=f"{low} to {high}", expected="a last step that is not before the first")
    tables = {n: t[(t.step >= low) & (t.step <= high)].reset_index(drop=True) if "step" in t.columns else t for n, t in run.tables.items()}
    return replace(run, tables=tables, cache={})


def measured(run: Run) -> Measured:
    """A run as the comparison takes it. InputError if it holds no timing."""
    if run.why_untimed:
        raise InputError("there is no timing to compare", came=f"{run.path}: {run.why_untimed}", expected="a run with timed steps")
    timing, ops, peaks = run.tables["step_timing"], run.tables["op_profile"], run.tables["peaks"]
    columns = [*COMPARED, *(c for c in timing.columns if c.endswith("_ns") and c.removesuffix("_ns") in PHASES)]
    return Measured(run.name, run.metadata, {c: timing[c].to_numpy() for c in columns},
                    {c: ops[c].to_numpy() for c in ("step", "rank", "plan", "launch", "op", "shape", "phase", "device_ns")},
                    {c: peaks[c].to_numpy() for c in ("flops", "bandwidth")})  # fmt: skip
