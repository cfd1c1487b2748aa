"""The order of samples on inputs that Hypothesis searches for, and at 10^10 samples: mixtures, packing, the permutation."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpha.data import bucketed, sampler
from alpha.data.bucketed import BucketedSampler, pairs_of
from alpha.data.mixture import MixedSampler, Turns
from alpha.data.packing import NO_TARGET, PackedSampler, pack
from alpha.data.permutation import permuted
from alpha.data.sampler import PermutedSampler
from alpha.data.shards import TokenStream
from alpha.gates.contracts.data.mixture import source_stream
from alpha.gates.contracts.data.packing import document_stream
from alpha.models.parts import IGNORE

FEW = settings(max_examples=60, deadline=None, derandomize=True)
FEWER = settings(FEW, max_examples=15)
"""Where files are written."""
SIZE = 10**10


@contextmanager
def permuted_once() -> Iterator[None]:
    """Within it the permutation of the same indices is worked out once. Few indices take it long, for it walks until it is among them; and
    each of many readers asks for the same."""
    known: dict[tuple[bytes, bytes, int, int], np.ndarray] = {}

    def remembered(indices: np.ndarray, epochs: np.ndarray, size: int, seed: int) -> np.ndarray:
        key = indices.tobytes(), np.asarray(epochs).tobytes(), size, seed
        if key not in known:
            known[key] = permuted(indices, epochs, size, seed)
        return known[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        for module in (bucketed, sampler):
            patch.setattr(module, "permuted", remembered)
        yield


@FEW
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(0, 10**12), st.integers(1, 400))
def test_every_source_has_its_share_after_any_number_of_samples(weights: list[int], first: int, more: int) -> None:
    turns, whole = Turns(weights), sum(weights)
    source, place = turns.of(np.arange(first, first + more))
    for n, had in ((first, turns.counts(first)), (first + more, turns.counts(first + more))):
        assert sum(had) == n and all(abs(whole * x - n * a) < whole for a, x in zip(weights, had))
    for i, had in enumerate(turns.counts(first)):
        assert place[source == i].tolist() == list(range(had, turns.counts(first + more)[i]))


@FEWER
@given(st.lists(st.tuples(st.integers(9, 80), st.integers(1, 9)), min_size=1, max_size=4), st.sampled_from([1, 2, 4]),
       st.sampled_from([1, 3]), st.integers(0, 30), st.integers(0, 2**63 - 1))
def test_any_ranks_that_begin_at_any_step_read_the_run(sources: list[tuple[int, int]], ranks: int, micros: int, step: int,
                                                       seed: int) -> None:
    with TemporaryDirectory() as folder:
        streams = [source_stream(Path(folder), i, tokens) for i, (tokens, _) in enumerate(sources)]

        def made() -> MixedSampler:
            return MixedSampler([PermutedSampler(s, sequence=4, global_batch=12, seed=seed) for s in streams], [w for _, w in sources])

        whole = made()
        for earlier in range(step % 5):
            whole.batch(earlier)
        due, resumed = whole.batch(step), made()
        parts = [resumed.batch(step, r, ranks, micro=m, n_micro=micros) for r in range(ranks) for m in range(micros)]
        for name in ("inputs_bT", "targets_bT", "samples_b"):
            assert np.array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(due, name))


@FEWER
@given(st.lists(st.integers(1, 50), min_size=2, max_size=120), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_packed_epochs_hold_every_token_once(sizes: list[int], sequence: int, seed: int) -> None:
    if sum(sizes) <= sequence:
        sizes = [*sizes, sequence]
    with TemporaryDirectory() as folder:
        made = PackedSampler(document_stream(Path(folder), sizes), sequence=sequence, global_batch=1, seed=seed)
        targets = made.read(np.arange(made.windows)).targets_bT
        assert np.array_equal(np.sort(targets[targets != NO_TARGET]), np.arange(sum(sizes)))
        pieces = -(-np.array(sizes) // sequence)
        assert -(-sum(sizes) // sequence) <= made.windows <= pieces.sum()


SIZES = st.lists(st.integers(1, 50), min_size=2, max_size=120)


@FEWER
@given(SIZES, st.integers(1, 30), st.integers(1, 9), st.integers(2, 7), st.integers(0, 12), st.integers(0, 2**63 - 1))
def test_bucketed_epochs_hold_every_token_once_and_even_steps(sizes: list[int], sequence: int, batch: int, buckets: int, most: int,
                                                              seed: int) -> None:
    """Epoch by epoch, wherever steps begin in one; and no bucket of a pool reaches into the next: their pairs do not overlap."""
    if sum(sizes) <= sequence:
        sizes = [*sizes, sequence]
    with TemporaryDirectory() as folder, permuted_once():
        made = BucketedSampler(document_stream(Path(folder), sizes), sequence=sequence, global_batch=batch, seed=seed, buckets=buckets,
                               most=most)
        for epoch in range(3):
            begin = epoch * made.windows
            targets = made.read(np.arange(begin, begin + made.windows)).targets_bT
            assert np.array_equal(np.sort(targets[targets != NO_TARGET]), np.arange(sum(sizes)))
            first, end = -(-begin // batch), (begin + made.windows) // batch  # the steps that lie in this epoch alone
            for pool in range(first, end, buckets):
                steps = range(pool, min(pool + buckets, end))
                spans = sorted((own.min(), own.max()) for own in
                               (made.pairs[made.window_of(np.arange(s * batch, s * batch + batch))] for s in steps))
                assert all(a[1] <= b[0] for a, b in pairwise(spans))


@FEWER
@given(SIZES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.integers(2, 5), st.integers(0, 2**63 - 1), st.randoms())
def test_bucketed_runs_resume_at_every_step_by_any_ranks(sizes: list[int], ranks: int, micros: int, buckets: int, seed: int,
                                                         random: Random) -> None:
    """Alone and in a mixture with packed documents."""
    with TemporaryDirectory() as folder, permuted_once():
        streams = [document_stream(Path(folder), [*sizes, 9 + i]) for i in range(2)]

        def one(stream: TokenStream) -> BucketedSampler:
            return BucketedSampler(stream, sequence=8, global_batch=12, seed=seed, buckets=buckets)

        def mixed() -> MixedSampler:
            return MixedSampler([one(streams[0]), PackedSampler(streams[1], sequence=8, global_batch=12, seed=seed)], [2, 1])

        for kind in (lambda: one(streams[0]), mixed):
            whole = kind()
            due = [whole.batch(step, documents=True) for step in range(12)]
            for step in random.sample(range(12), 12):
                readers = [kind() for _ in range(ranks)]
                parts = [readers[r].batch(step, r, ranks, micro=m, n_micro=micros, documents=True)
                         for r in range(ranks) for m in range(micros)]
                for name in ("inputs_bT", "targets_bT", "documents_bT", "samples_b"):
                    assert np.array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(due[step], name))


@FEW
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.integers(0, 10**6))
def test_pairs_are_the_keys_that_each_query_sees(lengths: list[int], most: int) -> None:
    pairs = pairs_of(np.array(lengths), most)
    due = [sum(range(min(n, most or n) + 1)) + max(0, n - (most or n)) * most for n in lengths]
    assert pairs.tolist() == due


@FEW
@given(st.integers(1, 2**62), st.integers(0, 2**63), st.lists(st.integers(0, 2**61), min_size=2, max_size=9, unique=True))
def test_places_of_one_epoch_never_meet(size: int, seed: int, places: list[int]) -> None:
    indices = np.unique(np.array(places) % size)
    came = permuted(indices, np.full(len(indices), 3), size, seed)
    assert len(np.unique(came)) == len(indices) and came.min() >= 0 and came.max() < size


def test_ten_thousand_million_samples_are_computed_not_stored() -> None:
    """A call at any place of 10^10 takes the memory of its own rows and the time of a call at any other."""
    rng, took = np.random.default_rng(1), dict[int, float]()
    for size in (10**4, SIZE):
        samples = rng.integers(0, 3 * size, 2**14)
        permuted(samples % size, samples // size, size, 7)
        tracemalloc.start()
        came = permuted(samples % size, samples // size, size, 7)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * samples.nbytes, f"{peak:,} bytes for {samples.nbytes:,} bytes of samples"
        assert came.min() >= 0 and came.max() < size and came.max() > 0.99 * size
        begins = time.process_time()
        for _ in range(4):
            permuted(samples % size, samples // size, size, 7)
        took[size] = time.process_time() - begins
    assert took[SIZE] < 20 * took[10**4], took  # the walk has at most 4 rounds on average, whatever the size


def test_an_order_of_ten_thousand_million_meets_no_place_twice() -> None:
    """Neighbours, far apart and at the ends: 300,000 places of one epoch, all different; their quarters are evenly met."""
    places = np.concatenate([np.arange(10**5), SIZE - 1 - np.arange(10**5), np.arange(10**5) * (SIZE // 10**5)])
    places = np.unique(places)
    came = permuted(places, np.full(len(places), 5), SIZE, 11)
    assert len(np.unique(came)) == len(places)
    quarters = np.bincount(came // (SIZE // 4), minlength=4)
    assert abs(quarters / len(places) - 0.25).max() < 5 * (0.25 * 0.75 / len(places)) ** 0.5


def test_padding_is_what_models_ignore() -> None:
    assert NO_TARGET == IGNORE


def test_groups_of_documents_are_packed_by_themselves() -> None:
    """So what a document is packed with hangs on its neighbours alone: documents behind a whole group change nothing in it."""
    sizes = np.random.default_rng(2).integers(1, 30, 9000)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    whole, less = pack(starts, 32), pack(starts[:8193], 32)
    n = len(less)
    assert np.array_equal(whole.firsts[: n + 1], less.firsts) and np.array_equal(whole.starts[: less.firsts[-1]], less.starts)
    assert int(less.lengths.sum()) == starts[8192]
