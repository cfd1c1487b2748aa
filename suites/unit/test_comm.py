"""Parts of alpha/comm one by one: segment, control block, waits, flight recorder, rule, agreement, rendezvous."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alpha.comm import collectives, links, process, shm, streams, watch
from alpha.comm.agree import agree
from alpha.comm.clock import Clocks, align
from alpha.comm.control import Control, Failure, control_bytes
from alpha.comm.flight import RECORDS
from alpha.comm.message import HEADER, OPS, About, checksum, differences, header
from alpha.comm.process import LATE_NS, SAMPLE_NS, Served, process_state
from alpha.comm.rendezvous import _name, ask, offer
from alpha.comm.rule import COSTS, Rule
from alpha.comm.segment import CHANNELS, MOST_RANKS, PAYLOAD_BYTES, Segment, reserve
from alpha.comm.watch import Deadlines, Watch
from alpha.comm.world import WORLD, World
from alpha.errors import BusyError, GraphError, InputError, MachineError, RankError
from alpha.gates.contracts.ranks.collectives import CHOICES
from alpha.gates.contracts.ranks.members import in_threads
from alpha.train.ranks import Ranks

SHORT = Deadlines(stall=0.2)


# -- segment -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, MOST_RANKS + 1])
def test_a_job_has_some_ranks(size: int) -> None:
    with pytest.raises(InputError, match="another number of ranks"):
        Segment.create(size)


def test_a_segment_is_opened_from_its_descriptor_alone() -> None:
    made = Segment.create(3, epoch=4, payload_bytes=8192, slots=3)
    opened = Segment(os.dup(made.fd))
    assert (opened.size, opened.epoch, opened.payload_bytes, opened.slots, opened.job) == (3, 4, 8192, 3, made.job)
    assert Segment.create(3).job != made.job
    made.memory[-1] = 7
    assert opened.memory[-1] == 7
    with pytest.raises(InputError, match="no segment"):
        Segment(os.memfd_create("other"))


def test_rings_do_not_overlap() -> None:
    segment = Segment.create(3, payload_bytes=4096, slots=2)
    starts = sorted(segment.ring(c, a, b) for c in range(CHANNELS + 1) for a in range(3) for b in range(3))
    gaps = np.diff(starts)
    assert len(set(starts)) == len(starts) and gaps.min() >= 128 + 2 * (128 + 4096)
    assert starts[-1] + gaps.min() <= len(segment.memory)


def test_no_memory_is_said_before_it_is_written() -> None:
    read, write = os.pipe()
    with pytest.raises(MachineError, match="no memory for the ranks to share"):
        reserve(read, 0, 4096)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("payload, slots", [(100, 4), (4096, 1)])
def test_impossible_slots_are_refused(payload: int, slots: int) -> None:
    with pytest.raises(InputError):
        Segment.create(2, payload_bytes=payload, slots=slots)


def test_messages_of_many_ranks_are_shorter() -> None:
    """Up to eight ranks have whole messages, more have an eighth, so that rings of all pairs fit a machine."""
    assert [PAYLOAD_BYTES // Segment.create(n).payload_bytes for n in (2, 8, 9, 16)] == [1, 1, 8, 8]
    assert PAYLOAD_BYTES % 512 == 0


# -- messages ----------------------------------------------------------------------------------------------------------------------


def test_every_word_of_a_header_counts() -> None:
    about = About("broadcast", "f32", 5, 6, 7, "halving", "", 1)
    given = {"job": 1, "epoch": 2, "sender": 3, "sequence": 4, "chunk": 5, "nbytes": 6}
    head = header(about, **given)
    assert len(head) == HEADER.size and differences(head, head) == []
    changed = [header(about, **given | {name: value + 1}) for name, value in given.items()]
    changed += [header(About(*other), **given) for other in (
        ("reduce", "f32", 5, 6, 7, "halving", "", 1), ("broadcast", "f64", 5, 6, 7, "halving", "", 1),
        ("broadcast", "f32", 4, 6, 7, "halving", "", 1), ("broadcast", "f32", 5, 5, 7, "halving", "", 1),
        ("broadcast", "f32", 5, 6, 8, "halving", "", 1), ("broadcast", "f32", 5, 6, 7, "ring", "", 1),
        ("broadcast", "f32", 5, 6, 7, "halving", "sum", 1), ("broadcast", "f32", 5, 6, 7, "halving", "", -1))]
    assert len({head, *changed}) == len(changed) + 1
    assert all(len(differences(other, head)) == 1 for other in changed)
    payload = np.arange(64, dtype=np.uint8)
    assert len({checksum(h, payload) for h in (head, *changed)}) == len(changed) + 1
    assert checksum(head, payload) != checksum(head, payload[:-1]) and checksum(head, payload[:0]) == checksum(head, payload[:0].copy())


# -- control block and waits -------------------------------------------------------------------------------------------------------


def test_the_earliest_error_is_the_first() -> None:
    control: Control = Segment.create(3).control
    assert not control.failed() and control.failures() == []
    control.fail(Failure(2, 1, "all_reduce", 7, 200, "late"))
    control.fail(Failure(0, -1, "", -1, 100, "early, with a sign: \u00e9"))
    control.fail(Failure(0, 2, "barrier", 9, 50, "a second word of rank 0"))
    assert control.failed()
    assert control.failures() == [Failure(0, -1, "", -1, 100, "early, with a sign: \u00e9"), Failure(2, 1, "all_reduce", 7, 200, "late")]


def test_what_a_rank_says_is_what_others_read() -> None:
    """Where a rank is, with and without a step; no record reaches into the flags before them or into what lies before the block."""
    memory = mmap.mmap(-1, 4096 + control_bytes(3))
    control = Control(memory, 4096, 3)
    for rank, said in enumerate(((2, 3, 4, 5), (7, 1, 2, -1), (1, 1, 1, 0))):
        control.at(rank, *said)
        assert control.place(rank) == said
        control.serve(rank, 10**9, True)
    assert not control.failed() and not any(memory[:4096])
    served = watch._Elsewhere(control, 1).served()
    control.serve(1, 4 * 10**9, False)
    assert served.look() == 3 * 10**9


def test_a_long_error_is_cut() -> None:
    control = Segment.create(1).control
    control.fail(Failure(0, 0, "x" * 100, 0, 1, "\u00e9" * 5000))
    (found,) = control.failures()
    assert found.op == "x" * 64 and 100 < len(found.text) < 1000


def test_names_of_files_that_are_no_utf_8_are_told() -> None:
    """Python holds their bytes as lone surrogates, which no text may hold."""
    def body(world: World) -> None:
        ranks = Ranks(world)
        assert ranks.hear("runs/caf\udce9" if ranks.first else "") == "runs/caf\udce9"
        agree(world.group(WORLD), {"resume": "runs/caf\udce9"}, "rank {rank} differs", "")
        agree(world.group(WORLD), {"resume": f"runs/caf\udce9{world.rank}"}, "rank {rank} differs", "")

    for error in in_threads(2, body):
        assert isinstance(error, RankError) and "rank 1 differs" in str(error)


def test_the_first_error_of_a_world_reaches_all() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            raise ValueError("planted")
        collectives.barrier(world.group(WORLD))

    found = in_threads(3, body, deadlines=SHORT)
    assert isinstance(found[1], ValueError)
    for other in (found[0], found[2]):
        assert isinstance(other, RankError) and other.rank == 1 and "ValueError: planted" in str(other)


def test_who_told_why_it_leaves_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails and leaves between two looks of rank 0: after that for a failure, before that for who has left."""
    control, looks = Segment.create(2).control, [False]
    control.join(1, os.getpid())
    control.fail(Failure(1, 1, "barrier", 3, 1, "planted"))
    control.leave(1)
    monkeypatch.setattr(control, "failed", lambda: looks.pop() if looks else True)
    with pytest.raises(RankError, match="rank 0 stops: planted"):
        Watch(control, 0, SHORT).until(lambda: False, 1, "barrier")


def test_who_told_why_and_has_ended_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails and its process is gone before rank 0 first looks for it (ESRCH)."""
    control = Segment.create(2).control
    control.join(1, 2**22 + 1)
    control.fail(Failure(1, 1, "barrier", 3, 1, "planted"))
    monkeypatch.setattr(control, "failed", lambda heard=[True, False]: not heard.pop())
    with pytest.raises(RankError, match="rank 0 stops: planted"):
        Watch(control, 0, SHORT).join()


def test_time_without_a_processor_is_not_spent_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was held for longer than `join` gives nobody up."""
    control, looks = Segment.create(2).control, [0.0, 9e9]
    monkeypatch.setattr(watch, "Served", lambda pid: SimpleNamespace(look=lambda: looks.pop(0)))
    monkeypatch.setattr(time, "monotonic", lambda: pytest.fail("a clock on the wall"))
    with pytest.raises(RankError, match="rank 1 never came"):
        Watch(control, 0, Deadlines(join=5.0)).join()
    assert not looks


def test_a_rank_is_given_up_when_the_limit_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """In processor time of the rank that all wait for: here every look finds 0.1 s more of it, and 1 s is the limit. One look finds that it
    is over, and the next one says by how much."""
    control, looks = Segment.create(2).control, count(1)
    waiting = Watch(control, 0, Deadlines(stall=1.0))
    served = SimpleNamespace(ns=0)
    served.look = lambda: setattr(served, "ns", 10**8 * next(looks)) or served.ns
    waiting._seen[1] = SimpleNamespace(served=lambda: served, doing=lambda: "running")  # type: ignore[assignment]
    with pytest.raises(RankError, match=r"progress within 1\.2 s"):
        waiting.until(lambda: False, 1, "barrier")


def test_the_end_of_a_process_is_seen_at_once() -> None:
    """Long before it would be given up, and whoever its parent is."""
    segment = Segment.create(2)
    pid = os.fork()
    if pid == 0:
        segment.control.join(1, os.getpid())
        time.sleep(0.5)
        os._exit(0)
    waiting = Watch(segment.control, 0, Deadlines(stall=600.0))
    waiting.join()
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 died"):
        waiting.until(lambda: time.monotonic() > began + 60, 1, "barrier")
    os.waitpid(pid, 0)
    waiting.close()


def test_who_is_stopped_is_not_waited_for() -> None:
    """Whatever it asked for before, on this host; of a rank elsewhere its host says so."""
    segment = Segment.create(2)
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    try:
        segment.control.join(1, pid)
        segment.control.be_patient(1, time.monotonic_ns() + 600 * 10**9)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 is stopped"):
            Watch(segment.control, 0, SHORT).until(lambda: time.monotonic() > began + 60, 1, "barrier")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    elsewhere = Segment.create(2, here=range(1)).control
    assert not Watch(elsewhere, 0, SHORT)._frozen(1)
    elsewhere.serve(1, 1, True)
    assert Watch(elsewhere, 0, SHORT)._frozen(1)


def test_patience_within_patience_ends_with_the_outer_one() -> None:
    """A save that opens its folder asks for it within what it asked for as a whole: behind the folder comes the disk."""
    with World(Segment.create(1), 0) as world:
        said = []
        for outer, inner in ((60.0, 600.0), (600.0, 60.0)):
            with world.patient(outer):
                whole = world._control.patience(0)
                with world.patient(inner):
                    said.append(world._control.patience(0) - whole)
                assert world._control.patience(0) == whole
            assert world._control.patience(0) == 0
        assert said[0] > 0 and said[1] == 0, "the longer one holds"


def test_a_circle_of_waits_is_called_one() -> None:
    def body(world: World) -> None:
        collectives.receive(world.group(WORLD), np.empty(3, np.float32), source=(world.rank + 1) % world.size)

    found = in_threads(3, body, deadlines=SHORT)
    assert all(isinstance(f, RankError) for f in found), found
    assert any("ranks wait for each other in send" in str(f) and "waits for rank" in str(f) for f in found)


def test_who_holds_up_a_chain_is_named() -> None:
    """0 waits for 1, which waits for 2, which does something else. 0 is the first to give up."""
    def body(world: World) -> None:
        if world.rank == 1:
            world._watch.deadlines = Deadlines(stall=10.0)
        if world.rank == 2:
            time.sleep(1.5)
            return
        collectives.receive(world.group(WORLD), np.empty(3, np.float32), source=world.rank + 1)

    for found in in_threads(3, body, deadlines=SHORT)[:2]:
        assert isinstance(found, RankError) and found.rank == 2 and found.op == "send", found


def test_a_rank_has_one_process() -> None:
    segment = Segment.create(1)
    with World(segment, 0), pytest.raises(InputError, match="this rank is taken"):
        World(segment, 0)
    with pytest.raises(InputError, match="no such rank"):
        World(segment, 1)


def test_a_rank_knows_its_place_and_its_groups() -> None:
    with World(Segment.create(1), 0) as alone, World(Segment.create(1), 0, local_rank=5, device="cuda:5") as placed:
        assert (alone.local_rank, alone.device) == (0, "cpu") and (placed.local_rank, placed.device) == (5, "cuda:5")
        alone.add_groups({WORLD: [(0,)], "dp": [(0,)]})
        assert alone.group("dp").members == (0,)


def test_two_threads_in_one_group_are_refused() -> None:
    def body(world: World) -> str:
        group = world.group(WORLD)
        if world.rank:
            refused.wait(60)
            collectives.barrier(group)
            return ""
        other = threading.Thread(target=collectives.barrier, args=(group,))
        other.start()
        while other.is_alive() and not group._busy.locked():
            time.sleep(0.01)
        try:
            collectives.barrier(group)
            return "went through"
        except GraphError as error:
            return str(error)
        finally:
            refused.set()
            other.join()

    refused = threading.Event()
    assert "two threads" in in_threads(2, body)[0]


def test_too_many_groups_are_refused() -> None:
    def body(world: World) -> None:
        for i in range(CHANNELS):
            world.add_group(f"g{i}", [(0,)])
        with pytest.raises(GraphError, match="too many groups"):
            world.add_group("one more", [(0,)])
        with pytest.raises(GraphError, match="one meaning"):
            world.add_group("g0", [(0,)])

    assert in_threads(1, body) == [None]


def test_groups_of_other_members_do_not_understand_each_other() -> None:
    """The ranks part the world in different ways, under one name: the first message says so."""
    def body(world: World) -> None:
        tuples = [(0, 1), (2, 3)] if world.rank < 2 else [(0, 1), (3, 2)]
        group = world.add_group("dp", tuples if world.rank != 1 else [(1, 0), (2, 3)])
        collectives.barrier(group)

    found = in_threads(4, body, deadlines=SHORT)
    assert any(isinstance(f, RankError) and "group" in str(f) for f in found)


def test_states_of_processes_have_names() -> None:
    assert process_state(os.getpid()) in ("running", "sleeping") and process_state(2**22 + 1) == "gone"


def test_time_without_a_processor_does_not_count() -> None:
    """A process that others keep from its core, for seconds at a time, beside one that sleeps."""
    core = min(os.sched_getaffinity(0))
    text = f"import os; os.sched_setaffinity(0, [{core}]); {{}}; print(flush=True)\nwhile True: pass"
    low = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    codes = ["import time; print(flush=True); time.sleep(600)", text.format(low), text.format("pass"), text.format("pass")]
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in codes]
    try:
        for p in started:
            assert p.stdout is not None
            assert p.stdout.readline() == b"\n"
        sleeps, kept = Served(started[0].pid), Served(started[1].pid)
        while sleeps.look() < 2e9:
            kept.look()
            time.sleep(0.02)
        assert kept.ns < 1e9, kept.ns
    finally:
        for p in started:
            p.kill()
            p.communicate()
    assert Served(started[0].pid).look() == 0


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads cannot be listed any more (ESRCH): its clock goes on, no error hides what it died of."""
    served = Served(os.getpid())

    def gone(path: str) -> list[str]:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), path)

    monkeypatch.setattr("os.listdir", gone)
    while served.look() == 0:
        time.sleep(SAMPLE_NS / 1e9)


def test_what_counts_as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that runs, sleeps, waits and runs again, while another one sleeps; then looks that come late."""
    now, letter, threads = SAMPLE_NS, "S", {Path("1"): (0, 0), Path("2"): (5, 5)}
    monkeypatch.setattr(process, "_threads", lambda pid: dict(threads))
    monkeypatch.setattr(process, "_letter", lambda path: letter if path == Path("1") else "S")
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    served, seen = Served(1), [0]

    def after(passed: int, ran: int, waited: int, state: str) -> int:
        nonlocal now, letter
        now, letter = now + passed, state
        threads[Path("1")] = (threads[Path("1")][0] + ran, threads[Path("1")][1] + waited)
        seen.append(served.look())
        return seen[-1] - seen[-2]

    tenth = SAMPLE_NS // 10
    assert after(SAMPLE_NS, 0, 0, "S") == SAMPLE_NS  # it sleeps
    assert after(SAMPLE_NS, SAMPLE_NS, 0, "R") == SAMPLE_NS  # it runs
    assert after(SAMPLE_NS, tenth, 4 * tenth, "R") == 6 * tenth  # it waited some of the time
    assert [after(SAMPLE_NS, 0, 0, "R") for _ in range(5)] == [0] * 5  # it waits, and its count stands still
    assert after(SAMPLE_NS, tenth, 59 * tenth, "R") == tenth  # now it counts all that, and nine tenths of this time
    assert after(tenth, 0, 0, "S") == 0 and after(9 * tenth, 0, 0, "S") == SAMPLE_NS  # a look that comes early
    lost = served.lost
    assert after(6 * 10**9, 0, 0, "T") == LATE_NS and served.lost - lost == 6 * 10**9 - LATE_NS  # a machine that was held for six seconds


def test_a_machine_of_weak_order_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same transport where stores may pass each other, as on Arm."""
    fences: list[int] = []
    monkeypatch.setattr(shm, "_STORES_IN_ORDER", False)
    monkeypatch.setattr(shm, "_fence", lambda: fences.append(1))

    def body(world: World) -> float:
        x = np.full(5, world.rank + 1.0)
        collectives.all_reduce(world.group(WORLD), x, x, algorithm="whole")
        return float(x[0])

    assert in_threads(2, body) == [3.0, 3.0] and len(fences) == 2 * 4  # a send and a receive: a wait and a counter each


# -- recorder ----------------------------------------------------------------------------------------------------------------------


def test_the_recorder_keeps_the_last_ones() -> None:
    recorder = Segment.create(1).recorder(0)
    for i in range(RECORDS + 5):
        at = recorder.create(9, i, OPS[i % len(OPS)], "f32", 4 * i, i - 1, f"{'long/' * 30}model.py:{i}")
        recorder.start(at)
        if i % 2:
            recorder.finish(at)
    found = recorder.records()
    assert [r.call for r in found] == list(range(5, RECORDS + 5))
    assert all(r.op == OPS[r.call % len(OPS)] and r.nbytes == 4 * r.call and r.step == r.call - 1 for r in found)
    assert all(r.source.endswith(f"model.py:{r.call}") and bool(r.finished) == bool(r.call % 2) for r in found)
    assert all(0 < r.created <= r.started and (not r.finished or r.started <= r.finished) for r in found)


# -- between hosts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "late"), [(2, 1), (3, 1), (4, 2), (8, 4)])
def test_releases_are_told_when_half_of_the_slots_are_free(slots: int, late: int) -> None:
    """Not before, for the next message the other way may tell them; and not later, for then the sender waits for each whole way."""
    told: list[int] = []

    class Told(streams.Lane):
        def tell(self) -> None:
            told.append(self.back.released[0])
            self.back.told = self.back.released[0]

        def carry(self) -> bool:
            return True

    back: Any = SimpleNamespace(released=[0], told=0, slots=[b""] * slots)
    all_: Any = SimpleNamespace(lock=threading.RLock())
    lane = Told(all_, SimpleNamespace(), 0, SimpleNamespace(), back)  # type: ignore[arg-type]
    for released in range(1, 3 * late + 1):
        back.released[0] = released
        lane.credit()
    assert told == [late, 2 * late, 3 * late]


# -- rule --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(COSTS))
@pytest.mark.parametrize("members", [2, 3, 4, 8, 64])
def test_the_rule_takes_the_cheapest(op: str, members: int) -> None:
    rule = Rule(20e-6, 3e-10, 2e-11)
    for nbytes in (0, 1, 1 << 12, 1 << 18, 1 << 26):
        chosen, costs = rule.choose(op, members, nbytes), {n: f(members, nbytes, rule) for n, f in COSTS[op].items()}
        assert costs[chosen] <= min(costs.values())
    limits = rule.limits(op, members)
    assert limits[0][0] == 0 and [n for n, _ in limits] == sorted({n for n, _ in limits})


@pytest.mark.parametrize("rule, op, members, sizes", CHOICES)
def test_measurements_and_what_the_rule_makes_of_them(rule: Rule, op: str, members: int, sizes: dict[int, str]) -> None:
    assert {n: rule.choose(op, members, n, rule.together(range(members))) for n in sizes} == sizes


@pytest.mark.parametrize("hosts, members, together", [
    ((), (0, 1, 2), 3), ((0, 0, 0), (0, 1, 2), 3), ((0, 0, 2, 2), (0, 1, 2, 3), 2), ((0, 0, 2, 2), (2, 3), 2), ((0, 0, 2, 2), (0, 2), 1),
    ((0, 0, 2, 2), (0, 2, 1, 3), 1), ((0, 0, 2), (0, 1, 2), 1), ((0, 0, 0, 3, 3, 3), range(6), 1), ((0, 0, 2, 2, 4, 4), range(6), 2),
    ((0, 0, 0, 0, 4, 4, 4, 4), range(8), 4), ((0, 0, 2, 2), (3, 2, 1, 0), 2),
])
def test_members_are_together_where_their_sums_are_subtrees(hosts: tuple[int, ...], members: Sequence[int], together: int) -> None:
    assert Rule(hosts=hosts).together(members) == together


def test_every_size_at_which_the_choice_changes_is_recorded() -> None:
    """From nothing to 2^30 bytes, the first byte too."""
    free = Rule(latency=0.0)
    assert free.limits("broadcast", 4) == [(0, "direct"), (1, "halving")]
    for op in COSTS:
        chosen = [(n, Rule().choose(op, 4, n)) for n in (0, *(2**k for k in range(31)))]
        assert Rule().limits(op, 4) == [x for x, before in zip(chosen, [(0, ""), *chosen]) if x[1] != before[1]]


@pytest.mark.parametrize(("op", "taken", "given", "more"), [
    ("all_reduce", 8, 8, {}), ("reduce_scatter", 8, 2, {}), ("all_gather", 2, 8, {}), ("broadcast", 8, 8, {"root": 0})])
def test_the_rule_is_asked_about_the_operand_and_about_who_is_together(op: str, taken: int, given: int, more: dict[str, int]) -> None:
    """So what runs is what the text of the rule says for so many bytes, over several hosts too."""
    asked: list[tuple[object, ...]] = []

    class Asked(Exception):
        pass

    def choose(*words: object) -> str:
        asked.append(words)
        raise Asked

    group = SimpleNamespace(size=4, index=1, together=2, rule=SimpleNamespace(choose=choose))
    with pytest.raises(Asked):
        getattr(collectives, op)(group, np.zeros(taken, np.float32), np.zeros(given, np.float32), **more)
    assert asked == [(op, 4, 4 * taken, 2)]


def test_latency_and_bandwidth_decide() -> None:
    assert Rule(1e-3, 1e-12).choose("all_reduce", 8, 1 << 16) == "halving"  # six messages in place of seven
    assert Rule(1e-6, 1e-9).choose("all_reduce", 8, 1 << 26) in ("direct", "halving")
    assert Rule(1e-3, 1e-12).choose("all_reduce", 2, 1 << 10) == "whole"
    assert Rule(1e-6, 1e-9, 0.0).choose("all_reduce", 2, 1 << 18) == "whole"  # additions of half the operand are worth a message more
    assert Rule(1e-6, 1e-9, 0.0, 1 << 28).choose("all_reduce", 2, 1 << 26) == "whole"
    assert [Rule(message=100).messages(n) for n in (0, 1, 100, 100.5, 250)] == [1, 1, 1, 2, 3]
    assert Rule(1e-6, 1e-9, 1e-10).limits("all_reduce", 2) == [(0, "whole"), (1 << 15, "direct")]


def test_a_ring_is_as_slow_as_its_slowest_way() -> None:
    """Be that inside a host or between two, by bytes or by messages: of eight members on two hosts all others are better off there."""
    hosts = (0,) * 4 + (4,) * 4
    for far, near in ((1e-9, 1e-8), (1e-8, 1e-9)):
        assert Rule(0.0, far, hosts=hosts, near_inverse_bandwidth=near).choose("all_gather", 8, 1 << 26, 4) != "ring"
    for far, near in ((1e-6, 1e-3), (1e-3, 1e-6)):
        assert Rule(far, 0.0, hosts=hosts, near_latency=near).choose("all_gather", 8, 1 << 10, 4) != "ring"
    assert "all_reduce whole, from 32,768 bytes direct; " in Rule(1e-6, 1e-9, 1e-10).text(2)
    assert Rule().choose("all_reduce", 1, 1 << 26) == Rule().choose("barrier", 8, 0) == "direct"


# -- agreement ---------------------------------------------------------------------------------------------------------------------


def agreeing(odd: int | None) -> Callable[[World], None]:
    def body(world: World) -> None:
        facts = {"version": "1", "commit": "c" * 500, "seed": "8" if world.rank == odd else "7"}
        agree(world.group(WORLD), facts, "rank {rank} was started otherwise", "start all ranks from one state")

    return body


def test_equal_facts_agree() -> None:
    assert in_threads(3, agreeing(None)) == [None] * 3


@pytest.mark.parametrize("odd, named", [(0, 0), (2, 2)])
def test_the_odd_one_is_named(odd: int, named: int) -> None:
    for error in in_threads(3, agreeing(odd)):
        assert isinstance(error, RankError) and error.rank == named
        assert f"rank {named} was started otherwise" in str(error) and "seed of rank" in str(error) and ": 8" in str(error)


def test_as_much_of_a_value_is_shown_as_fits() -> None:
    def body(world: World) -> None:
        agree(world.group(WORLD), {"text": "ab"[world.rank] * 250}, "rank {rank} differs", "start alike")

    for error in in_threads(2, body):
        assert isinstance(error, RankError)
        assert str(error.came).endswith(": " + "b" * 200) and str(error.expected).endswith(": " + "a" * 200)


def test_of_two_the_second_is_the_odd_one() -> None:
    assert [e.rank for e in in_threads(2, agreeing(0))] == [1, 1]


def test_every_pair_of_links_is_timed_once() -> None:
    """All ranks have one table, both ways alike; nothing is timed with itself."""
    found = in_threads(3, links.measure, deadlines=Deadlines(stall=1.0))
    assert all(isinstance(f, links.Links) for f in found), found
    for table in ("latency", "inverse_bandwidth"):
        (first, *others) = (getattr(f, table) for f in found)
        assert all(np.array_equal(first, other) for other in others)
        assert np.array_equal(first, first.T) and ((first > 0) == ~np.eye(3, dtype=bool)).all()


# -- rendezvous --------------------------------------------------------------------------------------------------------------------


def test_ranks_of_another_launcher_meet() -> None:
    segment, found = Segment.create(3), dict[int, Segment]()
    threads = [threading.Thread(target=lambda r=rank: found.update({r: ask("meet", r, 5.0)})) for rank in (1, 2)]
    for t in threads:
        t.start()
    offer(segment, "meet", 5.0)
    for t in threads:
        t.join()
    assert {r: s.job for r, s in found.items()} == {1: segment.job, 2: segment.job}
    with pytest.raises(RankError, match="rank 0 never came"):  # nothing is left of the name
        ask("meet", 1, 0.05)


def test_a_rank_that_never_asks_is_named() -> None:
    with pytest.raises(RankError, match="ranks never came: 1, 2"):
        offer(Segment.create(3), "alone", 0.1)


def test_who_asks_and_says_nothing_holds_up_nobody() -> None:
    segment = Segment.create(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent, ThreadPoolExecutor(2) as pool:
        offering = pool.submit(offer, segment, "silence", 30.0)
        while silent.connect_ex(_name("silence")):
            time.sleep(0.01)
        asking = pool.submit(ask, "silence", 1, 30.0)
        try:
            assert asking.result(20).job == segment.job and offering.result(20) is None
        finally:
            silent.close()


def test_another_user_gets_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpha.comm.rendezvous.os.getuid", lambda: os.geteuid() + 1)  # who offers is another one than who asks
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, "others", 1, 0.2)
        with pytest.raises(RankError, match="ranks never came: 1"):
            offer(Segment.create(2), "others", 0.2)
        with pytest.raises(RankError, match="rank 0 never came"):
            asking.result()


def test_a_rank_that_is_not_in_the_job_is_told() -> None:
    said: list[Exception] = []

    def stranger() -> None:
        try:
            ask("strangers", 5, 5.0)
        except InputError as error:
            said.append(error)
        ask("strangers", 1, 5.0)

    thread = threading.Thread(target=stranger)
    thread.start()
    offer(Segment.create(2), "strangers", 5.0)
    thread.join()
    assert len(said) == 1 and "no place for this rank" in str(said[0])


def test_two_jobs_under_one_name_are_refused() -> None:
    """The first is not disturbed: its second rank comes later."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(offer, Segment.create(3), "twice", 60.0)
        ask("twice", 1, 60.0)
        with pytest.raises(BusyError, match="another job"):
            offer(Segment.create(3), "twice", 1.0)
        ask("twice", 2, 60.0)
        first.result(60)


# -- clocks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ns", [0, 3_000_000_000, -7_000_000_000])
def test_clocks_are_compared_and_one_that_stands_elsewhere_is_seen(ahead_ns: int) -> None:
    """Rank 1 of three reads another clock: as a process in a time namespace of its own does."""
    def body(world: World) -> tuple[Clocks, int]:
        found = align(world.group(WORLD), lambda: time.perf_counter_ns() + (ahead_ns if world.rank == 1 else 0))
        return found, found.moment - (ahead_ns if world.rank == 1 else 0)

    found = in_threads(3, body)
    clocks, moments = [f[0] for f in found], [f[1] for f in found]
    assert all((c.offset == clocks[0].offset).all() and (c.within == clocks[0].within).all() for c in clocks)
    first = clocks[0]
    assert first.offset[0] == first.within[0] == 0 and (first.within[1:] > 0).all() and first.within.max() < 1_000_000_000
    assert list(first.shared) == [True, ahead_ns == 0, True]
    assert abs(first.offset[1] - ahead_ns) <= first.within[1]
    assert moments[0] == moments[2] and abs(moments[1] - moments[0]) <= first.within[1]
    assert ("rank 1 by" if ahead_ns else "one clock") in first.text()


def test_what_a_recorder_and_a_flight_recorder_read_is_one_clock() -> None:
    """`perf_counter_ns` stamps launches, `monotonic_ns` stamps collectives: both are laid side by side only if they are the same."""
    low, middle, high = time.perf_counter_ns(), time.monotonic_ns(), time.perf_counter_ns()
    assert low <= middle <= high
