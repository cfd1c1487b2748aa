"""The dashboard in a real headless browser: what a person sees on an empty run, a run that goes on, 100,000 steps and a damaged one.

Needs the extra `browser` and a Chromium on the machine (named by ALPHA_BROWSER, or found on the path); without them every test is NOT RUN
and says so. ALPHA_SCREENSHOTS names a folder for pictures of every state, to be looked at.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import made_runs
import pytest

if any(importlib.util.find_spec(p) is None for p in ("uvicorn", "playwright")):
    pytest.skip("NOT RUN: the extras `dashboard` and `browser` are not installed", allow_module_level=True)
from playwright.sync_api import Browser, Page, expect, sync_playwright
from test_dashboard import ODD, STEPPED, Server, serving

pytestmark = pytest.mark.browser
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
HERE = ("http://127.0.0.1", "data:", "blob:")
PATIENCE_MS = 30_000
TIMELINE = "document.querySelector('#p-timeline .js-plotly-plot')"
TICK_MS = 300
"""How often a page of these tests looks for news; at a user's it is a second."""


def chromium() -> str | None:
    """A browser of this machine."""
    named = os.environ.get("ALPHA_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip(f"NOT RUN: no browser: none of {', '.join(NAMES)} is installed and ALPHA_BROWSER names none")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("browser") / "runs"
    root.mkdir()
    made_runs.make(root / "a", steps=1200, seed=1)
    made_runs.make(root / "b", steps=1000, seed=2, slow={"op:gelu": 1.3, "rank:0": 1.0})
    made_runs.make(root / "lab", steps=300, status="UNGATED")
    made_runs.make(root / "model", steps=300, metadata={"flops_version": "flops/v9"})
    made_runs.make(root / "ranks", steps=120, ranks=2)
    made_runs.make(root / "empty", steps=0, ended=None)
    made_runs.make(root / "long", steps=100_000)
    made_runs.make(root / "damaged", steps=400)
    file = root / "damaged" / "metrics.sqlite"
    whole = bytearray(file.read_bytes())
    whole[8192:60000] = b"\xff" * (60000 - 8192)
    file.write_bytes(whole)
    made_runs.make(root / ODD, steps=60)
    made_runs.edit(root / ODD, "UPDATE op_profile SET op = '<b onclick=alert(2)>' || op, shape = '<script>alert(3)</script>'")
    made_runs.edit(root / ODD, "UPDATE gpu_timeline SET name = '<img src=x onerror=alert(4)>' || name, track = '<i>' || track")
    yield from serving(root)


class View:
    """A page with what went wrong on it."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page, self.server = page, server
        self.wrong: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(f"window.tickMs = {TICK_MS}")
        page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: self.wrong.append(str(e)))
        page.on("requestfailed", lambda r: self.wrong.append(f"failed: {r.url}"))
        page.on("request", lambda r: None if r.url.startswith(HERE) else self.wrong.append(f"elsewhere: {r.url}"))
        page.on("dialog", lambda d: (self.wrong.append(f"dialog: {d.message}"), d.dismiss()))

    def open(self, path: str) -> None:
        self.page.goto(f"http://127.0.0.1:{self.server.port}{path}")

    def drawn(self) -> None:
        """Wait until the figures of the run are on the page."""
        self.page.wait_for_selector("body[data-drawn]")
        self.page.wait_for_selector("#p-loss .main-svg")

    def ticks(self, number: int) -> None:
        """Wait until the page has looked for news so often."""
        for _ in range(number):
            self.page.wait_for_event("response", lambda r: "/progress" in r.url)

    def overdue(self) -> None:
        """Wait until a page that follows would have asked for figures anew, and a little longer."""
        self.page.wait_for_function("() => Date.now() - state.asked >= state.every")
        self.ticks(3)

    def turned(self, range_: Any) -> Any:
        """Wait until the timeline shows another window than this one; which."""
        self.page.wait_for_function(f"(was) => JSON.stringify({TIMELINE}.layout.xaxis.range) !== was",
                                    arg=json.dumps(range_, separators=(",", ":")))
        return self.plot("timeline", "p.layout.xaxis.range")

    def plot(self, panel: str, expression: str) -> Any:
        """Something of a chart's own data: `p` is plotly's element."""
        return self.page.evaluate(f"(() => {{ const p = document.querySelector('#p-{panel} .js-plotly-plot'); return {expression}; }})()")

    def drag(self, panel: str, start: float, stop: float) -> None:
        """Drag across a chart from one part of its width to another (12 pixels at least: plotly takes less for a click)."""
        plot, mouse = self.page.locator(f"#p-{panel} .nsewdrag").first, self.page.mouse
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        at = box["y"] + box["height"] / 2
        mouse.move(box["x"] + box["width"] * start, at)
        mouse.down()
        mouse.move(box["x"] + box["width"] * (start + stop) / 2, at, steps=4)
        mouse.move(box["x"] + max(box["width"] * stop, box["width"] * start + 12), at, steps=4)
        mouse.up()

    def shot(self, name: str, full: bool = True) -> None:
        if folder := os.environ.get("ALPHA_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)


@pytest.fixture
def view(browser: Browser, server: Server) -> Iterator[View]:
    context = browser.new_context(viewport={"width": 1500, "height": 950})
    made = View(context.new_page(), server)
    yield made
    context.close()
    assert not made.wrong, made.wrong


CHARTS = ("waterfall", "phases", "utilisation", "speed", "roofline", "loss", "launches", "bandwidth", "memory", "live", "resident",
          "timeline")
POINTS = "p.data.reduce((n, t) => n + (t.x || []).filter((v) => v !== null).length, 0)"


def test_a_finished_run_fills_every_chart(view: View) -> None:
    view.open("/profiling?run=a")
    view.drawn()
    view.page.wait_for_selector("#p-timeline .barlayer .point")
    for chart in CHARTS:
        assert view.plot(chart, POINTS) > 2, chart
        assert view.page.locator(f"#p-{chart} .main-svg").first.bounding_box()["height"] > 120, chart  # type: ignore[index]
        assert "Synthetic CPU" in view.page.locator(f"#p-{chart} .prov").inner_text(), chart
    assert view.page.locator("#p-ops tbody tr").count() == 15
    assert view.page.locator("#figures .figure").count() >= 14
    assert "PASS" in view.page.locator("#figures [data-key=kernel_active]").inner_text()
    assert view.page.locator("#progress").inner_text().startswith("finished")
    buttons = view.page.locator(".modebar-btn").evaluate_all("(all) => [...new Set(all.map((b) => b.dataset.title))]")
    assert sorted(buttons) == ["Download plot as a PNG", "Pan", "Zoom", "Zoom in", "Zoom out"]  # none that sends a chart away
    assert all(not view.plot(c, "p._context.plotlyServerURL") for c in CHARTS)
    assert not view.page.locator(".chip.ungated:visible").count() and not view.page.locator("#stamp").is_visible()
    view.shot("finished")


def test_an_ungated_run_is_marked_on_every_chart(view: View) -> None:
    view.page.emulate_media(color_scheme="dark")
    view.open("/profiling?run=lab")
    view.drawn()
    view.page.wait_for_selector("#p-timeline .barlayer .point")
    expect(view.page.locator("#stamp")).to_contain_text("UNGATED")
    for chart in CHARTS:
        assert "UNGATED" in view.plot(chart, "(p.layout.annotations || []).map((a) => a.text)"), chart
        assert view.page.locator(f"#p-{chart} .chip.ungated").is_visible()
    for table in ("ops", "used"):
        assert view.page.locator(f"#p-{table} .chip.ungated").is_visible()
    view.shot("ungated-dark")


def test_an_empty_run_says_what_is_missing(view: View) -> None:
    view.open("/profiling?run=empty")
    view.page.wait_for_selector("body[data-drawn]")
    for chart in ("waterfall", "utilisation", "loss", "timeline"):
        expect(view.page.locator(f"#p-{chart} .none")).to_be_visible()
    expect(view.page.locator("#p-loss .none")).to_contain_text("no finished step")
    view.shot("empty")


def test_a_damaged_run_leaves_the_page_usable(view: View) -> None:
    view.open("/profiling?run=damaged")
    notice = view.page.locator("#notice")
    expect(notice).to_be_visible()
    expect(notice).to_contain_text("damaged")
    expect(notice).to_contain_text("restore")
    assert not view.page.locator(".js-plotly-plot").count()
    view.shot("damaged")
    view.page.select_option("#run", "a")
    view.drawn()
    expect(notice).to_be_hidden()
    view.page.select_option("#run", "damaged")
    expect(notice).to_be_visible()
    assert not view.page.locator(".js-plotly-plot").count()


def test_a_run_whose_rows_contradict_each_other_is_read_once_and_not_again_and_again(view: View) -> None:
    made_runs.make(view.server.root / "clock", steps=50)
    made_runs.edit(view.server.root / "clock", "UPDATE step_timing SET began_ns = began_ns - 10000000000 WHERE step = 30")
    asked: list[str] = []
    view.page.on("request", lambda r: asked.append(r.url) if "/clock/view" in r.url else None)
    try:
        view.open("/profiling?run=clock")
        expect(view.page.locator("#notice")).to_contain_text("backwards")
        view.overdue()
        assert len(asked) == 1, asked
        assert "damaged" in view.page.locator("#progress").inner_text()
    finally:
        shutil.rmtree(view.server.root / "clock")


def test_a_locked_run_is_shown_as_soon_as_it_is_free(view: View) -> None:
    path = view.server.root / "held"
    made_runs.make(path, steps=60)
    try:
        with closing(sqlite3.connect(path / "metrics.sqlite", isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=DELETE")
            db.execute("BEGIN EXCLUSIVE")
            view.open("/profiling?run=held")
            expect(view.page.locator("#notice")).to_contain_text("locked")
            view.shot("locked", full=False)
            db.execute("ROLLBACK")
        view.drawn()
        expect(view.page.locator("#notice")).to_be_hidden()
    finally:
        view.page.select_option("#run", "a")
        view.drawn()
        shutil.rmtree(path)


def test_a_folder_without_runs_waits_for_the_first(browser: Browser, tmp_path: Path) -> None:
    for other in serving(tmp_path / "runs"):
        context = browser.new_context()
        view = View(context.new_page(), other)
        view.open("/profiling")
        expect(view.page.locator("#notice")).to_contain_text("no run here yet")
        view.shot("no-runs", full=False)
        made_runs.make(tmp_path / "runs" / "first", steps=100)
        view.drawn()
        expect(view.page.locator("#notice")).to_be_hidden()
        context.close()
        assert not view.wrong


def test_the_page_follows_a_run_that_goes_on(view: View, tmp_path: Path) -> None:
    """A writer adds rows while the page is open: the step, the loss curve and the newest profiled step move on by themselves."""
    source, target = tmp_path / "source", view.server.root / "going"
    made_runs.make(source, steps=3000, ended=None, samples=60, timeline=60)
    shutil.copytree(source, target)
    for table in STEPPED:
        made_runs.edit(target, f"DELETE FROM {table} WHERE step > 300")
    stop, shown = threading.Event(), [300.0]

    def write() -> None:
        """Ten steps at a time, and no further ahead of the page than a busy machine draws in time."""
        with closing(sqlite3.connect(target / "metrics.sqlite", isolation_level=None, timeout=30)) as db:
            db.execute("ATTACH ? AS source", (str(source / "metrics.sqlite"),))
            for step in range(301, 3000, 10):
                while not stop.wait(0.05) and step > shown[0] + 400:
                    pass
                if stop.is_set():
                    return
                db.execute("BEGIN IMMEDIATE")
                for table in STEPPED:
                    db.execute(f"INSERT OR REPLACE INTO {table} SELECT * FROM source.{table} WHERE step BETWEEN ? AND ?", (step, step + 9))
                now = time.time_ns()
                db.execute("UPDATE sessions SET unix_ns = ? - (seen_ns - clock_ns)", (now,))
                db.execute("COMMIT")

    writer = threading.Thread(target=write)
    try:
        view.open("/profiling?run=going")
        view.drawn()
        writer.start()
        first = view.plot("loss", "Math.max(...p.data[0].x)")
        expect(view.page.locator("#progress")).to_contain_text("running")
        view.page.wait_for_selector("body:not([data-drawn='1'])")
        deadline = time.monotonic() + 40
        seen, steps = {first}, set()
        while time.monotonic() < deadline and (len(seen) < 4 or len(steps) < 3):
            view.page.wait_for_timeout(TICK_MS / 2)
            seen.add(view.plot("loss", "Math.max(...p.data[0].x)"))
            shown[0] = max(seen)
            if view.page.locator("#tl-step").count():
                steps.add(view.page.locator("#tl-step").input_value())
        assert len(seen) >= 4 and max(seen) > first + 100, (first, seen)
        assert len(steps) >= 3, steps
        view.shot("running")
        shown[0] = 3000.0
        view.page.keyboard.press("f")  # held still, the charts stay as they are while the step goes on
        expect(view.page.locator("#follow")).not_to_be_checked()
        view.page.wait_for_function("() => !state.busy && !state.again")  # what was asked for before is drawn
        view.ticks(2)
        still, at = view.plot("loss", "Math.max(...p.data[0].x)"), view.page.locator("#step").inner_text()
        expect(view.page.locator("#step")).not_to_have_text(at)
        view.overdue()
        assert view.plot("loss", "Math.max(...p.data[0].x)") == still
    finally:
        stop.set()
        if writer.ident is not None:
            writer.join()
        view.page.select_option("#run", "a")
        view.drawn()
        shutil.rmtree(target)


def test_100_000_steps_open_quickly_and_zoom_shows_single_steps(view: View) -> None:
    view.open("/profiling?run=a")
    view.drawn()
    began = time.monotonic()
    view.page.select_option("#run", "long")
    view.page.wait_for_function("() => { const e = document.querySelector('#step'); return e && e.textContent === '99,999'; }")
    view.page.wait_for_selector("#p-loss .main-svg")
    took = time.monotonic() - began
    print(f"100,000 steps on the page after {took:.2f} s")
    assert took < 30
    assert view.plot("loss", "p.data[0].x.length") <= 900 and view.plot("loss", "Math.max(...p.data[0].x)") > 99_000
    view.shot("long")
    view.drag("loss", 0.5, 0.504)
    view.page.wait_for_function("() => document.querySelector('#first').value !== ''")
    low, high = (int(view.page.locator(f"#{i}").input_value()) for i in ("first", "last"))
    assert 45_000 < low < high < 55_000 and high - low < 3000
    view.page.wait_for_function(f"() => Math.min(...document.querySelector('#p-loss .js-plotly-plot').data[0].x) >= {low}")
    x = view.plot("speed", "p.data[p.data.length - 1].x")
    assert low <= min(x) and max(x) <= high  # every chart over steps follows
    view.shot("long-zoomed")
    view.page.keyboard.press("z")
    view.page.wait_for_function("() => Math.min(...document.querySelector('#p-loss .js-plotly-plot').data[0].x) === 0")
    assert view.page.locator("#first").input_value() == ""


def test_the_timeline_zooms_by_mouse_and_by_keys(view: View) -> None:
    view.open("/profiling?run=a")
    view.drawn()
    view.page.wait_for_selector("#p-timeline .barlayer .point")
    whole = view.plot("timeline", "p.layout.xaxis.range")
    bars = view.plot("timeline", POINTS)
    view.drag("timeline", 0.4, 0.5)
    view.page.wait_for_function(f"() => document.querySelector('#p-timeline .js-plotly-plot').layout.xaxis.range[0] > {whole[1] * 0.3}")
    view.page.wait_for_function(f"() => {POINTS.replace('p.', f'{TIMELINE}.', 1)} < {bars}")  # only what lies in the window
    part = view.plot("timeline", "p.layout.xaxis.range")
    assert whole[1] * 0.38 < part[0] < part[1] < whole[1] * 0.52
    assert "matmul" in " ".join(view.plot("timeline", "p.data.flatMap((t) => t.text || [])"))
    view.shot("timeline-zoomed", full=False)
    view.page.locator("#p-timeline .js-plotly-plot").focus()
    view.page.keyboard.press("+")
    near = view.turned(part)
    assert near[1] - near[0] == pytest.approx((part[1] - part[0]) / 2, rel=1e-3)
    view.page.keyboard.press("ArrowRight")
    moved = view.turned(near)
    assert moved[0] > near[0] and moved[1] - moved[0] == pytest.approx(near[1] - near[0], rel=1e-3)
    view.page.keyboard.press("0")
    assert view.turned(moved) == pytest.approx(whole)
    before = view.page.locator("#tl-step").input_value()
    view.page.keyboard.press("[")
    expect(view.page.locator("#tl-step")).not_to_have_value(before)


def test_ranks_stand_in_the_timeline_by_name(view: View) -> None:
    view.open("/profiling?run=ranks")
    view.drawn()
    view.page.wait_for_selector("#p-timeline .barlayer .point")
    tracks = view.plot("timeline", "p.layout.yaxis.categoryarray")
    assert {t.split(" · ")[0] for t in tracks} == {"rank 0", "rank 1"}
    view.page.select_option("#tl-rank", "1")
    view.page.wait_for_function(f"(was) => {TIMELINE}.layout.yaxis.categoryarray.length < was", arg=len(tracks))
    assert not any("rank" in t for t in view.plot("timeline", "p.layout.yaxis.categoryarray"))


def test_two_runs_are_compared(view: View) -> None:
    view.open("/profiling?run=b")
    view.drawn()
    view.page.select_option("#other", "a")
    view.page.wait_for_selector("#p-comparison [data-verdict=SLOWER]")
    assert "gelu" in (view.page.locator("#p-comparison [data-verdict=SLOWER]").first.get_attribute("data-name") or "")
    assert view.plot("comparison", POINTS) > 3
    assert {"training loss b", "training loss a"} <= set(view.plot("loss", "p.data.map((t) => t.name || '')"))
    view.shot("comparison")
    view.page.select_option("#other", "model")
    expect(view.page.locator("#p-comparison .none")).to_contain_text("flops")
    expect(view.page.locator("#notes")).to_contain_text("is not drawn here")
    view.page.click("#anyway")
    view.page.wait_for_selector("#p-comparison [data-verdict]")
    expect(view.page.locator("#p-comparison")).to_contain_text("different flops_version")
    view.page.select_option("#other", "")
    expect(view.page.locator("#p-comparison")).to_be_hidden()


def test_names_are_text_and_nothing_else(view: View) -> None:
    view.open("/profiling")
    view.page.select_option("#run", ODD)
    view.drawn()
    view.page.wait_for_selector("#p-timeline .barlayer .point")
    assert "<script>alert(3)</script>" in view.page.locator("#p-ops tbody").inner_text()
    for tag in ("#content img", "#content b[onclick]", "#content script", "#content svg image[href=x]"):
        assert view.page.locator(tag).count() == 0, tag
    assert "<img src=x" in view.page.locator("#p-timeline").inner_text() or "<i>" in view.page.locator("#p-timeline").inner_text()


def test_the_ops_table_sorts_by_keyboard(view: View) -> None:
    view.open("/profiling?run=a")
    view.drawn()
    head = view.page.locator("#p-ops [data-sort=intensity]")
    head.focus()
    view.page.keyboard.press("Enter")
    found = [float(t) for t in view.page.locator("#p-ops tbody tr td:nth-child(10)").all_inner_texts()]
    assert found == sorted(found, reverse=True)
    assert view.page.evaluate("() => document.activeElement.dataset.sort") == "intensity"
    view.page.keyboard.press("Enter")
    assert [float(t) for t in view.page.locator("#p-ops tbody tr td:nth-child(10)").all_inner_texts()] == sorted(found)


def test_the_gates_page_filters(view: View) -> None:
    view.open("/gates")
    view.page.wait_for_selector("table.gates tbody tr")
    every = view.page.locator("table.gates tbody tr").count()
    view.shot("gates")
    view.page.fill("#gate-search", "gelu")
    few = view.page.locator("table.gates tbody tr").count()
    assert 0 < few < every and all("gelu" in t for t in view.page.locator("table.gates tbody th").all_inner_texts())
    view.page.keyboard.press("Escape")  # leaves the field
    view.page.keyboard.press("p")
    view.drawn()
