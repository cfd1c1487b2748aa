"""Kernels and records that cheat: each must be rejected."""

import pytest

from alpha.gates.adversarial.redteam import CHEATS, Cheat


@pytest.mark.parametrize("cheat", CHEATS, ids=[f"{c.number}-{c.name.replace(' ', '-')}" for c in CHEATS])
def test_rejected(cheat: Cheat) -> None:
    assert cheat.attempt(), f"cheat {cheat.number} ({cheat.name}) got through"
