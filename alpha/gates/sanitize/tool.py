"""One process under NVIDIA's compute-sanitizer, and what the tool's report says. Floor 7; knows nothing of components.

The report is believed only where it is complete: one summary, and either nothing but it (clean) or errors with the places of their
kernels. Every other line that the tool prints leaves the outcome open. Formats: user guide of compute-sanitizer 2025.3, chapters
"Command Line Options", "Understanding Memcheck Errors", "Understanding Racecheck Analysis Reports".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alpha.gates.processes import finish

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
WORDS = 6
"""Lines of a report that are kept."""

_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (?P<errors>\d+) errors?|RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed"
                      r" \(\d+ errors?, \d+ warnings?\))")
_VERSION = re.compile(r"[Vv]ersion (\d{4}\.\d[\w.]*)")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    # an error that a call of the driver returns is the process's affair, not the tool's finding
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
    "initcheck": (),
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one process under one tool came to.

    reported  errors (racecheck: hazards) that the tool counted; None where it did not come to a count
    words     the first lines of the report between header and summary, without the tool's prefix
    calls     kernel calls that the process finished
    code      exit code; None where it was ended after its time
    """

    reported: int | None
    words: tuple[str, ...] = ()
    calls: int = 0
    code: int | None = 0

    def clean(self, calls: int) -> bool:
        """Whether all calls ran and the tool printed that it found nothing, and nothing else."""
        return self.reported == 0 and not self.words and self.code == 0 and self.calls == calls > 0

    def names(self, kernels: Sequence[str]) -> bool:
        """Whether the tool reported something and names one of these kernels as its place."""
        return bool(self.reported) and any(re.search(rf"\b{re.escape(k)}\b", w) for k in kernels for w in self.words)

    @property
    def open(self) -> str:
        """Why this settles nothing, for one that is not clean and reported nothing."""
        ended = "it did not end in time" if self.code is None else f"exit code {self.code}"
        first = f": {self.words[0]}" if self.words else ""
        return f"{'no summary' if self.reported is None else 'a summary of nothing'} after {self.calls} calls, {ended}{first}"


def find() -> Path | None:
    """The tool on PATH, beside CUDA_HOME, or where CUDA is installed; None when this machine has none."""
    folders = [Path(h) / "bin" for h in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if h]
    named = shutil.which("compute-sanitizer")
    found = [Path(named)] if named else [f / "compute-sanitizer" for f in folders if os.access(f / "compute-sanitizer", os.X_OK)]
    return found[0] if found else None


@cache
def version(tool: Path) -> str:
    """Such as 2025.3.0; '' where the tool does not start or does not say."""
    try:
        done = subprocess.run([str(tool), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    match = _VERSION.search(done.stdout)
    return match[1] if match and done.returncode == 0 else ""


def read(text: str) -> tuple[int | None, tuple[str, ...]]:
    """(count of the one summary, the lines before it that are no header) of a report; None where there is no summary or more than one."""
    lines = [line.lstrip("=").strip() for line in text.splitlines() if line.startswith("=====")]
    found = [m for line in lines if (m := _SUMMARY.fullmatch(line))]
    words = tuple(x for x in lines if x and x != "COMPUTE-SANITIZER" and not _SUMMARY.fullmatch(x))
    # what does not bear the tool's mark was not written by it, or is torn
    words += tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("====="))
    if len(found) != 1:
        return None, words
    return int(found[0]["errors"] or found[0]["hazards"] or 0), words


def run(tool: Path, check: str, command: Sequence[str], calls: Path, *, timeout: float,
        environment: Mapping[str, str] | None = None) -> Seen:
    """`command` under `check`, one of TOOLS. `calls`: the file in which the process keeps how many calls it has finished."""
    with tempfile.TemporaryDirectory(prefix="alpha-sanitize-") as folder:
        log = Path(folder) / "report"
        whole = [str(tool), "--tool", check, *_OPTIONS[check], "--target-processes", "application-only", "--check-exit-code", "no",
                 "--launch-timeout", "120", "--print-limit", "20", "--log-file", str(log), *command]
        code, complaint = finish(whole, timeout=timeout, environment=environment)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    reported, words = read(text)
    if not words and (reported is None or code):  # the tool has nothing to say of it; the process may have
        words = tuple(complaint.strip().splitlines()[-1:])
    counted = calls.read_text(encoding="utf-8") if calls.is_file() else ""
    return Seen(reported=reported, words=tuple(w[:200] for w in words[:WORDS]), calls=int(counted) if counted.isdigit() else 0, code=code)
