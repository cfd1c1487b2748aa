"""Cores are counted in one place: those that the process may use."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from alpha.cores import cores

ROOT = Path(__file__).parents[2] / "alpha"
WHICH = {"gates/contracts/ranks/perf.py", "bench/hosts.py"}
"""Modules that ask which cores these are, and bind processes to them."""

OF_THE_MACHINE = {"registry/machine.py", "cuda_runtime/compile.py", "gates/device_code/build.py"}
"""Modules that ask for the machine's own: its description, and compilers for GPUs."""


def test_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7} if pid == 0 else set())
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def test_no_other_module_counts_them() -> None:
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py") if "contracts/train" not in str(path)}
    assert {name for name, text in found.items() if re.search(r"sched_getaffinity\(", text)} == {"cores.py"} | WHICH
    assert {name for name, text in found.items() if "os.cpu_count(" in text} == {"cores.py"} | OF_THE_MACHINE
