"""What saves add to a run's steps: foretold before the first step by a rehearsal, measured at each save. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

LINE = 0.02
"""Share of a mean step that a save may add to the steps until the next one, before its excess is told."""


@dataclass
class Stalls:
    """Of one rank and session. `clock`: ns; `nbytes`: what a save copies; `foretold_ns`: what a rehearsed one took, None where no save has
    steps behind it; `measured_ns`: of each save what it added to the steps from it to the next one."""

    clock: Callable[[], int]
    nbytes: int = 0
    foretold_ns: int | None = None
    measured_ns: list[int] = field(default_factory=list)

    def rehearse(self, act: Callable[[], int]) -> None:
        """`act`: all that a step waits for at a save; returns the bytes that it copied. It runs twice, for the first time takes the memory
        that every later one finds; the second is what saves will take."""
        for _ in range(2):
            began = self.clock()
            self.nbytes = act()
            self.foretold_ns = self.clock() - began

    def save(self) -> None:
        """A save with steps behind it begins: what is added from here on is its own."""
        self.measured_ns.append(0)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """The steps wait for the latest save; before the first one nothing is counted."""
        began = self.clock()
        yield
        if self.measured_ns:
            self.measured_ns[-1] += self.clock() - began

    def before(self) -> str:
        """What is foretold, before the first step; '' where nothing is."""
        if self.foretold_ns is None:
            return ""
        return f"{self.nbytes / 1e6:,.1f} MB copied at each, {self.foretold_ns / 1e6:,.1f} ms foretold"

    def after(self, step_ns: float) -> str:
        """Foretold beside measured, as shares of a mean step of `step_ns`, and how far the latter is above LINE; '' where no save has been
        rehearsed or made."""
        if self.foretold_ns is None or not self.measured_ns or not step_ns > 0:
            return ""
        took = float(median(self.measured_ns))
        share = took / step_ns
        return (f"{len(self.measured_ns)} with steps behind: {self.foretold_ns / 1e6:,.1f} ms foretold, {took / 1e6:,.1f} ms measured "
                f"(median), {self.foretold_ns / step_ns:.1%} and {share:.1%} of a mean step"
                + (f"; {share - LINE:.1%} above the line of {LINE:.0%}" if share > LINE else ""))
