"""What a run states about itself: one peak in every place, views that any SQLite client reads, kernels and driver."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from alpha import cli, config
from alpha.errors import CorruptError, MachineError, NonFiniteError
from alpha.profile.phases import PHASES
from alpha.profile.store import read
from alpha.report import runs as reading
from alpha.report import views
from alpha.report.build import build
from alpha.report.document import Table
from alpha.train import log, provenance, rundir
from alpha.train import peak as peaks
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.loop import Loop, StepResult
from alpha.train.session import train

SETTINGS = {"train.steps": 12, "train.shards": 2, "train.eval_every": 4, "train.checkpoint_every": 6, "train.profile": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_run: Callable[..., Path]) -> Path:
    return small_run(tmp_path_factory.mktemp("figures"), SETTINGS).parent


@pytest.fixture(scope="module")
def wandering(root: Path) -> Path:
    """A finished run, resumed once, on a machine whose speed is another one at every look: twice as fast each time."""
    looks = [0]

    def wander(self: peaks.Speedometer) -> tuple[float, float]:
        looks[0] += 1
        return 1e12 * 2 ** (looks[0] // 4), 1e10 * 2 ** (looks[0] // 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peaks.Speedometer, "read", wander)
        assert cli.main(["lab", str(root / "run.toml")]) == 0
        assert cli.main(["lab", str(root / "runs" / "r"), "--resume", "--at", "6"]) == 0
    return root / "runs" / "r"


def stated(path: Path) -> dict[str, float]:
    """Where a run states the FLOP/s that MFU stands against -> the number."""
    run = reading.load(path)
    peak = [r[1] for r in read(path / "metrics.sqlite", "run_peak")]
    assert len(peak) == 1
    use = views.utilisation([run])["runs"][0]
    steady = {f["key"]: f["value"] for f in views.figures(run)["figures"]}
    rate = run.number("flops_per_token")
    assert rate is not None
    return {"table": peak[0], "metadata": run.number("peak_flops") or 0.0, "manifest": rundir.read_manifest(path)["flops"]["peak"],
            "report": run.provenance()["peak_flops"], "report's MFU": steady["achieved_flops"] / steady["mfu"],
            "dashboard's MFU": use["tokens_per_second"]["mean"][0] * rate / use["mfu"]["mean"][0]}  # fmt: skip


def test_one_peak_in_every_place_however_the_machine_wanders(wandering: Path) -> None:
    found = stated(wandering)
    assert found == pytest.approx(dict.fromkeys(found, found["table"]), rel=1e-9), found
    seen = {r[2] for r in read(wandering / "metrics.sqlite", "peaks")}
    assert len(seen) > 2  # it did wander, and the readings are kept


def test_the_console_states_the_same_peak(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", str(root / "run.toml"), "--set", "run.name=console"]) == 0
    output = re.findall(r"peak ([\d.]+) GFLOP/s", capsys.readouterr().out)
    assert cli.main(["lab", str(root / "runs" / "console"), "--resume", "--at", "6"]) == 0
    output += re.findall(r"peak ([\d.]+) GFLOP/s", capsys.readouterr().out)
    assert len(output) == 4 and {float(x) for x in output} == {round(stated(root / "runs" / "console")["table"] / 1e9, 1)}


def test_a_session_elsewhere_says_so(root: Path, wandering: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(wandering, tmp_path / "moved"))
    assert not any("stands against" in n for n in reading.load(path).notes)
    (path / "config.toml").write_text((path / "config.toml").read_text().replace("threads = 1", "threads = 2"))
    assert cli.main(["lab", str(path), "--resume", "--at", "6"]) == 0
    assert "this session runs on" in capsys.readouterr().out
    assert any("stands against the peak of the first" in n for n in reading.load(path).notes)
    assert stated(path)["table"] == stated(wandering)["table"] == pytest.approx(stated(path)["report's MFU"])


def test_a_second_peak_in_the_table_stops_readers_and_a_resume(wandering: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(wandering, tmp_path / "two"))
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        db.execute("INSERT INTO run_peak VALUES (1, 2e12, 1e10, 'measured again')")
        db.commit()
    with pytest.raises(CorruptError, match="more than one peak"):
        reading.load(path)
    assert cli.main(["lab", str(path), "--resume", "--at", "6"]) == CorruptError.exit_code


def test_a_busy_moment_is_not_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a neighbour takes half of the machine in the first looks."""
    rates = iter([50.0, 52.0, 70.0, 50.0, 99.0, 50.0, 100.0, 100.0])
    monkeypatch.setattr(peaks.Speedometer, "read", lambda self: (next(rates), 1.0))
    monkeypatch.setattr(peaks.Speedometer, "__init__", lambda self, workers: None)
    assert peaks.measured(type("Workers", (), {"n": 1})()).flops == 100.0  # type: ignore[arg-type]


def rows(path: Path, query: str) -> list[dict[str, float]]:
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        db.row_factory = sqlite3.Row
        return [dict(r) for r in db.execute(query)]


def test_step_timing_in_milliseconds(wandering: Path) -> None:
    plain, shown = rows(wandering, "SELECT * FROM step_timing ORDER BY step"), rows(wandering, "SELECT * FROM step_timing_ms ORDER BY step")
    assert len(plain) == len(shown) == 12
    for a, b in zip(plain, shown):
        assert a["step"] == b["step"] and a["profiled"] == b["profiled"]
        for name in ("wall", "step", *PHASES, "comm_overlapped", "unexplained"):
            assert b[f"{name}_ms"] == a[f"{name}_ns"] / 1e6, name
        assert sum(b[f"{p}_ms"] for p in (*PHASES, "unexplained")) == pytest.approx(b["wall_ms"])


def test_op_profile_per_step(wandering: Path) -> None:
    shown, launches = rows(wandering, "SELECT * FROM op_profile_per_step"), rows(wandering, "SELECT * FROM op_profile")
    steps = {r["step"] for r in launches}
    assert steps == {3, 9}, "of 3, 6 and 9 the first after the resume is held to spot checks, which time no launch"
    assert {(r["step"], r["op_name"]) for r in shown} == {(r["step"], r["op"]) for r in launches}
    for row in shown:
        own = [r for r in launches if r["step"] == row["step"] and r["op"] == row["op_name"]]
        assert row["count"] == sum(r["count"] for r in own) and row["bytes_moved"] == sum(r["nbytes"] for r in own)
        assert row["avg_ms"] == pytest.approx(sum(r["device_ns"] for r in own) / row["count"] / 1e6)


def test_memory_pool_per_step(wandering: Path) -> None:
    live = {(r["plan"], r["launch"]): r["live"] for r in rows(wandering, "SELECT * FROM memory_plan")}
    for row in rows(wandering, "SELECT * FROM memory_pool_per_step"):
        own = [r for r in rows(wandering, f"SELECT * FROM op_profile WHERE step = {row['step']}")]
        held = [(live[r["plan"], r["launch"]], r["device_ns"]) for r in own]
        assert row["peak_bytes"] == max(n for n, _ in held) <= row["planned_bytes"]
        assert row["average_bytes"] == pytest.approx(sum(n * ns for n, ns in held) / sum(ns for _, ns in held))
        assert 0 < row["average_bytes"] < row["peak_bytes"]


@pytest.mark.parametrize(("find", "replace"), [("device_ns) / 1e6 / sum(count)", "device_ns) / 1e6"), ("sum(nbytes) AS", "max(nbytes) AS")])
def test_a_wrong_view_is_seen(wandering: Path, tmp_path: Path, find: str, replace: str) -> None:
    """Planted: time of all launches shown as the mean of one; bytes of one launch shown as those of all."""
    path = tmp_path / "r"
    path.mkdir()
    (path / "metrics.sqlite").write_bytes((wandering / "metrics.sqlite").read_bytes())
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db:
        text = db.execute("SELECT sql FROM sqlite_master WHERE name = 'op_profile_per_step'").fetchone()[0]
        assert find in text
        db.execute("DROP VIEW op_profile_per_step")
        db.execute(text.replace(find, replace))
        db.commit()
    with pytest.raises(AssertionError):
        test_op_profile_per_step(path)


def test_kernels_and_driver_are_named(wandering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = dict(read(wandering / "metrics.sqlite", "run_metadata"))
    kernels: dict[str, str] = json.loads(meta["kernels"])
    assert {r[0] for r in read(wandering / "metrics.sqlite", "op_profile", "DISTINCT component")} <= set(kernels)
    assert all(re.fullmatch("[0-9a-f]{64}", h) for h in kernels.values()) and meta["driver"] == "none"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC version: 12\n")
    fake: Callable[..., object] = lambda backend: type("E", (), {  # noqa: E731
        "program": type("P", (), {"facts": {"backend": backend}}), "hardware": lambda self: {"version": "CUDA driver API 13000"}})()
    assert provenance.driver_of(fake("cuda"), tmp_path / "version") == "580.95.05"  # type: ignore[arg-type]
    assert provenance.driver_of(fake("cuda"), tmp_path / "none") == "CUDA driver API 13000"  # type: ignore[arg-type]


def test_another_kernel_has_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one byte of a compiled file, one byte of a binder's file."""
    from dataclasses import replace

    component = catalogue()["gelu.bf16.sm90"] if "gelu.bf16.sm90" in catalogue() else next(c for c in catalogue() if c.binaries is not None)
    program = type("P", (), {"kernels": lambda self: (component.id,)})()
    before = provenance.kernel_hashes(program, {component.id: component})  # type: ignore[arg-type]
    other = replace(component, binaries=lambda: {"a.cu": "00"})
    assert before != provenance.kernel_hashes(program, {component.id: other})  # type: ignore[arg-type]
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read_bytes(self) + b" ")
    assert before != provenance.kernel_hashes(program, {component.id: component})  # type: ignore[arg-type]


# Samples on the way, and the log of a rank -------------------------------------------------------------------------------------------


def test_samples_on_the_way_are_kept_and_shown_and_move_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = {}
    for name, every in (("silent", 0), ("talking", 4)):
        assert cli.main(["lab", str(root / "run.toml"), "--set", f"run.name={name}", "--set", f"train.sample_every={every}"]) == 0
        out = capsys.readouterr().out
        path = root / "runs" / name
        assert [r[0] for r in read(path / "metrics.sqlite", "samples")] == ([4, 8, 12] if every else [12])
        assert ("step 4: sample" in out) == bool(every)
        ends[name] = ({f.name: f.read_bytes() for f in sorted((path / "checkpoints" / "step-00000012").iterdir()) if f.suffix == ".state"},
                      read(path / "metrics.sqlite", "step_metrics", "step, loss, norm"))  # fmt: skip
    assert ends["silent"] == ends["talking"] and len(ends["silent"][0])
    made = build([reading.load(root / "runs" / "talking")])
    table = next(b for s in made.sections if s.title == "Samples" for b in s.blocks if isinstance(b, Table))
    texts = [r[2] for r in read(root / "runs" / "talking" / "metrics.sqlite", "samples")]
    assert [row[1] for row in table.rows] == ["def " + t.replace("\n", " ⏎ ") for t in texts] and len(set(texts)) == 3


def test_a_resumed_run_samples_again_what_it_forgot(root: Path) -> None:
    """Its beginning stays where it was. Planted: written at each session (`step >= 0` in provenance.py), it moves."""
    assert cli.main(["lab", str(root / "run.toml"), "--set", "run.name=again", "--set", "train.sample_every=4"]) == 0
    path = root / "runs" / "again"
    first, began = read(path / "metrics.sqlite", "samples"), "2001-02-03T04:05:06+00:00"
    with closing(sqlite3.connect(path / "metrics.sqlite")) as db, db:
        db.execute("UPDATE run_metadata SET value = ? WHERE key = 'started'", (began,))
    assert cli.main(["lab", str(path), "--resume", "--at", "6"]) == 0
    assert read(path / "metrics.sqlite", "samples") == first
    assert ("started", began) in [tuple(x[:2]) for x in read(path / "metrics.sqlite", "run_metadata")]


def test_the_log_says_what_happened(root: Path) -> None:
    assert cli.main(["lab", str(root / "run.toml"), "--set", "run.name=logged", "--set", "train.sample_every=8"]) == 0
    path = root / "runs" / "logged"
    assert cli.main(["lab", str(path), "--resume", "--at", "6"]) == 0
    lines = log.read(path / "logs" / "rank0.jsonl")
    assert all(set(x) == {"time", "level", "event", "step", "fields"} for x in lines)
    assert [x["time"] for x in lines] == sorted(x["time"] for x in lines)
    events = [(x["event"], x["step"]) for x in lines]
    assert [e for e in events if e[0] != "checkpoint"] == [
        ("start", 0), ("evaluation", 4), ("evaluation", 8), ("sample", 8), ("evaluation", 12), ("sample", 12), ("spot-checks", 12),
        ("end", 12), ("resume", 6), ("evaluation", 8), ("sample", 8), ("evaluation", 12), ("sample", 12), ("spot-checks", 12),
        ("end", 12)]  # fmt: skip
    # a save ends beside the steps that follow
    saved = [(i, step) for i, (event, step) in enumerate(events) if event == "checkpoint"]
    assert [step for _, step in saved] == [6, 12, 12] and all(saved[i][0] < end for i, end in ((1, 9), (2, len(events) - 1)))
    assert lines[9]["fields"]["reason"] == "finished" and lines[0]["fields"]["status"] == "UNGATED"


def test_signals_warnings_and_refused_steps_are_logged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.load(root / "run.toml", ["run.name=stops", "train.profile=0", "train.verify=0"])  # no spot check sees the planted value
    steps = iter([0, 0, int(signal.SIGTERM)])
    stopped = train(cfg, catalogue(), Printer(), admit=None, stop=lambda: next(steps))
    assert not stopped.finished
    events = [(x["event"], x["level"], x["step"], x["fields"]) for x in log.read(stopped.path / "logs" / "rank0.jsonl")]
    assert events[1] == ("signal", "warning", 3, {"name": "SIGTERM"}) and events[-1][0] == "end" and events[-1][3] == {"reason": "stopped"}

    advance = Loop.advance

    def spoilt(self: Loop, *, ahead: bool = False) -> StepResult:
        if self.step == 5:
            warnings.warn("planted", UserWarning, stacklevel=1)
            self.executor.state("param")[...] = float("nan")
        return advance(self, ahead=ahead)

    monkeypatch.setattr(Loop, "advance", spoilt)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *args: None)  # as a terminal would show it
        with pytest.raises(NonFiniteError):
            train(cfg, catalogue(), Printer(), admit=None, resume=stopped.path)
    found = [x for x in log.read(stopped.path / "logs" / "rank0.jsonl") if x["step"] == 5]
    assert [(x["event"], x["level"]) for x in found] == [("warning", "warning"), ("non-finite", "error"), ("end", "error")]
    assert "planted" in found[0]["fields"]["text"] and "refused" in found[1]["fields"]["what"]
    assert found[2]["fields"]["reason"].startswith("failed: NonFiniteError")


KILLED = """
import os, signal, sys
from pathlib import Path
from alpha.train.log import RankLog
log = RankLog(Path(sys.argv[1]))
for step in range(1000):
    log.say("checkpoint", step, path="x" * 50, loss=float("nan"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_log_survives_a_kill_and_a_torn_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "logs")], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = tmp_path / "logs" / "rank0.jsonl"
    lines = log.read(path)
    assert [x["step"] for x in lines] == list(range(1000)) and lines[0]["fields"]["loss"] is None
    path.write_bytes(path.read_bytes()[:-20])  # planted: the disk cut the last line
    with log.RankLog(tmp_path / "logs") as again:
        again.say("resume", 999)
    assert [x["step"] for x in log.read(path)] == [*range(999), 999]


def test_a_log_that_is_not_written_at_once_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: lines wait in a buffer, as those of a file object do."""
    waiting: list[bytes] = []
    monkeypatch.setattr(log.os, "write", lambda file, data: waiting.append(data) or len(data))
    with log.RankLog(tmp_path) as held:
        held.say("start", 0)
        assert not log.read(held.path) and len(waiting) == 1


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with log.RankLog(tmp_path) as held:
        os.close(held._file)
        held._file = os.open("/dev/full", os.O_WRONLY)
        with pytest.raises(MachineError, match="disk is full"):
            held.say("start", 0)
