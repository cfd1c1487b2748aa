"""When a run on a device is looked at: spot checks move apart from a session's first step on, and leave alone a profiled step, and one
behind which the device's clock is set. Floor 6."""

from __future__ import annotations

from alpha.train.spots import Spots


class PacedSpots(Spots):
    """Spot checks as the loop asks for them."""

    _before: tuple[int, int] | None = None
    """ns and components of a first checked step, until an unchecked one has said how long a step takes."""

    _unhashed = False
    """Whether the last step was left without hashes so that the clock could be set."""

    def begin(self, step: int) -> None:
        """A step begins. What runs beside a profiled one is waited for: an instrument would take its kernels for those of the step."""
        if self.on and self._instrumented:
            self._executor.digests.wait()
        super().begin(step)

    def wrote(self, step: int) -> None:
        """The update of `step` has just been handed over. Nothing is hashed behind a profiled step, so what follows begins without; nor
        where no step may be handed over ahead, for the device's clock is set on a stream with nothing on it, and until it was the device
        waits for the host behind each step. Where a reason that stays forbids that, every second step is hashed."""
        self._unhashed = self._executor.digests.late and not self._executor.runs_ahead and not self._unhashed
        if self.on and (self._instrumented or self._unhashed):
            self._hashes.clear()
        else:
            super().wrote(step)

    def took(self, ns: int) -> None:
        """What the step took, checks included."""
        if self._looked and not self._step_ns:
            self._before = self._ns, self._looked
        super().took(ns)
        if self._before and self._step_ns:
            (self._ns, self._looked), self._before = self._before, None
            self._space()

    @property
    def _instrumented(self) -> bool:
        """Whether a device's kernels are counted in this step."""
        return self._executor.digests.late and self._executor.recorder.profiling
