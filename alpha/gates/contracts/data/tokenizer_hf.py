"""Cases of `tokenizer.hf`: against words cut by hand, and merges applied one by one, for the shapes of GPT-2, Llama 3 and Qwen."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.data import form_c, tokenizer_file, tokenizer_hf
from alpha.data.tokenizer import FIRST_MERGE, learn_merges
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import patterns
from alpha.gates.contracts.data.support import Cases, any_bytes, folder, same_everywhere, stdlib_texts
from alpha.gates.contracts.data.tokenizer_bpe import damaged_files, full_disk

SHAPES = ("gpt2", "llama3", "qwen")
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_SPECIAL = {"gpt2": "<|endoftext|>", "llama3": "<|end_of_text|>", "qwen": "<|endoftext|>"}
_TOOL, _TOOLS = "<tool>", "<tool>s"
_UNMADE = "ħŧđłŋ"
"""A word and a token that no merge makes, for no drawn text holds it: whole where the file says that merges are ignored, else in parts."""
_SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_PIECES = (
    *("the def Größe return naïve I'm WE'LL it'ſ 'ſx 'LLama 'REx x's don't 1234567 ٣٤٥ Ⅷ² = == -> \"\"\" /** 日本語の文 한국어 שלום "
      "العربية हिन्दी русский Ελληνικά 🙂👍🏽 e\u0301 \u1100\u1161 ﬁ ſ 〱").split(),
    *(" ", " ", " ", "  ", "     ", "\n", "\n\n", "\r\n", " \n  \n", "\t\t", "\u3000", "\xa0", "\x1c", "\x85", "\u2028", "'", "\0"),
    *(_TOOL, _TOOLS, "<too", *_SPECIAL.values()),
)  # fmt: skip


def letters_of_bytes() -> dict[int, str]:
    """Byte -> letter, as GPT-2's encoder.py makes it."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    given, n = {byte: chr(byte) for byte in kept}, 0
    for byte in range(256):
        if byte not in given:
            given[byte] = chr(256 + n)
            n += 1
    return given


def text(rng: np.random.Generator, pieces: int) -> str:
    """Words of many scripts, odd blanks, names of added tokens, runs, and any assigned characters, marks of Unicode 3.2 alone: later ones
    have another form C in Python than in Unicode 9, which `_form_c` looks at."""

    def drawn(c: str) -> bool:
        plain = unicodedata.category(c) != "Cn" and not unicodedata.combining(c) and not unicodedata.decomposition(c)
        return plain or unicodedata.ucd_3_2_0.category(c) != "Cn"

    out = []
    for kind in rng.integers(0, 12, pieces):
        if kind == 0:
            out.append("".join(c for c in map(chr, rng.integers(1, 0x3100, 4).tolist()) if drawn(c)))
        elif kind == 1:
            out.append(_PIECES[int(rng.integers(len(_PIECES)))][:1] * int(rng.integers(1, 90)))
        else:
            out.append(_PIECES[int(rng.integers(len(_PIECES)))])
    return "".join(out)


def reference_words(data: str, shape: str) -> list[str]:
    """The words of a shape, by hand: at each place the first rule that fits takes as much as it may."""

    def letter(c: str) -> bool:
        return unicodedata.category(c)[0] == "L"

    def number(c: str) -> bool:
        return unicodedata.category(c)[0] == "N"

    def sign(c: str) -> bool:
        return not letter(c) and not number(c) and c not in _SPACES

    def run(start: int, member: Any, most: int = 1 << 30) -> int:
        end = start
        while end < len(data) and end - start < most and member(data[end]):
            end += 1
        return end

    old, words, i = shape == "gpt2", [], 0
    while i < len(data):
        end = i
        if data[i] == "'":
            for tail in ("s", "t", "re", "ve", "m", "ll", "d"):
                come = data[i + 1 : i + 1 + len(tail)]
                if come == tail or (not old and come.casefold() == tail):
                    end = i + 1 + len(tail)
                    break
        blank = i + (data[i] == " ")
        if end == i:
            before = blank if old else i + (data[i] not in "\r\n" and not letter(data[i]) and not number(data[i]))
            end = run(before, letter)
            end = i if end == before else end
        if end == i:
            before = blank if old else i
            end = run(before, number, {"gpt2": 1 << 30, "llama3": 3, "qwen": 1}[shape])
            end = i if end == before else end
        if end == i:
            end = run(blank, sign)
            end = i if end == blank else end if old else run(end, lambda c: c in "\r\n")
        if end == i:  # blanks: up to the last line end of the run, else all but the last before a word
            end = run(i, lambda c: c in _SPACES)
            lines = [k for k in range(i, end) if data[k] in "\r\n"]
            if lines and not old:
                end = lines[-1] + 1
            elif end < len(data) and end - i > 1:
                end -= 1
        words.append(data[i:end])
        i = end
    return words


class Reference:
    """A tokenizer.json and its ids by definition. Ids are drawn in no order, so none is a byte or a rank by chance."""

    def __init__(self, rng: np.random.Generator, shape: str, merges: int = 150) -> None:
        self.shape, letters = shape, letters_of_bytes()
        words = Counter(w.encode() for _ in range(4) for w in reference_words(text(rng, 200), shape))
        known: list[bytes] = [*(bytes([b]) for b in range(256)), b""]
        self.merges: list[tuple[bytes, bytes]] = []
        for left, right in learn_merges(words, merges):
            self.merges.append((known[left], known[right]))
            known.append(known[left] + known[right])
        tokens = list(dict.fromkeys([*known[:256], *known[FIRST_MERGE:]]))
        if shape == "llama3":
            tokens.append(b"return naive")  # no merge makes it, and no word is it
            tokens.append("русский".encode())  # no merge need make it: it is taken whole
        tokens.append(_UNMADE.encode())
        ids = rng.permutation(len(tokens)).tolist()
        self.ids = dict(zip(tokens, ids))
        self.eod, self.tool = len(ids) + 1, len(ids)
        self.tools = len(ids) + 2
        spelled = {"".join(letters[b] for b in token): i for token, i in self.ids.items()}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": shape == "gpt2"}
        pattern = _LLAMA3 if shape == "llama3" else _LLAMA3.replace("{1,3}", "")
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        rows = [(self.eod, _SPECIAL[shape], True), (self.tool, _TOOL, False), (self.tools, _TOOLS, False)]
        self.content: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": c, "special": s, **common} for i, c, s in rows],
            "normalizer": {"type": "NFC"} if shape == "qwen" else None,
            "pre_tokenizer": byte_level if shape == "gpt2" else {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": None, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": shape == "llama3", "vocab": spelled,
                      "merges": [["".join(letters[b] for b in side) for side in merge] for merge in self.merges]},
        }  # fmt: skip
        if rng.random() < 0.5:  # as older releases wrote them
            self.content["model"]["merges"] = [" ".join(merge) for merge in self.content["model"]["merges"]]

    def opened(self) -> tokenizer_hf.HuggingFaceTokenizer:
        with folder() as root:
            return read(root, self.content)

    def encode(self, data: str) -> list[int]:
        """Ids by definition: added tokens, form C, words, in each word the first place of the earliest merge, again and again."""
        for name, i in ((_TOOLS, self.tools), (_TOOL, self.tool)):
            if name in data:
                left, right = data.split(name, 1)
                return [*self.encode(left), i, *self.encode(right)]
        rank = {pair: k for k, pair in enumerate(self.merges)}
        out: list[int] = []
        for word in reference_words(unicodedata.normalize("NFC", data) if self.shape == "qwen" else data, self.shape):
            parts = [bytes([b]) for b in word.encode("utf-8", "surrogateescape")]
            if self.shape == "llama3" and b"".join(parts) in self.ids:
                parts = [b"".join(parts)]
            while fits := [(rank[pair], k) for k, pair in enumerate(pairwise(parts)) if pair in rank]:
                k = min(fits)[1]
                parts[k : k + 2] = [parts[k] + parts[k + 1]]
            out += [self.ids[part] for part in parts]
        return out


def read(root: Path, content: object, end: str = "") -> tokenizer_hf.HuggingFaceTokenizer:
    """What the reader makes of `content` as a file."""
    (root / "hf.json").write_text(json.dumps(content), encoding="utf-8")
    return tokenizer_hf.read_hugging_face(root / "hf.json", end)


def _ids_as_reference(rng: np.random.Generator) -> Measured:
    count = Checks()
    for shape in SHAPES:
        made = Reference(rng, shape)
        own = made.opened()
        samples = [text(rng, int(n)) for n in rng.integers(1, 40, 30)]
        samples += ["", "a", " ", "\n", " \n a", "русский", "x русский", _UNMADE, f"x {_UNMADE}", "return naive", "'LL'll'ſ'K",
                    _TOOLS + _TOOL, "a" * 300, " " * 300]
        samples += list(_PIECES)
        for data in (*samples, *samples):  # the second time from the cache
            count.that(own.encode(data.encode()).tolist() == made.encode(data), f"{shape}: ids of {data[:60]!r}")
        count.that(own.eod == made.eod and own.vocab_size == made.tools + 1, f"{shape}: end of text or number of ids")
    return count.measured()


def _words_as_reference(rng: np.random.Generator) -> Measured:
    """The words themselves: few merges tell where a word ends."""
    count = Checks()
    for shape in SHAPES:
        own = Reference(rng, shape, 20).opened()
        for data in (*_PIECES, *(text(rng, int(n)) for n in rng.integers(2, 60, 40)), "".join(_PIECES)):
            came, expected = list(own._words(data)), reference_words(data, shape)
            count.that(came == expected, f"{shape}: words {came} instead of {expected}")
    return count.measured()


def _long_words(rng: np.random.Generator) -> Measured:
    """Words of hundreds of characters, where merges overlap, meet and run out."""
    count = Checks()
    for shape in SHAPES:
        made = Reference(rng, shape, 300)
        own = made.opened()
        alphabets = ["ab", "aeinrt", "日本語の文", "русский", "=-", "🙂👍", "etaoinshrdlu"]
        for alphabet in alphabets:
            for size in (64, 65, 66, *rng.integers(67, 500, 2).tolist()):
                data = "".join(alphabet[i] for i in rng.integers(0, len(alphabet), size))
                count.that(own.encode(data.encode()).tolist() == made.encode(data), f"{shape}: ids of {data[:60]!r}")
    return count.measured()


def _any_bytes(rng: np.random.Generator) -> Measured:
    """Bytes that are no UTF-8 keep their tokens, also where a merge makes such; decoding gives back the text."""
    count = Checks()
    for shape in SHAPES:
        made = Reference(rng, shape)
        own = made.opened()
        samples = [any_bytes(rng, int(n)) for n in rng.integers(0, 600, 10)] + [b"\xff\xfe\x80" * 50, bytes(range(256)), b"\xe6\x97a\xa5"]
        samples += [text(rng, 60).encode() + b"\xe6\x97", *stdlib_texts(rng, 2, 3000), *(left + right for left, right in made.merges)]
        for data in samples:
            ids, want = own.encode(data), made.encode(data.decode("utf-8", "surrogateescape"))
            count.that(ids.tolist() == want, f"{shape}: ids of {data[:40]!r}")
            count.that(shape == "qwen" or own.decode(ids) == data, f"{shape}: round trip of {data[:40]!r}")
            count.that(int(own.byte_lengths[ids].sum()) == len(own.decode(ids)), "byte lengths do not add up")
            count.that(not np.any(ids == own.eod) and ids.dtype == np.uint16, "ids out of range")
        count.that(own.decode([made.eod]) == b"" and own.decode([made.tool]) == _TOOL.encode(), f"{shape}: bytes of added tokens")
        spelled = (_SPECIAL[shape] * 2).encode()
        count.that(own.decode(own.encode(spelled)) == spelled, f"{shape}: the name of the end of text is text")
    return count.measured()


def _form_c(rng: np.random.Generator) -> Measured:
    """Form C of what Unicode 9 has is Python's; marks and letters that came later stay where they are."""
    count = Checks()
    for _ in range(200):
        data = unicodedata.normalize("NFD", "".join(chr(int(c)) for c in rng.integers(0xC0, 0x250, 6)) + "각힣")
        count.that(form_c.form_c(data) == unicodedata.normalize("NFC", data), f"form C of {data!r}")
    for mark in "\u05c8\u0897\u08d3\u0d3b\u1abf\u1ac5\u1df6\U0001e131\U0001e4ec":
        count.that(form_c.form_c(f"e\u0301{mark}\u0327e\u0301") == f"\xe9{mark}\u0327\xe9", f"a mark of later than Unicode 9: {mark!r}")
    return count.measured()


def _save_and_load(rng: np.random.Generator) -> Measured:
    count = Checks()
    for shape in SHAPES:
        made = Reference(rng, shape).opened()
        with folder() as root:
            made.save(root / "t.json")
            back = tokenizer_file.open_tokenizer(root / "t.json")
            back.save(root / "again.json")
            count.that((root / "t.json").read_bytes() == (root / "again.json").read_bytes(), "saved again, the file differs")
            count.that(back.kind == "hf", "kind")
        data = text(rng, 200).encode()
        count.that(back.hash == made.hash and back.eod == made.eod and list(back.tokens) == list(made.tokens), "hash, end or tokens")
        count.that(np.array_equal(back.encode(data), made.encode(data)), "ids")
    return count.measured()


def read_digest(data: bytes) -> str:
    """Hash of a tokenizer read from `data` and of ids that it gives (also called in a fresh process)."""
    with folder() as root:
        own = read(root, json.loads(data))
    return f"{own.hash} {hashlib.sha256(own.encode(data[:5000]).tobytes()).hexdigest()}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(read_digest, json.dumps(Reference(rng, "qwen").content).encode(), rng)


def _calls_do_not_matter(rng: np.random.Generator) -> Measured:
    """The same ids whatever was encoded before, and from a tokenizer that has encoded nothing."""
    count = Checks()
    own = Reference(rng, "llama3").opened()
    texts = [text(rng, 30).encode(), b"prefixes", *(b"prefixes" + b"z" * int(rng.integers(1, 90)) for _ in range(30))]
    fresh = [tokenizer_hf.HuggingFaceTokenizer(own.form()).encode(t).tobytes() for t in texts]
    count.add(b"".join(fresh))
    for _ in range(3):
        for i in rng.permutation(len(texts)):
            count.that(own.encode(texts[i]).tobytes() == fresh[i], f"ids of {texts[i][:40]!r} depend on the calls before")
    return count.measured()


def _hash_tells_apart(rng: np.random.Generator) -> Measured:
    """Other merges, words, ends, added tokens: another hash."""
    count = Checks()
    made = Reference(rng, "llama3")
    changed = [made.content]
    for change in (
        lambda c: c["model"]["merges"].pop(), lambda c: c["model"].update(ignore_merges=False),
        lambda c: c.update(normalizer={"type": "NFC"}),
        lambda c: c["added_tokens"].pop(), lambda c: c["added_tokens"][1].update(special=True),
        lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\s+|\S+"),
    ):  # fmt: skip
        content = json.loads(json.dumps(made.content))
        change(content)
        changed.append(content)
    with folder() as root:
        hashes = [read(root, content).hash for content in changed]
        count.that(len(set(hashes)) == len(hashes), "two tokenizers share a hash")
        count.that(read(root, {**made.content, "truncation": None}).hash == hashes[0], "what decides nothing is in the hash")
    return count.measured()


def _damaged(rng: np.random.Generator) -> Measured:
    return damaged_files(rng, Reference(rng, "qwen", 20).opened())


def _full_disk(rng: np.random.Generator) -> Measured:
    return full_disk(rng, Reference(rng, "gpt2", 20).opened())


def _refused(rng: np.random.Generator) -> Measured:
    """What is not supported, is missing, or cannot be: refused as an InputError that names it."""
    count = Checks()
    made = Reference(rng, "llama3", 20)
    byte_level = made.content["pre_tokenizer"]["pretokenizers"][1]

    def words(pattern: str) -> dict[str, Any]:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}}

    model, vocab = made.content["model"], made.content["model"]["vocab"]
    first, second = list(vocab)[:2]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("WordPiece", {"model": {**model, "type": "WordPiece"}}), ("Unigram", {"model": {**model, "type": "Unigram"}}),
        ("dropout", {"model": {**model, "dropout": 0.1}}), ("byte_fallback", {"model": {**model, "byte_fallback": True}}),
        ("continuing_subword_prefix", {"model": {**model, "continuing_subword_prefix": "##"}}),
        ("end_of_word_suffix", {"model": {**model, "end_of_word_suffix": "</w>"}}),
        ("merge", {"model": {**model, "merges": [*model["merges"], [first, "nowhere"]]}}),
        ("merge", {"model": {**model, "merges": [*model["merges"], model["merges"][0]]}}),
        ("merge", {"model": {**model, "merges": [[first * 40, first]], "vocab": {**vocab, first * 40: len(vocab) + 3}}}),
        ("no token for a byte", {"model": {**model, "merges": [], "vocab": {k: v for k, v in vocab.items() if k != first}}}),
        ("one id", {"model": {**model, "vocab": {**vocab, second: vocab[first]}}}),
        ("ids", {"model": {**model, "vocab": {**vocab, "far": 1 << 20}}}), ("ids", {"model": {**model, "vocab": {**vocab, "low": -1}}}),
        ("model.vocab", {"model": {**model, "vocab": {**vocab, "half": 0.5}}}), ("model.vocab", {"model": {**model, "vocab": [first]}}),
        ("Lowercase", {"normalizer": {"type": "Lowercase"}}),
        ("NFKC", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}}),
        ("Whitespace", {"pre_tokenizer": {"type": "Whitespace"}}), ("none", {"pre_tokenizer": None}),
        ("Metaspace", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}, byte_level]}}),
        ("add_prefix_space", {"pre_tokenizer": {**byte_level, "add_prefix_space": True}}),
        ("without words", {"pre_tokenizer": byte_level}),
        ("end a text", {"added_tokens": made.content["added_tokens"][1:]}),
        ("lstrip", {"added_tokens": [made.content["added_tokens"][0], {**made.content["added_tokens"][1], "lstrip": True}]}),
        ("added token", {"added_tokens": [*made.content["added_tokens"], {**made.content["added_tokens"][1], "content": "<other>"}]}),
        *((bad, words(pattern)) for bad, pattern in (
            ("possessive", r"\p{L}++"), ("possessive", r"\s+?"), ("no characters", r"\p{L}*"), ("repeated group", r"(?:a|b)+"),
            ("category", r"\p{Han}+"), ("category", r"\p{Greek}"), ("escape", r"\w+"), ("escape", r"a\b"), ("kind of group", r"(?<=a)b"),
            ("class in a class", r"[a[bc]]"), ("range", r"[z-a]"), ("open group", r"(?:a"), ("'.'", r"."), ("ASCII", r"(?i:\p{L})"),
            ("folds", r"(?i:ss)"), ("nothing opened", r"a)"), ("an end too early", "[a"), ("ends swapped", r"a{3,1}"),
            ("repeated lookahead", r"a(?!b)+"))),
    ]  # fmt: skip
    with folder() as root:
        count.that(read(root, made.content).kind == "hf", "the sound file is refused")
        for name, change in wrong:
            try:
                read(root, {**made.content, **change})
            except InputError as error:
                count.that(name in str(error), f"{name}: another refusal: {error}")
            except Exception as error:  # any other class is a wrong answer of the component
                count.that(False, f"{name}: {type(error).__name__} instead of InputError")
            else:
                count.that(False, f"{name}: accepted")
        for missing in ("model", "pre_tokenizer", "normalizer"):
            content = {k: v for k, v in made.content.items() if k != missing}
            count.refuses(InputError, lambda content=content: read(root, content), f"without {missing}")
        others: list[Any] = [[], "text", 3, None, {"model": 3}]
        for other in others:
            count.refuses(InputError, lambda other=other: read(root, other), f"{other!r}")
        count.refuses(InputError, lambda: read(root, made.content, "<none>"), "an end that the file has not")
        count.that(read(root, made.content, _TOOL).eod == made.tool, "an end by name")
        (root / "torn.json").write_bytes(json.dumps(made.content).encode()[:-5])
        count.refuses(InputError, lambda: tokenizer_hf.read_hugging_face(root / "torn.json"), "a torn file")
        count.refuses(InputError, lambda: tokenizer_hf.read_hugging_face(root / "nowhere.json"), "no file")
    return count.measured()


CASES: Cases = {
    "parity": [
        ("ids as the reference encodes them", _ids_as_reference),
        ("words as the reference cuts them", _words_as_reference),
        ("ids of long words", _long_words),
        ("any bytes keep their tokens", _any_bytes),
        ("form C", _form_c),
        ("save and load", _save_and_load),
        ("each construct of a pattern", patterns.constructs),
        ("unusual files", patterns.odd_files),
        ("merges in any order", patterns.any_ranks),
    ],
    "determinism": [
        ("hash and ids are the same in a fresh process", _same_everywhere),
        ("earlier calls do not matter", _calls_do_not_matter),
        ("what was forgotten does not matter", patterns.few_joins),
        ("the hash tells tokenizers apart", _hash_tells_apart),
    ],
    "faults": [
        ("damaged files are refused", _damaged),
        ("a full disk loses nothing", _full_disk),
        ("what is not supported is refused by name", _refused),
        ("patterns that say too much are refused by name", patterns.refused_patterns),
        ("files that say what none may are refused by name", patterns.refused_files),
    ],
}
