"""What the parity gate allows, counted again element by element, and a leak that the fault gate has to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from alpha.backends.cpu.lib import Cpu
from alpha.gates import faults
from alpha.gates.tolerance import TILE, Allowance, _per_tile
from alpha.registry.cases import Refusal
from alpha.registry.gates import cases_of
from alpha.train.catalogue import catalogue
from alpha.types import Attrs


@pytest.mark.parametrize("naive", [0.0, 0.5])
def test_an_error_beyond_the_slack_is_weighed_by_the_plain_one_and_by_nothing_where_there_is_none(naive: float) -> None:
    want, slack = np.array([1.0, 2.0, np.inf, np.nan]), 0.25
    allowed = Allowance([want, np.array([3])], [np.full(4, slack), np.zeros(1)], [np.full(4, naive), np.zeros(1)], single=False)

    def ratio(*got: float, integer: int = 3) -> float:
        return allowed.ratio([np.array(got, np.float32), np.array([integer])], ["f32", "i32"])

    assert ratio(1, 2, np.inf, np.nan) == ratio(1.25, 1.75, np.inf, np.nan) == 0
    assert ratio(1, 2 - 0.375, np.inf, np.nan) == (0.375 / naive if naive else np.inf)
    for bad in ((np.nan, 2, np.inf, np.nan), (1, np.inf, np.inf, np.nan), (1, 2, 7, np.nan), (1, 2, -np.inf, np.nan), (1, 2, np.inf, 0)):
        assert ratio(*bad) == np.inf
    assert ratio(1, 2, np.inf, np.nan, integer=4) == np.inf


@pytest.mark.parametrize("size", [1, TILE, 2 * TILE - 1, 2 * TILE, 5 * TILE, 5 * TILE + 1, 6 * TILE - 1])
def test_a_tile_errs_as_it_and_its_neighbours_do(size: int) -> None:
    """Tiles of TILE elements, the last with what is left over; of fewer than two all are one."""
    error = np.random.default_rng(size).standard_exponential((size, 1)) ** 3
    count = max(1, size // TILE)
    ends = [*(i * TILE for i in range(count)), size]
    found = _per_tile(error)
    assert found.shape == error.shape
    for i in range(count):
        around = error[ends[max(0, i - 1)] : ends[min(count, i + 2)]]
        assert (found[ends[i] : ends[i + 1]] == around.max()).all()


@pytest.mark.parametrize(("leaks", "seen"), [
    ("", set()), ("what is no number", set()), ("everything", {"nan propagates", "inf propagates"})])
def test_what_is_no_number_may_not_leak(leaks: str, seen: set[str]) -> None:
    """A kernel of which each result takes a little of its neighbour's operand. One that takes what is no number alone may have met it with
    a weight of zero."""
    silu = catalogue()["silu.f32.cpu"]

    def binder(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        sound = silu.implementation(cpu, ins, outs, attrs)

        def run() -> None:
            near = np.roll(ins[0].reshape(-1), 1).reshape(ins[0].shape).copy()
            sound()
            taken = {"": 0.0, "what is no number": np.where(np.isfinite(near), 0.0, np.nan), "everything": 1e-3 * near}[leaks]
            outs[0][...] += taken
        return run

    record = faults.measure(replace(silu, implementation=binder))
    assert {case.name for case in cases_of(record) if isinstance(case, Refusal) and case.error} == seen
