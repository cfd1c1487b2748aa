"""The resume matrix: what so many ranks saved, with whole moments or with cuts (ZeRO-1), loaded by so many others. Made of real files.

    python suites/support/resume_matrix.py

Prints the table of docs/checkpoints.md: rows saved, columns loaded. A cell says on how many of the loading ranks every array has the bits
that it would have had without a checkpoint.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from alpha.checkpoint import folders, ranges
from alpha.gates.contracts.made_state import States, cut_of, layouts
from alpha.types import NUMPY

JOBS = [(1, 0), *((ranks, zero) for ranks in (2, 4, 8) for zero in (0, 1))]
"""(ranks, train.zero)."""


def drawn() -> States:
    """A small model's state, its units spread over the ranks; zeros between tensors."""
    rng = np.random.default_rng(1)
    made = {kind: (layout, np.zeros(layout.size, NUMPY[layout.dtype])) for kind, layout in layouts(rng, 3, 20).items()}
    for layout, flat in made.values():
        for start, size in layout.ranges():
            flat[start : start + size] = rng.integers(0, 1 << 30, size)
    return made


def held(states: States, rank: int, ranks: int, zero: int) -> States:
    """What a rank holds of a whole state: of the moments its cut alone, where they are shared."""
    return {kind: (layout, cut_of(layout, flat, rank, ranks) if zero and kind in "mv" else flat)
            for kind, (layout, flat) in states.items()}


def matrix() -> str:
    """The table."""
    before, lines = drawn(), [f"| saved by | {' | '.join(map(_name, JOBS))} |", f"|---|{'---|' * len(JOBS)}"]
    with tempfile.TemporaryDirectory(prefix="alpha-matrix-") as name:
        for saved in JOBS:
            temporary = folders.begin(Path(name) / _name(saved), 1)
            for rank in range(saved[0]):
                folders.write(temporary, rank, saved[0], *ranges.image(held(before, rank, *saved), rank, saved[0]))
            path = folders.commit(temporary, 1, {kind: layout for kind, (layout, _) in before.items()}, saved[0], {})
            lines.append(f"| {_name(saved)} | {' | '.join(f'{_same(path, before, *loaded)} of {loaded[0]}' for loaded in JOBS)} |")
    return "\n".join(lines)


def _same(path: Path, before: States, ranks: int, zero: int) -> int:
    """Ranks that get from `path` what they would hold of `before`, bit for bit."""
    good = 0
    for rank in range(ranks):
        expected = held(before, rank, ranks, zero)
        found = {kind: (layout, np.full_like(flat, 7)) for kind, (layout, flat) in expected.items()}
        folders.load(path, found, cut=(rank, ranks))
        good += all(found[kind][1].tobytes() == flat.tobytes() for kind, (_, flat) in expected.items())
    return good


def _name(job: tuple[int, int]) -> str:
    return f"{job[0]}{', ZeRO-1' if job[1] else ''}"


if __name__ == "__main__":
    print(matrix())
