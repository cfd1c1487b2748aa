"""The README's worked example, pasted: its files go into a copy of the package, and the gates and its planted fault are run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks() -> dict[str, str]:
    """Path -> text of every fenced block whose first line names a file."""
    found = {}
    for body in re.findall(r"```\w+\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        first = re.match(r"# (alpha/\S+)\n", body)
        if first:
            found[first.group(1)] = body
    return found


def test_the_example_is_gated(tmp_path: Path) -> None:
    files = blocks()
    assert len(files) == 3
    for part in ("alpha", "baselines", "kernels"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def alpha(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "alpha.cli", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}, check=False)
        assert done.returncode == 0, f"alpha {' '.join(words)}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    ran = alpha("gate", "run", "relu2.f32.cpu", "relu2_bwd.f32.cpu")
    for gate in ("parity", "gradient", "determinism", "faults", "perf"):
        assert gate in ran
    assert "FAIL" not in ran
    explained = alpha("gate", "explain", "relu2.f32.cpu")
    assert "usable" in explained
    caught = alpha("gate", "catches", "relu2")
    assert "1 of 1 planted faults caught, 1 of them run now" in caught
