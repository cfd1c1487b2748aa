"""Cases of the Program: microbatches, shards, the fixed tree of its sums, its schedule, recomputation and its hash. Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.component import Measured
from alpha.errors import ShapeError
from alpha.gates.contracts import edges
from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.passes import texts
from alpha.gates.contracts.reference import (
    SCHEDULE,
    Reference,
    batches_of,
    both,
    graph_hashes,
    hash_of,
    in_new_process,
    kernels,
    layout_of,
    load_initial,
    program,
    refuses,
    run_step,
    text_of,
    training_graph,
    yes,
)
from alpha.graph.differentiate import contributions
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Value
from alpha.graph.plan import Program
from alpha.graph.state import Init
from alpha.graph.trace import Tracer
from alpha.optim.update import sgd
from alpha.passes.build import STATS, Model, StepShape, build_program, lower, stats_layout, trailing_ones

Case = Callable[[np.random.Generator], Measured]


def _terms(ref: Reference, p: Program) -> Program:
    """A Program of one Plan whose outputs are the terms of every gradient: '<element offset> <number of the term>'."""
    layout = p.states["param"]
    t = Tracer("terms", layout)
    loss_sum, count = ref.model.loss(t, True)
    leaves = list(t.leaves.values())
    found = [(leaf.state[1], terms) for leaf, terms in zip(leaves, contributions(t, loss_sum, leaves)) if leaf.state is not None]
    at = stats_layout(layout).offsets
    for offset, terms in (*found, (at[f"{STATS}.loss_sum"], [loss_sum]), (at[f"{STATS}.count"], [count])):
        for i, term in enumerate(terms):
            t.output(f"{offset} {i}", term)
    states = {kind: p.states[kind] for kind in ("param", "counter")}
    plan = lower(t.graph, kernels(), "cpu", 2, states, fused=False)
    return Program("terms", {plan.name: plan}, (), states, p.facts)


def _tree(shards: int, micros: int) -> Callable[[Reference, np.random.Generator], Measured]:
    def check(ref: Reference, rng: np.random.Generator) -> Measured:
        """Gradients of S shards x M microbatches are, bit for bit, the left folds of the shards added in a balanced binary tree. A shard's
        fold takes the terms of a microbatch's gradient, one per use of the parameter, one after the other."""
        batches = batches_of(ref, rng, shards, micros)
        p = program(ref.name, shards=shards, micros=micros, fused=False)
        last = f"grad{shards.bit_length() - 1}"
        with CpuExecutor(p, kernels()) as executor:
            load_initial(executor, ref, 5)
            for call in p.schedule[:-1]:
                executor.run(call.plan, text_of(batches, call))
            got = executor.state(last).copy()
        apart = _terms(ref, p)
        single: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        with CpuExecutor(apart, kernels()) as executor:
            load_initial(executor, ref, 5)
            for key, x in batches.items():
                single[key] = {k: v.ravel().copy() for k, v in executor.run("terms", x).items()}
        level = []
        for s in range(shards):
            fold = np.zeros_like(got)
            for m in range(micros):
                for name, term in sorted(single[s, m].items(), key=lambda item: tuple(map(int, item[0].split()))):
                    offset, i = map(int, name.split())
                    at = slice(offset, offset + term.size)
                    fold[at] = fold[at] + term if m or i else term
            level.append(fold)
        several = sum(name.endswith(" 1") for name in single[0, 0])
        while len(level) > 1:
            level = [a + b for a, b in zip(level[0::2], level[1::2])]
        differ = sum(int((got[o : o + n] != level[0][o : o + n]).any()) for o, n in stats_layout(layout_of(ref)).ranges())
        return Measured(error=float(differ), bound=0.0, cases=len(layout_of(ref).tensors) + 2,
                        note=f"tensors that differ; {several} with several terms")
    return check


def _sum_of_all(ref: Reference, rng: np.random.Generator) -> Measured:
    """Loss and token count of a step are the sums over all its microbatches, each counted once; both through the oracle."""
    shards, micros = 4, 2
    batches = batches_of(ref, rng, shards, micros)
    p = program(ref.name, shards=shards, micros=micros)
    layout = stats_layout(layout_of(ref))
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 6)
        state = {"param": executor.state("param").copy(), "counter": executor.state("counter").copy()}
        out = run_step(executor, p, batches)
    loss = count = 0.0
    graph = training_graph(ref)
    for x in batches.values():
        _, updates = evaluate(graph, x, state)
        loss += float(updates["grad0", layout.offsets[f"{STATS}.loss_sum"]])
        count += float(updates["grad0", layout.offsets[f"{STATS}.count"]])
    error = abs(float(out["loss_sum"]) / loss - 1) + abs(float(out["count"]) - count)
    # eight float32 losses of about 40 nats, each right to a few ulp: 2^-24 * 64 covers them
    return Measured(error=error, bound=64 * 2.0**-24, cases=len(batches), note="relative loss error + count error")


def _schedule_shape(rng: np.random.Generator) -> Measured:
    """Every (shard, microbatch) exactly once, in order; slots by trailing ones; log2 S + 1 gradient buffers; update last and once.
    Pieces that are handed over at once hold so many microbatches each, with the trees behind them, and what is left."""
    good, cases = True, 0
    for shards in (1, 2, 4, 8):
        for micros in (1, 3):
            p = program("llama", shards=shards, micros=micros)
            seen = [(s.shard, s.micro) for s in p.schedule if s.shard is not None]
            good &= seen == [(s, m) for s in range(shards) for m in range(micros)]
            good &= [s.plan for s in p.schedule].count("update") == 1 and p.schedule[-1].plan == "update"
            good &= sum(k.startswith("grad") for k in p.states) == shards.bit_length()
            good &= sum(s.plan.startswith("tree@") for s in p.schedule) == shards - 1
            for replay in (0, 1, 2, 3, 5):
                *pieces, last = replace(p, replay=replay).replays()
                held = [sum(s.shard is not None for s in piece) for piece in pieces]
                good &= held == [min(replay or len(seen), len(seen) - at) for at in range(0, len(seen), replay or len(seen))]
                good &= (*(s for piece in pieces for s in piece), *last) == p.schedule and last == p.schedule[-1:]
                good &= all(piece[0].shard is not None for piece in pieces)
            cases += 1
    good &= [trailing_ones(s) for s in range(8)] == [0, 1, 0, 2, 0, 1, 0, 3]
    good &= StepShape(micro_batch=2, seq=3, shards=4, micros=5).tokens == 2 * 3 * 4 * 5
    return yes(good, cases=cases)


def _shared_gradient(rng: np.random.Generator) -> Measured:
    """Parameters with one and the same gradient, of which one is read by the loss twice or none is: each buffer gets its own, exactly."""
    worst, cases = 0.0, 0
    for uses in ((2, 1), (1, 1), (1, 2, 1), (1, 1, 1)):
        def loss(t: Tracer, training: bool, uses: tuple[int, ...] = uses) -> tuple[Value, Value]:
            params = [t.param(f"p{i}", (6,), Init("ones")) for i in range(len(uses))]
            x, *others = [p for turn in range(2) for p, n in zip(params, uses) if turn < n]
            for p in others:
                x = t.add(x, p)
            targets = t.input("targets", (6,), "i32")
            return t.sum(x, axis=(0,), keepdims=False), t.count_valid(targets, ignore_index=-1)

        p = build_program(name="shared", model=Model(name="shared", loss=loss), optimizer=sgd(SCHEDULE), catalogue=kernels(),
                          shape=StepShape(micro_batch=1, seq=6))
        with CpuExecutor(p, kernels()) as executor:
            executor.run("micro_first@0", {"targets": np.zeros(6, np.int32)})
            got = [executor.state("grad0")[o : o + n] for o, n in p.states["param"].ranges()]
        worst += sum(float(np.abs(x - n).max()) for x, n in zip(got, uses, strict=True))
        cases += len(uses)
    return Measured(error=worst, bound=0.0, cases=cases)


def _training_apart(rng: np.random.Generator) -> Measured:
    """A model whose loss is another one in training: microbatches run that, validation the other."""
    def loss(t: Tracer, training: bool) -> tuple[Value, Value]:
        x = t.scale(t.param("a", (6,), Init("ones")), factor=5.0 if training else 3.0)
        return t.sum(x, axis=(0,), keepdims=False), t.count_valid(t.input("targets", (6,), "i32"), ignore_index=-1)

    p = build_program(name="apart", model=Model(name="apart", loss=loss), optimizer=sgd(SCHEDULE), catalogue=kernels(),
                      shape=StepShape(micro_batch=1, seq=6))
    with CpuExecutor(p, kernels()) as executor:
        for offset, n in p.states["param"].ranges():
            executor.state("param")[offset : offset + n] = 1
        found = [float(executor.run("eval", {"targets": np.zeros(6, np.int32)})["loss_sum"])]
        executor.run("micro_first@0", {"targets": np.zeros(6, np.int32)})
        found += [float(executor.state("grad0")[p.states["grad0"].offsets[f"{STATS}.loss_sum"]]), float(executor.state("grad0")[0])]
    return yes(found == [18.0, 30.0, 5.0], str(found), cases=3)


def _order_of_terms(rng: np.random.Generator) -> Measured:
    """A parameter that is used four times: its terms are added one after the other, the last use first, to the bit."""
    def loss(t: Tracer, training: bool) -> tuple[Value, Value]:
        a = t.param("a", (6,), Init("ones"))
        total = t.mul(a, t.input("f0", (6,), "f32"))
        for i in range(1, 4):
            total = t.add(total, t.mul(a, t.input(f"f{i}", (6,), "f32")))
        return t.sum(total, axis=(0,), keepdims=False), t.count_valid(t.input("targets", (6,), "i32"), ignore_index=-1)

    p = build_program(name="terms", model=Model(name="terms", loss=loss), optimizer=sgd(SCHEDULE), catalogue=kernels(),
                      shape=StepShape(micro_batch=1, seq=6))
    factors = (rng.standard_normal((4, 6)) * 10.0 ** rng.integers(-3, 4, (4, 6))).astype(np.float32)
    factors[:, 0] = 1, -(2.0**24), 2.0**24, 1
    with CpuExecutor(p, kernels()) as executor:
        executor.run("micro_first@0", {"targets": np.zeros(6, np.int32), **{f"f{i}": factors[i, :] for i in range(4)}})
        got = executor.state("grad0")[:6].copy()
    want = ((factors[3] + factors[2]) + factors[1]) + factors[0]
    backwards = ((factors[3] + factors[0]) + factors[1]) + factors[2]
    return yes(np.array_equal(got, want) and not np.array_equal(want, backwards), f"{got[0]}, {want[0]}, {backwards[0]}", cases=6)


def _recompute_same_bits(ref: Reference, rng: np.random.Generator) -> Measured:
    """Three steps with and without per-block recompute: the same parameter bits (dropout included)."""
    batches = [batches_of(ref, rng, 1, 1) for _ in range(3)]
    digests = set()
    for policy in ("none", "block"):
        p = program(ref.name, policy=policy, fused=False)
        with CpuExecutor(p, kernels()) as executor:
            load_initial(executor, ref, 7)
            for b in batches:
                run_step(executor, p, b)
            digests.add(hash_of(executor.state("param")))
    return Measured(error=float(len(digests) - 1), bound=0.0, cases=2)


def _snapshot_is_state(ref: Reference, rng: np.random.Generator) -> Measured:
    """The snapshot's outputs are the state arrays themselves, whole, at their own addresses; gradients are not among them."""
    p = program(ref.name)
    with CpuExecutor(p, kernels()) as executor:
        out = executor.run("snapshot")
        same = set(out) == {k for k in p.states if not k.startswith("grad")}
        for kind, x in out.items():
            state = executor.state(kind)
            same &= x.shape == state.shape and x.ctypes.data == state.ctypes.data
    return yes(same, cases=len(out))


def _program_hash(ref: Reference, rng: np.random.Generator) -> Measured:
    here = graph_hashes(ref.name)
    return Measured(error=float(here != in_new_process(f"graph_hashes({ref.name!r})", "alpha.gates.contracts.reference")), bound=0.0,
                    digest=hash_of(np.frombuffer(here.encode(), np.uint8)))


def _bad_shards(rng: np.random.Generator) -> Measured:
    held = [refuses(ShapeError, partial(StepShape, micro_batch=1, seq=1, shards=s)).error == 0 for s in (0, 3, 6, -4)]
    return yes(all(held), cases=4)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = merged({
    "program.step": {
        "parity": [*[(f"tree-{s}x{m}-{n}", c) for s, m in ((1, 2), (2, 1), (4, 2)) for n, c in both(_tree(s, m))],
                   *[(f"sum-{n}", c) for n, c in both(_sum_of_all)], ("schedule", _schedule_shape), ("shared-gradient", _shared_gradient),
                   ("order-of-terms", _order_of_terms), ("training-apart", _training_apart),
                   *[(f"recompute-{n}", c) for n, c in both(_recompute_same_bits)],
                   *[(f"snapshot-{n}", c) for n, c in both(_snapshot_is_state)],
                   ("told", edges.told_for_people), ("texts-of-plans", texts.plans), ("texts-of-programs", texts.programs)],
        "determinism": both(_program_hash)[1:],
        "faults": [("shards", _bad_shards), ("edges", edges.programs), ("not-finite", edges.first_not_finite)],
    },
})
