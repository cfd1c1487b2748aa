"""Policy: what is exempt from a gate and why, what evidence carries over, which catches are excused. Floor 3; data and pure functions.

Nothing here is digested: a change of policy makes no evidence stale, it changes what is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from alpha.component import Component
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.registry.gates import asked_of, gate_of
from alpha.registry.gpu import AnyClass, GpuClass, family_of

_NO_GRADIENT = (
    ("the update of weights, which no gradient crosses", ("adamw", "sgd", "global_norm", "clip_coefficient", "finite_flag",
                                                             "update_scalars", "square_sums", "norm_of_squares",
                                                             "scalars_of_squares")),
    ("integers or flags come out", ("count_valid", "next_step")),
    ("the learning rate is a function of an integer", ("learning_rate",)),
    ("has no operands", ("fill", "barrier")),
    ("made by fusion after differentiation; parity compares it with the composed oracles of its parts, whose gradients are gated",
     ("linear_gelu", "linear_swiglu", "matmul_gelu_bwd", "matmul_accumulate", "add_layernorm", "add_rmsnorm", "layernorm_bwd_add",
      "rmsnorm_bwd_add", "embedding_add", "embedding_bwd_accumulate", "sum_accumulate")),
    ("evaluation's loss; linear_cross_entropy_grad is the row that gives gradients", ("linear_cross_entropy",)),
)

EXEMPT: Mapping[tuple[str, str], str] = {(op, "gradient"): reason for reason, ops in _NO_GRADIENT for op in ops}
"""(op row, gate) -> reason. Closed: a row without a vjp that is no backward row owes the gradient gate until it stands here."""

EXEMPT_ON: Mapping[tuple[str, str, str], str] = {
    ("cuda", "take_row", "perf"): "copies one row: its bytes take 3 ns, its launch 4 us, so a share would say how fast the host launches",
}
"""(back end, op row, gate) -> reason, where the components of that back end alone owe no such gate. Closed."""

HOST_PROFILES = ("host", "count")
"""Profiles of components whose results do not come out of vector units: integers, bytes, and float64 scalars of the C library."""


AWAITING: Mapping[str, Mapping[str, str]] = {}
"""Reference class of GPUs -> what the merge gate finds missing or older than the code there, by the name it gives it -> why. It is told as
NOT_RUN and counted, in place of an error, for a machine of CI has no GPU. Nothing else is excused: a failing verdict, a forged line or a
loosened judge stays an error, and no run on such a GPU takes old evidence for current. An entry that is not needed is an error."""


def awaiting(machine: str, about: str) -> str:
    """Why evidence of a class may be missing or older than the code for a while; '' where it may not, as on every class of CPUs."""
    return awaited(machine).get(about, "")


def awaited(machine: str) -> Mapping[str, str]:
    """Everything of a class that may, with the reasons."""
    return AWAITING.get(machine, {}) if family_of(machine) == "cuda" else {}


def is_backward(spec: OpSpec) -> bool:
    """Whether a row is the backward of another row: it is named after that row, with `_bwd` behind."""
    base, found, more = spec.name.partition("_bwd")
    return bool(found) and not more and base in table()


def owed(component: Component) -> tuple[str, ...]:
    """Gates that this component owes, exemptions taken off."""
    return tuple(g for g in asked_of(component.profile) if exemption(component, g) is None)


def exemption(component: Component, gate: str) -> str | None:
    """Why a gate that the profile owes is not owed by this component; None when it is owed."""
    if component.op is None:
        return None
    return EXEMPT.get((component.op, gate)) or EXEMPT_ON.get((component.backend, component.op, gate))


def exempt(component: Component) -> dict[str, str]:
    """gate -> reason, of those that the profile owes and this component does not."""
    return {g: why for g in asked_of(component.profile) if (why := exemption(component, g)) is not None}


def required_runs(component: Component, gate: str) -> int:
    """Fewest runs that a record of the gate holds, all cases together."""
    return gate_of(gate).repeats.get((component.profile, component.backend), 2)


def carries(component: Component, gate: str, source: AnyClass, here: AnyClass, *, blas: bool) -> bool:
    """Whether evidence made on class `source` counts on class `here`. `blas`: the implementation calls a BLAS.

    Same class: always. Else gates that carry only: of host profiles under the same NumPy; of numeric ones under the same
    instruction set, NumPy and thread count, when no BLAS is called (its kernel is then all that differs). Between GPU models: parity
    and gradient within one compute capability, whose machine code they run, on as many devices with the same links.
    """
    if source == here:
        return True
    carried = gate_of(gate).carried
    if isinstance(source, GpuClass) or isinstance(here, GpuClass):
        same = isinstance(source, GpuClass) and isinstance(here, GpuClass) and source == replace(here, model=source.model)
        return carried and same
    if not carried or source.numpy != here.numpy:
        return False
    if component.profile in HOST_PROFILES:
        return True
    return not blas and source.isa == here.isa and source.threads == here.threads


def problems() -> list[str]:
    """Exemptions that should not stand: no such op, no such gate, no reason, or not needed. Empty when the list is sound."""
    found = []
    for (op, gate), reason in (*EXEMPT.items(), *((key[1:], why) for key, why in EXEMPT_ON.items())):
        if op not in table():
            found.append(f"exemption ({op}, {gate}): no such op row")
        elif gate not in asked_of("kernel"):
            found.append(f"exemption ({op}, {gate}): kernels owe no such gate")
        elif not reason.strip():
            found.append(f"exemption ({op}, {gate}): no reason is given")
        elif gate == "gradient" and (row(op).vjp is not None or is_backward(row(op))):
            found.append(f"exemption ({op}, {gate}): the row has a gradient, so it owes the gate")
    return found
