"""When every kernel, copy and fill began and ended on the device, and when the host waited for it: CUPTI's activity records. Floor 3.

An instrument that a run may do without: the extra `cupti` (packages cupti-python and nvidia-cuda-cupti). While it is on, kernels take
longer to start, so it is on during profiled steps only. Times are turned into those of `time.perf_counter_ns` by two readings of both
clocks, one when it is turned on and one when it is turned off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from alpha.cuda_runtime import _bindings
from alpha.errors import MachineError

PROBES = 20
EXTRA = "install the extra, in the checkout: python3 -m pip install --editable '.[cupti]'"
BUFFER = 8 << 20
"""Bytes of one buffer of records: some 40,000."""


@dataclass(frozen=True)
class Record:
    """kind: 'kernel', 'copy', 'fill' or 'wait'. start, stop: ns of time.perf_counter_ns. nbytes: of a copy or fill."""

    kind: str
    name: str
    start: int
    stop: int
    nbytes: int = 0


class Instrument(Protocol):
    """What times kernels. `text`: what it is, as run_metadata names it."""

    text: str

    def start(self) -> None:
        """Records are kept from now on. MachineError where it refuses."""

    def stop(self) -> list[Record]:
        """No more; all that were complete, by their start. The device must have ended what is to be seen. MachineError where it refuses."""


_NAMES = {"HTOD": "HtoD", "DTOH": "DtoH", "DTOD": "DtoD", "HTOH": "HtoH", "PTOP": "PtoP"}
_WAITS = {"EVENT_SYNCHRONIZE": "wait for an event", "STREAM_SYNCHRONIZE": "wait for a stream", "CONTEXT_SYNCHRONIZE": "wait for the device"}


class Cupti:
    """The instrument. `opened` makes the one of this process: callbacks can be registered once."""

    def __init__(self, module: Any, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        kind = module.ActivityKind
        self._cupti, self._clock = module, clock
        self._on = {kind.CONCURRENT_KERNEL: self._kernel, kind.MEMCPY: self._copy, kind.MEMSET: self._fill,
                    kind.SYNCHRONIZATION: self._wait}
        self._kinds = {int(k): make for k, make in self._on.items()}
        self._records: list[tuple[str, str, int, int, int]] = []
        self._from = self._moment()
        module.activity_register_callbacks(lambda: (BUFFER, 0), self._completed)
        self.text = f"CUPTI activity records, cupti-python {_version('cupti-python')}"

    def start(self) -> None:
        self._records.clear()
        for kind in self._on:
            self._ask("activity_enable", kind)
        self._from = self._moment()

    def stop(self) -> list[Record]:
        self._ask("activity_flush_all", 1)  # forced: a copy for the next step may still run, and must not hold back the rest
        for kind in self._on:
            self._ask("activity_disable", kind)
        (host, device), (host_now, device_now) = self._from, self._moment()
        rate = (host_now - host) / max(1, device_now - device)
        found = [Record(k, name, host + round((start - device) * rate), host + round((stop - device) * rate), n)
                 for k, name, start, stop, n in self._records if stop > start]
        self._records.clear()
        return sorted((r for r in found if r.start >= host), key=lambda r: (r.start, r.stop))

    def _ask(self, call: str, argument: Any) -> None:
        try:
            getattr(self._cupti, call)(argument)
        except Exception as error:  # cuptiError, a class of the package
            raise MachineError("CUPTI refuses", came=f"{call}({argument}): {type(error).__name__}: {error}",
                               expected="a process without another profiler", do="run without it, or without the extra") from error

    def _moment(self) -> tuple[int, int]:
        """The host's clock and CUPTI's at one moment: the shortest of PROBES tries."""
        best, pair = 1 << 62, (0, 0)
        for _ in range(PROBES):
            before = self._clock()
            stamp = int(self._cupti.get_timestamp())
            after = self._clock()
            if after - before < best:
                best, pair = after - before, ((before + after) // 2, stamp)
        return pair

    def _completed(self, activities: list[Any]) -> None:
        """A buffer is full, or was flushed. Its records live no longer than this call."""
        for activity in activities:
            make = self._kinds.get(int(activity.kind))
            if make is not None:
                found = make(activity)
                if found is not None:
                    self._records.append(found)

    def _kernel(self, a: Any) -> tuple[str, str, int, int, int]:
        return "kernel", str(a.name), int(a.start), int(a.end), 0

    def _copy(self, a: Any) -> tuple[str, str, int, int, int]:
        name = self._cupti.ActivityMemcpyKind(a.copy_kind).name
        return "copy", _NAMES.get(name, name), int(a.start), int(a.end), int(a.bytes)

    def _fill(self, a: Any) -> tuple[str, str, int, int, int]:
        return "fill", "memset", int(a.start), int(a.end), int(a.bytes)

    def _wait(self, a: Any) -> tuple[str, str, int, int, int] | None:
        """A wait of the host; a stream's wait for an event is none."""
        name = _WAITS.get(self._cupti.ActivitySynchronizationType(a.type).name)
        return None if name is None else ("wait", name, int(a.start), int(a.end), 0)


@functools.cache
def opened() -> Instrument | str:
    """The instrument, ready (its first start, which is slow, is over); or why there is none."""
    try:
        _preload()
        instrument = Cupti(importlib.import_module("cupti.cupti"))
        instrument.start()
        instrument.stop()
    except ImportError as error:
        return f"no CUPTI: {error} ({EXTRA})"
    except Exception as error:  # cuptiError, a class of the package; a library that cannot be loaded
        return f"CUPTI does not start: {type(error).__name__}: {error}"
    return instrument


def _preload() -> None:
    """Load libcupti from the wheel nvidia-cuda-cupti, where the loader would not find it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("cu*/lib/libcupti.so.*")):
            _bindings.library(path)
            return


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown release"
