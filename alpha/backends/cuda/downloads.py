"""Copies of the state on their way to the host: into page-locked memory, on a stream of their own, beside what computes. Floor 4.

    begin     the copies that follow are of the state as the last plan or upload that wrote to it leaves it
    copy      one stretch of one kind of state
    end       these were all
    writing   around what writes to the state: the computing stream waits there until the copies are done
    wait      the host waits for them

Microbatches only read the state. So a save costs a step what its copies take longer than they.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.backends.cuda.values import device_bytes
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.locked import locked
from alpha.cuda_runtime.memory import Arena, Span, fetch
from alpha.errors import GraphError
from alpha.types import NUMPY, TensorType


def _nothing() -> None:
    """What is given back once all is."""


@dataclass(frozen=True)
class Away:
    """A kind of state that lies on the device: its flat array's shape, and its elements' type on device and host."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Downloads:
    """Of one executor, whose launches run on `stream`. `states`: of each kind elements and their type; its arena is `state.` and the kind.
    `settle`: enqueues what the host was handed out of the state and has to give back."""

    def __init__(self, device: Device, stream: Any, states: Mapping[str, tuple[int, str]], arenas: Mapping[str, Arena],
                 settle: Callable[[], None]) -> None:  # fmt: skip
        self._stream, self._states, self._arenas, self._settle = stream, states, arenas, settle
        self._copies, self._written, self._done = device.stream(), device.event(), device.event()
        self._lent: set[str] = set()
        self._under_way: set[str] = set()
        """Arenas that saves copy, and those whose copies nobody has waited for."""
        self._room: np.ndarray | None = None

    def lend(self, kind: str) -> Away:
        """What stands for a kind of state where it is to be copied. GraphError where the host holds its elements in another form."""
        size, held = self._states[kind]
        _, dtype = device_bytes(TensorType((size,), held))
        if np.dtype(dtype) != NUMPY[held]:
            raise GraphError("this kind of state cannot be copied as it lies", came=f"{kind}: {held}", expected="f32 or i32")
        if f"state.{kind}" not in self._lent:
            self._lent.add(f"state.{kind}")
            self._written.record(self._stream)
        return Away(kind, (size,), NUMPY[held])

    def room(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, u8[nbytes], zero where nothing was copied to; the same until another size is asked for. MachineError
        where it cannot be had."""
        if self._room is None or self._room.nbytes != nbytes:
            self.wait()
            self._room = None  # what was there goes first: never two of them
            self._room = locked(nbytes)
        return self._room

    def begin(self) -> None:
        """What is copied from here on is the state behind what has written to it so far. GraphError while other copies are under way."""
        if self._under_way:
            raise GraphError("a copy of the state began before the last one was waited for", came=", ".join(sorted(self._under_way)),
                             expected="none under way")
        self._settle()
        self._copies.wait_for_event(self._written)

    def copy(self, source: Away, start: int, target: np.ndarray) -> None:
        """Enqueue the elements of a kind from `start` on to `target`, a flat part of `room` in the kind's type."""
        arena, at = self._arenas[f"state.{source.kind}"], start * source.dtype.itemsize
        if not target.nbytes:
            return
        fetch(target, Span(arena.address + at, min(target.nbytes, arena.nbytes - at)), self._copies)
        self._under_way.add(f"state.{source.kind}")

    def end(self) -> None:
        """All copies have been enqueued."""
        self._done.record(self._copies)

    def wait(self) -> None:
        """Until the copies are done."""
        self._done.synchronize()
        self._under_way.clear()

    @contextmanager
    def writing(self, arenas: set[str]) -> Iterator[None]:
        """What is enqueued inside writes to these arenas: behind copies of them that are under way, before those that begin later."""
        if arenas & self._under_way:
            self._stream.wait_for_event(self._done)
        yield
        if arenas & self._lent:
            self._written.record(self._stream)

    def free(self) -> None:
        """Give the host memory back, and let go of who opened this: it holds page-locked memory, which a cycle of references would free
        when Python looks for cycles. Inside the capture of another executor's graph that ends the capture."""
        self._copies.synchronize()
        self._under_way.clear()
        self._room, self._settle = None, _nothing
