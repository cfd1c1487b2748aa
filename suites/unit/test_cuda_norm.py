"""The norm of a gradient of which each rank holds its cut has the bits of one process's: the device code itself, emulated."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_threads import aligned, at, on_threads, placed

from alpha.backends.cuda.kernels import sums, update
from alpha.graph.state import StateLayout, TensorSpec
from alpha.ops.global_norm import blocks

SIZES = (30_001, 513, 4_300_000, 77, 65_536, 70_000)
LAYOUT = StateLayout([TensorSpec(f"block.{i // 3}.w{i}", (n,), f"block.{i // 3}") for i, n in enumerate(SIZES)])
CUT = blocks(LAYOUT.runs())
SCALARS = ("norm", "mean_norm", "coefficient", "finite", "lr", "used", "next")


def scalars(parts: np.ndarray) -> dict[str, bytes]:
    """What the step makes of sums of squares, float32 [blocks, 8]."""
    out = {name: aligned((1,), np.int32 if name in ("finite", "used", "next") else np.float32) for name in SCALARS}
    rates, loss, count, step = (placed(x) for x in (np.float32([1e-3, 2e-3]), np.float32([7.5]), np.float32([300.0]), np.int32([1])))
    update.step(len(CUT), max_norm=0.1, rates=at(rates), entries=2, parts=at(parts), loss=at(loss), count=at(count), step=at(step),
                **{name: at(x) for name, x in out.items()})()  # fmt: skip
    return {name: x.tobytes() for name, x in out.items()}


def squares(grad: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Sums of squares of the blocks in a table, float32 [blocks, 8]."""
    parts, table = aligned((len(table), 8), np.float32), placed(table)
    update.global_norm(len(table), grads=at(grad), table=at(table), parts=at(parts))()
    return parts


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_norm_of_cuts_has_the_bits_of_the_whole(ranks: int, seed: int) -> None:
    """Blocks that parts of a unit cut short, and whole ones; each rank's sums in the places of its own blocks, zeros in the others'."""
    grad = placed(np.random.default_rng(seed % 1000).standard_normal(LAYOUT.size).astype(np.float32))
    total, sharded = np.zeros(len(CUT), np.float32), LAYOUT.shard(ranks)
    with on_threads():
        want = scalars(squares(grad, update.norm_table(LAYOUT.runs())))
        for rank in range(ranks):
            own = placed(np.concatenate([grad[lo:hi] for _, lo, hi in sharded.cuts(rank)]))
            mine = aligned((len(CUT),), np.float32)
            eights = squares(own, sums.block_table(sharded.blocks(rank, CUT)))
            sums._between("fold", len(CUT), at(eights), at(mine))()
            total = total + mine
        folded, parts = placed(total), aligned((len(CUT), 8), np.float32)
        sums._between("unfold", len(CUT), at(folded), at(parts))()
        assert scalars(parts) == want
    assert len(CUT) > 150 and np.isfinite(np.frombuffer(want["norm"], np.float32)[0])
