"""A stream whose launches go before those of others where both could run, and fences between streams. Floor 3.

Captured kernels keep the priority of their stream, and a graph heeds it where it is instantiated with NODE_PRIORITIES. Blocks of a kernel
that runs are not taken from it: priority decides whose blocks come next. The driver does not say of a graph that it does: 580.159.04 leaves
that flag out of cuGraphExecGetFlags.
"""

from __future__ import annotations

from typing import Any

from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.device import stream_handle

NODE_PRIORITIES = 8
"""CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY."""

_NON_BLOCKING, _NO_TIMING = 1, 2
"""CU_STREAM_NON_BLOCKING; CU_EVENT_DISABLE_TIMING."""


class FirstStream:
    """A new non-blocking stream of the highest priority that the current context has. `least`, `greatest`: its range, of which a lower
    number comes first; `handle`: the integer that launches take."""

    def __init__(self) -> None:
        driver = _bindings.driver()
        self.least, self.greatest = map(int, _bindings.check("cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange()))
        self._stream = _bindings.check("cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority(_NON_BLOCKING, self.greatest))
        self.handle = int(self._stream)
        self.priority = int(_bindings.check("cuStreamGetPriority", driver.cuStreamGetPriority(self._stream)))
        """As the driver has it."""

    def synchronize(self) -> None:
        """Waits for all that was enqueued."""
        _bindings.check("cuStreamSynchronize", _bindings.driver().cuStreamSynchronize(self._stream))

    def close(self) -> None:
        """Gives it back; nothing may be under way."""
        _bindings.check("cuStreamDestroy", _bindings.driver().cuStreamDestroy(self._stream))


class Fence:
    """A place in one stream that another one waits for; may be captured, and used again."""

    def __init__(self) -> None:
        self._event = _bindings.check("cuEventCreate", _bindings.driver().cuEventCreate(_NO_TIMING))

    def record(self, stream: Any) -> None:
        """Everything that was enqueued on `stream` so far."""
        _bindings.check("cuEventRecord", _bindings.driver().cuEventRecord(self._event, stream_handle(stream)))

    def hold(self, stream: Any) -> None:
        """What is enqueued on `stream` from now on waits for the last `record`."""
        _bindings.check("cuStreamWaitEvent", _bindings.driver().cuStreamWaitEvent(stream_handle(stream), self._event, 0))
