"""The components of this package, for the catalogue that the caller hands in. Floor 5."""

from __future__ import annotations

from alpha.checkpoint import simple
from alpha.component import Catalogue, Component


class SimpleCheckpoint:
    """What `checkpoint.simple` is made of: the functions that a run calls."""

    save = staticmethod(simple.save)
    load = staticmethod(simple.load)
    at = staticmethod(simple.at)
    clean = staticmethod(simple.clean)
    set_aside = staticmethod(simple.set_aside)


COMPONENTS = (
    Component(id="checkpoint.simple", kind="checkpoint", profile="host", implementation=SimpleCheckpoint,
              contract="alpha.gates.contracts.checkpoint"),
)


def fill(catalogue: Catalogue) -> None:
    """Add the checkpoint formats to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
