"""How far apart two cores stand: by the time of a hop, in which one writes a counter and the other one sees it. Floor 3.

A virtual machine's cores move on the host, from second to second or from hour to hour. Two behind one last level of cache hop in less than
half of the time that two behind different ones need (about 125 and 290 ns on one EPYC of Zen 4). What a long call moves must
cross, but its ceiling is a copy inside a core: far, its share is a third. The ceiling of a short call is the hop: far, its share is
twice as large. So a share below its line says nothing of the code where the cores stand elsewhere than where it was pinned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from alpha.registry.pins import FEWEST, Pin

WITHIN = 1.5
"""Hops whose ratio is at most this one are of one distance. Records said 119 to 138 ns near, beside other work up to 167; far 280 to 329.
So one distance spans 1.40, and two are at least 1.68 apart; this is halfway."""

LEFT = 0.25
"""The least part of a pinned share that another distance leaves: 0.33 was the least seen (a sum of 1 MiB, 0.11 and then 0.036). What is
slower became slower, wherever the cores stand."""

HOP, HOPS = "hop_ns", "hops_ns"
"""In the environment of a record: ns of the fastest hop of all its cases. In that of a pin: the same of each measurement, oldest first."""

ELSEWHERE = "the cores stand at another distance"
"""How the reason begins for which a case is NOT_RUN."""


def same(one: float, other: float) -> bool:
    """Whether two hops (ns) are of one distance."""
    return max(one, other) <= WITHIN * min(one, other)


def hops_of(pin: Pin) -> list[float]:
    """ns of a hop of each measurement; [] where the pin does not say."""
    found = _times(pin.environment.get(HOPS, ""))
    return found if len(found) == len(pin.times) else []


def together(hops: Sequence[float]) -> list[int]:
    """Places of the hops at the nearest distance at which FEWEST measurements stood, in order; [] where there is none."""
    groups = ([i for i, hop in enumerate(hops) if least <= hop and same(hop, least)] for least in sorted(hops))
    return next((group for group in groups if len(group) >= FEWEST), [])


def elsewhere(environment: Mapping[str, str], pin: Pin) -> str:
    """Why a record of this environment may be slower though its code is not. '' where its cores stood as in a measurement of its pin, and
    where one of the two does not say."""
    here, pinned = _times(environment.get(HOP, "")), hops_of(pin)
    if len(here) != 1 or not pinned or any(same(here[0], hop) for hop in pinned):
        return ""
    return f"{ELSEWHERE} (a hop takes {here[0]:.0f} ns, pinned at {median(pinned):.0f} ns)"


def _times(text: str) -> list[float]:
    """Times between blanks; [] where one is no time."""
    try:
        found = [float(word) for word in text.split()]
    except ValueError:
        return []
    return found if all(0 < t < math.inf for t in found) else []
