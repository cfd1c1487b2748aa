"""`alpha bench simulate`: steps on paper whose times are known by hand, what records make of them, and the error on every recorded step."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpha import config
from alpha.bench import docs, record, simulated
from alpha.bench.simulated import Rates
from alpha.cli import main
from alpha.data.tokenizer import ByteTokenizer
from alpha.errors import AlphaError, GraphError, InputError
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step
from alpha.profile import simulate
from alpha.profile.simulate import Cost, RankTime
from alpha.resources import ROOT
from alpha.types import TensorType

GPT, LLAMA = (ROOT / "configs" / f"{name}.toml" for name in ("gpt2-124m", "llama-1b"))
HALF = 66
"""Of 132 multiprocessors."""


# -- by hand -------------------------------------------------------------------------------------------------------------------


def compute(ns: float, *after: int, op: str = "matmul") -> Launch:
    return launch(op, {"ns": ns}, COMPUTE, after)


def collective(ns: float, *after: int, blocks: int = 0, group: str = "dp", op: str = "all_reduce", stream: str = COMM) -> Launch:
    return launch(op, {"ns": ns, "blocks": blocks, "group": group, "size": 2}, stream, after)


def launch(op: str, attrs: dict[str, Any], stream: str = COMPUTE, after: tuple[int, ...] = (), **more: Any) -> Launch:
    held: dict[str, Any] = {"ins": (), "outs": (), "flops": 0, "nbytes": 0, **more}
    return Launch(op, op, held["ins"], held["outs"], attrs, None, f"unit {attrs.get('ns')}", "reduce", "", held["flops"], held["nbytes"],
                  stream, after)


def program(*plans: Sequence[Launch], ranks: int = 1, groups: Any = None) -> Program:
    """Ranks that all run these plans, one after the other."""
    return of_roles([list(map(tuple, plans))] * ranks, groups or {"dp": (tuple(range(ranks)),)})


def of_roles(roles: Sequence[Sequence[Sequence[Launch]]], groups: Any) -> Program:
    """Ranks each of which has its own plans."""
    made = {f"{i}~{r}": Plan(f"{i}~{r}", tuple(x), {}, {}, {}, Memory(0, 0, 0))
            for r, plans in enumerate(roles) for i, x in enumerate(plans)}
    steps = [tuple(Step(f"{i}~{r}") for i, _ in enumerate(plans)) for r, plans in enumerate(roles)]
    return Program("t", made, steps[0], {}, others=tuple(Role(s, {x.plan: x.plan for x in s}) for s in steps[1:]), groups=groups)


def told(rank: int, x: Launch) -> Cost:
    """What a made launch says of itself."""
    return Cost(float(x.attrs["ns"]), int(x.attrs.get("blocks", 0)))  # type: ignore[arg-type]


def times(p: Program, cost: Callable[[int, Launch], Cost] = told) -> list[RankTime]:
    return list(simulate.simulate(p, cost).ranks)


def one(*plans: Sequence[Launch]) -> tuple[float, float, float, float]:
    """(step, communication, exposed, slowed) of two ranks that are alike."""
    first, second = times(program(*plans, ranks=2))
    assert first == second
    return tuple(round(x, 3) for x in (first.ns, first.communication, first.exposed, first.slowed))  # type: ignore[return-value]


def test_compute_alone_is_a_sum() -> None:
    assert one([compute(10), compute(20)], [compute(5)]) == (35, 0, 0, 0)


def test_a_collective_beside_compute_is_hidden() -> None:
    assert one([compute(10), collective(5, 0), compute(20)]) == (30, 5, 0, 0)


def test_a_collective_waits_for_what_it_sums() -> None:
    assert one([compute(10), collective(25, 0), compute(20)]) == (35, 25, 5, 0)


def test_a_collective_waits_for_all_compute_before_it() -> None:
    """The executor begins it beside the launch for which it was put there, not at its operand."""
    assert one([compute(10), compute(20), collective(5, 0), compute(4)]) == (35, 5, 1, 0)


def test_the_last_collective_is_exposed() -> None:
    assert one([compute(10), compute(20), collective(15, 1)]) == (45, 15, 15, 0)
    first, _ = times(program([compute(10), compute(20), collective(15, 1)], ranks=2))
    assert first.waits == {("unit 15", "all_reduce"): 15}


def test_a_plan_ends_with_both_streams() -> None:
    assert one([compute(10), collective(30, 0), compute(5)], [compute(5)]) == (45, 30, 25, 0)


def test_compute_waits_for_the_gather_that_it_reads() -> None:
    assert one([compute(10), collective(20, 0, op="all_gather"), compute(4), compute(5, 1), compute(1)]) == (36, 20, 16, 0)


def test_collectives_follow_one_another() -> None:
    found = times(program([compute(10), collective(20, 0), collective(7, 0), compute(5), compute(1, 2)], ranks=2))[0]
    assert (found.ns, found.waits) == (38, {("unit 20", "all_reduce"): 15, ("unit 7", "all_reduce"): 7})


def test_compute_beside_a_collective_has_what_it_leaves() -> None:
    assert one([compute(10), collective(10, 0, blocks=HALF), compute(20)]) == (35, 10, 0, 5)
    assert one([compute(10), collective(10, 0, blocks=132), compute(20)]) == (40, 10, 0, 10)
    assert one([compute(10), collective(10, 0, blocks=0), compute(20)]) == (30, 10, 0, 0), "copy engines leave all"


def test_a_collective_begins_when_the_last_member_comes() -> None:
    """The first one waits 20 for the second one, and holds no room meanwhile; it takes as long as the slower member says."""
    quick = [compute(10), collective(5, 0, blocks=HALF), compute(10), compute(10, 1)]
    slow = [compute(30), collective(6, 0, blocks=HALF), compute(30), compute(10, 1)]
    first, second = times(of_roles([[quick], [slow]], {"dp": ((0, 1),)}))
    assert (second.ns, second.compute, second.exposed, second.slowed) == (73, 70, 0, 3)
    assert (first.ns, first.exposed, first.slowed) == (46, 16, 0) and first.communication == second.communication == 6


def test_a_step_ends_with_its_last_rank() -> None:
    p = of_roles([[[compute(5)]], [[compute(9)]]], {})
    assert simulate.simulate(p, told).ns == 9


def test_pairs_of_ranks_do_not_wait_for_each_other() -> None:
    pairs = {"dp": ((0, 1), (2, 3))}
    found = times(program([compute(10), collective(5, 0)], ranks=4, groups=pairs),
                  lambda rank, x: replace(told(rank, x), ns=told(rank, x).ns * (1 + (rank == 3))))
    assert [x.ns for x in found] == [15, 15, 30, 30] and [x.exposed for x in found] == [5, 5, 20, 10]


def test_a_collective_among_compute_is_exposed() -> None:
    assert one([compute(10), collective(7, stream=COMPUTE), compute(3)]) == (20, 7, 7, 0)


def test_members_that_do_not_meet_are_refused() -> None:
    groups = {"a": ((0, 1),), "b": ((0, 1),)}
    this, that = collective(1, group="a"), collective(1, group="b")
    with pytest.raises(GraphError, match=r"wait in a circle[\s\S]*a 0 by ranks \[0\]; b 0 by ranks \[1\]"):
        times(of_roles([[[this, that]], [[that, this]]], groups))
    with pytest.raises(GraphError, match="different collectives"):
        times(of_roles([[[this]], [[replace(this, op="all_gather")]]], groups))


@st.composite
def drawn(draw: Any) -> tuple[list[list[list[Launch]]], dict[str, Any]]:
    """Ranks whose launches take times of their own, in one order of streams and waits."""
    ranks, roles = draw(st.integers(1, 3)), []
    shape = [[(draw(st.booleans()), draw(st.sampled_from((0, 16, HALF))), draw(st.integers(0, 5)))
              for _ in range(draw(st.integers(1, 6)))] for _ in range(draw(st.integers(1, 3)))]
    for _ in range(ranks):
        plans = []
        for places in shape:
            made: list[Launch] = []
            for beside, blocks, back in places:
                others = [i for i, x in enumerate(made) if (x.stream == COMM) != beside]
                after, ns = tuple(others[-1 - back:][:1]), draw(st.integers(0, 40))
                made.append(collective(ns, *after, blocks=blocks) if beside else compute(ns, *after))
            plans.append(made)
        roles.append(plans)
    return roles, {"dp": (tuple(range(ranks)),)}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(drawn(), st.integers(0, 30), st.integers(0, 8))
def test_what_holds_of_any_step(made: tuple[Any, Any], more: int, which: int) -> None:
    """A step is no shorter than its parts, each rank's time adds up, and a slower collective makes none faster."""
    roles, groups = made
    found = simulate.simulate(of_roles(roles, groups), told)
    for rank, plans in zip(found.ranks, roles):
        alone = sum(float(x.attrs["ns"]) for plan in plans for x in plan if x.stream == COMPUTE)
        assert rank.compute == pytest.approx(alone) and rank.ns >= max(alone, rank.communication) - 1e-3
        assert rank.ns == pytest.approx(rank.compute + rank.slowed + rank.exposed, abs=1e-3)
        assert sum(rank.waits.values()) == pytest.approx(rank.exposed)
    calls = [[x for plan in plans for x in plan if x.stream == COMM] for plans in roles]
    longest = sum(max(float(x.attrs["ns"]) for x in each) for each in zip(*calls))
    assert all(rank.communication == pytest.approx(longest, abs=1e-3) for rank in found.ranks)
    if not calls[0]:
        return
    slow = {id(each[which % len(each)]) for each in calls}
    slower = simulate.simulate(of_roles(roles, groups),
                               lambda rank, x: replace(told(rank, x), ns=told(rank, x).ns + more * (id(x) in slow)))
    assert slower.ns >= found.ns - 1e-3


# -- from records --------------------------------------------------------------------------------------------------------------


def ref(dtype: str, *shape: int, arena: str = "act") -> Ref:
    return Ref(arena, 0, TensorType(shape, dtype))


def rates(scale: float = 1.0, **more: Any) -> Rates:
    """A record of a product of 1 us and 1,000 FLOPs, an update of 4 us and 4,000 bytes, a copy of 2 ns a byte; and of collectives."""
    rows = [{"op": "matmul", "shape": "bf16[8] -> bf16[8]", "kind": "product", "calls": 4, "flops": 4000, "nbytes": 1, "ns": 4000.0},
            {"op": "adamw", "shape": "f32[8] -> f32[8]", "kind": "memory", "calls": 1, "flops": 9, "nbytes": 4000, "ns": 4000.0}]
    held = {"all_reduce": ((1024, 10.0), (4096, 20.0), (16384, 80.0)), "broadcast": ((1 << 30, 7.0),), "all_gather": ((1 << 24, 3.0),)}
    cases = [{"op": op, "nbytes": n, "graph": graph,
              "rows": [{"name": "nccl", "ns": 1.0}, {"name": "ours", "ns": ns * (1 if graph else 9)}]}
             for op, each in held.items() for n, ns in each for graph in (True, False)]
    return Rates({"floor": {"rows": rows, "copy": {"ns": 2.0}}}, {"comm": {"cases": cases}}, scale=scale)


def of(op: str, ins: tuple[Ref, ...], outs: tuple[Ref, ...], flops: int = 0, nbytes: int = 0, size: int = 0) -> Launch:
    attrs: dict[str, Any] = {"group": "dp", "size": size} if size else {}
    return launch(op, attrs, ins=ins, outs=outs, flops=flops, nbytes=nbytes)


def test_what_compute_takes() -> None:
    r = rates()
    assert r.cost(0, of("matmul", (ref("bf16", 8),), (ref("bf16", 8),), 7, 7)) == Cost(1000.0) and not r.estimated
    assert r.cost(0, of("matmul", (ref("bf16", 4),), (ref("bf16", 4),), 500, 7)) == Cost(500.0), "a product by FLOPs"
    assert r.cost(0, of("adamw", (ref("f32", 4),), (ref("f32", 4),), 7, 2000)) == Cost(2000.0), "an update by bytes"
    assert r.cost(0, of("matmul_accumulate", (), (), 500, 7)) == Cost(500.0), "a product that is not there, as all products"
    assert r.cost(0, of("square_sums", (), (), 500, 7)) == Cost(14.0), "what moves memory, as a copy"
    assert r.estimated == {"matmul": "matmul: FLOPs at the rate of matmul", "adamw": "adamw: bytes at the rate of adamw",
                           "matmul_accumulate": "matmul_accumulate: FLOPs at the rate of all of product",
                           "square_sums": "square_sums: bytes at the rate of a copy"}
    assert rates(3.0).cost(0, of("square_sums", (), (), 500, 7)) == Cost(42.0)


def sized(op: str, *bytes_: int, size: int = 2, arenas: tuple[str, str] = ("act", "act")) -> Cost:
    """Of a collective of f32 with these bytes of operand and result."""
    x, y = (ref("f32", n // 4, arena=arena) for n, arena in zip(bytes_, arenas))
    return rates(3.0).cost(0, of(op, (x,), (y,), size=size))


def test_what_collectives_take() -> None:
    """By op and bytes, in a graph, along a line of logarithms; beyond the largest at its rate. No scale of compute moves them."""
    for nbytes, ns in ((1024, 10.0), (4096, 20.0), (16384, 80.0), (2048, 200**0.5), (8192, 40.0), (65536, 320.0), (256, 10.0)):
        assert sized("all_reduce", nbytes, nbytes).ns == pytest.approx(ns), nbytes
    assert sized("all_gather", 1 << 23, 1 << 24).ns == pytest.approx(3.0), "a gather counts its result"
    with pytest.raises(InputError, match=r"no record has times of this collective[\s\S]*all_gather, all_reduce, broadcast"):
        sized("all_to_all", 4096, 4096)


def test_what_collectives_keep_from_compute() -> None:
    """As alpha/backends/cuda/kernels/collectives.py has it."""
    assert sized("all_reduce", 1 << 20, 1 << 20).blocks == 32 and sized("all_reduce", 1 << 25, 1 << 25).blocks == 16
    assert sized("all_reduce", 1 << 28, 1 << 28).blocks == 32, "engines move, and 32 blocks add"
    assert sized("all_reduce", 1 << 28, 1 << 28, size=4).blocks == 64
    assert sized("broadcast", 1 << 30, 1 << 30).blocks == 0, "engines alone"
    assert sized("broadcast", 1 << 30, 1 << 30, size=4).blocks == 64, "four hand it on by multiprocessors"
    assert sized("all_gather", 1 << 23, 1 << 24).blocks == 64
    assert sized("all_gather", 1 << 23, 1 << 24, arenas=("act", "param16")).blocks == 80, "its own piece is copied by 16"


@cache
def records() -> list[dict[str, Any]]:
    return record.records()


def cfg(path: Path = GPT, *overrides: str) -> config.Config:
    return config.load(path, list(overrides))


@pytest.mark.parametrize("path", [GPT, LLAMA])
def test_one_gpu_is_the_record(path: Path) -> None:
    """The Program of today is that of the record: each of its launches is found, and their sum is the measured step."""
    found = simulated.predict(cfg(path), 1, records(), "cuda_sm90_H200")
    held = next(r for r in records() if r["subject"] == f"floor-{path.stem}")["floor"]
    assert found.one == pytest.approx(held["step_ns"], rel=1e-5) and not found.notes + found.estimated
    assert found.many.ns == pytest.approx(found.one, rel=1e-12)
    assert found.many.ranks[0].exposed == found.many.ranks[0].communication == 0


def test_a_step_on_many_says_what_it_rests_on() -> None:
    found = simulated.predict(cfg(GPT, "train.zero=1"), 4, records(), "cuda_sm90_H200")
    assert found.machine == "cuda_sm90_H200x4-nvlink" and found.tokens == 4 * 64 * 1024
    assert not found.notes
    fewer = [r for r in records() if (r["machine"], r["subject"]) != ("cuda_sm90_H200x4-nvlink", "comm-device")]
    sibling = simulated.predict(cfg(GPT, "train.zero=1"), 4, fewer, "cuda_sm90_H200")
    assert sibling.notes == ("times of collectives of cuda_sm90_H100-80GB-HBM3x4-nvlink",), "a sibling is named"
    assert sibling.many.ns != found.many.ns
    assert found.estimated == ("adamw: bytes at the rate of adamw", "scalars_of_squares: bytes at the rate of a copy",
                               "square_sums: bytes at the rate of a copy")
    assert found.waits[0][:2] == ("embedding", "reduce_scatter") and found.waits[0][2] > 0
    assert found.efficiency == pytest.approx(found.one / found.many.ns) and found.one < found.many.ns
    other = simulated.predict(cfg(GPT, "train.zero=1"), 2, records(), "cuda_sm90_H100-80GB-HBM3", 2e8)
    assert other.one == 2e8 and other.notes == ("times of compute of cuda_sm90_H200",)
    alone = simulated.predict(cfg(GPT), 2, records(), "cuda_sm90_H100-80GB-HBM3")
    held = next(r for r in records() if (r["machine"], r["subject"]) == ("cuda_sm90_H100-80GB-HBM3", "step-gpt2-124m"))
    assert alone.one == pytest.approx(held["step"]["rows"][0]["ns"]) and "one GPU as measured on cuda_sm90_H100-80GB-HBM3" in alone.notes


def test_a_record_is_of_a_model_whoever_gives_its_ids(tmp_path: Path) -> None:
    """The run file of the scaling run says model.vocab_size where the recorded one says data.vocab; a tokenizer's file has other ids."""
    wide = simulated.predict(cfg(GPT.with_name("gpt2-124m-scaling.toml")), 1, records(), "cuda_sm90_H200")
    assert wide.one == simulated.predict(cfg(GPT), 1, records(), "cuda_sm90_H200").one and not wide.estimated
    ByteTokenizer().save(tmp_path / "t.json")
    other = [f"data.tokenizer_file={tmp_path / 't.json'}", "data.vocab=512", "data.sample=4000000"]
    with pytest.raises(InputError, match="no floor record of this model"):
        simulated.predict(cfg(GPT, *other), 1, records(), "cuda_sm90_H200")


@pytest.mark.parametrize("missing", ["comm-device", "floor-llama-1b"])
def test_a_step_that_nothing_predicts_yet_costs_no_other_line(missing: str) -> None:
    """Recorded before what a simulation of it rests on; the pages are filled from the others."""
    whole, fewer = ([(x.run, x.machine) for x in simulated.recorded(of)] for of in (records(), [
        r for r in records() if r["subject"] != missing or (missing == "comm-device" and "x4-" not in r["machine"])]))
    gone = [x for x in whole if (x[1].endswith("x4-nvlink") if missing == "comm-device" else x[0].startswith("llama-1b"))]
    assert gone and fewer == [x for x in whole if x not in gone]


REFUSED: dict[str, tuple[list[str], str]] = {
    "a processor": ([str(ROOT / "configs" / "tiny.toml")], "simulated step is of GPUs"),
    "no class": ([str(GPT), "--machine", "H200"], "not the key of a GPU class"),
    "as many as": ([str(GPT), "--machine", "cuda_sm90_H200x4-nvlink"], "another number of GPUs"),
    "another capability": ([str(GPT), "--machine", "cuda_sm100_B200"], "no floor record of this model"),
    "another model": ([str(GPT), "--set", "model.layers=3"], "no floor record of this model"),
    "too many": ([str(GPT), "--nproc", "8"], "no record of collectives among 8 GPUs"),
    "another link": ([str(GPT), "--machine", "cuda_sm90_H200x2-pcie"], "no record of collectives among 2 GPUs"),
    "no run file": ([], "takes a run file"),
    "a peer": ([str(GPT), "--peers"], "takes a run file"),
    "a record": ([str(GPT), "--record"], "nothing of this can be recorded"),
    "none": ([str(GPT), "--nproc", "0"], "--nproc is too small"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, why = REFUSED[name]
    assert main(["bench", "simulate", *words]) == 2
    said = capsys.readouterr().err
    assert why in said and "came:" in said and "expected:" in said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    assert main(["bench", "simulate", str(GPT), "--nproc", "2", "--set", "train.zero=1", "--json", str(out)]) == 0
    said, held = capsys.readouterr().out, json.loads(out.read_text())["simulated"]
    assert "nothing was measured here" in said and f"efficiency {held['efficiency']:.3f}" in said and "estimated adamw" in said
    assert "embedding  reduce_scatter" in said and len(held["ranks"]) == 2 and held["waits"][0][1] == "reduce_scatter"
    assert main(["bench", "step", str(GPT), "--machine", "cuda_sm90_H200"]) == 2 and "--machine is for" in capsys.readouterr().err


# -- against what was measured -------------------------------------------------------------------------------------------------


WORST, BOUND, BLIND = "llama-1b-zero1 cuda_sm90_H200x4-nvlink", 0.05, 0.07
"""The recorded step that is predicted worst, and bounds of all errors of a step's time: the worst are -4.67 and, blind, -6.82 %."""


@cache
def lines() -> dict[str, simulated.Line]:
    return {f"{x.run} {x.machine}": x for x in simulated.recorded(records())}


def test_the_error_on_every_recorded_step() -> None:
    """Each line of the records is predicted, too fast, within the bound. The worst stands close enough to it that 1 % more is seen."""
    held = {f"{r['ranks']['run']} {r['machine']}" for r in records() if r["subject"].startswith("ranks-")}
    assert lines().keys() == held and len(held) >= 8
    errors = {name: x.error(x.given) for name, x in lines().items()}
    worst = max(errors, key=lambda name: abs(errors[name]))
    assert all(-BOUND < e < 0 for e in errors.values()), errors
    assert all(abs(x.error(x.blind)) < BLIND for x in lines().values())
    assert worst == WORST and errors[worst] - 0.01 < -BOUND, f"the worst is {worst}: {errors[worst]:+.2%}"
    assert all(x.exposed is None or x.given.exposed < x.exposed for x in lines().values()), "waits are underestimated"


def test_the_page_says_so() -> None:
    text = docs.simulations(records())
    assert text == docs.REGIONS["simulated"](records()) and len(text.splitlines()) == 2 + len(lines())
    for x in lines().values():
        assert f"{100 * x.error(x.given):+.2f} %" in text and f"{x.efficiency:.3f}" in text
    assert "Not recorded" in docs.simulations([])


# -- planted -------------------------------------------------------------------------------------------------------------------


HELD: tuple[Callable[[], None], ...] = (
    test_compute_alone_is_a_sum, test_a_collective_beside_compute_is_hidden, test_a_collective_waits_for_what_it_sums,
    test_a_collective_waits_for_all_compute_before_it, test_the_last_collective_is_exposed, test_a_plan_ends_with_both_streams,
    test_compute_waits_for_the_gather_that_it_reads, test_collectives_follow_one_another,
    test_compute_beside_a_collective_has_what_it_leaves, test_a_collective_begins_when_the_last_member_comes,
    test_a_step_ends_with_its_last_rank, test_pairs_of_ranks_do_not_wait_for_each_other, test_a_collective_among_compute_is_exposed,
    test_members_that_do_not_meet_are_refused, test_what_compute_takes, test_what_collectives_take,
    test_what_collectives_keep_from_compute, lambda: test_one_gpu_is_the_record(GPT), test_a_step_on_many_says_what_it_rests_on)

FAULTS: dict[str, tuple[types.ModuleType, str, str]] = {
    "operand-not-waited-for": (simulate, "behind = len(other) if own is beside", "behind = 0 if own is beside"),
    "ends-not-waited-for": (simulate, "ended, places = len(beside)", "ended, places = 0"),
    "gather-not-before-its-use": (simulate, "*(places[j] + 1 for j in order.waits(i))", ""),
    "contention-forgotten": (simulate, "multiprocessors - beside.cost.blocks", "multiprocessors"),
    "room-held-while-waiting": (simulate, "beside is None or self.left[1] is None", "beside is None"),
    "last-rank-ignored": (simulate, "len(there) == len(m[1])", "there"),
    "shortest-member": (simulate, "= max(call.cost.ns for call in calls)", "= min(call.cost.ns for call in calls)"),
    "step-of-the-first-rank": (simulate, "max(rank.ns for rank in self.ranks)", "self.ranks[0].ns"),
    "one-group-for-all": (simulate, "next(m for m in program.groups[group] if rank in m)", "tuple(range(program.ranks))"),
    "compute-stream-not-exposed": (simulate, "(self.left[0] is None or met)", "self.left[0] is None"),
    "elements-for-bytes": (simulated, "max(ref.type.nbytes for", "max(ref.type.size for"),
    "operand-of-a-gather": (simulated, "max(ref.type.nbytes for", "min(ref.type.nbytes for"),
    "flops-of-memory": (simulated, 'of = "nbytes" if kind == MEMORY', 'of = "flops" if kind == MEMORY'),
    "any-op": (simulated, "self._curves.get(op, ())", 'self._curves.get("all_reduce", ())'),
    "alone-for-graph": (simulated, 'if case["graph"]:', 'if not case["graph"]:'),
    "peer-for-ours": (simulated, 'if x["name"] == OURS)', 'if x["name"] != OURS)'),
    "all-calls-for-one": (simulated, "return ns / calls", "return ns"),
    "scaled-collectives": (simulated, "return Cost(ns, how.blocks", "return Cost(self.scale * ns, how.blocks"),
    "engines-keep-room": (simulated, 'how.algorithm == "engine" and', "False and"),
    "own-copy-forgotten": (simulated, "+ collectives.OWN_BLOCKS * apart", ""),
    "batch-of-one": (simulated, "program_for(of_gpus(cfg, ranks)", "program_for(cfg"),
    "sibling-not-told": (simulated, 'if r is not None and r["machine"] != own.key]', "if False]"),
    "one-not-scaled": (simulated, "rates.scale = one / raw if one is not None else", "rates.scale = 1.0 if one is not None else"),
    "efficiency-upside-down": (simulated, "return self.one / self.many.ns", "return self.many.ns / self.one"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_defects_turn_a_test_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the tests above that says so is enough."""
    module, find, replaced = FAULTS[name]
    path, made = Path(str(module.__file__)), dict[str, Any](__name__="planted")
    text = path.read_text(encoding="utf-8")
    assert text.count(find) == 1, find
    monkeypatch.setitem(sys.modules, "planted", types.ModuleType("planted"))  # dataclasses look for their module
    exec(compile(text.replace(find, replaced), str(path), "exec"), made)
    for own in ("simulate",) if module is simulate else ("predict",):
        monkeypatch.setattr(module, own, made[own])
    if module is simulate:
        monkeypatch.setattr(simulated, "simulate", made["simulate"])
    else:
        monkeypatch.setitem(globals(), "Rates", made["Rates"])
    for one_of in HELD:
        try:
            one_of()
        except (AssertionError, KeyError, AlphaError):
            return
    pytest.fail(f"{name} is not seen")
