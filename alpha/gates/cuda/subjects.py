"""How the gates call a kernel of the GPU: buffers of its own between guards, and one stream that alone is waited for. Floor 7.

What the engines see is what they see of a kernel of the CPU (subjects.Bound): host arrays in, host arrays out. Behind them every operand
has device memory of its own, `GUARD` bytes of a pattern on either side; a write there is an error that names the operand. Only the
stream that the kernel was given is waited for, so work that it leaves elsewhere shows as outputs that change later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from alpha.backends.cuda.lib import Gpu, Operand, copy
from alpha.backends.cuda.values import device_bytes, from_device, to_device
from alpha.component import Component
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.memory import Arena, Span, aligned, download, fill, upload
from alpha.errors import GraphError
from alpha.gates.cuda import calls
from alpha.ops.numerics import round_to
from alpha.ops.spec import Sample
from alpha.types import TensorType

GUARD = 4096
PATTERN = 0xA5

MOVED = 64
"""Bytes that a nudge moves."""

REPLAYS = ("stream:replayed", "stream:kernels", "stream:cache")
"""Names of the entries of replay.py."""


def warm_up() -> None:
    """Open the device, so that the driver's own threads are there before anything is counted."""
    opened()


def samples(component: Component, rng: np.random.Generator, which: str) -> list[Sample]:
    """Samples beyond the row's own, inside what kernels of the GPU accept: 'samples' or 'exact' ones."""
    return calls.further(component, rng, which)


def refused(component: Component, rng: np.random.Generator) -> list[Sample]:
    """None: code of the device raises no errors over contents."""
    return []


def differentiated(component: Component, row: str, rng: np.random.Generator) -> list[Sample]:
    """Samples of the forward row through which the kernel is differentiated."""
    return calls.differentiated(component, row, rng)


def large_names(component: Component) -> list[str]:
    """Names of the entries of parity beyond the samples', in order."""
    return [*calls.large(component), *REPLAYS]


@cache
def opened() -> tuple[Device, Any]:
    """The device and the stream of the gates; the driver's own threads are started by then, and no part of L2 is set aside."""
    device = Device.open()
    driver = _bindings.driver()
    _bindings.check("cuCtxSetLimit", driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0))
    return device, device.stream()


def set_aside() -> int:
    """Bytes of L2 that are set aside for what is marked to stay; a kernel that asks for them keeps its operands from being flushed."""
    driver = _bindings.driver()
    return int(_bindings.check("cuCtxGetLimit", driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE)))


class CudaBound:
    """A kernel of the GPU bound to buffers of its own, ready to be called again and again with other contents.

    types: (inputs, outputs). `offset`: 16-byte steps past a 256-byte boundary of every operand. `share`: (output, input) that get the same
    memory. `blocks`: most thread blocks at once (0: one per multiprocessor).
    """

    def __init__(self, component: Component, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Any, *, offset: int = 0,
                 share: tuple[int, int] | None = None, blocks: int = 0) -> None:
        device, self.stream = opened()
        device.make_current()
        self.in_types, self.out_types, self.attrs = tuple(ins), tuple(outs), attrs
        scratch = component.scratch(ins, attrs, 1) if component.scratch is not None else 0
        sizes = [t.nbytes for t in (*ins, *outs)] + [scratch]
        self._arena = Arena(sum(aligned(n) + 2 * GUARD + 256 for n in sizes), name="gate buffers")
        everything = Span(self._arena.address, self._arena.nbytes)
        fill(everything, PATTERN, self.stream)
        at, spans = self._arena.address, []
        for n in sizes:
            at += GUARD
            spans.append(Span(at + 16 * (offset % 16), n))
            at += aligned(n) + 256 + GUARD
        n_in = len(self.in_types)
        self._ins, self._outs, self._scratch = spans[:n_in], spans[n_in:-1], Span(aligned(spans[-1].address), scratch)
        if share is not None:
            self._outs[share[0]] = self._ins[share[1]]
        for span in (*self._ins, self._scratch):  # a binder that reads its operands reads NaN
            self._set(span, 0xFF)
        self.constants: dict[Hashable, Arena] = {}
        gpu = Gpu(device, self._scratch, blocks=blocks, constants=self.constants)
        self._call: Callable[[int], None] = component.implementation(
            gpu, [Operand(s.address, t) for s, t in zip(self._ins, self.in_types)],
            [Operand(s.address, t) for s, t in zip(self._outs, self.out_types)], attrs)
        if gpu.used > aligned(scratch):
            raise GraphError("a kernel took more scratch than its component declares", came=gpu.used, expected=scratch)
        self.stream.synchronize()

    def _set(self, span: Span, byte: int) -> None:
        if span.nbytes:
            fill(span, byte, self.stream)

    def fill(self, contents: Iterable[np.ndarray]) -> None:
        """Write contents into the input buffers, bf16 ones rounded, in the order of the stream (the next launch might not see a copy
        outside it)."""
        rounded = (round_to(x, "bf16") if t.dtype == "bf16" else np.asarray(x) for t, x in zip(self.in_types, contents))
        self.fill_bits(to_device(x, t) for t, x in zip(self.in_types, rounded))

    def fill_bits(self, contents: Iterable[np.ndarray]) -> None:
        """The same with contents in device form."""
        for span, x in zip(self._ins, contents):
            if span.nbytes:
                upload(span, x, self.stream)

    def fill_blocks(self, blocks: Iterable[np.ndarray]) -> None:
        """Write 1-D blocks in device form into the input buffers, each again and again until its operand is full: one small upload, and
        copies on the device."""
        for span, block in zip(self._ins, blocks):
            done = min(block.nbytes, span.nbytes)
            if done:
                upload(Span(span.address, done), block[: done // block.itemsize], self.stream)
            while done < span.nbytes:
                more = min(done, span.nbytes - done)
                copy(span.address + done, span.address, more, int(self.stream.handle))
                done += more

    def take(self, other: CudaBound) -> None:
        """The contents of another's inputs, in the order of the stream."""
        for span, source in zip(self._ins, other._ins):
            copy(span.address, source.address, span.nbytes, int(self.stream.handle))

    def nudge(self, rng: np.random.Generator) -> None:
        """Move a little of the largest operand to another place in it, in the order of the stream: other contents, nothing uploaded."""
        largest = max(self._ins, key=lambda s: s.nbytes)
        pieces = largest.nbytes // MOVED
        if pieces > 1:
            to, source = (largest.address + MOVED * int(i) for i in rng.choice(pieces, 2, replace=False))
            copy(to, source, MOVED, int(self.stream.handle))

    def again(self, garbage: int) -> None:
        """As `run`, without looking at the guards."""
        self.poison(garbage)
        self.call()

    def poison(self, garbage: int) -> None:
        """Fill outputs and scratch, in the order of the stream."""
        for span, t in zip(self._outs, self.out_types):
            self._set(span, garbage if t.dtype != "bool" else 1)
        self._set(self._scratch, garbage)

    def call(self) -> None:
        """Enqueue once and wait for the stream."""
        self._call(int(self.stream.handle))
        self.stream.synchronize()

    def enqueue(self, stream: Any = None) -> None:
        """Enqueue once on a stream, this one's own by default."""
        self._call(int((stream or self.stream).handle))

    def run(self, garbage: int = 0xFF, *, keep: int | None = None) -> None:
        """Poison outputs (but number `keep`) and scratch (0xFF: NaN in every float type), call once, look at the guards."""
        for i, (span, t) in enumerate(zip(self._outs, self.out_types)):
            if i != keep:
                self._set(span, garbage if t.dtype != "bool" else 1)
        self._set(self._scratch, garbage)
        self.call()
        self.check_guards()

    def check_guards(self) -> None:
        """GraphError if a byte outside the operands was written."""
        host = download(Span(self._arena.address, self._arena.nbytes), (self._arena.nbytes,), np.uint8)
        free = np.ones(host.size, bool)
        for span in (*self._ins, *self._outs, self._scratch):
            start = span.address - self._arena.address
            free[start : start + span.nbytes] = False
        bad = np.flatnonzero(free & (host != PATTERN))
        if bad.size:
            at = int(bad[0]) + self._arena.address
            near = min((*self._ins, *self._outs, self._scratch), key=lambda s: max(s.address - at, at - s.address - s.nbytes))
            raise GraphError("the kernel wrote outside its operands", expected="every write inside an output or scratch",
                             came=f"{bad.size} bytes, the first {at - near.address} after the start of an operand of {near.nbytes} bytes")

    @property
    def ins(self) -> list[np.ndarray]:
        """What the input buffers hold now."""
        self.stream.synchronize()
        return [self._read(s, t) for s, t in zip(self._ins, self.in_types)]

    @property
    def outs(self) -> list[np.ndarray]:
        """What the output buffers hold now; waits for nothing but the gates' stream."""
        return [self._read(s, t) for s, t in zip(self._outs, self.out_types)]

    def bits(self) -> list[np.ndarray]:
        """The outputs in their device form: cheapest to compare."""
        return [download(s, *device_bytes(t)) for s, t in zip(self._outs, self.out_types)]

    def _read(self, span: Span, t: TensorType) -> np.ndarray:
        if not span.nbytes:
            return from_device(np.empty(*device_bytes(t)), t)
        return from_device(download(span, *device_bytes(t)), t)


def bind(component: Component, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Any, *, offset: int = 0,
         share: tuple[int, int] | None = None) -> CudaBound:
    """See CudaBound."""
    return CudaBound(component, ins, outs, attrs, offset=offset, share=share)
