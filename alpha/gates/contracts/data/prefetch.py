"""Cases of `sampler.prefetched`: whoever asks, in any order, gets what the sampler itself makes; waits are told; threads end."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
from numpy.typing import NDArray

from alpha.component import Measured
from alpha.data.prefetch import NAME, Call, Prefetcher, Waited
from alpha.data.sampler import Batch, Sampler
from alpha.errors import CorruptError, InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import limits
from alpha.gates.contracts.data.support import Cases, same_everywhere

BATCH, SHARDS, MICROS, STEPS = 12, 2, 3, 7
CALLS: list[Call] = [(shard, SHARDS, micro, MICROS, True) for shard in range(SHARDS) for micro in range(MICROS)]
PAUSE = 0.02
"""Seconds that a slow sampler takes at least."""


class _Numbers(Sampler):
    """Token t of sample g is 100 g + t. `made`: how often each batch was made, by its first sample; `pause`: seconds that each takes;
    `bad`: the sample that cannot be read."""

    hash = "numbers"

    def __init__(self, *, pause: float = 0.0, bad: int = -1) -> None:
        self.global_batch, self.pause, self.bad = BATCH, pause, bad
        self.made: dict[int, int] = {}

    def read(self, samples_b: NDArray[np.int64], documents: bool = False) -> Batch:
        if self.pause:
            time.sleep(self.pause)
        if self.bad in samples_b:
            raise CorruptError("sample 30 is torn", came=self.bad, expected="a whole one", do="mend it")
        self.made[int(samples_b[0])] = self.made.get(int(samples_b[0]), 0) + 1
        inputs = (100 * samples_b[:, None] + np.arange(4)).astype(np.int32)
        return Batch(inputs, inputs + 1, samples_b, inputs // 2 if documents else None)


PATIENCE = 10.0
"""Seconds; a batch is there in a thousandth of that."""


def _ask(sampler: Sampler, step: int, call: Call) -> Batch:
    shard, shards, micro, micros, documents = call
    return sampler.batch(step, shard, shards, micro=micro, n_micro=micros, documents=documents)


def _same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("inputs_bT", "targets_bT", "samples_b", "documents_bT"))


def _prefetcher(sampler: Sampler, depth: int, told: list[Waited] | None = None) -> Prefetcher:
    return Prefetcher(sampler, CALLS, depth=depth, steps=STEPS, told=(told if told is not None else list[Waited]()).append)


def _told_in_time(sampler: Sampler, step: int, call: Call) -> Batch | CorruptError | None:
    """What is answered, an error too; None where nothing is in PATIENCE seconds: who waits for ever would end no gate but by its limit."""
    told = list[Batch | CorruptError]()

    def ask() -> None:
        try:
            told.append(_ask(sampler, step, call))
        except CorruptError as error:
            told.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return told[0] if told else None


def _what_the_sampler_makes(rng: np.random.Generator) -> Measured:
    """In order, from any place on, again, out of order, other shares of the batch, and behind the run's end."""
    count = Checks()
    plain, whole = _Numbers(), [(step, call) for step in range(STEPS) for call in CALLS]
    for depth in (1, 2, 5, 100):
        with _prefetcher(_Numbers(), depth) as ahead:
            drawn = [whole[i] for i in rng.integers(0, len(whole), 12)]
            begin = int(rng.integers(len(whole)))
            others = [(int(step), (0, 1, 0, 1, bool(rng.integers(2)))) for step in rng.integers(0, STEPS, 2)]
            others.append((0, (*CALLS[0][:4], False)))  # a share of a step's calls, asked for without its documents
            for step, call in (*whole, *whole[begin:], *drawn, *others, (STEPS, CALLS[0]), (STEPS + 2, CALLS[-1]), *whole):
                asked = ahead.batch(step) if call[1] == 1 and not call[4] else _ask(ahead, step, call)
                count.that(_same(asked, _ask(plain, step, call)), f"step {step}, call {call}, depth {depth}")
            count.that(np.array_equal(ahead.read(np.array([5, 3])).inputs_bT, plain.read(np.array([5, 3])).inputs_bT), "rows")
            count.that(ahead.hash == plain.hash and ahead.global_batch == BATCH, "hash or batch")
    return count.measured()


def _each_made_once(rng: np.random.Generator) -> Measured:
    """A run in order makes each batch once, and none behind its end."""
    count = Checks()
    for depth in (1, 3, 100):
        own = _Numbers()
        with _prefetcher(own, depth) as ahead:
            for step in range(STEPS):
                for call in CALLS:
                    _ask(ahead, step, call)
        firsts = range(0, BATCH * STEPS, BATCH // len(CALLS))
        count.that(own.made == {first: 1 for first in firsts}, f"depth {depth}: {len(own.made)} batches")
    return count.measured()


def _waits_are_told(rng: np.random.Generator) -> Measured:
    """Of each step how many batches were there, and what the loop waited for the others: all that a slow sampler takes where nobody
    computes beside it, and never more than the loop spent on asking."""
    count, told = Checks(), list[Waited]()
    count.that(Waited(0) == Waited(0, 0, 0, 0, 0), "a step begins with something")
    for depth in (1, 4):
        told.clear()
        with _prefetcher(_Numbers(pause=PAUSE), depth, told) as ahead:
            for step in range(3):
                began = time.perf_counter_ns()
                for call in CALLS:
                    _ask(ahead, step, call)
                spent, own = time.perf_counter_ns() - began, told[-1]
                count.that((own.step, own.batches, len(told)) == (step, len(CALLS), step + 1), f"step {step}: {own}")
                count.that(0 <= own.wait_ns <= spent, f"waited {own.wait_ns} of {spent} ns")
                count.that(own.made_ns >= 0.9 * len(CALLS) * PAUSE * 1e9, f"made in {own.made_ns} ns")
                count.that((own.wait_ns > 0) == (own.ready < own.batches), f"ready {own.ready}, waited {own.wait_ns} ns")
            count.that(told[0].ready < len(CALLS) and told[0].wait_ns >= 0.9 * PAUSE * 1e9, f"the first is made for who asks: {told[0]}")
    for _ in range(50):  # a machine that stops this thread for longer than a batch takes finds it ready
        told.clear()
        with _prefetcher(_Numbers(pause=PAUSE), 1, told) as ahead:
            for call in CALLS:
                _ask(ahead, 0, call)
        if told[0].ready == 0:
            break
    count.that(told[0].ready == 0, f"of a slow sampler no batch is ready: {told[0]}")
    return count.measured()


def _made(own: _Numbers, least: int) -> int:
    """Batches that were made, once there are `least` and the thread had time for more."""
    patience = time.monotonic() + 60
    while len(own.made) < least and time.monotonic() < patience:
        time.sleep(0.001)
    time.sleep(3 * PAUSE)
    return len(own.made)


def _bounded(rng: np.random.Generator) -> Measured:
    """Beside those that were taken at most `depth` wait, and one that finds no room; it is counted as there when it was."""
    count = Checks()
    for depth in (1, 3, 8):
        own, told = _Numbers(), list[Waited]()
        with _prefetcher(own, depth, told) as ahead:
            _ask(ahead, 0, CALLS[0])
            count.that(_made(own, depth + 2) == depth + 2, f"{len(own.made)} batches made at depth {depth}")
            for call in CALLS[1 : 1 + min(depth, len(CALLS) - 1)]:
                _ask(ahead, 0, call)
            if depth >= len(CALLS):
                count.that(told[0].ready >= len(CALLS) - 1, f"ready {told[0].ready}")
    return count.measured()


def _ready_is_no_wait(rng: np.random.Generator) -> Measured:
    """Of a step whose batches were all there the loop is told that it waited for none."""
    count, own, told = Checks(), _Numbers(), list[Waited]()
    with _prefetcher(own, 100, told) as ahead:
        _ask(ahead, 0, CALLS[0])
        count.that(_made(own, STEPS * len(CALLS)) == STEPS * len(CALLS), f"{len(own.made)} batches made")
        for call in (*CALLS[1:], *CALLS):
            _ask(ahead, len(told), call)
    count.that((told[1].ready, told[1].wait_ns) == (len(CALLS), 0), f"{told[1]}")
    return count.measured()


def digest(data: bytes) -> str:
    """Hash of a run in order, whose sampler takes any time (also called in a fresh process)."""
    found, rng = hashlib.sha256(), np.random.default_rng(list(data))
    own = _Numbers()
    with _prefetcher(own, 1 + data[0] % 4) as ahead:
        for step in range(STEPS):
            for call in CALLS:
                own.pause = float(rng.choice([0.0, 0.0, 0.002]))
                found.update(_ask(ahead, step, call).inputs_bT.tobytes())
    return found.hexdigest()


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(digest, rng.bytes(4), rng)


def _any_depth(rng: np.random.Generator) -> Measured:
    """The bits hang on no depth, and not on where the asking began."""
    count = Checks()
    plain = [_ask(_Numbers(), step, call) for step in range(STEPS) for call in CALLS]
    for depth in rng.integers(1, 9, 4).tolist():
        begin = int(rng.integers(len(plain)))
        with _prefetcher(_Numbers(pause=0.001), depth) as ahead:
            for place in range(begin, len(plain)):
                asked = _ask(ahead, place // len(CALLS), CALLS[place % len(CALLS)])
                count.that(_same(asked, plain[place]), f"place {place} from {begin} on at depth {depth}")
    return count.measured()


def _errors_arrive(rng: np.random.Generator) -> Measured:
    """What the sampler raises reaches the loop as it is, where the batch is asked for, and again; batches before and behind are good."""
    count = Checks()
    rows = BATCH // len(CALLS)
    for depth in (1, 4):
        with _prefetcher(_Numbers(bad=30), depth) as ahead:
            for place in range(30 // rows):
                asked = _ask(ahead, place // len(CALLS), CALLS[place % len(CALLS)])
                count.that(int(asked.samples_b[0]) == rows * place, "a batch before the bad one")
            for turn in range(2):
                told = _told_in_time(ahead, 30 // BATCH, CALLS[30 % BATCH // rows])
                if told is None:
                    count.that(False, f"who asks for time {turn + 1} waits for ever")
                    return count.measured()
                count.that(isinstance(told, CorruptError) and "sample 30 is torn" in str(told) and "mend it" in str(told),
                           f"the error is swallowed, or its text: {told}")
            count.that(_same(_ask(ahead, 4, CALLS[2]), _ask(_Numbers(), 4, CALLS[2])), "a batch behind the bad one")
    with _prefetcher(_Numbers(), 2) as ahead:
        for shares in ((-1, 0, 1), (0, 1, 1), (0, 0, 5)):
            count.refuses(InputError, ahead.batch, f"share {shares}", *shares)
    return count.measured()


def _threads_end(rng: np.random.Generator) -> Measured:
    """One thread at a time, and none after the end: also where it waits for room, was never asked, or the loop failed."""
    def alive() -> int:
        return sum(t.name == NAME for t in threading.enumerate())

    count, before = Checks(), alive()
    for asked in (0, 1, len(CALLS)):
        with _prefetcher(_Numbers(), 1) as ahead:
            for call in CALLS[:asked]:
                _ask(ahead, 0, call)
            count.that(alive() - before == min(asked, 1), f"{alive() - before} threads")
            if asked:
                _ask(ahead, 5, CALLS[1])
                count.that(alive() - before == 1, "two threads after a jump")
        count.that(alive() == before, f"a thread is left after {asked} batches")
    try:
        with _prefetcher(_Numbers(), 2) as ahead:
            _ask(ahead, 0, CALLS[0])
            raise InputError("the loop failed", came=1)
    except InputError:
        count.that(alive() == before, "a thread is left after an error")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("what the sampler makes", _what_the_sampler_makes),
        ("each batch is made once", _each_made_once),
        ("waits are told", _waits_are_told),
        ("what waits is bounded", _bounded),
        ("what is ready is not waited for", _ready_is_no_wait),
    ],
    "determinism": [
        ("batches are the same in a fresh process", _same_everywhere),
        ("no bit hangs on the depth", _any_depth),
    ],
    "faults": [
        ("errors of the thread arrive", _errors_arrive),
        ("threads end", _threads_end),
        ("a batch out of turn is refused", limits.out_of_turn),
    ],
}
