"""The parity gate on the GPU: parity.py over buffers of the GPU, the sizes of a model (large.py), and what a call leaves behind
(replay.py). Floor 7."""

from __future__ import annotations

from alpha.component import Component
from alpha.gates import parity
from alpha.gates.cuda import large as cuda_large
from alpha.gates.cuda import replay as cuda_replay
from alpha.gates.cuda.subjects import large_names
from alpha.registry.cases import CaseRecord, Contract
from alpha.registry.record import Record


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    return parity.measure(component, nonce, lambda c, n: [*cuda_large.entries(c, n), *cuda_replay.entries(c, n)])


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [*parity.listed(component, nonce), *((Contract, name) for name in large_names(component))]
