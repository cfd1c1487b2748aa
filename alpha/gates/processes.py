"""Processes that end with the one that started them. Floor 7.

A gate's process may hang in a planted deadlock, and what is left on a GPU falsifies whatever is measured there next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

_under_way: set[int] = set()


def finish(command: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """(exit code, what it printed and complained of) of a process in a session of its own. Code None: it was ended after `timeout` seconds,
    with all that it had started."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True, env=None if environment is None else dict(environment))
    _under_way.add(process.pid)
    try:
        words = process.communicate(timeout=timeout)[0]
        return process.returncode, words
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    finally:
        _under_way.discard(process.pid)


@contextmanager
def threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for processes. Where the block ends in an exception, also that of `termination_raises`, every process ends."""
    with ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for leader in list(_under_way):
                with suppress(ProcessLookupError):
                    os.killpg(leader, signal.SIGKILL)
            raise


@contextmanager
def termination_raises() -> Iterator[None]:
    """Within it SIGTERM ends this process as an exception does: what it has started is ended first."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
