"""Time stamps on a stream, also inside captured graphs: a ring in device memory that a one-thread kernel writes. Floor 3."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from alpha.cudart.compile import Source, compile_kernel
from alpha.cudart.launch import Kernel
from alpha.cudart.memory import Arena, Span, download, fill

SOURCE = Source(path="profile/mark.cu")
PLACES = 1 << 16
PROBES = 50


class Marks:
    """A ring of PLACES time stamps. `mark(stream)` enqueues one (capturable); `take(n)` reads the last n, in ns of the host's clock."""

    def __init__(self, stream: Any) -> None:
        self._ring, self._stream = Arena(8 * PLACES + 256, name="time stamps"), stream
        self._stamps, self._cursor = self._ring.take(8 * PLACES), self._ring.take(4)
        fill(Span(self._ring.address, self._ring.nbytes), 0, stream)
        kernel = Kernel(compile_kernel(SOURCE), "mark")
        arguments = (self._stamps, self._cursor, ctypes.c_uint32(PLACES))
        self._launch = kernel.prepare((1, 1, 1), (1, 1, 1), arguments)
        self._offset = 0
        self.align()

    def mark(self, stream: Any) -> None:
        """Enqueue one time stamp."""
        self._launch(stream)

    def align(self) -> int:
        """Measure again what to add to the device's timer to get `time.perf_counter_ns`; returns the uncertainty in ns.

        The stream must be idle. A stamp was taken between the launch and the end of the wait for it; of PROBES tries the shortest counts,
        and its middle is taken for the stamp's moment.
        """
        best = 1 << 62
        for _ in range(PROBES):
            before = time.perf_counter_ns()
            self.mark(self._stream)
            self._stream.synchronize()
            after = time.perf_counter_ns()
            if after - before < best:
                best = after - before
                self._offset = (before + after) // 2 - int(self._last(1)[0])
        return best // 2

    def take(self, n: int) -> list[int]:
        """The last n stamps, oldest first, in ns of the host's clock. The stream must be idle."""
        return [int(stamp) + self._offset for stamp in self._last(n)]

    def _last(self, n: int) -> np.ndarray:
        if not 0 <= n <= PLACES:
            raise ValueError(f"{n} stamps asked of a ring of {PLACES}")
        cursor = int(download(self._cursor, (1,), np.uint32)[0])
        ring = download(self._stamps, (PLACES,), np.uint64) if n > 64 else None
        if ring is None:
            places = [(cursor - n + k) % PLACES for k in range(n)]
            return np.array([download(Span(self._stamps.address + 8 * p, 8), (1,), np.uint64)[0] for p in places], np.uint64)
        return ring[(cursor - n + np.arange(n)) % PLACES]

    def free(self) -> None:
        """Give the memory back."""
        self._ring.free()
