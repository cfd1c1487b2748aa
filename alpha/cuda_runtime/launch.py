"""Loads cubins, each held against the manifest, and launches their kernels.

Arguments are built once; a prepared launch is then one driver call."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from alpha.cuda_runtime import _bindings, manifest
from alpha.cuda_runtime.compile import Cubin, Source
from alpha.cuda_runtime.device import Device, stream_handle
from alpha.cuda_runtime.memory import Span
from alpha.cuda_runtime.tensormap import TensorMap
from alpha.errors import GraphError, ShapeError, VerdictError

Dim3 = tuple[int, int, int]


class Kernel:
    """One kernel of a cubin, loaded into the current context.

    `shared_bytes` is the dynamic shared memory of every launch. GraphError if the cubin has no such kernel; ShapeError if it
    asks for more shared memory than the device grants.
    """

    def __init__(self, cubin: Cubin, name: str, *, shared_bytes: int = 0) -> None:
        if name not in cubin.resources:
            raise GraphError(f"{cubin.source} has no kernel of this name", came=name, expected=sorted(cubin.resources))
        limit = Device.open().properties.shared_per_block
        if shared_bytes + cubin.resources[name].static_shared > limit:
            raise ShapeError(f"kernel {name} asks for too much shared memory", came=shared_bytes, expected=f"at most {limit} bytes")
        driver = _bindings.driver()
        self.cubin, self.name, self.shared_bytes = cubin, name, shared_bytes
        self.function = _bindings.check(f"cuModuleGetFunction({name})", driver.cuModuleGetFunction(_module(cubin), name.encode()))
        if shared_bytes + cubin.resources[name].static_shared > 48 * 1024:
            # all the device grants: the function is shared by every Kernel of this cubin and name
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            most = limit - cubin.resources[name].static_shared
            _bindings.check("cuFuncSetAttribute", driver.cuFuncSetAttribute(self.function, attribute, most))

    def prepare(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[Any],
        *,
        overlap_previous: bool = False,
    ) -> Launch:
        """A launch with these arguments. Each is a ctypes scalar or Structure, a NumPy scalar, a Span (its address) or a
        TensorMap (128 bytes by value); plain Python numbers are refused because their width would be a guess.

        `overlap_previous` allows programmatic dependent launch.
        """
        return Launch(self, grid, block, arguments, overlap_previous)


_journal: list[str] | None = None


@contextmanager
def noted() -> Iterator[list[str]]:
    """Within it the name of each kernel that is launched, or recorded into a graph, is appended to the list. Blocks do not nest."""
    global _journal
    found: list[str] = []
    _journal = found
    try:
        yield found
    finally:
        _journal = None


def note(name: str) -> None:
    """A kernel of this name is launched."""
    if _journal is not None:
        _journal.append(name)


class Launch:
    """A kernel with grid, block and arguments; call it with a stream to run it. Reusable, and safe to record into a graph."""

    def __init__(
        self, kernel: Kernel, grid: Dim3, block: Dim3, arguments: Sequence[Any], overlap_previous: bool
    ) -> None:
        if min(*grid, *block) < 1 or block[0] * block[1] * block[2] > 1024 or max(grid[1:]) > 65535:
            raise ShapeError(f"{kernel.name}: impossible launch", came=f"grid {grid} block {block}", expected="1..1024 threads a block")
        self.kernel, self.grid, self.block = kernel, grid, block
        self._driver = _bindings.driver()
        self._values = [_value(argument, kernel.name, place) for place, argument in enumerate(arguments)]
        self._pointers = (ctypes.c_void_p * max(len(self._values), 1))(*(ctypes.addressof(value) for value in self._values))
        self._address = ctypes.addressof(self._pointers)
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = kernel.shared_bytes
        attributes = []
        if overlap_previous:
            serial = self._driver.CUlaunchAttribute()
            serial.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            serial.value.programmaticStreamSerializationAllowed = 1
            attributes.append(serial)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config = config

    def __call__(self, stream: Any = None) -> None:
        """Launches on `stream` (None: the default stream). CudaError if the driver refuses."""
        note(self.kernel.name)
        self._config.hStream = stream_handle(stream)
        result = self._driver.cuLaunchKernelEx(self._config, self.kernel.function, self._address, 0)
        if int(result[0]) != 0:
            _bindings.check(f"cuLaunchKernelEx({self})", result)

    def __str__(self) -> str:
        return f"{self.kernel.name} grid {self.grid} block {self.block} shared {self.kernel.shared_bytes}"


def _value(argument: Any, kernel: str, place: int) -> Any:
    """`argument` as a ctypes object that owns its bytes."""
    if isinstance(argument, Span):
        return ctypes.c_uint64(argument.address)
    if isinstance(argument, TensorMap):
        return argument.buffer
    if isinstance(argument, np.generic):
        return (ctypes.c_ubyte * argument.nbytes).from_buffer_copy(argument.tobytes())
    if isinstance(argument, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return argument
    raise ShapeError(
        f"argument {place} of kernel {kernel} has no fixed width",
        came=f"{argument!r} ({type(argument).__name__})",
        expected="a ctypes scalar or Structure, a NumPy scalar, a Span or a TensorMap",
        do="write np.int32(n) or ctypes.c_uint64(address)",
    )


LOADED: dict[Source, str] = {}
"""Every compiled file that this process has loaded -> sha256 of the bytes that the driver was given."""


@functools.cache
def _loaded(source: Source, path: str, binary_digest: str) -> Any:
    """The one place where machine code is handed to the driver. VerdictError where its bytes are not those that evidence binds to."""
    with open(path, "rb") as file:
        code = file.read()
    given, known = hashlib.sha256(code).hexdigest(), manifest.binary_digest(source)
    if given != known:
        raise VerdictError(
            f"the machine code of {source} is not that of the evidence",
            came=f"{path}: {given[:16]}",
            expected=f"{known[:16]}, from baselines/cubins.json or, for sources that it does not know, from compiling them",
            do="delete .alpha/cubins and build again with the pinned compiler (`alpha kernels check`)",
        )
    module = _bindings.check("cuModuleLoadData", _bindings.driver().cuModuleLoadData(code))
    LOADED[source] = given
    return module


def _module(cubin: Cubin) -> Any:
    return _loaded(cubin.source, str(cubin.path), cubin.binary_digest)
