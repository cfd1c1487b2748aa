"""Five ways in which a collective could fool its gate, each put into the members of a real job: the gate's own cases refuse all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alpha.comm import collectives, message, shm
from alpha.comm.world import WORLD, World
from alpha.gates.contracts.ranks.calls import drawn
from alpha.gates.contracts.ranks.collectives import SMALL, SOUND, Found, at_bits
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.gates.contracts.ranks.messages import FAULTS, Link, faulty


def returns_its_input_on_one_rank(world: World) -> None:
    """Everyone takes part, but the last member keeps its own operand."""
    sound = collectives.all_reduce

    def cheat(group: Any, x: np.ndarray, out: np.ndarray, **given: Any) -> None:
        own = x.copy()
        sound(group, x, out, **given)
        if group.index == group.size - 1:
            out.reshape(-1)[...] = own.reshape(-1)

    collectives.all_reduce = cheat


def adds_in_arrival_order(world: World) -> None:
    """Parts are added as they come, this member's first: the same sum up to rounding, on another member in another order."""
    def cheat(call: Any, own: np.ndarray, out: np.ndarray) -> None:
        total = own.copy()
        for j in call.others():
            total += call.receive(j, own)
            call.release(j)
        out[...] = total
        collectives._finish(call, out)

    collectives._total = cheat


def skips_on_one_rank(world: World) -> None:
    """One member does nothing, and leaves what lay in its result."""
    sound = collectives.all_reduce

    def cheat(group: Any, x: np.ndarray, out: np.ndarray, **given: Any) -> None:
        if group.index != 1:
            sound(group, x, out, **given)

    collectives.all_reduce = cheat


def serves_a_result_twice(world: World) -> None:
    """The result of the last call of a size is handed out again."""
    sound, kept = collectives.all_reduce, dict[int, np.ndarray]()

    def cheat(group: Any, x: np.ndarray, out: np.ndarray, **given: Any) -> None:
        if out.nbytes in kept and out.nbytes and kept[out.nbytes].dtype == out.dtype:
            out[...] = kept.pop(out.nbytes)
            return
        sound(group, x, out, **given)
        kept[out.nbytes] = out.copy()

    collectives.all_reduce = cheat


CHEATS = (returns_its_input_on_one_rank, adds_in_arrival_order, skips_on_one_rank, serves_a_result_twice)


def cheated(world: World, cheat: str) -> Found:
    """The gate's sweep in a member that cheats."""
    if cheat:
        globals()[cheat](world)
    return at_bits(world, "all_reduce", 7)


def refused(ended: list[Ended]) -> bool:
    return any(e.error or e.status or (e.result is not None and e.result[0]) for e in ended)


def job(cheat: str) -> list[Ended]:
    return members().run(cheated, 3, cheat, deadlines=SOUND, **SMALL)


def test_without_a_cheat_the_sweep_passes() -> None:
    assert not refused(job(""))


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.__name__)
def test_a_cheat_is_refused(cheat: Callable[[World], None]) -> None:
    assert refused(job(cheat.__name__))


def test_a_checksum_over_the_wrong_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the header alone: what happens to the payload on its way is not seen."""
    sound = message.checksum
    monkeypatch.setattr(shm, "checksum", lambda head, payload: sound(head, payload[:0]))
    link, rng = Link(), np.random.default_rng(3)
    seen = {fault: [faulty(link, fault, rng) for _ in range(40)] for fault in FAULTS if fault != "dropped"}
    assert any(seen["truncated"]) and any(seen["flipped"])
    link.segment.close()


def order_shows(world: World) -> bool:
    """Whether these operands tell the order of additions: else a sum in arrival order could pass."""
    parts = [drawn(np.random.default_rng((7, 601, i)), "f32", 601, 0) for i in range(3)]
    return world.group(WORLD).size == 1 and not np.array_equal((parts[0] + parts[1]) + parts[2], parts[0] + (parts[1] + parts[2]))


def test_operands_tell_the_order() -> None:
    assert members().run(order_shows, 1)[0].result
