"""Tokenizers: bytes to token ids and back, without loss on any bytes.

`ByteTokenizer` has one id per byte. `BPETokenizer` is byte-level byte pair encoding: Sennrich, Haddow, Birch, "Neural Machine
Translation of Rare Words with Subword Units" (ACL 2016), algorithm 1, on bytes as in Radford et al., "Language Models are
Unsupervised Multitask Learners" (2019), section 2.2. Ids 0 to 255 are the bytes, 256 ends a document, 257 + k is merge k.

Text is first cut into words by a byte pattern; merges never cross words. Words are short, so encoding is linear in the text.
"""

from __future__ import annotations

import heapq
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpha.data.files import sha256_hex
from alpha.data.hashed import canonical, save_hashed
from alpha.errors import InputError

Merge = tuple[int, int]

FORMAT, VERSION = "alpha.tokenizer", 1
END_OF_DOCUMENT = 256
FIRST_MERGE = 257
MAX_VOCABULARY = 1 << 31
"""Ids fit into int32, as batches hold them."""

# Words by name of the pattern: a run of letters (any byte above 127 is one) with at most one sign or blank before it; one to
# three digits; signs, with the line end and indentation that follow; line ends with indentation; other blanks. Every byte falls
# into one of the classes, so the words of a text join to the text. No word is longer than MAX_WORD, none looks behind itself.
_HIGH = rb"A-Za-z\x80-\xff"
_BLANK = rb" \t\n\r\f\v"
PATTERNS: Mapping[str, bytes] = {
    "code-v1": rb"[^\r\n0-9" + _HIGH + rb"]?[" + _HIGH + rb"]{1,32}"
               rb"|[0-9]{1,3}"
               rb"| ?[^0-9" + _BLANK + _HIGH + rb"]{1,32}(?:[\r\n]{1,8}[ \t]{0,64})?"
               rb"|[\r\n]{1,8}[ \t]{0,64}"
               rb"|[" + _BLANK + rb"]{1,32}",
}
MAX_WORD = 128
_BLOCK = 1 << 18
_CACHED_WORDS = 1 << 18


def words_of(data: bytes, pattern: re.Pattern[bytes]) -> Iterator[list[bytes]]:
    """The words of `data` in lists of about _BLOCK bytes of text; together the same words as `pattern.findall(data)`.

    A block ends where its last words cannot depend on bytes behind the block, which bounds the memory for a large file.
    """
    start = 0
    while start < len(data):
        end = min(start + _BLOCK, len(data))
        words = pattern.findall(data, start, end)
        if end < len(data):
            unsure = 0
            while unsure <= 2 * MAX_WORD:
                unsure += len(words.pop())
            end -= unsure
        yield words
        start = end


class Tokenizer(ABC):
    """What the rest of the package needs of a tokenizer."""

    kind: str
    eod = END_OF_DOCUMENT

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """Of ids: the narrower of uint16 and uint32, little-endian."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""

    @property
    @abstractmethod
    def tokens(self) -> Sequence[bytes]:
        """The bytes that each id stands for, [vocab_size]; empty for the end of a document."""

    @abstractmethod
    def encode(self, data: bytes) -> NDArray[np.unsignedinteger]:
        """Ids of `data`, `dtype` [n]. No end-of-document token is added, and none can come out of text."""

    @abstractmethod
    def form(self) -> dict[str, Any]:
        """All that decides about encode and decode, as JSON data."""

    @property
    def record(self) -> Mapping[str, Any]:
        """How it was made; kept in the file, not part of `hash`."""
        return {}

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical JSON of `form()`, which decides all of encode and decode."""
        return sha256_hex(canonical(self.form()))

    @cached_property
    def byte_lengths(self) -> NDArray[np.int32]:
        """Number of text bytes behind each id, int32 [vocab_size]; 0 for the end of a document."""
        return np.array([len(token) for token in self.tokens], dtype=np.int32)

    def decode(self, ids: ArrayLike) -> bytes:
        """The bytes behind `ids` (integers, [n]); the end of a document stands for no bytes. InputError for an unknown id."""
        array = np.asarray(ids)
        if array.size == 0:
            return b""
        if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= self.vocab_size:
            raise InputError("these are not token ids",
                             came=f"{array.dtype}{list(array.shape)} from {array.min()} to {array.max()}",
                             expected=f"integers [n] from 0 to {self.vocab_size - 1}",
                             do="decode with the tokenizer that encoded")
        return b"".join(map(self.tokens.__getitem__, array.tolist()))

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON with its version and the SHA-256 of its content. MachineError if the disk refuses."""
        save_hashed(path, FORMAT, VERSION, {"form": self.form(), "record": dict(self.record)})


class ByteTokenizer(Tokenizer):
    """One id per byte and one that ends a document: 257 ids."""

    kind = "bytes"

    @property
    def vocab_size(self) -> int:
        return FIRST_MERGE

    @cached_property
    def tokens(self) -> Sequence[bytes]:
        return (*(bytes([value]) for value in range(256)), b"")

    def encode(self, data: bytes) -> NDArray[np.unsignedinteger]:
        return np.frombuffer(data, dtype=np.uint8).astype(self.dtype)

    def form(self) -> dict[str, Any]:
        return {"kind": self.kind, "eod": self.eod}


class _WordIds(dict[bytes, bytes]):
    """Word -> the bytes of its ids; a missing word is encoded on demand. Emptied when full."""

    def __init__(self, encode_word: Callable[[bytes], list[int]], dtype: np.dtype[np.uint16] | np.dtype[np.uint32]) -> None:
        super().__init__()
        self._encode_word, self._dtype = encode_word, dtype

    def __missing__(self, word: bytes) -> bytes:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        ids = np.array(self._encode_word(word), dtype=self._dtype).tobytes()
        self[word] = ids
        return ids


class MadeTokenizer(Tokenizer):
    """One that holds its tokens, and how it was made, as they were read or trained."""

    _tokens: tuple[bytes, ...]
    _record: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[bytes]:
        return self._tokens

    @property
    def record(self) -> Mapping[str, Any]:
        return self._record


class BPETokenizer(MadeTokenizer):
    """Byte-level byte pair encoding. `merges[k]` is the pair of ids that becomes id 257 + k; earlier merges go first."""

    kind = "bpe"

    def __init__(self, merges: Sequence[Merge], *, pattern: str = "code-v1", record: Mapping[str, Any] | None = None) -> None:
        """`record`: how it was trained, as JSON data. InputError for an unknown pattern or an impossible merge."""
        if pattern not in PATTERNS:
            raise InputError("unknown word pattern of a tokenizer", came=pattern, expected=", ".join(PATTERNS))
        if FIRST_MERGE + len(merges) > MAX_VOCABULARY:
            raise InputError("too many merges", came=len(merges), expected=f"at most {MAX_VOCABULARY - FIRST_MERGE}")
        self.merges: tuple[Merge, ...] = tuple((int(left), int(right)) for left, right in merges)
        self.pattern = pattern
        self._record = dict(record or {})
        self._words = re.compile(PATTERNS[pattern])
        self._rank: dict[Merge, int] = {}
        tokens = [*(bytes([value]) for value in range(256)), b""]
        for rank, (left, right) in enumerate(self.merges):
            known = FIRST_MERGE + rank
            possible = 0 <= left < known and 0 <= right < known and END_OF_DOCUMENT not in (left, right)
            if not possible or (left, right) in self._rank:
                raise InputError(f"merge {rank} of a tokenizer is impossible", came=(left, right),
                                 expected=f"a new pair of ids below {known}, none of them {END_OF_DOCUMENT}")
            if len(tokens[left]) + len(tokens[right]) > MAX_WORD:  # else merges that double would fill the memory
                raise InputError(f"merge {rank} of a tokenizer is longer than any word",
                                 came=f"{len(tokens[left]) + len(tokens[right])} bytes", expected=f"at most {MAX_WORD}",
                                 do="train the tokenizer again")
            self._rank[left, right] = rank
            tokens.append(tokens[left] + tokens[right])
        self._tokens = tuple(tokens)
        self._cache = _WordIds(self._encode_word, self.dtype)

    def form(self) -> dict[str, Any]:
        return {"kind": self.kind, "eod": self.eod, "pattern": self.pattern,
                "words": PATTERNS[self.pattern].decode("ascii"), "merges": [list(merge) for merge in self.merges]}

    def encode(self, data: bytes) -> NDArray[np.unsignedinteger]:
        joined = b"".join(b"".join(map(self._cache.__getitem__, words)) for words in words_of(data, self._words))
        return np.frombuffer(joined, dtype=self.dtype)

    def _encode_word(self, word: bytes) -> list[int]:
        """Ids of one word: apply the earliest merge that fits, at all its places from the left, until none fits."""
        ids, rank, none = list(word), self._rank, len(self._rank)
        while len(ids) > 1:
            best = min(rank.get(pair, none) for pair in pairwise(ids))
            if best == none:
                break
            ids = _merged(ids, self.merges[best], FIRST_MERGE + best)
        return ids

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int, *, pattern: str = "code-v1", min_word_count: int = 2,
              record: Mapping[str, Any] | None = None) -> BPETokenizer:
        """Learn `vocab_size - 257` merges from `texts`: each time the most frequent pair, of equals the lowest pair of ids.

        Words seen fewer than `min_word_count` times take no part. `record` is kept beside what this function records itself.
        InputError if `vocab_size` is outside 257 to 2^31 or the texts have too few pairs for it.
        """
        if not FIRST_MERGE <= vocab_size <= MAX_VOCABULARY:
            raise InputError("impossible vocabulary size", came=vocab_size, expected=f"from {FIRST_MERGE} to {MAX_VOCABULARY}")
        if pattern not in PATTERNS:
            raise InputError("unknown word pattern of a tokenizer", came=pattern, expected=", ".join(PATTERNS))
        compiled = re.compile(PATTERNS[pattern])
        table: Counter[bytes] = Counter()
        documents = total = 0
        for text in texts:
            documents, total = documents + 1, total + len(text)
            for words in words_of(text, compiled):
                table.update(words)
        merges = learn_merges({word: n for word, n in table.items() if n >= min_word_count}, vocab_size - FIRST_MERGE)
        if len(merges) < vocab_size - FIRST_MERGE:
            raise InputError("the text is too small for this vocabulary",
                             came=f"vocab_size {vocab_size} from {total} bytes of text",
                             expected=f"at most {FIRST_MERGE + len(merges)}", do="lower the vocabulary or give more text")
        trained = {"documents": documents, "bytes": total, "min_word_count": min_word_count, "distinct_words": len(table)}
        return cls(merges, pattern=pattern, record={**(record or {}), **trained})


def _merged(ids: Sequence[int], pair: Merge, new: int) -> list[int]:
    """`ids` with each occurrence of `pair`, found from the left without overlap, replaced by `new`."""
    left, right = pair
    out: list[int] = []
    i, last = 0, len(ids) - 1
    while i <= last:
        if i < last and ids[i] == left and ids[i + 1] == right:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def learn_merges(table: Mapping[bytes, int], wanted: int) -> list[Merge]:
    """The first `wanted` merges (fewer if no pair is left) for a table word -> how often it occurs.

    Pair counts are kept up to date from the words that a merge changed. The heap may hold outdated counts of a pair; the
    current one is always among them, so an entry that disagrees with `counts` is skipped.
    """
    words = [list(word) for word in table]
    times = list(table.values())
    counts: dict[Merge, int] = {}
    where: dict[Merge, set[int]] = {}
    for index, ids in enumerate(words):
        for pair in pairwise(ids):
            counts[pair] = counts.get(pair, 0) + times[index]
            where.setdefault(pair, set()).add(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Merge] = []
    while heap and len(merges) < wanted:
        count, best = heapq.heappop(heap)
        if counts[best] != -count or count == 0:
            continue
        new = FIRST_MERGE + len(merges)
        merges.append(best)
        changed: set[Merge] = set()
        for index in where.pop(best):
            old = words[index]
            words[index] = ids = _merged(old, best, new)
            for pair in pairwise(old):
                counts[pair] -= times[index]
                changed.add(pair)
            for pair in pairwise(ids):
                counts[pair] = counts.get(pair, 0) + times[index]
                where.setdefault(pair, set()).add(index)
                changed.add(pair)
        for pair in changed:
            heapq.heappush(heap, (-counts[pair], pair))
    return merges
