"""Cases of what ranks tell of themselves in shared memory, in one process and without a clock: each word of the control block, the flight
recorder, and the names of those who are waited for, by drawn calls that a dull model repeats. Floor 7."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from alpha.comm import watch as watching
from alpha.comm.agree import agree
from alpha.comm.control import ABSENT, JOINED, LEFT, Failure
from alpha.comm.flight import RECORDS
from alpha.comm.message import DTYPES, OPS
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines, Watch
from alpha.comm.words import exchanged
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts.ranks.memory import measured

SIZE = 5
ROOM = 1023
"""Bytes that the op and the text of an error have together."""

Found = tuple[list[str], int]


def words(rng: np.random.Generator) -> Measured:
    """Whatever a rank tells is read back, of that rank and as that word alone; another host has it as it was told, times by its own clock,
    and of an error the first."""
    segment, other, wrong, calls = Segment.create(SIZE), Segment.create(SIZE), list[str](), 400
    control = segment.control
    none: dict[str, Any] = {"state": ABSENT, "pid": 0, "heartbeat": 0, "progress": 0, "place": (0, 0, 0, -1), "step": -1, "waits_for": None,
                            "patience": 0, "served": 0, "frozen": False}
    model, errors = [dict(none) for _ in range(SIZE)], dict[int, Failure]()
    for i in range(calls):
        r, n = int(rng.integers(SIZE)), int(rng.integers(1 << 30))
        own, what = model[r], ("join", "leave", "beat", "advance", "at", "begin", "wait", "patient", "serve", "fail")[int(rng.integers(10))]
        before = time.monotonic_ns()
        if what == "join":
            control.join(r, n)
            own |= {"state": JOINED, "pid": n, "heartbeat": before}
        elif what == "leave":
            control.leave(r)
            own["state"] = LEFT
        elif what == "beat":
            control.beat(r)
            own["heartbeat"] = before
        elif what == "advance":
            control.advance(r)
            own["progress"] += 1
        elif what == "at":
            own["place"] = n % 7, n % 99, n % len(OPS), n % 5 - 1
            control.at(r, *own["place"])
        elif what == "begin":
            control.begin(r, n % 5 - 1)
            own["step"] = n % 5 - 1
        elif what == "wait":
            own["waits_for"] = None if n % 6 == 5 else n % 6
            control.wait(r, own["waits_for"])
        elif what == "patient":
            control.be_patient(r, n)
            own["patience"] = n
        elif what == "serve":
            control.serve(r, n, n % 2 == 0)
            own |= {"served": n, "frozen": n % 2 == 0}
        elif i > calls // 2:
            text = f"text {i} ä"[: n % 12] if i % 2 else "x" * (990 + n % 99)  # what finds no room beside the op is cut
            failure = Failure(r, n % SIZE, "all_reduce"[: n % 11], n % 5 - 1, n, text)
            control.fail(failure)
            errors.setdefault(r, replace(failure, text=text[: ROOM - len(failure.op)]))
        for rank, told in enumerate(model):
            found = {name: getattr(control, name)(rank) for name in none}
            late = found["heartbeat"] - told["heartbeat"]
            if rank == r and what in ("join", "beat"):
                wrong += [] if 0 <= late < 60 * 10**9 else [f"a heartbeat {late} ns later"]
                told["heartbeat"] = found["heartbeat"]
            wrong += [] if found == told else [f"{what} of {r}: rank {rank} tells {found}, not {told}"]
        wrong += [] if control.failed() == bool(errors) else [f"{what}: failed is {control.failed()}"]
        if i % 20 == 19:
            ahead = int(rng.integers(-9, 10)) if i % 40 == 19 else 1 << 62  # or all of it was before this clock began
            for rank in range(SIZE):
                other.control.mirror(rank, control.record(rank), ahead)
            ahead_of = [{**told, **{k: max(1, told[k] - ahead) if told[k] else 0 for k in ("heartbeat", "patience")}} for told in model]
            there = [{name: getattr(other.control, name)(rank) for name in none} for rank in range(SIZE)]
            wrong += [] if there == ahead_of else [f"{ahead} ns ahead: {there} {ahead_of}"]
            said = [(f.teller, f.rank, f.op, f.step, f.text) for f in other.control.failures()]
            wanted = [(f.teller, f.rank, f.op, f.step, f.text) for f in sorted(errors.values(), key=lambda f: f.when)]
            wrong += [] if sorted(said) == sorted(wanted) and [f.when for f in control.failures()] == sorted(
                f.when for f in errors.values()) else [f"errors: {said} {wanted}"]
    for record in (b"", control.record(0)[:-1], control.record(0) + b"x", b"\2" + control.record(0)[1:]):
        try:
            other.control.mirror(0, record, 0)
            wrong.append(f"{len(record)} bytes are taken for a record")
        except ValueError:
            pass
    segment.close()
    other.close()
    return measured(wrong, calls)


def rests(rng: np.random.Generator) -> Measured:
    """A rank that waits for parts of a message rests until one comes, again and again, as long as it may; it says whether what it waits
    for was ready in that time, after as many rests as that took."""
    wrong, cases = list[str](), 20
    for i in range(cases):
        needs, rested, asked = i % 5 if i < 10 else int(rng.integers(1, 40)), list[float](), [0]

        def ready(needs: int = needs, rested: list[float] = rested, asked: list[int] = asked) -> bool:
            asked[0] += 1
            return len(rested) >= needs

        with mock.patch.object(watching.time, "monotonic_ns", side_effect=lambda: 5):  # no time goes by
            found = Watch._rest(ready, rested.append)
        wrong += [] if found and rested == [watching.LONGEST_S] * needs else [f"{found} after {len(rested)} of {needs} rests"]
    for over in (1.0, 1.5):
        now, rested = [0], list[float]()

        def rest(seconds: float, now: list[int] = now, rested: list[float] = rested, over: float = over) -> None:
            rested.append(seconds)
            now[0] += int(over * 1e9 * seconds)

        with mock.patch.object(watching.time, "monotonic_ns", side_effect=lambda now=now: now[0]):
            found = Watch._rest(lambda: False, rest)
        wrong += [] if not found and len(rested) == 1 else [f"{found} after {len(rested)} rests of {over} times the longest"]
    return measured(wrong, cases + 2)


def flights(rng: np.random.Generator) -> Measured:
    """The ring holds the last collectives of its own rank, oldest first, as they were told; started and finished at the call that says so;
    once around it drops the oldest. Of long source lines the end is kept."""
    segment, wrong = Segment.create(3), list[str]()
    model: list[list[dict[str, Any]]] = [[], [], []]
    at: list[list[int]] = [[], [], []]
    for i in range(RECORDS + 300):
        rank = 1 if i < RECORDS + 40 else int(rng.integers(3))
        recorder, told = segment.recorder(rank), model[rank]
        source = f"models/{'long/' * int(rng.integers(30))}gpt.py:{i}"
        one: dict[str, Any] = {"group": int(rng.integers(1 << 32)), "call": i, "op": OPS[int(rng.integers(len(OPS)))],
                               "dtype": DTYPES[int(rng.integers(len(DTYPES)))], "nbytes": int(rng.integers(1 << 40)),
                               "step": int(rng.integers(-1, 9)), "source": source[-88:]}
        began = time.monotonic_ns()
        at[rank].append(recorder.create(**{k: x for k, x in one.items() if k != "source"}, source=source))
        marks = int(rng.integers(3))
        if marks:
            recorder.start(at[rank][-1])
        if marks == 2:
            recorder.finish(at[rank][-1])
        told.append({**one, "marks": marks, "began": began, "ended": time.monotonic_ns()})
        if i % 80 == 79:
            for r, rows in enumerate(model):
                whole = segment.recorder(r)
                first = int(rng.integers(len(rows) + 2))
                for since in (0, first):
                    kept = rows[max(since, len(rows) - RECORDS) :]
                    found = whole.records(since) if since else whole.records()
                    same = len(found) == len(kept) and all(
                        {k: getattr(x, k) for k in one} == {k: row[k] for k in one}
                        and row["began"] <= x.created <= row["ended"]
                        and (x.created <= x.started <= row["ended"] if row["marks"] else x.started == 0)
                        and (x.started <= x.finished <= row["ended"] if row["marks"] == 2 else x.finished == 0)
                        for x, row in zip(found, kept))
                    wrong += [] if same else [f"of {len(rows)} calls of rank {r}, from {since}: {len(found)} records"]
                wrong += [] if whole.written == len(rows) else [f"written {whole.written} of {len(rows)}"]
    segment.close()
    return measured(wrong, RECORDS + 300)


def named(rng: np.random.Generator) -> Measured:
    """Of drawn ranks that wait for one another, some of them stopped, on this host and on another: the chain of names, and the whole text
    of the error that ends the wait."""
    wrong, cases = list[str](), 120
    for case in range(cases):
        segment = Segment.create(SIZE, here=range(1))
        control, waits, frozen = segment.control, list[int | None](), list[bool]()
        for rank in range(SIZE):
            control.join(rank, os.getpid())
            waits.append(None if rng.random() < 0.3 else int(rng.choice([r for r in range(SIZE) if r != rank])))
            frozen.append(bool(rank and rng.random() < 0.2))
            control.wait(rank, waits[-1])
            control.serve(rank, 0, frozen[-1])
        watch, peer = Watch(control, 0, Deadlines()), int(rng.integers(1, SIZE))
        watch.step = case % 3 - 1
        wanted, last = [peer], peer
        while not frozen[last] and (following := waits[last]) is not None and following not in wanted and following != 0:
            wanted.append(following)
            last = following
        place, now = (int(rng.integers(1 << 20)), int(rng.integers(3)), int(rng.integers(len(OPS))), int(rng.integers(-1, 3))), case % 4
        control.at(last, *place)
        control.begin(last, now)
        chain = watch._chain(peer)
        wrong += [] if chain == (*wanted,) else [f"{waits}, stopped {frozen}: {chain}, not {wanted}"]
        error = watch._stalled(wanted, "all_reduce", 1.26)
        ring = not frozen[last] and waits[last] is not None
        names = " waits for ".join(f"rank {r}" for r in [0, *wanted, *([waits[last]] if ring else [])])
        begun = f", and has begun step {now}" if now > place[3] else ""
        seen = f"{OPS[place[2]]} number {place[1]} of group {place[0]:#x}" + (f", step {place[3]}" if place[3] >= 0 else "")
        said = ("ranks wait for each other in all_reduce" if ring else f"rank {last} gets on with nothing while all_reduce waits for it",
                f"{names}; rank {last} is {'stopped' if frozen[last] else 'on another host'}, last heartbeat 0.",
                f" s ago, last seen in {seen if place[1] else 'no collective yet'}{begun}\n", "progress within 1.3 s")
        text = str(error)
        wrong += [f"{part!r} is not in {text}" for part in said if part not in text]
        told = (error.rank, error.op, error.step)
        wrong += [] if told == (last, "all_reduce", watch.step) else [f"{told}"]
        watch.close()
        segment.close()
    return measured(wrong, cases)


def at_facts(world: World, seed: int) -> Found:
    """Of drawn facts that members hold in an order of their own, some of them otherwise: all are told the first name, who is in the
    minority, and both texts as far as they are shown; where nothing differs nobody is told anything."""
    rng, wrong, cases, group = np.random.default_rng(seed), list[str](), 12, world.group(WORLD)
    for case in range(cases):
        names = [f"fact {int(i)}" for i in rng.permutation(30)[: int(rng.integers(1, 9))]]
        every = [{name: f"{name} is " + "\u00e9x" * int(rng.integers(90)) for name in names}] * world.size
        every = [dict(facts) for facts in every]
        for name in names if case else ():
            for member in range(world.size):
                every[member][name] += f" {int(rng.integers(2))}" if rng.random() < 0.4 else ""
        mine = every[world.rank]
        mine = {names[int(i)]: mine[names[int(i)]] for i in np.random.default_rng(seed + world.rank + case).permutation(len(names))}
        differing = sorted(name for name in names if len({facts[name] for facts in every}) > 1)
        came: RankError | None = None
        try:
            agree(group, mine, "rank {rank} was told otherwise", "mend it")
        except RankError as error:
            came = error
        if not differing:
            wrong += [] if came is None else [f"alike, and {came}"]
            continue
        name = differing[0]
        texts = [facts[name] for facts in every]
        counts = {text: texts.count(text) for text in texts}
        most = [text for text in dict.fromkeys(texts) if counts[text] == max(counts.values())]
        usual = [texts[0]] if texts[0] in most else most  # of others that are as many any may be the usual one
        shown = [text.encode()[:200].decode("utf-8", "replace") for text in texts]
        wanted = [("; ".join(f"{name} of rank {i}: {shown[i]}" for i, text in enumerate(texts) if text != one),
                   f"{name} of rank {texts.index(one)}: {shown[texts.index(one)]}", next(i for i, text in enumerate(texts) if text != one))
                  for one in usual]
        got = came and (came.came, came.expected, came.rank)
        wrong += [] if got in wanted and f"rank {got[2]} was told otherwise" in str(came) else [f"{got}, not {wanted}"]
    return wrong, cases


def at_exchange(world: World, seed: int) -> Found:
    """Bytes of each, of lengths that differ, in the order of the group, on every member; of a part of the ranks too."""
    rng, wrong, cases = np.random.default_rng(seed), list[str](), 12
    for _ in range(cases):
        every = [rng.bytes(int(rng.integers(14)) * int(rng.integers(2))) for _ in range(world.size)]
        got = exchanged(world.group(WORLD), every[world.rank])
        wrong += [] if got == every else [f"{got}, not {every}"]
    return wrong, cases
