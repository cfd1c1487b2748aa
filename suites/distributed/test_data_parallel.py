"""The bit table of data parallel: ranks by ZeRO-1, as real processes over shared memory, and carried on by another number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.reference.executor import ReferenceExecutor
from alpha.comm.world import World
from alpha.gates.contracts.data_parallel import SHARDS, kernels, program
from alpha.gates.contracts.ranks.members import Members
from alpha.gates.contracts.reference import Batches, batches_of, references
from alpha.graph.plan import Program
from alpha.graph.state import Layout, StateLayout, flat_shards, reshard, whole
from alpha.optim.init import fill_initial

STEPS = 3
Shown = tuple[str, str, list[str]]
"""Program hash, sha256 of the parameters, and the numbers of every step in hex."""


def texts(name: str) -> list[Batches]:
    rng = np.random.default_rng(11)
    return [batches_of(references()[name], rng, SHARDS, 1) for _ in range(STEPS)]


def shown(p: Program, param: np.ndarray, numbers: list[Mapping[str, np.ndarray]]) -> Shown:
    held = np.concatenate([param[o : o + n] for o, n in p.states["param"].ranges()])
    return p.hash(), hashlib.sha256(held.tobytes()).hexdigest(), [np.asarray(x[k]).tobytes().hex() for x in numbers for k in sorted(x)]


def trained(world: World | None, name: str, ranks: int, zero: int) -> Shown:
    """One rank's run."""
    p, rank = program(name, ranks, zero), world.rank if world else 0
    if world is not None:
        world.add_groups(p.groups)
    with CpuExecutor(p, kernels(), world) as executor:
        fill_initial(executor.state("param"), p.states["param"], 3)
        if "shard" in p.plans:
            executor.run("shard")
        numbers = []
        for text in texts(name):
            for call in p.role(rank).schedule:
                out = executor.run(call.plan, text[call.shard, call.micro] if call.shard is not None and call.micro is not None else {})
            numbers.append({k: v.copy() for k, v in out.items()})
        return shown(p, executor.state("param"), numbers)


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    with Members() as started:
        yield started


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_processes_have_the_bits_of_one(members: Members, ranks: int, zero: int) -> None:
    _, *want = trained(None, "gpt", 1, 0)
    ended = members.run(trained, ranks, "gpt", ranks, zero)
    assert all(e.status == 0 and not e.error for e in ended), "\n".join(f"{i}: {e.error or e}" for i, e in enumerate(ended))
    assert all(list(e.result[1:]) == want for e in ended)
    assert len({e.result[0] for e in ended}) == 1, "ranks have one Program"


def lockstep(p: Program) -> ReferenceExecutor:
    return ReferenceExecutor(p, kernels(), mode="kernels")


def layout_of(p: Program, kind: str) -> Layout:
    layout = p.states[kind]
    if kind in p.sharded:
        return flat_shards(layout, p.ranks)
    one = whole(layout)
    return Layout(one.shapes, one.ranks * p.ranks)


def carried(before: Program, after: Program, left: ReferenceExecutor, right: ReferenceExecutor) -> None:
    """The state of one job to another, by boxes of named tensors."""
    for kind in ("param", "m", "v", "counter"):
        source = [left.state(rank, kind) for rank in range(before.ranks)]
        target = [right.state(rank, kind) for rank in range(after.ranks)]
        for x in target:
            x[...] = 0
        for c in reshard(layout_of(before, kind), layout_of(after, kind)):
            shape = [hi - lo for lo, hi in c.box]
            to, at = (np.lib.stride_tricks.as_strided(x[offset:], shape, [s * x.itemsize for s in strides])
                      for x, offset, strides in ((target[c.target], c.target_offset, c.target_strides),
                                                 (source[c.source], c.source_offset, c.source_strides)))
            to[...] = at


@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 1)), ((8, 1), (2, 0)), ((2, 0), (4, 1)), ((4, 1), (1, 0)), ((1, 0), (8, 1))])
def test_another_number_of_ranks_carries_on(before: tuple[int, int], after: tuple[int, int]) -> None:
    """Two steps of one job, the third of another: the bits of a job that was never disturbed."""
    _, *want = trained(None, "llama", 1, 0)
    first, second = program("llama", *before), program("llama", *after)
    left, right = lockstep(first), lockstep(second)
    for rank in range(first.ranks):
        for kind in first.states:
            left.state(rank, kind)[...] = 0
        fill_initial(left.state(rank, "param"), first.states["param"], 3)
    refresh(first, left)
    numbers: list[Mapping[str, np.ndarray]] = []
    for i, text in enumerate(texts("llama")):
        if i == 2:
            carried(first, second, left, right)
            refresh(second, right)
        numbers.append((left if i < 2 else right).step(lambda s, m, text=text: text[s, m])[0])  # type: ignore[misc]
    for rank in range(second.ranks):
        assert list(shown(second, right.state(rank, "param"), numbers)[1:]) == want


@pytest.mark.parametrize("zero", [0, 1])
def test_a_bad_rank_makes_all_refuse_the_step(zero: int) -> None:
    """An infinity in one rank's copy of the weights: no rank counts the step, no state changes but that copy."""
    p = program("gpt", 4, zero)
    ranks = lockstep(p)
    for rank in range(4):
        for kind in p.states:
            ranks.state(rank, kind)[...] = 0
        fill_initial(ranks.state(rank, "param"), p.states["param"], 3)
    refresh(p, ranks)
    kinds = ("m", "v", "counter", *(("master",) if zero else ("param",)))
    ranks.state(2, "param")[p.states["param"].offsets["head.norm.gain"]] = np.inf
    before = {(rank, kind): ranks.state(rank, kind).copy() for rank in range(4) for kind in kinds}
    text = texts("gpt")[0]
    with np.errstate(all="ignore"):
        found = ranks.step(lambda s, m: text[s, m])
    assert [int(out["finite"]) for out in found] == [0, 0, 0, 0]
    assert all(np.array_equal(ranks.state(*at), x) for at, x in before.items())


def refresh(p: Program, ranks: ReferenceExecutor) -> None:
    if "shard" in p.plans:
        ranks.run([[("shard", {})]] * p.ranks)


def test_cuts_are_smaller_by_the_number_of_ranks() -> None:
    layout = program("gpt", 8, 1).states["param"]
    assert isinstance(layout, StateLayout)
    cut, alone = program("gpt", 8, 1).arenas(3), program("gpt", 1).arenas()
    assert all(8 * cut[f"state.{kind}"] == alone[f"state.{kind}"] for kind in ("m", "v"))
