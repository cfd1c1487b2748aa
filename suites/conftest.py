"""All suites run under the gates' plugin: it finds the components, keeps evidence and counts what was executed."""

import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before the first import of NumPy, which makes the others: see one_thread

import warm
from threadpoolctl import threadpool_limits

from alpha.__main__ import YOUNG
from alpha.profile import served
from alpha.registry import digest_cache
from alpha.train import peak

pytest_plugins = ["alpha.gates.plugin"]

INHERITED = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_NUMERIC", "LC_TIME", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR",
             "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE")  # fmt: skip

KEPT = 1 << 25
"""Bytes: freed memory up to here is kept for the next array. glibc takes no larger threshold."""


def pytest_configure() -> None:
    """Whatever starts the suites, tests and the processes that they start find the same signals, umask, locale, width and time zone.
    Python looks for cycles as seldom as in a command."""
    gc.set_threshold(YOUNG)
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:  # nohup, or a script's background job
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    os.umask(0o022)
    for name in INHERITED:
        os.environ.pop(name, None)
    sys.dont_write_bytecode = False  # some hundred interpreters would compile every file anew
    os.environ["LC_ALL"], os.environ["TZ"], os.environ["TERM"] = "C.UTF-8", "UTC", "dumb"
    time.tzset()
    keep_memory()
    one_thread()
    warm.collect_seldom()


def keep_memory() -> None:
    """glibc gives the memory of a large array back when it is freed, and the next array pays for fresh pages. That takes a third of the
    time of oracles. Here and in processes that tests start it is kept. Another C library is left as it is."""
    thresholds = {"MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30), "MALLOC_MMAP_THRESHOLD_": (-3, KEPT)}  # numbers of <malloc.h>
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, (number, threshold) in thresholds.items():
        os.environ[name] = str(threshold)
        if mallopt is not None:
            mallopt(number, threshold)


def one_thread() -> None:
    """BLAS on one thread, here and in processes that tests start, as the gates have it (`pin_blas`). Products of tests are small, and a
    second thread of BLAS that waits for the next one spins: on two cores it takes the core of the other worker."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    threadpool_limits(1, "blas")


def pytest_collection_finish() -> None:
    """The tests that were found stay to the end; and what collecting them read of the sources is there for processes that tests start."""
    digest_cache.save_all()
    warm.collect_seldom()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Runs that tests train measure the machine's peak quickly, as those of warm interpreters do. A gate measures what a run does, so there
    it stays whole."""
    if item.get_closest_marker("gate") is not None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm.PEAK.items():
            patch.setattr(peak, name, value)
        return (yield)


@pytest.fixture
def warm_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made peers and ranks of benchmarks begin in warm interpreters: a test starts up to a dozen, and each says a few lines."""
    monkeypatch.setattr(served, "subprocess", types.SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE))


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


Settings = Mapping[str, object]
SMALL: Settings = {
    "run.name": "r", "model.family": "gpt", "model.layers": 1, "model.width": 16, "model.heads": 2, "data.tokenizer": "bytes",
    "data.validation": 0.3, "data.sequence": 16, "train.batch": 4, "optim.lr": 1e-2, "machine.threads": 1,
}  # fmt: skip
"""Keys of the smallest run that does all that runs do; a second on one core."""


@pytest.fixture(scope="session")
def small_run() -> Callable[..., Path]:
    """A function of a folder and settings (section.key -> value), which go before those of SMALL. It writes a run file, `file`, beside
    twelve files of text, and returns its path. Runs, cache and text lie in the folder."""

    def write(folder: Path, settings: Settings, *, file: str = "run.toml") -> Path:
        if not (folder / "text").exists():
            (folder / "text").mkdir()
            for i in range(12):
                (folder / "text" / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n\n" * 40)
        places = {"run.out": folder / "runs", "data.corpus": folder / "text", "data.cache": folder / "cache"}
        values = {**SMALL, **{key: place.as_posix() for key, place in places.items()}, **settings}
        sections: dict[str, list[str]] = {}
        for dotted, value in values.items():
            section, _, key = dotted.partition(".")
            sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
        path = folder / file
        path.write_text("\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n")
        return path

    return write
