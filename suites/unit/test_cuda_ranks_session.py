"""Whole sessions of two ranks on emulated GPUs: the bits of one process, saves that it goes on from, what is told of collectives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu import emulated, emulated_gpu
from emulated_peers import among
from test_cuda_session import bits, configured

from alpha.checkpoint import folders
from alpha.cli import common
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.config import Config
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.memory import Span, fill
from alpha.cuda_runtime.peers import Peers
from alpha.errors import ConfigError, MachineError, NonFiniteError, RankError
from alpha.profile.store import read
from alpha.train import engine
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.loop import Loop, StepResult
from alpha.train.ranks import Ranks, held_by_all
from alpha.train.session import train

STEPS = "step, loss, norm, lr"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    """A folder with a small corpus."""
    path = tmp_path_factory.mktemp("ranks")
    small_corpus(path / "text")
    return path


def session(peers: Peers, world: World, cfg: Config, more: dict[str, Any]) -> tuple[str, int, str]:
    """A rank's session: (run, step, which GPU its process saw first)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(engine.VISIBLE, "4,7")
        outcome = train(cfg, emulated(catalogue()), Printer(), admit=None, world=world, **more)
        return str(outcome.path), outcome.step, engine.visible_devices()[0]


def state(path: Path) -> dict[str, bytes]:
    """What the last checkpoint holds, whatever number of ranks saved it."""
    return {kind: folders.read(folders.at(path / "checkpoints", 8), kind)[kind][1].tobytes() for kind in ("param", "m", "v")}


def ranked(cfg: Config, **more: Any) -> list[tuple[str, int, str]]:
    return among(2, session, cfg, more, kernels=nvcc.KERNELS, each=512 << 20, deadlines=Deadlines(stall=60.0))


@pytest.mark.parametrize("zero", [0, 1])
def test_two_ranks_have_the_bits_of_one(root: Path, zero: int) -> None:
    """Losses, norms and validations; and one process that goes on from what two saved ends where one process ends that was alone, as two do
    that go on from what one saved."""
    cfg = configured(root, "gpt", (f"train.zero={zero}",))
    with emulated_gpu():
        alone = train(cfg, emulated(catalogue()), Printer(), admit=None)
    (path, step, first), (same, _, second) = ranked(cfg)
    assert (path, step, first, second) == (same, 8, "4", "7")
    store = Path(path) / "metrics.sqlite"
    assert list(read(store, "step_metrics", STEPS)) == list(read(alone.path / "metrics.sqlite", "step_metrics", STEPS))
    both = [list(read(p, "evaluations", "step, bits_per_byte")) for p in (store, alone.path / "metrics.sqlite")]
    assert both[0] == both[1] and len(both[0]) == 2
    told = json.loads((Path(path) / "manifest.json").read_text())["sessions"][0]["devices"]
    assert [x.rsplit(" ", 1)[1] for x in told] == ["4", "7"]
    assert dict(read(store, "run_metadata", "key, value"))["comm_priority"] == "-5 of 0 to -5"
    rows = list(read(store, "communication", "step, rank, op, stream, calls, total_ns, exposed_ns, overlapped_ns"))
    sums = [r for r in rows if r[2:4] == ("reduce_scatter" if zero else "all_reduce", "comm")]
    assert {r[:2] for r in sums} >= {(s, rank) for s in (1, 2) for rank in (0, 1)}, rows
    assert all(calls > 0 and total == exposed + hidden for *_, calls, total, exposed, hidden in sums), sums
    with emulated_gpu():
        resumed = train(cfg, emulated(catalogue()), Printer(), admit=None, resume=Path(path), at=6)
    assert resumed.finished and bits(alone, 8) == bits(resumed, 8)
    other = configured(root, "gpt", (f"train.zero={1 - zero}",))
    want = state(alone.path)
    assert [step for _, step, _ in ranked(other, resume=alone.path, at=6)] == [8, 8]
    assert len(bits(alone, 8)) == 2 and state(alone.path) == want


def test_a_damaged_cut_is_passed_over_by_all_ranks(root: Path) -> None:
    """One rank alone finds its file damaged. The other does not make copies of its parameters with it: both go on from the one before."""
    cfg = configured(root, "gpt", ("train.zero=1",))
    (path, *_), _ = ranked(cfg)
    want, last = state(Path(path)), sorted((folders.at(Path(path) / "checkpoints", 8)).glob("*.state"))[-1]
    raw = bytearray(last.read_bytes())
    raw[len(raw) // 2] ^= 1
    last.write_bytes(raw)
    assert [step for _, step, _ in ranked(cfg, resume=Path(path))] == [8, 8]
    assert state(Path(path)) == want


AHEAD = ("train.verify=0", "train.profile=0", "train.eval_every=0", "train.checkpoint_every=4")


def watched(peers: Peers, world: World, cfg: Config, flips: bool) -> tuple[list[bool], list[int], str]:
    """A rank's session: behind which of its steps the next one was handed over, what was hashed, and how it ended. flips: behind the update
    of the first step from 2 on that is hashed at once, the last rank's parameters change."""
    ahead, steps, advance, hashed = list[bool](), list[int](), Loop.advance, Ranks.hash

    def noted(loop: Loop, **more: bool) -> StepResult:
        ahead.append(more["ahead"])
        return advance(loop, **more)

    def flipped(ranks: Ranks, executor: Any) -> None:
        steps.append(world.step)
        if flips and world.step >= 2 and world.rank == world.size - 1:
            fill(Span(executor.arenas[f"state.{held_by_all(executor.program)}"].address, 1), 0x55, executor.stream)
        hashed(ranks, executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "advance", noted)
        patch.setattr(Ranks, "hash", flipped)
        try:
            session(peers, world, cfg, {})
        except RankError as error:
            return ahead, steps, str(error)
    return ahead, steps, ""


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("flips", [False, True])
def test_ranks_run_ahead_and_see_what_differs(root: Path, zero: int, flips: bool) -> None:
    """Both hand over the same steps ahead: all but those in which either has its clock to set. A parameter that one of them has otherwise
    is named with the step that left it, though the device has the next one by then."""
    cfg = configured(root, "gpt", (*AHEAD, f"train.zero={zero}"))
    (one, steps, said), (other, also, heard) = among(2, watched, cfg, flips, kernels=nvcc.KERNELS, each=512 << 20,
                                                     deadlines=Deadlines(stall=60.0))
    assert one == other and steps == also == [i for i, ahead in enumerate(one) if ahead] and len(steps) > 1, (one, other)
    assert len(one) == (steps[-1] + 1 if flips else 8)
    words = f"rank 1 has other bits than the others after step {steps[-1]}"
    assert all(words in x and "parameter" in x for x in (said, heard)) == flips and bool(said) == bool(heard) == flips, said


def refused(peers: Peers, world: World, cfg: Config) -> str:
    """What a rank's session ends with."""
    with pytest.raises((NonFiniteError, MachineError)) as error:
        session(peers, world, cfg, {})
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("zero", [0, 1])
def test_a_refused_step_is_replayed_by_all_ranks(root: Path, zero: int) -> None:
    """A learning rate that makes parameters overflow: all ranks see it, save, replay the step launch by launch, and name the op."""
    cfg = configured(root, "llama", ("optim.lr=1e30", "optim.warmup=0", "optim.clip=0", f"train.zero={zero}"))
    for text in among(2, refused, cfg, kernels=nvcc.KERNELS, each=512 << 20, deadlines=Deadlines(stall=60.0)):
        assert text.startswith("NonFiniteError") and "was refused and changed nothing" in text and "made" in text, text


def test_each_rank_has_a_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.VISIBLE, "3")
    with pytest.raises(MachineError, match=r"each rank computes on a GPU of its own\n.*2 ranks, 1 GPU\n.*at most 1"):
        engine.require_devices(2)
    monkeypatch.setenv(engine.VISIBLE, "3, GPU-x,5")
    engine.require_devices(3)
    world = type("Second", (), {"here": range(2), "local_rank": 1})()
    engine.take_device(world)  # type: ignore[arg-type]
    assert engine.visible_devices() == ["GPU-x", "5", "3"]


def test_what_ranks_on_gpus_cannot_do_yet_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="not checked by their rows yet"):
        common.require_ranks(configured(root, "gpt", ("machine.debug=\"check\"",)), 2)
    common.require_ranks(configured(root, "gpt"), 2)
