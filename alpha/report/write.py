"""A Document onto the disk: report.html, report.md, plots/ and csv/. Floor 7.

All of it is written into a folder beside them first and moved when it is whole: a full disk leaves an earlier report as it was. Of what
lies there already, a report replaces its own files alone, and removes those that an earlier one's pages name.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from alpha.data.files import MAKING, disk_error, hold, sync_folder, write_atomic
from alpha.errors import BusyError, InputError
from alpha.files import read_regular
from alpha.report import html, markdown
from alpha.report.canvas import alone
from alpha.report.document import Document, Plot, Table, Text

HTML, MARKDOWN = "report.html", "report.md"
PART = f"{MAKING}report"

OURS = ("<title>Report on ", '<a href="csv/figures.csv">CSV</a>'), ("Report on ", "* · [CSV](csv/figures.csv)")
"""What stands in every HTML page of `alpha-report`, also of releases that did not mark theirs, and in every Markdown page."""

NAMED = re.compile(r'<a href="csv/([\w-]+)\.csv">CSV</a>|(?<!\\)\[CSV\]\(csv/([\w-]+)\.csv\)')
"""A link of a page to the numbers of a plot or table. Text of others never reads so: its signs are escaped."""


def write(document: Document, out: Path) -> Path:
    """Write everything under `out`, replacing what an earlier report left there; returns the HTML page. InputError if `out` is no folder or
    holds something else, BusyError if another report is being written there, MachineError if the disk refuses."""
    if out.exists() and not out.is_dir():
        raise InputError("the report goes into a folder", came=f"{out}, a file", expected="a folder", do="give another --out")
    try:
        made = not out.exists()
        if not made and any(p.name != PART for p in out.iterdir()) and not _of_a_report(out):
            raise InputError("the folder holds something that is no report", came=out, expected="a new folder, or one of an earlier report",
                             do="give another --out")
        try:
            (out / PART).mkdir(parents=True, exist_ok=True)
            _through(document, out / PART, out)
        finally:
            with suppress(OSError):
                if made:
                    out.rmdir()  # empty where nothing was written
    except OSError as error:
        raise disk_error(out, error) from error
    return out / HTML


def _through(document: Document, part: Path, out: Path) -> None:
    """Write into `part`, then move all of it to `out`; `part` is gone then."""
    handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        hold(handle)
    except BlockingIOError:
        os.close(handle)
        raise BusyError("another report is being written into this folder", came=out, expected="one at a time",
                        do="wait for it, or give another --out") from None
    try:
        for old in part.iterdir():  # of one that was killed
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        _fill(document, part)
        before = _named(out)
        for page in (HTML, MARKDOWN):  # the marked one first: wherever this ends, the folder is known as a report's
            os.replace(part / page, out / page)
        for folder, suffix in (("plots", "svg"), ("csv", "csv")):
            (out / folder).mkdir(exist_ok=True)
            files = {f.name for f in (part / folder).iterdir()}
            for file in files:
                os.replace(part / folder / file, out / folder / file)
            for file in {f"{name}.{suffix}" for name in before} - files:
                (out / folder / file).unlink(missing_ok=True)
        sync_folder(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(handle)


def _fill(document: Document, part: Path) -> None:
    """The whole report under `part`."""
    for folder in ("plots", "csv"):
        (part / folder).mkdir()
    for block in (b for s in document.sections for b in s.blocks if not isinstance(b, Text)):
        if isinstance(block, Plot):
            (part / "plots" / f"{block.name}.svg").write_text(alone(block.svg), encoding="utf-8")
        (part / "csv" / f"{block.name}.csv").write_text(_csv(block), encoding="utf-8")
    write_atomic(part / MARKDOWN, markdown.render(document).encode())
    write_atomic(part / HTML, html.render(document).encode())


def _text(page: Path) -> str:
    """A page that may be anybody's; empty where it cannot be read."""
    try:
        return read_regular(page).decode("utf-8", "replace")
    except OSError:
        return ""


def _of_a_report(folder: Path) -> bool:
    """Whether a report was written there, and its pages are still ours; its HTML page may have been left out, as version control does
    here."""
    if os.path.lexists(folder / HTML):
        text = _text(folder / HTML)
        return html.GENERATOR in text.partition("</head>")[0] or all(sign in text for sign in OURS[0])
    text = _text(folder / MARKDOWN)
    return OURS[1][0] in text.partition("\n")[0] and OURS[1][1] in text and (folder / "csv").is_dir()


def _named(folder: Path) -> set[str]:
    """Names of the plots and tables of the report that lies there."""
    found = (NAMED.finditer(_text(folder / page)) for page in (HTML, MARKDOWN))
    return {match[1] or match[2] for matches in found for match in matches}


def _csv(block: Plot | Table) -> str:
    """Provenance and mark as lines that begin with '#', then the numbers in full precision."""
    head = [f"# UNGATED: {', '.join(block.marks)}"] if block.marks else []
    head += [f"# {' '.join(line.split())}" for line in block.caption]
    return "\n".join([*head, block.data.to_csv(index=False, lineterminator="\n")])
