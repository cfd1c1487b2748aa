"""Mixed precision without a GPU: what a bf16 Program for the GPU computes, in arithmetic that rounds to bf16 and f32 where it says so.

The catalogue holds one kernel per row with the operand types of docs/numerics.md, none of which can run. Graphs are evaluated by
the rows' oracles with each result rounded to its type, and Plans by an interpreter over real byte arenas, so that offsets, lifetimes and
in-place pairs count as well.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alpha.config import load
from alpha.errors import ConfigError, GraphError, InputError, ShapeError
from alpha.gates.contracts.mixed import MACHINE, Arenas, by_tensor, declared
from alpha.gates.contracts.reference import wording
from alpha.gates.subjects import case_of, generator
from alpha.gates.tolerance import allowance, exact_error
from alpha.graph.differentiate import differentiate
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, prune
from alpha.graph.plan import Program, Ref
from alpha.graph.state import Init, StateLayout
from alpha.graph.trace import Tracer
from alpha.models import gpt, llama
from alpha.ops.numerics import UNIT_ROUNDOFF, round_to, walk
from alpha.ops.table import row, table
from alpha.optim.init import fill_initial
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw, sgd
from alpha.passes.build import MULTIPROCESSORS, Model, StepShape, build_program, stats_layout, trace_training
from alpha.registry.judge import RATIO
from alpha.train.assemble import program_for
from alpha.types import TensorType

CONFIGS = Path(__file__).parents[2] / "configs"
BATCH, SEQ, VOCAB = 2, 24, 72
CASES = ("gpt", "gpt-untied", "gpt-documents", "llama", "llama-tied")
DRAWS = 4


@cache
def model(case: str) -> Model:
    shared: dict[str, Any] = {"vocab": VOCAB, "positions": SEQ, "layers": 2, "width": 32, "z_loss": 1e-3}
    family: Any = gpt if case.startswith("gpt") else llama
    if family is gpt:
        packed = case == "gpt-documents"
        cfg: Any = gpt.GPTConfig(**shared, heads=2, tied=case != "gpt-untied", documents=packed, window=9 * packed)
    else:
        cfg = llama.LlamaConfig(**shared, heads=4, kv_heads=2, hidden=64, tied=case == "llama-tied")

    def loss(t: Tracer, training: bool) -> Any:
        return family.loss(t, cfg, BATCH, SEQ, training)

    return Model(name=case, loss=loss, decode=lambda t: family.decode(t, cfg, 1, SEQ))


@cache
def program(case: str, fused: bool = True, optimizer: str = "adamw") -> Program:
    schedule = ScheduleConfig(kind="cosine", peak=1e-2, warmup=2, total=10)
    return build_program(name=case, model=model(case), optimizer=adamw(schedule) if optimizer == "adamw" else sgd(schedule),
                         shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=2, micros=2), catalogue=declared(), backend="cuda",
                         precision="bf16", fused=fused)


def parameters(layout: StateLayout, draw: int = 0) -> np.ndarray:
    """Initial parameters, four times as wide as a run's so that two layers have something to say, moved by up to 2^-6 of their size."""
    flat = np.zeros(layout.size, np.float32)
    fill_initial(flat, layout, 7)
    rng = np.random.default_rng(draw)
    moved = np.where(flat == 1, flat, 4 * flat) * (1 + 2.0**-6 * rng.uniform(-1, 1, flat.size))
    return np.asarray(moved, np.float32)


def batch(micro: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + micro)
    targets = rng.integers(0, VOCAB, (BATCH, SEQ))
    targets[rng.random((BATCH, SEQ)) < 0.1] = -1
    found = {"tokens": rng.integers(0, VOCAB, (BATCH, SEQ)), "positions": np.tile(np.arange(SEQ), (BATCH, 1)), "targets": targets,
             "documents": np.sort(rng.integers(0, 3, (BATCH, SEQ)), axis=1), "index": np.array([SEQ - 3])}
    return {k: v.astype(np.int32) for k, v in found.items()}


def gradients(case: str, precision: str, draw: int, rounding: dict[str, str] | None) -> dict[str, np.ndarray]:
    """Gradients of every tensor, and the loss, of one microbatch at bf16 parameters, by the graph of that precision."""
    layout = program(case).states["param"]
    _, graph = trace_training(model(case), layout, "micro", 0, False, precision)
    kind = "param16" if precision == "bf16" else "param"
    _, updates = evaluate(prune(graph), batch(), {kind: round_to(parameters(layout, draw), "bf16")}, precision=rounding)
    return by_tensor(updates, layout)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))


# -- graphs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_back_end_is_given_the_same_graph(case: str) -> None:
    """Training, evaluation and decoding: the same nodes, attributes and order in f32 and bf16, but for float types and the copy that is
    read. So what the CPU's tests see is what a GPU runs."""
    layout = program(case).states["param"]

    def graphs(precision: str) -> list[Graph]:
        found = [trace_training(model(case), layout, "x", slot, accumulate, precision)[1]
                 for slot, accumulate in ((0, False), (0, True), (None, False))]
        t = Tracer("decode", layout, precision=precision)
        t.output("logits", model(case).decode(t))  # type: ignore[misc]
        return [prune(graph) for graph in (*found, t.graph)]

    for f32, bf16 in zip(graphs("f32"), graphs("bf16"), strict=True):
        assert wording(f32) == wording(bf16)
        kinds = [{kind for kind, _, _ in g.states} & {"param", "param16"} for g in (f32, bf16)]
        assert kinds == [{"param"}, {"param16"}]
        pairs = list(zip(f32.nodes, bf16.nodes, strict=True))
        assert all((a.op, a.attrs, a.layer, a.phase) == (b.op, b.attrs, b.layer, b.phase) for a, b in pairs)
        types = [(u.type, v.type) for a, b in pairs for u, v in zip(a.outputs, b.outputs, strict=True)]
        assert all(u.shape == v.shape for u, v in types)
        assert any((u.dtype, v.dtype) == ("f32", "bf16") for u, v in types)
        assert {(u.dtype, v.dtype) for u, v in types} <= {("f32", "bf16"), ("f32", "f32"), ("i32", "i32")}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_round_as_bf16_does(case: str) -> None:
    """Rounding errors are linear in the unit roundoff to first order. The same graph, rounded to f32 wherever it rounds to bf16, errs by
    u32/u16 of what it may err; twice the largest of several draws is the tolerance, tensor by tensor. One precision lower exceeds it.
    """
    scale = UNIT_ROUNDOFF["bf16"] / UNIT_ROUNDOFF["f32"]
    exact = [gradients(case, "bf16", d, None) for d in range(DRAWS)]
    fine = [gradients(case, "bf16", d, {"bf16": "f32"}) for d in range(DRAWS)]
    coarse = gradients(case, "bf16", 0, MACHINE)
    lower = [gradients(case, "bf16", d, {"bf16": "e4m3", "f32": "f32"}) for d in range(DRAWS)]
    for name, want in exact[0].items():
        if name == "~stats.count":
            assert np.array_equal(coarse[name], want)
            continue
        tolerance = 2 * scale * max(distance(f[name], e[name]) for e, f in zip(exact, fine))
        assert distance(coarse[name], want) <= tolerance, name
        assert tolerance < np.linalg.norm(want), name
        assert not max(distance(x[name], e[name]) for x, e in zip(lower, exact)) <= tolerance, f"{name}: the tolerance tells nothing"


@pytest.mark.parametrize("case", CASES)
def test_nothing_rounds_a_gradient_to_bf16(case: str) -> None:
    """Every term of a parameter's gradient is made in f32 and added in f32: from the row that makes it to the buffer."""
    layout = program(case).states["param"]
    _, graph = trace_training(model(case), layout, "micro", 0, True, "bf16")
    seen = 0
    for value in graph.updates.values():
        at = value
        while at.producer is not None and at.producer.op == "accumulate":
            into, term = at.producer.inputs
            assert {at.type.dtype, into.type.dtype, term.type.dtype} == {"f32"}
            seen += 1
            at = into
        assert at.state is not None and at.state[0] == "grad0"
    assert seen >= len(layout.tensors)


def test_a_rounded_gradient_of_a_parameter_is_refused() -> None:
    t = Tracer("x", precision="bf16")
    w = t.param("w", (8, 8), Init("ones"))
    loss = t.sum(t.cast(t.mul(w, w), dtype="f32"), axis=None, keepdims=False)
    with pytest.raises(GraphError, match="rounded before it is summed"):
        differentiate(t, loss, [w])


def test_a_shared_parameter_is_summed_in_its_buffer() -> None:
    """The two terms of a tied embedding need no memory of their own and no third launch: one writes the buffer, one adds to it."""
    plan = program("gpt").plans["micro_first@0"]
    offset = program("gpt").states["param"].offsets["embedding.token.weight"] * 4
    writes = [x for x in plan.launches if any(r.arena == "state.grad0" and r.offset == offset for r in x.outs)]
    assert [x.op for x in writes] == ["linear_cross_entropy_grad", "embedding_bwd_accumulate"]
    assert writes[1].ins[0] == writes[1].outs[0]


def test_stacked_parameters_must_lie_side_by_side() -> None:
    t = Tracer("x", precision="bf16")
    t.stacked(("a", "b"), (5, 7), Init("ones"))
    again = Tracer("x", StateLayout(t.tensors.values()), precision="bf16")
    with pytest.raises(GraphError, match="side by side"):
        again.stacked(("a", "b"), (5, 7), Init("ones"))


# -- plans ---------------------------------------------------------------------------------------------------------------------


@cache
def stepped(case: str, fused: bool, optimizer: str = "adamw") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(state, outputs of the update) after one step of the Program, plan by plan in arenas."""
    p = program(case, fused, optimizer)
    arenas = Arenas(p)
    arenas.start(parameters(p.states["param"]))
    outputs: dict[str, np.ndarray] = {}
    for step in p.schedule:
        outputs = arenas.run(p.plans[step.plan], batch(2 * (step.shard or 0) + (step.micro or 0)))
    return {kind: arenas.state(kind) for kind in p.states}, outputs


@pytest.mark.parametrize("case", CASES)
def test_plans_compute_what_their_graphs_say(case: str) -> None:
    """Without fused rows: after a step every state has the bits that the traced graphs give, run by themselves without any memory plan."""
    p = program(case, False)
    layout, grads = p.states["param"], p.states["grad0"]
    states: dict[str, np.ndarray] = {k: np.zeros(s.size) for k, s in p.states.items()}
    states["param"] = parameters(layout).astype(np.float64)
    states["param16"] = round_to(states["param"], "bf16")

    def run(graph: Graph, inputs: dict[str, np.ndarray]) -> None:
        for (kind, offset), value in evaluate(prune(graph), inputs, states, precision=MACHINE)[1].items():
            states[kind][offset : offset + value.size] = value.ravel()

    run(trace_training(model(case), layout, "m", 0, False, "bf16")[1], batch(0))
    run(trace_training(model(case), layout, "m", 0, True, "bf16")[1], batch(1))
    run(trace_training(model(case), layout, "m", 1, False, "bf16")[1], batch(2))
    run(trace_training(model(case), layout, "m", 1, True, "bf16")[1], batch(3))
    found, outputs = stepped(case, False)
    inside = np.zeros(grads.size, bool)
    for s in grads.tensors:
        inside[grads.offsets[s.name] : grads.offsets[s.name] + s.size] = True
    total = round_to(states["grad1"] + states["grad0"], "f32")
    assert np.array_equal(found["grad0"][inside], states["grad0"][inside])
    assert np.array_equal(found["grad1"][inside], total[inside])
    assert outputs["finite"] == 1
    assert outputs["count"] == sum((batch(i)["targets"] >= 0).sum() for i in range(4))


@pytest.mark.parametrize("case", CASES)
def test_a_step_keeps_f32_state_and_its_bf16_copy(case: str) -> None:
    """The master parameters take an f32 AdamW step of the accumulated f32 gradient, and the copy is their rounding, to the bit."""
    p = program(case, False)
    layout = p.states["param"]
    found, outputs = stepped(case, False)
    before = parameters(layout).astype(np.float64)
    names = ("coefficient", "lr")
    want = row("adamw").oracle(before, found["grad1"][: layout.size], np.zeros(layout.size), np.zeros(layout.size),
                               *(outputs[n] for n in names), np.array(0), np.array(1), beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
                               segments=layout.segments())
    inside = np.zeros(layout.size, bool)
    for offset, length in layout.ranges():
        inside[offset : offset + length] = True
    for kind, value in zip(("param", "m", "v"), want):
        assert np.array_equal(found[kind][inside], round_to(value, "f32")[inside]), kind
    assert np.array_equal(found["param16"], round_to(found["param"], "bf16"))
    assert found["counter"][0] == 1
    moved = np.abs(found["param"] - before)[inside]
    finer = np.abs(found["param16"] - found["param"])[inside]
    assert np.median(moved) > 0 and (finer > 0).mean() > 0.5, "the master keeps what bf16 cannot"
    assert not np.any(found["param"][~inside])


@pytest.mark.parametrize("case", CASES)
def test_fused_rows_change_roundings_only(case: str) -> None:
    """With every fused row the gradients of a step stay within the tolerance of the graph that they replace, once for each."""
    scale = UNIT_ROUNDOFF["bf16"] / UNIT_ROUNDOFF["f32"]
    layout = program(case).states["param"]
    p = program(case)
    arenas = Arenas(p)
    arenas.start(parameters(p.states["param"]))
    arenas.run(p.plans["micro_first@0"], batch())
    flat, whole = arenas.state("grad0"), stats_layout(layout)
    exact = [gradients(case, "bf16", d, None) for d in range(DRAWS)]
    fine = [gradients(case, "bf16", d, {"bf16": "f32"}) for d in range(DRAWS)]
    for s in whole.tensors:
        got = flat[whole.offsets[s.name] : whole.offsets[s.name] + s.size]
        tolerance = 2 * scale * max(distance(f[s.name], e[s.name]) for e, f in zip(exact, fine))
        assert distance(got, exact[0][s.name]) <= tolerance, s.name


def test_a_step_that_does_not_count_leaves_every_bit() -> None:
    p = program("gpt")
    arenas = Arenas(p)
    arenas.start(parameters(p.states["param"]))
    for kind in ("m", "v"):
        layout = p.states[kind]
        arenas.write(Ref(f"state.{kind}", 0, TensorType((layout.size,), "f32")), np.linspace(0, 1, layout.size))
    arenas.raw["state.grad1"][...] = 0
    broken = p.states["grad1"].offsets["block.0.mlp.up.weight"] * 4
    arenas.raw["state.grad1"][broken : broken + 4] = np.array([np.inf], np.float32).view(np.uint8)
    before = {k: arenas.state(k) for k in ("param", "param16", "m", "v", "counter")}
    outputs = arenas.run(p.plans["update"], {})
    assert outputs["finite"] == 0
    for kind, x in before.items():
        assert np.array_equal(arenas.state(kind), x), kind


def test_sgd_keeps_its_copy_too() -> None:
    found, _ = stepped("llama", True, "sgd")
    assert np.array_equal(found["param16"], round_to(found["param"], "bf16"))
    assert np.any(found["param"] != parameters(program("llama").states["param"]))


@pytest.mark.parametrize("case", ["gpt", "llama"])
def test_decode_and_evaluation_read_the_copy(case: str) -> None:
    """Logits to sample from arrive in f32 and agree with the float64 ones; evaluation gives the loss of training without its z-loss."""
    p = program(case)
    arenas = Arenas(p)
    arenas.start(parameters(p.states["param"]))
    t = Tracer("decode", p.states["param"], precision="bf16")
    t.output("logits", model(case).decode(t))  # type: ignore[misc]
    single = {k: v[:1] for k, v in batch().items()}
    want = evaluate(t.graph, single, {"param16": arenas.state("param16")})[0]["logits"]
    ref = p.plans["decode"].outputs["logits"]
    assert ref.type == TensorType((1, VOCAB), "f32")
    got = arenas.run(p.plans["decode"], single)["logits"]
    assert distance(got, want) < 0.02 * np.linalg.norm(want) and not np.array_equal(round_to(got, "bf16"), got)
    outputs = arenas.run(p.plans["eval"], batch())
    arenas.run(p.plans["micro_first@0"], batch())
    stats = p.states["grad0"]
    loss = arenas.state("grad0")[stats.offsets["~stats.loss_sum"]]
    assert outputs["loss_sum"] == loss
    assert not any(x.op.endswith("_grad") for x in p.plans["eval"].launches)


def test_which_launches_a_block_takes() -> None:
    """What fusion must find on the GPU: nothing elementwise is left alone, and each weight gradient is one launch."""
    for case, left in (("gpt", {"layernorm", "layernorm_bwd"}), ("llama", {"rmsnorm", "rmsnorm_bwd"})):
        launched = [x.op for x in program(case).plans["micro@1"].launches]
        assert not {"gelu", "gelu_bwd", "swiglu_packed", "add", "split", "concat", "cross_entropy", "broadcast_to", "fill"} & set(launched)
        assert launched.count(f"add_{min(left)}") == 4 and launched.count(f"{min(left)}_bwd_add") == 4
        weights = [s for s in program(case).states["param"].tensors if s.name.endswith("weight") and "block" in s.name]
        stacked = sum(s.name.endswith("gate.weight") for s in weights)
        assert launched.count("matmul_accumulate") == len(weights) - stacked
        assert launched.count("linear_cross_entropy_grad") == 1


def test_scratch_is_planned_for_the_chip_not_the_host() -> None:
    found = [x for x in program("gpt").plans["micro_first@0"].launches if x.op == "layernorm_bwd"]
    assert [x.scratch.type.nbytes for x in found if x.scratch] == [256 * 132]


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(InputError, match="no cuda kernel covers count_valid"):
        build_without("count_valid")


def test_without_a_kernel_a_packed_row_is_its_composition() -> None:
    """A back end that lacks the packed rows launches their parts instead, in the layers and phases of the rows."""
    lacking = ("attention_packed", "attention_packed_bwd")
    found, whole = build_without(*lacking).plans["micro_first@0"].launches, build_without().plans["micro_first@0"].launches
    assert not set(lacking) & {x.op for x in found} and set(lacking) <= {x.op for x in whole}
    for row_, part in (("attention_packed", "attention"), ("attention_packed_bwd", "attention_bwd")):
        places = [sorted((x.layer, x.phase) for x in launches if x.op == op) for launches, op in ((whole, row_), (found, part))]
        assert places[0] == places[1] and places[0]


def build_without(*rows: str) -> Program:
    return build_program(name="x", model=model("gpt"), optimizer=adamw(ScheduleConfig(kind="cosine", peak=1e-2, warmup=2, total=10)),
                         shape=StepShape(micro_batch=BATCH, seq=SEQ), catalogue=declared(without=rows), backend="cuda",
                         precision="bf16")


# -- the contract of the rows --------------------------------------------------------------------------------------------------


def t(dtype: str, *shape: int) -> TensorType:
    return TensorType(shape, dtype)


CONTRACT: tuple[tuple[str, tuple[TensorType, ...], dict[str, Any], tuple[TensorType, ...]], ...] = (
    ("matmul", (t("bf16", 8, 16), t("bf16", 16, 24), t("bf16", 24)), {}, (t("bf16", 8, 24),)),
    ("matmul", (t("bf16", 8, 16), t("bf16", 16, 24)), {"wide": True}, (t("f32", 8, 24),)),
    ("sum", (t("bf16", 8, 16),), {"axis": (0,), "wide": True}, (t("f32", 16),)),
    ("matmul_accumulate", (t("f32", 8, 24), t("bf16", 8, 16), t("bf16", 16, 24)), {"wide": True}, (t("f32", 8, 24),)),
    ("embedding_bwd", (t("bf16", 4, 8), t("i32", 4)), {"vocab": 9}, (t("f32", 9, 8),)),
    ("layernorm_bwd", (t("bf16", 4, 8), t("bf16", 4, 8), t("bf16", 8), t("f32", 4), t("f32", 4)), {},
     (t("bf16", 4, 8), t("f32", 8), t("f32", 8))),
    ("rmsnorm_bwd", (t("bf16", 4, 8), t("bf16", 4, 8), t("bf16", 8), t("f32", 4)), {}, (t("bf16", 4, 8), t("f32", 8))),
    ("accumulate", (t("f32", 8), t("bf16", 8)), {}, (t("f32", 8),)),
    ("cross_entropy_bwd", (t("f32", 4), t("bf16", 4, 8), t("i32", 4), t("f32", 4)), {"ignore_index": -1, "z_loss": 0.0},
     (t("bf16", 4, 8),)),
    ("linear_cross_entropy_grad", (t("bf16", 4, 8), t("bf16", 9, 8), t("i32", 4)), {"ignore_index": -1, "z_loss": 0.0, "chunk": 2},
     (t("f32"), t("bf16", 4, 8), t("f32", 9, 8))),
    ("attention_packed_bwd", (t("bf16", 1, 4, 16), t("bf16", 1, 4, 32), t("bf16", 1, 4, 16), t("f32", 1, 2, 4)),
     {"heads": 2, "kv_heads": 1, "causal": True, "window": 0, "scale": 0.5}, (t("bf16", 1, 4, 32),)),
    ("scale_by", (t("bf16", 4), t("f32")), {}, (t("bf16", 4),)),
)  # fmt: skip


@pytest.mark.parametrize(("op", "types", "attrs", "results"), CONTRACT, ids=[f"{c[0]}-{i}" for i, c in enumerate(CONTRACT)])
def test_rows_keep_their_contract_of_types(op: str, types: Any, attrs: Any, results: Any) -> None:
    """Results have the types of docs/numerics.md, operands are what `kept` says, and any other float type in any place is refused."""
    spec = row(op)
    assert tuple(spec.infer(types, attrs)) == results
    for i, given in enumerate(types):
        if not given.is_float:
            continue
        assert spec.operand_dtype(i, "bf16") == given.dtype
        for other in {"f64", "f32", "bf16"} - {given.dtype}:
            trial = [TensorType(x.shape, other) if i == k else x for k, x in enumerate(types)]
            compute = spec.compute_dtype(trial) or "f32"
            if all(x.dtype == spec.operand_dtype(k, compute) for k, x in enumerate(trial) if x.is_float):
                continue  # the contract of another compute type
            with pytest.raises(ShapeError):
                spec.infer(trial, attrs)


def test_every_row_says_what_it_keeps_by_a_name_that_it_has() -> None:
    for name, spec in table().items():
        names = {n.strip("?*") for n in (*spec.inputs, *spec.outputs)}
        assert set(spec.kept) <= names, name
        assert set(spec.kept.values()) <= {"accumulate", "bf16"}, name


# -- run files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "vocab", "millions"), [
    ("gpt2-124m", 50304, 124), ("gpt2-1.5b", 50304, 1557), ("llama-1b", 32768, 1107), ("llama-3b", 32768, 3020),
    ("llama-8b-shapes", 128256, 1486)])
def test_the_gpu_run_files_plan_without_a_gpu(name: str, vocab: int, millions: int) -> None:
    """Parameters as published, every launch a kernel of cuda, no tensor of all logits anywhere, and room to spare on the chip."""
    cfg = load(CONFIGS / f"{name}.toml")
    p = program_for(cfg, vocab, declared(), 2)
    assert p.facts["multiprocessors"] == MULTIPROCESSORS and "threads" not in p.facts
    assert p.facts["backend"] == "cuda" and p.facts["precision"] == "bf16"
    assert sum(s.size for s in p.states["param"].tensors) // 1_000_000 == millions
    assert sum(p.arenas().values()) < 100 * 2**30
    for plan in p.plans.values():
        assert all(c.endswith(".cuda") for c in plan.components())
        assert not [x.op for x in plan.launches for r in x.outs if r.type.shape[-1:] == (vocab,) and r.type.size > vocab], plan.name
    chunks = {x.attrs["chunk"] for x in p.plans["micro_first@0"].launches if x.op == "linear_cross_entropy_grad"}
    assert chunks == {8192}


def test_gate_and_up_that_cannot_lie_side_by_side_are_refused_by_name() -> None:
    sizes: dict[str, int] = {"vocab": 8, "positions": 8, "layers": 1, "width": 12, "heads": 2, "kv_heads": 1}
    llama.LlamaConfig(**sizes, hidden=16)
    with pytest.raises(ConfigError, match="gate and up cannot be read as one matrix"):
        llama.LlamaConfig(**sizes, hidden=20)


def test_precision_and_back_end_agree() -> None:
    path = CONFIGS / "gpt2-124m.toml"
    for override in ('train.precision="f32"', 'machine.backend="cpu"'):
        with pytest.raises(ConfigError, match="does not compute in"):
            load(path, [override])
    with pytest.raises(ConfigError, match="vocabulary does not fit"):
        program_for(load(path, ['data.tokenizer="bytes"']), 257, declared(), 2)
    tiny = load(CONFIGS / "tiny.toml")
    assert (tiny.machine.backend, tiny.train.precision) == ("cpu", "f32")
    assert load(path).identity() != load(path, ['machine.backend="cpu"', 'train.precision="f32"']).identity()


# -- tolerances ----------------------------------------------------------------------------------------------------------------

SUMS = ("accumulate", "adamw", "add_layernorm", "attention", "attention_packed", "cross_entropy", "embedding_bwd", "layernorm",
        "layernorm_bwd", "linear_cross_entropy_grad", "linear_gelu", "linear_swiglu", "matmul", "matmul_accumulate", "rmsnorm",
        "rmsnorm_bwd", "sum", "sum_accumulate", "update_scalars")  # fmt: skip
"""Rows in which something is summed, or kept in f32: a computation that is bf16 throughout must show."""


@pytest.mark.parametrize("name", sorted(table()))
def test_a_kernel_that_computes_in_f32_passes_and_one_in_bf16_does_not(name: str) -> None:
    """The plainest honest kernel, every operation in f32 and one rounding of each result, lies within the bf16 tolerance of every row."""
    spec, compute = row(name), "f32" if name in ("adamw", "update_scalars") else "bf16"
    found = []
    for sample in spec.samples(generator("precision", name)):
        if spec.across is not None and sample.attrs["size"] != 1:
            continue  # sends and receives: one member alone has no result
        case = case_of(sample, compute, spec=spec)
        try:
            dtypes = [t.dtype for t in case.out_types(spec)]
        except ShapeError:
            continue  # rows of the f32 update have no bf16 case
        if sum(np.size(x) for x in case.inputs) <= 20_000:
            found.append((case, dtypes, allowance(spec, case, "precision")))
    single = all(a.single for _, _, a in found)
    rejected = 0
    for case, dtypes, allowed in found:
        for throughout in (False, True):
            walked = walk(spec.oracle, "bf16" if throughout else "f32", case.inputs, case.attrs, mixed="" if throughout else compute)
            got = [round_to(y, d) if y.dtype.kind == "f" else y for y, d in zip(walked, dtypes)]
            bad = exact_error(got, tuple(allowed.want), dtypes) > 0 if single else allowed.ratio(got, dtypes) > RATIO
            assert throughout or not bad, case.name
            rejected += throughout and bad
    assert rejected or name not in SUMS


@pytest.mark.parametrize("case", ["gpt", "llama"])
def test_recomputed_blocks_have_the_same_bits_in_less_memory(case: str) -> None:
    schedule = ScheduleConfig(kind="cosine", peak=1e-2, warmup=2, total=10)
    p = build_program(name=case, model=model(case), optimizer=adamw(schedule), shape=StepShape(micro_batch=BATCH, seq=SEQ),
                      catalogue=declared(), backend="cuda", precision="bf16", policy=("block", ()), fused=False)
    found = []
    for q in (p, program(case, False)):
        arenas = Arenas(q)
        arenas.start(parameters(q.states["param"]))
        arenas.run(q.plans["micro_first@0"], batch())
        found.append([arenas.state("grad0")[o : o + n] for o, n in q.states["grad0"].ranges()])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert p.plans["micro_first@0"].memory.peak < program(case, False).plans["micro_first@0"].memory.peak
    assert any(x.phase == "recompute" for x in p.plans["micro_first@0"].launches)
