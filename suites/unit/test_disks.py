"""Disks that answer late, refuse, or are written by two at once: prepared data and runs on it come out the same, or say what is wrong."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from alpha import cli
from alpha.data import prepare, prepared, sources
from alpha.data.shards import TokenStream
from alpha.errors import AlphaError, BusyError, MachineError
from alpha.profile.store import read

LATE_S = 0.05


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disks") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} is a line, é\n" * (1 + i % 5)}) + "\n" for i in range(200)), encoding="utf-8")
    return path


def order(lines: Path) -> prepare.Order:
    return prepare.Order((str(lines),), tokenizer="bytes", validation=0.2, unit=3000)


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(lines: Path) -> prepared.Prepared:
    """What is prepared where nothing is wrong."""
    return prepare.prepare(order(lines), lines.parent / "whole")


class Late(io.RawIOBase):
    """A file whose reads come late and short, as over a network."""

    def __init__(self, path: Path | str) -> None:
        self._file = open(path, "rb", buffering=0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        time.sleep(0.001)
        data = self._file.read(min(len(buffer), 97))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def test_sources_that_come_late_and_in_parts(lines: Path, whole: prepared.Prepared, tmp_path: Path) -> None:
    with mock.patch.object(sources, "open_regular", lambda path: io.BufferedReader(Late(path), 300)):
        made = prepare.prepare(order(lines), tmp_path / "out")
    assert content(made.folder) == content(whole.folder)


REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)


@pytest.mark.parametrize("name", ["mkdir", "replace", "fsync"])
def test_a_disk_that_refuses_at_any_moment_is_named_and_the_command_goes_on(name: str, lines: Path, whole: prepared.Prepared,
                                                                          tmp_path: Path) -> None:
    """From the first call on, then from the third, and so on: full, over quota, forbidden, read-only, broken."""
    out, sound, tries = tmp_path / "out", getattr(os, name), 0
    for late in range(0, 1000, 2):
        calls, number = count(), REFUSALS[tries % len(REFUSALS)]

        def refuse(*args: Any, late: int = late, calls: Iterator[int] = calls, number: int = number) -> Any:
            if next(calls) >= late:
                raise OSError(number, os.strerror(number))
            return sound(*args)

        try:
            with mock.patch.object(os, name, refuse):
                prepare.prepare(order(lines), out)
            break
        except MachineError as error:
            tries += 1
            assert str(out) in str(error) and os.strerror(number) in str(error), error
            assert ("the disk is full" in str(error)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert tries > 1 and content(out) == content(whole.folder)


def test_a_second_writer_is_refused_while_the_first_goes_on(lines: Path, whole: prepared.Prepared, tmp_path: Path) -> None:
    refused = []

    def told(done: int, total: int) -> None:
        with pytest.raises(BusyError, match="another process prepares"):
            prepare.prepare(order(lines), tmp_path / "out")
        refused.append(done)

    made = prepare.prepare(order(lines), tmp_path / "out", told=told)
    assert len(refused) > 3 and content(made.folder) == content(whole.folder)


def losses(run: Path) -> list[tuple[int, float]]:
    return sorted(read(run / "metrics.sqlite", "step_metrics", "step, loss"))


def test_a_slow_disk_delays_a_run_which_says_so(small_run: Callable[..., Path], whole: prepared.Prepared, tmp_path: Path) -> None:
    """The same losses, and the waits of the steps hold what the disk took."""
    settings = {"data.corpus": whole.folder.as_posix(), "train.steps": 4, "train.profile": 0, "data.baseline": False,
                "train.final_windows": 1, "data.prefetch": 1}
    file = small_run(tmp_path, settings)
    assert cli.main(["lab", str(file)]) == 0
    sound = TokenStream.windows

    def late(self: TokenStream, *args: Any) -> Any:
        time.sleep(LATE_S)
        return sound(self, *args)

    with mock.patch.object(TokenStream, "windows", late):
        assert cli.main(["lab", str(file), "--set", "run.name=slow"]) == 0
    fast, slow = tmp_path / "runs" / "r", tmp_path / "runs" / "slow"
    assert losses(slow) == losses(fast) and len(losses(fast)) == 4
    waits = sorted(read(slow / "metrics.sqlite", "data_waits", "step, ready, batches, wait_ns, made_ns"))
    assert len(waits) == 4 and all(made >= 1e9 * LATE_S for *_, made in waits), waits
    _, ready, batches, wait, _ = waits[0]  # nothing can be there when the first is asked for
    assert ready < batches and wait >= 1e9 * LATE_S


def test_a_source_that_cannot_be_read_to_its_end(lines: Path, tmp_path: Path) -> None:
    """An error of the medium in the middle of a file is told with its name."""

    class Broken(Late):
        def readinto(self, buffer: Any) -> int:
            if self._file.tell() > 2000:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(buffer)

    with mock.patch.object(sources, "open_regular", lambda path: io.BufferedReader(Broken(path), 300)), \
         pytest.raises(AlphaError, match="Input/output error") as caught:
        prepare.prepare(order(lines), tmp_path / "out")
    assert str(lines) in str(caught.value) and not isinstance(caught.value, MachineError)


CUT = """
import os, sys
from alpha import cli
from alpha.data.sampler import PermutedSampler
batch = PermutedSampler.batch
def cutting(self, step, *args, **kwargs):
    if step == 3:
        for shard in self.stream.shards:
            os.truncate(shard.path, shard.path.stat().st_size // 2)
            shard.forget()
    return batch(self, step, *args, **kwargs)
PermutedSampler.batch = cutting
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_shard_that_is_cut_under_a_run_is_named(lines: Path, tmp_path: Path) -> None:
    """In mapped memory the run would end by SIGBUS, without a word."""
    made = prepare.prepare(order(lines), tmp_path / "data")
    run = tmp_path / "run.toml"
    run.write_text(f'[run]\nname = "cut"\n[model]\nfamily = "gpt"\nlayers = 1\nwidth = 16\nheads = 2\n[data]\ncorpus = "{made.folder}"\n'
                   f'sequence = 16\nprefetch = 2\n[train]\nsteps = 9\nbatch = 64\n[optim]\nlr = 1e-3\n')  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", CUT, "lab", str(run)], cwd=tmp_path, text=True, timeout=120,
                           capture_output=True, check=False)  # fmt: skip
    assert ended.returncode == 2, (ended.returncode, ended.stderr[-2000:])
    assert "it was cut while it was open" in ended.stderr and ".tokens: " in ended.stderr and "do:" in ended.stderr
