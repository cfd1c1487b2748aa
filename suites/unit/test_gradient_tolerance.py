"""The gradient gate's tolerance where an output cancels: a sound vjp agrees at every draw, a wrong one at none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from alpha.gates import evaluate, gradient
from alpha.ops import gelu
from alpha.ops.spec import OpSpec, Sample
from alpha.train.catalogue import catalogue

GELU = catalogue()["gelu.f32.cpu"]
NEGATIVE = -np.linspace(1.5, 5, 400)
"""Where 1 + tanh cancels: results of 1e-1 down to 1e-6, rounded as x is."""


def ratios(spec: OpSpec) -> list[float]:
    """Error over tolerance of one-element samples, one after the other."""
    found = []
    for i, x in enumerate(NEGATIVE):
        sample = Sample(name="one", inputs=(np.array([x]),), attrs={"approximate": "tanh" if i % 2 else "none"})
        entry, = gradient._case(GELU, spec, sample, f"{i:032x}", ["oracle"])
        found.append(entry.error / entry.bound)
    return found


def test_an_output_that_cancels_is_allowed_the_roundoff_of_its_terms() -> None:
    assert max(ratios(gelu.ROWS[0])) <= 1


def test_without_it_a_sound_one_would_be_refused() -> None:
    """Else the test above would show nothing."""
    assert max(ratios(replace(gelu.ROWS[0], bound=None))) > 1


@pytest.mark.parametrize("part", [1e-3, -1e-3])
def test_it_does_not_cover_a_wrong_one(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = evaluate.vjp

    def wrong(*args: object) -> Sequence[np.ndarray | None]:
        return [g if g is None else g * (1 + part) for g in sound(*args)]  # type: ignore[arg-type]
    monkeypatch.setattr(evaluate, "vjp", wrong)
    assert min(ratios(gelu.ROWS[0])) > 1
