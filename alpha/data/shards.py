"""Token streams on disk: a corpus through a tokenizer, cut into memory-mapped files, cached by (corpus hash, tokenizer hash).

A stream is the documents of the corpus in order, each followed by the end-of-document token, which belongs to the document that
it ends. A document lies in one shard.

A shard file is, little-endian: the magic `ALPHATOK`; header length, uint64; SHA-256 of the header, 32 bytes; the header, JSON;
zeros up to a multiple of 64; the tokens, uint16 [tokens]; zeros up to a multiple of 8; where each document starts in the shard,
and the end, int64 [documents + 1]. The header holds the SHA-256 of everything behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpha.data.corpus import Corpus
from alpha.data.files import MAKING, disk_error, hold, sha256_hex
from alpha.data.tokenizer import Tokenizer
from alpha.errors import CorruptError, InputError
from alpha.files import json_of, open_regular

MAGIC, VERSION = b"ALPHATOK", 1
_PREFIX = struct.Struct("<8sQ32s")
_ALIGN = 64
_MOST_HEADER = 1 << 16
"""Bytes of a header; one is about 500."""
_FACTS = {"version": int, "tokens": int, "documents": int, "payload": int, "sha256": str, "index": int, "last": bool, "corpus": str,
          "tokenizer": str, "vocab_size": int, "text_bytes": int}
SHARD_TOKENS = 1 << 26
"""A shard is closed before it would exceed this many tokens (128 MiB)."""


@dataclass(frozen=True)
class Shard:
    """One open file. `tokens`: memory-mapped uint16 [n]. `starts`: int64 [documents + 1], positions within the shard."""

    path: Path
    header: Mapping[str, Any]
    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _payload(tokens: NDArray[np.uint16], starts: NDArray[np.int64]) -> bytes:
    raw = tokens.astype("<u2", copy=False).tobytes()
    return raw.ljust(_padded(len(raw), 8), b"\0") + starts.astype("<i8", copy=False).tobytes()


def write_shard(path: Path, tokens: NDArray[np.uint16], starts: NDArray[np.int64], facts: Mapping[str, Any]) -> None:
    """Write one shard file. `facts` joins the header. OSError if the disk refuses; `token_stream` makes it a MachineError."""
    payload = _payload(tokens, starts)
    header = {**facts, "version": VERSION, "dtype": "<u2", "tokens": len(tokens), "documents": len(starts) - 1,
              "payload": len(payload), "sha256": sha256_hex(payload)}
    text = json.dumps(header, sort_keys=True).encode()
    head = _PREFIX.pack(MAGIC, len(text), bytes.fromhex(sha256_hex(text))) + text
    with open(path, "wb") as file:
        file.write(head.ljust(_padded(len(head), _ALIGN), b"\0"))
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def open_shard(path: Path, *, verify: bool = True) -> Shard:
    """Open one shard file; with `verify` its whole payload is hashed (about 1 GB/s).

    InputError: missing, or a version that this program does not know. CorruptError: torn, edited, or another size than stated.
    """

    def corrupt(why: str, came: object, expected: object) -> CorruptError:
        return CorruptError(f"a token shard is damaged: {why}", came=f"{path}: {came}", expected=expected,
                            do=f"remove {path.parent} and run again; it is made from the corpus")

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
                raise corrupt("no shard header", f"{size} bytes, first {prefix[:8]!r}", f"a file starting with {MAGIC!r}")
            _, length, digest = _PREFIX.unpack(prefix)
            if length > _MOST_HEADER:
                raise corrupt("its header is too long", f"{length} bytes", f"at most {_MOST_HEADER}")
            begin = _padded(_PREFIX.size + length, _ALIGN)
            head = file.read(min(begin, size) - _PREFIX.size)
    except OSError as error:
        raise InputError("a token shard cannot be read", came=f"{path} ({error.strerror})", expected="a readable shard file",
                         do=f"remove {path.parent} and run again; it is made from the corpus") from error
    text = head[:length]
    if sha256_hex(text) != digest.hex() or head[length:].strip(b"\0"):
        raise corrupt("its header is not what its hash says", sha256_hex(text)[:16], digest.hex()[:16])
    try:
        header = json_of(text)
        if not isinstance(header, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise corrupt("its header is no JSON object", error, "a JSON object") from error
    if header.get("version") != VERSION:
        raise InputError("a token shard has an unknown version", came=f"{path}: version {header.get('version')}",
                         expected=f"version {VERSION}", do=f"remove {path.parent} and run again")
    wrong = [k for k, kind in _FACTS.items() if type(header.get(k)) is not kind or (kind is int and header[k] < 0)]
    if wrong:
        raise corrupt("its header lacks a fact", f"{wrong[0]} = {header.get(wrong[0])!r}", ", ".join(_FACTS))
    n = header["tokens"]
    if header["payload"] != _padded(2 * n, 8) + 8 * (header["documents"] + 1):
        raise corrupt("its sizes contradict each other", f"{header['payload']} bytes for {n} tokens of {header['documents']} documents",
                      f"{_padded(2 * n, 8) + 8 * (header['documents'] + 1)} bytes")
    if size != begin + header["payload"]:
        raise corrupt("its size is wrong", f"{size} bytes", f"{begin + header['payload']} bytes")
    payload = np.memmap(path, dtype=np.uint8, mode="r", offset=begin)
    if verify and sha256_hex(payload.data) != header["sha256"]:
        raise corrupt("its tokens are not what their hash says", sha256_hex(payload.data)[:16], header["sha256"][:16])
    return Shard(path, header, payload[: 2 * n].view("<u2"), np.array(payload[_padded(2 * n, 8) :].view("<i8"), dtype=np.int64))


class TokenStream:
    """The tokens of all shards as one sequence of `len(stream)` ids; read by windows, never loaded whole."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """`shards`: all of one stream, in order. CorruptError if one is missing or belongs to another stream."""
        first = shards[0].header
        for number, shard in enumerate(shards):
            facts = shard.header
            if (facts["index"], facts["last"]) != (number, number == len(shards) - 1) or any(
                facts[key] != first[key] for key in ("corpus", "tokenizer", "vocab_size")
            ):
                raise CorruptError("the shards of a token stream do not belong together",
                                   came=f"{shard.path}: shard {facts['index']}{', the last' if facts['last'] else ''}",
                                   expected=f"shard {number} of {len(shards)} of corpus {first['corpus'][:16]}",
                                   do=f"remove {shard.path.parent} and run again; it is made from the corpus")
        self.shards = tuple(shards)
        self.corpus_hash: str = first["corpus"]
        self.tokenizer_hash: str = first["tokenizer"]
        self.vocab_size: int = first["vocab_size"]
        self.text_bytes: int = sum(shard.header["text_bytes"] for shard in shards)
        self._offsets = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
        inner = [shard.starts[:-1] + offset for shard, offset in zip(shards, self._offsets)]
        self._starts = np.concatenate([*inner, self._offsets[-1:]])

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of (corpus hash, tokenizer hash), which decide every token; how the stream is cut does not matter."""
        return sha256_hex(f"alpha.tokens.v1\n{self.corpus_hash}\n{self.tokenizer_hash}\n".encode())

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._starts) - 1

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def _check(self, starts: ArrayLike, length: int) -> NDArray[np.int64]:
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (starts.min() < 0 or starts.max() + length > len(self)):
            raise InputError("a window lies outside the token stream",
                             came=f"starts {starts.min()} to {starts.max()}, length {length}",
                             expected=f"inside 0 to {len(self)}")
        return starts

    def windows(self, starts: ArrayLike, length: int) -> NDArray[np.int32]:
        """`stream[start : start + length]` for each of `starts` [b]: int32 [b, length]. A window may cross shards."""
        checked = self._check(starts, length)
        out = np.empty((len(checked), length), dtype=np.int32)
        for row, start in zip(out, checked.tolist()):
            shard = int(np.searchsorted(self._offsets, start, side="right")) - 1
            filled = 0
            while filled < length:
                inside = start + filled - int(self._offsets[shard])
                piece = self.shards[shard].tokens[inside : inside + length - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
                shard += 1
        return out

    def document_ids(self, starts: ArrayLike, length: int) -> NDArray[np.int32]:
        """The number of the document, 0 to `documents` - 1, that each token of the windows belongs to: int32 [b, length]."""
        positions = self._check(starts, length)[:, None] + np.arange(length)
        return (np.searchsorted(self._starts, positions, side="right") - 1).astype(np.int32)


def stream_folder(cache: Path, corpus_hash: str, tokenizer_hash: str) -> Path:
    """Where the stream of this corpus and this tokenizer lies in a cache folder."""
    return cache / f"tokens-v{VERSION}-{corpus_hash[:20]}-{tokenizer_hash[:20]}"


def _write_stream(folder: Path, corpus: Corpus, tokenizer: Tokenizer, shard_tokens: int) -> None:
    pieces: list[NDArray[np.uint16]] = []
    starts, index, text_bytes = [0], 0, 0

    def close(last: bool) -> None:
        nonlocal index, text_bytes
        write_shard(folder / f"{index:05d}.tokens", np.concatenate(pieces), np.array(starts, dtype=np.int64),
                    {"index": index, "last": last, "corpus": corpus.hash, "tokenizer": tokenizer.hash,
                     "vocab_size": tokenizer.vocab_size, "text_bytes": text_bytes})
        pieces.clear()
        starts[:] = [0]
        index, text_bytes = index + 1, 0

    ending = np.array([tokenizer.eod], dtype=np.uint16)
    for text in corpus.texts():
        ids = np.concatenate([tokenizer.encode(text), ending])
        if pieces and starts[-1] + len(ids) > shard_tokens:
            close(last=False)
        pieces.append(ids)
        starts.append(starts[-1] + len(ids))
        text_bytes += len(text)
    close(last=True)


def open_stream(folder: Path, *, verify: bool = True) -> TokenStream:
    """Open the stream in `folder`. InputError if there is none, CorruptError if it is incomplete or damaged."""
    paths = sorted(folder.glob("*.tokens"))
    if not paths:
        raise InputError("there is no token stream", came=folder, expected="a folder of *.tokens files",
                         do="prepare the data first")
    return TokenStream([open_shard(path, verify=verify) for path in paths])


def token_stream(corpus: Corpus, tokenizer: Tokenizer, cache: Path, *, shard_tokens: int = SHARD_TOKENS,
                 verify: bool = True) -> TokenStream:
    """The stream of `corpus` through `tokenizer`, made in the folder `cache` unless it is there.

    A stream is written in a temporary folder and renamed when complete, so interrupted or concurrent runs leave no half stream.
    A damaged stream is a CorruptError, not silently made again. MachineError if the disk refuses.
    """
    folder = stream_folder(cache, corpus.hash, tokenizer.hash)
    if not folder.is_dir():
        temporary, handle = None, -1
        try:
            cache.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=MAKING, dir=cache))
            handle = os.open(temporary, os.O_RDONLY)
            hold(handle)  # so that nobody sweeps it
            _write_stream(temporary, corpus, tokenizer, shard_tokens)
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():  # else another process finished the same stream first
                    raise
        except OSError as error:
            raise disk_error(folder, error) from error
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            if handle >= 0:
                os.close(handle)
    stream = open_stream(folder, verify=verify)
    if (stream.corpus_hash, stream.tokenizer_hash) != (corpus.hash, tokenizer.hash):
        raise CorruptError("the token stream belongs to another corpus or tokenizer",
                           came=f"{folder}: corpus {stream.corpus_hash[:20]}, tokenizer {stream.tokenizer_hash[:20]}",
                           expected=f"corpus {corpus.hash[:20]}, tokenizer {tokenizer.hash[:20]}",
                           do=f"remove {folder} and run again")
    return stream
