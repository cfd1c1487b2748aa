"""Cases of verify: sound graphs pass, and each way to break one is refused. Floor 7."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from alpha.component import Measured
from alpha.errors import GraphError
from alpha.gates.contracts import edges
from alpha.gates.contracts.passes import effects, texts, traced
from alpha.gates.contracts.passes.support import GPT, HASHES, LLAMA, Case, Cases
from alpha.gates.contracts.reference import (
    Reference,
    both,
    kernels,
    program,
    references,
    refuses,
    training_graph,
    yes,
)
from alpha.graph.ir import Graph
from alpha.graph.verify import verify
from alpha.ops.numerics import ulp
from alpha.passes.build import lower


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


def _lower_verifies(rng: np.random.Generator) -> Measured:
    """The pipeline verifies between passes: a broken graph does not come out as a plan."""
    states = program(GPT).states
    return refuses(GraphError, lambda: lower(_swap(training_graph(references()[GPT])), kernels(), "cpu", 2, states))


def _spacings(rng: np.random.Generator) -> Measured:
    """What neighbours are apart, by which judges and spot checks allow: NumPy's own distance, down to numbers below the normal range, where
    it no longer shrinks. bf16 has the exponents of f32 and 16 bits less."""
    wrong, cases = list[str](), 0
    for dtype, of, factor in (("f16", np.float16, 1.0), ("f32", np.float32, 1.0), ("f64", np.float64, 1.0), ("bf16", np.float32, 2.0**16)):
        limits = np.finfo(of)
        exponents = np.arange(limits.minexp - limits.nmant if factor == 1.0 else -133, limits.maxexp)
        x = np.ldexp(1 + np.where(exponents < limits.minexp, 0.0, rng.integers(0, 128, exponents.size) / 128), exponents)
        for found in (x, -x, np.array([0.0, -0.0])):
            want = factor * np.spacing(np.abs(found).astype(of)).astype(np.float64)
            wrong += [f"{dtype} at {at:g}" for at in found[ulp(found, dtype) != want]]
            cases += found.size
    return yes(not wrong, f"{len(wrong)}: {'; '.join(wrong[:3])}", cases=cases)


CASES: Cases = {
    "verify.pass": {"parity": [*both(_verify_accepts), ("effects", effects.accepts), ("pruned", effects.pruned_kept),
                               ("units", traced.units_in_units), ("texts", traced.graph_texts), ("lines", edges.lines),
                               ("attributes", edges.texts), ("of-rows", edges.of_rows), ("whole-texts", texts.graphs),
                               ("spacings", _spacings)],
                    "determinism": HASHES,
                    "faults": [("order", _broken(_swap)), ("dropped", _broken(_drop)), ("type", _broken(_retype)),
                               ("twice", _broken(_twice)), ("overlap", _broken(_overlap)),
                               ("adopted", _broken(_adopted)), ("phase", _broken(_phase)),
                               ("stream", _broken(_stream)),
                               ("pipeline", _lower_verifies), ("extent-of-made", effects.refuse_extent_of_made),
                               ("redeclared", traced.redeclared), ("stacked", traced.stacked_in_order), ("overlaps", traced.overlaps),
                               ("places", traced.places), ("edges", edges.traces), ("extents", edges.extents), ("rows", edges.rows),
                               *((name, effects.refuses_graph(name)) for name in effects.broken())]},
}
