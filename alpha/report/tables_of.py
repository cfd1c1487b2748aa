"""The tables of a report: from a view's dict to cells. Floor 7. Each carries its provenance, its mark and the numbers for its CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alpha.flops.parts import DIRECTIONS
from alpha.profile.figures import shown
from alpha.registry.gates import GATES
from alpha.report import charts
from alpha.report.data import comparison as comparison_data
from alpha.report.document import Table, provenance_lines
from alpha.report.extra import pandas as pd
from alpha.report.runs import Run
from alpha.report.series import View

NONE = "—"
NO_TARGET = "no\u00a0target"
LONGEST = 160
"""Characters of a reason in a cell; the CSV has all of it."""


def _table(name: str, title: str, view: View, columns: Sequence[str], rows: Sequence[Sequence[str]], data: pd.DataFrame,
           numeric: Iterable[int] = (), wide: Iterable[int] = ()) -> Table:  # fmt: skip
    return Table(name, title, columns, rows, data, provenance_lines(view["provenance"]), charts.marks_of(view), frozenset(numeric),
                 frozenset(wide))  # fmt: skip


# -- figures -------------------------------------------------------------------------------------------------------------------

_FIGURE = ("key", "title", "value", "unit", "text", "target", "target_source", "verdict", "reason", "formula")


def _figures_data(runs: Sequence[Run], made: Sequence[View]) -> pd.DataFrame:
    return pd.DataFrame([{"run": run.label, **{k: f[k] for k in _FIGURE}} for run, view in zip(runs, made) for f in view["figures"]])


def figures(run: Run, view: View) -> Table:
    """All figures of one run, judged."""
    rows = []
    for f in view["figures"]:
        verdict = f["verdict"] or (NO_TARGET if f["reason"] == "no target" else NONE)
        remark = "" if f["reason"] == "no target" else f["reason"]
        own = f" ({f['target_source']})" if f["target_source"] not in ("", "default") else ""
        rows.append([f["title"], f["text"], (f["target"] or NONE) + own, verdict, remark, f["formula"]])
    return _table("figures", "Figures and their targets", view, ("figure", "value", "target", "verdict", "remark", "formula"), rows,
                  _figures_data([run], [view]), (1, 2), (4, 5))  # fmt: skip


def figures_of_all(runs: Sequence[Run], made: Sequence[View]) -> Table:
    """The same for several runs, a column a run."""
    rows = []
    for i, f in enumerate(made[0]["figures"]):
        cells = [view["figures"][i] for view in made]
        goals = list(dict.fromkeys(c["target"] for c in cells if c["target"]))
        rows.append([f["title"], " / ".join(goals) or NONE, *(f"{c['text']}{' ' + c['verdict'] if c['verdict'] else ''}" for c in cells)])
    whole = {"provenance": [p for view in made for p in view["provenance"]]}
    return _table("figures", "Figures and their targets", whole, ("figure", "target", *(r.label for r in runs)), rows,
                  _figures_data(runs, made), range(1, 2 + len(runs)))  # fmt: skip


def definitions(made: Sequence[View]) -> Table:
    """What the figures are."""
    whole = {"provenance": [p for view in made for p in view["provenance"]]}
    all_ = made[0]["figures"]
    return _table("definitions", "What the figures are", whole, ("figure", "formula"), [[f["title"], f["formula"]] for f in all_],
                  pd.DataFrame([{k: f[k] for k in ("key", "title", "unit", "formula")} for f in all_]), (), (1,))  # fmt: skip


# -- several runs --------------------------------------------------------------------------------------------------------------


def comparison(a: Run, b: Run, view: View) -> Table:
    """Run b against run a, row by row."""
    rows = [[r["kind"], r["name"], ms(r["a_ns"]), ms(r["b_ns"]), percent(r["share"], 1), percent(r.get("estimate"), 2, sign=True),
             _interval(r), percent(r["line"], 1), r["verdict"], r["false_alarms"], r["power"],
             r["reason"]] for r in view["rows"]]  # fmt: skip
    columns = ("kind", "row", a.label, b.label, "share", "slower by", "interval", "line", "verdict", "false alarms, measured",
               "power, measured", "remark")  # fmt: skip
    return _table("comparison-rows", "Row by row", view, columns, rows, comparison_data(view), range(2, 8), (1,))


def _interval(row: View) -> str:
    if row.get("low") is None or row.get("high") is None:
        return "not known"
    return f"{percent(row['low'], 2, sign=True)} to {percent(row['high'], 2, sign=True)}"


def scaling(view: View) -> Table:
    """A row a run."""
    rows = [[r["label"], NONE if r["workers"] is None else str(r["workers"]), rate(r["tokens_per_second"], "tokens/s"),
             rate(r["ideal"], "tokens/s"), percent(r["efficiency"], 1), between(r), percent(r["comm_exposed"], 2),
             r["why"] or r["unlike"] or ""] for r in view["rows"]]  # fmt: skip
    columns = ("run", view["axis"], "throughput", "ideal", "efficiency", "interval", "exposed communication", "remark")
    return _table("scaling-rows", "Scaling", view, columns, rows, pd.DataFrame(view["rows"]), range(1, 7), (7,))


# -- one run -------------------------------------------------------------------------------------------------------------------


def waterfall(view: View, tail: str) -> Table:
    """A row a phase; the last one is the whole."""
    rows = [[p["phase"], ms(p["exclusive_ns"]), percent(p["share"], 2), ms(p["overlapped_ns"]) if p["overlapped_ns"] else NONE, p["about"]]
            for p in view["phases"]]  # fmt: skip
    rows.append(["together", ms(view["wall_ns"]), percent(1.0, 2), NONE, "the step interval"])
    columns = ("phase", "exclusive", "share", "overlapped", "what it counts")
    return _table(f"waterfall-rows{tail}", "Phases", view, columns, rows, pd.DataFrame(view["phases"]), (1, 2, 3), (4,))


def ranks(view: View, tail: str) -> Table:
    """A row a rank."""
    rows = [[str(r["rank"]), ms(r["step_ns"]), ms(r["own_ns"]), percent(r["apart"], 1, sign=True), between(r, sign=True), r["verdict"],
             ms(r["exposed_ns"]), ms(r["overlapped_ns"]), r["reason"]] for r in view["rows"]]  # fmt: skip
    columns = ("rank", "step", "own time", "longer than the others'", "interval", "verdict", "communication exposed", "overlapped",
               "remark")
    return _table(f"ranks{tail}", "Ranks", view, columns, rows, pd.DataFrame(view["rows"]), (0, 1, 2, 3, 4, 6, 7), (8,))


def sources(view: View, tail: str) -> Table:
    """A row a source: its share of the samples, and what an epoch of it is made of."""
    rows = [[s["source"], percent(s["share"], 2), f"{s['sequences']:,.0f}", f"{s['documents']:,.0f}", f"{s['cut']:,.0f}",
             percent(s["padding"], 2), percent(s["left_out"], 4),
             percent(s["attended"], 2), NONE if s["heaviest"] is None else f"{s['heaviest']:.3f}",
             NONE if s["bits_per_byte"] is None else f"{s['bits_per_byte']:.4f}"]
            for s in view["sources"]]  # fmt: skip
    columns = ("source", "of the samples", "sequences an epoch", "documents", "of them cut", "padding", "tokens left out",
               "pairs attended", "heaviest over mean", "bits per byte")
    return _table(f"sources-rows{tail}", "Sources", view, columns, rows, pd.DataFrame(view["sources"]), range(1, 10))


def waits(view: View, tail: str) -> Table:
    """A row a rank."""
    rows = [[str(r["rank"]), f"{r['steps']:,}", f"{r['waited']:,}", percent(r["ready"] / r["batches"] if r["batches"] else None, 2),
             ms(r["wait_ns"]), percent(r["share"], 3), f"{ms(r['longest_ns'])} in step {r['longest_step']:,}", ms(r["made_ns"])]
            for r in view["ranks"]]  # fmt: skip
    columns = ("rank", "steps", "of them waited", "batches ready", "wait a step", "of its time", "longest", "making them")
    return _table(f"waits-rows{tail}", "Waits for batches", view, columns, rows, pd.DataFrame(view["ranks"]), range(8))


def profiled(view: View, tail: str) -> Table:
    """A row a profiled step: how much slower it was, what its kernels did, and our stamps against the instrument's."""
    rows = []
    for r in view["rows"]:
        slower = NONE if r["slowdown"] is None else percent(r["slowdown"], 2, sign=True)
        cells = [f"{r['step']}" + (f", rank {r['rank']}" if r["rank"] else ""), slower, "yes" if r["judged"] else "no: perturbed"]
        if r["kernels"] is None:
            rows.append(cells + [NONE] * 10)
            continue
        rows.append([*cells, f"{r['kernels']:,}", *(percent(r[k], 2) for k in ("busy", "idle", "gap")), ms(r["longest_gap_ns"]),
                     percent(r["gap_sync"], 3), percent(r["gap_copy"], 3),
                     f"{r['copies']}: {ms(r['copy_ns'])}, {percent(r['copy_overlapped'], 1)} beside kernels",
                     f"{r['syncs']}: {ms(r['sync_ns'])}",
                     f"{r['stamps']}: {r['stamp_offset_ns']:+,} ± {r['stamp_spread_ns']:,} ns"])  # fmt: skip
    columns = ("step", "slower", "gaps judged", "kernels", "busy", "idle", "gaps", "longest", "gaps by waits", "gaps by copies", "copies",
               "waits of the host", "our stamps less the instrument's")
    return _table(f"profiled{tail}", "Profiled steps", view, columns, rows, pd.DataFrame(view["rows"]), range(13), ())


def ops(view: View, tail: str) -> Table:
    """The slowest ops."""
    rows = [[o["op"], o["shape"], o["phase"], f"{o['runs']:g}", ms(o["device_ns"]), percent(o["share"], 1),
             NONE if o["distance"] is None else charts.distance(o["distance"]), o["bound"] or NONE, rate(o["flops_rate"], "FLOP/s"),
             rate(o["bandwidth"], "bytes/s"), NONE if o["intensity"] is None else f"{o['intensity']:.3g}", ms(o["enqueue_ns"]),
             ms(o["wait_ns"]), f"{o['dispatches']:g}"] for o in view["ops"]]  # fmt: skip
    columns = ("op", "shape", "phase", "runs", "device", "share", "distance", "bound by", "rate", "bandwidth", "FLOP/B", "enqueue",
               "wait", "hand-overs")  # fmt: skip
    numeric = (3, 4, 5, 6, 8, 9, 10, 11, 12, 13)
    return _table(f"ops-rows{tail}", "Slowest ops", view, columns, rows, pd.DataFrame(view["ops"]), numeric, (1,))


def flops(view: View, tail: str) -> Table:
    """A row a part of the model, the last one their sums; FLOPs of one step."""
    columns = [(f"{to}, {kind}", f"{to}_{kind}") for kind in ("model", "executed") for to in DIRECTIONS
               if any(p[f"{to}_{kind}"] for p in view["parts"])]  # fmt: skip
    columns.insert(sum(key.endswith("_model") for _, key in columns), ("model", "model"))
    columns.append(("executed", "executed"))
    rows = [[p["part"], *(gflop(p[key]) for _, key in columns), p["about"]] for p in view["parts"]]
    title, names = f"FLOPs of a step by part, {view['version']}", ("part", *(c for c, _ in columns), "what it counts")
    return _table(f"flops-rows{tail}", title, view, names, rows, pd.DataFrame(view["parts"]), range(1, 1 + len(columns)),
                  (1 + len(columns),))  # fmt: skip


def samples(view: View, tail: str) -> Table:
    """A row a sample: the text as it was printed."""
    rows = [[f"{s['step']:,}", (s["prompt"] + s["text"]).replace("\n", " ⏎ "), f"{s['temperature']:g}", str(s["top_k"]), str(s["seed"])]
            for s in view["samples"]]  # fmt: skip
    return _table(f"samples-rows{tail}", "Samples", view, ("step", "text", "temperature", "top-k", "seed"), rows,
                  pd.DataFrame(view["samples"]), (0, 2, 3, 4), (1,))  # fmt: skip


def memory(view: View, tail: str) -> Table:
    """A row an arena."""
    rows = [[a["arena"], mib(a["planned"]), mib(a["most"]), mib(a["last"]),
             NONE if not a["planned"] else percent(a["most"] / a["planned"], 1)] for a in view["arenas"]]  # fmt: skip
    columns = ("arena", "planned", "actual, most", "actual, last", "actual / planned")
    return _table(f"memory-rows{tail}", "Arenas", view, columns, rows, pd.DataFrame(view["arenas"]), (1, 2, 3, 4))


def gates(view: View, tail: str) -> Table:
    """A row a component: the evidence that the run had, and what holds for today's code."""
    rows, flat = [], []
    for c in view["components"]:
        ran, verdicts = ", ".join(sorted(c["evidence"])), c.get("gates", {})
        usable = {True: "usable", False: "not usable", None: NONE}[c.get("usable")]
        missing = "; ".join(c.get("missing", []))
        brief = missing if len(missing) <= LONGEST else missing[: LONGEST - 1] + "…"
        today = [verdicts.get(g, NONE) for g in GATES]
        rows.append([c["component"], f"{len(c['evidence'])} gates" if ran else "none", usable, *today, brief])
        flat.append({"component": c["component"], "evidence_of_the_run": ran, "today": usable, **dict(zip(GATES, today)),
                     "missing": missing})  # fmt: skip
    columns = ("component", "evidence of the run", "today", *GATES, "missing")
    return _table(f"gates{tail}", "Gate status of the components used", view, columns, rows, pd.DataFrame(flat), (), (8,))


# -- cells ---------------------------------------------------------------------------------------------------------------------


def ms(ns: float | None) -> str:
    """Nanoseconds as milliseconds."""
    return NONE if ns is None else f"{ns / 1e6:,.3f} ms"


def gflop(n: int) -> str:
    """FLOPs as GFLOP."""
    return f"{n / 1e9:,.4f}" if n else NONE


def mib(nbytes: int | None) -> str:
    """Bytes as MiB."""
    return NONE if nbytes is None else f"{nbytes / 2**20:,.2f} MiB"


def percent(share: float | None, digits: int, *, sign: bool = False) -> str:
    """A share of 1 as per cent."""
    return NONE if share is None else f"{share * 100:{'+' if sign else ''}.{digits}f} %"


def between(row: View, *, sign: bool = False) -> str:
    """An interval of shares, `low` to `high`."""
    return NONE if row["low"] is None or row["high"] is None else " to ".join(percent(row[k], 1, sign=sign) for k in ("low", "high"))


def rate(value: float | None, unit: str) -> str:
    """A rate with its unit."""
    return NONE if value is None else shown(value, unit)
