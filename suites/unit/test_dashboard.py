"""The dashboard over HTTP, against a real server: every endpoint on sound runs and on bad ones. What is expected is read from the rows with
SQL, not with the code under test.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import made_runs
import pytest

from alpha.errors import InputError, MachineError
from alpha.profile.phases import PHASES
from alpha.train.catalogue import catalogue

pytest.importorskip("uvicorn", reason="NOT RUN: the extra `dashboard` is not installed")
import uvicorn

from alpha.dashboard import command
from alpha.dashboard.folder import Folder
from alpha.dashboard.live import Live

CHARTS = ("figures", "waterfall", "phases", "utilisation", "ops", "launches", "bandwidth", "memory", "memory_launches", "loss", "gates",
          "ranks", "waits")
ODD = "<img src=x onerror=alert(1)> & co"


@dataclass
class Server:
    """A running dashboard and the folder that it shows."""

    root: Path
    port: int

    def raw(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; the path goes out as it is."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as c:
            c.request(method, path, headers={} if host is None else {"Host": host})
            answer = c.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def get(self, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
        """JSON of an answer, read by the letter of JSON (no NaN)."""
        found, headers, body = self.raw(f"{path}?{urlencode(query)}" if query else path)
        assert found == status, (path, found, body[:300])
        assert headers["content-type"].startswith("application/json")
        return json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def run(self, name: str, what: str, status: int = 200, **query: Any) -> dict[str, Any]:
        return self.get(f"/api/run/{quote(name, safe='')}/{what}", status, **query)


def serving(root: Path) -> Iterator[Server]:
    """A server over `root` in a thread of this process."""
    with command.listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(command.application(root, "127.0.0.1"), log_level="warning", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield Server(root, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def rows(path: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        return db.execute(statement, values).fetchall()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("dashboard") / "runs"
    root.mkdir()
    made_runs.make(root / "a", steps=1200, seed=1)
    made_runs.make(root / "b", steps=1000, seed=2, slow={"op:gelu": 1.3})
    made_runs.make(root / "ranks", steps=120, ranks=2)
    made_runs.make(root / "lab", steps=200, status="UNGATED")
    made_runs.make(root / ODD, steps=40)
    made_runs.make(root / "model", steps=200, metadata={"flops_version": "flops/v9"})
    made_runs.make(root / "empty", steps=0, ended=None)
    made_runs.make(root / "newer", steps=10, version=99)
    made_runs.make(root / "old", steps=50, version=1)
    made_runs.make(root / "damaged", steps=400)
    file = root / "damaged" / "metrics.sqlite"
    whole = bytearray(file.read_bytes())
    whole[8192:60000] = b"\xff" * (60000 - 8192)
    file.write_bytes(whole)
    made_runs.make(root / "clock", steps=50)
    made_runs.edit(root / "clock", "UPDATE step_timing SET began_ns = began_ns - 10000000000 WHERE step = 30")
    (root / "half").mkdir()
    shutil.copy(root / "a" / "config.toml", root / "half")
    (root / "torn").mkdir()
    shutil.copy(root / "a" / "config.toml", root / "torn")
    (root / "torn" / "manifest.json").write_text('{"status": "GA')
    (root / "nothing").mkdir()
    made_runs.make(root.parent / "outside", steps=10)
    (root / "link").symlink_to(root.parent / "outside")
    yield from serving(root)


# -- what is there -------------------------------------------------------------------------------------------------------------


def test_the_picker_lists_every_run_and_nothing_else(server: Server) -> None:
    answer = server.get("/api/runs")
    found = {r["name"]: r for r in answer["runs"]}
    assert set(found) == {"a", "b", "ranks", "lab", ODD, "model", "empty", "newer", "old", "damaged", "clock", "half", "torn"}
    assert found["a"]["status"] == "GATED" and found["lab"]["status"] == "UNGATED"
    assert not found["half"]["metrics"] and "manifest" in found["torn"]["error"]["what"]
    assert [r["changed"] for r in answer["runs"]] == sorted((r["changed"] for r in answer["runs"]), reverse=True)
    phases = answer["phases"]
    assert [p["name"] for p in phases] == [*PHASES, "unexplained"]
    assert len({(p["colour"], p["shape"]) for p in phases}) == len(phases)


def test_progress_says_how_far_a_run_is(server: Server) -> None:
    answer = server.run("a", "progress", since=1196)
    assert (answer["state"], answer["last_step"], answer["steps"]) == ("finished", 1199, 1200)
    assert [row[0] for row in answer["tail"]] == [1197, 1198, 1199]
    assert [row[1] for row in answer["tail"]] == [v for (v,) in rows(server.root / "a", "SELECT loss FROM step_metrics WHERE step > 1196")]
    assert len(server.run("a", "progress")["tail"]) == 200
    assert server.run("empty", "progress")["last_step"] is None
    assert server.run("a", "progress")["stamp"] == server.run("a", "progress")["stamp"]


def test_charts_show_the_stored_rows(server: Server) -> None:
    v = server.run("a", "view", points=50)
    path = server.root / "a"
    for entry in v["waterfall"]["phases"]:
        (mean,) = rows(path, f"SELECT avg({entry['phase']}_ns) FROM step_timing WHERE profiled = 0")[0]
        assert entry["exclusive_ns"] == pytest.approx(mean, rel=1e-12), entry["phase"]
    assert sum(e["exclusive_ns"] for e in v["waterfall"]["phases"]) == pytest.approx(v["waterfall"]["wall_ns"], rel=1e-9)
    loss = v["loss"]["runs"][0]["loss"]
    assert len(loss["x"]) == 50
    lowest, highest = rows(path, "SELECT min(loss), max(loss) FROM step_metrics")[0]
    assert min(loss["min"]) == lowest and max(loss["max"]) == highest
    top = v["ops"]["ops"][0]
    totals = rows(path, "SELECT op, shape, sum(device_ns) s FROM op_profile GROUP BY op, phase, shape ORDER BY s DESC LIMIT 1")[0]
    (steps,) = rows(path, "SELECT count(DISTINCT step) FROM op_profile")[0]
    assert (top["op"], top["shape"]) == totals[:2] and top["device_ns"] == pytest.approx(totals[2] / steps)
    assert v["launches"]["runs"][0]["launches"]["max"][0] == rows(path, "SELECT max(launches) FROM step_timing")[0][0]
    memory = {a["arena"]: a for a in v["memory"]["arenas"]}
    assert memory["param"]["planned"] == rows(path, "SELECT max(planned) FROM memory WHERE arena = 'param'")[0][0]
    assert len(v["bandwidth"]["runs"][0]["x"]) == steps


def test_every_chart_says_where_it_comes_from(server: Server) -> None:
    facts = dict(rows(server.root / "lab", "SELECT key, value FROM run_metadata"))
    v = server.run("lab", "view")
    assert v["ungated"]
    for name in CHARTS:
        (p,) = v[name]["provenance"]
        assert p["run"] == "lab" and p["status"] == "UNGATED", name
        assert facts["commit"].startswith(p["commit"]) and p["hardware"] == facts["hardware"]
        assert (p["flops_model"], p["convention"]) == (facts["flops_version"], facts["flops_convention"])
        assert p["peak_flops"] == float(facts["peak_flops"])
    assert not server.run("a", "view")["ungated"]


def test_a_range_of_steps_is_shown_alone_and_in_more_detail(server: Server) -> None:
    v = server.run("a", "view", points=100, first=300, last=340)
    loss = v["loss"]["runs"][0]["loss"]
    assert loss["x"] == list(range(300, 341))
    stored = rows(server.root / "a", "SELECT loss FROM step_metrics WHERE step BETWEEN 300 AND 340")
    assert loss["mean"] == pytest.approx([x for (x,) in stored])
    assert (v["waterfall"]["first"], v["waterfall"]["last"]) == (300, 340)
    assert v["figures"] == server.run("a", "view", points=100)["figures"]  # the figures stay those of the whole run
    assert server.run("a", "view", first=9, last=3)["error"]["kind"] == "input"


def test_a_second_run_lies_beside_it_unless_they_count_flops_differently(server: Server) -> None:
    v = server.run("a", "view", **{"with": "b"})
    for name in ("utilisation", "launches", "bandwidth", "loss"):
        assert [r["run"] for r in v[name]["runs"]] == ["a", "b"]
    v = server.run("a", "view", **{"with": "model"})
    assert [r["run"] for r in v["utilisation"]["runs"]] == ["a"] and [r["run"] for r in v["loss"]["runs"]] == ["a", "model"]
    assert any("flops/v9" in n for n in v["utilisation"]["notes"])


def test_the_comparison_names_what_is_slower(server: Server) -> None:
    c = server.get("/api/compare", a="a", b="b")
    verdicts = {(r["kind"], r["name"].split()[0]): r["verdict"] for r in c["rows"]}
    assert verdicts["op", "gelu"] == "SLOWER" and verdicts["phase", "backward"] == "SAME"
    assert any(name.startswith("op gelu ") for name in c["differing"])
    same = server.get("/api/compare", a="a", b="a")
    assert {r["verdict"] for r in same["rows"]} <= {"SAME", "UNDECIDED"} and not same["differing"]
    refused = server.get("/api/compare", a="a", b="model")["error"]
    assert "flops" in refused["what"] and "flops/v9" in refused["came"]
    assert any("flops/v9" in n for n in server.get("/api/compare", a="a", b="model", anyway=1)["notes"])
    assert server.get("/api/compare", a="a", b="old")["error"]["kind"] == "input"
    server.get("/api/compare", 404, a="a", b="gone")


def test_the_gates_page_shows_every_component(server: Server) -> None:
    answer = server.get("/api/gates")
    found = {c["id"]: c for c in answer["components"]}
    assert set(found) == {c.id for c in catalogue()}
    for c in found.values():
        assert c["usable"] == (not c["presupposed"] and all(g["satisfied"] for g in c["gates"].values()))
        for g in c["gates"].values():
            assert g["evidence"] in ("none", "stale", "current") and bool(g["why"]) != g["satisfied"]
            assert g["evidence"] != "stale" or not g["satisfied"]
    assert answer["usable"] == sum(c["usable"] for c in found.values())


# -- the timeline --------------------------------------------------------------------------------------------------------------


def test_the_timeline_shows_the_newest_profiled_step(server: Server) -> None:
    t = server.run("a", "timeline")
    stored = rows(server.root / "a", "SELECT track, name, category, start_ns, stop_ns FROM gpu_timeline WHERE step = 1199")
    origin = min(r[3] for r in stored)
    bars = t["bars"]
    shown = sorted(zip(bars["track"], bars["name"], bars["category"], bars["start"], bars["stop"]))
    assert t["step"] == 1199 and shown == sorted((a, b, c, s - origin, e - origin) for a, b, c, s, e in stored)
    flows = rows(server.root / "a", "SELECT count(DISTINCT flow) FROM gpu_timeline WHERE step = 1199")[0][0]
    assert len(t["arrows"]) == flows
    assert all(a[0] == "host enqueue" and a[2] == "worker 0" and a[1] <= a[3] for a in t["arrows"])


def test_zooming_the_timeline_keeps_what_lies_in_the_window(server: Server) -> None:
    whole = server.run("a", "timeline")
    low, high = whole["extent"][1] // 3, whole["extent"][1] // 2
    part = server.run("a", "timeline", step=1199, rank=0, **{"from": low, "to": high})
    inside = sum(stop >= low and start <= high for start, stop in zip(whole["bars"]["start"], whole["bars"]["stop"]))
    assert 0 < part["events"] == inside < whole["events"] and part["window"] == [low, high] and part["extent"] == whole["extent"]
    assert part["own"] == whole["window"] == whole["own"]
    assert server.run("a", "timeline", step=1199, **{"from": 10, "to": 10})["error"]["kind"] == "input"
    assert server.run("a", "timeline", step=7)["error"]["kind"] == "input"


def test_the_timeline_begins_with_the_step_and_not_with_what_follows(server: Server) -> None:
    path = server.root / "evaluated"
    made_runs.make(path, steps=30)
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        began, length = db.execute("SELECT began_ns, step_ns FROM step_timing WHERE step = 29").fetchone()
        first = db.execute("SELECT min(start_ns) FROM gpu_timeline WHERE step = 29").fetchone()[0]
        made_runs.insert(db, "gpu_timeline", [(29, 0, "host enqueue", "eval", "eval", began + length, began + length + 10**9, None)])
        db.commit()
    try:
        t = server.run("evaluated", "timeline")
        assert t["window"] == t["own"] == [0, began + length - first] and t["extent"] == [0, began + length - first + 10**9]
        assert server.run("evaluated", "timeline", **{"from": 0, "to": t["extent"][1]})["window"] == t["extent"]
    finally:
        shutil.rmtree(path)


def test_many_events_are_drawn_coarser_without_losing_time(server: Server) -> None:
    path = server.root / "many"
    made_runs.make(path, steps=30)
    events = [(29, 0, "stream 0", f"k{i % 7}", "forward", 1000 * i, 1000 * i + 900, None) for i in range(20_000)]
    events += [(29, 0, "stream 0", "long", "optimizer", 30_000_000, 40_000_000, None)]
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        db.execute("DELETE FROM gpu_timeline")
        made_runs.insert(db, "gpu_timeline", events)
        db.commit()
    try:
        t = server.run("many", "timeline", **{"from": 0, "to": 40_000_000})
        assert t["events"] == 20_001 and t["drawn"] <= 1500 and sum(t["bars"]["events"]) == 20_001
        assert sum(t["bars"]["busy"]) == 20_000 * 900 + 10_000_000 and "long" in t["bars"]["name"]
        near = server.run("many", "timeline", **{"from": 1_000_000, "to": 1_300_000})
        assert near["drawn"] == near["events"] == 301 and set(near["bars"]["events"]) == {1}
    finally:
        shutil.rmtree(path)


def test_ranks_are_drawn_on_one_clock(server: Server) -> None:
    t = server.run("ranks", "timeline")
    assert {track.split(" · ")[0] for track in t["tracks"]} == {"rank 0", "rank 1"}
    session = {r: (u, c) for r, u, c in rows(server.root / "ranks", "SELECT rank, unix_ns, clock_ns FROM sessions")}
    stored = rows(server.root / "ranks", "SELECT rank, min(start_ns) FROM gpu_timeline WHERE step = ? GROUP BY rank", t["step"])
    unix = {r: s - session[r][1] + session[r][0] for r, s in stored}
    shown = {r: min(s for track, s in zip(t["bars"]["track"], t["bars"]["start"]) if track.startswith(f"rank {r} ")) for r in unix}
    assert shown[1] - shown[0] == unix[1] - unix[0]
    assert server.run("ranks", "timeline", rank=1)["tracks"] == ["host enqueue", "worker 0", "data loading"]
    assert server.run("ranks", "timeline", rank=5)["error"]["kind"] == "input"


def test_an_event_that_ends_before_it_starts_is_left_out_and_counted(server: Server) -> None:
    path = server.root / "back"
    made_runs.make(path, steps=30)
    made_runs.edit(path, "UPDATE gpu_timeline SET stop_ns = start_ns - 5 WHERE step = 29 AND flow = 3 AND track = 'worker 0'")
    try:
        t = server.run("back", "timeline", step=29)
        assert t["odd"] == 1 and all(a <= b for a, b in zip(t["bars"]["start"], t["bars"]["stop"]))
    finally:
        shutil.rmtree(path)


# -- bad runs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "says"), [
    ("newer", "input", "newer schema"), ("half", "input", "no metrics"), ("damaged", "corrupt", "damaged"),
    ("clock", "corrupt", "backwards"),
])
def test_a_bad_run_is_one_clear_answer(server: Server, name: str, kind: str, says: str) -> None:
    error = server.run(name, "view")["error"]
    assert error["kind"] == kind and says in error["what"] and name in error["came"] and error["do"]
    assert "error" not in server.run("a", "view")  # the others go on
    if name != "clock":
        assert server.run(name, "progress")["error"]["kind"] == kind


def test_a_damaged_manifest_is_said(server: Server) -> None:
    assert "error" in server.run("torn", "view") and "error" in server.run("torn", "progress")


def test_an_empty_run_is_a_page_that_waits(server: Server) -> None:
    v = server.run("empty", "view")
    assert all(v[name]["why"] for name in ("waterfall", "utilisation", "ops", "loss", "launches", "bandwidth", "memory"))
    assert all(f["value"] is None and f["reason"] for f in v["figures"]["figures"])
    assert server.run("empty", "timeline")["step"] is None


def test_metrics_without_timing_show_the_loss_alone(server: Server) -> None:
    v = server.run("old", "view")
    assert v["loss"]["why"] is None and len(v["loss"]["runs"][0]["loss"]["x"]) == 50
    assert "schema 1" in v["waterfall"]["why"] and server.run("old", "progress")["state"] == "unknown"


def test_a_locked_run_says_so_and_comes_back(server: Server) -> None:
    path = server.root / "held"
    made_runs.make(path, steps=30)
    with closing(sqlite3.connect(path / "metrics.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=DELETE")
        db.execute("BEGIN EXCLUSIVE")
        assert server.run("held", "progress")["error"]["kind"] == "busy"
        assert server.run("a", "progress")["last_step"] == 1199
        db.execute("ROLLBACK")
    try:
        assert server.run("held", "progress")["last_step"] == 29
    finally:
        shutil.rmtree(path)


# -- following a run -----------------------------------------------------------------------------------------------------------


def copy_steps(source: Path, target: Path, first: int, last: int, tables: tuple[str, ...]) -> None:
    """Rows of steps first..last of one database into another, as a writer adds them."""
    with closing(sqlite3.connect(target / "metrics.sqlite")) as db:
        db.execute("ATTACH ? AS source", (str(source / "metrics.sqlite"),))
        for table in tables:
            db.execute(f"INSERT OR REPLACE INTO {table} SELECT * FROM source.{table} WHERE step BETWEEN ? AND ?", (first, last))
        db.commit()


STEPPED = ("step_metrics", "step_timing", "op_profile", "gpu_timeline", "memory", "evaluations")


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_are_added_show_up_as_if_read_at_once(tmp_path: Path, ranks: int) -> None:
    made_runs.make(tmp_path / "whole", steps=900, ranks=ranks, ended=None)
    shutil.copytree(tmp_path / "whole", tmp_path / "x")
    for table in STEPPED:
        made_runs.edit(tmp_path / "x", f"DELETE FROM {table} WHERE step > 400")
    live = Live(Folder(tmp_path))
    assert live.view("x", points=50)["loss"]["runs"][0]["loss"]["max"] and live.progress("x", -1)["last_step"] == 400
    assert live._kept["x"][1].tables["step_timing"].step.max() == 400
    # a batch may cut a step in two: its timing is there, its profile comes later
    profiled = rows(tmp_path / "whole", "SELECT min(step) FROM op_profile WHERE step > 420")[0][0]
    copy_steps(tmp_path / "whole", tmp_path / "x", 401, profiled, ("step_metrics", "step_timing", "memory"))
    copy_steps(tmp_path / "whole", tmp_path / "x", 401, profiled - 1, ("op_profile",))
    live.view("x", points=50)
    copy_steps(tmp_path / "whole", tmp_path / "x", 401, 899, STEPPED)
    grown, read = live.view("x", points=80), Live(Folder(tmp_path)).view("x", points=80)
    assert grown == read and grown["loss"]["runs"][0]["loss"]["x"][-1] > 880


def test_a_resume_that_replaces_rows_is_read_whole(tmp_path: Path) -> None:
    made_runs.make(tmp_path / "x", steps=300)
    live = Live(Folder(tmp_path))
    live.view("x", points=50)
    made_runs.make(tmp_path / "y", steps=300, seed=5, resumes=(100,))
    for table in ("step_metrics", "step_timing", "op_profile", "sessions"):
        with closing(sqlite3.connect(tmp_path / "x" / "metrics.sqlite")) as db:
            db.execute("ATTACH ? AS source", (str(tmp_path / "y" / "metrics.sqlite"),))
            db.execute(f"DELETE FROM {table}")
            db.execute(f"INSERT INTO {table} SELECT * FROM source.{table}")
            db.commit()
    assert live.view("x", points=50) == Live(Folder(tmp_path)).view("x", points=50)


def test_a_run_of_100_000_steps_opens_quickly(tmp_path: Path) -> None:
    made_runs.make(tmp_path / "long", steps=100_000)
    live, times = Live(Folder(tmp_path)), []
    for _ in range(3):
        began = time.process_time()
        view = live.view("long", points=600)
        times.append(time.process_time() - began)
    print(f"opened in {times[0]:.2f} s, again in {min(times[1:]):.2f} s, {len(json.dumps(view)) / 1e3:.0f} kB")
    assert len(view["loss"]["runs"][0]["loss"]["x"]) == 600 and len(json.dumps(view)) < 2_000_000
    made_runs.edit(tmp_path / "long", "UPDATE sessions SET seen_ns = seen_ns + 1")
    began = time.process_time()
    live.view("long", points=600)
    grown = time.process_time() - began
    print(f"after a change in {grown:.2f} s")
    assert times[0] < 12 and min(times[1:]) < 3 and grown < times[0]


def test_nothing_is_written(server: Server) -> None:
    def digest() -> dict[str, str]:
        return {str(p.relative_to(server.root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(server.root.rglob("*"))
                if p.is_file() and not p.name.endswith(("-shm", "-wal"))}  # SQLite's own, of any reader

    before = digest()
    for name in ("a", "lab", "damaged", "empty", "half"):
        for what in ("progress", "view", "timeline"):
            server.run(name, what)
    assert digest() == before
    for method in ("POST", "PUT", "DELETE"):
        assert server.raw("/api/runs", method)[0] == 405


# -- what it refuses -----------------------------------------------------------------------------------------------------------


OUTSIDE = ("gone", "..", ".", "%2e%2e", "..%2foutside", "%2fetc", "link", "nothing", "a%2f..%2f..%2foutside", "a%00", "%ff%fe")


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_of_the_folder_are_refused(server: Server, name: str) -> None:
    for what in ("progress", "view", "timeline"):
        status, _, body = server.raw(f"/api/run/{name}/{what}")
        assert status == 404 and b"outside/" not in body and b"loss" not in body
    for query in (f"a={name}&b=a", f"a=a&b={name}", "a=a"):
        assert server.raw(f"/api/compare?{query}")[0] == 404
    assert server.raw(f"/api/run/a/view?with={name}")[0] == 404


@pytest.mark.parametrize("query", ["points=0", "points=1e9", "points=x", "first=1.5", "points=99999999999999999999999999", "first=%00"])
def test_numbers_that_are_none_are_refused(server: Server, query: str) -> None:
    status, _, body = server.raw(f"/api/run/a/view?{query}")
    assert status == 400 and json.loads(body)["error"]["kind"] == "input"


def test_files_come_from_the_page_alone(server: Server) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/none.js", "/static/", "/app.py"):
        assert server.raw(path)[0] == 404
    pages = {"/static/dashboard.js": b"// The page", "/static/dashboard.css": b":root", "/profiling": b"<!doctype", "/gates": b"<!doctype"}
    for path, start in pages.items():
        status, headers, body = server.raw(path)
        assert status == 200 and body.startswith(start) and headers["x-content-type-options"] == "nosniff"
    assert len(server.raw("/static/plotly.min.js")[2]) > 1_000_000
    assert server.raw("/")[:1] == (307,)


def test_the_page_loads_nothing_from_elsewhere_and_other_sites_get_nothing(server: Server) -> None:
    _, headers, page = server.raw("/profiling")
    assert "default-src 'none'" in headers["content-security-policy"] and "script-src 'self';" in headers["content-security-policy"]
    for text in (page, server.raw("/static/dashboard.js")[2], server.raw("/static/dashboard.css")[2]):
        assert b"http://" not in text and b"https://" not in text and b"innerHTML" not in text
    assert server.raw("/api/runs", host="evil.example")[0] == 421
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}", "[::1]:80", "LOCALHOST"):
        assert server.raw("/api/runs", host=host)[0] == 200


# -- the command ---------------------------------------------------------------------------------------------------------------


def test_a_missing_extra_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install --editable '\.\[dashboard\]'") as error:
        command.serve(tmp_path)
    assert error.value.exit_code == 3


def test_importing_the_command_needs_the_base_packages_only() -> None:
    code = "import sys, alpha, alpha.dashboard.command; print(sorted({'starlette', 'uvicorn', 'plotly', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_addresses_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(MachineError, match="cannot listen"):
        command.serve(tmp_path, port=taken.getsockname()[1])
    for host, port in (("127.0.0.1", 65536), ("127.0.0.1", -1), ("no.such.host.invalid", 0)):
        with pytest.raises(InputError):
            command.serve(tmp_path, host, port)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a folder"):
        command.serve(tmp_path / "file")


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_command_serves_until_interrupted(tmp_path: Path, host: str, warned: bool) -> None:
    code = f"import sys; from pathlib import Path; from alpha.dashboard.command import serve; sys.exit(serve(Path('missing'), '{host}', 0))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONUNBUFFERED": "1"})  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        port = int(line.split(":")[2].split("/")[0])
        found = Server(tmp_path, port).get("/api/runs")
        assert found["runs"] == [] and not found["exists"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "Traceback" not in errors and "does not exist yet" in errors
    assert ("no password" in errors) == warned


def test_the_folder_of_one_run_shows_that_run(tmp_path: Path) -> None:
    for name in ("x", "y"):
        made_runs.make(tmp_path / name, steps=5)
    folder = Folder(tmp_path / "x")
    assert [e.name for e in folder.entries()] == ["x"] and folder.path("x") == tmp_path / "x"
    with pytest.raises(InputError):
        folder.path("y")


def test_odd_entries_leave_the_rest_alone(tmp_path: Path) -> None:
    """A link to itself is no run; a name that is not UTF-8 is shown with escapes, and found by them."""
    made_runs.make(tmp_path / "runs" / "x", steps=5)
    shutil.copytree(tmp_path / "runs" / "x", tmp_path / "runs" / os.fsdecode(b"b\xffd"))
    os.makedirs(tmp_path / "runs" / os.fsdecode(b"torn\xff"))
    (tmp_path / "runs" / os.fsdecode(b"torn\xff") / "manifest.json").write_text("{")
    for name in ("loop", "config.toml", "back"):
        (tmp_path / "runs" / name).symlink_to("back" if name == "loop" else "loop" if name == "back" else name)
    with contextmanager(serving)(tmp_path / "runs") as server:
        found = {r["name"]: r for r in server.get("/api/runs")["runs"]}
        assert set(found) == {"x", "b\\udcffd", "torn\\udcff"} and "torn\\udcff" in found["torn\\udcff"]["error"]["came"]
        for name in ("x", "b\\udcffd"):
            assert server.run(name, "progress")["steps"] == 5
            assert server.run(name, "view")["provenance"]["run"] == name
        assert server.get("/api/compare", a="x", b="b\\udcffd")["rows"] is not None
        assert "torn\\udcff" in server.run("torn\\udcff", "view")["error"]["came"]
        for name in ("loop", "b\\udcfed", "b?d"):
            assert server.run(name, "view", status=404)["error"]
    with contextmanager(serving)(tmp_path / "runs" / os.fsdecode(b"b\xffd")) as server:
        assert [r["name"] for r in server.get("/api/runs")["runs"]] == ["b\\udcffd"] and server.run("b\\udcffd", "view")["figures"]
        server.run("x", "view", status=404)
    with contextmanager(serving)(tmp_path / os.fsdecode(b"none\xff")) as server:
        assert server.get("/api/runs")["root"].endswith("none\\udcff")
    with pytest.raises(InputError, match="leads to itself"):
        Folder(tmp_path / "runs" / "loop")
