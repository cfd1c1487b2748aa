"""The benchmark of collectives among processes, without any: what the rule of algorithms costs, from made-up times."""

from __future__ import annotations

import math

import pytest

from alpha.bench.comm import Map, Result, Row, Seconds

RULE = [(0, "direct"), (1024, "ring")]
"""The ring from 1 KiB on."""


def result(op: str, ranks: int, times: dict[str, dict[int, float]]) -> Result:
    rows = [Row(f"{op} {name}", fastest=fastest) for name, fastest in times.items()]
    return Result(ranks, Seconds(1.0, 1.0), Seconds(1.0, 1.0), rows, {op: RULE}, Map([0] * ranks, [], [], {}))


@pytest.mark.parametrize(("op", "ranks", "limit"), [("all_gather", 2, 2048), ("all_gather", 4, 4096), ("reduce_scatter", 4, 1024)])
def test_the_rule_is_asked_by_what_a_rank_gives(op: str, ranks: int, limit: int) -> None:
    """A gather's operand is a rank's piece; the size of a case is that of the whole, as it is with the other ops."""
    below = result(op, ranks, {"direct": {limit // 2: 2.0}, "ring": {limit // 2: 1.0}})
    assert below.price(op) == 2.0
    at = result(op, ranks, {"direct": {limit: 2.0}, "ring": {limit: 3.0}})
    assert at.price(op) == 1.5


def test_the_price_is_the_worst_of_all_sizes_and_none_without_every_algorithm() -> None:
    times = {"direct": {512: 1.0, 8192: 1.0}, "ring": {512: 0.5, 8192: 3.0}}
    assert result("all_gather", 2, times).price("all_gather") == 3.0
    assert math.isnan(result("all_gather", 2, {"direct": times["direct"]}).price("all_gather"))
