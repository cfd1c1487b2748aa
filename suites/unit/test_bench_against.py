"""`alpha bench step --against TREE`: verdicts from made ranks of two trees, and from the ranks of this one twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_bench import MadeClocks, calm, tiny

from alpha import cli
from alpha.bench import step_against
from alpha.bench.step_against import Compared, compare
from alpha.errors import InputError
from alpha.resources import ROOT


def made(today: float, other: float, **more: Any) -> Callable[[Path], Sequence[str]]:
    """Ranks that take so many ns a step; `more`: of the other tree's."""
    def member(root: Path) -> list[str]:
        ns = today if root == ROOT else other
        told = {"batch": 4, "sequence": 32, "ns": {"1": ns, "N": ns}, **({} if root == ROOT else more)}
        return [sys.executable, str(ROOT / "suites" / "support" / "made_ranks.py"), str(ROOT), "ours", json.dumps(told)]
    return member


def another(tmp_path: Path) -> Path:
    """A folder that is taken for another tree."""
    tree = tmp_path / "tree"
    (tree / "alpha" / "bench").mkdir(parents=True)
    for name in ("__init__.py", "bench/step_member.py"):
        (tree / "alpha" / name).touch()
    return tree


def measured(tmp_path: Path, patch: pytest.MonkeyPatch, member: Callable[[Path], Sequence[str]], gpus: int = 2) -> Compared:
    calm(patch)
    return compare(tiny(tmp_path), gpus, another(tmp_path), "v1", rounds=7, steps=4, member=member)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("today", "other", "verdict"), [(100e6, 101e6, "faster"), (101e6, 100e6, "slower"),
                                                         (100e6, 100e6, "no difference seen")])
def test_verdicts(gpus: int, today: float, other: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, monkeypatch, made(today, other), gpus)
    assert found.verdict == verdict and not found.why and found.difference == 0 and found.counts == [True] * 7
    assert found.ratio[1] == pytest.approx(today / other) and found.ns == (pytest.approx(today), pytest.approx(other))
    assert {name: len(x) for name, x in found.blocks.items()} == {step_against.TODAY: 7, "v1": 7}


def test_the_slowest_rank_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, monkeypatch, made(100e6, 100e6, defect="slow rank"))
    assert found.verdict == "faster" and found.ns[1] == pytest.approx(125e6)


@pytest.mark.parametrize(("more", "said"), [({"times": 1.05}, "compute otherwise"), ({"times": float("nan")}, "compute otherwise"),
                                            ({"times": 0.0}, "compute otherwise"),
                                            ({"defect": "dies"}, "rank 1 of v1")])
def test_no_ratio_without_two_that_compute_the_same(more: dict[str, Any], said: str, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, monkeypatch, made(100e6, 100e6, **more))
    assert said in found.why and found.verdict == "not compared" and not found.blocks, found


def test_rounding_is_told_and_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, monkeypatch, made(100e6, 100e6, times=1 + 1e-6))
    assert not found.why and 0 < found.difference < found.allowed


def test_throttled_rounds_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm(monkeypatch)
    for slow, counted in ((lambda i: False, True), (lambda i: True, False)):
        clocks = MadeClocks(slow)
        monkeypatch.setattr(step_against.Clocks, "open", staticmethod(lambda index=0, clocks=clocks: clocks))
        found = compare(tiny(tmp_path, "cuda"), 2, another(tmp_path / str(counted)), rounds=7, steps=4, member=made(100e6, 90e6))
        assert (not found.why and found.verdict == "slower") if counted else "rounds count" in found.why, found


def test_this_tree_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks of the CPU for each: the same bits, and times as far apart as noise."""
    calm(monkeypatch)
    tiny(tmp_path)
    code = cli.main(["bench", "step", str(tmp_path / "gpt.toml"), "--against", str(ROOT), "--nproc", "2", "--rounds", "2", "--steps", "3",
                     "--json", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())["against"]
    assert code == 0 and found["verdict"] == "too few rounds to say" and not found["why"]
    assert found["difference"] == 0 and 0.3 < found["ratio"][1] < 3
    assert "the same bits" in capsys.readouterr().out


def test_a_slower_tree_has_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calm(monkeypatch)
    tiny(tmp_path)
    tree = str(another(tmp_path))
    for ns, code in ((110e6, 1), (90e6, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(step_against, "compare", partial(compare, member=made(ns, 100e6)))
            assert cli.main(["bench", "step", str(tmp_path / "gpt.toml"), "--against", tree, "--rounds", "7", "--steps", "3"]) == code
    assert "1.1000" in capsys.readouterr().out


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path)
    run = ["bench", "step", str(tmp_path / "gpt.toml"), "--against"]
    for more, said in ((["nowhere"], "no such state of the code"), ([str(ROOT), "--rounds", "1"], "one round has no interval"),
                       ([str(ROOT), "--peers"], "two states of our own code"),
                       ([str(ROOT), "--record"], "two states of our own code")):
        assert cli.main([*run, *more]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # of a variable that is not set: nothing would be compared, and the code be 0
        cli.main([*run, ""])
    tree = another(tmp_path)
    (tree / "alpha" / "bench" / "step_member.py").unlink()
    with pytest.raises(InputError, match="no ranks to benchmark"):
        compare(tiny(tmp_path), 2, tree)
