"""The components of this package, for the catalogue that the caller hands in. Floor 5."""

from __future__ import annotations

from alpha.checkpoint import folders, hf, offline
from alpha.component import Catalogue, Component


class RangedCheckpoint:
    """What `checkpoint.ranges` is made of: the functions that a run calls."""

    save = staticmethod(folders.save)
    begin = staticmethod(folders.begin)
    write = staticmethod(folders.write)
    commit = staticmethod(folders.commit)
    inspect = staticmethod(folders.inspect)
    load = staticmethod(folders.load)
    read = staticmethod(folders.read)
    at = staticmethod(folders.at)
    relay = staticmethod(offline.relay)
    clean = staticmethod(folders.clean)
    prune = staticmethod(folders.prune)
    set_aside = staticmethod(folders.set_aside)


class HuggingFace:
    """What `checkpoint.hf` is made of: models of Hugging Face's transformers, in and out."""

    open_hub = staticmethod(hf.open_hub)
    fill = hf.Hub.fill
    export = staticmethod(hf.export)


COMPONENTS = (
    Component(id="checkpoint.hf", kind="checkpoint", profile="host", implementation=HuggingFace, contract="alpha.gates.contracts.hf"),
    Component(id="checkpoint.ranges", kind="checkpoint", profile="host", implementation=RangedCheckpoint,
              contract="alpha.gates.contracts.checkpoint"),
)


def fill(catalogue: Catalogue) -> None:
    """Add the checkpoint formats to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
