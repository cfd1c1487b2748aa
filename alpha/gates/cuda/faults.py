"""The fault gate on the GPU: faults.py over buffers of the GPU, whose guards show writes outside, and misuse of the binder. Floor 7."""

from __future__ import annotations

from alpha.component import Component
from alpha.gates import faults
from alpha.registry.record import Record


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    return faults.measure(component, nonce)
