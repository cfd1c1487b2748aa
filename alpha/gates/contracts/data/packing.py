"""Cases of `sampler.packed`: every token a target once, documents whole, the packing against best fit walked piece by piece."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from alpha.component import Measured
from alpha.data import packing, shards
from alpha.data.sampler import Batch, PermutedSampler
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.sampler import reference_window
from alpha.gates.contracts.data.support import Cases, folder, same_everywhere

# Sizes and a sequence that best fit packs otherwise than first fit and a search that is off by one, and than the newest of equal rooms.
_APART = (([12, 9, 9, 2], 20), ([7, 7, 3], 10))
# The packing is a promise to every run that resumes: documents of these sizes in sequences of 10.
_FROZEN_SIZES = [6, 6, 4, 12, 7, 3, 25, 4, 1, 10]
_FROZEN = [[16], [38], [48], [68], [28, 35], [0, 12], [6, 63], [26, 58, 67]]


def document_stream(root: Path, sizes: list[int], shards_of_it: int = 2) -> shards.TokenStream:
    """A stream of documents of these sizes whose token at place i is i: at most 65,536 tokens."""
    opened, begin = [], 0
    for index, own in enumerate(np.array_split(np.array(sizes), shards_of_it)):
        path = root / f"{len(sizes)}-{sum(sizes)}-{index}.tokens"
        starts = np.concatenate([[0], np.cumsum(own)]).astype(np.int64)
        facts = {"index": index, "last": index == shards_of_it - 1, "corpus": "c" * 64, "tokenizer": "t" * 64, "vocab_size": 1 << 16,
                 "text_bytes": int(starts[-1])}
        shards.write_shard(path, (begin + np.arange(starts[-1])).astype(np.uint16), starts, facts)
        opened.append(shards.open_shard(path))
        begin += int(starts[-1])
    return shards.TokenStream(opened)


def drawn_sizes(rng: np.random.Generator, documents: int, typical: float) -> list[int]:
    """Lengths of documents, log-normal with that median, at least 1."""
    return [max(1, int(n)) for n in rng.lognormal(np.log(typical), 1.0, documents)]


def _make(stream: shards.TokenStream, sequence: int, batch: int, seed: int) -> packing.PackedSampler:
    return packing.PackedSampler(stream, sequence=sequence, global_batch=batch, seed=seed)


def reference_packing(sizes: list[int], sequence: int) -> list[list[tuple[int, int]]]:
    """(start, length) of the pieces of each sequence: best fit decreasing, looking at every sequence that was begun."""
    pieces, begin = list[tuple[int, int]](), 0
    for size in sizes:
        pieces += [(begin + at, min(sequence, size - at)) for at in range(0, size, sequence)]
        begin += size
    made = list[list[tuple[int, int]]]()
    for first in range(0, len(pieces), packing.GROUP):
        begun, rooms = list[list[tuple[int, int]]](), list[int]()
        for piece in sorted(pieces[first : first + packing.GROUP], key=lambda p: (-p[1], p[0])):
            least, own = min(((room, i) for i, room in enumerate(rooms) if room >= piece[1]), default=(sequence, len(begun)))
            if own == len(begun):
                begun.append([])
                rooms.append(sequence)
            begun[own].append(piece)
            rooms[own] = least - piece[1]
        made += [sorted(own) for own in begun]
    return made


def _epoch(made: packing.PackedSampler, epoch: int = 0) -> Batch:
    return made.read(np.arange(made.windows, dtype=np.int64) + epoch * made.windows, documents=True)


def _every_token_once(rng: np.random.Generator) -> Measured:
    """In an epoch each token is a target once, its input the token before it; documents and padding are told apart."""
    count = Checks()
    with folder() as root:
        for sequence, typical in ((1, 3.0), (8, 3.0), (int(rng.integers(2, 60)), 30.0), (200, 30.0)):
            stream = document_stream(root, drawn_sizes(rng, int(rng.integers(4, 300)), typical))
            if len(stream) <= sequence:
                continue
            made, owner = _make(stream, sequence, 2, int(rng.integers(1 << 32))), stream.document_ids([0], len(stream))[0]
            got = _epoch(made, int(rng.integers(3)))
            assert got.documents_bT is not None
            counts = got.targets_bT != packing.NO_TARGET
            targets = got.targets_bT[counts]
            count.that(np.array_equal(np.sort(targets), np.arange(len(stream))), f"targets of {sequence}")
            count.that(np.array_equal(got.inputs_bT[counts], (targets - 1) % len(stream)), f"inputs of {sequence}")
            count.that(np.array_equal(got.documents_bT[counts], owner[targets]), f"documents of {sequence}")
            count.that(bool((got.inputs_bT[~counts] == len(stream) - 1).all()), "padding is not the end of a document")
            count.that(bool((got.documents_bT[~counts] == stream.documents).all()), "padding belongs to a document")
            count.that(bool((np.diff(counts.astype(int), axis=1) <= 0).all()), "padding is not at the end")
            count.that(bool((np.diff(np.where(counts, got.documents_bT, stream.documents), axis=1) >= 0).all()), "order of documents")
            shapes = {x.shape for x in (got.inputs_bT, got.targets_bT, got.documents_bT)} == {(made.windows, sequence)}
            count.that(shapes and got.inputs_bT.dtype == got.targets_bT.dtype == got.documents_bT.dtype == np.int32, "shape or dtype")
    return count.measured()


def _documents_stay_whole(rng: np.random.Generator) -> Measured:
    """A document that fits into a sequence lies in one; a longer one is cut at multiples of the sequence, into as few pieces as can be."""
    count = Checks()
    with folder() as root:
        sizes = drawn_sizes(rng, 200, 20.0)
        stream, sequence = document_stream(root, sizes), int(rng.integers(15, 40))
        got = _epoch(_make(stream, sequence, 2, int(rng.integers(1 << 32))))
        assert got.documents_bT is not None
        rows = [set(row[targets != packing.NO_TARGET].tolist()) for row, targets in zip(got.documents_bT, got.targets_bT)]
        for document, size in enumerate(sizes):
            count.that(sum(document in row for row in rows) == -(-size // sequence), f"document {document} of {size} tokens")
        firsts = np.cumsum([0, *sizes])
        for row in got.targets_bT:
            place = int(row[0])
            size = sizes[int(np.searchsorted(firsts, place, side="right")) - 1]
            count.that(size <= sequence or (place - int(firsts[np.searchsorted(firsts, place, side="right") - 1])) % sequence == 0, "cut")
    return count.measured()


def _many_pieces(rng: np.random.Generator) -> Measured:
    """More pieces than 16 bits count: each lies in one sequence, whole."""
    sizes = rng.integers(1, 3, 70_000)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    made, count = packing.pack(starts, 2), Checks()
    order = np.argsort(made.starts)
    count.that(np.array_equal(made.starts[order], starts[:-1]) and np.array_equal(made.lengths[order], sizes), "pieces")
    count.that(int(np.add.reduceat(made.lengths, made.firsts[:-1]).max()) <= 2, "a sequence that is too long")
    return count.measured()


def _packing_as_reference(rng: np.random.Generator) -> Measured:
    """The same sequences as a search over all that were begun, in one group and in several, and read in the order of the permutation."""
    count = Checks()
    with folder() as root:
        drawn = ((300, 20.0, 32), (120, 60.0, 25), (packing.GROUP + 600, 3.0, 12))
        for sizes, sequence in (*_APART, *((drawn_sizes(rng, documents, typical), sequence) for documents, typical, sequence in drawn)):
            made = _make(document_stream(root, sizes), sequence, 2, int(rng.integers(1 << 32)))
            due, p = reference_packing(sizes, sequence), made.packing
            own = [list(zip(p.starts[a:b].tolist(), p.lengths[a:b].tolist())) for a, b in zip(p.firsts, p.firsts[1:])]
            count.that(own == due, f"packing of {len(sizes)} documents in {sequence}")
            count.that(made.windows == len(due), "number of sequences")
            for sample in rng.integers(0, 4 * len(due), 10).tolist():
                expected = [start + i for start, n in due[reference_window(sample, len(due), made.seed)] for i in range(n)]
                came = made.read(np.array([sample])).targets_bT[0]
                count.that(came.tolist() == expected + [packing.NO_TARGET] * (sequence - len(expected)), f"sample {sample}")
    return count.measured()


def _waste(rng: np.random.Generator) -> Measured:
    """What is told of an epoch is what is counted in it, of packed documents and of windows."""
    count = Checks()
    with folder() as root:
        sizes = drawn_sizes(rng, 150, 20.0)
        stream, sequence = document_stream(root, sizes), int(rng.integers(10, 40))
        ends = np.cumsum(sizes)
        for kind in (packing.PackedSampler, PermutedSampler):
            made = kind(stream, sequence=sequence, global_batch=2, seed=1)
            got, told = made.read(np.arange(made.windows, dtype=np.int64)).targets_bT, packing.waste(made)
            held = np.searchsorted(ends, got, side="right") * (got != packing.NO_TARGET) - (got == packing.NO_TARGET)
            rows = np.zeros(len(sizes), int)
            for row in held:
                rows[np.unique(row[row >= 0])] += 1
            count.that(told["sequences"] == len(got) and told["documents"] == len(sizes), "sequences and documents")
            count.that(told["cut"] == int((rows > 1).sum()), f"{told['cut']} documents cut, counted {int((rows > 1).sum())}: {kind}")
            count.that(abs(told["padding"] - float((got == packing.NO_TARGET).mean())) < 1e-12, "padding")
            count.that(abs(told["left_out"] - (1 - (got != packing.NO_TARGET).sum() / sum(sizes))) < 1e-12, "left out")
    return count.measured()


def share_the_batch(count: Checks, anew: Callable[[], PermutedSampler], rng: np.random.Generator) -> None:
    """Parts that ranks read, each from a sampler made anew, are together the one batch of 24: several numbers of ranks and microbatches."""
    made = anew()
    for step in (0, *rng.integers(1, 500, 4).tolist()):
        whole = made.batch(step, documents=True)
        for ranks, micros in ((2, 1), (3, 4), (8, 1), (24, 1), (1, 24)):
            each = [anew() for _ in range(ranks)]
            parts = [each[r].batch(step, r, ranks, micro=m, n_micro=micros, documents=True) for r in range(ranks) for m in range(micros)]
            for name in ("inputs_bT", "targets_bT", "documents_bT", "samples_b"):
                same = np.array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))
                count.that(same, f"{name} of {ranks} ranks, {micros} microbatches, step {step}")


def digest_of_steps(made: PermutedSampler) -> str:
    """Hash of a sampler, and of what a few of its steps see."""
    digest = hashlib.sha256()
    for step in (0, 1, 30, 10_000):
        batch = made.batch(step, documents=True)
        assert batch.documents_bT is not None
        digest.update(batch.inputs_bT.tobytes() + batch.targets_bT.tobytes() + batch.documents_bT.tobytes())
    return f"{made.hash} {digest.hexdigest()}"


def go_on(count: Checks, anew: Callable[[], PermutedSampler], stops: Iterable[int], end: int, ahead: int, rng: np.random.Generator) -> None:
    """A sampler made anew at each of `stops`, by 1, 2, 4 or 8 ranks in turn, sees up to `ahead` steps before `end` as an uninterrupted one
    did, which sees them again in any order."""
    running = anew()
    uninterrupted = [running.batch(step).targets_bT for step in range(end)]
    for stop, ranks in zip(stops, itertools.cycle((1, 2, 4, 8))):
        resumed = anew()
        for step in range(stop, min(stop + ahead, end)):
            came = np.concatenate([resumed.batch(step, rank, ranks).targets_bT for rank in range(ranks)])
            count.that(np.array_equal(came, uninterrupted[step]), f"resumed at {stop} with {ranks} ranks: step {step}")
    for step in rng.permutation(end).tolist():
        count.that(np.array_equal(running.batch(step).targets_bT, uninterrupted[step]), f"step {step} asked again")


def _ranks_share_the_batch(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream, seed = document_stream(root, drawn_sizes(rng, 200, 20.0)), int(rng.integers(1 << 32))
        share_the_batch(count, lambda: _make(stream, 32, 24, seed), rng)
    return count.measured()


def steps_digest(data: bytes) -> str:
    """Hash of what a few steps see (also called in a fresh process)."""
    with folder() as root:
        return digest_of_steps(_make(document_stream(root, [1 + data[i % len(data)] for i in range(90)]), 50, 8, data[0]))


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(steps_digest, rng.bytes(20), rng)


def _resume(rng: np.random.Generator) -> Measured:
    """A sampler made anew at any step, by any number of ranks, goes on where an uninterrupted one is; steps in any order."""
    count = Checks()
    with folder() as root:
        stream = document_stream(root, drawn_sizes(rng, 60, 20.0))
        go_on(count, lambda: _make(stream, 32, 8, 3), rng.integers(0, 20, 4).tolist(), 20, 20, rng)
    return count.measured()


def _frozen(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        stream = document_stream(root, _FROZEN_SIZES)
        p = _make(stream, 10, 2, 1).packing
        came = [p.starts[a:b].tolist() for a, b in zip(p.firsts, p.firsts[1:])]
        count.that(came == _FROZEN, f"the packing of version 1 changed: {came}")
        hashes = [_make(stream, *facts).hash for facts in ((10, 2, 1), (9, 2, 1), (10, 3, 1), (10, 2, 2))]
        hashes.append(PermutedSampler(stream, sequence=10, global_batch=2, seed=1).hash)
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
        for sequence, batch, seed in ((0, 1, 0), (41, 1, 0), (4, 0, 0), (4, 1, -1), (4, 1, 1 << 64)):
            count.refuses(InputError, _make, f"{sequence, batch, seed}", stream, sequence, batch, seed)
    return count.measured()


class _Asked(shards.TokenStream):
    """Notes what is asked of it."""

    def __init__(self, own: Sequence[shards.Shard]) -> None:
        super().__init__(own)
        self.order = list[object]()

    def ahead(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.order.append([(int(a), int(a + n)) for a, n in zip(starts, lengths, strict=True)])
        super().ahead(starts, lengths)

    def windows(self, starts: ArrayLike, length: int) -> np.ndarray:
        self.order.append("read")
        return super().windows(starts, length)


def _asked_at_once(rng: np.random.Generator) -> Measured:
    """All that the sequences of a batch hold, and the token before each piece, is asked for before the first is read."""
    count = Checks()
    with folder() as root:
        stream = _Asked(document_stream(root, drawn_sizes(rng, 40, 12.0)).shards)
        sampler = _make(stream, 16, 3, int(rng.integers(1 << 30)))
        samples = rng.permutation(sampler.windows)[:3]
        p = sampler.packing
        stream.order.clear()
        want = [(max(int(p.starts[i]) - 1, 0), int(p.starts[i] + p.lengths[i])) for w in sampler.window_of(samples).tolist()
                for i in range(p.firsts[w], p.firsts[w + 1])]
        sampler.read(samples)
        count.that(stream.order == [want, *["read"] * len(want)], f"{stream.order} for {want}")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("every token a target once", _every_token_once),
        ("documents stay whole", _documents_stay_whole),
        ("the packing is best fit, and read in the sampler's order", _packing_as_reference),
        ("many pieces", _many_pieces),
        ("the waste that is told is there", _waste),
        ("a batch is asked for at once", _asked_at_once),
        ("ranks and microbatches share the batch", _ranks_share_the_batch),
    ],
    "determinism": [
        ("steps are the same in a fresh process", _same_everywhere),
        ("a resumed run sees what an uninterrupted one sees", _resume),
        ("the packing is frozen and the hash tells samplers apart", _frozen),
    ],
    "faults": [("impossible shares and sizes are refused", _bad_input)],
}
