"""What takes long is told while it lasts, also where nothing comes any more; what ends soon is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from alpha import cli
from alpha.checkpoint import folders
from alpha.train import loop, telling


class Clock:
    """Goes on by four seconds at each look, as long as it is wound."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 4.0
        return self.now


def test_a_long_read_says_how_far_it_has_come_and_that_nothing_comes() -> None:
    said, enough = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            enough.set()

    before = set(threading.enumerate())
    with telling.telling("reading step-00000007", say, every=0.01, clock=Clock()) as told:
        told(5_000_000, 20_000_000)
        assert enough.wait(20), "it is silent"
    assert not set(threading.enumerate()) - before
    assert said[0].startswith("reading step-00000007: ") and "of 20.0 MB after" in said[-1] and "MB/s" in said[-1]
    assert "nothing came for" in said[-1] and "the disk is slow, or does not answer" in said[-1]


def test_a_short_one_is_not_told() -> None:
    said = list[str]()
    with telling.telling("reading", said.append) as told:
        told(1, 1)
    with pytest.raises(ValueError, match="as it was"), telling.telling("reading", said.append):
        raise ValueError("as it was")
    assert not said


def test_a_run_on_a_slow_disk_tells_its_load(tmp_path: Path, small_corpus: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """A load that hangs in one block is told all the same."""
    sets = {"run.out": str(tmp_path), "train.steps": 4, "train.final_windows": 2, "train.profile": 0, "train.eval_every": 0,
            "data.baseline": "false", "optim.warmup": 1}
    given = [x for k, v in sets.items() for x in ("--set", f"{k}={v}")]
    assert cli.main(["lab", "configs/tiny.toml", *given]) == 0
    (path,) = tmp_path.glob("tiny*")
    sound, said = folders.ranges.blocks, threading.Event()

    def slow(*args: object) -> object:
        for number, data in sound(*args):  # type: ignore[arg-type]
            said.wait(20)
            yield number, data

    monkeypatch.setattr(folders.ranges, "blocks", slow)

    def telling_soon(what: str, say: Callable[[str], None]) -> AbstractContextManager[telling.Told]:
        def heard(text: str) -> None:
            say(text)
            if "nothing came" in text:
                said.set()

        return telling.telling(what, heard, every=0.05)

    monkeypatch.setattr(loop, "telling", telling_soon)
    capsys.readouterr()
    assert cli.main(["lab", str(path), "--resume", *given[2:]]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "reading step-00000004: 0.0 of" in out and "nothing came for" in out
