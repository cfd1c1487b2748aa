"""A stream beside compute: one thread that runs calls in the order in which they are handed over. Floor 4."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np


class Stream:
    """Runs calls one after the other, beside the thread that gives them. What is given after a call that failed does not run; the error is
    raised in whoever waits next, once. `close` ends the thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._given = self._ended = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True, name=name)
        self._thread.start()

    def _loop(self) -> None:
        with np.errstate(all="ignore"):  # as on the workers: `finite` and replay are what looks at values
            while (call := self._calls.get()) is not None:
                error: BaseException | None = None
                if self._error is None:
                    try:
                        call()
                    except BaseException as failed:  # handed to whoever waits
                        error = failed
                with self._changed:
                    self._error = self._error or error
                    self._ended += 1
                    self._changed.notify_all()

    def give(self, call: Callable[[], None]) -> int:
        """Hand a call over; it begins when all before it have ended. Returns its number, from 1."""
        self._given += 1
        self._calls.put(call)
        return self._given

    def wait(self, number: int | None = None) -> None:
        """Return when call `number`, or all that was given, has ended. Raises the first error of any call, when none runs any more."""
        number = self._given if number is None else number
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= number or self._error is not None)
            if self._error is not None:
                self._changed.wait_for(lambda: self._ended == self._given)
                error, self._error = self._error, None
                raise error

    @property
    def stopped(self) -> bool:
        """Whether a call has failed, or all were dropped, and nobody has waited since: no other begins."""
        return self._error is not None

    def drop(self) -> None:
        """Let the call that runs end and no other begin; errors are forgotten. For whoever has failed beside it."""
        with self._changed:
            self._error = self._error or RuntimeError("dropped")
            self._changed.wait_for(lambda: self._ended == self._given)
            self._error = None

    def close(self) -> None:
        """End the thread when its last call has ended."""
        self._calls.put(None)
        self._thread.join()
