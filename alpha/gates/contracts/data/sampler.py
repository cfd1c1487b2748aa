"""Cases of `sampler.permuted`: against the same network walked one number at a time with Python integers."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import numpy as np

from alpha.component import Measured
from alpha.data import sampler, shards
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import limits
from alpha.gates.contracts.data.support import Cases, folder, same_everywhere

# The order is a promise to every run that resumes: seed 1, epoch 2, 10 windows.
_FROZEN_ORDER = [4, 8, 7, 6, 0, 5, 2, 3, 9, 1]

_ALL = (1 << 64) - 1


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _ALL
    return z ^ (z >> 31)


def reference_window(sample: int, windows: int, seed: int) -> int:
    """The window of a global sample: eight Feistel rounds, walked until inside."""
    golden = 0x9E3779B97F4A7C15
    epoch, value = divmod(sample, windows)
    key = _mix((_mix((seed + golden) & _ALL) + (epoch + 1) * golden) & _ALL)
    half = 4
    while 1 << (2 * half) < windows:
        half += 1
    while True:
        left, right = value >> half, value % (1 << half)
        for number in range(1, 9):
            round_key = _mix((key + number * golden) & _ALL)
            left, right = right, left ^ (_mix((right + round_key) & _ALL) % (1 << half))
        value = (left << half) + right
        if value < windows:
            return value


def made_up_stream(root: Path, tokens: int, pieces: int = 3) -> shards.TokenStream:
    """A stream whose token at place i is i mod 60000, in `pieces` shards of some documents."""
    bounds = np.linspace(0, tokens, pieces + 1).astype(int)
    opened = []
    for index in range(pieces):
        size = int(bounds[index + 1] - bounds[index])
        values = ((np.arange(size) + bounds[index]) % 60_000).astype(np.uint16)
        starts = np.unique(np.array([0, size // 3, size // 2, size], dtype=np.int64))
        path = root / f"{tokens}-{index}.tokens"
        shards.write_shard(
            path,
            values,
            starts,
            {
                "index": index,
                "last": index == pieces - 1,
                "corpus": "c" * 64,
                "tokenizer": "t" * 64,
                "vocab_size": 60_000,
                "text_bytes": size,
            },
        )
        opened.append(shards.open_shard(path))
    return shards.TokenStream(opened)


def _make(stream: shards.TokenStream, sequence: int, batch: int, seed: int) -> sampler.PermutedSampler:
    return sampler.PermutedSampler(stream, sequence=sequence, global_batch=batch, seed=seed)


def _windows_as_reference(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        for windows in (1, 2, 3, 17, 256, 257, 1000):
            stream, seed = (
                made_up_stream(root, windows * 2 + 1 + int(rng.integers(2)), pieces=1),
                int(rng.integers(0, 1 << 63)) * 2 + 1,
            )
            made = _make(stream, 2, 4, seed)
            samples = np.unique(np.concatenate([np.arange(5), rng.integers(0, 5 * windows, 40), rng.integers(0, 1 << 40, 5)]))
            for sample, came in zip(samples.tolist(), made.window_of(samples).tolist()):
                count.that(came == reference_window(sample, windows, seed), f"sample {sample} of {windows} windows, seed {seed}")
    return count.measured()


def _tokens_as_reference(rng: np.random.Generator) -> Measured:
    """Inputs are the tokens of the window, targets the same one place later, documents those of the inputs."""
    count = Checks()
    with folder() as root:
        for sequence in (1, int(rng.integers(2, 40))):
            stream = made_up_stream(root, 1500 + int(rng.integers(100)))
            seed = int(rng.integers(1 << 32))
            made = _make(stream, sequence, 6, seed)
            owners = stream.document_ids([0], len(stream))[0]
            for step in rng.integers(0, 1000, 8).tolist():
                batch = made.batch(step, documents=True)
                shapes = {batch.inputs_bT.shape, batch.targets_bT.shape} == {(6, sequence)}
                count.that(shapes and batch.inputs_bT.dtype == batch.targets_bT.dtype == np.int32, "shape or dtype")
                count.that(batch.samples_b.tolist() == list(range(step * 6, step * 6 + 6)) and batch.samples_b.dtype == np.int64, "ids")
                for row, sample in enumerate(batch.samples_b.tolist()):
                    first = reference_window(sample, (len(stream) - 1) // sequence, seed) * sequence
                    count.that(batch.inputs_bT[row].tolist() == list(range(first, first + sequence)), "inputs")
                    count.that(batch.targets_bT[row].tolist() == list(range(first + 1, first + sequence + 1)), "targets")
                    assert batch.documents_bT is not None
                    count.that(np.array_equal(batch.documents_bT[row], owners[first : first + sequence]), "documents")
    return count.measured()


def _every_window_once(rng: np.random.Generator) -> Measured:
    """Each epoch visits each window exactly once; the windows are all that fit; each epoch has its own order."""
    count = Checks()
    with folder() as root:
        for windows, extra in ((1, 0), (2, 1), (5, 3), (64, 0), (65, 2), (700, 3)):
            sequence = 4
            made = _make(made_up_stream(root, windows * sequence + 1 + extra), sequence, 2, int(rng.integers(1 << 32)))
            count.that(made.windows == windows, f"{made.windows} windows instead of {windows}")
            for step in (0, 1, windows, int(rng.integers(1, 1 << 30))):
                count.that(made.epoch(step) == 2 * step / windows, f"epochs before step {step}")
            orders = []
            for epoch in (0, 1, 2, int(rng.integers(3, 1 << 30))):
                order = made.window_of(np.arange(windows, dtype=np.int64) + epoch * windows)
                count.that(np.array_equal(np.sort(order), np.arange(windows)), f"epoch {epoch} of {windows} windows")
                orders.append(order.tobytes())
            count.that(windows < 60 or len(set(orders)) == len(orders), "two epochs share an order")
            count.that(windows < 60 or np.arange(windows).tobytes() not in orders, "an epoch is not shuffled")
    return count.measured()


def _orders_are_mixed(rng: np.random.Generator) -> Measured:
    """Rank correlation of place and window, and between two epochs, within 5 standard deviations (1 / sqrt(n)) of none."""
    windows = 4000
    with folder() as root:
        made = _make(made_up_stream(root, windows + 1), 1, 1, int(rng.integers(1 << 32)))
        other = _make(made.stream, 1, 1, made.seed + 1)
        places = np.arange(windows, dtype=np.int64)
        orders = [
            places,
            made.window_of(places),
            made.window_of(places + windows),
            made.window_of(places + 2 * windows),
            other.window_of(places),
        ]
    worst = max(abs(float(np.corrcoef(a, b)[0, 1])) for i, a in enumerate(orders) for b in orders[:i])
    return Measured(error=worst, bound=5 / math.sqrt(windows), cases=10, note="correlation")


def _ranks_share_the_batch(rng: np.random.Generator) -> Measured:
    """For every number of shards and microbatches the parts are disjoint and together the one global batch, row for row."""
    count = Checks()
    with folder() as root:
        made = _make(made_up_stream(root, 2000), 8, 24, int(rng.integers(1 << 32)))
        for step in (0, *rng.integers(1, 500, 4).tolist()):
            whole = made.batch(step)
            for ranks in (1, 2, 3, 4, 8, 24):
                for micro in (1, 24 // ranks):
                    parts = [made.batch(step, r, ranks, micro=m, n_micro=micro) for r in range(ranks) for m in range(micro)]
                    samples = np.concatenate([part.samples_b for part in parts])
                    count.that(len(np.unique(samples)) == 24, f"{ranks} ranks overlap at step {step}")
                    count.that(np.array_equal(samples, whole.samples_b), f"samples of {ranks} ranks, {micro} microbatches")
                    inputs, targets = ([getattr(p, name) for p in parts] for name in ("inputs_bT", "targets_bT"))
                    count.that(np.array_equal(np.concatenate(inputs), whole.inputs_bT), f"inputs of {ranks} ranks")
                    count.that(np.array_equal(np.concatenate(targets), whole.targets_bT), f"targets of {ranks} ranks")
    return count.measured()


def _evaluation_sees_all(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        for tokens in (11, 12, 101, int(rng.integers(50, 500))):
            stream = made_up_stream(root, tokens)
            for batch in range(1, 8):  # one size may divide the windows, and then hides a last batch that is lost or miscounted
                seen = []
                for made, rows in sampler.ordered_batches(stream, sequence=5, batch=batch):
                    count.that(made.inputs_bT.shape == (batch, 5) and 1 <= rows <= batch, "shape")
                    count.that(np.array_equal(made.targets_bT, made.inputs_bT + 1), "targets")
                    seen += made.inputs_bT[:rows, 0].tolist()
                count.that(seen == list(range(0, (tokens - 1) // 5 * 5, 5)), f"windows of {tokens} tokens in batches of {batch}")
    return count.measured()


def steps_digest(data: bytes) -> str:
    """Hash of what a few steps see; `data` is the seed (also called in a fresh process)."""
    (seed,) = struct.unpack("<Q", data)
    digest = hashlib.sha256()
    with folder() as root:
        made = _make(made_up_stream(root, 3001), 7, 8, seed)
        for step in (0, 1, 53, 54, 10_000):
            batch = made.batch(step)
            for array in (batch.inputs_bT, batch.targets_bT, batch.samples_b):
                digest.update(array.tobytes())
    return f"{made.hash} {digest.hexdigest()}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(steps_digest, rng.bytes(8), rng)


def _resume(rng: np.random.Generator) -> Measured:
    """A sampler made anew at any step, on any number of ranks, goes on where an uninterrupted one is, over epoch ends too."""
    count = Checks()
    with folder() as root:
        stream, seed = made_up_stream(root, 301), int(rng.integers(1 << 32))
        running = _make(stream, 4, 8, seed)
        uninterrupted = [running.batch(step) for step in range(30)]  # 75 windows: three epoch ends
        for stop, ranks in zip(rng.integers(0, 30, 6).tolist(), (1, 2, 4, 8, 2, 4)):
            resumed = _make(stream, 4, 8, seed)
            for step in range(stop, 30):
                parts = [resumed.batch(step, rank, ranks) for rank in range(ranks)]
                same = np.array_equal(np.concatenate([p.inputs_bT for p in parts]), uninterrupted[step].inputs_bT)
                same &= np.array_equal(np.concatenate([p.samples_b for p in parts]), uninterrupted[step].samples_b)
                count.that(same, f"resumed at {stop} with {ranks} ranks, step {step} differs")
        for step in rng.permutation(30).tolist():  # random access
            count.that(np.array_equal(running.batch(step).inputs_bT, uninterrupted[step].inputs_bT), f"step {step} asked again")
        count.add(b"".join(batch.inputs_bT.tobytes() for batch in uninterrupted))
        seen = np.sort(running.window_of(np.concatenate([b.samples_b for b in uninterrupted])[:75]))
        count.that(np.array_equal(seen, np.arange(75)), "the first epoch skipped a window")
    return count.measured()


def _order_is_frozen(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream = made_up_stream(root, 41)
        made = _make(stream, 4, 2, 1)
        came = made.window_of(np.arange(20, 30, dtype=np.int64)).tolist()
        count.that(came == _FROZEN_ORDER, f"the order of version 1 changed: {came}")
        hashes = [_make(stream, *facts).hash for facts in ((4, 2, 1), (5, 2, 1), (4, 3, 1), (4, 2, 2))]
        hashes.append(_make(shards.TokenStream([made_up_foreign(root)]), 4, 2, 1).hash)
        count.that(len(set(hashes)) == len(hashes), "two samplers share a hash")
        count.that(_make(made_up_stream(root, 41, 1), 4, 2, 1).hash == made.hash, "the hash depends on the cut into shards")
    count.add(str(came).encode())
    return count.measured()


def made_up_foreign(root: Path) -> shards.Shard:
    """A shard of another corpus with the same number of tokens."""
    path = root / "foreign.tokens"
    shards.write_shard(
        path,
        np.zeros(41, dtype=np.uint16),
        np.array([0, 41], dtype=np.int64),
        {"index": 0, "last": True, "corpus": "d" * 64, "tokenizer": "t" * 64, "vocab_size": 60_000, "text_bytes": 41},
    )
    return shards.open_shard(path)


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream = made_up_stream(root, 41)
        made = _make(stream, 4, 6, int(rng.integers(100)))
        for shares in ((-1, 0, 1), (0, 1, 1), (0, -1, 2), (0, 0, 4), (0, 0, 0), (0, 2, 2)):
            count.refuses(InputError, made.batch, f"share {shares}", *shares)
        for micro, of in ((1, 1), (-1, 2), (0, 4), (0, 0)):
            count.refuses(InputError, made.batch, f"{micro} of {of}", 0, 0, 1, micro=micro, n_micro=of)
        for sequence, batch, seed in ((0, 1, 0), (41, 1, 0), (1000, 1, 0), (4, 0, 0), (4, 1, -1), (4, 1, 1 << 64)):
            count.refuses(InputError, _make, f"{sequence, batch, seed}", stream, sequence, batch, seed)
        count.that(_make(stream, 40, 1, 0).windows == 1, "one window that just fits is refused")
    return count.measured()


def evaluation_digest(data: bytes) -> str:
    """Hash of all evaluation batches (also called in a fresh process)."""
    digest = hashlib.sha256()
    with folder() as root:
        for made, rows in sampler.ordered_batches(made_up_stream(root, 500 + data[0]), sequence=7, batch=4):
            digest.update(made.inputs_bT.tobytes() + made.targets_bT.tobytes() + made.samples_b.tobytes() + bytes([rows]))
    return digest.hexdigest()


def _evaluation_same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(evaluation_digest, rng.bytes(1), rng)


def _bad_evaluation(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream = made_up_stream(root, 41)
        for sequence, batch in ((4, 0), (4, -1), (0, 1), (41, 1), (int(rng.integers(42, 1000)), 1)):
            batches = sampler.ordered_batches(stream, sequence=sequence, batch=batch)
            count.refuses(InputError, list, f"{sequence, batch}", batches)
    return count.measured()


ORDERED_CASES: Cases = {
    "parity": [("evaluation sees every window once", _evaluation_sees_all)],
    "determinism": [("batches are the same in a fresh process", _evaluation_same_everywhere)],
    "faults": [("impossible sizes are refused", _bad_evaluation)],
}

CASES: Cases = {
    "parity": [
        ("windows as the reference permutes them", _windows_as_reference),
        ("inputs, targets and documents", _tokens_as_reference),
        ("every window once per epoch, in a new order", _every_window_once),
        ("orders are mixed", _orders_are_mixed),
        ("ranks and microbatches share the batch", _ranks_share_the_batch),
    ],
    "determinism": [
        ("steps are the same in a fresh process", _same_everywhere),
        ("a resumed run sees what an uninterrupted one sees", _resume),
        ("the order is frozen and the hash tells samplers apart", _order_is_frozen),
    ],
    "faults": [("impossible shares and sizes are refused", _bad_input), ("a walk without end is refused", limits.no_permutation)],
}
