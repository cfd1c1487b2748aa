"""Command lines that went wrong: what is printed, what is advised, and options that contradict each other."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from alpha import cli, config
from alpha.cli import auditing, common, data, gating, training
from alpha.errors import ConfigError, InputError
from alpha.gates import merge
from alpha.registry.check import ERROR, Checked, Finding
from alpha.registry.history import History
from alpha.resources import ROOT


def test_a_place_in_a_file_is_no_emoji(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Line 100 of a file was printed as a picture, and with it the colons gone that editors and CI look for."""
    found = [Finding(ERROR, "baselines/evidence/x.jsonl", n, "gelu", "forged: see a.cu:1234: there") for n in (100, 1234)]
    monkeypatch.setattr(merge, "check", lambda *a: Checked(tuple(found), 1, 1, 1))
    assert gating.cmd_check() == 1
    said = capsys.readouterr().out
    assert "x.jsonl:100  gelu" in said and "x.jsonl:1234  gelu" in said and said.count("a.cu:1234: there") == 2


@pytest.mark.parametrize("name", ["two words", "12", "true", "it's", "plain"])
def test_the_command_that_prepared_data_advise_reads_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "prepare", lambda *a, **k: SimpleNamespace(folder=tmp_path / name))
    monkeypatch.setattr(data, "_introduce", lambda made: None)
    assert cli.main(["data", "prepare", "a.txt", "--out", name]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
    assert words[-3:-1] == ["RUN.toml", "--set"]
    assert config.load(ROOT / "configs" / "demo.toml", words[-1:]).data.corpus == name


def test_this_program_is_named_as_a_shell_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = tmp_path / "my tools" / "alpha"
    called.parent.mkdir()
    called.touch()
    monkeypatch.setattr(sys, "argv", [str(called)])
    assert shlex.split(common.this_command()) == [str(called)]


@pytest.mark.parametrize("words", [["--workers", "0"], ["--seeded", "-1"], ["--seed", "hello"], ["--seed", "-1"], ["--seed", ""]])
def test_catches_refuses_what_draws_or_runs_nothing(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["gate", "catches", "no-such-fault", *words])


@pytest.mark.parametrize("words", [["--all"], ["--changed", "-n", "3"], ["--changed", "--seed", "3"]])
def test_an_audit_takes_no_options_of_the_other_kind(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--all` alone measured a sample of five and ended with 0."""
    for name in ("cmd_audit", "cmd_audit_changed"):
        monkeypatch.setattr(auditing, name, lambda *a, **k: 0)
    assert cli.main(["gate", "audit", *words]) == 2
    assert [cli.main(["gate", "audit", *fine]) for fine in (["-n", "3"], [], ["--changed", "--all"])] == [0, 0, 0]


def test_brackets_of_what_is_told_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "alpha[wip]"
    folder.mkdir()
    monkeypatch.setattr(auditing, "History", lambda: History(folder))
    text = io.StringIO()
    assert auditing.cmd_audit_changed(console=Console(file=text, width=200)) == 3
    assert "alpha[wip] is no git checkout" in text.getvalue()


def test_what_history_cannot_say_is_told_of_a_path_that_there_is() -> None:
    """A workflow command shows beside a file of the repository; `evidence` is none."""
    root = ROOT / "baselines" / "evidence"
    silent: Any = SimpleNamespace(why_not="no checkout", base="")
    assert [f.path for f in merge._owed_audits(root, silent)] == ["baselines/evidence"]


def test_continue_does_not_hide_a_run_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began another run in silence, and weeks of the first were left."""
    args: Any = SimpleNamespace(init=None, at=None, source=str(ROOT / "configs" / "demo.toml"))
    cfg = config.load(args.source, [f"run.out={tmp_path}"])
    assert training._newest(args, cfg) is None
    run = tmp_path / "demo"
    run.mkdir()
    (run / "config.toml").write_text("[run]\nname = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        training._newest(args, cfg)
    monkeypatch.setattr(config, "read_regular", _denied)
    with pytest.raises(InputError, match="cannot be read"):
        training._newest(args, cfg)


def _denied(*_: object) -> bytes:
    raise PermissionError(13, "Permission denied")


def test_resume_and_continue_are_two_wishes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", str(ROOT / "configs" / "demo.toml"), "--resume", "--continue"]) == 2
    assert "--continue does without" in capsys.readouterr().err
