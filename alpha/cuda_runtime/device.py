"""The GPU of this process: one primary context per device (shared with other libraries in it), streams, events, limits."""

from __future__ import annotations

import atexit
import functools
from dataclasses import dataclass
from typing import Any

from alpha.cuda_runtime import _bindings
from alpha.errors import MachineError

COMPUTE_CAPABILITY = (9, 0)
MINIMUM_DRIVER = 13000  # CUDA 13.0, as cuDriverGetVersion counts


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a device is. Sizes in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    memory_bytes: int
    driver: int


class Device:
    """An opened device whose context is current on the opening thread. Use `Device.open`."""

    def __init__(self, index: int, properties: Properties, context: Any, cuda: Any) -> None:
        self.index, self.properties = index, properties
        self._context, self._cuda = context, cuda

    @staticmethod
    def open(index: int = 0) -> Device:
        """Opens GPU `index` and makes its primary context current. The same object each time.

        MachineError: no binding, no driver, no GPU, driver too old, or an architecture that is not Hopper.
        """
        device = _open(index)
        device.make_current()
        return device

    def make_current(self) -> None:
        """Makes this device's context current on the calling thread."""
        current = self._cuda.Context.get_current()
        if current is None or current.handle != self._context.handle:
            self._context.push()
            atexit.register(self._context.pop)  # pycuda aborts the process if a context is still current at its end

    def stream(self) -> Any:
        """A new non-blocking stream (a pycuda Stream; `.handle` is the integer that launches take)."""
        return self._cuda.Stream(1)

    def event(self) -> Any:
        """A new event with timing (a pycuda Event: `.record(stream)`, `.synchronize()`, `.time_since(earlier)` in ms)."""
        return self._cuda.Event()

    def synchronize(self) -> None:
        """Waits for all work of the context; errors of earlier launches surface here."""
        self._cuda.Context.synchronize()

    def free_memory(self) -> int:
        """Free bytes of device memory now."""
        return int(self._cuda.mem_get_info()[0])


@functools.cache
def _open(index: int) -> Device:
    cuda = _bindings.pycuda_driver()
    try:
        cuda.init()
        count = cuda.Device.count()
    except Exception as error:
        raise MachineError(
            "the NVIDIA driver does not start",
            came=f"{type(error).__name__}: {error}",
            expected="a working driver and at least one GPU",
            do="run `nvidia-smi`; load the driver, or use the CPU backend",
        ) from error
    if not 0 <= index < count:
        raise MachineError("no such GPU", came=f"device {index}", expected=f"0..{count - 1}" if count else "at least one GPU")
    found = cuda.Device(index)
    version = int(cuda.get_driver_version())
    if version < MINIMUM_DRIVER:
        raise MachineError("the NVIDIA driver is too old", came=version, expected=f"{MINIMUM_DRIVER} or newer", do="update it")
    capability = tuple(found.compute_capability())
    if capability != COMPUTE_CAPABILITY:
        raise MachineError(
            "this GPU is not a Hopper GPU",
            came=f"{found.name()}, compute capability {capability[0]}.{capability[1]}",
            expected="compute capability 9.0 (H100, H200): the kernels are built for sm_90a alone",
            do="use such a machine, or the CPU backend",
        )
    attribute = cuda.device_attribute
    properties = Properties(
        name=found.name(),
        capability=COMPUTE_CAPABILITY,
        multiprocessors=found.get_attribute(attribute.MULTIPROCESSOR_COUNT),
        shared_per_block=found.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        memory_bytes=found.total_memory(),
        driver=version,
    )
    return Device(index, properties, found.retain_primary_context(), cuda)


def stream_handle(stream: Any) -> int:
    """The integer handle of a stream: None is the default stream 0; integers pass; pycuda streams give `.handle`."""
    if stream is None:
        return 0
    return stream if isinstance(stream, int) else int(stream.handle)
