"""Reports: one truth in HTML, Markdown and CSV, marks and provenance on every figure, slowdowns named, in time."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import compare_runs
import made_runs
import pytest

from alpha.errors import BusyError, CorruptError, InputError, MachineError
from alpha.profile import compare, schema
from alpha.profile.figures import shown
from alpha.report import charts, tables_of, views
from alpha.report import runs as reading
from alpha.report.across import _verdict
from alpha.report.build import build
from alpha.report.command import main
from alpha.report.document import Document, Plot, Text
from alpha.report.write import write

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made run of 600 steps; tests only read it."""
    return made_runs.make(tmp_path_factory.mktemp("runs") / "a", steps=600, seed=1)


class Page(HTMLParser):
    """Figures of a page: id -> (whole text, table cells); and every address that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, tuple[list[str], list[list[str]]]] = {}
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self._figure = ""
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("href", "src", "xlink:href", "data", "action")]
        if tag == "figure":
            self._figure = given["id"] or ""
            self.figures[self._figure] = ([], [])
        if tag == "tr":
            self.figures[self._figure][1].append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_data(self, data: str) -> None:
        if self._figure:
            self.figures[self._figure][0].append(data)
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.figures[self._figure][1][-1].append("".join(self._cell))
            self._cell = None
        if tag == "figure":
            self._figure = ""

    def text(self, name: str) -> str:
        return " ".join(self.figures[name][0])


def markdown_tables(text: str) -> dict[str, list[list[str]]]:
    """Name (of the CSV above it) -> cells."""
    found: dict[str, list[list[str]]] = {}
    name = ""
    for line in text.splitlines():
        if (m := re.search(r"\[CSV\]\(csv/(.+?)\.csv\)", line)) is not None:
            name = m[1]
        if line.startswith("| ") and not line.startswith("| ---"):
            cells = re.split(r"(?<!\\) \| ", line[2:-2])
            found.setdefault(name, []).append([re.sub(r"\\(.)", r"\1", c) for c in cells])
    return found


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """(comment lines, rows)."""
    lines = path.read_text().splitlines()
    head = [line for line in lines if line.startswith("# ")]
    return head, list(csv.DictReader(io.StringIO("\n".join(lines[len(head) :]))))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a gated run and an ungated one, compared."""
    root = tmp_path_factory.mktemp("pages")
    a = made_runs.make(root / "gated", steps=400, seed=1, ranks=2)
    b = made_runs.make(root / "lab", steps=400, seed=2, ranks=2, status="UNGATED", slow={"backward": 1.05})
    assert main([str(a), str(b), "--compare", "--out", str(root / "out")]) == 0
    return root / "out"


def test_the_pages_show_the_same_figures(pages: Path, tmp_path: Path, run_a: Path) -> None:
    assert main([str(run_a), "--out", str(tmp_path / "one")]) == 0
    for out, least in ((pages, 11), (tmp_path / "one", 5)):
        page, marked = Page((out / "report.html").read_text()), markdown_tables((out / "report.md").read_text())
        tables = {name: cells for name, (_, cells) in page.figures.items() if cells}
        assert len(tables) >= least and set(tables) == set(marked)
        for name, cells in tables.items():
            assert [[" ".join(c.split()) for c in row] for row in cells] == marked[name], name
        csvs = {p.stem for p in (out / "csv").glob("*.csv")}
        assert csvs == set(page.figures), "a CSV beside every plot and table"
        plots = {p.stem for p in (out / "plots").glob("*.svg")}
        assert plots | set(tables) == csvs and not plots & set(tables)
    _, rows = read_csv(tmp_path / "one" / "csv" / "figures.csv")
    shown_cells = {row[0]: row for row in tables["figures"][1:]}
    direct = {f["key"]: f for f in views.figures(reading.load(run_a))["figures"]}
    assert len(rows) == len(direct) == len(shown_cells)
    for row in rows:
        f = direct[row["key"]]
        cells = shown_cells[row["title"]]
        if f["value"] is None:  # what one device cannot measure
            assert row["value"] == "" and cells[1] == cells[3] == "—" and row["reason"] == cells[4] != "", row["key"]
            continue
        assert float(row["value"]) == f["value"], "full precision"
        assert row["text"] == cells[1] == shown(f["value"], f["unit"])
        assert (row["verdict"] or "no\u00a0target") == cells[3]


def test_numbers_of_a_plot_stand_in_its_csv(pages: Path) -> None:
    run = reading.load(pages.parent / "lab")
    _, rows = read_csv(pages / "csv" / "waterfall-lab.csv")
    assert {r["phase"]: float(r["exclusive_ns"]) for r in rows} == {p["phase"]: p["exclusive_ns"] for p in views.waterfall(run)["phases"]}
    _, rows = read_csv(pages / "csv" / "utilisation.csv")
    own = [float(r["mean"]) for r in rows if r["series"] == "mfu" and r["run"] == "lab [UNGATED]"]
    assert own == views.utilisation([run])["runs"][0]["mfu"]["mean"]


def test_an_ungated_run_is_marked_everywhere(pages: Path, tmp_path: Path, run_a: Path) -> None:
    page, marked = Page((pages / "report.html").read_text()), (pages / "report.md").read_text()
    of_both = [n for n in page.figures if not n.endswith("-gated")]
    assert len(of_both) > 12 and len(page.figures) > len(of_both)
    for name in page.figures:
        mine = name in of_both
        assert ("UNGATED (lab):" in page.text(name)) == mine and ("UNGATED" in page.text(name)) == mine, name
        head, _ = read_csv(pages / "csv" / f"{name}.csv")
        assert any(line.startswith("# UNGATED: lab") for line in head) == mine, name
        line = next(x for x in marked.splitlines() if f"(csv/{name}.csv)" in x)
        assert ("UNGATED (lab)" in line) == mine, name
        if (pages / "plots" / f"{name}.svg").exists():
            assert ("UNGATED" in (pages / "plots" / f"{name}.svg").read_text()) == mine, name
    assert "no figure of them may be quoted" in (pages / "report.html").read_text()
    assert marked.startswith("# UNGATED (lab): ")
    assert main([str(run_a), "--out", str(tmp_path / "gated")]) == 0
    assert "UNGATED" not in (tmp_path / "gated" / "report.html").read_text()


def test_a_run_that_does_not_say_is_not_taken_for_gated(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=10)
    assert not reading.load(path).ungated
    (path / "manifest.json").unlink()
    made_runs.edit(path, "DELETE FROM run_metadata WHERE key = 'status'")
    assert reading.load(path).ungated
    path = made_runs.make(tmp_path / "s", steps=10)
    made_runs.edit(path, "UPDATE run_metadata SET value = 'UNGATED' WHERE key = 'status'")
    assert reading.load(path).ungated, "one of the two says so"


def test_every_figure_carries_its_provenance(pages: Path) -> None:
    page, marked = Page((pages / "report.html").read_text()), (pages / "report.md").read_text()
    parts = ("0123456789ab", "Synthetic CPU, 2 devices, 2 threads",
             "flops/v1: 3 x forward; matmuls with head; causal attention counted half",
             "peak 1 TFLOP/s and 40 GB/s (made up for a test)", "NumPy 2.2.6")  # fmt: skip
    for name in page.figures:
        texts = [page.text(name), "\n".join(read_csv(pages / "csv" / f"{name}.csv")[0])]
        after = marked.split(f"(csv/{name}.csv)")[1].split("[CSV]")[0].split("\n#")[0]
        texts.append("\n".join(re.findall("<sub>(.*)</sub>", after)).replace("\\", ""))
        whose = [n for n in ("gated", "lab") if name.endswith(f"-{n}")] or ["gated", "lab"]
        for text in texts:
            for part in (*parts, *(f"run {n} (" for n in whose)):
                assert part in text, f"{name}: {part}"


def test_the_commits_of_a_run(tmp_path: Path) -> None:
    run = reading.load(made_runs.make(tmp_path / "r", steps=5))
    sources = [{"commit": "a" * 40, "dirty": ""}, {"commit": "b" * 40, "dirty": "c" * 64}, {"commit": "a" * 40, "dirty": ""},
               {"commit": "unknown", "dirty": "unknown"}]  # fmt: skip
    run.manifest["sessions"] = [{"source": s} for s in sources]
    assert run.provenance()["commit"] == f"{'a' * 12}, {'b' * 12}+changes, unknown"
    run.manifest = {}
    assert run.provenance()["commit"] == "0123456789ab"


def test_the_page_is_self_contained(pages: Path) -> None:
    text = (pages / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    for address in page.addresses:
        assert address.startswith("#") or (pages / address).is_file(), address
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    targets_ = [a[1:] for a in page.addresses if a.startswith("#")]
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert set(targets_) <= set(ids) and len(ids) == len(set(ids)), "every reference has one target"
    for name in re.findall(r"\]\((\S+?\.(?:svg|csv))\)", (pages / "report.md").read_text()):
        assert (pages / name).is_file()


def test_a_second_report_replaces_the_first(tmp_path: Path, run_a: Path) -> None:
    document = build([reading.load(run_a)])
    page = write(document, tmp_path / "out")
    first, names = page.read_bytes(), {p.name for p in (tmp_path / "out" / "csv").iterdir()}
    write(build([reading.load(run_a)]), tmp_path / "out")
    assert page.read_bytes() == first, "the same runs give the same bytes"
    write(Document("short", [], []), tmp_path / "out")
    assert names and not list((tmp_path / "out" / "csv").iterdir()) and not list((tmp_path / "out" / "plots").iterdir())


def test_what_is_not_of_a_report_stays(tmp_path: Path, run_a: Path) -> None:
    """A page of somebody else is none of ours, whatever it is called; beside one of ours files of others stay."""
    document, out = build([reading.load(run_a)]), tmp_path / "out"
    own = {"report.html": "<title>Report on mine</title>", "csv/results.csv": "1", "plots/fig1.svg": "<svg/>"}

    def lay(folder: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def there(folder: Path) -> dict[str, str]:
        return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}

    marked = "<meta name=\"generator\" content=\"alpha-report\">"
    for i, files in enumerate((own, {**own, "report.html": f"<head></head>{marked}"}, {**own, "report.md": "# Report on mine\n"},
                               {"report.md": "# Report on mine\n", "csv/figures.csv": "1"}, {"csv/a.csv": "1"}, {"plots/x": ""})):
        lay(tmp_path / f"theirs{i}", files)
        with pytest.raises(InputError, match="no report"):
            write(document, tmp_path / f"theirs{i}")
        assert there(tmp_path / f"theirs{i}") == files
    write(document, out)
    first = there(out)
    more = {"csv/results.csv": "1", "plots/fig1.svg": "<svg/>", "trace.json": "{}", "plots/sub/loss.svg": ""}
    lay(out, more)
    write(Document("short", [], []), out)
    assert set(there(out)) == {*more, "report.html", "report.md"} and there(out).items() >= more.items()
    write(document, out)
    assert there(out) == {**first, **more}
    (out / "report.html").unlink()  # as under version control
    write(Document("short", [], []), out)
    assert set(there(out)) == {*more, "report.html", "report.md"}


def test_reports_of_older_releases_are_known(tmp_path: Path, run_a: Path) -> None:
    write(build([reading.load(run_a)]), tmp_path / "old")
    page = tmp_path / "old" / "report.html"
    page.write_text(re.sub("<meta name=.generator.*?>\n", "", page.read_text()))
    assert "generator" not in page.read_text()
    for folder in (tmp_path / "old", *(p.parent for p in (ROOT / "reports").glob("*/report.md"))):
        copy = tmp_path / "copy" / folder.name
        shutil.copytree(folder, copy)
        assert list((copy / "plots").iterdir()), folder
        write(Document("short", [], []), copy)
        assert not list((copy / "csv").iterdir()) and not list((copy / "plots").iterdir())


@pytest.mark.parametrize("call", [0, 3, 9])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, run_a: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    document, out, calls = build([reading.load(run_a)]), tmp_path / "new" / "out", [0]
    real = Path.write_text

    def full(self: Path, *given: Any, **how: Any) -> int:
        calls[0] += 1
        if calls[0] > call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *given, **how)

    for before in (False, True):  # into a new folder, and over a report
        if before:
            write(document, out)
        first = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        calls[0] = 0
        with monkeypatch.context() as patch, pytest.raises(MachineError, match="the disk is full"):
            patch.setattr(Path, "write_text", full)
            write(document, out)
        assert out.exists() == before and {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == first
    with monkeypatch.context() as patch, pytest.raises(MachineError):
        patch.setattr("alpha.report.write._named", lambda folder: (_ for _ in ()).throw(OSError(errno.EIO, "refused")))
        write(document, tmp_path / "torn")
    assert not (tmp_path / "torn").exists()


def test_a_report_that_was_killed_does_not_block_its_folder(tmp_path: Path, run_a: Path) -> None:
    document, out = build([reading.load(run_a)]), tmp_path / "out"
    (out / ".alpha-making-report" / "csv").mkdir(parents=True)
    (out / ".alpha-making-report" / "report.md").write_text("half")
    handle = os.open(out / ".alpha-making-report", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(BusyError, match="another report"):
        write(document, out)
    os.close(handle)
    write(document, out)
    assert sorted(p.name for p in out.iterdir()) == ["csv", "plots", "report.html", "report.md"]
    for name in ("csv", "plots", "report.md"):  # killed while it was moved
        subprocess.run(["rm", "-r", str(out / name)], check=True)
    write(document, out)
    assert (out / "csv" / "figures.csv").is_file()


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_small_runs(tmp_path: Path, steps: int) -> None:
    path = made_runs.make(tmp_path / "r", steps=steps, ended=None)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    cells = Page((tmp_path / "out" / "report.html").read_text()).figures["figures"][1]
    value = {row[0]: row[1] for row in cells}["MFU"]
    assert (value == "—") == (steps < 4)


def test_no_two_files_of_a_report_have_one_name(tmp_path: Path) -> None:
    """Names of runs become names of files: what is no letter or digit is a hyphen there, and each file would be of the last run alone."""
    names = ("a.b", "a-b", "rows-x", "x", "launches-a-b", "a-b-2", "a.b-2")
    runs = [reading.load(made_runs.make(tmp_path / name, steps=9 + i, seed=i)) for i, name in enumerate(names)]
    reading.distinct(runs)
    document = build(runs)
    files = [b.name for section in document.sections for b in section.blocks if not isinstance(b, Text)]
    assert len(set(files)) == len(files) > 8 * len(names), sorted({f for f in files if files.count(f) > 1})
    assert "ops-a-b" in files and "ops-a-b-2" in files and all(re.fullmatch(r"[\w-]+", f) for f in files)


def test_views_are_json(tmp_path: Path, run_a: Path) -> None:
    made = [run_a, made_runs.make(tmp_path / "none", steps=0), made_runs.make(tmp_path / "old", steps=9, version=1),
            made_runs.make(tmp_path / "ranks", steps=30, ranks=3)]  # fmt: skip
    for path in made:
        run = reading.load(path)
        of_one = (views.figures, views.waterfall, views.phases_over_time, views.top_ops, views.memory, views.memory_launches, views.gates,
                  views.flops, views.samples)
        of_many = (views.utilisation, views.launches, views.bandwidth, views.loss, views.scaling)
        for view in (*(f(run) for f in of_one), *(f([run]) for f in of_many), views.top_ops(run, by="launch"),
                     views.comparison(run, reading.load(path))):  # fmt: skip
            assert json.loads(json.dumps(view, allow_nan=False)) == view
            assert view["provenance"][0]["run"] == path.name and "why" in view and "notes" in view
    assert len(views.loss([reading.load(run_a)], 50)["runs"][0]["loss"]["x"]) == 50


def test_phases_over_time_are_of_unprofiled_steps_of_the_first_rank(tmp_path: Path) -> None:
    run = reading.load(made_runs.make(tmp_path / "r", steps=60, ranks=2, samples=8))
    rows = run.tables["step_timing"]
    plain = rows[(rows["rank"] == 0) & (rows.profiled == 0)].sort_values("step")
    made = views.phases_over_time(run, 100)
    assert 0 < len(plain) < 60 and made["x"] == plain.step.tolist()
    for name, series in made["series"].items():
        assert series == pytest.approx(plain[f"{name}_ns"].tolist()), name


# -- comparison, gates, speed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slow", "named"), [("backward", "phase backward is SLOWER"), ("op:gelu", "op gelu f32[2048,512]"),
                                             ("rank:1", "rank 1 is SLOWER")])  # fmt: skip
def test_a_slowdown_of_five_per_cent_is_named(tmp_path: Path, slow: str, named: str) -> None:
    a = made_runs.make(tmp_path / "a", steps=1500, seed=3, ranks=2, samples=60)
    b = made_runs.make(tmp_path / "b", steps=1500, seed=4, ranks=2, samples=60, slow={slow: 1.05})
    same = views.comparison(reading.load(a), reading.load(made_runs.make(tmp_path / "c", steps=1500, seed=5, ranks=2, samples=60)))
    assert not same["differing"] and same["verdict"] != "DIFFERENT"
    view = views.comparison(reading.load(a), reading.load(b))
    assert view["verdict"] == "DIFFERENT" and named in view["sentence"]
    found = next(r for r in view["differing"] if r["name"].startswith(slow.removeprefix("op:").replace("rank:", "rank ")))
    assert 0.02 < found["estimate"] < 0.08


def test_the_pages_name_the_slowdown(pages: Path) -> None:
    for page in ("report.html", "report.md"):
        text = (pages / page).read_text()
        assert "lab [UNGATED] against gated: DIFFERENT." in text.replace("\\", "")
        assert "phase backward is SLOWER by +4." in text or "phase backward is SLOWER by +5." in text


def test_the_chart_of_a_comparison_shows_what_lies_beyond_it_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(charts, "svg_of", lambda figure, name: drawn.append(figure.axes[0]) or "<svg/>")
    rows = [{"kind": "phase", "name": f"p{i}", "estimate": x, "low": x - 0.1, "high": x + 0.1, "line": 0.02, "verdict": "UNDECIDED"}
            for i, x in enumerate([0.0, 0.5, -0.5, *[0.01] * 28])]  # fmt: skip
    for known, said in ((rows, "first 30 of 31 rows"), (rows[:30], "")):
        charts.comparison({"rows": known, "a": "a", "provenance": []}, "c")
        dots = [line for line in drawn[-1].lines if line.get_marker() in ("o", "<", ">")]
        assert [(d.get_marker(), round(float(d.get_xdata()[0]), 9)) for d in dots[:3]] == [("o", 0.0), (">", 30.0), ("<", -30.0)]
        assert said in drawn[-1].get_xlabel() and ("rows" in drawn[-1].get_xlabel()) == bool(said)


def test_series_of_one_rank_say_so(tmp_path: Path) -> None:
    for ranks in (1, 2):
        made = build([reading.load(made_runs.make(tmp_path / f"r{ranks}", steps=100, ranks=ranks))])
        titles = [b.title for s in made.sections for b in s.blocks if isinstance(b, Plot)]
        assert sorted(t for t in titles if "rank 0" in t) == ([] if ranks == 1 else [
            "Launch counts, rank 0", "Phases of the step over the run, rank 0", "Planned and actual memory; over the run, rank 0"])


def test_other_programs_are_compared_only_when_asked(tmp_path: Path) -> None:
    a, b = (reading.load(made_runs.make(tmp_path / n, steps=100, metadata={"program": n * 64})) for n in "ab")
    with pytest.raises(InputError, match="program"):
        views.comparison(a, b)
    assert any("different program" in n for n in views.comparison(a, b, anyway=True)["notes"])


def test_gate_status_of_the_components_used(run_a: Path) -> None:
    from alpha.registry.status import Registry
    from alpha.train.catalogue import catalogue

    run, registry = reading.load(run_a), Registry(catalogue())
    view = views.gates(run, registry)
    assert [c["component"] for c in view["components"]] == sorted(run.manifest["components"])
    for c in view["components"]:
        status = registry.status(c["component"])
        assert c["usable"] == status.usable and set(c["gates"]) == set(status.gates)
        assert bool(c["missing"]) == (not status.usable)
        assert ("STALE" in c["gates"].values()) <= (not status.usable)
        assert c["evidence"] == run.manifest["components"][c["component"]]
    run.manifest["components"]["gone.f32.cpu"] = {}
    gone = next(c for c in views.gates(run, registry)["components"] if c["component"] == "gone.f32.cpu")
    assert not gone["usable"] and "no such component" in gone["missing"][0]


@pytest.mark.slow
def test_ten_runs_of_ten_thousand_steps_in_time(tmp_path: Path) -> None:
    """20 s are allowed on a quiet machine; CPU seconds of this process are what a busy one does not stretch."""
    made = [made_runs.make(tmp_path / f"r{i}", steps=10_000, seed=i, metadata={"devices": 1 + i // 5}) for i in range(10)]
    began = time.process_time()
    assert main([*map(str, made), "--out", str(tmp_path / "out")]) == 0
    assert time.process_time() - began < 20.0
    assert Page((tmp_path / "out" / "report.html").read_text()).figures["figures"][1][0][2:] == [f"r{i}" for i in range(10)]


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_extra_is_asked_for_only_by_reports(run_a: Path) -> None:
    blocked = "import sys; sys.modules['pandas'] = None; sys.modules['matplotlib'] = None\n"
    light = python(blocked + "import alpha, alpha.train.catalogue, alpha.profile.figures, alpha.profile.compare, alpha.report.command")
    assert light.returncode == 0, light.stderr
    done = python(blocked + f"from alpha.report.command import main; sys.exit(main([{str(run_a)!r}]))")
    assert done.returncode == MachineError.exit_code and "--editable '.[report]'" in done.stderr and "Traceback" not in done.stderr
    done = python(f"import sys; sys.modules['matplotlib'] = None\nfrom alpha.report.command import main; sys.exit(main([{str(run_a)!r}]))")
    assert done.returncode == MachineError.exit_code and "--editable '.[report]'" in done.stderr and "Traceback" not in done.stderr


def test_what_occurs_too_rarely_and_too_few_computing_rows_leave_a_verdict() -> None:
    same = compare.compare(compare_runs.made(1), compare_runs.made(1))
    same = replace(same, rows=tuple(r for r in same.rows if r.kind != "op"))  # of a few made samples each
    assert _verdict(same) == "SAME"
    told = replace(same.common, verdict=compare.UNDECIDED, reason="too few computing rows to tell")  # as on a GPU: two phases are all
    rare = replace(same.rows[-1], name="checkpoint", verdict=compare.UNDECIDED, reason=compare.RARE)
    assert _verdict(replace(same, common=told, rows=(*same.rows, rare))) == "SAME"
    noisy = replace(rare, reason="too noisy")
    assert _verdict(replace(same, common=told, rows=(*same.rows, noisy))) == "UNDECIDED"
    moved = replace(same.rows[0], verdict=compare.SLOWER)
    assert _verdict(replace(same, common=told, rows=(moved, *same.rows[1:]))) == "DIFFERENT"


def test_flops_by_part_stand_beside_their_totals(tmp_path: Path) -> None:
    run = reading.load(made_runs.make(tmp_path / "r", steps=20))
    view, total = views.flops(run), run.number("flops_per_token")
    assert total is not None and view["version"] == "flops/v1"
    last = view["parts"][-1]
    assert last["part"] == "together" and last["model"] == total * made_runs.TOKENS and last["executed"] == run.number("executed_flops")
    for key in ("model", "executed", "backward_model", "recompute_executed"):
        assert last[key] == sum(p[key] for p in view["parts"][:-1]), key
    table = tables_of.flops(view, "")
    assert "flops/v1" in table.title and table.rows[-1][0] == "together" and len({len(r) for r in (table.columns, *table.rows)}) == 1
    assert views.samples(run)["why"] == "no text was sampled"


def test_sources_and_waits_of_a_mixture(tmp_path: Path) -> None:
    each = {"sequences": 10, "documents": 4, "cut": 1, "padding": 0.25, "left_out": 0.0}
    stated = [{"source": "a|<b>", "weight": 7, **each, "attended": 0.5, "heaviest": 1.25}, {"source": "c", "weight": 3, **each}]
    path = made_runs.make(tmp_path / "r", steps=20, metadata={"sources": json.dumps(stated)})
    before = reading.load(path)
    assert views.sources(before)["runs"] == [] and "data.prefetch" in views.waits(before)["why"]
    for statement in (schema.SOURCES, schema.WAITS):
        made_runs.edit(path, statement)
    for step, source, bits in ((10, "a|<b>", 3.0), (10, "c", 5.0), (20, "a|<b>", 2.5), (20, "c", 4.0)):
        made_runs.edit(path, "INSERT INTO source_evaluations VALUES (?, ?, 1.0, 1, 1, 1, ?)", (step, source, bits))
    for step in range(20):
        late = step == 7
        made_runs.edit(path, "INSERT INTO data_waits VALUES (?, 0, 4, ?, ?, 8000000)", (step, 4 - late, 5_000_000 * late))
    run = reading.load(path)
    assert [(s["share"], s["bits_per_byte"]) for s in views.sources(run)["sources"]] == [(0.7, 2.5), (0.3, 4.0)]
    (rank,) = views.waits(run)["ranks"]
    assert (rank["waited"], rank["ready"], rank["longest_step"], rank["wait_ns"]) == (1, 79, 7, 250_000.0)
    assert rank["share"] == 5_000_000 / int(run.step_timing.wall_ns.sum())
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert [row[0] for row in page.figures["sources-rows"][1]] == ["source", "a|<b>", "c"] and {"sources", "waits"} <= set(page.figures)
    told = [dict(zip(page.figures["sources-rows"][1][0], row)) for row in page.figures["sources-rows"][1][1:]]
    assert [(row["pairs attended"], row["heaviest over mean"]) for row in told] == [("50.00 %", "1.250"), (tables_of.NONE, tables_of.NONE)]
    made_runs.edit(path, "UPDATE data_waits SET ready = 5 WHERE step = 3")
    with pytest.raises(CorruptError, match="step 3"):
        reading.load(path)
    for wrong in ("[", "[1]", "[{}]", json.dumps([{**stated[0], "weight": 0}]), json.dumps([{**stated[0], "cut": "x"}]),
                  json.dumps([{**stated[0], "heaviest": None}])):
        run.metadata["sources"] = wrong
        with pytest.raises(CorruptError, match="sources"):
            views.sources(run)
