"""Ranks as processes: how a job ends when ranks die, stop, hang or disagree; signals; other launchers; nothing that stays behind."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import warm
from shm import nothing_left

from alpha import cli
from alpha.checkpoint import folders
from alpha.comm.meet import Across, meet
from alpha.comm.process import Served
from alpha.comm.watch import Deadlines
from alpha.errors import InputError
from alpha.graph.state import StateLayout, TensorSpec
from alpha.train import launch, supervisor
from alpha.train.launch import Ended, seat

SCRIPT = str(Path(__file__).parents[1] / "support" / "launched.py")
BOUND_S = 5.0
"""Within which a job ends, without what its processes wait for processors; the deadlines of the script are a second each."""
PATIENCE_S = 60.0
"""What a machine that is busy elsewhere may take for what takes no time."""


def start(*words: str, **env: str) -> warm.Process:
    return warm.start([SCRIPT, *words], environment=env, stdout=subprocess.PIPE)


def said(process: warm.Process) -> str:
    """All that it prints, until it and its ranks have ended."""
    assert process.stdout is not None
    with process.stdout as stream:
        return stream.read().decode()


def ended(case: str, size: int = 4, victim: int = 2) -> dict[str, Any]:
    with nothing_left():
        done = warm.run([SCRIPT, case, size, victim])
    assert not done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["left"]
    return found


def in_time(case: str, victim: int = 2) -> dict[str, Any]:
    """The same of a job that must be over within BOUND_S."""
    with nothing_left():
        process = start(case, "4", str(victim))
        began, clocks = time.monotonic(), {process.pid: Served(process.pid)}
        while process.poll() is None:
            with suppress(OSError):
                for pid in map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
                    clocks.setdefault(pid, Served(pid))
            for clock in clocks.values():
                clock.look()
            time.sleep(0.05)
        seconds = time.monotonic() - began - sum(clock.lost for clock in clocks.values()) / 1e9
        found: dict[str, Any] = json.loads(said(process).splitlines()[-1])
    assert process.returncode == 0 and seconds < BOUND_S, f"{seconds:.1f} s"
    return found


def test_ranks_start_and_end() -> None:
    found = ended("none")
    assert found["code"] == 0 and not found["error"] and not found["lost"] and found["told"]["path"] == "a run"


@pytest.mark.parametrize(("case", "words"), [
    ("dies", "killed by SIGKILL"), ("stops", "did not answer"), ("exits", "exit code 0"), ("deaf", "did not answer"),
])  # fmt: skip
def test_a_lost_rank_ends_the_job(case: str, words: str) -> None:
    found = in_time(case)
    assert found["code"] == 1 and found["lost"]
    assert "rank 2" in found["error"].splitlines()[0], found["error"]
    lines = found["account"].splitlines()
    assert re.match(rf"rank 2 ended \(.*{words}\) in step 7: had done all_reduce .*, step 6$", lines[2]), lines[2]
    # the sum of step 6 is done for rank 2, but perhaps not for all
    assert all(re.match(rf"rank {r} ended \(.*\) in step ([67]): waited in all_reduce .*, step \1$", lines[r]) for r in (0, 1, 3)), lines


def test_a_rank_that_stops_when_nobody_waits_for_it() -> None:
    for victim in (0, 2):
        found = in_time("late", victim)
        assert found["code"] == 1 and found["lost"]
        assert found["error"].startswith(f"rank {victim} is stopped"), found["error"]


@pytest.mark.parametrize(("case", "code", "words"), [("raises", 1, "ValueError: planted"), ("refuses", 2, "came:     this")])
def test_an_error_of_one_rank_is_the_jobs(case: str, code: int, words: str) -> None:
    found = in_time(case)
    assert found["code"] == code and not found["lost"]
    assert found["error"].startswith("rank 2: ") and words in found["error"]


def test_without_memory_to_share_nothing_starts() -> None:
    found = ended("cramped")
    assert found["code"] == 3 and found["error"].startswith("the ranks cannot share memory")


def test_a_rank_that_cannot_be_watched_is_ended() -> None:
    found = ended("unwatched")
    assert found["code"] == 3 and found["error"].startswith("the ranks cannot be started") and "1 of 4" in found["error"]


def test_who_ends_late_is_killed_by_the_time_it_was_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """`join` seconds behind the first rank's end; `abort` seconds behind a failure, whatever came before."""
    served = [0.0]
    killed: list[int] = []
    monkeypatch.setattr(launch, "Served", lambda pid: SimpleNamespace(look=lambda since=served[0]: 1e9 * (served[0] - since)))
    monkeypatch.setattr(launch, "_send", lambda child, number: killed.append(child.rank))
    limits = Deadlines(join=30.0, abort=5.0)

    def late(*, first_ended: bool, failed_at: float, until: int) -> float:
        children = [launch._Child(rank, 0, 0, 0, status=0 if not rank and first_ended else None) for rank in range(2)]
        served[0] = 0.0
        killed.clear()
        while 1 not in killed and served[0] < until:
            launch._end_late(children, served[0] >= failed_at, limits)
            served[0] += 1.0
        return served[0]

    never = math.inf
    assert late(first_ended=False, failed_at=never, until=100) == 100 and not killed
    assert late(first_ended=True, failed_at=never, until=100) == 31
    assert late(first_ended=False, failed_at=10, until=100) == 16
    assert late(first_ended=True, failed_at=10, until=100) == 16


def test_another_configuration_on_one_rank_is_named() -> None:
    found = ended("config")
    first, came, expected, _ = found["error"].splitlines()
    assert found["code"] == 1 and first == "rank 2 was started otherwise than the others"
    assert "config optim.lr of rank 2: 0.5" in came and "config optim.lr of rank 0: " in expected


def wait_for_ranks(process: warm.Process, size: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[1]) for _ in range(size)]


def state(pid: int) -> str:
    """The letter of proc(5), Z where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while any(state(pid) != "Z" for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return all(state(pid) == "Z" for pid in pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_ranks(number: signal.Signals, code: int) -> None:
    process = start("signal", "3", "-1")
    pids = wait_for_ranks(process, 3)
    process.send_signal(number)
    assert json.loads(said(process).splitlines()[-1])["code"] == code
    assert process.wait(PATIENCE_S) == 0 and gone(pids)


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans go to this process, of the ranks' session, as to process 1 of a container: then Linux does not wake a stopped one."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
    yield
    libc.prctl(36, 0, 0, 0, 0)


def test_no_rank_outlives_its_parent(adopting: None) -> None:
    """Nor one that is stopped, or is told to stop when its parent has just died. Planted: a rank that watches for that by itself."""
    process = start("parent", "3", "-1")
    pids = wait_for_ranks(process, 3)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pids[2], signal.SIGSTOP)
    try:
        assert gone(pids)
    finally:
        process.kill()
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


# -- other launchers -----------------------------------------------------------------------------------------------------------


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return str(s.getsockname()[1])


def ranks(case: str, size: int, port: str, numbers: tuple[int, ...], *, join: float = PATIENCE_S, **more: str) -> list[warm.Process]:
    return [start("rank", case, str(join), RANK=str(r), WORLD_SIZE=str(size), LOCAL_RANK=str(r), MASTER_ADDR="localhost", MASTER_PORT=port,
                  **more) for r in numbers]  # fmt: skip


def finished(processes: list[warm.Process]) -> list[tuple[int, str]]:
    texts = [said(p) for p in processes]
    return [(p.wait(PATIENCE_S), text) for p, text in zip(processes, texts)]


def test_ranks_of_another_launcher_meet() -> None:
    assert finished(ranks("none", 3, free_port(), (0, 1, 2))) == [(0, "")] * 3


def test_a_rank_that_never_comes() -> None:
    for code, text in finished(ranks("none", 3, free_port(), (0, 1), join=1.0)):
        assert code == 1 and "rank" in text and "never" in text


@pytest.mark.parametrize("case", ["config", "dies", "raises"])
def test_every_rank_of_another_launcher_names_the_fault(case: str) -> None:
    found = finished(ranks(case, 3, free_port(), (0, 1, 2)))
    assert all(code == 1 and "rank 1" in text for i, (code, text) in enumerate(found) if i != 1), found


def test_two_jobs_of_one_port() -> None:
    """The second is refused, and the first one does not notice."""
    port, before = free_port(), sockets()
    first = ranks("none", 2, port, (0,))
    until = time.monotonic() + PATIENCE_S
    while not sockets() - before and time.monotonic() < until:  # until its first rank waits for its second
        time.sleep(0.02)
    (code, text), = finished(ranks("none", 2, port, (0,)))
    assert code == 2 and "another job on this host" in text
    assert finished([*first, *ranks("none", 2, port, (1,))]) == [(0, "")] * 2


def sockets() -> set[str]:
    """Names in the abstract namespace at which jobs meet (unix(7))."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@alpha-" in line}


def test_what_the_environment_may_say() -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = seat(whole)
    assert found is not None and (found.rank, found.size, found.local_rank) == (1, 2, 1)
    assert seat({}) is None
    other = seat({**whole, "TORCHELASTIC_RUN_ID": "b"})
    assert other is not None and other.name != found.name
    for wrong, words in (({"RANK": "2"}, "RANK=2"), ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"), ({"MASTER_PORT": ""}, "no MASTER_PORT"),
                         ({"MASTER_ADDR": "192.0.2.1"}, "MASTER_ADDR=192.0.2.1"), ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1"),
                         ({"RANK": "-1"}, "RANK=-1"), ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b"), ({"RANK": "9" * 5000}, "RANK=999"),
                         ({"MASTER_ADDR": "\udcff"}, r"MASTER_ADDR=\udcff")):
        with pytest.raises(InputError) as caught:
            seat({**whole, **wrong})
        assert words in str(caught.value)


def test_what_the_environment_may_say_of_several_hosts() -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65535",
             "ALPHA_SECRET": "0123456789abcde\udcff"}
    found = seat(whole)
    assert found is not None and found.across is not None and found.across.secret == b"0123456789abcde\xff"
    for port in ("0", "65536"):
        with pytest.raises(InputError, match=f"MASTER_PORT={port}"):
            seat({**whole, "MASTER_PORT": port})


@pytest.mark.parametrize("host", [0, 1])
def test_hosts_meet_at_no_address_that_cannot_be(host: int) -> None:
    for address in ("a..b", "x" * 64 + ".org", "\udcff"):
        with pytest.raises(InputError, match="host 0 has no such address"):
            meet(Across(host, 2, address, 29500, b"0123456789abcdef"), 1, 0, 1, 5.0)


# -- the command line, and starting again --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "env", "words"), [
    (["--nproc", "3"], {}, "--nproc out of 2"),
    (["--nproc", "0"], {}, "0 ranks"),
    (["--nproc", "2", "--fewest", "1"], {}, "--fewest 1"),
    (["--nproc", "2", "--restarts", "-1"], {}, "--restarts -1"),
    (["--nproc", "2"], {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "WORLD_SIZE=4, --nproc 2"),
    ([], {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "4 ranks, train.shards = 2"),
    ([], {"RANK": "0"}, "no WORLD_SIZE"),
    ([], {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK=1, LOCAL_RANK=0, WORLD_SIZE=2"),
])  # fmt: skip
def test_numbers_of_ranks_that_cannot_be(options: list[str], env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["lab", "configs/tiny.toml", *options]) == 2
    assert words in capsys.readouterr().err


def test_starting_again_has_a_limit_and_pauses(tmp_path: Path) -> None:
    starts: list[tuple[int, int, Path | None, int | None]] = []
    said: list[str] = []
    pauses: list[float] = []

    def lose(*given: Any) -> Ended:
        starts.append(given)
        return Ended(1, "rank 1 died", True, "", {"path": str(tmp_path)})

    found = supervisor.supervise(lose, 8, restarts=4, fewest=2, resume=None, at=None, report=said.append, sleep=pauses.append)
    assert found.lost and pauses == [1.0, 2.0, 4.0, 8.0] and len(said) == 4
    assert [s[:2] for s in starts] == [(8, 0), (8, 1), (4, 2), (2, 3), (2, 4)]
    assert [s[2] for s in starts] == [None, *[tmp_path] * 4]


def test_a_start_that_told_no_run_goes_on_in_the_one_before(tmp_path: Path) -> None:
    """A rank may be lost before the run directory is told, again and again: what the first start told, or was given, still holds."""
    for given, told in ((None, {"path": str(tmp_path)}), (tmp_path, {})):
        starts: list[Path | None] = []

        def lose(ranks: int, number: int, resume: Path | None, at: int | None, told: dict[str, Any] = told,
                 starts: list[Path | None] = starts) -> Ended:  # fmt: skip
            starts.append(resume)
            return Ended(1, "rank 1 died", True, "", told if number == 0 else {})

        supervisor.supervise(lose, 2, restarts=3, fewest=2, resume=given, at=None, report=lambda text: None, sleep=lambda s: None)
        assert starts == [given, *[tmp_path] * 3]


def test_a_start_that_did_not_reach_the_checkpoint_asked_for_is_tried_from_there(tmp_path: Path) -> None:
    """A rank may be lost before the run was taken back: the later checkpoints, which were to be left behind, are still the latest. Once
    they are aside the run goes on from what was saved since, also where that is of the same step."""
    state = StateLayout([TensorSpec("a", (4,), "test")])

    def save(step: int) -> None:
        folders.save(tmp_path / "checkpoints", step, {"param": (state, np.zeros(state.size, np.float32))}, {}, keep=9)

    for step in (2, 4, 6):
        save(step)
    starts: list[int | None] = []

    def lose(ranks: int, number: int, resume: Path | None, at: int | None) -> Ended:
        starts.append(at)
        if number == 2:
            folders.set_aside(tmp_path / "checkpoints", 2)
        if number == 3:
            save(4)
        return Ended(1, "rank 1 died", True)

    said: list[str] = []
    supervisor.supervise(lose, 2, restarts=4, fewest=2, resume=tmp_path, at=2, report=said.append, sleep=lambda s: None)
    assert starts == [2, 2, 2, 2, 4] and "the checkpoint of step 2" in said[0]


def test_bad_input_is_not_tried_again() -> None:
    found = supervisor.supervise(lambda *_: Ended(2, "rank 0: no such file"), 2, restarts=3, fewest=2, resume=None, at=None,
                                 report=lambda text: pytest.fail(text))
    assert found.code == 2
