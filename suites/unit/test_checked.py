"""`machine.debug = "check"`: each collective is held against its row, and the member whose result is another one is named on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.executor import RankCpu
from alpha.backends.cpu.observe import ObservedWorkers
from alpha.comm.checked import CHECKED, checked
from alpha.comm.world import WORLD, World
from alpha.component import Catalogue
from alpha.errors import RankError
from alpha.gates.contracts.ranks.members import in_threads
from alpha.train.catalogue import catalogue

SIZE, COUNT = 3, 12
Plant = Callable[[int, np.ndarray, np.ndarray], None]


def attributes(op: str) -> dict[str, object]:
    found: dict[str, object] = {"group": WORLD, "size": SIZE}
    return found | ({"reduce": "sum"} if op in ("all_reduce", "reduce_scatter") else {"root": 1} if op in ("broadcast", "reduce") else {})


def run(op: str, plant: Plant) -> list[Any]:
    """One collective of step 5 among three ranks; `plant` (rank, operand, result) spoils what the plain kernel gave."""
    plain = catalogue()[f"{op}.cpu"]

    def spoilt(cpu: Any, ins: Any, outs: Any, attrs: Any) -> Callable[[], None]:
        call = plain.implementation(cpu, ins, outs, attrs)

        def spoil() -> None:
            call()
            plant(cpu.world.rank, ins[0], outs[0])
        return spoil

    kernels = Catalogue()
    kernels.add(replace(plain, implementation=spoilt))

    def body(world: World) -> None:
        world.step, world.place.source = 5, "gpt.py:7"
        x = np.random.default_rng(world.rank).standard_normal(COUNT) * 10.0 ** np.arange(COUNT)
        out = np.zeros({"reduce_scatter": COUNT // SIZE, "all_gather": COUNT * SIZE}.get(op, COUNT))
        workers = ObservedWorkers(1)
        try:
            cpu = RankCpu(workers, np.empty(0, np.uint8), world)
            checked(kernels)[f"{op}.cpu"].implementation(cpu, [x], [out], attributes(op))()
        finally:
            workers.close()

    return in_threads(SIZE, body)


@pytest.mark.parametrize("op", CHECKED)
def test_sound_collectives_pass(op: str) -> None:
    assert run(op, lambda rank, x, y: None) == [None] * SIZE


def _own_operand(rank: int, x: np.ndarray, y: np.ndarray) -> None:
    if rank == 2:
        y[:] = np.resize(x, y.shape)


def _last_bit(rank: int, x: np.ndarray, y: np.ndarray) -> None:
    if rank == 2:
        y.view(np.int64)[-1] ^= 1


def _stale(rank: int, x: np.ndarray, y: np.ndarray) -> None:
    if rank == 2:
        y[:] = 0.0


@pytest.mark.parametrize("plant, op", [(plant, op) for plant in (_own_operand, _last_bit, _stale) for op in CHECKED
                                       if (plant, op) != (_stale, "reduce")])  # zeros are what a member beside the root owes
def test_a_rank_with_other_bits_is_named_on_all(op: str, plant: Plant) -> None:
    for error in run(op, plant):
        assert isinstance(error, RankError) and (error.rank, error.op, error.step) == (2, op, 5), error
        assert f"{op} of step 5 gave rank 2 other bits" in str(error) and "gpt.py:7" in str(error)


def test_nothing_else_is_touched() -> None:
    """Without it the kernels are the plain ones: it costs nothing. With it only those that are compared are others."""
    plain = catalogue()
    others = {c.id for c in checked(plain) if plain[c.id] is not c}
    assert others == {f"{op}.cpu" for op in CHECKED}
