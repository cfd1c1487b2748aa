"""Cases of how ranks come into a job and are watched there: who is refused, who died before all had come, groups, and waits for a device.
Floor 7.

All in this process, over a segment of its own: processes that ended are children whose numbers are still or no longer taken.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np

from alpha.comm import collectives, process
from alpha.comm import watch as watching
from alpha.comm import world as worlds
from alpha.comm.control import Failure
from alpha.comm.segment import Segment
from alpha.comm.streams import Streams
from alpha.comm.watch import LONGEST_S, Deadlines, Watch
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import AlphaError, GraphError, InputError, MachineError, RankError
from alpha.gates.contracts.edges import told
from alpha.gates.contracts.ranks.members import in_threads
from alpha.gates.contracts.ranks.memory import measured, refused


@contextmanager
def ended(reaped: bool) -> Iterator[int]:
    """The number of a process that has ended: `reaped`, so that nobody has it now, or still kept by its parent."""
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    if reaped:
        gone.wait()
    else:
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    try:
        yield gone.pid
    finally:
        gone.wait()


@contextmanager
def _watched(size: int, *there: int, **deadlines: float) -> Iterator[tuple[Segment, Watch]]:
    """A job of `size` ranks as rank 0 watches it; `there`: who has joined, as processes that live."""
    segment = Segment.create(size)
    for rank in (0, *there):
        segment.control.join(rank, os.getpid())
    watch = Watch(segment.control, 0, Deadlines(**deadlines))
    try:
        yield segment, watch
    finally:
        with suppress(OSError):
            watch.close()
        segment.close()


def _said(call: Callable[[], object]) -> tuple[type[AlphaError] | None, str]:
    """What a call ends in."""
    try:
        call()
    except AlphaError as error:
        return type(error), str(error)
    return None, ""


def absent(rng: np.random.Generator) -> Measured:
    """While ranks are waited for: who dies before all are there is named at once, and not who is late; of those that never come all are
    named, one as one and several as several; a system that lets nobody watch is told from a rank that died."""
    wrong, size = list[str](), int(rng.integers(3, 6))
    victim = int(rng.integers(1, size - 1))  # the last one never comes
    with _watched(size, join=60.0) as (segment, watch), ended(reaped=False) as pid:
        for rank in range(1, size - 1):
            segment.control.join(rank, pid if rank == victim else os.getpid())
        kind, text = _said(watch.join)
        wrong += [] if kind is RankError and text.startswith(f"rank {victim} died") else [f"of {victim}, which died: {text}"]
        wrong += [] if [f.rank for f in segment.control.failures()] == [victim] else ["others are told otherwise"]
    for missing, names in ((1, f"rank {size - 1} never came"), (2, f"ranks {size - 2}, {size - 1} never came")):
        with _watched(size, *range(1, size - missing), join=0.03) as (segment, watch):
            kind, text = _said(watch.join)
            said = f"{size - missing} ranks within 0.03 s"
            wrong += [] if kind is RankError and text.startswith(names) and said in text else [f"{missing} missing: {text}"]
    with _watched(3, 1, join=60.0) as (segment, watch):
        segment.control.fail(Failure(1, 1, "send", 0, 0, "it told why"))
        kind, text = _said(watch.join)
        wrong += [] if kind is RankError and text.startswith("rank 0 stops: it told why") else [f"one failed before all had come: {text}"]
    with _watched(2, 1) as (segment, watch), refused(os, "pidfd_open", errno.ENOSYS):
        kind, text = _said(watch.join)
        wrong += [] if kind is MachineError and "pidfd_open: Function not implemented" in text else [f"no pidfd_open: {text}"]
        wrong += ["a rank is named where the system is at fault"] if segment.control.failed() else []
    return measured(wrong, 7)


def no_bridge(rng: np.random.Generator) -> Measured:
    """The bridge of a host that died is named, by the rank that sees it first, to all: before it is watched and while something is waited
    for. Where a rank had told why before, that is said."""
    wrong, op = list[str](), ("all_reduce", "barrier")[int(rng.integers(2))]
    for reaped in (True, False):
        for failed in (False, True):
            with _watched(2, 1) as (segment, watch), ended(reaped) as pid:
                if failed and not reaped:
                    watch.watch_bridge(pid)
                    kind, text = _said(lambda: watch.until(_late(segment, 2, tells=True), 1, op))
                    words = "rank 0 stops: it told why"
                else:
                    kind, text = _said(partial(_watch_and_wait, watch, pid, op))
                    words = "the bridge of this host died"
                wrong += [] if kind is RankError and text.startswith(words) else [f"reaped {reaped}, failed {failed}: {text}"]
                named = [(f.rank, f.op) for f in segment.control.failures()]
                wanted = [(1, "send")] if failed and not reaped else [(0, "" if reaped else op)]
                wrong += [] if named == wanted else [f"reaped {reaped}, failed {failed}: told of {named}"]
    return measured(wrong, 8)


def last_words(rng: np.random.Generator) -> Measured:
    """A rank whose end is seen while something is waited for: it died, or it told why before, which is said then; where it had left nothing
    is wrong with its end, but with the wait for it. What came meanwhile is taken, whoever has ended."""
    wrong, op = list[str](), ("all_reduce", "barrier")[int(rng.integers(2))]
    outcomes = {"died": "rank 1 died", "told": "rank 0 stops: it told why", "left": f"rank 1 has left while rank 0 waits for it in {op}",
                "left and told": "rank 0 stops: it told why", "came": "", "left, but came": ""}
    for what, said in outcomes.items():
        with ended(reaped=False) as pid, _watched(2) as (segment, watch):
            segment.control.join(1, pid)
            watch._watch(1)
            if "left" in what:
                segment.control.leave(1)
            asked = {"told": 2, "left and told": 3, "came": 2, "left, but came": 3}.get(what, 0)
            _, text = _said(partial(watch.until, _late(segment, asked, tells="told" in what), 1, op))
            wrong += [] if text.startswith(said) and bool(text) == bool(said) else [f"{what}: {text!r}"]
            wrong += [] if segment.control.failed() == bool(said) else [f"{what}: others are told otherwise"]
    with _watched(2, 1) as (segment, watch):
        for asks in (1, 2, 3):
            count = [0]

            def ready(count: list[int] = count, asks: int = asks) -> bool:
                count[0] += 1
                return count[0] >= asks

            with mock.patch.object(watching.time, "monotonic_ns", lambda: 5):  # no time goes by
                found = watch._spin(ready)
            wrong += [] if found and count[0] == asks else [f"ready at {asks}, asked {count[0]} times"]
    return measured(wrong, 2 * len(outcomes) + 3)


def threads(rng: np.random.Generator) -> Measured:
    """Threads of a process that end while they are looked at are left out, and so are all where the kernel does not tell of them; of a
    process that has ended there are none."""
    wrong, listed = list[str](), os.listdir
    more = [str((1 << 22) + int(n)) for n in rng.integers(1, 1 << 20, 3)]  # numbers that no thread has
    before = {*listed("/proc/self/task")}  # others of this process may begin or end meanwhile
    with mock.patch.object(process.os, "listdir", lambda path: [*listed(path), *more]):
        found = {path.name for path in process._threads(os.getpid())}
    after = {*listed("/proc/self/task")}
    good = before & after <= found and found.isdisjoint(more)
    wrong += [] if good else [f"threads {sorted(found)} of {sorted(before)}, then {sorted(after)}"]
    with ended(reaped=True) as gone:
        wrong += [] if process._threads(gone) == {} else ["a process that has ended has threads"]
        clock = process.Served(gone)
        clock._then -= 10**9
        wrong += [] if 0 < clock.look() <= process.LATE_NS else [f"a late look counts for {clock.ns} ns"]
    return measured(wrong, 3)


def served(rng: np.random.Generator) -> Measured:
    """The time of a process is that of the thread that was served least. One that begins while others run takes nothing of what was counted
    before; while one waits for a processor it stands; what that one lacks goes with it when it ends. Each look comes late, so it counts
    for LATE_NS."""
    wrong, cases = list[str](), 0
    for _ in range(20):
        threads, letters = {Path("a"): (1, 0)}, dict[Path, str]()
        alone, both, waits, runs, after = (int(n) for n in rng.integers(1, 6, 5))
        with mock.patch.object(process, "_threads", lambda pid, threads=threads: dict(threads)), \
             mock.patch.object(process, "_letter", lambda folder, letters=letters: letters.get(folder, "S")):
            clock, found = process.Served(os.getpid()), list[float]()

            def look(times: int, clock: process.Served = clock, found: list[float] = found) -> None:
                for _ in range(times):
                    clock._then -= 10**9
                    found.append(clock.look() / process.LATE_NS)

            look(alone)
            threads[Path("b")] = (1, 0)
            look(both)
            letters[Path("b")] = "R"
            look(waits)
            for ran in range(runs):  # what it waited for before it ran was counted as it waited
                threads[Path("b")] = (2 + ran, 0)
                look(1)
            del threads[Path("b")]
            look(after)
        before, all_ = alone + both, alone + both + waits + runs
        wanted = [*range(1, before + 1), *[before] * waits, *range(before + 1, before + runs + 1), *range(all_ + 1, all_ + after + 1)]
        wrong += [] if found == wanted else [f"{found} for {wanted}"]
        cases += len(wanted)
    return measured(wrong, cases)


def _late(segment: Segment, asked: int, *, tells: bool) -> Callable[[], bool]:
    """What is ready, or else told, when a wait that looks at others asks for that time; 0: never."""
    count = [0]

    def ready() -> bool:
        count[0] += segment.control.waits_for(0) is not None
        if tells and count[0] == asked:
            segment.control.fail(Failure(1, 1, "send", 0, 0, "it told why"))
        return not tells and 0 < asked <= count[0]

    return ready


def _watch_and_wait(watch: Watch, pid: int, op: str) -> None:
    """Watch a bridge, and wait for what is never ready."""
    watch.watch_bridge(pid)
    watch.until(lambda: False, 1, op)


def seats(rng: np.random.Generator) -> Measured:
    """Who has no seat in a job is refused, and it goes on without: a number that it has not, and one that somebody has. All see which step
    a rank is in."""
    size = int(rng.integers(2, 5))
    segment = Segment.create(size)
    for rank in range(1, size):
        segment.control.join(rank, os.getpid())
    result = told(("a rank too many", lambda: World(segment, size), InputError, ("no such rank", f"came:     {size}", f"0 to {size - 1}")),
                  ("a rank too few", lambda: World(segment, -1), InputError, ("no such rank", "came:     -1", f"0 to {size - 1}")))
    wrong = [result.note] if result.error else []
    threads = threading.active_count()
    with World(segment, 0) as world:
        result = told(("a seat that is taken", lambda: World(segment, 0), InputError, ("taken", f"rank 0, process {os.getpid()}", "RANK")))
        wrong += [result.note] if result.error else []
        wrong += [] if world._watch.deadlines == Deadlines() else [f"who is told of no deadlines has {world._watch.deadlines}"]
        wrong += [] if threading.active_count() == threads + 1 else ["who was refused left a heartbeat"]
        wrong += [] if world.broken == 0 and world.flights.written == 0 else ["a world begins with what is broken or was called"]
        step = int(rng.integers(1, 1000))
        steps = [world.step, segment.control.step(0)]
        world.step = step
        steps += [world.step, segment.control.step(0), segment.control.step(1)]
        wrong += [] if steps == [-1, -1, step, step, -1] else [f"before, in and beside step {step}: {steps}"]
        world.place.source = "gpt.py:3"
        collectives.barrier(world.add_group("alone", [[rank] for rank in range(size)]))
        mine, there = world.flights.records(), segment.recorder(0).records()
        called = [(r.op, r.source, r.step) for r in mine]
        wrong += [] if mine == there and called == [("barrier", "gpt.py:3", step)] else [f"flights: {mine}"]
    segment.close()
    return measured(wrong, 7)


class _Settled:
    """Connections of a rank that count how often they were looked after."""

    def __init__(self) -> None:
        self.often = 0

    def settle(self) -> None:
        """Once more."""
        self.often += 1


def heartbeats(rng: np.random.Generator) -> Measured:
    """A rank that computes is seen to live, for as long as it does, and its connections are looked after, where it has some."""
    segment, wrong, often = Segment.create(2), list[str](), int(rng.integers(2, 6))
    segment.control.join(1, os.getpid())
    with mock.patch.object(worlds, "_BEAT_S", 1e-3), World(segment, 0) as world:
        beats, clock, settled = set[int](), process.Served(os.getpid()), _Settled()
        while len(beats) < often and clock.look() < 10e9:
            beats.add(segment.control.heartbeat(0))
            time.sleep(1e-3)
        wrong += [] if len(beats) == often else [f"{len(beats)} beats of a rank without connections"]
        world._streams = cast(Streams, settled)
        while settled.often < often and clock.look() < 20e9:
            time.sleep(1e-3)
        world._streams = None
        wrong += [] if settled.often >= often else [f"connections were looked after {settled.often} times"]
    segment.close()
    return measured(wrong, 2)


def groups(rng: np.random.Generator) -> Measured:
    """A name has one meaning; a group parts all ranks; those of a Program are added in the order of their names, the world once; two
    threads are not in one group at a time, and whoever is refused hurts no other call. Of what is expected the bytes are handed on."""
    segment, wrong = Segment.create(1), list[str]()
    with World(segment, 0) as world:
        result = told(
            ("a name twice", lambda: world.add_group(WORLD, [[0]]), GraphError, ("one meaning", "came:     world", "a new name")),
            ("a rank twice", lambda: world.add_group("x", [[0], [0]]), GraphError, ("group x parts", "[[0], [0]]", "each of 0 to 0 once")),
            ("a rank of nobody", lambda: world.add_group("x", [[0, 1]]), GraphError, ("group x parts", "[[0, 1]]", "each of 0 to 0 once")),
            ("nobody", lambda: world.add_group("x", []), GraphError, ("group x parts", "[]", "each of 0 to 0 once")))
        wrong += [result.note] if result.error else []
        drawn = rng.permutation(3)
        names = [f"g{int(i)}" for i in (drawn[::-1] if (np.diff(drawn) > 0).all() else drawn)]  # not in the order of their names
        world.add_groups({name: [[0]] for name in (names[0], WORLD, *names[1:])})
        wrong += [] if list(world._groups) == [WORLD, *sorted(names)] else [f"groups in order {list(world._groups)}"]
        group, x = world.group(names[0]), np.ones(3, np.float32)
        with group.call("send", "f32", 3, 12):
            result = told(("a second thread", lambda: collectives.all_reduce(group, x, x), GraphError,
                           ("two threads", f"all_reduce in group {group.name}", "one order")))
        wrong += [result.note] if result.error else []
        wrong += [] if _said(lambda: collectives.all_reduce(group, x, x)) == (None, "") else ["the call behind a refused one is refused"]
        sent = list[tuple[int, list[Any]]]()
        with group.call("send", "f32", 3, 12) as call, \
                mock.patch.object(group.transport, "expect", lambda source, outs: sent.append((source, [*outs]))):
            call.expect(0, [None, x])
        none, bytes_ = sent[0][1] if sent else (0, x)
        wrong += [] if none is None and bytes_.dtype == np.uint8 and np.shares_memory(bytes_, x) else [f"expected are {sent}"]
        calls = [(r.op, r.call) for r in world.flights.records()]
        wrong += [] if calls == [("send", 1), ("all_reduce", 2), ("send", 3)] else [f"calls {calls}: who was refused counts"]
    segment.close()
    return measured(wrong, 9)


def devices(rng: np.random.Generator) -> Measured:
    """A rank that waits for its device gets on as long as it looks: others wait for it, and it comes back when the device has done. An
    error that is told from outside a wait reaches all."""
    looks, wrong = int(rng.integers(3, 40)), list[str]()

    def body(world: World) -> tuple[int, list[float], str]:
        collectives.barrier(world.group(WORLD))  # all are there before one fails
        if world.rank:
            kind, text = None, ""
            end = time.monotonic() + 20
            while kind is None and time.monotonic() < end:
                kind, text = _said(world.advance)
            return 0, [], text
        before, asked, rests = segment.control.progress(0), [0], list[float]()

        def ready() -> bool:
            asked[0] += 1
            return asked[0] > looks

        world.until(ready, "all_reduce", rests.append)
        got_on = segment.control.progress(0) - before - asked[0]
        error = RankError("the device is lost", rank=0, op="all_reduce", step=4)
        return got_on, rests, "" if world.fail(error) is error else "another error comes back"

    segment = Segment.create(2)
    found = in_threads(2, body, segments=[segment, segment], deadlines=Deadlines(stall=5.0))
    for rank, f in enumerate(found):
        wrong += [f"rank {rank}: {f}"] if isinstance(f, Exception) else []
    if not wrong:
        (late, rests, other), (_, _, heard) = found
        wrong += [] if late == 0 else [f"it got on {late} times other than it looked"]
        # one look without a rest where the wait begins to look at others, too
        wrong += [] if {*rests} == {LONGEST_S} and looks - 2 <= len(rests) < looks else [f"{len(rests)} rests of {looks} looks"]
        wrong += [other] if other else []
        wrong += [] if heard.startswith("rank 1 stops: the device is lost") else [f"the other one hears {heard!r}"]
    segment.close()
    return measured(wrong, 4)
