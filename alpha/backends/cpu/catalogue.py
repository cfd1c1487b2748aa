"""The CPU kernels: every `KERNELS` tuple of the modules in kernels/, found by looking at the folder. Floor 4."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import alpha.backends.cpu.kernels as kernels
from alpha.backends.cpu.lib import Cpu, Workers
from alpha.component import Catalogue, Component
from alpha.ops.table import row
from alpha.types import NUMPY, Attrs, TensorType


class _NoWorkers(Workers):
    """A pool of n that cannot run anything: for dry binds."""

    def __init__(self, n: int) -> None:  # no threads are started
        self.n = n


def scratch_bytes(component: Component, types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of scratch that one bind asks for, counted by a dry bind on untouched memory: declared nowhere twice."""
    cpu = Cpu(_NoWorkers(threads))
    ins = [np.empty(t.shape, NUMPY[t.dtype]) for t in types]
    outs = [np.empty(t.shape, NUMPY[t.dtype]) for t in row(component.op or "").infer(types, attrs)]
    component.implementation(cpu, ins, outs, attrs)
    return cpu.used


def fill(catalogue: Catalogue) -> None:
    """Add every CPU kernel to the catalogue."""
    for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda m: m.name):
        for c in getattr(importlib.import_module(f"{kernels.__name__}.{info.name}"), "KERNELS", ()):
            catalogue.add(replace(c, scratch=lambda types, attrs, threads, c=c: scratch_bytes(c, types, attrs, threads)))


def run(component: Component, ins: Sequence[np.ndarray], types: Sequence[TensorType], attrs: Attrs, *, workers: Workers,
        poison: bool = True) -> tuple[np.ndarray, ...]:
    """One call outside any plan: fresh outputs and scratch (NaN-poisoned unless told otherwise), bound and run once.

    `ins`: arrays in the NumPy dtypes of `types`, never written. Returns the outputs.
    """
    outs = []
    for t in row(component.op or "").infer(types, attrs):
        out = np.empty(t.shape, NUMPY[t.dtype])
        if poison:
            out.view(np.uint8 if out.ndim else out.dtype)[...] = 0xFF if out.ndim else np.array(-1).astype(out.dtype)
        outs.append(out)
    scratch = np.full(scratch_bytes(component, types, attrs, workers.n), 0xFF, np.uint8)
    component.implementation(Cpu(workers, scratch), list(ins), outs, attrs)()
    return tuple(outs)
