"""Effects and extents: what calls and tensors say beside operands and types, and what cannot be. Floor 2.

**Effects** of a call. `stage` of a pipeline: values of the forward go to the same stage or a later one, those of the backward to the same
or an earlier one. `microbatch`: only sums (phases wgrad, reduce, update) read what another microbatch made. `sms`, the SM budget: most
multiprocessors that a launch takes; no bit depends on it. A kernel that keeps to budgets says so (`Component.budgeted`).

**Extent** of a tensor: an integer that the device holds, which says how many rows along the first axis there are, from none to the bound
that the type is. What lies behind them is rubbish, so only rows (`ROWWISE`) may read such a tensor whose first n results are made of the
first n rows of their operands alone. Their results have the same extent. No gradient crosses one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from alpha.graph.ir import Node, Value
from alpha.graph.plan import MULTIPROCESSORS
from alpha.types import TensorType

ROWWISE = ("accumulate", "add", "all_reduce", "broadcast", "mul", "receive", "reduce", "scale", "send")
"""Rows of the op table that take operands with an extent. What collectives count is then what the device says, on all members the same."""

COUNT = TensorType((), "i32")
"""The type of an extent."""

Refusal = tuple[str, object, object]
"""(which invariant broke, what came, what is expected)."""


Tensors = Iterable[tuple[TensorType, object]]
"""Operands or results of a call, each with its extent or None."""


class Placed(Protocol):
    """A Node or a Launch."""

    @property
    def stage(self) -> int | None: ...
    @property
    def microbatch(self) -> int | None: ...
    @property
    def sms(self) -> int: ...


def refused(call: Placed) -> Refusal | None:
    """Why effects cannot be, whatever the other calls are; None where they can."""
    if type(call.sms) is not int or not 0 <= call.sms <= MULTIPROCESSORS:
        return "an SM budget that no GPU has", call.sms, f"1 to {MULTIPROCESSORS} multiprocessors, 0 for no limit"
    for name, number in (("stage", call.stage), ("microbatch", call.microbatch)):
        if number is not None and (type(number) is not int or number < 0):
            return f"a {name} that is none", number, "an integer from 0, or None"
    return None


def backward(phase: str) -> bool:
    """Whether values of a phase go to earlier stages."""
    return phase in ("backward", "wgrad")


def out_of_place(node: Node) -> Refusal | None:
    """Why a node cannot read what it reads, by stages and microbatches; None where it can."""
    for v in node.inputs:
        made = v.producer
        if made is None:
            continue
        if made.stage is not None and node.stage is not None and "update" not in (node.phase, made.phase):
            back = backward(node.phase) and backward(made.phase)
            if node.stage > made.stage if back else node.stage < made.stage:
                return ("a stage that goes backward", f"stage {node.stage} reads {v.name} of stage {made.stage}, {made.phase}",
                        "the same stage or an earlier one" if back else "the same stage or a later one")
        summed = node.phase in ("wgrad", "reduce", "update")
        if not summed and None not in (made.microbatch, node.microbatch) and made.microbatch != node.microbatch:
            return ("a microbatch that reads another one", f"microbatch {node.microbatch} reads {v.name} of microbatch {made.microbatch}",
                    "its own values")
    return None


def extent_of(op: str, inputs: tuple[Value, ...]) -> Value | None:
    """The extent of an op's results: that of its operands, where they have one."""
    found = {v.extent: None for v in inputs if v.extent is not None}
    return next(iter(found)) if len(found) == 1 and op in ROWWISE else None


def no_extent(v: Value) -> Refusal | None:
    """Why a tensor cannot have the extent that it has; None where it can."""
    n = v.extent
    if n is None:
        return None
    if n.kind not in ("input", "state") or n.type != COUNT or n.extent is not None:
        return "an extent that is no integer of the device", f"{v} with rows {n}", f"an input or a state box {COUNT}"
    return None if v.type.shape else ("an extent of a tensor without rows", f"{v} with rows {n.name}", "a tensor of one axis or more")


def cannot_cross(op: str, phase: str, ins: Tensors, outs: Tensors) -> Refusal | None:
    """Why a call cannot read or make tensors with an extent as it does; None where it can."""
    ins, outs = tuple(ins), tuple(outs)
    said = [(t, extent) for t, extent in (*ins, *outs) if extent is not None]
    if not said:
        return None
    if op not in ROWWISE or backward(phase):
        return "a row that reads behind an extent", f"{op}, phase {phase}", f"no extent, or one of {', '.join(ROWWISE)}, but in a backward"
    axes = {(len(t.shape), *t.shape[:1]) for t, _ in said}
    if len({extent for _, extent in said}) > 1 or len(axes) > 1:
        return "tensors of several extents", ", ".join(f"{t} rows {extent}" for t, extent in said), "one extent of one axis"
    if any(extent is None for _, extent in outs):
        return "a result without its operands' extent", ", ".join(f"{t} rows {extent}" for t, extent in outs), f"rows {said[0][1]}"
    beside = [t for t, extent in ins if extent is None and len(t.shape) >= len(said[0][0].shape) and t.shape[0] != 1]
    if beside:
        return "an operand of all rows beside one with an extent", ", ".join(map(str, beside)), "the same extent, or one row for all"
    return None
