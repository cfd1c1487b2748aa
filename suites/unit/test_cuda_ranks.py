"""A rank's executor on emulated GPUs: real binders, channels and device code, compute by oracles, streams that are late or ahead."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_gpu import Stream, emulated, emulated_gpu
from emulated_peers import EACH, Memory, among
from planted import planted

import alpha
from alpha.backends.cuda import memory_check, sum_stages
from alpha.backends.cuda import ranks as cuda_rank
from alpha.backends.cuda.kernels import collectives
from alpha.backends.cuda.kernels.collectives import LARGE, TABLE, How
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.component import Catalogue
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.graph import capture
from alpha.cuda_runtime.peers import Peers
from alpha.cuda_runtime.priority import NODE_PRIORITIES, FirstStream
from alpha.gates.contracts import cuda_ranks
from alpha.gates.contracts.device_priority import WAVES, Rivals, Turn, judged
from alpha.graph.order import COMM
from alpha.graph.plan import Program
from alpha.passes import build
from alpha.registry.faults import Fault, broken
from alpha.train import engine

FAULTS = {f.id.removeprefix("cuda_ranks."): f for f in planted() if f.component == "executor.cuda_ranks"}

SEEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sum-not-waited-for", "operand-not-waited-for", "not-joined", "not-forked"),
                    (cuda_ranks.at_steps, ("uncaptured", "", "uncaptured", ""))),
    "streams-share-a-channel": (cuda_ranks.at_steps, ("",)),
    **dict.fromkeys(("stamps-of-one-end", "collectives-untold", "clock-of-its-own"), (cuda_ranks.at_told,)),
    **dict.fromkeys(("priority-left-in-the-stream", "priority-untold", "priority-of-any-stream"), (cuda_ranks.at_first,)),
    "plans-of-rank-0": (cuda_ranks.at_model, "gpt", 1),
    "looked-at-too-early": (cuda_ranks.at_steps, ("inspected",)),
    "waits-not-ended": (cuda_ranks.at_lost, "killed", 2.5), "who-waits-is-blamed": (cuda_ranks.at_waiting,),
    **dict.fromkeys(("last-piece-not-compared", "hashed-late", "hashes-of-the-step-before", "hashes-not-waited-for", "one-rank-ahead"),
                    (cuda_ranks.at_decided,)),
    "rubbish-taken": (cuda_ranks.at_lost, "absent", 2.0), "step-unsaid": (cuda_ranks.at_lost, "absent", 2.0),
}
"""Planted fault -> what rejects it here: a function and its arguments."""


@cache
def oracles() -> Catalogue:
    """The kernels of a rank, computed by oracles."""
    return emulated(filled())


filled, of_model = cuda_ranks.kernels, cuda_ranks.of_model


@cache
def built(name: str, ranks: int = 1, zero: int = 0) -> Program:
    """A model's Program, once for all tests and ranks: nothing writes into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ranks, "kernels", oracles)
        return of_model(name, ranks, zero)


@lru_cache(1)
def gpus(ranks: int) -> Memory:
    """Their memory, from test to test."""
    return Memory(ranks, EACH)


@pytest.fixture(scope="module", autouse=True)
def _given_back() -> Iterator[None]:
    yield
    gpus.cache_clear()


def on_emulated(peers: Peers, world: World, haste: int | None, fault: Fault | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` in a rank whose kernels are oracles. `haste`: streams run ahead by such draws; None: all are late. `fault`: is planted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ranks, "kernels", oracles)
        patch.setattr(cuda_ranks, "of_model", built)
        patch.setattr(Stream, "haste", None if haste is None else random.Random(f"{haste} {world.rank}"))
        if fault is not None:
            path = Path(alpha.__file__).parent / fault.file
            made: dict[str, Any] = {"__name__": "planted"}
            exec(compile(broken(fault, path.read_text(encoding="utf-8")), str(path), "exec"), made)
            for name in ("CudaRank", "Ranks"):
                if getattr(made.get(name), "__module__", "") == "planted":
                    patch.setattr(cuda_ranks, name, made[name])
            if fault.file == "comm/world.py":
                patch.setattr(World, "until", made["World"].until)
        return function(peers, world, *arguments)


def found(function: Callable[..., Any], *arguments: Any, haste: int | None = None, ranks: int = 2, fault: Fault | None = None,
          deadlines: Deadlines | None = None) -> list[Any]:
    """What a function returned in each rank, without the last one's where that is lost."""
    lost = function is cuda_ranks.at_lost
    if function is cuda_ranks.at_model:  # ranks are forks
        name, zero, *_ = arguments
        built(name), built(name, ranks, zero)
    limits = cuda_ranks.LIMITS if function is cuda_ranks.at_waiting or (lost and arguments[0] != "absent") else Deadlines(stall=60.0)
    return among(ranks, on_emulated, haste, fault, function, *arguments, kernels=nvcc.KERNELS, memory=gpus(ranks), deadlines=limits,
                 lost=lost)


ON_HOST = {name: f for name, f in FAULTS.items() if f.file == "train/engine.py"}
OF_MEMORY = {name: f for name, f in FAULTS.items() if f.file in ("backends/cuda/memory_check.py", "backends/cuda/sum_stages.py")}


def test_every_fault_is_seen_somewhere() -> None:
    assert SEEN.keys() == FAULTS.keys() - ON_HOST.keys() - OF_MEMORY.keys()


@pytest.mark.parametrize("name", ["", *ON_HOST])
def test_each_rank_takes_its_own_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name:
        made: dict[str, Any] = {"__name__": "planted"}
        exec(broken(ON_HOST[name], Path(engine.__file__).read_text(encoding="utf-8")), made)
        for own in ("take_device", "require_devices"):
            monkeypatch.setattr(cuda_ranks, own, made[own])
    case = dict(cuda_ranks.CASES["executor.cuda_ranks"]["faults"])["devices"]
    assert bool(case(np.random.default_rng(0)).error) == bool(name)


@pytest.mark.parametrize("name", ["", *OF_MEMORY])
def test_what_a_rank_takes_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name:
        both = (memory_check, ("needed", "check_memory")), (sum_stages, ("stages_of", "require_stages"))
        file, owns = next((m, owns) for m, owns in both if str(m.__file__).endswith(OF_MEMORY[name].file))
        made: dict[str, Any] = {"__name__": file.__name__}
        exec(broken(OF_MEMORY[name], Path(str(file.__file__)).read_text(encoding="utf-8")), made)
        for own in owns:
            monkeypatch.setattr(cuda_ranks, own, made[own])
    monkeypatch.setattr(cuda_ranks, "of_model", built)
    case = dict(cuda_ranks.CASES["executor.cuda_ranks"]["faults"])["memory"]
    assert bool(case(np.random.default_rng(0)).error) == bool(name)


@pytest.mark.parametrize("haste", [None, 1, 2])
def test_steps_have_the_promised_bits(haste: int | None, seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_steps, cuda_ranks.WAYS, seed % 1000, haste=haste if haste is None else haste + seed):
        assert not wrong and held == cuda_ranks.STEPS * (3 * len(cuda_ranks.WAYS) + 1) + 4, wrong


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum is one by copy engines."""
    sums = dict.fromkeys(collectives.SUMS, ((LARGE, How("engine", 2)),))
    monkeypatch.setattr(collectives, "TABLE", {most: {**rows, **sums} for most, rows in TABLE.items()})


@pytest.mark.parametrize("haste", [None, 4])
def test_steps_whose_sums_fork_have_the_promised_bits(engines: None, haste: int | None, seed: int) -> None:
    """A sum by engines has a stream beside its own, in a stream that is itself beside compute, in every way to run. It takes no packets, of
    which a channel counts the turns."""
    for wrong, held in found(cuda_ranks.at_steps, cuda_ranks.WAYS, seed % 1000, haste=haste if haste is None else haste + seed):
        wrong = [w for w in wrong if "turns of the stream" not in w]
        assert not wrong and held == cuda_ranks.STEPS * (3 * len(cuda_ranks.WAYS) + 1) + 4, wrong


def test_pairs_of_ranks_have_stages_of_their_own(engines: None, seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_pairs, seed % 1000, ranks=4, haste=seed):
        assert held and not [w for w in wrong if "turns of the stream" not in w], wrong


def _staged(peers: Peers, world: World) -> tuple[list[int], list[int], list[int]]:
    """Stages of the channels: made, counted; and bytes of all stages that were ever made."""
    made, plain = list[int](), Peers.arena

    def arena(peers: Peers, nbytes: int, *, name: str = "shared arena") -> Any:
        found = plain(peers, nbytes, name=name)
        made.extend([found.nbytes] * name.startswith("stage"))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "arena", arena)
        with cuda_rank.CudaRank(cuda_ranks.program(world.size), cuda_ranks.kernels(), world) as executor:
            counted = sum_stages.stages_of(executor.program, world.rank)
            return [c.staged for c in executor.channels.values()], sorted(counted.values()), made


def test_a_rank_makes_the_stages_that_are_counted(engines: None) -> None:
    """Each once, with room for the largest sum of its channel."""
    for made, counted, ever in found(_staged):
        assert sorted(made) == counted == sorted(ever) and all(made)


def _sums(program: Program) -> list[int]:
    """Where in their plans the sums of gradients stand."""
    return [i for plan in program.plans.values() for i, x in enumerate(plan.launches) if x.stream == COMM and x.phase == "reduce"]


@pytest.mark.parametrize(("name", "zero", "haste"), [("llama", 0, None), ("gpt", 1, 3)])
def test_sums_that_go_late_have_the_same_bits(name: str, zero: int, haste: int | None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run file's model; those of the gate are too small for any place but the first to hide a sum."""
    early = built(name, 2, zero)
    monkeypatch.setattr(build, "HIDES", {"cuda": 1e-3})
    built.cache_clear()
    try:
        assert _sums(built(name, 2, zero)) > _sums(early), "no sum goes later"
        test_a_model_has_the_bits_of_one_process(name, zero, haste, seed)
    finally:
        built.cache_clear()


@pytest.mark.parametrize(("name", "zero", "haste"), [("llama", 0, None), ("gpt", 0, 3), ("gpt", 1, None), ("llama", 1, 3)])
def test_a_model_has_the_bits_of_one_process(name: str, zero: int, haste: int | None, seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_model, name, zero, seed % 1000, haste=haste):
        assert not wrong and held == cuda_ranks.MODEL_STEPS, wrong


STALE_GROUP = Fault(id="stale-group", component="executor.cuda_ranks", gate="parity", mirrors=49, file="backends/cuda/ranks.py",
                    why="every rank sums with the first tuple of its group", find="if self.world.rank in t)", replace="if t)")
"""It shows among more ranks than the gate has."""


@pytest.mark.parametrize("fault", [None, STALE_GROUP], ids=["sound", "stale group"])
def test_pairs_of_ranks_sum_apart(fault: Fault | None, seed: int) -> None:
    try:
        said = [w for wrong, held in found(cuda_ranks.at_pairs, seed % 1000, ranks=4, fault=fault) for w in wrong or [""] * (not held)]
    except AssertionError as error:
        said = [str(error)]
    assert bool(said) == (fault is not None), said


def test_collectives_are_told_of(seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_told, seed % 1000):
        assert not wrong and held == cuda_ranks.STEPS, wrong


@pytest.mark.parametrize("what", cuda_ranks.LOST)
def test_a_rank_that_is_lost_is_named(what: str, seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_lost, what, 2.0 if what == "absent" else cuda_ranks.LONG_S, seed % 1000):
        assert held and not wrong, wrong


def test_parameters_that_differ_are_named(seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_decided, seed % 1000):
        assert held == 5 and not wrong, wrong


def test_collectives_come_first(seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_first, seed % 1000):
        assert held == 3 and not wrong, wrong


@pytest.mark.parametrize(("where", "flags", "said"), [(cuda_rank, 0, "graphs do not heed that collectives come first"),
                                                      (cuda_ranks, NODE_PRIORITIES, "whether graphs heed priorities cannot be told")])
def test_a_graph_shows_whether_it_heeds_priorities(where: Any, flags: int, said: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of the executor's graphs that do not come to the driver; a graph for comparison that heeds them as well."""
    monkeypatch.setattr(where, "capture", lambda record, stream, asked=0: capture(record, stream, flags))
    for wrong, _ in found(cuda_ranks.at_first, seed % 1000):
        assert len(wrong) == 1 and wrong[0].startswith(said), wrong


def test_which_kernel_came_first_is_judged_by_both_graphs() -> None:
    def turn(before: int) -> Turn:
        return Turn(blocks=3200, before=before, wave=100, began_ns=before, lasted_ns=3200)

    assert judged(turn(600), turn(3200)) == ""
    for asked, plain, said in ((3200, 3200, "do not heed"), (1600, 3200, "do not heed"), (600, 600, "cannot be told"),
                               (600, 1600, "cannot be told"), (99, 3200, "cannot be told")):
        assert said in judged(turn(asked), turn(plain)), (asked, plain)
    assert "600 of 3200 blocks" in judged(turn(600), turn(700)) and "700 of 3200 blocks" in judged(turn(600), turn(700))


def test_a_turn_is_read_from_the_stamps() -> None:
    with emulated_gpu():
        device = Device.open(0)
        stream, first = device.stream(), FirstStream()
        rivals = Rivals(device, stream, first)
        at = rivals._memory.address
        stamps = np.frombuffer((ctypes.c_uint8 * rivals._memory.nbytes).from_address(at), np.uint64)[: 2 * (rivals.blocks + 2)]
        stamps[...] = 5_000
        stamps[0], stamps[2 * rivals.blocks - 1], stamps[2], stamps[-2:] = 2_000, 9_000, 3_000, 4_000  # two blocks began before the short
        assert rivals.turn() == Turn(WAVES * 264, 2, 264, 2_000, 7_000)
        rivals.enqueue()  # streams by themselves have their priorities
        assert rivals.turn().before == rivals.wave
        rivals.free()


def test_who_waits_for_a_device_is_not_blamed() -> None:
    for wrong, held in found(cuda_ranks.at_waiting, 1):
        assert held and not wrong, wrong


@pytest.mark.parametrize("name", SEEN)
def test_planted_faults_are_caught(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are late see some, streams that run ahead others: one of several draws does."""
    monkeypatch.setattr(cuda_ranks, "SOUND_S", 5.0)
    monkeypatch.setattr(cuda_ranks, "BOUND_S", 3.0)
    monkeypatch.setattr(cuda_ranks, "AWAY_S", 6.0)
    said = ""
    for haste in (None, *range(seed, seed + 8)):
        try:
            said = "; ".join(w for wrong, _ in found(*SEEN[name], seed % 1000, haste=haste, fault=FAULTS[name]) for w in wrong)
        except AssertionError as error:
            said = str(error).strip().splitlines()[-1]
        if said:
            break
    print(f"{name}: haste {haste}: {said[:200]}")
    assert said, f"{name}: {FAULTS[name].why}, and nothing says so"


def test_a_sum_begins_behind_all_compute_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only behind what it needs: the schedule put it beside the launch that follows."""
    done, waited = list[int](), dict[int, list[int]]()

    class Recorded:
        """A fence that knows what compute had done when it was recorded."""

        def record(self, stream: str) -> None:
            self.behind = list(done)

        def hold(self, stream: str) -> None:
            if stream == "beside":
                done_before.append(self.behind)

    done_before: list[list[int]] = []
    monkeypatch.setattr(cuda_rank, "Fence", Recorded)
    plan = cuda_ranks.program().plans["beside"]
    late = (0, 2, 3, 5, 1, 4, *range(6, len(plan.launches)))  # two sums later than they could begin
    moved = (replace(plan.launches[i], after=tuple(late.index(j) for j in plan.launches[i].after)) for i in late)
    plan = replace(plan, launches=tuple(moved))
    rank: Any = object.__new__(cuda_rank.CudaRank)
    rank._calls, rank._inline, rank._stamping = {"beside": plan.launches}, False, False
    rank.stream, rank.beside = "compute", Beside("beside")

    def launched(i: int, stream: object) -> None:
        if plan.launches[i].stream == COMM:
            waited[i] = list(done_before[-1])
        else:
            done.append(i)

    for _, run in rank._on_streams(plan, [(x, partial(launched, i)) for i, x in enumerate(plan.launches)]):
        run(0)
    assert waited == {i: [j for j in range(i) if plan.launches[j].stream != COMM] for i, x in enumerate(plan.launches) if x.stream == COMM}
    assert len(waited[4]) == 4


class Beside(str):
    """The name of a stream, in place of one."""

    handle = 7
