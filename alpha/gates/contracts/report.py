"""Cases of the figures of a report: a run of drawn rows, read as a report reads it, and every figure counted again from the rows. Floor 7.

Drawn are ranks, sessions, resumes, profiled and refused steps, rows that are missing, saves, kernels of a GPU and its timeline. The second
count knows dictionaries and loops alone.

A report is read in a process of its own: pandas loads what nothing that trains may load, so it has no place in a process that gates.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from alpha import config
from alpha.component import Measured
from alpha.errors import AlphaError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.engine import child_environment
from alpha.gates.contracts.profile import chances, compared, figured, ranked, rates
from alpha.profile.figures import FAIL, PASS, judge
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.profile.schema import COMMUNICATION, TABLES, VERSION, VIEWS
from alpha.train import rundir

Case = Callable[[np.random.Generator], Measured]
DRAWS = 4
"""Runs of a case. Two of them leave nothing out."""
RUN = """
[run]
name = "drawn"
[model]
family = "gpt"
layers = 1
width = 16
heads = 2
[data]
sequence = 8
[train]
steps = 9
batch = 2
[optim]
lr = 0.1
"""
KERNEL_TIMES = ("kernels", "busy_ns", "stamp_ns", "idle_ns", "gap_ns", "gap_sync_ns", "gap_copy_ns", "longest_gap_ns", "copies", "copy_ns",
                "copy_overlapped_ns", "syncs", "sync_ns", "stamps", "stamp_offset_ns", "stamp_spread_ns", "switch_ns")
OPS = ("add", "scale")
BUCKETS = (1, 2, 1000)
"""Of phases over time: numbers that cut any number of steps at whole ones."""
RANGES = ((None, None), (None, 6), (4, None), (5, 9), (7, 7), (9, 5))
"""(first, last) step that a mean step is asked of."""
SUMS = {"runs": "count", **{k: k for k in ("enqueue_ns", "device_ns", "wait_ns", "flops", "nbytes", "dispatches")}}
"""What a page says of an op -> the column of op_profile that it adds up."""
LINES = {"kernel_active": (0.9, True), "bubble": (0.1, False), "comm_exposed": (0.15, False), "bandwidth_bound": (0.6, True),
         "unexplained": (0.01, False)}
"""Figure -> (its line, whether it must lie above)."""


class Drawn:
    """A run directory of drawn rows. `rows`: of step_timing; `steps`: step -> (tokens, finite); `sessions`: (session, rank) -> its row;
    `ops`, `kernels`, `events`: rows of op_profile, kernel_times and gpu_timeline; `facts`: run_metadata; `profiled`: step -> whether its
    first rank profiled it."""

    def __init__(self, path: Path, rng: np.random.Generator, backend: str, whole: bool = False) -> None:
        """`whole`: the run says everything, has several ranks of several devices each, and steps enough for every figure."""
        self.path, self.rng, self.backend, self.whole = path, rng, backend, whole
        ranks, count = int(rng.integers(2 if whole else 1, 4)), int(rng.integers(25 if whole else 5, 40))
        begun = {0, *(int(x) for x in rng.integers(1, count, int(rng.integers(0, 3))))}
        every = int(rng.integers(2, 8))
        if whole:  # sessions that go on from the step before a save, and from a save
            begun |= {every * int(rng.integers(1, count // every + 1)) - late for late in (0, 1)} - {count}
        starts = sorted(begun)
        self.facts: dict[str, str] = {"backend": backend, "status": "GATED",
                                      "devices": str(ranks * int(rng.integers(2 if whole else 1, 4)))}
        for key, value in (("peak_flops", 10.0 ** (rng.uniform(9, 11) if whole else rng.uniform(2, 7))),
                           ("peak_bandwidth", 10.0 ** rng.uniform(5, 9)),
                           ("flops_per_token", 10.0 ** rng.uniform(0, 2)), ("executed_flops", float(rng.integers(1, 1 << 20)))):
            if whole or rng.random() < 0.9:
                self.facts[key] = repr(float(value))
        for key, value in (("checkpoint_every", every), ("save_foretold_ns", int(rng.integers(2, 8)))):
            if whole or rng.random() < 0.7:
                self.facts[key] = str(value)
        if not whole and rng.random() < 0.2:
            self.facts["save_measured_ns"] = str(int(rng.integers(1, 1 << 20)))
        self.steps = {s: (int(rng.integers(1, 99)), int(rng.random() < 0.93)) for s in range(count) if rng.random() < 0.95}
        if whole:  # a profiled step and an unprofiled one that count
            self.steps |= {2: (7, 1), 3: (9, 1)}
        self.rows: list[dict[str, Any]] = []
        self.profiled = {2: 1, 3: 0} if whole else dict[int, int]()
        self.sessions: dict[tuple[int, int], dict[str, int]] = {}
        self.ops: list[dict[str, Any]] = []
        self.kernels: list[dict[str, Any]] = []
        self.events: list[tuple[int, int, str, str, str, int, int, int | None]] = []
        for rank in range(ranks):
            at = int(rng.integers(1, 1 << 30))
            for session, (first, stop) in enumerate(pairwise([*starts, count])):
                began = at
                at += int(rng.integers(1, 1 << 20))
                for step in range(first, stop):
                    at = self._step(step, rank, session, at)
                at += int(rng.integers(0, 1 << 10))
                self.sessions[session, rank] = {"first": first, "began": began, "seen": at}
                at += int(rng.integers(0, 1 << 20))
        if ranks > 1 and len(starts) > 1 and rng.random() < 0.8:  # went on with its first rank alone
            for gone in [key for key in self.sessions if key[0] == len(starts) - 1 and key[1]]:
                del self.sessions[gone]
            self.rows, self.ops = ([r for r in x if r["step"] < starts[-1] or not r["rank"]] for x in (self.rows, self.ops))
            self.kernels = [r for r in self.kernels if r["step"] < starts[-1] or not r["rank"]]
            self.events = [e for e in self.events if e[0] < starts[-1] or not e[1]]
            self.facts["devices"] = "1"
        self._write()

    def _step(self, step: int, rank: int, session: int, began: int) -> int:
        rng = self.rng
        spent = {p: int(rng.integers(0, 3000)) for p in PHASES}
        spent["forward"] *= int(rng.integers(1, 60))
        for p in ("eval", "sample_gen", "checkpoint"):
            spent[p] = spent[p] if self.whole or rng.random() < 0.3 else 0
        between = sum(spent[p] for p in ("eval", "sample_gen", "checkpoint"))
        loose = int(rng.integers(0, 2000))
        wall = sum(spent.values()) + loose
        profiled = self.profiled.setdefault(step, int(rng.random() < 0.2))
        if rank and not (self.whole and rng.random() < 0.75):
            profiled = int(rng.random() < 0.2)
        row = {"step": step, "rank": rank, "session": session, "began_ns": began, "wall_ns": wall, "step_ns": wall - between,
               "profiled": profiled, "launches": 1, "enqueue_ns": 1, **{f"{p}_ns": x for p, x in spent.items()},
               **{f"{p}_overlapped_ns": int(rng.integers(0, 999)) for p in OVERLAPPING}, "unexplained_ns": loose}
        self.rows.append(row)
        if row["profiled"]:
            for launch in range(int(rng.integers(0, 4))):
                self.ops.append({"step": step, "rank": rank, "plan": "p", "launch": launch, "op": str(rng.choice(OPS)),
                                 "component": "add", "layer": "", "phase": "forward", "shape": "", "dtype": "f32", "count": 1,
                                 "enqueue_ns": int(rng.integers(0, 99)), "device_ns": int(rng.integers(0, 999)),
                                 "wait_ns": int(rng.integers(0, 99)), "flops": int(rng.integers(0, 1 << 16)),
                                 "nbytes": int(rng.integers(0, 1 << 16)), "dispatches": 1})
            if self.backend != "cpu" and rng.random() < 0.8:
                self.kernels.append({"step": step, "rank": rank, **{k: int(rng.integers(0, 9)) for k in KERNEL_TIMES},
                                     "busy_ns": int(row["step_ns"] * rng.uniform(0.7, 1)),
                                     "idle_ns": int(row["step_ns"] * rng.uniform(0, 0.2))})
            for track in ("host enqueue", "stream 0", "stream 1", "copies"):
                for _ in range(int(rng.integers(0, 4))):
                    start = began + int(rng.integers(0, 60))
                    phase = str(rng.choice(["forward", "eval", "data_load"]))
                    self.events.append((step, rank, track, "x", phase, start, start + int(rng.integers(0, 40)), None))
        return began + wall

    def _write(self) -> None:
        self.path.mkdir()
        (self.path / "config.toml").write_text(config.parse(RUN).resolved())
        (self.path / "manifest.json").write_text(json.dumps(rundir.sealed({"run": "drawn", "status": "GATED", "sessions": []})))
        with closing(sqlite3.connect(self.path / "metrics.sqlite")) as db:
            db.executescript(TABLES + VIEWS + COMMUNICATION + f"PRAGMA user_version={VERSION};")
            db.executemany("INSERT INTO run_metadata VALUES (?, ?)", self.facts.items())
            for table, rows in (("step_timing", self.rows), ("op_profile", self.ops), ("kernel_times", self.kernels)):
                for row in rows:
                    db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
            for (session, rank), s in self.sessions.items():
                db.execute("INSERT INTO sessions VALUES (?, ?, 'h', 1, ?, 5, ?, ?, NULL, ?, NULL)",
                           (session, rank, s["first"], s["began"], s["began"], s["seen"]))
            db.executemany("INSERT INTO step_metrics VALUES (?, 1.0, 1.0, 0.1, 1.0, ?, 1.0, ?)",
                           [(s, t, f) for s, (t, f) in self.steps.items()])
            db.executemany("INSERT INTO gpu_timeline VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self.events)
            if "peak_flops" in self.facts and "peak_bandwidth" in self.facts:
                db.execute("INSERT INTO run_peak VALUES (0, ?, ?, 'drawn')",
                           (float(self.facts["peak_flops"]), float(self.facts["peak_bandwidth"])))
            db.commit()

    def edit(self, *statements: str) -> None:
        """Change rows."""
        with closing(sqlite3.connect(self.path / "metrics.sqlite")) as db:
            for statement in statements:
                db.execute(statement)
            db.commit()


@contextmanager
def drawn(rng: np.random.Generator, backend: str, whole: bool = False) -> Iterator[Drawn]:
    """A drawn run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="alpha-report-") as root:
        yield Drawn(Path(root) / "drawn", rng, backend, whole)


Told = dict[str, Any]
"""What a report says of a run: key of a figure -> [value, text, verdict, reason], `ops`: of each op what it takes a step, `over time`:
number of buckets -> the phases over time, and `waterfall`: the phases of a mean step, of each of RANGES; or `error`: the class of error
that refused it."""


def read_all(paths: Sequence[str]) -> str:
    """What a report says of each of these runs, as JSON. Called in a process of its own."""
    from alpha.report import runs
    from alpha.report.facts import facts
    from alpha.report.views import phases_over_time, top_ops, waterfall

    found: list[Told] = []
    for path in paths:
        try:
            run = runs.load(Path(path))
            found.append({f.key: [f.value, f.text, f.verdict, f.reason] for f in judge(facts(run))}
                         | {"ops": top_ops(run)["ops"], "waterfall": [waterfall(run, *steps) for steps in RANGES],
                            "over time": {points: phases_over_time(run, points) for points in BUCKETS}})
        except AlphaError as error:
            found.append({"error": type(error).__name__, "what": error.what})
    return json.dumps(found)


def reports(drawn_runs: Sequence[Drawn]) -> list[Told]:
    """What a report says of each, read in a new process whose hash seed is drawn by the system."""
    name = read_all.__name__  # named, so that evidence binds to what it reads a report with
    code = f"import sys; from {__name__} import {name}; print({name}(sys.argv[1:]), end='')"
    done = subprocess.run([sys.executable, "-c", code, *(str(run.path) for run in drawn_runs)], capture_output=True, text=True, timeout=60,
                          check=False, env=child_environment(PYTHONHASHSEED="random"))
    if done.returncode:
        raise RuntimeError(done.stderr[-200:])
    found: list[Told] = json.loads(done.stdout)
    return found


def per(a: float, b: float) -> float | None:
    """a / b, None where there is nothing to divide by."""
    return a / b if b > 0 else None


def counted(run: Drawn) -> dict[str, float | None]:
    """Every figure, from the rows alone."""
    rows = [r for r in run.rows if run.steps.get(r["step"], (0, 1))[1]]  # a refused step moved nothing
    known = {k: float(v) for k, v in run.facts.items() if k not in ("backend", "status")}
    plain, profiled = [r for r in rows if not r["profiled"]], [r for r in rows if r["profiled"]]

    def is_steady(r: dict[str, Any]) -> bool:
        late = r["step"] >= run.sessions[r["session"], r["rank"]]["first"] + 3
        return bool(late and not r["profiled"] and r["step"] in run.steps)

    by_step: dict[int, list[dict[str, Any]]] = {}
    for r in rows:
        by_step.setdefault(r["step"], []).append(r)
    steady = [x for x in by_step.values() if all(map(is_steady, x))]
    steady_ns = sum(max(r["step_ns"] for r in x) for x in steady)
    rate = per(1e9 * sum(run.steps[x[0]["step"]][0] for x in steady), steady_ns)
    ranks = {session: sum(s == session for s, _ in run.sessions) for session, _ in run.sessions}
    devices = known["devices"]
    if len(set(ranks.values())) > 1 and steady_ns:  # the metadata know those of the latest session
        devices = sum(max(r["step_ns"] for r in x) * ranks[x[0]["session"]] for x in steady) / steady_ns
    peak = known["peak_flops"] * devices if "peak_flops" in known else None
    lasted = {key: s["seen"] - s["began"] for key, s in run.sessions.items()}
    longest = sum(max(ns for (n, _), ns in lasted.items() if n == session) for session in {n for n, _ in lasted})
    achieved = None if rate is None or "flops_per_token" not in known else rate * known["flops_per_token"]
    executed = None if "executed_flops" not in known else per(1e9 * known["executed_flops"] * len(steady), steady_ns)
    took = sum(r["step_ns"] for r in plain)

    def share(*names: str) -> float | None:
        return per(sum(r[f"{n}_ns"] for r in plain for n in names), took)

    def settled(*names: str) -> float | None:
        late = [r for r in plain if is_steady(r)]
        aside = ("eval_ns", "sample_gen_ns", "checkpoint_ns")
        return per(sum(r[f"{n}_ns"] for r in late for n in names), sum(r["wall_ns"] - sum(r[key] for key in aside) for r in late))

    of_steady = mean([r["step_ns"] for r in rows if is_steady(r)]) if any(map(is_steady, rows)) else None
    stalls = saves(run, rows, known)
    found = {
        "tokens_per_second": rate, "tokens_per_second_device": rate and rate / devices, "achieved_flops": achieved,
        "workflow_tokens_per_second": per(1e9 * sum(run.steps.get(s, (0, 1))[0] for s in by_step), longest),
        "mfu": achieved / peak if achieved is not None and peak else None,
        "hfu": executed / peak if executed is not None and peak else None,
        "comm_exposed": settled("comm") if devices > 1 else None,
        "comm_total": settled("comm", "comm_overlapped") if devices > 1 else None,
        "goodput": per(sum(r["step_ns"] - r["checks_ns"] for r in rows), sum(lasted.values())),
        "unexplained": per(sum(r["unexplained_ns"] for r in plain), sum(r["wall_ns"] for r in plain)),
        "save_stall": median(stalls) / of_steady if stalls and of_steady else None,
        "save_stall_foretold": known["save_foretold_ns"] / of_steady if of_steady and "save_foretold_ns" in known else None,
        "instrumented_slowdown": mean([r["step_ns"] for r in profiled]) / of_steady - 1 if profiled and of_steady else None,
        "kernel_active": share("forward", "backward", "grad_norm", "grad_clip", "optimizer"), "bubble": share("idle"),
    }  # fmt: skip
    both = "peak_bandwidth" in known and "peak_flops" in known
    for key, ops in (("bandwidth", run.ops), ("bandwidth_bound", [
            o for o in run.ops if both and o["nbytes"] / known["peak_bandwidth"] > o["flops"] / known["peak_flops"]])):
        rate = per(1e9 * sum(o["nbytes"] for o in ops), sum(o["device_ns"] for o in ops)) if both else None
        found[key] = None if rate is None else rate / known["peak_bandwidth"]
    cells = {(r["step"], r["rank"]): r for r in rows}
    if run.backend == "cpu":
        whole = sum(cells[c]["step_ns"] for c in {(o["step"], o["rank"]) for o in run.ops} if c in cells)
        found["launch_overhead"] = per(sum(o["enqueue_ns"] + o["wait_ns"] for o in run.ops), whole)
    else:
        found["launch_overhead"] = exposed(run, cells)
        timed = [k for k in run.kernels if (k["step"], k["rank"]) in cells]
        slow = {(k["step"], k["rank"]): slowdown(run, rows, cells[k["step"], k["rank"]], is_steady) for k in timed}
        sound = [k for k in timed if (s := slow[k["step"], k["rank"]]) is not None and s <= 0.02] or timed
        whole = sum(cells[k["step"], k["rank"]]["step_ns"] for k in sound)
        found["kernel_active"], found["bubble"] = (per(sum(k[x] for k in sound), whole) for x in ("busy_ns", "idle_ns"))
    for key in ("mfu", "hfu", "kernel_active", "bubble", "goodput"):
        if key != "bubble" and found[key] is not None and found[key] > 1:  # type: ignore[operator]
            found[key] = None
    return found


def slowdown(run: Drawn, rows: list[dict[str, Any]], of: dict[str, Any], is_steady: Callable[[dict[str, Any]], bool]) -> float | None:
    """Against the median of up to five steady steps on either side, at least three."""
    near = sorted((r["step"], r["step_ns"]) for r in rows if is_steady(r) and (r["rank"], r["session"]) == (of["rank"], of["session"]))
    chosen = [x for x in near if x[0] < of["step"]][-5:] + [x for x in near if x[0] > of["step"]][:5]
    return of["step_ns"] / median(ns for _, ns in chosen) - 1 if len(chosen) >= 3 else None


def saves(run: Drawn, rows: list[dict[str, Any]], known: dict[str, float]) -> list[float]:
    """What each save added to the steps from it to the next one, of those with steps behind them in their session."""
    if "save_measured_ns" in known:
        return [known["save_measured_ns"]]
    found: list[float] = []
    for rank, session in {(r["rank"], r["session"]) for r in rows}:
        own = sorted((r["step"], r["checkpoint_ns"]) for r in rows if (r["rank"], r["session"]) == (rank, session))[:-1]
        if "checkpoint_every" not in known:
            found += [ns for _, ns in own if ns > 0]
            continue
        every, sums = int(known["checkpoint_every"]), dict[int, int]()
        for step, ns in own:
            behind = max((n for n in range(every, step + 2, every)), default=0)  # the save that this step's interval holds or follows
            if behind > own[0][0]:
                sums[behind] = sums.get(behind, 0) + ns
        found += sums.values()
    return found


def by_op(run: Drawn) -> dict[str, dict[str, float | None]]:
    """Of each op its sums over those steps of ranks that have rows, and its share of all device time."""
    steps, whole = len({(o["step"], o["rank"]) for o in run.ops}), sum(o["device_ns"] for o in run.ops)
    found = dict[str, dict[str, float | None]]()
    for op in {o["op"] for o in run.ops}:
        own = [o for o in run.ops if o["op"] == op]
        found[op] = {k: sum(o[column] for o in own) / steps for k, column in SUMS.items()}
        found[op]["share"] = per(sum(o["device_ns"] for o in own), whole)
    return found


def over_time(run: Drawn, points: int) -> tuple[list[int], dict[str, list[float]]]:
    """The first step of each bucket, and of each phase its mean there: unprofiled steps that moved something, on the first rank."""
    rows = [r for r in run.rows if not r["rank"] and not r["profiled"] and run.steps.get(r["step"], (0, 1))[1]]
    rows.sort(key=lambda r: int(r["step"]))
    count = min(points, len(rows))
    cuts = [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]
    return [cut[0]["step"] for cut in cuts], {p: [mean(r[f"{p}_ns"] for r in cut) for cut in cuts] for p in (*PHASES, "unexplained")}


def by_phase(run: Drawn, first: int | None, last: int | None) -> tuple[dict[str, tuple[float, float]], tuple[int, int] | None]:
    """Of each phase what it takes of a mean unprofiled step of a range on a rank, and beside it; the first and the last such step. Nothing
    where there is none."""
    rows = [r for r in run.rows if not r["profiled"] and run.steps.get(r["step"], (0, 1))[1]
            and (first is None or r["step"] >= first) and (last is None or r["step"] <= last)]
    if not rows:
        return {}, None
    steps = [r["step"] for r in rows]
    return {p: (mean(r[f"{p}_ns"] for r in rows), mean(r.get(f"{p}_overlapped_ns", 0) for r in rows))
            for p in (*PHASES, "unexplained")}, (min(steps), max(steps))


def _phases(run: Drawn, said: Told, shown: list[Told]) -> list[tuple[str, bool]]:
    """Phases over time, and those of a mean step of all and of some, beside what they should be."""
    checks = list[tuple[str, bool]]()
    for points in BUCKETS:
        (x, series), got = over_time(run, points), said[str(points)]
        why = None if x else "no unprofiled step"
        checks.append((f"phases in {points}: {got['x']} for {x}, {got['why']}", (got["x"], got["why"]) == (x, why)))
        checks += [(f"{p} in {points}: {got['series'].get(p)} for {values}"[:190],
                    len(got["series"].get(p, ())) == len(values) and bool(np.allclose(got["series"][p], values, rtol=1e-12, atol=0)))
                   for p, values in series.items()]
    for steps, one in zip(RANGES, shown, strict=True):
        found = {e["phase"]: (e["exclusive_ns"], e["overlapped_ns"]) for e in one["phases"]}
        want, ends = by_phase(run, *steps)
        told = (one["first"], one["last"]) if one["why"] is None else None
        checks.append((f"phases of steps {steps}: {told} for {ends}, {sorted(set(found) ^ set(want))}", (list(found), told) == (
            list(want), ends)))
        checks += [(f"{p} of steps {steps}: {found[p]} for {want[p]}", bool(np.allclose(found[p], want[p], rtol=1e-12, atol=0)))
                   for p in set(found) & set(want)]
    return checks


def exposed(run: Drawn, cells: dict[tuple[int, int], dict[str, Any]]) -> float | None:
    """Host time of handing over with no stream busy, nanosecond by nanosecond, over the time of those steps."""
    alone, whole = 0, 0
    for cell in {(e[0], e[1]) for e in run.events}:
        own = [e for e in run.events if (e[0], e[1]) == cell]
        host = [e for e in own if e[2] == "host enqueue" and e[4] not in ("eval", "checkpoint", "sample_gen")]
        device = [e for e in own if e[2].startswith("stream")]
        if host and device and cell in cells:
            at, busy = ({t for e in some for t in range(e[5], e[6])} for some in (host, device))
            alone, whole = alone + len(at - busy), whole + cells[cell]["step_ns"]
    return per(alone, whole)


# -- the cases -----------------------------------------------------------------------------------------------------------------


def _recounted(backend: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """Every figure of drawn runs, and its verdict by the line that the figure has; what each op takes a step, on a rank; phases over
        time, and of a mean step."""
        checks = []
        with ExitStack() as stack:
            made = [stack.enter_context(drawn(rng, backend, whole=i < 2)) for i in range(DRAWS)]
            for run, got in zip(made, reports(made)):
                want, ops = counted(run), by_op(run)
                said = {o["op"]: {k: o[k] for k in (*SUMS, "share")} for o in got.pop("ops", [])}
                checks += _phases(run, got.pop("over time"), got.pop("waterfall"))
                checks += [(f"{op}: {said.get(op)} for {ops.get(op)}", said.get(op) == ops.get(op)) for op in OPS]
                checks.append((f"figures {sorted(set(got) ^ set(want))}", set(got) == set(want)))
                for key in set(want) & set(got):
                    checks += _alike(backend, key, want[key], *got[key])
        return all_hold(checks)
    return check


def _alike(backend: str, key: str, want: float | None, value: float | None, text: str, verdict: str | None, reason: str) \
        -> list[tuple[str, bool]]:
    """A figure beside what it should be."""
    what = f"{key} {value} for {want} {reason}"
    if value is None or want is None:
        return [(what, value is want and bool(reason))]
    checks = [(what, math.isclose(value, want, rel_tol=1e-9, abs_tol=1e-15))]
    if key not in LINES or verdict is None:
        return [*checks, (f"{key} not judged, without a word", bool(reason) and verdict is None)]
    line, least = LINES[key]
    holds = value > line if least else value < line or (key == "unexplained" and value == line)
    return [*checks, (f"{key} {value}: {verdict}", verdict == (PASS if holds else FAIL))]


def contradictions(rng: np.random.Generator) -> Measured:
    """Rows that contradict each other make no figure: each is refused by name, wherever it stands."""
    checks, made, stack = list[tuple[str, bool]](), list[tuple[str, Drawn]](), ExitStack()
    for name, *edits in (
        ("negative", "UPDATE step_timing SET forward_ns = -1, unexplained_ns = unexplained_ns + forward_ns + 1 WHERE step = 2"),
        ("phases above wall", "UPDATE step_timing SET wall_ns = 1, step_ns = 1 WHERE step = 3"),
        ("step above wall", "UPDATE step_timing SET step_ns = wall_ns + 1 WHERE step = 1"),
        ("unexplained", "UPDATE step_timing SET unexplained_ns = unexplained_ns + 1 WHERE step = 2"),
        ("overlap", "UPDATE step_timing SET wall_ns = wall_ns + 1, unexplained_ns = unexplained_ns + 1 "
                    "WHERE step < (SELECT max(step) FROM step_timing t WHERE t.session = step_timing.session)"),
        ("seen early", "UPDATE sessions SET seen_ns = began_ns - 1 WHERE session = 0"),
        ("outside its session", "UPDATE sessions SET seen_ns = began_ns WHERE session = 0"),
        ("no session", "DELETE FROM sessions WHERE session = 0"),
        ("two peaks", "INSERT OR REPLACE INTO run_peak VALUES (0, 1.0, 1.0, 'a')", "INSERT INTO run_peak VALUES (7, 2.0, 1.0, 'b')",
         "DELETE FROM run_metadata WHERE key LIKE 'peak%'"),
        ("another peak", "INSERT OR REPLACE INTO run_peak VALUES (0, 5.0, 5.0, 'a')",
         "INSERT OR REPLACE INTO run_metadata VALUES ('peak_flops', '6.0')"),
        ("parts", "INSERT INTO flops_parts VALUES ('a', 'forward', 5, 7)",
         "INSERT OR REPLACE INTO run_metadata VALUES ('executed_flops', '8')"),
        ("negative profile", "INSERT INTO op_profile VALUES (0, 0, 'z', 0, 'a', 'a', '', 'forward', '', '', 1, 1, -1, 1, 1, 1, 1)"),
        ("unknown phase", "INSERT INTO op_profile VALUES (0, 0, 'z', 0, 'a', 'a', '', 'sideways', '', '', 1, 1, 1, 1, 1, 1, 1)"),
        ("a text", "UPDATE step_timing SET wall_ns = 'x' WHERE step = 1"),
        ("comm", "INSERT INTO communication VALUES (0, 0, 'all_reduce', 'comm', 1, 1, 3, 1, 1)"),
        ("more comm than stamped", "UPDATE step_timing SET comm_ns = 0, unexplained_ns = unexplained_ns + comm_ns WHERE step + rank = 0",
         "INSERT INTO communication VALUES (0, 0, 'all_reduce', 'comm', 1, 1, 2, 1, 1)"),
        ("sound", "UPDATE step_timing SET launches = launches + 1"),
    ):
        run = stack.enter_context(drawn(rng, "cuda"))
        run.edit(*edits)
        made.append((name, run))
    for (name, _), said in zip(made, reports([run for _, run in made])):
        checks.append((f"{name}: {said.get('what', 'it was read')}", said.get("error", "") == ("" if name == "sound" else "CorruptError")))
    stack.close()
    return all_hold(checks)


def same_everywhere(rng: np.random.Generator) -> Measured:
    """What new processes say of the same drawn runs, to the letter: the gate compares its digests."""
    with drawn(rng, "cuda") as one, drawn(rng, "cpu") as two:
        return Measured(0.0, 0.0, 2, hashlib.sha256(repr(reports([one, two])).encode()).hexdigest())


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "report.figures": {"parity": [("recounted-cpu", _recounted("cpu")), ("recounted-cuda", _recounted("cuda")), *chances.PARITY,
                                  *compared.PARITY, *rates.PARITY, *ranked.PARITY, *figured.PARITY],
                       "determinism": [("elsewhere", same_everywhere)],
                       "faults": [("contradictions", contradictions), *compared.FAULTS, *rates.FAULTS]},
}
