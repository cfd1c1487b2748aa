"""Whole runs on several hosts: the bits of one process, hosts and ranks that are lost, and what hosts may be told.

Hosts are processes on this machine, each of which starts ranks of its own (suites/support/ranked_runs.py).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_ranks import SAME, alone, folder, run, went_on  # noqa: F401

from alpha import __main__ as cli
from alpha.bench import hosts as bench
from alpha.errors import InputError
from alpha.gates.contracts.ranks import frames
from alpha.report import curves
from alpha.train.launch import seat

ROOT = Path(__file__).parents[2]
SECRET = "0123456789abcdef"


def test_any_number_of_hosts_has_the_bits_of_one_process(folder: Path, alone: dict[str, Any]) -> None:  # noqa: F811
    """The bit table: hosts and ranks by ZeRO-1, then resumed on other numbers of both."""
    jobs = [{"name": f"h{hosts}n4z{zero}", "hosts": hosts, "ranks": 4, "zero": zero} for hosts in (2, 4) for zero in (0, 1)]
    jobs += [{"name": "h4-h2n8", "from": "h4n4z1", "at": 2, "hosts": 2, "ranks": 8, "zero": 0},
             {"name": "h2-n1", "from": "h2n4z1", "at": 2, "ranks": 1}]
    for job, found in zip(jobs, run(folder, *jobs)):
        assert found["code"] == 0, (job, found["error"], found["account"])
        for what in SAME:
            assert found[what] == alone[what], (job, what)


def test_a_host_that_is_lost_is_named_and_the_run_goes_on(folder: Path, alone: dict[str, Any]) -> None:  # noqa: F811
    lost, rank = run(folder, {"name": "host", "hosts": 2, "ranks": 4, "plant": "kill-host", "victim": 3, "step": 3, "restarts": 1,
                              "settled": True},
                     {"name": "rank", "hosts": 2, "ranks": 4, "plant": "kill", "victim": 3, "step": 3, "restarts": 1, "settled": True})
    went_on(lost, alone, r"host 1 \(ranks 2 to 3, .*\) is out of reach|rank [23] died", "from the checkpoint of step 2, with 4 ranks")
    went_on(rank, alone, "rank 3 died", "from the checkpoint of step 2, with 4 ranks")


def test_frames_that_were_spoiled(seed: int) -> None:
    """None delivers another message, none ends the bridge. `python suites/support/spoiled_frames.py 1000000` takes more of them."""
    assert not frames.mutated(2_000, np.random.default_rng(seed))


@pytest.mark.parametrize(("options", "secret", "words"), [
    (["--hosts", "2", "--nproc", "1", "--meet", "127.0.0.1:9"], None, "no ALPHA_SECRET"),
    (["--hosts", "2", "--nproc", "1", "--meet", "127.0.0.1:9"], "short", "ALPHA_SECRET of 5 characters"),
    (["--hosts", "2", "--nproc", "1"], SECRET, "--meet nothing"),
    (["--hosts", "2", "--nproc", "1", "--host", "2", "--meet", "127.0.0.1:9"], SECRET, "--host 2"),
    (["--hosts", "2", "--nproc", "1", "--meet", "127.0.0.1:70000"], SECRET, "--meet 127.0.0.1:70000"),
    (["--hosts", "2", "--nproc", "1", "--meet", "192.0.2.1:9"], SECRET, "an address of its own"),
    (["--hosts", "3", "--nproc", "1", "--meet", "127.0.0.1:9"], SECRET, "3 ranks"),
])  # fmt: skip
def test_hosts_that_cannot_be(options: list[str], secret: str | None, words: str, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    if secret is None:
        monkeypatch.delenv("ALPHA_SECRET", raising=False)
    else:
        monkeypatch.setenv("ALPHA_SECRET", secret)
    assert cli.main(["lab", "configs/tiny.toml", *options]) == 2
    assert words in capsys.readouterr().err


def test_hosts_with_other_numbers_of_ranks_are_told_so(tmp_path: Path) -> None:
    env = {**os.environ, "ALPHA_SECRET": SECRET, "PYTHONPATH": str(ROOT)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "alpha", "lab", "configs/tiny.toml", "--set=train.shards=8", "--set=train.micro_batch=1",
               f"--set=run.out={tmp_path}", "--hosts=2", f"--meet=127.0.0.1:{port}"]  # fmt: skip
    jobs = [subprocess.Popen([*command, f"--host={host}", f"--nproc={host + 1}"], cwd=ROOT, env=env, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True) for host in (0, 1)]  # fmt: skip
    for job in jobs:
        assert "the hosts of a job have the same number of ranks" in job.communicate(timeout=120)[1] and job.returncode


def test_what_the_environment_may_say_of_hosts() -> None:
    whole = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500",
             "ALPHA_SECRET": SECRET}
    found = seat(whole)
    assert found is not None and found.across is not None
    assert (found.across.host, found.across.hosts, found.across.address, found.across.port) == (1, 2, "192.0.2.1", 29500)
    assert found.across.streams == 1 and found.local_size == 4
    many = seat({**whole, "ALPHA_STREAMS": "4"})
    assert many is not None and many.across is not None and many.across.streams == 4
    other = seat({**whole, "RANK": "1"})
    assert other is not None and other.name != found.name  # both hosts may be on one machine
    for wrong, words in (({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"), ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
                         ({"ALPHA_SECRET": ""}, "no ALPHA_SECRET"), ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
                         ({"ALPHA_STREAMS": "0"}, "ALPHA_STREAMS=0"), ({"ALPHA_STREAMS": "17"}, "ALPHA_STREAMS=17")):
        with pytest.raises(InputError) as caught:
            seat({**whole, **wrong})
        assert words in str(caught.value)


def test_messages_beside_plain_sockets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bench.bench(2, sizes=(4, 1 << 20), streams=(1, 3), calls=3)
    assert [(r.streams, r.nbytes) for r in rows] == [(1, 4), (1, 1 << 20), (3, 4), (3, 1 << 20)]
    for r in rows:
        assert set(r.fastest) == set(bench.ARMS) and all(0 < r.fastest[arm] <= r.median[arm] for arm in bench.ARMS)
        assert r.share("send") == r.fastest["sockets"] / r.fastest["send"]
    told = json.loads(json.dumps([{"streams": r.streams, "nbytes": r.nbytes, "median": r.median} for r in rows]))
    picture = curves.draw_hosts(told)
    assert all(f">{name}<" in picture for name in ("sockets, 1 stream", "messages, 3 streams", "send, 3 streams")), picture
    monkeypatch.setattr(bench.bench, "__defaults__", ((4,), (1,), None))
    assert cli.main(["bench", "comm", "--hosts", "2", "--rounds", "2"]) == 0
    assert "messages / sockets" in capsys.readouterr().out
    assert cli.main(["bench", "comm", "--hosts", "3"]) == 2
    assert "--hosts 3" in capsys.readouterr().err
