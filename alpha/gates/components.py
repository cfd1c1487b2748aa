"""All components of the house. Floor 7."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from alpha.component import Catalogue


@cache
def house() -> Catalogue:
    """The catalogue that alpha/train/house.py collects; CPU kernels and data while that file does not exist."""
    if importlib.util.find_spec("alpha.train.house") is not None:
        found: Catalogue = importlib.import_module("alpha.train.house").house()
        return found
    catalogue = Catalogue()
    for module in ("alpha.backends.cpu.catalogue", "alpha.data.catalogue", "alpha.gates.cases.catalogue"):
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).fill(catalogue)
    return catalogue
