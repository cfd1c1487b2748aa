"""Cases of traces of many ranks (alpha/profile/trace.py): drawn timelines, collectives and calls, told again with lists. Floor 7.

Times are drawn on one clock; each rank writes them down on its own. `Drawn.want` says what must be in the trace.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs, words
from alpha.gates.contracts.profile.support import Case, folder
from alpha.profile import trace
from alpha.profile.schema import COMMUNICATION, TABLES, VERSION

TRACKS = ("steps", "host enqueue", "sync waits", "stream 0", "stream 2", "stream 10", "gaps", "copies", "fills", "worker 1", "comm",
          "data loading", "checkpoint writer", "aside 7", "beside")
"""From top to bottom; the last two are of no kind that is known."""

MEET = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")
STEPS = 9
"""Of each of two sessions; the third and the sixth are profiled."""

Event = tuple[str, str, str, int, int, "int | None"]
Cell = tuple[int, int]


class Drawn:
    """A run of several ranks. events: (step, rank) -> its timeline, ns after its session's moment; `told`: (step, rank) -> collectives
    (group, call, op, asked, ended); `calls`: (plan, shard, microbatch, began, ended); `timing`: (began, wall, step_ns, profiled)."""

    def __init__(self, rng: np.random.Generator, ranks: int, collectives: bool) -> None:
        self.ranks, self.collectives, self.rng = ranks, collectives, rng
        self.unix = [10**18, 10**18 + 10**9]
        self.clock = [[int(rng.integers(1 << 30, 1 << 40)) + s * 10**9 for s in range(2)] for _ in range(ranks)]
        self.timing: dict[Cell, tuple[int, int, int, int]] = {}
        self.events: dict[Cell, list[Event]] = {}
        self.told: dict[Cell, list[tuple[int, int, str, int, int]]] = {}
        self.calls: dict[Cell, list[tuple[str, int | None, int | None, int, int]]] = {}
        self.memory: dict[Cell, dict[str, int]] = {}
        self.slow = {step: float(rng.choice([1.0, 1.015, 1.03, 2.0])) for step in range(2 * STEPS)}
        for step in range(2 * STEPS):
            for rank in range(ranks):
                profiled, began = int(step % STEPS in (2, 5)), 2000 * (step % STEPS) + int(rng.integers(0, 20))
                length = int((700 + rng.integers(0, 9)) * (self.slow[step] if profiled else 1))
                self.timing[step, rank] = began, length + 50, length, profiled
                if profiled:
                    self._profiled(step, rank, began)
            if collectives:
                self._together(step)

    def _profiled(self, step: int, rank: int, began: int) -> None:
        rng, rows = self.rng, list[Event]()
        at = free = began + int(rng.integers(0, 40))
        for flow in range(int(rng.integers(2, 8))):
            handed = int(rng.integers(0, 30))
            rows.append(("host enqueue", f"op{flow}", "forward", at, at + handed, flow))
            free = max(free, at) + int(rng.integers(0, 9))
            for track in rng.choice(["stream 0", "stream 2", "stream 10", "worker 1"], int(rng.integers(0, 3)), replace=False).tolist():
                length = int(rng.integers(0, 60)) * int(rng.random() < 0.9)
                start = free
                if track == "stream 0" and length > 20 and rng.random() < 0.3:
                    start = at - 5  # stamped when the launch before it ended: its stream was idle
                rows.append((track, f"op{flow}", "forward", start, free + length, flow))
                free += length if track != "stream 2" else length // 2  # on that stream kernels may cross
            at += handed + int(rng.integers(0, 9))
        for track, name in (("copies", "HtoD"), ("fills", "memset"), ("data loading", "batch"), ("sync waits", "sync"),
                            ("aside 7", "x"), ("beside", "y"), ("checkpoint writer", "save"), ("gaps", "gap")):
            if rng.random() < 0.6:
                late = 7000 * int(track == "checkpoint writer" and step % STEPS == 2 and rng.random() < 0.7)  # behind that of a later step
                start = began + int(rng.integers(0, 300)) + late
                stop = start + int(rng.integers(0, 90))
                rows.append((track, name, "comm", start, stop, None))
                if track == "fills":  # one that ends with it
                    rows.append((track, "inner", "comm", (start + stop + 1) // 2, stop, None))
        self.events[step, rank] = rows
        self.memory[step, rank] = {name: int(rng.integers(1 << 30)) for name in ("act", "params")[: int(rng.integers(0, 3))]}
        for i in range(int(rng.integers(0, 3)) if self.collectives else 0):
            shard, micro = (None if rng.random() < 0.4 else int(rng.integers(9)) for _ in range(2))
            self.calls.setdefault((step, rank), []).append((f"plan{i}", shard, micro, began + 150 * i, began + 150 * i + 140))

    def _together(self, step: int) -> None:
        """Collectives of all ranks: nobody leaves before the last one came, but who sends does."""
        rng, began = self.rng, max(self.timing[step, rank][0] for rank in range(self.ranks))
        for call in range(int(rng.integers(0, 4))):
            op = str(rng.choice([*MEET, "send"]))
            asked = [began + 150 * call + int(rng.integers(0, 50)) for _ in range(self.ranks)]
            for rank, at in enumerate(asked):
                ended = (max(asked) if op in MEET else at) + int(rng.integers(0, 40))
                self.told.setdefault((step, rank), []).append((77, call, op, at, ended))
                if (step, rank) in self.events and rng.random() < 0.8:
                    self.events[step, rank].append(("comm", op, "comm", at, ended, None))

    def write(self, path: Path, facts: dict[str, str]) -> None:
        """Every row on its rank's own clock."""
        with closing(sqlite3.connect(path)) as db:
            db.executescript(TABLES + (COMMUNICATION if self.collectives else "") + f"PRAGMA user_version={VERSION};")
            db.executemany("INSERT INTO run_metadata VALUES (?, ?)", facts.items())
            for rank in range(self.ranks):
                for s, clock in enumerate(self.clock[rank]):
                    db.execute("INSERT INTO sessions VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, 'finished')",
                               (s, rank, f"host{s}{rank}", STEPS * s, self.unix[s] + 99 * rank, clock, clock - 9, clock, clock + 10**8))
            for (step, rank), (began, wall, length, profiled) in self.timing.items():
                s = step // STEPS
                row = {"step": step, "rank": rank, "session": s, "began_ns": self.clock[rank][s] + began, "wall_ns": wall,
                       "step_ns": length, "profiled": profiled, "launches": 1, "enqueue_ns": 0, "unexplained_ns": 0}
                db.execute(f"INSERT INTO step_timing ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
            for (step, rank), rows in self.events.items():
                at = self.clock[rank][step // STEPS]
                db.executemany("INSERT INTO gpu_timeline VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                               [(step, rank, t, n, c, at + a, at + b, f) for t, n, c, a, b, f in rows])
            for (step, rank), arenas in self.memory.items():
                db.executemany("INSERT INTO memory VALUES (?, ?, ?, 1, ?)", [(step, rank, a, n) for a, n in arenas.items()])
            for (step, rank), found in self.told.items():
                at = self.clock[rank][step // STEPS]
                db.executemany("INSERT INTO collectives VALUES (?, ?, ?, ?, ?, 'comm', 'f32', 4, ?, ?, '')",
                               [(step, rank, g, c, op, at + a, at + b) for g, c, op, a, b in found])
            for (step, rank), calls in self.calls.items():
                at = self.clock[rank][step // STEPS]
                db.executemany("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                               [(step, rank, i, p, sh, m, at + a, at + b) for i, (p, sh, m, a, b) in enumerate(calls)])
            db.commit()

    def slower(self, step: int, rank: int) -> dict[str, str]:
        """What the trace says of a step: against up to five steady ones on either side, at least three in all."""
        steady = [s for s in range(2 * STEPS) if s // STEPS == step // STEPS and s % STEPS >= 3 and not self.timing[s, rank][3]]
        near = [s for s in steady if s < step][-5:] + [s for s in steady if s > step][:5]
        if not self.timing[step, rank][3] or len(near) < 3:
            return {"slowdown": "not known: too few steady neighbours", "gaps": "not judged"}
        by = self.timing[step, rank][2] / median(self.timing[s, rank][2] for s in near) - 1
        return {"slowdown": f"{100 * by:+.2f} %", "gaps": "perturbed, not judged" if by > 0.02 else "judged"}

    def want(self, steps: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
        """Slices, arrows of launches, arrows between ranks, counters; times are Unix ns."""
        cells = [c for c in sorted({*self.events, *self.told}) if c[0] in steps and c[1] in ranks]
        lanes: dict[tuple[int, str], list[list[tuple[int, int]]]] = {}
        slices, counters, launched, met = [], [], [], []
        unmatched, zero = 0, 1 << 70
        for step in sorted({s for s, _ in cells}):
            comm: dict[int, list[tuple[int, int, str]]] = {}
            unix = self.unix[step // STEPS]
            for rank in [r for s, r in cells if s == step]:
                began, wall, length, _ = self.timing[step, rank]
                rows = self.events.get((step, rank)) or [("comm", op, "comm", a, b, None) for _, _, op, a, b in self.told[step, rank]]
                zero = min([zero, unix + began, *(unix + r[3] for r in self.events.get((step, rank), ()))])
                hosts = {f: (a, b) for track, _, _, a, b, f in rows if track == "host enqueue" and f is not None}
                rows = [(t, n, c, hosts[f][0] if f in hosts and t.startswith("stream") and a < hosts[f][0] < b else a, b, f)
                        for t, n, c, a, b, f in rows]
                placed: dict[int, list[tuple[str, int, int]]] = {}
                for track, name, category, a, b, flow in sorted([("steps", f"step {step}", "step", began, began + wall, None), *rows],
                                                                key=lambda r: (TRACKS.index(r[0]), r[3], -r[4])):
                    thread = _placed(lanes.setdefault((rank, track), []), track, unix + a, unix + b)
                    launched_by = next(({"plan": p, **({} if sh is None else {"shard": sh}), **({} if m is None else {"microbatch": m})}
                                        for p, sh, m, x, y in self.calls.get((step, rank), ()) if x <= a and b <= y), {})
                    said = {"step": step, **(self.slower(step, rank) if track == "steps" else launched_by)}
                    slices.append((rank + 1, thread, name, category, unix + a, b - a, json.dumps(said, sort_keys=True)))
                    if track == "comm":
                        comm.setdefault(rank, []).append((a, b, thread))
                    if flow is not None and track != "host enqueue":
                        placed.setdefault(flow, []).append((thread, a, b - a))
                for flow, (a, b) in hosts.items():
                    unmatched += flow not in placed
                    launched += [(rank + 1, "host enqueue", unix + a, rank + 1, thread, unix + start)
                                 for thread, start, dur in placed.get(flow, ()) if dur and b > a]
                if self.memory.get((step, rank)):
                    counters.append((rank + 1, unix + began + length, json.dumps(self.memory[step, rank])))
            for call in range(4):
                here = [(r, op, a) for r in comm for _, c, op, a, _ in self.told.get((step, r), ()) if c == call and op in MEET]
                if here:
                    last, _, came = max(here, key=lambda x: x[2])
                    at = {r: next((thread for a, b, thread in comm[r] if a <= came < b), None) for r, _, _ in here}
                    met += [(last + 1, at[last], unix + came, r + 1, at[r], unix + came)
                            for r in at if r != last and at[r] is not None and at[last] is not None]
        return {"slices": Counter(slices), "counters": Counter(counters), "launched": Counter(launched), "met": Counter(met),
                "unmatched": unmatched, "zero": zero, "cells": cells}


def _placed(lanes: list[list[tuple[int, int]]], track: str, start: int, stop: int) -> str:
    """The first lane of a track on which an event nests in, or follows, all that is there."""
    for i, lane in enumerate([*lanes, []]):
        if all(start >= a and (b <= start or stop <= b) for a, b in lane):
            if i == len(lanes):
                lanes.append([])
            lanes[i].append((start, stop))
            return track if i == 0 else f"{track} ({i + 1})"
    raise AssertionError


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a trace holds: what `Drawn.want` names, and threads, processes and facts."""
    content = json.loads(path.read_bytes(), parse_float=Decimal)
    events = content["traceEvents"]
    zero = int(content["otherData"]["zero_unix_ns"])
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    sorts = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}

    def at(e: dict[str, Any]) -> int:
        return zero + int(e["ts"] * 1000)

    pairs: dict[str, list[tuple[int, str, int, int, str, int]]] = {"launch": [], "collective": []}
    ends = {(e["cat"], e["id"]): e for e in events if e["ph"] == "f"}
    for e in (e for e in events if e["ph"] == "s"):
        f = ends.pop((e["cat"], e["id"]))
        pairs[e["cat"]].append((e["pid"], names[e["tid"]], at(e), f["pid"], names[f["tid"]], at(f)))
        assert (f["bp"], f["name"], e["name"]) == ("e", *[{"launch": "launch", "collective": "came last"}[e["cat"]]] * 2)
    assert not ends, "an arrow without a start"
    slices = [(e["pid"], names[e["tid"]], e["name"], e["cat"], at(e), int(e["dur"] * 1000), json.dumps(e["args"], sort_keys=True))
              for e in events if e["ph"] == "X"]
    found = {"slices": Counter(slices), "launched": Counter(pairs["launch"]), "met": Counter(pairs["collective"]), "zero": zero,
             "counters": Counter((e["pid"], at(e), json.dumps(e["args"])) for e in events if e["ph"] == "C")}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    named = [{e["pid"]: e["args"] for e in events if e["name"] == n} for n in ("process_name", "process_sort_index", "process_labels")]
    return found, {"threads": threads, "names": names, "sorts": sorts, "named": named, "facts": content["otherData"],
                   "count": len(events), "unit": content["displayTimeUnit"], "first": events[0]["name"]}


def many_ranks(rng: np.random.Generator) -> Measured:
    """Traces of one to three ranks, with collectives of every step or without: each slice on its thread, with what is said of it; arrows
    from hand-overs to executions and from who came last to who waited; memory; ranks, tracks and lanes in their order."""
    checks, seen = [], Counter[str]()
    for trial in range(9):
        ranks, collectives = 1 + trial % 3, trial % 4 != 3
        run = Drawn(rng, ranks, collectives)
        facts = {"hardware": "h"}
        if trial % 5:
            facts = {"status": ("GATED", "UNGATED")[trial % 2], "name": "run", "program": "p", "secret": "s"}
        every = sorted({*run.events, *run.told})
        steps = None if trial % 3 else sorted({s for s, _ in every})[1::2]
        asked = None if trial % 4 else sorted({r for _, r in every})[-2:]
        with folder() as root:
            run.write(root / "m.sqlite", facts)
            done = trace.write(root / "m.sqlite", root / "t.json", steps, asked, ungated=trial == 4)
            got, more = read(root / "t.json")
        chosen = steps or sorted({s for s, _ in every}), asked or sorted({r for _, r in every})
        want = run.want(*chosen)
        for key in ("slices", "launched", "met", "counters", "zero"):
            wrong = list((got[key] - want[key]) + (want[key] - got[key]))[:2] if key != "zero" else got[key] - want[key]
            checks.append((f"trial {trial}, {key}: {wrong}", got[key] == want[key]))
        totals = more["count"], want["launched"].total(), want["unmatched"], want["met"].total(), (*chosen[0],), (*chosen[1],)
        checks.append(differs("written", (done.events, done.arrows, done.unmatched, done.waits, done.steps, done.ranks), totals))
        gated = facts.get("status") == "GATED" and trial != 4
        status = "UNGATED" if trial == 4 else facts.get("status", "unknown, so UNGATED")
        names = [f"rank {r}" + ("" if gated else " UNGATED") for r in chosen[1]]
        labels = [", ".join(x for x in (f"host1{r}", facts.get("hardware"), facts.get("name")) if x) for r in chosen[1]]
        processes = [{r + 1: {key: x} for r, x in zip(chosen[1], values)}
                     for key, values in (("name", names), ("sort_index", chosen[1]), ("labels", labels))]
        checks.append(differs("processes", more["named"], processes))
        said = {k: v for k, v in facts.items() if k not in ("secret", "status")} | {
            "status": status, "zero_unix_ns": str(want["zero"]),
            "time": "microseconds after zero_unix_ns; ranks aligned at one moment of each session"}
        checks.append(differs("facts", (more["facts"], more["unit"], more["first"]), (said, "ns", "process_name")))
        by_rank = {pid: [more["names"][tid] for p, tid in sorted(more["threads"]) if p == pid] for pid in more["named"][0]}
        for pid, threads in by_rank.items():
            order = sorted(threads, key=lambda t: (TRACKS.index(t.partition(" (")[0]), len(t), t))
            checks.append(differs(f"threads of {pid}", threads, order))
            tids = sorted(tid for p, tid in more["threads"] if p == pid)
            checks.append(("sorted alike", tids == sorted(tids, key=more["sorts"].get)))
        checks.append(("threads are one rank's", len({tid for _, tid in more["threads"]}) == len(more["threads"]) == len(more["sorts"])))
        for event in want["slices"]:
            seen.update([event[1].partition(" (")[2], *[x for x in ('"judged"', "perturbed", "not known", "shard") if x in event[6]]])
        seen.update({"met": want["met"].total(), "unmatched": want["unmatched"]})
    checks.append((f"all kinds {seen}", all(seen[x] for x in ("2)", '"judged"', "perturbed", "not known", "shard", "met", "unmatched"))))
    return all_hold(checks)


def said_no(rng: np.random.Generator) -> Measured:
    """Clocks that do not fit, events that cross, steps that meet each other, ranks that are not there, a full disk: each is refused
    in words, and no file is left."""
    checks = []
    run = Drawn(rng, 2, True)
    run.events[2, 0] = [("host enqueue", "a", "forward", 5000, 5010, 1), ("host enqueue", "b", "forward", 5005, 5006, None)]
    run.events[2, 1], run.calls, run.memory = [("comm", "barrier", "comm", 5000, 5010, None)], {}, {}
    run.told = {(s, r): [(77, 0, "barrier", run.timing[s, 0][0] + 9, run.timing[s, 0][0] + 40)] for s in range(2 * STEPS) for r in range(2)}
    at = run.clock[0][0]
    backwards, order = "a clock stepped backwards, so the timeline cannot be drawn", "leave that step, rank or session out"
    began = {s: at + run.timing[s, 0][0] for s in range(STEPS)}
    ended = began[2] + run.timing[2, 0][1]
    no_clock = "a step has a timeline but no session, so its clock is unknown"
    cases: list[tuple[str, str, tuple[str, ...]]] = [
        ("sound", "SELECT 1", ()),
        ("crosses", f"UPDATE gpu_timeline SET stop_ns = {at + 5011} WHERE name = 'b' AND step = 2 AND rank = 0",
         ("CorruptError", "two events of one track cross", "step 2, rank 0, host enqueue: b", "events that nest or follow each other",
          "a clock may have stepped: leave that step out")),
        ("lasts less than nothing", "UPDATE step_timing SET wall_ns = -4 WHERE step = 3 AND rank = 0",
         ("CorruptError", backwards, f"rank 0: step 3 began at {began[3]} ns and lasted -4 ns", "steps one after the other", order)),
        ("the first one too", "UPDATE step_timing SET wall_ns = -1 WHERE step = 0 AND rank = 0",
         ("CorruptError", backwards, f"rank 0: step 0 began at {began[0]} ns and lasted -1 ns", "steps one after the other", order)),
        ("steps overlap", f"UPDATE step_timing SET began_ns = {ended - 1} WHERE step = 3 AND rank = 0",
         ("CorruptError", backwards, f"rank 0: step 3 began at {ended - 1} ns, step 2 ended at {ended} ns", "steps one after the other",
          order)),
        ("no time, too late", f"UPDATE step_timing SET began_ns = {ended - 1}, wall_ns = 0 WHERE step = 3 AND rank = 0",
         ("CorruptError", backwards, f"rank 0: step 3 began at {ended - 1} ns, step 2 ended at {ended} ns", "steps one after the other",
          order)),
        ("left early", "UPDATE collectives SET ended_ns = asked_ns - 1, asked_ns = asked_ns - 2 WHERE step = 4 AND rank = 1",
         ("CorruptError", "the clocks of two ranks do not fit",
          "step 4, barrier number 0 of group 0x4d: rank 1 left it 1 ns before rank 0 came", "nobody leaves before all came",
          "look at one rank at a time: --rank")),
        ("no sessions", "DELETE FROM sessions",
         ("CorruptError", no_clock, "{path}: step 0, rank 0", "its rows in step_timing and sessions", "")),
        ("no start", "UPDATE gpu_timeline SET flow = 1 WHERE name = 'b' AND step = 2 AND rank = 0",
         ("CorruptError", "an arrow needs one start", "step 2, rank 0, arrow 1: 2 events on the host", "one event on 'host enqueue'",
          "leave that step out")),
        ("only its end", "UPDATE gpu_timeline SET track = 'stream 0' WHERE step = 2 AND rank = 0",
         ("CorruptError", "an arrow needs one start", "step 2, rank 0, arrow 1: 0 events on the host", "one event on 'host enqueue'",
          "leave that step out")),
        ("no timeline", "DELETE FROM gpu_timeline; DELETE FROM collectives",
         ("InputError", "the run has no timeline", "{path}", "at least one profiled step", "train on until there is one")),
    ]
    for name, statements, want in cases:
        with folder() as root:
            path = root / "m.sqlite"
            run.write(path, {})
            with closing(sqlite3.connect(path)) as db:
                db.executescript(statements)
            said = words(lambda path=path, root=root: trace.write(path, root / "t.json"))  # type: ignore[misc]
            whole = tuple(x.replace("{path}", str(path)) for x in want)
            checks.append(differs(name, said, whole))
            files = ["m.sqlite"] if want else ["m.sqlite", "t.json"]
            checks.append(differs(f"files of {name}", sorted(p.name for p in root.iterdir()), files))
    return all_hold([*checks, *_not_there(rng)])


def _not_there(rng: np.random.Generator) -> list[tuple[str, bool]]:
    checks = []
    with folder() as root:
        path, run = root / "m.sqlite", Drawn(rng, 2, True)
        began = {s: run.timing[s, 0][0] for s in range(2 * STEPS)}
        run.told = {(s, r): [(1, 0, "barrier", at + 30, at + 40)] for s, at in began.items() for r in (0, 1)}
        run.write(path, {})

        def tried(out: Path = root / "t.json", **which: Any) -> tuple[str, ...]:
            return words(lambda: trace.write(path, out, **which))

        steps = ", ".join(map(str, range(18)))
        for which, what, came, among in (({"steps": [3, 99, 40]}, "step", "40, 99", steps), ({"ranks": [0, 7]}, "rank", "7", "0, 1"),
                                         ({"steps": []}, "step", "no step", steps), ({"ranks": ()}, "rank", "no rank", "0, 1")):
            checks.append(differs(what, tried(**which), ("InputError", f"no timeline of that {what}", came, f"among {among}", "")))
        with closing(sqlite3.connect(path)) as db:
            db.executemany("INSERT INTO collectives SELECT ?, rank, grp, call, op, stream, dtype, nbytes, asked_ns, ended_ns, source "
                           "FROM collectives WHERE step = 0", [(18,), (19,)])
            db.commit()
            shown = ", ".join(map(str, range(20)))
            checks.append(differs("twenty", tried(steps=[50]), ("InputError", "no timeline of that step", "50", f"among {shown}", "")))
            db.execute("INSERT INTO collectives SELECT 21, rank, grp, call, op, stream, dtype, nbytes, asked_ns, ended_ns, source "
                       "FROM collectives WHERE step = 0")
            db.commit()
        checks.append(differs("many", tried(steps=[50]), ("InputError", "no timeline of that step", "50", f"among {shown} ... 21", "")))
        nowhere = root / "none" / "t.json"
        said = tried(nowhere, steps=[2])
        checks.append(differs("no folder", (*said[:2], said[2].partition(": ")[0], *said[3:]),
                              ("MachineError", "the trace cannot be written", str(nowhere), "room and permission there", "")))
        full: Callable[..., None] = mock.Mock(side_effect=OSError(28, "No space left on device"))
        for name in ("t.json", "t.json.gz"):
            with mock.patch.object(trace.os, "replace", full):
                said = tried(root / name, steps=[2])
            checks.append(differs("full", said, ("MachineError", "the trace cannot be written",
                                                 f"{root / name}: [Errno 28] No space left on device", "room and permission there", "")))
        checks.append(differs("nothing is left", sorted(p.name for p in root.iterdir()), ["m.sqlite"]))
        pipe, link, there = root / "pipe", root / "link.json", root / "there.json"
        os.mkfifo(pipe)
        (root / "to-pipe").symlink_to(pipe)
        (root / "loop").symlink_to("loop")
        for out in (pipe, root / "to-pipe", root):
            checks.append(differs(f"{out.name} is no file", tried(out, steps=[2]), (
                "InputError", "the trace goes into a regular file", f"{out}, which is something else", "a new file, or one to replace",
                "name another file: --out FILE")))
        for out in (root / "loop", path / "t.json"):
            checks.append(differs(out.name, tried(out, steps=[2])[:2], ("MachineError", "the trace cannot be written")))
        link.symlink_to(there.name)
        for _ in range(2):  # to what is not there yet, and to a file
            checks.append(differs("followed", (tried(link, steps=[2]), link.is_symlink(), there.is_file() and read(there)[1]["unit"]),
                                  ((), True, "ns")))
            there.write_text("old")
        checks.append(differs("what is left", (pipe.is_fifo(), sorted(p.name for p in root.iterdir())),
                              (True, ["link.json", "loop", "m.sqlite", "pipe", "there.json", "to-pipe"])))
    return checks


def set_back(rng: np.random.Generator) -> Measured:
    """The clock of the day was set back between two sessions: together they are refused, and the steps of either alone are drawn."""
    checks = []
    for ranks in (1, 2):
        run = Drawn(rng, ranks, False)
        run.unix[1] = run.unix[0] - 5 * 10**9
        early, late = ([s for s in sorted({s for s, _ in run.events}) if s // STEPS == n] for n in (0, 1))
        over = 10**8 + 5 * 10**9 + 9
        with folder() as root:
            run.write(root / "m.sqlite", {})
            for steps in (None, [early[0], late[1]], [early[1], *late]):
                first = late[1] if steps == [early[0], late[1]] else late[0]
                said = words(lambda steps=steps, root=root: trace.write(root / "m.sqlite", root / "t.json", steps))  # type: ignore[misc]
                checks.append(differs("together", said, (
                    "CorruptError", "a clock stepped backwards, so the timeline cannot be drawn",
                    f"rank 0: session 1 began {over} ns before session 0 was last seen", "sessions one after the other",
                    f"take steps before {first}, or those from it on: --step")))
            for steps in (early, late):
                trace.write(root / "m.sqlite", root / "t.json", steps)
                got, want = read(root / "t.json")[0], run.want(steps, range(ranks))
                checks += [(f"{steps}, {key}", got[key] == want[key]) for key in ("slices", "launched", "zero")]
    return all_hold(checks)


def ahead(rng: np.random.Generator) -> Measured:
    """What was handed over ahead may begin before its step, or before every step: time begins with the first event that is shown, whatever
    step, rank or track it is of, else with the first step."""
    checks, run = [], Drawn(rng, 2, False)
    for at in run.events:  # none earlier than its step, so that what is put ahead alone comes before
        late = max(0, run.timing[at][0] - min([1 << 62, *(a for _, _, _, a, _, _ in run.events[at])]))
        run.events[at] = [(t, n, c, a + late, b + late, f) for t, n, c, a, b, f in run.events[at]]
    steps = sorted({s for s, _ in run.events})[:2]
    began, sound = min(run.timing[c][0] for c in run.events if c[0] in steps), dict(run.events)
    with folder() as root, closing(sqlite3.connect(root / "m.sqlite")) as db:
        run.write(root / "m.sqlite", {})
        for i, track in enumerate(("", "copies", "comm", "stream 2", "aside 7")):
            run.events, zero, (step, rank) = dict(sound), began, (steps[i % 2], i // 2 % 2)
            if track:
                zero = began - int(rng.integers(1, 3900))  # within its session
                stop = zero + int(rng.integers(0, 2))
                run.events[step, rank] = [*sound[step, rank], (track, "x", "comm", zero, stop, None)]
                moment = run.clock[rank][0]
                db.execute("INSERT INTO gpu_timeline VALUES (?, ?, ?, 'x', 'comm', ?, ?, NULL)",
                           (step, rank, track, moment + zero, moment + stop))
                db.commit()
            trace.write(root / "m.sqlite", root / "t.json", steps)
            db.execute("DELETE FROM gpu_timeline WHERE name = 'x' AND category = 'comm' AND track = ? AND start_ns IN (?, ?)",
                       (track, *(clock[0] + zero for clock in run.clock)))
            got, want = read(root / "t.json")[0], run.want(steps, (0, 1))
            zero += run.unix[0]
            where = f"{track or 'nothing'} of step {step}, rank {rank}"
            checks.append(differs(f"zero, {where}", (got["zero"], min(x[4] for x in got["slices"])), (zero, zero)))
            checks += [(f"{key}, {where}", got[key] == want[key]) for key in ("slices", "launched", "zero")]
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("many ranks", many_ranks), ("ahead", ahead))
FAULTS: Sequence[tuple[str, Case]] = (("said no", said_no), ("set back", set_back))
