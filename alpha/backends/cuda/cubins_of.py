"""Which compiled files the binders of bandwidth-bound kernels may ask for: found by binding them to nothing over ranges of shapes.
Floor 4.

Their wrappers choose a compiled file from the width of a row, the number of heads, the vocabulary. So a component names the calls between
which that choice moves; each is bound to made-up addresses while the wrappers only note what they would compile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

from alpha.backends.cuda.launches import recording
from alpha.backends.cuda.lib import Gpu, Kernel, Operand
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.memory import Span
from alpha.ops.table import row
from alpha.types import Attrs, TensorType

Signature = tuple[Sequence[TensorType], Attrs]

ANYWHERE = 1 << 20
"""An address that satisfies every alignment."""


class NullGpu(Gpu):
    """A GPU that gives addresses and does nothing."""

    def __init__(self) -> None:
        super().__init__(None)

    def scratch(self, nbytes: int) -> Span:
        """A made-up span."""
        return Span(ANYWHERE, nbytes)

    def constant(self, key: Hashable, make: Callable[[], np.ndarray | tuple[int, Callable[[int, int], None]]]) -> Span:
        """A made-up span; nothing is made."""
        return Span(ANYWHERE, 0)

    def counters(self, nbytes: int) -> Span:
        """A made-up span."""
        return Span(ANYWHERE, nbytes)


def cubins_of(op: str, binder: Kernel, calls: Callable[[], Iterable[Signature]]) -> Callable[[], list[Source]]:
    """The function that lists the compiled files of all `calls` of a binder."""

    def sources() -> list[Source]:
        found: dict[Source, None] = {}
        for types, attrs in calls():
            outs = row(op).infer(list(types), attrs)
            with recording() as noted:
                binder(NullGpu(), [Operand(ANYWHERE, t) for t in types], [Operand(ANYWHERE, t) for t in outs], attrs)
            found.update(dict.fromkeys(noted))
        return list(found)

    return sources
