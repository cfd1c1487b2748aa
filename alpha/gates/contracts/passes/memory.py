"""Cases of select and memory: which kernel a node gets, and that no launch writes where another one reads. Floor 7."""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations, pairwise, product
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.catalogue import run as run_kernel
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Workers
from alpha.component import Catalogue, Component, Envelope, Measured
from alpha.errors import GraphError, InputError
from alpha.gates.contracts.passes import effects, parts, traced
from alpha.gates.contracts.passes.support import GPT, HASHES_LLAMA, Cases, drawn_streams, exchanges
from alpha.gates.contracts.reference import (
    Reference,
    batch,
    both,
    filled,
    kernels,
    program,
    random_state,
    references,
    refuses,
    training_graph,
    yes,
)
from alpha.graph.ir import Graph, Node, Value, prune
from alpha.graph.order import COMM, COMPUTE, Order
from alpha.graph.plan import Plan, Ref
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.ops.table import table
from alpha.passes import memory
from alpha.passes.fuse import fuse
from alpha.passes.memory import ALIGN
from alpha.passes.memory import layout as lay_out
from alpha.passes.recompute import recompute
from alpha.passes.schedule import schedule
from alpha.passes.select import select

PAGE = 4096


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
        wrong += sum(list(order.waits(i)) != sorted(order.waits(i)) for i in run)
    return Measured(error=float(wrong), bound=0.0, cases=cases)


def _windows_closed(rng: np.random.Generator) -> Measured:
    """Every order of four calls of two streams, and of three of any: a call beside compute may begin behind the last call of compute that
    it knows of, and is over before the first one that knows of it; where several streams run beside compute, once that one is."""
    wrong, cases = list[str](), 0
    for n, kinds in ((4, (COMPUTE, COMM)), (3, (COMPUTE, COMM, "third", None))):
        waits = [[*chain(*(combinations(range(i), k) for k in range(i + 1)))] for i in range(n)]
        for streams in product(kinds, repeat=n):
            beside = {s for s in streams if s}
            for after in product(*waits):
                order = Order(streams, after)
                compute = [j for j in range(n) if streams[j] == COMPUTE]
                for i in range(n):
                    known = [j for j in compute if j < i and order.before(j, i)]
                    knows = [j for j in compute if j > i and order.before(i, j)]
                    want = max(known, default=-1) + 1, min(knows) - (len(beside) == 1) if knows else n
                    want = want if streams[i] and len({*streams} - {None}) > 1 else (i, i)
                    wrong += [] if order.window(i) == want else [f"call {i} of {streams} after {after}: {order.window(i)}, not {want}"]
                cases += n
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def _refuse_late_wait(rng: np.random.Generator) -> Measured:
    """A call that waits for a later one would wait for ever."""
    return refuses(GraphError, lambda: Order([COMPUTE, COMM], [{1}, set()]))


def _packed_as_said(rng: np.random.Generator) -> Measured:
    """Storages of drawn sizes and lifetimes, many of whole alignments so that gaps fit to the byte: largest first, and of one size the
    one written first, each at the lowest aligned place that is free while it lives, which is looked for place by place."""
    wrong, cases = list[str](), 40
    for _ in range(cases):
        n = int(rng.integers(1, 14))
        sizes = [int(rng.integers(1, 5)) * ALIGN - (rng.random() < 0.3) * int(rng.integers(1, ALIGN)) for _ in range(n)]
        first = rng.integers(0, 12, len(sizes)).tolist()
        lives = [(a, a + int(rng.integers(0, 8))) for a in first]
        classes = [memory._Class(nbytes=n, first=a, last=b) for n, (a, b) in zip(sizes, lives, strict=True)]
        got, want = memory.pack(classes), dict[int, int]()
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], lives[i])):
            beside = [j for j in want if lives[j][0] <= lives[i][1] and lives[i][0] <= lives[j][1]]
            want[i] = next(at for at in range(0, 1 << 20, ALIGN)
                           if all(at + sizes[i] <= want[j] or want[j] + sizes[j] <= at for j in beside))
        lower = max(sum(n for n, (a, b) in zip(sizes, lives, strict=True) if a <= t <= b) for t in range(24))
        peak, total = max(want[i] + sizes[i] for i in want), sum(-(-n // ALIGN) * ALIGN for n in sizes)
        wrong += [] if [c.offset for c in classes] == [want[i] for i in range(len(sizes))] else [f"{sizes} that live {lives}"]
        wrong += [] if (got.peak, got.total, got.lower) == (peak, total, lower) else [f"{got} instead of {(peak, total, lower)}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


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
        graph = schedule(exchanges(n, ready=ready, phase="reduce" if rng.random() < 0.7 else "forward").graph)
        touch, pairs = _together(lay_out(graph, select(graph, _with_exchange(), "cpu"), 2, {}))
        wrong, cases = wrong + touch, cases + pairs
    return Measured(error=float(wrong), bound=0.0, cases=cases, note="pairs that touch the same bytes")


def _streams_drawn(rng: np.random.Generator) -> Measured:
    """Plans of drawn graphs, as they are and scheduled: what may run at once touches no common bytes; what acts on one group runs one after
    the other, whatever its streams; what a launch reads was made before, by the waits that the plan has."""
    wrong, cases = list[str](), 0
    for trial in range(40):
        graph = verify(drawn_streams(rng).graph, "trace")
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
        t = drawn_streams(rng)
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
    """What makes up a bucket is written where it lies in it, and the sum over ranks ends there: no copy, no memory beside the state's. So
    it is with a bucket that is part of another one."""
    plan = _bucketed()
    at = {x.op: [(r.arena, r.offset) for r in x.outs] for x in plan.launches if x.op in ("scale", "accumulate", "all_reduce")}
    want = {"scale": [("state.grad1", 4 * (128 + 64))], "accumulate": [("state.grad1", 512)], "all_reduce": [("state.grad1", 512)]}
    reads = {r.arena for x in plan.launches for r in x.ins if x.op in ("accumulate", "all_reduce")}
    t = Tracer("in a bucket")
    x = t.input("x", (4, 4), "f32")
    inner = t.bucket(t.matmul(x, x), offsets=(16,), size=64)
    outer = t.bucket(t.scale(x, factor=3.0), inner, offsets=(0, 64), size=128)
    t.update(t.state("grad0", 64, (128,), "f32"), t.all_reduce(outer, group="dp", size=2, reduce="sum"))
    graph = schedule(verify(prune(t.graph), "trace"))
    both = {x.op: x.outs[0].offset // 4 for x in lay_out(graph, select(graph, _with_exchange(), "cpu"), 2, {"grad0": 1024}).launches}
    inside = both == {"matmul": 64 + 64 + 16, "scale": 64, "all_reduce": 64}
    return yes(at == want and reads <= {"state.grad1", "state.grad0", "act"} and inside, f"{at}, {both}", cases=6)


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


CASES: Cases = {
    "select.pass": {"parity": [*both(_select), ("budget", effects.budgets_chosen), ("first", _select_first)], "determinism": HASHES_LLAMA,
                    "faults": [("dtype", _refuse_dtype), ("extent-read", _refuse_extent_read), ("extent-made", _refuse_extent_made),
                               ("no-kernel", _refuse_no_kernel), ("effects", effects.refuse_budget)]},
    "memory.pass": {"parity": [*[(f"ownership-{n}", c) for n, c in both(_ownership)],
                               *[(f"bits-{n}", c) for n, c in both(_planned_equals_fresh)],
                               *[(f"exact-{n}", c) for n, c in both(_arenas_exact)], *[(f"shares-{n}", c) for n, c in both(_shares)],
                               ("order", _order_is_reachability), ("windows", _windows_closed), ("beside", _beside_is_apart),
                               ("streams", _streams_drawn), ("bucket", _bucket_in_place), ("bucket-kept", _bucket_kept),
                               ("aligned", _aligned), ("read-twice", _read_twice),
                               ("packed", _packed_as_said), ("two-readers", _two_readers), ("scattered", _scattered_apart),
                               ("largest-first", _largest_first),
                               ("any-order", _named_in_any_order),
                               ("placed", effects.launches_placed),
                               ("parts", parts.in_place), ("parts-apart", parts.written_apart), ("gathered-parts", parts.gathered),
                               ("computations", traced.computations)],
                    "determinism": HASHES_LLAMA,
                    "faults": [("copy", _refuse_copy), ("late-read", _refuse_late_read), ("own-read", _refuse_own_read),
                               ("late-wait", _refuse_late_wait), ("bucket", _refuse_bucket), ("late-extent", effects.refuse_late_extent),
                               ("part-updated", parts.refuse_update), ("part-outside", parts.refuse_outside)]},
}
