"""A gate's engine over a kernel of the CPU that runs in a process of its own (process.py). Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from alpha.component import Component
from alpha.gates.cpu.process import Candidate, apart
from alpha.gates.subjects import digests_now, fresh_nonce
from alpha.registry.record import Record


def measure(component: Component, gate: str, nonce: str | None, engine: Callable[[Candidate, str], Record]) -> Record:
    """What the engine finds with the kernel's process. The record binds to the kernel, of which the engine has seen a stand-in."""
    with apart(component) as candidate:
        record = engine(candidate, nonce or fresh_nonce())
    return replace(record, digests=digests_now(component, gate))
