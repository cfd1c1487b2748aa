"""Ids of Alpha's reader of tokenizer.json against those of the library `tokenizers`, over drawn texts.

    python suites/support/hf_fuzz.py --texts 1000000 [--seed N]

The tokenizers are trained here, by that library, in the shapes of GPT-2, Llama 3, Qwen and GPT-4o, on the standard library's source and
on words drawn from the letters of many scripts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import unicodedata
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from alpha.data.corpus import stdlib_folder
from alpha.data.tokenizer_hf import HuggingFaceTokenizer, read_hugging_face

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHAPES = {"gpt2": "", "llama3": LLAMA3, "qwen": LLAMA3.replace("{1,3}", ""), "gpt4o": GPT4O}
SCRIPTS = ("aeinorst", "AEIOUßéüñçø", "абвгдеиностр", "αβγδεικλνοστ", "אבגדהוילמנ", "ابتحدرسعلمن","कतनमरलवसहा",
           "กขคงจชดตนม", "的一是不了人我在有他",
           "日本語のはをにがでと", "가나다라마바사", "আকতনবমর", "அகசதநப", "0123456789", "٠١٢٣", "+-*/=<>!&|", "🙂👍🏽🎉🇫")  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "<tool>", "<tool>s", "<|fim_prefix|>")
ODD = (*SPECIAL, *ADDED, "cafe\u0301s", "café", "e\u0301", "\u0327", "'s", "'LL", "'ſ", "'K", "'ve", "\r\n", "\n\n", "   ", "\t", "\u3000",
       "\xa0", "\u1680", "\x1c", "\x85", "  \n  ", "123456", "Ⅷ", "\0", "\ufeff", "\u200d")  # fmt: skip


@cache
def assigned() -> list[str]:
    """The characters that this Python's Unicode has; later ones may have other categories in the library."""
    return [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]


@cache
def sources() -> list[str]:
    """Source text of this Python's standard library."""
    return [p.read_text(encoding="utf-8", errors="replace") for p in sorted(stdlib_folder().glob("*.py"))[::8]]


def word(draw: random.Random) -> str:
    """Letters of one script."""
    return "".join(draw.choices(draw.choice(SCRIPTS), k=draw.randrange(1, 9)))


def text(draw: random.Random) -> str:
    """A short text of words, source, runs, odd blanks, names of added tokens and any characters."""
    out = []
    for _ in range(draw.randrange(1, 12)):
        kind = draw.random()
        if kind < 0.3:
            source = draw.choice(sources())
            start = draw.randrange(len(source) + 1)
            out.append(source[start : start + draw.randrange(1, 50)])
        elif kind < 0.6:
            out.append(" ".join(word(draw) for _ in range(draw.randrange(1, 5))))
        elif kind < 0.75:
            out.append("".join(draw.choices(assigned(), k=draw.randrange(1, 8))))
        elif kind < 0.9:
            out.append(draw.choice(ODD))
        else:
            out.append(draw.choice("ab \n1'é日") * draw.randrange(1, 90))
    return "".join(out)


def train(shape: str, vocabulary: int = 3000) -> tokenizers.Tokenizer:
    """A tokenizer of the library in one of SHAPES, trained on sources and drawn words."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=shape == "llama3"))
    byte_level = pre_tokenizers.ByteLevel
    if shape == "gpt2":
        made.pre_tokenizer = byte_level(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(SHAPES[shape]), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)])
    if shape == "qwen":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    draw = random.Random(shape)
    words = [" ".join(word(draw) for _ in range(100)) for _ in range(100)]
    made.train_from_iterator([*sources(), *words], trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=byte_level.alphabet(), show_progress=False,
        special_tokens=[SPECIAL[0]] if shape == "gpt2" else []))  # fmt: skip
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    if shape == "qwen":
        made.add_tokens([AddedToken("cafe\u0301s", normalized=True)])
    return made


def pair(shape: str, folder: Path) -> tuple[tokenizers.Tokenizer, HuggingFaceTokenizer]:
    """(the library's, ours) of one file."""
    path = folder / f"{shape}.json"
    train(shape).save(str(path))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    return theirs, read_hugging_face(path)


def differences(theirs: tokenizers.Tokenizer, ours: HuggingFaceTokenizer, texts: int, seed: int) -> list[str]:
    """The texts, of `texts` drawn ones, whose ids differ."""
    draw, found = random.Random(seed), []
    for _ in range(texts):
        data = text(draw)
        if ours.encode(data.encode()).tolist() != theirs.encode(data, add_special_tokens=False).ids:
            found.append(data)
    return found


def main() -> int:
    """All shapes; exit code 1 where a text has other ids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            found = differences(*pair(shape, Path(folder)), args.texts // len(SHAPES), args.seed)
            wrong += len(found)
            print(f"{shape:8} {args.texts // len(SHAPES)} texts, {len(found)} with other ids", *map(repr, found[:3]), flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
