"""Copies of the repository that tests change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def share_digests(place: Path, root: Path = ROOT) -> None:
    """What this tree's files were found to say is known in the copy `place` too, by content: only what is edited there is read anew."""
    kept, own = root / ".alpha" / "digests", place / ".alpha" / "digests"
    kept.mkdir(parents=True, exist_ok=True)
    own.parent.mkdir(exist_ok=True)
    own.symlink_to(kept)


def linked(source: str, target: str) -> str:
    """In place of a copy, for `shutil.copytree`: a second name of the same file. Whoever changes it takes that name away first. A copy
    where the two places lie on two file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
