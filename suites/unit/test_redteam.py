"""Kernels and records that cheat: each must be rejected."""

import random

import pytest

from alpha.gates.adversarial import apart
from alpha.gates.adversarial.redteam import CHEATS, Cheat, honest_passes


@pytest.mark.parametrize("cheat", CHEATS, ids=[f"{c.number}-{c.name.replace(' ', '-')}" for c in CHEATS])
def test_rejected(cheat: Cheat) -> None:
    assert cheat.attempt(), f"cheat {cheat.number} ({cheat.name}) got through"


def test_the_honest_are_not() -> None:
    assert not honest_passes()


DRAWN = 5
"""Kernels that look around, in a session that does not ask for all: each has the package imported anew."""


def test_kernels_that_look_around_are_rejected(request: pytest.FixtureRequest, seed: int) -> None:
    """By the last of their gates, with a record: an error that ends a gate is no catch here. Their wrapper alone passes, and what is listed
    as a survivor is one: what a gate has come to reject belongs among the cheats."""
    every = len(apart.CHEATS) if request.config.getoption("--all") else DRAWN
    drawn = random.Random(seed).sample(apart.CHEATS, every)
    outcomes = apart.attempt([apart.HONEST, *apart.SURVIVORS, *drawn])
    wrong = [f"cheat {c.number} ({c.name}): {o.error or [(r.gate, v, why) for r, v, why in o.records]}"
             for c in drawn if (o := outcomes[c.name]).error or o.caught_by != c.by]
    assert not wrong, "\n".join(wrong)
    for passes in (apart.HONEST, *apart.SURVIVORS):
        outcome = outcomes[passes.name]
        assert not outcome.error and not outcome.caught_by and len(outcome.records) == len(passes.gates), passes.name
