"""Whether a captured graph heeds that one of its streams comes first: measured by when blocks of two kernels get room. Floor 7.

The driver does not tell it: cuGraphExecGetFlags of 580.159.04 answers 0 for a graph that was instantiated with NODE_PRIORITIES. So a long
kernel of WAVES full waves takes the whole device, and a short one on the other stream is ready a few waves later. Where that stream comes
first, the short kernel gets the next room; elsewhere it waits until the long one's last wave has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.cuda_runtime import Arena, Device, Kernel, Source, compile_kernel, download
from alpha.cuda_runtime.device import stream_handle
from alpha.cuda_runtime.memory import Span
from alpha.cuda_runtime.priority import Fence

SOURCE = Source.of("probe/occupy.cu")
THREADS, A_MULTIPROCESSOR = 1024, 2
"""Of a block of the long kernel; how many of them fill a multiprocessor."""
WAVES, BLOCK_NS, LATE_NS = 32, 20_000, 100_000
"""Waves of the long kernel; how long a block lasts; how much later than the fork the short kernel is ready."""
EARLY = 0.5
"""Share of the long kernel's blocks that have begun before the short kernel: below it that one came first. To be expected are 6 of 32 waves
where it does, and 31 or all where it does not."""
REPLAYS = 5


@dataclass(frozen=True)
class Turn:
    """One replay. `blocks`: of the long kernel; `before`: how many of them began before the short kernel; `wave`: how many have room at a
    time; `began_ns`, `lasted_ns`: when the short kernel began, and the long one ended, since the long one began."""

    blocks: int
    before: int
    wave: int
    began_ns: int
    lasted_ns: int

    @property
    def share(self) -> float:
        """Of the long kernel that was before the short one."""
        return self.before / self.blocks

    def __str__(self) -> str:
        return f"{self.before} of {self.blocks} blocks before it ({self.began_ns / 1e3:.0f} of {self.lasted_ns / 1e3:.0f} us)"


class Rivals:
    """The two kernels on a device, which has nothing else to do. `stream`: the long one's; `first`: the short one's. Called by hand, or
    while `stream` captures."""

    def __init__(self, device: Device, stream: Any, first: Any) -> None:
        self.stream, self.first = stream, stream_handle(first)
        self.wave = A_MULTIPROCESSOR * device.properties.multiprocessors
        self.blocks = WAVES * self.wave
        self._memory = Arena(16 * (self.blocks + 2), name="stamps of rivals")
        kernel, at = Kernel(compile_kernel(SOURCE), "occupy"), self._memory.address

        def blocks(start: int, n: int, threads: int, ns: int) -> Callable[[Any], None]:
            return kernel.prepare((n, 1, 1), (threads, 1, 1), (Span(at + 16 * start, 16 * n), np.uint32(ns)))

        self._long = blocks(0, self.blocks, THREADS, BLOCK_NS)
        self._until_ready = blocks(self.blocks, 1, 32, LATE_NS)
        self._short = blocks(self.blocks + 1, 1, 32, 0)
        self._forked, self._ended = Fence(), Fence()

    def enqueue(self) -> None:
        """Both kernels, forked from `stream` and joined back."""
        self._forked.record(self.stream)
        self._forked.hold(self.first)
        self._until_ready(self.first)
        self._short(self.first)
        self._ended.record(self.first)
        self._long(self.stream)
        self._ended.hold(self.stream)

    def turn(self) -> Turn:
        """What the last one was, when `stream` has ended."""
        self.stream.synchronize()
        stamps = download(Span(self._memory.address, self._memory.nbytes), (self.blocks + 2, 2), np.uint64).astype(np.int64)
        began, short = stamps[: self.blocks, 0], int(stamps[-1, 0])
        start, end = int(began.min()), int(stamps[: self.blocks, 1].max())
        return Turn(self.blocks, int((began < short).sum()), self.wave, short - start, end - start)

    def median(self, replay: Callable[[], None]) -> Turn:
        """Of REPLAYS, behind one that may load kernels."""
        turns = list[Turn]()
        for _ in range(REPLAYS + 1):
            replay()
            turns.append(self.turn())
        return sorted(turns[1:], key=lambda t: t.before)[REPLAYS // 2]

    def free(self) -> None:
        """Give the memory back."""
        self._memory.free()


def judged(asked: Turn, plain: Turn) -> str:
    """'' where the graph that was `asked` to heed priorities does, and one that was not (`plain`) shows that it makes a difference; else
    what is wrong, with both."""
    said = f"with priorities {asked}; without {plain}"
    if plain.share <= EARLY or asked.before < asked.wave:  # the short kernel did not come behind a device that was full
        return f"whether graphs heed priorities cannot be told: {said}"
    return "" if asked.share < EARLY else f"graphs do not heed that collectives come first: {said}"
