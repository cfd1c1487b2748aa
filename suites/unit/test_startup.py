"""What the time to the first step went to: phases without gaps, from the process's beginning, and a delay stands where it was."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alpha import cli
from alpha.profile.store import read
from alpha.train import session
from alpha.train.startup import Startup

LATE_S = 0.4


def test_phases_are_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((10, 12, 15, 21, 25, 40))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(now) * 10**9)
    monkeypatch.setattr(Startup, "counted", True)
    found = Startup()
    for name in ("text", "Program", "text"):
        found.phase(name)
    assert found.seconds() == {"command": 2.0, "text": 3.0 + 4.0, "Program": 6.0}, "the last phase goes on"
    found.end()
    assert found.text() == "30.0 s from the command: command 2.0, text 22.0, Program 6.0"


def test_the_first_one_of_a_process_counts_from_its_beginning() -> None:
    code = ("import time; time.sleep(0.4); from alpha.train.startup import Startup; first = Startup(); second = Startup();"
            "print(first.seconds()['command'], second.seconds()['command'])")
    began = time.monotonic()
    first, second = map(float, subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert LATE_S - 0.02 <= first <= time.monotonic() - began + 0.02
    assert second < 0.02


def test_a_delay_stands_in_its_phase(tmp_path: Path, small_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    sound = session.open_executor

    def late(*given: object) -> object:
        time.sleep(LATE_S)
        return sound(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "open_executor", late)
    assert cli.main(["lab", str(small_run(tmp_path, {"train.steps": 2}))]) == 0
    said = dict(read(tmp_path / "runs" / "r" / "metrics.sqlite", "run_metadata"))["startup"]
    assert f"start     {said}" in capsys.readouterr().out
    total, *each = map(float, re.findall(r"\d+\.\d", said))
    assert abs(total - sum(each)) <= 0.05 * (len(each) + 1), "each is rounded to a tenth"
    within = dict(zip(re.findall(r"(?:: |, )([a-zA-Z' ]+) \d", said), each))
    assert within["kernels and memory"] >= LATE_S - 0.05


def test_a_session_of_many_ranks_begins_at_the_moment_that_their_clocks_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each rank's own clock: what it is when the session's row is written says nothing of the others'."""
    monkeypatch.setattr(session, "align", lambda group: SimpleNamespace(moment=11, unix=22, text=lambda: "one clock"))
    begun: list[tuple[int, ...]] = []
    metrics: Any = SimpleNamespace(next_session=lambda: 3, begin=lambda *words: begun.append(words),
                                   renumber=lambda n: begun.append((n,)))
    ranks: Any = SimpleNamespace(first=False, hear=lambda text: "5")
    world: Any = SimpleNamespace(group=lambda name: None)
    assert session._begun(metrics, 7, ranks, world, 2) == "one clock"
    assert begun == [(7, 2, 11, 22), (5,)]
