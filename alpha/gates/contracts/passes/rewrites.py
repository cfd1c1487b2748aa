"""Cases of recompute, expand, fuse and schedule: what a pass makes of a graph computes the same, to the bit where promised. Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np

from alpha.component import Catalogue, Measured
from alpha.errors import GraphError, InputError
from alpha.gates.contracts import of_settings
from alpha.gates.contracts.passes import effects
from alpha.gates.contracts.passes.support import GPT, HASHES, HASHES_LLAMA, LLAMA, Cases, drawn_streams, exchanges
from alpha.gates.contracts.reference import (
    Reference,
    batch,
    both,
    evaluate,
    kernels,
    program,
    random_state,
    references,
    refuses,
    same_updates,
    training_graph,
    yes,
)
from alpha.graph.ir import Graph, Node, prune
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.ops.compose import FusedSpec
from alpha.ops.table import table
from alpha.passes.build import lower
from alpha.passes.expand import expand
from alpha.passes.fuse import fuse
from alpha.passes.recompute import recompute
from alpha.passes.schedule import schedule
from alpha.passes.select import select

ACTIVATIONS = ("gelu", "swiglu_packed", "layernorm", "rmsnorm")
"""Rows whose recomputation costs little; each model has some."""


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


def _schedule_keeps_groups(rng: np.random.Generator) -> Measured:
    """What acts on one group keeps its order, although a later one could begin before an earlier one; what is ready goes at once."""
    nodes = schedule(exchanges(3, ready=(2, 0, 1)).graph).nodes
    layers = [n.layer for n in nodes if n.acts]
    prompt = schedule(exchanges(3).graph).nodes
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
        graph = exchanges(n, ready=tuple(int(k) for k in rng.integers(0, n, n)), groups=groups).graph
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
        graph = drawn_streams(rng).graph if trial % 2 else exchanges(n, ready=tuple(int(k) for k in rng.integers(0, n, n)),
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


def _schedule_late(rng: np.random.Generator) -> Measured:
    """What runs beside compute goes as late as it may: by a queue in which each takes its bytes times what a byte takes, none ends behind
    both where it is needed and where it would end had all gone as early as they can. And none could begin at its next place alone."""
    wrong = cases = moved = 0
    for trial in range(240):
        n = int(rng.integers(2, 10))
        graph = drawn_streams(rng).graph if trial % 2 else exchanges(n, ready=tuple(int(k) for k in rng.integers(0, n, n)),
                                                                       groups=int(rng.integers(1, 3)), gathers=int(rng.integers(4))).graph
        before = schedule(graph).nodes
        roomy = {str(x) for x in rng.choice(sorted({x.op for x in before}), 2)}
        compute, beside = ([x for x in before if x.stream == s] for s in (COMPUTE, COMM))
        if not beside:
            continue
        at = np.cumsum([0, *(table()[x.op].flops([v.type for v in x.inputs], x.attrs) for x in compute)])
        moves = [max(4 * sum(v.type.size for v in vs) for vs in (x.inputs, x.outputs)) for x in beside]
        took = float(at[-1] / sum(moves) * 10 ** rng.uniform(-1.5, 0.5)) * np.array(moves)
        rooms = [i for i, x in enumerate(compute) if x.op in roomy]
        needed = [next((i for i, x in enumerate(compute) if any(v.producer in beside[k:] for v in x.inputs)), len(compute))
                  for k in range(len(beside))]

        def places(nodes: list[Node], beside: list[Node] = beside) -> list[int]:
            return [sum(x.stream == COMPUTE for x in nodes[: nodes.index(b)]) for b in beside]

        def ends(places: list[int], at: np.ndarray = at, took: np.ndarray = took) -> np.ndarray:
            found, free = [], 0.0
            for place, ns in zip(places, took, strict=True):
                free = max(free, float(at[place])) + float(ns)
                found.append(free)
            return np.array(found)

        early = places(schedule(graph, roomy).nodes)
        late = places(verify(schedule(graph, roomy, took[0] / moves[0]), "schedule").nodes)
        least = 1e-9 * float(at[-1] + took.sum())
        most = np.maximum(at[needed], ends(early)) + least
        wrong += bool((ends(late) > most).any()) + (sorted(late) != late) + any(x < y for x, y in zip(late, early, strict=True))
        for k, place in enumerate(late):
            after = next((i for i in rooms if place < i < needed[k] and i <= [*late, len(compute)][k + 1]), None)
            if after is not None and ends(late)[k] - took[k] < at[after] - least:
                wrong += bool((ends([*late[:k], after, *late[k + 1 :]]) <= most).all())
        moved += early != late
        cases += 1
    return yes(not wrong and moved > 10, f"{wrong} of {cases} out of place, {moved} moved", cases=cases)


def _exchanges_kept(rng: np.random.Generator) -> Measured:
    """What acts on other ranks is neither pruned, nor computed twice by recompute, though nothing reads it or it is a block's."""
    t = exchanges(2, phase="forward")
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


def _unknown_policy(rng: np.random.Generator) -> Measured:
    return refuses(InputError, lambda: recompute(training_graph(references()[GPT]), "sometimes"))


def _absent_op(rng: np.random.Generator) -> Measured:
    """An op of no node, and each op that no forward node is of."""
    graph = training_graph(references()[GPT])
    made = {n.op for n in graph.nodes if n.phase == "forward"}
    later = sorted({n.op for n in graph.nodes} - made)
    looks = [refuses(InputError, lambda op=op: recompute(graph, "ops", ("gelu", op))) for op in ("swiglu", *later)]  # type: ignore[misc]
    return yes(bool(later) and not any(look.error for look in looks), "; ".join(sorted({look.note for look in looks})), len(looks))


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


def _lower_fuses(rng: np.random.Generator) -> Measured:
    """Who says nothing of fusion gets it: the plan is that of a graph that was fused, and another one without."""
    states = program(GPT).states
    graph = training_graph(references()[GPT])
    plan = lower(graph, kernels(), "cpu", 2, states).text()
    fused, plain = (lower(graph, kernels(), "cpu", 2, states, fused=fused).text() for fused in (True, False))
    return yes(plan == fused != plain, cases=3)


CASES: Cases = {
    "recompute.pass": {"parity": [*[(f"block-{n}", c) for n, c in both(_recompute("block", ()))],
                                  *[(f"ops-{n}", c) for n, c in both(_recompute("ops", ACTIVATIONS))],
                                  *[(f"across-layers-{n}", c) for n, c in both(_recompute("ops", ("add",)))],
                                  *[(f"saves-{n}", c) for n, c in both(_recompute_saves)], ("exchanges", _exchanges_kept),
                                  ("placed", effects.copies_placed)],
                       "determinism": HASHES, "faults": [("unknown-policy", _unknown_policy), ("absent-op", _absent_op)]},
    "expand.pass": {"parity": [*both(_expand), ("every-row", _expand_rows), ("nested", _expand_nested),
                               *[(f"keeps-{n}", c) for n, c in both(_expand_keeps)], ("placed", effects.parts_placed)],
                    "determinism": HASHES, "faults": [("envelope", _expand_envelope), ("no-kernel", _expand_names)]},
    "fuse.pass": {"parity": [*both(_fuse), ("every-row", _fuse_finds), ("outside-reader", _fuse_keeps_outside_readers),
                             ("phases", _fuse_within_a_phase), ("placed", effects.fused_placed), ("of-one-place", _fuse_of_one_place),
                             ("by-default", _lower_fuses)],
                  "determinism": HASHES, "faults": [("no-kernel", _fuse_faults), ("envelope", _fuse_envelope)]},
    "schedule.pass": {"parity": [*both(_schedule), *[(f"prompt-{n}", c) for n, c in both(_schedule_prompt)],
                                 ("groups", _schedule_keeps_groups), ("groups-drawn", _schedule_keeps_drawn),
                                 ("beside-room", _schedule_beside_room), ("late", _schedule_late),
                                 ("leaves", of_settings.prompt_leaves)],
                      "determinism": HASHES_LLAMA, "faults": [("cycle", _refuse_cycle)]},
}
