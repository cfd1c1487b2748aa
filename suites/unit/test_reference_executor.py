"""The reference executor: one rank against the float64 model and against the CPU executor's bits; many ranks, matched call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.reference.executor import ReferenceExecutor
from alpha.component import Catalogue
from alpha.errors import GraphError, InputError
from alpha.gates.contracts.mixed import declared
from alpha.gates.contracts.reference import (
    BATCH,
    SCHEDULE,
    SEQ,
    batches_of,
    kernels,
    layout_of,
    program,
    random_state,
    references,
    text_of,
    training_graph,
)
from alpha.graph.evaluate import evaluate
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step
from alpha.graph.state import StateLayout, TensorSpec
from alpha.ops.numerics import round_to
from alpha.ops.table import row
from alpha.optim.update import adamw
from alpha.passes.build import StepShape, build_program
from alpha.types import ITEMSIZE, TensorType

MODELS = ("gpt", "llama")


def start(executor: Any, state: Callable[[str], np.ndarray], name: str, seed: int) -> None:
    given = random_state(references()[name], np.random.default_rng(seed))
    state("param")[...] = given["param"].astype(np.float32)
    state("counter")[...] = 0


@pytest.mark.parametrize("name", MODELS)
def test_oracles_give_the_float64_model(name: str) -> None:
    """A microbatch's gradients and loss in arenas equal the traced graph's, though memory is shared and poisoned."""
    p, ref = program(name), references()[name]
    batch = batches_of(ref, np.random.default_rng(4), 1, 1)[0, 0]
    with ReferenceExecutor(p) as executor:
        start(executor, lambda kind: executor.state(0, kind), name, 3)
        states = {kind: np.array(executor.state(0, kind)) for kind in ("param", "counter", "grad0")}
        states["counter"] = states["counter"].astype(np.int32)
        executor.run([[("micro_first@0", batch)]])
        _, updates = evaluate(training_graph(ref), batch, states)
        assert updates
        for (kind, offset), want in updates.items():
            got = executor.state(0, kind)[offset : offset + want.size]
            np.testing.assert_allclose(got, want.reshape(-1), rtol=1e-10, atol=1e-12 * np.abs(want).max(initial=0))


@pytest.mark.parametrize("name", MODELS)
def test_plans_of_the_gpu_run_by_oracles_too(name: str) -> None:
    """A step of the GPU's Program, its fused rows and bf16 copies, is that of the CPU's where bf16 holds the parameters exactly."""
    ref = references()[name]
    on_gpu = build_program(name=name, model=ref.model, optimizer=adamw(SCHEDULE), catalogue=declared(), backend="cuda", precision="bf16",
                           shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=2, micros=2))
    batches = batches_of(ref, np.random.default_rng(5), 2, 2)
    found = []
    for p, to in ((on_gpu, "bf16"), (program(name, shards=2, micros=2), "bf16"), (program(name, shards=2, micros=2), "f32")):
        with ReferenceExecutor(p) as executor:
            start(executor, lambda kind, executor=executor: executor.state(0, kind), name, 6)  # type: ignore[misc]
            executor.state(0, "param")[...] = round_to(executor.state(0, "param"), to)
            if "narrow" in p.plans:
                executor.run([[("narrow", {})]])
            found.append(executor.step(lambda s, m: batches[s, m])[0])
    for k in found[0]:
        np.testing.assert_allclose(found[0][k], found[1][k], rtol=1e-9)
    assert abs(found[0]["loss_sum"] / found[2]["loss_sum"] - 1) > 1e-6, "other parameters would not be seen"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("shards", "micros"), [(1, 1), (2, 2)])
def test_kernels_give_the_cpu_executors_bits(name: str, shards: int, micros: int) -> None:
    """Three steps: every byte of parameters, moments and counters, and every output."""
    p, ref = program(name, shards=shards, micros=micros), references()[name]
    batches = batches_of(ref, np.random.default_rng(5), shards, micros)
    with ReferenceExecutor(p, kernels(), mode="kernels") as executor, CpuExecutor(p, kernels()) as cpu:
        start(executor, lambda kind: executor.state(0, kind), name, 6)
        start(cpu, cpu.state, name, 6)
        for _ in range(3):
            (found,) = executor.step(lambda s, m: batches[s, m])
            for call in p.schedule:
                cpu.run(call.plan, text_of(batches, call))
            want = cpu.outputs(p.schedule[-1].plan)
            assert {k: x.tobytes() for k, x in found.items()} == {k: x.tobytes() for k, x in want.items()} and found
        for kind in ("param", "m", "v", "counter"):
            for offset, n in p.states[kind].ranges():
                assert executor.state(0, kind)[offset : offset + n].tobytes() == cpu.state(kind)[offset : offset + n].tobytes(), kind


def test_what_a_launch_does_not_write_shows() -> None:
    """A component that leaves the second half of its result as it was: rubbish is found there, run after run."""
    def lazy(cpu: Any, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Any) -> Callable[[], None]:
        half = outs[0].size // 2
        return lambda: np.copyto(outs[0][:half], ins[0][:half])

    catalogue = Catalogue()
    catalogue.add(replace(kernels()["scale.f32.cpu"], implementation=lazy))
    x, y = ref_of("act", 0, 8), ref_of("act", 256, 8)
    p = job([[call("scale", [x], [y], component="scale.f32.cpu", factor=1.0)]], inputs={"x": x}, outputs={"y": y})
    with ReferenceExecutor(p, catalogue, mode="kernels") as executor:
        for _ in range(2):
            (found,) = executor.run([[("p", {"x": np.ones(8, np.float32)})]])
            assert np.isnan(found["y"]).tolist() == [False] * 4 + [True] * 4


def test_modes_are_refused_by_name() -> None:
    for kwargs in ({"mode": "fast"}, {"mode": "kernels"}):
        with pytest.raises(InputError, match="no such mode"):
            ReferenceExecutor(program("gpt"), **kwargs)  # type: ignore[arg-type]


# -- many ranks: Programs written by hand ----------------------------------------------------------------------------------------


def ref_of(arena: str, offset: int, n: int, dtype: str = "f32") -> Ref:
    return Ref(arena, offset, TensorType((n,), dtype))


def call(op: str, ins: Sequence[Ref], outs: Sequence[Ref], *, component: str = "", line: str = "model.py:1", **attrs: Any) -> Launch:
    return Launch(op, component or f"{op}.cpu", tuple(ins), tuple(outs), attrs, None, "", "reduce", line, 0, 0)


def job(launches: Sequence[Sequence[Launch]], *, inputs: Mapping[str, Ref] | None = None, outputs: Mapping[str, Ref] | None = None,
        groups: Mapping[str, tuple[tuple[int, ...], ...]] | None = None) -> Program:
    """A Program of one plan, `p`, in which each rank runs its own launches."""
    plans = {f"p{r}" if r else "p": Plan("p", tuple(own), dict(inputs or {}), dict(outputs or {}), {"act": 4096, "io": 0, "out": 0},
                                         Memory(0, 0, 0)) for r, own in enumerate(launches)}
    others = tuple(Role((Step("p"),), {"p": f"p{r}"}) for r in range(1, len(launches)))
    states = {"param": StateLayout([TensorSpec("w", (4,), "u")])}
    return Program("job", plans, (Step("p"),), states, {"threads": 1}, others=others,
                   groups=groups or {"dp": (tuple(range(len(launches))),)})


X, Y = ref_of("act", 0, 6), ref_of("act", 1024, 6)


def together(launches: Sequence[Sequence[Launch]], xs: Sequence[np.ndarray], y: Ref = Y, x: Ref = X, **more: Any) -> list[np.ndarray]:
    """What each rank holds at `y`, by oracles, which must agree with the kernels' mode to f32."""
    p = job(launches, inputs={"x": x}, outputs={"y": y}, **more)
    found = []
    for mode, catalogue in (("oracle", None), ("kernels", kernels())):
        with ReferenceExecutor(p, catalogue, mode=mode) as executor:
            found.append([ys["y"] for ys in executor.run([[("p", {"x": x.astype(np.float32)})] for x in xs])])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return found[1]


def test_every_collective_is_what_its_row_says() -> None:
    xs = [np.arange(6.0) + 10 * k for k in range(3)]
    for op, y, attrs in (("all_reduce", Y, {"reduce": "average"}), ("reduce_scatter", ref_of("act", 1024, 2), {"reduce": "sum"}),
                         ("all_gather", ref_of("act", 1024, 18), {}), ("broadcast", Y, {"root": 2}), ("reduce", Y, {"root": 1}),
                         ("all_to_all", Y, {})):
        attrs = {"group": "dp", "size": 3, **attrs}
        across = row(op).across
        assert across is not None
        want = across([(x,) for x in xs], **attrs)
        got = together([[call(op, [X], [y], **attrs)]] * 3, xs, y)
        assert [g.tolist() for g in got] == [w.tolist() for w, in want], op


def test_in_place_and_sub_groups_and_order() -> None:
    """Two tuples of two; then, over the results, two others: each rank at its own pace."""
    groups = {"dp": ((0, 2), (3, 1)), "tp": ((0, 1), (2, 3))}
    xs = [np.full(6, 10.0**k) for k in range(4)]
    launches = [[call("barrier", [], [], group="dp", size=2), call("all_reduce", [X], [X], group="dp", size=2, reduce="sum"),
                 call("broadcast", [X], [X], group="tp", size=2, root=1)] for _ in range(4)]
    assert [x.tolist() for x in together(launches, xs, X, groups=groups)] == [[1010.0] * 6, [1010.0] * 6, [1010.0] * 6, [1010.0] * 6]
    assert xs[0][0] == 1


def test_sends_do_not_wait_and_come_in_order() -> None:
    def to(rank: int, x: Ref) -> Launch:
        return call("send", [x], [], group="pp", size=2, to=rank)

    def received(rank: int, y: Ref) -> Launch:
        return call("receive", [], [y], group="pp", size=2, source=rank, shape=(6,), dtype="f32")

    double = call("scale", [X], [Y], component="scale.f32.cpu", factor=2.0)
    z = ref_of("act", 2048, 6)
    first = [to(1, X), double, to(1, Y), received(1, X)]
    second = [to(0, X), received(0, z), received(0, Y)]
    got = together([first, second], [np.ones(6), np.full(6, 5.0)], X, groups={"pp": ((0, 1),)})
    assert [g[0] for g in got] == [5, 5]
    assert [g[0] for g in together([first, second], [np.ones(6), np.full(6, 5.0)], Y, groups={"pp": ((0, 1),)})] == [2, 2]


def summed(group: str = "dp", size: int = 2, x: Ref = X, reduce: str = "sum", line: str = "model.py:7") -> Launch:
    return call("all_reduce", [x], [x], group=group, size=size, reduce=reduce, line=line)


def met(group: str = "dp") -> Launch:
    return call("barrier", [], [], group=group, size=2, line="model.py:8")


WRONG: tuple[tuple[str, list[list[Launch]], str], ...] = (
    ("another op", [[summed()], [met()]], "different calls.*(\n.*)?rank 1: barrier"),
    ("another attribute", [[summed()], [summed(reduce="average", line="model.py:9")]], "different calls(.|\n)*model.py:9"),
    ("another count", [[summed()], [summed(x=ref_of("act", 0, 5))]], r"different calls(.|\n)*f32\[5\]"),
    ("another type", [[summed()], [summed(x=ref_of("act", 0, 6, "i32"))]], r"different calls(.|\n)*i32\[6\]"),
    ("another root", [[call("broadcast", [X], [X], group="dp", size=2, root=r)] for r in range(2)], "different calls"),
    ("a missing member", [[summed()], []], "never comes(.|\n)*rank 0: all_reduce(.|\n)*model.py:7"),
    ("once too often", [[met(), met()], [met()]], "never comes(.|\n)*rank 0: barrier"),
    ("swapped groups", [[met("dp"), met("tp")], [met("tp"), met("dp")]], "never comes(.|\n)*rank 1: barrier(.|\n)*tp"),
    ("an unknown group", [[met("pp")], [met("pp")]], "has not(.|\n)*pp"),
    ("another size", [[summed(size=3)], [summed(size=3)]], "has not"),
    ("nobody receives", [[call("send", [X], [], group="dp", size=2, to=1)], []], "never received(.|\n)*rank 0: send"),
    ("nobody sends", [[], [call("receive", [], [X], group="dp", size=2, source=0, shape=(6,), dtype="f32")]], "never comes(.|\n)*receive"),
    ("other than sent", [[call("send", [X], [], group="dp", size=2, to=1)],
                         [call("receive", [], [ref_of("act", 0, 5)], group="dp", size=2, source=0, shape=(5,), dtype="f32")]],
     "not what is received"),
)


@pytest.mark.parametrize(("launches", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_ranks_that_do_not_match_are_named(launches: list[list[Launch]], text: str) -> None:
    p = job(launches, groups={"dp": ((0, 1),), "tp": ((0, 1),)})
    with ReferenceExecutor(p) as executor, pytest.raises(GraphError, match=text):
        executor.run([[("p", {})], [("p", {})]])


def test_oracles_hold_integers_exactly_or_say_so() -> None:
    x = ref_of("io", 0, 2, "i64")
    p = job([[]], inputs={"x": x}, outputs={"x": x})
    p.plans["p"].arenas["io"] = 2 * ITEMSIZE["i64"]
    with ReferenceExecutor(p) as executor:
        (found,) = executor.run([[("p", {"x": np.array([2**53, -7])})]])
        assert found["x"].dtype == np.int64 and found["x"].tolist() == [2**53, -7]
        with pytest.raises(GraphError, match="holds integers as float64"):
            executor.run([[("p", {"x": np.array([2**53 + 1, 0])})]])


def test_layouts_are_those_of_the_program() -> None:
    p = program("gpt")
    with ReferenceExecutor(p) as executor:
        assert executor.state(0, "param").shape == (layout_of(references()["gpt"]).size,)
