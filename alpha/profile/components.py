"""The components of this package: what a run tells of its time and speed. Floor 3."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.profile.figures import judge
from alpha.profile.recorder import Recorder
from alpha.profile.store import Store
from alpha.profile.trace import write

_STORED = "alpha.gates.contracts.stored"
COMPONENTS = (
    Component(id="profile.recorder", kind="evidence", profile="host", implementation=Recorder, contract="alpha.gates.contracts.profile"),
    Component(id="profile.store", kind="evidence", profile="host", implementation=Store, contract=_STORED),
    Component(id="profile.trace", kind="evidence", profile="host", implementation=write, contract=_STORED),
    Component(id="report.figures", kind="evidence", profile="host", implementation=judge, requires=("the extra report",),
              contract="alpha.gates.contracts.report"),
)


def fill(catalogue: Catalogue) -> None:
    """Add them to a catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
