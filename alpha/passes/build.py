"""Build: from plain model and update functions to a Program. Floor 3.

One training step, for S logical shards of M microbatches each (DESIGN: fixed tree over shards, left fold inside a shard):

    shard s, micro 0      micro_first@slot   overwrites the gradients in `grad<slot>`
    shard s, micro 1..    micro@slot         adds to them, in order
    after shard s         tree@level>slot    grad<slot> = grad<slot> + grad<level>, level = 0 .. slot-1: a binary counter's carries
    at the end            update             reads grad<log2 S>, writes param, moments and the step counter

Shard s writes slot trailing_ones(s), so the sum over shards is the balanced binary tree whatever S is, in log2 S + 1 buffers, and no
buffer is ever copied. Loss and token count travel as the unit `~stats` of the same buffers, so they follow the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from alpha.component import Catalogue
from alpha.errors import ShapeError
from alpha.graph.differentiate import contributions
from alpha.graph.ir import Graph, Value, prune
from alpha.graph.plan import MULTIPROCESSORS as MULTIPROCESSORS
from alpha.graph.plan import Plan, Program, Step
from alpha.graph.state import StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.passes.expand import expand
from alpha.passes.fuse import fuse
from alpha.passes.memory import layout as lay_out
from alpha.passes.recompute import recompute
from alpha.passes.schedule import schedule
from alpha.passes.select import select
from alpha.types import ITEMSIZE

STATS = "~stats"


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of one step: `micro_batch` sequences of `seq` tokens per microbatch, `micros` microbatches per shard, `shards` S = 2^k,
    `replay` microbatches handed over at once (0: all)."""

    micro_batch: int
    seq: int
    shards: int = 1
    micros: int = 1
    replay: int = 1

    def __post_init__(self) -> None:
        if self.shards < 1 or self.shards & (self.shards - 1):
            raise ShapeError("logical shards are a power of two", came=self.shards, expected="1, 2, 4, 8, ...")
        if min(self.micro_batch, self.seq, self.micros) < 1 or self.replay < 0:
            raise ShapeError("sizes of a step are positive", came=self)

    @property
    def tokens(self) -> int:
        """Tokens per step, ignored targets included."""
        return self.micro_batch * self.seq * self.shards * self.micros


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a model gives the builder.

    `loss(t, training)` -> (sum of token losses f32[], number of valid targets f32[]); dropout acts only when training.
    `decode(t)` -> logits of the next token, from inputs tokens[1, T] and index[1].
    """

    name: str
    loss: Callable[[Tracer, bool], tuple[Value, Value]]
    decode: Callable[[Tracer], Value] | None = None


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """`kinds`: extra flat f32 state arrays (m, v ...). `update(t, state)`: writes the update graph; `state` gives the flat values."""

    name: str
    kinds: tuple[str, ...]
    update: Callable[[Tracer, FlatState], None]


@dataclass(frozen=True)
class FlatState:
    """Whole state arrays as values of the update graph, and the segment table. `count`, `loss_sum`: f32[] totals of the step. `param16`:
    the bf16 copy that the model reads, which the update keeps in step; None in f32."""

    param: Value
    grad: Value
    extra: Mapping[str, Value]
    step: Value
    loss_sum: Value
    count: Value
    layout: StateLayout
    param16: Value | None = None


def trace_training(model: Model, layout: StateLayout | None, name: str, slot: int | None, accumulate: bool,
                   precision: str = "f32") -> tuple[Tracer, Graph]:
    """Forward (slot None) or forward + backward into `grad<slot>` (overwriting, or accumulating).

    The terms of a gradient go to its buffer one after the other, each in f32, so that none needs memory of its own.
    """
    t = Tracer(name, layout, precision=precision)
    loss_sum, count = model.loss(t, slot is not None)
    if slot is None or layout is None:
        t.output("loss_sum", loss_sum)
        t.output("count", count)
        return t, t.graph
    params = sorted(t.leaves.values(), key=_offset)
    grads = contributions(t, loss_sum, params)
    with_stats = stats_layout(layout)
    t.phase, t.layer, t.source = "wgrad", "", "gradients"
    results = [(_offset(p), terms) for p, terms in zip(params, grads)]
    results += [(with_stats.offsets[f"{STATS}.loss_sum"], [loss_sum]), (with_stats.offsets[f"{STATS}.count"], [count])]
    for offset, (value, *others) in results:
        box = t.state(f"grad{slot}", offset, value.type.shape, "f32")
        total = t("accumulate", box, value) if accumulate else _produced(t, value)
        for term in others:
            total = t("accumulate", total, term)
        t.update(box, total)
    return t, t.graph


def _offset(box: Value) -> int:
    assert box.state is not None
    return box.state[1]


def _produced(t: Tracer, value: Value) -> Value:
    """A gradient that is an alias of something else (a tied or shared value) gets a node of its own."""
    taken = value in t.graph.updates.values() or value.producer is None
    return t("scale", value, factor=1.0) if taken else value


def stats_layout(layout: StateLayout) -> StateLayout:
    """The parameter layout with the unit ~stats (loss_sum, count) behind it: what a gradient buffer holds."""
    return StateLayout([*layout.tensors, TensorSpec(f"{STATS}.count", (), STATS), TensorSpec(f"{STATS}.loss_sum", (), STATS)])


def lower(graph: Graph, catalogue: Catalogue, backend: str, threads: int, states: Mapping[str, StateLayout], *,
          policy: tuple[str, tuple[str, ...]] = ("none", ()), fused: bool = True) -> Plan:
    """One graph through every pass, verified between passes."""
    graph = verify(prune(graph), "trace")
    graph = verify(prune(recompute(graph, *policy)), "recompute")
    graph = verify(prune(expand(graph, catalogue, backend)), "expand")
    if fused:
        graph = verify(prune(fuse(graph, catalogue, backend)), "fuse")
    graph = verify(schedule(graph), "schedule")
    chosen = select(graph, catalogue, backend)
    return lay_out(graph, chosen, threads, {k: s.size * ITEMSIZE[s.dtype] for k, s in states.items()})


def build_program(*, name: str, model: Model, optimizer: Optimizer, shape: StepShape, catalogue: Catalogue, backend: str = "cpu",
                  threads: int = 2, policy: tuple[str, tuple[str, ...]] = ("none", ()), fused: bool = True, precision: str = "f32",
                  facts: Mapping[str, Any] | None = None) -> Program:
    """Trace, differentiate, recompute, expand, fuse, schedule, select and lay out every Segment of a run.

    `threads`: workers of the CPU, by which its kernels size their scratch; those of a GPU do by MULTIPROCESSORS. In bf16 there is one
    Segment more, `narrow`, which makes `param16` from `param`: it runs once when parameters have been drawn or loaded; checkpoints leave
    param16 out.
    """
    first, _ = trace_training(model, None, "shapes", None, False, precision)
    params = StateLayout(first.tensors.values())
    grads = stats_layout(params)
    levels = shape.shards.bit_length() - 1
    states: dict[str, StateLayout] = {"param": params, "counter": StateLayout([TensorSpec("step", (), "counter")], "i32")}
    states |= {"param16": params.kept_in("bf16")} if precision == "bf16" else {}
    states |= {k: params for k in optimizer.kinds}
    states |= {f"grad{k}": grads for k in range(levels + 1)}

    side_by_side = MULTIPROCESSORS if backend == "cuda" else threads

    def plan(graph: Graph, *, recomputed: bool = False) -> Plan:
        return lower(graph, catalogue, backend, side_by_side, states, policy=policy if recomputed else ("none", ()), fused=fused)

    update = plan(_update(optimizer, params, grads, levels, precision))  # first: it is small, and refuses a state that is too large
    plans: dict[str, Plan] = {}
    slots = sorted({trailing_ones(s) for s in range(shape.shards)})
    for slot in slots:
        for role in ("micro_first", "micro") if shape.micros > 1 else ("micro_first",):
            key = f"{role}@{slot}"
            plans[key] = plan(trace_training(model, params, key, slot, role == "micro", precision)[1], recomputed=True)
    for slot in slots:
        for level in range(slot):
            plans[f"tree@{level}>{slot}"] = plan(_tree(level, slot, grads))
    plans["update"] = update
    plans["eval"] = plan(trace_training(model, params, "eval", None, False, precision)[1])
    if model.decode is not None:
        t = Tracer("decode", params, precision=precision)
        t.output("logits", model.decode(t))
        plans["decode"] = plan(t.graph)
    if precision == "bf16":
        plans["narrow"] = plan(_narrow(params))
    plans["snapshot"] = plan(_snapshot(states))
    known = {"precision": precision} if precision != "f32" else {}
    return Program(name, plans, _schedule(shape), states,
                   {"shards": shape.shards, "micros": shape.micros, "micro_batch": shape.micro_batch, "seq": shape.seq,
                    "multiprocessors" if backend == "cuda" else "threads": side_by_side, "backend": backend, "model": model.name,
                    "optimizer": optimizer.name, **known,
                    **(facts or {})}, shape.replay)


def trailing_ones(s: int) -> int:
    """Number of trailing one bits: the binary-counter slot that shard s writes."""
    return ((s + 1) & ~s).bit_length() - 1


def _schedule(shape: StepShape) -> tuple[Step, ...]:
    steps: list[Step] = []
    for s in range(shape.shards):
        slot = trailing_ones(s)
        steps += [Step(f"{'micro' if m else 'micro_first'}@{slot}", s, m) for m in range(shape.micros)]
        steps += [Step(f"tree@{level}>{slot}") for level in range(slot)]
    return (*steps, Step("update"))


def _tree(level: int, slot: int, grads: StateLayout) -> Graph:
    """The sum of the 2^level shards before goes into the buffer of the shard just done, whose sum then covers 2^(level+1)."""
    t = Tracer(f"tree@{level}>{slot}")
    t.phase, t.source = "reduce", "tree"
    before, sums = t.state(f"grad{level}", 0, (grads.size,), "f32"), t.state(f"grad{slot}", 0, (grads.size,), "f32")
    t.update(sums, t("accumulate", sums, before))
    return t.graph


def _update(optimizer: Optimizer, params: StateLayout, grads: StateLayout, level: int, precision: str = "f32") -> Graph:
    t = Tracer("update", params, precision=precision)
    t.phase, t.source = "update", optimizer.name
    n, kind = params.size, f"grad{level}"
    flat = FlatState(t.state("param", 0, (n,), "f32"), t.state(kind, 0, (n,), "f32"),
                     {k: t.state(k, 0, (n,), "f32") for k in optimizer.kinds}, t.state("counter", 0, (), "i32"),
                     _stat(t, kind, grads, "loss_sum"), _stat(t, kind, grads, "count"), params,
                     t.state("param16", 0, (n,), "bf16") if precision == "bf16" else None)
    optimizer.update(t, flat)
    return t.graph


def _stat(t: Tracer, kind: str, grads: StateLayout, name: str) -> Value:
    return t.state(kind, grads.offsets[f"{STATS}.{name}"], (), "f32")


def _narrow(params: StateLayout) -> Graph:
    """The bf16 copy of the parameters, made from them."""
    t = Tracer("narrow")
    t.phase, t.source = "update", "narrow"
    copied = t("cast", t.state("param", 0, (params.size,), "f32"), dtype="bf16")
    t.update(t.state("param16", 0, (params.size,), "bf16"), copied)
    return t.graph


def _snapshot(states: Mapping[str, StateLayout]) -> Graph:
    """The state that a checkpoint holds, as outputs: no launches, only where each array lies. The bf16 copy of the parameters can be
    made again, so it is left out."""
    t = Tracer("snapshot")
    for kind, s in states.items():
        if not kind.startswith("grad") and kind != "param16":
            t.output(kind, t.state(kind, 0, (s.size,), s.dtype))
    return t.graph
