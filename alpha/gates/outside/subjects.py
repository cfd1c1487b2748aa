"""How the gates call an outside candidate: a process of its own, over memory that the judge owns. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.gates.outside.process import OutsideBound, running
from alpha.gates.outside.signature import Signature
from alpha.ops.spec import Sample
from alpha.types import TensorType


def warm_up(*workers: int) -> None:
    """Nothing: the process is started by whoever runs the gates."""


def samples(component: Component, rng: np.random.Generator, which: str) -> list[Sample]:
    """Of a row of the op table: samples drawn within the sizes that the candidate takes. A plain reference draws its own."""
    further = component.calls.further
    return [replace(s, name=f"drawn-{s.name}") for s in further(rng)] if further and which == "samples" else []


def refused(component: Component, rng: np.random.Generator) -> list[Sample]:
    """None: which contents are refused is the caller's matter."""
    return []


def differentiated(component: Component, row: str, rng: np.random.Generator) -> list[Sample]:
    """None beyond the row's own."""
    return []


def bind(component: Component, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Any, *, offset: int = 0,
         share: tuple[int, int] | None = None) -> OutsideBound:
    """See subjects.bind. `offset`: elements."""
    return OutsideBound(running(component), ins, outs, attrs, offset=offset, share=share)


@dataclass(frozen=True)
class Calls:
    """What a candidate is called on. `further`: samples within the declared sizes beyond those of its row of the op table; None where the
    row is a plain reference's, which draws its own."""

    signature: Signature
    attributes: dict[str, object]
    further: Callable[[np.random.Generator], Iterable[Sample]] | None
