"""Two Hopper GPUs of one host: the bits of one GPU with two shards, across resumes, and faults of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import device_rank_bits
import device_rank_faults
import pytest

from alpha.registry.gpu import asked

pytestmark = [pytest.mark.h100, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def two() -> None:
    if len(asked().gpus) < 2:
        pytest.skip(f"NOT_RUN: two GPUs are wanted, {len(asked().gpus)} are here")


def test_two_gpus_have_the_bits_of_one(tmp_path: Path) -> None:
    out = tmp_path / "bits.json"
    code = device_rank_bits.main([str(out), "--steps", "12", "--batch", "16"])
    assert code == 0, out.read_text()


def test_faults_of_ranks_are_named_and_runs_start_again(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    code = device_rank_faults.main([str(out), "--each", "3", "--restarts", "1", "--seconds", "120"])
    assert code == 0, json.loads(out.read_text())["problems"]
