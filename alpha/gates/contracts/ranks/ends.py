"""Cases of what one rank does alone: what it asks of whoever carries its messages to another host, and how it looks at others that it has
yet to watch. Both stand against dull models. Floor 7."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.comm import catalogue
from alpha.comm.checked import checked
from alpha.comm.control import Failure
from alpha.comm.message import HEADER, SPACE, About
from alpha.comm.segment import RELEASED, Segment
from alpha.comm.shm import LENT_BYTES, SharedMemory
from alpha.comm.watch import Deadlines, Watch
from alpha.comm.world import WORLD, World
from alpha.component import Catalogue, Measured
from alpha.errors import RankError

SLOTS = 4


class Carrier:
    """A dull other end of what goes to one rank elsewhere (shm.py: Elsewhere). It answers as it is told, and notes what is asked of it for
    which its protocol has no place."""

    def __init__(self) -> None:
        self.lent = dict[int, memoryview]()
        self.called = True
        self.takes = self.keeps = True
        self.wrong = list[str]()
        self.credits = self.withdrawn = 0

    def lend(self, sequence: int, payload: memoryview) -> None:
        """Noted: one payload of a message."""
        if sequence in self.lent or payload.nbytes < LENT_BYTES:
            self.wrong.append(f"message {sequence} of {payload.nbytes} bytes was lent")
        self.lent[sequence] = payload

    def keep(self) -> bool:
        """Asked of a call that lent something alone."""
        if not self.lent:
            self.wrong.append("what was lent to nobody is to be kept")
        if self.keeps:
            self.lent.clear()
        return self.keeps

    def expect(self, sequence: int, out: memoryview) -> None:
        """Nothing comes from there."""

    def came(self, sequence: int, nbytes: int) -> memoryview:
        """Nothing comes from there."""
        raise AssertionError("nothing was sent")

    def withdraw(self) -> None:
        """Of a call that failed."""
        self.lent.clear()
        self.withdrawn += 1

    def carry(self) -> bool:
        """Whether it is told to take over what is sent."""
        return self.takes

    def credit(self) -> None:
        """Counted."""
        self.credits += 1

    def rest(self, seconds: float) -> None:
        """Nothing comes, and time is not waited for."""


def carried(rng: np.random.Generator) -> Measured:
    """Drawn calls to several ranks elsewhere, of payloads on both sides of the least that is lent; some fail while they are sent, some
    while what was lent is to be kept: what lies in slots, what is lent and for how long is what a dull model says, and a call that
    failed leaves nothing to the next one."""
    wrong, calls = list[str](), 60
    segment = Segment.create(3, payload_bytes=LENT_BYTES + 64, slots=SLOTS, here=range(1))
    control = segment.control
    for rank in range(3):
        control.join(rank, os.getpid())
    far = {rank: Carrier() for rank in (1, 2)}
    mine = SharedMemory(segment, Watch(control, 0, Deadlines(stall=60.0)), 0, (0, 1, 2), lambda channel, rank: far[rank])
    sent = {1: 0, 2: 0}
    for n in range(calls):
        about, lent = About("send", "bool", 0, n, 1), set[int]()
        failing = int(rng.integers(4))  # 0: while it is sent; 1: while it is kept; else not
        try:
            for _ in range(int(rng.integers(1, 4))):
                to, nbytes, kept = int(rng.integers(1, 3)), LENT_BYTES + int(rng.integers(-2, 3)), bool(rng.random() < 0.7)
                carrier, payload = far[to], rng.integers(0, 256, nbytes).astype(np.uint8)
                carrier.takes = failing != 0
                _tell(segment, 0, failing == 0)
                start = segment.ring(0, 0, to)
                memoryview(segment.memory)[start + RELEASED : start + RELEASED + 8].cast("Q")[0] = sent[to]  # all before it was released
                slot = segment.slot(start, sent[to] % SLOTS)
                memoryview(segment.memory)[slot + SPACE : slot + SPACE + nbytes] = bytes(nbytes)
                lends = kept and nbytes >= LENT_BYTES
                sent[to] += 1
                lent |= {to} if lends else set()
                try:
                    mine.send(to, about, 0, payload, kept=kept)
                finally:
                    there = bytes(segment.memory[slot + SPACE : slot + SPACE + nbytes])
                    if there != (bytes(nbytes) if lends else payload.tobytes()) or not any(segment.memory[slot : slot + HEADER.size]):
                        wrong.append(f"{nbytes} bytes, kept {kept}, lie elsewhere")
                    if lends != (sent[to] - 1 in carrier.lent):
                        wrong.append(f"{nbytes} bytes, kept {kept}: lent is {not lends}")
            for carrier in far.values():
                carrier.keeps = failing != 1
            _tell(segment, 0, failing == 1)
            mine.done(about)
            wrong += ["a call ended that could not"] if failing == 1 and lent else []
            wrong += ["what was lent is so behind its call"] if any(c.lent for c in far.values()) else []
        except RankError:
            before = [c.withdrawn for c in far.values()]
            mine.withdraw()
            wrong += [] if failing < 2 else ["a sound call failed"]
            wrong += [] if [c.withdrawn for c in far.values()] == [x + 1 for x in before] else ["a failed call is not withdrawn everywhere"]
        wrong += [w for c in far.values() for w in c.wrong]
        for carrier in far.values():
            carrier.wrong.clear()
        control._flags[:] = bytes(3)
    segment.close()
    return Measured(error=float(len(wrong)), bound=0.0, cases=calls, note=wrong[0][:120] if wrong else "")


def _tell(segment: Segment, rank: int, failed: bool) -> None:
    """That a rank has failed, so that a wait ends at once, or that none has."""
    segment.control._flags[:] = bytes(3)
    if failed:
        segment.control.fail(Failure(rank, 1, "send", 0, 0, "told"))


def watched_late(rng: np.random.Generator) -> Measured:
    """A rank that has ended before it is watched: it is let go where it left, its own words are said where it failed, and else it died."""
    wrong, expected = list[str](), {"left": "", "told": "it told why", "died": "rank 1 died"}
    for how, said in expected.items():
        for others in range(1, 4):
            segment = Segment.create(1 + others)
            control = segment.control
            gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
            gone.wait()  # nobody has its number now
            control.join(0, os.getpid())
            for rank in range(1, 1 + others):
                control.join(rank, gone.pid if rank == 1 else os.getpid())
            if how == "left":
                control.leave(1)
            watch, came = Watch(control, 0, Deadlines(join=5.0)), ""
            try:
                if how == "told":  # between the look for failures and the one at that process
                    control.fail(Failure(1, 1, "", -1, 0, "it told why"))
                    watch._watch(1)
                watch.join()
            except RankError as error:
                came = str(error)
            wrong += [] if (said in came if said else not came) else [f"{how}: {came or 'nobody was named'}"]
            wrong += [] if bool(control.failed()) == (how != "left") else [f"{how}: others are told otherwise"]
            with suppress(OSError):
                watch.close()
            segment.close()
    return Measured(error=float(len(wrong)), bound=0.0, cases=9, note=wrong[0][:120] if wrong else "")


def patience(rng: np.random.Generator) -> Measured:
    """How long a rank may get on with nothing while another waits: the deadline, or three times the longest that a collective of that name
    has taken; those of other names do not lengthen it, and neither do shorter ones."""
    wrong, stall = list[str](), 0.04
    for longest, others, least in ((0.0, 0.0, stall), (0.1, 0.0, 0.3), (0.005, 0.0, stall), (0.0, 0.1, stall), (0.1, 1.0, 0.3)):
        segment = Segment.create(2)
        for rank in range(2):
            segment.control.join(rank, os.getpid())
        watch, came = Watch(segment.control, 0, Deadlines(stall=stall)), ""
        for seconds in sorted((longest, longest / 2), reverse=bool(rng.integers(2))):
            watch.took("all_reduce", seconds)
        watch.took("broadcast", others)
        end = time.monotonic() + 5 + 3 * longest  # far behind any patience: a wait that nothing ends is a failure, not a hang
        try:
            watch.until(lambda end=end: time.monotonic() > end, 1, "all_reduce")  # type: ignore[misc]
        except RankError as error:
            came = str(error)
        told = came.partition("progress within ")[2].partition(" s")[0]
        good = bool(told) and round(least, 1) <= float(told) <= least + 0.2
        wrong += [] if good else [f"{longest} s, others {others} s: {told or came}, {least} expected"]
        segment.close()
    return Measured(error=float(len(wrong)), bound=0.0, cases=5, note=wrong[0][:120] if wrong else "")


def announced(rng: np.random.Generator) -> Measured:
    """A rank asks for the seconds that it announces, and behind long work, also where that fails, for none. Within longer work for no
    fewer than that has announced, and behind the inner one for just those."""
    wrong, cases = list[str](), 8
    for case in range(cases):
        long = float(rng.uniform(0.1, 60))
        with World(Segment.create(1), 0) as world:
            said, begun = list[int](), time.monotonic_ns()
            with suppress(RankError), world.patient(long):
                said.append(world._control.patience(0) - int(1e9 * long))
                whole = world._control.patience(0)
                for inner, longer in ((long / 2, False), (2 * long, True)):
                    with world.patient(inner):
                        held = (world._control.patience(0) > whole) == longer and world._control.patience(0) >= whole
                    held = held and world._control.patience(0) == whole
                    wrong += [] if held else [f"{inner:.3f} s within {long:.3f} s: {world._control.patience(0) - whole} ns apart behind it"]
                if case % 2:
                    raise RankError("no space")
            good = begun <= said[0] <= time.monotonic_ns() and world._control.patience(0) == 0
        wrong += [] if good else [f"{long:.3f} s were announced {said[0] - begun} ns late, and then {world._control.patience(0)}"]
    return Measured(error=float(len(wrong)), bound=0.0, cases=cases, note=wrong[0][:120] if wrong else "")


def anew(rng: np.random.Generator) -> Measured:
    """A rank that announced long work has its whole deadline anew once it says that this has ended, for it could not get on before. Where
    it never says so, it is waited for until the time that it announced."""
    wrong, stall = list[str](), 0.06
    for long in (0.4, 0.6):
        for says in (True, False):
            segment = Segment.create(2)
            control = segment.control
            for rank in range(2):
                control.join(rank, os.getpid())
            began, over, came = time.monotonic(), list[float](), ""
            say: Callable[[], object] = partial(control.be_patient, 1, 0) if says else list
            control.be_patient(1, int(1e9 * (began + (20.0 if says else long))))

            def rest(seconds: float, end: float = began + long, over: list[float] = over, say: Callable[[], object] = say) -> None:
                time.sleep(seconds)
                if time.monotonic() > end and not over:
                    over.append(time.monotonic())
                    say()

            watch = Watch(control, 0, Deadlines(stall=stall))
            try:
                watch.until(lambda end=began + 10: time.monotonic() > end, 1, "all_reduce", rest)  # type: ignore[misc]
            except RankError as error:
                came = error.what
            after = time.monotonic() - (over[0] if says and over else began + long)
            good = came.startswith("rank 1 gets on with nothing") and after >= stall * says
            wrong += [] if good else [f"{long} s, {'ended' if says else 'not ended'}: {came or 'nobody was named'} after {after:.3f} s"]
            watch.close()
            segment.close()
    return Measured(error=float(len(wrong)), bound=0.0, cases=4, note=wrong[0][:120] if wrong else "")


def turned(rng: np.random.Generator) -> Measured:
    """A rank that another one begins to wait for has its whole deadline from then on, whoever was waited for before it."""
    wrong, stall, each, turns = list[str](), 0.6, 0.2, 6
    segment = Segment.create(4)
    control = segment.control
    for rank in range(4):
        control.join(rank, os.getpid())
    order, began = [2 + i % 2 for i in range(int(rng.integers(2)), turns + 2)], time.monotonic()

    def rest(seconds: float) -> None:
        time.sleep(seconds)
        control.wait(1, order[min(int((time.monotonic() - began) / each), turns)])

    control.wait(1, order[0])
    watch = Watch(control, 0, Deadlines(stall=stall))
    try:
        watch.until(lambda: time.monotonic() > began + turns * each, 1, "all_reduce", rest)
    except RankError as error:
        wrong.append(f"{error.what} after {time.monotonic() - began:.3f} s")
    watch.close()
    segment.close()
    return Measured(error=float(len(wrong)), bound=0.0, cases=turns, note=wrong[0][:120] if wrong else "")


def stops(rng: np.random.Generator) -> Measured:
    """A rank that waits for a living one stops at the first error that any rank tells, at whichever look, before it begins or in its
    sleep: with that one's name, op and step."""
    wrong, size, cases = list[str](), 4, 12
    for case in range(cases):
        segment = Segment.create(size)
        control = segment.control
        for rank in range(size):
            control.join(rank, os.getpid())
        teller, accused, step = int(rng.integers(1, size)), int(rng.integers(-1, size)), int(rng.integers(-1, 9))
        op, looks = ("all_gather", "")[case % 2], [-1 if case < 2 else int(rng.integers(2, 9))]
        tell = partial(control.fail, Failure(teller, accused, op, step, time.monotonic_ns(), "out of paper"))
        if looks[0] < 0:
            tell()

        def rest(seconds: float, looks: list[int] = looks, tell: Callable[[], object] = tell) -> None:
            looks[0] -= 1
            if looks[0] == 0:
                tell()

        watch, came, end = Watch(control, 0, Deadlines()), None, time.monotonic() + 2.0  # behind it nobody was stopped
        try:
            watch.until(lambda end=end: time.monotonic() > end, int(rng.integers(1, size)), "all_reduce", rest)  # type: ignore[misc]
        except RankError as error:
            came = error.rank, error.op, error.step, error.what
        expected = accused, op or "all_reduce", step, "rank 0 stops: out of paper"
        wrong += [] if came == expected else [f"{came}, not {expected}"]
        watch.close()
        segment.close()
    return Measured(error=float(len(wrong)), bound=0.0, cases=cases, note=wrong[0][:120] if wrong else "")


def at_checked(world: World, op: str, seed: int) -> tuple[list[str], int]:
    """A collective that is held against its row (checked.py), of either type of floats, in place or not: sound it passes on every member;
    one bit of one member's result, drawn, ends it on all, by that member's name, at the model's line where there is one. What is not
    compared is left as it is."""
    rng, group, wrong, n = np.random.default_rng(seed), world.group(WORLD), list[str](), 4 * world.size
    attrs = {"group": WORLD, "size": group.size} | ({"reduce": "sum"} if op in ("all_reduce", "reduce_scatter") else {})
    attrs |= {"root": int(rng.integers(group.size))} if op in ("broadcast", "reduce") else {}
    own = Catalogue()
    catalogue.fill(own)
    plain = own[f"{op}.cpu"]
    for trial in range(5):
        victim, bit = int(rng.integers(group.size)), int(rng.integers(32))  # -1: none
        bit = bit if trial > 1 and group.index == victim else -1
        x = np.random.default_rng((seed, trial, group.index)).standard_normal(n).astype(kind := (np.float32, np.float64)[trial % 2])
        out = np.zeros({"reduce_scatter": n // group.size, "all_gather": n * group.size}.get(op, n), kind)
        out = x if op in ("all_reduce", "broadcast") and trial in (1, 2) else out  # in place, sound and spoilt

        def spoilt(cpu: Any, ins: Any, outs: Any, attrs: Any, bit: int = bit) -> Callable[[], None]:
            run = plain.implementation(cpu, ins, outs, attrs)

            def call() -> None:
                run()
                if bit >= 0:
                    outs[0].view(np.uint32)[-1] ^= np.uint32(1 << bit)
            return call

        found = Catalogue()
        found.add(replace(plain, implementation=spoilt))
        found.add(other := replace(plain, id="other", profile="program"))
        found.add(own["barrier.cpu"])
        world.step, world.place.source, came, together = 5, "" if trial == 4 else "gpt.py:7", "", checked(found)
        wrong += [] if together["other"] is other and together["barrier.cpu"] is own["barrier.cpu"] else ["what has no result is compared"]
        try:
            together[plain.id].implementation(SimpleNamespace(world=world), [x], [out], attrs)()
        except RankError as error:
            came = str(error)
        said = (f"{op} of step 5 gave rank {victim} other bits", f"rank {victim}: ", f"of the result{'' if trial == 4 else ', gpt.py:7'})")
        if (trial > 1 and not all(word in came for word in said)) or (trial < 2 and came):
            wrong.append(f"{op}, trial {trial}, rank {victim}: {came or 'nothing was seen'}")
    return wrong, 5
