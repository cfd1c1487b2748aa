"""Time stamps on a stream, also inside captured graphs: a ring in device memory that a one-thread kernel writes. Floor 3."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from alpha.cuda_runtime.compile import Source, compile_kernel
from alpha.cuda_runtime.launch import Kernel
from alpha.cuda_runtime.memory import Arena, Span, download, fill
from alpha.errors import GraphError

SOURCE = Source(path="profile/mark.cu")
PLACES = 1 << 16
PROBES = 50

SURE = 20e-6
"""Two alignments say how fast the device's clock runs only where they are this sure of it, as a fraction: quartz is off by less than
100e-6, and what is not known better than that is not corrected."""


class Marks:
    """A ring of PLACES time stamps, numbered in the order in which they are taken. `mark(stream)` enqueues one (capturable), `number(n)` is
    told of n that were enqueued, all on one stream, and `take` reads them by their numbers, in ns of the host's clock."""

    def __init__(self, stream: Any) -> None:
        self._ring, self._stream = Arena(8 * PLACES + 256, name="time stamps"), stream
        self._stamps, self._cursor = self._ring.take(8 * PLACES), self._ring.take(4)
        fill(Span(self._ring.address, self._ring.nbytes), 0, stream)
        kernel = Kernel(compile_kernel(SOURCE), "mark")
        arguments = (self._stamps, self._cursor, ctypes.c_uint32(PLACES))
        self._launch = kernel.prepare((1, 1, 1), (1, 1, 1), arguments)
        self._next = 0
        self._rate, self._pair = 1.0, self._same_moment(PROBES)

    def mark(self, stream: Any) -> None:
        """Enqueue one time stamp."""
        self._launch(stream)

    def number(self, n: int) -> int:
        """Number of the first of the next n stamps, which were enqueued or will be before any others."""
        first = self._next
        self._next += n
        return first

    def align(self, probes: int = PROBES) -> int:
        """Set the device's timer against `time.perf_counter_ns` again, and measure how fast it runs; returns the uncertainty in ns. The
        stream must be idle. GraphError if other stamps were taken than were numbered."""
        host, device, wide = self._same_moment(probes)
        before = self._pair
        if device > before[1] and (wide + before[2]) / (host - before[0]) <= SURE:
            self._rate = (host - before[0]) / (device - before[1])
        self._pair = host, device, wide
        return wide

    def _same_moment(self, probes: int) -> tuple[int, int, int]:
        """The host's time and the device's at one moment, and how sure that is, all in ns. A stamp was taken between the launch and the end
        of the wait for it; of all tries the shortest counts, and its middle is taken for the stamp's moment."""
        best, host, device = 1 << 62, 0, 0
        for _ in range(probes):
            at, before = self.number(1), time.perf_counter_ns()
            self.mark(self._stream)
            self._stream.synchronize()
            after = time.perf_counter_ns()
            if after - before < best:
                best, host, device = after - before, (before + after) // 2, int(self._read(at, 1)[0])
        taken = int(download(self._cursor, (1,), np.uint32)[0])
        if taken != self._next % (1 << 32):
            raise GraphError("time stamps were taken that nobody numbered, so their times would be told of other work",
                             came=f"{taken} stamps", expected=self._next % (1 << 32))
        return host, device, best // 2

    def take(self, first: int, n: int) -> list[int]:
        """Stamps number `first` to `first + n - 1`, in ns of the host's clock. They must have been taken, and none PLACES behind them."""
        host, device, _ = self._pair
        return [host + round((int(stamp) - device) * self._rate) for stamp in self._read(first, n)]

    def _read(self, first: int, n: int) -> np.ndarray:
        if not 0 <= n <= PLACES:
            raise ValueError(f"{n} stamps asked of a ring of {PLACES}")
        place = first % PLACES
        places = min(n, PLACES - place)  # the rest lies at the start of the ring
        parts = [download(Span(self._stamps.address + 8 * at, 8 * m), (m,), np.uint64) for at, m in ((place, places), (0, n - places)) if m]
        return np.concatenate([np.zeros(0, np.uint64), *parts])

    def free(self) -> None:
        """Give the memory back."""
        self._ring.free()
