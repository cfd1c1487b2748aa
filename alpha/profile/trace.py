"""Timeline of a run as trace-event JSON, which Perfetto and chrome://tracing open. Floor 3.

One process a rank, one thread a track, in a fixed order: steps, host enqueue, the host's waits for the device, device streams with their
gaps, copies and fills, workers, communication, data loading, checkpoint writer. A step says how much slower than its steady neighbours it
was, and whether its gaps may be judged (alpha/profile/kernels.py). What runs is a complete event (`X`); an arrow (`s` to `f`) leads from
the enqueue of a launch to each of its executions, or from that of a graph to its first kernel; memory is a counter. In a collective an
arrow leads from the rank that came last to each that waited for it. Of many ranks, what a Plan launches says the Plan, and the logical
shard and microbatch whose text it ran with (none: it reads no text). Ranks are aligned at one moment of each session
(alpha/comm/clock.py): `clock_ns` of each rank is one and the same, and its Unix time is taken from the lowest rank. Times are microseconds
after the first event with three decimals, so no nanosecond is lost.

The file is written step by step into a temporary one beside it, which takes its name at the end: there is a whole trace or none.
Format: "Trace Event Format", Duca and Sinclair.
"""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alpha.errors import CorruptError, InputError, MachineError
from alpha.profile.kernels import PERTURBED, slowdowns
from alpha.profile.noise import WARM_UP
from alpha.profile.timed import timed

ORDER = ("steps", "host enqueue", "sync waits", "stream", "gaps", "copies", "fills", "worker", "comm", "data loading", "checkpoint writer")
"""Tracks from top to bottom (streams and workers by number); others follow by name."""

_Event = tuple[str, str, str, int, int, int | None]
"""Track, name, category, start and stop in ns, flow."""

MEETINGS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
"""Collectives that no rank leaves before the last one has come. A trace in which one does has clocks that do not fit."""

SERIAL = ("steps", "host enqueue", "gaps", "worker")
"""Tracks on which one thing runs at a time: events may nest or follow each other, and crossing ones are an error. On the others an event
that crosses goes to another lane of the track: a kernel may begin before the one ahead of it on its stream has ended."""

PROVENANCE = ("name", "status", "program", "commit", "dirty", "version", "hardware", "devices", "machine", "backend", "backend_version",
              "binaries", "kernel_times", "flops_version", "flops_convention", "peak_flops", "peak_source", "threads", "shards", "started")
"""Keys of run_metadata that travel with a trace."""


@dataclass(frozen=True)
class Written:
    """What a trace holds. arrows: enqueue to execution; unmatched: enqueued launches whose execution was not recorded; waits: arrows of
    collectives, from the rank that came last to one that waited."""

    path: Path
    events: int
    arrows: int
    unmatched: int
    waits: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Session:
    """Where the clock of one rank stood in one session, ns; `unix`: Unix time of the moment, the same for all ranks."""

    clock: int
    unix: int
    began: int
    seen: int

    def at(self, ns: int) -> int:
        """Unix ns of a reading of the rank's monotonic clock."""
        return ns - self.clock + self.unix


@dataclass
class _Lane:
    """One thread: the ends of the events that are open, outermost first, and the start of the last one."""

    tid: int
    last: int = -(1 << 62)
    open: list[int] = field(default_factory=list)

    def takes(self, start: int, stop: int) -> bool:
        """Whether an event fits: not before the last one, and inside or after what is open."""
        if start < self.last:
            return False
        while self.open and self.open[-1] <= start:
            self.open.pop()
        return not self.open or stop <= self.open[-1]

    def add(self, start: int, stop: int) -> None:
        self.last = start
        self.open.append(stop)


def write(
    run_db_path: Path, out_path: Path, steps: Collection[int] | None = None, ranks: Collection[int] | None = None, *, ungated: bool = False
) -> Written:  # fmt: skip
    """Write the timeline of a run's metrics.sqlite; gzipped where `out_path` ends with .gz.

    steps, ranks: which ones, default all that have a timeline. ungated: marked so, whatever the metrics say.
    InputError: no such run, nothing was profiled, a step or rank without a timeline. CorruptError: an event without an end, a clock that
    stepped backwards, crossing events of one stream, an arrow without a start. MachineError: no room or permission to write.
    """
    with timed(run_db_path) as db:
        chosen = _Chosen(db, run_db_path, steps, ranks)
        with _opened(out_path) as put:
            return _Writer(db, chosen, put, ungated).all(out_path)


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[str], object]]:
    """A function that writes text to `path`, which appears when the block ends without an error. A link is followed. InputError where
    something stands there that is no file: it would be lost for a file in its place."""
    real = Path(os.path.realpath(path))
    part = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        if not _is_free(path):
            raise InputError("the trace goes into a regular file", came=f"{path}, which is something else",
                             expected="a new file, or one to replace", do="name another file: --out FILE")
        with part.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0, compresslevel=5) as packed:
                    yield lambda text: packed.write(text.encode())
            else:
                yield lambda text: raw.write(text.encode())
        os.replace(part, real)
    except OSError as error:
        raise MachineError("the trace cannot be written", came=f"{path}: {error}", expected="room and permission there") from error
    finally:
        with suppress(OSError):  # its folder may not be one
            part.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    """Whether nothing stands there, or a regular file."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return True


class _Chosen:
    """Which steps and ranks, and the clocks of their sessions; checked."""

    def __init__(self, db: sqlite3.Connection, path: Path, steps: Collection[int] | None, ranks: Collection[int] | None) -> None:
        also = " UNION SELECT step, rank FROM collectives" if _has(db, "collectives") else ""
        have = db.execute(f"SELECT step, rank FROM gpu_timeline{also} ORDER BY step, rank").fetchall()
        have = list(dict.fromkeys(have))
        if not have:
            raise InputError("the run has no timeline", came=path, expected="at least one profiled step", do="train on until there is one")
        self.steps = _picked("step", steps, [s for s, _ in have])
        self.ranks = _picked("rank", ranks, [r for _, r in have])
        self.cells = [(s, r) for s, r in have if s in set(self.steps) and r in set(self.ranks)]
        self.session_of = {(s, r): n for s, r, n in db.execute("SELECT step, rank, session FROM step_timing")}
        self.sessions = self._sessions(db)
        self.slowdown = _slowdowns(db)
        for cell in self.cells:
            if (self.session_of.get(cell), cell[1]) not in self.sessions:
                raise CorruptError("a step has a timeline but no session, so its clock is unknown",
                                   came=f"{path}: step {cell[0]}, rank {cell[1]}", expected="its rows in step_timing and sessions")
        self._in_order(db)

    def _sessions(self, db: sqlite3.Connection) -> dict[tuple[int, int], _Session]:
        """All of them; those of the chosen steps are in order. Others are not drawn: where the clock of the day was set back between two
        sessions, the steps of either one alone make a trace."""
        drawn = {(self.session_of.get(cell), cell[1]) for cell in self.cells}
        found: dict[tuple[int, int], _Session] = {}
        unix: dict[int, int] = {}
        ends: dict[int, tuple[int, int]] = {}
        for n, rank, stamp, clock, began, seen in db.execute(
                "SELECT session, rank, unix_ns, clock_ns, began_ns, seen_ns FROM sessions ORDER BY session, rank"):
            here = found[n, rank] = _Session(clock, unix.setdefault(n, stamp), began, seen)
            if (n, rank) not in drawn:
                continue
            if not began <= clock <= seen:
                raise _backwards(f"session {n}, rank {rank}: began at {began}, that moment at {clock}, last seen at {seen} ns",
                                 "three times in order")
            before = ends.get(rank)
            if before is not None and here.at(began) < before[1]:
                first = min(s for s, r in self.cells if r == rank and self.session_of.get((s, r)) == n)
                raise _backwards(f"rank {rank}: session {n} began {before[1] - here.at(began)} ns before session {before[0]} was last seen",
                                 "sessions one after the other", f"take steps before {first}, or those from it on: --step")
            ends[rank] = (n, here.at(seen))
        return found

    def _in_order(self, db: sqlite3.Connection) -> None:
        """Step intervals of one session follow each other."""
        last: dict[tuple[int, int], tuple[int, int]] = {}
        for step, rank, session, began, wall in db.execute("SELECT step, rank, session, began_ns, wall_ns FROM step_timing ORDER BY step"):
            if rank not in self.ranks:
                continue
            before = last.get((rank, session))
            if wall < 0 or (before is not None and began < before[1]):
                why = f", step {before[0]} ended at {before[1]} ns" if before and wall >= 0 else f" and lasted {wall} ns"
                raise _backwards(f"rank {rank}: step {step} began at {began} ns{why}", "steps one after the other")
            last[rank, session] = (step, began + wall)


def _backwards(came: str, expected: str, do: str = "leave that step, rank or session out") -> CorruptError:
    return CorruptError("a clock stepped backwards, so the timeline cannot be drawn", came=came, expected=expected, do=do)


def _picked(what: str, asked: Collection[int] | None, have: Sequence[int]) -> list[int]:
    every = sorted(set(have))
    missing = sorted(set(asked or ()) - set(every))
    if missing or (asked is not None and not asked):
        shown = ", ".join(map(str, every[:20])) + (f" ... {every[-1]}" if len(every) > 20 else "")
        raise InputError(f"no timeline of that {what}", came=", ".join(map(str, missing)) or f"no {what}", expected=f"among {shown}")
    return every if asked is None else sorted(set(asked))


class _Writer:
    """Writes events one by one; knows the lanes of each rank and the zero of time."""

    def __init__(self, db: sqlite3.Connection, chosen: _Chosen, put: Callable[[str], object], ungated: bool) -> None:
        self.db, self.chosen, self.put = db, chosen, put
        self.meta = {str(k): str(v) for k, v in db.execute("SELECT key, value FROM run_metadata")}
        if ungated:
            self.meta["status"] = "UNGATED"
        marks = ",".join("?" * len(chosen.ranks))
        tracks = [t for (t,) in db.execute(f"SELECT DISTINCT track FROM gpu_timeline WHERE rank IN ({marks})", chosen.ranks)]
        also = {"comm"} if _has(db, "collectives") else set()
        self.index = {t: i for i, t in enumerate(sorted({"steps", *also, *tracks}, key=_place))}
        self.lanes: dict[tuple[int, str], list[_Lane]] = {}
        self.zero = self._zero()
        self.events = self.arrows = self.unmatched = self.waits = 0
        self.comm: dict[int, list[tuple[int, int, int]]] = {}

    def _zero(self) -> int:
        """Unix ns of the first thing shown."""
        first = []
        for step, rank in self.chosen.cells:
            began = self.db.execute("SELECT began_ns FROM step_timing WHERE step = ? AND rank = ?", (step, rank)).fetchone()[0]
            start = self.db.execute("SELECT min(start_ns) FROM gpu_timeline WHERE step = ? AND rank = ?", (step, rank)).fetchone()[0]
            first.append(self._session(step, rank).at(min(began, start) if isinstance(start, int) else began))
        return min(first)

    def _session(self, step: int, rank: int) -> _Session:
        return self.chosen.sessions[self.chosen.session_of[step, rank], rank]

    def all(self, path: Path) -> Written:
        """Header, then each step of each rank, then what has been told apart into threads."""
        c = self.chosen
        self.put('{"displayTimeUnit":"ns","otherData":' + json.dumps(self._other()) + ',"traceEvents":[\n')
        for i, rank in enumerate(c.ranks):
            self._process(rank, first=i == 0)
        for step in c.steps:
            self.comm = {}
            for _, rank in (cell for cell in c.cells if cell[0] == step):
                self._step(step, rank)
            self._meet(step)
        self.put("\n]}\n")
        return Written(path, self.events, self.arrows, self.unmatched, self.waits, tuple(c.steps), tuple(c.ranks))

    def _other(self) -> dict[str, str]:
        """Provenance (4.1 of the format: any further top-level data)."""
        facts = {k: self.meta[k] for k in PROVENANCE if k in self.meta}
        facts["status"] = self.meta.get("status", "unknown, so UNGATED")
        facts |= {"zero_unix_ns": str(self.zero), "time": "microseconds after zero_unix_ns; ranks aligned at one moment of each session"}
        return facts

    def _process(self, rank: int, first: bool) -> None:
        host = self.db.execute("SELECT host FROM sessions WHERE rank = ? ORDER BY session DESC", (rank,)).fetchone()[0]
        mark = "" if self.meta.get("status") == "GATED" else " UNGATED"
        pid = rank + 1  # process 0 is the idle process to a viewer
        labels = ", ".join(x for x in (host, self.meta.get("hardware"), self.meta.get("name")) if x)
        number = str(rank).zfill(len(str(self.chosen.ranks[-1])))  # Perfetto sorts processes by name
        named: dict[str, dict[str, object]] = {"process_name": {"name": f"rank {number}{mark}"}, "process_sort_index": {"sort_index": rank},
                                               "process_labels": {"labels": labels}}
        for name, args in named.items():
            self._event({"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}, first=first)
            first = False

    def _event(self, event: dict[str, Any], ns: int | None = None, dur: int | None = None, first: bool = False) -> None:
        text = json.dumps(event, separators=(",", ":"), ensure_ascii=False)[:-1]
        if ns is not None:
            text += f',"ts":{_us(ns - self.zero)}'
        if dur is not None:
            text += f',"dur":{_us(dur)}'
        self.put(("" if first else ",\n") + text + "}")
        self.events += 1

    def _lane(self, rank: int, track: str, start: int, stop: int, what: str) -> int:
        """The thread of an event; a new lane is named when it is first used."""
        lanes = self.lanes.setdefault((rank, track), [])
        for lane in lanes:
            if lane.takes(start, stop):
                lane.add(start, stop)
                return lane.tid
        if lanes and _kind(track) in SERIAL:
            raise CorruptError("two events of one track cross", came=what, expected="events that nest or follow each other",
                               do="a clock may have stepped: leave that step out")
        # unique in the whole trace, for some readers know threads by number alone; in the order of the tracks, for Perfetto sorts by
        # number and not by sort_index
        place = self.index[track] * 1000 + len(lanes)
        lane = _Lane((rank + 1) * 1_000_000 + place + 1)
        lanes.append(lane)
        lane.add(start, stop)
        named: dict[str, dict[str, object]] = {"thread_name": {"name": track if len(lanes) == 1 else f"{track} ({len(lanes)})"},
                                               "thread_sort_index": {"sort_index": place}}
        for name, args in named.items():
            self._event({"ph": "M", "name": name, "pid": rank + 1, "tid": lane.tid, "args": args})
        return lane.tid

    def _step(self, step: int, rank: int) -> None:
        """Everything of one step of one rank."""
        session = self._session(step, rank)
        began, wall, length = self.db.execute("SELECT began_ns, wall_ns, step_ns FROM step_timing WHERE step = ? AND rank = ?",
                                              (step, rank)).fetchone()
        rows: list[_Event] = [("steps", f"step {step}", "step", began, began + wall, None)]
        rows += self.db.execute("SELECT track, name, category, start_ns, stop_ns, flow FROM gpu_timeline WHERE step = ? AND rank = ?",
                                (step, rank))
        if len(rows) == 1 and _has(self.db, "collectives"):  # not profiled; only its collectives were told (machine.debug)
            rows += self.db.execute("SELECT 'comm', op, 'comm', asked_ns, ended_ns, NULL FROM collectives WHERE step = ? AND rank = ?",
                                    (step, rank))
        for track, name, _, start, stop, _ in rows:
            self._sound(step, rank, track, name, start, stop, session)
        rows = _handed_over(rows)
        rows.sort(key=lambda r: (self.index[r[0]], r[3], -r[4]))
        calls = self._calls(step, rank)
        ends: dict[int, list[tuple[str, int, int, int]]] = {}
        for track, name, category, start, stop, flow in rows:
            tid = self._lane(rank, track, session.at(start), session.at(stop), f"step {step}, rank {rank}, {track}: {name}")
            call = next((said for began, ended, said in calls if began <= start and stop <= ended), {})
            args = {"step": step, **(self._slower(step, rank) if track == "steps" else call)}
            self._event({"ph": "X", "name": name, "cat": category, "pid": rank + 1, "tid": tid, "args": args}, session.at(start),
                        stop - start)
            if track == "comm":
                self.comm.setdefault(rank, []).append((session.at(start), session.at(stop), tid))
            if flow is not None:
                ends.setdefault(flow, []).append((track, tid, session.at(start), stop - start))
        for flow, found in ends.items():
            self._arrows(step, rank, flow, found)
        memory = self.db.execute("SELECT arena, actual FROM memory WHERE step = ? AND rank = ? ORDER BY arena", (step, rank)).fetchall()
        if memory:
            self._event({"ph": "C", "name": "memory, bytes", "pid": rank + 1, "tid": 0, "args": dict(memory)}, session.at(began + length))

    def _calls(self, step: int, rank: int) -> list[tuple[int, int, dict[str, object]]]:
        """From when to when each Plan of the step ran, and what its launches say of it."""
        if not _has(self.db, "calls"):
            return []
        found = []
        for plan, shard, micro, start, stop in self.db.execute(
                "SELECT plan, shard, micro, began_ns, ended_ns FROM calls WHERE step = ? AND rank = ? ORDER BY call", (step, rank)):
            text = {"shard": shard, "microbatch": micro}
            found.append((start, stop, {"plan": plan, **{name: n for name, n in text.items() if n is not None}}))
        return found

    def _slower(self, step: int, rank: int) -> dict[str, str]:
        """What a step says of itself: its slowdown, and whether gaps in it may be judged."""
        slower = self.chosen.slowdown.get((step, rank))
        if slower is None:
            return {"slowdown": "not known: too few steady neighbours", "gaps": "not judged"}
        return {"slowdown": f"{slower * 100:+.2f} %", "gaps": "judged" if slower <= PERTURBED else "perturbed, not judged"}

    def _sound(self, step: int, rank: int, track: str, name: str, start: Any, stop: Any, session: _Session) -> None:
        what = f"step {step}, rank {rank}, {track}: {name}"
        if not isinstance(start, int) or not isinstance(stop, int):
            raise CorruptError("an event has no end or no start", came=f"{what} from {start} to {stop}", expected="integer nanoseconds",
                               do="leave that step out")
        if stop < start:
            raise CorruptError("an event ends before it starts", came=f"{what} from {start} to {stop} ns",
                               expected="an end at or after the start", do="leave that step out")
        if start < session.began:
            raise _backwards(f"{what} starts at {start} ns", f"not before its session began at {session.began} ns")

    def _arrows(self, step: int, rank: int, flow: int, found: list[tuple[str, int, int, int]]) -> None:
        """Arrows of one launch. A viewer cannot bind an arrow to an event of no length, so those have none."""
        hosts = [e for e in found if e[0] == "host enqueue"]
        others = [e for e in found if e[0] != "host enqueue"]
        what = f"step {step}, rank {rank}, arrow {flow}"
        if len(hosts) != 1:
            raise CorruptError("an arrow needs one start", came=f"{what}: {len(hosts)} events on the host",
                               expected="one event on 'host enqueue'", do="leave that step out")
        _, tid, at, length = hosts[0]
        self.unmatched += not others
        for _, there, start, dur in others:
            if start < at:
                raise _backwards(f"{what}: execution starts {at - start} ns before it was enqueued", "execution after the enqueue")
            if not length or not dur:
                continue
            self.arrows += 1
            both = {"name": "launch", "cat": "launch", "pid": rank + 1, "id": self.arrows}
            self._event({"ph": "s", **both, "tid": tid}, at)
            self._event({"ph": "f", "bp": "e", **both, "tid": there}, start)

    def _meet(self, step: int) -> None:
        """Arrows between ranks, of the collectives of a step whose clocks and slices are all there."""
        if not _has(self.db, "collectives"):
            return
        met: dict[tuple[int, int, str], list[tuple[int, int, int]]] = {}
        for rank, group, call, op, asked, ended in self.db.execute(
                "SELECT rank, grp, call, op, asked_ns, ended_ns FROM collectives WHERE step = ? ORDER BY rank", (step,)):
            if op in MEETINGS and rank in self.comm:
                at = self._session(step, rank).at
                met.setdefault((group, call, op), []).append((rank, at(asked), at(ended)))
        for (group, call, op), members in met.items():
            last, came, _ = max(members, key=lambda m: m[1])
            for rank, _, ended in members:
                if ended < came:
                    what = f"step {step}, {op} number {call} of group {group:#x}"
                    raise CorruptError("the clocks of two ranks do not fit",
                                       came=f"{what}: rank {rank} left it {came - ended} ns before rank {last} came",
                                       expected="nobody leaves before all came", do="look at one rank at a time: --rank")
                ends = [next((tid for start, stop, tid in self.comm[r] if start <= came < stop), None) for r in (last, rank)]
                if rank == last or None in ends:
                    continue
                self.waits += 1
                both = {"name": "came last", "cat": "collective", "id": self.waits}
                self._event({"ph": "s", **both, "pid": last + 1, "tid": ends[0]}, came)
                self._event({"ph": "f", "bp": "e", **both, "pid": rank + 1, "tid": ends[1]}, came)


def _has(db: sqlite3.Connection, table: str) -> bool:
    """Runs of one rank, and those of older releases, have no such table."""
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone())


def _slowdowns(db: sqlite3.Connection) -> dict[tuple[int, int], float]:
    """(step, rank) of a profiled step -> by how much it was slower than its steady neighbours, where that is known."""
    rows = db.execute("SELECT t.step, t.rank, t.session, t.step_ns, t.profiled, t.step >= s.first_step + ? FROM step_timing t "
                      "JOIN sessions s ON s.session = t.session AND s.rank = t.rank", (WARM_UP,)).fetchall()
    if not rows:
        return {}
    step, rank, session, ns, profiled, late = np.array(rows, np.int64).T
    found = slowdowns(step, rank + session * (rank.max() + 1), ns, (profiled == 0) & (late == 1), profiled == 1)
    return {(int(s), int(r)): float(x) for s, r, x in zip(step, rank, found) if not np.isnan(x)}


def _handed_over(rows: list[_Event]) -> list[_Event]:
    """Executions on a device's stream, none before it was handed over. Devices stamp between launches, so that one which found its stream
    idle has the stamp of the end of the launch before it; it cannot have begun before the host began to hand it over."""
    called: dict[int | None, int] = {flow: start for track, _, _, start, _, flow in rows if track == "host enqueue" and flow is not None}
    found = []
    for track, name, category, start, stop, flow in rows:
        if flow in called and _kind(track) == "stream" and start < called[flow] < stop:
            start = called[flow]
        found.append((track, name, category, start, stop, flow))
    return found


def _kind(track: str) -> str:
    head, _, number = track.rpartition(" ")
    return head if number.isdigit() else track


def _place(track: str) -> tuple[int, str, int]:
    """Sort key of a track."""
    kind = _kind(track)
    number = int(track.rpartition(" ")[2]) if kind != track else 0
    return ORDER.index(kind) if kind in ORDER else len(ORDER), kind, number


def _us(ns: int) -> str:
    """Microseconds as a decimal that keeps every nanosecond."""
    whole, rest = divmod(ns, 1000)
    return f"{whole}.{rest:03d}"
