"""The plots: from a view's dict to an SVG. Floor 7. Nothing is computed here that is not in the view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from alpha.profile.phases import STEP_PHASES
from alpha.report.canvas import INK, RC, canvas, steps_axis, svg_of, watermark
from alpha.report.extra import matplotlib
from alpha.report.palette import OF_LAUNCH, OF_PHASE, series
from alpha.report.series import View

MIB = 2**20


def _drawn(draw: Callable[..., Figure]) -> Callable[..., str]:
    """A function that fills a Figure, made into one that returns SVG with the mark of its UNGATED runs."""

    @wraps(draw)
    def plot(view: View, name: str, *args: Any, **options: Any) -> str:
        with matplotlib.rc_context(RC):
            figure = draw(view, *args, **options)
            watermark(figure, marks_of(view))
            return svg_of(figure, name)

    return plot


def marks_of(view: View) -> list[str]:
    """Names of the view's runs that are not gated."""
    return [str(p["run"]) for p in view["provenance"] if p["status"] != "GATED"]


def _percent(value: float, _: object) -> str:
    return f"{round(value * 100, 6):g} %"


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], np.float64)


def _lines(axis: Axes, runs: Sequence[View], key: str, factor: float = 1.0) -> None:
    """Bucket means as lines; smallest to largest as a band where there are at most three runs."""
    for i, run in enumerate(runs):
        if run.get("why") or not run[key]["x"]:
            continue
        colour, dash = series(i)
        s = run[key]
        if len(runs) <= 3:
            axis.fill_between(s["x"], _floats(s["min"]) * factor, _floats(s["max"]) * factor, color=colour, alpha=0.16, linewidth=0)
        marker = "o" if len(s["x"]) < 3 else None
        axis.plot(s["x"], _floats(s["mean"]) * factor, color=colour, linestyle=dash, linewidth=1.4, label=run["label"], marker=marker)


def _legend(axis: Axes, runs: Sequence[View]) -> None:
    if len(runs) > 1:
        axis.legend(loc="best", ncols=2 if len(runs) > 4 else 1, handlelength=2.2)


@_drawn
def waterfall(view: View) -> Figure:
    """A bar a phase, each beginning where the one before ended; overlapped time as an outline."""
    entries = [p for p in view["phases"] if p["exclusive_ns"] > 0 or p["overlapped_ns"] > 0]
    figure, (axis,) = canvas(0.95 + 0.27 * len(entries), left=1.35, right=1.6)
    at = 0.0
    for row, p in enumerate(entries):
        colour, hatch = OF_PHASE[p["phase"]]
        wide = p["exclusive_ns"] / 1e6
        axis.barh(row, wide, left=at, color=colour, hatch=hatch, height=0.72, linewidth=0, edgecolor="white")
        reach = max(at + wide, at + p["overlapped_ns"] / 1e6)
        if p["overlapped_ns"] > 0:
            axis.barh(row, p["overlapped_ns"] / 1e6, left=at, fill=False, edgecolor=colour, linestyle="--", height=0.72, linewidth=1.1)
        text = f"{wide:.3g} ms  {p['share'] * 100:.1f} %"
        text += f"  (+{p['overlapped_ns'] / 1e6:.3g} overlapped)" if p["overlapped_ns"] else ""
        axis.annotate(text, (reach, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5, annotation_clip=False)
        at += wide
    axis.set_yticks(range(len(entries)), [p["phase"] for p in entries])
    axis.set_ylim(len(entries) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color="#808080", alpha=0.22, linewidth=0.6)
    axis.set_xlim(0, view["wall_ns"] / 1e6)
    axis.set_xlabel(f"ms of a step interval (mean of {view['steps']:,} steps; whole: {view['wall_ns'] / 1e6:.4g} ms)")
    return figure


@_drawn
def phases_over_time(view: View) -> Figure:
    """Stacked areas: ms of the step itself over the run. What happens between steps would hide it; it is in the waterfall."""
    figure, (axis,) = canvas(2.7, right=1.55)
    own = (*STEP_PHASES, "unexplained")
    names = [p for p, values in view["series"].items() if p in own and np.nansum(_floats(values)) > 0]
    stacks = [np.nan_to_num(_floats(view["series"][p])) / 1e6 for p in names]
    drawn = axis.stackplot(view["x"], stacks, colors=[OF_PHASE[p][0] for p in names], linewidth=0)
    for area, p in zip(drawn, names):
        area.set_hatch(OF_PHASE[p][1])
        area.set_edgecolor("white")
        area.set_linewidth(0)
    axis.legend(drawn[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.2, fontsize=8)
    axis.set_ylabel("ms a step")
    axis.margins(x=0)
    steps_axis(axis)
    return figure


@_drawn
def utilisation(view: View) -> Figure:
    """MFU and HFU over steps."""
    figure, axes = canvas(2.7, 2)
    for axis, key, title in zip(axes, ("mfu", "hfu"), ("MFU: useful FLOPs", "HFU: executed FLOPs")):
        _lines(axis, view["runs"], key)
        axis.set_title(title)
        axis.set_ylabel("share of peak")
        axis.yaxis.set_major_formatter(FuncFormatter(_percent))
        axis.set_ylim(0, axis.get_ylim()[1] * 1.15)
        steps_axis(axis)
    _legend(axes[0], view["runs"])
    return figure


@_drawn
def top_ops(view: View) -> Figure:
    """Device time of an op beside the least time that its roofline allows."""
    ops = view["ops"]
    figure, (axis,) = canvas(0.95 + 0.27 * len(ops), left=2.75, right=1.35)
    for row, op in enumerate(ops):
        colour = OF_PHASE[op["phase"]][0]
        axis.barh(row, op["device_ns"] / 1e6, color=colour, height=0.7, linewidth=0)
        annotation = "no ceiling known"
        if op["ceiling_ns"] is not None:
            axis.plot([op["ceiling_ns"] / 1e6] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2.0)
            annotation = f"{distance(op['distance'])}, {op['bound']}"
        axis.annotate(annotation, (max(op["device_ns"], op["ceiling_ns"] or 0) / 1e6, row), xytext=(5, 0), textcoords="offset points",
                      va="center", fontsize=8.5, annotation_clip=False)
    axis.set_yticks(range(len(ops)), [f"{op['op']}  {_short(op['shape'])}" for op in ops], fontsize=8.5)
    axis.set_ylim(len(ops) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color="#808080", alpha=0.22, linewidth=0.6)
    axis.set_xlabel("ms a step on the device; upright mark: ceiling = max(FLOPs / peak, bytes / bandwidth); x: distance to it")
    phases = list(dict.fromkeys(op["phase"] for op in ops))
    handles = [matplotlib.patches.Patch(color=OF_PHASE[p][0], label=p) for p in phases]
    axis.legend(handles=handles, loc="lower right", handlelength=1.2)
    return figure


def distance(value: float) -> str:
    """Device time over its ceiling, as it is printed."""
    return f"{value:,.0f} x" if value >= 100 else f"{value:.2f} x"


def _short(shape: str) -> str:
    """The first result of a shape, short enough for a label."""
    text = (shape.split("->")[-1].split() or [""])[0]
    return text if len(text) <= 26 else text[:25] + "…"


@_drawn
def launches(view: View) -> Figure:
    """Launches of every step, and hand-overs of the profiled ones."""
    figure, axes = canvas(2.4, 2)
    _lines(axes[0], view["runs"], "launches")
    for i, run in enumerate(view["runs"]):
        if not run.get("why"):
            colour, dash = series(i)
            axes[1].plot(run["dispatches"]["x"], run["dispatches"]["value"], color=colour, linestyle=dash, linewidth=1.2, marker="o",
                         markersize=3, label=run["label"])
    for axis, title, label in zip(axes, ("Launches", "Hand-overs (profiled steps)"), ("launches a step", "dispatches a step")):
        axis.set_title(title)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        steps_axis(axis)
    _legend(axes[0], view["runs"])
    return figure


@_drawn
def bandwidth(view: View) -> Figure:
    """Bytes/s of the launches that bandwidth bounds, and of all, beside the measured ceiling."""
    figure, axes = canvas(2.4, 2)
    for axis, key, title in zip(axes, ("bound", "all"), ("Bandwidth-bound launches", "All launches")):
        for i, run in enumerate(view["runs"]):
            if run.get("why"):
                continue
            colour, dash = series(i)
            axis.plot(run["x"], _floats(run[key]) / 1e9, color=colour, linestyle=dash, linewidth=1.2, marker="o", markersize=3,
                      label=run["label"])
            if run["peak_bandwidth"] and (i == 0 or run["peak_bandwidth"] != view["runs"][0].get("peak_bandwidth")):
                axis.axhline(run["peak_bandwidth"] / 1e9, color=colour if len(view["runs"]) > 1 else INK, linewidth=0.9, linestyle="--")
        axis.set_title(f"{title} (dashed: peak)")
        axis.set_ylabel("GB/s")
        axis.set_ylim(bottom=0)
        steps_axis(axis, "profiled step")
    _legend(axes[0], view["runs"])
    return figure


@_drawn
def sources(view: View) -> Figure:
    """Bits per byte of each source over the validations."""
    figure, (axis,) = canvas(2.5)
    for i, run in enumerate(view["runs"]):
        colour, dash = series(i)
        axis.plot(run["x"], _floats(run["bits_per_byte"]), color=colour, linestyle=dash, linewidth=1.3, marker="o", markersize=3,
                  label=run["label"])
    axis.set_ylabel("bits per byte")
    axis.legend(loc="best", ncols=2 if len(view["runs"]) > 4 else 1, handlelength=2.2)
    steps_axis(axis)
    return figure


@_drawn
def waits(view: View) -> Figure:
    """What the loop waited for the batches of a step, and what the thread spent on making them."""
    figure, axes = canvas(2.4, 2)
    for axis, key, title in zip(axes, ("wait", "made"), ("The loop waits", "The thread makes them")):
        _lines(axis, [{**view, "label": ""}], key, 1e-6)
        axis.set_title(title)
        axis.set_ylabel("ms a step")
        axis.set_ylim(bottom=0)
        steps_axis(axis)
    return figure


@_drawn
def scaling(view: View) -> Figure:
    """Throughput, efficiency and exposed communication against devices or threads."""
    rows = [r for r in view["rows"] if r["why"] is None]
    figure, axes = canvas(2.8, 3, gap=0.75)
    x = _floats([r["workers"] for r in rows])
    axes[0].plot(x, _floats([r["ideal"] for r in rows]), color=INK, linestyle="--", linewidth=1.0, label="ideal")
    for axis, key, label, title in (
        (axes[0], "tokens_per_second", "tokens/s", "Throughput"),
        (axes[1], "efficiency", "share of ideal", "Efficiency"),
        (axes[2], "comm_exposed", "share of the step", "Exposed communication"),
    ):
        colour = series(0)[0]
        axis.plot(x, _floats([r[key] for r in rows]), color=colour, marker="o", markersize=4.5, linewidth=1.3, label="measured")
        axis.set_title(title)
        axis.set_ylabel(label)
        axis.set_xlabel(view["axis"])
        axis.set_xticks(sorted(set(x.tolist())), [f"{v:g}" for v in sorted(set(x.tolist()))])
        axis.set_ylim(0, max(axis.get_ylim()[1] * 1.12, 0.01))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1e3:g}k" if v >= 1000 else f"{v:g}"))
    axes[0].legend(loc="upper left")
    for axis in axes[1:]:
        axis.yaxis.set_major_formatter(FuncFormatter(_percent))
    known = [r for r in rows if r["low"] is not None]
    axes[1].vlines([r["workers"] for r in known], [r["low"] for r in known], [r["high"] for r in known], color=series(0)[0], linewidth=1.3)
    axes[1].axhline(1.0, color=INK, linestyle="--", linewidth=1.0)
    axes[1].set_ylim(0, max(1.12, axes[1].get_ylim()[1]))
    return figure


@_drawn
def loss(view: View) -> Figure:
    """Training loss, and bits per byte of the validation text."""
    figure, axes = canvas(2.9, 2)
    _lines(axes[0], view["runs"], "loss")
    for i, run in enumerate(view["runs"]):
        colour, dash = series(i)
        evals = run["evaluations"]
        axes[1].plot(evals["x"], _floats(evals["bits_per_byte"]), color=colour, linestyle=dash, linewidth=1.3, marker="o", markersize=3.5,
                     label=run["label"])
    baselines = {r["order2_bits_per_byte"] for r in view["runs"] if r["order2_bits_per_byte"]}
    for value in sorted(baselines):
        axes[1].axhline(value, color=INK, linewidth=0.9, linestyle="--")
        axes[1].annotate(f"order-2 model {value:.3f}", (1.0, value), xycoords=("axes fraction", "data"), xytext=(0, 3),
                         textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
    for axis, title, label in zip(axes, ("Training loss", "Validation"), ("nats a token", "bits per byte")):
        axis.set_title(title)
        axis.set_ylabel(label)
        steps_axis(axis)
    _legend(axes[0], view["runs"])
    return figure


@_drawn
def memory(view: View) -> Figure:
    """Planned beside actual, an arena a row; and the whole process or device over the run."""
    arenas = view["arenas"]
    figure, axes = canvas(max(2.3, 0.95 + 0.36 * len(arenas)), 2, left=1.15)
    left, right = axes
    for row, arena in enumerate(arenas):
        bars = [(0.19, arena["most"], 0, "actual, most"), (-0.19, arena["planned"], 4, "planned")]
        for off, value, colour, label in ((o, v, series(c)[0], t) for o, v, c, t in bars if v is not None):
            left.barh(row + off, value / MIB, height=0.34, color=colour, linewidth=0, label=label if row == 0 else None)
    left.set_yticks(range(len(arenas)), [a["arena"] for a in arenas])
    left.invert_yaxis()
    left.grid(axis="y", visible=False)
    left.set_xlabel("MiB")
    left.set_title("Planned and actual")
    left.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncols=2, handlelength=1.2)
    for i, (arena, s) in enumerate(view["series"].items()):
        colour, dash = series(i)
        right.plot(s["x"], _floats(s["max"]) / MIB, color=colour, linestyle=dash, linewidth=1.3, label=arena)
    right.set_title("Actual over the run")
    right.set_ylabel("MiB")
    right.set_ylim(bottom=0)
    right.legend(loc="best", ncols=2)
    steps_axis(right)
    return figure


@_drawn
def memory_launches(view: View) -> Figure:
    """Live bytes of the activation arena while each launch runs."""
    figure, (axis,) = canvas(2.3)
    live, phases = np.array(view["live"], np.float64) / MIB, view["phase"]
    edges = np.arange(len(live) + 1) - 0.5
    for phase in dict.fromkeys(phases):
        own = np.where([p == phase for p in phases], live, 0.0)
        axis.stairs(own, edges, fill=True, color=OF_LAUNCH[phase], linewidth=0, label=phase)
    axis.set_ylabel("live MiB")
    axis.set_xlabel(f"launch of {view['plan']}")
    axis.legend(loc="best", ncols=3)
    axis.margins(x=0)
    return figure


@_drawn
def comparison(view: View) -> Figure:
    """A dot with its interval a row, or an arrow where it lies beyond the chart; the grey band is the difference that matters there."""
    known = [r for r in view["rows"] if r.get("estimate") is not None and r.get("low") is not None and r.get("high") is not None]
    rows = known[:30]
    figure, (axis,) = canvas(0.95 + 0.24 * max(1, len(rows)), left=3.1, right=1.0)
    tone = {"SLOWER": "#D55E00", "FASTER": "#009E73", "SAME": "#0072B2"}
    reach = min(max([3.0, *(1.15 * max(abs(r["low"]), abs(r["high"])) * 100 for r in rows)]), 30.0)
    for i, r in enumerate(rows):
        line, colour = (r["line"] or 0.0) * 100, tone.get(r["verdict"], "#9AA3A7")
        axis.barh(i, 2 * line, left=-line, height=0.8, color="#808080", alpha=0.16, linewidth=0)
        axis.plot([r["low"] * 100, r["high"] * 100], [i, i], color=colour, linewidth=2.0)
        at = r["estimate"] * 100  # beyond the chart: an arrow at its edge
        axis.plot(min(max(at, -reach), reach), i, ">" if at > reach else "<" if at < -reach else "o", color=colour, markersize=4.5,
                  clip_on=False, zorder=3)
        axis.annotate(r["verdict"], (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=colour, weight="bold",
                      annotation_clip=False)  # fmt: skip
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_xlim(-reach, reach)
    axis.set_yticks(range(len(rows)), [_label(r) for r in rows], fontsize=8.5)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"% slower than {view['a']} (dot: estimate, line: interval, band: difference that matters)"
                    + (f"; first {len(rows)} of {len(known)} rows" if len(known) > len(rows) else ""))
    return figure


def _label(row: View) -> str:
    text = str(row["name"])
    if row["kind"] == "op":
        words = text.split(" ")
        text = f"{words[0]} ({words[-1]}) {_short(text.rsplit(' ', 1)[0]) if '->' in text else ''}"
    return text if len(text) <= 46 else text[:45] + "…"

