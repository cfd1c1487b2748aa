"""Spot checks of a run that trains: no bit moves, nothing is said of what is sound, and flipped bits and wrong kernels end it by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import flips
import numpy as np
import pytest
from spoiled import spoiled

from alpha.backends.digest import WORDS, HostDigests, columns
from alpha.errors import SpotCheckError
from alpha.profile.store import read
from alpha.train.loop import Loop
from alpha.train.spots import DRAWN, Spots

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spots")


@pytest.fixture(scope="module")
def campaign(folder: Path) -> Iterator[flips.Campaign]:
    with flips.running(folder) as loop:
        yield flips.Campaign(loop, np.random.default_rng(11))


def trained(folder: Path, every: int) -> tuple[bytes, Loop]:
    with flips.running(folder, verify=every) as loop:
        for _ in range(STEPS):
            loop.advance()
        loop.metrics.flush()
        return flips.bits(loop), loop


def test_no_bit_hangs_on_them_and_nothing_sound_is_refused(folder: Path) -> None:
    off, _ = trained(folder / "off", 0)
    often, loop = trained(folder / "often", 1)
    assert off == often
    rows = read(folder / "often" / "metrics.sqlite", "spot_checks", "step, op, how, elements, ratio")
    assert {step for step, *_ in rows} == set(range(STEPS))
    assert {op for step, op, *_ in rows if step == 0} >= {x.op for call in loop.program.schedule for x in loop.plans[call.plan].launches}
    assert all(len({op for s, op, *_ in rows if s == step and op != "state"}) <= DRAWN for step in range(1, STEPS))
    assert {how for _, _, how, *_ in rows} == {"product", "rows", "whole", "hash"} and all(ratio <= 1 for *_, ratio in rows)


def test_checked_are_the_first_step_every_so_many_and_the_first_after_a_resume(folder: Path) -> None:
    with flips.running(folder / "resumed", verify=5) as loop:
        for _ in range(8):
            loop.advance()
        loop.save()
        loop.resume()
        for _ in range(3):
            loop.advance()
        loop.metrics.flush()
    steps = {step for step, in read(folder / "resumed" / "metrics.sqlite", "spot_checks", "step")}
    assert steps == {0, 5, 8, 10}


def test_every_launch_is_drawn_in_time_and_ranks_draw_apart(folder: Path) -> None:
    """After the first step a few components are drawn, and of each a launch: none is left out for good, be it the last one by name or in
    the step. What ranks do alike each of them looks at somewhere else."""
    with flips.running(folder / "drawn", verify=1) as loop:
        executor, schedule = loop.executor, loop.program.schedule
        places = [(n, i) for n, call in enumerate(schedule) for i in range(len(loop.plans[call.plan].launches))]
        drawn: list[list[frozenset[tuple[int, int]]]] = []
        for rank in (0, 1):
            spots = Spots(1, 7, executor, 0, loop.metrics)
            spots.rank, spots._first = rank, False
            drawn.append([])
            for step in range(3000):
                spots.begin(step)
                drawn[-1].append(frozenset(spots._drawn))
        executor.inspector = None
    assert max(map(len, drawn[0])) == DRAWN and set[tuple[int, int]]().union(*drawn[0]) == set(places)
    assert np.mean([a == b for a, b in zip(*drawn)]) < 0.01


@pytest.mark.parametrize("kind", flips.KINDS)
def test_a_flip_that_moves_a_bit_of_the_run_is_seen_in_a_checked_step(campaign: flips.Campaign, kind: str) -> None:
    trials = [campaign.trial(kind, size, True) for size in flips.SIZES.values() for _ in range(4)]
    assert any(t.changed for t in trials)
    assert all(t.seen for t in trials if t.changed) and all(t.latency == 0 for t in trials if t.seen == "memory")


def test_a_flip_that_nothing_reads_says_nothing(campaign: flips.Campaign) -> None:
    trials = [campaign.trial("activations", 1, False) for _ in range(6)]
    assert all(t.changed or not t.seen for t in trials)


def test_weights_are_looked_at_before_they_are_saved(folder: Path) -> None:
    with flips.running(folder / "saved", verify=1) as loop:
        loop.advance()
        place = loop.program.states["param"].offsets["block.0.attention.out.weight"]
        loop.executor.state("param").view(np.uint32)[place] ^= np.uint32(1)
        with pytest.raises(SpotCheckError, match=r"rank 0, step 0, param, seen before a checkpoint(.|\n)*block\.0\.attention\.out\.weight"):
            loop.save()
        assert not list(loop.checkpoints.glob("*"))


def test_a_wrong_kernel_ends_the_run_by_name(folder: Path) -> None:
    """A product with one wrong element, from its fortieth call on."""
    def wrong(outs: list[np.ndarray], calls: int) -> None:
        if calls >= 40:
            outs[0].reshape(-1)[-5] += np.abs(outs[0]).max()

    made = spoiled("matmul.f32.cpu", wrong)
    with flips.running(folder / "wrong", made, verify=1) as loop:
        loop.advance()
        with pytest.raises(SpotCheckError) as caught:
            for _ in range(20):
                loop.advance()
    text = str(caught.value)
    assert caught.value.exit_code == 4
    for part in ("a spot check failed: rank 0, step ", "matmul (matmul.f32.cpu) of block.", "model line ", "y[", "got ", "expected ", "+-"):
        assert part in text, part


def test_a_hash_sees_every_bit_and_pairs_that_lie_apart() -> None:
    rng, piece = np.random.default_rng(2), HostDigests.piece
    x = rng.integers(0, 256, piece + 24, dtype=np.uint8)
    sound = columns(x)
    for at in (0, piece, piece + 23, *rng.integers(0, x.size, 40)):
        x[at] ^= 1 << rng.integers(8)
        assert columns(x) != sound
        sound = columns(x)
    for _ in range(40):
        first, second = rng.choice(piece // 8, 2, replace=False)
        if (first - second) % WORDS:
            x[[8 * first, 8 * second]] ^= 4  # one up and one down, perhaps
            assert columns(x) != sound
            sound = columns(x)
