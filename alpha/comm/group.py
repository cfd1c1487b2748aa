"""One tuple of ranks that run collectives together, and one collective as a member runs it. Floor 4."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from alpha.comm.flight import FlightRecorder
from alpha.comm.message import OPS, About
from alpha.comm.rule import Rule
from alpha.comm.shm import LENT_BYTES
from alpha.comm.transport import Transport
from alpha.comm.watch import Watch
from alpha.errors import GraphError


class Place(threading.local):
    """What a thread of this rank runs now. `source`: the model's source line of its launch."""

    source = ""


class Group:
    """A rank's tuple of a group.

    name: the group's. number: 32 bits of name and tuples. members: the ranks of this tuple, in order. rule: which algorithm runs when.
    `index`: this rank's place among the members; `size`: how many they are; `together`: how many of them each host has (Rule.together).
    """

    def __init__(self, name: str, number: int, members: Sequence[int], transport: Transport, watch: Watch, recorder: FlightRecorder,
                 place: Place, rule: Rule) -> None:
        self.name, self.number, self.members, self.transport = name, number, tuple(members), transport
        self.rule, self.together = rule, rule.together(members)
        self.index, self.size = self.members.index(watch.rank), len(self.members)
        self._watch, self._recorder, self._place = watch, recorder, place
        self._busy = threading.Lock()
        self._numbers: dict[tuple[int, int] | None, int] = {}
        self._partials: list[np.ndarray] = []

    def follow(self, rule: Rule) -> None:
        """Choose by another rule from now on; all members do."""
        self.rule, self.together = rule, rule.together(self.members)

    @contextmanager
    def call(self, op: str, dtype: str, count: int, nbytes: int, *, algorithm: str = "direct", reduce: str = "",
             place: int = -1, pair: tuple[int, int] | None = None) -> Iterator[Call]:
        """One collective of `count` elements in `nbytes` bytes, recorded. All members give the same words.

        `pair`: of a send, the two members that it is between. Sends are numbered for each pair, for the others do not know of them.

        GraphError where two threads of a rank are in one group at a time.
        """
        if not self._busy.acquire(blocking=False):
            raise GraphError("two threads run collectives of one group at a time", came=f"{op} in group {self.name}",
                             expected="one order of a group's collectives, the same on all members")
        try:
            watch, start = self._watch, time.monotonic()
            number = self._numbers[pair] = self._numbers.get(pair, 0) + 1
            watch.control.at(watch.rank, self.number, number, OPS.index(op), watch.step)
            record = self._recorder.create(self.number, number, op, dtype, nbytes, watch.step, self._place.source)
            watch.stopped(op)
            self._recorder.start(record)
            call = Call(self, About(op, dtype, self.number, number, count, algorithm, reduce, place))
            try:
                yield call
                self.transport.done(call.about)
            except BaseException:
                self.transport.withdraw()
                raise
            self._recorder.finish(record)
            watch.took(op, time.monotonic() - start)
        finally:
            self._busy.release()

    def partials(self, level: int, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays for the sums of the two halves of a tree, of `like`'s size and type; `level`: how deep in the tree."""
        while len(self._partials) < 2 * level + 2:
            self._partials.append(np.empty(self.transport.payload_bytes, np.uint8))
        left, right = (p[: like.nbytes].view(like.dtype) for p in self._partials[2 * level : 2 * level + 2])
        return left, right


class Call:
    """One collective as one member runs it. Messages carry what it is, and what comes must say the same.

    `block`: elements of the longest message. Members are named by their place in the group.
    """

    def __init__(self, group: Group, about: About) -> None:
        self.group, self.about = group, about
        self._sent, self._received = [0] * group.size, [0] * group.size

    def others(self) -> list[int]:
        """The other members, beginning with the next one, so that not all send to the same one first."""
        me, n = self.group.index, self.group.size
        return [(me + i) % n for i in range(1, n)]

    def send(self, to: int, x: np.ndarray, *, kept: bool = False) -> None:
        """One message: contiguous elements; they may be written again at once. `kept`: they are not, before this call ends or the member
        has answered."""
        self.group.transport.send(to, self.about, self._sent[to], x.view(np.uint8), kept=kept)
        self._sent[to] += 1

    def expect(self, source: int, outs: Sequence[np.ndarray | None]) -> None:
        """The next messages of a member belong there (None: of one that is only read), which nobody reads or writes before they came."""
        self.group.transport.expect(source, [None if out is None else out.view(np.uint8) for out in outs])

    def receive(self, source: int, like: np.ndarray) -> np.ndarray:
        """The next message of a member, of `like`'s size and type, to read until `release`."""
        found = self.group.transport.receive(source, self.about, self._received[source], like.nbytes)
        self._received[source] += 1
        return found.view(like.dtype)

    def release(self, source: int) -> None:
        """The message has been read."""
        self.group.transport.release(source)

    def take(self, source: int, out: np.ndarray) -> None:
        """The next message of a member into `out`."""
        move(self.receive(source, out), out)
        self.release(source)


def move(x: np.ndarray, out: np.ndarray) -> None:
    """out = x. Where both are one array, a long one is left alone."""
    if x.nbytes < LENT_BYTES or x.__array_interface__["data"] != out.__array_interface__["data"]:
        out[...] = x
