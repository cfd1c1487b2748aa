"""Captures what is launched on a stream into a CUDA graph, and replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.device import stream_handle


class Graph:
    """An instantiated graph. Replaying it repeats the captured launches with the captured arguments and addresses."""

    def __init__(self, executable: Any, nodes: int) -> None:
        self._executable, self.nodes = executable, nodes

    def launch(self, stream: Any = None) -> None:
        """Replays on `stream`. CudaError if the driver refuses."""
        _bindings.check("cuGraphLaunch", _bindings.driver().cuGraphLaunch(self._executable, stream_handle(stream)))

    def destroy(self) -> None:
        """Frees the executable graph; it may not be running."""
        if self._executable is not None:
            _bindings.check("cuGraphExecDestroy", _bindings.driver().cuGraphExecDestroy(self._executable))
            self._executable = None


def capture(record: Callable[[Any], None], stream: Any, flags: int = 0) -> Graph:
    """Runs `record(stream)` while `stream` (not the default one) captures, and instantiates the result, with the driver's `flags`.

    Other streams join by waiting on an event recorded in `stream`, and must be joined back before `record` returns. An
    exception in `record` ends the capture and passes through; CudaError if something illegal was captured.
    """
    driver = _bindings.driver()
    handle = stream_handle(stream)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _bindings.check("cuStreamBeginCapture", driver.cuStreamBeginCapture(handle, mode))
    try:
        record(stream)
    except BaseException:
        driver.cuStreamEndCapture(handle)
        raise
    graph = _bindings.check("cuStreamEndCapture", driver.cuStreamEndCapture(handle))
    try:
        _, nodes = _bindings.check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, 0))
        return Graph(_bindings.check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, flags)), int(nodes))
    finally:
        driver.cuGraphDestroy(graph)
