"""Runs that are killed, resumed, disturbed: a resumed run ends in the same bits, one process holds a run, a bad step changes nothing."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import warm

from alpha import config
from alpha.backends.cpu.executor import CpuExecutor
from alpha.checkpoint import folders
from alpha.config import Config
from alpha.errors import BusyError, CorruptError, InputError, MachineError, NonFiniteError
from alpha.graph.plan import Program
from alpha.profile.store import Store, read
from alpha.train import assemble, rundir
from alpha.train.assemble import Dataset
from alpha.train.catalogue import catalogue
from alpha.train.loop import Loop, Watch

RUN = """
[run]
name = "t"
out = "{out}/runs"
[model]
family = "{family}"
layers = 2
width = 16
heads = 2
[data]
corpus = "{out}/text"
tokenizer = "bytes"
validation = 0.3
sequence = 16
cache = "{out}/cache"
[train]
steps = {steps}
batch = 8
shards = 2
micro_batch = 2
eval_every = 4
eval_windows = 8
final_windows = 8
checkpoint_every = 3
[optim]
lr = 1e-2
warmup = 2
[machine]
threads = 2
"""


def run_file(root: Path, family: str = "gpt", steps: int = 12) -> str:
    return RUN.format(out=root.as_posix(), family=family, steps=steps)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    """A folder with a small corpus."""
    path = tmp_path_factory.mktemp("resume")
    small_corpus(path / "text")
    return path


@cache
def program_of(text: str, vocab: int) -> Program:
    cfg = config.parse(text)
    return assemble.program_for(cfg, vocab, catalogue(), assemble.threads_for(cfg))


class Session:
    """One process's hold on a run, without the command line."""

    def __init__(self, cfg: Config, data: Dataset, path: Path | None = None) -> None:
        self.program = program_of(cfg.resolved(), data.tokenizer.vocab_size)
        self.executor = CpuExecutor(self.program, catalogue())
        self.held = rundir.create(cfg, data.tokenizer) if path is None else rundir.RunDir(path)
        self.metrics = Store(self.held.metrics)
        sampler = assemble.sampler_for(cfg, data)
        self.loop = Loop(cfg, self.executor, sampler, data.validation, data.tokenizer, self.held.checkpoints, self.metrics)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.metrics.close()
        self.held.close()
        self.executor.close()

    def bits(self) -> dict[str, bytes]:
        return {kind: flat.tobytes() for kind, (_, flat) in self.loop.states().items()}


@pytest.fixture(scope="module")
def made(root: Path) -> Iterator[tuple[Config, Dataset, dict[str, bytes], Path]]:
    """(config, data, bits after an uninterrupted run, its folder)."""
    cfg = config.parse(run_file(root))
    data = assemble.open_data(cfg)
    with Session(cfg, data) as s:
        s.loop.start()
        assert s.loop.run()
        yield cfg, data, s.bits(), s.held.path


def test_resumed_from_every_step_ends_in_the_same_bits(made: tuple[Config, Dataset, dict[str, bytes], Path]) -> None:
    cfg, data, expected, reference = made
    for stop in (1, 3, 5, 11):
        with Session(cfg, data) as s:
            s.loop.start()
            assert not s.loop.run(Watch(stop=lambda s=s, stop=stop: s.loop.step == stop))  # type: ignore[misc]
            path = s.held.path
        with Session(cfg, data, path) as s:
            s.loop.resume()
            assert s.loop.step == stop
            assert s.loop.run()
            assert s.bits() == expected, f"stopped after step {stop}"
        rows, theirs = (read(p / "metrics.sqlite", "step_metrics", "step, loss, norm, lr, coefficient") for p in (path, reference))
        assert rows == theirs and len(rows) == cfg.train.steps


def test_resumed_with_other_threads_ends_in_the_same_bits(made: tuple[Config, Dataset, dict[str, bytes], Path]) -> None:
    _, data, expected, reference = made
    cfg = config.load(reference / "config.toml", ["machine.threads=1"])
    with Session(cfg, data) as s:
        s.loop.start()
        assert s.loop.run()
        assert s.bits() == expected


def test_metrics_hold_what_the_checkpoints_say(made: tuple[Config, Dataset, dict[str, bytes], Path]) -> None:
    cfg, _, _, path = made
    rows = read(path / "metrics.sqlite", "step_metrics", "step, loss, tokens, finite, seconds")
    assert [r[0] for r in rows] == list(range(12)) and all(r[2] == 128 and r[3] == 1 and r[4] > 0 for r in rows)
    assert rows[-1][1] < rows[0][1]
    assert [r[0] for r in read(path / "metrics.sqlite", "evaluations")] == [4, 8]
    assert folders.steps(path / "checkpoints")[-1] == 12 and len(folders.steps(path / "checkpoints")) == cfg.train.keep


def test_kill_9_at_any_moment(root: Path, made: tuple[Config, Dataset, dict[str, bytes], Path], tmp_path: Path) -> None:
    """A real process, killed again and again at random moments, resumed each time: the same bits as without."""
    cfg, data, expected, _ = made
    (tmp_path / "run.toml").write_text(run_file(root).replace(f"{root.as_posix()}/runs", f"{tmp_path.as_posix()}/runs"))
    code = (
        "import sys, time; from alpha import cli; from alpha.train import loop; real = loop.Loop.advance\n"
        "def slow(self, **more):\n    time.sleep(0.03); return real(self, **more)\n"
        "loop.Loop.advance = slow; sys.exit(cli.main(sys.argv[1:]))"
    )
    rng, kills, folder = random.Random(os.getpid()), 0, tmp_path / "runs" / "t"
    for _ in range(30):
        more = ["--resume"] if (folder / "config.toml").exists() else []
        process = warm.start(["-c", code, "lab", tmp_path / "run.toml", *more], stderr=subprocess.PIPE)
        try:
            if kills < 3:
                before = _progress(folder)
                deadline = time.monotonic() + 60
                while process.poll() is None and _progress(folder) == before and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0.0, 0.12))
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
            assert process.stderr is not None
            errors = process.stderr.read()
            process.wait(timeout=120)
        finally:
            process.kill()
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        if process.returncode == 0 and folders.steps(folder / "checkpoints")[-1] == 12:
            break
    assert kills >= 1, "the process was never caught alive"
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["t"]
    with Session(cfg, data, folder) as s:
        s.loop.resume()
        assert s.loop.step == 12 and s.bits() == expected
    assert len(read(folder / "metrics.sqlite", "step_metrics")) == 12


def _progress(folder: Path) -> int:
    try:
        return int(read(folder / "metrics.sqlite", "step_metrics", "count(*)")[0][0])
    except (InputError, sqlite3.Error):
        return 0


def test_two_runs_in_one_directory(made: tuple[Config, Dataset, dict[str, bytes], Path], tmp_path: Path) -> None:
    shutil.copytree(made[3], tmp_path / "run")
    with rundir.RunDir(tmp_path / "run"), pytest.raises(BusyError, match=re.escape(str(os.getpid()))) as caught:
        rundir.RunDir(tmp_path / "run")
    assert caught.value.exit_code == 2
    rundir.RunDir(tmp_path / "run").close()


def test_the_lock_names_its_holder_whoever_held_it_before(tmp_path: Path) -> None:
    """Numbers of processes begin anew, so the one before may have been longer: nothing of it stays."""
    (tmp_path / ".lock").write_text("123456789012\n")
    with rundir.RunDir(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_names_are_numbered_and_the_newest_is_found(made: tuple[Config, Dataset, dict[str, bytes], Path], tmp_path: Path) -> None:
    cfg, data, _, path = made
    cfg = config.load(path / "config.toml", [f"run.out={tmp_path}"])
    with pytest.raises(InputError, match="no run to resume"):
        rundir.find(cfg)
    for name in ("t", "t-2", "t-3"):
        with rundir.create(cfg, data.tokenizer) as held:
            assert held.path.name == name and rundir.read_config(held.path) == cfg
            assert rundir.read_tokenizer(held.path).hash == data.tokenizer.hash
    (tmp_path / "t-10").mkdir()  # killed before its config was written: not a run
    assert rundir.find(cfg).name == "t-3"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_bad_step_leaves_the_state_and_names_its_op(root: Path, family: str) -> None:
    cfg = config.parse(run_file(root, family), ["run.name=bad", "machine.threads=1", "train.verify=0"])  # spot checks could see it first
    data = assemble.open_data(cfg)
    with Session(cfg, data) as s:
        s.loop.start()
        for _ in range(2):
            s.loop.advance()
        layout = s.program.states["param"]
        name = next(t.name for t in layout.tensors if t.name.startswith("block.1") and "up.weight" in t.name)
        s.executor.state("param")[layout.offsets[name] + 3] = np.inf
        before = s.bits()
        with pytest.raises(NonFiniteError) as caught:
            s.loop.advance()
        message = str(caught.value)
        assert s.bits() == before and s.loop.step == 2
        assert "matmul" in message or "swiglu" in message or "gelu" in message, message
        assert "block.1" in message and "model line" in message and "shard 0" in message and "step-00000002" in message
        row = read(s.held.metrics, "step_metrics", "step, loss, finite")[-1]
        assert row[0] == 2 and row[2] == 0
        assert folders.at(s.held.checkpoints).name == "step-00000002"


def test_a_resume_that_would_not_continue_is_refused(made: tuple[Config, Dataset, dict[str, bytes], Path], tmp_path: Path) -> None:
    cfg, data, _, path = made
    shutil.copytree(path, tmp_path / "run")
    other = config.load(path / "config.toml", ["optim.lr=2e-2"])
    with Session(other, data, tmp_path / "run") as s, pytest.raises(InputError, match="another configuration"):
        s.loop.resume()
    fewer = config.load(path / "config.toml", ["data.validation=0.4"])
    with Session(cfg, assemble.open_data(fewer), tmp_path / "run") as s, pytest.raises(InputError, match="text or order of samples"):
        s.loop.resume()
    newest = folders.at(tmp_path / "run" / "checkpoints")
    data_file = newest / "rank-00000-of-00001.state"
    raw = bytearray(data_file.read_bytes())
    raw[-9000] ^= 4
    data_file.write_bytes(raw)
    with Session(cfg, data, tmp_path / "run") as s:
        with pytest.raises(CorruptError, match=r"bytes \d+ to \d+, is not what its checksum says"):
            s.loop.resume(12)
        s.loop.resume()
        assert s.loop.step == 9 and "rank-00000-of-00001.state" in str(s.loop.passed)
        assert s.loop.run() and s.bits() == made[2]


def test_a_full_disk_while_saving_loses_nothing(
    made: tuple[Config, Dataset, dict[str, bytes], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, data, expected, path = made
    shutil.copytree(path, tmp_path / "run")
    with Session(cfg, data, tmp_path / "run") as s:
        s.loop.resume(9)
        with monkeypatch.context() as patched:
            patched.setattr("alpha.checkpoint.disk.os.fsync", _full)
            with pytest.raises(MachineError, match="disk is full") as caught:
                s.loop.run()
        assert caught.value.exit_code == 3
    assert folders.steps(tmp_path / "run" / "checkpoints") == [9]
    with Session(cfg, data, tmp_path / "run") as s:
        s.loop.resume()
        assert s.loop.run() and s.bits() == expected


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")
