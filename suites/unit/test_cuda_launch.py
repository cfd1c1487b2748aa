"""`alpha lab RUN.toml --nproc 2` on emulated GPUs, from the command line to the exit code: devices, console, logs, ranks that go wrong,
runs that go on with one rank and with two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from test_cuda_session import RUN

from alpha.bench.peer import ROOT
from alpha.checkpoint import folders
from alpha.profile.store import read
from alpha.report import runs as reading


@dataclass(frozen=True)
class Done:
    """How a command ended, and the run that it made."""

    code: int
    out: str
    err: str
    run: Path

    def bits(self, step: int) -> dict[str, bytes]:
        return {kind: x.tobytes() for kind, (_, x) in folders.read(folders.at(self.run / "checkpoints", step)).items()}

    def steps(self) -> list[tuple[Any, ...]]:
        return list(read(self.run / "metrics.sqlite", "step_metrics", "step, loss, norm, lr"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    path = tmp_path_factory.mktemp("launch")
    small_corpus(path / "text")
    (path / "run.toml").write_text(RUN.format(out=path.as_posix(), family="gpt"))
    return path


def ran(root: Path, name: str, *words: str, command: str = "lab", source: str = "", **job: Any) -> Done:
    """`alpha lab` with these words, of a run called so."""
    own = [] if source else ["--set", f"run.name={name}"]
    made = warm.run([ROOT / "suites" / "support" / "emulated_launch.py", root, json.dumps(job), "--", command,
                     source or root / "run.toml", *own, *words], timeout=240)
    return Done(made.returncode, made.stdout, made.stderr, root / "runs" / name)


@pytest.fixture(scope="module")
def alone(root: Path) -> Done:
    done = ran(root, "alone")
    assert done.code == 0, done.out + done.err
    return done


@pytest.fixture(scope="module")
def two(root: Path) -> Done:
    done = ran(root, "two", "--nproc", "2")
    assert done.code == 0, done.out + done.err
    return done


def test_two_ranks_from_the_command_line(alone: Done, two: Done) -> None:
    """One console, a log of each rank, each its own GPU, and the bits of one process. A report reads the run: what ranks told each other
    beside their devices is no more than what each step's phases have of it."""
    assert two.steps() == alone.steps() and two.bits(8) == alone.bits(8)
    assert two.out.count("run directory") == 1 and two.out.count("validation    ") == 1 and "ranks     2, each with a GPU" in two.out
    for rank in (0, 1):
        lines = [json.loads(x) for x in (two.run / "logs" / f"rank{rank}.jsonl").read_text().splitlines()]
        start, end = (next(x for x in lines if x["event"] == event) for event in ("start", "end"))
        assert start["fields"]["ranks"] == 2 and end["fields"]["reason"] == "finished", lines
    session = json.loads((two.run / "manifest.json").read_text())["sessions"][0]
    assert [x.rsplit(" ", 1)[1] for x in session["devices"]] == ["0", "1"]
    table = reading.load(two.run).tables["communication"]
    own = table[(table.stream == "compute") & (table.step > 0)]
    assert (own.overlapped_ns > 0).any(), own


def test_more_ranks_than_gpus_are_refused(root: Path) -> None:
    done = ran(root, "many", "--nproc", "4", "--set", "train.shards=4", "--set", "train.micro_batch=1")
    assert done.code == 3 and "each rank computes on a GPU of its own" in done.err and "4 ranks, 2 GPUs" in done.err
    assert not done.run.exists()
    none = ran(root, "none", "--nproc", "2", gpus=0)
    assert none.code == 3 and "Traceback" not in none.err and not none.run.exists()


@pytest.mark.parametrize(("plant", "said"), [("kill", "rank 1 died"), ("stop", "rank 1 is stopped"), ("raise", "rank 1: ")])
def test_a_rank_that_goes_wrong_is_named(root: Path, plant: str, said: str) -> None:
    done = ran(root, f"wrong-{plant}", "--nproc", "2", plant=plant, victim=1, step=4)
    assert done.code == 1 and said in done.err + done.out, done.err
    if plant != "raise":
        assert "rank 0 ended" in done.err and "step 4" in done.err, done.err


def test_what_a_rank_may_not_hold_is_found_there(root: Path) -> None:
    done = ran(root, "forbidden", "--nproc", "2", plant="import", victim=1, step=4)
    assert done.code != 0 and "rank 1: a forbidden library is in this process" in done.err and "imported: torch" in done.err, done.err


def test_a_lost_rank_is_started_again(root: Path, alone: Done) -> None:
    done = ran(root, "again", "--nproc", "2", "--restarts", "2", plant="kill", victim=1, step=5, once=True)
    (root / "planted").unlink()
    assert done.code == 0 and "start 1 of 2, from the checkpoint of step 3" in done.err, done.err
    assert done.bits(8) == alone.bits(8) and done.steps() == alone.steps()


def test_a_lost_context_is_a_lost_rank(root: Path, alone: Done) -> None:
    """Its process ends, and a new one has a sound context: the job starts again, and names whose GPU it was."""
    done = ran(root, "context", "--nproc", "2", "--restarts", "1", plant="context", victim=0, step=5, once=True)
    (root / "planted").unlink()
    assert done.code == 0 and "rank 0: its GPU is lost" in done.err and "ILLEGAL_ADDRESS" in done.err, done.err
    assert done.bits(8) == alone.bits(8)


def test_ctrl_c_saves_and_one_rank_goes_on(root: Path, alone: Done) -> None:
    """And two go on from what one left."""
    done = ran(root, "stopped", "--nproc", "2", plant="interrupt", victim=0, step=4)
    assert done.code == 130 and "stopped after step 5, saved" in done.out, done.out + done.err
    one = ran(root, "stopped", "--resume", "--set", "train.steps=8", source=str(done.run))
    assert one.code == 0 and one.bits(8) == alone.bits(8), one.err
    again = ran(root, "stopped", "--resume", "--at", "6", "--nproc", "2", source=str(done.run))
    assert again.code == 0 and again.bits(8) == alone.bits(8) and again.steps() == alone.steps(), again.err
