"""The components of this package, for the catalogue that the caller hands in. Floor 5."""

from __future__ import annotations

from alpha.checkpoint import hf, offline, simple
from alpha.component import Catalogue, Component


class SimpleCheckpoint:
    """What `checkpoint.simple` is made of: the functions that a run calls."""

    save = staticmethod(simple.save)
    begin = staticmethod(simple.begin)
    write = staticmethod(simple.write)
    commit = staticmethod(simple.commit)
    inspect = staticmethod(simple.inspect)
    load = staticmethod(simple.load)
    read = staticmethod(simple.read)
    at = staticmethod(simple.at)
    relay = staticmethod(offline.relay)
    clean = staticmethod(simple.clean)
    set_aside = staticmethod(simple.set_aside)


class HuggingFace:
    """What `checkpoint.hf` is made of: models of Hugging Face's transformers, in and out."""

    open_hub = staticmethod(hf.open_hub)
    fill = hf.Hub.fill
    export = staticmethod(hf.export)


COMPONENTS = (
    Component(id="checkpoint.hf", kind="checkpoint", profile="host", implementation=HuggingFace, contract="alpha.gates.contracts.hf"),
    Component(id="checkpoint.simple", kind="checkpoint", profile="host", implementation=SimpleCheckpoint,
              contract="alpha.gates.contracts.checkpoint"),
)


def fill(catalogue: Catalogue) -> None:
    """Add the checkpoint formats to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
