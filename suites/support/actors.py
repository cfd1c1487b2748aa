"""Roles of a protocol as generators that take their steps in orders that chance gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

Actor = Iterator[Callable[[], bool]]
"""Yields what it waits for."""


def play(actors: Sequence[Actor], rng: random.Random) -> bool:
    """Whether all have ended: False where all that are left wait. One actor at a time takes a step; for stretches some are left aside."""
    waits: dict[int, Callable[[], bool]] = {}

    def step(i: int) -> None:
        try:
            waits[i] = next(actors[i])
        except StopIteration:
            waits.pop(i, None)

    for i in range(len(actors)):
        step(i)
    aside: set[int] = set()
    while waits:
        if rng.random() < 0.02:
            aside = set(rng.sample(range(len(actors)), rng.randrange(len(actors))))
        able = [i for i, ready in waits.items() if ready()]
        if not able:
            return False
        step(rng.choice([i for i in able if i not in aside] or able))
    return True
