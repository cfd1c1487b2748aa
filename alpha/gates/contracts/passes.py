"""Cases of the graph passes: what goes in and what comes out compute the same, under the oracles, to the bit where it is promised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.catalogue import run as run_kernel
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Workers
from alpha.component import Catalogue, Component, Envelope, Measured
from alpha.errors import GraphError, InputError, ShapeError
from alpha.gates.contracts import edges, effects, of_settings, parts, texts, traced
from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.reference import (
    VOCAB,
    Reference,
    batch,
    both,
    evaluate,
    filled,
    graph_hashes,
    hash_of,
    in_new_process,
    kernels,
    layout_of,
    program,
    random_state,
    references,
    refuses,
    same_updates,
    training_graph,
    yes,
)
from alpha.graph.ir import Graph, Node, Value, prune
from alpha.graph.order import COMM, COMPUTE, Order
from alpha.graph.plan import Plan, Ref
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.ops.compose import FusedSpec
from alpha.ops.table import table
from alpha.passes.build import lower
from alpha.passes.expand import expand
from alpha.passes.fuse import fuse
from alpha.passes.memory import layout as lay_out
from alpha.passes.recompute import recompute
from alpha.passes.schedule import schedule
from alpha.passes.select import select

Case = Callable[[np.random.Generator], Measured]
GPT, LLAMA = "gpt", "llama"
PAGE = 4096

ACTIVATIONS = ("gelu", "swiglu_packed", "layernorm", "rmsnorm")
"""Rows whose recomputation costs little; each model has some."""


def _both(check: Callable[[Reference, np.random.Generator], Measured]) -> list[tuple[str, Case]]:
    return both(check)


def _plan_hash_elsewhere(ref: Reference, rng: np.random.Generator) -> Measured:
    here = graph_hashes(ref.name)
    there = in_new_process(f"graph_hashes({ref.name!r})", "alpha.gates.contracts.reference")
    digest = hash_of(np.frombuffer(here.encode(), np.uint8))
    return Measured(error=float(here != there), bound=0.0, digest=digest, note="graph and plan hashes")


# -- differentiate -------------------------------------------------------------------------------------------------------------------


def _finite_difference(ref: Reference, rng: np.random.Generator) -> Measured:
    """Whole model: the gradient against central differences in float64 through the oracles, along each tensor and 4 mixed directions.

    h = 3e-6: truncation ~ h^2 and cancellation ~ 1e-16 * loss / h are both below 1e-9 of a directional derivative of order 1.
    """
    graph, layout, inputs, state = training_graph(ref), layout_of(ref), batch(ref, rng), random_state(ref, rng)
    _, updates = evaluate(graph, inputs, state)
    grad = np.zeros(layout.size)
    for (_kind, offset), x in updates.items():
        if offset < layout.size:
            grad[offset : offset + x.size] = x.ravel()
    forward = prune(Graph("loss", graph.inputs, graph.states, graph.nodes, {"loss": _stat(graph, layout)}, {}))

    def loss(flat: np.ndarray) -> float:
        return float(evaluate(forward, inputs, {**state, "param": flat})[0]["loss"])

    directions = []
    for offset, n in layout.ranges():
        d = np.zeros(layout.size)
        d[offset : offset + n] = rng.standard_normal(n)
        directions.append(d)
    directions = [directions[i] for i in rng.permutation(len(directions))[:12]] + [sum(directions), *(np.sign(d) for d in directions[:1])]
    worst, h = 0.0, 3e-6
    for d in directions:
        numeric = (loss(state["param"] + h * d) - loss(state["param"] - h * d)) / (2 * h)
        scale = max(float(np.abs(grad * d).sum()), 1e-3)
        worst = max(worst, abs(numeric - float(grad @ d)) / scale)
    return Measured(error=worst, bound=1e-7, cases=len(directions), note="relative to sum |g_i d_i|")


def _stat(graph: Graph, layout: StateLayout) -> Value:
    from alpha.passes.build import STATS, stats_layout

    return graph.updates[("grad0", stats_layout(layout).offsets[f"{STATS}.loss_sum"])]


def _shared_value(rng: np.random.Generator) -> Measured:
    """x is read three times (a residual and a product with itself): d/dx (x + x*x) = 1 + 2x, exactly on small integers."""
    from alpha.graph.differentiate import differentiate

    t = Tracer("shared")
    x = t.input("x", (5,), "f32")
    loss = t.sum(t.add(x, t.mul(x, x)), axis=(0,), keepdims=False)
    t.output("g", differentiate(t, loss, [x])[0])
    value = rng.integers(-9, 9, 5).astype(float)
    got = evaluate(t.graph, {"x": value}, {})[0]["g"]
    return Measured(error=float(np.abs(got - (1 + 2 * value)).max()), bound=0.0)


def _scaled_loss(ref: Reference, rng: np.random.Generator) -> Measured:
    """The gradient of four times the loss is four times that of the loss, to the bit under the oracles."""
    from alpha.graph.differentiate import differentiate

    inputs, state, found = batch(ref, rng), random_state(ref, rng), []
    for factor in (1.0, 4.0):
        t = Tracer("scaled", layout_of(ref))
        loss, _ = ref.model.loss(t, True)
        for i, grad in enumerate(differentiate(t, t.scale(loss, factor=factor), list(t.leaves.values()))):
            t.output(f"{i}", grad)
        found.append(evaluate(prune(t.graph), inputs, state)[0])
    wrong = sum(not np.array_equal(4 * x, found[1][name]) for name, x in found[0].items())
    return Measured(error=float(wrong), bound=0.0, cases=len(found[0]), note="parameters")


def _second_result(rng: np.random.Generator) -> Measured:
    """A gradient goes through a row of whose results the loss reads the second alone: exactly, on small integers."""
    from alpha.graph.differentiate import differentiate

    t = Tracer("second")
    x = t.input("x", (6,), "f32")
    _, second = t.split(t.scale(x, factor=2.0), sizes=(2, 4), axis=0)
    t.output("g", differentiate(t, t.sum(t.mul(second, second), axis=(0,), keepdims=False), [x])[0])
    value = rng.integers(-9, 9, 6).astype(float)
    got = evaluate(t.graph, {"x": value}, {})[0]["g"]
    return Measured(error=float(np.abs(got - np.where(np.arange(6) < 2, 0, 8 * value)).max()), bound=0.0)


def _told_where(ref: Reference, rng: np.random.Generator) -> Measured:
    """Work of the backward stands in the layer and at the line of the row that it is of: both are where the forward has them together."""
    nodes = training_graph(ref).nodes
    forward = {(n.layer, n.source) for n in nodes if n.phase == "forward"}
    backward = [(n.layer, n.source) for n in nodes if n.phase == "backward" and n.op != "fill"]
    astray = sorted({*backward} - forward)
    layers = {layer for layer, _ in forward if layer.startswith("block.")} - {layer for layer, _ in backward}
    return yes(bool(backward) and not astray and not layers, f"{astray[:2]} {sorted(layers)}", cases=len(backward))


def _refuse_no_vjp(rng: np.random.Generator) -> Measured:
    from alpha.graph.differentiate import differentiate

    t = Tracer("no vjp")
    x = t.input("x", (4, VOCAB), "f32")
    y = t.gelu_bwd(x, x, approximate="tanh")
    return refuses(GraphError, lambda: differentiate(t, t.sum(y, axis=(0, 1), keepdims=False), [x]))


def _refuse_unused(rng: np.random.Generator) -> Measured:
    from alpha.graph.differentiate import differentiate

    t = Tracer("unused")
    x, unused = t.input("x", (4,), "f32"), t.param("unused", (3,), Init("zeros"))
    return refuses(GraphError, lambda: differentiate(t, t.sum(x, axis=(0,), keepdims=False), [x, unused]))


# -- recompute, schedule, fuse -------------------------------------------------------------------------------------------------------


def _recompute(policy: str, ops: tuple[str, ...]) -> Callable[[Reference, np.random.Generator], Measured]:
    def check(ref: Reference, rng: np.random.Generator) -> Measured:
        graph = training_graph(ref)
        there = {n.op for n in graph.nodes}
        after = verify(prune(recompute(graph, policy, tuple(op for op in ops if op in there))), "recompute")
        copies = [n for n in after.nodes if n.phase == "recompute"]
        kept = [v for n in after.nodes if n.phase not in ("forward", "recompute") for v in n.inputs
                if v.producer is not None and v.producer.phase == "forward" and v.producer.op in ops]
        error = same_updates(graph, after, batch(ref, rng), random_state(ref, rng))
        return Measured(error=error if copies and not kept else float("inf"), bound=0.0, cases=len(copies),
                        note=f"bitwise; cases = recomputed nodes; {len(kept)} values of these ops are kept")
    return check


def _recompute_saves(ref: Reference, rng: np.random.Generator) -> Measured:
    """Per-block recompute must shorten lifetimes: the live lower bound falls."""
    peaks = [program(ref.name, policy=p, fused=False).plans["micro_first@0"].memory.lower for p in ("none", "block")]
    return yes(peaks[1] < peaks[0], f"live bytes {peaks[0]} -> {peaks[1]}")


def _schedule(ref: Reference, rng: np.random.Generator) -> Measured:
    graph = prune(recompute(training_graph(ref), "block"))
    after = verify(schedule(graph), "schedule")
    if sorted(map(id, after.nodes)) != sorted(map(id, graph.nodes)):
        return yes(False, "nodes lost or doubled")
    return Measured(error=same_updates(graph, after, batch(ref, rng), random_state(ref, rng)), bound=0.0, note="bitwise")


def _schedule_prompt(ref: Reference, rng: np.random.Generator) -> Measured:
    """Recomputed nodes stand behind the forward; a gradient reaches its buffer before any other backward work is begun."""
    nodes = schedule(prune(recompute(training_graph(ref, accumulate=True), "block"))).nodes
    at = {n: i for i, n in enumerate(nodes)}
    last_forward = max(i for i, n in enumerate(nodes) if n.phase == "forward")
    early = sum(at[n] < last_forward for n in nodes if n.phase == "recompute")
    late = 0
    for n in nodes:
        if n.phase == "wgrad":
            made = max(at[v.producer] for v in n.inputs if v.producer is not None)
            late += any(x.phase != "wgrad" for x in nodes[made + 1 : at[n]]) and nodes[made].phase == "backward"
    return Measured(error=float(early + late), bound=0.0, cases=len(nodes), note="nodes out of place")


def _exchanges(count: int, ready: tuple[int, ...] = (), phase: str = "reduce", groups: int = 1) -> Tracer:
    """A chain of matrix products, and `count` sums over a group of two ranks of some of them, on the stream beside compute, in `phase`.
    Outputs: the last product, and the mean of each sum. `ready`: after which product each can begin (default: one after the other);
    `groups`: how many take turns."""
    t = Tracer("exchanges")
    x, values = t.input("x", (8, 8), "f32"), []
    for _ in range(count + 2):
        x = t.matmul(x, x)
        values.append(x)
    t.output("y", x)
    for i, at in enumerate(ready or range(count)):
        with t.unit(f"unit.{i}"):
            t.phase = phase
            taken = t.reshape(values[at], shape=(64,))
            t.stream = COMM
            total = t.all_reduce(taken, group=("dp", "tp")[i % groups], size=2, reduce="sum")
            t.phase, t.stream = "forward", COMPUTE
            t.output(f"mean.{i}", t.mean(total, axis=(0,), keepdims=False))
    return t


def _schedule_keeps_groups(rng: np.random.Generator) -> Measured:
    """What acts on one group keeps its order, although a later one could begin before an earlier one; what is ready goes at once."""
    nodes = schedule(_exchanges(3, ready=(2, 0, 1)).graph).nodes
    layers = [n.layer for n in nodes if n.acts]
    prompt = schedule(_exchanges(3).graph).nodes
    chained = Tracer("chained")
    total = chained.input("x", (64,), "f32")
    for i in range(3):
        with chained.unit(f"unit.{i}"):
            total = chained.all_reduce(total, group="dp", size=2, reduce="sum")
    chained.output("y", total)
    layers += [n.layer for n in schedule(chained.graph).nodes]
    beside = [i for i, n in enumerate(prompt) if n.acts]
    last = max(i for i, n in enumerate(prompt) if n.op == "matmul")
    return yes(layers == 2 * ["unit.0", "unit.1", "unit.2"] and max(beside) < last, f"{layers}, {beside} of {last}", cases=6)


def _schedule_keeps_drawn(rng: np.random.Generator) -> Measured:
    """So however many there are of however many groups, and whenever each could begin; and nothing comes before what makes its operands."""
    wrong, cases = 0, 40
    for _ in range(cases):
        n, groups = int(rng.integers(3, 8)), int(rng.integers(1, 3))
        graph = _exchanges(n, ready=tuple(int(k) for k in rng.integers(0, n, n)), groups=groups).graph
        acting = [(node.attrs["group"], node.layer) for node in verify(schedule(graph), "schedule").nodes if node.acts]
        for group in {name for name, _ in acting}:
            layers = [layer for name, layer in acting if name == group]
            wrong += layers != sorted(layers)
    return Measured(error=float(wrong), bound=0.0, cases=cases, note="groups out of order")


def _schedule_beside_room(rng: np.random.Generator) -> Measured:
    """What runs beside compute waits for the next node that leaves it room, and for no other: by a walk from each one's place, node by
    node, that ends where it, or one behind it, is needed. Compute keeps its order, and so does what runs beside it."""
    wrong = cases = moved = 0
    for trial in range(60):
        n = int(rng.integers(2, 8))
        graph = _drawn_streams(rng).graph if trial % 2 else _exchanges(n, ready=tuple(int(k) for k in rng.integers(0, n, n)),
                                                                       groups=int(rng.integers(1, 3))).graph
        before = schedule(graph).nodes
        roomy = {str(x) for x in rng.choice(sorted({x.op for x in before}), 2)}
        after = verify(schedule(graph, roomy), "schedule").nodes
        compute, beside = ([x for x in before if x.stream == s] for s in (COMPUTE, COMM))
        for k, one in enumerate(beside):
            place = i = before.index(one)
            while i < len(before) and not (before[i].stream == COMPUTE and any(v.producer in beside[k:] for v in before[i].inputs)):
                if before[i].stream == COMPUTE and before[i].op in roomy:
                    place = i
                    break
                i += 1
            moved += place != before.index(one)
            wrong += [x for x in after[: after.index(one)] if x.stream == COMPUTE] != [x for x in before[:place] if x.stream == COMPUTE]
        wrong += ([x for x in after if x.stream == COMPUTE], [x for x in after if x.stream == COMM]) != (compute, beside)
        cases += len(beside) + 1
    return yes(not wrong and moved > 20, f"{wrong} out of place, {moved} moved", cases=cases)


def _exchanges_kept(rng: np.random.Generator) -> Measured:
    """What acts on other ranks is neither pruned, nor computed twice by recompute, though nothing reads it or it is a block's."""
    t = _exchanges(2, phase="forward")
    for n in t.graph.nodes:
        n.layer = "block.0"
    t.phase, t.layer = "backward", "block.0"
    t.output("late", t.add(t.graph.outputs["mean.0"], t.graph.outputs["mean.1"]))
    after = prune(recompute(t.graph, "block"))
    acting = [n for n in after.nodes if n.acts]
    again = [n for n in after.nodes if n.phase == "recompute"]
    del t.graph.outputs["mean.0"], t.graph.outputs["mean.1"], t.graph.outputs["late"]
    left = [n for n in prune(t.graph).nodes if n.acts]
    return yes(len(acting) == len(left) == 2 and bool(again) and all(n.stream == COMM for n in acting), cases=4)


def _refuse_cycle(rng: np.random.Generator) -> Measured:
    graph = training_graph(references()[LLAMA])
    first = next(n for n in graph.nodes if n.inputs and n.inputs[0].producer is None)
    late = graph.nodes[-1].outputs[0]
    broken = Node(first.op, (late, *first.inputs[1:]), first.attrs, first.outputs, first.layer, first.phase)
    for v in first.outputs:
        v.producer = broken
    nodes = [broken if n is first else n for n in graph.nodes]
    return refuses(GraphError, lambda: schedule(Graph("cycle", graph.inputs, graph.states, nodes, graph.outputs, graph.updates)))


def _fuse(ref: Reference, rng: np.random.Generator) -> Measured:
    graph = training_graph(ref, accumulate=True)
    after = verify(prune(fuse(graph, kernels(), "cpu")), "fuse")
    made = [n for n in after.nodes if isinstance(table()[n.op], FusedSpec)]
    error = same_updates(graph, after, batch(ref, rng), random_state(ref, rng))
    return Measured(error=error if made else float("inf"), bound=0.0, cases=len(made), note="bitwise; cases = fused nodes")


def _fuse_finds(rng: np.random.Generator) -> Measured:
    """Every fused row that the CPU has a kernel for occurs in one of the reference models."""
    rows = {s.name for s in table().values() if isinstance(s, FusedSpec) and kernels().for_op(s.name, "cpu")}
    found = {n.op for ref in references().values() for n in fuse(training_graph(ref, accumulate=True), kernels(), "cpu").nodes}
    return yes(bool(rows) and rows <= found, f"missing {sorted(rows - found)}", max(1, len(rows)))


def _fuse_keeps_outside_readers(rng: np.random.Generator) -> Measured:
    """A value made inside a match and read outside, or given out, must stay: accumulate(into, matmul) is not fused then. Nor are rows
    between which another one reads what the first makes."""
    worst = 0.0
    for how in ("read", "output", "between"):
        t = Tracer("outside")
        into, a, b = t.input("into", (8, 8), "f32"), t.input("a", (8, 8), "f32"), t.input("b", (8, 8), "f32")
        product = t.add(a, b) if how == "between" else t.matmul(a, b)
        if how == "between":
            t.output("z", t.scale(product, factor=2.0))
            t.output("y", t.rmsnorm(product, t.input("gain", (8,), "f32"), eps=1e-5)[0])
        else:
            t.output("y", t.accumulate(into, product))
            t.output("z", t.scale(product, factor=2.0) if how == "read" else product)
        after = verify(fuse(t.graph, kernels(), "cpu"), "fuse")
        data = {k: rng.integers(-5, 5, (8, 8)).astype(float) for k in ("into", "a", "b")} | {"gain": np.ones(8)}
        worst = max(worst, same_updates(t.graph, after, {k: data[k] for k in t.graph.inputs}, {}))
    return Measured(error=worst, bound=0.0, cases=3)


def _fuse_within_a_phase(rng: np.random.Generator) -> Measured:
    """Rows of two phases are fused only where both are of the backward: forward and recomputed work stays in its own phase."""
    wrong, phases = [], ("forward", "recompute", "backward", "wgrad")
    for first in phases:
        for second in phases:
            t = Tracer("phases")
            into, a, b = (t.input(name, (8, 8), "f32") for name in ("into", "a", "b"))
            t.phase = first
            product = t.matmul(a, b)
            t.phase = second
            t.output("y", t.accumulate(into, product))
            nodes = verify(fuse(t.graph, kernels(), "cpu"), "fuse").nodes
            together = first == second or {first, second} == {"backward", "wgrad"}
            if len(nodes) != 2 - together or nodes[-1].phase != second:
                wrong.append(f"{first} and {second}")
    return yes(not wrong, ", ".join(wrong), cases=len(phases) ** 2)


def _fuse_of_one_place(rng: np.random.Generator) -> Measured:
    """Rows are fused only where each effect of theirs is the same, and no result of either has an extent: pairs of drawn ones, and each
    effect and extent alone."""
    wrong, fused, cases = list[str](), 0, 48
    for case in range(cases):
        t = Tracer("places")
        into, a, b, n = (*(t.input(name, (8, 8), "f32") for name in ("into", "a", "b")), t.input("n", (), "i32"))
        y = t.accumulate(into, t.matmul(a, b))
        product, total = t.graph.nodes
        for field, values in {"stream": (COMPUTE, COMM), "stage": (None, 0, 1), "microbatch": (None, 0, 1), "sms": (0, 8)}.items():
            common = values[int(rng.integers(len(values)))]
            setattr(product, field, common)
            setattr(total, field, common)
        if case < 4:
            setattr(total, ("stream", "stage", "microbatch", "sms")[case], (COMM if product.stream == COMPUTE else COMPUTE, 2, 2, 16)[case])
        elif case < 6:
            t.graph.nodes[case - 4].outputs[0].extent = n
        elif case % 2:
            setattr(total, ("stage", "microbatch")[int(rng.integers(2))], int(rng.integers(2)))
        t.output("y", y)
        same = product.effects() == total.effects() and all(v.extent is None for v in (*product.outputs, y))
        nodes = fuse(t.graph, kernels(), "cpu").nodes
        fused += same
        if len(nodes) != 2 - same or nodes[-1].effects() != total.effects():
            wrong.append(f"{product.effects()} and {total.effects()}: {nodes}")
    return yes(not wrong and fused > 9, ", ".join(wrong)[:200], cases=cases)


# -- expand --------------------------------------------------------------------------------------------------------------------------


def _without(*ops: str) -> Catalogue:
    """The CPU kernels but those of these rows."""
    found = Catalogue()
    for c in kernels():
        if c.op not in ops:
            found.add(c)
    return found


def _composed() -> list[str]:
    """Every row that is a composition of others."""
    return [name for name, spec in table().items() if spec.compose is not None]


def _expand(ref: Reference, rng: np.random.Generator) -> Measured:
    """A model's gradients keep every bit under the oracles; parts stand in the layer and phase of their row, and no row that has a
    composition is left without a kernel."""
    graph = training_graph(ref, accumulate=True)
    after = verify(prune(expand(graph, _without(*_composed()), "cpu")), "expand")
    apart = [n for n in graph.nodes if table()[n.op].compose is not None]
    left = [n for n in after.nodes if table()[n.op].compose is not None]
    places = [[place for place, _ in groupby((n.layer, n.phase) for n in g.nodes)] for g in (graph, after)]
    error = same_updates(graph, after, batch(ref, rng), random_state(ref, rng))
    return Measured(error=error if apart and not left and places[0] == places[1] else float("inf"), bound=0.0, cases=len(apart),
                    note="bitwise; cases = rows taken apart")


def _expand_rows(rng: np.random.Generator) -> Measured:
    """Every composed row on its own samples: the oracle of the row and those of its parts agree to float64 roundoff."""
    worst, cases = 0.0, 0
    for name in _composed():
        spec = table()[name]
        for s in spec.samples(rng):
            if sum(np.size(x) for x in s.inputs) > 20_000:
                continue
            t = Tracer(name)
            given = {f"x{i}": x for i, x in enumerate(s.inputs)}
            made = t(name, *(t.input(k, x.shape, "f32" if x.dtype.kind == "f" else "i32") for k, x in given.items()), **s.attrs)
            for i, v in enumerate(made if isinstance(made, tuple) else (made,)):
                t.output(f"y{i}", v)
            after = verify(prune(expand(t.graph, Catalogue(), "cpu")), "expand")
            cases += 1
            if any(table()[n.op].compose is not None for n in after.nodes):
                return yes(False, f"{name} is left whole")
            for k, want in evaluate(t.graph, given, {})[0].items():
                got, size = evaluate(after, given, {})[0][k], float(np.abs(want[np.isfinite(want)]).max(initial=1e-300))
                with np.errstate(invalid="ignore"):
                    same = np.where(np.isfinite(want), np.abs(got - want) / size, got != want)
                worst = max(worst, float(same.max(initial=0.0)))
    return Measured(error=worst, bound=1e-12, cases=cases, note="relative to the largest element of a result")


def _expand_nested(rng: np.random.Generator) -> Measured:
    """A part that is a composition without a kernel is taken apart in its turn; one with a kernel stays."""
    t = Tracer("nested")
    x, weight = t.input("x", (4, 8), "f32"), t.input("weight", (24, 8), "f32")
    for name, v in zip(("pre", "y"), t.linear_swiglu(x, weight, trans_b=True)):
        t.output(name, v)
    nodes = expand(t.graph, _without("linear_swiglu", "swiglu_packed"), "cpu").nodes
    return yes([n.op for n in nodes] == ["matmul", "split", "swiglu"], str([n.op for n in nodes]))


def _expand_keeps(ref: Reference, rng: np.random.Generator) -> Measured:
    """What a kernel covers stays the very node that it was, fused rows too."""
    graph = fuse(expand(training_graph(ref), kernels(), "cpu"), kernels(), "cpu")
    after = expand(graph, kernels(), "cpu")
    good = any(isinstance(table()[n.op], FusedSpec) for n in graph.nodes)
    return yes(good and list(map(id, after.nodes)) == list(map(id, graph.nodes)), cases=len(graph.nodes))


def _expand_envelope(rng: np.random.Generator) -> Measured:
    """A call outside every kernel's envelope is taken apart, although the row has a kernel."""
    t = Tracer("bf16")
    a, b, gain = (t.input(name, shape, "bf16") for name, shape in (("a", (4, 8)), ("b", (4, 8)), ("gain", (8,))))
    t.output("y", t.add_rmsnorm(a, b, gain, eps=1e-5)[1])
    return yes([n.op for n in expand(t.graph, kernels(), "cpu").nodes] == ["add", "rmsnorm"])


def _expand_names(rng: np.random.Generator) -> Measured:
    """A part that nothing covers is refused by selection, by its own name."""
    t = Tracer("no kernel")
    t.output("y", t.swiglu_packed(t.input("x", (4, 8), "f32")))
    nodes = expand(t.graph, _without("swiglu_packed", "swiglu"), "cpu")
    return refuses(InputError, lambda: select(nodes, _without("swiglu_packed", "swiglu"), "cpu"))


# -- select, memory ------------------------------------------------------------------------------------------------------------------


def _select(ref: Reference, rng: np.random.Generator) -> Measured:
    graph = training_graph(ref)
    chosen = select(graph, kernels(), "cpu")
    good = all(chosen[n].op == n.op and chosen[n].envelope.why_outside([v.type for v in n.inputs], n.attrs) is None
               for n in graph.nodes if not table()[n.op].view)
    return yes(good and len(chosen) == sum(not table()[n.op].view for n in graph.nodes), cases=max(1, len(chosen)))


def _select_first(rng: np.random.Generator) -> Measured:
    """Of several kernels of a row the first by id takes the call that its envelope covers, in whatever order they were added."""
    ids, wrong = ["scale.a", "scale.b", "scale.c", "scale.d"], []
    t = Tracer("several")
    t.output("y", t.scale(t.input("x", (4,), "f32"), factor=2.0))
    for covers in ((1, 1, 1, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 0, 1)):
        found = Catalogue()
        for i in rng.permutation(4):
            found.add(Component(id=ids[i], kind="kernel", backend="cpu", op="scale", implementation=_select_first,
                                envelope=Envelope(dtypes=("f32",) if covers[i] else ("f64",))))
        (chosen,) = select(t.graph, found, "cpu").values()
        wrong += [] if chosen.id == ids[covers.index(1)] else [f"{chosen.id} of {covers}"]
    return yes(not wrong, ", ".join(wrong), cases=4)


def _refuse_extent_made(rng: np.random.Generator) -> Measured:
    """So is what makes one and reads none, as a receipt."""
    found = Catalogue()
    found.add(Component(id="receive.planned", kind="kernel", backend="cuda", op="receive", implementation=_refuse_extent_made))
    t = Tracer("received")
    got = t.receive(shape=(64,), dtype="f32", group="dp", size=2, source=0)
    t.output("y", t.extent(got, t.input("n", (), "i32")))
    return refuses(InputError, lambda: select(verify(t.graph, "trace"), found, "cuda"))


def _refuse_extent_read(rng: np.random.Generator) -> Measured:
    """A back end that knows no extents refuses what reads one and makes nothing, as a send."""
    found = Catalogue()
    found.add(Component(id="send.planned", kind="kernel", backend="cuda", op="send", implementation=_refuse_extent_read))
    t = Tracer("sent")
    t.send(t.extent(t.input("x", (64,), "f32"), t.input("n", (), "i32")), group="dp", size=2, to=1)
    return refuses(InputError, lambda: select(verify(t.graph, "trace"), found, "cuda"))


def _refuse_dtype(rng: np.random.Generator) -> Measured:
    t = Tracer("bf16")
    t.output("y", t.gelu(t.input("x", (4,), "bf16"), approximate="tanh"))
    return refuses(InputError, lambda: select(t.graph, kernels(), "cpu"))


def _refuse_no_kernel(rng: np.random.Generator) -> Measured:
    return refuses(InputError, lambda: select(training_graph(references()[GPT]), Catalogue(), "cpu"))


def _plan(ref: Reference, policy: str) -> tuple[Graph, Plan]:
    states = program(ref.name).states
    graph = schedule(prune(fuse(prune(recompute(training_graph(ref, accumulate=True), policy)), kernels(), "cpu")))
    chosen = select(graph, kernels(), "cpu")
    return graph, lay_out(graph, chosen, 2, {k: s.size * 4 for k, s in states.items()})


def _ownership(ref: Reference, rng: np.random.Generator) -> Measured:
    """Walk the plan with a map of which launch last wrote each 4-byte word: every read must find the words of the value it names.

    Shares no code with the packer: it knows only the graph's edges and the plan's addresses.
    """
    bad = reads = 0
    for policy in ("none", "block"):
        graph, plan = _plan(ref, policy)
        owner = {name: np.full((n + 3) // 4, -1, np.int64) for name, n in plan.arenas.items()}
        tags: dict[Value, int] = {}
        leaves = {**{v: plan.inputs[k] for k, v in graph.inputs.items()},
                  **{v: Ref(f"state.{v.state[0]}", v.state[1] * 4, v.type) for v in graph.states.values() if v.state}}
        for tag, (v, ref_) in enumerate(leaves.items()):
            owner[ref_.arena][ref_.offset // 4 : (ref_.stop + 3) // 4] = tags[v] = 10**6 + tag
        launched = iter(plan.launches)
        for i, node in enumerate(graph.nodes):
            if table()[node.op].view:
                tags[node.outputs[0]] = tags[node.inputs[0]]
                continue
            launch = next(launched)
            for v, r in zip(node.inputs, launch.ins, strict=True):
                words = owner[r.arena][r.offset // 4 : (r.stop + 3) // 4]
                reads += 1
                bad += int((words != tags[v]).any())
            places = [(v, r) for v, r in zip(node.outputs, launch.outs, strict=True)]
            spans = sorted((r.arena, r.offset, r.stop) for _, r in places)
            spans += [(launch.scratch.arena, launch.scratch.offset, launch.scratch.stop)] if launch.scratch else []
            spans.sort()
            bad += sum(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(spans))
            if launch.scratch:
                owner[launch.scratch.arena][launch.scratch.offset // 4 : (launch.scratch.stop + 3) // 4] = -2
            for k, (v, r) in enumerate(places):
                tags[v] = i * 8 + k
                owner[r.arena][r.offset // 4 : (r.stop + 3) // 4] = tags[v]
        for key, v in graph.updates.items():
            words = owner[f"state.{key[0]}"][key[1] : key[1] + v.type.size]
            bad += int((words != tags[v]).any())
    return Measured(error=float(bad), bound=0.0, cases=reads, note="reads that found another value's words")


def _planned_equals_fresh(ref: Reference, rng: np.random.Generator) -> Measured:
    """The plan in its shared arenas gives the bits of the same kernels on fresh, separate, poisoned memory."""
    graph, plan = _plan(ref, "none")
    inputs, state = batch(ref, rng), random_state(ref, rng)
    p = program(ref.name)
    alone = type(p)(p.name, {plan.name: plan}, (), p.states, p.facts)
    with CpuExecutor(alone, kernels()) as executor:
        for arena in executor.arenas.values():
            arena[...] = 0xFF
        for kind in ("param", "grad0", "counter"):
            executor.state(kind)[...] = state[kind]
        old = {k: executor.state(k).copy() for k in ("param", "grad0", "counter")}
        executor.run(plan.name, inputs)
        got = executor.state("grad0").copy()
    want = _fresh(graph, inputs, old)
    differ = sum(int(got[o : o + x.size].tobytes() != np.ascontiguousarray(x).tobytes()) for (_, o), x in want.items())
    return Measured(error=float(differ), bound=0.0, cases=len(want), note="tensors whose bits differ")


def _fresh(graph: Graph, inputs: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    env: dict[Value, Any] = {v: inputs[k] for k, v in graph.inputs.items()}
    for (kind, offset, shape), v in graph.states.items():
        env[v] = state[kind][offset : offset + v.type.size].reshape(shape).copy()
    chosen, workers = select(graph, kernels(), "cpu"), Workers(2)
    for node in graph.nodes:
        if node in chosen:
            outs = run_kernel(chosen[node], [env[v] for v in node.inputs], [v.type for v in node.inputs], node.attrs, workers=workers)
        else:
            outs = (env[node.inputs[0]].reshape(node.outputs[0].type.shape),)
        env.update(zip(node.outputs, outs, strict=True))
    workers.close()
    return {k: env[v] for k, v in graph.updates.items()}


def _arenas_exact(ref: Reference, rng: np.random.Generator) -> Measured:
    """peak is the last byte used, not below the lower bound, not above the sum; the executor's arenas have exactly the planned bytes, from
    the beginning of a page on."""
    p = program(ref.name)
    good = all(q.memory.lower <= q.memory.peak <= q.memory.total for q in p.plans.values())
    for q in p.plans.values():
        used = [r.stop for x in q.launches for r in (*x.ins, *x.outs, *((x.scratch,) if x.scratch else ())) if r.arena == "act"]
        good &= q.arenas["act"] == q.memory.peak == max(used, default=0)
        for arena, refs in (("io", q.inputs), ("out", q.outputs)):  # as long as what lies in it, and no longer
            good &= q.arenas[arena] == max((r.stop for r in refs.values() if r.arena == arena), default=0)
    with CpuExecutor(p, kernels()) as executor:
        good &= {k: a.size for k, a in executor.arenas.items()} == p.arenas()
        good &= not any(a.ctypes.data % PAGE for a in executor.arenas.values() if a.size)
    return yes(good, cases=len(p.plans))


def _shares(ref: Reference, rng: np.random.Generator) -> Measured:
    """Sharing works: the peak of the training plan is well under the sum of all tensors, and within 1.25 of the lower bound."""
    m = program(ref.name).plans["micro_first@0"].memory
    return Measured(error=m.peak / m.lower, bound=1.25, note=f"peak/lower; sum/peak = {m.total / m.peak:.2f}")


def _random_order(rng: np.random.Generator) -> tuple[list[str | None], list[set[int]]]:
    n = int(rng.integers(2, 30))
    streams = [(COMPUTE, COMM, "third", None)[int(k)] for k in rng.integers(4 if rng.random() < 0.5 else 3, size=n)]
    return streams, [set(rng.choice(i, int(rng.integers(0, min(i, 3) + 1)), replace=False).tolist()) if i else set() for i in range(n)]


def _order_is_reachability(rng: np.random.Generator) -> Measured:
    """`before` is reachability over the streams and the waits, as a search over all edges finds it; `waits` alone give the same; and
    calls whose windows are apart run one after the other."""
    wrong = cases = 0
    for _ in range(60):
        streams, after = _random_order(rng)
        order, n = Order(streams, after), len(streams)
        run = [i for i in range(n) if streams[i] is not None]
        for edges_ in (after, [set(order.waits(i)) for i in range(n)]):
            reach = np.zeros((n, n), bool)
            for j in run:
                for i in run:
                    if i < j and (streams[i] == streams[j] or i in edges_[j]):
                        reach[:, j] |= reach[:, i]
                        reach[i, j] = True
            for i in run:
                for j in run:
                    cases += 1
                    wrong += order.before(i, j) != reach[i, j]
                    (a, b), (c, _) = order.window(i), order.window(j)
                    wrong += b < c and not reach[i, j] and i != j
                    wrong += not a <= i <= b
        wrong += sum(len({streams[j] for j in order.waits(i)}) != len(order.waits(i)) for i in run)
    return Measured(error=float(wrong), bound=0.0, cases=cases)


def _refuse_late_wait(rng: np.random.Generator) -> Measured:
    """A call that waits for a later one would wait for ever."""
    return refuses(GraphError, lambda: Order([COMPUTE, COMM], [{1}, set()]))


def _with_exchange() -> Catalogue:
    """The CPU's kernels and an exchange, which plans are made with and nothing runs."""
    found = filled(fill)
    found.add(Component(id="all_reduce.planned", kind="kernel", backend="cpu", op="all_reduce", implementation=_with_exchange,
                        inplace=((0, 0),), scratch=lambda types, attrs, threads: types[0].nbytes))
    found.add(Component(id="reduce_scatter.planned", kind="kernel", backend="cpu", op="reduce_scatter", implementation=_with_exchange))
    return found


def _together(plan: Plan) -> tuple[int, int]:
    """(pairs of launches that touch the same bytes and may run at once, pairs that may run at once)."""
    order = Order([x.stream for x in plan.launches], [x.after for x in plan.launches])
    uses = [[(r, r in (*x.outs, x.scratch)) for r in (*x.ins, *x.outs, x.scratch) if r is not None] for x in plan.launches]
    pairs = [(i, j) for j in range(len(uses)) for i in range(j) if not order.before(i, j)]
    return sum(any((a or b) and r.arena == q.arena and r.offset < q.stop and q.offset < r.stop for r, a in uses[j] for q, b in uses[i])
               for i, j in pairs), len(pairs)


def _beside_is_apart(rng: np.random.Generator) -> Measured:
    """Calls of two streams of which neither waits for the other never touch the same bytes, unless both read: by every pair of launches of
    plans of chains with exchanges beside them."""
    wrong = cases = 0
    for _ in range(20):
        n = int(rng.integers(2, 8))
        ready = tuple(int(k) for k in rng.integers(0, n, n))
        graph = schedule(_exchanges(n, ready=ready, phase="reduce" if rng.random() < 0.7 else "forward").graph)
        touch, pairs = _together(lay_out(graph, select(graph, _with_exchange(), "cpu"), 2, {}))
        wrong, cases = wrong + touch, cases + pairs
    return Measured(error=float(wrong), bound=0.0, cases=cases, note="pairs that touch the same bytes")


def _drawn_streams(rng: np.random.Generator) -> Tracer:
    """A drawn graph: each row on a drawn stream, over any value made before; rows of two results, rows that work in place, views and sums
    over ranks of drawn groups. Some results nobody reads."""
    t = Tracer("drawn streams")
    values = [t.input("x", (8, 64), "f32")]
    gain, back = t.input("gain", (64,), "f32"), int(rng.integers(2, 20))
    for _ in range(int(rng.integers(4, 20))):
        t.stream = (COMPUTE, COMM)[int(rng.random() < 0.5)]
        a, b = (values[int(i)] for i in rng.integers(max(0, len(values) - back), len(values), 2))
        kind = int(rng.integers(7))
        if kind == 0:
            values.append(t.add(a, b))
        elif kind == 1:
            values.append(t.gelu(a, approximate="tanh"))
        elif kind == 2:
            values.append(t.rmsnorm(a, gain, eps=1e-5)[0])
        elif kind == 3:
            values.append(t.reshape(t.reshape(a, shape=(512,)), shape=(8, 64)))
        else:
            total = t.all_reduce(t.reshape(a, shape=(512,)), group=("dp", "tp")[int(rng.integers(2))], size=2, reduce="sum")
            values.append(t.reshape(total, shape=(8, 64)))
    t.stream = COMPUTE
    t.output("y", t.add(values[-1], values[int(rng.integers(len(values)))]))
    return t


def _streams_drawn(rng: np.random.Generator) -> Measured:
    """Plans of drawn graphs, as they are and scheduled: what may run at once touches no common bytes; what acts on one group runs one after
    the other, whatever its streams; what a launch reads was made before, by the waits that the plan has."""
    wrong, cases = list[str](), 0
    for trial in range(40):
        graph = verify(_drawn_streams(rng).graph, "trace")
        graph = schedule(graph) if trial % 2 else graph
        chosen = select(graph, _with_exchange(), "cpu")
        plan = lay_out(graph, chosen, 2, {})
        touch, pairs = _together(plan)
        order = Order([x.stream for x in plan.launches], [x.after for x in plan.launches])
        run = [node for node in graph.nodes if node in chosen]
        at = {node: i for i, node in enumerate(run)}

        def makers(v: Value, at: dict[Node, int] = at) -> list[int]:
            node = v.producer
            return [] if node is None else [at[node]] if node in at else [i for w in node.inputs for i in makers(w)]

        groups = [[at[node] for node in run if node.acts and node.attrs["group"] == group] for group in ("dp", "tp")]
        wrong += ["bytes are touched at once"] * touch
        wrong += ["a group out of order" for of in groups for j in of for i in of if i < j and not order.before(i, j)]
        wrong += ["read before it is made" for node in run for v in node.inputs for i in makers(v) if not order.before(i, at[node])]
        cases += pairs + len(run)
    return Measured(error=float(len(wrong)), bound=0.0, cases=cases, note=wrong[0] if wrong else "")


def _named_in_any_order(rng: np.random.Generator) -> Measured:
    """A plan is the same in whatever order inputs and outputs of its graph were named: places and text."""
    wrong, cases = 0, 12
    for _ in range(cases):
        t = _drawn_streams(rng)
        for i in range(4):
            t.output(f"beside.{i}", t.scale(t.input(f"given.{i}", (8 * int(rng.integers(1, 9)), 3), "f32"), factor=2.0))
        graph = schedule(t.graph)
        inputs = {k: graph.inputs[k] for k in rng.permutation(sorted(graph.inputs)).tolist()}
        outputs = {k: graph.outputs[k] for k in rng.permutation(sorted(graph.outputs)).tolist()}
        turned = Graph(graph.name, inputs, graph.states, graph.nodes, outputs, graph.updates)
        plans = [lay_out(g, select(g, _with_exchange(), "cpu"), 1, {}) for g in (graph, turned)]
        wrong += plans[0].text() != plans[1].text()
    return Measured(error=float(wrong), bound=0.0, cases=cases, note="plans that hang on the order of names")


def _bucketed(kind: str = "state", *, read_again: bool = False) -> Plan:
    """Two sums into boxes of one unit, the bucket of both, an earlier sum added, and all of it summed over two ranks."""
    t = Tracer("bucket")
    x = t.input("x", (4, 4), "f32")
    first = t.accumulate(t.state("grad1", 128, (4, 4), "f32"), t.matmul(x, x))
    second = t.scale(x, factor=2.0)
    unit = t.bucket(first, second, offsets=(0, 64), size=128)
    unit = t.accumulate(unit, t.state("grad0", 128, (128,), "f32"))
    unit = t.all_reduce(unit, group="dp", size=2, reduce="sum")
    if kind == "state":
        t.update(t.state("grad1", 128, (128,), "f32"), unit)
    else:
        t.output("unit", unit)
    if read_again:
        t.output("again", t.scale(second, factor=3.0))
    graph = schedule(verify(prune(t.graph), "trace"))
    return lay_out(graph, select(graph, _with_exchange(), "cpu"), 2, {"grad0": 1024, "grad1": 1024})


def _bucket_in_place(rng: np.random.Generator) -> Measured:
    """What makes up a bucket is written where it lies in it, and the sum over ranks ends there: no copy, no memory beside the state's."""
    plan = _bucketed()
    at = {x.op: [(r.arena, r.offset) for r in x.outs] for x in plan.launches if x.op in ("scale", "accumulate", "all_reduce")}
    want = {"scale": [("state.grad1", 4 * (128 + 64))], "accumulate": [("state.grad1", 512)], "all_reduce": [("state.grad1", 512)]}
    reads = {r.arena for x in plan.launches for r in x.ins if x.op in ("accumulate", "all_reduce")}
    return yes(at == want and reads <= {"state.grad1", "state.grad0", "act"}, str(at), cases=3)


def _bucket_kept(rng: np.random.Generator) -> Measured:
    """What else reads a value of which a part of a bucket is a view does not write over it."""
    t = Tracer("kept")
    x = t.input("x", (4, 4), "f32")
    product = t.matmul(x, x)
    unit = t.bucket(t.reshape(product, shape=(16,)), offsets=(0,), size=64)
    t.output("more", t.scale(product, factor=3.0))  # a kernel that may work in place
    t.update(t.state("grad0", 0, (64,), "f32"), t.all_reduce(unit, group="dp", size=2, reduce="sum"))
    graph = verify(prune(t.graph), "trace")
    at = {x.op: x for x in lay_out(graph, select(graph, _with_exchange(), "cpu"), 2, {"grad0": 256}).launches}
    part, more = at["matmul"].outs[0], at["scale"].outs[0]
    return yes((part.arena, part.offset) == ("state.grad0", 0) and more.arena == "out", f"{part}, {more}", cases=2)


def _scattered_apart(rng: np.random.Generator) -> Measured:
    """What is scattered into a part of a box leaves the rest of the box alone: its operand, which is longer, does not lie there."""
    t = Tracer("scattered")
    total = t.accumulate(t.state("grad0", 0, (128,), "f32"), t.input("x", (128,), "f32"))
    t.update(t.state("grad0", 0, (64,), "f32"), t.reduce_scatter(total, group="dp", size=2, reduce="sum"))
    plan = lay_out(t.graph, select(t.graph, _with_exchange(), "cpu"), 2, {"grad0": 512})
    (made,) = (x.outs[0] for x in plan.launches if x.op == "accumulate")
    return yes(made.arena == "act", str(made))


def _largest_first(rng: np.random.Generator) -> Measured:
    """A small value that lives before and beside a large one does not split the memory that the large one needs."""
    t = Tracer("chain")
    first = t.matmul(t.input("x", (8, 8), "f32"), t.input("x2", (8, 8), "f32"))
    second = t.matmul(first, first)
    t.output("y", t.matmul(second, t.matmul(second, t.input("wide", (8, 16), "f32"))))
    memory = lay_out(t.graph, select(t.graph, kernels(), "cpu"), 2, {}).memory
    return yes(memory.peak == memory.lower == 3 * 256, f"peak {memory.peak}, lower bound {memory.lower}")


def _aligned(rng: np.random.Generator) -> Measured:
    """What lies outside of states begins at a multiple of 256 bytes, whatever the sizes of what is beside it."""
    t = Tracer("aligned")
    for i, n in enumerate(rng.integers(1, 300, 5).tolist()):
        a, b = t.input(f"a{i}", (n, 3), "f32"), t.input(f"b{i}", (3, n), "f32")
        t.output(f"y{i}", t.matmul(t.matmul(t.matmul(a, b), a), t.scale(b, factor=2.0)))
    plan = lay_out(t.graph, select(t.graph, kernels(), "cpu"), 2, {})
    places = {r for x in plan.launches for r in (*x.ins, *x.outs, *((x.scratch,) if x.scratch else ()))}
    astray = [str(r) for r in places if r.offset % 256]
    return yes(not astray and {r.arena for r in places} >= {"act", "io", "out"}, ", ".join(astray[:3]), cases=len(places))


def _read_twice(rng: np.random.Generator) -> Measured:
    """A value that one launch reads as two operands is not overwritten by that launch: its kernel may write before it reads again."""
    catalogue = filled(fill)
    pairs = next(c.inplace for c in catalogue.for_op("add", "cpu"))
    apart = []
    for again in (True, False):
        t = Tracer("twice")
        x = t.scale(t.input("x", (64,), "f32"), factor=2.0)
        t.output("y", t.scale(t.add(x, x if again else t.input("z", (64,), "f32")), factor=3.0))
        made, added, _ = lay_out(t.graph, select(t.graph, catalogue, "cpu"), 1, {}).launches
        apart.append((made.outs[0].arena, made.outs[0].offset) != (added.outs[0].arena, added.outs[0].offset))
    return yes(bool(pairs) and apart == [True, False], f"{pairs}: {apart}", cases=2)


def _two_readers(rng: np.random.Generator) -> Measured:
    """A sum on the way to a state box that is read once more, behind the next sum, does not lie in the box."""
    wrong = []
    for late in (False, True):
        t = Tracer("two readers")
        box, a = t.state("grad0", 0, (64,), "f32"), t.input("a", (64,), "f32")
        first = t.accumulate(box, a)
        other = None if late else t.scale(first, factor=2.0)
        second = t.accumulate(first, a)
        t.update(box, second)
        t.output("y", t.scale(first, factor=2.0) if other is None else other)
        plan = lay_out(t.graph, select(t.graph, kernels(), "cpu"), 1, {"grad0": 256})
        ends = {x.outs[0]: x.ins[0] for x in plan.launches if x.op == "accumulate"}
        read = next(x.ins[0] for x in plan.launches if x.op == "scale")
        wrong += [] if plan.launches[-1 - late].outs[0] == Ref("state.grad0", 0, box.type) else [f"{plan.launches}"]
        wrong += [] if not late or (read in ends and read.arena != "state.grad0") else [f"read at {read} of {ends}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=2)


def _refuse_bucket(rng: np.random.Generator) -> Measured:
    """A bucket without a place, and one that shares storage with what is read when the sum over ranks may stand there: a part, what a part
    is a view of, a view of a part, or a result of the plan. What is read before may be."""
    found = [refuses(GraphError, lambda: _bucketed("output")), refuses(GraphError, lambda: _bucketed(read_again=True)),
             refuses(GraphError, lambda: _bucket_of_views("after")), refuses(GraphError, lambda: _bucket_of_views("view after")),
             refuses(GraphError, lambda: _bucket_of_views("result"))]
    sound = _bucket_of_views("before").launches
    return yes(all(m.error == 0 for m in found) and [x.op for x in sound] == ["matmul", "scale", "all_reduce"], cases=6)


def _bucket_of_views(how: str) -> Plan:
    """A bucket whose part is a view of a product, which is read before the sum over ranks, after it, as a view of the part, or by the
    caller."""
    t = Tracer("views")
    x = t.input("x", (4, 4), "f32")
    product = t.matmul(x, x)
    part = t.reshape(product, shape=(16,))
    total = t.all_reduce(t.bucket(part, offsets=(0,), size=64), group="dp", size=2, reduce="sum") if how != "before" else None
    if how == "result":
        t.output("product", product)
    else:
        t.output("more", t.scale(t.reshape(part, shape=(2, 8)) if how == "view after" else product, factor=3.0))
    total = total or t.all_reduce(t.bucket(part, offsets=(0,), size=64), group="dp", size=2, reduce="sum")
    t.update(t.state("grad0", 0, (64,), "f32"), total)
    graph = verify(prune(t.graph), "trace")
    return lay_out(graph, select(graph, _with_exchange(), "cpu"), 2, {"grad0": 256})


def _refuse_copy(rng: np.random.Generator) -> Measured:
    """An update that takes a leaf as its value would need a hidden copy: refused."""
    t = Tracer("copy")
    x = t.input("x", (4,), "f32")
    t.update(t.state("param", 0, (4,), "f32"), x)
    return refuses(GraphError, lambda: lay_out(t.graph, {}, 1, {"param": 16}))


def _refuse_late_read(rng: np.random.Generator) -> Measured:
    """A state box read after its update was written in place must be refused, never silently reordered: itself, as a view, a view of a
    view, or a part, and another box that shares elements with it. Read before, it may be."""
    accepted, cases = [], 0
    for how in ("itself", "view", "view of a view", "part", "other box", "before"):
        for late in (False, True):  # whether a view is made behind the update, or only read there
            t = Tracer("late read")
            p, other = t.state("param", 0, (8, 8), "f32"), t.state("param", 32, (8, 8), "f32")
            x, x2 = t.input("x", (8, 8), "f32"), t.input("x2", (8, 8), "f32")
            new = t.matmul(x, x2) if late else None
            seen = other if how == "other box" else p
            seen = t.reshape(seen, shape=(64,)) if how in ("view", "view of a view", "part") else seen
            seen = t.part(seen, offset=0, shape=(4,)) if how == "part" else t.reshape(seen, shape=(4, 16)) if "of a" in how else seen
            read = t.scale(seen, factor=3.0) if how == "before" and not late else None
            new = new or t.matmul(x, x2)
            t.update(p, new)
            t.output("late", read or t.scale(seen, factor=3.0))
            t.output("new", t.scale(new, factor=2.0))
            cases += 1
            if refuses(GraphError, partial(lay_out, t.graph, select(t.graph, kernels(), "cpu"), 1, {"param": 1024})).error:
                accepted.append((how, late))
    return yes(accepted == [("before", False)], str(accepted), cases=cases)


def _refuse_own_read(rng: np.random.Generator) -> Measured:
    """So must one that is read by the node that writes its update, whose kernel does not work in place."""
    t = Tracer("own read")
    p = t.state("param", 0, (4, 4), "f32")
    t.update(p, t.transpose(p, perm=(1, 0)))
    return refuses(GraphError, lambda: lay_out(t.graph, select(t.graph, kernels(), "cpu"), 1, {"param": 64}))


# -- verify --------------------------------------------------------------------------------------------------------------------------


def _verify_accepts(ref: Reference, rng: np.random.Generator) -> Measured:
    return yes(verify(training_graph(ref), "trace") is not None)


def _broken(change: Callable[[Graph], Graph]) -> Case:
    return lambda rng: refuses(GraphError, lambda: verify(change(training_graph(references()[LLAMA])), "a broken pass"))


def _swap(g: Graph) -> Graph:
    reader = next(i for i, n in enumerate(g.nodes) if n.inputs and n.inputs[0].producer is g.nodes[i - 1])
    g.nodes[reader - 1], g.nodes[reader] = g.nodes[reader], g.nodes[reader - 1]
    return g


def _drop(g: Graph) -> Graph:
    del g.nodes[len(g.nodes) // 2]
    return g


def _retype(g: Graph) -> Graph:
    v = g.nodes[-1].outputs[0]
    v.type = type(v.type)((*v.type.shape, 1), v.type.dtype)
    return g


def _twice(g: Graph) -> Graph:
    g.nodes.append(g.nodes[-1])
    return g


def _overlap(g: Graph) -> Graph:
    (kind, offset), v = next((k, v) for k, v in g.updates.items() if v.type.size > 4)
    g.updates[(kind, offset + 1)] = v
    return g


def _adopted(g: Graph) -> Graph:
    g.nodes[3].outputs[0].producer = g.nodes[2]
    return g


def _phase(g: Graph) -> Graph:
    g.nodes[3].phase = "sideways"
    return g


def _stream(g: Graph) -> Graph:
    g.nodes[3].stream = "sideways"
    return g


# -- state layout --------------------------------------------------------------------------------------------------------------------


def _random_layout(rng: np.random.Generator) -> StateLayout:
    tensors = []
    for unit in range(int(rng.integers(11, 14))):  # more than ten, so that block.10 must come after block.2
        for k in range(int(rng.integers(1, 4))):
            shape = tuple(int(n) for n in rng.integers(1, 24, int(rng.integers(0, 4))))
            tensors.append(TensorSpec(f"block.{unit}.t{k}", shape, f"block.{unit}"))
    return StateLayout([tensors[i] for i in rng.permutation(len(tensors))])


def _move(copies: Any, source: list[np.ndarray], target: list[np.ndarray]) -> None:
    for c in copies:
        shape = [hi - lo for lo, hi in c.box]

        def view(a: np.ndarray, offset: int, strides: tuple[int, ...], shape: list[int] = shape) -> np.ndarray:
            return np.lib.stride_tricks.as_strided(a[offset:], shape, [s * a.itemsize for s in strides])
        view(target[c.target], c.target_offset, c.target_strides)[...] = view(source[c.source], c.source_offset, c.source_strides)


def _reshard_round_trip(rng: np.random.Generator) -> Measured:
    """whole -> flat shards -> tensor shards -> flat shards of another number -> whole: every element comes back, padding stays zero."""
    from alpha.graph.state import flat_shards, reshard, tensor_shards, whole

    wrong = 0
    for _ in range(6):
        layout = _random_layout(rng)
        flat = np.zeros(layout.size)
        for o, n in layout.ranges():
            flat[o : o + n] = rng.standard_normal(n)
        ranks = int(rng.choice([1, 2, 3]))
        axis = {t.name: int(rng.integers(len(t.shape))) for t in layout.tensors if t.shape}
        axis = {k: d for k, d in axis.items() if layout.by_name[k].shape[d] % ranks == 0}
        stages = [whole(layout), flat_shards(layout, int(rng.choice([2, 4, 8]))), tensor_shards(layout, axis, ranks),
                  flat_shards(layout, 16), flat_shards(layout, int(rng.choice([3, 5, 7, 65]))), whole(layout)]
        for stage in stages:
            stage.covers()
        held = [flat]
        for a, b in pairwise(stages):
            new = [np.zeros(max(layout.size, layout.shard(len(b.ranks)).size)) for _ in b.ranks]
            _move(reshard(a, b), held, new)
            held = new
        wrong += int((held[0] != flat).any())
    return Measured(error=float(wrong), bound=0.0, cases=6)


def _lowest_replica(rng: np.random.Generator) -> Measured:
    """Of ranks that hold the same elements, whole tensors or equal cuts of them, the lowest is read."""
    from alpha.graph.state import Layout, Piece, flat_shards, reshard, row_major, whole

    layout = _random_layout(rng)
    (mine,) = whole(layout).ranks
    shapes = {t.name: t.shape for t in layout.tensors}
    halves = flat_shards(layout, 2).ranks
    wrong = cases = 0
    for source in (Layout(shapes, (mine,) * 3), Layout(shapes, (*halves, *halves, *halves[::-1]))):
        for c in reshard(source, whole(layout)):
            cases += 1
            wrong += c.source >= (1 if len(source.ranks) == 3 else 2)
    part = Piece("w", ((1, 3),), 0, row_major((2,)))
    overlapping = Layout({"w": (4,)}, ((part,), (Piece("w", ((0, 4),), 0, (1,)),)))
    taken = {c.box: c.source for c in reshard(overlapping, Layout({"w": (4,)}, ((Piece("w", ((0, 4),), 0, (1,)),),)))}
    wrong += taken != {((1, 3),): 0, ((0, 1),): 1, ((3, 4),): 1}
    return Measured(error=float(wrong), bound=0.0, cases=cases + 1)


def _shard_is_cut(rng: np.random.Generator) -> Measured:
    """Rank r of R holds elements [r, r+1) * len / R of every unit, at the same place in its local array."""
    from alpha.graph.state import flat_shards, reshard, whole

    layout = _random_layout(rng)
    flat = np.zeros(layout.size)
    for o, n in layout.ranges():
        flat[o : o + n] = rng.standard_normal(n)
    ranks = 4
    local = [np.zeros(layout.size // ranks) for _ in range(ranks)]
    _move(reshard(whole(layout), flat_shards(layout, ranks)), [flat], local)
    units = [np.split(flat[u.start : u.stop], ranks) for u in layout.units]
    want = [np.concatenate([u[r] for u in units]) for r in range(ranks)]
    return yes(all((a == b).all() for a, b in zip(local, want)), cases=ranks)


def _leaves(rng: np.random.Generator) -> Measured:
    """Leaves hold every element of every tensor once, in pieces of at most `most`, and are the same, rank after rank, whatever the cut."""
    length = 64 * (3 * int(rng.integers(3, 10)) + 1)  # of a part of three leaves, which do not divide it
    most = length // 3 + 1 + int(rng.integers(0, length // 10))
    bigs = [64 * length, *(n * 64 * most + int(rng.integers(1, most)) for n in (1, 2))]
    tensors = [*_random_layout(rng).tensors, *(TensorSpec(f"block.{i}.big", (n,), f"block.{i}") for i, n in enumerate(bigs, 3))]
    layout = StateLayout(tensors)
    inside = np.zeros(layout.size, np.int64)
    for offset, n in layout.ranges():
        inside[offset : offset + n] += 1
    names = np.arange(layout.size)
    whole_ = [np.concatenate([names[o : o + n] for o, n in leaf]) if leaf else names[:0] for leaf in layout.leaves(most)]
    good = all(x.size <= most for x in whole_)
    np.subtract.at(inside, np.concatenate(whole_), 1)
    good &= not inside.any()
    for ranks in (2, 64):
        sharded = layout.shard(ranks)
        again = []
        for rank in range(ranks):
            held = np.concatenate([names[lo:hi] for _, lo, hi in sharded.cuts(rank)])
            again += [np.concatenate([held[o : o + n] for o, n in leaf]) if leaf else names[:0] for leaf in sharded.leaves(rank, most)]
        good &= len(again) == len(whole_) and all(np.array_equal(a, b) for a, b in zip(again, whole_))
    return yes(good, cases=3)


def _blocks(rng: np.random.Generator) -> Measured:
    """Runs hold what the ranges hold, in the same order. Whatever the cut, each block of them is held whole by one rank, where its elements
    are, and is empty on all others."""
    layout, most, cases = _random_layout(rng), int(rng.integers(60, 400)), 0
    names = np.arange(layout.size)
    runs = layout.runs()
    good = np.array_equal(*(np.concatenate([names[o : o + n] for o, n in pieces]) for pieces in (runs, layout.ranges())))
    good &= all(n > 0 for _, n in runs) and len(runs) < 65 * len(layout.units) + len(layout.tensors)
    blocks = [(at, min(at + most, o + n)) for o, n in runs for at in range(o, o + n, most)]
    for ranks in (1, 2, 8, 64):
        sharded, found = layout.shard(ranks), [list[np.ndarray]() for _ in blocks]
        for rank in range(ranks):
            held = np.concatenate([names[lo:hi] for _, lo, hi in sharded.cuts(rank)])
            for own, leaf in zip(found, sharded.blocks(rank, blocks), strict=True):
                own += [held[o : o + n] for o, n in leaf]
        good &= all(len(own) == 1 and np.array_equal(own[0], names[a:b]) for own, (a, b) in zip(found, blocks))
        cases += len(blocks)
    uneven = StateLayout([TensorSpec("a.w", (8192,), "a"), TensorSpec("b.w", (64,), "b")])
    ragged = uneven.shard(48)  # some ranks hold nothing of the small unit; pieces that are their cuts are split by none
    pieces = sorted((lo, hi) for rank in range(48) for _, lo, hi in ragged.cuts(rank) if lo < hi)
    for rank in range(48):
        held = [(lo, hi) for _, lo, hi in ragged.cuts(rank) if lo < hi]
        local = {(lo, hi): at for at, lo, hi in ragged.cuts(rank)}
        want = tuple(((local[piece], piece[1] - piece[0]),) if piece in held else () for piece in pieces)
        good &= not held or ragged.blocks(rank, pieces) == want
    return yes(good, cases=cases + 48)


def _refuse_split_block(rng: np.random.Generator) -> Measured:
    """A block that begins in one rank's cut and ends in another's has no one who could sum it: refused, at either end."""
    layout = StateLayout([TensorSpec("a.w", (8192,), "a"), TensorSpec("b.w", (8192,), "b")])
    at = 64 * int(rng.integers(1, 60))
    found = [refuses(ShapeError, lambda rank=rank: layout.shard(2).blocks(rank, [(at, 4096 + at)])) for rank in (0, 1)]  # type: ignore[misc]
    return yes(all(m.error == 0 for m in found), cases=2)


def _tables(rng: np.random.Generator) -> Measured:
    """The optimizer's tables of all ranks name what the whole table names, with its flags, at the places where the cut lies."""
    layout = _random_layout(rng)
    layout = StateLayout([TensorSpec(t.name, t.shape, t.unit, decay=bool(rng.integers(2)), lr_scale=float(rng.integers(1, 9)))
                          for t in layout.tensors])

    def painted(size: int, segments: Any) -> np.ndarray:
        x = np.zeros((size, 2))
        for o, n, decay, scale in segments:
            x[o : o + n] += (1 + decay, scale)
        return x

    want = painted(layout.size, layout.segments())
    good = True
    for ranks in (1, 4, 64, 6):
        sharded, got = layout.shard(ranks), np.zeros_like(want)
        for rank in range(ranks):
            local = painted(sharded.size, sharded.segments(rank))
            good &= sharded.ranges(rank) == tuple((o, n) for o, n, _, _ in sharded.segments(rank))
            for start, lo, hi in sharded.cuts(rank):
                got[lo:hi] += local[start : start + hi - lo]
        good &= np.array_equal(got, want)
    return yes(good, cases=4)


def _refuse_split_leaf(rng: np.random.Generator) -> Measured:
    """A cut over six ranks would split leaves: no norm is promised for it."""
    return refuses(ShapeError, lambda: _random_layout(rng).shard(6).leaves(0))


def _layout_rules(rng: np.random.Generator) -> Measured:
    """256-byte alignment, canonical order whatever the declaration order, units padded to 4096, no overlap."""
    layout = _random_layout(rng)
    again = StateLayout([layout.tensors[i] for i in rng.permutation(len(layout.tensors))])
    spans = sorted((o, o + n) for o, n in layout.ranges())
    good = again.offsets == layout.offsets and all(b[0] >= a[1] for a, b in pairwise(spans))
    good &= all(o * 4 % 256 == 0 for o, _ in layout.ranges()) and all((u.stop - u.start) % 4096 == 0 for u in layout.units)
    order = [t.unit for t in layout.tensors]
    good &= [int(u.split(".")[1]) for u in dict.fromkeys(order)] == sorted({int(u.split(".")[1]) for u in order})
    return yes(good)


def _refuse_gap(rng: np.random.Generator) -> Measured:
    from alpha.graph.state import Layout, Piece

    shapes: dict[str, tuple[int, ...]] = {"w": (4, 6)}
    half = Piece("w", ((0, 2), (0, 6)), 0, (6, 1))  # twice the same half: as many elements as the whole
    every = Piece("w", ((0, 4), (0, 6)), 0, (6, 1))  # and one half more often than the other
    return yes(all(refuses(GraphError, Layout(shapes, ((one,), (half,))).covers).error == 0 for one in (half, every)), cases=2)


def _refuse_missing(rng: np.random.Generator) -> Measured:
    from alpha.graph.state import Layout, Piece, reshard

    whole_ = Layout({"w": (4, 6)}, ((Piece("w", ((0, 4), (0, 6)), 0, (6, 1)),),))
    part = Layout({"w": (4, 6)}, ((Piece("w", ((0, 3), (0, 6)), 0, (6, 1)),),))
    return refuses(GraphError, lambda: reshard(part, whole_))


def _layout_hash(rng: np.random.Generator) -> Measured:
    layout = _random_layout(rng)
    text = repr(sorted(layout.offsets.items()))
    return Measured(error=0.0, bound=0.0, digest=hash_of(np.frombuffer(text.encode(), np.uint8)))


def _unknown_policy(rng: np.random.Generator) -> Measured:
    return refuses(InputError, lambda: recompute(training_graph(references()[GPT]), "sometimes"))


def _absent_op(rng: np.random.Generator) -> Measured:
    return refuses(InputError, lambda: recompute(training_graph(references()[GPT]), "ops", ("gelu", "swiglu")))


def _fuse_faults(rng: np.random.Generator) -> Measured:
    """Without a kernel for it no fused row may appear."""
    after = fuse(training_graph(references()[GPT], accumulate=True), Catalogue(), "cpu")
    return yes(not any(isinstance(table()[n.op], FusedSpec) for n in after.nodes))


def _fuse_envelope(rng: np.random.Generator) -> Measured:
    """In bf16, which no CPU kernel's envelope covers, no fused row may appear either."""
    t = Tracer("bf16")
    into, a, b = (t.input(name, (8, 8), dtype) for name, dtype in (("into", "f32"), ("a", "bf16"), ("b", "bf16")))
    t.output("y", t.accumulate(into, t.matmul(a, b)))
    return yes([n.op for n in fuse(t.graph, kernels(), "cpu").nodes] == ["matmul", "accumulate"])


def _lower_verifies(rng: np.random.Generator) -> Measured:
    """The pipeline verifies between passes: a broken graph does not come out as a plan."""
    states = program(GPT).states
    return refuses(GraphError, lambda: lower(_swap(training_graph(references()[GPT])), kernels(), "cpu", 2, states))


def _lower_fuses(rng: np.random.Generator) -> Measured:
    """Who says nothing of fusion gets it: the plan is that of a graph that was fused, and another one without."""
    states = program(GPT).states
    graph = training_graph(references()[GPT])
    plan = lower(graph, kernels(), "cpu", 2, states).text()
    fused, plain = (lower(graph, kernels(), "cpu", 2, states, fused=fused).text() for fused in (True, False))
    return yes(plan == fused != plain, cases=3)


def _refuse_shape(rng: np.random.Generator) -> Measured:
    t = Tracer("shape")
    return refuses(ShapeError, lambda: t.matmul(t.input("a", (2, 3), "f32"), t.input("b", (4, 5), "f32")))


_HASHES = _both(_plan_hash_elsewhere)[:1]
_HASHES_LLAMA = _both(_plan_hash_elsewhere)[1:]

CASES: dict[str, dict[str, list[tuple[str, Case]]]] = merged({
    "differentiate.pass": {"parity": [*_both(_finite_difference), ("shared-value", _shared_value),
                                      *[(f"scaled-{n}", c) for n, c in _both(_scaled_loss)],
                                      ("second-result", _second_result), *[(f"told-{n}", c) for n, c in _both(_told_where)],
                                      ("placed", effects.backward_placed), ("types", traced.gradient_types)],
                           "determinism": _HASHES,
                           "faults": [("no-vjp", _refuse_no_vjp), ("unused-parameter", _refuse_unused), ("shape", _refuse_shape)]},
    "recompute.pass": {"parity": [*[(f"block-{n}", c) for n, c in _both(_recompute("block", ()))],
                                  *[(f"ops-{n}", c) for n, c in _both(_recompute("ops", ACTIVATIONS))],
                                  *[(f"across-layers-{n}", c) for n, c in _both(_recompute("ops", ("add",)))],
                                  *[(f"saves-{n}", c) for n, c in _both(_recompute_saves)], ("exchanges", _exchanges_kept),
                                  ("placed", effects.copies_placed)],
                       "determinism": _HASHES, "faults": [("unknown-policy", _unknown_policy), ("absent-op", _absent_op)]},
    "expand.pass": {"parity": [*_both(_expand), ("every-row", _expand_rows), ("nested", _expand_nested),
                               *[(f"keeps-{n}", c) for n, c in _both(_expand_keeps)], ("placed", effects.parts_placed)],
                    "determinism": _HASHES, "faults": [("envelope", _expand_envelope), ("no-kernel", _expand_names)]},
    "fuse.pass": {"parity": [*_both(_fuse), ("every-row", _fuse_finds), ("outside-reader", _fuse_keeps_outside_readers),
                             ("phases", _fuse_within_a_phase), ("placed", effects.fused_placed), ("of-one-place", _fuse_of_one_place),
                             ("by-default", _lower_fuses)],
                  "determinism": _HASHES, "faults": [("no-kernel", _fuse_faults), ("envelope", _fuse_envelope)]},
    "schedule.pass": {"parity": [*_both(_schedule), *[(f"prompt-{n}", c) for n, c in _both(_schedule_prompt)],
                                 ("groups", _schedule_keeps_groups), ("groups-drawn", _schedule_keeps_drawn),
                                 ("beside-room", _schedule_beside_room), ("leaves", of_settings.prompt_leaves)],
                      "determinism": _HASHES_LLAMA, "faults": [("cycle", _refuse_cycle)]},
    "select.pass": {"parity": [*_both(_select), ("budget", effects.budgets_chosen), ("first", _select_first)], "determinism": _HASHES_LLAMA,
                    "faults": [("dtype", _refuse_dtype), ("extent-read", _refuse_extent_read), ("extent-made", _refuse_extent_made),
                               ("no-kernel", _refuse_no_kernel), ("effects", effects.refuse_budget)]},
    "memory.pass": {"parity": [*[(f"ownership-{n}", c) for n, c in _both(_ownership)],
                               *[(f"bits-{n}", c) for n, c in _both(_planned_equals_fresh)],
                               *[(f"exact-{n}", c) for n, c in _both(_arenas_exact)], *[(f"shares-{n}", c) for n, c in _both(_shares)],
                               ("order", _order_is_reachability), ("beside", _beside_is_apart), ("streams", _streams_drawn),
                               ("bucket", _bucket_in_place), ("bucket-kept", _bucket_kept), ("aligned", _aligned),
                               ("read-twice", _read_twice),
                               ("two-readers", _two_readers), ("scattered", _scattered_apart), ("largest-first", _largest_first),
                               ("any-order", _named_in_any_order),
                               ("placed", effects.launches_placed),
                               ("parts", parts.in_place), ("parts-apart", parts.written_apart), ("gathered-parts", parts.gathered),
                               ("computations", traced.computations)],
                    "determinism": _HASHES_LLAMA,
                    "faults": [("copy", _refuse_copy), ("late-read", _refuse_late_read), ("own-read", _refuse_own_read),
                               ("late-wait", _refuse_late_wait), ("bucket", _refuse_bucket), ("late-extent", effects.refuse_late_extent),
                               ("part-updated", parts.refuse_update), ("part-outside", parts.refuse_outside)]},
    "verify.pass": {"parity": [*_both(_verify_accepts), ("effects", effects.accepts), ("pruned", effects.pruned_kept),
                               ("units", traced.units_in_units), ("texts", traced.graph_texts), ("lines", edges.lines),
                               ("attributes", edges.texts), ("whole-texts", texts.graphs)],
                    "determinism": _HASHES,
                    "faults": [("order", _broken(_swap)), ("dropped", _broken(_drop)), ("type", _broken(_retype)),
                               ("twice", _broken(_twice)), ("overlap", _broken(_overlap)),
                               ("adopted", _broken(_adopted)), ("phase", _broken(_phase)),
                               ("stream", _broken(_stream)),
                               ("pipeline", _lower_verifies), ("extent-of-made", effects.refuse_extent_of_made),
                               ("redeclared", traced.redeclared), ("stacked", traced.stacked_in_order), ("overlaps", traced.overlaps),
                               ("places", traced.places), ("edges", edges.traces), ("extents", edges.extents),
                               *((name, effects.refuses_graph(name)) for name in effects.broken())]},
    "layout.pass": {"parity": [("round-trip", _reshard_round_trip), ("cut", _shard_is_cut), ("rules", _layout_rules), ("leaves", _leaves),
                               ("blocks", _blocks), ("tables", _tables), ("replicas", _lowest_replica)],
                    "determinism": [("offsets", _layout_hash)],
                    "faults": [("gap", _refuse_gap), ("missing", _refuse_missing), ("split-leaf", _refuse_split_leaf),
                               ("split-block", _refuse_split_block), ("edges", edges.layouts)]},
})
