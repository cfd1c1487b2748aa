"""What the binders of the bandwidth-bound kernels share: prepared launches as one operation, address checks, divisors. Floor 4.

Each family (kernels/) has a frozen problem (what is computed; `check` names the limit of the envelope that is broken), where there is
something to choose a frozen config (how), and functions that turn problem and device addresses into an `Operation`: call it with a
stream, or record it into a graph.

All of them are deterministic: no float atomics, additions in an order that the problem fixes. The grid is never part of it, so
`blocks` (most CTAs of a launch, 0: no limit) may follow the SM budget without changing a bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from alpha.cuda_runtime.compile import Source, compile_kernel
from alpha.cuda_runtime.launch import Kernel, Launch
from alpha.errors import ShapeError
from alpha.graph.plan import MULTIPROCESSORS as MULTIPROCESSORS

Dtype = Literal["bf16", "f32"]
Output = Literal["f32", "f32+="]

SIZE = {"bf16": 2, "f32": 4}
PER_VECTOR = 8  # bf16 elements of 16 bytes
REGISTER_FILE = 65536


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Operation:
    """Prepared launches on fixed addresses. `nbytes`: the fewest bytes that it must move."""

    name: str
    launches: tuple[Launch, ...]
    nbytes: int

    def __call__(self, stream: Any = None) -> None:
        for launch in self.launches:
            launch(stream)

    def __str__(self) -> str:
        return f"{self.name} [{'; '.join(map(str, self.launches))}]"


def require(name: str, rules: Sequence[tuple[bool, object, str]]) -> None:
    """ShapeError for the first rule (holds, what came, what is expected) that does not hold."""
    for good, came, expected in rules:
        if not good:
            raise ShapeError(
                f"outside the envelope of {name}",
                came=came,
                expected=expected,
                do="use the CPU backend for this shape, or change the model's shape",
            )


def addresses(name: str, aligned_to: int = 16, **wanted: int) -> None:
    """ShapeError unless every named address is there and aligned."""
    for argument, value in wanted.items():
        if value <= 0 or value % aligned_to:
            raise ShapeError(f"{name}: address of {argument}", came=hex(value), expected=f"a device address, {aligned_to}-byte aligned")


def structure(name: str, pointers: str, *rest: tuple[str, Any]) -> type[ctypes.Structure]:
    """A ctypes mirror of a kernel's parameter struct: pointers first, then `rest`."""
    fields = [(word, ctypes.c_uint64) for word in pointers.split()] + list(rest)
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Divisor(ctypes.Structure):
    """`vec::Divisor` of kernels/common/vector.cuh."""

    _fields_ = [("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32), ("value", ctypes.c_uint32)]

    @classmethod
    def of(cls, value: int) -> Divisor:
        """For 1 <= value < 2^31, exact for dividends below 2^31."""
        shift = (value - 1).bit_length()
        return cls((((1 << shift) - value) << 32) // value + 1, shift, value)


_noted: list[list[Source]] = []


@contextmanager
def recording() -> Iterator[list[Source]]:
    """Within it nothing is compiled, loaded or launched: what would be compiled is noted in the list. Needs neither GPU nor compiler."""
    found: list[Source] = []
    _noted.append(found)
    try:
        yield found
    finally:
        _noted.pop()


def kernel(path: str, name: str, defines: Mapping[str, object], *, shared_bytes: int = 0) -> Kernel:
    """The kernel `name` of kernels/`path` with these defines."""
    if _noted:
        _noted[-1].append(Source.of(path, defines))
        return _NOTHING
    return Kernel(compile_kernel(Source.of(path, defines)), name, shared_bytes=shared_bytes)


class _Nothing:
    """Stands for a kernel, and for its launches, while sources are only noted."""

    def prepare(self, *arguments: Any, **more: Any) -> Any:
        return self

    def __call__(self, stream: Any = None) -> None:
        return None


_NOTHING: Any = _Nothing()


def launch(
    of: Kernel, grid: int | tuple[int, int, int], threads: int, *arguments: Any, overlap_previous: bool = False
) -> Launch:
    """A prepared launch; an integer grid is one-dimensional."""
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    return of.prepare(shape, (threads, 1, 1), arguments, overlap_previous=overlap_previous)


def limit(grid: int, blocks: int) -> int:
    """`grid`, at most `blocks` unless that is 0, at least 1."""
    return max(1, min(grid, blocks) if blocks else grid)
