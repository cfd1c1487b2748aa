"""What measures which sides of device code are taken: counts of a program that is known, of a small component, and of none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from device_coverage import HERE, ROOT, main, untaken

COMPONENT = "take_row.bf16.sm90"

MADE = """\
/*made/a.cu:3*/ int f(int x) {
/*made/a.cu:4*/   if (x > 2) return 1;
/*made/a.cu:5*/   for (int i = 0; i < x; ++i) x -= i;
/*made/a.cu:6*/   return x;
/*made/a.cu:7*/ }
int main(int n, char**) { if (n > 9) return 3; return f(n) > 99; }
"""


def ran(folder: Path, *arguments: str) -> Path:
    """A folder in which the program was compiled with counters, and called once with each number of arguments."""
    folder.mkdir()
    (folder / "made.cpp").write_text(MADE)
    subprocess.run(["g++", "--coverage", "-fno-exceptions", "-O0", "-w", "made.cpp", "-o", "made"], cwd=folder, check=True)
    subprocess.run([folder / "made", *arguments], cwd=folder, check=True)
    return folder


def test_sides_of_a_known_program(tmp_path: Path) -> None:
    """Lines without a place are not counted. A side is taken where any run took it."""
    few, many = ran(tmp_path / "few"), ran(tmp_path / "many", "a", "b", "c")
    left, sides = untaken([few])
    assert sides == 4 and [(file, line) for file, line, _, _ in left] == [("made/a.cu", 4)]
    left, sides = untaken([many])
    assert sides == 4 and [(file, line) for file, line, _, _ in left] == [("made/a.cu", 4), ("made/a.cu", 5), ("made/a.cu", 5)]
    assert untaken([few, many]) == ([], 4)


def test_sides_of_a_component(tmp_path: Path) -> None:
    """Its one index is a row, or is drawn from a few that are none: of its own file sides about ids that are no row are left, and they are
    lines of kernels/."""
    subprocess.run([sys.executable, HERE, "--call", COMPONENT, str(tmp_path)], check=True, capture_output=True)
    left, sides = untaken([tmp_path])
    own = {line for file, line, _, _ in left if file == "embedding/forward.cu"}
    text = (ROOT / "kernels" / "embedding" / "forward.cu").read_text(encoding="utf-8").splitlines()
    assert sides > 20 and own and all("good" in text[n - 1] or "vocabulary" in text[n - 1] for n in own), sorted(own)
    assert 0 < len(left) < sides / 2


def test_a_component_that_was_not_called_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"not called: none\.such"):
        main(["none.such"])
    assert "no such component" in capsys.readouterr().out
