"""The comparison of two runs again, row by row with lists and dictionaries, as alpha/profile/compare.py says it. Floor 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from alpha.gates.contracts.profile.by_hand import INF, NAN, Between, height, moved, stretches
from alpha.gates.contracts.profile.measured import Made, Row

COMPUTING = ("forward", "backward", "grad_norm", "grad_clip", "optimizer")
PHASES = (*COMPUTING, "data_load", "host_to_device", "device_to_host", "comm", "checkpoint", "eval", "sample_gen", "checks", "idle")
LINE = 0.02
"""The difference that matters, and the share of a step below which a row is judged as if it had so much."""

NOBODY = Between(-1.0, NAN, INF, 0)


@dataclass
class Entry:
    """A row to judge: block values of both runs."""

    kind: str
    name: str
    a: list[float]
    b: list[float]
    share: float
    reason: str = ""

    @property
    def positive(self) -> bool:
        return min([1.0, *self.a, *self.b]) > 0


@dataclass
class Shared:
    """What is taken out: ups and downs by name of each run, a level with its squared error; what is said of it."""

    ups: tuple[dict[str, list[float]], dict[str, list[float]]]
    log: float
    square: float
    told: tuple[float, str, str, float, str]
    """Shift, verdict, cause, taken, reason."""
    least: float = 0.0


def steady_steps(run: Made, rank: int) -> list[Row]:
    """Unprofiled steps of a rank, without the first three of each session."""
    mine = sorted((r for r in run.timing if r["rank"] == rank), key=lambda r: int(r["step"]))
    return [r for i, r in enumerate(mine) if i >= 3 and mine[i - 3]["session"] == r["session"] and not r["profiled"]]


def series(run: Made) -> dict[int, list[Row]]:
    """Rank -> its rows of the steps that are steady on all ranks."""
    own = {rank: steady_steps(run, rank) for rank in sorted({r["rank"] for r in run.timing})}
    common = set.intersection(*({r["step"] for r in rows} for rows in own.values())) if own else set()
    return {rank: [r for r in rows if r["step"] in common] for rank, rows in own.items()}


def over(rows: dict[int, list[Row]], ranks: Sequence[int], column: str) -> list[float]:
    """The mean of a column over ranks, step by step."""
    return [fmean(r[column] for r in at) for at in zip(*(rows[rank] for rank in ranks))]


def entry(kind: str, name: str, a: list[float], b: list[float], step_ns: float, n: int = 16) -> Entry | None:
    """A row of two series; None where neither took any time."""
    some = [sum(x != 0 for x in s) / len(s) if s else 0.0 for s in (a, b)]
    if some == [0, 0]:
        return None
    if min(some) < 0.9:
        a, b = [x for x in a if x > 0], [x for x in b if x > 0]
    first, second = stretches(a, n), stretches(b, n)
    typical = median(first) * some[0] if first else median(second) * some[1]
    return Entry(kind, name, first, second, typical / step_ns, "" if a and b else "only in one of the runs")


def ops_of(run: Made, ranks: Sequence[int], by: str) -> dict[str, list[float]]:
    """Op -> ns a profiled step, mean over ranks."""
    found: dict[str, dict[int, float]] = {}
    for r in run.ops:
        name = " ".join(str(r[k]) for k in (("op", "shape", "phase") if by == "op" else ("plan", "launch", "op")))
        at = found.setdefault(name, dict.fromkeys(sorted({x["step"] for x in run.ops}), 0.0))
        if r["rank"] in ranks:
            at[r["step"]] += r["device_ns"] / len(ranks)
    return {name: list(found[name].values()) for name in sorted(found)}


def wobble(logs: list[list[float]], names: list[str]) -> dict[str, list[float]]:
    """For each name how far off their usual all others were, block by block; '' asks all."""
    away = [[x - median(row) for x in row] for row in logs]
    ups = {}
    for name in {*names, ""}:
        others = [row for row, n in zip(away, names) if n != name]
        ups[name] = [median(at) for at in zip(*others)] if others else [0.0] * len(away[0])
    return ups


def shared(references: list[Entry], peaks: Between | None, interest: float = LINE) -> Shared:
    """What the computing rows have in common."""
    usable = [t for t in references if not t.reason and t.positive]
    usable = [t for t in usable if (len(t.a), len(t.b)) == (len(usable[0].a), len(usable[0].b))]
    if len(usable) < 3:
        return Shared(({}, {}), 0.0, 0.0, (0.0, "UNDECIDED", "none", 0.0, "too few computing rows to tell"))
    names = [t.name for t in usable]
    logs = [[[math.log(x) for x in (t.a, t.b)[run]] for t in usable] for run in (0, 1)]
    ups = wobble(logs[0], names), wobble(logs[1], names)
    levels = [[height([x - u for x, u in zip(row, ups[run][name])]) for row, name in zip(logs[run], names)] for run in (0, 1)]
    by = sorted(two.mean - one.mean for one, two in zip(*levels))
    half = len(by) // 2 + 1
    closest = min(range(len(by) - half + 1), key=lambda i: (by[i + half - 1] - by[i], i))
    most = fmean(by[closest : closest + half])
    change = math.exp(most) - 1
    if most > 0:
        most_share = by[len(by) // 4] >= 0.75 * most
    else:
        most_share = by[-1 - len(by) // 4] <= 0.75 * most
    verdict = "SAME" if abs(change) < interest else "SLOWER" if most > 0 else "FASTER"
    cause, why = blamed(most, peaks, verdict)
    small = math.log(1 + 0.75 * interest)
    if (verdict == "SAME" and abs(most) <= small) or cause == "machine" or (cause != "program" and most_share):
        square = math.pi / 2 * median(one.square + two.square for one, two in zip(*levels)) / len(usable)
        return Shared(ups, most, square, (change, verdict, cause, change, why))
    rest = 0.0 if cause == "program" else max(-small, min(small, most))
    return Shared(({}, {}), rest, 0.0, (change, verdict, cause, math.exp(rest) - 1, why))


def blamed(most: float, peaks: Between | None, verdict: str) -> tuple[str, str]:
    """Machine or program, and why."""
    if verdict == "SAME":
        return "none", "less than matters"
    if peaks is None:
        return "unknown", "the machine's own clock was read fewer than 4 times, so machine and program cannot be told apart"
    says = f"the machine's own clock says {100 * peaks.estimate:+.1f}% ({100 * peaks.low:+.1f}% to {100 * peaks.high:+.1f}%)"
    ends = [math.log(1 + max(peaks.low, -0.999999)), math.log(1 + peaks.high)]
    if most < 0:
        ends = [-ends[1], -ends[0]]
    if ends[1] < abs(most) / 2:
        return "program", f"{says}: it is the program"
    return ("machine", f"{says}: it is the machine") if ends[0] > 0 else ("unknown", f"{says}: too rough to tell machine and program apart")


def of_two(references: list[Entry], interest: float = LINE) -> Shared:
    """Of two ranks the one that moved less is the machine."""
    found = shared(references, None, interest)
    by: dict[str, list[float]] = {}
    errors = []
    for t in (t for t in references if not t.reason and t.positive):
        one, two = (height([math.log(x) for x in s]) for s in (t.a, t.b))
        by.setdefault(t.name, []).append(two.mean - one.mean)
        errors.append(one.square + two.square)
    if len(by) != 2:
        return found
    quiet = min((median(x) for x in by.values()), key=abs)
    change = math.exp(quiet) - 1
    return Shared(found.ups, quiet, math.pi / 2 * median(errors) * 2 / len(errors),
                  (change, "SAME", "none", change, "of two ranks, what the one that moved less moved"), 1.5 * abs(quiet))


def clock_of(a: Made, b: Made) -> Between | None:
    """By how much the machine's clock went slower; None where one run hardly read it."""
    logs = []
    for run in (a, b):
        rates = [x for r in run.peaks for x in r.values()]
        if len(run.peaks) < 4 or not all(0 < x < INF for x in rates):
            return None
        logs.append([-(math.log(r["flops"]) + math.log(r["bandwidth"])) / 2 for r in run.peaks])
    return moved(logs[0], logs[1], 0.05)


def back(i: Between) -> Between:
    """The same from the other side."""
    low, estimate, high = (1 / (1 + x) - 1 if x > -1 else INF for x in (i.high, i.estimate, i.low))
    return Between(low, estimate, high, i.n)


def judged(t: Entry, alpha: float, common: Shared, enough: bool, interest: float = LINE) -> dict[str, Any]:
    """Every field of a row but its rates."""
    line = interest * max(1.0, LINE / t.share if t.share > 0 else INF)
    row: dict[str, Any] = {"kind": t.kind, "name": t.name, "a_ns": median(t.a) if t.a else 0.0, "b_ns": median(t.b) if t.b else 0.0,
                           "share": t.share, "line": line}
    if t.reason or not t.positive:
        return {**row, "raw": NOBODY, "own": NOBODY, "verdict": "UNDECIDED", "reason": t.reason or "times that are not positive"}
    a, b = [math.log(x) for x in t.a], [math.log(x) for x in t.b]
    raw = moved(a, b, alpha)
    now, then = (ups.get(t.name, ups.get("")) for ups in common.ups)
    if now and then and (len(now), len(then)) == (len(a), len(b)):
        a, b = [x - u for x, u in zip(a, now)], [x - u for x, u in zip(b, then)]
    own = moved(a, b, alpha, common.log, common.square)
    row |= {"raw": raw, "own": own}
    if not enough:
        return {**row, "verdict": "UNDECIDED", "reason": "fewer than 64 steady steps"}
    near, aside = moved(a, b, 0.1, common.log, common.square), back(own)
    up = own.low > 0 and own.estimate >= line
    if up or (aside.low > 0 and aside.estimate >= line):
        least = 0.0 if common.told[2] == "machine" else max(math.log(1 + line / 2), common.least)
        as_measured = math.log(1 + max(raw.estimate, -0.999999)) * (1 if up else -1)
        if least > 0 and as_measured < least:
            few = "too few samples" if min(len(t.a), len(t.b)) < 4 else ""
            return {**row, "verdict": "UNDECIDED", "reason": few or "it moved apart from the others, but hardly as measured: either it or "
                                                                     "they moved"}
        return {**row, "verdict": "SLOWER" if up else "FASTER", "reason": ""}
    if near.high < line and back(near).high < line:
        return {**row, "verdict": "SAME", "reason": ""}
    return {**row, "verdict": "UNDECIDED", "reason": "too few samples" if min(len(t.a), len(t.b)) < 4 else "too noisy"}


def accounted(a: Made, b: Made, by: str = "op", interest: float = LINE) -> dict[str, Any]:
    """Rows, what is common, steps and stalls of b against a, over the ranks that both have."""
    one, two = series(a), series(b)
    ranks = [r for r in one if r in two]
    step_ns = median(over(one, ranks, "step_ns")) if one[ranks[0]] else 1.0

    def kept(found: list[Entry | None]) -> list[Entry]:
        return [t for t in found if t is not None]

    def parts(named: str) -> list[Entry]:
        found = kept([entry("", p if named == "phase" else f"rank {r}", [float(x[f"{p}_ns"]) for x in one[r]],
                            [float(x[f"{p}_ns"]) for x in two[r]], step_ns) for r in ranks for p in COMPUTING])
        return [t for t in found if t.share >= LINE and not t.reason]

    phases = kept([entry("step" if n == "step" else "phase", n, over(one, ranks, f"{n}_ns"), over(two, ranks, f"{n}_ns"), step_ns)
                   for n in ("step", *PHASES, "unexplained") if all(f"{n}_ns" in run.timing[0] for run in (a, b))])
    own = [{r: [float(sum(x[f"{p}_ns"] for p in COMPUTING)) for x in rows[r]] for r in ranks} for rows in (one, two)]
    by_rank = kept([entry("rank", f"rank {r}", own[0][r], own[1][r], step_ns) for r in ranks]) if len(ranks) > 1 else []
    first, second = ops_of(a, ranks, by), ops_of(b, ranks, by)
    ops = []
    if first and second:
        whole = median(sum(at) for at in zip(*first.values()))
        ops = kept([entry("op", name, first.get(name, []), second.get(name, []), whole, 24) for name in {**first, **second}])
    clock, enough = clock_of(a, b), min(len(one[ranks[0]]), len(two[ranks[0]])) >= 64
    of_phases = shared(parts("phase"), clock, interest)
    kinds = [(phases, of_phases, enough)] if phases else []
    if by_rank:
        kinds.append((by_rank, of_two(parts("rank"), interest) if len(ranks) == 2 else shared(by_rank, None, interest), enough))
    if ops:
        kinds.append((ops, shared([t for t in ops if t.share >= LINE], clock, interest), True))
    rows = [judged(t, 0.05 / (len(kinds) * len(todo)), common, believed, interest) for todo, common, believed in kinds for t in todo]
    longest = [[max(r["step_ns"] for r in at) for at in zip(*x.values())] for x in (one, two)]
    return {"rows": rows, "common": kinds[0][1].told, "peaks": clock,
            "steps": tuple(len(x[ranks[0]]) for x in (one, two)),
            "stalls": tuple(sum(x > 2 * median(s) for x in s) for s in longest), "ranks": len(ranks)}
