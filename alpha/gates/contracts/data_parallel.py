"""Cases of `data_parallel.pass`: any number of ranks, the optimizer's state cut or not, has the bits of one process; overlap; bad input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from alpha.backends.cpu.catalogue import fill as fill_cpu
from alpha.backends.reference.executor import ReferenceExecutor
from alpha.comm.catalogue import fill as fill_comm
from alpha.component import Catalogue, Envelope, Measured
from alpha.errors import GraphError, ShapeError
from alpha.gates.contracts.mixed import declared
from alpha.gates.contracts.reference import (
    BATCH,
    SCHEDULE,
    SEQ,
    VOCAB,
    Batches,
    Reference,
    batches_of,
    both,
    hash_of,
    layout_of,
    reference_of,
    references,
    refuses,
    yes,
)
from alpha.graph.ir import Value
from alpha.graph.order import COMM, COMPUTE, Order
from alpha.graph.plan import Launch, Program
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify_program import verify_program
from alpha.models import gpt
from alpha.ops.numerics import round_to
from alpha.optim.init import fill_initial
from alpha.optim.update import adamw, sgd
from alpha.parallel.data import DataParallel
from alpha.passes.build import STATS, Model, StepShape, build_program, trace_training

Case = Callable[[np.random.Generator], Measured]
SHARDS, STEPS, SHARDS_OF_GPUS = 8, 3, 4
CLIP = 0.2
"""Largest norm: below that of these models, so that the coefficient hangs on every leaf."""


@cache
def kernels() -> Catalogue:
    """The CPU's kernels, collectives included."""
    found = Catalogue()
    fill_cpu(found)
    fill_comm(found)
    return found


OF_RANKS = ("all_reduce", "reduce_scatter", "all_gather")
"""What sums over ranks and gathers, on GPUs in the types that an operand has."""


@cache
def kernels_of_gpus() -> Catalogue:
    """What one GPU and several have, only declared: all numbers of an update come from one row, of the gradient or of sums of its blocks,
    and sums over ranks work in place."""
    found = Catalogue()
    for c in declared(without=("norm_of_squares", "global_norm")):
        place = ((0, 0),) if c.op == "all_reduce" else ()
        found.add(replace(c, inplace=place, envelope=Envelope(dtypes=("bf16", "f32"))) if c.op in OF_RANKS else c)
    return found


@cache
def program(name: str, ranks: int, zero: int = 0, *, micros: int = 1, optimizer: str = "adamw", shards: int = SHARDS,
            threads: int = 1, policy: str = "none") -> Program:
    """A reference model over `ranks` ranks; of one rank the Program without any mode of parallelism. `threads`: workers of each rank."""
    made = adamw(SCHEDULE, max_norm=CLIP) if optimizer == "adamw" else sgd(SCHEDULE, momentum=0.9, max_norm=CLIP)
    return build_program(name=name, model=references()[name].model, optimizer=made, catalogue=kernels(), threads=threads,
                         policy=(policy, ()), shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=shards, micros=micros),
                         over=DataParallel(ranks, zero, micros) if ranks > 1 else None)


@cache
def on_gpus(name: str, ranks: int, micros: int = 1, zero: int = 0) -> Program:
    """The same in bf16 on GPUs."""
    over = DataParallel(ranks, zero, micros, precision="bf16", one_row=True) if ranks > 1 else None
    return build_program(name=name, model=references()[name].model, optimizer=adamw(SCHEDULE, max_norm=CLIP), backend="cuda",
                         catalogue=kernels_of_gpus(), precision="bf16", over=over,
                         shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=SHARDS_OF_GPUS, micros=micros))


@dataclass(frozen=True)
class Trained:
    """What STEPS steps left. `numbers`: the outputs of each step, as one array each; `params`: without padding; `apart`: ranks that
    disagreed with rank 0 on either."""

    numbers: tuple[np.ndarray, ...]
    params: np.ndarray
    apart: int


def train(p: Program, ref: Reference, texts: list[Batches], seed: int, *, mode: str = "kernels") -> Trained:
    """STEPS steps of all ranks in lockstep from one start."""
    ranks = ReferenceExecutor(p, kernels() if mode == "kernels" else None, mode=mode)
    layout = p.states["param"]
    for rank in range(p.ranks):
        for kind in p.states:
            ranks.state(rank, kind)[...] = 0
        start = np.zeros(layout.size, np.float32)
        fill_initial(start, layout, seed)
        for offset, n in layout.ranges():
            start[offset : offset + n] += np.float32(0.02) * np.cos(np.arange(n, dtype=np.float32))
        _put(ranks, rank, start)
    for copies in ("shard", "narrow"):
        if copies in p.plans:
            ranks.run([[(copies, {})]] * p.ranks)
    numbers, apart = [], 0
    for text in texts:
        made = [np.array([float(out[k]) for k in sorted(out)]) for out in ranks.step(lambda s, m, text=text: text[s, m])]  # type: ignore[misc]
        apart += sum(x.tobytes() != made[0].tobytes() for x in made)
        numbers.append(made[0])
    held = [np.concatenate([x[o : o + n] for o, n in layout.ranges()]) for x in _taken(ranks, "param")]
    models = _taken(ranks, "param16") if "param16" in p.states else held
    apart += sum(x.tobytes() != y[0].tobytes() for y in (held, models) for x in y)
    return Trained(tuple(numbers), held[0], apart)


def _put(ranks: ReferenceExecutor, rank: int, whole: np.ndarray) -> None:
    """A rank's parameters: all of them, or its cut."""
    p, own = ranks.program, ranks.state(rank, "param")
    if "param" not in p.sharded:
        own[...] = whole
        return
    for local, lo, hi in p.states["param"].shard(p.ranks).cuts(rank):
        own[local : local + hi - lo] = whole[lo:hi]


def _taken(ranks: ReferenceExecutor, kind: str) -> list[np.ndarray]:
    """A kind of state as each rank holds it; of one that is cut all cuts, joined, in place of each."""
    p = ranks.program
    if kind not in p.sharded:
        return [ranks.state(rank, kind) for rank in range(p.ranks)]
    sharded, whole = p.states[kind].shard(p.ranks), np.zeros(p.states[kind].size)
    for rank in range(p.ranks):
        for local, lo, hi in sharded.cuts(rank):
            whole[lo:hi] = ranks.state(rank, kind)[local : local + hi - lo]
    return [whole]


def _texts(ref: Reference, rng: np.random.Generator, micros: int, shards: int = SHARDS) -> list[Batches]:
    return [batches_of(ref, rng, shards, micros) for _ in range(STEPS)]


def _same_bits(micros: int, optimizer: str = "adamw") -> Callable[[Reference, np.random.Generator], Measured]:
    """Parameters, loss, norm and all other numbers of every step: every bit that of one process, on every rank."""
    def check(ref: Reference, rng: np.random.Generator) -> Measured:
        texts, seed = _texts(ref, rng, micros), int(rng.integers(1 << 30))
        want = train(program(ref.name, 1, micros=micros, optimizer=optimizer), ref, texts, seed)
        wrong = cases = 0
        for ranks in (2, 4, 8) if micros == 1 else (2,):
            for zero in (0, 1):
                got = train(verify_program(program(ref.name, ranks, zero, micros=micros, optimizer=optimizer)), ref, texts, seed)
                pairs = [*zip(got.numbers, want.numbers), (got.params, want.params)]
                wrong += got.apart + sum(x.tobytes() != y.tobytes() for x, y in pairs)
                cases += len(pairs)
        return Measured(error=float(wrong), bound=0.0, cases=cases, digest=hash_of(want.params, *want.numbers),
                        note="arrays whose bits differ")
    return check


def _against_oracle(ref: Reference, rng: np.random.Generator) -> Measured:
    """The same in float64, by the rows' oracles: what is left of four ranks' sums is the roundoff of float64."""
    texts, seed = _texts(ref, rng, 1), int(rng.integers(1 << 30))
    want = train(program(ref.name, 1), ref, texts, seed, mode="oracle")
    apart = []
    for zero in (0, 1):
        got = train(program(ref.name, 4, zero), ref, texts, seed, mode="oracle")
        apart += [np.abs(x - y).max() / np.abs(y).max() for x, y in (*zip(got.numbers, want.numbers), (got.params, want.params))]
    return Measured(error=float(np.max(apart)), bound=1e-12, cases=2, note="relative to the largest element")


def _same_bits_on_gpus(ref: Reference, rng: np.random.Generator) -> Measured:
    """In bf16, by the rows' oracles, with one microbatch and several, the state cut or not: every bit of parameters, of their copy that the
    model reads and of the numbers that of one process."""
    wrong, cases, hashed = 0, 0, []
    for micros in (1, 2):
        texts, seed = _texts(ref, rng, micros, SHARDS_OF_GPUS), int(rng.integers(1 << 30))
        want = train(on_gpus(ref.name, 1, micros), ref, texts, seed, mode="oracle")
        for ranks, zero in ((2, 0), (4, 0), (2, 1), (4, 1)):
            got = train(verify_program(on_gpus(ref.name, ranks, micros, zero)), ref, texts, seed, mode="oracle")
            pairs = [*zip(got.numbers, want.numbers), (got.params, want.params)]
            wrong += got.apart + sum(x.tobytes() != y.tobytes() for x, y in pairs)
            cases += len(pairs)
        hashed += [want.params, *want.numbers]
    return Measured(error=float(wrong), bound=0.0, cases=cases, digest=hash_of(*hashed), note="arrays whose bits differ")


def _as_on_the_cpu(ref: Reference, rng: np.random.Generator) -> Measured:
    """From parameters that bf16 holds, the numbers and summed gradients of a first step are those of the CPU's Program in float64."""
    texts, start = batches_of(ref, rng, SHARDS_OF_GPUS, 1), round_to(rng.standard_normal(layout_of(ref).size) / 8, "bf16")
    found = []
    for p in (program(ref.name, 1, shards=SHARDS_OF_GPUS), *(on_gpus(ref.name, ranks) for ranks in (1, 2, 4))):
        layout, ranks = p.states["param"], ReferenceExecutor(p)
        for rank in range(p.ranks):
            for offset, n in layout.ranges():
                ranks.state(rank, "param")[offset : offset + n] = start[offset : offset + n]
        if "narrow" in p.plans:
            ranks.run([[("narrow", {})]] * p.ranks)
        out = ranks.step(lambda s, m: texts[s, m])[-1]
        summed = ranks.state(p.ranks - 1, f"grad{(SHARDS_OF_GPUS // p.ranks).bit_length() - 1}")
        found.append([np.array([float(out[k]) for k in sorted(out)]), np.concatenate([summed[o : o + n] for o, n in layout.ranges()])])
    apart = [np.abs(x - y).max() / np.abs(y).max() for got in found[1:] for x, y in zip(got, found[0], strict=True)]
    return Measured(error=float(np.max(apart)), bound=1e-12, cases=3, note="relative to the largest element")


def _no_copies(ref: Reference, rng: np.random.Generator) -> Measured:
    """On GPUs a rank's last microbatch launches what one process's does, and behind every unit the earlier shards' sums and one sum over
    ranks, in place: where the unit lies in the gradients."""
    wrong, cases = [], 0
    for micros in (1, 2):
        alone = on_gpus(ref.name, 1, micros)
        for ranks in (2, 4):
            p, levels = on_gpus(ref.name, ranks, micros), (SHARDS_OF_GPUS // ranks).bit_length() - 1
            last = p.plans[f"micro_last@{levels}"].launches
            units = {u.name: u for u in p.states["grad0"].units}
            own = alone.plans[f"{'micro' if micros > 1 else 'micro_first'}@{levels}"].launches
            told = [[(x.op, x.component, x.attrs, [r.type for r in x.ins]) for x in found if x.phase != "reduce"] for found in (own, last)]
            wrong += [] if told[0] == told[1] else [f"{ranks} ranks launch other kernels"]
            sums = [x for x in last if x.stream == COMM]
            adds = [x for x in last if x.phase == "reduce" and x.stream == COMPUTE]
            for x in sums:
                unit, (before,), (after,) = units[x.layer], x.ins, x.outs
                here = (before.arena, before.offset, before.type.size) == (f"state.grad{levels}", 4 * unit.start, unit.stop - unit.start)
                wrong += [] if here and before == after and x.op == "all_reduce" else [f"{x.op} of {x.layer} from {before} to {after}"]
            wrong += [] if sorted(x.layer for x in sums) == sorted(units) else ["a unit is not summed once"]
            wrong += [] if [x.op for x in adds] == ["accumulate"] * levels * len(units) else [f"{[x.op for x in adds]}"]
            cases += len(last)
    return yes(not wrong, "; ".join(wrong[:3]), cases=cases)


def _beside(ref: Reference, rng: np.random.Generator) -> Measured:
    """The backward goes on while units are summed: the head and the blocks are begun before the last launch of the backward has run, and
    every unit is summed once."""
    wrong = cases = 0
    for zero in (0, 1):
        plan = program(ref.name, 2, zero).plans[f"micro_last@{(SHARDS // 2).bit_length() - 1}"]
        order = Order([x.stream for x in plan.launches], [x.after for x in plan.launches])
        last = max(i for i, x in enumerate(plan.launches) if x.stream == COMPUTE and x.phase != "reduce")
        beside = [i for i, x in enumerate(plan.launches) if x.stream == COMM]
        units = [plan.launches[i].layer for i in beside]
        early = [plan.launches[i].layer for i in beside if not order.before(last, i)]
        wrong += not {"head", "block.1", "block.0"} <= set(early)
        wrong += sorted(units) != sorted(u.name for u in program(ref.name, 2, zero).states["grad0"].units)
        cases += len(beside)
    return Measured(error=float(wrong), bound=0.0, cases=cases)


def _late(rng: np.random.Generator) -> Measured:
    """Sums of GPUs stand right before attention's backward: of few rows before the next one, of many, beside which all are hidden, before
    the last. Only those that are complete behind it stand elsewhere."""
    wrong, layers, cases = list[str](), 3, 0
    for zero in (0, 1):
        found = []
        for rows in (2, 1 << 20):
            model = reference_of("gpt", gpt.FAMILY, gpt.GPTConfig(vocab=VOCAB, positions=SEQ, layers=layers, width=16, heads=4), rows).model
            p = build_program(name="late", model=model, optimizer=adamw(SCHEDULE), backend="cuda", catalogue=kernels_of_gpus(),
                              precision="bf16", shape=StepShape(micro_batch=rows, seq=SEQ, shards=2),
                              over=DataParallel(2, zero, precision="bf16", one_row=True))
            launches = next(plan for name, plan in p.plans.items() if name.startswith("micro_last")).launches
            roomy = [i for i, x in enumerate(launches) if x.op in ("attention_bwd", "attention_packed_bwd")]
            sums = [i for i, x in enumerate(launches) if x.stream == COMM and i < roomy[-1]]
            found.append([next(n for n, j in enumerate(roomy) if j > i) for i in sums])
            wrong += [f"zero {zero}, {rows} rows: {launches[i].layer}" for i, place in zip(sums, found[-1], strict=True)
                      if any(x.stream == COMPUTE for x in launches[i : roomy[place]])]
            cases += len(sums)
        if set(found[0]) != set(range(layers)) or found[1] != len(found[0]) * [layers - 1]:
            wrong.append(f"zero {zero}: at the {found} of {layers} places")
    return yes(not wrong, "; ".join(wrong)[:300], cases=cases)


def _cut_on_gpus(ref: Reference, rng: np.random.Generator) -> Measured:
    """On GPUs a cut state takes its share of the memory, every unit is summed to where the rank's cut of it lies, and gathered once, from
    the copy that the update leaves to where the model reads it, while the next unit is updated. Nothing is copied."""
    wrong, cases = [], 0
    for ranks in (2, 4):
        p, alone = on_gpus(ref.name, ranks, 1, 1), on_gpus(ref.name, 1)
        mine, whole = p.arenas(ranks - 1), alone.arenas()
        wrong += [kind for kind, n in (("param", whole["state.param"]), ("m", whole["state.m"]), ("v", whole["state.v"]),
                                       ("grad", whole["state.param"]), ("master16", whole["state.param16"]))
                  if mine[f"state.{kind}"] * ranks != n]
        sharded = {u.name: u for u in p.states["param"].shard(ranks).units}
        last = p.plans[f"micro_last@{(SHARDS_OF_GPUS // ranks).bit_length() - 1}"]
        for x in (x for x in last.launches if x.op == "reduce_scatter"):
            unit, (y,) = sharded[x.layer], x.outs
            wrong += [] if (y.arena, y.offset, y.stop) == ("state.grad", 4 * unit.start, 4 * unit.stop) else [f"{x.layer} goes to {y}"]
        units = {u.name: u for u in p.states["param16"].units}
        for rank in range(ranks):
            for name in ("update", "narrow"):
                plan = p.plans_of(rank)[name]
                order = Order([x.stream for x in plan.launches], [x.after for x in plan.launches])
                made = [i for i, x in enumerate(plan.launches) if x.op in ("adamw", "cast")]
                gathers = [i for i, x in enumerate(plan.launches) if x.op == "all_gather"]
                wrong += [f"{name}: {i} waits" for i, j in zip(made[1:], gathers) if order.before(j, i)]
                for x in (plan.launches[i] for i in gathers):
                    (cut,), (y,), unit = x.ins, x.outs, units[x.layer]
                    good = (y.arena, y.offset, y.stop) == ("state.param16", 2 * unit.start, 2 * unit.stop)
                    good &= (cut.arena, cut.offset) == ("state.master16", 2 * sharded[x.layer].start)
                    wrong += [] if good and x.stream == COMM else [f"{name} gathers {cut} into {y}"]
                if sorted(plan.launches[i].layer for i in gathers) != sorted(units):
                    wrong.append(f"{name}: a unit is not gathered once")
                wrong += [f"{name}: {len(plan.launches)} launches"] * (len(plan.launches) != 2 * len(units) + 3 * (name == "update"))
                cases += len(plan.launches)
    return yes(not wrong, "; ".join(wrong[:3]), cases=cases)


def _recomputed(ref: Reference, rng: np.random.Generator) -> Measured:
    """Where blocks are recomputed they are in every microbatch of a rank, also in the one that sums over ranks, whose memory falls as that
    of the others; the bits stay."""
    kept, again = (program(ref.name, 2, 1, shards=4, policy=policy) for policy in ("none", "block"))
    micros = [name for name in again.plans if name.startswith("micro")]
    wrong = [name for name in again.plans if (name in micros) != any(x.phase == "recompute" for x in again.plans[name].launches)]
    wrong += [f"memory of {name}" for name in micros if not again.plans[name].memory.lower < kept.plans[name].memory.lower]
    texts, seed = [batches_of(ref, rng, 4, 1)], int(rng.integers(1 << 30))
    a, b = (train(p, ref, texts, seed) for p in (kept, again))
    wrong += [] if a.params.tobytes() == b.params.tobytes() and a.apart == b.apart == 0 else ["other bits"]
    return yes(len(micros) > 1 and not wrong, f"{micros}: {wrong}", cases=len(again.plans))


def _told_where(ref: Reference, rng: np.random.Generator) -> Measured:
    """What sums a unit, on the CPU and on GPUs, stands at a line of the model that works on that unit; what sums loss and count at one of
    their makers."""
    astray, cases = list[str](), 0
    for p, levels in ((program(ref.name, 2, 0), 2), (program(ref.name, 2, 1), 2), (on_gpus(ref.name, 2), 1)):
        launches = p.plans[f"micro_last@{levels}"].launches
        own = {(x.layer, x.source) for x in launches if x.phase in ("forward", "backward")}
        lines = {line for _, line in own}
        for x in launches:
            if x.phase == "reduce":
                known = x.source in lines if x.layer == STATS else (x.layer, x.source) in own
                astray += [] if known else [f"{x.op} of {x.layer} at {x.source!r}"]
                cases += 1
    p = program(ref.name, 2, 1)  # what gathers the cuts stands in the layer of its unit, beside compute, unit after unit
    gathers = [x for x in p.plans["update"].launches if x.op == "all_gather"]
    units = [unit.name for unit in p.states["param"].units]
    astray += [f"{x.op} of {x.layer or 'no layer'} on {x.stream or 'compute'}" for x in gathers if x.stream != COMM]
    astray += [f"{x.op} of {x.layer} in {x.phase}" for x in gathers if x.layer and x.phase != "reduce"]
    astray += [] if [x.layer for x in gathers if x.layer] == units else [f"gathers of {[x.layer for x in gathers]}"]
    return yes(not astray and cases > 6 and len(gathers) == len(units) + 1, "; ".join(astray[:2]), cases=cases + len(gathers))


def _as_completed(rng: np.random.Generator) -> Measured:
    """Units whose parameters are used here and there are summed in the order in which the last of each is complete."""
    wrong, orders = 0, set()
    for _ in range(12):
        uses = [str(x) for x in rng.permutation([*"aabbcc"])]

        def loss(t: Tracer, training: bool, uses: list[str] = uses) -> tuple[Value, Value]:
            x = t.input("x", (4, 4), "f32")
            for i, name in enumerate(uses):
                with t.unit(name):
                    x = t.gelu(t.matmul(x, t.param(f"w{i}", (4, 4), Init("ones"))), approximate="tanh")
            return t.sum(x, axis=(0, 1), keepdims=False), t.count_valid(t.input("targets", (6,), "i32"), ignore_index=-1)

        model = Model(name="here and there", loss=loss)
        params = StateLayout(trace_training(model, None, "shapes", None, False)[0].tensors.values())
        t, graph = trace_training(model, params, "micro_last@0", 0, False)
        DataParallel(2).reduce(t, params, 0)
        told = [n.layer for n in graph.nodes if n.acts and n.layer in uses]
        wrong += told != sorted(set(uses), key=lambda name, uses=uses: -uses.index(name))  # type: ignore[misc]
        orders.add(tuple(told))
    return yes(not wrong and len(orders) > 2, f"{wrong} of 12; {sorted(orders)}", cases=12)


def _in_the_last(ref: Reference, rng: np.random.Generator) -> Measured:
    """Whatever sums over ranks is of the last microbatch, so a schedule that runs it in an earlier one is refused, by what it would sum."""
    found: list[Measured] = []
    for zero in (0, 1):
        p = program(ref.name, 4, zero, micros=2)
        name = f"micro_last@{(SHARDS // 4).bit_length() - 1}"
        sums = [x for x in p.plans[name].launches if x.phase == "reduce"]
        found += [yes({x.microbatch for x in sums} == {1} and len(sums) == 2 * len(p.states["grad0"].units))]
        for rank in range(4):
            role = p.role(rank)
            at = next(i for i, step in enumerate(role.schedule) if step.plan == name)
            steps = [*role.schedule]
            steps[at - 1], steps[at] = replace(steps[at], micro=0), replace(steps[at - 1], micro=1)
            early = replace(role, schedule=tuple(steps))
            others = tuple(early if r == rank else p.role(r) for r in range(1, 4))
            wrong = replace(p, schedule=early.schedule if rank == 0 else p.schedule, others=others)
            found.append(refuses(GraphError, lambda wrong=wrong: verify_program(wrong)))  # type: ignore[misc]
    return yes(all(m.error == 0 for m in found), cases=len(found))


def _broken_on_gpus(ref: Reference, rng: np.random.Generator) -> Measured:
    """On GPUs too no Program is taken that sums in an earlier microbatch, leaves a unit out or sums it twice, or whose sum waits for
    nothing, so that its place is written meanwhile."""
    p, name, found = on_gpus(ref.name, 2, 2), "micro_last@1", []
    plan = p.plans[name]
    sums = [i for i, x in enumerate(plan.launches) if x.stream == COMM]

    def changed(at: int, *launches: Launch) -> Program:
        """The launch at a place replaced by these, the places that others wait for moved with them."""
        by = len(launches) - 1
        later = [replace(x, after=tuple(j + by * (j > at) for j in x.after if by >= 0 or j != at)) for x in plan.launches[at + 1 :]]
        return replace(p, plans={**p.plans, name: replace(plan, launches=(*plan.launches[:at], *launches, *later))})

    for i in sums:
        x = plan.launches[i]
        for wrong, said in ((changed(i), f"nothing sums {x.layer}"), (changed(i, x, x), f"{x.layer} is summed before"),
                            (changed(i, replace(x, after=())), "the same bytes")):
            found.append(_says(wrong, said))
    steps = [*p.schedule]
    at = next(i for i, step in enumerate(steps) if step.plan == name)
    steps[at - 1], steps[at] = replace(steps[at], micro=0), replace(steps[at - 1], micro=1)
    found.append(_says(replace(p, schedule=tuple(steps)), "microbatch"))
    return yes(not any(found) and len(sums) == len(p.states["grad0"].units), "; ".join(filter(None, found))[:200], cases=len(found))


def _says(p: Program, words: str) -> str:
    """'' where the Program is refused with these words, else what became of it."""
    try:
        verify_program(p)
    except GraphError as error:
        return "" if words in str(error) else f"for {words}: {error.what} {error.came}"
    return f"taken, for {words}"


def _stored_once(ref: Reference, rng: np.random.Generator) -> Measured:
    """Eight ranks share the plans that are equal; only what a cut's place decides is a rank's own. One hash covers all."""
    whole, cut = program(ref.name, 8, 0), program(ref.name, 8, 1)
    own = {key.partition("~")[0] for key in cut.plans if "~" in key}
    good = not any("~" in key for key in whole.plans) and own == {"update", "shard"}
    good &= len({p.hash() for p in (whole, cut, program(ref.name, 4, 1), program(ref.name, 1))}) == 4
    good &= all(set(cut.role(r).plans) == set(cut.role(0).plans) for r in range(8))
    good &= [s.shard for r in range(8) for s in cut.role(r).schedule if s.shard is not None] == list(range(8))
    small, large = cut.arenas(7), whole.arenas(7)
    good &= all(8 * small[f"state.{kind}"] == large[f"state.{kind}"] for kind in ("m", "v"))
    for p, parts in ((cut, 8), (whole, 1)):
        held = {kind: ref_.type.size for kind, ref_ in p.plans["snapshot"].outputs.items()}
        good &= {*held} == {"m", "v", "param", "counter"} and all(held[kind] * parts == p.states[kind].size for kind in ("m", "v"))
        good &= held["param"] == p.states["param"].size
    saved = {*on_gpus(ref.name, 1).plans["snapshot"].outputs}  # no copy in bf16: it is made from the parameters
    good &= saved == {"param", "m", "v", "counter"} < {*on_gpus(ref.name, 1).states}
    return yes(good, cases=9)


def _of_no_host(ref: Reference, rng: np.random.Generator) -> Measured:
    """However many workers a rank has, which moves places, the hash is one. A launch that reads something else has another one."""
    p, cases = program(ref.name, 4, 1), 4
    good = len({program(ref.name, 4, 1, threads=threads).hash() for threads in (1, 2, 3, 8)}) == 1
    plan = p.plans["micro_first@0"]
    for i in map(int, rng.permutation(len(plan.launches))[:8]):
        x = plan.launches[i]
        kept = [ref_ for y in plan.launches[:i] for ref_ in y.outs if ref_.arena == "act" and x.ins and ref_.type == x.ins[0].type]
        for other in {ref_ for ref_ in kept if ref_ != x.ins[0]}:
            launches = [*plan.launches]
            launches[i] = replace(x, ins=(other, *x.ins[1:]))
            changed = replace(p, plans={**p.plans, plan.name: replace(plan, launches=tuple(launches))})
            good &= changed.hash() != p.hash()
            cases += 1
    return yes(good, cases=cases)


def _own_settings(rng: np.random.Generator) -> Measured:
    """With a cut state each rank's updates name what its cut holds, with decay and rate of every tensor."""
    layout = StateLayout([TensorSpec(f"block.{u}.t{k}", (int(rng.integers(1, 3000)),), f"block.{u}", decay=bool(k % 2),
                                     lr_scale=float(rng.uniform(0.1, 9))) for u in range(3) for k in range(3)])
    wrong = 0
    for name, optimizer in (("adamw", adamw(SCHEDULE)), ("sgd", sgd(SCHEDULE))):
        for ranks in (2, 8):
            sharded = layout.shard(ranks)
            start = {unit.name: unit.start for unit in sharded.units}
            for rank in range(ranks):
                for over in (DataParallel(ranks, 1), DataParallel(ranks, 1, precision="bf16", one_row=True)):
                    nodes = [n for n in over.update(rank, optimizer, layout, 0).nodes if n.op == name]
                    told = [(start[n.layer] + at, *rest) for n in nodes for at, *rest in n.attrs["segments"]]  # type: ignore[attr-defined]
                    wrong += sorted(told) != sorted(sharded.segments(rank))
    return yes(not wrong, f"{wrong} ranks", cases=40)


def _hashes(ref: Reference, rng: np.random.Generator) -> Measured:
    text = " ".join(program(ref.name, ranks, zero).hash() for ranks in (2, 8) for zero in (0, 1))
    return Measured(error=0.0, bound=0.0, digest=hash_of(np.frombuffer(text.encode(), np.uint8)))


def _refuse_ranks(rng: np.random.Generator) -> Measured:
    """Ranks that do not divide the shards, that no unit can be cut over, one alone, an unknown stage, another last microbatch, and another
    compute type."""
    found = [refuses(ShapeError, lambda: program("gpt", 4, 0, shards=2)), refuses(ShapeError, lambda: DataParallel(3)),
             refuses(ShapeError, lambda: DataParallel(128)), refuses(ShapeError, lambda: DataParallel(1)),
             refuses(ShapeError, lambda: DataParallel(2, 2)),
             refuses(ShapeError, lambda: DataParallel(2, micros=2).check(StepShape(micro_batch=1, seq=8, shards=2), "f32")),
             refuses(ShapeError, lambda: DataParallel(2).check(StepShape(micro_batch=1, seq=8, shards=2, micros=2), "f32")),
             refuses(ShapeError, lambda: DataParallel(2).check(StepShape(micro_batch=1, seq=8, shards=2), "bf16")),
             refuses(ShapeError, lambda: DataParallel(2, precision="bf16").check(StepShape(micro_batch=1, seq=8, shards=2), "f32"))]
    for precision in ("f32", "bf16"):
        DataParallel(2, precision=precision).check(StepShape(micro_batch=1, seq=8, shards=2), precision)
    return yes(all(m.error == 0 for m in found), cases=len(found))


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "data_parallel.pass": {"parity": [*both(_same_bits(1)), *both(_same_bits(2), "micros-"), *both(_same_bits(1, "sgd"), "sgd-")[:1],
                                      *both(_against_oracle, "oracle-"),
                                      *both(_same_bits_on_gpus, "gpus-"), *both(_as_on_the_cpu, "gpus-as-cpu-"),
                                      *both(_no_copies, "gpus-in-place-"), *both(_cut_on_gpus, "gpus-cut-"),
                                      *both(_broken_on_gpus, "gpus-broken-"), *both(_told_where, "told-"),
                                      *both(_beside, "beside-"), *both(_in_the_last, "last-"),
                                      *both(_stored_once, "once-"), *both(_recomputed, "recomputed-")[:1],
                                      ("as-completed", _as_completed), ("late", _late),
                                      *both(_of_no_host, "host-"), ("own-settings", _own_settings)],
                           "determinism": both(_hashes), "faults": [("ranks", _refuse_ranks)]},
}
