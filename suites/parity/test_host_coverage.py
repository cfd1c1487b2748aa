"""Branches of host components are counted across processes, and the count itself can fail. `alpha gate coverage --hosts` runs all cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alpha.errors import InputError
from alpha.gates import branches
from alpha.gates.contracts import coverage
from alpha.train.catalogue import catalogue

SOURCE = """
import os, threading

def never():
    return 1

def once(a, b):
    if a and b is None:
        return 1
    while a:
        a -= 1
    for _ in range(b or 0):
        pass
    assert b != 3, "never"
    try:
        return [x for x in range(4) if x != 1]
    except KeyError:
        return 2

def forked():
    pid = os.fork()
    if pid == 0:
        child(1)
        os._exit(0)
    os.waitpid(pid, 0)

def child(x):
    return 1 if x else 2

def thread():
    t = threading.Thread(target=child, args=(0,))
    t.start()
    t.join()

class Told:
    def stub(self): ...
    def doc(self):
        '''Says only that.'''
"""


def left(tmp_path: Path, calls: str) -> list[tuple[str, str, str]]:
    """(function, side, line) that some calls of SOURCE leave, run in another process."""
    file = tmp_path / "made.py"
    file.write_text(SOURCE)
    folder = tmp_path / "marks"
    folder.mkdir(exist_ok=True)
    branches.prepare(folder, [file])
    environment = {**os.environ, branches.WATCHED: str(folder), "PYTHONPATH": os.pathsep.join((str(folder), str(tmp_path)))}
    subprocess.run([sys.executable, "-c", f"import made\n{calls}"], env=environment, check=True)
    text = SOURCE.splitlines()
    return [(name, side, text[line - 1].strip()) for _, name, line, side in branches.read(folder, [file])]


def test_sides_are_told_by_what_was_asked(tmp_path: Path) -> None:
    found = left(tmp_path, "made.once(2, 5)\nmade.child(1)")
    assert ("never", "", "def never():") in found and ("thread", "", "def thread():") in found
    assert ("once", "None", "if a and b is None:") in found
    assert ("child", "false", "return 1 if x else 2") in found
    assert not any("assert" in line or "stub" in name or "doc" in name for name, _, line in found)
    assert [side for _, side, line in found if line.startswith("except")] in ([], ["true"])  # where the interpreter asks there at all
    if sys.version_info >= (3, 11):  # before, conditions of one line are told by the line alone
        assert ("once", "false", "if a and b is None:") in found and not any(line == "while a:" for _, _, line in found)


def test_forks_and_threads_count(tmp_path: Path) -> None:
    found = left(tmp_path, "made.forked()\nmade.thread()")
    assert not any(name in ("child", "thread") for name, _, _ in found)
    assert not any(name == "forked" and side == "true" for name, side, _ in found)


def test_a_killed_process_has_told(tmp_path: Path) -> None:
    found = left(tmp_path, "import os, signal\npid = os.fork()\nif not pid:\n    made.child(0)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
                           "os.waitpid(pid, 0)")
    assert ("child", "true", "return 1 if x else 2") in found and not any(side == "" and name == "child" for name, side, _ in found)


def test_a_side_that_no_case_takes_is_named() -> None:
    """Of the cases of two passes alone: what they do not reach is named with its line, what they do is not."""
    looked = [catalogue()[i] for i in ("schedule.pass", "select.pass")]
    found = coverage.problems(coverage.untaken(looked, coverage.files(("passes",))), whole=False)
    assert any("passes/recompute.py" in problem for problem in found)
    assert not any("passes/select.py" in problem or "passes/schedule.py" in problem for problem in found), found


def test_exemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = coverage.exemptions()
    assert known and all((coverage.ROOT.parent / file).is_file() for file, *_ in known)
    for file, _, _, line in known:
        assert line in [text.strip() for text in (coverage.ROOT.parent / file).read_text(encoding="utf-8").splitlines()]
    assert any("exempts what is taken" in problem for problem in coverage.problems([]))
    entry = {"file": "a", "function": "b", "side": "true", "line": "x", "why": " "}
    monkeypatch.setattr(coverage, "read_toml", lambda path: {"branch": [entry]})
    with pytest.raises(InputError, match="its line and a reason"):
        coverage.exemptions()
