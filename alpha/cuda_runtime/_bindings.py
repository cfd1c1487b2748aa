"""The two Python bindings of the driver, imported on first use, so that everything else works on a machine without a GPU.

pycuda gives the context, memory, streams and events; cuda-bindings gives what pycuda lacks: launches with parameters by
value, tensor maps, graphs. `driver()` and `pycuda_driver()` raise MachineError naming what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from alpha.errors import AlphaError, MachineError


class CudaError(AlphaError):
    """A driver call failed; `what` names the call, `came` the driver's error."""


def _load(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that finds no driver library fails here too, with exceptions of its own
        raise MachineError(
            f"the package {package} cannot be used",
            came=f"{type(error).__name__}: {error}",
            expected=f"`import {module}` to work (it needs the NVIDIA driver library libcuda.so.1)",
            do=f"on a machine with an NVIDIA driver run `python3 -m pip install {package}`; elsewhere use the CPU backend",
        ) from error


def library(path: Path | None) -> Any:
    """A shared library, or what this process has loaded already (None). The one place in Alpha that opens one; OSError if it cannot be."""
    return ctypes.CDLL(None if path is None else str(path))


def pycuda_driver() -> Any:
    """`pycuda.driver`, not yet initialised. MachineError if it cannot be imported."""
    return _load("pycuda.driver", "pycuda")


@functools.cache
def driver() -> Any:
    """`cuda.bindings.driver`. MachineError if it cannot be imported or finds no driver library."""
    module = _load("cuda.bindings.driver", "cuda-bindings")
    try:
        module.cuDriverGetVersion()
    except RuntimeError as error:
        raise MachineError(
            "the NVIDIA driver library is missing",
            came=str(error),
            expected="libcuda.so.1 on the library path",
            do="install the NVIDIA driver, or use the CPU backend",
        ) from error
    return module


def check(call: str, result: tuple[Any, ...]) -> Any:
    """Unpacks what a cuda-bindings call returned: the value (None, one, or a tuple). CudaError if the driver refused."""
    status = result[0]
    if int(status) != 0:
        _, name = driver().cuGetErrorName(status)
        _, text = driver().cuGetErrorString(status)
        words = f"{(name or b'?').decode()} ({int(status)}): {(text or b'').decode()}"
        raise CudaError(f"the driver call {call} failed", came=words, do=_advice(int(status)))
    rest = result[1:]
    return None if not rest else rest[0] if len(rest) == 1 else rest


def _advice(status: int) -> str:
    return {
        1: "check grid, block, shared memory and pointer alignment against the kernel's envelope",
        2: "free device memory: `nvidia-smi` lists who holds it; `alpha plan` says what a run needs",
        209: "the cubin was built for another architecture; rebuild it for this GPU",
        700: "an earlier kernel read or wrote outside its buffers; run it under compute-sanitizer",
        701: "the kernel asks for more registers or shared memory than an SM has",
        715: "an earlier kernel executed an illegal instruction (misaligned tensor map or descriptor, wrong architecture)",
        716: "an earlier kernel used a misaligned address",
        719: "an earlier kernel failed; its context is lost, restart the process",
    }.get(status, "errors of earlier launches surface here too; synchronise after each launch to find the first")
