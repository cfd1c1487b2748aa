"""The fault gate of a kernel of the CPU: faults.py over the kernel in its own process. Floor 7."""

from __future__ import annotations

from alpha.component import Component
from alpha.gates import faults
from alpha.gates.cpu import engine
from alpha.registry.cases import CaseRecord
from alpha.registry.record import Record


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    return engine.measure(component, nonce, lambda candidate, nonce: faults.measure(candidate.stand_in(), nonce))


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return faults.listed(component, nonce)
