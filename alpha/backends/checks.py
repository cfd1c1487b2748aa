"""What every executor asks of a Plan's inputs, and on a replay of its launches' results. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from alpha.errors import InputError, NonFiniteError
from alpha.graph.plan import Plan, Ref
from alpha.types import NUMPY


class Inspector(Protocol):
    """Looks at every launch of the Plans that an executor runs while it has one. `read`: the tensor at a planned place, to read only; it
    may be a view of memory that later launches write. What it raises ends the run of the Plan there."""

    def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        """Launch `index` of `plan` comes next."""
    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        """It has run."""


def cut(ref: Ref, x: np.ndarray, rows: int, whose: str = "") -> np.ndarray:
    """The rows of a tensor, as the integer says that its extent is: a view. InputError, naming `whose` it is, outside of 0 to its bound."""
    if not 0 <= rows <= ref.type.shape[0]:
        raise InputError(f"an extent lies outside its bound{': ' if whose else ''}{whose}", came=f"{rows} rows of {ref}",
                         expected=f"0 to {ref.type.shape[0]}", do="hand in as many rows as the plan allows")
    return x[:rows]


def check_inputs(plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
    """InputError unless `inputs` are exactly those of the plan, in shape and dtype."""
    if set(inputs) != set(plan.inputs):
        raise InputError(f"plan {plan.name} needs other inputs", came=sorted(inputs), expected=sorted(plan.inputs))
    for name, ref in plan.inputs.items():
        x = np.asarray(inputs[name])
        if x.shape != ref.type.shape or x.dtype != NUMPY[ref.type.dtype]:
            raise InputError(f"input {name} of plan {plan.name} has another type", came=f"{x.dtype}{list(x.shape)}", expected=ref.type)


def check_finite(plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
    """NonFiniteError naming node, op and model line if launch `index` of `plan`, which has just run, made a value that is not finite.
    `read`: the float tensor at a planned place."""
    launch = plan.launches[index]
    for k, ref in enumerate(launch.outs):
        if not ref.type.is_float:
            continue
        found = read(ref)
        if not np.isfinite(found).all():
            where = np.argwhere(~np.isfinite(found))[0].tolist()
            raise NonFiniteError(
                f"{launch.op} made a non-finite value: plan {plan.name}, launch {index}, {launch.layer or 'no layer'} {launch.phase}, "
                f"model line {launch.source}", came=f"output {k} {ref.type} at {where}: {found[tuple(where)]}",
                expected="finite values", do="look at the inputs of this op: learning rate, data, initialisation")
