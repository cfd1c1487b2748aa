"""Tokenizers of Hugging Face: `tokenizer.json` with byte-level BPE, as GPT-2, Llama 3 and Qwen have it, by code of our own.

Ids are those of the library `tokenizers` for text that is UTF-8, encoded with `add_special_tokens=False` and `encode_special_tokens=True`.
The way of a text: added tokens are cut out, Unicode's form C if the file asks for it, words by the file's patterns
(alpha/data/regular.py), byte pair encoding in each word. Three decisions are Alpha's:

- **Special tokens never come out of text.** Their names in a text are encoded as text, so no document can end itself. Added tokens that
  the file does not call special are found in text, the end of text excepted.
- **Bytes that are no UTF-8 are kept**, each as the token of its byte; patterns see signs. The library takes no such text.
- **Categories are those of the Unicode of the Python that read the file** (3.10: 13, 3.14: 16; the library: 16). They go into the
  tokenizer's form, hash and saved file. Ids can differ from the library's only at characters that one of the two does not have.

Encoding is lossless but for form C (alpha/data/form_c.py). Byte-level BPE: Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019), section 2.2; the letters that stand for bytes: the same authors' encoder.py, `bytes_to_unicode`.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpha.data.files import read_file, sha256_hex
from alpha.data.form_c import form_c
from alpha.data.regular import Ranges, translate
from alpha.data.tokenizer import MAX_VOCABULARY, MadeTokenizer, Merge
from alpha.errors import InputError
from alpha.files import MOST_TEXT, json_of

ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "</s>")
"""Names of the token that ends a text, the first that a file has counts: GPT-2 and Qwen; Llama 3; others."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The words of GPT-2 (encoder.py), which a ByteLevel pre-tokenizer with `use_regex` stands for."""

_CACHED, _CACHED_LENGTH, _BATCH, _SHORT = 1 << 18, 64, 1 << 14, 64


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in a tokenizer.json -> the byte: itself where it prints, else one from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + place): byte for place, byte in enumerate(rest)}


LETTERS: Mapping[str, int] = _letters()


class _Words(dict[str, bytes]):
    """Word -> the bytes of its ids; a missing word is encoded on demand. Emptied when full; long words are not kept."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        super().__init__()
        self._ids, self._dtype = tokenizer.word_ids, tokenizer.dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._ids(word), dtype=self._dtype).tobytes()
        if len(word) <= _CACHED_LENGTH:
            if len(self) >= _CACHED:
                self.clear()
            self[word] = ids
        return ids


class _Joins(dict[str, bool]):
    """Two characters that follow each other -> whether a merge can reach across them.

    A merge reaches across where its left token ends with the first character, or is an end of it, and its right token begins so. A word
    falls apart where none does, and its parts recur where long words do not: what makes text without blanks fast.
    """

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._reach = {(end, begin) for left, right in pairs if (end := _last(left)) and (begin := _first(right))}

    def __missing__(self, both: str) -> bool:
        left, right = (c.encode("utf-8", "surrogateescape") for c in both)
        torn = any(0xDC80 <= ord(c) <= 0xDCFF for c in both)  # a byte that is no UTF-8 joins what it likes
        found = torn or any((left[i:], right[:j]) in self._reach for i in range(len(left)) for j in range(1, len(right) + 1))
        if len(self) >= _CACHED:
            self.clear()
        self[both] = found
        return found


def _first(token: bytes) -> bytes:
    """What of the first character `token` begins with; nothing where it begins inside one."""
    lead = token[0]
    if 0x80 <= lead < 0xC0:
        return b""
    return token[: 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4]


def _last(token: bytes) -> bytes:
    """What of the last character `token` ends with; nothing where it ends inside one."""
    start = next((i for i in range(len(token) - 1, max(len(token) - 5, -1), -1) if not 0x80 <= token[i] < 0xC0), None)
    if start is None:
        return token if len(token) < 4 else b""
    return token[start:] if len(token) - start == len(_first(token[start:] + b"\x80\x80\x80")) else b""


class HuggingFaceTokenizer(MadeTokenizer):
    """A byte-level BPE tokenizer that `read_hugging_face` read."""

    kind = "hf"

    def __init__(self, form: Mapping[str, Any], record: Mapping[str, Any] | None = None) -> None:
        """`form`: what `form()` gives. `record`: where it came from, as JSON data.

        InputError for merges, ids or patterns that cannot be; KeyError, TypeError or ValueError where `form` has another shape.
        """
        self._form, self._record = dict(form), dict(record or {})
        self.eod = int(form["eod"])
        self._nfc = bool(form["nfc"])
        vocabulary: dict[str, int] = dict(form["vocab"])
        self._tokens = _tokens_of(vocabulary, form["added"], self.eod)
        self._bytes = [vocabulary.get(letter, -1) for letter in sorted(LETTERS, key=LETTERS.__getitem__)]
        if -1 in self._bytes:
            raise InputError("a tokenizer has no token for a byte", came=f"none for {self._bytes.count(-1)} of 256 bytes, "
                             f"the first 0x{self._bytes.index(-1):02x}", expected="all 256, so that every text has ids",
                             do="train it with the whole alphabet of ByteLevel")
        self._merges = _merges_of(vocabulary, form["merges"], self.eod)
        self._whole: dict[bytes, int] = {}
        if form["ignore_merges"]:
            self._whole = {token: i for letters, i in vocabulary.items() if i != self.eod and (token := _raw(letters)) is not None}
        classes: dict[str, Ranges] = {name: tuple((int(low), int(high)) for low, high in c) for name, c in form["classes"].items()}
        self._patterns = [translate(pattern, classes)[0] for pattern in form["patterns"]]
        self._added = [_Added(form["added"], self.eod, normalized, self._normal) for normalized in (False, True)]
        self._joins = _Joins((self._tokens[left], self._tokens[right]) for left, right in self._merges)
        self._cache = _Words(self)

    def form(self) -> dict[str, Any]:
        return self._form

    def encode(self, data: bytes) -> NDArray[np.unsignedinteger]:
        out: list[bytes] = []
        raw, normal = self._added
        for section in raw.cut([data.decode("utf-8", "surrogateescape")]):
            for part in normal.cut([self._normal(section)] if isinstance(section, str) else [section]):
                if isinstance(part, int):
                    out.append(np.array([part], dtype=self.dtype).tobytes())
                    continue
                words = map(self._cache.__getitem__, self._words(part))
                while ids := b"".join(islice(words, _BATCH)):  # no word is without ids
                    out.append(ids)
        return np.frombuffer(b"".join(out), dtype=self.dtype)

    def _normal(self, text: str) -> str:
        return form_c(text) if self._nfc else text

    def _words(self, text: str) -> Iterator[str]:
        """The words of `text`, one after another: all of them at once would take many times its memory."""
        first, *rest = self._patterns
        words: Iterator[str] = map(re.Match.group, first.finditer(text))
        for pattern in rest:
            words = chain.from_iterable(map(pattern.findall, words))
        return words

    def word_ids(self, word: str) -> list[int]:
        """Ids of one word."""
        data = word.encode("utf-8", "surrogateescape")
        whole = self._whole.get(data)
        if whole is not None:
            return [whole]
        joins = self._joins
        cuts = [place for place, both in enumerate(map(add, word, word[1:]), 1) if not joins[both]]
        if not cuts:
            return self._merged(data)
        ids: list[int] = []
        for start, end in pairwise((0, *cuts, len(word))):
            ids += self._merged(word[start:end].encode("utf-8", "surrogateescape"))
        return ids

    def _merged(self, data: bytes) -> list[int]:
        """Apply the earliest merge that fits, at its first place, until none fits."""
        ids = list(map(self._bytes.__getitem__, data))
        merges, none = self._merges, (len(self._merges), 0)
        if len(ids) > _SHORT:
            return _merged_by_heap(ids, merges)
        fits = [merges.get(pair, none) for pair in pairwise(ids)]
        while fits and (best := min(fits)) is not none:
            place = fits.index(best)
            ids[place : place + 2] = [best[1]]
            del fits[place]
            if place:
                fits[place - 1] = merges.get((ids[place - 1], best[1]), none)
            if place < len(fits):
                fits[place] = merges.get((best[1], ids[place + 1]), none)
        return ids


def _merged_by_heap(ids: list[int], merges: Mapping[Merge, Merge]) -> list[int]:
    """As `_merged`, in time n log n: places wait in a heap by (rank, place); what a merge made outdated is passed over."""
    count = len(ids)
    after, before = list(range(1, count + 1)), list(range(-1, count - 1))
    heap = [(*found, place) for place, pair in enumerate(pairwise(ids)) if (found := merges.get(pair))]
    heap = [(rank, place, new) for rank, new, place in heap]
    heapq.heapify(heap)
    while heap:
        rank, place, new = heapq.heappop(heap)
        right = after[place]
        if ids[place] < 0 or right >= count or merges.get((ids[place], ids[right])) != (rank, new):
            continue
        ids[place], ids[right] = new, -1
        after[place] = end = after[right]
        if end < count:
            before[end] = place
        for left, other in ((before[place], place), (place, end)):
            if left >= 0 and other < count and (found := merges.get((ids[left], ids[other]))):
                heapq.heappush(heap, (found[0], left, found[1]))
    return [i for i in ids if i >= 0]


class _Added:
    """Added tokens that are looked for in text before (`normalized` False) or after it is brought to form C; of several the longest."""

    def __init__(self, added: Iterable[Sequence[Any]], eod: int, normalized: bool, normal: Callable[[str], str]) -> None:
        self.ids: dict[str, int | None] = {}
        for i, content, special, wanted in added:
            if bool(wanted) is normalized:
                self.ids[normal(content) if normalized else content] = None if special or i == eod else int(i)
        longest = sorted(self.ids, key=len, reverse=True)
        found = any(i is not None for i in self.ids.values())
        self.pattern = re.compile("|".join(map(re.escape, longest))) if found else None

    def cut(self, sections: Iterable[str | int]) -> Iterator[str | int]:
        """`sections` with each added token in them as its id; special ones stay text, and hide what lies in them."""
        for section in sections:
            if self.pattern is None or isinstance(section, int):
                yield section
                continue
            at = 0
            for match in self.pattern.finditer(section):
                found = self.ids[match.group()]
                if found is not None:
                    if match.start() > at:
                        yield section[at : match.start()]
                    yield found
                    at = match.end()
            if at < len(section):
                yield section[at:]


def _raw(letters: str) -> bytes | None:
    """The bytes that a token's letters stand for; None where one is no letter of a byte."""
    found = [LETTERS.get(letter, -1) for letter in letters]
    return None if -1 in found else bytes(found)


def _tokens_of(vocabulary: Mapping[str, int], added: Iterable[Sequence[Any]], eod: int) -> tuple[bytes, ...]:
    """The bytes of each id; none for the end of text and for ids that the file leaves out."""
    named = {i: token for token, i in vocabulary.items()}
    if len(named) < len(vocabulary):
        raise InputError("two tokens of a tokenizer have one id", came=f"{len(vocabulary)} tokens, {len(named)} ids", expected="an id each")
    plain: dict[int, str] = {}
    for i, content, _, _ in added:
        if plain.get(i, named.get(i, content)) != content or vocabulary.get(content, i) != i or not content:
            raise InputError("an added token of a tokenizer has an id of its own no more", came=f"{content!r}: {i}",
                             expected="an id that no other token has, the vocabulary's where it is there too")
        plain[i] = content
    if eod not in plain:
        raise InputError("no added token of a tokenizer ends a text", came=eod, expected="the id of one")
    size = max((*named, *plain)) + 1
    if min((*named, *plain)) < 0 or size > min(MAX_VOCABULARY, 2 * (len(named) + len(plain))):  # ids decide the memory of all
        raise InputError("a tokenizer has impossible ids", came=f"ids from {min((*named, *plain))} to {size - 1} for "
                         f"{len(named.keys() | plain.keys())} tokens", expected="ids from 0 on, at least half of them in use")
    found = [b""] * size
    for i, token in named.items():
        raw = _raw(token)
        found[i] = token.encode() if raw is None else raw
    for i, token in plain.items():
        found[i] = token.encode()
    found[eod] = b""
    return tuple(found)


def _merges_of(vocabulary: Mapping[str, int], merges: Iterable[Sequence[int]], eod: int) -> dict[Merge, Merge]:
    """Pair of ids -> (rank, id that it becomes)."""
    named = {i: token for token, i in vocabulary.items()}
    found: dict[Merge, Merge] = {}
    for rank, (left, right) in enumerate(merges):
        new = vocabulary.get(named[left] + named[right])
        if new is None or new == eod or (left, right) in found:
            raise InputError(f"merge {rank} of a tokenizer is impossible", came=f"{named[left]!r} with {named[right]!r}",
                             expected="a new pair whose text is a token, and not the end of text")
        found[left, right] = (rank, new)
    return found


def read_hugging_face(path: Path, end: str = "") -> HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`.

    `end`: name of the added token that ends a text; empty: the first of ENDS that the file has. InputError: no such file, no JSON, a part
    that is missing, or one that is not supported, by name. Post-processors and truncation are passed over: nothing is added to a text.
    """
    raw = read_file(path, "the tokenizer file", MOST_TEXT)
    try:
        content = json_of(raw)
        form = _form_of(content, end)
        return HuggingFaceTokenizer(form, {"file": path.name, "sha256": sha256_hex(raw)})
    except InputError as error:
        raise InputError(f"{path}: {error.what}", came=error.came, expected=error.expected, do=error.do) from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is no tokenizer.json of Hugging Face", came=f"{type(error).__name__}: {error}"[:300],
                         expected="JSON with model, pre_tokenizer and added_tokens", do="export it again from its library") from error


def _form_of(content: Any, end: str) -> dict[str, Any]:
    """What `content`, a tokenizer.json, says, each of its parts checked."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise _unsupported("the model", model["type"], "BPE")
    for name, none in (("dropout", (None, 0, 0.0)), ("continuing_subword_prefix", (None, "")), ("end_of_word_suffix", (None, "")),
                       ("byte_fallback", (None, False))):
        if model.get(name) not in none:
            raise _unsupported(f"the model's {name}", model[name], "none")
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
        raise TypeError("model.vocab is no table of ids")
    merges: list[list[int]] = []
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left not in vocabulary or right not in vocabulary:
            raise InputError(f"merge {len(merges)} of a tokenizer is impossible", came=f"{left!r} with {right!r}",
                             expected="two tokens of the vocabulary")
        merges.append([vocabulary[left], vocabulary[right]])
    added = [_added_of(token) for token in content.get("added_tokens") or []]
    ends = [name for name in ([end] if end else ENDS) if any(name == token[1] for token in added)]
    if not ends:
        raise InputError("no token of this tokenizer is known to end a text", came=", ".join(token[1] for token in added)[:200] or "none",
                         expected=f"an added token {end or ', '.join(ENDS)}", do="name it: data.tokenizer_end")
    patterns = _patterns_of(content["pre_tokenizer"])
    classes = {name: ranges for pattern in patterns for name, ranges in translate(pattern)[1].items()}
    return {"kind": HuggingFaceTokenizer.kind, "eod": next(i for i, name, _, _ in added if name == ends[0]),
            "nfc": _is_nfc(content["normalizer"]), "ignore_merges": bool(model.get("ignore_merges", False)), "patterns": patterns,
            "classes": {name: [list(run) for run in classes[name]] for name in sorted(classes)},
            "unicode": unicodedata.unidata_version, "vocab": vocabulary, "merges": merges, "added": added}  # fmt: skip


def _added_of(token: Mapping[str, Any]) -> list[Any]:
    """[id, name, special, normalized] of an entry of added_tokens."""
    i, name, special, normalized = token["id"], token["content"], token["special"], token["normalized"]
    if type(i) is not int or not isinstance(name, str):
        raise TypeError("an entry of added_tokens has no id or no content")
    for rule in ("single_word", "lstrip", "rstrip"):
        if token.get(rule) and not special:
            raise _unsupported(f"{rule} of the added token {name!r}", True, "false, or a special token")
    return [i, name, bool(special), bool(normalized)]


def _is_nfc(normalizer: Any) -> bool:
    """Whether text is brought to form C."""
    parts = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer] if normalizer else []
    for part in parts:
        if part["type"] != "NFC":
            raise _unsupported("the normalizer", part["type"], "NFC or none")
    return bool(parts)


def _patterns_of(pre: Any) -> list[str]:
    """The patterns that cut text into words, one after another."""
    if not pre:
        raise _unsupported("the pre-tokenizer", "none", "ByteLevel, or a Sequence of Split and ByteLevel")
    *splits, last = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    patterns = []
    for split in splits:
        if split["type"] != "Split":
            raise _unsupported("the pre-tokenizer", split["type"], "Split before ByteLevel")
        if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
            raise _unsupported("the pre-tokenizer Split", f"behavior {split['behavior']}, invert {split['invert']}, pattern "
                               f"{', '.join(split['pattern'])}", "Isolated, not inverted, by Regex")
        patterns.append(split["pattern"]["Regex"])
    if last["type"] != "ByteLevel":
        raise _unsupported("the pre-tokenizer", last["type"], "ByteLevel, at the end")
    if last.get("add_prefix_space", True):
        raise _unsupported("ByteLevel's add_prefix_space", True, "false: a blank that no text has could not be decoded")
    if last.get("use_regex", True):
        patterns.append(GPT2_WORDS)
    if not patterns:
        raise _unsupported("the pre-tokenizer", "ByteLevel without words", "use_regex, or a Split before it")
    return patterns


def _unsupported(what: str, came: object, expected: str) -> InputError:
    return InputError(f"{what} of this tokenizer is not supported", came=came, expected=expected,
                      do="take a byte-level BPE tokenizer in the shape of GPT-2, Llama 3 or Qwen")
