"""Spot checks: launches of real plans against float64, sound kernels and kernels that go wrong where no gate has looked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from spoiled import spoiled

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.spot import HEAD, PRODUCTS, Look, Spot
from alpha.component import Catalogue
from alpha.config import from_tables
from alpha.graph import cuts
from alpha.graph.cuts import CUTS, drawn, runs
from alpha.graph.plan import Launch, Plan, Program, Ref
from alpha.ops.numerics import round_to
from alpha.ops.table import row, table
from alpha.optim.init import fill_initial
from alpha.train import spots
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue
from alpha.train.pace import PacedSpots
from alpha.types import Attrs, Table, TensorType

VOCAB = 257


@cache
def program(family: str) -> Program:
    """A step with more than 2^16 elements in its activations."""
    model: dict[str, Any] = {"family": family, "layers": 1, "width": 64, "heads": 2, "dropout": 0.1 if family == "gpt" else 0.0}
    train: dict[str, Any] = {"steps": 4, "batch": 20, "micro_batch": 10, "fuse": family == "gpt"}
    if family == "llama":
        model |= {"kv_heads": 1, "z_loss": 1e-3}
    return program_for(from_tables({"run": {"name": "spots"}, "model": model, "data": {"tokenizer": "bytes", "documents": family == "llama",
                                    "sequence": 128}, "train": train, "optim": {"lr": 1e-3}}), VOCAB, catalogue(), 2)


class Everything:
    """Looks at every launch. `found`: op, look."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Look]] = []
        self._rng = np.random.default_rng(5)

    def before(self, plan: Plan, index: int, read: Callable[..., np.ndarray]) -> None:
        self._spot = Spot(plan.launches[index], read, self._rng)

    def after(self, plan: Plan, index: int, read: Callable[..., np.ndarray]) -> None:
        self.found += [(plan.launches[index].op, look) for look in self._spot.looks(read)]


def inputs(plan: Plan, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    """Text for a plan: ids, positions that rise, documents in order."""
    made = {}
    for name, ref in plan.inputs.items():
        shape = ref.type.shape
        drawn_ids = np.sort(rng.integers(0, 3, shape)) if name == "documents" else rng.integers(0, VOCAB, shape)
        made[name] = (np.broadcast_to(np.arange(shape[-1]), shape) if name in ("positions", "sample_ids") else drawn_ids).astype(np.int32)
    return made


def looks(of: Program, kernels: Catalogue, steps: int = 1) -> list[tuple[str, Look]]:
    """Everything seen in some steps."""
    seen, rng = Everything(), np.random.default_rng(3)
    with CpuExecutor(of, kernels) as executor:
        fill_initial(executor.state("param"), of.states["param"], 1)
        executor.inspector = seen
        for call in of.schedule * steps:
            executor.run(call.plan, inputs(of.plans[call.plan], rng))
    return seen.found


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_sound_kernels_stay_within_their_tolerances(family: str) -> None:
    found = looks(program(family), catalogue())
    bad = [(op, look) for op, look in found if not look.ratio <= 1]
    assert not bad, bad
    assert {op for op, _ in found} == {x.op for s in program(family).schedule for x in program(family).plans[s.plan].launches}
    assert all(look.elements > 0 for _, look in found)


SEGMENTS = ((0, 1), (64, 1023), (1087, 0), (1088, 1024), (2112, 5000), (8192, 2048), (10_241, 3), (10_300, 7000))


def test_squares_of_segments_are_those_of_their_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding left out, a piece at a time, without overflow of the narrow type."""
    x = (np.random.default_rng(0).standard_normal(20_000) * 1e25).astype(np.float32)
    want = [float((x[a : a + n].astype(np.float64) ** 2).sum()) for a, n in SEGMENTS]
    for piece in (1 << 20, 1000):
        monkeypatch.setattr(cuts, "PIECE", piece)
        np.testing.assert_allclose(cuts.squares(x, SEGMENTS), want, rtol=1e-12)


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_the_norm_of_a_gradient_is_that_of_its_roots(max_norm: float) -> None:
    """Every result of the update's numbers, from one element a segment; NaN, infinity and squares beyond float32 reach it."""
    rng, rates = np.random.default_rng(1), Table.of(np.linspace(1e-3, 1e-4, 30))
    attrs: Attrs = {"segments": SEGMENTS, "max_norm": max_norm, "rates": rates}
    for bad in (0.0, np.nan, np.inf, 1e25):
        grad = rng.standard_normal(20_000)
        grad[2200] += bad
        ins = grad, np.array(2048.0), np.array(7000.25), np.array(5, np.int32)
        types = [TensorType(x.shape, "i32" if x.dtype == np.int32 else "f32") for x in ins]
        part, = cuts.parts("update_scalars", types, [], attrs, rng)
        with np.errstate(all="ignore"):
            want = row("update_scalars").oracle(*ins, **attrs)
            got = row("update_scalars").oracle(*(take(x) for take, x in zip(part.ins, ins)), **part.attrs)
        for w, g in zip(want, got, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-12)
    assert part.ins[0](ins[0]).shape == (len(SEGMENTS),)


def test_what_the_smaller_norm_is_allowed_is_what_the_row_allows() -> None:
    """No less than the row's own bound of the whole, and no more than one level of its tree above it."""
    attrs: Attrs = {"segments": SEGMENTS, "max_norm": 0.5, "rates": Table.of(np.ones(9))}
    ins = np.random.default_rng(2).standard_normal(20_000), np.array(2048.0), np.array(7000.0), np.array(5, np.int32)
    part, = cuts.parts("update_scalars", [TensorType(np.shape(x), "f32") for x in ins], [], attrs, np.random.default_rng(0))
    bound = row("update_scalars").bound
    assert bound is not None
    small = tuple(t(x) for t, x in zip(part.ins, ins))
    want = row("update_scalars").oracle(*ins, **attrs)
    for w, whole, less, apart in zip(want, bound(ins, attrs), bound(small, part.attrs), part.apart, strict=True):
        assert float(whole) <= (float(less) + apart * abs(float(w))) * (1 + 1e-9) <= float(whole) * 1.1 + 8 * abs(float(w))


def update_of_a_gpu(rng: np.random.Generator) -> tuple[Launch, dict[Ref, np.ndarray]]:
    """The launch that reads the whole gradient for an update's numbers, and operands of it."""
    tables = {"run": {"name": "spots"}, "model": {"family": "gpt", "layers": 1, "width": 64, "heads": 1}, "machine": {"backend": "cuda"},
              "data": {"tokenizer": "bpe", "vocab": 512, "sequence": 128}, "optim": {"lr": 1e-3},
              "train": {"steps": 4, "batch": 4, "precision": "bf16"}}
    plan = program_for(from_tables(tables), 512, catalogue(), 1).plans["update"]
    launch = next(x for x in plan.launches if x.op == "update_scalars")
    made = {ref: rng.standard_normal(ref.type.shape).astype(np.float32) for ref in launch.ins}
    made[launch.ins[1]], made[launch.ins[2]] = np.array(2048, np.float32), np.array(7000.25, np.float32)
    made[launch.ins[3]] = np.array(2, np.int32)
    return launch, made


@pytest.mark.parametrize("result", [None, *range(7)])
def test_a_wrong_number_of_an_update_is_seen(result: int | None) -> None:
    """Of a GPU's update, which reads the whole gradient: off by a thousandth, or by one."""
    rng = np.random.default_rng(4)
    launch, made = update_of_a_gpu(rng)
    spot = Spot(launch, made.__getitem__, rng)
    results = row("update_scalars").oracle(*(made[ref].astype(np.float64 if ref.type.is_float else np.int32) for ref in launch.ins),
                                           **launch.attrs)
    for i, (ref, y) in enumerate(zip(launch.outs, results, strict=True)):
        made[ref] = np.asarray(y, np.float32 if ref.type.is_float else np.int32)
        if i == result:
            made[ref] = made[ref] * np.float32(1.001) if ref.type.is_float else made[ref] + 1
    look, = spot.looks(made.__getitem__)
    assert (look.ratio <= 1) == (result is None) and look.how == "whole"
    assert result is None or row("update_scalars").outputs[result] in look.place


@pytest.mark.parametrize("large", [1e15, 1e25, -3e38, np.inf, np.nan])
def test_a_gradient_whose_squares_overflow_accuses_nobody(large: float) -> None:
    """Kernels add squares in float32: such a step is not finite, and no memory is wrong."""
    launch, made = update_of_a_gpu(np.random.default_rng(7))
    made[launch.ins[0]][2200] = large
    spot = Spot(launch, made.__getitem__, np.random.default_rng(3))
    with np.errstate(all="ignore"):
        results = row("update_scalars").oracle(*(made[ref] for ref in launch.ins), **launch.attrs)
    made |= {ref: np.asarray(y, np.float32 if ref.type.is_float else np.int32) for ref, y in zip(launch.outs, results, strict=True)}
    look, = spot.looks(made.__getitem__)
    assert look.ratio <= 1, look
    assert int(made[launch.outs[3]]) == (large == 1e15)


def _from_2_16(outs: list[np.ndarray], calls: int) -> None:
    outs[0].reshape(-1)[1 << 16 :] *= np.float32(1.001)


def _one_element(outs: list[np.ndarray], calls: int) -> None:
    y = outs[0].reshape(-1)
    if y.size > 1 << 16:
        y[(1 << 16) + 77] += 0.1 * np.abs(y).max()


def _after_calls(outs: list[np.ndarray], calls: int) -> None:
    if calls > 1:
        outs[0][...] *= np.float32(1.001)


def _at_an_alignment(outs: list[np.ndarray], calls: int) -> None:
    if outs[0].ctypes.data % 512 == 256:
        outs[0][...] *= np.float32(1.001)


FAULTS = [("matmul.f32.cpu", _one_element), ("matmul.f32.cpu", _at_an_alignment), ("add_layernorm.f32.cpu", _from_2_16),
          ("layernorm_bwd.f32.cpu", _after_calls), ("attention_packed.f32.cpu", _after_calls), ("dropout.f32.cpu", _from_2_16),
          ("linear_gelu.f32.cpu", _one_element), ("linear_cross_entropy_grad.f32.cpu", _after_calls), ("adamw.f32.cpu", _after_calls)]


@pytest.mark.parametrize(("component", "fault"), FAULTS, ids=lambda x: x if isinstance(x, str) else x.__name__.strip("_"))
def test_a_kernel_that_goes_wrong_where_no_gate_looked_is_seen(component: str, fault: Callable[[list[np.ndarray], int], None]) -> None:
    steps = 2 if component.startswith("adamw") else 1  # one launch a step
    found = [(op, look) for op, look in looks(program("gpt"), spoiled(component, fault), steps) if not look.ratio <= 1]
    assert {op for op, _ in found} == {component.split(".")[0]}, "it alone is wrong: what follows computed rightly from it"
    assert all("got" in look.place and "expected" in look.place for _, look in found)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_long_attention_is_looked_at_by_single_queries_and_keys(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(cuts, "SCORES", 0)
    assert not [(op, look) for op, look in looks(program(family), catalogue()) if not look.ratio <= 1]
    wrong = "attention_packed.f32.cpu", "attention_packed_bwd.f32.cpu"
    for component in wrong if family == "gpt" else ():
        found = [op for op, look in looks(program(family), spoiled(component, _after_calls)) if not look.ratio <= 1]
        assert set(found) == {component.split(".")[0]}, found


@pytest.mark.parametrize("op", ["attention", "attention_bwd", "attention_packed", "attention_packed_bwd"])
def test_single_queries_and_keys_are_those_of_the_whole_call(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Causal, windowed, by documents, of grouped heads, with more keys than queries and the other way round."""
    monkeypatch.setattr(cuts, "SCORES", 0)
    rng, seen = np.random.default_rng(0), 0
    for sample in row(op).samples(np.random.default_rng(3)):
        ins = [np.asarray(x) for x in sample.inputs]
        outs = row(op).oracle(*ins, **sample.attrs)
        types = [TensorType(x.shape, "f32" if x.dtype.kind == "f" else "i32") for x in ins], [TensorType(x.shape, "f32") for x in outs]
        for part in cuts.parts(op, *types, sample.attrs, rng):
            found = row(part.op).oracle(*[take(ins[i]) for take, i in zip(part.ins, part.operands(), strict=True)], **part.attrs)
            for got, take, i in zip(found, part.outs, part.results(), strict=True):
                if take is not None:
                    np.testing.assert_allclose(got, take(outs[i]), rtol=1e-9, atol=1e-10, err_msg=f"{op} {sample.name}")
                    seen += got.size
    assert seen > 1000


def test_a_look_at_long_attention_costs_by_what_is_drawn() -> None:
    """At the length of a Llama: as a whole its scores alone take 512 MiB, and the walk over them minutes."""
    qkv, attrs = TensorType((8, 4096, 3072), "bf16"), {"heads": 32, "kv_heads": 8, "causal": True, "window": 0, "scale": 0.125}
    do, lse = TensorType((8, 4096, 2048), "bf16"), TensorType((8, 32, 4096), "f32")
    for op, ins, outs in (("attention_packed", [qkv], [do, lse]), ("attention_packed_bwd", [do, qkv, do, lse], [qkv])):
        assert cuts.scores_of(op, ins, attrs) == 4 * 4096**2 > cuts.SCORES >= 512**2
        for part in cuts.parts(op, ins, outs, attrs, np.random.default_rng(1)):
            shapes = [take(np.broadcast_to(np.int8(0), ins[i].shape)).shape for take, i in zip(part.ins, part.operands(), strict=True)]
            queries, keys = (shapes[1], shapes[2]) if op.endswith("bwd") else shapes[:2]
            assert queries[2] == 4 and keys[2] == 1 and 1 in (queries[1], keys[1])


def test_checked_steps_of_a_device_move_apart_by_what_they_cost() -> None:
    def spaced(every: int, cost: float, late: bool = True, looked: int = spots.DRAWN, first: bool = False) -> int:
        it = object.__new__(PacedSpots)
        it.every = it.apart = every
        it._executor = SimpleNamespace(digests=SimpleNamespace(late=late))  # type: ignore[assignment]
        it._step_ns = 0
        for ns, seen in reversed([(0, 0), (int(cost * 1000), looked)]) if first else [(0, 0), (int(cost * 1000), looked)]:
            it._ns, it._looked = ns, seen
            it.took(ns + 1000)
        assert it._step_ns == 1000
        return it.apart

    assert spaced(200, 1) == 200 and spaced(200, 1.1) == 400 and spaced(200, 100) == 20_000
    assert spaced(200, 3, looked=3 * spots.DRAWN) == 200, "a first step looks at more"
    assert spaced(200, 100, late=False) == 200 and spaced(1, 100) == 1
    assert spaced(200, 100, first=True) == 20_000, "a session begins with a checked step, before any has said how long a step takes"


def test_cuts_are_of_rows_that_there_are() -> None:
    for op, found in CUTS.items():
        spec = table()[op]
        for cut in found:
            letters, results = cut.split(">")
            assert len(letters) == len(spec.inputs) and len(results) == len(spec.outputs), op
        assert all(any(cut.split(">")[1][i] != "." for cut in found) for i in range(len(spec.outputs))), f"{op}: a result that no cut has"
    assert set(PRODUCTS) <= set(table())


def test_both_ends_are_always_drawn() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 8, 9, 1000, 1 << 33):
        for at in (drawn(n, 8, rng), runs(n, rng)):
            assert at[0] == 0 and at[-1] == n - 1 and (np.diff(at) > 0).all()




@pytest.mark.parametrize("wrong", ["", "loss", "dx", "dweight"])
def test_a_head_that_keeps_its_logits_in_bf16_is_sound(wrong: str) -> None:
    """As the chunked head of a GPU does: logits and their gradients are rounded, sums are wider."""
    rng, n, c, v = np.random.default_rng(6), 64, 128, 264
    attrs = {"ignore_index": -1, "z_loss": 1e-4, "chunk": 32}
    x, weight = (round_to(rng.standard_normal(shape) * s, "bf16") for shape, s in (((n, c), 1.0), ((v, c), 0.4)))
    targets = rng.integers(-1, v, n).astype(np.int32)
    logits = round_to(x @ weight.T, "bf16")
    losses, lse = row("cross_entropy").oracle(logits, targets, ignore_index=-1, z_loss=1e-4)
    (dl,) = row("cross_entropy_bwd").oracle(np.ones(n), logits, targets, lse, ignore_index=-1, z_loss=1e-4)
    dl = round_to(dl, "bf16")
    made = {"loss": losses.sum(), "dx": round_to(dl @ weight, "bf16"), "dweight": dl.T @ x}
    if wrong:
        made[wrong] = made[wrong] * np.float64(1.05)
    types = [TensorType((n, c), "bf16"), TensorType((v, c), "bf16"), TensorType((n,), "i32"), TensorType((), "f32"),
             TensorType((n, c), "bf16"), TensorType((v, c), "f32")]
    refs = [Ref("act", 1 << 20 * i, t) for i, t in enumerate(types)]
    launch = SimpleNamespace(op=HEAD, ins=refs[:3], outs=refs[3:], attrs=attrs)
    values = dict(zip(refs, (x, weight, targets, *(np.asarray(y, np.float32) for y in made.values()))))
    (look,) = Spot(launch, values.__getitem__, rng).looks(values.__getitem__)  # type: ignore[arg-type]
    assert (look.ratio > 1) == bool(wrong), look
