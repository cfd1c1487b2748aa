"""Cases of the executor on CPUs: what it computes call by call and replayed, what it tells, and which inputs it refuses. Floor 7."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, current_thread
from types import SimpleNamespace
from unittest import mock

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Cpu
from alpha.backends.digest import WORDS, HostDigests
from alpha.component import Catalogue, Component, Measured
from alpha.errors import GraphError, InputError, NonFiniteError
from alpha.gates.contracts import edges, watching
from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.passes import effects, traced
from alpha.gates.contracts.reference import (
    Reference,
    batch,
    batches_of,
    both,
    filled,
    hash_of,
    kernels,
    layout_of,
    load_initial,
    program,
    references,
    refuses,
    run_step,
    text_of,
    training_graph,
    yes,
)
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Plan, Program, Ref, Role, Step
from alpha.graph.trace import Tracer
from alpha.ops.numerics import walk
from alpha.ops.table import row
from alpha.passes.build import lower
from alpha.profile.recorder import Recorder
from alpha.types import Attrs

Case = Callable[[np.random.Generator], Measured]

DRAWS = 12
"""Draws of the naive error, of which the largest counts."""


def _against_oracle(ref: Reference, rng: np.random.Generator) -> Measured:
    """One microbatch's gradients in float32 against the oracles: at most twice the error of the naive float32 walk of the same graph.

    Per tensor, in root mean square, the largest of DRAWS draws of parameters within 2^-8 of these: a vector of 16 elements has an error of
    half or twice its usual size by luck, so one draw of the naive walk's error refused one sound run in 15. Tensors on which the naive walk
    happens to be exact may be off by 8 u of their own root mean square.
    """
    graph, layout, inputs = training_graph(ref), layout_of(ref), batch(ref, rng)
    p = program(ref.name)
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, int(rng.integers(1 << 30)))
        state = {"param": executor.state("param").copy(), "counter": executor.state("counter").copy()}
        executor.run("micro_first@0", inputs)
        got = executor.state("grad0").astype(np.float64)
    _, want = evaluate(graph, inputs, state)
    naive = _naive_errors(graph, inputs, state, want)
    for _ in range(DRAWS - 1):
        nudged = state["param"] * (1 + 2.0**-8 * rng.uniform(-1, 1, state["param"].size))
        moved = {**state, "param": nudged.astype(np.float32)}
        again = _naive_errors(graph, inputs, moved, evaluate(graph, inputs, moved)[1])
        naive = {key: max(naive[key], again[key]) for key in naive}
    worst = 0.0
    for key, w in want.items():
        error = _rms(got[key[1] : key[1] + w.size].reshape(w.shape) - w)
        ratio = error / max(2 * naive[key], 8 * 2.0**-24 * _rms(w), 1e-30)
        worst = max(worst, ratio if np.isfinite(ratio) else np.inf)
    assert layout.size
    return Measured(error=worst, bound=1.0, cases=len(graph.updates), note="error over max(2 x naive, 8 u)")


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _naive_errors(graph: Graph, inputs: dict[str, np.ndarray], state: dict[str, np.ndarray],
                  want: dict[tuple[str, int], np.ndarray]) -> dict[tuple[str, int], float]:
    """By what is updated, root mean square of what the float32 walk of the graph, oracle by oracle, is off `want`."""
    env = {**{v: inputs[k] for k, v in graph.inputs.items()},
           **{v: state[k][o : o + v.type.size].reshape(s) for (k, o, s), v in graph.states.items()}}
    for node in graph.nodes:
        outs = walk(row(node.op).oracle, "f32", tuple(env[v] for v in node.inputs), node.attrs)
        env.update({v: x.reshape(v.type.shape) for v, x in zip(node.outputs, outs, strict=True)})
    return {key: _rms(np.asarray(env[value], dtype=np.float64) - want[key]) for key, value in graph.updates.items()}


class _LateWorld:
    """Rank 0 of two that never meet: what a collective gives comes late, and is twice its operand."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.place, self.advanced = SimpleNamespace(source=""), 0

    def advance(self) -> None:
        self.advanced += 1


def _of_two(name: str, plan: Plan) -> Program:
    """A Program whose step is this plan, on each of two ranks."""
    role = Role((Step(name),), {name: name})
    return Program(name, {name: plan}, role.schedule, {}, {"threads": 1}, others=(role,), groups={"dp": ((0, 1),)})


def _gets_on(rng: np.random.Generator) -> Measured:
    """A rank says that it gets on before each Plan, one without collectives too: so it hears that another has failed."""
    t = Tracer("plain")
    t.output("y", t.scale(t.input("x", (64,), "f32"), factor=2.0))
    p = _of_two("plain", lower(t.graph, kernels(), "cpu", 1, {}))
    world = _LateWorld()
    with CpuExecutor(p, kernels(), world) as executor:
        for _ in range(3):
            executor.run("plain", {"x": np.ones(64, np.float32)})
    return yes(world.advanced == 3, f"{world.advanced} times", cases=3)


def _late(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    def run() -> None:
        x = ins[0].copy()
        time.sleep(0.02)
        np.add(x, x, out=outs[0])
    return run


class _TimedRecorder(Recorder):
    """`ordered`: whether every launch that it was told of has a start, and an end behind it."""

    ordered = True

    def ran(self, plan: Plan, marks: Sequence[int], waits: Sequence[tuple[int, int]] = (), checked: tuple[int, int] | None = None) -> None:
        self.ordered &= len(marks) == 2 * len(plan.launches) and all(0 < a <= b for a, b in zip(marks[::2], marks[1::2]))
        super().ran(plan, marks, waits, checked)


def _beside(rng: np.random.Generator) -> Measured:
    """Compute waits for a collective where it reads what that gives, and a plan has run when its last collective has. Each launch has the
    time of its start and of its end."""
    t = Tracer("beside")
    x = t.input("x", (64,), "f32")
    y = t.scale(x, factor=2.0)
    t.stream = COMM
    first, last = (t.all_reduce(v, group="dp", size=2, reduce="sum") for v in (x, y))
    t.stream = COMPUTE
    t.output("used", t.add(first, y))
    t.output("last", last)
    catalogue = filled(fill)
    catalogue.add(Component(id="all_reduce.late", kind="kernel", backend="cpu", op="all_reduce", implementation=_late))
    p = _of_two("beside", lower(t.graph, catalogue, "cpu", 1, {}))
    wrong, runs = 0, 3
    with CpuExecutor(p, catalogue, _LateWorld()) as executor:
        executor.recorder = timed = _TimedRecorder()
        for step in range(runs):
            timed.begin(step)
            for arena in executor.arenas.values():
                arena[...] = 0xFF
            given = rng.integers(-99, 100, 64).astype(np.float32)
            out = executor.run("beside", {"x": given})
            wrong += not (np.array_equal(out["used"], 4 * given) and np.array_equal(out["last"], 4 * given))
        wrong += not timed.ordered
    return yes(not wrong, cases=3 * runs)


def _instead(**kernels: Callable[..., Callable[[], None]]) -> Catalogue:
    """The CPU's kernels, with these in place of those of their ops."""
    catalogue = Catalogue()
    for c in (*(c for c in filled(fill) if c.op not in kernels),
              *(Component(id=f"{op}.instead", kind="kernel", backend="cpu", op=op, implementation=k) for op, k in kernels.items())):
        catalogue.add(c)
    return catalogue


def _dropped(rng: np.random.Generator) -> Measured:
    """A launch of compute fails beside collectives: the one that runs ends before the error comes, those behind it never begin, and the
    next run is as if nothing had been."""
    t = Tracer("dropped")
    x = t.input("x", (64,), "f32")
    y = t.scale(x, factor=2.0)
    t.stream = COMM
    sums = [t.all_reduce(v, group="dp", size=2, reduce="sum") for v in (x, x)]
    t.stream = COMPUTE
    t.output("y", t.gelu(y, approximate="tanh"))
    for i, total in enumerate(sums):
        t.output(f"sum{i}", total)
    seen, begun, broken = list[str](), Event(), [True]

    def exchange(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            seen.append("begins")
            begun.set()
            while broken[0] and not comm.stopped:
                time.sleep(0.001)
            np.add(ins[0], ins[0], out=outs[0])
            seen.append("ends")
        return run

    def fails(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            begun.wait()
            if broken[0]:
                raise InputError("a launch of compute")
            outs[0][...] = ins[0]
        return run

    catalogue = _instead(all_reduce=exchange, gelu=fails)
    p = _of_two("dropped", lower(t.graph, catalogue, "cpu", 1, {}))
    given = {"x": rng.integers(-99, 100, 64).astype(np.float32)}
    with CpuExecutor(p, catalogue, _LateWorld()) as executor:
        assert executor._comm is not None
        comm = executor._comm
        held = [refuses(InputError, partial(executor.run, "dropped", given)).error == 0, seen == ["begins", "ends"]]
        broken[0] = False
        out = executor.run("dropped", given)
        held.append(comm._thread.daemon)  # a process that ends without closing does not wait for its collectives
        held += [np.array_equal(out["y"], 2 * given["x"]), *(np.array_equal(out[f"sum{i}"], 2 * given["x"]) for i in range(2))]
    return yes(all(held), str(held), cases=len(held))


def _overlaps(rng: np.random.Generator) -> Measured:
    """Compute waits for the collective whose result it reads, not for one behind it: that one here ends only when compute is done."""
    t = Tracer("overlaps")
    x = t.input("x", (64,), "f32")
    t.stream = COMM
    first = t.all_reduce(x, group="dp", size=2, reduce="sum")
    second = t.all_reduce(t.reshape(x, shape=(8, 8)), group="dp", size=2, reduce="sum")
    t.stream = COMPUTE
    t.output("y", t.gelu(t.add(first, x), approximate="tanh"))
    t.output("second", second)
    done, held = Event(), list[bool]()

    def exchange(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            if ins[0].ndim == 2:
                held.append(done.wait(20))
            np.add(ins[0], ins[0], out=outs[0])
        return run

    def last(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            outs[0][...] = ins[0]
            done.set()
        return run

    catalogue = _instead(all_reduce=exchange, gelu=last)
    p = _of_two("overlaps", lower(t.graph, catalogue, "cpu", 1, {}))
    given = rng.integers(-99, 100, 64).astype(np.float32)
    with CpuExecutor(p, catalogue, _LateWorld()) as executor:
        out = executor.run("overlaps", {"x": given})
        held += [np.array_equal(out["y"], 3 * given), np.array_equal(out["second"].ravel(), 2 * given)]
    return yes(held == [True] * 3, str(held), cases=3)


def _sides(rng: np.random.Generator) -> Measured:
    """What is put beside compute runs there, whether it takes and gives something or not, alone or behind another one: compute goes on to
    its end, and the plan has run when that has."""
    wrong, kinds = list[str](), (("send",), ("receive",), ("all_reduce",), ("send", "send"), ("receive", "send"))
    main = current_thread()
    for kind in kinds:
        t = Tracer("sides")
        x = t.input("x", (64,), "f32")
        t.stream = COMM
        for i, op in enumerate(kind):
            if op == "send":
                t.send(x, group="dp", size=2, to=1)
                continue
            t.output(f"given{i}", t.receive(shape=(64,), dtype="f32", group="dp", size=2, source=1) if op == "receive" else
                     t.all_reduce(x, group="dp", size=2, reduce="sum"))
        t.stream = COMPUTE
        t.output("y", t.gelu(x, approximate="tanh"))
        done, on = Event(), list[tuple[bool, bool]]()

        def beside(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs, done: Event = done,
                   on: list[tuple[bool, bool]] = on) -> Callable[[], None]:
            def run() -> None:
                away = current_thread() is not main
                on.append((away, away and done.wait(20)))
                for out in outs:
                    out[...] = 7
            return run

        def last(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs, done: Event = done) -> Callable[[], None]:
            def run() -> None:
                outs[0][...] = ins[0]
                done.set()
            return run

        catalogue = _instead(send=beside, receive=beside, all_reduce=beside, gelu=last)
        p = _of_two("sides", lower(t.graph, catalogue, "cpu", 1, {}))
        given = rng.integers(-99, 100, 64).astype(np.float32)
        with CpuExecutor(p, catalogue, _LateWorld()) as executor:
            out = executor.run("sides", {"x": given})
            good = on == [(True, True)] * len(kind) and all(np.array_equal(v, given if k == "y" else given * 0 + 7) for k, v in out.items())
        wrong += [] if good else [f"{' and '.join(kind)}: beside compute, until it is done: {on}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=len(kinds))


def _failed(rng: np.random.Generator) -> Measured:
    """One of three collectives fails before compute has come to what needs the second, or while it waits there: that does not begin, nor
    what is behind it, nor a collective behind the one that failed. The error comes, and the next run is as if nothing had been."""
    wrong, ran, at = list[str](), list[str](), [0, False]
    t = Tracer("failed")
    x = t.input("x", (64,), "f32")
    t.stream = COMM
    sums = [t.all_reduce(t.reshape(x, shape=shape), group="dp", size=2, reduce="sum") for shape in ((1, 64), (2, 32), (4, 16))]
    t.stream = COMPUTE
    y = t.gelu(x, approximate="tanh")
    y = t.scale(t.add(t.reshape(sums[1], shape=(64,)), y), factor=2.0)
    t.output("y", y)
    t.output("first", sums[0])
    t.output("last", t.add(t.reshape(sums[2], shape=(64,)), y))

    def exchange(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            if at[0] == len(ins[0]):
                waits.wait(20 * at[1])
                raise InputError("a collective")
            ran.append(f"sum {len(ins[0])}")
            np.add(ins[0], ins[0], out=outs[0])
        return run

    def first(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            ran.append("first")
            outs[0][...] = ins[0]
            end = time.monotonic() + 20
            while at[0] and not at[1] and not comm.stopped and time.monotonic() < end:
                time.sleep(0.001)
        return run

    def adds(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            ran.append("add")
            np.add(ins[0], ins[1], out=outs[0])
        return run

    def scales(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            ran.append("scale")
            np.multiply(ins[0], 2, out=outs[0])
        return run

    def wait(number: int | None = None) -> None:
        waits.set()
        waited(number)

    catalogue = _instead(all_reduce=exchange, gelu=first, add=adds, scale=scales)
    p = _of_two("failed", lower(t.graph, catalogue, "cpu", 1, {}))
    given, cases = rng.integers(-99, 100, 64).astype(np.float32), 0
    with CpuExecutor(p, catalogue, _LateWorld()) as executor:
        assert executor._comm is not None
        comm, waits, waited = executor._comm, Event(), executor._comm.wait
        with mock.patch.object(comm, "wait", wait):
            for late in (False, True):
                for fails in (1, 2):
                    at[:], cases = [fails, late], cases + 1
                    ran.clear()
                    waits.clear()
                    told = refuses(InputError, partial(executor.run, "failed", {"x": given})).error == 0
                    want = ["first", *(f"sum {n}" for n in (1, 2) if n < fails)]
                    wrong += [] if told and sorted(ran) == want else [f"sum {fails} fails{' late' * late}: {told}, {ran}, not {want}"]
                    at[:] = [0, False]
                    out = executor.run("failed", {"x": given})
                    good = np.array_equal(out["y"], 6 * given) and np.array_equal(out["last"], 8 * given)
                    wrong += [] if good else [f"sum {fails} fails{' late' * late}: the next run gives something else"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def _replay_names(ref: Reference, rng: np.random.Generator) -> Measured:
    """An infinite weight: replay names the first op that reads it, with layer and model line. What that one makes is infinite; products
    further on make NaN of it."""
    p = program(ref.name)
    layout = layout_of(ref)
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 1)
        executor.state("param")[layout.offsets["block.1.attention.qkv.weight"]] = np.inf
        try:
            executor.replay("micro_first@0", batch(ref, rng))
        except NonFiniteError as error:
            text = str(error)
            return yes(all(word in text for word in ("matmul", "block.1", "parts.py:", "inf\n")), text[:250])
    return yes(False, "no error")


def _bad_inputs(ref: Reference, rng: np.random.Generator) -> Measured:
    with CpuExecutor(program(ref.name), kernels()) as executor:
        good = batch(ref, rng)
        tokens = good["tokens"]
        wrong = [{}, {**good, "tokens": tokens[:, :-1]}, {**good, "tokens": tokens.astype(np.int64)}, {**good, "more": tokens}]
        held = [refuses(InputError, partial(executor.run, "micro_first@0", w)).error == 0 for w in wrong]
        held += [refuses(InputError, partial(executor.stage, ("micro_first@0",), [w])).error == 0 for w in wrong]
    return yes(all(held), cases=len(held))


def bad_step_harmless(ref: Reference, rng: np.random.Generator) -> Measured:
    """A non-finite gradient: parameters, moments and step keep their bits, finite is 0; the next good step goes on."""
    p = program(ref.name)
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 2)
        run_step(executor, p, batches_of(ref, rng, 1, 1))
        kept = [k for k in p.states if not k.startswith("grad")]
        before = {k: executor.state(k).copy() for k in kept}
        executor.run("micro_first@0", batch(ref, rng))
        executor.state("grad0")[layout_of(ref).ranges()[3][0]] = rng.choice([np.inf, -np.inf, np.nan])
        out = executor.run("update")
        same = all(before[k].tobytes() == executor.state(k).tobytes() for k in kept) and int(out["finite"]) == 0
        out = run_step(executor, p, batches_of(ref, rng, 1, 1))
        moved = int(out["finite"]) == 1 and int(executor.state("counter")[0]) == 2
    return yes(same and moved)


def _bits(ref: Reference, rng: np.random.Generator) -> Measured:
    """Two steps of two shards of two microbatches on 1, 2 and 3 workers: the same parameter bits."""
    batches = batches_of(ref, rng, 2, 2)
    digests = set()
    for threads in (2, 1, 3):
        p = program(ref.name, shards=2, micros=2, threads=threads)
        with CpuExecutor(p, kernels()) as executor:
            load_initial(executor, ref, 3)
            for _ in range(2):
                run_step(executor, p, batches)
            digests.add(hash_of(executor.state("param"), executor.state("m"), executor.state("v")))
    return Measured(error=float(len(digests) - 1), bound=0.0, cases=3, digest=sorted(digests)[0], note="workers 1, 2, 3")


class _CountedRecorder(Recorder):
    """Counts the launches that it is told of one by one, their hand-overs, and the Plans that it is told of."""

    launches = dispatches = plans = 0

    def profiled(self, plan: Plan, index: int, **counted: int) -> None:
        self.launches += 1
        self.dispatches += counted["dispatches"]
        super().profiled(plan, index, **counted)

    def ran(self, plan: Plan, marks: Sequence[int], waits: Sequence[tuple[int, int]] = (), checked: tuple[int, int] | None = None) -> None:
        self.plans += 1
        super().ran(plan, marks, waits, checked)


class _Looks:
    """An inspector that looks at operands before each launch, and at what is in the place of its results."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.told, self.wrong = 0, 0

    def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        self.held = [read(r).tobytes() for r in plan.launches[index].outs]

    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        self.told += 1
        self.wrong += self.held == [read(r).tobytes() for r in plan.launches[index].outs]


def _inspected(rng: np.random.Generator) -> Measured:
    """A launch is looked at just before it runs and just after. Its step's times are told as those of any other."""
    t = Tracer("inspected")
    x = t.input("x", (64,), "f32")
    t.output("y", t.add(t.scale(x, factor=2.0), t.scale(x, factor=3.0)))
    p = Program("inspected", {"inspected": lower(t.graph, kernels(), "cpu", 1, {})}, (Step("inspected"),), {}, {"threads": 1})
    with CpuExecutor(p, kernels()) as executor:
        executor.recorder, executor.inspector = (counted := _CountedRecorder()), (looks := _Looks())
        for step in range(2):
            executor.recorder.begin(step)
            executor.run("inspected", {"x": (step + 1) * rng.uniform(1, 2, 64).astype(np.float32)})
        launches = 2 * len(p.plans["inspected"].launches)
        found = looks.told, looks.wrong, counted.plans
        return yes(found == (launches, 0, 2), f"looks, at the wrong time, plans: {found}", cases=3)


def _handed_over(rng: np.random.Generator) -> Measured:
    """In a profiled step each launch is told with its own hand-overs, beside collectives too: together as many as there were."""
    catalogue, told = filled(fill), list[tuple[int, int]]()
    catalogue.add(Component(id="all_reduce.late", kind="kernel", backend="cpu", op="all_reduce", implementation=_late))
    for beside in (False, True):
        t = Tracer("handed")
        x, gain, few = (t.input(name, shape, "f32") for name, shape in (("x", (4096, 64)), ("gain", (64,)), ("few", (4,))))
        if beside:
            t.stream = COMM
            t.output("sum", t.all_reduce(few, group="dp", size=2, reduce="sum"))
            t.stream = COMPUTE
        t.output("y", t.rmsnorm(t.rmsnorm(x, gain, eps=1e-6)[0], gain, eps=1e-6)[0])
        t.output("z", t.scale(few, factor=2.0))  # which hands nothing over
        role = Role((Step("handed"),), {"handed": "handed"})
        p = Program("handed", {"handed": lower(t.graph, catalogue, "cpu", 2, {})}, role.schedule, {}, {"threads": 2},
                    others=(role,) * beside, groups={"dp": ((0, 1),)} if beside else {})
        with CpuExecutor(p, catalogue, _LateWorld() if beside else None) as executor:
            executor.recorder = counted = _CountedRecorder()
            calls, sound = list[int](), executor.workers.run

            def run(tasks: Sequence[Callable[[], None]], sound: Callable[..., None] = sound, calls: list[int] = calls) -> None:
                calls.append(len(tasks))
                sound(tasks)
            executor.workers.run = run  # type: ignore[method-assign]
            executor.recorder.begin(0, profiled=True)
            executor.run("handed", {"x": rng.standard_normal((4096, 64)).astype(np.float32), "gain": np.ones(64, np.float32),
                                    "few": np.ones(4, np.float32)})
            told.append((len(calls), counted.dispatches))
    return yes(all(a == b >= 2 for a, b in told), f"hand-overs, told: {told}", cases=2)


def _watched(ref: Reference, rng: np.random.Generator) -> Measured:
    """Two steps unwatched, with every launch timed, and with the workers observed: the same parameter bits. The recorder is told of each
    launch by itself where workers are observed, and there alone."""
    p, batches = program(ref.name, shards=2, micros=2), batches_of(ref, rng, 2, 2)
    digests, launches = [], 2 * sum(len(p.plans[call.plan].launches) for call in p.schedule)
    wrong = 0
    for mode in ("unwatched", "timed", "observed"):
        with CpuExecutor(p, kernels()) as executor:
            executor.recorder = counted = _CountedRecorder()
            load_initial(executor, ref, 3)
            for step in range(2):
                if mode != "unwatched":
                    executor.recorder.begin(step, profiled=mode == "observed")
                run_step(executor, p, batches)
            digests.append(hash_of(executor.state("param"), executor.state("m"), executor.state("v")))
            wrong += counted.launches != (launches if mode == "observed" else 0)
    return Measured(error=float(len(set(digests)) - 1 + wrong), bound=0.0, cases=3, digest=digests[0], note="unwatched, timed, observed")


def _eval_reads_only(ref: Reference, rng: np.random.Generator) -> Measured:
    """eval and decode leave every state array alone, and eval's loss is the training loss where there is no dropout."""
    p = program(ref.name)
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 4)
        before = {k: executor.state(k).copy() for k in p.states}
        full = batch(ref, rng)
        executor.run("eval", {k: v for k, v in full.items() if k in p.plans["eval"].inputs})
        decode = {k: full[k][:1] for k in p.plans["decode"].inputs if k in full} | {"index": np.array([3], np.int32)}
        executor.run("decode", decode)
        executor.run("snapshot")
        same = all(before[k].tobytes() == executor.state(k).tobytes() for k in p.states)
    return yes(same)


def _replay_same(ref: Reference, rng: np.random.Generator) -> Measured:
    """replay computes what run computes, from its own inputs, also where another batch was staged; so does run; a staged batch is used.
    A Plan that takes no inputs is given none."""
    p = program(ref.name)
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 11)
        first, second = batch(ref, rng), batch(ref, rng)
        executor.run("micro_first@0", second)
        want = executor.state("grad0").copy()
        held = []
        for again in (executor.replay, executor.run):
            executor.run("micro_first@0", first)
            held.append(want.tobytes() != executor.state("grad0").tobytes())  # or the comparison means nothing
            executor.stage(("micro_first@0",), [first])
            again("micro_first@0", second)
            held.append(want.tobytes() == executor.state("grad0").tobytes())
        executor.run("micro_first@0", first)
        executor.stage(("micro_first@0",), [second])
        executor.enqueue(("micro_first@0",))
        held.append(want.tobytes() == executor.state("grad0").tobytes())
        before, after = {kind: executor.state(kind).copy() for kind in p.states}, set[str]()
        for again in (executor.replay, executor.run):
            for kind, values in before.items():
                executor.state(kind)[...] = values
            again("update")
            after.add(hash_of(*(executor.state(kind) for kind in p.states)))
        held.append(len(after) == 1 and after != {hash_of(*before.values())})
        return yes(all(held), cases=len(held))


def _replays(ref: Reference, rng: np.random.Generator) -> Measured:
    """However many microbatches are handed over at once, each call of the schedule is, once and in order, and the state is the same to the
    bit; so where the first of them were staged."""
    batches, good, digests = batches_of(ref, rng, 2, 2), True, set()
    p = program(ref.name, shards=2, micros=2)
    for replay, most in ((1, 1), (2, 2), (3, 3), (0, 4), (9, 4)):
        cut = replace(p, replay=replay)
        good &= tuple(call for calls in cut.replays() for call in calls) == p.schedule and cut.hash() == p.hash()
        held = [sum(call.shard is not None for call in calls) for calls in cut.replays()[:-1]]
        good &= cut.replays()[-1] == p.schedule[-1:]
        good &= held[:-1] == [most] * (len(held) - 1) and 0 < held[-1] <= most
        for staged in (False, True):
            with CpuExecutor(cut, kernels()) as executor:
                load_initial(executor, ref, 8)
                for index, calls in enumerate(cut.replays()):
                    plans = tuple(call.plan for call in calls)
                    inputs = [text_of(batches, call) for call in calls]
                    if staged and index == 0:
                        executor.stage(plans, inputs)
                    executor.enqueue(plans, None if staged and index == 0 else inputs)
                digests.add(hash_of(executor.state("param"), executor.state("counter")))
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 8)
        run_step(executor, p, batches)
        digests.add(hash_of(executor.state("param"), executor.state("counter")))
    return yes(good and len(digests) == 1, cases=11)


def _staged_once(ref: Reference, rng: np.random.Generator) -> Measured:
    """What was staged is a copy, which the caller may write over, and is used once: asked for again, it is not there."""
    p, plan = program(ref.name), "micro_first@0"
    with CpuExecutor(p, kernels()) as executor:
        load_initial(executor, ref, 12)
        given = batch(ref, rng)
        executor.run(plan, given)
        want = executor.state("grad0").copy()
        executor.stage((plan,), [given])
        for x in given.values():
            x[...] = 0
        executor.enqueue((plan,))
        copied = want.tobytes() == executor.state("grad0").tobytes()
        return yes(copied and refuses(InputError, partial(executor.enqueue, (plan,))).error == 0, cases=2)


def _blas_lent(rng: np.random.Generator) -> Measured:
    """BLAS has one thread while an executor lives, and as many as before when it is gone, by an error too."""
    def threads() -> set[int]:
        return {int(x["num_threads"]) for x in threadpool_info() if x["user_api"] == "blas"}

    found = list[set[int]]()
    for error in ((), (InputError,)):
        with threadpool_limits(limits=2, user_api="blas"):
            found.append(threads())
            with suppress(InputError), CpuExecutor(program("gpt"), kernels()):
                found.append(threads())
                for kind in error:
                    raise kind("the run ends")
            found.append(threads())
    return yes(found == 2 * [{2}, {1}, {2}], f"threads {found}", cases=6)


def _other_world(rng: np.random.Generator) -> Measured:
    """A Program of one rank does not run on one of two."""
    def opened() -> None:
        with CpuExecutor(program("gpt"), kernels(), _LateWorld()):
            pass
    return refuses(InputError, opened)


def _other_scratch(rng: np.random.Generator) -> Measured:
    """A kernel that takes less scratch than its component declares, or more, is refused when it is bound."""
    def opened(taken: int) -> None:
        catalogue = Catalogue()
        catalogue.add(Component(id="gelu.made", kind="kernel", backend="cpu", op="gelu", scratch=lambda types, attrs, threads: 512,
                                implementation=lambda cpu, ins, outs, attrs: (cpu.scratch((taken,), np.uint8), lambda: None)[1]))
        t = Tracer("scratch")
        t.output("y", t.gelu(t.input("x", (4,), "f32"), approximate="tanh"))
        p = Program("scratch", {"scratch": lower(t.graph, catalogue, "cpu", 1, {})}, (Step("scratch"),), {}, {"threads": 1})
        with CpuExecutor(p, catalogue):
            pass
    opened(512)
    return yes(all(refuses(GraphError, partial(opened, n)).error == 0 for n in (256, 768)), cases=3)


def _hashes(rng: np.random.Generator) -> Measured:
    """A bit that changes, wherever it is, changes the hash of its piece and no other. The hash's first byte that differs names the word."""
    raw = rng.integers(0, 256, HostDigests.piece + 8 * (WORDS + 5) + 3).astype(np.uint8)
    digests, wrong, cases = HostDigests({"state.x": raw}, lambda ref: raw[ref.offset : ref.stop]), 0, 0

    def hashed(start: int) -> np.ndarray:
        return np.frombuffer(digests.read(digests.of_state("x", start)), np.uint8)

    starts = range(0, digests.nbytes("x"), digests.piece)
    sound = [hashed(start) for start in starts]
    for k, start in enumerate(starts):
        nbytes = min(digests.piece, raw.size - start)
        for at in (0, 8 * WORDS - 1, 8 * WORDS, nbytes - 1, *rng.integers(0, nbytes, 12).tolist()):
            raw[start + at] ^= 1 << int(rng.integers(8))
            now = [hashed(s) for s in starts]
            differ = [np.flatnonzero(a != b) for a, b in zip(sound, now)]
            named = differ[k].size and at // 8 in digests.words(nbytes, int(differ[k][0]))
            wrong += not named or any(d.size for d in (*differ[:k], *differ[k + 1 :]))
            sound, cases = now, cases + 1
    p = program("llama")
    with CpuExecutor(p, kernels()) as executor:
        ref = p.plans["micro_first@0"].inputs["tokens"]
        before = executor.digests.read(executor.digests.of(ref))
        executor.view(ref)[-1, -1] += 1
        wrong += before == executor.digests.read(executor.digests.of(ref))
        wrong += any(executor.digests.nbytes(kind) != executor.state(kind).nbytes for kind in p.states)
    return Measured(error=float(wrong), bound=0.0, cases=cases + 2, note="bits")


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = merged({
    "executor.cpu": {
        "parity": [("beside", _beside), ("overlaps", _overlaps), ("sides", _sides), ("gets-on", _gets_on), ("hashes", _hashes),
                   ("inspected", _inspected),
                   ("handed-over", _handed_over), ("extents", effects.counted_rows), ("extents-of-ranks", effects.ranks_count),
                   *both(_against_oracle),
                   *[(f"read-only-{n}", c) for n, c in both(_eval_reads_only)],
                   *[(f"replay-{n}", c) for n, c in both(_replay_same)], *[(f"replays-{n}", c) for n, c in both(_replays)],
                   ("staged-once", lambda rng: _staged_once(references()["llama"], rng)), ("parts-of-calls", traced.parts_of_calls),
                   ("long-calls", edges.long_calls), ("held-at-once", edges.held_at_once), ("launches-told", watching.launches),
                   ("hand-overs-told", watching.notes), ("workers-told", watching.workers), ("items-once", watching.items),
                   ("panels-apart", watching.panels), ("blas-lent", _blas_lent),
                   ("late-ends", watching.late_ends), ("errors-told", watching.errors), ("pages", watching.pages)],
        "determinism": [*both(_bits), *[(f"watched-{n}", c) for n, c in both(_watched)]],
        "faults": [*[(f"replay-{n}", c) for n, c in both(_replay_names)], *[(f"inputs-{n}", c) for n, c in both(_bad_inputs)],
                   *[(f"bad-step-{n}", c) for n, c in both(bad_step_harmless)], ("other-world", _other_world), ("dropped", _dropped),
                   ("failed", _failed), ("other-scratch", _other_scratch), ("extent-outside", effects.refuse_rows),
                   ("extents-apart", effects.refuse_other_counts),
                   ("extent-of-other-rows", effects.refuse_other_rows)],
    },
})
