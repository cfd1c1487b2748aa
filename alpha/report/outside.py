"""The page of an outside component: verdict, what failed and where, speed beside ceiling and reference, every raw number. Floor 7."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from alpha.registry.record import Record, parse
from alpha.report.document import Document, Section, Table, Text
from alpha.report.extra import pandas as pd
from alpha.report.write import write


def write_page(name: str, about: Sequence[str], verdicts: Sequence[tuple[str, str, Sequence[str]]], records: Sequence[Record],
               out: Path) -> Path:
    """Write the page under `out`; returns the HTML file. `verdicts`: (gate, verdict, reasons); `about`: lines on what was gated."""
    sections = [Section("Verdict", [_table("gates", "Gates", ("gate", "verdict", "why"), [(g, v, "; ".join(w)) for g, v, w in verdicts],
                                           wide={2})])]
    failed = [Text(f"{gate}: {line}", strong=True) for gate, _, why in verdicts for line in why]
    if failed:
        sections.append(Section("What failed, and where", list(failed)))
    timed = [row for r in records if r.gate == "perf" for row in _speeds(r)]
    if timed:
        columns = ("call", "operands", "time", "ceiling", "share of the ceiling", "limit", "reference in NumPy")
        sections.append(Section("Speed", [_table("speed", "Beside ceiling and reference", columns, timed, numeric={2, 3, 4, 6})]))
    for record in records:
        rows = [(str(c["name"]), "; ".join(f"{k} {v}" for k, v in c.items() if k not in ("name", "note", "times_ns")),
                 str(c.get("note", ""))) for c in record.cases]
        sections.append(Section(f"Raw numbers: {record.gate}", [
            _table(f"raw-{record.gate}", f"{record.gate}, {len(rows)} cases", ("case", "numbers", "note"), rows, wide={1, 2},
                   caption=[f"nonce {record.nonce} on {record.machine}",
                            " ".join(f"{k} {v}" for k, v in sorted(record.environment.items()))])]))
    return write(Document(f"Gates of {name}", about, sections), out)


def _table(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: set[int] | None = None,
           wide: set[int] | None = None, caption: Sequence[str] = ()) -> Table:
    return Table(name, title, columns, rows, pd.DataFrame(rows, columns=list(columns)), caption, numeric=frozenset(numeric or ()),
                 wide=frozenset(wide or ()))


def _speeds(record: Record) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for case in record.cases:
        times, ceiling = case["times_ns"], case.get("ceiling_ns")
        reference = record.environment.get(f"{case['name']}.reference_ns")
        found.append((str(case["name"]), str(case.get("shape", "")), _us(min(times)) if times else "-", _us(ceiling),
                      f"{case['share']:.3f}", str(case.get("limit", "")), _us(float(reference)) if reference else "-"))
    return found


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:,.1f} us"


def main() -> None:
    """Write the page that standard input describes. A process of its own: what draws pages may not be in one that runs gates."""
    said = json.load(sys.stdin)
    write_page(said["name"], said["about"], said["verdicts"], [parse(line, "evidence") for line in said["records"]], Path(said["out"]))


if __name__ == "__main__":
    main()
