"""Runs that are killed by SIGKILL at drawn moments of starts, steps and saves, as `suites/support/soak_saves.py` does at full size."""

from __future__ import annotations

import re
from pathlib import Path

import warm

SOAK = Path(__file__).resolve().parents[1] / "support" / "soak_saves.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def test_killed_anywhere_the_bits_are_those_of_an_undisturbed_run(seed: int) -> None:
    """Seen to fail: a checkpoint that is renamed before its manifest is written, and a state that is copied late."""
    done = warm.run([SOAK, "--kills", "6", "--seed", seed], timeout=540)
    assert done.returncode == 0 and re.search(r"^seed \d+: ([6-9]|1\d) kills .* 0 wrong$", done.stdout, re.M), done.stdout + done.stderr


def test_the_page_s_kills_add_up() -> None:
    """The table's last row is the sum of the others, at least 200, and each number of ranks has some in a step, a write and a rename."""
    text = PAGE.read_text()
    table = text[text.index("| killed while | 1 rank |") :].split("\n\n")[0].splitlines()[2:]
    rows = {cells[1].strip(): [int(x) for x in cells[2:5]] for cells in (line.split("|") for line in table)}
    total = rows.pop("all")
    assert total == [sum(of) for of in zip(*rows.values())] and sum(total) >= 200
    for where in ("a step runs", "a step runs, beside a save", "the state is written", "the index is written", "the manifest is written",
                  "the checkpoint is renamed"):
        assert all(rows[where]), (where, rows[where])
    said = re.search(r"([\d,]+) kills", text)
    assert said is not None and int(said[1].replace(",", "")) == sum(total)
