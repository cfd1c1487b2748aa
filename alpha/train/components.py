"""The component of this package, for the catalogue that the caller hands in. Floor 6."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.train.loop import Loop

COMPONENTS = (
    Component(
        id="train.loop",
        kind="program",
        profile="program",
        implementation=Loop,
        presupposes=("checkpoint.simple", "sampler.permuted"),
        contract="alpha.gates.contracts.train",
    ),
)


def fill(catalogue: Catalogue) -> None:
    """Add the training loop to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
