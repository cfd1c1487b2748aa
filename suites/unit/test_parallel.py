"""Several workers are one session: one seed, one count of what ran, tests that run alone, and the closing lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alpha.gates import plugin
from alpha.gates.plugin import Clock, Tally
from alpha.registry.history import History

ROOT = Path(__file__).parents[2]

CONFTEST = """
from pathlib import Path
from alpha.gates import plugin
pytest_plugins = ["alpha.gates.plugin"]
plugin.hopper = lambda: "none"
plugin.Clock.PATH = Path(__file__).parent / ".alpha" / "seconds.json"
"""

NAPS = """
import json, os, time
from pathlib import Path
import pytest

def nap(name, seed):
    began = time.monotonic()
    time.sleep(0.6 if name.endswith("alone") else 0.4)
    told = {"began": began, "ended": time.monotonic(), "seed": seed, "worker": os.environ["PYTEST_XDIST_WORKER"]}
    (Path(__file__).parent / f"{name}.json").write_text(json.dumps(told))
"""

TESTS = """
from naps import nap, pytest

@pytest.mark.parametrize("i", range(6))
def test_beside_others(i, seed):
    nap(f"{__name__}-{i}", seed)

@pytest.mark.alone
def test_alone(seed):
    nap(f"{__name__}-alone", seed)

@pytest.mark.h100
def test_on_a_gpu(monkeypatch):
    raise AssertionError
"""


def test_workers_share_a_seed_and_a_count_and_wait_for_what_runs_alone(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="`make setup` installs it: it is in requirements.lock")
    (tmp_path / "naps.py").write_text(NAPS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert len(told) == 14 and len({t["seed"] for t in told.values()}) == 1 and len({t["worker"] for t in told.values()}) == 2

    def beside(name: str) -> list[str]:
        a = told[name]
        return [n for n, b in told.items() if n != name and a["began"] < b["ended"] and b["began"] < a["ended"]]

    assert any(beside(n) for n in told if not n.endswith("alone")), "nothing ran beside anything: this shows nothing"
    assert [beside(f"test_{name}-alone") for name in ("one", "two")] == [[], []]
    assert "h100: 0 executed of 2 selected" in done.stdout and "NOT_RUN: 2 tests: none" in done.stdout
    assert f"seed of what is drawn at random: {told['test_one-0']['seed']}" in done.stdout
    assert "in 16 tests; the slowest 10:" in done.stdout and "test_one.py::test_alone" in done.stdout


class Item:
    """Of a collected test what its place in the order follows from."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self._markers = nodeid, markers

    def get_closest_marker(self, name: str) -> object:
        return name if name in self._markers else None


def test_long_files_come_first_and_those_alone_last() -> None:
    """Files that were never timed come before all that were."""
    items = [Item("short.py::a"), Item("timed.py::a", "alone"), Item("long.py::a"), Item("mixed.py::a", "alone"), Item("mixed.py::b"),
             Item("new.py::a"), Item("short.py::b")]
    config = SimpleNamespace(workerinput={"alpha_seconds": {"short.py": 1.0, "long.py": 3.0, "timed.py": 9.0, "mixed.py": 2.0}})
    plugin.put_in_order(config, items)  # type: ignore[arg-type]
    assert [i.nodeid for i in items] == ["new.py::a", "long.py::a", "mixed.py::a", "mixed.py::b", "short.py::a", "short.py::b",
                                         "timed.py::a"]


def test_a_commit_has_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its files: another message or date changes nothing. Without history it is random."""
    monkeypatch.setattr(plugin, "History", lambda: History(tmp_path))
    assert len({plugin.seed_of_files() for _ in range(4)}) > 1

    def committed(text: str, message: str) -> int:
        (tmp_path / "file").write_text(text)
        for words in (["add", "file"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--allow-empty", "-m", message]):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        return plugin.seed_of_files()

    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    first = committed("a", "one")
    assert committed("a", "two") == first == plugin.seed_of_files() < 2**32
    assert committed("b", "three") != first


def test_what_workers_tell_is_added() -> None:
    one = Tally(declared={"parity": 3}, executed={"parity": 1}, selected={"a", "b"}, ran={"a"})
    two = Tally(declared={"parity": 3}, executed={"parity": 2, "perf": 1}, selected={"a", "b"}, ran={"b"}, drawn=True)
    whole = Tally()
    for told in (one, two):
        whole.add(json.loads(json.dumps(told.plain())))
    assert whole == Tally(declared={"parity": 3}, executed={"parity": 3, "perf": 1}, selected={"a", "b"}, ran={"a", "b"}, drawn=True)


def test_seconds_are_kept_by_file_for_the_next_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "PATH", tmp_path / "seconds.json")
    clock = Clock()
    assert clock.before() == {}
    clock.seconds = {"a.py::x": 1.0, "a.py::y[1]": 2.0, "b.py::z": 0.5}
    clock.keep()
    Clock.PATH.write_text(Clock.PATH.read_text().replace("0.5", "0.25"))
    clock.seconds = {"a.py::x": 4.0}
    clock.keep()
    assert clock.before() == {"a.py": 4.0, "b.py": 0.25}
    Clock.PATH.write_text("[")
    assert clock.before() == {}
    assert clock.lines() == ["4 s in 1 tests; the slowest 1:", "    4.0 s  a.py::x"]
