"""`alpha bench data`: what it counts, from memory and from disk."""

from __future__ import annotations

from pathlib import Path

import data_speed
import length_buckets
import numpy as np
import pytest

from alpha import cli, config
from alpha.bench import data

RUN = """
[run]
name = "made"
[model]
family = "gpt"
layers = 1
width = 16
heads = 2
[data]
corpus = "{root}/text"
tokenizer = "bytes"
validation = 0.3
sequence = 8
cache = "{root}/cache"
[train]
steps = 5
batch = 12
shards = 2
micro_batch = 2
[optim]
lr = 1e-2
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for i in range(9):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} {'word ' * 90}")
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(root=tmp_path.as_posix()))
    return path


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_both_passes_are_told(run_file: Path, packing: str) -> None:
    warm, cold = data.bench(config.load(run_file, [f"data.packing={packing}"]), 3)
    assert (warm.cache, cold.cache, warm.tokens, cold.steps) == ("warm", "cold", 3 * 12 * 8, 3)
    assert min(warm.wall, warm.core, cold.wall, cold.core) > 0


def test_a_run_file_is_asked_for(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "data"]) == 2
    assert "alpha bench data RUN.toml" in capsys.readouterr().err
    assert cli.main(["bench", "data", str(run_file), "--steps", "2", "--set", "data.mixture=x"]) == 2


def test_the_table_of_delivered_tokens_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_speed.shards, "SHARD_TOKENS", 1 << 17)
    monkeypatch.setattr(data_speed, "CONSUMED", 1e9)
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\nformer\n".join(data_speed.MARKS) + "\nbehind\n")
    words = ["--shards", "3", "--steps", "2", "--write", str(page)]
    assert data_speed.main(words) == 0
    told = page.read_text()
    assert told.startswith("before\n") and told.endswith("\nbehind\n") and "former" not in told
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith(("| windows", "| packed"))]
    assert [row[1] for row in rows] == ["cold", "warm"] * 2
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    page.write_text("no marks")
    assert data_speed.main(words) == 2 and page.read_text() == "no marks"


def test_the_table_of_buckets_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few documents: of each sequence, buckets leave padding and pairs as they are, and even the steps."""
    for name, value in {"MEDIANS": (60,), "SEQUENCES": (128, 256), "STEPS": 1}.items():
        monkeypatch.setattr(length_buckets, name, value)
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\nformer\n".join(length_buckets.MARKS) + "\nbehind\n")
    words = ["--documents", "1500", "--write", str(page)]
    assert length_buckets.main(words) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nbehind\n") and "former" not in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8 + 1 + 8 and [row[2] for row in rows[9:]] == ["packed", "packed, buckets"] * 4
    for windows, packed, buckets, alike in (rows[i : i + 4] for i in range(0, 8, 4)):
        assert windows[3] == "0.00%" and packed[3:6] == buckets[3:6] and float(alike[3][:-1]) > float(packed[3][:-1])
        assert float(buckets[6]) <= float(packed[6]) and float(buckets[7]) <= float(packed[7])
    page.write_text("no marks")
    assert length_buckets.main(words) == 2 and page.read_text() == "no marks"


def test_blocks_are_those_from_a_tile_s_first_document() -> None:
    one, own = np.zeros(1024, int), np.arange(1024) // 128
    late = np.arange(1024) >= 200
    assert length_buckets.blocks(np.array([one, own, late])).tolist() == [36, 8, 1 + 2 + (2 + 3 + 4 + 5 + 6 + 7)]
