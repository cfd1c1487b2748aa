"""Planted faults of timed gates: what makes a component slow is rejected. Their sound gates are timed too, so nothing runs beside them."""

from __future__ import annotations

import drawn_faults
import pytest

pytestmark = pytest.mark.alone


def test_planted_faults_of_timed_gates_are_rejected(seed: int) -> None:
    if not drawn_faults.TIMED.faults():
        pytest.skip("NOT_RUN: no component with planted faults of a timed gate is pinned on this kind of machine")
    drawn_faults.reject(drawn_faults.TIMED, seed)
