"""What several commands need: the Config of a run file or directory, how the user calls this program. Floor 9."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from alpha import config
from alpha.config import Config
from alpha.train import rundir


def load_source(source: str, overrides: Sequence[str]) -> Config:
    """The Config of a run file or of a run directory, with overrides."""
    path = Path(source)
    if path.is_dir():
        if not rundir.is_run(path):
            rundir.read_config(path)  # raises
        return config.load(path / "config.toml", overrides)
    return config.load(path, overrides)


def this_command() -> str:
    """How the user calls this program: `alpha` if that is what the shell would run, else the path it was called by."""
    called = Path(sys.argv[0])
    found = shutil.which("alpha")
    if called.name == "__main__.py" or not called.exists():
        return "python -m alpha"
    if found is not None and os.path.samefile(found, called):
        return "alpha"
    relative = os.path.relpath(called)
    return relative if not relative.startswith("..") else str(called)


def shown(path: Path) -> str:
    """A path as seen from here, whole where it lies elsewhere."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
