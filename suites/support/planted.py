"""Planted faults of this tree, read once a session: each of them is looked for in its file."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

from alpha.registry.faults import Fault, load_faults
from alpha.registry.gates import PINNED
from alpha.tomlfile import read_toml


@cache
def planted() -> tuple[Fault, ...]:
    """All of them, sorted by id."""
    return load_faults()


def asked_of(file: Path) -> list[tuple[str, str]]:
    """The (component, gate) pairs that reject faults planted in a source file, the most frequent first; gates of time are left out. Empty
    where nothing is planted."""
    faults = file.with_suffix(".faults.toml")
    found = Counter((f["component"], f["gate"]) for f in read_toml(faults)["fault"]) if faults.is_file() else Counter[tuple[str, str]]()
    return [pair for pair, _ in found.most_common() if pair[1] not in PINNED]
