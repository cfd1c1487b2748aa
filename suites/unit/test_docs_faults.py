"""Tables of the handbook that name planted faults, against their files: by number (ranks), by effect (architecture)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alpha.tomlfile import read_toml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8").partition("\n## Faults by number\n")[2].partition("\n## ")[0]
NUMBERS = range(42, 65)


def wrong(page: str) -> list[str]:
    """What the section's table says and no file does, or the other way round."""
    faults = [f for path in sorted((ROOT / "alpha").rglob("*.faults.toml")) for f in read_toml(path)["fault"]]
    mirrors = {f["id"]: f["mirrors"] for f in faults}
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|([^|]*)\|$", page, re.MULTILINE)
    found = [] if [int(n) for n, _, _ in rows] == [*NUMBERS] else ["the rows are not 42 to 64"]
    for number, _, named in rows:
        ids = re.findall(r"`([^`]+)`", named)
        found += [f"{id} is planted for {mirrors.get(id)}, not {number}" for id in ids if mirrors.get(id) != int(number)]
        if not ids:
            found += [f"{f['id']} is planted for {number}" for f in faults if f["mirrors"] == int(number) and f["id"].startswith(
                ("all_", "data_parallel.", "transport.", "verify_program."))]
    return found


def test_every_fault_of_the_table_is_planted() -> None:
    assert wrong(PAGE) == []


@pytest.mark.parametrize(("was", "now"), [
    ("`all_reduce.divided-twice`", "`all_reduce.divided-thrice`"), ("`all_reduce.divided-twice`", "`all_reduce.sum-for-average`"),
    ("| `all_reduce.divided-twice` |", "| |"), ("| 47 |", "| 48 |"), ("| 56 | waits", "| waits")])
def test_a_table_that_says_something_else_is_seen(was: str, now: str) -> None:
    assert was in PAGE and wrong(PAGE.replace(was, now))


def unplanted(page: str) -> list[str]:
    """Of the table of effects, what is named as planted and is not; 'no row' where a field of a node has none."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| (`[^|]+`) \|$", page, re.MULTILINE)
    known = {f["id"] for path in (ROOT / "alpha").rglob("*.faults.toml") for f in read_toml(path)["fault"]}
    said = " ".join(field for field, _ in rows)
    return [id for _, named in rows for id in re.findall(r"`([^`]+)`", named) if id not in known] + [
        f"{field}: no row" for field in ("stream", "stage", "microbatch", "sms", "group", "extents") if field not in said]


def test_what_is_said_of_effects_is_planted() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert unplanted(page) == []
    assert unplanted(page.replace("`select.any-budget`", "`select.some-budget`")) == ["select.some-budget"]
    assert unplanted(page.replace("| `sms` |", "| budget |")) == ["sms: no row"]
