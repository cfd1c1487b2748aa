"""No test leans on what the process that starts it had: signals, terminal, locale, umask, time zone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SENSITIVE = (
    "suites/unit/test_cuda_sanitize.py::test_who_ends_the_run_ends_all_of_it",
    "suites/unit/test_robust_process.py::test_ctrl_c_while_it_imports",
    "suites/unit/test_robust_config.py::test_errors_are_fit_for_a_terminal",
    "suites/unit/test_robust_files.py::test_prompts_of_any_bytes",
    "suites/unit/test_robust_files.py::test_a_read_only_run_folder",
    "suites/unit/test_config.py",
    "suites/unit/test_inherited.py::test_what_a_test_finds",
)
"""Tests that send signals, print, read file modes or names."""


def test_what_a_test_finds() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    mask = os.umask(0o022)
    assert mask == 0o022 and time.tzname[0] == "UTC" and os.environ["LC_ALL"] == "C.UTF-8"
    text = "import signal, os; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, os.umask(0))"
    output = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.split() == ["False", str(0o022)]


@pytest.mark.skipif(os.environ.get("ALPHA_INHERITED") == "1", reason="inside its own run")
def test_sensitive_tests_pass_under_hostile_inheritance() -> None:
    """Planted: without `pytest_configure` of suites/conftest.py the run below fails, as one from a script's background does."""

    def hostile() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.umask(0o077)

    env = {**os.environ, "ALPHA_INHERITED": "1", "LC_ALL": "C", "LANG": "C", "TZ": "Asia/Kathmandu", "COLUMNS": "20", "FORCE_COLOR": "1",
           "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SENSITIVE]
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=400, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          start_new_session=True, preexec_fn=hostile, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
