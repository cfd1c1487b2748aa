"""Cases of effects and extents, pass by pass: stages, microbatches and SM budgets stay with what carries them, rows that the device counts
are all that is read, and what cannot be is refused by name. Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from alpha.backends.cpu.catalogue import fill as fill_cpu
from alpha.backends.cpu.catalogue import run as run_kernel
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.catalogue import fill as fill_cuda
from alpha.backends.reference.executor import ReferenceExecutor
from alpha.comm.catalogue import fill as fill_comm
from alpha.comm.world import World
from alpha.component import Catalogue, Measured
from alpha.errors import AlphaError, GraphError
from alpha.gates.contracts.ranks.members import members
from alpha.gates.contracts.reference import filled, kernels, refuses, yes
from alpha.graph.differentiate import differentiate
from alpha.graph.effects import COUNT, ROWWISE
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, Value, prune
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import MULTIPROCESSORS, Plan, Program, Role, Step
from alpha.graph.state import StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.graph.verify_program import verify_program
from alpha.ops.table import row
from alpha.passes.build import lower
from alpha.passes.expand import expand
from alpha.passes.fuse import fuse
from alpha.passes.memory import layout as lay_out
from alpha.passes.recompute import recompute
from alpha.passes.select import select
from alpha.types import TensorType

Case = Callable[[np.random.Generator], Measured]
BOUND, WIDTH = 24, 3


def _names(action: Callable[[], object], *said: str) -> str:
    """What is wrong with a refusal: '' where it is one that says all of these."""
    try:
        action()
    except AlphaError as error:
        return "; ".join(f"{word!r} is not said: {error}" for word in said if word not in str(error)).replace("\n", " ")
    return f"accepted where {said[0]!r} was to be said"


@cache
def collectives() -> Catalogue:
    """The CPU's kernels, and its collectives."""
    found = filled(fill_cpu)
    fill_comm(found)
    return found


def pipeline() -> Tracer:
    """Two stages of one microbatch, the second with an SM budget, and their gradients; outputs: loss and both."""
    t = Tracer("pipeline")
    h = t.input("x", (8, 8), "f32")
    weights = []
    t.microbatch = 3
    for stage in (0, 1):
        t.stage, t.sms = stage, 24 * stage
        with t.unit(f"block.{stage}"):
            weights.append(t.state("param", 64 * stage, (8, 8), "f32"))
            h = t.gelu(t.matmul(h, weights[-1]), approximate="tanh")
            if stage:
                h = t.mean(h, axis=(0, 1), keepdims=False)
    t.output("loss", h)
    t.stage, t.microbatch, t.sms = None, None, 0
    for i, g in enumerate(differentiate(t, h, weights)):
        t.output(f"dw.{i}", g)
    return t


def rows(op: str, last: tuple[int, ...] | None = None) -> Tracer:
    """One row on operands with an extent that an input names; the last one of shape `last` and without an extent, where that is given."""
    t = Tracer("rows")
    n, names = t.input("n", (), "i32"), row(op).inputs
    xs = [t.extent(t.input(name, (BOUND, WIDTH), "f32"), n) for name in names[: len(names) - (last is not None)]]
    xs += [t.input(names[-1], last, "f32")] if last is not None else []
    t.output("y", t(op, *xs, **({"factor": 0.3} if op == "scale" else {})))
    return t


# -- what carries them -----------------------------------------------------------------------------------------------------------------


def backward_placed(rng: np.random.Generator) -> Measured:
    """A gradient is of the stage, the microbatch and the budget of what it is the gradient of."""
    nodes = [n for n in pipeline().graph.nodes if n.phase == "backward" and n.source != "loss"]
    wrong = [repr(n) for n in nodes if n.layer.startswith("block.") and (n.stage, n.microbatch, n.sms) !=
             (int(n.layer[-1]), 3, 24 * int(n.layer[-1]))]
    t = pipeline()
    return yes(not wrong and len(nodes) > 4 and (t.stage, t.microbatch, t.sms) == (None, None, 0), "; ".join(wrong)[:200], cases=len(nodes))


def copies_placed(rng: np.random.Generator) -> Measured:
    """What is computed again is so where it was first, with an extent too."""
    t = pipeline()
    for n in t.graph.nodes:
        n.stream = COMM if n.op == "gelu" else COMPUTE
    copies = [n for n in prune(recompute(t.graph, "block")).nodes if n.phase == "recompute"]
    wrong = [repr(n) for n in copies if n.effects() != (COMM if n.op == "gelu" else COMPUTE, int(n.layer[-1]), 3, 24 * int(n.layer[-1]))]
    t = rows("add")
    t.graph.nodes[0].layer = "block.0"
    t.phase = "backward"
    t.output("z", t.scale(t.graph.outputs["y"], factor=2.0))
    again = [v for n in recompute(t.graph, "block").nodes for v in n.outputs]
    kept = all(v.extent is t.graph.inputs["n"] for v in again) and len(again) == 3
    return yes(not wrong and len(copies) >= 2 and kept, "; ".join(wrong)[:200] or f"extents kept: {kept}", cases=len(copies) + 1)


def parts_placed(rng: np.random.Generator) -> Measured:
    """Parts of a packed row without a kernel have the place of the row, and so has a node whose operand was replaced."""
    catalogue = Catalogue()
    for c in kernels():
        if c.op != "swiglu_packed":
            catalogue.add(c)
    t = Tracer("packed")
    t.stage, t.microbatch, t.sms, t.stream = 1, 2, 5, COMM
    y = t.swiglu_packed(t.input("x", (4, 8), "f32"))
    t.output("y", t.scale(y, factor=2.0))
    nodes = expand(t.graph, catalogue, "cpu").nodes
    return yes(len(nodes) > 2 and all(n.effects() == (COMM, 1, 2, 5) for n in nodes), f"{[n.effects() for n in nodes]}", cases=len(nodes))


def fused_placed(rng: np.random.Generator) -> Measured:
    """Two rows become one where they have the same effects, and it has them; rows with an extent stay apart."""
    wrong, cases = [], 0
    for effect, values in (("stage", (0, 1)), ("microbatch", (0, 1)), ("sms", (0, 8)), ("stream", (COMPUTE, COMM)), ("stage", (2, 2)),
                           ("sms", (8, 8))):
        t = Tracer("fused")
        into, a, b = (t.input(name, (8, 8), "f32") for name in ("into", "a", "b"))
        setattr(t, effect, values[0])
        product = t.matmul(a, b)
        setattr(t, effect, values[1])
        t.output("y", t.accumulate(into, product))
        nodes, cases = fuse(t.graph, kernels(), "cpu").nodes, cases + 1
        if len(nodes) != (1 if values[0] == values[1] else 2) or getattr(nodes[-1], effect) != values[1]:
            wrong.append(f"{effect} {values}: {nodes}")
    return yes(not wrong, "; ".join(wrong)[:200], cases)


def launches_placed(rng: np.random.Generator) -> Measured:
    """A launch has the effects of its node, and operands the place of their extent. Both are in a plan's hash; the budget moves no bit,
    so no Program's hash hangs on it."""
    def planned(budget: int, stage: int = 0, microbatch: int = 0, counted: str = "n") -> Plan:
        t = Tracer("launches")
        n, _ = t.input("n", (), "i32"), t.input("m", (), "i32")
        x = t.extent(t.input("x", (8, 64), "f32"), t.graph.inputs[counted]) if counted else t.input("x", (8, 64), "f32")
        t.stage, t.microbatch, t.sms = stage, microbatch, budget
        t.output("y", t.scale(t.add(x, x), factor=2.0))
        chosen = {node: replace(kernels()[f"{node.op}.f32.cpu"], budgeted=True) for node in t.graph.nodes}
        assert n.extent is None
        return lay_out(verify(t.graph, "trace"), chosen, 1, {})

    first, others = planned(7), [planned(8), planned(7, stage=1), planned(7, microbatch=1), planned(7, counted="m"), planned(7, counted="")]
    good = all((x.stage, x.microbatch, x.sms) == (0, 0, 7) for x in first.launches) and len(first.launches) == 2
    good &= all(r.extent == first.inputs["n"] and r.whole.extent is None for x in first.launches for r in (*x.ins, *x.outs))
    good &= first.outputs["y"].extent == first.inputs["n"] and len({p.hash() for p in (first, *others)}) == 6
    good &= [p.computation() == first.computation() for p in others] == [True, False, False, False, False]
    return yes(good, cases=12)


def pruned_kept(rng: np.random.Generator) -> Measured:
    """Pruning keeps the state that an extent lies in, though no node reads it."""
    t = Tracer("counted")
    x = t.extent(t.input("x", (8,), "f32"), t.state("counter", 0, (), "i32"))
    t.output("y", t.scale(x, factor=2.0))
    after = verify(prune(t.graph), "prune")
    return yes([v.name for v in after.states.values()] == ["counter+0"] and after.text() != rows("scale").graph.text())


def refuse_late_extent(rng: np.random.Generator) -> Measured:
    """An extent that an update has overwritten is not read after it."""
    t = Tracer("late extent")
    n = t.state("counter", 0, (), "i32")
    x = t.extent(t.input("x", (8,), "f32"), n)
    t.update(n, t.next_step(n, t.input("finite", (), "i32")))
    t.output("y", t.scale(x, factor=2.0))
    return refuses(GraphError, lambda: lay_out(t.graph, select(t.graph, kernels(), "cpu"), 1, {"counter": 16384}))


# -- what a graph cannot say -----------------------------------------------------------------------------------------------------------


def accepts(rng: np.random.Generator) -> Measured:
    """A pipeline with its gradients, sums over microbatches, and every row that goes by rows."""
    graphs = [pipeline().graph, *(rows(op).graph for op in ROWWISE if row(op).across is None)]
    t = Tracer("sums")
    t.microbatch, t.phase = 0, "backward"
    g = t.scale(t.input("g", (4,), "f32"), factor=1.0)
    t.microbatch, t.phase = 1, "wgrad"
    t.output("y", t.accumulate(g, t.input("h", (4,), "f32")))
    found = [verify(g, "trace") is g for g in (*graphs, t.graph)]
    return yes(all(found), cases=len(found))


def _two_stages(first: int, second: int, phases: tuple[str, str] = ("forward", "forward"), **of_second: int) -> Tracer:
    t = Tracer("two stages")
    t.source = "model.py:7"
    t.stage, t.phase, t.microbatch = first, phases[0], 0
    x = t.scale(t.input("x", (4,), "f32"), factor=2.0)
    t.stage, t.phase = second, phases[1]
    for name, value in of_second.items():
        setattr(t, name, value)
    t.output("y", t.add(x, x))
    return t


def broken() -> dict[str, tuple[Callable[[], Graph], tuple[str, ...]]]:
    """Graphs that cannot be -> what the refusal must say."""
    def marked(**effects: object) -> Callable[[], Graph]:
        def make() -> Graph:
            t = _two_stages(0, 0)
            for name, value in effects.items():
                setattr(t.graph.nodes[-1], name, value)
            return t.graph
        return make

    def counted(rows_type: TensorType = COUNT, shape: tuple[int, ...] = (4,), known: bool = True, read: bool = True) -> Callable[[], Graph]:
        def make() -> Graph:
            t = Tracer("counted")
            x, n = t.input("x", shape, "f32"), Value(rows_type, "n", "input")
            x.extent = n
            if known:
                t.graph.inputs["n"] = n
            t.output("y", t.scale(x, factor=2.0) if read else x)
            return t.graph
        return make

    def crossing(op: str, other: str = "", **attrs: object) -> Callable[[], Graph]:
        """A row over x with an extent and, by `other`, a second operand."""
        def make() -> Graph:
            t = Tracer("crossing")
            t.source, t.phase = "model.py:7", "backward" if other == "backward" else "forward"
            n, m = t.input("n", (), "i32"), t.input("m", (), "i32")
            x = t.extent(t.input("x", (4, 4), "f32"), n)
            beside = {"all": (4, 4), "other": (4, 4), "shifted": (1, 4, 4), "": None}.get(other)
            more = [t.input("b", beside, "f32")] if beside else [x] if op == "add" else []
            if other == "other":
                t.extent(more[0], m)
            t.output("y", t(op, x, *more, **attrs))
            if other == "lost":
                t.graph.outputs["y"].extent = None
            return t.graph
        return make

    def box(same: bool) -> Callable[[], Graph]:
        def make() -> Graph:
            t = Tracer("box")
            n, m = t.input("n", (), "i32"), t.input("m", (), "i32")
            x, target = t.extent(t.input("x", (4,), "f32"), n), t.state("param", 0, (4,), "f32")
            if same:
                t.extent(target, m)
            t.update(target, t.scale(x, factor=2.0))
            return t.graph
        return make

    def held(t: Tracer) -> Callable[[], Graph]:
        return lambda: t.graph

    where = "add(scale.0, scale.0)", "model.py:7"
    forward, back = ("forward", "forward"), ("backward", "backward")
    return {
        "sms-0": (marked(sms=-1), ("SM budget", "-1", *where)), "sms-133": (marked(sms=MULTIPROCESSORS + 1), ("SM budget", "1 to 132")),
        "sms-type": (marked(sms=1.5), ("SM budget",)), "stage": (marked(stage=-1), ("a stage that is none", *where)),
        "microbatch": (marked(microbatch="0"), ("a microbatch that is none", *where)),
        "stage-back": (held(_two_stages(1, 0, forward)), ("a stage that goes backward", "stage 0 reads scale.0 of stage 1", *where)),
        "stage-forth": (held(_two_stages(0, 1, back)), ("a stage that goes backward", "stage 1 reads", "an earlier one")),
        "stage-late": (held(_two_stages(1, 0, ("forward", "backward"))), ("a stage that goes backward",)),
        "other-microbatch": (held(_two_stages(0, 0, microbatch=1)), ("microbatch 1 reads scale.0 of microbatch 0", *where)),
        "unknown": (counted(known=False), ("does not know", "n")), "unknown-unread": (counted(known=False, read=False), ("does not know",)),
        "vector": (counted(TensorType((1,), "i32")), ("no integer of the device",)),
        "float": (counted(TensorType((), "f32")), ("no integer of the device",)),
        "scalar": (counted(shape=()), ("without rows",)),
        "by-columns": (crossing("transpose", perm=(1, 0)), ("reads behind an extent", "transpose", "model.py:7")),
        "summed": (crossing("sum", axis=(0,), keepdims=False), ("reads behind an extent",)),
        "gradient": (crossing("scale", "backward", factor=2.0), ("phase backward",)),
        "two": (crossing("add", "other"), ("several extents",)), "shifted": (crossing("add", "shifted"), ("of one axis",)),
        "beside": (crossing("add", "all"), ("an operand of all rows",)), "lost": (crossing("scale", "lost", factor=2.0), ("without its",)),
        "box": (box(False), ("fewer rows than it has",)), "other-box": (box(True), ("fewer rows than it has",)),
    }


def refuses_graph(name: str) -> Case:
    """The graph is refused, by node and model line where it is a node that cannot be."""
    def case(rng: np.random.Generator) -> Measured:
        make, said = broken()[name]
        wrong = _names(lambda: verify(make(), "trace"), *said)
        return yes(not wrong, wrong[:200])
    return case


def refuse_extent_of_made(rng: np.random.Generator) -> Measured:
    """The tracer gives extents to inputs, state boxes and what is received, and to nothing else."""
    t = Tracer("made")
    n, x = t.input("n", (), "i32"), t.input("x", (4,), "f32")
    wrong = [_names(lambda: t.extent(t.scale(x, factor=2.0), n), "that of its operands"),
             _names(lambda: t.extent(n, t.input("m", (), "i32")), "without rows"), _names(lambda: t.extent(x, x), "no integer")]
    got = t.extent(t.receive(group="pp", size=2, source=0, shape=(4,), dtype="f32"), n)
    return yes(not any(wrong) and got.extent is n and x.extent is None and n.extent is None, "; ".join(wrong)[:200], cases=4)


# -- kernels ---------------------------------------------------------------------------------------------------------------------------


def budgets_chosen(rng: np.random.Generator) -> Measured:
    """A kernel that keeps to budgets is chosen for a node with one."""
    t = _normalised(16)
    found = [c.id for c in select(t.graph, filled(fill_cuda), "cuda").values()]
    return yes(found == ["rmsnorm.bf16.sm90"], f"{found}")


def _normalised(budget: int) -> Tracer:
    t = Tracer("normalised")
    t.source, t.sms = "model.py:7", budget
    t.output("y", t.rmsnorm(t.input("x", (8, 64), "bf16"), t.input("gain", (64,), "bf16"), eps=1e-5)[0])
    return t


def refuse_budget(rng: np.random.Generator) -> Measured:
    """A kernel that keeps to no budget is not launched with one, and none of the GPU with an extent: op and model line are said."""
    t = Tracer("budget")
    t.source, t.sms = "model.py:7", 16
    t.output("y", t.scale(t.input("x", (4,), "f32"), factor=2.0))
    u = Tracer("extent")
    u.source = "model.py:7"
    u.output("y", u.scale(u.extent(u.input("x", (64,), "bf16"), u.input("n", (), "i32")), factor=2.0))
    wrong = [_names(lambda: select(t.graph, kernels(), "cpu"), "scale.f32.cpu keeps to no SM budget", "scale at model.py:7", "at most 16"),
             _names(lambda: select(u.graph, filled(fill_cuda), "cuda"), "scale.bf16.sm90 takes no extent", "scale at model.py:7")]
    return yes(not any(wrong), "; ".join(wrong)[:200], cases=2)


# -- the CPU's executor ----------------------------------------------------------------------------------------------------------------


def _program(graph: Graph) -> Program:
    layout = StateLayout([TensorSpec("w", (4,), "u")])
    plan = lower(graph, kernels(), "cpu", 1, {"param": layout})
    return Program("rows", {"p": replace(plan, name="p")}, (Step("p"),), {"param": layout}, {"threads": 1})


def counted_rows(rng: np.random.Generator) -> Measured:
    """Every number of rows from none to the bound: those have the bits of a call on as many rows, and those of the oracle to its roundoff;
    the memory behind them is left alone, and results are handed out as long as they are. So too beside an operand of one row for all."""
    wrong, cases = [], 0
    for op, last in (*((op, None) for op in ROWWISE if row(op).across is None), ("add", (WIDTH,)), ("mul", (1, WIDTH))):
        graph = verify(rows(op, last).graph, "trace")
        component, attrs = kernels()[f"{op}.f32.cpu"], graph.nodes[0].attrs
        with CpuExecutor(p := _program(graph), kernels()) as executor:
            behind = executor.view(p.plans["p"].outputs["y"].whole)
            for n in range(BOUND + 1):
                given = {k: rng.standard_normal(v.type.shape).astype(np.float32) for k, v in graph.inputs.items() if k != "n"}
                behind[...] = np.float32(7)
                got = executor.run("p", {**given, "n": np.array(n, np.int32)})["y"]
                own = [given[k][:n] if graph.inputs[k].extent is not None else given[k] for k in row(op).inputs]
                (want,) = run_kernel(component, own, [TensorType(x.shape, "f32") for x in own], attrs, workers=executor.workers)
                exact = evaluate(graph, {**given, "n": np.array(n, np.int32)}, {})[0]["y"]
                good = got.shape == want.shape == exact.shape == (n, WIDTH) and got.tobytes() == want.tobytes()
                good &= bool((behind[n:] == 7).all()) and bool(np.allclose(got, exact, rtol=1e-6, atol=1e-6))
                wrong += [] if good else [f"{op} of {n} rows, the last operand {last or 'too'}"]
                cases += 1
    return yes(not wrong, "; ".join(wrong)[:200], cases)


def refuse_rows(rng: np.random.Generator) -> Measured:
    """An extent outside of its bound stops the launch, which is named with its model line; nothing is written."""
    wrong = []
    t = rows("add")
    t.graph.nodes[0].source = "model.py:7"
    with CpuExecutor(p := _program(t.graph), kernels()) as executor:
        behind = executor.view(p.plans["p"].outputs["y"].whole)
        behind[...] = np.float32(7)
        for n in (-1, BOUND + 1, -(2**31)):
            given = {"a": np.ones((BOUND, WIDTH), np.float32), "b": np.ones((BOUND, WIDTH), np.float32), "n": np.array(n, np.int32)}
            wrong.append(_names(lambda given=given: executor.run("p", given), "add of no layer, line model.py:7", f"{n} rows",  # type: ignore[misc]
                                f"0 to {BOUND}"))
    return yes(not any(wrong) and bool((behind == 7).all()), "; ".join(wrong)[:200], cases=3)


def refuse_other_rows(rng: np.random.Generator) -> Measured:
    """A launch whose row does not go by rows is not bound with an extent, whoever wrote the plan."""
    p = _program(rows("add").graph)
    x = p.plans["p"].launches[0]
    other = replace(x, op="gelu", component="gelu.f32.cpu", ins=x.ins[:1], attrs={"approximate": "tanh"})
    changed = replace(p, plans={"p": replace(p.plans["p"], launches=(other,))})
    return refuses(GraphError, lambda: CpuExecutor(changed, kernels()))




# -- ranks -----------------------------------------------------------------------------------------------------------------------------


def exchanged(ranks: int) -> Program:
    """All that collectives move by a count that the device holds: a sum, a broadcast, a sum on one rank, and an exchange around a ring."""
    plans, layout = [], StateLayout([TensorSpec("w", (4,), "u")])
    for rank in range(ranks):
        t = Tracer("exchanged")
        t.source = "model.py:7"
        x, n = t.input("x", (BOUND, WIDTH), "f32"), t.input("n", (), "i32")  # x comes before what counts it
        t.extent(x, n)
        t.output("sum", t.all_reduce(x, group="dp", size=ranks, reduce="average"))
        t.output("root", t.broadcast(x, group="dp", size=ranks, root=ranks - 1))
        t.output("reduced", t.reduce(t.scale(x, factor=3.0), group="dp", size=ranks, root=0))
        if rank == 0:
            t.send(x, group="dp", size=ranks, to=1)
            t.send(t.scale(x, factor=5.0), group="dp", size=ranks, to=1)  # before the other rank has received anything
        if rank == 1:
            for name in ("sent", "sent then"):
                t.output(name, t.extent(t.receive(group="dp", size=ranks, source=0, shape=(BOUND, WIDTH), dtype="f32"), n))
        plans.append(replace(lower(t.graph, collectives(), "cpu", 1, {"param": layout}), name="p"))
    others = tuple(Role((Step("p"),), {"p": f"p~{r}"}) for r in range(1, ranks))
    return Program("exchanged", {"p" if not r else f"p~{r}": plan for r, plan in enumerate(plans)}, (Step("p"),), {"param": layout},
                   {"threads": 1}, others=others, groups={"dp": (tuple(range(ranks)),)})


def _given(seed: int, rank: int, n: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng((seed, rank, n)).standard_normal((BOUND, WIDTH)).astype(np.float32), "n": np.array(n, np.int32)}


def at_counts(world: World, seed: int, apart: int) -> list[list[bytes]]:
    """A rank's results for every count; `apart`: how many rows more the last rank counts."""
    p = exchanged(world.size)
    world.add_groups(p.groups)
    found: list[list[bytes]] = []
    with CpuExecutor(p, collectives(), world) as executor:
        for n in range(apart + 1 if apart else BOUND + 1):
            mine = n + apart * (world.rank == world.size - 1)
            out = executor.run("p", _given(seed, world.rank, mine))
            found.append([bytes(out[k]) for k in sorted(out)])
    return found


def ranks_count(rng: np.random.Generator) -> Measured:
    """Ranks exchange as many rows as their devices say, none to the bound: the bits are the reference executor's, who also agrees with the
    oracle; whole tensors never travel."""
    seed, wrong, cases = int(rng.integers(1 << 30)), [], 0
    for size in (2, 3):
        p = verify_program(exchanged(size))
        ended = members().run(at_counts, size, seed, 0)
        if any(e.result is None for e in ended):
            return yes(False, next(e.error for e in ended if e.result is None)[-200:])
        held = {}
        for mode, catalogue in (("kernels", collectives()), ("oracle", None)):
            with ReferenceExecutor(p, catalogue, mode=mode) as executor:
                held[mode] = [executor.run([[("p", _given(seed, r, n))] for r in range(size)]) for n in range(BOUND + 1)]
        for n in range(BOUND + 1):
            for r in range(size):
                own, exact = held["kernels"][n][r], held["oracle"][n][r]
                good = ended[r].result[n] == [bytes(own[k]) for k in sorted(own)] and all(x.shape == (n, WIDTH) for x in own.values())
                good &= all(np.allclose(own[k], exact[k], rtol=1e-6, atol=1e-6) for k in own)
                wrong += [] if good else [f"{n} rows, rank {r} of {size}"]
                cases += 1
    return yes(not wrong, "; ".join(wrong)[:200], cases)


def refuse_other_counts(rng: np.random.Generator) -> Measured:
    """Ranks whose devices count other rows end, and the one that differs is named; the reference executor says so too."""
    ended = members().run(at_counts, 2, 5, 1)
    wrong = [f"rank {r}: {e.status}, {e.error[-120:]}" for r, e in enumerate(ended) if e.result is not None or "count" not in e.error]
    with ReferenceExecutor(exchanged(2)) as executor:
        calls = [[("p", _given(5, r, 3 + r))] for r in range(2)]
        wrong.append(_names(lambda: executor.run(calls), "count other rows", "rank 1: all_reduce", "model.py:7", "(4, 3)"))
    return yes(not any(wrong), "; ".join(wrong)[:200], cases=3)
