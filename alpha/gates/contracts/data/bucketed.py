"""Cases of `sampler.bucketed`: pools walked one by one, each sequence once an epoch, even steps, pairs looked at one by one."""

from __future__ import annotations

import numpy as np

from alpha.component import Measured
from alpha.data import bucketed, packing, shards
from alpha.data.sampler import PermutedSampler
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.packing import digest_of_steps, document_stream, drawn_sizes, go_on, share_the_batch
from alpha.gates.contracts.data.sampler import reference_window
from alpha.gates.contracts.data.support import Cases, folder, same_everywhere

# The order is a promise to every run that resumes: of these documents in sequences of 10, three a step, two steps a pool, seed 1, the
# sequences of the first two epochs.
_FROZEN_SIZES = [6, 6, 4, 12, 7, 3, 25, 4, 1, 10, 8, 2, 9]
_FROZEN = [2, 5, 0, 9, 8, 6, 4, 7, 3, 1, 8, 3, 4, 6, 7, 1, 0, 2, 5, 9]


def _make(stream: shards.TokenStream, sequence: int, batch: int, seed: int, buckets: int = 4, most: int = 0) -> bucketed.BucketedSampler:
    return bucketed.BucketedSampler(stream, sequence=sequence, global_batch=batch, seed=seed, buckets=buckets, most=most)


def counted_pairs(documents_T: np.ndarray, most: int) -> int:
    """Pairs of a query and a key of its document, not behind it, among the last `most` keys (0: all), looked at one by one."""
    place = np.arange(len(documents_T))
    apart = place[:, None] - place[None, :]
    return int(((documents_T[:, None] == documents_T[None, :]) & (apart >= 0) & (apart < (most or len(place)))).sum())


def reference_order(made: bucketed.BucketedSampler, pairs: list[int], epoch: int) -> list[int]:
    """Sequences that the samples of an epoch read, by lists alone."""
    size, batch = made.windows, made.global_batch
    first = epoch * size
    plain = [reference_window(first + i, size, made.seed) for i in range(size)]
    at = 0
    while (first + at) % batch and at < size:  # what belongs to a step that began in the epoch before
        at += 1
    order = plain[:at]
    while size - at >= batch:
        steps = min(made.buckets, (size - at) // batch)
        pool = sorted(enumerate(plain[at : at + steps * batch]), key=lambda x: (pairs[x[1]], x[0]))
        for step in range(steps):
            turn = reference_window((first + at) * steps + step, steps, made.seed)
            order += [window for _, window in sorted(pool[turn * batch : (turn + 1) * batch])]
        at += steps * batch
    return order + plain[at:]


def _order_as_reference(rng: np.random.Generator) -> Measured:
    """The order of epochs that are no whole number of steps, nor steps a whole number of pools, one sample at a time and all at once."""
    count = Checks()
    with folder() as root:
        for documents, sequence, batch, buckets in ((200, 24, 5, 4), (160, 30, 6, 2), (40, 16, 1, 7), (12, 40, 64, 2), (150, 20, 8, 1000)):
            made = _make(document_stream(root, drawn_sizes(rng, documents, 15.0)), sequence, batch, int(rng.integers(1 << 32)), buckets)
            pairs = made.pairs.tolist()
            for epoch in (0, 1, int(rng.integers(2, 50))):
                due = reference_order(made, pairs, epoch)
                samples = np.arange(made.windows, dtype=np.int64) + epoch * made.windows
                came = made.window_of(samples)
                count.that(came.tolist() == due, f"epoch {epoch} of {documents} documents, steps of {batch}, pools of {buckets}")
                count.that(sorted(due) == list(range(made.windows)), "a sequence is lost or read twice")
                for i in rng.integers(0, made.windows, 5).tolist():
                    count.that(made.window_of(samples[i : i + 1])[0] == due[i], f"sample {i} of epoch {epoch} by itself")
    return count.measured()


def _every_token_once(rng: np.random.Generator) -> Measured:
    """In an epoch each token is a target once, in the sequences of the packing."""
    count = Checks()
    with folder() as root:
        for documents, sequence, batch in ((250, 20, 4), (60, 35, 7)):
            stream, seed = document_stream(root, drawn_sizes(rng, documents, 15.0)), int(rng.integers(1 << 32))
            made = _make(stream, sequence, batch, seed)
            plain = packing.PackedSampler(stream, sequence=sequence, global_batch=batch, seed=seed)
            for epoch in (0, int(rng.integers(1, 9))):
                samples = np.arange(made.windows, dtype=np.int64) + epoch * made.windows
                got, due = made.read(samples, documents=True), plain.read(samples, documents=True)
                targets = got.targets_bT[got.targets_bT != packing.NO_TARGET]
                count.that(np.array_equal(np.sort(targets), np.arange(len(stream))), f"targets of epoch {epoch}")
                assert got.documents_bT is not None and due.documents_bT is not None
                rows = [sorted(map(bytes, np.concatenate(x, axis=1))) for x in (
                    (got.inputs_bT, got.targets_bT, got.documents_bT), (due.inputs_bT, due.targets_bT, due.documents_bT))]  # fmt: skip
                count.that(rows[0] == rows[1], f"sequences of epoch {epoch} are not those of the packing")
    return count.measured()


def _pairs_as_counted(rng: np.random.Generator) -> Measured:
    """Pairs of packed sequences and of windows against each pair looked at; what is told of attention against what batches hold."""
    count = Checks()
    with folder() as root:
        stream = document_stream(root, drawn_sizes(rng, 120, 14.0) + [5] * 12)  # so documents begin in the last window
        for most in (0, 1, 5, 100):
            made = _make(stream, 24, 4, int(rng.integers(1 << 32)), 3, most)
            for sampler in (made, packing.PackedSampler(stream, sequence=24, global_batch=4, seed=made.seed),
                            PermutedSampler(stream, sequence=24, global_batch=4, seed=made.seed)):  # fmt: skip
                steps, whole = sampler.windows // 4, counted_pairs(np.zeros(24), most)
                got = sampler.read(np.arange(sampler.windows, dtype=np.int64), documents=True)
                assert got.documents_bT is not None
                due = np.array([counted_pairs(row, most) for row in got.documents_bT])
                order = sampler.window_of(np.arange(sampler.windows, dtype=np.int64))
                own = bucketed.sequence_pairs(sampler, most)
                count.that(np.array_equal(own[order], due), f"pairs of {type(sampler).__name__}, {most} keys")
                told, read = bucketed.attention(sampler, most), due[: steps * 4].reshape(steps, 4)
                count.that(abs(told["attended"] - due.mean() / whole) < 1e-12, f"attended, {most} keys")
                count.that(abs(told["heaviest"] - read.max(axis=1).sum() / read.mean(axis=1).sum()) < 1e-12, f"heaviest, {most} keys")
                count.that(bucketed.attention(sampler, most, False) == {"attended": 1.0, "heaviest": 1.0}, "attention across documents")
    return count.measured()


def _steps_are_even(rng: np.random.Generator) -> Measured:
    """What it is for: a pool's steps differ, the sequences of one hardly do; so the heaviest of a step is near the mean."""
    count = Checks()
    with folder() as root:
        stream = document_stream(root, drawn_sizes(rng, 2500, 20.0))
        for batch in (4, 16):
            seed = int(rng.integers(1 << 32))
            even = bucketed.attention(_make(stream, 128, batch, seed, 16))
            plain = bucketed.attention(packing.PackedSampler(stream, sequence=128, global_batch=batch, seed=seed))
            count.that(even["attended"] == plain["attended"], "bucketing changed what is attended")
            left = (even["heaviest"] - 1) / (plain["heaviest"] - 1)
            count.that(left < 0.5, f"{left:.2f} of the unevenness is left in steps of {batch}")
    return count.measured()


def _ranks_share_the_batch(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream, seed = document_stream(root, drawn_sizes(rng, 300, 20.0)), int(rng.integers(1 << 32))
        share_the_batch(count, lambda: _make(stream, 32, 24, seed, 3), rng)
    return count.measured()


def steps_digest(data: bytes) -> str:
    """Hash of what a few steps see (also called in a fresh process)."""
    with folder() as root:
        return digest_of_steps(_make(document_stream(root, [1 + data[i % len(data)] for i in range(90)]), 50, 8, data[0], 3))


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(steps_digest, rng.bytes(20), rng)


def _resume(rng: np.random.Generator) -> Measured:
    """A sampler made anew at any step, by any number of ranks, goes on where an uninterrupted one is; steps in any order."""
    count = Checks()
    with folder() as root:
        stream = document_stream(root, drawn_sizes(rng, 90, 20.0))
        go_on(count, lambda: _make(stream, 32, 8, 3), range(30), 30, 6, rng)
    return count.measured()


def _frozen(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream = document_stream(root, _FROZEN_SIZES)
        made = _make(stream, 10, 3, 1, 2)
        came = made.window_of(np.arange(2 * made.windows, dtype=np.int64)).tolist()
        count.that(came == _FROZEN, f"the order of version 1 changed: {came}")
        facts = ((10, 2, 1, 2, 0), (9, 2, 1, 2, 0), (10, 3, 1, 2, 0), (10, 2, 2, 2, 0), (10, 2, 1, 3, 0), (10, 2, 1, 2, 4))
        hashes = [_make(stream, *each).hash for each in facts]
        hashes.append(packing.PackedSampler(stream, sequence=10, global_batch=2, seed=1).hash)
        count.that(len(set(hashes)) == len(hashes), "two samplers share a hash")
    count.add(str(came).encode())
    return count.measured()


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream = document_stream(root, [20, 21])
        made = _make(stream, 4, 6, int(rng.integers(100)))
        for shares in ((-1, 0, 1), (0, 1, 1), (0, -1, 2), (0, 0, 4), (0, 0, 0)):
            count.refuses(InputError, made.batch, f"share {shares}", *shares)
        for facts in ((0, 1, 0, 2, 0), (41, 1, 0, 2, 0), (4, 0, 0, 2, 0), (4, 1, -1, 2, 0), (4, 1, 1 << 64, 2, 0),
                      (4, 1, 0, 1, 0), (4, 1, 0, 0, 0), (4, 1, 0, -2, 0), (4, 1, 0, 2, -1)):
            count.refuses(InputError, _make, str(facts), stream, *facts)
    return count.measured()


CASES: Cases = {
    "parity": [
        ("the order is that of pools walked one by one", _order_as_reference),
        ("every token a target once", _every_token_once),
        ("pairs as counted one by one", _pairs_as_counted),
        ("a step's sequences cost about the same", _steps_are_even),
        ("ranks and microbatches share the batch", _ranks_share_the_batch),
    ],
    "determinism": [
        ("steps are the same in a fresh process", _same_everywhere),
        ("a resumed run sees what an uninterrupted one sees", _resume),
        ("the order is frozen and the hash tells samplers apart", _frozen),
    ],
    "faults": [("impossible shares, sizes and buckets are refused", _bad_input)],
}
