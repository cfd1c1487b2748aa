"""What a report says, before it is HTML or Markdown: sections of paragraphs, tables and plots. Floor 7.

Both pages are written from the same Document, so they cannot differ in a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpha.profile.figures import shown
from alpha.report.extra import pandas as pd


@dataclass(frozen=True)
class Text:
    """A paragraph. `strong`: something that must not be overlooked."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; `numeric`: columns to align right, `wide`: columns of small running text.
    `data`: the same with full precision, for the CSV."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    data: pd.DataFrame
    caption: Sequence[str]
    marks: Sequence[str] = ()
    numeric: frozenset[int] = frozenset()
    wide: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plot:
    """An SVG drawing (text in it is text) and the numbers that it shows."""

    name: str
    title: str
    svg: str
    data: pd.DataFrame
    caption: Sequence[str]
    marks: Sequence[str] = ()


Block = Text | Table | Plot


@dataclass
class Section:
    """A heading with blocks; `level` 2 or 3."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    level: int = 2


@dataclass
class Document:
    """`marks`: names of runs that are UNGATED."""

    title: str
    intro: Sequence[str]
    sections: list[Section]
    marks: Sequence[str] = ()


def provenance_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each group of runs that share everything but their name."""
    groups: dict[tuple, list[str]] = {}
    for entry in entries:
        key = tuple((k, v) for k, v in entry.items() if k != "run")
        groups.setdefault(key, []).append(str(entry["run"]))
    return [_line(names, dict(key)) for key, names in groups.items()]


def _line(names: Sequence[str], e: Mapping[str, Any]) -> str:
    devices = e["devices"]
    count = "" if devices is None else f"{devices:g} device{'s' if devices != 1 else ''}"
    threads = "" if e["threads"] is None else f"{e['threads']:g} threads"
    peaks = [shown(e[k], u) for k, u in (("peak_flops", "FLOP/s"), ("peak_bandwidth", "bytes/s")) if e[k] is not None]
    parts = [f"run{'s' if len(names) > 1 else ''} {', '.join(names)} ({e['status']})", f"commit {e['commit']}",
             ", ".join(p for p in (str(e["hardware"]), count, threads) if p), str(e["backend"]),
             f"{e['flops_model']}: {e['convention']}", f"peak {' and '.join(peaks) if peaks else 'unknown'} ({e['peak_source']})"]
    return " · ".join(parts)
