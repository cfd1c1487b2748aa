"""The SM clock of a GPU and why it is not higher, read through NVML (NVIDIA's own binding, nvidia-ml-py) while work runs on it."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from alpha.cudart import _bindings
from alpha.errors import MachineError


@dataclass(frozen=True)
class Reading:
    """`sm_mhz`: NaN where the clock could not be read. `reasons`: NVML's bit mask of throttle reasons (profile/noise.py judges both)."""

    sm_mhz: float
    reasons: int


class Clocks:
    """Reads one GPU. Use `Clocks.open`; one reading takes some tens of microseconds of the host."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def open(index: int = 0) -> Clocks:
        """The GPU that the driver counts as `index`; NVML is asked by its PCI address, because it counts on its own. MachineError without
        nvidia-ml-py, or where NVML does not know the GPU."""
        library = _library()
        cuda = _bindings.pycuda_driver()
        cuda.init()  # whoever asks first
        address = str(cuda.Device(index).pci_bus_id())
        try:
            return Clocks(library, library.nvmlDeviceGetHandleByPciBusId(address.encode()))
        except library.NVMLError as error:
            raise MachineError("NVML does not know this GPU, so its clock cannot be read", came=f"{address}: {error}",
                               expected="the GPU that `nvidia-smi` lists", do="run `nvidia-smi`; in a container, give it NVML") from error

    def read(self) -> Reading:
        """The clock and the reasons now. A reading that fails is no reading: NaN, which counts as throttled."""
        library = self._library
        try:
            return Reading(float(library.nvmlDeviceGetClockInfo(self._handle, library.NVML_CLOCK_SM)),
                           int(library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)))
        except library.NVMLError:
            return Reading(float("nan"), 0)


@functools.cache
def _library() -> Any:
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
        return library
    except Exception as error:  # without a driver it fails with an exception of its own
        raise MachineError("the GPU's clock cannot be read, so no time measured on it can be believed",
                           came=f"{type(error).__name__}: {error}", expected="`import pynvml` and nvmlInit to work",
                           do="on a machine with an NVIDIA driver run `python3 -m pip install nvidia-ml-py`") from error
