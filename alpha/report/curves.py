"""Curves of collectives among ranks: time of a call and bandwidth by size. Floor 8.

    alpha bench comm --json FILE.json && python -m alpha.report.curves FILE.json FILE.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from alpha.report.canvas import RC, alone, canvas, svg_of
from alpha.report.extra import matplotlib
from alpha.report.palette import series

Curve = Mapping[int, float]


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


def _lines(axis: Axes, curves: Mapping[str, Curve]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 2**20:g} MiB" if n >= 1 << 20 else f"{n / 2**10:g} KiB"))
    axis.xaxis.set_major_locator(FixedLocator([1 << k for k in range(10, 40, 5)]))
    axis.xaxis.set_minor_locator(NullLocator())
    for i, (name, points) in enumerate(curves.items()):
        colour, dash = series(i)
        axis.plot(list(points), list(points.values()), color=colour, linestyle=dash, linewidth=1.4, marker="o", markersize=3, label=name)
    axis.set_xlabel("operand")
    if curves:
        axis.legend()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["comm"]), encoding="utf-8")
