"""Where baselines/tests.json says that the whole suite passed on this very tree, a tenth is drawn; everything runs in any other case."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import warm

from alpha.gates import whole_pass
from alpha.gates.whole_pass import NAME, Suite, WholePass
from alpha.registry.history import History

ROOT = Path(__file__).resolve().parents[2]
COUNT = 40
"""Tests of the made suite that depend on nothing but a file each."""

CONFTEST = """
from pathlib import Path
from alpha.gates import plugin, whole_pass
whole_pass.ROOT = Path(__file__).parents[1]
plugin.hopper = lambda: "no Hopper GPU"
plugin.Clock.PATH = whole_pass.ROOT / ".alpha" / "seconds.json"
"""

TESTS = f"""
from pathlib import Path
import pytest

OUTSIDE = Path(__file__).parents[2] / "outside"

@pytest.mark.parametrize("n", range({COUNT}))
def test_plain(n):
    assert not (OUTSIDE / str(n)).exists()

@pytest.mark.h100
def test_on_a_gpu():
    pass

def test_in_a_browser():
    if not (OUTSIDE / "browser").exists():
        pytest.skip("NOT RUN: no browser")

def test_that_writes():
    if (OUTSIDE / "write").exists():
        (Path(__file__).parent / "new").touch()
"""
TOTAL = COUNT + 3
ALWAYS = 2
"""The one marked h100, and the one that did not run in the whole pass."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of a handful of files, of this machine's class."""
    root = tmp_path / "tree"
    for name, text in {
        "suites/conftest.py": CONFTEST, "suites/test_made.py": TESTS, "source/a.py": "a = 1\n", "README.md": "A\n", ".ci/run": "#!\n",
        "baselines/evidence/REFERENCE": whole_pass.here()["machine"] + "\n", ".gitignore": (ROOT / ".gitignore").read_text(),
        "pyproject.toml": "[tool.pytest.ini_options]\n" + "\n".join(re.findall(r"^(?:testpaths|addopts|xfail_strict|markers) = .*",
                                                                              (ROOT / "pyproject.toml").read_text(), re.M)),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "outside").mkdir()
    return root


def session(tree: Path, *words: str, seed: int = 1, plugins: tuple[str, ...] = ("no:xdist",)) -> tuple[int, str]:
    """(exit code, output) of pytest in a made tree. It has no folder of our package's name: a worker would take that for the package."""
    named = [word for name in ("no:cacheprovider", "no:hypothesispytest", "no:anyio", "alpha.gates.plugin", *plugins)
             for word in ("-p", name)]
    workers = {name: None for name in os.environ if name.startswith("PYTEST_")}
    done = warm.run(["-m", "pytest", "-q", *named, "--evidence", "none", "--seed", str(seed), *words], cwd=tree, timeout=120,
                    environment={**workers, "PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout + done.stderr


def stamp(root: Path, **other: str) -> WholePass:
    """Write the file as a session of the made suite would, but for what is told."""
    bound = {"tree": whole_pass.digest(root), **whole_pass.here(), **other}
    done = WholePass(**bound, passed=COUNT + 1, not_run=ALWAYS, tests=TOTAL, seconds=1.0, workers=1,
                     not_run_tests=["suites/test_made.py::test_in_a_browser"])
    (root / NAME).write_text(done.text())
    return done


# -- the tree ------------------------------------------------------------------------------------------------------------------


def test_every_byte_name_and_executable_bit_is_in_the_digest(tree: Path) -> None:
    seen = [whole_pass.digest(tree)]

    def changes(act: Callable[[], object]) -> bool:
        act()
        seen.append(whole_pass.digest(tree))
        return seen[-1] not in seen[:-1]

    assert changes(lambda: (tree / "source" / "a.py").write_text("a = 2\n"))
    assert changes(lambda: (tree / ".ci" / "run").chmod(0o755))
    assert changes(lambda: (tree / "source" / "b.py").touch())
    assert changes(lambda: (tree / "source" / "b.py").rename(tree / "source" / "c.py"))
    assert changes(lambda: (tree / "conftest.py").touch()), "pytest reads it"
    assert changes(lambda: (tree / ".pytest.ini").touch()), "pytest reads it"
    assert changes(lambda: (tree / "docs").symlink_to("source"))
    assert changes(lambda: ((tree / "docs").unlink(), (tree / "docs").symlink_to("suites")))
    assert changes(lambda: (tree / "README.md").unlink())


def test_what_is_made_here_is_not_in_the_digest(tree: Path) -> None:
    """Caches, products and the file itself; nor the mode of others, the time, or empty folders."""
    before = whole_pass.digest(tree)
    for name in (NAME, "source/__pycache__/a.pyc", "source/x.pyc", "alpha.egg-info/PKG-INFO", ".alpha/x", ".venv/x", "runs/x", "build/x",
                 "kernels/x.cubin", "reports/mine/report.md", "reports/demo/report.html", "examples/a/evidence/x", ".git/HEAD", ".tool/x",
                 "baselines/evidence/.lock", "suites/.hypothesis/x"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    (tree / "kernels" / "empty").mkdir()
    (tree / "README.md").chmod(0o600)
    os.utime(tree / "README.md", (0, 0))
    assert whole_pass.digest(tree) == before
    for name in ("reports/demo/report.md", "examples/a/run.toml", "source/runs.py", "suites/texts/x"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
        assert whole_pass.digest(tree) != before, name
        (tree / name).unlink()


def test_git_agrees_and_is_not_needed(tree: Path, tmp_path: Path) -> None:
    for name in ("reports/mine/x", "reports/demo/x", "reports/demo/report.html", "a/b.cubin", "a/texts/x", "texts/x", "examples/a/report/x",
                 "examples/a/b/report/x", "source/build/x", "source/.lock", "source/lock"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    shutil.copytree(tree, tmp_path / "archive")
    git = ["git", "-C", str(tree)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    told = subprocess.run([*git, "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True).stdout
    assert list(whole_pass.files(tree)) == sorted(told.splitlines())
    assert whole_pass.digest(tree) == whole_pass.digest(tmp_path / "archive")


@pytest.mark.skipif(bool(History().why_not), reason="NOT_RUN: no git checkout")
def test_every_committed_file_is_in_the_tree() -> None:
    told = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    assert {name for name in told.split("\0") if name and (ROOT / name).exists()} - {NAME} <= set(whole_pass.files(ROOT))


# -- the draw ------------------------------------------------------------------------------------------------------------------


def test_a_tenth_by_seed_and_name_alone() -> None:
    tests = [f"suites/unit/test_x.py::test[{i}]" for i in range(4000)]
    made = WholePass(tree="", machine="", python="", numpy="", passed=1, not_run=0, tests=4000, seconds=0, workers=1)
    suite = Suite(made)
    left = suite.left_out(tests, [], 7)
    assert abs(len(left) - 4000 * 9 / 10) < 4 * (4000 * 9 / 100) ** 0.5
    assert Suite(made).left_out(tests[::-1], [], 7) == left and suite.left_out(tests, tests[:50], 7) == left - set(tests[:50])
    assert len(left - suite.left_out(tests, [], 8)) > 300
    assert Suite(replace(made, not_run_tests=tests[:50])).left_out(tests, [], 7) == left - set(tests[:50])
    assert not suite.left_out(tests[:-1], [], 7) and "3999 tests were found here, not the 4000" in suite.lines(3999, 0, 7)[0]


def test_a_session_on_this_very_tree_draws(tree: Path) -> None:
    """Whatever is wrong with a drawn test makes it red; what did not run in the whole pass runs."""
    stamp(tree)
    drawn = [n for n in range(COUNT) if whole_pass.is_drawn(f"suites/test_made.py::test_plain[{n}]", 1)]
    code, said = session(tree, "suites")
    count = len(drawn) + ALWAYS + whole_pass.is_drawn("suites/test_made.py::test_that_writes", 1)
    assert code == 0 and f"so {count} of {TOTAL} tests of no gate were drawn, seed 1;" in said, said
    assert f"passed on this very tree ({NAME}): {COUNT + 1} passed, {ALWAYS} NOT_RUN, on {whole_pass.here()['machine']}, Python" in said
    assert f"{count - ALWAYS} passed, {ALWAYS} skipped, {TOTAL - count} deselected" in said, said
    (tree.parent / "outside" / "browser").touch()
    (tree.parent / "outside" / str(drawn[0])).touch()
    code, said = session(tree)
    assert code == 1 and f"1 failed, {count - ALWAYS} passed, 1 skipped" in said and f"test_plain[{drawn[0]}]" in said, said


@pytest.mark.parametrize("words", [["suites", "--all"], ["suites", "-k", "plain or made"], ["suites", "-m", "not h100"],
                                   ["suites/test_made.py"], ["suites", "--deselect", "suites/x.py"]])
def test_a_command_that_chooses_gets_what_it_chose(tree: Path, words: list[str]) -> None:
    stamp(tree)
    code, said = session(tree, *words)
    assert code == 0 and re.search(rf"\b{COUNT + 1} passed", said) and "whole suite" not in said, said


def test_workers_draw_the_same(tree: Path) -> None:
    pytest.importorskip("xdist", reason="`make setup` installs it: it is in requirements.lock")
    (tree / "suites" / "test_more.py").write_text("def test_one():\n    pass\n")
    code, said = session(tree, "suites", "-n", "1", "--dist", "loadfile", "--stamp", plugins=())
    assert code == 0 and f"{NAME} says that this tree passed" in said, said
    found = whole_pass.read(tree)
    assert (found.passed, found.not_run, found.tests, found.workers) == (COUNT + 2, ALWAYS, TOTAL + 1, 1)
    assert found.not_run_tests == ["suites/test_made.py::test_in_a_browser"] and found.tree == whole_pass.digest(tree)
    known = tree / ".alpha" / "seconds.json"
    assert "suites/test_made.py" in json.loads(known.read_text())
    known.write_text('{"suites/test_made.py": 900.0}')
    one, (code, two) = session(tree, "suites")[1], session(tree, "suites", "-n", "2", "--dist", "loadfile", plugins=())
    lines = [[line for line in said.splitlines() if "tests of no gate were drawn" in line] for said in (one, two)]
    assert code == 0 and lines[0] == lines[1] != [], two
    assert json.loads(known.read_text())["suites/test_made.py"] == 900.0, "a part of a file says nothing of the time of the whole"


# -- what differs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "why"), [
    ({"tree": "0" * 64}, f"files differ from those of {NAME}"),
    ({"machine": "cpu_x"}, f"not the cpu_x of {NAME}"),
    ({"python": "3.1"}, f"not the 3.1 of {NAME}"),
    ({"numpy": "1.0.0"}, f"not the 1.0.0 of {NAME}"),
])  # fmt: skip
def test_each_difference_is_told(tree: Path, other: dict[str, str], why: str) -> None:
    done = stamp(tree)
    assert whole_pass.standing(tree) == (done, "")
    stamp(tree, **other)
    found, said = whole_pass.standing(tree)
    assert found is None and said.endswith(why) and ";" not in said and Suite(found, said).lines(3, 0, 1) == [
        f"all tests were asked for: {said}"]


def test_where_something_differs_everything_runs(tree: Path) -> None:
    code, said = session(tree, "suites")
    assert code == 0 and f"{COUNT + 1} passed, {ALWAYS} skipped" in said and f"all tests were asked for: there is no {NAME}" in said, said
    stamp(tree)
    (tree / "source" / "a.py").write_text("a = 2\n")
    code, said = session(tree, "suites")
    assert code == 0 and f"{COUNT + 1} passed, {ALWAYS} skipped" in said and "all tests were asked for: files differ" in said, said


DAMAGES: list[bytes | dict[str, object]] = [
    b"", b"{", b"[]", b"1", b"null", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000, b'{"tree": 1}', b"{" + b" " * (2 << 20) + b"}",
    *[{name: value} for name in ("passed", "not_run", "tests", "workers") for value in (-1, 1.0, True, "1", None, 10**40)],
    *[{"seconds": value} for value in (-1, "1", None, float("nan"), float("inf"), 10**400)],
    *[{name: value} for name in ("tree", "machine", "python", "numpy") for value in ("", "x\n", "\x1b[31m", 3, None, "3" * 5000)],
    {"not_run_tests": "abc"}, {"not_run_tests": [1]}, {"not_run_tests": None}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_file_is_told_and_draws_nothing(tree: Path, damage: bytes | dict[str, object]) -> None:
    made = json.loads(stamp(tree).text())
    (tree / NAME).write_bytes(damage if isinstance(damage, bytes) else json.dumps({**made, **damage}).encode())
    found, said = whole_pass.standing(tree)
    assert found is None and said.startswith(f"{NAME} cannot be read: ") and said.isprintable() and len(said) < 300, said


def test_what_is_no_file_or_no_tree_is_told(tree: Path) -> None:
    os.mkfifo(tree / NAME)
    assert whole_pass.standing(tree) == (None, f"{NAME} cannot be read: it is a FIFO, not a regular file")
    (tree / NAME).unlink()
    (tree / NAME).mkdir()
    assert whole_pass.standing(tree)[1].startswith(f"{NAME} cannot be read: it is a folder")
    (tree / NAME).rmdir()
    stamp(tree)
    os.mkfifo(tree / "source" / "pipe")
    assert "the tree cannot be read: " in whole_pass.standing(tree)[1]


# -- the stamp -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["-k", "plain"], ["suites", "-m", "not h100"], ["suites/test_made.py"], ["--collect-only"]])
def test_a_stamp_of_a_part_is_refused_before_anything_runs(tree: Path, words: list[str]) -> None:
    code, said = session(tree, "--stamp", *words)
    assert code == 4 and "--stamp needs the whole suite, and " in said and "passed" not in said and not (tree / NAME).exists(), said


def test_a_stamp_of_another_class_is_refused(tree: Path) -> None:
    (tree / "baselines" / "evidence" / "REFERENCE").write_text("cpu_x86_64-sse42_np1.0_x_t1\n")
    code, said = session(tree, "--stamp")
    assert code == 4 and "--stamp needs the reference class, cpu_x86_64-sse42_np1.0_x_t1; here is" in said, said
    assert not (tree / NAME).exists()


@pytest.mark.parametrize(("outside", "why"), [("3", "the session ended with 1"), ("write", "files changed while the tests ran")])
def test_a_stamp_needs_a_whole_pass_of_one_tree(tree: Path, outside: str, why: str) -> None:
    before = stamp(tree).text()
    (tree.parent / "outside" / outside).touch()
    code, said = session(tree, "suites", "--stamp")
    assert code == 1 and f"{NAME} was not written: {why}" in said and (tree / NAME).read_text() == before, said
    assert re.search(rf"\b{COUNT + (outside == 'write')} passed", said), "all of them run, whatever the file says"
