"""What one rank of many spends in collectives, step by step. Floor 6.

Two clocks look on that know nothing of each other: the flight recorder stamps every collective (alpha/comm/flight.py), and the executor
stamps when the compute stream waits for the stream beside it. Both read CLOCK_MONOTONIC. Laid on each other they give what is exposed, and
what is hidden behind compute. The collectives of validations and checkpoints count in those phases and are left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.comm.flight import Record
from alpha.comm.world import World
from alpha.errors import GraphError
from alpha.graph.order import COMM
from alpha.graph.plan import Launch, Plan, Step
from alpha.profile.intervals import apart
from alpha.profile.phases import PHASES
from alpha.profile.recorder import Recorder
from alpha.profile.store import Store

_COMM, _NEVER = list(PHASES).index("comm"), np.iinfo(np.int64).max

Spans = Sequence[tuple[int, int]]
"""(start, stop) in ns: in order, none overlaps the next."""


@dataclass(frozen=True)
class Spent:
    """A collective in a step of a rank, ns. `stream`: 'comm' or 'compute'."""

    record: Record
    stream: str
    exposed: int
    overlapped: int


def spent(records: Sequence[Record], beside: Spans, waits: Spans, alone: Spans, busy: Spans = ()) -> list[Spent]:
    """What each of `records` took of a step. beside: when the stream beside compute ran something; waits: when compute waited for it;
    alone: when the computing thread itself was in a collective, which is exposed but for when a device was `busy` beside it. What lies in
    neither belongs to no step."""
    low, high = np.array([(r.created, r.finished) for r in records], np.int64).reshape(-1, 2).T
    start, stop = np.array(waits, np.int64).reshape(-1, 2).T
    exposed = _shared(low, high, start, stop).tolist()
    overlapped = _shared(low, high, np.append(0, stop), np.append(start, _NEVER)).tolist()
    covered = _shared(low, high, *apart(*np.array(busy, np.int64).reshape(-1, 2).T)).tolist()
    found = []
    for r, on_stream, on_compute, e, o, c in zip(records, _within(low, high, beside), _within(low, high, alone), exposed, overlapped,
                                                 covered):
        if on_stream:
            found.append(Spent(r, "comm", e, o))
        elif on_compute:
            found.append(Spent(r, "compute", r.finished - r.created - c, c))
    return found


def _shared(low: np.ndarray, high: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """i64[n]: how much of each [low, high) lies in the intervals [start, stop) together."""
    inside = np.minimum(high[:, None], stop) - np.maximum(low[:, None], start)
    return np.asarray(np.maximum(0, inside).sum(axis=1))


def _within(low: np.ndarray, high: np.ndarray, spans: Spans) -> np.ndarray:
    """bool[n]: whether each [low, high) has ended and lies in one of the spans."""
    start, stop = np.array([(0, 0), *spans], np.int64).T
    return (high > 0) & (high <= stop[np.searchsorted(start, low, side="right") - 1])


def rows(found: Sequence[Spent], step: int, rank: int, each: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(table, row) of a step. `each`: every collective too."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for x in found:
        r = x.record
        row = sums.setdefault((r.op, x.stream), {"step": step, "rank": rank, "op": r.op, "stream": x.stream,
                                                 **dict.fromkeys(("calls", "nbytes", "total_ns", "exposed_ns", "overlapped_ns"), 0)})
        for name, n in (("calls", 1), ("nbytes", r.nbytes), ("total_ns", r.finished - r.created), ("exposed_ns", x.exposed),
                        ("overlapped_ns", x.overlapped)):
            row[name] += n
        if each:
            yield "collectives", {"step": step, "rank": rank, "grp": r.group, "call": r.call, "op": r.op, "stream": x.stream,
                                  "dtype": r.dtype, "nbytes": r.nbytes, "asked_ns": r.created, "ended_ns": r.finished, "source": r.source}
    yield from (("communication", row) for row in sums.values())


def called(schedule: Sequence[Step], calls: Sequence[tuple[str, int, int]], step: int, rank: int) -> list[dict[str, Any]]:
    """Rows of the table `calls`: which call of the schedule each Plan that ran was. calls: (name, start, stop) in the order in which they
    ran. GraphError where the schedule has another Plan in that place."""
    found = []
    for number, (name, began, ended) in enumerate(calls):
        call = schedule[number] if number < len(schedule) else None
        if call is None or call.plan != name:
            raise GraphError("a step ran another Plan than its schedule has", came=f"call {number} of step {step}: {name}",
                             expected="nothing more" if call is None else call.plan)
        found.append({"step": step, "rank": rank, "call": number, "plan": name, "shard": call.shard, "micro": call.micro,
                      "began_ns": began, "ended_ns": ended})
    return found


class RankRecorder(Recorder):
    """A recorder that also tells the collectives of each step interval, of one rank of many, and of a profiled one which call of the rank's
    `schedule` ran when. For debugging, `each`: both of every step, one by one; `log`: called with the step, and with every collective as
    words."""

    def __init__(self, store: Store, world: World, schedule: Sequence[Step]) -> None:
        super().__init__(store)
        self._schedule = schedule
        self.each = False
        self.log: Callable[..., None] | None = None
        self._flights, self._first = world.flights, world.flights.written
        self._beside: list[tuple[int, int]] = []
        self._alone: list[tuple[int, int]] = []
        self._waits: list[tuple[int, int]] = []
        self._on_device: list[Record] = []
        """Collectives among GPUs, which no flight recorder sees."""
        self._calls: list[tuple[str, int, int]] = []
        """Name of a Plan that ran, and from when to when."""

    def begin(self, step: int, *, profiled: bool = False, ahead: bool = False) -> None:
        """As of every recorder; the collectives of the interval before are told. Those that the host began behind the end of a step, with
        the next one under way on a device, belong to this interval, as the host's time does."""
        behind = self._tell(last=True, ended=self._done if ahead else _NEVER)
        self._first = self._flights.written - behind
        self._beside, self._alone, self._waits, self._calls, self._on_device = [], [], [], [], []
        super().begin(step, profiled=profiled, ahead=ahead)

    def so_far(self) -> None:
        """As of every recorder."""
        self._tell()
        super().so_far()

    def finish(self) -> None:
        """As of every recorder."""
        self._tell(last=True)
        super().finish()

    def ran(self, plan: Plan, marks: Sequence[int], waits: Sequence[tuple[int, int]] = (), checked: tuple[int, int] | None = None) -> None:
        """As of every recorder. Without `waits` all launches ran on the computing thread, one after the other."""
        super().ran(plan, marks, waits, checked)
        self._waits += waits
        times = [*marks, *(t for wait in waits for t in wait)] or [self.clock()]
        self._calls.append((plan.name, min(times), max(times)))
        where = self._beside if waits else self._alone
        where += [(marks[2 * i], marks[2 * i + 1]) for i, x in enumerate(plan.launches) if x.stream == COMM]

    def ran_beside(self, launches: Sequence[Launch], times: Sequence[tuple[int, int]]) -> None:
        """As of every recorder; each is a collective of the step."""
        super().ran_beside(launches, times)
        self._beside += times
        for x, (start, stop) in zip(launches, times, strict=True):
            operands = x.ins or x.outs
            self._on_device.append(Record(0, len(self._on_device) + 1, x.op, operands[0].type.dtype, sum(r.type.nbytes for r in operands),
                                          self._at.step or 0, start, start, stop, x.source))

    def _tell(self, *, last: bool = False, ended: int = _NEVER) -> int:
        """Tell the collectives that began before `ended`. Returns how many did not, as the flight recorder knows."""
        step = self._at.step
        if step is None or self.store is None:
            return 0
        records, asked = self._flights.records(self._first), self._flights.written - self._first
        if len(records) < asked:
            raise GraphError("a step has more collectives than the flight recorder keeps", came=asked, expected=f"at most {len(records)}",
                             do="raise RECORDS in alpha/comm/flight.py")
        alone = sorted([*self._alone, *((start, min(stop, ended)) for phase, start, stop in self._at.host if phase == _COMM)])
        busy = [(start, stop) for _, start, stop in self._at.device]
        records = [r for r in records if r.created < ended]
        behind = asked - len(records)
        records += self._on_device
        beside, waits, rank, each = self._beside, self._waits, self.store.rank, self.profiling or self.each
        if self._on_device:
            waits = sorted([*waits, *self.waits_on_device()])
        for r in records if last and self.log else ():
            self.log(step, op=r.op, group=r.group, call=r.call, dtype=r.dtype, nbytes=r.nbytes, us=(r.finished - r.created) / 1e3,
                     source=r.source)  # type: ignore[misc]
        self.store.later(lambda: rows(spent(records, beside, waits, alone, busy), step, rank, each))
        for row in called(self._schedule, self._calls, step, rank) if each else ():
            self.store.add("calls", row)
        return behind
