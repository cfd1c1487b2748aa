"""Ranks that die, stop, leave or do something else, and messages that are lost, torn, doubled, swapped, flipped or not meant for this job.

Pass: all others end within the bound, with the rank named, and nothing wrong is ever delivered or left behind.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shm import SHM, apart, nothing_left

from alpha.comm import collectives
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.errors import RankError
from alpha.gates.contracts.ranks.calls import misbehave
from alpha.gates.contracts.ranks.members import Ended, Members
from alpha.gates.contracts.ranks.messages import FAULTS, Link, faulty

SHORT = Deadlines(stall=0.5)
BOUND_S = 5.0
"""Within which all ranks end, without what they wait for processors; the deadline in these tests is a tenth of the default."""


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    with nothing_left(), Members() as started:
        yield started


def hang(world: World) -> None:
    """Sleep until all other ranks have ended: nobody is waited for longer than it takes them."""
    for rank in range(world.size):
        if rank != world.rank:
            with suppress(ProcessLookupError):
                select.select([os.pidfd_open(world._segment.control.pid(rank))], [], [])


def training(world: World, what: str, victim: int, at: int) -> int:
    """Steps of three collectives each; before number `at` the victim does `what`."""
    group, x, calls = world.group(WORLD), np.ones(5000, np.float32), 0
    piece = np.empty(5000 // world.size, np.float32)
    for step in range(6):
        world.step = step
        for op in ("all_reduce", "reduce_scatter", "all_gather"):
            if world.rank == victim and calls == at:
                hang(world) if what == "hangs" else misbehave(world, what)
            if op == "all_reduce":
                collectives.all_reduce(group, x, x, reduce="average")
            elif op == "reduce_scatter":
                collectives.reduce_scatter(group, x[: piece.size * world.size], piece)
            else:
                collectives.all_gather(group, piece, np.empty(piece.size * world.size, np.float32))
            calls += 1
    return calls


def named(ended: list[Ended], victim: int, among: tuple[int, ...] = ()) -> None:
    """Every other rank ended by itself, soon, with an error that names the victim, or another of `among`, where two blame each other."""
    for rank, e in enumerate(ended):
        if rank == victim:
            continue
        assert not e.hung and e.served < BOUND_S, f"rank {rank}: {e}"
        assert e.result is None and e.rank in (victim, *among), f"rank {rank}: {e}"


@pytest.mark.parametrize("what", ["dies", "stops", "hangs", "raises", "exits"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_lost_rank_is_named(members: Members, size: int, what: str) -> None:
    for at in (0, 7):
        ended = members.run(training, size, what, 1, at, deadlines=SHORT, payload_bytes=4096)
        named(ended, 1)
        others = "\n".join(e.error for e in ended[:1] + ended[2:])
        assert {"dies": "rank 1 died", "exits": "rank 1 died", "stops": "is stopped", "hangs": "is sleeping",
                "raises": "MemoryError: planted"}[what] in others


def test_a_rank_whose_messages_are_lost_is_named(members: Members) -> None:
    ended = members.run(training, 2, "skips", 1, 4, deadlines=SHORT)
    assert all(not e.hung and e.served < BOUND_S for e in ended), ended
    assert all("gets on with nothing" in e.error or "wait for each other" in e.error for e in ended), ended


@pytest.mark.parametrize("what", ["barrier", "count", "dtype", "sum", "root"])
def test_another_collective_is_named(members: Members, what: str) -> None:
    ended = members.run(training, 4, what, 2, 6, deadlines=SHORT)
    named(ended, 2, among=(0, 1, 3))
    first = [e for e in ended if e.error and "stops:" not in e.error]
    assert first and all("runs another collective than rank" in e.error and "rank 2" in e.error for e in first)


def test_a_flipped_bit_is_seen(members: Members) -> None:
    ended = members.run(training, 3, "flips", 1, 5, deadlines=SHORT)
    named(ended, 1)
    assert "was damaged on its way" in ended[0].error + ended[2].error


def test_a_rank_that_never_comes_is_named(members: Members) -> None:
    ended = members.run(training, 3, "dies", 2, 99, deadlines=replace(SHORT, join=0.5), absent=(2,))
    assert all(not e.hung and e.served < BOUND_S and re.search(r"\b2 never came", e.error) for e in ended[:2]), ended


def slow(world: World) -> int:
    """The first member takes far longer than the deadline, and says so."""
    group = world.group(WORLD)
    if world.rank == 0:
        with world.patient(20.0):
            time.sleep(1.5)
    collectives.barrier(group)
    return world.rank


def computing(world: World) -> int:
    """The same, but it gets on: an executor tells each launch."""
    if world.rank == 0:
        for _ in range(15):
            time.sleep(0.1)
            world.advance()
    collectives.barrier(world.group(WORLD))
    return world.rank


@pytest.mark.parametrize("function", [slow, computing])
def test_a_slow_rank_is_waited_for(members: Members, function: Callable[[World], int]) -> None:
    assert [e.result for e in members.run(function, 3, deadlines=SHORT)] == [0, 1, 2]


def test_the_recorder_outlives_its_rank() -> None:
    """A process that was handed the segment dies in its third collective; the others read what it did."""
    text = """
import os, sys
import numpy as np
from alpha.comm import collectives
from alpha.comm.segment import Segment
from alpha.comm.world import World
with World(Segment(int(sys.argv[1])), 1) as world:
    x = np.ones(10, np.float32)
    world.step, world.place.source = 5, "model.py:12"
    for i in range(3):
        if i == 2:
            send = world.group("world").transport.send
            world.group("world").transport.send = lambda *given, **kept: os.kill(os.getpid(), 9)
        collectives.all_reduce(world.group("world"), x, x)
"""
    segment = Segment.create(2)
    process = subprocess.Popen([sys.executable, "-c", text, str(segment.fd)], pass_fds=[segment.fd])
    try:
        with pytest.raises(RankError, match="rank 1 died") as caught, World(segment, 0, deadlines=Deadlines(join=30)) as world:
            x = np.ones(10, np.float32)
            for _ in range(3):
                collectives.all_reduce(world.group(WORLD), x, x)
        assert (caught.value.rank, caught.value.op) == (1, "all_reduce")
        records = segment.recorder(1).records()
        assert [(r.op, r.dtype, r.call, r.nbytes, r.step, r.source) for r in records] == [
            ("all_reduce", "f32", i, 40, 5, "model.py:12") for i in (1, 2, 3)]
        assert [bool(r.finished) for r in records] == [True, True, False]
        assert all(r.created <= r.started for r in records)
        (failure,) = segment.control.failures()
        assert (failure.teller, failure.rank, failure.op) == (0, 1, "all_reduce")
    finally:
        process.kill()
        process.wait(10)
        segment.close()


# -- messages ------------------------------------------------------------------------------------------------------------------------



@pytest.mark.parametrize("fault", FAULTS)
def test_no_message_is_delivered_wrong(fault: str) -> None:
    """10,000 faults in all; the seed is fixed, so that a failure can be had again."""
    link, rng = Link(), np.random.default_rng(FAULTS.index(fault))
    cases = 300 if fault == "dropped" else 1250  # a third of the dropped ones are waited for
    wrong = [w for w in (faulty(link, fault, rng) for _ in range(cases)) if w]
    assert not wrong, f"{len(wrong)} of {cases}: {wrong[:3]}"
    link.segment.close()


def test_faults_in_all() -> None:
    assert 300 + 1250 * (len(FAULTS) - 1) >= 10_000


def test_an_honest_link_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same harness without a fault sees none: it can pass."""
    link, rng = Link(), np.random.default_rng(1)
    assert {faulty(link, "none", rng) for _ in range(100)} == {"none: nobody saw it"}
    link.segment.close()


def test_nothing_has_a_name() -> None:
    """The segment is no file that anybody could find: not in /dev/shm, and gone with its processes."""
    with nothing_left():
        segment = Segment.create(4)
    assert "memfd:alpha-job" in os.readlink(f"/proc/self/fd/{segment.fd}") and "deleted" in os.readlink(f"/proc/self/fd/{segment.fd}")
    assert not Path(f"/dev/shm/alpha-{segment.job:x}").exists()
    segment.close()


def test_what_stays_behind_is_seen() -> None:
    """A file that a process leaves in /dev/shm is named; one that a living process holds is somebody's work."""
    with open(f"/dev/shm/alpha-test-{os.getpid()}", "xb") as file:
        try:
            with pytest.raises(AssertionError, match=f"{os.getpid()}-left"), nothing_left(0.0):
                os.link(file.name, f"{file.name}-left")
            with nothing_left(0.0):
                pass
        finally:
            os.unlink(f"{file.name}-left")
            os.unlink(file.name)


def test_a_soak_sees_its_own_names_alone() -> None:
    """What another process leaves in /dev/shm is not seen from within, what one of its own leaves there is; outside neither is left."""
    others, own = SHM / f"alpha-test-{os.getpid()}-others", SHM / f"alpha-test-{os.getpid()}-own"
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            if apart():
                code = 1
                with nothing_left(0.0):
                    subprocess.run(["nsenter", f"--mount=/proc/{os.getppid()}/ns/mnt", "touch", others], check=True)
                with pytest.raises(AssertionError, match=own.name), nothing_left(0.0):
                    subprocess.run(["touch", own], check=True)
                code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        assert code == (0 if os.geteuid() == 0 else 2) and not own.exists() and others.exists() == (code == 0)
    finally:
        others.unlink(missing_ok=True)
