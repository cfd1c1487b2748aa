"""Planted faults of this tree, read once a session: each of them is looked for in its file."""

from __future__ import annotations

from functools import cache

from alpha.registry.faults import Fault, load_faults


@cache
def planted() -> tuple[Fault, ...]:
    """All of them, sorted by id."""
    return load_faults()
