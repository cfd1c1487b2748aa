"""Cases of tokenizers at their edges: each construct of a word pattern with the words that it finds, what no tokenizer's file may say by
the words of the refusal, caches that are full, and files of other shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import regular, tokenizer, tokenizer_file, tokenizer_hf
from alpha.data.hashed import file_bytes
from alpha.errors import CorruptError, InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import folder, text_like

TEXT = "ab-z AB~9 ]^é ٣ x\n\tK.ſ!\\[-]aab5\u212a"
"""Letters, digits of two scripts, blanks, signs that patterns use, and the two characters that fold to ASCII letters."""


def _is(*ranges: tuple[str, str]) -> Callable[[str], bool]:
    return lambda c: any(low <= c <= high for low, high in ranges)


def constructs(rng: np.random.Generator) -> Measured:
    """Each construct finds what it says: classes with dashes, escapes and ranges, categories and what is not of them, groups in groups
    where case is ignored. What is left between words is a word too."""
    count = Checks()
    digit, small = str.isdecimal, _is(("a", "z"))
    alone: list[tuple[str, Callable[[str], bool]]] = [
        ("[a-z]", small), ("[^a-z]", lambda c: not small(c)), ("[a-]", lambda c: c in "a-"), ("[-a]", lambda c: c in "a-"),
        (r"[ -\~]", _is((" ", "~"))), (r"[\--\]]", _is(("-", "]"))), (r"\d", digit), (r"\D", lambda c: not digit(c)),
        (r"[\d-]", lambda c: digit(c) or c == "-"), (r"\n", lambda c: c == "\n"), (r"\.", lambda c: c == "."),
        (r"[\n\t!]", lambda c: c in "\n\t!"),
        (r"\p{Nd}", digit), (r"\P{Nd}", lambda c: not digit(c)), (r"\p{^Nd}", lambda c: not digit(c)), (r"\P{^Nd}", digit),
        (r"(a)", lambda c: c == "a"), (r"(?:a|(9))", lambda c: c in "a9"), (r"(?i:a|(?:k|x))", lambda c: c in "aAkKxX\u212a"),
        (r"(?i:(s))", lambda c: c in "sS\u017f"), (r"(?i:\-)", lambda c: c == "-"), (r"\\", lambda c: c == "\\"),
    ]
    for pattern, member in alone:
        found = regular.translate(pattern)[0].findall(TEXT)
        want, rest = list[str](), ""
        for c in TEXT:
            if member(c):
                want += [rest, c] if rest else [c]
                rest = ""
            else:
                rest += c
        count.that(found == [*want, *([rest] if rest else [])], f"{pattern}: {found}")
    for pattern in (r"a{2}b?", r"a(?=b)", r"a(?!b)", r"(?:ab)?-", r"[a-b]{1,2}", r"(?:a|ab)", r"b*-", r"[!-~]{2,3}"):  # plain Python
        want, at = list[str](), 0
        for match in re.finditer(pattern, TEXT):
            want += [*[TEXT[at : match.start()]] * (match.start() > at), match.group()]
            at = match.end()
        found = regular.translate(pattern)[0].findall(TEXT)
        count.that(found == [*want, *[TEXT[at:]] * (at < len(TEXT))], f"{pattern}: {found}")
    made, used = regular.translate(r"\p{L}+", {"L": ((97, 98),)})
    count.that(used == {"L": ((97, 98),)} and made.findall("abcab") == ["ab", "c", "ab"], "categories that are handed in")
    return count.measured()


def refused_patterns(rng: np.random.Generator) -> Measured:
    """What a pattern may not say is refused by what and where: ends of ranges that are several characters, letters that case does not
    ignore alone, classes of nothing, categories that were not saved, patterns that are too long or that Python refuses."""
    count, ends, two = Checks(), "a range without two ends", {"Nd": ((48, 57),), "L": ((97, 98), (100, 101))}
    for pattern, what, classes in (
        (r"[\p{Nd}-z]", ends, two), (r"[ -\p{Nd}]", ends, two), (r"[\p{L}-z]", ends, two), (r"[ -\p{L}]", ends, two),
        (r"[z-a]", ends, two), ("[]", "an empty class", two), (r"(?i:[ab])", "more than ASCII letters", two),
        (r"(?i:[ac])", "more than ASCII letters", two), ("(?i:é)", "more than ASCII letters", two),
        (r"\p{Lu}", "the category Lu, which was not saved", two), (r"\q", r"the escape \q", two),
        ("a" * 4097, "4097 characters (at most 4096)", two), ("a|", "a word of no characters", two),
    ):  # fmt: skip
        count.says(InputError, partial(regular.translate, pattern, classes), f"{pattern[:20]}", what,
                   " at character ")
    count.that(regular.translate("a" * 4096)[0].findall("a" * 4097) == ["a" * 4096, "a"], "the longest pattern")
    compiles = re.compile

    def unwilling(text: str) -> re.Pattern[str]:
        if text.startswith("(?:"):
            raise OverflowError("too much")
        return compiles(text)

    with mock.patch.object(regular.re, "compile", side_effect=unwilling):
        count.says(InputError, lambda: regular.translate("ab"), "what Python refuses", "Python's re refuses (too much)", "at character 2")
    return count.measured()


def _content(**more: Any) -> dict[str, Any]:
    """A tokenizer.json without merges; the id of a byte is its place among the letters. `more` goes into the model."""
    letters = sorted(tokenizer_hf.LETTERS, key=tokenizer_hf.LETTERS.__getitem__)
    end = {"id": 256, "content": "<eos>", "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    return {"added_tokens": [end], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": [], **more}}  # fmt: skip


def _added(i: int, content: str, *, special: bool = False, normalized: bool = False) -> dict[str, Any]:
    return {"id": i, "content": content, "special": special, "normalized": normalized}


def _opened(root: Path, content: dict[str, Any], end: str = "") -> tokenizer_hf.HuggingFaceTokenizer:
    (root / "t.json").write_text(json.dumps(content), encoding="utf-8")
    return tokenizer_hf.read_hugging_face(root / "t.json", end)


def odd_files(rng: np.random.Generator) -> Measured:
    """Files of Hugging Face that are sound and unusual: added tokens found before and after form C beside each other, an end that is not
    special, a token that spells no bytes, words that one pattern after another cuts, and whole words that a file keeps apart."""
    count = Checks()
    with folder() as root:
        content = _content(ignore_merges=True)
        vocab = content["model"]["vocab"]
        vocab |= {"日": 257, "<eos>": 256, "ab": 258}  # one spells no bytes, one is the end's own
        content["added_tokens"] += [_added(259, "<t>"), _added(260, "ệ", normalized=True), _added(261, "<s>", special=True)]
        content["added_tokens"][0]["special"] = False
        content["normalizer"] = {"type": "NFC"}
        split = {"type": "Split", "pattern": {"Regex": r"\d+"}, "behavior": "Isolated", "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
        made = _opened(root, content)
        for text, ids in (("ab", [258]), ("ab1ab", [258, 49, 258]), ("a<t>b", [97, 259, 98]), ("e\u0323\u0302<t>ệ", [260, 259, 260]),
                          ("<eos>", [*b"<eos>"]), ("<s>ệ", [*b"<s>", 260]), ("日", [*"日".encode()]), ("12ab x", [49, 50, 258, 32, 120])):
            found = made.encode(text.encode()).tolist()
            count.that(found == ids, f"{text!r}: {found}")
        count.that(made.eod == 256 and made.decode([257, 260, 256, 259]) == "日ệ<t>".encode(), "bytes of unusual tokens")
        saved = root / "saved.json"
        made.save(saved)
        text = "abc 12 ệ日 ab " * 9
        count.that(tokenizer_file.open_tokenizer(saved).encode(text.encode()).tolist() == made.encode(text.encode()).tolist(), "saved")
        count.that(tokenizer_file.open_tokenizer(root / "t.json").hash == made.hash, "opened by what it holds")
        ends = {"日本".encode(): "本".encode(), b"\x97\xa5": b"\x97\xa5", b"\x80" * 3: b"\x80" * 3, b"\x80" * 4: b"",
                b"a" + b"\x80" * 5: b"", b"\xe6\x97": b"", b"a\xe6\x97": b""}  # the last two end inside a character
        for token, last in ends.items():
            count.that(tokenizer_hf._last(token) == last, f"the last character of {token!r}: {tokenizer_hf._last(token)!r}")
    return count.measured()


def any_ranks(rng: np.random.Generator) -> Measured:
    """Long words whose merges stand in any order, a token before those that it is made of: what is found first is merged first, and what
    became of a place is no longer merged there."""
    count = Checks()
    with folder() as root:
        for trial in range(12):
            tokens, pairs = ["a", "b", "c"], list[tuple[str, str]]()
            while len(pairs) < 9:
                left, right = (tokens[int(i)] for i in rng.integers(0, len(tokens), 2))
                if (left, right) not in pairs and left + right not in tokens:
                    tokens.append(left + right)
                    pairs.append((left, right))
            pairs = [pairs[i] for i in rng.permutation(len(pairs))] if trial else [("b", "c"), ("a", "bc"), ("a", "b"), ("c", "a")]
            content = _content(merges=[list(pair) for pair in pairs])
            content["model"]["vocab"] |= {token: 257 + i for i, token in enumerate(sorted({a + b for a, b in pairs}))}
            made = _opened(root, content)
            for size in (65, 66, *(int(x) for x in rng.integers(67, 200, 2))):
                word = "".join(rng.choice(("a", "b", "c"), size)) if trial else "abc" * size
                parts = list(word)
                while fits := [(pairs.index(pair), i) for i, pair in enumerate(pairwise(parts)) if pair in pairs]:
                    i = min(fits)[1]
                    parts[i : i + 2] = [parts[i] + parts[i + 1]]
                want = [content["model"]["vocab"][part] for part in parts]
                count.that(made.encode(word.encode()).tolist() == want, f"{pairs}: {word}")
    return count.measured()


def refused_files(rng: np.random.Generator) -> Measured:
    """What a tokenizer's file may not say, by the words of the refusal; a saved file that is signed, and says another thing."""
    count = Checks()
    letters = _content()["model"]["vocab"]
    wrong: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"added_tokens": []}, ("no token of this tokenizer is known", "none", "<eos>")),
        ({"added_tokens": None}, ("no token of this tokenizer is known", "none")),
        ({"model": {"type": "BPE", "vocab": letters, "merges": [["nowhere", "a"]]}}, ("merge 0", "'nowhere' with 'a'")),
        ({"model": {"type": "BPE", "vocab": {**letters, "<eos>": 256, "<e": 257, "os>": 258}, "merges": [["<e", "os>"]]}},
         ("merge 0", "'<e' with 'os>'", "not the end of text")),
        ({"model": {"type": "BPE", "vocab": letters, "merges": [["a", "b"]]}}, ("merge 0", "'a' with 'b'")),
        *(({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False, **split}, _content()["pre_tokenizer"]]}},
           ("Split", said)) for split, said in (({"behavior": "Removed"}, "Removed"), ({"invert": True}, "invert True"),
                                                ({"pattern": {"String": "a"}}, "pattern String"))),
    )  # fmt: skip
    with folder() as root:
        _opened(root, _content())
        for change, words in wrong:
            count.says(InputError, lambda change=change: _opened(root, {**_content(), **change}), str(words), *words)  # type: ignore[misc]
        form = _opened(root, _content()).form()
        count.says(InputError, lambda: tokenizer_hf.HuggingFaceTokenizer({**form, "eod": 3}), "an end that is no added token",
                   "no added token of a tokenizer ends a text", "3")
        bpe = tokenizer.BPETokenizer([(97, 98)])
        for change, kind, words in (
            ({"form": {**bpe.form(), "kind": "other"}}, CorruptError, ("unknown kind of tokenizer", "other")),
            ({"form": {k: v for k, v in bpe.form().items() if k != "merges"}}, CorruptError, ("a field is missing", "merges")),
            ({"form": {**bpe.form(), "words": "x"}}, InputError, ("other word rules", "pattern code-v1")),
            ({"form": {**bpe.form(), "merges": [[97, 98, 99]]}}, CorruptError, ("the wrong type",)),
        ):
            path = root / "saved.json"
            path.write_bytes(file_bytes(tokenizer.FORMAT, tokenizer.VERSION, {"form": bpe.form(), "record": {}, **change}))
            count.says(kind, lambda path=path: tokenizer_file.open_tokenizer(path), str(words), str(path), *words)  # type: ignore[misc]
        bpe.save(path)
        count.says(InputError, lambda: tokenizer_file.open_tokenizer(path, "<eos>"), "an end beside a saved one", "says itself", "'<eos>'")
        count.that(tokenizer_file.open_tokenizer(path).hash == bpe.hash, "the sound one is refused")
        for raw, words in ((b"{", ("is no JSON",)), (b"[]", ("is no tokenizer.json",)), (b'{"format": "x"}', ("is no tokenizer.json",))):
            path.write_bytes(raw)
            count.says(InputError, lambda: tokenizer_file.open_tokenizer(path), repr(raw), str(path), *words)
    return count.measured()


def few_words(rng: np.random.Generator) -> Measured:
    """Ids hang on no cache: of a few words, emptied again and again, they are the same."""
    count = Checks()
    text = text_like(rng, 4000)
    bpe = tokenizer.BPETokenizer([(115, 101), (32, 32), (257, 108), (97, 98)])
    want = bpe.encode(text).tolist()
    with mock.patch.object(tokenizer, "_CACHED_WORDS", 3):
        few = tokenizer.BPETokenizer(bpe.merges)
        count.that(few.encode(text).tolist() == want and len(few._cache) <= 3, f"{len(few._cache)} words are kept")
    return count.measured()


def few_joins(rng: np.random.Generator) -> Measured:
    """The same of Hugging Face's: neither words nor joins that were forgotten change an id."""
    count = Checks()
    content = _content()
    content["model"]["vocab"] |= {"ab": 257, "abc": 258, "se": 259}
    content["model"]["merges"] = [["s", "e"], ["a", "b"], ["ab", "c"]]
    plain = " ".join(rng.choice(("abc", "self", "ab", "é", "日本", "sese", "abab"), 400).tolist()).encode()
    with folder() as root:
        made = _opened(root, content)
        want = made.encode(plain).tolist()
        with mock.patch.object(tokenizer_hf, "_CACHED", 3):
            few_hf = _opened(root, content)
            count.that(few_hf.encode(plain).tolist() == want, "ids of a full cache")
            kept = len(few_hf._cache), len(few_hf._joins)
            count.that(max(kept) <= 3, f"{kept} are kept")
    return count.measured()


def impossible_merges(rng: np.random.Generator) -> Measured:
    """Merges of ids that are not there yet, of the end of a document, again, too long or too many; and patterns that nobody knows."""
    count = Checks()
    for left, right in ((-1, 97), (97, -1), (300, 97), (97, 300), (257, 97), (97, 257), (256, 97), (97, 256)):
        count.says(InputError, partial(tokenizer.BPETokenizer, [(left, right)]), f"{left}, {right}", "merge 0",
                   f"({left}, {right})", "ids below 257, none of them 256")
    count.says(InputError, lambda: tokenizer.BPETokenizer([(97, 98), (97, 98)]), "again", "merge 1", "(97, 98)", "below 258")
    doubled = [(97, 97), *((257 + i, 257 + i) for i in range(9))]
    longest = tokenizer.MAX_WORD.bit_length() - 1
    count.that(len(tokenizer.BPETokenizer(doubled[:longest]).tokens[-1]) == tokenizer.MAX_WORD, "the longest merge is refused")
    count.says(InputError, lambda: tokenizer.BPETokenizer(doubled), "too long", f"merge {longest}", f"{2 * tokenizer.MAX_WORD} bytes",
               f"at most {tokenizer.MAX_WORD}")
    with mock.patch.object(tokenizer, "MAX_VOCABULARY", 259):
        count.that(tokenizer.BPETokenizer([(97, 98), (98, 97)]).vocab_size == 259, "as many as there may be")
        count.says(InputError, lambda: tokenizer.BPETokenizer([(97, 98), (98, 97), (97, 97)]), "one more", "too many merges", "3",
                   "at most 2")
    count.says(InputError, lambda: tokenizer.BPETokenizer([], pattern="words"), "a pattern", "word pattern", "words", "code-v1")
    count.says(InputError, lambda: tokenizer.BPETokenizer.train([b"ab"], 258, pattern="words"), "to train by", "word pattern", "code-v1")
    return count.measured()
