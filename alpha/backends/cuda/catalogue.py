"""The GPU kernels: every `KERNELS` tuple of the modules in kernels/, found by looking at the folder. Floor 4.

Importing this needs neither a GPU nor its bindings.
"""

from __future__ import annotations

import pkgutil

import alpha.backends.cuda.kernels as kernels
from alpha.component import Catalogue


def fill(catalogue: Catalogue) -> None:
    """Add every GPU kernel to the catalogue."""
    for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda m: m.name):
        catalogue.load(f"{kernels.__name__}.{info.name}")
