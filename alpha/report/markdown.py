"""A Document as Markdown. Floor 7."""

from __future__ import annotations

import re
from collections.abc import Sequence

from alpha.errors import visible
from alpha.report.document import Block, Document, Plot, Table, Text


def render(document: Document) -> str:
    """The page; plots are the files plots/NAME.svg beside it, numbers the files csv/NAME.csv."""
    out = [f"# {_mark(document.marks)}{_plain(document.title)}", ""]
    out += [line for note in document.intro for line in (f"> {_plain(note)}", "")]
    for section in document.sections:
        out += [f"{'#' * section.level} {_plain(section.title)}", ""]
        for block in section.blocks:
            out += [*_block(block), ""]
    return "\n".join(out).rstrip() + "\n"


def _block(block: Block) -> list[str]:
    if isinstance(block, Text):
        return [f"**{_plain(block.text)}**" if block.strong else _paragraph(block.text)]
    title = f"{_mark(block.marks)}{_plain(block.title)}"
    if isinstance(block, Plot):
        return [f"![{title}](plots/{block.name}.svg)", "", f"*{title}* · [CSV](csv/{block.name}.csv)", "", *_caption(block.caption)]
    return [f"*{title}* · [CSV](csv/{block.name}.csv)", "", *_table(block), "", *_caption(block.caption)]


def _table(table: Table) -> list[str]:
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
    return [_row(table.columns), f"| {' | '.join(rule)} |", *(_row(r) for r in table.rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(c) for c in cells)} |"


def _caption(lines: Sequence[str]) -> list[str]:
    return [f"<sub>{_plain(line)}</sub>" + ("  " if i + 1 < len(lines) else "") for i, line in enumerate(lines)]


def _mark(marks: Sequence[str]) -> str:
    return f"UNGATED ({', '.join(map(_plain, marks))}): " if marks else ""


def _paragraph(text: str) -> str:
    """The same at the beginning of a line, where more signs have a meaning."""
    return re.sub(r"^(\d+)([.)])|^([#+=>-])", lambda m: f"{m[1]}\\{m[2]}" if m[1] else f"\\{m[3]}", _plain(text))


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    for sign in ("\\", "|", "*", "_", "<", "`", "[", "~", "&"):
        text = text.replace(sign, f"\\{sign}")
    return visible(" ".join(text.split()))
