"""A rank's executor on emulated GPUs: real binders, channels and device code, compute by oracles, streams that are late or ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from emulated_gpu import Stream, emulated
from emulated_peers import among

from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.peers import Peers
from alpha.gates.contracts import cuda_ranks


def on_emulated(peers: Peers, world: World, haste: int | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` in a rank whose kernels are oracles. `haste`: streams run ahead by such draws; None: all are late."""
    kernels = emulated(cuda_ranks.kernels())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ranks, "kernels", lambda: kernels)
        patch.setattr(Stream, "haste", None if haste is None else random.Random(f"{haste} {world.rank}"))
        return function(peers, world, *arguments)


def found(function: Callable[..., Any], *arguments: Any, haste: int | None = None, ranks: int = 2,
          deadlines: Deadlines | None = None, lost: bool = False) -> list[Any]:
    return among(ranks, on_emulated, haste, function, *arguments, kernels=nvcc.KERNELS, each=512 << 20,
                 deadlines=deadlines or Deadlines(stall=60.0), lost=lost)


@pytest.mark.parametrize("haste", [None, 1, 2])
def test_steps_have_the_promised_bits(haste: int | None, seed: int) -> None:
    for wrong, held in found(cuda_ranks.at_steps, seed % 1000, haste=haste if haste is None else haste + seed):
        assert not wrong and held == 3 * cuda_ranks.STEPS * len(cuda_ranks.WAYS), wrong


@pytest.mark.parametrize("what", ["killed", "stopped", "hangs", "raises", "absent"])
def test_a_rank_that_is_lost_is_named(what: str, seed: int) -> None:
    patience = 2.0 if what == "absent" else cuda_ranks.SOUND_S
    limits = Deadlines(stall=60.0) if what == "absent" else cuda_ranks.LIMITS
    for wrong, held in found(cuda_ranks.at_lost, what, seed % 1000, patience, deadlines=limits, lost=True):
        assert held and not wrong, wrong
