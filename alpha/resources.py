"""Where the files that are no Python lie: kernels, evidence, run files. Floor 0.

Alpha runs from a checkout. Evidence is part of the code that it judges, so it is not packed into a wheel.
"""

from __future__ import annotations

from pathlib import Path

from alpha.errors import MachineError

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: the folder that holds the package, kernels/, baselines/ and configs/."""

NEEDED = ("kernels", "baselines")
"""Folders beside the package without which no command has a meaning."""


def checkout(root: Path = ROOT) -> Path:
    """The checkout that this package lies in. MachineError where the package stands alone, as pip installs it from a wheel."""
    missing = [name for name in NEEDED if not (root / name).is_dir()]
    if missing:
        raise MachineError("Alpha runs from a checkout, and this package stands alone", came=f"{root} without {', '.join(missing)}",
                           expected="the package beside kernels/, baselines/ and configs/",
                           do="get the repository with `git clone`, then run `python3 -m pip install --editable .` in it (or `make train`)")
    return root
