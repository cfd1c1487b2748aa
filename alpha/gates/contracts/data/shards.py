"""Cases of `shards.v2`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import corpus, shards, tokenizer
from alpha.data.hashed import file_bytes
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import limits
from alpha.gates.contracts.data.support import Cases, any_bytes, flipped, folder, same_everywhere, text_like, wide_bpe, write_texts


def made_up(rng: np.random.Generator, root: Path, files: int = 9) -> corpus.Corpus:
    """A corpus of small files below `root`, one of them a single byte, one not text."""
    texts = {f"f{i}.txt": text_like(rng, int(rng.integers(3, 300))) for i in range(files)}
    write_texts(root, {**texts, "one.txt": b"x", "raw.txt": any_bytes(rng, 77)})
    return corpus.folder_corpus(root)


def reference_stream(made: corpus.Corpus, with_tokenizer: tokenizer.Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens and, for each, the number of its document."""
    tokens: list[int] = []
    owners: list[int] = []
    for number, document in enumerate(made.documents):
        ids = [*with_tokenizer.encode((made.root / document.relpath).read_bytes()).tolist(), 256]
        tokens += ids
        owners += [number] * len(ids)
    return tokens, owners


def _bpe() -> tokenizer.BPETokenizer:
    return tokenizer.BPETokenizer([(115, 101), (32, 32), (257, 108), (10, 258)])


def _stream_as_reference(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        made = made_up(rng, root / "texts")
        for k, kind in enumerate((tokenizer.ByteTokenizer(), _bpe())):
            tokens, owners = reference_stream(made, kind)
            for cut in (1, int(rng.integers(50, 400)), 1 << 20):
                stream = shards.token_stream(made, kind, root / f"{k}-{cut}", shard_tokens=cut)
                count.that(len(stream) == len(tokens), f"{len(stream)} tokens instead of {len(tokens)}")
                count.that(stream.windows([0], len(stream))[0].tolist() == tokens, f"tokens, shards of {cut}")
                fit = [len(s.tokens) <= cut or len(s.starts) == 2 for s in stream.shards]  # a document is in one shard
                count.that(all(fit), f"shards of more than {cut} tokens")
                count.that(stream.document_ids([0], len(stream))[0].tolist() == owners, f"documents, shards of {cut}")
                count.that((stream.documents, stream.text_bytes) == (len(made.documents), made.size), "documents or bytes of text")
                length = int(rng.integers(2, 60))
                starts = [0, len(tokens) - length, *rng.integers(0, len(tokens) - length, 30).tolist()]
                windows, documents = stream.windows(starts, length), stream.document_ids(starts, length)
                count.that(windows.dtype == np.int32 and documents.dtype == np.int32, "dtype")
                for row, start in enumerate(starts):
                    count.that(windows[row].tolist() == tokens[start : start + length], f"window at {start}")
                    count.that(documents[row].tolist() == owners[start : start + length], f"documents at {start}")
    return count.measured()


def _ids_beyond_16_bits(rng: np.random.Generator) -> Measured:
    """A vocabulary of 65,793 ids: tokens are uint32, on disk too; the last id of 65,536 is still uint16."""
    count = Checks()
    with folder() as root:
        texts = {"a.txt": rng.integers(0xFC, 0x100, 300).astype(np.uint8).tobytes(), "b.txt": b"\xff" * 9, "c.txt": b"\xfe" * 9}
        write_texts(root / "texts", texts)
        made = corpus.open_corpus(str(root / "texts"))
        for kind, dtype in ((wide_bpe(65_536), "<u2"), (wide_bpe(65_537), "<u4"), (wide_bpe(65_793), "<u4")):
            tokens, _ = reference_stream(made, kind)
            count.that(max(tokens) == kind.vocab_size - 1 or kind.vocab_size == 65_537, f"the last of {kind.vocab_size} ids is not used")
            for cut in (7, 1 << 20):
                stream = shards.token_stream(made, kind, root / f"{kind.vocab_size}-{cut}", shard_tokens=cut)
                count.that(stream.windows([0], len(stream))[0].tolist() == tokens, f"{kind.vocab_size} ids, shards of {cut}")
                count.that({s.tokens.dtype.str for s in stream.shards} == {dtype}, f"{kind.vocab_size} ids are not {dtype}")
    return count.measured()


class _Silent(tokenizer.ByteTokenizer):
    """A tokenizer that must not be asked again."""

    def encode(self, data: bytes) -> np.ndarray:
        raise AssertionError("tokenized although the stream is cached")


def _cache_as_asked(rng: np.random.Generator) -> Measured:
    """The second time nothing is tokenized; another tokenizer or another corpus gets its own stream."""
    count = Checks()
    with folder() as root:
        made, cache = made_up(rng, root / "texts"), root / "cache"
        expected = reference_stream(made, tokenizer.ByteTokenizer())[0]
        for kind in (tokenizer.ByteTokenizer(), _Silent()):
            stream = shards.token_stream(made, kind, cache)
            count.that(stream.windows([0], len(stream))[0].tolist() == expected, "cached tokens")
        other = shards.token_stream(made, _bpe(), cache)
        count.that(other.windows([0], len(other))[0].tolist() == reference_stream(made, _bpe())[0], "the stream of another tokenizer")
        fewer = made.subset("fewer", made.documents[1:])
        rest = shards.token_stream(fewer, tokenizer.ByteTokenizer(), cache)
        count.that(rest.windows([0], len(rest))[0].tolist() == reference_stream(fewer, tokenizer.ByteTokenizer())[0], "another corpus")
        count.that(len({stream.hash, other.hash, rest.hash}) == 3, "two streams share a hash")
    return count.measured()


def stream_digest(data: bytes) -> str:
    """Hash of every file of a stream over `data` in four documents (also called in a fresh process)."""
    with folder() as root:
        write_texts(root / "texts", {f"{i}.txt": data[i::4] for i in range(4)})
        made = corpus.folder_corpus(root / "texts")
        stream = shards.token_stream(made, _bpe(), root / "cache", shard_tokens=len(data) // 3)
        return " ".join([stream.hash, *(hashlib.sha256(shard.path.read_bytes()).hexdigest() for shard in stream.shards)])


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(stream_digest, text_like(rng, 3000), rng)


def _cut_does_not_matter(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        made = made_up(rng, root / "texts")
        lengths = [len(_bpe().encode(text)) + 1 for text in made.texts()]
        three = sum(lengths[:3])  # so many documents fill a file to its last token
        cuts = (1, 100, 1000, three, three - 1, 1 << 20)
        streams = [shards.token_stream(made, _bpe(), root / f"c{cut}", shard_tokens=cut) for cut in cuts]
        for cut, stream in zip(cuts, streams):
            files = [0]
            for n in lengths:
                files = [*files, n] if files[-1] and files[-1] + n > cut else [*files[:-1], files[-1] + n]
            count.that([len(s) for s in stream.shards] == files, f"files of at most {cut} tokens hold others")
        whole = streams[-1].windows([0], len(streams[-1]))
        for stream in streams:
            count.that(stream.hash == streams[-1].hash and np.array_equal(stream.windows([0], len(stream)), whole), "cut matters")
        count.add(whole.tobytes())
        count.that(len(streams[0].shards) > len(streams[-1].shards) == 1, "nothing was cut")
    return count.measured()


def _damaged_shards(rng: np.random.Generator) -> Measured:
    """Torn, grown, or one byte changed anywhere in the file: CorruptError when it is opened."""
    count = Checks()
    with folder() as root:
        stream = shards.token_stream(made_up(rng, root / "texts"), _bpe(), root / "cache", shard_tokens=300)
        path = stream.shards[0].path
        whole, parent = path.read_bytes(), path.parent
        torn = [whole[: int(n)] for n in (0, 7, 48, len(whole) - 1, *rng.integers(1, len(whole), 10))] + [whole + b"\0"]
        for data in torn:  # the length is noticed without reading the tokens
            path.write_bytes(data)
            count.refuses(CorruptError, shards.open_stream, f"torn shard of {len(data)} bytes", parent, verify=False)
        damaged = [*torn, *(flipped(rng, whole) for _ in range(80))]
        damaged += [flipped(rng, whole[:600]) + whole[600:] for _ in range(40)]
        damaged += [whole[:-8] + flipped(rng, whole[-8:]) for _ in range(4)]
        for data in damaged:
            path.write_bytes(data)
            count.refuses(CorruptError, lambda: shards.open_stream(parent), f"damaged shard of {len(data)} bytes")
        start = whole.index(b'"tokenizer":') + 14  # of the right length: its own hash alone tells it
        path.write_bytes(whole[:start] + (b"0" if whole[start : start + 1] != b"0" else b"1") + whole[start + 1 :])
        count.refuses(CorruptError, shards.open_shard, "a header with another tokenizer, by itself", path)
        path.write_bytes(whole)
        count.that(len(shards.open_stream(parent)) == len(stream), "the whole file is refused")
    return count.measured()


def _damage_seen_when_read(rng: np.random.Generator) -> Measured:
    """Opened without reading the tokens, a stream gives the windows of whole blocks and refuses those of a damaged one."""
    count = Checks()
    with folder() as root:
        write_texts(root / "texts", {"a.txt": any_bytes(rng, 3 * shards.BLOCK), "b.txt": any_bytes(rng, 99)})
        made = corpus.folder_corpus(root / "texts")
        path = shards.token_stream(made, tokenizer.ByteTokenizer(), root / "cache").shards[0].path
        whole = path.read_bytes()
        tokens, _ = reference_stream(made, tokenizer.ByteTokenizer())
        block = shards.BLOCK // 2  # tokens of a block
        begin = whole.index(np.array(tokens[:64], dtype="<u2").tobytes())  # where the tokens are in the file
        for damaged in range(len(tokens) // block):
            at = begin + damaged * shards.BLOCK + int(rng.integers(shards.BLOCK))
            path.write_bytes(whole[:at] + flipped(rng, whole[at : at + 1]) + whole[at + 1 :])
            count.refuses(CorruptError, shards.open_stream, f"all of it, block {damaged} damaged", path.parent)
            stream = shards.open_stream(path.parent, verify=False)
            for read in rng.permutation(len(tokens) // block).tolist():
                start = read * block + int(rng.integers(block - 64))
                if read == damaged:
                    count.refuses(CorruptError, stream.windows, f"a window of damaged block {damaged}", [start], 64)
                    count.refuses(CorruptError, stream.windows, "one that begins before it", [max(0, read * block - 9)], block)
                else:
                    count.that(stream.windows([start], 64)[0].tolist() == tokens[start : start + 64], f"block {read}, {damaged} damaged")
            first, last = sorted(rng.choice(len(tokens) // block, 2, replace=False).tolist())  # of which all others are known by now
            if first <= damaged <= last:
                count.refuses(CorruptError, stream.windows, f"{first} to {last}, {damaged} damaged", [first * block],
                              (last + 1 - first) * block)
            count.refuses(CorruptError, stream.windows, f"all blocks, {damaged} damaged", [0], len(tokens))
        index = len(whole) - 16  # where the second document starts; its lowest bit leaves the index rising
        path.write_bytes(whole)
        for known in (False, True):  # a session goes on reading a file that somebody cuts
            stream = shards.open_stream(path.parent, verify=known)
            cut = block + int(rng.integers(1, block))
            os.truncate(path, begin + 2 * cut)
            count.refuses(CorruptError, stream.windows, f"a window beyond the cut, checked before: {known}", [cut - 9], 10)
            if known:
                count.that(stream.windows([cut - 9], 9)[0].tolist() == tokens[cut - 9 : cut], "a window before the cut")
            count.refuses(CorruptError, getattr, "all tokens of a file that was cut", stream.shards[0], "tokens")
            path.write_bytes(whole)
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        count.refuses(CorruptError, shards.open_stream, "a damaged index", path.parent, verify=False)
        for starts in ([0, 3, 3, 5], [1, 3, 5], [0, 3, 4], [0, 4, 3, 5]):  # whose checksums fit
            facts = {"tokenizer": "t" * 64, "vocab_size": 9, "text_bytes": 5}
            shards.write_shard(path, np.arange(5, dtype=np.uint16), np.array(starts), facts)
            count.refuses(CorruptError, shards.open_shard, f"documents that begin at {starts}", path)
    return count.measured()


def _damaged_listing(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        place = shards.token_stream(made_up(rng, root / "texts"), _bpe(), root / "cache", shard_tokens=300).shards[0].path.parent
        path = place / shards.LISTING
        whole = path.read_bytes()
        damaged = [b"", whole[:-1], whole + b" ", *(whole[: int(n)] for n in rng.integers(1, len(whole), 5))]
        for data in [*damaged, *(flipped(rng, whole) for _ in range(60))]:
            path.write_bytes(data)
            count.refuses(CorruptError, shards.open_stream, f"a listing of {len(data)} bytes", place, verify=False)
        path.write_bytes(file_bytes(shards.FORMAT, 3, json.loads(whole)))
        count.refuses(CorruptError, lambda: shards.open_stream(place), "a hash of another content")
        content = {k: v for k, v in json.loads(whole).items() if k != "sha256"}
        path.write_bytes(file_bytes(shards.FORMAT, 3, content))
        count.refuses(InputError, lambda: shards.open_stream(place), "a listing of version 3")
        path.write_bytes(file_bytes("alpha.other", shards.VERSION, content))
        count.refuses(CorruptError, lambda: shards.open_stream(place), "another kind of file")
        path.write_bytes(file_bytes(shards.FORMAT, shards.VERSION, {**content, "shards": content["shards"][::-1]}))
        count.refuses(CorruptError, lambda: shards.open_stream(place, expected=hashlib.sha256(whole).hexdigest()), "another listing")
        path.unlink()
        count.refuses(InputError, lambda: shards.open_stream(place), "no listing")
    return count.measured()


def _incomplete_streams(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        made = made_up(rng, root / "texts")
        stream = shards.token_stream(made, _bpe(), root / "cache", shard_tokens=300)
        place = stream.shards[0].path.parent
        for index in (0, len(stream.shards) // 2, len(stream.shards) - 1):
            shutil.copytree(place, root / "copy")
            (root / "copy" / stream.shards[index].path.name).unlink()
            count.refuses(CorruptError, lambda: shards.open_stream(root / "copy"), f"without shard {index}")
            shutil.rmtree(root / "copy")
        paths = [shard.path for shard in stream.shards]
        paths[0].rename(place / "away")
        paths[1].rename(paths[0])
        (place / "away").rename(paths[1])
        count.refuses(CorruptError, lambda: shards.open_stream(place, verify=False), "two shards with each other's names")
        paths[0].rename(place / "renamed.tokens")
        count.refuses(CorruptError, lambda: shards.open_stream(place), "a renamed shard")
        count.refuses(InputError, lambda: shards.open_stream(root / "none"), "no folder")
        count.refuses(InputError, lambda: shards.open_shard(root / "none.tokens"), "no file")
        other = shards.token_stream(made, tokenizer.ByteTokenizer(), root / "cache")
        shutil.rmtree(place)
        shutil.copytree(other.shards[0].path.parent, place)
        count.refuses(CorruptError, lambda: shards.token_stream(made, _bpe(), root / "cache"), "the stream of another tokenizer")
        path = root / "v3.tokens"
        path.write_bytes(_of_version_3(other.shards[0].path.read_bytes()))
        count.refuses(InputError, lambda: shards.open_shard(path), "version 3")
        count.refuses(InputError, lambda: other.windows([len(other)], 1), "a window behind the end")
        count.refuses(InputError, lambda: other.windows([-1], 1), "a window before the start")
    return count.measured()


def _of_version_3(whole: bytes) -> bytes:
    _, length, _ = struct.unpack("<8sQ32s", whole[:48])
    text = json.dumps({**json.loads(whole[48 : 48 + length]), "version": 3}, sort_keys=True).encode()
    return struct.pack("<8sQ32s", b"ALPHATOK", len(text), hashlib.sha256(text).digest()) + text + whole[48 + length :]


def _interrupted_writes(rng: np.random.Generator) -> Measured:
    """A full disk or a file that changes halfway leaves no stream and no leftovers; the next run makes it whole."""
    count = Checks()
    with folder() as root:
        made, cache = made_up(rng, root / "texts"), root / "cache"

        def on_full_disk() -> None:
            with mock.patch.object(shards.os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
                shards.token_stream(made, _bpe(), cache)

        count.refuses(MachineError, on_full_disk, "full disk")
        count.that(not list(cache.iterdir()), "leftovers of a full disk")
        last = made.root / made.documents[-1].relpath
        kept = last.read_bytes()
        last.write_bytes(kept + b"!")
        count.refuses(CorruptError, lambda: shards.token_stream(made, _bpe(), cache, shard_tokens=100), "a file that changed")
        count.that(not list(cache.iterdir()), "leftovers of an interrupted run")
        last.write_bytes(kept)
        count.that(len(shards.token_stream(made, _bpe(), cache)) == len(reference_stream(made, _bpe())[0]), "the next run")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("stream, windows and documents as the reference", _stream_as_reference),
        ("ids beyond 16 bits", _ids_beyond_16_bits),
        ("the cache gives what was asked", _cache_as_asked),
    ],
    "determinism": [
        ("files are the same in a fresh process", _same_everywhere),
        ("where the stream is cut does not matter", _cut_does_not_matter),
    ],
    "faults": [
        ("damaged shards are refused", _damaged_shards),
        ("a damaged block is refused when it is read", _damage_seen_when_read),
        ("damaged listings are refused", _damaged_listing),
        ("incomplete and foreign streams are refused", _incomplete_streams),
        ("interrupted writes leave nothing", _interrupted_writes),
        ("what no header says is refused", limits.headers),
        ("disks that refuse are told", limits.asked_of_the_disk),
        ("what a batch needs is asked for at once", limits.fetched_ahead),
        ("what was left is swept", limits.left_over),
    ],
}
