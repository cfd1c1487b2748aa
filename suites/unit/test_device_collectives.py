"""Collectives among emulated GPUs: the device code on CPUs, a process for each GPU, held to the bits of the CPU's collectives.

Every planted fault of that code is rejected here, a few each session, all with `--all`; beside each stands its unbroken run.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated_gpu import Event, Stream
from emulated_peers import among
from planted import planted

from alpha.backends.cuda import launches
from alpha.backends.cuda.kernels import collectives
from alpha.backends.cuda.kernels.collectives import How
from alpha.backends.cuda.lib import Operand
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime import peers as arenas
from alpha.cuda_runtime.peers import Peers
from alpha.errors import GraphError, MachineError, RankError, ShapeError
from alpha.gates.adversarial import cuda_plant
from alpha.gates.contracts import device_perf, device_ranks
from alpha.registry import consistency
from alpha.registry.faults import Fault, broken
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue
from alpha.types import TensorType

SUPPORT = Path(__file__).parents[1] / "support"
BESIDE = tuple(Fault(file="device_ranks.toml", **table) for table in read_toml(SUPPORT / "device_ranks.toml")["fault"])
FAULTS = {f.id.removeprefix("cuda.collectives."): f for f in (*planted(), *BESIDE) if f.id.startswith("cuda.collectives.")}
FEW = (601, 8192)

EARLY = (None, 1, 2, 3, 4, 5)
"""Draws by which streams run ahead; None: all are late."""

Job = tuple[int, Callable[..., Any], Sequence[Any]]


def _bits(op: str, ranks: int = 2, counts: Sequence[int] = FEW) -> Job:
    return ranks, device_ranks.at_bits, (op, 7, counts)


def _streamed(op: str) -> Job:
    return 2, device_ranks.at_streamed, (op, 7, 4096)


SEEN: dict[str, Job] = {
    **{name: _streamed("all_reduce") for name in ("fence-missing", "stale-turn", "wrong-slot", "first-meeting-left-out", "torn-packet")},
    "last-read-not-waited-for": (2, device_ranks.at_streamed, ("reduce_scatter", 7, 16384)),
    "results-not-waited-for": (2, device_ranks.at_streamed, ("all_gather", 7, 16384)),
    "sequential-sum": _bits("all_reduce", 4, (601,)), "rounded-partials": _bits("all_reduce", 4, (601,)),
    "remainder-dropped": _bits("all_reduce"), "sum-for-average": _bits("all_reduce"), "nan-of-the-adder": _bits("all_reduce"),
    "piece-of-another": _bits("reduce_scatter"), "pulled-from-itself": _streamed("all_to_all"),
    "token-of-another-length": _bits("broadcast"), "sender-of-nothing": _bits("send"),
    "piece-of-its-neighbour": _bits("reduce_scatter", 4, (601,)), "next-member-alone": _bits("all_gather", 4, (8192,)),
    "handed-on-early": _bits("broadcast", 3), "groups-are-whole": (3, device_ranks.at_streamed, ("all_to_all", 7, 4096)),
    "waits-for-passers-by": _bits("send", 4, (601,)), "rounds-with-passers-by": _bits("send", 3, (601, 8192)),
    "first-two-meet": (4, device_ranks.at_slow, ("barrier", 7)),
    **{name: (2, device_ranks.at_absent, (op, 7, 0.6)) for name, op in (
        ("abort-unseen", "all_reduce"), ("abort-not-set", "all_reduce"), ("names-itself", "send"), ("record-of-another-op", "all_gather"))},
    **{name: _streamed("all_reduce") for name in ("part-added-early", "part-met-early", "part-handed-on-early", "engines-end-unmet")},
    "side-not-joined": _streamed("reduce_scatter"), "stage-of-another": _streamed("reduce_scatter"),
    **{name: _bits("all_reduce") for name in ("parts-leave-a-gap", "parts-overlap", "parts-beyond-the-end")},
    "stage-too-small": (2, device_ranks.at_grown, ("all_reduce", 7)), "slots-overlap": _bits("all_reduce", 4, (601,)),
    "whole-pieces-late": (3, device_ranks.at_streamed, ("all_reduce", 7, 16384)),
    "passers-by-tell-less": _bits("send", 3, (8192,)),
    "barrier-alone": (2, device_ranks.at_slow, ("barrier", 7)),
}
"""Fault -> the job that rejects it: ranks, function, arguments."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that stand for GPUs wait for processors."""
    monkeypatch.setattr(device_ranks, "SOUND_S", 120.0)


def _ahead(peers: Peers, world: World, haste: int | None, fault: Fault | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """A function in a rank whose streams run ahead by such draws, with a fault in the host's code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "haste", None if haste is None else random.Random(f"{haste} {world.rank}"))
        if fault is not None:
            made = ModuleType(collectives.__name__)
            exec(compile(broken(fault, Path(str(collectives.__file__)).read_text(encoding="utf-8")), fault.file, "exec"), made.__dict__)
            patch.setattr(device_ranks, "collectives", made)
            patch.setattr(device_ranks, "Channel", made.Channel)
        return function(peers, world, *arguments)


def wrong(job: Job, kernels: Path = nvcc.KERNELS, haste: int | None = None, fault: Fault | None = None) -> str:
    """What a job found, '' for nothing; the words of a rank that failed."""
    ranks, function, arguments = job
    try:
        found = among(ranks, _ahead, haste, fault, function, *arguments, kernels=kernels, deadlines=Deadlines(stall=60.0))
        return "; ".join(w for each, *_ in found for w in each)
    except AssertionError as error:
        return str(error).strip().splitlines()[-1]


def drawn(config: pytest.Config, seed: int, names: Sequence[str], n: int) -> list[str]:
    return list(names) if config.getoption("--all") else random.Random(f"{seed} {names}").sample(list(names), n)


def test_every_fault_is_seen_somewhere() -> None:
    assert SEEN.keys() == FAULTS.keys()
    assert {f.component for f in FAULTS.values()} == {c.id for c in catalogue() if c.profile == "device_collective"}


def test_bits(pytestconfig: pytest.Config, seed: int) -> None:
    """Of every op at some time, each algorithm, type and count; among three, whose tree is no full one, too."""
    for op in drawn(pytestconfig, seed, device_ranks.OPS, 1):
        for haste in (None, seed):
            assert wrong((random.Random(seed).choice((2, 3)), device_ranks.at_bits, (op, seed % 1000, FEW)), haste=haste) == ""


def test_faults_are_rejected_over_emulated_device_code(pytestconfig: pytest.Config, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that hangs on time is tried again, three times in all; one in the host's code with streams that are late or run ahead."""
    for name in drawn(pytestconfig, seed, sorted(FAULTS), 1):
        monkeypatch.setattr(device_ranks, "SOUND_S", 120.0)
        fault, early = FAULTS[name], (None,) * 3 if FAULTS[name].source else EARLY
        assert wrong(SEEN[name], haste=random.Random(f"{seed} {name}").choice(early)) == "", f"the unbroken run beside {name}"
        monkeypatch.setattr(device_ranks, "SOUND_S", 5.0)  # a fault may keep a member waiting
        found, haste, host = "", None, None if fault.source else fault
        with cuda_plant.overlay(fault) if fault.source else nullcontext(nvcc.KERNELS) as kernels:
            for haste in early:
                if found := wrong(SEEN[name], kernels, haste, host):
                    break
        print(f"{name}: haste {haste}: {found[:200]}")
        assert found, f"{name}: {FAULTS[name].why}, and nothing says so"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_by_engines(ranks: int, pytestconfig: pytest.Config, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place and not, one after the other, from graphs, at other addresses, with a stage that grows; streams are late or ahead."""
    plain = device_ranks.hows
    monkeypatch.setattr(device_ranks, "hows", lambda *of: [how for how in plain(*of) if how.algorithm == "engine"])
    for op in drawn(pytestconfig, seed + ranks, collectives.SUMS, 1):
        for function, more in (("bits", ((1, 31, 601, 8192),)), ("streamed", (4096,)), ("repeated", (12,)), ("adjoint", ()), ("grown", ())):
            haste = random.Random(f"{seed} {op} {function}").choice((None, seed))
            found = wrong((ranks, getattr(device_ranks, f"at_{function}"), (op, seed % 1000, *more)), haste=haste)
            assert found == "", f"{op}, {function}, haste {haste}"


def test_a_sum_by_eight_engines(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many members as a host has: another tree, more whole pieces."""
    monkeypatch.setattr(device_ranks, "hows", lambda *of: [How("engine", 1)])
    assert wrong((8, device_ranks.at_streamed, ("all_reduce", seed % 1000, 512)), haste=seed) == ""


def _default(peers: Peers, world: World, count: int) -> list[str]:
    """An exchange between two of the members, by the table, and that the next call is right."""
    bench, wrong = device_ranks.Bench(peers), list[str]()
    for root in range(bench.channel.size):
        wrong.append(device_ranks.one(bench, "send", "f32", count, None, seed=root))
    return [*wrong, device_ranks.one(bench, "all_reduce", "f32", 601, None)]


def test_members_pass_by_whatever_the_pair_takes() -> None:
    """The table takes packets for the one, copies for the other; who passes by is told neither."""
    for count, algorithm in ((601, "packets"), (200_000, "direct")):
        assert collectives.choose("send", 4 * count, 4).algorithm == algorithm
        assert among(4, _default, count, kernels=nvcc.KERNELS, deadlines=Deadlines(stall=60.0)) == [[""] * 5] * 4


def _at_speed(peers: Peers, world: World, *arguments: Any) -> Any:
    """With kernels and events of emulated GPUs. An event knows no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_perf, "Kernel", launches.Kernel)
        patch.setattr(device_perf, "compile_kernel", launches.compile_kernel)
        patch.setattr(Event, "time_since", lambda event, earlier: 1.0, raising=False)
        return device_perf.at_speed(peers, world, *arguments)


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_and_probes_of_the_perf_gate_run(ranks: int, pytestconfig: pytest.Config, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every op, also where a probe moves more than an operand: an emulated driver refuses to copy beyond an allocation. Timed calls are
    held to the row."""
    calls = {"short": 2, "long": 1}
    for name, value in {"IN_GRAPH": calls, "REPLAYS": calls, "BLOCKS": 1, "HOPS": 2, "COPIES": 1}.items():
        monkeypatch.setattr(device_perf, name, value)
    monkeypatch.setattr(arenas, "WHOLE", 1 << 16)
    for op in ("all_reduce", *drawn(pytestconfig, seed, (*device_ranks.OPS[1:], "receive", "barrier"), 2)):
        for name, nbytes in (("short", 1 << 10), ("long", 1 << 20)) if op != "barrier" else (("short", 0),):
            found = among(ranks, _at_speed, op, name, nbytes, seed % 1000, True, kernels=nvcc.KERNELS, deadlines=Deadlines(stall=60.0))
            assert [wrong for _, wrong in found] == [""] * ranks
            assert {tuple(times) for times, _ in found} == {("calls", "hop", "copy")[: 3 if name == "long" else 2]}


def test_a_case_says_what_went_wrong() -> None:
    """What broke and what came, of a rank's traceback or of an error's words, and not the advice behind it."""
    error = MachineError("the driver call x failed", came="CUDA_ERROR_INVALID_VALUE (1): invalid argument", do="check grid, block")
    try:
        raise error
    except MachineError:
        text = traceback.format_exc()
    expected = "the driver call x failed came: CUDA_ERROR_INVALID_VALUE (1): invalid argument"
    assert device_perf.said(str(error)) == expected and device_perf.said(text) == f"MachineError: {expected}"
    assert device_perf.said("Traceback\n  File\nMemoryError\n") == "MemoryError" and device_perf.said("") == ""


def _renewed(peers: Peers, world: World) -> list[int]:
    """Packets of the first block's slots whose flag is of a turn before the renewal, after a few short calls beyond it."""
    bench = device_ranks.Bench(peers)
    bench.channel.begin_at(0xFEFFFFFD)
    made = collectives.all_reduce(bench.channel, bench.x.address, bench.y.address, 8, "f32", how=How("packets", 1))
    left = []
    for _ in range(5):
        bench.run(made)
        flags = bench.channel.flags(0, 1 - bench.channel.me)
        left.append(int((flags < 0xFF000000).sum()) if flags.dtype == np.uint32 else -1)
    return left


def test_every_position_is_renewed() -> None:
    """Every 2^24 turns, so that no flag of a turn 2^32 ago can be taken for one of today."""
    for left in among(2, _renewed, kernels=nvcc.KERNELS):
        assert left[0] > 0, "before the renewal short calls leave old flags"
        assert left[-1] == 0, f"after it {left} old flags are left"


def _wraps(peers: Peers, world: World) -> tuple[list[str], int]:
    """Calls while the counts pass 2^32."""
    bench = device_ranks.Bench(peers)
    bench.channel.begin_at(0xFFFFFFFD)
    ways = [How("packets", 1), How("direct", 2)]
    return [w for i in range(6) for how in ways if (w := device_ranks.one(bench, "all_reduce", "f32", 601, how, seed=i))], 12


def test_counts_wrap() -> None:
    assert wrong((2, _wraps, ())) == ""


def test_a_member_that_does_not_come_is_named(pytestconfig: pytest.Config, seed: int) -> None:
    for op in drawn(pytestconfig, seed, (*device_ranks.OPS, "receive", "barrier"), 1):
        assert wrong((2, device_ranks.at_absent, (op, 7, 1.0))) == ""


def _disagree(peers: Peers, world: World) -> list[str]:
    """What the binders say of calls that do not fit, and that the next call is right."""
    bench = device_ranks.Bench(peers)
    c, x, y = bench.channel, bench.x.address, bench.y.address
    said = []
    attempts: list[Callable[[], object]] = [
        partial(collectives.all_reduce, c, x, y, 600 + c.me, "f32"),
        partial(collectives.all_reduce, c, x, y, 600, "f32", reduce=("sum", "average")[c.me]),
        partial(collectives.broadcast, c, x, y, 600, "f32", root=c.me),
        partial(collectives.all_reduce, c, x, y, 600, "f32", how=How("star")),
        partial(collectives.all_reduce, c, x, y, 600, "f32", how=How("packets", 65)),
        partial(collectives.all_to_all, c, x, x, 600, "f32", how=How("direct")),
        partial(collectives.all_reduce, c, x, y, 600, "f32", how=How("engine", parts=0)),
        partial(collectives.reduce_scatter, c, x, y, 601, "f32", how=How("engine")),
        partial(collectives.all_reduce, c, 64, y, 600, "f32"),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("")
        except (GraphError, ShapeError) as error:
            said.append(str(error).splitlines()[0])
    return [*said, device_ranks.one(bench, "all_reduce", "f32", 601, How("packets", 1))]


def test_calls_that_do_not_fit_are_refused() -> None:
    for said in among(2, _disagree, kernels=nvcc.KERNELS):
        assert said == ["members make different collectives"] * 3 + [
            "all_reduce has no such algorithm", "a collective's launch", "an exchange in place wants packets",
            "all_reduce by engines", "engine sums want pieces of whole vectors", "peers see shared arenas alone", ""]


def _unproved(peers: Peers, world: World) -> str:
    """Memory of which rank 0 maps the wrong place is refused by all, with both ranks' names."""
    plain = peers._open
    if peers.rank == 0:
        peers._open = lambda raw, rank: plain(raw, rank) + 4096  # type: ignore[method-assign]
    try:
        peers.arena(1 << 20)
    except Exception as error:
        return str(error)
    return ""


def test_memory_that_is_not_where_it_seems_is_refused() -> None:
    for said in among(2, _unproved, kernels=nvcc.KERNELS):
        assert "GPUs do not share memory" in said and "what rank 0 wrote does not arrive at rank 1" in said


def _checked(peers: Peers, world: World) -> tuple[int, str]:
    bench = device_ranks.Bench(peers, 0.3)
    made = collectives.barrier(bench.channel)
    if peers.rank == 0:
        try:
            bench.run(made)
        except RankError as error:
            return error.rank, error.op
    return -1, ""


def test_the_error_names_rank_and_op() -> None:
    assert among(2, _checked, kernels=nvcc.KERNELS)[0] == (1, "barrier")


def operand(address: int, shape: tuple[int, ...]) -> Operand:
    return Operand(address, TensorType(shape, "bf16"))


@pytest.mark.parametrize("op, attrs, ins, outs, told", [
    ("all_reduce", {"reduce": "average"}, 12, 12, ((16, 32, 12, "bf16"), {"reduce": "average"})),
    ("reduce_scatter", {"reduce": "sum"}, 12, 6, ((16, 32, 6, "bf16"), {"reduce": "sum"})),
    ("all_gather", {}, 6, 12, ((16, 32, 6, "bf16"), {})),
    ("broadcast", {"root": 1}, 12, 12, ((16, 32, 12, "bf16"), {"root": 1})),
    ("all_to_all", {}, 12, 12, ((16, 32, 6, "bf16"), {})),
    ("send", {"to": 1}, 12, 0, ((16, 12, "bf16"), {"to": 1})),
    ("receive", {"source": 1}, 0, 12, ((32, 12, "bf16"), {"source": 1})),
    ("barrier", {}, 0, 0, ((), {})),
])  # fmt: skip
def test_a_binder_makes_the_collective_of_its_node(op: str, attrs: dict[str, object], ins: int, outs: int, told: object,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are of what a member sends or gets as its own piece; a group without a channel, or of another size, is refused."""
    seen = list[object]()
    monkeypatch.setattr(collectives, op, lambda channel, *given, **named: seen.append((given, named)))
    (bind,) = (c.implementation for c in collectives.KERNELS if c.id == f"{op}.sm90")
    gpu = SimpleNamespace(channels={"dp": SimpleNamespace(size=2)})
    sides = [operand(16, (ins,))] * bool(ins), [operand(32, (outs,))] * bool(outs)
    bind(gpu, *sides, {"group": "dp", "size": 2, **attrs})
    assert seen == [told]
    for wrong in ({"group": "dp", "size": 3}, {"group": "tp", "size": 2}):
        with pytest.raises(GraphError):
            bind(gpu, *sides, {**wrong, **attrs})


def test_a_share_is_the_one_that_the_judge_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of uneven blocks the median counts, as for kernels: the merge gate takes another share for forged."""
    times = {"calls": [100.0, 110.0, 150.0, 160.0], "hop": [40.0, 50.0], "copy": [90.0, 95.0]}
    other = {arm: [t + 7 for t in blocks] for arm, blocks in times.items()}
    monkeypatch.setattr(device_perf, "job", lambda *args: [SimpleNamespace(rank=None, result=(t, "")) for t in (times, other)])
    record = device_perf.measure(catalogue()["all_reduce.sm90"], tries=1)
    on_gpus = replace(record, machine="cuda_sm90_H200x2-nvlink", environment={**record.environment, "seconds": "1"})
    assert [case["share"] for case in on_gpus.cases] == [round(97 / 137, 4)] * 2
    assert not consistency.wrong_in(on_gpus, catalogue())
    for share in (round(97 / 107, 4), round(97 / 167, 4)):  # by the fastest, by the slowest
        forged = replace(on_gpus, cases=[{**case, "share": share} for case in on_gpus.cases])
        assert consistency.wrong_in(forged, catalogue())
