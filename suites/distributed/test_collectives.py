"""Collectives among real processes: every op, type, count, algorithm and number of members has the bits that its row promises.

The members' functions run in the processes of suites/support/members.py and return what was wrong, as text.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from alpha.bench import comm, command
from alpha.comm import collectives
from alpha.comm.links import measure
from alpha.comm.world import WORLD, World
from alpha.errors import GraphError, InputError, ShapeError
from alpha.gates.contracts.ranks import calls
from alpha.gates.contracts.ranks.calls import ALGORITHMS, COUNTS, DTYPES, OPS, drawn, one, summed
from alpha.gates.contracts.ranks.members import Ended, Members
from alpha.ops.collectives import promised
from alpha.report import curves
from alpha.types import NUMPY

PAYLOAD = 4096


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    with Members() as started:
        yield started


def sound(ended: list[Ended]) -> list[object]:
    """What the members returned, when all ended well."""
    assert all(e.status == 0 and not e.error for e in ended), "\n".join(f"{i}: {e}" for i, e in enumerate(ended))
    return [e.result for e in ended]


@contextmanager
def remembered() -> Iterator[None]:
    """Operands and what the rows promise of them are made once in a member, not anew for each algorithm, in place and not."""
    operands: dict[object, np.ndarray] = {}
    results: dict[object, object] = {}

    def operand(rng: np.random.Generator, dtype: str, count: int, index: int) -> np.ndarray:
        key = dtype, count, index, rng.bit_generator.seed_seq.entropy  # type: ignore[attr-defined]
        if key not in operands:
            operands[key] = drawn(rng, dtype, count, index)
            operands[key].flags.writeable = False
        return operands[key]

    def result(row: Any, ins: list[tuple[np.ndarray, ...]], types: object, attrs: dict[str, object]) -> object:
        key = row.name, *(id(x) for x, in ins), str(types), *sorted(attrs.items())
        if key not in results:
            results[key] = promised(row, ins, types, attrs)  # type: ignore[arg-type]
        return results[key]

    with mock.patch.object(calls, "drawn", operand), mock.patch.object(calls, "promised", result):
        yield


def sweep(world: World, dtype: str) -> list[str]:
    with remembered():
        return _sweep(world, dtype)


def _sweep(world: World, dtype: str) -> list[str]:
    group, wrong = world.group(WORLD), []
    for op in OPS:
        for reduce in ("sum", "average") if op in ("all_reduce", "reduce_scatter") else ("sum",):
            for count in COUNTS:
                for algorithm in ALGORITHMS.get(op, ("",)):
                    for in_place in (False, True):
                        if summed(op, dtype, reduce):
                            wrong.append(one(group, op, dtype, count, algorithm=algorithm, reduce=reduce, in_place=in_place))
    return [w for w in wrong if w]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_bits_of_every_op_type_count_and_algorithm(members: Members, size: int, dtype: str) -> None:
    for found in sound(members.run(sweep, size, dtype, payload_bytes=PAYLOAD, slots=2)):
        assert found == []


def alone(world: World) -> list[str]:
    return [w for dtype in DTYPES for w in sweep(world, dtype)]


def test_a_world_of_one_is_a_copy(members: Members) -> None:
    assert sound(members.run(alone, 1, payload_bytes=PAYLOAD)) == [[]]


def exchanges(world: World) -> list[str]:
    """Every pair sends both ways, beside collectives of the whole group, which count their calls apart."""
    group, wrong = world.group(WORLD), []
    for dtype in DTYPES:
        for count in COUNTS:
            for low in range(group.size):
                for high in range(low + 1, group.size):
                    if group.index not in (low, high):
                        continue
                    sent = {i: drawn(np.random.default_rng((count, i)), dtype, count, i) for i in (low, high)}
                    other, out = low + high - group.index, np.empty(count, NUMPY[dtype])
                    for place in (low, high):
                        if group.index == place:
                            collectives.send(group, sent[place], to=other, dtype=dtype)
                        else:
                            collectives.receive(group, out, source=place, dtype=dtype)
                    if out.tobytes() != sent[other].tobytes():
                        wrong.append(f"{other} to {group.index}: {dtype} {count}")
            wrong.append(one(group, "all_reduce", "f32", count, seed=count))
    return [w for w in wrong if w]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_send_and_receive(members: Members, size: int) -> None:
    for found in sound(members.run(exchanges, size, payload_bytes=PAYLOAD)):
        assert found == []


def grouped(world: World) -> list[str]:
    world.add_groups({"rows": [(0, 1, 2), (3, 4, 5)], "columns": [(0, 3), (4, 1), (2, 5)], "odd": [(5, 0, 3, 1), (2,), (4,)]})
    wrong = []
    for seed in range(20):
        for name in ("rows", "columns", WORLD, "odd"):
            wrong.append(one(world.group(name), "all_reduce", "f32", 601, seed=seed))
            wrong.append(one(world.group(name), "all_gather", "i64", 31, seed=seed))
    return [w for w in wrong if w]


def test_groups_part_the_ranks_and_do_not_meet(members: Members) -> None:
    for found in sound(members.run(grouped, 6, payload_bytes=PAYLOAD)):
        assert found == []


def at_random(world: World, calls: int, seed: int) -> list[str]:
    """Back to back, without a barrier, everything drawn from one seed on all members; now and then a member is late."""
    group, wrong = world.group(WORLD), []
    rng, own = np.random.default_rng(seed), np.random.default_rng((seed, world.rank))
    for i in range(calls):
        op, dtype = OPS[rng.integers(len(OPS))], DTYPES[rng.integers(len(DTYPES))]
        count, reduce = int(rng.integers(0, 3000)), ("sum", "average")[rng.integers(2)]
        algorithms = ALGORITHMS.get(op, ("",))
        algorithm, in_place = algorithms[rng.integers(len(algorithms))], bool(rng.integers(2))
        if own.random() < 0.05:
            np.sort(own.standard_normal(int(own.integers(1, 100_000))))
        if summed(op, dtype, reduce):
            wrong.append(one(group, op, dtype, count, algorithm=algorithm, reduce=reduce, in_place=in_place, seed=i))
    return [w for w in wrong if w]


@pytest.mark.parametrize("size", [2, 4, 6])
def test_back_to_back_in_random_order(members: Members, size: int) -> None:
    for found in sound(members.run(at_random, size, 200, size, payload_bytes=PAYLOAD, slots=2)):
        assert found == []


def held(world: World) -> list[str]:
    """In turns each member comes late; nobody leaves a barrier before it has come."""
    group, wrong = world.group(WORLD), []
    for late in range(2 * group.size):
        if late % group.size == group.index:
            time.sleep(0.02)
        own, every = np.array([time.monotonic(), 0.0]), np.empty((group.size, 2))
        collectives.barrier(group)
        own[1] = time.monotonic()
        collectives.all_gather(group, own, every)
        if every[:, 0].max() > every[:, 1].min():
            wrong.append(f"round {late}: one left {every[:, 0].max() - every[:, 1].min():.3f} s before the last one came")
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_barrier_holds_everyone(members: Members, size: int) -> None:
    for found in sound(members.run(held, size)):
        assert found == []


def unordered(world: World) -> list[bytes]:
    group = world.group(WORLD)
    found = []
    for count in COUNTS:
        x = drawn(np.random.default_rng((count, world.rank)), "f32", count * group.size, 0)
        out, piece = np.empty_like(x), np.empty(count, np.float32)
        collectives.all_reduce(group, x, out, reduce="unordered")
        collectives.reduce_scatter(group, x, piece, reduce="unordered")
        tree = np.empty_like(x)
        collectives.all_reduce(group, x, tree)
        assert np.allclose(out, tree, rtol=1e-4, atol=1e-1), count
        assert piece.tobytes() == out[count * group.index : count * (group.index + 1)].tobytes(), count
        found.append(out.tobytes())
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_unordered_sums_agree_among_members(members: Members, size: int) -> None:
    found = sound(members.run(unordered, size, payload_bytes=PAYLOAD))
    assert all(f == found[0] for f in found)


def refused(world: World) -> list[str]:
    group = world.group(WORLD)
    x, whole = np.zeros(8, np.float32), np.zeros((4, 4), np.float32)
    attempts: list[tuple[type[Exception], Callable[[], None]]] = [
        (ShapeError, lambda: collectives.all_reduce(group, x, np.zeros(7, np.float32))),
        (ShapeError, lambda: collectives.all_reduce(group, x, np.zeros(8))),
        (ShapeError, lambda: collectives.all_reduce(group, whole.T, whole.T)),
        (ShapeError, lambda: collectives.all_reduce(group, np.zeros(8, np.int32), np.zeros(8, np.int32), reduce="average")),
        (ShapeError, lambda: collectives.all_reduce(group, np.zeros(8, bool), np.zeros(8, bool))),
        (ShapeError, lambda: collectives.all_reduce(group, np.zeros(8, np.float16), np.zeros(8, np.float16))),
        (ShapeError, lambda: collectives.reduce_scatter(group, x, np.zeros(8, np.float32))),
        (ShapeError, lambda: collectives.all_gather(group, x, x)),
        (ShapeError, lambda: collectives.all_to_all(group, np.zeros(7, np.float32), np.zeros(7, np.float32))),
        (GraphError, lambda: collectives.broadcast(group, x, x, root=2)),
        (GraphError, lambda: collectives.send(group, x, to=group.index)),
        (GraphError, lambda: collectives.all_reduce(group, x, x, algorithm="ring of rings")),
        (GraphError, lambda: world.add_group("torn", [(0,)]) and None),
        (GraphError, lambda: world.group("absent") and None),
    ]
    wrong = []
    for i, (error, attempt) in enumerate(attempts):
        try:
            attempt()
            wrong.append(f"attempt {i} went through")
        except error:
            pass
    wrong.append(one(group, "all_reduce", "f32", 31))  # nothing of it went out
    return [w for w in wrong if w]


def test_bad_operands_are_refused_before_a_message_goes_out(members: Members) -> None:
    for found in sound(members.run(refused, 2)):
        assert found == []


def links_of(world: World) -> tuple[bytes, bytes, bytes, str]:
    links = measure(world)
    world.rule = links.rule()
    chosen = world.rule.choose("all_reduce", world.size, 1 << 20)
    assert one(world.group(WORLD), "all_reduce", "f32", 601) == ""
    return links.latency.tobytes(), links.inverse_bandwidth.tobytes(), links.addition.tobytes(), chosen


def test_links_are_measured_alike_on_all_ranks(members: Members) -> None:
    found = sound(members.run(links_of, 3))
    assert found[0] == found[1] == found[2]
    latency = np.frombuffer(found[0][0]).reshape(3, 3)  # type: ignore[index]
    assert ((latency > 0) == ~np.eye(3, dtype=bool)).all() and (latency == latency.T).all()


def test_the_benchmark_measures_every_collective(tmp_path: Path) -> None:
    result = comm.bench(3, sizes=(1024, 40_000), calls=3)
    assert {r.name.split()[0] for r in result.rows} == {*OPS, "send"} and {n for r in result.rows for n in r.seconds} == {1024, 40_000}
    assert all(t > 0 for r in result.rows for t in r.seconds.values()) and result.barrier.fastest > 0 and result.memcpy.fastest > 0
    assert all(r.fastest[n] <= t for r in result.rows for n, t in r.seconds.items())
    assert all(r.latency >= 0 for r in result.rows)
    assert all(result.price(op) >= 1 for op in result.rule)
    planted = replace(result, rows=[comm.Row("all_reduce whole", fastest={8: 3.0}), comm.Row("all_reduce direct", fastest={8: 2.0})],
                      rule={"all_reduce": [(0, "whole"), (16, "direct")]})
    assert planted.price("all_reduce") == 1.5
    written = tmp_path / "comm.json"
    command._write(str(written), {"comm": result})
    picture = curves.draw(json.loads(written.read_text())["comm"])
    assert all(f">{name}<" in picture for name in ("direct", "whole", "halving", "unordered", *OPS, "send", "memcpy of one core")), picture
    with pytest.raises(InputError, match="no such collective"):
        comm.bench(2, "nothing")
    with pytest.raises(InputError, match="among ranks"):
        comm.bench(1)


def test_a_fit_finds_latency_and_bandwidth() -> None:
    row_ = comm.Row("made", {n: 1e-5 + 2e-10 * n for n in (1 << 10, 1 << 16, 1 << 24)})
    row_.fit()
    assert row_.latency == pytest.approx(1e-5) and row_.inverse_bandwidth == pytest.approx(2e-10)
    steep = comm.Row("made", {1000: 1e-6, 2000: 3e-6})  # a line through both would begin below zero
    steep.fit()
    assert steep.latency == 0 and 1e-9 < steep.inverse_bandwidth < 1.5e-9
    falling = comm.Row("made", {1000: 3e-6, 2000: 2e-6})  # a line through both would fall, and no byte takes less than nothing
    falling.fit()
    assert falling.inverse_bandwidth == 0 and 2e-6 < falling.latency < 3e-6
    text = io.StringIO()
    once = comm.Seconds(1.0, 1.0)
    comm.show(comm.Result(2, once, once, [replace(falling, fastest=falling.seconds)], {}, comm.Map([], [], [], {})), Console(file=text))
    assert re.search(r"made .* 2\.3 +- ", text.getvalue()), text.getvalue()
