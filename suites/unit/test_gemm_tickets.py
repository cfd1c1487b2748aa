"""Tiles that a product draws while it runs (kernels/gemm/tickets.cuh): the protocol, step by step in orders that chance gives, and what the
compiler makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from actors import Actor, play

from alpha.backends.cuda import lib
from alpha.backends.cuda.kernels.gemm import BUSY, CLUSTERS, COOPERATIVE, DEFERRED, PINGPONG, GemmConfig, GemmProblem, choose, prepare
from alpha.backends.cuda.kernels.matmul import CALLS, problem_of
from alpha.backends.cuda.lib import Gpu
from alpha.cuda_runtime import manifest, toolchain
from alpha.cuda_runtime.compile import compile_all
from alpha.cuda_runtime.memory import Arena, Span
from alpha.cuda_runtime.opcodes import opcodes
from alpha.errors import MachineError, ShapeError
from alpha.gates.device_code import audit as kernels_audit
from alpha.types import TensorType


@dataclass
class Barrier:
    """An mbarrier: a wait for a parity sees the phase that was last completed, and cannot tell it from the one two before."""

    arrivals: int
    phase: int = 0
    came: int = 0

    def arrive(self) -> None:
        self.came += 1
        if self.came == self.arrivals:
            self.phase, self.came = self.phase + 1, 0

    def completed(self, parity: int) -> bool:
        return (self.phase & 1) != parity


@dataclass
class Block:
    """What a CTA has in shared memory, and its walkers: producer, two consumers."""

    stages: int
    slots: int
    readers: int
    full: list[Barrier] = field(init=False)
    empty: list[Barrier] = field(init=False)
    ready: list[Barrier] = field(init=False)
    ticket: list[tuple[int, int]] = field(init=False)
    read: list[int] = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        self.full = [Barrier(2) for _ in range(self.stages)]  # its own arrival, and the peer's half of B
        self.empty = [Barrier(self.readers) for _ in range(self.stages)]
        self.ready = [Barrier(1) for _ in range(self.slots)]
        self.ticket = [(0, 0)] * self.slots
        self.read = [3] * self.slots


class Launch:
    """One launch. `steps`: of K in a tile; `late`: clusters that cannot begin before another has ended."""

    def __init__(self, *, config: GemmConfig, slots: int, units: int, clusters: int, steps: int, ahead: int, late: int, seed: int) -> None:
        self.config, self.slots, self.units, self.clusters, self.steps, self.ahead = config, slots, units, clusters, steps, ahead
        self.rng, self.counter = random.Random(seed), 0
        self.done: dict[tuple[int, int], list[int]] = {}  # (unit, CTA) -> consumers that computed it
        self.ended = [0] * clusters
        self.actors: list[Actor] = []
        for cluster in range(clusters):
            self.actors += self.cluster(cluster, cluster >= clusters - late)

    def cluster(self, cluster: int, late: bool) -> list[Actor]:
        readers = 2 if self.config.pingpong else 4
        blocks = [Block(self.config.stages, self.slots, readers) for _ in range(2)]
        wanted = Barrier(1)
        walkers = [self.producer(cluster, blocks, rank, wanted) for rank in range(2)]
        walkers += [self.consumer(cluster, blocks, rank, warpgroup) for rank in range(2) for warpgroup in range(2)]

        def begun(actor: Actor) -> Actor:
            if late:
                yield lambda: any(n == 7 for n in self.ended)
            yield from actor
            self.ended[cluster] += 1

        return [begun(a) for a in [*walkers, self.drawer(blocks, wanted)]]

    def draw(self) -> int:
        """atom.inc with units - 1."""
        old = self.counter
        self.counter = 0 if old >= self.units - 1 else old + 1
        return self.clusters + old

    def drawer(self, blocks: list[Block], wanted: Barrier) -> Actor:
        number = parity = 0
        if self.units <= self.clusters:
            return
        while True:
            yield lambda parity=parity: wanted.completed(parity)
            parity ^= 1
            unit = self.draw()
            for block in blocks:
                yield lambda: True
                slot = number % self.slots
                if block.read[slot] != 3:
                    raise AssertionError(f"ticket {block.ticket[slot][0]} is overwritten before all have read it")
                block.ticket[slot], block.read[slot] = (number, unit), 0
                block.ready[slot].arrive()
            number += 1
            if unit >= self.units:
                return

    def walk(self, cluster: int, block: Block) -> Iterator[Callable[[], bool] | int]:
        """The units of a walker, and what it waits for."""
        yield cluster
        number = 0
        while self.units > self.clusters:
            slot, parity = number % self.slots, number // self.slots & 1
            yield lambda slot=slot, parity=parity: block.ready[slot].completed(parity)
            got, unit = block.ticket[slot]
            assert got == number, f"ticket {got} is read for {number}"
            block.read[slot] += 1
            number += 1
            if unit >= self.units:
                return
            yield unit

    def producer(self, cluster: int, blocks: list[Block], rank: int, wanted: Barrier) -> Actor:
        at = 0
        for unit in self.walk(cluster, blocks[rank]):
            if not isinstance(unit, int):
                yield unit
                continue
            for step in range(self.steps):
                if rank == 0 and step == max(self.steps - self.ahead, 0) and self.units > self.clusters:
                    wanted.arrive()
                slot, parity = at % self.config.stages, 1 ^ (at // self.config.stages & 1)
                yield lambda slot=slot, parity=parity: blocks[rank].empty[slot].completed(parity)
                for block in blocks:
                    block.full[slot].arrive()
                at += 1

    def consumer(self, cluster: int, blocks: list[Block], rank: int, warpgroup: int) -> Actor:
        at = tile = 0
        block, stages = blocks[rank], self.config.stages
        for unit in self.walk(cluster, block):
            if not isinstance(unit, int):
                yield unit
                continue
            tile += 1
            if self.config.pingpong and (tile - 1) % 2 != warpgroup:
                at += self.steps
                continue
            if self.config.pingpong:
                yield lambda: block.turn == warpgroup
            for step in range(self.steps):
                slot, parity = at % stages, at // stages & 1
                yield lambda slot=slot, parity=parity: block.full[slot].completed(parity)
                if step:
                    self.release(blocks, at - 1)
                at += 1
            block.turn = 1 - warpgroup
            yield lambda: True
            self.release(blocks, at - 1)
            self.done.setdefault((unit, rank), []).append(warpgroup)

    def release(self, blocks: list[Block], at: int) -> None:
        for block in blocks:
            block.empty[at % self.config.stages].arrive()

    def run(self) -> None:
        """Until all have ended."""
        if not play(self.actors, self.rng):
            raise AssertionError("all wait")


def launch(config: GemmConfig, seed: int, less: int = 0) -> Launch:
    """One launch, drawn; `less` slots than the kernel has."""
    rng = random.Random(seed)
    clusters = rng.choice((1, 2, 3))
    return Launch(config=config, slots=config.stages + 3 - less, units=clusters + rng.choice((0, 1, 2, 7, 30)), clusters=clusters,
                  steps=rng.choice((1, 1, 2, 3, 9)), ahead=rng.choice((1, 2, 4, 8)), late=rng.randrange(clusters), seed=seed)


@pytest.mark.parametrize("config", [DEFERRED, PINGPONG, BUSY], ids=["deferred", "pingpong", "busy"])
def test_each_tile_is_computed_once_and_the_counter_is_zero_again(config: GemmConfig, seed: int) -> None:
    for i in range(60):
        one = launch(config, hash((seed, i)))
        one.run()
        each = [0] if config.pingpong else [0, 1]
        assert set(one.done) == {(unit, rank) for unit in range(one.units) for rank in range(2)}
        assert all(len(found) == len(each) and (config.pingpong or sorted(found) == each) for found in one.done.values())
        assert one.counter == 0


def test_one_slot_less_would_not_do() -> None:
    """Chance finds the ticket that is overwritten, so it would find one that the argument has overlooked."""
    found = 0
    for i in range(4000):
        one = Launch(config=PINGPONG, slots=PINGPONG.stages + 2, units=40, clusters=1, steps=1, ahead=1, late=0, seed=i)
        try:
            one.run()
        except AssertionError:
            found += 1
            break
    assert found


def test_drawing_costs_no_spill_and_keeps_every_wait() -> None:
    """Of each form the machine code with and without tickets: the one with is what is known, and holds no less that waits."""
    try:
        toolchain.find_nvcc(), toolchain.find_nvdisasm()
    except MachineError as error:
        pytest.skip(f"NOT_RUN: {error}")
    problem = GemmProblem(m=64, n=64, k=64, bias=True)
    fixed = [replace(c, ahead=0).sources(problem)[0] for c in (DEFERRED, PINGPONG)]
    drawn = [c.sources(problem)[0] for c in (DEFERRED, PINGPONG)]
    for before, after in zip(compile_all(fixed), compile_all(drawn)):
        assert after.binary_digest == manifest.binary_digest(after.source)
        used = after.resources["gemm"]
        assert (used.spill_stores, used.spill_loads, used.stack, used.registers) == (0, 0, 0, before.resources["gemm"].registers)
        assert kernels_audit.audit(after, opcodes(after)) == []
        counts = [kernels_audit.counts(opcodes(c), "gemm") for c in (before, after)]
        assert all(counts[1][name] >= n for name, n in counts[0].items())


def test_each_launch_has_a_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[_Page]()

    def page(nbytes: int, *, name: str) -> _Page:
        made.append(_Page(nbytes, (1 + len(made)) << 20))
        return made[-1]

    zeroed = list[Span]()
    monkeypatch.setattr(lib, "Arena", page)
    monkeypatch.setattr(lib, "fill", lambda span, byte: zeroed.append(span))
    n, constants = lib.COUNTER_PAGE_BYTES // 256, dict[Hashable, Any]()
    calls = [Gpu(SimpleNamespace(synchronize=lambda: None), constants=constants) for _ in range(3)]  # of one executor
    given = [calls[i % 3].counters(4 + 252 * (i % 2)) for i in range(2 * n + 1)]
    assert len({span.address for span in given}) == 2 * n + 1 and len(made) == 3
    assert {id(page) for page in constants.values()} == {id(page) for page in made}, "a page is given back while its counters are in use"
    assert [span.nbytes for span in zeroed] == 3 * [lib.COUNTER_PAGE_BYTES]
    assert all(any(z.address <= s.address < z.address + z.nbytes for z in zeroed) for s in given)
    problem = GemmProblem(m=64, n=64, k=64)
    with pytest.raises(ShapeError, match="counter"):
        prepare(problem, choose(problem), a=256, b=256, c=256)


class _Page(Arena):
    """In no memory."""

    def __init__(self, nbytes: int, address: int) -> None:
        self.name, self.nbytes, self.used, self.address = "page", nbytes, 0, address


def test_tickets_fit_beside_the_ring() -> None:
    for config in (DEFERRED, COOPERATIVE, PINGPONG, BUSY):
        assert config.ahead and replace(config, ahead=0).shared_bytes < config.shared_bytes <= 232_448
        assert (8 * (2 * config.stages + 2 * config.staging)) % 16 == 0, "tickets begin at a multiple of 16 bytes"


def test_determinism_repeats_a_product_of_each_form_that_draws() -> None:
    """More tiles than clusters, so that the clock decides who computes which; the speed gate alone saw a counter that was kept."""
    repeated = {}
    for name, draw in CALLS.repeated.items():
        operands, attrs = draw(np.random.default_rng(0))
        problem = problem_of("matmul", [TensorType(x.shape, dtype) for x, dtype in operands], attrs)
        repeated[name] = (choose(problem), choose(problem).tiles(problem)[2])
    assert {name: (c.defer, c.pingpong, c.ahead) for name, (c, _) in repeated.items() if c.ahead} == {
        name: (c.defer, c.pingpong, c.ahead) for name, c in (("drawn", PINGPONG), ("drawn-wide", DEFERRED), ("drawn-f32", COOPERATIVE),
                                                              ("split", COOPERATIVE))}
    assert all(tiles > CLUSTERS or config.owned for config, tiles in repeated.values() if config.ahead)
    split = {name: config for name, (config, _) in repeated.items() if config.split_units}
    assert {name: c.owned for name, c in split.items()} == {"split": True, "split-many": False}
    assert all(c.split_units > c.split_tiles and c.split_units % c.split_tiles for c in split.values()), "no run lies in two tiles"
