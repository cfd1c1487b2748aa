"""The gradient gate on the GPU: gradient.py over samples that kernels of the GPU take, the kernel run at every node of its op. Floor 7."""

from __future__ import annotations

from alpha.component import Component
from alpha.gates import gradient
from alpha.registry.record import Record


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    return gradient.measure(component, nonce)
