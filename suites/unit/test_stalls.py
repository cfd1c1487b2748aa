"""What saves add to steps: foretold, measured and told, on a made-up clock; and a run that says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpha import cli
from alpha.profile.store import read
from alpha.train.stalls import Stalls

MS = 1_000_000


class Clock:
    """Goes on when it is told."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def stalls(rehearsed: tuple[int, int], waits: list[list[int]]) -> Stalls:
    """Those of a run whose rehearsals took `rehearsed` ms, and whose saves made steps wait so many ms, time after time."""
    clock = Clock()
    made, turns = Stalls(clock), iter(rehearsed)

    def wait(ms: int) -> int:
        clock.ns += ms * MS
        return 3_000_000

    with made.adding():
        wait(1000)  # no save was before it
    made.rehearse(lambda: None, lambda: wait(next(turns)), lambda: None)
    for own in waits:
        made.save()
        for ms in own:
            wait(500)  # a step
            with made.adding():
                wait(ms)
    return made


def test_foretold_is_the_second_rehearsal_and_measured_is_what_a_save_added_until_the_next() -> None:
    made = stalls((90, 40), [[30, 5, 1], [50], [40, 7]])
    assert (made.nbytes, made.foretold_ns, made.measured_ns) == (3_000_000, 40 * MS, [36 * MS, 50 * MS, 47 * MS])
    assert made.before() == "3.0 MB copied at each, 40.0 ms foretold"
    assert made.after(100 * MS) == ("3 with steps behind: 40.0 ms foretold, 44.3 ms measured (mean, give or take 8.5 ms), 40.0% and "
                                    "44.3% of a mean step; 42.3% above the line of 2%")
    assert made.after(2217 * MS).endswith("8.5 ms), 1.8% and 2.0% of a mean step")  # at the line, not above
    assert "above the line" in made.after(2216 * MS)


def test_nothing_is_told_where_no_save_has_steps_behind() -> None:
    never = Stalls(Clock())
    assert never.before() == never.after(MS) == ""
    assert stalls((9, 4), []).after(MS) == "" and stalls((9, 4), []).before() != ""
    assert stalls((9, 4), [[1]]).after(0.0) == ""


@pytest.mark.parametrize(("every", "saves"), [(2, 2), (5, 0), (0, 0)])
def test_a_run_foretells_its_saves_and_measures_them(every: int, saves: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of five steps the save at the last one has no steps behind it."""
    sets = {"run.out": str(tmp_path), "train.steps": 5, "train.checkpoint_every": every, "train.final_windows": 2, "train.profile": 0,
            "train.eval_every": 0, "data.baseline": "false", "optim.warmup": 1}
    assert cli.main(["lab", "configs/tiny.toml", *(x for k, v in sets.items() for x in ("--set", f"{k}={v}"))]) == 0
    said, (path,) = capsys.readouterr().out, tmp_path.glob("tiny*")
    found = dict(read(path / "metrics.sqlite", "run_metadata"))
    state = max(path.glob("checkpoints/*/rank-00000-of-00001.state"))
    if saves:
        assert int(found["save_bytes"]) == state.stat().st_size and int(found["save_foretold_ns"]) > 0
        assert found["checkpoint_every"] == str(every) and "MB copied at each" in said and f"{saves} with steps behind" in said
    else:
        assert "save_foretold_ns" not in found and "foretold" not in said
