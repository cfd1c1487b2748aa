"""All components of the house. Floor 7."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from alpha.backends.cpu.catalogue import fill as fill_cpu
from alpha.component import Catalogue


@cache
def house() -> Catalogue:
    """The catalogue that alpha/train/house.py collects; the CPU kernels alone while that file does not exist."""
    if importlib.util.find_spec("alpha.train.house") is not None:
        found: Catalogue = importlib.import_module("alpha.train.house").house()
        return found
    catalogue = Catalogue()
    fill_cpu(catalogue)
    return catalogue
