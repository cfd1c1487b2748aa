"""Clients of TensorBoard and Weights & Biases: what they write is what the run measured, and whatever they do, the run is the same."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import warm

from alpha import cli
from alpha.checkpoint import folders
from alpha.profile.store import Store, read
from alpha.trackers import start
from alpha.trackers.clients import Client
from alpha.trackers.follow import Follower

pytest.importorskip("tensorboardX", reason="NOT_RUN: the extra `tensorboard` is not installed")

Values = dict[tuple[str, int], float]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory, small_run: Callable[..., Path]) -> Path:
    settings = {"train.steps": 6, "train.eval_every": 3, "train.checkpoint_every": 3, "train.profile": 0, "data.baseline": False}
    return small_run(tmp_path_factory.mktemp("trackers"), settings)


def trained(run_file: Path, name: str, *more: str) -> Path:
    """The folder of a finished run."""
    assert cli.main(["lab", str(run_file), "--set", f"run.name={name}", *more]) == 0
    return run_file.parent / "runs" / name


def state(run: Path) -> dict[str, np.ndarray]:
    return {kind: flat for kind, (_, flat) in folders.read(folders.at(run / "checkpoints", 6)).items()}


def measured(run: Path) -> Values:
    """What a client is to write, but speeds."""
    steps = read(run / "metrics.sqlite", "step_metrics", "step, loss, norm, lr")
    made = {(f"train/{name}", row[0]): x for row in steps for name, x in zip(("loss", "norm", "lr"), row[1:])}
    evaluations = read(run / "metrics.sqlite", "evaluations", "step, bits_per_byte")
    return {**made, **{("validation/bits_per_byte", step): x for step, x in evaluations}}


def events(run: Path) -> Values:
    """Scalars of the event files, which are records: length, its checksum, an Event, its checksum. Later files win."""
    from tensorboardX.proto.event_pb2 import Event

    found: Values = {}
    for path in sorted((run / "tensorboard").glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def same(found: Values, run: Path, relative: float) -> None:
    assert {key for key in found if key[0] != "train/tokens_per_second"} == set(measured(run))
    for key, value in measured(run).items():
        assert found[key] == pytest.approx(value, rel=relative), key


@pytest.fixture(scope="module")
def plain(run_file: Path) -> dict[str, np.ndarray]:
    """State at the end of the run without a client."""
    return state(trained(run_file, "plain"))


def test_event_files_hold_what_the_run_measured(run_file: Path, plain: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(run_file, "events", "--set", "log.tensorboard=true")
    assert "log." not in capsys.readouterr().err
    same(events(run), run, 2**-24)  # an Event holds float32
    assert all(x > 0 for (name, _), x in events(run).items() if name == "train/tokens_per_second")
    assert {kind: x.tobytes() for kind, x in state(run).items()} == {kind: x.tobytes() for kind, x in plain.items()}


def test_ranks_have_one_client(run_file: Path) -> None:
    done = warm.run(["-m", "alpha", "lab", run_file, "--nproc", "2", "--set=train.shards=2", "--set=run.name=ranks",
                     "--set=log.tensorboard=true"], timeout=600)
    assert done.returncode == 0 and "log." not in done.stderr, done.stderr
    run = run_file.parent / "runs" / "ranks"
    same(events(run), run, 2**-24)
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_a_job_of_one_rank_has_its_client(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts it on one process: what [log] asks for is written there too."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    run = trained(run_file, "alone", "--set", "log.tensorboard=true")
    same(events(run), run, 2**-24)


def logged(data: bytes) -> Iterator[bytes]:
    """Records of a file of Weights & Biases: 7 bytes, then blocks of 32 KiB in the format of LevelDB's log, whose records are a checksum,
    a length, a kind (1: whole, 2 to 4: first part, middle, last) and so many bytes."""
    at, record = 7, b""
    while at < len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def test_weights_and_biases_offline(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb", reason="NOT_RUN: the extra `wandb` is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(start, "PATIENCE_S", 300.0)
    run = trained(run_file, "wandb", "--set", "log.wandb=true")
    assert "log." not in capsys.readouterr().err
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found: Values = {}
    for record in map(Record.FromString, logged(path.read_bytes())):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found |= {(name, items["step"]): x for name, x in items.items() if not name.startswith("_") and name != "step"}
    same(found, run, 0)


FAKES = {
    "killed": ("import os, signal\ndef SummaryWriter(*a, **k): os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    "hangs": ("import time\ndef SummaryWriter(*a, **k): time.sleep(3600)", "hung and was ended"),
    "raises": ("def SummaryWriter(*a, **k): raise OSError('no room')", "ended with exit code 1"),
    "cannot be imported": ("raise ImportError('broken')", "ended with exit code 1"),
    "missing": (None, "is not installed"),
}


@pytest.mark.parametrize("kind", FAKES)
def test_whatever_a_client_does_the_run_is_the_same(kind: str, run_file: Path, plain: dict[str, np.ndarray], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = FAKES[kind]
    (tmp_path / "tensorboardX.py").write_text(str(text))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(start.__file__).parents[2]}")
    if text is None:
        monkeypatch.setattr(start, "MODULES", {"tensorboard": "no_such_module_of_any_name"})
    monkeypatch.setattr(start, "PATIENCE_S", 0.5 if kind == "hangs" else 300.0)
    run = trained(run_file, kind.replace(" ", "-"), "--set", "log.tensorboard=true")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "log." in line]
    assert line.startswith("alpha lab: log.tensorboard: ") and said in line
    assert {k: x.tobytes() for k, x in state(run).items()} == {k: x.tobytes() for k, x in plain.items()}


class Kept(Client):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def begin(self, path: Path, first: int) -> None:
        self.told.append(first)

    def write(self, step: int, values: object) -> None:
        self.told.append((step, *values))  # type: ignore[misc]

    def close(self) -> None:
        self.told.append("closed")


def test_a_session_that_goes_on_begins_where_it_does(tmp_path: Path) -> None:
    """Rows of an earlier session are left alone, those that it went back behind are written again, and each once."""
    kept, row = Kept(), {"loss": 1.0, "norm": 1.0, "lr": 1.0, "tokens": 8, "seconds": 0.5, "finite": 1}
    follower = Follower(tmp_path, -1, kept)
    follower.look()
    assert kept.told == [], "nothing was measured yet"
    path = tmp_path / "metrics.sqlite"
    with Store(path) as store:
        follower.look()
        store.begin(0, 0, 0, 0)
        for step in range(4):
            store.add("step_metrics", {"step": step, **row})
        store.add("evaluations", {"step": 3, "nats": 1.0, "tokens": 1, "bytes": 1, "windows": 1, "bits_per_byte": 2.0})
        store.flush()
        follower.look()
        follower.look()
    names = ("train/loss", "train/norm", "train/lr", "train/tokens_per_second")
    assert kept.told == [0, *((step, *names) for step in range(4)), (3, "validation/bits_per_byte")]
    kept.told, follower = [], Follower(tmp_path, 0, kept)
    with Store(path) as store:
        follower.look()
        store.rewind(2)
        store.begin(2, 0, 0, 0)
        store.of_sources(2, {"a": {"nats": 1.0, "tokens": 1, "bytes": 1, "windows": 1, "bits_per_byte": 2.0}})
        store.add("evaluations", {"step": 2, "nats": 1.0, "tokens": 1, "bytes": 1, "windows": 1, "bits_per_byte": 2.0})
        store.add("step_metrics", {"step": 2, **row, "loss": None})
        store.flush()
        follower.look()
    assert kept.told == [2, (2, *names), (2, "validation/bits_per_byte", "validation/bits_per_byte/a")]
