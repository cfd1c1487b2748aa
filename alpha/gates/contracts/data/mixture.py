"""Cases of `sampler.mixed`: turns against Tijdeman's rule in fractions, rows against the sources' own samplers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from alpha.component import Measured
from alpha.data import mixture, shards
from alpha.data.corpus import open_corpus
from alpha.data.sampler import PermutedSampler
from alpha.data.split import split_by_file
from alpha.errors import ConfigError, InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import limits
from alpha.gates.contracts.data.support import Cases, folder, same_everywhere, write_texts

# The turns are a promise to every run that resumes: weights 3, 3 and 2.
_FROZEN_TURNS = [0, 1, 2, 0, 1, 2, 0, 1]

SPAN = 20_000
"""Source i of a made-up mixture has the tokens from i SPAN on, so that a token tells its source."""


def source_stream(root: Path, number: int, tokens: int) -> shards.TokenStream:
    """A stream of one document whose token at place p is `number` SPAN + p."""
    path = root / f"source-{number}-{tokens}.tokens"
    facts = {"index": 0, "last": True, "corpus": f"{number}".zfill(64), "tokenizer": "t" * 64, "vocab_size": 1 << 16, "text_bytes": tokens}
    shards.write_shard(path, (number * SPAN + np.arange(tokens)).astype(np.uint16), np.array([0, tokens], np.int64), facts)
    return shards.TokenStream([shards.open_shard(path)])


def reference_turns(weights: list[int]) -> list[int]:
    """The source of each sample of one period, by Tijdeman's rule."""
    k, period = len(weights), sum(weights)
    share = [Fraction(a, period) for a in weights]
    least, had, made = Fraction(1, 2 * k - 2) if k > 1 else Fraction(0), [0] * k, []
    for n in range(1, period + 1):
        owed = [share[i] * n - had[i] for i in range(k)]
        made.append(min((i for i in range(k) if owed[i] >= least), key=lambda i: ((1 - least - owed[i]) / share[i], i)))
        had[made[-1]] += 1
    return made


def _weights(rng: np.random.Generator) -> list[int]:
    found = rng.integers(1, 30, int(rng.integers(1, 6))).tolist()
    return [int(a) // int(np.gcd.reduce(found)) for a in found]


def _mixed(root: Path, sizes: list[int], weights: list[int], batch: int = 12, seed: int = 5) -> mixture.MixedSampler:
    return mixture.MixedSampler([PermutedSampler(source_stream(root, i, size), sequence=4, global_batch=batch, seed=seed + i)
                                 for i, size in enumerate(sizes)], weights)


def _turns_as_reference(rng: np.random.Generator) -> Measured:
    """The rule's turns in any round; each source's samples come in order, none left out; counts are those of the turns."""
    count = Checks()
    for weights in ([1], [1, 1], [7, 3], [1, 60], [1, 1, 1, 97], _weights(rng), _weights(rng)):
        turns, period = mixture.Turns(weights), sum(weights)
        first = period * int(rng.integers(0, 1 << 30))
        source, place = turns.of(np.arange(first, first + 3 * period, dtype=np.int64))
        count.that(source.tolist() == 3 * reference_turns(weights), f"turns of {weights}")
        for i, had in enumerate(turns.counts(first)):
            own = place[source == i]
            count.that(own.tolist() == list(range(had, had + 3 * weights[i])), f"samples of source {i} of {weights}")
        cut = first + int(rng.integers(3 * period))
        came = [had + int((source[: cut - first] == i).sum()) for i, had in enumerate(turns.counts(first))]
        count.that(came == turns.counts(cut), f"counts of {weights} after {cut}")
        count.that(turns.counts(first) == [first // period * a for a in weights], "counts after whole rounds")
    return count.measured()


def _near_the_weights(rng: np.random.Generator) -> Measured:
    """After any number of samples every source has had its share, less than one more or less."""
    worst = 0.0
    for weights in ([7, 3], [1, 1, 1, 97], [333, 333, 334], _weights(rng), _weights(rng)):
        period, k = sum(weights), len(weights)
        source, _ = mixture.Turns(weights).of(np.arange(2 * period, dtype=np.int64))
        had = np.cumsum(source[:, None] == np.arange(k), axis=0)
        due = np.outer(np.arange(1, 2 * period + 1), weights)
        worst = max(worst, float(np.abs(had * period - due).max() / period) - (1 - 1 / (2 * k - 2) if k > 1 else 0))
    return Measured(error=max(worst, 0.0), bound=1e-12, cases=5, note="samples off a share, beyond 1 - 1 / (2 k - 2)")


def _rows_of_sources(rng: np.random.Generator) -> Measured:
    """Each row is what the source's own sampler reads for that sample of its own; any ranks and microbatches share the batch."""
    count = Checks()
    with folder() as root:
        made = _mixed(root, [301, 45, 1000], [5, 3, 2], 24, int(rng.integers(1 << 32)))
        for step in (0, 1, *rng.integers(2, 1000, 5).tolist()):
            whole = made.batch(step, documents=True)
            source, place = made.turns.of(whole.samples_b)
            count.that(whole.samples_b.tolist() == list(range(24 * step, 24 * step + 24)), "ids")
            for row, (s, p) in enumerate(zip(source.tolist(), place.tolist())):
                own = made.samplers[s].read(np.array([p]), documents=True)
                assert whole.documents_bT is not None and own.documents_bT is not None
                for name in ("inputs_bT", "targets_bT", "documents_bT"):
                    count.that(np.array_equal(getattr(whole, name)[row], getattr(own, name)[0]), f"{name} of row {row} of step {step}")
                count.that(bool((whole.inputs_bT[row] // SPAN == s).all()), f"row {row} of step {step} is of another source")
            for ranks, micros in ((2, 1), (4, 3), (1, 24), (8, 1)):
                parts = [made.batch(step, r, ranks, micro=m, n_micro=micros) for r in range(ranks) for m in range(micros)]
                for name in ("inputs_bT", "targets_bT", "samples_b"):
                    got = np.concatenate([getattr(p, name) for p in parts])
                    count.that(np.array_equal(got, getattr(whole, name)), f"{name} of {ranks} ranks")
    return count.measured()


def _own_epochs(rng: np.random.Generator) -> Measured:
    """Each source has seen each of its windows once before it sees one again, whatever the others have."""
    count = Checks()
    with folder() as root:
        made = _mixed(root, [81, 29, 401], [2, 5, 3], 10, int(rng.integers(1 << 32)))  # 20, 7 and 100 windows
        first = np.concatenate([made.batch(step).inputs_bT[:, 0] for step in range(40)])
        for source, windows in enumerate((20, 7, 100)):
            own = (first[first // SPAN == source] % SPAN) // 4
            for epoch in range(len(own) // windows):
                seen = np.sort(own[epoch * windows : (epoch + 1) * windows])
                count.that(seen.tolist() == list(range(windows)), f"epoch {epoch} of source {source}")
    return count.measured()


def _one_text(rng: np.random.Generator) -> Measured:
    """The sources as one corpus: every document read from its own; samples by weight; what one source holds out no other trains on."""
    count = Checks()
    with folder() as root:
        shared = rng.integers(32, 127, 40, np.uint8).tobytes()
        for source in ("a", "b"):
            texts = {f"{source}/{i}.txt": rng.integers(32, 127, int(rng.integers(20, 60)), np.uint8).tobytes() for i in range(12)}
            write_texts(root, {**texts, f"{source}/shared-{rng.integers(1 << 30)}.txt": shared})
        corpora = [open_corpus(str(root / source)) for source in ("a", "b")]
        whole = mixture.joined("both", corpora, (3, 1))
        expected = [corpus.read(d) for corpus in corpora for d in corpus.documents]
        count.that(list(whole.texts()) == expected and whole.size == sum(map(len, expected)), "texts of the whole")
        others = ((corpora[::-1], (3, 1)), (corpora, (3, 2)), (corpora[:1], (3,)))
        count.that(len({whole.hash, *(mixture.joined("", *other).hash for other in others)}) == 4, "sources or weights are not hashed")
        drawn, room = whole.sample(400), (300, 100)
        own = [text for corpus, most in zip(corpora, room) for text in corpus.sample(most).texts()]
        count.that(list(drawn.texts()) == own, "the sample is not that of the sources by weight")
        count.that([*whole.sample(3).texts()] == [*corpora[0].sample(2).texts()], "a source without room has a part, or ends the others'")
        count.refuses(InputError, whole.sample, "a sample of nothing", 0)
        first = mixture.joined("both", corpora, (1, 3)).sample(3)  # the first one has no room, and keeps its place
        alone = mixture.joined("", (replace(corpora[0], documents=()), corpora[1].sample(2)), (1, 3))
        count.that((first.hash, [*first.texts()]) == (alone.hash, [*alone.texts()]), "sources behind one without room have others' weights")
        splits = [split_by_file(corpus, fraction=float(rng.uniform(0.2, 0.5))) for corpus in corpora]
        held = next(d for d in corpora[0].documents if corpora[0].read(d) == shared)
        also = next(d for d in corpora[1].documents if corpora[1].read(d) == shared)
        splits[1] = replace(splits[1], train=corpora[1].subset("t", {*splits[1].train.documents, also}),
                            validation=corpora[1].subset("v", {*splits[1].validation.documents} - {also}))
        splits[0] = replace(splits[0], validation=corpora[0].subset("v", {*splits[0].validation.documents, held}),
                            train=corpora[0].subset("t", {*splits[0].train.documents} - {held}))
        for order in (splits, splits[::-1]):  # whichever source holds it out
            for split, apart in zip(order, mixture.kept_apart(order)):
                count.that(shared not in apart.train.texts(), "a held-out text is trained on")
                left = [text for text in split.train.texts() if text != shared]
                count.that(list(apart.train.texts()) == left and apart.validation == split.validation, "more was left out")
    return count.measured()


def steps_digest(data: bytes) -> str:
    """Hash of what a few steps of a mixture see (also called in a fresh process)."""
    digest = hashlib.sha256()
    with folder() as root:
        made = _mixed(root, [301, 45, 1000], [5, 3, 2], 8, data[0])
        for step in (0, 1, 53, 10_000):
            batch = made.batch(step)
            digest.update(batch.inputs_bT.tobytes() + batch.targets_bT.tobytes())
    return f"{made.hash} {digest.hexdigest()}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(steps_digest, rng.bytes(1), rng)


def _resume(rng: np.random.Generator) -> Measured:
    """A sampler made anew at any step goes on where an uninterrupted one is; steps may be asked for in any order."""
    count = Checks()
    with folder() as root:
        running = _mixed(root, [81, 29], [2, 5])
        uninterrupted = [running.batch(step).inputs_bT for step in range(25)]
        for stop in rng.integers(0, 25, 4).tolist():
            resumed = _mixed(root, [81, 29], [2, 5])
            for step in range(stop, 25):
                count.that(np.array_equal(resumed.batch(step).inputs_bT, uninterrupted[step]), f"resumed at {stop}: step {step}")
        for step in rng.permutation(25).tolist():
            count.that(np.array_equal(running.batch(step).inputs_bT, uninterrupted[step]), f"step {step} asked again")
    return count.measured()


def _frozen(rng: np.random.Generator) -> Measured:
    count = Checks()
    came = mixture.Turns([3, 3, 2]).of(np.arange(8, dtype=np.int64))[0].tolist()
    count.that(came == _FROZEN_TURNS, f"the turns of version 1 changed: {came}")
    with folder() as root:
        made = [_mixed(root, [81, 29], [2, 5]), _mixed(root, [81, 29], [5, 2]),
                _mixed(root, [81, 29], [2, 5], seed=6), _mixed(root, [81, 29], [2, 5], batch=6)]
        count.that(len({m.hash for m in made}) == len(made), "two mixtures share a hash")
    count.add(json.dumps(came).encode())
    return count.measured()


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Checks()
    no_source, twice, too_fine = "has a part that is no source with its weight", "names a source twice", "is too fine"
    for text, what, came in (
            *((text, no_source, repr(text)) for text in ("", "a", "a:", ":1", "a:0", "a:-1", "a:x", "a:nan", "a:inf", "a:1/0", "a\0:1")),
            *((text, no_source, repr(text)) for text in ("a:1e5000", "a:1E-33", "a:" + "1" * 33)),
            ("a:1,,b:1", no_source, "''"), ("a:1, a:2", twice, "'a:2'"), ("a:1, b:2, a :x", twice, "'a :x'"),
            ("a:1, b:0.00001", too_fine, "2 sources, weights that add up to 100001"),
            (",".join(f"s{i}:1" for i in range(65)), too_fine, "65 sources, weights that add up to 65"),
            (",".join(f"s{i}:1/{10**28 + i}" for i in range(300)), too_fine, "300 sources, weights that add up to more than 10^100")):
        try:
            count.that(False, f"{text[:20]!r}: accepted as {mixture.sources_of(text)}")
        except ConfigError as error:
            said = error.what == f"data.mixture {what}" and str(error.came).startswith(came)
            count.that(said, f"{text[:20]!r}: {error.what}, came {error.came}")
    for text, due in (("a:0.7, b:0.3", [("a", 7), ("b", 3)]), ("a: 2 ,C:\\b:4", [("a", 1), ("C:\\b", 2)]),
                      ("a:1e32", [("a", 1)]), ("a:" + "1" * 32, [("a", 1)]),
                      ("x/*.md:1e-2,y:1/50", [("x/*.md", 1), ("y", 2)])):
        count.that(mixture.sources_of(text) == due, f"{text} is {mixture.sources_of(text)}")
    with folder() as root:
        one, other = _mixed(root, [81], [1]).samplers[0], _mixed(root, [81], [1], batch=6).samplers[0]
        for samplers, weights in (([], []), ([one], []), ([one], [0]), ([one, other], [1, 1]), ([one], [1, 1])):
            count.refuses(InputError, mixture.MixedSampler, f"{len(samplers)} samplers, weights {weights}", samplers, weights)
        write_texts(root, {"a/1.txt": b"one", "a/2.txt": b"two", "b/1.txt": b"one", "b/2.txt": b"two"})
        splits = [split_by_file(open_corpus(str(root / name))) for name in ("a", "b")]
        splits[1] = replace(splits[1], train=splits[0].validation, validation=splits[0].train)
        count.refuses(InputError, mixture.kept_apart, "sources that hold out each other's texts", splits)
        corpus = mixture.joined("both", [open_corpus(str(root / name)) for name in ("a", "b")], (1, 1))
        count.refuses(InputError, corpus.sample, "a sample of nothing", 1)
    return count.measured()


CASES: Cases = {
    "parity": [
        ("turns as the rule says", _turns_as_reference),
        ("counts near the weights", _near_the_weights),
        ("rows of the sources", _rows_of_sources),
        ("each source has its own epochs", _own_epochs),
        ("the sources as one text", _one_text),
    ],
    "determinism": [
        ("steps are the same in a fresh process", _same_everywhere),
        ("a resumed run sees what an uninterrupted one sees", _resume),
        ("the turns are frozen and the hash tells mixtures apart", _frozen),
        ("the hash tells streams apart", limits.names_of_streams),
    ],
    "faults": [("impossible mixtures are refused", _bad_input)],
}
