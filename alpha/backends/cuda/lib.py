"""What a GPU kernel is given: the device, scratch from the plan, and operands at fixed device addresses. Floor 4.

A kernel is a *binder*: `def matmul(gpu, ins, outs, attrs) -> Callable[[int], None]`. It is called once, when a Plan is loaded: it picks
the compiled file, encodes tensor maps and fixes grids, and returns a closure that only enqueues on the stream (a handle) that it is
given, so that it can be captured. It must not read or write the data while binding, must not write its inputs (unless an `inplace` pair
names them), must write every element of its outputs, and must give bits that depend neither on addresses nor on what else runs.

Every decision that bits depend on is made for MULTIPROCESSORS (graph/plan.py), whatever the device has; `Gpu.blocks` only caps how many
thread blocks a launch may use at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.device import stream_handle
from alpha.cuda_runtime.memory import Arena, Span, aligned, fill, upload
from alpha.errors import GraphError
from alpha.types import TensorType

Kernel = Callable[..., Callable[[int], None]]

SM90A = ("sm_90a",)
"""What every kernel here requires."""


@dataclass(frozen=True)
class Operand:
    """A contiguous tensor in device memory."""

    address: int
    type: TensorType

    @property
    def span(self) -> Span:
        return Span(self.address, self.type.nbytes)


class Parts:
    """What a binder returns whose kernels belong to several phases of a step: (phase, what enqueues them) in order. `None` stands for the
    phase of the launch; the others are those of alpha.profile.phases. Called like any other closure it enqueues all of them."""

    def __init__(self, *parts: tuple[str | None, Callable[[int], None]]) -> None:
        self.parts = parts

    def __call__(self, stream: int) -> None:
        for _, run in self.parts:
            run(stream)


def in_order(runs: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """A closure that enqueues these one after the other."""

    def call(stream: int) -> None:
        for run in runs:
            run(stream)

    return call


COUNTERS, COUNTER_PAGE_BYTES = "counters", 1 << 16


class Gpu:
    """Handed to every binder.

    `device`: the opened device. `region`: scratch of this call; its contents do not survive the call and are garbage before it.
    `blocks`: most thread blocks of a persistent launch, 0 for one per multiprocessor; bits do not depend on it. `constants`: what
    `constant` has made so far, shared by the calls of one executor; whoever holds it keeps that memory.
    """

    def __init__(self, device: Any, region: Span | None = None, *, blocks: int = 0,
                 constants: dict[Hashable, Arena] | None = None) -> None:
        self.device, self.blocks = device, blocks
        self._region = region
        self.constants = constants if constants is not None else {}
        self.used = 0

    def constant(self, key: Hashable, make: Callable[[], np.ndarray | tuple[int, Callable[[int, int], None]]]) -> Span:
        """Device memory that is written once, now, and only read afterwards: tables that follow from types and attributes. Calls with an
        equal key share it. `make`: the array to upload, or (bytes, what writes them: called with their address and a stream)."""
        if key not in self.constants:
            made = make()
            nbytes = made.nbytes if isinstance(made, np.ndarray) else made[0]
            arena = Arena(nbytes, name=f"constant {key}")
            if isinstance(made, np.ndarray):
                upload(Span(arena.address, nbytes), np.ascontiguousarray(made))
            else:
                made[1](arena.address, 0)
            self.device.synchronize()
            self.constants[key] = arena
        arena = self.constants[key]
        return Span(arena.address, arena.nbytes)

    def counters(self, nbytes: int) -> Span:
        """`nbytes` zeros that no other call has, at most COUNTER_PAGE_BYTES, for a kernel that puts them back to zeros before it ends: two
        launches may run at once, and a captured one is replayed, so neither shared memory nor scratch will do. They come from pages: a step
        has hundreds of products, and an allocation for each would make the start and the end of an executor slow."""
        page = self.constants.get(COUNTERS)
        if page is None or page.used + nbytes > page.nbytes:
            if page is not None:
                self.constants[COUNTERS, len(self.constants)] = page
            page = self.constants[COUNTERS] = Arena(COUNTER_PAGE_BYTES, name=COUNTERS)
            fill(Span(page.address, page.nbytes), 0)
            self.device.synchronize()
        return page.take(nbytes)

    def scratch(self, nbytes: int) -> Span:
        """The next `nbytes` bytes of scratch, 256-byte aligned. GraphError when the plan reserved less."""
        start = self.used
        self.used = start + aligned(nbytes)
        size = self._region.nbytes if self._region is not None else 0
        if self._region is None or self.used > size:
            raise GraphError("a kernel asked for more scratch than it was planned", came=self.used, expected=size,
                             do="give the component's `scratch` the same formula as its binder")
        return Span(self._region.address + start, nbytes)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy inside the device; nothing when both are one place."""
    if target != source and nbytes:
        driver = _bindings.driver()
        _bindings.check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(target, source, nbytes, stream_handle(stream)))


def in_place(pairs: Sequence[tuple[Operand, Operand]], run: Callable[[int], None]) -> Callable[[int], None]:
    """A closure for a kernel that updates its outputs in place: where the plan gave an (output, input) pair two places, the input is
    copied to the output first."""
    apart = [(y.address, x.address, x.type.nbytes) for y, x in pairs if y.address != x.address]
    if not apart:
        return run

    def call(stream: int) -> None:
        for target, source, nbytes in apart:
            copy(target, source, nbytes, stream)
        run(stream)

    return call
