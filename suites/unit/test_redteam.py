"""Kernels and records that cheat: each must be rejected."""

import pytest

from alpha.gates.adversarial import apart, plant
from alpha.gates.adversarial.redteam import CHEATS, Cheat, honest_passes


@pytest.mark.parametrize("cheat", CHEATS, ids=[f"{c.number}-{c.name.replace(' ', '-')}" for c in CHEATS])
def test_rejected(cheat: Cheat) -> None:
    assert cheat.attempt(), f"cheat {cheat.number} ({cheat.name}) got through"


def test_the_honest_are_not() -> None:
    assert not honest_passes()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, plant.Outcome]:
    return apart.attempt([apart.HONEST, *apart.CHEATS, *apart.SURVIVORS])


@pytest.mark.parametrize("cheat", apart.CHEATS, ids=[f"{c.number}-{c.name.replace(' ', '-')}" for c in apart.CHEATS])
def test_a_kernel_that_looks_around_is_rejected(cheat: apart.Cheat, outcomes: dict[str, plant.Outcome]) -> None:
    """By the last of its gates, with a record: an error that ends a gate is no catch here."""
    outcome = outcomes[cheat.name]
    assert not outcome.error, outcome.error
    assert outcome.caught_by == cheat.by, f"cheat {cheat.number} ({cheat.name}): {[(r.gate, v, why) for r, v, why in outcome.records]}"


def test_its_wrapper_alone_is_not(outcomes: dict[str, plant.Outcome]) -> None:
    outcome = outcomes[apart.HONEST.name]
    assert not outcome.error and not outcome.caught_by and len(outcome.records) == len(apart.HONEST.gates)


@pytest.mark.parametrize("cheat", apart.SURVIVORS, ids=[c.name.replace(" ", "-") for c in apart.SURVIVORS])
def test_the_list_of_survivors_lags_behind_nothing(cheat: apart.Cheat, outcomes: dict[str, plant.Outcome]) -> None:
    """A survivor that a gate has come to reject belongs among the cheats."""
    outcome = outcomes[cheat.name]
    assert not outcome.error and not outcome.caught_by and len(outcome.records) == len(cheat.gates)
