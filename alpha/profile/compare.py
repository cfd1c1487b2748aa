"""Do two runs of the same Program differ in speed, and where? Floor 3.

Rows are compared: the step, its phases, the ops of the profiled steps, the ranks (time in which a rank computes, beside the others).
The slowdown of run b against run a is the difference of the logarithms of typical times. Steps in a row resemble each other and machines
drift, so a series is cut into blocks (noise.blocks), each block gives one value, and Welch's interval on trimmed block values, widened by
what is left of the correlation, says how far the estimate can be trusted (noise.shift). The chance of a false alarm (noise.ALPHA) is split
over the kinds of rows and over the rows of a kind. How often it cries wolf and what it sees: baselines/perf/compare.json.

    SLOWER     the interval lies above 0 and the estimate reaches the line
    FASTER     the same, the other way
    SAME       neither, and a difference as large as the line is excluded for this row with 95 % either way
    UNDECIDED  more or quieter steps are needed

The line is 2 % (noise.INTEREST) of the row; a row of less than 2 % of the step is judged as if it had 2 % of it, since nobody
should be alarmed over noise in microseconds.

What all have in common is told apart from what stands out. In each block the median over the computing rows (each phase of each rank is
one) says how fast the machine was just then; that is taken out of every row, and with it drift and busy neighbours. Over the whole run
it is the *common* shift. A shift too small to name a row (under 3/4 of the line) is always taken out; a larger one when three quarters
of the computing rows share it, or when the table `peaks`, the machine's own clock, says that the machine was to blame; when `peaks` says
that the machine was as fast as before, the shift is the program's and stays in.

Two ranks have only each other. The one that moved less says how the machine moved; the other is named only where it moved CLEARLY further.

What it does not see: a typical step is compared, so rare stalls are only counted (`stalls`); what differs between two processes by
chance (where memory came to lie) is a difference like any other. Every row carries its measured false-alarm rate and power (`known`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log1p, pi
from pathlib import Path

import numpy as np

from alpha.errors import InputError
from alpha.profile import noise
from alpha.profile.known import Known, known
from alpha.profile.noise import Interval
from alpha.profile.phases import PHASES
from alpha.profile.timed import timed

SAME, SLOWER, FASTER, UNDECIDED = "SAME", "SLOWER", "FASTER", "UNDECIDED"

VERSION = 2
"""Of the way rows are judged; raised by hand when it changes, so that rates of another way are not printed. 2: the closest majority says
what is common, two ranks are judged against the one that moved less, and a row must also have moved as measured."""

LEAST_SHARE = 0.02
"""Share of the step below which a row is judged as if it had this much."""

LEAST_PART = 0.75
"""A shift under this part of the line names no row, right or wrong, so it may always be taken out; a row that moved by this part of the
common shift shares it."""

LEAST_RAW = 0.5
"""Part of the line that a row must have moved as measured, in the direction of its verdict: a row that only moved because a shift was
taken out of it is not named. Not asked where the machine's own clock explains the shift."""

CLEARLY = 1.5
"""Of two ranks that drifted apart the one that moved so many times as far as the other is named, or none."""

LEAST_STEPS = 64
"""Fewer steady steps than this make no blocks worth the name: every row is then UNDECIDED."""

LEAST_SAMPLES, RARE = 4, "too few samples"
"""Block values in either run below which no interval means anything, and what such a row says: a run writes one last checkpoint."""

TAKEN = "it moved apart from the others, but hardly as measured: either it or they moved"
"""What a row says that would be named only because of what was taken out of it."""

LEAST_PEAKS = 4
"""Readings of the machine's speed in either run that it takes to say how far they can be trusted."""

COMPUTING = ("forward", "backward", "grad_norm", "grad_clip", "optimizer")
"""Phases whose time depends on this rank's own speed alone."""

MUST_AGREE = ("program", "flops_version", "machine")
MAY_AGREE = ("hardware", "devices", "threads")
"""Keys of run_metadata that two runs must share to be compared; the second kind only where both runs say it."""

STALL = 2.0
"""A step of more than this many typical ones is a stall."""

Columns = Mapping[str, Sequence[object] | np.ndarray]


@dataclass(frozen=True)
class Measured:
    """What a run left behind: columns of tables as equally long sequences, rows in any order.

    timing: step, rank, session, profiled, step_ns, unexplained_ns and `<phase>_ns` of step_timing. ops: step, rank, plan, launch, op,
    shape, phase, device_ns of op_profile. peaks: flops, bandwidth. The last two may be empty.
    """

    name: str
    metadata: Mapping[str, str]
    timing: Columns
    ops: Columns
    peaks: Columns


@dataclass(frozen=True)
class Row:
    """One line of a comparison. a_ns, b_ns: typical time per step (of an op: per profiled step; of a phase that does not occur in
    every step: each time it does). share: of the step in run a. raw: slowdown as measured; own: after the common shift is taken out,
    which the verdict goes by. line: the difference that matters here."""

    kind: str
    name: str
    a_ns: float
    b_ns: float
    share: float
    raw: Interval
    own: Interval
    line: float
    verdict: str
    reason: str = ""
    known: Known | None = None
    """How often such a verdict is wrong, and what it sees, as measured."""


@dataclass(frozen=True)
class Common:
    """The shift that most computing rows share. shift: fraction; taken: the part of it that rows are judged without. peaks: slowdown of
    the machine by its own clock, None where it was not measured. cause: 'none', 'machine', 'program' or 'unknown'."""

    shift: float
    verdict: str
    cause: str
    taken: float
    peaks: Interval | None
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Run b against run a. steps: steady steps of each; stalls: how many of them took over twice the typical time. notes: what a
    reader must know, such as differences that were asked to be overlooked."""

    a: str
    b: str
    common: Common
    rows: tuple[Row, ...]
    steps: tuple[int, int]
    stalls: tuple[int, int]
    notes: tuple[str, ...]

    def differing(self) -> tuple[Row, ...]:
        """Rows that are SLOWER or FASTER, the largest change of the step's time first."""
        found = [r for r in self.rows if r.verdict in (SLOWER, FASTER)]
        return tuple(sorted(found, key=lambda r: -abs(r.own.estimate) * r.share))

    def text(self) -> str:
        """For a person: notes, the common shift, one line a row."""
        lines = [f"{self.b} against {self.a}: {self.steps[1]} and {self.steps[0]} steps, {self.stalls[1]} and {self.stalls[0]} stalls",
                 *self.notes, f"in common: {self.common.shift:+.1%} {self.common.verdict} ({self.common.reason})"]
        for r in self.rows:
            i = r.own
            between = f"({i.low:+.2%} to {i.high:+.2%})" if np.isfinite(i.high) else "(no interval)"
            lines.append(f"{r.verdict:9s} {r.kind:5s} {r.name:40s} {r.a_ns / 1e6:10.3f} ms {r.b_ns / 1e6:10.3f} ms  {i.estimate:+7.2%} "
                         f"{between}  line {r.line:.1%}{'  ' + r.reason if r.reason else ''}"
                         + (f"  [false alarms {r.known.alarms_text()}; power {r.known.power_text()}]" if r.known else ""))
        return "\n".join(lines)


def read(path: Path) -> Measured:
    """A run's metrics.sqlite. Errors as those of timed.timed."""
    with timed(path) as db:
        there = {name for _, name, *_ in db.execute("PRAGMA table_info(step_timing)")}
        phases = ", ".join(f"{name}_ns" if name != "checks" or "checks_ns" in there else "0 AS checks_ns" for name in PHASES)
        meta = {str(k): str(v) for k, v in db.execute("SELECT key, value FROM run_metadata")}
        timing = _columns(db.execute(f"SELECT step, rank, session, profiled, step_ns, unexplained_ns, {phases} FROM step_timing"))
        ops = _columns(db.execute("SELECT step, rank, plan, launch, op, shape, phase, device_ns FROM op_profile"))
        peaks = _columns(db.execute("SELECT flops, bandwidth FROM peaks"))
    return Measured(meta.get("name") or path.parent.name, meta, timing, ops, peaks)


def _columns(cursor: sqlite3.Cursor) -> dict[str, np.ndarray]:
    names = [d[0] for d in cursor.description]
    return {name: np.array(column) for name, column in zip(names, zip(*cursor.fetchall()))}


def compare(a: Measured, b: Measured, *, anyway: bool = False, by: str = "op", interest: float = noise.INTEREST) -> Comparison:
    """Compare run b with run a. `by`: match ops by 'op' (with shape and phase: launches that do the same are one row) or by 'launch'.

    InputError when the runs are of different Programs, FLOPS models or machines, unless `anyway`: then the notes say so.
    """
    if by not in ("op", "launch"):
        raise InputError("ops are matched in one of two ways", came=by, expected="'op' or 'launch'")
    notes = _agree(a, b, anyway)
    one, two = _Series(a), _Series(b)
    ranks = [r for r in one.ranks if r in two.ranks]
    if ranks != one.ranks or ranks != two.ranks:
        if not anyway:
            raise InputError("the runs have different ranks", came=f"{b.name}: {two.ranks}", expected=f"{a.name}: {one.ranks}",
                             do="compare runs on equally many devices, or ask for it anyway")
        notes.append(f"different ranks: {one.ranks} and {two.ranks}; only those in both are compared")
    if not ranks:
        raise InputError("there is no timed step to compare", came=f"{a.name}: ranks {one.ranks}, {b.name}: ranks {two.ranks}",
                         expected="rows of step_timing of a rank that both have", do="train on until there are some")
    for m in (a, b):
        if m.metadata.get("status") != "GATED":
            notes.append(f"{m.name} is UNGATED")
    enough = min(one.steps, two.steps) >= LEAST_STEPS
    ops = _op_rows(a, b, ranks, by)
    by_rank = _rank_rows(one, two, ranks) if len(ranks) > 1 else []
    peaks = _peaks(a, b)
    kinds = [(_phase_rows(one, two, ranks), _references(one, two, ranks, "phase"), peaks, enough),
             # a rank stands out from the other ranks, whatever made all of them slower; two ranks have nobody to ask but the phases
             (by_rank, by_rank if len(ranks) != 2 else _references(one, two, ranks, "rank"), None, enough),
             (ops, [t for t in ops if t.share >= LEAST_SHARE], peaks, True)]  # each profiled step is a sample, few as they are
    kinds = [k for k in kinds if k[0]]
    if not kinds:
        raise InputError("there is no timed step to compare", came=f"{a.name}: {one.steps} steady steps, {b.name}: {two.steps}",
                         expected="steady steps or profiled ones", do="train on until there are some")
    rows: list[Row] = []
    for todo, references, clock, believed in kinds:
        alpha = noise.share(noise.ALPHA, family=len(todo) * len(kinds))
        common = _common(references, clock, interest) if todo is not by_rank or len(ranks) != 2 else _of_two(references, interest)
        rows += [_with_rates(_judge(t, alpha, common, interest, believed), len(ranks)) for t in todo]
    told = _common(kinds[0][1], peaks, interest).told
    return Comparison(a.name, b.name, told, tuple(rows), (one.steps, two.steps), (one.stalls(), two.stalls()), tuple(notes))


def procedure() -> dict[str, object]:
    """What the measured rates hold for: they are void when one of these changes."""
    return {"version": VERSION, "alpha": noise.ALPHA, "interest": noise.INTEREST, "blocks": noise.BLOCKS, "trim": noise.TRIM,
            "warm_up": noise.WARM_UP, "least_share": LEAST_SHARE, "least_part": LEAST_PART, "least_raw": LEAST_RAW, "clearly": CLEARLY,
            "least_steps": LEAST_STEPS}  # fmt: skip


def _with_rates(row: Row, ranks: int) -> Row:
    half = (row.own.high - row.own.low) / 2 * min(1.0, row.share / LEAST_SHARE if row.share > 0 else 1.0)
    return replace(row, known=known("rank of 2" if row.kind == "rank" and ranks == 2 else row.kind, half, procedure()))


def _agree(a: Measured, b: Measured, anyway: bool) -> list[str]:
    """Notes on what differs; refuses unless asked."""
    notes = []
    for key in MUST_AGREE + MAY_AGREE:
        x, y = a.metadata.get(key), b.metadata.get(key)
        if x == y and x is not None:
            continue
        if key in MAY_AGREE and (x is None or y is None):
            continue
        if not anyway:
            raise InputError(f"two runs are compared only when their {key} is the same", came=f"{b.name}: {y or 'not recorded'}",
                             expected=f"{a.name}: {x or 'not recorded'}", do="ask for it anyway (the comparison will say that they differ)")
        notes.append(f"different {key}: {a.name} has {x or 'none recorded'}, {b.name} has {y or 'none recorded'}")
    return notes


# Series ------------------------------------------------------------------------------------------------------------------------------


class _Series:
    """Steady steps of a run: int64[ranks, steps] of each column, over the steps that all ranks have."""

    def __init__(self, m: Measured) -> None:
        t = {k: np.asarray(v) for k, v in m.timing.items()}
        self.ranks = [int(r) for r in np.unique(t["rank"])] if t and len(t["rank"]) else []
        parts: list[np.ndarray] = []
        for r in self.ranks:
            mine = np.flatnonzero(t["rank"] == r)
            mine = mine[np.argsort(t["step"][mine], kind="stable")]
            mine = mine[noise.steady(t["session"][mine], t["profiled"][mine])]
            parts.append(mine)
        steps = t["step"][parts[0]] if parts else np.zeros(0, np.int64)
        for mine in parts[1:]:
            steps = np.intersect1d(steps, t["step"][mine])
        self.steps = len(steps)
        rows = [mine[np.isin(t["step"][mine], steps)] for mine in parts]
        names = ("step_ns", "unexplained_ns", *(f"{p}_ns" for p in PHASES))
        self.of = {name.removesuffix("_ns"): np.array([t[name][mine] for mine in rows], np.float64) for name in names if name in t}

    def mean(self, name: str, ranks: Sequence[int]) -> np.ndarray:
        """float64[steps]: a column's mean over ranks."""
        return self.of[name][[self.ranks.index(r) for r in ranks]].mean(axis=0)

    def computing(self, rank: int) -> np.ndarray:
        """float64[steps]: the time in which a rank computed."""
        return np.sum([self.of[p][self.ranks.index(rank)] for p in COMPUTING], axis=0)

    def stalls(self) -> int:
        step = self.of["step"].max(axis=0) if self.steps else np.zeros(0)
        return int(np.count_nonzero(step > STALL * np.median(step))) if step.size else 0


@dataclass
class _Todo:
    """A row to judge: block values (ns) of both runs, its share of the step in run a, and each run's part of steps that have it."""

    kind: str
    name: str
    a: np.ndarray
    b: np.ndarray
    share: float
    reason: str = ""


def _todo(kind: str, name: str, a: np.ndarray, b: np.ndarray, step_ns: float, n: int = noise.BLOCKS) -> _Todo | None:
    """A row of two series of ns per step; None when neither run spent any time on it. Zeros are steps without it: where they are more
    than a tenth, the times that it did occur are compared instead."""
    some = [np.count_nonzero(x) / x.size if x.size else 0.0 for x in (a, b)]
    if max(some) == 0:
        return None
    if min(some) < 0.9:
        a, b = a[a > 0], b[b > 0]
    values = [noise.blocks(x, n) for x in (a, b)]
    share = (float(np.median(values[0])) * some[0] if values[0].size else float(np.median(values[1])) * some[1]) / step_ns
    return _Todo(kind, name, values[0], values[1], share, "" if a.size and b.size else "only in one of the runs")


def _phase_rows(one: _Series, two: _Series, ranks: Sequence[int]) -> list[_Todo]:
    step_ns = float(np.median(one.mean("step", ranks))) if one.steps else 1.0
    names = [n for n in ("step", *PHASES, "unexplained") if n in one.of and n in two.of]
    found = [_todo("step" if n == "step" else "phase", n, one.mean(n, ranks), two.mean(n, ranks), step_ns) for n in names]
    return [t for t in found if t is not None]


def _rank_rows(one: _Series, two: _Series, ranks: Sequence[int]) -> list[_Todo]:
    step_ns = float(np.median(one.mean("step", ranks))) if one.steps else 1.0
    found = [_todo("rank", f"rank {r}", one.computing(r), two.computing(r), step_ns) for r in ranks]
    return [t for t in found if t is not None]


def _references(one: _Series, two: _Series, ranks: Sequence[int], kind: str) -> list[_Todo]:
    """Each computing phase of each rank, named after the row of `kind` that it is part of; those of too little time to tell anything left
    out."""
    step_ns = float(np.median(one.mean("step", ranks))) if one.steps else 1.0
    found = []
    for r in ranks:
        for p in COMPUTING:
            series = one.of[p][one.ranks.index(r)], two.of[p][two.ranks.index(r)]
            found.append(_todo("", p if kind == "phase" else f"rank {r}", *series, step_ns))
    return [t for t in found if t is not None and t.share >= LEAST_SHARE and not t.reason]


def _op_rows(a: Measured, b: Measured, ranks: Sequence[int], by: str) -> list[_Todo]:
    """Ops of the profiled steps; each step is a sample, for they lie far apart."""
    first, second = _ops(a, ranks, by), _ops(b, ranks, by)
    if not first or not second:
        return []
    whole = float(np.median(np.sum(list(first.values()), axis=0)))
    found = []
    for key in dict.fromkeys([*first, *second]):
        none = np.zeros(0)
        t = _todo("op", key, first.get(key, none), second.get(key, none), whole, 24)
        if t is not None:
            found.append(t)
    return found


def _ops(m: Measured, ranks: Sequence[int], by: str) -> dict[str, np.ndarray]:
    """Op -> float64[profiled steps]: ns per step, mean over ranks."""
    o = {k: np.asarray(v) for k, v in m.ops.items()}
    if not o or not len(o["step"]):
        return {}
    names = ("op", "shape", "phase") if by == "op" else ("plan", "launch", "op")
    steps, at = np.unique(o["step"], return_inverse=True)
    keep = np.isin(o["rank"], ranks)
    keys = [f"{x} {y} {z}" for x, y, z in zip(*(o[n].tolist() for n in names))]
    uniq, which = np.unique(np.array(keys), return_inverse=True)
    sums = np.zeros((len(uniq), len(steps)))
    np.add.at(sums, (which[keep], at[keep]), o["device_ns"][keep].astype(np.float64))
    return {str(k): s / len(ranks) for k, s in zip(uniq, sums)}


# Judging -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Shift:
    """What to take out of logarithms of block values. ups: name -> two float64[blocks], of run a and b, how much slower than usual the
    machine was in each block, as all computing rows but the named one say ('' for a row that is none of them; rows with other blocks go
    without). log: the level between the runs, square: its squared error. least: logarithm by which a row must have moved as measured,
    nothing taken out, to be named."""

    ups: dict[str, tuple[np.ndarray, np.ndarray]]
    log: float
    square: float
    told: Common
    least: float = 0.0

    def without(self, name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of a row's blocks after the machine's ups and downs are taken out."""
        found = self.ups.get(name, self.ups.get(""))
        if found is None or (found[0].size, found[1].size) != (a.size, b.size):
            return a, b
        return a - found[0], b - found[1]


def _wobble(logs: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """logs float64[rows, blocks] -> for each name the median of the other names' deviation from their usual; for '' of all. A row must not
    enter its own reference: it would look steadier than it is."""
    away = logs - np.median(logs, axis=1, keepdims=True)
    others = {name: away[[n != name for n in names]] for name in names}
    return {name: np.median(x, axis=0) if len(x) else np.zeros(away.shape[1]) for name, x in others.items()} | {"": np.median(away, axis=0)}


def _common(references: list[_Todo], peaks: Interval | None, interest: float) -> _Shift:
    """What the references share, and how much of it is to be taken out."""
    usable = [t for t in references if not t.reason and (t.a > 0).all() and (t.b > 0).all()]
    usable = [t for t in usable if (t.a.size, t.b.size) == (usable[0].a.size, usable[0].b.size)]
    if len(usable) < 3:
        return _Shift({}, 0.0, 0.0, Common(0.0, UNDECIDED, "none", 0.0, peaks, "too few computing rows to tell"))
    first, second = np.log([t.a for t in usable]), np.log([t.b for t in usable])
    names = [t.name for t in usable]
    now, then = _wobble(first, names), _wobble(second, names)
    levels = [(noise.level(x - now[n]), noise.level(y - then[n])) for n, x, y in zip(names, first, second)]
    moved = np.sort([y.mean - x.mean for x, y in levels])
    most = _shorth(moved)
    quarter = len(moved) // 4
    shared = bool(moved[quarter] >= LEAST_PART * most if most > 0 else moved[-1 - quarter] <= LEAST_PART * most)
    verdict = SAME if abs(exp(most) - 1) < interest else SLOWER if most > 0 else FASTER
    cause, why = _cause(most, peaks, verdict)
    small = log1p(LEAST_PART * interest)
    if (verdict == SAME and abs(most) <= small) or cause == "machine" or (cause != "program" and shared):
        square = pi / 2 * float(np.median([x.square + y.square for x, y in levels])) / len(levels)  # of a median of that many
        return _Shift({n: (now[n], then[n]) for n in now}, most, square, Common(exp(most) - 1, verdict, cause, exp(most) - 1, peaks, why))
    rest = 0.0 if cause == "program" else float(np.clip(most, -small, small))
    return _Shift({}, rest, 0.0, Common(exp(most) - 1, verdict, cause, exp(rest) - 1, peaks, why))


def _of_two(references: list[_Todo], interest: float) -> _Shift:
    """Two ranks have only each other: the one that moved less says how the machine moved, and the other is named for what it moved beyond
    that only where it moved clearly more, for else either may be the one that did."""
    found = _common(references, None, interest)
    usable = [t for t in references if not t.reason and (t.a > 0).all() and (t.b > 0).all()]
    by_rank: dict[str, list[float]] = {}
    errors = []
    for t in usable:
        x, y = noise.level(np.log(t.a)), noise.level(np.log(t.b))
        by_rank.setdefault(t.name, []).append(y.mean - x.mean)
        errors.append(x.square + y.square)
    if len(by_rank) != 2:
        return found
    quiet = min((float(np.median(moved)) for moved in by_rank.values()), key=abs)
    square = pi / 2 * float(np.median(errors)) * len(by_rank) / len(usable)
    told = Common(exp(quiet) - 1, SAME, "none", exp(quiet) - 1, None, "of two ranks, what the one that moved less moved")
    return _Shift(found.ups, quiet, square, told, CLEARLY * abs(quiet))


def _shorth(ordered: np.ndarray) -> float:
    """The mean of the closest majority of sorted values (Andrews et al. 1972). A median of three of which one moved is the larger of the
    other two, so it would push these apart; the closest two do not see the one."""
    n = ordered.size // 2 + 1
    at = int(np.argmin(ordered[n - 1 :] - ordered[: ordered.size - n + 1]))
    return float(ordered[at : at + n].mean())


def _cause(shift: float, peaks: Interval | None, verdict: str) -> tuple[str, str]:
    if verdict == SAME:
        return "none", "less than matters"
    if peaks is None:
        return "unknown", f"the machine's own clock was read fewer than {LEAST_PEAKS} times, so machine and program cannot be told apart"
    low, high = log1p(max(peaks.low, -0.999999)), log1p(peaks.high)
    says = f"the machine's own clock says {peaks.estimate:+.1%} ({peaks.low:+.1%} to {peaks.high:+.1%})"
    sign = 1 if shift > 0 else -1
    reach = high if sign > 0 else -low
    if reach < abs(shift) / 2:  # the machine explains less than half of it at the very most
        return "program", f"{says}: it is the program"
    if (low > 0 if sign > 0 else high < 0):
        return "machine", f"{says}: it is the machine"
    return "unknown", f"{says}: too rough to tell machine and program apart"


def _peaks(a: Measured, b: Measured) -> Interval | None:
    """Slowdown of the machine by its reference rates: the mean of arithmetic and copy; None with too few readings in a run."""
    logs = []
    for m in (a, b):
        if not m.peaks or len(m.peaks["flops"]) < LEAST_PEAKS:
            return None
        rates = np.array([m.peaks["flops"], m.peaks["bandwidth"]], np.float64)
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            return None
        logs.append(-np.log(rates).mean(axis=0))
    return noise.shift(logs[0], logs[1], noise.ALPHA)


def _judge(t: _Todo, alpha: float, common: _Shift, interest: float, enough: bool) -> Row:
    """One row: its interval and verdict."""
    line = interest * max(1.0, LEAST_SHARE / t.share if t.share > 0 else np.inf)
    a_ns, b_ns = (float(np.median(x)) if x.size else 0.0 for x in (t.a, t.b))
    if t.reason or not (t.a > 0).all() or not (t.b > 0).all():
        nothing = Interval(-1.0, np.nan, np.inf, 0)
        return Row(t.kind, t.name, a_ns, b_ns, t.share, nothing, nothing, line, UNDECIDED, t.reason or "times that are not positive")
    a, b = np.log(t.a), np.log(t.b)
    raw = noise.shift(a, b, alpha)
    a, b = common.without(t.name, a, b)
    own = noise.shift(a, b, alpha, taken=common.log, square=common.square)
    if not enough:
        return Row(t.kind, t.name, a_ns, b_ns, t.share, raw, own, line, UNDECIDED, f"fewer than {LEAST_STEPS} steady steps")
    near = noise.shift(a, b, 2 * noise.ALPHA, taken=common.log, square=common.square)  # 5 % on either side
    least = 0.0 if common.told.cause == "machine" else max(log1p(LEAST_RAW * line), common.least)
    away = log1p(max(raw.estimate, -0.999999))
    wrong_way = False
    if noise.slower(own, line) or noise.slower(_back(own), line):
        up = own.estimate > 0
        wrong_way = least > 0 and (away if up else -away) < least
        verdict = UNDECIDED if wrong_way else SLOWER if up else FASTER
    elif near.high < line and _back(near).high < line:
        verdict = SAME
    else:
        verdict = UNDECIDED
    reason = "" if verdict != UNDECIDED else RARE if min(t.a.size, t.b.size) < LEAST_SAMPLES else TAKEN if wrong_way else "too noisy"
    return Row(t.kind, t.name, a_ns, b_ns, t.share, raw, own, line, verdict, reason)


def _back(i: Interval) -> Interval:
    """The same shift seen from b: how much slower a is."""
    return Interval(1 / (1 + i.high) - 1, 1 / (1 + i.estimate) - 1, 1 / (1 + i.low) - 1 if i.low > -1 else np.inf, i.n)
