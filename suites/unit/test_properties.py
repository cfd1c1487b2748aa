"""Properties on inputs that Hypothesis searches for: tokenizers on any bytes, evaluation windows, state layouts and
shardings, the memory packer."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpha.data.sampler import ordered_batches
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer
from alpha.gates.contracts.data.sampler import made_up_stream
from alpha.gates.contracts.data.support import folder
from alpha.graph.state import StateLayout, TensorSpec, flat_boxes, flat_shards, intersect, reshard, subtract, whole
from alpha.passes.memory import _Class, pack

BPE = BPETokenizer.train([b"the cat sat on the mat, the cat; \xff\xfe def __init__(self):\n    return self\n" * 20], 290)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


@FEW
@given(st.binary(max_size=400))
def test_tokenizers_round_trip_on_any_bytes(data: bytes) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(data)
        assert tokenizer.decode(ids) == data
        assert int(np.asarray(tokenizer.byte_lengths)[ids].sum()) == len(data)


@FEW
@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 40), st.data())
def test_evaluation_counts_every_window_once(sequence: int, batch: int, more: int, data: st.DataObject) -> None:
    """Also where the windows do and do not fill the last batch, and where there are fewer than one batch."""
    tokens = sequence + 1 + more
    with folder() as root:
        stream, counted = made_up_stream(root, tokens, data.draw(st.integers(1, min(3, tokens // 2)))), []
        for made, rows in ordered_batches(stream, sequence=sequence, batch=batch):
            assert made.inputs_bT.shape == (batch, sequence)
            assert np.array_equal(made.targets_bT, made.inputs_bT + 1)
            counted += made.inputs_bT[:rows, 0].tolist()
        assert counted == list(range(0, (tokens - 1) // sequence * sequence, sequence))


@FEW
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_flat_ranges_are_disjoint_boxes(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    held = np.zeros(shape, int)
    for box, first in flat_boxes(shape, start, stop):
        at = tuple(slice(lo, hi) for lo, hi in box)
        held[at] += 1
        assert np.arange(size).reshape(shape)[at].flat[0] == first
    assert (held.ravel() == ((np.arange(size) >= start) & (np.arange(size) < stop))).all()


BOX = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=2, max_size=2).map(lambda d: tuple((lo, lo + n) for lo, n in d))


@FEW
@given(BOX, BOX)
def test_a_box_is_its_common_part_and_the_rest(a: tuple, b: tuple) -> None:
    common = intersect(a, b)
    parts = [*subtract(a, common), common] if common else [a]
    held = np.zeros((12, 12), int)
    for part in parts:
        held[tuple(slice(lo, hi) for lo, hi in part)] += 1
    assert held.max() == 1 and held.sum() == np.prod([hi - lo for lo, hi in a])


@FEW
@given(st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_shards_hold_every_element_once(shapes: list[list[int]], ranks: int) -> None:
    layout = StateLayout([TensorSpec(f"block.{i}.w", tuple(s), f"block.{i}") for i, s in enumerate(shapes)])
    shards = flat_shards(layout, ranks)
    shards.covers()
    moved = sum(int(np.prod([hi - lo for lo, hi in c.box])) for c in reshard(whole(layout), shards))
    assert moved == sum(t.size for t in layout.tensors)


@FEW
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=24))
def test_packed_lifetimes_never_overlap(spans: list[tuple[int, int, int]]) -> None:
    classes = [_Class(nbytes=n, first=first, last=first + length) for n, first, length in spans]
    memory = pack(classes)
    assert memory.lower <= memory.peak <= memory.total
    for a, b in combinations(classes, 2):
        together = a.first <= b.last and b.first <= a.last
        assert not together or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    assert all(c.offset % 256 == 0 for c in classes)
