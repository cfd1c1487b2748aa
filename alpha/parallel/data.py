"""Data parallel: every rank runs the microbatches of its own logical shards, and gradients are summed over ranks. Floor 5.

As a pass over graphs. In the last microbatch of a rank, as soon as the gradients of a unit are complete, they become one bucket. It
takes the earlier shards' sums, by the rank's own tree, and is then summed over the ranks on the stream beside compute, while the backward
goes on. Ranks hold subtrees side by side, so the whole is the tree over all shards, whatever the number of ranks: the bits are those of
one process.

With `zero` = 1 a rank holds its cut of the optimizer's state, and of every unit's sum it gets its cut alone (Rajbhandari et al. 2020,
"ZeRO", arXiv:1910.02054, section 5.1; their stage 1). It updates its cut of the parameters, `master`, and all cuts are gathered into
`param`, which the model reads. In bf16 the model reads `param16` alone: then `param` itself is cut, its update leaves a bf16 copy of the
cut in `master16`, and the cuts of that are gathered into `param16`. The norm is summed over leaves, or blocks, that no cut splits. With
`zero` = 0 every rank holds and updates everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alpha.errors import ShapeError
from alpha.graph.ir import Graph, Node, Value, prune
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Groups
from alpha.graph.state import PARTS, ShardedLayout, StateLayout, UnitRange
from alpha.graph.trace import Tracer
from alpha.ops.global_norm import blocks
from alpha.passes.build import MASTER, MASTER16, STATS, FlatPart, Optimizer, StepShape, flat_state, stats_layout, update_graph
from alpha.passes.schedule import schedule

GROUP = "dp"
"""The group of all ranks."""

SUMS = "grad"
"""The kind of state that takes a rank's cut of the summed gradients."""


@dataclass(frozen=True)
class DataParallel:
    """Data parallel over `ranks` ranks; `zero`: 1 cuts the optimizer's state over them, 0 does not; `micros`: microbatches of a shard, the
    last of which sums over the ranks. `precision`: the compute type; `one_row`: whether the back end makes the numbers of an update by the
    row update_scalars, both as `update_graph` has them. ShapeError for other numbers."""

    ranks: int
    zero: int = 0
    micros: int = 1
    precision: str = "f32"
    one_row: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 2 or PARTS % self.ranks:
            raise ShapeError("units of state cannot be cut evenly over the ranks", came=f"{self.ranks} ranks",
                             expected=f"a power of two from 2 to {PARTS}", do="take another number of ranks; one rank needs no sums")
        if self.zero not in (0, 1):
            raise ShapeError("the stage of ZeRO is not known", came=self.zero, expected="0 or 1", do="set train.zero")

    @property
    def groups(self) -> Groups:
        """All ranks in one tuple."""
        return {GROUP: (tuple(range(self.ranks)),)}

    @property
    def facts(self) -> Mapping[str, Any]:
        """What decides the plans."""
        return {"ranks": self.ranks, "zero": self.zero}

    def check(self, shape: StepShape, precision: str) -> None:
        """ShapeError where the ranks do not divide the logical shards, or where the step has other sizes or another compute type."""
        if precision != self.precision:
            raise ShapeError("the ranks update in another compute type than the step has", came=self.precision, expected=precision,
                             do="make DataParallel of the Program's precision")
        if shape.shards % self.ranks:
            raise ShapeError("the ranks do not divide the logical shards", came=f"{self.ranks} ranks, {shape.shards} shards",
                             expected=f"{self.ranks} shards or a multiple", do="set train.shards; it is part of the numerics")
        if shape.micros != self.micros:
            raise ShapeError("the ranks sum in another microbatch than a shard's last", came=f"the last of {self.micros}",
                             expected=f"the last of {shape.micros}", do="make DataParallel and StepShape of the same numbers")

    def sharded(self, params: StateLayout, kinds: tuple[str, ...]) -> Mapping[str, ShardedLayout]:
        """The optimizer's kinds, what is updated and the summed gradients; nothing where the state is not cut."""
        if not self.zero:
            return {}
        found = dict.fromkeys((*kinds, self._updated, SUMS), params.shard(self.ranks))
        return {**found, MASTER16: params.kept_in("bf16").shard(self.ranks)} if self.precision == "bf16" else found

    @property
    def _updated(self) -> str:
        """The kind of which a rank updates its cut."""
        return "param" if self.precision == "bf16" else MASTER

    def reduce(self, t: Tracer, params: StateLayout, slot: int) -> None:
        """Sum the gradients of the traced microbatch, and what lies in the slots below `slot`, over the ranks: unit after unit, in the
        order in which they are complete. All that sums is marked with the microbatch, so no sound Program runs it in another one.

        The sums of a unit go to `grad<slot>`, or a rank's cut of them to `grad`; those of loss and count always to `grad<slot>`."""
        cuts = {unit.name: unit for unit in params.shard(self.ranks).units}
        t.microbatch = self.micros - 1
        for unit in _as_completed(t.graph, stats_layout(params).units, f"grad{slot}"):
            n = unit.stop - unit.start
            bucket = _bucket(t, unit, f"grad{slot}")
            for level in range(slot):
                bucket = t.accumulate(bucket, t.state(f"grad{level}", unit.start, (n,), "f32"))
            box = t.state(f"grad{slot}", unit.start, (n,), "f32")
            t.stream = COMM
            if self.zero and unit.name != STATS:
                t.update(box, bucket)
                cut = cuts[unit.name]
                mine = t.state(SUMS, cut.start, (cut.stop - cut.start,), "f32")
                t.update(mine, t.reduce_scatter(bucket, group=GROUP, size=self.ranks, reduce="sum"))
            else:
                t.update(box, t.all_reduce(bucket, group=GROUP, size=self.ranks, reduce="sum"))
            t.stream = COMPUTE
        t.microbatch = None

    def update(self, rank: int, optimizer: Optimizer, params: StateLayout, slot: int) -> Graph:
        """The update of all state, which is one process's, or of a rank's cut of it: unit after unit, each gathered while the next is
        updated."""
        if not self.zero:
            return update_graph(optimizer, params, slot, self.precision, one_row=self.one_row)
        t = Tracer("update", params, precision=self.precision)
        t.phase, t.source = "update", optimizer.name
        sharded = params.shard(self.ranks)
        parts = tuple(self._part(t, optimizer, unit, sharded.segments(rank)) for unit in sharded.units)
        optimizer.update(t, flat_state(t, params, slot, parts, self._sums(t, rank, params), one_row=self.one_row))
        t.phase = "reduce"
        for unit, part in zip(params.units, parts):
            t.layer = unit.name
            updated = part.param if part.param16 is None else part.param16
            assert updated.state is not None
            self._gather(t, unit, t.graph.updates[updated.state])
        return t.graph

    def _sums(self, t: Tracer, rank: int, params: StateLayout) -> Value:
        """What the norm is made of, of all ranks: leaves that are gathered; or blocks, of which every rank has another number, so that each
        has zeros in place of the others' and they are added, which moves no bit."""
        sharded = params.shard(self.ranks)
        leaves = sharded.blocks(rank, blocks(params.runs())) if self.one_row else sharded.leaves(rank)
        sums = t.square_sums(t.state(SUMS, 0, (sharded.size,), "f32"), leaves=leaves)
        t.stream = COMM
        if self.one_row:
            sums = t.all_reduce(sums, group=GROUP, size=self.ranks, reduce="sum")
        else:
            sums = t.all_gather(sums, group=GROUP, size=self.ranks)
        t.stream = COMPUTE
        return sums

    def _gather(self, t: Tracer, unit: UnitRange, cut: Value) -> None:
        """All ranks' cuts of a unit become what the model reads."""
        t.stream = COMM
        kind = "param16" if self.precision == "bf16" else "param"
        whole = t.state(kind, unit.start, (unit.stop - unit.start,), self.precision)
        t.update(whole, t.all_gather(cut, group=GROUP, size=self.ranks))
        t.stream = COMPUTE

    def _part(self, t: Tracer, optimizer: Optimizer, unit: UnitRange, segments: tuple[tuple[int, int, float, float], ...]) -> FlatPart:
        """A rank's cut of one unit. `segments`: of its cuts of all units."""
        def box(kind: str, dtype: str = "f32") -> Value:
            return t.state(kind, unit.start, (unit.stop - unit.start,), dtype)

        own = tuple((at - unit.start, n, decay, scale) for at, n, decay, scale in segments if unit.start <= at < unit.stop)
        return FlatPart(box(self._updated), box(SUMS), {kind: box(kind) for kind in optimizer.kinds}, own,
                        box(MASTER16, "bf16") if self.precision == "bf16" else None, layer=unit.name)

    def refresh(self, rank: int, params: StateLayout) -> Mapping[str, Graph]:
        """With `zero`: `shard`, which copies a rank's cut of the parameters to `master`; in bf16 `narrow`, which makes a copy of it in bf16
        and gathers those of all ranks."""
        if not self.zero:
            return {}
        if self.precision == "bf16":
            t = Tracer("narrow", params, precision=self.precision)
            t.phase, t.source = "update", "narrow"
            for unit, own in zip(params.units, params.shard(self.ranks).units):
                n, t.layer = own.stop - own.start, unit.name
                copied = t("cast", t.state("param", own.start, (n,), "f32"), dtype="bf16")
                t.update(t.state(MASTER16, own.start, (n,), "bf16"), copied)
                self._gather(t, unit, copied)
            return {"narrow": t.graph}
        t = Tracer("shard", params)
        t.phase, t.source = "update", "shard"
        for local, lo, hi in params.shard(self.ranks).cuts(rank):
            t.update(t.state(MASTER, local, (hi - lo,), "f32"), t.scale(t.state("param", lo, (hi - lo,), "f32"), factor=1.0))
        return {"shard": t.graph}


def _as_completed(graph: Graph, units: list[UnitRange], kind: str) -> list[UnitRange]:
    """The units, first the one whose gradients are complete first where the graph runs as it is scheduled."""
    at = {node: i for i, node in enumerate(schedule(prune(graph)).nodes)}

    def complete(unit: UnitRange) -> int:
        return max(at[_maker(v)] for (k, offset), v in graph.updates.items() if k == kind and unit.start <= offset < unit.stop)

    return sorted(units, key=complete)


def _bucket(t: Tracer, unit: UnitRange, kind: str) -> Value:
    """The unit's gradients as one value, in place of the updates that they were. Its line is that of what completes it."""
    boxes = sorted(box for box in t.graph.updates if box[0] == kind and unit.start <= box[1] < unit.stop)
    parts = [t.graph.updates.pop(box) for box in boxes]
    t.phase, t.layer = "reduce", unit.name
    made = _maker(parts[-1])
    while made.phase == "wgrad" and made.inputs and made.inputs[-1].producer is not None:
        made = made.inputs[-1].producer
    t.source = made.source
    bucket: Value = t.bucket(*parts, offsets=tuple(offset - unit.start for _, offset in boxes), size=unit.stop - unit.start)
    return bucket


def _maker(v: Value) -> Node:
    assert v.producer is not None, "the gradient of every parameter is computed"
    return v.producer
