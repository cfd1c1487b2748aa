"""`alpha train RUN --resume` from any folder: relative paths are those of the folder in which the run began, wherever it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import warm

from alpha import cli, config
from alpha.checkpoint import folders
from alpha.cli import gating
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer
from alpha.errors import InputError
from alpha.profile.store import read
from alpha.train import rundir
from alpha.train.home import at_home

Write = Callable[..., Path]

KILLED = """
import os, signal, sys
from alpha import cli
from alpha.train.loop import Loop
real, steps = Loop.advance, int(sys.argv[1])
def advance(self, **more):
    if self.step == steps:
        self.saver.finish()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, **more)
Loop.advance = advance
sys.exit(cli.main(sys.argv[2:]))
"""
"""A command that is killed after so many steps."""

KINDS = {
    "folder": {"data.corpus": "text"},
    "glob": {"data.corpus": "text/[0-7].txt"},
    "mixture": {"data.corpus": "stdlib", "data.mixture": "text/1.txt:2, other:1"},
    "prepared": {"data.corpus": "own"},
    "mixture of prepared": {"data.corpus": "stdlib", "data.mixture": "own:2, more:1", "data.packing": "documents",
                            "data.documents": True, "data.buckets": 2},
    "tokenizer": {"data.corpus": "text", "data.tokenizer": "bpe", "data.tokenizer_file": "tokenizers/t.json"},
    "beginning": {"data.corpus": "text", "train.start_from": "runs/first@2"},
}
"""What a run reads by paths that are relative."""


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory, small_run: Write) -> Path:
    """A folder with texts, prepared data, a tokenizer, and a run file of each kind."""
    folder = tmp_path_factory.mktemp("home") / "began"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        relative = {"run.out": "runs", "data.cache": "cache", "train.steps": 6, "train.checkpoint_every": 2, "data.baseline": False}
        for kind, settings in KINDS.items():
            small_run(folder, {**relative, "run.name": kind.replace(" ", "-"), **settings}, file=f"{kind}.toml")
        small_run(folder, {**relative, "run.name": "first", "data.corpus": "text", "train.steps": 2}, file="first.toml")
        (folder / "other").mkdir()
        for i in range(6):
            (folder / "other" / f"{i}.md").write_text(f"{i} times {i} is {i * i}\n" * 60)
        for name, source in (("own", "text"), ("more", "other")):
            assert cli.main(["data", "prepare", source, "--out", name, "--tokenizer", "bytes", "--validation", "0.3"]) == 0
        (folder / "tokenizers").mkdir()
        BPETokenizer([(97, 98), (32, 120)]).save(folder / "tokenizers" / "t.json")
        assert cli.main(["lab", "first.toml"]) == 0
    return folder


def kill(folder: Path, run_file: str, after: int, *more: str) -> None:
    """Start a run in a folder and kill it."""
    done = warm.run(["-c", KILLED, after, "lab", run_file, *more], cwd=folder)
    assert done.returncode == -signal.SIGKILL, done.stderr


def bits(run: Path) -> dict[str, bytes]:
    """The state that a run ended with."""
    saved = folders.at(run / "checkpoints", 6)
    return {kind: array.tobytes() for kind, (_, array) in folders.read(saved).items()}


@pytest.mark.parametrize("kind", ("tokenizer", "prepared"))
def test_a_run_is_planned_from_any_folder(kind: str, began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer and the components that it has, whatever lies under the names that it reads where the command is called."""
    monkeypatch.chdir(began)
    assert cli.main(["lab", f"{kind}.toml", "--set", f"run.name={kind}-planned"]) == 0
    (tmp_path / "tokenizers").mkdir()
    ByteTokenizer().save(tmp_path / "tokenizers" / "t.json")
    run, said = Path("runs", f"{kind}-planned"), []
    for folder in (began, tmp_path):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert cli.main(["plan", os.path.relpath(began / run)]) == 0 and Path.cwd() == folder
        said.append(capsys.readouterr().out)
    assert "of the run's tokenizer" in said[0] and said[0] == said[1]
    assert ("corpus.prepared" if kind == "prepared" else "tokenizer.bpe") in said[0]


def test_a_run_whose_text_is_gone_is_planned(began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(began)
    assert cli.main(["lab", "folder.toml", "--set", "run.name=gone", "--set", "train.steps=2"]) == 0
    (began / "text").rename(began / "moved")
    try:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        assert cli.main(["plan", os.path.relpath(began / "runs" / "gone")]) == 0
        said = capsys.readouterr().out
    finally:
        (began / "moved").rename(began / "text")
    assert f"what the run reads is gone: {began} has no text" in said and "corpus.folder" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_another_folder(kind: str, began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """With the bits and the text of a run that nothing disturbed, and nothing is left where it was called."""
    name = kind.replace(" ", "-")
    monkeypatch.chdir(began)
    assert cli.main(["lab", f"{kind}.toml", "--set", f"run.name={name}-whole"]) == 0
    kill(began, f"{kind}.toml", 1 if kind == "beginning" else 3)
    assert len(folders.steps(began / "runs" / name / "checkpoints")) == (kind != "beginning")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    run = os.path.relpath(began / "runs" / name)
    assert cli.main(["lab", run, "--resume"]) == 0
    assert f"relative paths are those of {began}, " in capsys.readouterr().err
    assert Path.cwd() == tmp_path and not list(tmp_path.iterdir())
    assert bits(began / "runs" / name) == bits(began / "runs" / f"{name}-whole")
    for table in ("step_metrics", "evaluations"):
        columns = "*" if table == "evaluations" else "step, loss, tokens"
        of = [read(began / "runs" / run / "metrics.sqlite", table, columns) for run in (name, f"{name}-whole")]
        assert of[0] == of[1] and of[0]
    manifests = [rundir.read_manifest(began / "runs" / run) for run in (name, f"{name}-whole")]
    assert len({json.dumps([m[key] for key in ("config", "corpus", "streams", "split", "folder")]) for m in manifests}) == 1


def test_ranks_go_on_in_another_folder(began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them."""
    settings = ["--set", "train.shards=2", "--set", "run.name=ranks"]
    monkeypatch.chdir(began)
    assert cli.main(["lab", "mixture.toml", *settings[:2], "--set", "run.name=ranks-whole"]) == 0
    kill(began, "mixture.toml", 3, *settings)
    run = os.path.relpath(began / "runs" / "ranks", tmp_path)
    done = warm.run(["-m", "alpha", "lab", run, "--resume", "--nproc", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert bits(began / "runs" / "ranks") == bits(began / "runs" / "ranks-whole") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_in_a_folder_whose_name_is_no_utf_8(ranks: int, tmp_path: Path, small_run: Write) -> None:
    """As an old disk has them, and the folder around it too. Its metrics call it by a name that can be written."""
    work = tmp_path / os.fsdecode(b"caf\xe9")
    work.mkdir()
    small_run(tmp_path, {"data.corpus": "text", "data.cache": "cache", "run.out": "runs", "train.shards": 2, "train.steps": 4,
                         "train.checkpoint_every": 2, "data.baseline": False})
    for name in ("run.toml", "text"):
        (tmp_path / name).rename(work / name)
    assert warm.run(["-m", "alpha", "lab", "run.toml"], cwd=work).returncode == 0
    run = (work / "runs" / "r").rename(work / "runs" / os.fsdecode(b"r\xe9"))
    more = ["--nproc", "2"] if ranks == 2 else []
    done = warm.run(["-m", "alpha", "lab", run, "--resume", "--at", "2", *more], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert folders.steps(run / "checkpoints") == [2, 4] and dict(read(run / "metrics.sqlite", "run_metadata"))["name"] == "r\\udce9"


@pytest.fixture
def moved(began: Path, tmp_path: Path) -> Path:
    """A run that was killed, in a folder that moved to `tmp_path / "there"` with its text."""
    work = tmp_path / "work"
    work.mkdir()
    shutil.copytree(began / "text", work / "text")
    shutil.copy(began / "folder.toml", work / "run.toml")
    kill(work, "run.toml", 3)
    return work.rename(tmp_path / "there")


def test_a_folder_that_moved(moved: Path, began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from where it lies now, and from there on anywhere."""
    monkeypatch.chdir(moved)
    shutil.copytree("runs", "copies")
    assert cli.main(["lab", "runs/folder", "--resume"]) == 0
    assert not (tmp_path / "work").exists() and rundir.read_manifest(Path("runs/folder"))["folder"] == str(moved)
    monkeypatch.chdir(began)
    assert cli.main(["lab", str(moved / "runs" / "folder"), "--resume"]) == 0
    monkeypatch.chdir(moved)
    assert cli.main(["lab", "run.toml", "--set", "run.name=whole"]) == 0
    assert bits(moved / "runs" / "folder") == bits(moved / "runs" / "whole")


def test_a_text_that_is_gone(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One error names both folders; a folder without the text is passed over for one with it."""
    (moved / "text").rename(tmp_path / "text")
    run, before = moved / "runs" / "folder", (moved / "runs" / "folder" / "manifest.json").read_bytes()
    monkeypatch.chdir(moved)
    capsys.readouterr()
    assert cli.main(["lab", "runs/folder", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "what the run reads is gone" in said and f"{tmp_path / 'work'} has no such folder; {moved} has no text" in said
    (tmp_path / "work").mkdir()
    assert cli.main(["lab", "runs/folder", "--resume"]) == 2
    assert f"{tmp_path / 'work'} has no text; {moved} has no text" in capsys.readouterr().err
    assert (run / "manifest.json").read_bytes() == before
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "there/runs/folder", "--resume"]) == 0 and folders.steps(run / "checkpoints")[-1] == 6


def test_another_text_in_its_place(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with its folder and the one in which the run began."""
    (moved / "text" / "3.txt").write_text("another text\n" * 50)
    state = {path: path.read_bytes() for path in (moved / "runs").rglob("*") if path.is_file() and path.name != ".lock"}
    monkeypatch.chdir(moved)
    capsys.readouterr()
    assert cli.main(["lab", "runs/folder", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "the run read another text before" in said
    assert f"text, read in {moved}: train " in said and f"which runs/folder read in {tmp_path / 'work'}" in said
    assert {path: path.read_bytes() for path in state} == state


def test_a_run_that_kept_no_folder(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """As runs of older versions: paths start from here."""
    run = moved / "runs" / "folder"
    kept = {k: v for k, v in rundir.read_manifest(run).items() if k not in ("folder", "format", "sha256")}
    (run / "manifest.json").write_text(json.dumps(rundir.sealed(kept)))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", str(run), "--resume"]) == 2 and "the corpus has no such path" in capsys.readouterr().err
    monkeypatch.chdir(moved)
    assert cli.main(["lab", str(run), "--resume"]) == 0


@pytest.mark.parametrize("kind, reads", [("glob", ["text"]), ("mixture", ["text/1.txt", "other"]), ("mixture of prepared", ["own", "more"]),
                                         ("tokenizer", ["text", "tokenizers/t.json"]), ("beginning", ["text", "runs/first"])])
def test_each_path_is_looked_for(kind: str, reads: list[str], began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one folder lacks is named; the other one is taken if it has all of it, and found again from there."""
    home, here, run, cfg = tmp_path / "home", tmp_path / "here", tmp_path / "run", config.load(began / f"{kind}.toml")
    for folder in (home, here, run):
        folder.mkdir()
    (run / "manifest.json").write_text(json.dumps(rundir.sealed({"folder": str(home)})))
    monkeypatch.chdir(here)
    for path in reads:
        with pytest.raises(InputError, match=f"home has no .*{path}.*here has no .*{path}"), at_home(cfg, run):
            pass
        (here / path).mkdir(parents=True)
    with at_home(cfg, Path("../run")) as found:
        assert Path.cwd() == here and found == Path("../run")
    (home / reads[0]).mkdir(parents=True)
    with at_home(cfg, Path("../run")) as found:
        assert (Path.cwd(), found) == ((here, Path("../run")) if reads[1:] else (home, run))
    for path in reads[1:]:
        (home / path).mkdir(parents=True)
    with pytest.raises(KeyError), at_home(cfg, Path("../run")) as found:
        assert (Path.cwd(), found) == (home, run)
        raise KeyError
    assert Path.cwd() == here


def test_a_run_with_a_checkpoint_needs_not_what_it_began_from(began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one it does."""
    home, run, cfg = tmp_path / "home", tmp_path / "run", config.load(began / "beginning.toml")
    (home / "text").mkdir(parents=True)
    run.mkdir()
    (run / "manifest.json").write_text(json.dumps(rundir.sealed({"folder": str(home)})))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="home has no runs/first"), at_home(cfg, run):
        pass
    shutil.copytree(began / "runs" / "first" / "checkpoints", run / "checkpoints")
    with at_home(cfg, run):
        assert Path.cwd() == home


def test_a_run_keeps_its_folder_from_the_start(began: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is killed before its first step."""
    monkeypatch.chdir(began)
    with rundir.create(config.load("folder.toml", ["run.name=new"]), ByteTokenizer()) as held:
        assert rundir.read_manifest(held.path)["folder"] == str(began)


def test_gates_for_a_run_in_another_folder(began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a refused resume is told to run finds the run's text too."""
    asked: list[list[str]] = []
    monkeypatch.setattr(gating, "cmd_run", lambda ids, **how: asked.append(list(ids)) or 0)
    monkeypatch.chdir(began)
    assert cli.main(["lab", "prepared.toml", "--set", "run.name=gates"]) == 0
    for source in ("prepared.toml", "runs/gates"):
        assert cli.main(["gate", "run", "--for", source, "--stale"]) == 0
    monkeypatch.chdir(tmp_path)
    assert cli.main(["gate", "run", "--for", os.path.relpath(began / "runs" / "gates"), "--stale"]) == 0
    assert asked[0] == asked[1] == asked[2] and "corpus.prepared" in asked[0] and Path.cwd() == tmp_path
