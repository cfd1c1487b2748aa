"""Build: from plain model and update functions to a Program. Floor 3.

One training step, for S logical shards of M microbatches each (a fixed tree over shards, a left fold inside a shard):

    shard s, micro 0      micro_first@slot   overwrites the gradients in `grad<slot>`
    shard s, micro 1..    micro@slot         adds to them, in order
    after shard s         tree@level>slot    grad<slot> = grad<slot> + grad<level>, level = 0 .. slot-1: a binary counter's carries
    at the end            update             reads grad<log2 S>, writes param, moments and the step counter

Shard s writes slot trailing_ones(s), so the sum over shards is the balanced binary tree whatever S is, in log2 S + 1 buffers, and no
buffer is ever copied. Loss and token count travel as the unit `~stats` of the same buffers, so they follow the same tree.

Of R ranks each runs the microbatches of S / R shards that lie side by side, by the same tree. The last of them, micro_last@slot, sums over
ranks what the others have left; a Distribution (alpha/parallel) says how, and what a rank updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from alpha.component import Catalogue
from alpha.errors import ShapeError
from alpha.graph.differentiate import contributions
from alpha.graph.ir import Graph, Value, prune
from alpha.graph.plan import MULTIPROCESSORS as MULTIPROCESSORS
from alpha.graph.plan import Groups, Plan, Program, Role, Step
from alpha.graph.state import ShardedLayout, StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.passes.expand import expand
from alpha.passes.fuse import fuse
from alpha.passes.memory import layout as lay_out
from alpha.passes.recompute import recompute
from alpha.passes.schedule import HIDES, ROOMY, schedule
from alpha.passes.select import select
from alpha.types import ITEMSIZE

STATS = "~stats"

MASTER, MASTER16 = "master", "master16"
"""What a rank updates before all cuts are gathered: its cut of `param`, or of `param16` where it holds no more of `param` than a cut."""

COPIES = ("param16", MASTER, MASTER16)
"""Kinds of state that are made from `param`."""


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
class FlatPart:
    """Flat arrays of one length that one launch updates: param, grad and `extra` f32[n] by kind. `segments`: the tensors in them
    (StateLayout.segments). `param16`: the bf16 copy that the model reads, which the update keeps in step; None in f32. `layer`: the unit
    that it is, "" for all of them."""

    param: Value
    grad: Value
    extra: Mapping[str, Value]
    segments: tuple[tuple[int, int, float, float], ...]
    param16: Value | None = None
    layer: str = ""


@dataclass(frozen=True)
class FlatState:
    """State as values of the update graph. `count`, `loss_sum`: f32[] totals of the step. `sums`: f32[leaves], the sums of squares by which
    the norm is made; None where the row update_scalars sums the gradient of the one part, which is whole, over `runs` (StateLayout.runs).
    `one_row`: the back end makes all numbers by one row, of the gradient or of the sums of its blocks."""

    parts: tuple[FlatPart, ...]
    step: Value
    loss_sum: Value
    count: Value
    sums: Value | None = None
    runs: tuple[tuple[int, int], ...] = ()
    one_row: bool = False


class Distribution(Protocol):
    """A way to run a Program on many ranks, as the builder meets it."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    @property
    def groups(self) -> Groups:
        """What the collectives name."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a Program says of it."""

    def check(self, shape: StepShape, precision: str) -> None:
        """ShapeError where it cannot run steps of these sizes in this compute type."""

    def sharded(self, params: StateLayout, kinds: tuple[str, ...]) -> Mapping[str, ShardedLayout]:
        """The kinds of state of which a rank holds its cut, those that it adds included. `kinds`: those of the optimizer."""

    def reduce(self, t: Tracer, params: StateLayout, slot: int) -> None:
        """Append to the last microbatch of a rank what sums its gradients over the ranks."""

    def update(self, rank: int, optimizer: Optimizer, params: StateLayout, slot: int) -> Graph:
        """What updates the state that a rank holds, by the sums in `grad<slot>` or in a kind of its own."""

    def refresh(self, rank: int, params: StateLayout) -> Mapping[str, Graph]:
        """Segments that make a rank's own copies when parameters have been drawn or loaded, by name."""


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


def lower(graph: Graph, catalogue: Catalogue, backend: str, threads: int, states: Mapping[str, StateLayout | ShardedLayout], *,
          policy: tuple[str, tuple[str, ...]] = ("none", ()), fused: bool = True) -> Plan:
    """One graph through every pass, verified between passes."""
    graph = verify(prune(graph), "trace")
    graph = verify(prune(recompute(graph, *policy)), "recompute")
    graph = verify(prune(expand(graph, catalogue, backend)), "expand")
    if fused:
        graph = verify(prune(fuse(graph, catalogue, backend)), "fuse")
    graph = verify(schedule(graph, ROOMY.get(backend, ()), HIDES.get(backend, inf)), "schedule")
    chosen = select(graph, catalogue, backend)
    return lay_out(graph, chosen, threads, {k: s.size * ITEMSIZE[s.dtype] for k, s in states.items()})


def build_program(*, name: str, model: Model, optimizer: Optimizer, shape: StepShape, catalogue: Catalogue, backend: str = "cpu",
                  threads: int = 2, policy: tuple[str, tuple[str, ...]] = ("none", ()), fused: bool = True, precision: str = "f32",
                  facts: Mapping[str, Any] | None = None, over: Distribution | None = None) -> Program:
    """Trace, differentiate, recompute, expand, fuse, schedule, select and lay out every Segment of a run.

    `threads`: workers of the CPU, by which its kernels size their scratch; those of a GPU do by MULTIPROCESSORS. In bf16 there is one
    Segment more, `narrow`, which makes `param16` from `param`: it runs once when parameters have been drawn or loaded; checkpoints leave
    param16 out. `over`: how it runs on many ranks; None: on one.
    """
    first, _ = trace_training(model, None, "shapes", None, False, precision)
    params = StateLayout(first.tensors.values())
    grads = stats_layout(params)
    ranks = over.ranks if over else 1
    if over:
        over.check(shape, precision)
    own = shape.shards // ranks
    levels = own.bit_length() - 1
    states: dict[str, StateLayout] = {"param": params, "counter": StateLayout([TensorSpec("step", (), "counter")], "i32")}
    states |= {"param16": params.kept_in("bf16")} if precision == "bf16" else {}
    states |= {k: params for k in optimizer.kinds}
    states |= {f"grad{k}": grads for k in range(levels + 1)}
    sharded = dict(over.sharded(params, optimizer.kinds)) if over else {}
    held: dict[str, StateLayout | ShardedLayout] = {**states, **sharded}
    states |= {k: s.whole for k, s in sharded.items()}

    side_by_side = MULTIPROCESSORS if backend == "cuda" else threads

    def plan(graph: Graph, *, recomputed: bool = False) -> Plan:
        return lower(graph, catalogue, backend, side_by_side, held, policy=policy if recomputed else ("none", ()), fused=fused)

    if over:
        updates = [over.update(rank, optimizer, params, levels) for rank in range(ranks)]
    else:
        one_row = bool(catalogue.for_op("update_scalars", backend))
        updates = [update_graph(optimizer, params, levels, precision, one_row=one_row)]
    by_rank = [{"update": plan(graph)} for graph in updates]  # first: they are small, and refuse a state that is too large
    schedules = [_schedule(shape, over is not None, rank, ranks) for rank in range(ranks)]
    used = {call.plan for call in schedules[0]}
    plans: dict[str, Plan] = {}
    slots = sorted({trailing_ones(s) for s in range(own)})
    for slot in slots:
        for role in ("micro_first", "micro"):
            key = f"{role}@{slot}"
            if key in used:
                plans[key] = plan(trace_training(model, params, key, slot, role == "micro", precision)[1], recomputed=True)
    for slot in slots:
        for level in range(slot):
            if (key := f"tree@{level}>{slot}") in used:
                plans[key] = plan(_tree(level, slot, grads))
    if over:
        key = f"micro_last@{levels}"
        t, graph = trace_training(model, params, key, levels, shape.micros > 1, precision)
        over.reduce(t, params, levels)
        plans[key] = plan(graph, recomputed=True)
        for rank, own_plans in enumerate(by_rank):
            own_plans |= {key: plan(graph) for key, graph in over.refresh(rank, params).items()}
    plans |= by_rank[0]
    plans["eval"] = plan(trace_training(model, params, "eval", None, False, precision)[1])
    if model.decode is not None:
        t = Tracer("decode", params, precision=precision)
        t.output("logits", model.decode(t))
        plans["decode"] = plan(t.graph)
    if precision == "bf16" and "narrow" not in plans:
        plans["narrow"] = plan(_narrow(params))
    plans["snapshot"] = plan(_snapshot(held))
    everyones = {key: key for key in plans if key not in by_rank[0]}
    others = tuple(Role(schedule, {**everyones, **_kept_once(plans, own_plans, rank)})
                   for rank, (schedule, own_plans) in enumerate(zip(schedules, by_rank)) if rank)
    known = {"precision": precision} if precision != "f32" else {}
    return Program(name, plans, schedules[0], states,
                   {"shards": shape.shards, "micros": shape.micros, "micro_batch": shape.micro_batch, "seq": shape.seq,
                    "multiprocessors" if backend == "cuda" else "threads": side_by_side, "backend": backend, "model": model.name,
                    "optimizer": optimizer.name, **known, **(over.facts if over else {}),
                    **(facts or {})}, shape.replay, others=others, groups=over.groups if over else {}, sharded=tuple(sorted(sharded)))


def _kept_once(plans: dict[str, Plan], own: Mapping[str, Plan], rank: int) -> dict[str, str]:
    """Name -> key of a rank's own plans, those added to `plans` whose text no rank before has."""
    found: dict[str, str] = {}
    for name, plan in own.items():
        text = plan.text()
        same = (key for key, other in plans.items() if key.partition("~")[0] == name and other.text() == text)
        found[name] = next(same, f"{name}~{rank}")
        plans.setdefault(found[name], plan)
    return found


def trailing_ones(s: int) -> int:
    """Number of trailing one bits: the binary-counter slot that shard s writes."""
    return ((s + 1) & ~s).bit_length() - 1


def _schedule(shape: StepShape, reduces: bool, rank: int = 0, ranks: int = 1) -> tuple[Step, ...]:
    """The step of one of `ranks` ranks; `reduces`: its last microbatch is micro_last, which does what trees would do behind it."""
    steps: list[Step] = []
    own = shape.shards // ranks
    for s in range(own):
        slot, shard = trailing_ones(s), rank * own + s
        steps += [Step(f"{'micro' if m else 'micro_first'}@{slot}", shard, m) for m in range(shape.micros)]
        if reduces and s == own - 1:
            steps[-1] = Step(f"micro_last@{slot}", shard, shape.micros - 1)
        else:
            steps += [Step(f"tree@{level}>{slot}") for level in range(slot)]
    return (*steps, Step("update"))


def _tree(level: int, slot: int, grads: StateLayout) -> Graph:
    """The sum of the 2^level shards before goes into the buffer of the shard just done, whose sum then covers 2^(level+1)."""
    t = Tracer(f"tree@{level}>{slot}")
    t.phase, t.source = "reduce", "tree"
    before, sums = t.state(f"grad{level}", 0, (grads.size,), "f32"), t.state(f"grad{slot}", 0, (grads.size,), "f32")
    t.update(sums, t("accumulate", sums, before))
    return t.graph


def update_graph(optimizer: Optimizer, params: StateLayout, slot: int, precision: str = "f32", *, one_row: bool = False) -> Graph:
    """What updates the whole state by `grad<slot>`. `one_row`: all scalars are made by the row update_scalars."""
    t = Tracer("update", params, precision=precision)
    t.phase, t.source = "update", optimizer.name
    n = params.size
    grad = t.state(f"grad{slot}", 0, (n,), "f32")
    whole = FlatPart(t.state("param", 0, (n,), "f32"), grad, {k: t.state(k, 0, (n,), "f32") for k in optimizer.kinds}, params.segments(),
                     t.state("param16", 0, (n,), "bf16") if precision == "bf16" else None)
    sums = None if one_row else t.square_sums(grad, leaves=params.leaves())
    optimizer.update(t, flat_state(t, params, slot, (whole,), sums, one_row=one_row))
    return t.graph


def flat_state(t: Tracer, params: StateLayout, slot: int, parts: tuple[FlatPart, ...], sums: Value | None, *,
               one_row: bool = False) -> FlatState:
    """These parts, with the step counter and the totals that lie behind the gradients in `grad<slot>`."""
    grads = stats_layout(params)
    loss_sum, count = (t.state(f"grad{slot}", grads.offsets[f"{STATS}.{name}"], (), "f32") for name in ("loss_sum", "count"))
    return FlatState(parts, t.state("counter", 0, (), "i32"), loss_sum, count, sums, params.runs() if sums is None else (), one_row)


def _narrow(params: StateLayout) -> Graph:
    """The bf16 copy of the parameters, made from them."""
    t = Tracer("narrow")
    t.phase, t.source = "update", "narrow"
    copied = t("cast", t.state("param", 0, (params.size,), "f32"), dtype="bf16")
    t.update(t.state("param16", 0, (params.size,), "bf16"), copied)
    return t.graph


def _snapshot(states: Mapping[str, StateLayout | ShardedLayout]) -> Graph:
    """The state that a checkpoint holds, as outputs: no launches, only where each array lies. What can be made again from the parameters
    is left out."""
    t = Tracer("snapshot")
    for kind, s in states.items():
        if not kind.startswith("grad") and kind not in COPIES:
            t.output(kind, t.state(kind, 0, (s.size,), s.dtype))
    return t.graph
