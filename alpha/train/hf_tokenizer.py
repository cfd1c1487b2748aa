"""A tokenizer as tokenizer.json, which Hugging Face's `tokenizers` reads to the same ids. Floor 6.

Byte-level BPE there works on text whose characters stand for bytes (GPT-2's `bytes_to_unicode`: printable ones for themselves, the others
from U+0100 on). For a tokenizer of ours the text is turned into these characters first, and cut into words then, by our byte pattern
with its bytes as characters. That cuts any text where ours cuts it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from alpha.data.files import read_file
from alpha.data.tokenizer import PATTERNS, BPETokenizer, ByteTokenizer, Tokenizer
from alpha.data.tokenizer_hf import read_hugging_face
from alpha.errors import InputError
from alpha.files import MOST_TEXT, json_of

NAME, SETTINGS = "tokenizer.json", "tokenizer_config.json"

EOD = "<|endoftext|>"
"""What the end of a document is called there, as in GPT-2's vocabulary."""

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


def alphabet() -> tuple[str, ...]:
    """[256]: the character that stands for each byte (Radford et al. 2019, `bytes_to_unicode` of their code)."""
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in _PRINTABLE else next(others)) for byte in range(256))


_CHARACTER = alphabet()


def _as_text(token: bytes) -> str:
    return "".join(_CHARACTER[byte] for byte in token)


def word_pattern(name: str) -> str:
    """Our word pattern of this name, with the characters that stand for bytes."""
    text = PATTERNS[name].decode("ascii").replace(r"\x80-\xff", _as_text(bytes(range(0x80, 0x100))))
    for escape, byte in ((r"\t", 9), (r"\n", 10), (r"\v", 11), (r"\f", 12), (r"\r", 13), (" ", 32)):
        text = text.replace(escape, _CHARACTER[byte])
    return text


def files(tokenizer: Tokenizer) -> tuple[dict[str, bytes], str]:
    """(name of a file -> its content, why there is none). A vocabulary there names its tokens by their bytes: a tokenizer of which two
    stand for the same bytes has no such file."""
    if isinstance(tokenizer, (ByteTokenizer, BPETokenizer)):
        tokens = [EOD if i == tokenizer.eod else _as_text(token) for i, token in enumerate(tokenizer.tokens)]
        twice = _first_twice(tokens)
        if twice:
            return {}, f"ids {twice[0]} and {twice[1]} stand for the same bytes, {tokenizer.tokens[twice[0]]!r}"
        merges = tokenizer.merges if isinstance(tokenizer, BPETokenizer) else ()
        content = _content({t: i for i, t in enumerate(tokens)}, [[tokens[left], tokens[right]] for left, right in merges],
                           [(tokenizer.eod, EOD, True, False)], _own_words(tokenizer))
    elif tokenizer.kind == "hf":  # it was read from such a file, and its form holds all that decides about ids
        form = tokenizer.form()
        names = {i: letters for letters, i in form["vocab"].items()}
        content = _content(form["vocab"], [[names[left], names[right]] for left, right in form["merges"]], form["added"],
                           [*(_split(pattern) for pattern in form["patterns"]), _LETTERS])
        content["normalizer"] = {"type": "NFC"} if form["nfc"] else None
        content["model"]["ignore_merges"] = form["ignore_merges"]
    else:
        return {}, f"a tokenizer of kind {tokenizer.kind} has none"
    end = next(token["content"] for token in content["added_tokens"] if token["id"] == tokenizer.eod)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "clean_up_tokenization_spaces": False}
    return {NAME: _json(content), SETTINGS: _json(settings)}, ""


def read(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json: of one that `files` wrote of ours the same again, to the hash; else as `read_hugging_face`, whose
    errors it has."""
    return _ours(read_file(path, "the tokenizer file", MOST_TEXT)) or read_hugging_face(path)


def _ours(raw: bytes) -> Tokenizer | None:
    """The tokenizer that `files` wrote as `raw`; None for any other file."""
    try:
        model = json_of(raw)["model"]
        ids, merges = model["vocab"], model["merges"]
        bpe = BPETokenizer([(ids[left], ids[right]) for left, right in merges])
        candidates: tuple[Tokenizer, ...] = (bpe,) if merges else (ByteTokenizer(), bpe)
        return next((found for found in candidates if files(found)[0][NAME] == raw), None)
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None


_LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _own_words(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [_LETTERS, _split(word_pattern(tokenizer.pattern))] if isinstance(tokenizer, BPETokenizer) else [_LETTERS]


def _content(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], added: Sequence[Sequence[Any]],
             before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE. `added`: (id, name, special, normalized)."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": _LETTERS,
        "added_tokens": [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized,
                          "special": special} for i, name, special, normalized in added],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(before)},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "merges": list(merges),
                  "vocab": dict(sorted(vocabulary.items(), key=itemgetter(1)))}}


def _first_twice(tokens: Sequence[str]) -> tuple[int, int] | None:
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token in seen:
            return seen[token], i
        seen[token] = i
    return None


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
