"""Axes and SVG text: everything that plots share. Floor 7.

Text and axes are drawn in `currentColor` and the ground is left open, so one drawing reads well on a light and on a dark page; letters stay
text in the reader's own font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from alpha.report.extra import matplotlib

INK = "#010203"
"""Stands for currentColor until the drawing is text."""
WIDTH = 9.0
"""Inches of every plot."""

RC = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK, "axes.edgecolor": INK,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.7, "xtick.major.width": 0.7, "ytick.major.width": 0.7, "axes.grid": False, "axes.axisbelow": True,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8.5,
    "legend.labelcolor": INK, "hatch.linewidth": 0.6, "hatch.color": "#ffffff", "path.simplify": True, "path.simplify_threshold": 0.3,
}  # fmt: skip

BOTTOM, TITLE = 0.5, 0.35
"""Inches below the axes, and above those with titles."""


def canvas(height: float, columns: int = 1, *, rows: int = 1, left: float = 0.85, right: float = 0.2, gap: float = 0.8,
           top: float = 0.12) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """A figure `height` inches high with `rows` x `columns` axes; `left`, `right` and `gap` in inches."""
    figure = Figure(figsize=(WIDTH, height))
    figure.patch.set_alpha(0.0)
    width = (WIDTH - left - right - gap * (columns - 1)) / columns
    tall = (height - top - BOTTOM - 0.55 * (rows - 1)) / rows
    top = max(top, TITLE if columns > 1 else 0.0)
    figure.subplots_adjust(left=left / WIDTH, right=1 - right / WIDTH, top=1 - top / height, bottom=BOTTOM / height,
                           wspace=gap / width, hspace=0.55 / tall)
    made = figure.subplots(rows, columns, squeeze=False)
    axes = [a for line in made for a in line]
    for a in axes:
        a.patch.set_alpha(0.0)
        a.grid(axis="y", color="#808080", alpha=0.22, linewidth=0.6)
    return figure, axes


def steps_axis(axis: Axes, label: str = "step") -> None:
    """The x axis counts steps."""
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def watermark(figure: Figure, marks: Sequence[str]) -> None:
    """UNGATED across the plot, with the names of the runs it is about."""
    if marks:
        figure.text(0.5, 0.5, "UNGATED", color="#D55E00", alpha=0.16, fontsize=54, ha="center", va="center", rotation=14, weight="bold",
                    zorder=0)
        figure.text(0.995, 0.012, f"UNGATED: {', '.join(marks)}"[:120], color="#D55E00", fontsize=8, ha="right", va="bottom", weight="bold")


_DIGITS = re.compile(r"(\.\d\d)\d+")


def svg_of(figure: Figure, name: str) -> str:
    """The drawing as an <svg> element, ids unique by `name`, the same bytes for the same drawing."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "system-ui, sans-serif", text)
    text = re.sub(r' d="[^"]*"', lambda m: _DIGITS.sub(r"\1", m[0]), text)
    text = text.replace(INK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r"\n\s*", "\n", text).strip()


def alone(svg: str) -> str:
    """The same as a file of its own: dark ink on light grounds and light ink on dark ones."""
    style = ("<style>:root{color:#24292f}@media (prefers-color-scheme:dark){:root{color:#d8dee4}}"
             "*{stroke-linejoin:round;stroke-linecap:butt}</style>")
    return svg.replace(">", f">{style}", 1) + "\n"
