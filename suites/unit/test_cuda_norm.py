"""The norm of a gradient of which each rank holds its cut has the bits of one process's: the device code itself, emulated."""

from __future__ import annotations

import pytest
import warm
from emulated_kernels import FIBERS

from alpha.cuda_runtime import compile as nvcc

NORMS = """
import sys
sys.path.insert(0, sys.argv[1])
import emu
import numpy as np
plain, fibers = emu.transform, open(sys.argv[4]).read()
emu.transform = lambda text: fibers + chr(10) + plain(text)  # they change places without a system call
from alpha.backends.cuda.kernels import sums, update
from alpha.graph.state import StateLayout, TensorSpec
from alpha.ops.global_norm import blocks
ranks, rng = int(sys.argv[2]), np.random.default_rng(int(sys.argv[3]))
sizes = (30_001, 513, 4_300_000, 77, 65_536, 70_000)
layout = StateLayout([TensorSpec(f"block.{i // 3}.w{i}", (n,), f"block.{i // 3}") for i, n in enumerate(sizes)])
cut = blocks(layout.runs())
names = ("norm", "mean_norm", "coefficient", "finite", "lr", "used", "next")
at = lambda x: x.ctypes.data

def given(x):
    kept = emu.aligned(x.shape, x.dtype)
    kept[...] = x
    return kept

grad, rates = given(rng.standard_normal(layout.size).astype(np.float32)), given(np.float32([1e-3, 2e-3]))
loss, count, old = given(np.float32([7.5])), given(np.float32([300.0])), given(np.int32([1]))

def numbers(parts):
    out = {name: emu.aligned((1,), np.int32 if name in ("finite", "used", "next") else np.float32) for name in names}
    update.step(len(cut), max_norm=0.1, rates=at(rates), entries=2, parts=at(parts), loss=at(loss), count=at(count), step=at(old),
                **{name: at(x) for name, x in out.items()})()
    return [x.tobytes() for x in out.values()]

def squares(x, table):
    parts, table = emu.aligned((len(table), 8), np.float32), given(table)
    update.global_norm(len(table), grads=at(x), table=at(table), parts=at(parts))()
    return parts

want = numbers(squares(grad, update.norm_table(layout.runs())))
total, sharded = np.zeros(len(cut), np.float32), layout.shard(ranks)
for rank in range(ranks):
    own = given(np.concatenate([grad[lo:hi] for _, lo, hi in sharded.cuts(rank)]))
    mine = given(np.full(len(cut), np.nan, np.float32))
    eights = squares(own, sums.block_table(sharded.blocks(rank, cut)))
    sums._between("fold", len(cut), at(eights), at(mine))()
    total = total + mine
total, parts = given(total), given(np.full((len(cut), 8), np.nan, np.float32))
sums._between("unfold", len(cut), at(total), at(parts))()
print(len(cut), numbers(parts) == want, np.isfinite(np.frombuffer(want[0], np.float32))[0])
"""


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_norm_of_cuts_has_the_bits_of_the_whole(ranks: int, seed: int) -> None:
    """Blocks that parts of a unit cut short, and whole ones; each rank's sums in the places of its own blocks, zeros in the others'."""
    done = warm.run(["-c", NORMS, nvcc.KERNELS / "checks" / "bandwidth", ranks, seed % 1000, FIBERS])
    blocks, same, finite = done.stdout.split() or ["0", done.stderr[-500:], ""]
    assert int(blocks) > 150 and (same, finite) == ("True", "True"), done.stdout + done.stderr
