"""Device memory: arenas of plain cuMemAlloc with stable addresses, cut into 256-byte aligned pieces in the order asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.device import stream_handle
from alpha.errors import GraphError, MachineError, ShapeError

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Span:
    """A piece of device memory: address (256-byte aligned when cut from an arena) and length in bytes."""

    address: int
    nbytes: int

    def __int__(self) -> int:
        return self.address


class Arena:
    """One allocation of `nbytes` bytes of device memory; its address never changes. Needs an open Device.

    MachineError when the device has not that much left.
    """

    def __init__(self, nbytes: int, *, name: str = "arena") -> None:
        cuda = _bindings.pycuda_driver()
        self.name, self.nbytes, self.used = name, aligned(max(nbytes, 1)), 0
        try:
            self._allocation: Any = cuda.mem_alloc(self.nbytes)
        except cuda.MemoryError as error:
            free, total = cuda.mem_get_info()
            raise MachineError(
                f"not enough device memory for {name}",
                came=f"{self.nbytes:,} bytes asked",
                expected=f"at most {free:,} bytes free of {total:,}",
                do="choose a smaller batch, more recomputation or more GPUs (`alpha plan` shows what fits)",
            ) from error
        self.address = int(self._allocation)

    def take(self, nbytes: int) -> Span:
        """The next `nbytes` bytes, 256-byte aligned. GraphError when the arena is full (the plan was wrong)."""
        start = self.used
        if start + nbytes > self.nbytes:
            raise GraphError(f"{self.name} is full", came=f"{nbytes:,} bytes", expected=f"at most {self.nbytes - start:,} bytes left")
        self.used = start + aligned(nbytes)
        return Span(self.address + start, nbytes)

    def free(self) -> None:
        """Gives the memory back; every span of it dies."""
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None


def upload(span: Span, array: np.ndarray, stream: Any = None) -> None:
    """Copies a C-contiguous array to the start of `span`.

    With a stream the copy is asynchronous: page-locked arrays only, kept alive by the caller.
    """
    if array.nbytes > span.nbytes or not array.flags.c_contiguous:
        raise ShapeError("array does not fit", came=f"{array.nbytes} bytes", expected=f"C-contiguous, at most {span.nbytes} bytes")
    cuda = _bindings.pycuda_driver()
    if stream is None:
        cuda.memcpy_htod(span.address, array)
    else:
        cuda.memcpy_htod_async(span.address, array, stream)


def download(span: Span, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The start of `span` as a new array of the given shape and dtype; waits for earlier work of the default stream."""
    array = np.empty(shape, dtype)
    if array.nbytes > span.nbytes:
        raise ShapeError("span is shorter than the array", came=f"{span.nbytes} bytes", expected=f"{array.nbytes} bytes")
    _bindings.pycuda_driver().memcpy_dtoh(array, span.address)
    return array


def fetch(array: np.ndarray, span: Span, stream: Any) -> None:
    """Enqueues a copy of the start of `span` into a page-locked, C-contiguous array, which is there when the stream has come so far."""
    if array.nbytes > span.nbytes or not array.flags.c_contiguous:
        raise ShapeError("span does not fill the array", came=f"{span.nbytes} bytes", expected=f"{array.nbytes} bytes, C-contiguous")
    _bindings.pycuda_driver().memcpy_dtoh_async(array, span.address, stream)


def fill(span: Span, byte: int, stream: Any = None) -> None:
    """Sets every byte of `span` (0xff makes NaN of bf16, fp16, fp32 and fp64)."""
    driver = _bindings.driver()
    _bindings.check("cuMemsetD8Async", driver.cuMemsetD8Async(span.address, byte, span.nbytes, stream_handle(stream)))


def pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A page-locked host array, for asynchronous uploads."""
    array: np.ndarray = _bindings.pycuda_driver().pagelocked_empty(shape, dtype)
    return array
