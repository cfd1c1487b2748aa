"""The registry's own components: what decides about all others is gated as well. Floor 3."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.registry.check import check
from alpha.registry.digest import component_digests
from alpha.registry.evidence import Evidence
from alpha.registry.faults import load_faults
from alpha.registry.judge import judge
from alpha.registry.status import Registry

COMPONENTS = (
    Component(id="registry.digest", kind="evidence", profile="host", implementation=component_digests,
              contract="alpha.gates.contracts.registry.digest"),
    Component(id="registry.evidence", kind="evidence", profile="host", implementation=Evidence,
              contract="alpha.gates.contracts.registry.evidence"),
    Component(id="registry.judge", kind="evidence", profile="host", implementation=judge,
              contract="alpha.gates.contracts.registry.judge"),
    Component(id="registry.faults", kind="evidence", profile="host", implementation=load_faults,
              contract="alpha.gates.contracts.registry.faults"),
    Component(id="registry.status", kind="evidence", profile="host", implementation=Registry,
              contract="alpha.gates.contracts.registry.status",
              presupposes=("registry.digest", "registry.evidence", "registry.judge")),
    Component(id="registry.check", kind="evidence", profile="host", implementation=check,
              contract="alpha.gates.contracts.registry.check",
              presupposes=("registry.faults", "registry.status")),
)


def fill(catalogue: Catalogue) -> None:
    """Add them to a catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
