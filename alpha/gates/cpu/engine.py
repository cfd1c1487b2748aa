"""A gate's engine over a kernel of the CPU that runs in a process of its own (process.py). Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alpha.component import Component
from alpha.gates import subjects
from alpha.gates.cpu.process import Candidate, apart
from alpha.registry.record import Record


def measure(component: Component, nonce: str | None, engine: Callable[[Candidate, str], Record]) -> Record:
    """What the engine finds with the kernel's process."""
    with apart(component) as candidate, _bound_to(component):
        return engine(candidate, nonce or subjects.fresh_nonce())


@contextmanager
def _bound_to(component: Component) -> Iterator[None]:
    """Within it a record binds to the kernel, of which an engine sees a stand-in."""
    kept = subjects.component_digests
    subjects.component_digests = lambda stand_in, gate, **more: kept(component, gate, **more)
    try:
        yield
    finally:
        subjects.component_digests = kept
