"""Ways around the seals of a run, each tried through the command line; and runs whose console, signals or cache misbehave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import warm

from alpha import cli, config
from alpha.checkpoint import folders
from alpha.cli import training
from alpha.dashboard.folder import Folder
from alpha.data.tokenizer import ByteTokenizer
from alpha.errors import CorruptError, InputError
from alpha.gates.contracts.made_state import saved_before
from alpha.profile.recorder import Recorder
from alpha.profile.store import read
from alpha.report import runs as report
from alpha.train import assemble, rundir
from alpha.train.seal import why_ungated

SETTINGS = {"train.steps": 8, "train.eval_every": 0, "train.checkpoint_every": 3, "train.final_windows": 2, "train.profile": 3}

Run = Callable[..., tuple[int, str, str]]
EVIDENCE: dict[str, dict[str, str]] = {"train.loop": {"faults": "abc"}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_run: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("seals")
    for name in ("gated", "lab"):
        small_run(path, {**SETTINGS, "run.name": name}, file=f"{name}.toml")
    return path


def admitted(printer: object, source: str, ids: list[str], calls: list[Any]) -> Mapping[str, Any]:
    return EVIDENCE


@pytest.fixture
def alpha(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run one command in this process, the registry letting everything in: (exit code, standard output, standard error)."""
    monkeypatch.setattr(training, "admit", admitted)

    def run(*args: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in args])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def made(root: Path) -> dict[str, Path]:
    """Two runs, one through the gate and one not, each with checkpoints 6 and 8."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "admit", admitted)
        for name, command in (("gated", "train"), ("lab", "lab")):
            assert cli.main([command, str(root / f"{name}.toml")]) == 0
    return {name: root / "runs" / name for name in ("gated", "lab")}


@pytest.fixture
def gated(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["gated"], tmp_path / "gated"))


@pytest.fixture
def lab(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["lab"], tmp_path / "lab"))


def status_of(path: Path) -> str:
    """What the run's own files, a resumed session's included, and every reader agree on."""
    manifest, metadata = rundir.read_manifest(path).get("status"), dict(read(path / "metrics.sqlite", "run_metadata"))["status"]
    shown = report.load(path)
    assert shown.ungated == bool(why_ungated(path)) == (shown.provenance()["status"] == "UNGATED")
    listed = {e.name: e.status for e in Folder(path.parent).entries()}
    assert listed[path.name] == ("UNGATED" if why_ungated(path) else "GATED")
    assert why_ungated(path) or (manifest, metadata) == ("GATED", "GATED")
    return "UNGATED" if why_ungated(path) else "GATED"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_gated_run_stays_gated(gated: Path, alpha: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, moved, and with newer evidence; its checkpoints say which evidence admitted them."""
    assert status_of(gated) == "GATED"
    assert folders.inspect(folders.at(gated / "checkpoints")).facts["seal"]["status"] == "GATED"
    code, out, _ = alpha("train", gated, "--resume", "--at", 6)
    assert code == 0 and "UNGATED" not in out and status_of(gated) == "GATED"
    monkeypatch.setitem(EVIDENCE, "train.loop", {"faults": "newer"})
    assert alpha("train", gated, "--resume", "--at", 6)[0] == 0 and status_of(gated) == "GATED"
    sessions = rundir.read_manifest(gated)["sessions"]
    assert len({s["evidence"] for s in sessions}) == 2 and len(sessions) == 3
    _, _, err = alpha("sample", gated, "--prompt", "def", "--tokens", 2)
    assert "UNGATED" not in err


def test_a_lab_run_does_not_become_gated(lab: Path, alpha: Run) -> None:
    code, out, _ = alpha("train", lab, "--resume", "--at", 6)
    assert code == 0 and "UNGATED: a development run" in out and status_of(lab) == "UNGATED"


def test_not_by_deleting_its_manifest(lab: Path, alpha: Run) -> None:
    (lab / "manifest.json").unlink()
    assert status_of(lab) == "UNGATED"
    _, out, _ = alpha("train", lab, "--resume", "--at", 6)
    assert "UNGATED: a development run (its manifest is missing)" in out and status_of(lab) == "UNGATED"
    _, out, _ = alpha("train", lab, "--resume", "--at", 6)  # the manifest that the session before wrote is no way out
    assert "UNGATED" in out and status_of(lab) == "UNGATED"


def test_not_by_editing_a_word(lab: Path, alpha: Run) -> None:
    edit(lab / "manifest.json", '"UNGATED"', '"GATED"')
    edit(lab / "manifest.json", '"gated": false', '"gated": true')
    _, out, _ = alpha("train", lab, "--resume", "--at", 6)
    assert "manifest was edited" in out and status_of(lab) == "UNGATED"


def test_not_by_the_manifest_of_a_gated_run(gated: Path, lab: Path, alpha: Run) -> None:
    shutil.copy(gated / "manifest.json", lab / "manifest.json")
    _, out, _ = alpha("train", lab, "--resume", "--at", 6)
    assert "comes from an UNGATED session" in out and status_of(lab) == "UNGATED"


def test_not_by_copying_its_checkpoint(gated: Path, lab: Path, alpha: Run) -> None:
    """The checkpoints are of one configuration and one text, so nothing but the seal tells them apart."""
    edit(lab / "config.toml", 'name = "lab"', 'name = "gated"')
    for step in folders.steps(gated / "checkpoints"):
        shutil.rmtree(folders.at(gated / "checkpoints", step))
        shutil.copytree(folders.at(lab / "checkpoints", step), gated / "checkpoints" / f"step-{step:08d}")
    assert status_of(gated) == "UNGATED"
    assert "UNGATED" in alpha("sample", gated, "--prompt", "def", "--tokens", 2)[2]
    assert alpha("trace", gated, "--out", gated / "t.json")[0] == 0
    assert json.loads((gated / "t.json").read_text())["otherData"]["status"] == "UNGATED"
    _, out, _ = alpha("train", gated, "--resume", "--at", 6)
    assert "UNGATED" in out and status_of(gated) == "UNGATED"


def test_not_by_an_edited_checkpoint(lab: Path, alpha: Run) -> None:
    edit(folders.at(lab / "checkpoints", 6) / "manifest.json", '"status":"UNGATED"', '"status":"GATED"')
    code, _, err = alpha("train", lab, "--resume", "--at", 6)
    assert code == 2 and "its manifest was edited or torn" in err


def test_not_by_the_word_in_the_metrics(lab: Path, alpha: Run) -> None:
    db = sqlite3.connect(lab / "metrics.sqlite")
    db.execute("UPDATE run_metadata SET value = 'GATED' WHERE key = 'status'")
    db.commit()
    db.close()
    assert status_of(lab) == "UNGATED" and report.load(lab).metadata["status"] == "UNGATED"


def test_a_gated_run_that_went_through_the_lab_is_ungated_for_good(gated: Path, alpha: Run) -> None:
    kept = (gated / "manifest.json").read_text()
    assert alpha("lab", gated, "--resume", "--at", 6)[0] == 0 and status_of(gated) == "UNGATED"
    (gated / "manifest.json").write_text(kept)  # an earlier manifest beside the lab session's checkpoint
    _, out, _ = alpha("train", gated, "--resume")
    assert "comes from an UNGATED session" in out and status_of(gated) == "UNGATED"


def test_an_older_checkpoint_goes_on_ungated(gated: Path, alpha: Run) -> None:
    """Made before seals: it loads, and what comes of it is UNGATED."""
    file = folders.at(gated / "checkpoints", 6) / "manifest.json"
    content = json.loads(file.read_text())
    content.pop("sha256")
    content["facts"].pop("seal")
    states = folders.read(file.parent)
    shutil.rmtree(file.parent)
    saved_before(file.parent.parent, content["step"], states, 1, content["facts"])
    code, out, _ = alpha("train", gated, "--resume", "--at", 6)
    assert code == 0 and "carries no seal" in out and status_of(gated) == "UNGATED"


# -- consoles and signals ------------------------------------------------------------------------------------------------------


def started(root: Path, tmp_path: Path, *more: str, code: str = "", **how: Any) -> warm.Process:
    """`alpha lab` in a process of its own, with a step every 20 ms."""
    slow = ("import sys, time; from alpha import cli; from alpha.train import loop; real = loop.Loop.advance\n"
            "def slow(self, **more):\n    time.sleep(0.02); return real(self, **more)\n"
            f"loop.Loop.advance = slow\n{code}\nsys.exit(cli.main(sys.argv[1:]))")
    return warm.start(["-c", slow, "lab", root / "lab.toml", "--set", f"run.out={tmp_path}", *more], **how)


PLANTED = "from alpha.train import console; console.Screen = lambda stream: stream"


@pytest.mark.parametrize("planted", ["", PLANTED], ids=["sound", "planted"])
def test_a_console_that_goes_away_takes_nothing_with_it(root: Path, tmp_path: Path, planted: str) -> None:
    """As in `alpha lab RUN | head -1`. The planted console passes the broken pipe on, and the run dies of it."""
    process = started(root, tmp_path, code=planted, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline()
        process.stdout.close()
        with process.stderr:
            errors = process.stderr.read()
        code = process.wait(timeout=120)
    finally:
        process.kill()
    finished = code == 0 and folders.steps(tmp_path / "lab" / "checkpoints")[-1:] == [8] and not errors
    assert finished == (not planted), errors.decode()


def test_a_console_on_a_full_disk_takes_nothing_with_it(root: Path, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = started(root, tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        errors = process.stderr.read()
        code = process.wait(timeout=120)
    finally:
        process.kill()
    assert code == 0 and folders.steps(tmp_path / "lab" / "checkpoints")[-1] == 8 and not errors, errors.decode()


def steps_of(path: Path) -> int:
    try:
        return int(read(path / "metrics.sqlite", "step_metrics", "count(*)")[0][0])
    except InputError:
        return 0


@pytest.mark.parametrize(("sent", "code"), [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGHUP, signal.SIGHUP], 129)],
                         ids=["INT", "TERM", "HUP twice"])
def test_an_interrupted_run_saves_and_says_so(root: Path, tmp_path: Path, sent: list[signal.Signals], code: int) -> None:
    """Also where the console is gone, as it is when a terminal closes."""
    process = started(root, tmp_path, "--set", "train.steps=100000", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + 90
        while process.poll() is None and steps_of(tmp_path / "lab") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.stdout.close()
        for number in sent:
            process.send_signal(number)
        assert process.wait(timeout=60) == code
    finally:
        process.kill()
    last = folders.steps(tmp_path / "lab" / "checkpoints")[-1]
    assert last == steps_of(tmp_path / "lab") >= 2, "the step that ran was saved"
    assert read(tmp_path / "lab" / "metrics.sqlite", "sessions", "ended") == [("stopped",)]


def test_nohup_is_respected(root: Path, tmp_path: Path) -> None:
    process = started(root, tmp_path, "--set", "train.steps=100", code="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    try:
        deadline = time.monotonic() + 90
        while process.poll() is None and steps_of(tmp_path / "lab") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=90) == 0
    finally:
        process.kill()
    assert folders.steps(tmp_path / "lab" / "checkpoints")[-1] == 100


# -- what a kill leaves --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


def lost_rows(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tables that lack rows of the profiled step behind which a checkpoint was saved, when the process was killed as it stood."""
    cfg = config.load(root / "lab.toml", [f"run.out={tmp_path}", "train.profile=4", "train.checkpoint_every=1"])
    whole = cli.main(["lab", str(root / "lab.toml"), "--set", f"run.out={tmp_path}", "--set", "train.profile=4",
                      "--set", "train.checkpoint_every=1"])
    assert whole == 0
    tables = ("step_timing", "op_profile", "gpu_timeline", "memory")
    path = tmp_path / "lab" / "metrics.sqlite"
    step = read(path, "op_profile", "min(step)")[0][0]
    others: list[Path] = []
    seen: dict[str, int] = {}
    real = folders.commit

    def rows(metrics: Path) -> dict[str, int]:
        return {t: read(metrics, f"{t} WHERE step = {step} ", "count(*)")[0][0] for t in tables}

    def killed(temporary: Path, at: int, *args: Any, **more: Any) -> Path:
        made = real(temporary, at, *args, **more)
        if at == step + 1:
            others.append(temporary.parent.parent / "metrics.sqlite")
            seen.update(rows(others[0]))
            raise Killed
        return made

    monkeypatch.setattr(folders, "commit", killed)
    with pytest.raises(Killed):
        cli.main(["lab", str(root / "lab.toml"), "--set", f"run.out={tmp_path}", "--set", "train.profile=4",
                  "--set", "train.checkpoint_every=1", "--set", f"run.name={cfg.run.name}"])
    timeline = read(path, "gpu_timeline", "step, rank, track, name, start_ns, stop_ns")
    assert len(timeline) == len(set(timeline)), "an event was told twice"
    expected = rows(others[0])  # of the same run, once its recorder was closed: how often a worker waits differs from run to run
    assert all(expected.values())
    # the checkpoint itself is an event that ends after it
    return [t for t in tables if seen[t] < expected[t] - (t == "gpu_timeline")]


def test_a_profiled_step_keeps_its_rows_when_killed_at_the_checkpoint(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost_rows(root, tmp_path, monkeypatch) == []


def test_and_what_it_would_lose_otherwise(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: only the timing of the step is told before a checkpoint."""

    def timing_alone(self: Recorder) -> None:
        assert self.store is not None
        self.store.add("step_timing", self._at.timing(self.clock(), 0, self.store.session))

    monkeypatch.setattr(Recorder, "so_far", timing_alone)
    assert lost_rows(root, tmp_path, monkeypatch) == ["op_profile", "gpu_timeline"]


def test_a_cached_tokenizer_is_the_one_asked_for(root: Path, tmp_path: Path) -> None:
    """Another sound tokenizer under the cached one's name is refused."""
    small, large = (config.load(root / "lab.toml", ["data.tokenizer=bpe", f"data.vocab={n}", f"data.cache={tmp_path}"]) for n in (262, 270))
    one, two = assemble.open_data(small).tokenizer, assemble.open_data(large).tokenizer
    assert (one.vocab_size, two.vocab_size) == (262, 270)
    files = {int(p.name.split("-")[1]): p for p in tmp_path.glob("bpe-*.json")}
    assert assemble.open_data(small).tokenizer.hash == one.hash
    kept = files[262].read_bytes()
    shutil.copy(files[270], files[262])
    with pytest.raises(CorruptError, match="not the one that is asked for") as caught:
        assemble.open_data(small)
    assert "remove the file" in str(caught.value)
    ByteTokenizer().save(files[262])
    with pytest.raises(CorruptError, match="not the one that is asked for"):
        assemble.open_data(small)
    other = config.load(root / "lab.toml", ["data.tokenizer=bpe", "data.vocab=262", "data.sample=4000", f"data.cache={tmp_path}"])
    assemble.open_data(other)
    sampled = next(p for p in tmp_path.glob("bpe-262-*.json") if p != files[262])
    shutil.copy(sampled, files[262])  # as large, trained on less text
    with pytest.raises(CorruptError, match="not the one that is asked for"):
        assemble.open_data(small)
    files[262].write_bytes(kept)
    assert assemble.open_data(small).tokenizer.hash == one.hash


def test_what_killed_processes_left_is_swept(root: Path, tmp_path: Path) -> None:
    """Half a run directory, half a token stream, temporary files of a run and of the cache; nothing of the user's."""
    cache, out = tmp_path / "cache", tmp_path / "out"
    assert cli.main(["lab", str(root / "lab.toml"), "--set", f"run.out={out}", "--set", f"data.cache={cache}"]) == 0
    garbage = [out / ".alpha-making-lab-1" / "tokenizer.json", cache / ".alpha-making-abc" / "00000.tokens",
               cache / ".bpe-262-x.json.7.alpha-tmp",
               out / "lab" / ".manifest.json.7.alpha-tmp", out / "lab" / "checkpoints" / ".tmp-step-00000009-7" / "m.npy"]
    mine = [out / "notes" / "x.txt", out / ".making-of-film" / "x", out / "lab" / ".notes.tmp", cache / "x.tmp"]
    for path in (*garbage, *mine):
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
        for touched in (path, path.parent):
            os.utime(touched, (1.0, 1.0))
    assert cli.main(["lab", str(out / "lab"), "--resume"]) == 0
    assert cli.main(["lab", str(root / "lab.toml"), "--set", f"run.out={out}", "--set", f"data.cache={cache}"]) == 0
    assert [p for p in garbage if p.exists()] == [] and all(p.exists() for p in mine)
