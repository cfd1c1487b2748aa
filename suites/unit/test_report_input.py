"""Reading runs: every bad input is one clear error, and what is odd but sound is told."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import made_runs
import pytest

from alpha.errors import BusyError, CorruptError, InputError
from alpha.profile.store import Store
from alpha.report import runs as reading
from alpha.report import views
from alpha.report.build import build
from alpha.report.command import main
from alpha.report.document import Plot, Text
from alpha.report.facts import facts
from alpha.report.tables import Reader


def spoil(path: Path, how: str) -> None:
    metrics = path / "metrics.sqlite"
    row = "WHERE step = 50 AND rank = 0"
    match how:
        case "missing": shutil.rmtree(path)
        case "file": spoil(path, "missing"); path.write_text("x")
        case "empty": spoil(path, "missing"); path.mkdir()
        case "foreign": (path / "config.toml").rename(path / "other.toml")
        case "half": metrics.unlink(); (path / "manifest.json").unlink()
        case "no metrics": metrics.unlink()
        case "zero bytes": metrics.write_bytes(b"")
        case "newer": made_runs.edit(path, "PRAGMA user_version = 99")
        case "damaged": spoil_bytes(metrics)
        case "no database": metrics.write_text("this is no database " * 100)
        case "table gone": made_runs.edit(path, "DROP TABLE op_profile")
        case "column gone":
            made_runs.edit(path, "DROP VIEW step_timing_ms")
            made_runs.edit(path, "ALTER TABLE step_timing DROP COLUMN comm_ns")
        case "column of a profile gone":  # of a mutant: no reader but the one that computes asked for it
            made_runs.edit(path, "ALTER TABLE op_profile DROP COLUMN dispatches")
        case "name of a column":  # of a mutant: what SQLite says of the table cannot be decoded either
            made_runs.edit(path, "PRAGMA journal_mode=DELETE")
            metrics.write_bytes(metrics.read_bytes().replace(b"dispatches INTEGER", b"\xffispatches INTEGER"))
        case "second peak": made_runs.edit(path, "INSERT INTO run_peak VALUES (1, 2e12, 4e10, 'measured again')")
        case "other peak": made_runs.edit(path, "UPDATE run_metadata SET value = '1.1e12' WHERE key = 'peak_flops'")
        case "other bandwidth": made_runs.edit(path, "UPDATE run_peak SET bandwidth = 5e10")
        case "peak no number": made_runs.edit(path, "UPDATE run_metadata SET value = '1e12?' WHERE key = 'peak_flops'")
        case "peak of the manifest":
            manifest = json.loads((path / "manifest.json").read_text())
            manifest["flops"]["peak"] *= 2
            (path / "manifest.json").write_text(json.dumps(manifest))
        case "part": made_runs.edit(path, "UPDATE flops_parts SET model = model + 1 WHERE direction = 'forward'")
        case "part executed": made_runs.edit(path, "DELETE FROM flops_parts WHERE direction = 'recompute'")
        case "text": made_runs.edit(path, f"UPDATE step_timing SET forward_ns = 'fast' {row}")
        case "real": made_runs.edit(path, f"UPDATE step_timing SET forward_ns = 1.5 {row}")
        case "negative": made_runs.edit(path, f"UPDATE step_timing SET idle_ns = -5, unexplained_ns = unexplained_ns + idle_ns + 5 {row}")
        case "too long": made_runs.edit(path, f"UPDATE step_timing SET forward_ns = forward_ns + 10000000, unexplained_ns = 0 {row}")
        case "long step": made_runs.edit(path, f"UPDATE step_timing SET step_ns = wall_ns + 1 {row}")
        case "unexplained": made_runs.edit(path, f"UPDATE step_timing SET unexplained_ns = unexplained_ns + 1 {row}")
        case "clock": made_runs.edit(path, f"UPDATE step_timing SET began_ns = began_ns - 900000000 {row}")
        case "overlap": made_runs.edit(path, f"UPDATE step_timing SET began_ns = began_ns - 1 {row}")
        case "order": made_runs.edit(path, f"UPDATE step_timing SET session = 7 {row}")
        case "session clock": made_runs.edit(path, "UPDATE sessions SET seen_ns = began_ns - 1")
        case "session short": made_runs.edit(path, "UPDATE sessions SET seen_ns = began_ns + 2500000000")
        case "no session": made_runs.edit(path, "DELETE FROM sessions")
        case "profile": made_runs.edit(path, "UPDATE op_profile SET device_ns = -1 WHERE launch = 3")
        case "phase": made_runs.edit(path, "UPDATE op_profile SET phase = 'lunch' WHERE launch = 3")
        case "tokens": made_runs.edit(path, "UPDATE step_metrics SET tokens = -1 WHERE step = 9")
        case "manifest": (path / "manifest.json").write_text("{")
        case "config": (path / "config.toml").write_text("[run\n")
        case "metadata": made_runs.edit(path, "UPDATE run_metadata SET value = 'many' WHERE key = 'devices'")
        case _: raise AssertionError(how)


def spoil_bytes(metrics: Path) -> None:
    data = bytearray(metrics.read_bytes())
    for page in range(3, len(data) // 4096, 4):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    metrics.write_bytes(data)


BAD = [
    ("missing", InputError, "no such run directory"), ("file", InputError, "a run is a directory"), ("empty", InputError, "is empty"),
    ("foreign", InputError, "not a run directory"), ("half", InputError, "only half of the run directory"),
    ("no metrics", InputError, "manifest.json is there"), ("zero bytes", CorruptError, "never finished"),
    ("newer", InputError, "newer schema"), ("damaged", CorruptError, "damaged"), ("no database", CorruptError, "damaged"),
    ("table gone", CorruptError, "no such table"), ("column gone", CorruptError, "without comm_ns"),
    ("column of a profile gone", CorruptError, "without dispatches"), ("name of a column", CorruptError, "metrics are damaged"),
    ("text", CorruptError, "'fast'"),
    ("real", CorruptError, "1.5"), ("negative", CorruptError, "idle_ns = -5 at step 50, rank 0"),
    ("too long", CorruptError, "sum to more than its wall time"), ("long step", CorruptError, "longer than its interval"),
    ("unexplained", CorruptError, "unexplained time of a step"), ("clock", CorruptError, "steps backwards"),
    ("overlap", CorruptError, "began 1 ns too early"), ("order", CorruptError, "out of order"),
    ("session clock", CorruptError, "last seen 1 ns before it began"), ("session short", CorruptError, "outside of the session"),
    ("no session", CorruptError, "never began"), ("profile", CorruptError, "device_ns = -1"), ("phase", CorruptError, "lunch"),
    ("tokens", CorruptError, "tokens = -1"), ("manifest", CorruptError, "manifest of a run is damaged"),
    ("second peak", CorruptError, "more than one peak"), ("other peak", CorruptError, "states two peaks"),
    ("peak no number", CorruptError, "'1e12?'"),
    ("other bandwidth", CorruptError, "states two peaks"), ("peak of the manifest", CorruptError, "states two peaks"),
    ("part", CorruptError, "parts of the model FLOPs"), ("part executed", CorruptError, "parts of the executed FLOPs"),
    ("config", CorruptError, "configuration of a run is damaged"), ("metadata", CorruptError, "devices = 'many'"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "kind", "output"), BAD, ids=[b[0] for b in BAD])
def test_bad_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, kind: type, output: str) -> None:
    path = made_runs.make(tmp_path / "r", steps=100)
    reading.load(path, thorough=True)
    spoil(path, how)
    with pytest.raises(kind) as caught:
        reading.load(path, thorough=True).provenance()
    assert type(caught.value) is kind and output in str(caught.value)
    assert caught.value.came and caught.value.expected and caught.value.do
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert output in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_locked_database_is_busy(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=20)
    holder = sqlite3.connect(path / "metrics.sqlite", isolation_level=None)
    try:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BusyError, match="locked"):
            reading.load(path, timeout=0.05)
        holder.execute("COMMIT")
    finally:
        holder.close()
    assert len(reading.load(path, timeout=0.05).step_timing) == 20


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=30, ended=None)
    with Store(path / "metrics.sqlite") as store:
        seen = []
        for step in range(30, 34):
            store.add("step_metrics", {"step": step, "loss": 2.0, "norm": 1.0, "lr": 1e-3, "coefficient": 1.0, "tokens": 5, "seconds": 0.1,
                                       "finite": 1})  # fmt: skip
            store.flush()
            run = reading.load(path)
            seen.append(len(run.step_metrics))
    assert seen == [31, 32, 33, 34]
    assert any("still running" in n for n in run.notes)
    assert facts(run).tokens == 30 * made_runs.TOKENS, "a step without timing has no rate"


def test_all_tables_are_seen_at_one_moment(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=30)
    with Reader(path / "metrics.sqlite", 1.0) as db:
        assert len(db.rows("SELECT step FROM step_timing")) == 30
        made_runs.edit(path, "DELETE FROM step_metrics")
        assert len(db.rows("SELECT step FROM step_metrics")) == 30
    assert len(reading.load(path).step_metrics) == 0


def test_lost_rows_and_a_failed_session_are_told(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "r", steps=30, ended="failed: NonFiniteError: loss")
    made_runs.edit(path, "DELETE FROM step_metrics WHERE step IN (11, 12)")
    notes = reading.load(path).notes
    assert any("2 step rows are missing, the first of them step 11" in n for n in notes)
    assert any("failed: NonFiniteError" in n for n in notes)


def test_schema_1_shows_loss_curves_only_and_says_so(tmp_path: Path) -> None:
    run = reading.load(made_runs.make(tmp_path / "old", steps=300, version=1))
    assert run.version == 1 and any("loss curves only" in n for n in run.notes)
    assert {f["value"] for f in views.figures(run)["figures"]} == {None}
    assert views.loss([run])["why"] is None and len(views.loss([run])["runs"][0]["loss"]["x"]) > 100
    document = build([run])
    assert [b.name for s in document.sections for b in s.blocks if isinstance(b, Plot)] == ["loss"]
    assert any("loss curves only" in b.text for s in document.sections for b in s.blocks if isinstance(b, Text))
    new = reading.load(made_runs.make(tmp_path / "new", steps=50))
    mixed = views.utilisation([run, new])
    assert mixed["runs"][0]["why"] and mixed["runs"][1]["why"] is None


def test_different_flops_models_are_no_one_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = made_runs.make(tmp_path / "a", steps=80)
    b = made_runs.make(tmp_path / "b", steps=80, metadata={"flops_version": "flops/v2", "flops_convention": "6N"})
    assert main([str(a), str(b), "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert "different models" in output and "flops/v2 (6N)" in output and "--mixed-flops" in output and not (tmp_path / "out").exists()
    assert main([str(a), str(b), "--out", str(tmp_path / "out"), "--mixed-flops"]) == 0
    for page in ("report.html", "report.md"):
        assert "MIXED FLOPS MODELS" in (tmp_path / "out" / page).read_text()
    c = made_runs.make(tmp_path / "c", steps=80, metadata={"flops_convention": "attention counted in full"})
    with pytest.raises(InputError, match="counted in full"):
        views.comparison(reading.load(a), reading.load(c))


def test_bad_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_a = made_runs.make(tmp_path / "a", steps=50)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for words, output in (
        ([], "no run to report on"), ([str(run_a), "--compare"], "a comparison is of two runs"),
        ([str(run_a), str(run_a)], "named twice"), ([str(run_a), "--target", "speed=1"], "no figure has this name"),
        ([str(run_a), "--target", "mfu=fast"], "a figure and a number"), ([str(run_a), "--top", "0"], "too small"),
        ([str(run_a), "--out", "full"], "holds something that is no report"),
    ):  # fmt: skip
        assert main(words) == 2
        assert output in capsys.readouterr().err
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_an_earlier_report_without_its_page_is_replaced(tmp_path: Path) -> None:
    run, out = made_runs.make(tmp_path / "a", steps=50), tmp_path / "out"
    assert main([str(run), "--out", str(out)]) == 0
    (out / "report.html").unlink()
    assert main([str(run), "--out", str(out)]) == 0 and (out / "report.html").is_file()


def test_a_run_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other, path = made_runs.make(tmp_path / "other", steps=30), tmp_path / os.fsdecode(b"b\xffd")
    shutil.copytree(other, path)
    monkeypatch.chdir(tmp_path)
    assert main([str(path)]) == 0 and main([str(path), str(other), "--compare", "--out", os.fsdecode(b"out\xff")]) == 0
    assert capsys.readouterr().out.split() == [f"{folder}/report.{kind}" for folder in ("reports/b\\udcffd", "out\\udcff")
                                               for kind in ("html", "md")]  # fmt: skip
    assert "Report on b\\udcffd" in (tmp_path / "reports" / "b\\udcffd" / "report.html").read_text()


def test_the_default_is_the_run_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age in (("old", 500), ("new", 100), ("older", 900)):
        path = made_runs.make(tmp_path / "runs" / name, steps=5)
        for file in path.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["reports/new/report.html", "reports/new/report.md"]
    assert (tmp_path / "reports/new/report.html").is_file()


def test_a_run_that_is_being_written_is_the_last_one(tmp_path: Path) -> None:
    """Its database stands still meanwhile: what is new lies in the log beside it."""
    times = {"closed": {"config.toml": 10, "metrics.sqlite": 50},
             "trains": {"config.toml": 20, "metrics.sqlite": 20, "metrics.sqlite-wal": 60}}
    for run, files in times.items():
        for name, at in files.items():
            path = tmp_path / run / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")
            os.utime(path, (at, at))
    assert reading._touched(tmp_path / "trains") == 60 > reading._touched(tmp_path / "closed") == 50


def test_two_runs_of_one_name(tmp_path: Path) -> None:
    found = [reading.load(made_runs.make(tmp_path / f / "demo", steps=20)) for f in ("x", "y")]
    reading.distinct(found)
    assert len({r.label for r in found}) == 2


@pytest.mark.parametrize("status, unsealed, ungated", [("GATED", "", False), ("GATED", "a seal is broken", True), ("UNGATED", "", True),
                                                       ("", "", True), (None, "", True), ("gated", "", True)])
def test_only_a_run_that_says_so_is_gated(status: str | None, unsealed: str, ungated: bool) -> None:
    run = reading.Run(Path("run"), 2, {}, {}, {} if status is None else {"status": status}, {}, unsealed)
    assert run.ungated == ungated and bool(run.mark) == ungated == ("UNGATED" in run.label)


@pytest.mark.parametrize("text, number", [("1.5e12", 1.5e12), ("0", None), ("-1", None), ("nan", None), ("inf", None), ("-inf", None),
                                          ("", None), ("1e-300", 1e-300), (None, None)])
def test_numbers_of_the_metadata_are_positive_and_finite(text: str | None, number: float | None) -> None:
    run = reading.Run(Path("run"), 2, {}, {}, {} if text is None else {"peak_flops": text}, {})
    assert run.number("peak_flops") == number
