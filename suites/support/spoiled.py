"""The CPU's kernels, one of which goes wrong after its sound run: what spot checks must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Catalogue
from alpha.train.catalogue import catalogue


def spoiled(component: str, fault: Callable[[list[np.ndarray], int], None]) -> Catalogue:
    """The CPU's kernels, one of which does `fault` to its results; `calls` counts those of all its launches."""
    made, calls = Catalogue(), [0]

    def binder(sound: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
        def bind(cpu: Any, ins: Any, outs: list[np.ndarray], attrs: Any) -> Callable[[], None]:
            run = sound(cpu, ins, outs, attrs)

            def wrong() -> None:
                run()
                calls[0] += 1
                fault(outs, calls[0])
            return wrong
        return bind

    for own in catalogue():
        made.add(replace(own, implementation=binder(own.implementation)) if own.id == component else own)
    return made
