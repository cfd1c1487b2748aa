"""The CPU kernels: every `KERNELS` tuple of the modules in kernels/, found by looking at the folder. Floor 4."""

from __future__ import annotations

import mmap
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

import alpha.backends.cpu.kernels as kernels
from alpha.backends.cpu.lib import ALIGN, Cpu, Workers
from alpha.component import Catalogue, Component
from alpha.errors import MachineError, ShapeError
from alpha.graph.ir import attrs_text
from alpha.ops.table import row
from alpha.types import NUMPY, Attrs, TensorType


class _NoWorkers(Workers):
    """A pool of n that cannot run anything: for dry binds."""

    def __init__(self, n: int) -> None:  # no threads are started
        self.n = n


def scratch_bytes(component: Component, types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of scratch that one bind asks for, counted by a dry bind on addresses without memory: declared nowhere twice.

    The layers of a model ask the same again and again, so answers are kept for the life of the process.
    """
    key = (component.implementation, tuple(types), attrs_text(attrs), threads)
    if key not in _KNOWN:
        _KNOWN[key] = _dry_bind(component, types, attrs, threads)
    return _KNOWN[key]


MOST_BYTES = 512 << 30
"""Bytes of an operand that a kernel is bound to. A binder cuts it into blocks and lists them, so a bind takes time and memory in
proportion: seconds for this, minutes and tens of GiB for a hundred times as much."""

_KNOWN: dict[tuple[Callable, tuple[TensorType, ...], str, int], int] = {}


def _dry_bind(component: Component, types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    cpu = Cpu(_NoWorkers(threads))
    outs = row(component.op or "").infer(types, attrs)
    at, places = 0, []
    for t in (*types, *outs):
        nbytes = t.size * NUMPY[t.dtype].itemsize  # bf16 is held as float32 here
        if nbytes > MOST_BYTES:
            raise ShapeError("a tensor is too large for a kernel of the CPU", came=f"{t} of {component.id}: {nbytes / 2**30:,.0f} GiB",
                             expected=f"at most {MOST_BYTES >> 30} GiB",
                             do='make the model or the microbatch smaller, or plan it for machine.backend = "cuda"')
        places.append((at, at + nbytes, t))
        at += -(-nbytes // ALIGN) * ALIGN
    space = _addresses(at)
    arrays = [space[start:stop].view(NUMPY[t.dtype]).reshape(t.shape) for start, stop, t in places]
    component.implementation(cpu, arrays[: len(types)], arrays[len(types) :], attrs)
    return cpu.used


def _addresses(nbytes: int) -> np.ndarray:
    """Bytes of address space that no memory stands behind until it is written, however many: a plan for 70B parameters needs no 300 GB."""
    if not nbytes:
        return np.empty(0, np.uint8)
    try:
        space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        raise MachineError("this process gets no address space to plan in", came=f"{nbytes / 2**30:,.1f} GiB ({error.strerror})",
                           expected="addresses alone; no memory stands behind them", do="raise `ulimit -v`") from error
    return np.frombuffer(space, np.uint8)


_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Python names it from 3.13 on; Linux's value."""


def fill(catalogue: Catalogue) -> None:
    """Add every CPU kernel to the catalogue."""
    for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda m: m.name):
        catalogue.load(f"{kernels.__name__}.{info.name}",
                       lambda c: replace(c, scratch=lambda types, attrs, threads: scratch_bytes(c, types, attrs, threads)))


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
