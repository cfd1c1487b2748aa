"""A Document as one self-contained HTML page: no script, nothing fetched, light and dark. Floor 7."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escaped

from alpha.errors import visible
from alpha.report.document import Block, Document, Plot, Table, Text


def escape(text: str) -> str:
    """Text that a page shows as it is, whatever it holds."""
    return escaped(visible(text))


STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--ground:#ffffff;--panel:#f6f8fa;
--good:#1a7f37;--bad:#b35900;--warn:#fff1e5}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--ground:#0d1117;--panel:#151b23;
--good:#3fb950;--bad:#f0883e;--warn:#341a00}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.6rem;margin:.5rem 0 1rem;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.8rem 0 .4rem}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem;padding-top:.9rem;border-top:1px solid var(--line)}
nav{font-size:.9rem;display:flex;flex-wrap:wrap;gap:.2rem .9rem;color:var(--soft)} a{color:inherit}
p{margin:.5rem 0;max-width:60rem} p.strong{font-weight:600} .note{color:var(--soft)}
.banner{background:var(--warn);color:var(--bad);border:1px solid;border-radius:6px;padding:.5rem .8rem;font-weight:700}
.mark{color:var(--bad);font-weight:700}
figure{margin:1.1rem 0 1.6rem} figure>.title{font-weight:600;margin-bottom:.35rem}
svg{display:block;width:100%;height:auto;max-width:58rem;color:var(--ink)} svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{color:var(--soft);font-size:.78rem;overflow-wrap:anywhere;margin-top:.35rem} figcaption div{margin:.1rem 0}
.scroll{overflow-x:auto} table{border-collapse:collapse;font-size:.84rem;width:100%}
th,td{padding:.28rem .55rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{background:var(--panel);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.w{font-size:.74rem;color:var(--soft);min-width:12rem;overflow-wrap:anywhere}
td.v{font-weight:700;white-space:nowrap} .PASS,.SAME,.FASTER{color:var(--good)} .FAIL,.SLOWER,.STALE{color:var(--bad)}
@media print{nav{display:none} figure{break-inside:avoid}}
"""

GENERATOR = '<meta name="generator" content="alpha-report">'
"""By this a later report knows the page as one that it may replace."""

VERDICTS = ("PASS", "FAIL", "SAME", "SLOWER", "FASTER", "UNDECIDED", "STALE", "NOT_RUN", "AMBIGUOUS")


def render(document: Document) -> str:
    """The page."""
    body = [f"<h1>{_mark(document.marks)}{escape(document.title)}</h1>"]
    if document.marks:
        names = escape(", ".join(document.marks))
        body.append(f'<p class="banner">UNGATED: {names}. Development runs: no figure of them may be quoted.</p>')
    body += [f'<p class="note">{escape(note)}</p>' for note in document.intro]
    links = (f'<a href="#s{i}">{escape(s.title)}</a>' for i, s in enumerate(document.sections) if s.level == 2)
    body.append(f"<nav>{''.join(links)}</nav>")
    for i, section in enumerate(document.sections):
        body.append(f'<h{section.level} id="s{i}">{escape(section.title)}</h{section.level}>')
        body += [_block(block) for block in section.blocks]
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width,initial-scale=1">\n'
            f"{GENERATOR}\n<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n" + "\n".join(body)
            + "\n</main>\n</body>\n</html>\n")  # fmt: skip


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f'<p{" class=strong" if block.strong else ""}>{escape(block.text)}</p>'
    shown = _svg(block) if isinstance(block, Plot) else _table(block)
    caption = "".join(f"<div>{escape(line)}</div>" for line in block.caption)
    return (f'<figure id="{escape(block.name)}"><div class="title">{_mark(block.marks)}{escape(block.title)}</div>\n{shown}\n'
            f'<figcaption>{caption}<div><a href="csv/{escape(block.name)}.csv">CSV</a></div></figcaption></figure>')


def _svg(plot: Plot) -> str:
    return plot.svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)


def _table(table: Table) -> str:
    head = "".join(f"<th{_right(table, i)}>{escape(c)}</th>" for i, c in enumerate(table.columns))
    rows = "\n".join(f"<tr>{''.join(_cell(table, i, c) for i, c in enumerate(row))}</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _right(table: Table, column: int) -> str:
    return ' class="n"' if column in table.numeric else ""


def _cell(table: Table, column: int, text: str) -> str:
    if text in VERDICTS:
        return f'<td class="v {text}">{text}</td>'
    start, _, last = text.rpartition(" ")
    if last in ("PASS", "FAIL") and column in table.numeric:
        return f'<td class="n">{escape(start)} <span class="{last}">{last}</span></td>'
    if column in table.wide:
        return f'<td class="w">{escape(text)}</td>'
    return f"<td{_right(table, column)}>{escape(text)}</td>"


def _mark(marks: Sequence[str]) -> str:
    return f'<span class="mark">UNGATED ({escape(", ".join(marks))}):</span> ' if marks else ""
