"""A real Slurm on this machine (suites/support/slurm.py) runs examples/slurm/train.sbatch: the bits of one process, also on fewer nodes.

NOT_RUN, with the reason, where Slurm or network namespaces are missing.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apart_runs
import pytest
import ranked_runs
import slurm
from slurm import Slurm

from alpha.profile.store import read

TEMPLATE = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
STEPS = ["--set", "train.steps=30", "--set", "train.checkpoint_every=5", "--set", "train.keep=99"]

pytestmark = pytest.mark.skipif(bool(slurm.why_not()), reason=f"NOT_RUN: {slurm.why_not()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slurm")
    apart_runs.corpus(path)
    (path / "alpha").write_text(f'#!/bin/sh\nexec {sys.executable} -m alpha "$@"\n')
    (path / "alpha").chmod(0o755)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process leaves."""
    return apart_runs.alone(folder, "alone", STEPS)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("cluster"), request.param) as made:
        yield made


def submit(cluster: Slurm, folder: Path, name: str, *options: str, zero: int = 1) -> tuple[int, Path]:
    """A job of the template, and its log."""
    log, run = folder / f"{name}.log", apart_runs.run_file(folder, name, zero)
    own = {"ALPHA": str(folder / "alpha"), "ALPHA_COMMAND": "lab", "PYTHONPATH": str(TEMPLATE.parents[2]), "PYTHONUNBUFFERED": "1"}
    exported = ",".join(["ALL", *(f"{k}={v}" for k, v in own.items())])
    job = cluster.submit(*options, f"--export={exported}", f"--output={log}", "--time=5", str(TEMPLATE), str(run), *STEPS)
    return job, log


def reach(cluster: Slurm, job: int, log: Path) -> None:
    """Wait until 12 steps are done and the checkpoint of step 10 stands."""
    until = time.monotonic() + 120
    while not log.exists() or "step 12/30" not in log.read_text() or "step 10: saved" not in log.read_text():
        assert time.monotonic() < until, log.read_text() if log.exists() else cluster.state(job)
        time.sleep(0.02)


def has_the_bits(folder: Path, name: str, alone: dict[str, Any]) -> None:
    found = ranked_runs.left(folder / "runs" / name)
    for what in apart_runs.SAME:
        assert found[what] == alone[what], what


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_one_node(cluster: Slurm, folder: Path, alone: dict[str, Any]) -> None:
    """Two tasks are two ranks; one task that starts two ranks is a job of its own. A run file that is wrong is not requeued."""
    job, log = submit(cluster, folder, "node", "--nodes=1", "--ntasks-per-node=2")
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "ranks     2, " in log.read_text()
    has_the_bits(folder, "node", alone)
    job, log = submit(cluster, folder, "wrong", "--nodes=1", "--ntasks-per-node=3")
    assert cluster.wait(job) == "FAILED" and "3 ranks, train.shards = 8" in log.read_text()
    assert "Restarts=0 " in cluster.run("scontrol", "show", "job", str(job))


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_rank_that_is_lost(cluster: Slurm, folder: Path, alone: dict[str, Any]) -> None:
    """The template has the job started again, which goes on from its last checkpoint."""
    job, log = submit(cluster, folder, "rank", "--nodes=1", "--ntasks-per-node=2")
    reach(cluster, job, log)
    ranks = read(folder / "runs" / "rank" / "metrics.sqlite", "sessions", "rank, pid")
    os.kill(int(dict(ranks)[1]), signal.SIGKILL)
    assert cluster.wait(job, "PENDING") == "PENDING", log.read_text()
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "rank 1 died" in log.read_text() and "from step 10" in log.read_text()
    assert "Restarts=1 " in cluster.run("scontrol", "show", "job", str(job))
    has_the_bits(folder, "rank", alone)


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize("fewer", [False, True])
def test_two_nodes_of_which_one_is_lost(cluster: Slurm, folder: Path, alone: dict[str, Any], fewer: bool) -> None:
    """Slurm requeues the job. It goes on from its last checkpoint, all ranks on the other node or on both, and ends with the bits of one
    process."""
    name = f"lost{fewer:d}"
    job, log = submit(cluster, folder, name, "--nodes=2", "--ntasks-per-node=2")
    reach(cluster, job, log)
    cluster.hosts.kill(1)
    assert cluster.wait(job, "PENDING") == "PENDING", log.read_text()
    if fewer:
        assert not cluster.run("scontrol", "update", f"JobId={job}", "NumNodes=1-1", "TasksPerNode=4").strip()
    else:
        cluster.node(1)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    text = log.read_text()
    assert text.count("ranks     4, ") == 2 and "from step 10" in text, text  # Slurm keeps a job's number of tasks
    assert f"NumNodes={1 if fewer else 2} " in cluster.run("scontrol", "show", "job", str(job))
    assert re.search(r"host 1 .* is out of reach|rank [23] died", text), text
    has_the_bits(folder, name, alone)
