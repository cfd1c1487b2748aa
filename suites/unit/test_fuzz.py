"""Readers of files on broken files, in a process of its own; `python suites/support/fuzz_files.py` does so a million times."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

SCRIPT = Path(__file__).parents[1] / "support" / "fuzz_files.py"


def test_no_broken_file_is_more_than_refused() -> None:
    done = warm.run([SCRIPT, "5000", "1"], timeout=900)
    assert done.returncode == 0 and ", 0 findings" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


FLAWS = {
    "another error": ("raise KeyError('x')", "KeyError"),
    "a warning": ("import warnings; warnings.warn('x', stacklevel=1)", "UserWarning"),
    "a crash": ("import os; os.abort()", "ended by SIGABRT"),
    "a hang": ("while True: pass", "ended by SIGPROF"),
    "memory": ("bytearray(fuzz_files.MEMORY + (1 << 20))", "MemoryError"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_of_a_reader_is_found(flaw: str, tmp_path: Path) -> None:
    """In a reader that is planted: 3 mutants, in a process of 2 and one of 1."""
    code, said = FLAWS[flaw]
    (tmp_path / "planted.py").write_text(f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPT.parent)!r})
import fuzz_files
fuzz_files.CPU_S, fuzz_files.CHUNK = 0.2, 2
def read():
    if (root / "x").read_bytes() != b"sound":
        {code}
def readers(of):
    global root
    root = of
    (root / "x").write_bytes(b"sound")
    return [fuzz_files.Reader("planted", root / "x", b"sound", read)]
fuzz_files.readers = readers
print(fuzz_files.fuzz(3, 1).wrong)
""")
    done = warm.run([tmp_path / "planted.py"], timeout=300)
    assert done.stdout.count(said) >= 2, done.stdout + done.stderr
