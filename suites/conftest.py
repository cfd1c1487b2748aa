"""All suites run under the gates' plugin: it finds the components, keeps evidence and counts what was executed."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alpha.train import peak

pytest_plugins = ["alpha.gates.plugin"]

INHERITED = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_NUMERIC", "LC_TIME", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR",
             "PYTHONIOENCODING", "PYTHONUTF8")  # fmt: skip


def pytest_configure() -> None:
    """Whatever starts the suites, tests and the processes that they start find the same signals, umask, locale, width and time zone."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:  # nohup, or a script's background job
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    os.umask(0o022)
    for name in INHERITED:
        os.environ.pop(name, None)
    os.environ["LC_ALL"], os.environ["TZ"], os.environ["TERM"] = "C.UTF-8", "UTC", "dumb"
    time.tzset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Runs that tests train measure the machine's peak with few and small products and copies: it takes three quarters of a tiny run.
    A gate measures what a run does, so there it stays whole."""
    if item.get_closest_marker("gate") is not None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "REPEATS", 5)
        patch.setattr(peak, "COPIES", 1)
        patch.setattr(peak, "COPY_BYTES", 1 << 20)
        return (yield)


@pytest.fixture(scope="session")
def small_corpus() -> Callable[[Path], None]:
    """A function that fills a new folder with twelve files of 480 words each, the same every time."""

    def write(folder: Path) -> None:
        folder.mkdir()
        words = "def return self value None import for in if else while class".split()
        rng = random.Random(1)
        for i in range(12):
            (folder / f"{i}.txt").write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(60)))

    return write
