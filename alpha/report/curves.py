"""Curves of collectives among ranks: time of a call and bandwidth by size. Also of messages between two hosts. Floor 7.

    alpha bench comm --json FILE.json && python -m alpha.report.curves FILE.json FILE.svg
    alpha bench comm --hosts 2 --json FILE.json && python -m alpha.report.curves FILE.json FILE.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from alpha.report.canvas import RC, alone, canvas, svg_of
from alpha.report.extra import matplotlib
from alpha.report.palette import series

Curve = Mapping[int, float]
TARGET = 0.8
"""Of plain sockets' speed, that long messages are to reach."""


def draw(found: Mapping[str, Any]) -> str:
    """An SVG file of what the command wrote. On the left microseconds of a sum by algorithm, medians; on the right GB/s of an operand, of
    each op by the first of its algorithms at its fastest, beside one core's memcpy. What was not timed is left out."""
    sums, ops = dict[str, Curve](), dict[str, Curve]()
    for row in found["rows"]:
        op, _, algorithm = row["name"].partition(" ")
        if op == "all_reduce":
            sums[algorithm] = {int(n): 1e6 * t for n, t in row["seconds"].items()}
        ops.setdefault(op, {int(n): 1e-9 * int(n) / t for n, t in row["fastest"].items()})
    memcpy = 1e-9 * found["copied"] / found["memcpy"][1]
    with matplotlib.rc_context(RC):
        figure, (left, right) = canvas(3.6, 2)
        _lines(left, sums)
        _lines(right, ops)
        right.axhline(memcpy, color="#808080", linestyle="--", linewidth=1)
        right.annotate("memcpy of one core", (0, memcpy), xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=8)
        left.set_title(f"all_reduce of {found['ranks']} ranks, us a call (median)")
        right.set_title(f"every op of {found['ranks']} ranks, GB/s of the operand (fastest)")
        return alone(svg_of(figure, "comm"))


def draw_hosts(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG file of what the command wrote with `--hosts 2`. On the left microseconds of a call by way and streams, medians; on the right
    plain sockets' time over that of each other way, medians, and the target of long messages."""
    times, shares = dict[str, dict[int, float]](), dict[str, dict[int, float]]()
    for row in rows:
        for arm, seconds in row["median"].items():
            name, n = f"{arm}, {row['streams']} stream{'s' if row['streams'] > 1 else ''}", int(row["nbytes"])
            times.setdefault(name, {})[n] = 1e6 * seconds
            if arm != "sockets":
                shares.setdefault(name, {})[n] = row["median"]["sockets"] / seconds
    with matplotlib.rc_context(RC):
        figure, (left, right) = canvas(3.6, 2)
        _lines(left, times)
        _lines(right, shares)
        right.set_yscale("linear")
        right.set_ylim(bottom=0)
        right.axhline(TARGET, color="#808080", linestyle="--", linewidth=1)
        left.set_title("bytes there and 4 back, us (median)")
        right.set_title("plain sockets' time over ours (median)")
        return alone(svg_of(figure, "hosts"))


def _size(nbytes: float, _: object) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:g} KiB" if nbytes >= 1 << 10 else f"{nbytes:g} B"


def _lines(axis: Axes, curves: Mapping[str, Curve]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(_size))
    axis.xaxis.set_major_locator(FixedLocator([4, *(1 << k for k in range(10, 40, 5))]))
    axis.xaxis.set_minor_locator(NullLocator())
    for i, (name, points) in enumerate(curves.items()):
        colour, dash = series(i)
        axis.plot(list(points), list(points.values()), color=colour, linestyle=dash, linewidth=1.4, marker="o", markersize=3, label=name)
    axis.set_xlabel("operand")
    if curves:
        axis.legend()


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(draw_hosts(told["hosts"]) if "hosts" in told else draw(told["comm"]), encoding="utf-8")
