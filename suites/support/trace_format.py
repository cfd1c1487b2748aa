"""A judge of trace-event JSON, written from the format's description ("Trace Event Format", Duca and Sinclair) alone.

It shares nothing with any writer: it reads the file again, keeps decimals exact, and returns every breach that it finds as text.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

PHASES = set("BEXiICbnestfPNODMVvRc(),STpF")
DURATION = {"B": ("name", "ts", "pid", "tid"), "E": ("ts", "pid", "tid"), "X": ("name", "ts", "dur", "pid", "tid"),
            "i": ("name", "ts", "pid", "tid"), "C": ("name", "ts", "pid", "args"), "M": ("name", "pid", "args"),
            "s": ("name", "cat", "id", "ts", "pid", "tid"), "t": ("name", "cat", "id", "ts", "pid", "tid"),
            "f": ("name", "cat", "id", "ts", "pid", "tid")}
"""Keys that each phase type must have, of the types that are looked at further."""

METADATA = {"process_name": ("name", str), "process_labels": ("labels", str), "process_sort_index": ("sort_index", int),
            "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}

Thread = tuple[Any, Any]


def load(path: Path) -> Any:
    """The parsed file; gzip is told by its first bytes, decimals stay exact."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    return json.loads(raw.decode("utf-8"), parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_no_doubles)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [k for k, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"a key stands twice in {names}")
    return dict(pairs)


def breaches(document: Any) -> list[str]:
    """What is wrong with a parsed trace; empty when nothing is."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        return ["no list of events"]
    found = []
    if isinstance(document, dict) and document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append(f"displayTimeUnit {document['displayTimeUnit']!r}")
    sound = []
    for i, event in enumerate(events):
        wrong = _shape(event)
        if wrong:
            found.append(f"event {i}: {wrong}")
        else:
            sound.append(event)
    slices = _slices(sound, found)
    _nested(slices, found)
    _flows(sound, slices, found)
    _names(sound, slices, found)
    return found


def _number(x: Any) -> bool:
    return isinstance(x, (int, Decimal)) and not isinstance(x, bool) and Decimal(x).is_finite()


def _shape(event: Any) -> str:
    """Keys and types of one event."""
    if not isinstance(event, dict):
        return "is no object"
    ph = event.get("ph")
    if not isinstance(ph, str) or len(ph) != 1 or ph not in PHASES:
        return f"unknown phase type {ph!r}"
    missing = [k for k in DURATION.get(ph, ()) if k not in event]
    if missing:
        return f"type {ph} without {', '.join(missing)}"
    if ph != "M" and not _number(event.get("ts")):
        return f"ts {event.get('ts')!r}"
    if ph == "X" and not (_number(event["dur"]) and event["dur"] >= 0):
        return f"dur {event['dur']!r}"
    for key in ("pid", "tid"):
        if key in event and (not isinstance(event[key], int) or isinstance(event[key], bool)):
            return f"{key} {event[key]!r}"
    for key in ("name", "cat"):
        if key in event and (not isinstance(event[key], str) or (key == "name" and not event[key])):
            return f"{key} {event[key]!r}"
    if "args" in event and not isinstance(event["args"], dict):
        return "args is no object"
    if ph == "C" and not (event["args"] and all(_number(v) for v in event["args"].values())):
        return f"a counter of {event['args']!r}"
    if ph == "f" and event.get("bp", "e") != "e":
        return f"bp {event['bp']!r}"
    if ph == "M" and event["name"] in METADATA:
        key, kind = METADATA[event["name"]]
        if not isinstance(event["args"].get(key), kind):
            return f"{event['name']} with args {event['args']!r}"
        if event["name"].startswith("thread_") and "tid" not in event:
            return f"{event['name']} without tid"
    return ""


Slice = tuple[Decimal, Decimal, str]


def _slices(events: list[dict[str, Any]], found: list[str]) -> dict[Thread, list[Slice]]:
    """(start, stop, name) by thread, from X events and from balanced B and E."""
    slices: dict[Thread, list[Slice]] = defaultdict(list)
    open_: dict[Thread, list[dict[str, Any]]] = defaultdict(list)
    for e in sorted((e for e in events if e["ph"] in "BEX"), key=lambda e: e["ts"]):
        thread = e["pid"], e["tid"]
        if e["ph"] == "X":
            slices[thread].append((Decimal(e["ts"]), Decimal(e["ts"]) + Decimal(e["dur"]), e["name"]))
        elif e["ph"] == "B":
            open_[thread].append(e)
        elif not open_[thread]:
            found.append(f"an end at {e['ts']} on {thread} without a beginning")
        else:
            began = open_[thread].pop()
            if e.get("name", began["name"]) != began["name"]:
                found.append(f"{began['name']} is ended as {e['name']} on {thread}")
            slices[thread].append((Decimal(began["ts"]), Decimal(e["ts"]), began["name"]))
    found += [f"{e['name']} at {e['ts']} on {thread} never ends" for thread, left in open_.items() for e in left]
    return slices


def _nested(slices: dict[Thread, list[Slice]], found: list[str]) -> None:
    """Slices of one thread lie inside or beside each other."""
    for thread, mine in slices.items():
        above: list[Slice] = []
        for s in sorted(mine, key=lambda s: (s[0], -s[1])):
            while above and above[-1][1] <= s[0]:
                above.pop()
            if above and s[1] > above[-1][1]:
                found.append(f"{s[2]} at {s[0]} crosses {above[-1][2]} on {thread}")
            above.append(s)


def _flows(events: list[dict[str, Any]], slices: dict[Thread, list[Slice]], found: list[str]) -> None:
    """Every arrow has one start and an end, goes forward in time, and hangs on slices."""
    flows: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            flows[e["cat"], e["name"], e["id"]].append(e)
    index = {thread: _Index(mine) for thread, mine in slices.items()}
    for key, mine in flows.items():
        kinds = [e["ph"] for e in mine]
        if kinds.count("s") != 1 or kinds.count("f") < 1:
            found.append(f"arrow {key} has {kinds.count('s')} starts and {kinds.count('f')} ends")
            continue
        start = next(e for e in mine if e["ph"] == "s")
        for e in mine:
            if e["ts"] < start["ts"]:
                found.append(f"arrow {key} goes back in time")
            at = index.get((e["pid"], e["tid"]))
            ahead = e["ph"] == "f" and "bp" not in e  # binds to the next slice
            if at is None or not (at.follows(e["ts"]) if ahead else at.holds(e["ts"])):
                found.append(f"arrow {key}: its {e['ph']} at {e['ts']} lies in no slice of {e['pid'], e['tid']}")


class _Index:
    """Which moments lie in a slice that has a length, of slices that nest: only the outermost matter."""

    def __init__(self, slices: list[Slice]) -> None:
        self.outer: list[list[Decimal]] = []
        for start, stop, _ in sorted(slices):
            if stop <= start:
                continue
            if self.outer and start <= self.outer[-1][1]:
                self.outer[-1][1] = max(stop, self.outer[-1][1])
            else:
                self.outer.append([start, stop])

    def holds(self, ts: Decimal) -> bool:
        low, high = 0, len(self.outer)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.outer[middle][0] <= ts else (low, middle)
        return low > 0 and ts <= self.outer[low - 1][1]

    def follows(self, ts: Decimal) -> bool:
        return bool(self.outer) and self.outer[-1][0] >= ts


def _names(events: list[dict[str, Any]], slices: dict[Thread, list[Slice]], found: list[str]) -> None:
    """Processes and threads are named once, each its own name and place; nothing is drawn on one without a name."""
    declared: dict[str, dict[Any, Any]] = {k: {} for k in METADATA}
    for e in events:
        if e["ph"] != "M" or e["name"] not in METADATA:
            continue
        who = (e["pid"], e["tid"]) if e["name"].startswith("thread_") else e["pid"]
        if who in declared[e["name"]]:
            found.append(f"{e['name']} of {who} is said twice")
        declared[e["name"]][who] = e["args"][METADATA[e["name"]][0]]
    for what in ("process_name", "process_sort_index"):
        values = list(declared[what].values())
        found += [f"{what} {v!r} is given twice" for v in {v for v in values if values.count(v) > 1}]
    for what in ("thread_name", "thread_sort_index"):
        pairs = [(pid, v) for (pid, _), v in declared[what].items()]
        found += [f"{what} {v!r} is given twice in process {pid}" for pid, v in {p for p in pairs if pairs.count(p) > 1}]
    for pid, tid in slices:
        if (pid, tid) not in declared["thread_name"]:
            found.append(f"thread {pid, tid} has no name")
        if pid not in declared["process_name"]:
            found.append(f"process {pid} has no name")
