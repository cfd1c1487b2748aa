"""Token streams on disk: documents through a tokenizer, cut into files that say of each block whether it is whole.

A stream is documents in order, each followed by the end-of-document token, which belongs to the document that it ends. A document
lies in one shard. A folder of shards has a listing, `stream.json`: the shards in order with the hash of each one's header. A header holds
the hash of its table, the table a checksum of each block: so one hash stands for every byte, and a block is checked when it is first read.

Windows are read, not mapped: the interpreter goes on while the disk is waited for, and a file that somebody cuts is an error with its
name. In mapped memory it would be SIGBUS, the end of the process without a word. Only passes over a whole shard map it.

A shard file is, little-endian: the magic `ALPHATOK`; header length, uint64; SHA-256 of the header, 32 bytes; the header, JSON; zeros up to
a multiple of 64; the table, XXH3-128 of each block of BLOCK bytes of what follows, 16 bytes each; zeros up to a multiple of 64; the tokens,
uint16 or uint32 as the header says [tokens]; zeros up to a multiple of 8; where each document starts in the shard, and the end, int64
[documents + 1].
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from alpha.data.corpus import Corpus
from alpha.data.files import MAKING, disk_error, hold, sha256_hex, write_atomic
from alpha.data.hashed import load_hashed, save_hashed
from alpha.data.tokenizer import Tokenizer
from alpha.errors import CorruptError, InputError, MachineError
from alpha.files import json_of, open_regular

MAGIC, VERSION = b"ALPHATOK", 2
LISTING, FORMAT = "stream.json", "alpha.stream"
BLOCK = 1 << 16
"""Bytes that one checksum covers: a window of a few KiB, read for the first time, hashes one or two blocks of it."""
_PREFIX = struct.Struct("<8sQ32s")
_ALIGN = 64
_CHECKSUM = 16
_MOST_HEADER = 1 << 16
"""Bytes of a header; one is about 400."""
_FACTS = {"version": int, "dtype": str, "tokens": int, "documents": int, "text_bytes": int, "table": str, "tokenizer": str,
          "vocab_size": int}
_DTYPES: Mapping[str, np.dtype[Any]] = {"<u2": np.dtype("<u2"), "<u4": np.dtype("<u4")}
SHARD_TOKENS = 1 << 24
"""A shard is closed before it would exceed this many tokens (32 MiB, or 64): the memory of whoever writes one."""

Listed = tuple[str, str]
"""A shard in a listing: its file's name, the SHA-256 (hex) of its header."""


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _checksum(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _damaged(path: Path, why: str, came: object, expected: object) -> CorruptError:
    return CorruptError(f"a token shard is damaged: {why}", came=f"{path}: {came}", expected=expected,
                        do=f"restore it, or remove {path.parent} and make it again")


class Shard:
    """One open file, whose handle it holds. `header`: its facts; `hash`: SHA-256 (hex) of the header; `dtype`: of its tokens, uint16 or
    uint32. `starts`: int64 [documents + 1], positions within the shard, checked. `len(shard)`: tokens."""

    def __init__(self, path: Path, header: Mapping[str, Any], digest: str, file: BinaryIO, table: bytes) -> None:
        """`file`: at the first token. CorruptError if the index is not what its blocks' checksums say, or no index."""
        self.path, self.header, self.hash, self.dtype = path, header, digest, _DTYPES[header["dtype"]]
        self._begin, self._table = file.tell(), table
        self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        self._known = bytearray(len(table) // _CHECKSUM)
        index = _padded(self.dtype.itemsize * len(self), 8)
        self._size = index + 8 * (header["documents"] + 1)
        self.starts: NDArray[np.int64] = np.empty(header["documents"] + 1, dtype="<i8")
        self._read(index, self.starts.view(np.uint8).data)
        if self.starts[0] != 0 or self.starts[-1] != len(self) or (np.diff(self.starts) < 1).any():
            raise _damaged(path, "its documents do not follow each other", "an index that does not rise", f"from 0 to {len(self)}, rising")

    def __len__(self) -> int:
        tokens: int = self.header["tokens"]
        return tokens

    @property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """All of them, memory-mapped and unchecked, for a pass over the shard: uint16 or uint32 [n]. CorruptError if the file was cut."""
        with open(os.dup(self._handle), "rb") as file:
            if os.fstat(self._handle).st_size < self._begin + self._size:
                raise self._cut()
            return np.memmap(file, dtype=self.dtype, mode="r", offset=self._begin, shape=(len(self),))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self._known)

    def read(self, begin: int, out: memoryview) -> None:
        """Fill `out`, bytes, with tokens from `begin` on. Each block is checked when it is first read. CorruptError names the block, and a
        file that was cut while it was open; MachineError if the disk refuses."""
        self._read(begin * self.dtype.itemsize, out)

    def ahead(self, begin: int, tokens: int) -> None:
        """Have the system fetch what a `read` of so many tokens will need, without waiting for it."""
        at, end = begin * self.dtype.itemsize, (begin + tokens) * self.dtype.itemsize
        first, behind = at // BLOCK, -(-end // BLOCK)
        if self._known.find(0, first, behind) >= 0:
            at, end = first * BLOCK, behind * BLOCK
        os.posix_fadvise(self._handle, self._begin + at, end - at, os.POSIX_FADV_WILLNEED)

    def forget(self) -> None:
        """Let the page cache drop the file, so that a measurement reads the disk."""
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def verify(self) -> None:
        """Check every block."""
        for block in range(len(self._known)):
            if not self._known[block]:
                self._block(block)

    def _read(self, begin: int, out: memoryview) -> None:
        end = begin + len(out)
        first, behind = begin // BLOCK, -(-end // BLOCK)
        if self._known.find(0, first, behind) < 0:
            self._fetch(begin, out)
            return
        for block in range(first, behind):
            at, stop = max(begin, block * BLOCK), min(end, (block + 1) * BLOCK)
            if self._known[block]:
                self._fetch(at, out[at - begin : stop - begin])
            else:
                out[at - begin : stop - begin] = self._block(block)[at - block * BLOCK : stop - block * BLOCK]

    def _block(self, block: int) -> memoryview:
        """A block that was not read before, held against its checksum."""
        data = memoryview(bytearray(min(BLOCK, self._size - block * BLOCK)))
        self._fetch(block * BLOCK, data)
        came, stated = _checksum(data), self._table[block * _CHECKSUM : (block + 1) * _CHECKSUM]
        if came != stated:
            raise _damaged(self.path, f"block {block} of {self.blocks} is not what its checksum says", came.hex(), stated.hex())
        self._known[block] = True
        return data

    def _fetch(self, begin: int, out: memoryview) -> None:
        """The bytes from `begin` on, counted from the first token."""
        at, done = self._begin + begin, 0
        try:
            while done < len(out):
                got = os.preadv(self._handle, [out[done:]], at + done)
                if not got:
                    raise self._cut()
                done += got
        except OSError as error:
            raise MachineError("a token shard can no longer be read", came=f"{self.path} ({error.strerror})",
                               expected="what was readable when it was opened", do="check the disk and resume the run") from error

    def _cut(self) -> CorruptError:
        return _damaged(self.path, "it was cut while it was open", f"{os.fstat(self._handle).st_size} bytes",
                        f"{self._begin + self._size} bytes")


def write_shard(path: Path, tokens: NDArray[np.unsignedinteger], starts: NDArray[np.int64], facts: Mapping[str, Any]) -> str:
    """Write one shard file, whole or not at all; the SHA-256 (hex) of its header. `tokens`: little-endian uint16 or uint32 [n]. `facts`
    joins the header. MachineError if the disk refuses."""
    raw = tokens.tobytes()
    payload = raw.ljust(_padded(len(raw), 8), b"\0") + starts.astype("<i8", copy=False).tobytes()
    view = memoryview(payload)
    table = b"".join(_checksum(view[at : at + BLOCK]) for at in range(0, len(payload), BLOCK))
    header = {**facts, "version": VERSION, "dtype": tokens.dtype.newbyteorder("<").str, "tokens": len(tokens), "documents": len(starts) - 1,
              "table": sha256_hex(table)}
    text = json.dumps(header, sort_keys=True).encode()
    digest = sha256_hex(text)
    head = _PREFIX.pack(MAGIC, len(text), bytes.fromhex(digest)) + text
    write_atomic(path, head.ljust(_padded(len(head), _ALIGN), b"\0") + table.ljust(_padded(len(table), _ALIGN), b"\0") + payload)
    return digest


def open_shard(path: Path, expected: str | None = None, *, verify: bool = True) -> Shard:
    """Open one shard file. `expected`: SHA-256 (hex) of its header. `verify`: check every block now, else each when it is first read.

    InputError: missing, or a version that this program does not know. CorruptError: torn, edited, another size than stated, not the one
    expected.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
                raise _damaged(path, "no shard header", f"{size} bytes, first {prefix[:8]!r}", f"a file starting with {MAGIC!r}")
            _, length, digest = _PREFIX.unpack(prefix)
            if length > _MOST_HEADER:
                raise _damaged(path, "its header is too long", f"{length} bytes", f"at most {_MOST_HEADER}")
            begin = _padded(_PREFIX.size + length, _ALIGN)
            head = file.read(begin - _PREFIX.size)
            header = _header(path, head, length, digest)
            n, dtype = header["tokens"], _DTYPES[header["dtype"]]
            payload = _padded(dtype.itemsize * n, 8) + 8 * (header["documents"] + 1)
            table_bytes = _CHECKSUM * -(-payload // BLOCK)
            behind = begin + _padded(table_bytes, _ALIGN)
            if size != behind + payload:
                raise _damaged(path, "its size is wrong", f"{size} bytes", f"{behind + payload} bytes")
            padded = file.read(behind - begin)
            table = padded[:table_bytes]
            if sha256_hex(table) != header["table"] or padded[table_bytes:].strip(b"\0"):
                raise _damaged(path, "its table is not what its hash says", sha256_hex(table)[:16], header["table"][:16])
            if expected is not None and digest.hex() != expected:
                raise _damaged(path, "it is another shard than the listing names", digest.hex()[:16], expected[:16])
            shard = Shard(path, header, digest.hex(), file, table)
    except OSError as error:
        raise InputError("a token shard cannot be read", came=f"{path} ({error.strerror})", expected="a readable shard file",
                         do=f"restore it, or remove {path.parent} and make it again") from error
    if verify:
        shard.verify()
    return shard


def _header(path: Path, head: bytes, length: int, digest: bytes) -> dict[str, Any]:
    """The facts of a header. `head`: its `length` bytes of JSON, and zeros."""
    text = head[:length]
    if sha256_hex(text) != digest.hex() or head[length:].strip(b"\0"):
        raise _damaged(path, "its header is not what its hash says", sha256_hex(text)[:16], digest.hex()[:16])
    try:
        header = json_of(text)
        if not isinstance(header, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise _damaged(path, "its header is no JSON object", error, "a JSON object") from error
    if header.get("version") != VERSION:
        raise InputError("a token shard has an unknown version", came=f"{path}: version {header.get('version')}",
                         expected=f"version {VERSION}", do="use the release that wrote it, or make the data again with this one")
    wrong = [k for k, kind in _FACTS.items() if type(header.get(k)) is not kind or (kind is int and header[k] < 0)]
    if wrong:
        raise _damaged(path, "its header lacks a fact", f"{wrong[0]} = {header.get(wrong[0])!r}", ", ".join(_FACTS))
    if header["dtype"] not in _DTYPES:
        raise _damaged(path, "its tokens are of an unknown type", header["dtype"], ", ".join(_DTYPES))
    return header


class ShardWriter:
    """Documents into shard files of a folder. A shard is closed before a document would make it longer than `shard_tokens`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, prefix: str = "", shard_tokens: int = SHARD_TOKENS) -> None:
        """`prefix`: what the names of the files begin with."""
        self._folder, self._tokenizer, self._prefix, self._most = folder, tokenizer, prefix, shard_tokens
        self._ending = np.array([tokenizer.eod], dtype=tokenizer.dtype)
        self._pieces: list[NDArray[np.unsignedinteger]] = []
        self._starts, self._text_bytes = [0], 0
        self.listed: list[Listed] = []
        self.documents = self.tokens = self.text_bytes = 0

    def add(self, text: bytes) -> None:
        """Tokenize one document and take it in. MachineError if the disk refuses."""
        ids = np.concatenate([self._tokenizer.encode(text), self._ending])
        if self._pieces and self._starts[-1] + len(ids) > self._most:
            self.close()
        self._pieces.append(ids)
        self._starts.append(self._starts[-1] + len(ids))
        self._text_bytes += len(text)
        self.documents, self.tokens, self.text_bytes = self.documents + 1, self.tokens + len(ids), self.text_bytes + len(text)

    def close(self) -> None:
        """Write the documents that wait, if there are any."""
        if not self._pieces:
            return
        name = f"{self._prefix}{len(self.listed):05d}.tokens"
        digest = write_shard(self._folder / name, np.concatenate(self._pieces), np.array(self._starts, dtype=np.int64),
                             {"tokenizer": self._tokenizer.hash, "vocab_size": self._tokenizer.vocab_size, "text_bytes": self._text_bytes})
        self.listed.append((name, digest))
        self._pieces.clear()
        self._starts[:] = [0]
        self._text_bytes = 0


class TokenStream:
    """The tokens of all shards as one sequence of `len(stream)` ids; read by windows, never loaded whole, each block checked before its
    first token is given."""

    def __init__(self, shards: Sequence[Shard], corpus: str | None = None) -> None:
        """`shards`: all of one stream, in order. `corpus`: hash of the documents, as the listing has it; default: what the first header
        says. CorruptError if they belong to several streams."""
        first = shards[0].header
        for shard in shards:
            if any(shard.header[key] != first[key] for key in ("tokenizer", "vocab_size", "dtype")):
                raise CorruptError("the shards of a token stream do not belong together",
                                   came=f"{shard.path}: tokenizer {shard.header['tokenizer'][:16]}",
                                   expected=f"tokenizer {first['tokenizer'][:16]}, as in {shards[0].path.name}",
                                   do=f"remove {shard.path.parent} and make it again")
        self.shards = tuple(shards)
        self.corpus_hash: str = first.get("corpus", "") if corpus is None else corpus
        self.tokenizer_hash: str = first["tokenizer"]
        self.vocab_size: int = first["vocab_size"]
        self.text_bytes: int = sum(shard.header["text_bytes"] for shard in shards)
        self._offsets = np.cumsum([0, *map(len, shards)])
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

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """Where each document starts, and the end: int64 [documents + 1]."""
        return self._starts

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
        """`stream[start : start + length]` for each of `starts` [b]: int32 [b, length]. A window may cross shards. CorruptError names the
        block that is damaged."""
        checked = self._check(starts, length)
        raw = np.empty((len(checked), length), dtype=self.shards[0].dtype)
        if not raw.size:
            return raw.astype(np.int32)
        places = self._places(checked)
        if len(places) > 1:
            self._ahead(places, repeat(length))
        flat, size = raw.reshape(-1).view(np.uint8).data, self.shards[0].dtype.itemsize
        for row, (shard, inside) in enumerate(places):
            at, end = row * length, (row + 1) * length
            while at < end:
                piece = min(end - at, len(self.shards[shard]) - inside)
                self.shards[shard].read(inside, flat[at * size : (at + piece) * size])
                at, shard, inside = at + piece, shard + 1, 0
        return raw.astype(np.int32)

    def ahead(self, starts: NDArray[np.int64], lengths: NDArray[np.integer]) -> None:
        """Have the system fetch these parts of the stream all at once, without waiting for it: int64 [n], tokens [n]. Whoever reads one
        after the other waits for the disk each time."""
        self._ahead(self._places(starts), lengths.tolist())

    def _ahead(self, places: Iterable[tuple[int, int]], lengths: Iterable[int]) -> None:
        for (shard, inside), length in zip(places, lengths):
            self.shards[shard].ahead(inside, min(length, len(self.shards[shard]) - inside))

    def _places(self, starts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(shard, place in it) of each."""
        shards = np.searchsorted(self._offsets, starts, side="right") - 1
        return list(zip(shards.tolist(), (starts - self._offsets[shards]).tolist()))

    def document_ids(self, starts: ArrayLike, length: int) -> NDArray[np.int32]:
        """The number of the document, 0 to `documents` - 1, that each token of the windows belongs to: int32 [b, length]."""
        positions = self._check(starts, length)[:, None] + np.arange(length)
        return (np.searchsorted(self._starts, positions, side="right") - 1).astype(np.int32)


def stream_folder(cache: Path, corpus_hash: str, tokenizer_hash: str) -> Path:
    """Where the stream of this corpus and this tokenizer lies in a cache folder."""
    return cache / f"tokens-v{VERSION}-{corpus_hash[:20]}-{tokenizer_hash[:20]}"


def save_listing(folder: Path, corpus_hash: str, shards: Sequence[Listed]) -> str:
    """Write the listing of a folder's shards; the SHA-256 (hex) of its bytes. MachineError if the disk refuses."""
    return save_hashed(folder / LISTING, FORMAT, VERSION, {"corpus": corpus_hash, "shards": [list(listed) for listed in shards]})


def open_stream(folder: Path, *, verify: bool = True, expected: str | None = None) -> TokenStream:
    """Open the stream in `folder`. `verify`: check every block now (it takes a second for some GB), else each when it is first read.
    `expected`: SHA-256 (hex) of the listing, where it is known.

    InputError if there is none or its version is unknown, CorruptError if it is incomplete or damaged.
    """
    path = folder / LISTING
    if not path.exists() and not any(folder.glob("*.tokens")):
        raise InputError("there is no token stream", came=folder, expected=f"a folder with {LISTING}", do="prepare the data first")
    listing = load_hashed(path, "the listing of a token stream", FORMAT, VERSION, expected)
    try:
        corpus, listed = str(listing["corpus"]), [(str(name), str(digest)) for name, digest in listing["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError("the listing of a token stream lacks a fact", came=f"{path}: {error!r}", expected="corpus, shards",
                           do=f"remove {folder} and make it again") from error
    missing = [name for name, _ in listed if not os.path.exists(folder / name)]
    if missing or not listed:
        unlisted = sorted({found.name for found in folder.glob("*.tokens")} - {name for name, _ in listed})
        came = f"{folder}: no {missing[0] if missing else 'shard listed'}" + (f"; {unlisted[0]} is not listed" if unlisted else "")
        raise CorruptError("a token stream lacks shards", came=came, expected=f"{len(listed)} shards, as {LISTING} names them",
                           do=f"restore or rename them, or remove {folder} and make it again")
    return TokenStream([open_shard(folder / name, digest, verify=verify) for name, digest in listed], corpus)


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
            writer = ShardWriter(temporary, tokenizer, shard_tokens=shard_tokens)
            for text in corpus.texts():
                writer.add(text)
            writer.close()
            save_listing(temporary, corpus.hash, writer.listed)
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
