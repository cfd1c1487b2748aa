"""What a GPU kernel is given: the device, scratch from the plan, and operands at fixed device addresses. Floor 4.

A kernel is a *binder*: `def matmul(gpu, ins, outs, attrs) -> Callable[[int], None]`. It is called once, when a Plan is loaded: it picks
the compiled file, encodes tensor maps and fixes grids, and returns a closure that only enqueues on the stream (a handle) that it is
given, so that it can be captured. It must not read or write the data while binding, must not write its inputs (unless an `inplace` pair
names them), must write every element of its outputs, and must give bits that depend neither on addresses nor on what else runs.

Every decision that bits depend on is made for 132 multiprocessors, those of every Hopper part of the evidence, whatever the device has;
`Gpu.blocks` only caps how many thread blocks a launch may use at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alpha.cudart.memory import Span, aligned
from alpha.errors import GraphError
from alpha.types import TensorType

Kernel = Callable[..., Callable[[int], None]]

SM90A = ("sm_90a",)
"""What every kernel here requires."""

MULTIPROCESSORS = 132
"""What plans are made for."""


@dataclass(frozen=True)
class Operand:
    """A contiguous tensor in device memory."""

    address: int
    type: TensorType

    @property
    def span(self) -> Span:
        return Span(self.address, self.type.nbytes)


class Gpu:
    """Handed to every binder.

    `device`: the opened device. `region`: scratch of this call; its contents do not survive the call and are rubbish before it.
    `blocks`: most thread blocks of a persistent launch, 0 for one per multiprocessor; bits do not depend on it.
    """

    multiprocessors = MULTIPROCESSORS

    def __init__(self, device: Any, region: Span | None = None, *, blocks: int = 0) -> None:
        self.device, self.blocks = device, blocks
        self._region = region
        self.used = 0

    def scratch(self, nbytes: int) -> Span:
        """The next `nbytes` bytes of scratch, 256-byte aligned. GraphError when the plan reserved less."""
        start = self.used
        self.used = start + aligned(nbytes)
        size = self._region.nbytes if self._region is not None else 0
        if self._region is None or self.used > size:
            raise GraphError("a kernel asked for more scratch than it was planned", came=self.used, expected=size,
                             do="give the component's `scratch` the same formula as its binder")
        return Span(self._region.address + start, nbytes)
