"""Cases of state layouts: offsets, cuts for ranks, replicas, and moves between two layouts. Floor 7."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import GraphError, ShapeError
from alpha.gates.contracts import edges
from alpha.gates.contracts.passes.support import Cases
from alpha.gates.contracts.reference import (
    hash_of,
    refuses,
    yes,
)
from alpha.graph.state import StateLayout, TensorSpec


def _random_layout(rng: np.random.Generator) -> StateLayout:
    tensors = []
    for unit in range(int(rng.integers(11, 14))):  # more than ten, so that block.10 must come after block.2
        for k in range(int(rng.integers(1, 4))):
            shape = tuple(int(n) for n in rng.integers(1, 24, int(rng.integers(0, 4))))
            tensors.append(TensorSpec(f"block.{unit}.t{k}", shape, f"block.{unit}"))
    return StateLayout([tensors[i] for i in rng.permutation(len(tensors))])


def _move(copies: Any, source: list[np.ndarray], target: list[np.ndarray]) -> None:
    for c in copies:
        shape = [hi - lo for lo, hi in c.box]

        def view(a: np.ndarray, offset: int, strides: tuple[int, ...], shape: list[int] = shape) -> np.ndarray:
            return np.lib.stride_tricks.as_strided(a[offset:], shape, [s * a.itemsize for s in strides])
        view(target[c.target], c.target_offset, c.target_strides)[...] = view(source[c.source], c.source_offset, c.source_strides)


def _reshard_round_trip(rng: np.random.Generator) -> Measured:
    """whole -> flat shards -> tensor shards -> flat shards of another number -> whole: every element comes back, padding stays zero."""
    from alpha.graph.state import flat_shards, reshard, tensor_shards, whole

    wrong = 0
    for _ in range(6):
        layout = _random_layout(rng)
        flat = np.zeros(layout.size)
        for o, n in layout.ranges():
            flat[o : o + n] = rng.standard_normal(n)
        ranks = int(rng.choice([1, 2, 3]))
        axis = {t.name: int(rng.integers(len(t.shape))) for t in layout.tensors if t.shape}
        axis = {k: d for k, d in axis.items() if layout.by_name[k].shape[d] % ranks == 0}
        stages = [whole(layout), flat_shards(layout, int(rng.choice([2, 4, 8]))), tensor_shards(layout, axis, ranks),
                  flat_shards(layout, 16), flat_shards(layout, int(rng.choice([3, 5, 7, 65]))), whole(layout)]
        for stage in stages:
            stage.covers()
        held = [flat]
        for a, b in pairwise(stages):
            new = [np.zeros(max(layout.size, layout.shard(len(b.ranks)).size)) for _ in b.ranks]
            _move(reshard(a, b), held, new)
            held = new
        wrong += int((held[0] != flat).any())
    return Measured(error=float(wrong), bound=0.0, cases=6)


def _lowest_replica(rng: np.random.Generator) -> Measured:
    """Of ranks that hold the same elements, whole tensors or equal cuts of them, the lowest is read."""
    from alpha.graph.state import Layout, Piece, flat_shards, reshard, row_major, whole

    layout = _random_layout(rng)
    (mine,) = whole(layout).ranks
    shapes = {t.name: t.shape for t in layout.tensors}
    halves = flat_shards(layout, 2).ranks
    wrong = cases = 0
    for source in (Layout(shapes, (mine,) * 3), Layout(shapes, (*halves, *halves, *halves[::-1]))):
        for c in reshard(source, whole(layout)):
            cases += 1
            wrong += c.source >= (1 if len(source.ranks) == 3 else 2)
    part = Piece("w", ((1, 3),), 0, row_major((2,)))
    overlapping = Layout({"w": (4,)}, ((part,), (Piece("w", ((0, 4),), 0, (1,)),)))
    taken = {c.box: c.source for c in reshard(overlapping, Layout({"w": (4,)}, ((Piece("w", ((0, 4),), 0, (1,)),),)))}
    wrong += taken != {((1, 3),): 0, ((0, 1),): 1, ((3, 4),): 1}
    return Measured(error=float(wrong), bound=0.0, cases=cases + 1)


def _shard_is_cut(rng: np.random.Generator) -> Measured:
    """Rank r of R holds elements [r, r+1) * len / R of every unit, at the same place in its local array."""
    from alpha.graph.state import flat_shards, reshard, whole

    layout = _random_layout(rng)
    flat = np.zeros(layout.size)
    for o, n in layout.ranges():
        flat[o : o + n] = rng.standard_normal(n)
    ranks = 4
    local = [np.zeros(layout.size // ranks) for _ in range(ranks)]
    _move(reshard(whole(layout), flat_shards(layout, ranks)), [flat], local)
    units = [np.split(flat[u.start : u.stop], ranks) for u in layout.units]
    want = [np.concatenate([u[r] for u in units]) for r in range(ranks)]
    return yes(all((a == b).all() for a, b in zip(local, want)), cases=ranks)


def _leaves(rng: np.random.Generator) -> Measured:
    """Leaves hold every element of every tensor once, in pieces of at most `most`, and are the same, rank after rank, whatever the cut."""
    length = 64 * (3 * int(rng.integers(3, 10)) + 1)  # of a part of three leaves, which do not divide it
    most = length // 3 + 1 + int(rng.integers(0, length // 10))
    bigs = [64 * length, *(n * 64 * most + int(rng.integers(1, most)) for n in (1, 2))]
    tensors = [*_random_layout(rng).tensors, *(TensorSpec(f"block.{i}.big", (n,), f"block.{i}") for i, n in enumerate(bigs, 3))]
    layout = StateLayout(tensors)
    inside = np.zeros(layout.size, np.int64)
    for offset, n in layout.ranges():
        inside[offset : offset + n] += 1
    names = np.arange(layout.size)
    whole_ = [np.concatenate([names[o : o + n] for o, n in leaf]) if leaf else names[:0] for leaf in layout.leaves(most)]
    good = all(x.size <= most for x in whole_)
    np.subtract.at(inside, np.concatenate(whole_), 1)
    good &= not inside.any()
    for ranks in (2, 64):
        sharded = layout.shard(ranks)
        again = []
        for rank in range(ranks):
            held = np.concatenate([names[lo:hi] for _, lo, hi in sharded.cuts(rank)])
            again += [np.concatenate([held[o : o + n] for o, n in leaf]) if leaf else names[:0] for leaf in sharded.leaves(rank, most)]
        good &= len(again) == len(whole_) and all(np.array_equal(a, b) for a, b in zip(again, whole_))
    return yes(good, cases=3)


def _blocks(rng: np.random.Generator) -> Measured:
    """Runs hold what the ranges hold, in the same order. Whatever the cut, each block of them is held whole by one rank, where its elements
    are, and is empty on all others."""
    layout, most, cases = _random_layout(rng), int(rng.integers(60, 400)), 0
    names = np.arange(layout.size)
    runs = layout.runs()
    good = np.array_equal(*(np.concatenate([names[o : o + n] for o, n in pieces]) for pieces in (runs, layout.ranges())))
    good &= all(n > 0 for _, n in runs) and len(runs) < 65 * len(layout.units) + len(layout.tensors)
    blocks = [(at, min(at + most, o + n)) for o, n in runs for at in range(o, o + n, most)]
    for ranks in (1, 2, 8, 64):
        sharded, found = layout.shard(ranks), [list[np.ndarray]() for _ in blocks]
        for rank in range(ranks):
            held = np.concatenate([names[lo:hi] for _, lo, hi in sharded.cuts(rank)])
            for own, leaf in zip(found, sharded.blocks(rank, blocks), strict=True):
                own += [held[o : o + n] for o, n in leaf]
        good &= all(len(own) == 1 and np.array_equal(own[0], names[a:b]) for own, (a, b) in zip(found, blocks))
        cases += len(blocks)
    uneven = StateLayout([TensorSpec("a.w", (8192,), "a"), TensorSpec("b.w", (64,), "b")])
    ragged = uneven.shard(48)  # some ranks hold nothing of the small unit; pieces that are their cuts are split by none
    pieces = sorted((lo, hi) for rank in range(48) for _, lo, hi in ragged.cuts(rank) if lo < hi)
    for rank in range(48):
        held = [(lo, hi) for _, lo, hi in ragged.cuts(rank) if lo < hi]
        local = {(lo, hi): at for at, lo, hi in ragged.cuts(rank)}
        want = tuple(((local[piece], piece[1] - piece[0]),) if piece in held else () for piece in pieces)
        good &= not held or ragged.blocks(rank, pieces) == want
    return yes(good, cases=cases + 48)


def _refuse_split_block(rng: np.random.Generator) -> Measured:
    """A block that begins in one rank's cut and ends in another's has no one who could sum it: refused, at either end."""
    layout = StateLayout([TensorSpec("a.w", (8192,), "a"), TensorSpec("b.w", (8192,), "b")])
    at = 64 * int(rng.integers(1, 60))
    found = [refuses(ShapeError, lambda rank=rank: layout.shard(2).blocks(rank, [(at, 4096 + at)])) for rank in (0, 1)]  # type: ignore[misc]
    return yes(all(m.error == 0 for m in found), cases=2)


def _tables(rng: np.random.Generator) -> Measured:
    """The optimizer's tables of all ranks name what the whole table names, with its flags, at the places where the cut lies."""
    layout = _random_layout(rng)
    layout = StateLayout([TensorSpec(t.name, t.shape, t.unit, decay=bool(rng.integers(2)), lr_scale=float(rng.integers(1, 9)))
                          for t in layout.tensors])

    def painted(size: int, segments: Any) -> np.ndarray:
        x = np.zeros((size, 2))
        for o, n, decay, scale in segments:
            x[o : o + n] += (1 + decay, scale)
        return x

    want = painted(layout.size, layout.segments())
    good = True
    for ranks in (1, 4, 64, 6):
        sharded, got = layout.shard(ranks), np.zeros_like(want)
        for rank in range(ranks):
            local = painted(sharded.size, sharded.segments(rank))
            good &= sharded.ranges(rank) == tuple((o, n) for o, n, _, _ in sharded.segments(rank))
            for start, lo, hi in sharded.cuts(rank):
                got[lo:hi] += local[start : start + hi - lo]
        good &= np.array_equal(got, want)
    return yes(good, cases=4)


def _refuse_split_leaf(rng: np.random.Generator) -> Measured:
    """A cut over six ranks would split leaves: no norm is promised for it."""
    return refuses(ShapeError, lambda: _random_layout(rng).shard(6).leaves(0))


def _layout_rules(rng: np.random.Generator) -> Measured:
    """256-byte alignment, canonical order whatever the declaration order, units padded to 4096, no overlap."""
    layout = _random_layout(rng)
    again = StateLayout([layout.tensors[i] for i in rng.permutation(len(layout.tensors))])
    spans = sorted((o, o + n) for o, n in layout.ranges())
    good = again.offsets == layout.offsets and all(b[0] >= a[1] for a, b in pairwise(spans))
    good &= all(o * 4 % 256 == 0 for o, _ in layout.ranges()) and all((u.stop - u.start) % 4096 == 0 for u in layout.units)
    order = [t.unit for t in layout.tensors]
    good &= [int(u.split(".")[1]) for u in dict.fromkeys(order)] == sorted({int(u.split(".")[1]) for u in order})
    return yes(good)


def _refuse_gap(rng: np.random.Generator) -> Measured:
    from alpha.graph.state import Layout, Piece

    shapes: dict[str, tuple[int, ...]] = {"w": (4, 6)}
    half = Piece("w", ((0, 2), (0, 6)), 0, (6, 1))  # twice the same half: as many elements as the whole
    every = Piece("w", ((0, 4), (0, 6)), 0, (6, 1))  # and one half more often than the other
    return yes(all(refuses(GraphError, Layout(shapes, ((one,), (half,))).covers).error == 0 for one in (half, every)), cases=2)


def _refuse_missing(rng: np.random.Generator) -> Measured:
    from alpha.graph.state import Layout, Piece, reshard

    whole_ = Layout({"w": (4, 6)}, ((Piece("w", ((0, 4), (0, 6)), 0, (6, 1)),),))
    part = Layout({"w": (4, 6)}, ((Piece("w", ((0, 3), (0, 6)), 0, (6, 1)),),))
    return refuses(GraphError, lambda: reshard(part, whole_))


def _layout_hash(rng: np.random.Generator) -> Measured:
    layout = _random_layout(rng)
    text = repr(sorted(layout.offsets.items()))
    return Measured(error=0.0, bound=0.0, digest=hash_of(np.frombuffer(text.encode(), np.uint8)))


CASES: Cases = {
    "layout.pass": {"parity": [("round-trip", _reshard_round_trip), ("cut", _shard_is_cut), ("rules", _layout_rules), ("leaves", _leaves),
                               ("blocks", _blocks), ("tables", _tables), ("replicas", _lowest_replica)],
                    "determinism": [("offsets", _layout_hash)],
                    "faults": [("gap", _refuse_gap), ("missing", _refuse_missing), ("split-leaf", _refuse_split_leaf),
                               ("split-block", _refuse_split_block), ("edges", edges.layouts)]},
}
