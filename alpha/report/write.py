"""A Document onto the disk: report.html, report.md, plots/ and csv/. Floor 7."""

from __future__ import annotations

from pathlib import Path

from alpha.data.files import disk_error, write_atomic
from alpha.errors import InputError
from alpha.report import html, markdown
from alpha.report.canvas import alone
from alpha.report.document import Document, Plot, Table, Text

HTML, MARKDOWN = "report.html", "report.md"


def write(document: Document, out: Path) -> Path:
    """Write everything under `out`, replacing what an earlier report left there; returns the HTML page. InputError if `out` is no folder or
    holds something else, MachineError if the disk refuses."""
    if out.exists() and not out.is_dir():
        raise InputError("the report goes into a folder", came=f"{out}, a file", expected="a folder", do="give another --out")
    if out.is_dir() and any(out.iterdir()) and not _of_a_report(out):
        raise InputError("the folder holds something that is no report", came=out, expected="a new folder, or one of an earlier report",
                         do="give another --out")
    blocks = [b for s in document.sections for b in s.blocks if not isinstance(b, Text)]
    try:
        for folder, suffix in ((out / "plots", "svg"), (out / "csv", "csv")):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"*.{suffix}"):
                old.unlink()
        for block in blocks:
            if isinstance(block, Plot):
                (out / "plots" / f"{block.name}.svg").write_text(alone(block.svg), encoding="utf-8")
            (out / "csv" / f"{block.name}.csv").write_text(_csv(block), encoding="utf-8")
    except OSError as error:
        raise disk_error(out, error) from error
    write_atomic(out / MARKDOWN, markdown.render(document).encode())
    write_atomic(out / HTML, html.render(document).encode())
    return out / HTML


def _of_a_report(folder: Path) -> bool:
    """Whether a report was written there; its HTML page may have been left out, as version control does here."""
    return (folder / HTML).exists() or ((folder / MARKDOWN).exists() and (folder / "csv").is_dir())


def _csv(block: Plot | Table) -> str:
    """Provenance and mark as lines that begin with '#', then the numbers in full precision."""
    head = [f"# UNGATED: {', '.join(block.marks)}"] if block.marks else []
    head += [f"# {' '.join(line.split())}" for line in block.caption]
    return "\n".join([*head, block.data.to_csv(index=False, lineterminator="\n")])
