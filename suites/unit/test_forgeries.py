"""Forged evidence, its content hash computed anew: a draw of the kinds of suites/support/forge.py, with --all five of each kind.

What passes is a closed list, with reasons (`PASSES`); docs/gates.md repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import forge
import numpy as np
import pytest
from signing import new_key

from alpha.registry import signatures

DRAWN, EACH = 30, 5


def test_the_kinds_are_many_and_what_passes_is_told() -> None:
    assert len(forge.KINDS) >= 60 and len(forge.KINDS) * EACH >= 500
    told = " ".join((Path(__file__).parents[2] / "docs" / "gates.md").read_text(encoding="utf-8").split())
    assert all(name in told for name in forge.PASSES), sorted(forge.PASSES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> forge.Forge:
    return forge.Forge(tmp_path_factory.mktemp("forged"))


@pytest.fixture
def signed(made: forge.Forge, tmp_path: Path) -> Iterator[forge.Forge]:
    """The same, and both classes ask for signatures."""
    assert made.seen(made.sound.copy()) == []
    lines = [signatures.sign(made.root, machine, new_key(tmp_path / machine), "lab")[1] for machine in made.keys.values()]
    signatures.signers_path(made.root).write_text("".join(f"{line}\n" for line in lines))
    yield made
    signatures.signers_path(made.root).unlink()


def test_what_passes_elsewhere_is_refused_where_lines_are_signed(signed: forge.Forge) -> None:
    assert signed.seen(signed.sound.copy()) == []
    for i, name in enumerate(forge.PASSES):
        evidence = signed.sound.copy()
        forge.KINDS[name](evidence, np.random.default_rng(i), signed)
        assert any("it is not signed" in error for error in signed.seen(evidence)), name


def test_forgeries_are_refused(made: forge.Forge, pytestconfig: pytest.Config, seed: int) -> None:
    assert made.seen(made.sound.copy()) == [], "the sound evidence is refused"
    names = list(forge.KINDS)
    drawn = names * EACH if pytestconfig.getoption("--all") else random.Random(f"{seed} forgeries").sample(names, DRAWN)
    wrong, ran = [], 0
    for i, name in enumerate(drawn):
        evidence, rng = made.sound.copy(), np.random.default_rng([seed, i])
        try:
            forge.KINDS[name](evidence, rng, made)
        except LookupError:  # this kind found no place in what was drawn
            continue
        ran += 1
        errors = made.seen(evidence)
        if bool(errors) == (name in forge.PASSES):
            wrong.append(f"{name}: {errors[:2] or 'passed'}")
    assert ran >= 0.9 * len(drawn) and not wrong, f"seed {seed}:\n" + "\n".join(wrong)
