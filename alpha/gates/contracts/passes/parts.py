"""Cases of parts of flat values: tensors at an offset of a buffer are read where they lie, and nothing writes there before. Floor 7."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.reference.executor import ReferenceExecutor
from alpha.component import Measured
from alpha.errors import GraphError, ShapeError
from alpha.gates.contracts.passes.effects import collectives
from alpha.gates.contracts.reference import refuses, yes
from alpha.graph.evaluate import evaluate
from alpha.graph.plan import Plan, Program, Role, Step
from alpha.graph.state import StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.graph.verify_program import verify_program
from alpha.passes.build import lower

N = 192
"""Elements of a buffer: three tensors of 256 bytes."""

LAYOUT = StateLayout([TensorSpec("w", (N,), "u")])


def _buffer() -> Tracer:
    """A buffer of which parts are read by products, beside it, after it has been summed up, and by the host."""
    t = Tracer("p")
    whole = t.scale(t.input("x", (N,), "f32"), factor=3.0)
    first = t.part(whole, offset=64, shape=(8, 8))
    second = t.part(t.reshape(whole, shape=(N,)), offset=128, shape=(4, 16))
    t.output("product", t.matmul(second, t.part(t.input("w", (N,), "f32"), offset=64, shape=(16, 8))))
    t.output("summed", t.accumulate(whole, t.input("more", (N,), "f32")))
    t.output("late", t.scale(first, factor=2.0))
    t.output("inner", t.part(t.part(whole, offset=64, shape=(128,)), offset=64, shape=(3,)))
    return t


def _plan(t: Tracer) -> Plan:
    return lower(t.graph, collectives(), "cpu", 1, {"param": LAYOUT})


def in_place(rng: np.random.Generator) -> Measured:
    """Parts launch nothing and copy nothing: operands lie in the buffer, at their offsets. Results are the oracle's."""
    t = _buffer()
    plan = _plan(t)
    by_op = {x.op: x for x in plan.launches}
    whole = plan.launches[0].outs[0]
    places = [by_op["matmul"].ins[0].offset - whole.offset, by_op["matmul"].ins[1].offset - plan.inputs["w"].offset,
              plan.launches[-1].ins[0].offset - whole.offset, plan.outputs["inner"].offset - whole.offset]
    good = places == [512, 256, 256, 512] and len(plan.launches) == 4
    given = {k: rng.integers(-9, 9, N).astype(np.float32) for k in t.graph.inputs}
    with CpuExecutor(Program("p", {"p": plan}, (Step("p"),), {"param": LAYOUT}, {"threads": 1}), collectives()) as executor:
        got = executor.run("p", given)
        want, _ = evaluate(verify(t.graph, "trace"), given, {})
        wrong = [k for k in want if not np.array_equal(got[k], want[k])]
    return yes(good and not wrong, f"places {places}; other values: {wrong}", cases=8)


def written_apart(rng: np.random.Generator) -> Measured:
    """A result lies where its operand does or apart from it: it does not take a buffer for the part of it that it is made of."""
    t = Tracer("p")
    whole = t.scale(t.input("x", (N,), "f32"), factor=3.0)
    t.output("y", t.scale(t.scale(t.part(whole, offset=64, shape=(128,)), factor=2.0), factor=2.0))
    plan = _plan(t)
    pairs = [(x.ins[0], y) for x in plan.launches for y in x.outs]
    partly = [(a, b) for a, b in pairs if a.arena == b.arena and a.offset < b.stop and b.offset < a.stop and a.offset != b.offset]
    return yes(not partly and len(pairs) == 3, f"{partly}", cases=len(pairs))


def gathered(rng: np.random.Generator) -> Measured:
    """What ranks gather of their cuts of a state is read tensor by tensor in the buffer that it came to."""
    t = Tracer("p")
    whole = t.all_gather(t.state("param", 0, (N // 2,), "f32"), group="dp", size=2)
    t.output("y", t.matmul(t.part(whole, offset=0, shape=(4, 16)), t.part(whole, offset=64, shape=(16, 8))))
    plan = _plan(t)
    p = Program("gathered", {"p": plan}, (Step("p"),), {"param": LAYOUT}, {"threads": 1}, others=(Role((Step("p"),), {"p": "p"}),),
                groups={"dp": ((0, 1),)})
    flat = rng.integers(-9, 9, N).astype(np.float32)
    want = flat[:64].reshape(4, 16) @ flat[64:].reshape(16, 8)
    with ReferenceExecutor(verify_program(p), collectives(), mode="kernels") as executor:
        for rank in range(2):
            executor.state(rank, "param")[: N // 2] = flat[rank * N // 2 : (rank + 1) * N // 2]
        got = [out["y"] for out in executor.run([[("p", {})]] * 2)]
    return yes([x.op for x in plan.launches] == ["all_gather", "matmul"] and all(np.array_equal(y, want) for y in got), cases=3)


def refuse_update(rng: np.random.Generator) -> Measured:
    """A state box does not become a part of a buffer: that would need a copy."""
    t = Tracer("update")
    whole = t.scale(t.input("x", (N,), "f32"), factor=3.0)
    t.update(t.state("param", 0, (64,), "f32"), t.part(whole, offset=0, shape=(64,)))
    return refuses(GraphError, lambda: _plan(t))


def refuse_outside(rng: np.random.Generator) -> Measured:
    """Parts that lie outside, that begin where no kernel may read, or that are of no flat array."""
    def part(whole: tuple[int, ...], offset: int, shape: tuple[int, ...]) -> Callable[[], object]:
        t = Tracer("outside")
        return lambda: t.part(t.input("x", whole, "f32"), offset=offset, shape=shape)

    found = [refuses(ShapeError, part((N,), o, s)) for o, s in ((128, (65,)), (-64, (1,)), (1, (3,)), (0, (-1,)), (0, (N, 2)))]
    found.append(refuses(ShapeError, part((4, 16), 0, (16,))))
    return yes(all(m.error == 0 for m in found), cases=len(found))
