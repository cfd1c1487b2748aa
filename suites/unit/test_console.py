"""The speed that the console says is of the steps that a report counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from alpha.errors import MachineError
from alpha.flops.v1 import ModelFlops
from alpha.profile.recorder import sampled
from alpha.train.console import Board, Printer
from alpha.train.loop import StepResult
from alpha.train.peak import Peak, sheet


@pytest.mark.parametrize(("first", "steps", "speed", "remark"), [
    (0, 60, 1000, ""), (20, 60, 1000, ""), (0, 6, 120, " (no steady step: of all)")])  # fmt: skip
def test_first_and_profiled_steps_enter_no_rate(first: int, steps: int, speed: int, remark: str) -> None:
    flops = cast(ModelFlops, SimpleNamespace(per_token=1.0))
    board = Board(Printer(), first, steps, flops, Peak(1e4, 1.0, ""), 1, lambda step: sampled(step, steps, 20))
    for step in range(first, steps):
        seconds = 2.0 if step < first + 3 else 0.5 if sampled(step, steps, 20) else 0.15
        board.step(StepResult(step, 1.0, 1.0, 1.0, 1.0, 150, seconds, True))
    assert f"{steps - first} steps in 0:00: {speed:,} tokens/s, MFU {speed / 1e4:.1%}{remark}  [mark]" in board.summary("mark")
    assert board.mean_ns == pytest.approx(150e9 / speed) and board.tokens_per_second() == pytest.approx(speed)


@pytest.mark.parametrize("hardware", ["NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 NVL", "RTX 9"])
def test_a_gpu_whose_name_holds_another_s_has_no_sheet(hardware: str) -> None:
    """Its memory or its clocks are others; MFU and bandwidth would stand against a peak that it does not have."""
    with pytest.raises(MachineError, match="no data sheet of this GPU is known"):
        sheet(hardware)
    assert sheet("NVIDIA H200").source.startswith("NVIDIA's data sheet of the H200:")
