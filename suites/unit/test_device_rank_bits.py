"""The bit table of ranks on GPUs: its dry run on emulated ones, and that every difference is seen."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import device_rank_bits
import pytest
from device_rank_bits import differences


def test_the_dry_run_has_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bits.json"
    assert device_rank_bits.main([str(out), "--dry", "--steps", "6"]) == 0
    found = json.loads(out.read_text())
    assert len(found["rows"]) >= 3 and not any(row["differs"] for row in found["rows"]) and sorted(found["state"]) == ["5", "6"]
    assert "| 2 GPUs, zero = 0 | same bits |" in capsys.readouterr().out


def test_another_bit_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks that train with another learning rate than one process."""
    run = device_rank_bits.Table.run

    def other(table: Any, name: str, ranks: int, zero: int = 0, at: int | None = None) -> dict[str, Any]:
        table.set = [*table.set, *(["optim.lr=7e-4"] if ranks > 1 and at is None else [])]
        return run(table, name, ranks, zero, at)

    monkeypatch.setattr(device_rank_bits.Table, "run", other)
    out = tmp_path / "bits.json"
    assert device_rank_bits.main([str(out), "--dry", "--zero", "0", "--steps", "3"]) == 1
    assert any("state param" in text for row in json.loads(out.read_text())["rows"] for text in row["differs"])


def test_nothing_that_is_missing_is_the_same() -> None:
    one = {"code": 0, "steps": [[0, 5.0, 1.0, 1e-3], [1, 4.9, 1.0, 1e-3]], "validation": [[2, 3.0]],
           "state": {"1": {"param": "a"}, "2": {"param": "b", "m": "c"}}}
    assert differences(one, deepcopy(one)) == []
    for change in (lambda x: x["steps"].pop(), lambda x: x["steps"][1].__setitem__(1, 4.90001), lambda x: x["validation"].clear(),
                   lambda x: x["state"].pop("2"), lambda x: x["state"].clear(), lambda x: x["state"]["2"].pop("m"),
                   lambda x: x["state"]["2"].update(param="d"), lambda x: x["state"]["1"].update(param="d"), lambda x: x["steps"].clear(),
                   lambda x: x.update(code=1, text="lost")):
        other = deepcopy(one)
        change(other)
        assert differences(one, other), other
    assert differences({**one, "steps": [], "state": {}}, {**one, "steps": [], "state": {}})
