"""Cases of what a run reads: from the names in its file to tokens on both sides, its tokenizer, and the order of its sequences. Floor 7.

Of bytes every token is one: streams are held against the documents themselves. Held-out documents are found again by the split alone.
"""

# mypy: disable-error-code="arg-type,union-attr"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from alpha import config
from alpha.component import Measured
from alpha.config import Config
from alpha.data.bucketed import BucketedSampler
from alpha.data.corpus import open_corpus
from alpha.data.mixture import MixedSampler, Streams
from alpha.data.packing import PackedSampler
from alpha.data.prepare import Order, position, prepare
from alpha.data.sampler import PermutedSampler
from alpha.data.shards import TokenStream
from alpha.data.split import split_by_file
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.train import assemble
from alpha.train.assemble import Dataset

FILE = """
[run]
name = "read"
[model]
family = "gpt"
layers = 1
width = 8
heads = 1
[data]
cache = "{root}/cache"
sequence = {sequence}
validation = {share}
[train]
steps = 3
batch = 6
[optim]
lr = 0.1
"""


class _Texts:
    """Folders of drawn documents, of which no two are the same."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        self.root, self.sequence, self.share = root, int(rng.integers(4, 9)), round(float(rng.uniform(0.2, 0.45)), 3)
        for name in ("one", "two", "three"):
            (root / name).mkdir()
            for i in range(int(rng.integers(9, 14))):
                words = rng.choice(["some", "words", "come", "again", "and", "once", "more"], int(rng.integers(20, 40)))
                text = f"{name} {i} {' '.join(words)}"
                low, high = {0: (0.0, 0.2), 1: (0.5, 1.0)}.get(i, (0.0, 1.0))  # a document on each side of every share
                texts = (f"{text} {k}" for k in range(1 << 20))
                (root / name / f"{i}.txt").write_text(next(x for x in texts if low <= position(x.encode()) < high))

    def path(self, name: str) -> str:
        """Of a folder."""
        return (self.root / name).as_posix()

    def config(self, *overrides: str) -> Config:
        """A run file over them."""
        return config.parse(FILE.format(root=self.root.as_posix(), sequence=self.sequence, share=self.share), overrides)

    def sides(self, name: str) -> tuple[list[bytes], list[bytes]]:
        """The documents of a folder to train and to validate on."""
        split = split_by_file(open_corpus(self.path(name)), fraction=self.share, seed=0)
        return list(split.train.texts()), list(split.validation.texts())


@contextmanager
def _texts(rng: np.random.Generator) -> Iterator[_Texts]:
    with tempfile.TemporaryDirectory(prefix="alpha-read-") as root:
        yield _Texts(Path(root), rng)


def _tokens(stream: object) -> list[int]:
    assert isinstance(stream, TokenStream)
    return [int(i) for i in stream.windows(np.array([0]), len(stream))[0]]


def _as_bytes(texts: Sequence[bytes]) -> list[int]:
    """Every document and its end."""
    return [i for text in texts for i in (*text, 256)]


def _too_short(texts: Sequence[bytes]) -> str:
    return error_text("InputError", "the data is shorter than one sequence", f"{len(_as_bytes(texts))} tokens", "at least 65537",
                      "use more text or a shorter sequence")


def sides(rng: np.random.Generator) -> Measured:
    """A folder, and folders mixed by weight: tokens of both sides are those of the split's documents in order, each with its end; of a
    mixture each source has its own stream under its name."""
    checks: Named = []
    with _texts(rng) as run:
        one = assemble.open_data(run.config(f"data.corpus='{run.path('one')}'", "data.tokenizer='bytes'"))
        learned, held = run.sides("one")
        same(checks, "one to train on", _tokens(one.train), _as_bytes(learned))
        same(checks, "one to validate on", _tokens(one.validation), _as_bytes(held))
        same(checks, "one corpus", sorted(one.corpus.texts()), sorted(learned + held))
        same(checks, "one split", (list(one.split.train.texts()), list(one.split.validation.texts()), one.tokenizer.hash),
             (learned, held, ByteTokenizer().hash))
        names, weights = [run.path(x) for x in rng.permutation(["one", "two", "three"])[:2]], (3, 2)
        mixture = ", ".join(f"{name}:{weight}" for name, weight in zip(names, weights))
        many = assemble.open_data(run.config(f"data.mixture='{mixture}'", "data.tokenizer='bytes'"))
        assert isinstance(many.train, Streams) and isinstance(many.validation, Streams)
        parts = [run.sides(Path(name).name) for name in names]
        for side, streams, texts in ((0, many.train, many.split.train), (1, many.validation, many.split.validation)):
            same(checks, f"side {side}", [(name, _tokens(x)) for name, x in streams.parts],
                 [(name, _as_bytes(part[side])) for name, part in zip(names, parts)])
            same(checks, f"texts of side {side}", list(texts.texts()), [text for part in parts for text in part[side]])
        same(checks, "all texts", sorted(many.corpus.texts()), sorted(text for part in parts for side in part for text in side))
        drawn = [text for part, room in zip(many.corpus.parts, (1200, 800)) for text in part.sample(room).texts()]
        same(checks, "shares of a sample", list(many.corpus.sample(2000).texts()), drawn)  # type: ignore[union-attr]
        for choice in (f"data.corpus='{run.path('one')}'", f"data.mixture='{mixture}'"):
            same(checks, "a sequence longer than its text", said(lambda: assemble.open_data(run.config(
                choice, "data.tokenizer='bytes'", "data.sequence=65536"))), _too_short(learned if "corpus" in choice else parts[0][0]))
    return all_hold(checks)


def tokenizers(rng: np.random.Generator) -> Measured:
    """BPE is trained on the text to train on, as much of it as is asked for, once: what the cache holds is taken while it is for that text
    and size, and refused where it is not. A file's tokenizer goes before, bytes need none."""
    checks: Named = []
    with _texts(rng) as run:
        split = split_by_file(open_corpus(run.path("one")), fraction=run.share, seed=0)
        ids, most = 258 + int(rng.integers(2, 9)), int(rng.uniform(0.6, 0.9) * sum(d.size for d in split.train.documents))  # not all
        cfg = run.config(f"data.corpus='{run.path('one')}'", f"data.vocab={ids}", f"data.sample={most}")
        sample = split.train.sample(most)
        expected = BPETokenizer.train(sample.texts(), ids)
        made = assemble.tokenizer_for(cfg, split.train)
        asked = {"corpus": split.train.hash, "vocab": ids, "sample_bytes": most}
        same(checks, "what it learned", (made.hash, made.vocab_size), (expected.hash, ids))
        same(checks, "what it says of itself", (made.record["asked"], made.record["sample"]), (asked, sample.hash))
        kept = [x for x in (run.root / "cache").iterdir() if x.name.startswith("bpe-")]
        same(checks, "what is kept", [(x.name.rsplit("-", 1)[0], len(x.name)) for x in kept],
             [(f"bpe-{ids}", len(f"bpe-{ids}-.json") + 20)])
        with instead(BPETokenizer, train=None):
            same(checks, "taken from the cache", assemble.tokenizer_for(cfg, split.train).hash, expected.hash)
        for name in ("corpus", "vocab", "sample"):
            again = run.config(f"data.vocab={ids + (name == 'vocab')}", f"data.sample={most + (name == 'sample')}")
            text = split.validation if name == "corpus" else split.train
            same(checks, f"another {name}", assemble.tokenizer_for(again, text).record["asked"],
                 {"corpus": text.hash, "vocab": ids + (name == "vocab"), "sample_bytes": most + (name == "sample")})
            checks.append((f"{name} has no file of its own", sum(x.name.startswith("bpe-")
                                                                 for x in (run.root / "cache").iterdir()) > len(kept)))
        fewer = BPETokenizer.train(sample.texts(), ids - 1, record={"asked": asked})
        for wrong in (BPETokenizer.train(sample.texts(), ids, record={"asked": {**asked, "vocab": 1}}), fewer):
            wrong.save(kept[0])
            same(checks, "another one in its place", said(lambda: assemble.tokenizer_for(cfg, split.train)), error_text(
                "CorruptError", "a cached tokenizer is not the one that is asked for",
                f"{kept[0]}: {dict(sorted(wrong.record['asked'].items()))}", asked,
                "remove the file; it is trained again"))
        made.save(run.root / "own.json")
        own = run.config(f"data.tokenizer_file='{run.path('own.json')}'")
        same(checks, "a file's", assemble.tokenizer_for(own, split.train).hash, made.hash)
        known = assemble.known_tokenizer(own)
        same(checks, "known", (known and known.hash, assemble.known_tokenizer(cfg)), (made.hash, None))
        same(checks, "bytes", assemble.tokenizer_for(run.config("data.tokenizer='bytes'"), split.train).hash, ByteTokenizer().hash)
    return all_hold(checks)


def orders(rng: np.random.Generator) -> Measured:
    """The sampler of a run is that of its packing and buckets, with its sequence, batch, seed and window; of a mixture the source of number
    i has the seed plus i, modulo 2^64, and the weights are the file's."""
    checks: Named = []
    with _texts(rng) as run:
        mixture = f"{run.path('one')}:2, {run.path('two')}:5"
        one = assemble.open_data(run.config(f"data.corpus='{run.path('one')}'", "data.tokenizer='bytes'"))
        many = assemble.open_data(run.config(f"data.mixture='{mixture}'", "data.tokenizer='bytes'"))
        assert isinstance(one.train, TokenStream) and isinstance(many.train, Streams)
        streams = [stream for _, stream in many.train.parts]
        buckets, window = int(rng.integers(2, 5)), int(rng.integers(2, 4))
        packed = ("data.packing='documents'", "data.documents=true")
        for seed in (int(rng.integers(1 << 40)), 2**63 - 1):
            for name, choice in (("windows", ()), ("packed", packed[:1]), ("buckets", (*packed, f"data.buckets={buckets}"))):
                def own(stream: TokenStream, seed: int) -> PermutedSampler:
                    sizes = {"sequence": run.sequence, "global_batch": 6, "seed": seed}
                    if name == "buckets":
                        return BucketedSampler(stream, **sizes, buckets=buckets, most=window)
                    return (PackedSampler if name == "packed" else PermutedSampler)(stream, **sizes)
                for data, more, expected in ((one, (), own(one.train, seed)), (many, (f"data.mixture='{mixture}'",), MixedSampler(
                        [own(streams[0], seed), own(streams[1], seed + 1)], [2, 5]))):
                    got = assemble.sampler_for(run.config(f"run.seed={seed}", f"model.window={window}", *choice, *more), data)
                    same(checks, f"{name} of seed {seed}", (type(got), got.hash), (type(expected), expected.hash))
                    if isinstance(got, BucketedSampler):
                        same(checks, "window", (got.most, got.buckets), (window, buckets))
        cfg = run.config(f"data.mixture='{mixture}'")
        object.__setattr__(cfg.run, "seed", 2**64 - 1)  # no run file may say so
        got = assemble.sampler_for(cfg, many)
        assert isinstance(got, MixedSampler)
        same(checks, "seeds beyond the last", [x.seed for x in got.samplers], [2**64 - 1, 0])
    return all_hold(checks)


def prepared(rng: np.random.Generator) -> Measured:
    """Prepared folders, alone and mixed: their own streams and tokenizer, refused beside plain text, beside folders of another tokenizer or
    share, under another vocabulary or tokenizer's file, and for sequences that are too long; each by all its words."""
    checks: Named = []
    with _texts(rng) as run:
        made = {name: prepare(Order((run.path(source),), tokenizer=kind, validation=share), run.root / "made" / name)
                for name, source, kind, share in (("a", "one", "bytes", 0.4), ("b", "two", "bytes", 0.4), ("share", "two", "bytes", 0.3),
                                                  ("bpe", "two", "bpe:260", 0.4))}
        paths = {name: str(x.folder) for name, x in made.items()}
        bound = made["a"].facts["bound"]
        one = assemble.open_data(run.config(f"data.corpus='{paths['a']}'"))
        for side, got, text in (("train", one.train, one.split.train), ("validation", one.validation, one.split.validation)):
            same(checks, f"one: {side}", _tokens(got), _tokens(made["a"].streams[side]))
            same(checks, f"one: text of {side}", _as_bytes(list(text.texts())), _tokens(made["a"].streams[side]))
        mixture = f"data.mixture='{paths['a']}:1, {paths['b']}:3'"
        many = assemble.open_data(run.config(mixture))
        _mixed_of(checks, many, [(paths[name], made[name].streams) for name in ("a", "b")])
        known = assemble.known_tokenizer(run.config(mixture))
        same(checks, "known", known and known.hash, ByteTokenizer().hash)
        same(checks, "bytes are what it has", said(lambda: len(_tokens(assemble.open_data(run.config(
            f"data.corpus='{paths['a']}'", "data.tokenizer='bytes'")).train))), str(len(_tokens(one.train))))

        def of(*choice: str) -> str:
            return said(lambda: assemble.open_data(run.config(*choice)) and "taken")

        plain = run.path("three")
        same(checks, "beside plain text", of(f"data.mixture='{plain}:1, {paths['a']}:1'"), error_text(
            "InputError", "a mixture holds prepared and other sources", f"{plain} beside {paths['a']}", "all of one kind",
            f"run `alpha data prepare {plain} --out FOLDER` with the same tokenizer"))
        for name in ("share", "bpe"):
            other = made[name]
            same(checks, f"with another {name}", of(f"data.mixture='{paths['a']}:1, {paths[name]}:1'"), error_text(
                "InputError", "prepared sources do not go together",
                f"{paths[name]}: tokenizer {other.tokenizer.hash[:16]}, validation below {other.facts['bound']}",
                f"tokenizer {ByteTokenizer().hash[:16]}, {bound}, as {paths['a']}",
                f"prepare it with --tokenizer {paths['a']}/tokenizer.json and the same --validation"))
        for name, choice, ids in (("a", "data.vocab=300", 300), ("bpe", "data.tokenizer='bytes'", 257), ("bpe", "data.vocab=261", 261)):
            same(checks, f"{name} with {choice}", of(f"data.corpus='{paths[name]}'", choice), error_text(
                "ConfigError", "the run file asks for another vocabulary than the prepared data has", f"{ids} ids",
                f"{made[name].tokenizer.vocab_size} ids, of {paths[name]}",
                "remove data.tokenizer and data.vocab: prepared data brings its own"))
        same(checks, "its own vocabulary", of(f"data.corpus='{paths['bpe']}'", "data.vocab=260"), "taken")
        file = f"{paths['a']}/tokenizer.json"
        same(checks, "its own file", of(f"data.corpus='{paths['a']}'", f"data.tokenizer_file='{file}'"), "taken")
        same(checks, "another file", of(f"data.corpus='{paths['bpe']}'", f"data.tokenizer_file='{file}'"), error_text(
            "ConfigError", "the run file names another tokenizer than the prepared data has", file, f"that of {paths['bpe']}",
            f"remove data.tokenizer_file, or prepare the data again with --tokenizer {file}"))
        same(checks, "a sequence longer than its text", of(f"data.corpus='{paths['a']}'", "data.sequence=65536"),
             _too_short(list(one.split.train.texts())))
    return all_hold(checks)


def _mixed_of(checks: Named, data: Dataset, sources: Sequence[tuple[str, object]]) -> None:
    """The streams of a mixture of prepared folders, by name and in order; its text is all of theirs."""
    for side, streams in (("train", data.train), ("validation", data.validation)):
        assert isinstance(streams, Streams)
        same(checks, f"mixed: {side}", [(name, _tokens(x)) for name, x in streams.parts],
             [(name, _tokens(own[side])) for name, own in sources])  # type: ignore[index]
    every = [token for side in ("train", "validation") for _, own in sources for token in _tokens(own[side])]  # type: ignore[index]
    same(checks, "mixed: all text", _as_bytes(list(data.corpus.texts())), every)
