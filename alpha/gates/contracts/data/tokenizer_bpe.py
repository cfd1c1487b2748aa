"""Cases of `tokenizer.bpe`: against a plain reference that recounts all pairs for each merge and applies each merge in turn."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import files, tokenizer, tokenizer_file
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import patterns
from alpha.gates.contracts.data.support import Cases, any_bytes, flipped, folder, same_everywhere, stdlib_texts, text_like, wide_bpe

Merges = list[tuple[int, int]]

# What the format promises: this tokenizer has this hash and these ids. A change of either needs a new version.
_FROZEN_MERGES: Merges = [(97, 98), (257, 99), (32, 32)]
_FROZEN_HASH = "eeb7a343b7ff84107ea84b947145b4b79d5aa3c113425e5563a570ec670e3c74"
_FROZEN_TEXT, _FROZEN_IDS = b"abcab  ab\xff\n", [258, 257, 259, 257, 255, 10]


def reference_words(data: bytes) -> list[bytes]:
    """The words of pattern code-v1, by hand: at each place the first rule that fits takes as much as it may."""

    def run(start: int, limit: int, member: set[int]) -> int:
        end = start
        while end < len(data) and end - start < limit and data[end] in member:
            end += 1
        return end

    letters = {*range(65, 91), *range(97, 123), *range(128, 256)}
    digits, ends, blanks = set(range(48, 58)), {10, 13}, {9, 10, 11, 12, 13, 32}
    signs = set(range(256)) - letters - digits - blanks
    words, i = [], 0
    while i < len(data):
        one = i + 1 if data[i] not in ends | digits | letters else i
        end = run(one, 32, letters)
        if end == one:
            end = run(i, 3, digits)
        if end == i:
            one = i + 1 if data[i] == 32 else i
            end = run(one, 32, signs)
            if end == one:
                end = i
            elif (line := run(end, 8, ends)) > end:
                end = run(line, 64, {9, 32})
        if end == i and (line := run(i, 8, ends)) > i:
            end = run(line, 64, {9, 32})
        if end == i:
            end = run(i, 32, blanks)
        words.append(data[i:end])
        i = end
    return words


def _replace(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            return [*ids[:i], new, *_replace(ids[i + 2 :], pair, new)]
    return ids


def reference_merges(texts: list[bytes], wanted: int, least: int) -> Merges:
    """Train by the definition: count every pair of every word anew for each merge."""
    table = Counter(word for text in texts for word in reference_words(text))
    words = [(list(word), n) for word, n in table.items() if n >= least]
    merges: Merges = []
    while len(merges) < wanted:
        counts: Counter[tuple[int, int]] = Counter()
        for ids, n in words:
            for i in range(len(ids) - 1):
                counts[ids[i], ids[i + 1]] += n
        if not counts:
            break
        most = max(counts.values())
        pair = min(p for p, n in counts.items() if n == most)
        words = [(_replace(ids, pair, 257 + len(merges)), n) for ids, n in words]
        merges.append(pair)
    return merges


def reference_ids(data: bytes, merges: Merges) -> list[int]:
    """Encode by the definition: in every word apply merge 0 wherever it fits, then merge 1, and so on."""
    out: list[int] = []
    for word in reference_words(data):
        ids = list(word)
        for rank, pair in enumerate(merges):
            ids = _replace(ids, pair, 257 + rank)
        out += ids
    return out


def _tied_texts(rng: np.random.Generator) -> list[bytes]:
    """Short words over few letters: many pairs of equal count, overlapping runs such as aaaa."""
    letters = b"abcd"[: int(rng.integers(2, 5))]
    return [b" ".join(bytes(rng.choice(list(letters), int(rng.integers(1, 9))).tolist()) for _ in range(60)) for _ in range(3)]


def _trained(rng: np.random.Generator, size: int = 20_000, vocabulary: int = 330) -> tokenizer.BPETokenizer:
    return tokenizer.BPETokenizer.train([text_like(rng, size), *stdlib_texts(rng, 1, size)], vocabulary)


def _merges_as_reference(rng: np.random.Generator) -> Measured:
    count = Checks()
    for _ in range(8):
        texts, least = _tied_texts(rng), int(rng.integers(1, 3))
        expected = reference_merges(texts, 24, least)
        came = tokenizer.BPETokenizer.train(texts, 257 + len(expected), min_word_count=least)
        count.that(list(came.merges) == expected, f"{came.merges} instead of {expected}")
    texts = [text_like(rng, 4000), *stdlib_texts(rng, 1, 4000)]
    expected = reference_merges(texts, 40, 2)
    came = tokenizer.BPETokenizer.train(texts, 297)
    for k, merge in enumerate(expected):
        count.that(came.merges[k] == merge, f"merge {k} is {came.merges[k]} instead of {merge}")
    return count.measured()


def _ids_as_reference(rng: np.random.Generator) -> Measured:
    count = Checks()
    bpe = _trained(rng)
    merges = list(bpe.merges)
    samples = [
        any_bytes(rng, 400),
        text_like(rng, 2000),
        *stdlib_texts(rng, 2, 2000),
        b"",
        b"a",
        b"a" * 300,
        b" " * 300,
        b"\n" * 50,
    ]
    samples += [bytes([value]) * 3 for value in rng.integers(0, 256, 8)]
    for data in (*samples, *samples):  # the second time from the cache
        count.that(bpe.encode(data).tolist() == reference_ids(data, merges), f"ids of {data[:40]!r}")
    return count.measured()


def _blocks_as_reference(rng: np.random.Generator) -> Measured:
    """Text longer than the block that is cut at once: the words are those of the uncut text."""
    count = Checks()
    bpe = tokenizer.BPETokenizer([])
    for shift in (0, int(rng.integers(1, 200))):
        data = b"x" * shift + text_like(rng, tokenizer._BLOCK + 4000)
        words = [word for block in tokenizer.words_of(data, bpe._words) for word in block]
        count.that(words == reference_words(data), f"words differ after {shift} bytes")
        count.that(len(words) and max(map(len, words)) <= tokenizer.MAX_WORD, "a word is too long")
    with mock.patch.object(tokenizer, "_BLOCK", 600):  # many cuts
        for _ in range(5):
            data = text_like(rng, 6000)
            words = [word for block in tokenizer.words_of(data, bpe._words) for word in block]
            count.that(words == reference_words(data), "words differ between small blocks")
    return count.measured()


def _round_trip(rng: np.random.Generator) -> Measured:
    count = Checks()
    bpe = _trained(rng)
    samples = [any_bytes(rng, int(n)) for n in rng.integers(0, 3000, 20)]
    samples += [bytes(range(256)), b"\xff\xfe\x80" * 50, "naïve 日本語 🙂".encode(), "\ud800".encode("utf-8", "surrogatepass")]
    samples += [text_like(rng, 50_000), *stdlib_texts(rng, 3, 50_000)]
    for data in samples:
        ids = bpe.encode(data)
        count.that(bpe.decode(ids) == data, f"round trip of {data[:40]!r}")
        count.that(int(bpe.byte_lengths[ids].sum()) == len(data), "byte lengths do not add up")
        count.that(ids.dtype == np.uint16 and not np.any(ids == bpe.eod) and np.all(ids < bpe.vocab_size), "ids out of range")
    wide, data = wide_bpe(65_793), rng.integers(0xF0, 0x100, 500).astype(np.uint8).tobytes() + b"\xff" * 8
    ids = wide.encode(data)
    count.that(ids.dtype == np.uint32 and int(ids.max()) == 65_792 and wide.decode(ids) == data, "ids beyond 16 bits")
    count.that(bpe.decode([97, bpe.eod, 98]) == b"ab", "the end of a document stands for bytes")
    return count.measured()


def _save_and_load(rng: np.random.Generator) -> Measured:
    count = Checks()
    bpe, data = _trained(rng), text_like(rng, 3000)
    with folder() as root:
        bpe.save(root / "t.json")
        back = tokenizer_file.load_tokenizer(root / "t.json")
        back.save(root / "again.json")
        count.that((root / "t.json").read_bytes() == (root / "again.json").read_bytes(), "saved again, the file differs")
    count.that(isinstance(back, tokenizer.BPETokenizer) and back.merges == bpe.merges, "merges")
    count.that(back.hash == bpe.hash and dict(back.record) == dict(bpe.record), "hash or record")
    count.that(np.array_equal(back.encode(data), bpe.encode(data)), "ids")
    return count.measured()


def trained_digest(data: bytes) -> str:
    """Hash of a tokenizer trained on `data` and of the ids it gives (also called in a fresh process)."""
    bpe = tokenizer.BPETokenizer.train([data[: len(data) // 2], data[len(data) // 2 :]], 360, min_word_count=1)
    return f"{bpe.hash} {hashlib.sha256(bpe.encode(data).tobytes()).hexdigest()}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(trained_digest, b"".join([text_like(rng, 20_000), *_tied_texts(rng)]), rng)


def _order_of_texts(rng: np.random.Generator) -> Measured:
    count = Checks()
    for _ in range(4):
        equal = rng.permuted(np.arange(97, 123))[:24].reshape(3, 4, 2)  # two-letter words, each twice: nothing but ties
        texts = [b"".join(b" " + bytes(word.tolist()) for word in words) * 2 for words in equal]
        texts += [*_tied_texts(rng), text_like(rng, 3000)][: int(rng.integers(0, 3))]
        expected = tokenizer.BPETokenizer.train(texts, 270).merges
        count.add(str(expected).encode())
        for _ in range(3):
            shuffled = [texts[i] for i in rng.permutation(len(texts))]
            count.that(tokenizer.BPETokenizer.train(shuffled, 270).merges == expected, "the order of the texts changed the merges")
    return count.measured()


def _hash_tells_apart(rng: np.random.Generator) -> Measured:
    """Other merges, another order of them, one fewer: another hash. The record does not matter. The hash is frozen."""
    count = Checks()
    bpe = _trained(rng)
    merges = list(bpe.merges)
    plain = next(k for k in range(len(merges) - 1) if 257 + k not in merges[k + 1])
    swapped = [*merges[:plain], merges[plain + 1], merges[plain], *merges[plain + 2 :]]
    swapped = [m for m in swapped if max(m) < 257 + plain]  # later merges may name the swapped ids: leave those out
    base = [m for m in merges if max(m) < 257 + plain]
    hashes = [tokenizer.BPETokenizer(m).hash for m in (merges, merges[:-1], base, swapped, [])]
    count.that(len(set(hashes)) == len(hashes), "two tokenizers share a hash")
    count.that(tokenizer.BPETokenizer(merges, record={"note": "x"}).hash == bpe.hash, "the record is in the hash")
    frozen = tokenizer.BPETokenizer(_FROZEN_MERGES)
    count.that(frozen.hash == _FROZEN_HASH, f"the hash of version 1 changed: {frozen.hash}")
    count.that(frozen.encode(_FROZEN_TEXT).tolist() == _FROZEN_IDS, "the ids of version 1 changed")
    count.add(frozen.hash.encode())
    return count.measured()


def _calls_do_not_matter(rng: np.random.Generator) -> Measured:
    """The same ids whatever was encoded before, and from a tokenizer that has encoded nothing."""
    count = Checks()
    bpe = _trained(rng)
    texts = [text_like(rng, 2000), any_bytes(rng, 500), *(b"prefix%d" % i + b"z" * int(rng.integers(30)) for i in range(30))]
    fresh = [tokenizer.BPETokenizer(bpe.merges).encode(text).tobytes() for text in texts]
    count.add(b"".join(fresh))
    for _ in range(3):
        for i in rng.permutation(len(texts)):
            count.that(bpe.encode(texts[i]).tobytes() == fresh[i], f"ids of {texts[i][:40]!r} depend on the calls before")
    return count.measured()


def damaged_files(rng: np.random.Generator, made: tokenizer.Tokenizer) -> Measured:
    """Torn, flipped, edited, of another version, missing: each refused with its class."""
    count = Checks()
    with folder() as root:
        path = root / "t.json"
        made.save(path)
        whole = path.read_bytes()
        damaged = [whole[: int(n)] for n in (0, 1, len(whole) - 1, *rng.integers(1, len(whole), 10))]
        damaged += [flipped(rng, whole) for _ in range(60)]
        content = json.loads(whole)
        damaged += [
            json.dumps({**content, "record": {"trained": "elsewhere"}}).encode(),
            json.dumps(content, indent=1).encode(),
            b"[]",
        ]
        for data in damaged:
            path.write_bytes(data)
            count.refuses(CorruptError, lambda: tokenizer_file.load_tokenizer(path), f"damaged file of {len(data)} bytes")
        del content["sha256"]
        path.write_bytes(_signed({**content, "version": 2}))
        count.refuses(InputError, lambda: tokenizer_file.load_tokenizer(path), "version 2")
        path.write_bytes(_signed({**content, "format": "something.else"}))
        count.refuses(CorruptError, lambda: tokenizer_file.load_tokenizer(path), "another format")
        count.refuses(InputError, lambda: tokenizer_file.load_tokenizer(root / "none.json"), "missing file")
    return count.measured()


def _signed(content: dict[str, object]) -> bytes:
    def canonical(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    return canonical({**content, "sha256": hashlib.sha256(canonical(content)).hexdigest()}) + b"\n"


def _damaged(rng: np.random.Generator) -> Measured:
    return damaged_files(rng, _trained(rng, 3000, 300))


def full_disk(rng: np.random.Generator, made: tokenizer.Tokenizer) -> Measured:
    """Saving to a full disk: MachineError, the file that was there still stands, nothing is left beside it. What is saved is forced to the
    medium; what a killed process left is swept, and nothing else."""
    count = Checks()
    with folder() as root:
        path = root / "t.json"
        made.save(path)
        before = path.read_bytes()

        def save() -> None:
            with mock.patch.object(files.os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
                made.save(path)

        count.refuses(MachineError, save, "full disk")
        count.that(path.read_bytes() == before, "the old file is gone")
        count.that([p.name for p in Path(root).iterdir()] == ["t.json"], "a temporary file is left")
        forced: dict[int, int] = {}
        real = os.fsync

        def spy(handle: int) -> None:
            forced[os.fstat(handle).st_ino] = os.fstat(handle).st_size
            real(handle)

        with mock.patch.object(files.os, "fsync", spy):
            made.save(path)
        count.that(forced.get(path.stat().st_ino) == path.stat().st_size, "the file was not forced to the medium whole")
        count.that(root.stat().st_ino in forced, "its new name was not forced to the medium")
        held, left, younger = root / ".held.alpha-tmp", root / ".left.alpha-tmp", root / ".younger.alpha-tmp"
        for file in (held, left, younger):
            file.write_bytes(b"half")
        for file in (held, left):
            os.utime(file, (1.0, 1.0))
        with open(held, "rb") as maker:
            files.hold(maker.fileno())
            files.sweep(root)
        count.that(not left.exists(), "what a killed process left is not swept")
        count.that(held.exists(), "what is being written is swept")
        count.that(younger.exists(), "what was just made is swept before its maker can hold it")
    return count.measured()


def _full_disk(rng: np.random.Generator) -> Measured:
    return full_disk(rng, _trained(rng, 3000, 300))


def _misuse(rng: np.random.Generator) -> Measured:
    count = Checks()
    bpe, train = _trained(rng, 3000, 300), tokenizer.BPETokenizer.train
    for ids in ([300], [-1], [1.5], [[1]], [0, int(rng.integers(300, 60_000))]):
        count.refuses(InputError, bpe.decode, f"ids {ids}", ids)
    for merges in ([(97, 257)], [(256, 97)], [(-1, 3)], [(97, 98), (97, 98)]):
        count.refuses(InputError, tokenizer.BPETokenizer, f"merges {merges}", merges)
    for size in (0, 256, 65_537):
        count.refuses(InputError, train, f"vocabulary {size}", [b"abab"], size)
    count.refuses(InputError, lambda: train([b"ab ab"], 4096), "a text too small")
    count.refuses(InputError, lambda: train([], 300), "no text")
    count.refuses(InputError, lambda: tokenizer.BPETokenizer([], pattern="none"), "unknown pattern")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("merges as the reference trains them", _merges_as_reference),
        ("ids as the reference encodes them", _ids_as_reference),
        ("long texts are cut into the same words", _blocks_as_reference),
        ("round trip on any bytes", _round_trip),
        ("save and load", _save_and_load),
    ],
    "determinism": [
        ("training and ids are the same in a fresh process", _same_everywhere),
        ("the order of the texts does not matter", _order_of_texts),
        ("earlier calls do not matter", _calls_do_not_matter),
        ("what was forgotten does not matter", patterns.few_words),
        ("the hash tells tokenizers apart and is frozen", _hash_tells_apart),
    ],
    "faults": [
        ("damaged files are refused", _damaged),
        ("a full disk loses nothing", _full_disk),
        ("misuse is refused", _misuse),
        ("impossible merges are refused", patterns.impossible_merges),
    ],
}
