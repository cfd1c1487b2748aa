"""The events of one profiled step inside a window of time, with no more detail than a screen can show. Floor 8.

A window with more than `limit` events is drawn coarser: events that are shorter than one cell (the window over CELLS) are joined with their
neighbours in the same cell of the same track. A joined bar says how many events it holds and how long they ran together.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alpha.errors import CorruptError, InputError
from alpha.profile.store import connect, refused

CELLS = 1200
LIMIT = 1500
ARROWS = 400
"""Most arrows of one answer; beyond that none is drawn and the answer says so."""

_ORDER = ("host enqueue", "sync waits", "stream", "gaps", "copies", "fills", "worker", "comm", "data loading", "checkpoint writer")


@dataclass(frozen=True)
class Bar:
    """One bar: ns from the origin; `events` joined into it, which ran `busy` ns together."""

    track: str
    name: str
    category: str
    start: int
    stop: int
    flow: int | None
    events: int
    busy: int


def steps(path: Path) -> list[dict[str, Any]]:
    """The steps that have events, with their ranks, in order. Errors as `connect`."""
    found: dict[int, list[int]] = defaultdict(list)
    for step, rank in _rows(path, "SELECT DISTINCT step, rank FROM gpu_timeline ORDER BY step, rank", ()):
        found[step].append(rank)
    return [{"step": step, "ranks": ranks} for step, ranks in found.items()]


def window(path: Path, step: int | None, rank: int | None, first_ns: int | None = None, last_ns: int | None = None,
           limit: int = LIMIT) -> dict[str, Any]:  # fmt: skip
    """The bars and arrows of a step (None: the newest that has events) of one rank (None: all, their clocks aligned).

    `first_ns`, `last_ns`: the window, ns from the origin (the first event of the step); None: to the end of the step itself, without the
    evaluation or checkpoint that follows it in its interval (`extent` is all of it). InputError if the step has no events or the window is
    empty.
    """
    have = steps(path)
    if not have:
        return {"steps": [], "step": None, "rank": rank, "tracks": [], "bars": {}, "arrows": [], "extent": [0, 0],
                "note": "no step was profiled with events yet"}
    step = have[-1]["step"] if step is None else step
    ranks = next((h["ranks"] for h in have if h["step"] == step), None)
    if ranks is None or (rank is not None and rank not in ranks):
        raise InputError("this step has no events", came=f"step {step}, rank {'all' if rank is None else rank}",
                         expected=f"steps {', '.join(str(h['step']) for h in have[-20:])}", do="pick a listed step")
    if first_ns is not None and last_ns is not None and last_ns <= first_ns:
        raise InputError("the window is empty", came=f"{first_ns} to {last_ns} ns", expected="an end after its start")
    bars, end, odd = _bars(path, step, ranks if rank is None else [rank], named=rank is None and len(ranks) > 1)
    origin = min(b.start for b in bars)
    bars = [replace(b, start=b.start - origin, stop=b.stop - origin) for b in bars]
    extent = [0, max(b.stop for b in bars)]
    own = min(extent[1], end - origin) if end is not None and end > origin else extent[1]
    low, high = 0 if first_ns is None else first_ns, own if last_ns is None else last_ns
    tracks = sorted({b.track for b in bars}, key=_track_key)
    inside = [b for b in bars if b.stop >= low and b.start <= high]
    drawn = inside if len(inside) <= limit else _coarse(inside, low, max(1, high - low), limit)
    arrows, left_out = _arrows(drawn, low, high)
    columns = {name: [getattr(b, name) for b in drawn] for name in ("track", "name", "category", "start", "stop", "events", "busy")}
    return {"steps": have, "step": step, "rank": rank, "tracks": tracks, "bars": columns, "arrows": arrows, "arrows_left_out": left_out,
            "extent": extent, "own": [0, own], "window": [low, high], "events": len(inside), "drawn": len(drawn), "odd": odd, "note": ""}


def _rows(path: Path, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    metrics = path / "metrics.sqlite"
    with closing(connect(metrics)) as db:
        try:
            return db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            if "no such table" in str(error):
                return []  # schema 1 had no timeline
            raise refused(metrics, error) from error


def _bars(path: Path, step: int, ranks: list[int], *, named: bool) -> tuple[list[Bar], int | None, int]:
    """All events; when the step itself ended (None: not known); how many events were left out because they end before they start."""
    shift = _shifts(path, step, ranks) if named else dict.fromkeys(ranks, 0)
    rows = _rows(path, "SELECT rank, track, name, category, start_ns, stop_ns, flow FROM gpu_timeline WHERE step = ?", (step,))
    mine = [r for r in rows if r[0] in shift]
    bars = [Bar(f"rank {rank} · {track}" if named else track, name, category, start + shift[rank], stop + shift[rank],
                None if flow is None else flow * len(ranks) + ranks.index(rank), 1, stop - start)
            for rank, track, name, category, start, stop, flow in mine if stop >= start]
    if not bars:
        raise CorruptError("every event of this step ends before it starts", came=f"{path}: step {step}", expected="clocks that go forward",
                           do="look at another step")
    ends = dict(_rows(path, "SELECT rank, began_ns + step_ns FROM step_timing WHERE step = ?", (step,)))
    return bars, max((ends[r] + shift[r] for r in shift if r in ends), default=None), len(mine) - len(bars)


def _shifts(path: Path, step: int, ranks: list[int]) -> dict[int, int]:
    """Rank -> ns to add so that the ranks' clocks agree. CorruptError where the session of a rank is not known."""
    found = dict(_rows(path, "SELECT t.rank, s.unix_ns - s.clock_ns FROM step_timing t JOIN sessions s ON s.session = t.session AND "
                       "s.rank = t.rank WHERE t.step = ?", (step,)))
    missing = [r for r in ranks if r not in found]
    if missing:
        raise CorruptError("the clocks of these ranks cannot be aligned", came=f"{path}: rank {', '.join(map(str, missing))}",
                           expected="a row of sessions and of step_timing for each rank", do="look at one rank at a time")
    return found


def _track_key(track: str) -> tuple[int, int, str]:
    rank, _, own = track.rpartition(" · ")
    return (int(rank.removeprefix("rank ") or 0), next((i for i, o in enumerate(_ORDER) if own.startswith(o)), len(_ORDER)), own)


def _coarse(bars: list[Bar], low: int, span: int, limit: int) -> list[Bar]:
    """At most about `limit` bars: short ones joined cell by cell; cells grow until it is enough."""
    cells = CELLS
    while True:
        width = max(1, span // cells)
        kept: list[Bar] = []
        joined: dict[tuple[str, int], list[Bar]] = defaultdict(list)
        for b in bars:
            if b.stop - b.start >= width:
                kept.append(b)
            else:
                joined[b.track, (b.start - low) // width].append(b)
        made = kept + [_join(group) for group in joined.values()]
        if len(made) <= limit or cells <= 50:
            return sorted(made, key=lambda b: (b.track, b.start))
        cells //= 2


def _join(group: list[Bar]) -> Bar:
    if len(group) == 1:
        return group[0]
    time: Counter[str] = Counter()
    for b in group:
        time[b.category] += b.busy
    names = Counter(b.name for b in group)
    (first, many), others = names.most_common(1)[0], len(names) - 1
    text = f"{many} x {first}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
    return Bar(group[0].track, text, time.most_common(1)[0][0], min(b.start for b in group), max(b.stop for b in group), None, len(group),
               sum(b.busy for b in group))


def _arrows(bars: list[Bar], low: int, high: int) -> tuple[list[list[Any]], int]:
    """[from track, from ns, to track, to ns] of flows whose both ends are drawn one by one inside the window; how many were left out."""
    flows: dict[int, list[Bar]] = defaultdict(list)
    for b in bars:
        if b.flow is not None and b.events == 1:
            flows[b.flow].append(b)
    found = []
    for ends in flows.values():
        hosts = [b for b in ends if b.track.endswith("host enqueue")]
        for host in hosts[:1]:
            found += [[host.track, host.start, b.track, b.start] for b in ends if b is not host and host.stop >= low and b.start <= high]
    return (found, 0) if len(found) <= ARROWS else ([], len(found))
