"""A rank among the ranks of one job: who it is, its groups, when it gives up. Floor 4.

Nothing here is ambient: whoever runs collectives is handed a World, and asks it for a Group by name.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from alpha.comm.flight import FlightRecorder
from alpha.comm.group import Group, Place
from alpha.comm.rule import Rule
from alpha.comm.segment import Segment
from alpha.comm.shm import SharedMemory
from alpha.comm.streams import Streams, call
from alpha.comm.watch import Deadlines, Watch
from alpha.comm.words import exchanged
from alpha.errors import GraphError, InputError, RankError

WORLD = "world"
"""The group of all ranks."""
_BEAT_S = 0.5


class World:
    """One rank of a job.

    rank, size: its number and how many there are. local_rank: its number on this host. device: what it computes on. job: 64 bits that no
    other job has. step: the training step, -1 before the first; place: the model's line that a thread runs: both for errors and the
    flight recorder, and set by whoever runs them.
    """

    def __init__(self, segment: Segment, rank: int, *, local_rank: int | None = None, device: str = "cpu",
                 deadlines: Deadlines | None = None) -> None:
        """Join the job and wait until all ranks have. RankError naming those that never come."""
        if not 0 <= rank < segment.size:
            raise InputError("this job has no such rank", came=rank, expected=f"0 to {segment.size - 1}")
        if segment.control.state(rank):
            raise InputError("this rank is taken", came=f"rank {rank}, process {segment.control.pid(rank)}",
                             expected="one process for each rank", do="look at RANK in the launcher's environment")
        self.rank, self.size, self.job = rank, segment.size, segment.job
        self.local_rank, self.device = rank if local_rank is None else local_rank, device
        self.place, self._rule = Place(), Rule()
        self._segment, self._groups = segment, dict[str, Group]()
        self._control, self._recorder = segment.control, segment.recorder(rank)
        self._watch = Watch(segment.control, rank, deadlines or Deadlines())
        self._streams: Streams | None = None
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="alpha-heartbeat")
        self._control.join(rank, os.getpid())
        self._beating.start()
        try:
            if segment.bridge:
                self._watch.watch_bridge(segment.bridge)
                self._streams = Streams(segment, rank, call(segment, self._watch.deadlines.join))
                self._watch.rest = self._streams.nap
            self._watch.join()
            self.add_group(WORLD, [range(segment.size)])
        except BaseException:
            self.close()
            raise

    def _beat(self) -> None:
        while not self._left.wait(_BEAT_S):
            self._control.beat(self.rank)
            if self._streams is not None:
                self._streams.settle()

    @property
    def flights(self) -> FlightRecorder:
        """The flight recorder of this rank."""
        return self._recorder

    @property
    def step(self) -> int:
        """The training step that runs, -1 before the first."""
        return self._watch.step

    @step.setter
    def step(self, step: int) -> None:
        self._watch.step = step
        self._control.begin(self.rank, step)

    def add_group(self, name: str, tuples: Sequence[Sequence[int]]) -> Group:
        """Part the ranks into tuples under a name; all ranks add the same groups in the same order. This rank's tuple as a Group."""
        if name in self._groups:
            raise GraphError("a group has one meaning", came=name, expected="a new name")
        if sorted(r for t in tuples for r in t) != list(range(self.size)):
            raise GraphError(f"group {name} parts the ranks into tuples", came=[list(t) for t in tuples],
                             expected=f"each of 0 to {self.size - 1} once")
        members = next(tuple(t) for t in tuples if self.rank in t)
        number = int.from_bytes(hashlib.sha256(repr((name, [tuple(t) for t in tuples])).encode()).digest()[:4], "little")
        elsewhere = self._streams.lane if self._streams else None
        transport = SharedMemory(self._segment, self._watch, len(self._groups), members, elsewhere)
        group = Group(name, number, members, transport, self._watch, self._recorder, self.place, self._rule)
        self._groups[name] = group
        return group

    def add_groups(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """All groups of a Program, by name."""
        for name in sorted(groups):
            if name != WORLD:
                self.add_group(name, groups[name])

    def group(self, name: str) -> Group:
        """This rank's tuple of a group. GraphError for an unknown name."""
        if name not in self._groups:
            raise GraphError("no such group", came=name, expected=", ".join(self._groups), do="add it with World.add_group")
        return self._groups[name]

    @property
    def rule(self) -> Rule:
        """Which algorithm runs when: the same on all ranks."""
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._rule = rule
        for group in self._groups.values():
            group.follow(rule)

    @property
    def here(self) -> range:
        """The ranks of this host."""
        return self._segment.here

    @property
    def bridge(self) -> int:
        """The process that carries what goes to other hosts, 0 where there are none."""
        return self._segment.bridge

    @property
    def broken(self) -> int:
        """How often this rank's connections to ranks on other hosts broke."""
        return self._streams.broken if self._streams else 0

    def advance(self) -> None:
        """Tell the others that this rank gets on; an executor does it at each launch. RankError if any rank has failed."""
        self._control.advance(self.rank)
        self._watch.stopped("")

    def exchange(self, words: bytes) -> list[bytes]:
        """The `words` of all ranks, in order. Called by all of them; lengths may differ."""
        return exchanged(self.group(WORLD), words)

    def until(self, ready: Callable[[], bool], op: str, rest: Callable[[float], object]) -> None:
        """Return as soon as `ready()`, which a device brings about that waits for other ranks in `op`. Meanwhile this rank gets on: what
        looks after the device's waits is the device's own patience. `rest`: waits so many seconds at most. RankError when any rank failed
        or died, or when one gets on with nothing."""
        def look() -> bool:
            self._control.advance(self.rank)
            return ready()

        self._watch.until(look, (self.rank + 1) % self.size, op, rest)

    def fail(self, error: RankError) -> RankError:
        """Tell all ranks of an error that was seen outside of a wait of theirs; it is raised then."""
        return self._watch.fail(error)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Within it the others wait up to so many seconds for this rank, whatever it does: it saves or compiles. What was asked for around
        it holds too, within and behind it."""
        before = self._control.patience(self.rank)
        self._control.be_patient(self.rank, max(before, time.monotonic_ns() + int(1e9 * seconds)))
        try:
            yield
        finally:
            self._control.be_patient(self.rank, before)

    def abort(self, error: BaseException) -> None:
        """Stop all ranks: each ends its next wait with this error, told as this rank's."""
        if not isinstance(error, RankError):
            told = RankError(f"rank {self.rank} failed", rank=self.rank, step=self.step, came=f"{type(error).__name__}: {error}",
                             do=f"look at the log of rank {self.rank}")
            self._watch.fail(told)

    def close(self) -> None:
        """Leave the job. What others still wait for from this rank never comes."""
        self._left.set()
        self._beating.join()
        if self._streams is not None:
            self._streams.linger(self._watch.deadlines.join)
        self._control.leave(self.rank)
        if self._streams is not None:
            self._streams.close()
        self._watch.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.abort(error)
        self.close()
