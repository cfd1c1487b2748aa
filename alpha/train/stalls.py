"""What saves add to a run's steps: foretold by a rehearsal before the first step, measured at each save. Floor 6.

Where steps wait while the state is copied, a save adds what it takes. Where it is copied *beside* a step of a device, it adds what the copy
takes longer than the step's microbatches, or the host longer than that step and what was handed over ahead behind it; how long those take,
the steps before the save tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median, variance

from alpha.profile.noise import WARM_UP

LINE = 0.02
"""Share of a mean step that a save may add to the steps until the next one, before its excess is told."""


@dataclass
class Stalls:
    """Of one rank and session. `clock`: ns; `beside`: the state is copied beside steps; `nbytes`: what a save copies; `host_ns`,
    `begin_ns`, `copy_ns`: of a rehearsed save what the host did for it, how long it began to copy, and how long until the copy was there,
    None where no save has steps behind it; `waits_ns`: of each save what the host kept the steps waiting for, and `under_way` the
    usual steps that ran while it was under way; `quiet`: usual steps without a save. Both are told apart by whether a step was handed over
    ahead, for one that was not begins with a device that has nothing to do. `microbatches`: what they took of quiet steps."""

    clock: Callable[[], int]
    beside: bool = False
    nbytes: int = 0
    host_ns: int | None = None
    begin_ns: int | None = None
    copy_ns: int | None = None
    waits_ns: list[int] = field(default_factory=list)
    under_way: list[list[tuple[bool, int]]] = field(default_factory=list)
    quiet: dict[bool, list[int]] = field(default_factory=lambda: {True: [], False: []})
    microbatches: list[int] = field(default_factory=list)
    steps: int = 0

    def rehearse(self, act: Callable[[], None], copy: Callable[[], int], wait: Callable[[], None]) -> None:
        """`act`: what the host does at a save; `copy`: begins to copy the state, returns how many bytes; `wait`: until they are there. All
        of it twice, for the first time takes the memory that every later one finds; the second is what saves will take."""
        for _ in range(2):
            began = self.clock()
            act()
            begun = self.clock()
            self.host_ns = begun - began
            self.nbytes = copy()
            self.begin_ns = self.clock() - begun
            wait()
            self.copy_ns = self.clock() - begun

    def stepped(self, ns: int, micro_ns: int, *, ahead: bool, saving: bool, usual: bool) -> None:
        """A step beside which a save may be copied took `ns`, its microbatches `micro_ns` of them. `ahead`: it was handed over ahead;
        `saving`: a save was under way; `usual`: else it was a step like others. Those that were not are left out, and so are the first
        ones: what they took more has other reasons."""
        self.steps += 1
        if not (self.beside and usual and self.steps > WARM_UP):
            return
        if saving and self.under_way:
            self.under_way[-1].append((ahead, ns))
        elif not saving:
            self.quiet[ahead].append(ns)
            self.microbatches.append(micro_ns)

    def save(self) -> None:
        """A save with steps behind it begins: what is added from here on is its own."""
        self.waits_ns.append(0)
        self.under_way.append([])

    @contextmanager
    def adding(self) -> Iterator[None]:
        """The steps wait for the latest save; before the first one nothing is counted."""
        began = self.clock()
        yield
        if self.waits_ns:
            self.waits_ns[-1] += self.clock() - began

    @property
    def foretold_ns(self) -> int | None:
        """What a save will add. None before it is known: where no save was rehearsed, or no usual step has been timed yet."""
        if self.host_ns is None or self.begin_ns is None or self.copy_ns is None:
            return None
        host = self.host_ns + self.begin_ns
        if not self.beside:
            return host
        if not self.microbatches:
            return None
        micros = round(median(self.microbatches))
        beside = round(median(self.quiet[True])) + micros if self.quiet[True] else round(median(self.quiet[False]))
        return max(0, self.copy_ns - micros, host - beside)

    @property
    def measured_ns(self) -> list[int]:
        """What each save added to the steps from it to the next one: what they waited, and beside steps of a device what those took longer
        than the mean usual one. Steps are skewed, so that a sum of them exceeds as many medians. Saves beside steps with which no usual one
        can be compared are left out."""
        if not self.beside:
            return list(self.waits_ns)
        usual = {ahead: fmean(steps) for ahead, steps in self.quiet.items() if steps}
        return [waited + round(sum(ns - usual[ahead] for ahead, ns in steps)) for waited, steps in zip(self.waits_ns, self.under_way)
                if all(ahead in usual for ahead, _ in steps)]

    @property
    def spread_ns(self) -> float | None:
        """Twice the standard error of the mean of `measured_ns`: of the saves, and of the usual steps that they are compared with. None of
        fewer than two saves."""
        added = self.measured_ns
        if len(added) < 2:
            return None
        square = variance(added) / len(added)
        for ahead, steps in self.quiet.items():
            compared = sum(a == ahead for save in self.under_way for a, _ in save) / len(self.under_way) if self.beside else 0.0
            if compared and len(steps) > 1:
                square += compared**2 * variance(steps) / len(steps)
        return 2.0 * sqrt(square)

    def facts(self) -> dict[str, int]:
        """For the run's metadata: what is foretold, and beside steps of a device the mean of what was measured, with its `spread_ns`."""
        found = {} if self.foretold_ns is None else {"save_foretold_ns": self.foretold_ns}
        if self.beside and self.copy_ns is not None:
            found["save_copy_ns"] = self.copy_ns
            if self.measured_ns:
                found["save_measured_ns"] = round(fmean(self.measured_ns))
            if self.spread_ns is not None:
                found["save_spread_ns"] = round(self.spread_ns)
        return found

    def before(self) -> str:
        """What is foretold, before the first step; '' where nothing is."""
        if self.host_ns is None or self.begin_ns is None or self.copy_ns is None:
            return ""
        host = (self.host_ns + self.begin_ns) / 1e6
        if not self.beside:
            return f"{self.nbytes / 1e6:,.1f} MB copied at each, {host:,.1f} ms foretold"
        return (f"{self.nbytes / 1e6:,.1f} MB copied at each to page-locked memory, in {self.copy_ns / 1e6:,.1f} ms beside the next step's "
                f"microbatches, {host:,.1f} ms of the host's beside all that the device was handed; it waits for what lasts longer")

    def at_first(self) -> str:
        """What the first save beside steps will add, from the steps before it; '' where that was told, or cannot be."""
        if not self.beside or self.foretold_ns is None or len(self.waits_ns) != 1:
            return ""
        return f"{self.foretold_ns / 1e6:,.1f} ms foretold beside microbatches of {median(self.microbatches) / 1e6:,.1f} ms"

    def after(self, step_ns: float) -> str:
        """Foretold beside measured, as shares of a mean step of `step_ns`, and how far the latter is above LINE; '' where no save has been
        rehearsed or made."""
        if self.foretold_ns is None or not self.measured_ns or not step_ns > 0:
            return ""
        took, spread = fmean(self.measured_ns), self.spread_ns
        share = took / step_ns
        return (f"{len(self.measured_ns)} with steps behind: {self.foretold_ns / 1e6:,.1f} ms foretold, {took / 1e6:,.1f} ms measured "
                + (f"(mean, give or take {spread / 1e6:,.1f} ms), " if spread is not None else "(one), ")
                + f"{self.foretold_ns / step_ns:.1%} and {share:.1%} of a mean step"
                + (f"; {share - LINE:.1%} above the line of {LINE:.0%}" if share > LINE else ""))
