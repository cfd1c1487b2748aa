"""Collectives among emulated GPUs: the device code on CPUs, a process for each GPU, held to the bits of the CPU's collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_peers import among

from alpha.gates.contracts import device_ranks

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", device_ranks.OPS)
def test_bits(op: str, ranks: int) -> None:
    found = among(ranks, device_ranks.at_bits, op, 7, kernels=KERNELS)
    assert [wrong for wrong, _ in found] == [[]] * ranks


@pytest.mark.parametrize("op", (*device_ranks.OPS, "barrier"))
def test_absent(op: str) -> None:
    found = among(2, device_ranks.at_absent, op, 7, 1.5, kernels=KERNELS)
    assert [wrong for wrong, _ in found] == [[]] * 2


@pytest.mark.parametrize("op", (*device_ranks.OPS, "barrier"))
def test_slow(op: str) -> None:
    found = among(2, device_ranks.at_slow, op, 7, kernels=KERNELS)
    assert [wrong for wrong, _ in found] == [[]] * 2
