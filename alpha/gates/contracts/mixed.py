"""Cases of mixed precision, which need no GPU: kernels that are only declared, graphs rounded as they say, Plans run in byte arenas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from alpha.component import Catalogue, Component, Envelope, Limit, Measured
from alpha.errors import GraphError
from alpha.gates.contracts.reference import (
    BATCH,
    SCHEDULE,
    SEQ,
    Reference,
    batch,
    both,
    layout_of,
    random_state,
    references,
    refuses,
    wording,
    yes,
)
from alpha.graph.differentiate import differentiate
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, prune
from alpha.graph.plan import Plan, Program, Ref
from alpha.graph.state import Init, StateLayout
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.ops.numerics import keeping, round_to
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.optim.update import adamw, sgd
from alpha.passes.build import STATS, StepShape, build_program, stats_layout, trace_training
from alpha.types import NUMPY, Attrs, TensorType

Case = Callable[[np.random.Generator], Measured]

MACHINE = {"bf16": "bf16", "f32": "f32"}
"""What a GPU holds: `evaluate(..., precision=MACHINE)`."""

DRAWS = 6

IN_PLACE: Mapping[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("accumulate", "matmul_accumulate", "sum_accumulate", "embedding_bwd_accumulate", "rope_packed"), ((0, 0),)),
    "adamw": ((0, 0), (1, 2), (2, 3), (3, 8)), "sgd": ((0, 0), (1, 2)), "update_scalars": ((6, 3),),
    "scalars_of_squares": ((6, 3),), "add": ((0, 0), (0, 1)),
}  # fmt: skip
IN_F32 = ("adamw", "sgd", "update_scalars", "square_sums", "scalars_of_squares", "cast", "accumulate")


def _cannot_run(*_: Any) -> Any:
    raise GraphError("a kernel that is only declared was bound", do="plan with it, do not run it")


def _narrow(spec: OpSpec, types: Sequence[TensorType], attrs: Attrs) -> bool:
    return spec.compute_dtype(types) in ("bf16", None)


def _scratch(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    return 256 * threads


def declared(without: Iterable[str] = ()) -> Catalogue:
    """One kernel of the back end cuda for every row but `without`, with the operand types of docs/numerics.md; none can run."""
    found = Catalogue()
    for name, spec in table().items():
        if spec.view or name in without:
            continue
        narrow = Limit(text="bf16 as compute type", holds=partial(_narrow, spec))
        found.add(Component(id=f"{name}.bf16.cuda", kind="kernel", backend="cuda", op=name, implementation=_cannot_run,
                            envelope=Envelope(dtypes=("bf16", "f32"), limits=() if name in IN_F32 else (narrow,)),
                            inplace=IN_PLACE.get(name, ()), scratch=_scratch if name == "layernorm_bwd" else None))
    return found


class Arenas:
    """Byte arenas of a Program, full of NaN; bf16 takes two bytes there. Launches run by their rows' oracles, rounded once
    and where an oracle has something `stored`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.raw = {name: np.full(n + 64, 0xFF, np.uint8) for name, n in program.arenas().items()}
        for kind in program.states:
            self.raw[f"state.{kind}"][...] = 0xFF if kind.startswith("grad") else 0

    def read(self, ref: Ref) -> np.ndarray:
        """The tensor at a place; floats as float64."""
        raw = self.raw[ref.arena][ref.offset : ref.stop]
        if ref.type.dtype == "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(ref.type.shape)
        x = raw.view(NUMPY[ref.type.dtype]).reshape(ref.type.shape)
        return x.astype(np.float64) if x.dtype.kind == "f" else x.copy()

    def write(self, ref: Ref, x: np.ndarray) -> None:
        """Store a tensor, rounded to the place's type."""
        x = np.asarray(x).reshape(ref.type.shape)
        if ref.type.is_float:
            held = round_to(x, ref.type.dtype).astype(np.float32)
            bits = (held.view(np.uint32) >> 16).astype(np.uint16) if ref.type.dtype == "bf16" else held
        else:
            bits = x.astype(NUMPY[ref.type.dtype])
        self.raw[ref.arena][ref.offset : ref.stop] = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)

    def _whole(self, kind: str) -> Ref:
        layout = self.program.states[kind]
        return Ref(f"state.{kind}", 0, TensorType((layout.size,), layout.dtype))

    def state(self, kind: str) -> np.ndarray:
        """A whole state array."""
        return self.read(self._whole(kind))

    def start(self, param: np.ndarray) -> None:
        """Master parameters, and their copy by the Segment `narrow`."""
        self.write(self._whole("param"), param)
        self.run(self.program.plans["narrow"], {})

    def run(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every launch in order. Results that share no memory with an operand are overwritten with NaN before operands are read."""
        for name, ref in plan.inputs.items():
            self.write(ref, inputs[name].reshape(-1)[: ref.type.size])
        for x in plan.launches:
            written = [x.scratch] if x.scratch is not None else []
            written += [r for r in x.outs if not any(r.arena == i.arena and r.offset < i.stop and i.offset < r.stop for i in x.ins)]
            ins = [self.read(r) for r in x.ins] if not written else None
            for r in written:
                self.raw[r.arena][r.offset : r.stop] = 0xFF
            ins = ins or [self.read(r) for r in x.ins]
            spec = row(x.op)
            with np.errstate(all="ignore"), keeping(spec.compute_dtype([r.type for r in x.ins]) or "f64"):
                outs = spec.oracle(*ins, **x.attrs)
            for r, y in zip(x.outs, outs, strict=True):
                self.write(r, y)
        return {name: self.read(ref) for name, ref in plan.outputs.items()}


def by_tensor(updates: Mapping[tuple[str, int], np.ndarray], layout: StateLayout) -> dict[str, np.ndarray]:
    """Gradient updates of a Segment by tensor name, loss and count among them; NaN where nothing was written."""
    whole = stats_layout(layout)
    flat = np.full(whole.size, np.nan)
    for (_, offset), value in updates.items():
        flat[offset : offset + value.size] = value.ravel()
    return {s.name: flat[whole.offsets[s.name] : whole.offsets[s.name] + s.size] for s in whole.tensors}


@cache
def mixed_program(name: str, fused: bool = True, optimizer: str = "adamw") -> Program:
    """A reference Program in bf16 for cuda, two shards of two microbatches."""
    return build_program(name=name, model=references()[name].model, optimizer=adamw(SCHEDULE) if optimizer == "adamw" else sgd(SCHEDULE),
                         shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=2, micros=2), catalogue=declared(), backend="cuda",
                         precision="bf16", fused=fused)


def mixed_graph(ref: Reference, *, slot: int = 0, accumulate: bool = False) -> Graph:
    """Forward and backward in bf16, verified."""
    return verify(prune(trace_training(ref.model, layout_of(ref), "micro", slot, accumulate, "bf16")[1]), "trace")


def _start(ref: Reference, rng: np.random.Generator) -> dict[str, np.ndarray]:
    state = random_state(ref, rng)
    state["param"] = round_to(state["param"], "f32")
    state["param16"] = round_to(state["param"], "bf16")
    return state


def _same_graph(ref: Reference, rng: np.random.Generator) -> Measured:
    """One model, one graph: in bf16 and in f32 the same nodes, attributes and order for training, evaluation and decoding; only float types
    and which copy of the parameters is read differ, and they do differ."""
    layout, good, cases = layout_of(ref), True, 0
    for slot, accumulate in ((0, False), (0, True), (None, False)):
        f32, bf16 = (prune(trace_training(ref.model, layout, "micro", slot, accumulate, p)[1]) for p in ("f32", "bf16"))
        good &= wording(f32) == wording(bf16) and f32.text() != bf16.text()
        cases += len(f32.nodes)
    f32, bf16 = (_decoding(ref, layout, p) for p in ("f32", "bf16"))
    return yes(good and wording(f32) == wording(bf16) and f32.text() != bf16.text(), cases=cases + len(f32.nodes))


def _decoding(ref: Reference, layout: StateLayout, precision: str) -> Graph:
    t = Tracer("decode", layout, precision=precision)
    assert ref.model.decode is not None
    t.output("logits", ref.model.decode(t))
    return prune(t.graph)


def _fused_rounds_alike(ref: Reference, rng: np.random.Generator) -> Measured:
    """With every fused row, a microbatch's gradients err at most twice what the graph that they replace errs, each result rounded to its
    type: the largest of several draws of parameters within 2^-8 of these. The loss is one number that may err by nearly nothing in all
    draws; it is judged by its gradients.
    """
    layout, inputs, state = layout_of(ref), batch(ref, rng), _start(ref, rng)
    state["counter"] = np.zeros_like(state["counter"])
    naive: dict[str, float] = {}
    want: dict[str, np.ndarray] = {}
    for draw in range(DRAWS):
        nudged = state["param"] * (1 + 2.0**-8 * rng.uniform(-1, 1, layout.size)) if draw else state["param"]
        moved = {**state, "param16": round_to(nudged, "bf16")}
        exact, walked = (by_tensor(evaluate(mixed_graph(ref), inputs, moved, precision=p)[1], layout) for p in (None, MACHINE))
        want = want or exact
        for n, x in exact.items():
            naive[n] = max(naive.get(n, 0.0), float(np.linalg.norm(walked[n] - x)))
    arenas = Arenas(mixed_program(ref.name))
    arenas.start(state["param"])
    arenas.run(mixed_program(ref.name).plans["micro_first@0"], inputs)
    got = by_tensor({("grad0", 0): arenas.state("grad0")}, layout)
    names = [n for n in naive if not n.startswith(STATS)]
    worst = max(float(np.linalg.norm(got[n] - want[n])) / naive[n] for n in names)
    finite = all(np.isfinite(got[n]).all() for n in names)
    return Measured(error=worst if finite else np.inf, bound=2.0, cases=len(names), note="largest error over the naive one, by tensor")


def _gradients_in_f32(ref: Reference, rng: np.random.Generator) -> Measured:
    """Every term of a parameter's gradient is made and added in f32, and a used parameter has as many terms as uses."""
    graph = mixed_graph(ref, accumulate=True)
    narrow = terms = 0
    for value in graph.updates.values():
        at = value
        while at.producer is not None and at.producer.op == "accumulate":
            into, term = at.producer.inputs
            narrow += {at.type.dtype, into.type.dtype, term.type.dtype} != {"f32"}
            terms, at = terms + 1, into
        narrow += at.state is None
    uses = sum(len(graph.readers()[v]) for v in graph.states.values() if v.state is not None and v.state[0] == "param16")
    backward = sum(v.state is not None and v.state[0] == "param16" for n in graph.nodes if n.phase == "backward" for v in n.inputs)
    return yes(narrow == 0 and terms == uses - backward + 2, f"{narrow} of {terms} terms rounded or out of place", cases=terms)


def _accumulates(ref: Reference, rng: np.random.Generator) -> Measured:
    """Unrounded, a later microbatch leaves what the buffer held plus what a first one would have written, tensor by tensor."""
    state, inputs, layout = _start(ref, rng), batch(ref, rng), layout_of(ref)
    alone, added = (by_tensor(evaluate(mixed_graph(ref, accumulate=a), inputs, state)[1], layout) for a in (False, True))
    held = by_tensor({("grad0", 0): state["grad0"]}, layout)
    error = max(float(np.max(np.abs(added[n] - (held[n] + x)) / (np.abs(held[n]) + np.abs(x) + 1))) for n, x in alone.items())
    finite = all(np.isfinite(x).all() for x in added.values())
    return Measured(error=error if finite else np.inf, bound=1e-13, cases=len(alone), note="relative difference of an element")


def _arenas_have_the_graphs_bits(ref: Reference, rng: np.random.Generator) -> Measured:
    """Without fused rows, a step in arenas leaves the gradients that the traced graphs give by themselves, to the bit."""
    p = mixed_program(ref.name, False)
    state, grads = _start(ref, rng), p.states["grad0"]
    state |= {k: np.zeros(grads.size) for k in ("grad0", "grad1")}
    state["counter"] = np.zeros_like(state["counter"])
    batches = [batch(ref, rng) for _ in range(4)]
    for i, inputs in enumerate(batches):
        graph = mixed_graph(ref, slot=i // 2, accumulate=bool(i % 2))
        for (kind, offset), value in evaluate(graph, inputs, state, precision=MACHINE)[1].items():
            state[kind][offset : offset + value.size] = value.ravel()
    state["grad1"] = round_to(state["grad1"] + state["grad0"], "f32")
    arenas = Arenas(p)
    arenas.start(state["param"])
    for step in p.schedule[:-1]:
        arenas.run(p.plans[step.plan], batches[2 * step.shard + step.micro] if step.shard is not None and step.micro is not None else {})
    differ = cases = 0
    for kind in ("grad0", "grad1"):
        found = arenas.state(kind)
        for offset, n in grads.ranges():
            differ += int(np.count_nonzero(found[offset : offset + n] != state[kind][offset : offset + n]))
            cases += 1
    return Measured(error=float(differ), bound=0.0, cases=cases, note="gradient elements that differ")


def _copy_follows(optimizer: str) -> Case:
    """After each of two steps the copy is the master's rounding, to the bit, and the master holds more than the copy can."""
    def check(rng: np.random.Generator) -> Measured:
        name = "llama" if optimizer == "adamw" else "gpt"
        ref, p = references()[name], mixed_program(name, True, optimizer)
        arenas = Arenas(p)
        arenas.start(_start(ref, rng)["param"])
        wrong = 0
        for _ in range(2):
            before = arenas.state("param")
            for step in p.schedule:
                arenas.run(p.plans[step.plan], batch(ref, rng))
            param, copy = arenas.state("param"), arenas.state("param16")
            wrong += int(np.count_nonzero(copy != round_to(param, "bf16")))
            wrong += not np.any(param != before) or not np.any(copy != param)
        return Measured(error=float(wrong + (arenas.state("counter")[0] != 2)), bound=0.0, cases=2, note="elements of a stale copy")
    return check


def _bad_step_keeps_bits(rng: np.random.Generator) -> Measured:
    """A gradient that is not finite leaves master, copy, moments and step as they were."""
    p = mixed_program("gpt")
    arenas = Arenas(p)
    arenas.start(_start(references()["gpt"], rng)["param"])
    arenas.raw["state.grad1"][...] = 0
    at = 4 * int(rng.choice([offset for offset, _ in p.states["param"].ranges()]))
    arenas.raw["state.grad1"][at : at + 4] = np.array([rng.choice([np.inf, np.nan])], np.float32).view(np.uint8)
    kinds = ("param", "param16", "m", "v", "counter")
    before = {k: arenas.state(k) for k in kinds}
    arenas.run(p.plans["update"], {})
    return yes(all(np.array_equal(arenas.state(k), before[k]) for k in kinds), cases=len(kinds))


def _refuse_rounded_gradient(rng: np.random.Generator) -> Measured:
    """A row that gives a parameter's gradient in bf16 has rounded a sum over the batch."""
    t = Tracer("x", precision="bf16")
    w = t.param("w", (8, 8), Init("ones"))
    loss = t.sum(t.cast(t.mul(w, w), dtype="f32"), axis=None, keepdims=False)
    return refuses(GraphError, lambda: differentiate(t, loss, [w]))


def _refuse_apart(rng: np.random.Generator) -> Measured:
    """Tensors that are read as one must lie side by side."""
    t = Tracer("x", precision="bf16")
    t.stacked(("a", "b"), (5, 7), Init("ones"))
    again = Tracer("x", StateLayout(t.tensors.values()), precision="bf16")
    return refuses(GraphError, lambda: again.stacked(("a", "b"), (5, 7), Init("ones")))


def _named(check: Callable[[Reference, np.random.Generator], Measured]) -> list[tuple[str, Case]]:
    return [(f"bf16-{name}", case) for name, case in both(check)]


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "model.gpt": {"parity": [_named(_same_graph)[0]]},
    "model.llama": {"parity": [_named(_same_graph)[1]]},
    "differentiate.pass": {"parity": _named(_gradients_in_f32), "faults": [("bf16-rounded", _refuse_rounded_gradient)]},
    "fuse.pass": {"parity": _named(_fused_rounds_alike)},
    "layout.pass": {"faults": [("stacked-apart", _refuse_apart)]},
    "program.step": {"parity": [*_named(_arenas_have_the_graphs_bits), *[(f"{n}-adds", c) for n, c in _named(_accumulates)]]},
    "optimizer.adamw": {"parity": [("bf16-copy", _copy_follows("adamw"))], "faults": [("bf16-bad-step", _bad_step_keeps_bits)]},
    "optimizer.sgd": {"parity": [("bf16-copy", _copy_follows("sgd"))]},
}
"""Merged into the cases of the modules that the components name as their contract."""


def merged(own: dict[str, dict[str, list[tuple[str, Case]]]]) -> dict[str, dict[str, list[tuple[str, Case]]]]:
    """`own` with the cases of mixed precision behind those of the same component and gate."""
    return {name: {gate: [*cases, *CASES.get(name, {}).get(gate, [])] for gate, cases in gates.items()} for name, gates in own.items()}
