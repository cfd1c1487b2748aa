"""The SM clock of a GPU and why it is not higher, read through NVML (NVIDIA's own binding, nvidia-ml-py) while work runs on it."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from typing import Any

from alpha.cuda_runtime import _bindings
from alpha.errors import MachineError


@dataclass(frozen=True)
class Reading:
    """`sm_mhz`: NaN where the clock could not be read. `reasons`: NVML's bit mask of throttle reasons (profile/noise.py judges both).
    `watts`, mean of the last second, and degrees `celsius`: NaN where nobody asked (`Clocks.sense`)."""

    sm_mhz: float
    reasons: int
    watts: float = float("nan")
    celsius: float = float("nan")


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

    def sense(self, reading: Reading) -> Reading:
        """The same with power and temperature now; NaN where they cannot be read."""
        library, found = self._library, {}
        for name, read, scale in (("watts", lambda: library.nvmlDeviceGetPowerUsage(self._handle), 1e-3),
                                  ("celsius", lambda: library.nvmlDeviceGetTemperature(self._handle, library.NVML_TEMPERATURE_GPU), 1.0)):
            try:
                found[name] = read() * scale
            except library.NVMLError:
                found[name] = float("nan")
        return replace(reading, **found)

    def joules(self) -> float:
        """What the GPU has taken since its driver was loaded; the counter moves at times of its own. MachineError where there is none."""
        try:
            return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3
        except self._library.NVMLError as error:
            raise MachineError("NVML does not count the joules of this GPU", came=str(error), expected="a GPU of Volta or later",
                               do="leave out what needs them") from error


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
