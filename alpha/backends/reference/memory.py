"""What the reference executor gives each rank: arenas, and a way to run a launch in them. Floor 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from alpha.backends.checks import cut
from alpha.backends.cpu.executor import CpuExecutor
from alpha.component import Catalogue
from alpha.errors import GraphError
from alpha.graph.order import COMPUTE
from alpha.graph.plan import Launch, Plan, Program, Ref
from alpha.ops.collectives import promised
from alpha.ops.spec import Arrays, OpSpec
from alpha.ops.table import row
from alpha.types import ITEMSIZE, NUMPY, Attrs, TensorType

_WHOLE = 1 << 53
"""Integers up to here are float64 numbers."""


class Rank(Protocol):
    """One rank's arenas."""

    def state(self, kind: str) -> np.ndarray:
        """A flat state array, to read and to write."""
    def feed(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        """Write the inputs of a plan."""
    def read(self, ref: Ref) -> np.ndarray:
        """A copy of the tensor at a place: of its rows, where it has an extent."""
    def write(self, ref: Ref, x: np.ndarray) -> None:
        """Store a tensor, or these rows of it, at a place."""
    def poison(self, ref: Ref) -> None:
        """Overwrite a place with rubbish, behind its extent too."""
    def launch(self, plan: Plan, index: int) -> None:
        """Run one launch that needs no other rank, what it writes poisoned first."""
    def across(self, spec: OpSpec, members: Sequence[Arrays], types: Sequence[TensorType], attrs: Attrs) -> Sequence[Arrays]:
        """The results of a collective for all members."""
    def outputs(self, plan: Plan) -> dict[str, np.ndarray]:
        """Copies of a plan's outputs."""
    def close(self) -> None:
        """End what it runs on."""


class OracleRank:
    """Arenas that hold one float64 for each byte: a tensor's element lies at the place of its first byte, so the plan's offsets stand, and
    nothing is rounded. They begin as zeros."""

    def __init__(self, program: Program, plans: Sequence[Plan]) -> None:
        self._dtype = {kind: layout.dtype for kind, layout in program.states.items()}
        self._arenas = {name: np.zeros(n) for name, n in _arenas(plans).items()}

    def _flat(self, ref: Ref) -> np.ndarray:
        return self._arenas[ref.arena][ref.offset : ref.stop : ITEMSIZE[ref.type.dtype]]

    def state(self, kind: str) -> np.ndarray:
        """A flat state array in float64, integers too."""
        return self._arenas[f"state.{kind}"][:: ITEMSIZE[self._dtype[kind]]]

    def feed(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        for name, ref in plan.inputs.items():
            self.write(ref.whole, np.asarray(inputs[name]))

    def _rows(self, ref: Ref) -> np.ndarray:
        x = self._flat(ref).reshape(ref.type.shape)
        return x if ref.extent is None else cut(ref, x, int(self.read(ref.extent)))

    def read(self, ref: Ref) -> np.ndarray:
        """Floats as float64, integers in their type."""
        x = self._rows(ref)
        return np.array(x) if ref.type.is_float else x.astype(NUMPY[ref.type.dtype])

    def write(self, ref: Ref, x: np.ndarray) -> None:
        if x.dtype.kind == "i" and ((x > _WHOLE) | (x < -_WHOLE)).any():
            raise GraphError("the reference executor holds integers as float64", came=f"{ref}: {int(x.min())} to {int(x.max())}",
                             expected="at most 2^53")
        self._rows(ref)[...] = x

    def poison(self, ref: Ref) -> None:
        self._arenas[ref.arena][ref.offset : ref.stop] = np.nan if ref.type.is_float else -1

    def launch(self, plan: Plan, index: int) -> None:
        x = plan.launches[index]
        for ref in written(x):
            self.poison(ref)
        ins = [self.read(r) for r in x.ins]
        with np.errstate(all="ignore"):
            results = row(x.op).oracle(*ins, **x.attrs)
        for ref, y in zip(x.outs, results, strict=True):
            self.poison(ref)
            self.write(ref, np.asarray(y))

    def across(self, spec: OpSpec, members: Sequence[Arrays], types: Sequence[TensorType], attrs: Attrs) -> Sequence[Arrays]:
        assert spec.across is not None
        with np.errstate(all="ignore"):
            return spec.across(members, **attrs)

    def outputs(self, plan: Plan) -> dict[str, np.ndarray]:
        return {name: self.read(ref) for name, ref in plan.outputs.items()}

    def close(self) -> None:
        pass


class KernelRank:
    """The CPU's arenas and components: a CPU executor whose plans are single launches."""

    def __init__(self, program: Program, plans: Sequence[Plan], catalogue: Catalogue) -> None:
        single = [_single(plan, i) for plan in plans for i, x in enumerate(plan.launches) if row(x.op).across is None]
        empty = Plan("arenas", (), {}, {}, _arenas(plans), plans[0].memory)
        alone = replace(program, plans={p.name: p for p in (*single, empty)}, schedule=(), others=(), groups={})
        self._cpu = CpuExecutor(alone, catalogue)

    def state(self, kind: str) -> np.ndarray:
        return self._cpu.state(kind)

    def feed(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        for name, ref in plan.inputs.items():
            self.write(ref.whole, inputs[name])

    def read(self, ref: Ref) -> np.ndarray:
        return np.array(self._cpu.view(ref))

    def write(self, ref: Ref, x: np.ndarray) -> None:
        self._cpu.view(ref)[...] = x

    def poison(self, ref: Ref) -> None:
        self._cpu.arenas[ref.arena][ref.offset : ref.stop] = 0xFF

    def launch(self, plan: Plan, index: int) -> None:
        for ref in written(plan.launches[index]):
            self.poison(ref)
        self._cpu.enqueue((_name(plan, index),), [{}])

    def across(self, spec: OpSpec, members: Sequence[Arrays], types: Sequence[TensorType], attrs: Attrs) -> Sequence[Arrays]:
        return promised(spec, members, types, attrs)

    def outputs(self, plan: Plan) -> dict[str, np.ndarray]:
        return {name: self.read(ref) for name, ref in plan.outputs.items()}

    def close(self) -> None:
        self._cpu.close()


def written(x: Launch) -> list[Ref]:
    """Scratch and results of a launch that share no memory with its operands: what may be overwritten before it runs."""
    outs = [r for r in x.outs if not any(r.arena == i.arena and r.offset < i.stop and i.offset < r.stop for i in x.ins)]
    return outs if x.scratch is None else [x.scratch, *outs]


def _arenas(plans: Sequence[Plan]) -> dict[str, int]:
    found: dict[str, int] = {}
    for plan in plans:
        for name, n in plan.arenas.items():
            found[name] = max(found.get(name, 0), n)
    return found


def _name(plan: Plan, index: int) -> str:
    return f"{plan.name}#{index}"


def _single(plan: Plan, index: int) -> Plan:
    alone = replace(plan.launches[index], stream=COMPUTE, after=())
    return Plan(_name(plan, index), (alone,), {}, {}, plan.arenas, plan.memory)
