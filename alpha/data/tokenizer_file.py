"""Tokenizers in files: what `Tokenizer.save` wrote, verified, and the tokenizer.json of Hugging Face. The content says which it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alpha.data.files import read_file
from alpha.data.hashed import load_hashed
from alpha.data.tokenizer import FORMAT, VERSION, BPETokenizer, ByteTokenizer, Tokenizer
from alpha.data.tokenizer_hf import HuggingFaceTokenizer, read_hugging_face
from alpha.errors import CorruptError, InputError
from alpha.files import MOST_TEXT, json_of


def open_tokenizer(path: Path, end: str = "") -> Tokenizer:
    """The tokenizer of a file of either sort. `end`: as for `read_hugging_face`. InputError and CorruptError as the two readers say."""
    if _saved(path) is None:
        return read_hugging_face(path, end)
    if end:
        raise InputError("a saved tokenizer says itself what ends a text", came=f"data.tokenizer_end = {end!r} for {path}",
                         expected="no data.tokenizer_end", do="remove data.tokenizer_end")
    return load_tokenizer(path)


def _saved(path: Path) -> dict[str, Any] | None:
    """The content of a file that says it is Alpha's; None for another. InputError where it cannot be read."""
    try:
        content = json_of(read_file(path, "the tokenizer file", MOST_TEXT))
    except ValueError as error:
        raise InputError("the tokenizer file is no JSON", came=f"{path}: {error}",
                         expected="a tokenizer.json of Hugging Face, or what Alpha saved", do="check data.tokenizer_file") from error
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def load_tokenizer(path: Path) -> Tokenizer:
    """Read what `Tokenizer.save` wrote.

    InputError: no such file, or a version that this program does not know. CorruptError: torn, edited or not a tokenizer file.
    """
    again = "restore it, or make the tokenizer again (the same corpus or tokenizer.json gives the same one)"

    def corrupt(why: str, came: object) -> CorruptError:
        return CorruptError(f"the tokenizer file is damaged: {why}", came=f"{path}: {came}", expected="the file as it was saved", do=again)

    content = load_hashed(path, "the tokenizer file", FORMAT, VERSION, do=again)
    try:
        form, record = content["form"], content["record"]
        if form["kind"] == "bytes":
            tokenizer: Tokenizer = ByteTokenizer()
        elif form["kind"] == "bpe":
            tokenizer = BPETokenizer(form["merges"], pattern=form["pattern"], record=record)
        elif form["kind"] == "hf":
            tokenizer = HuggingFaceTokenizer(form, record)
        else:
            raise corrupt("unknown kind of tokenizer", form["kind"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise corrupt("a field is missing or has the wrong type", repr(error)) from error
    if tokenizer.form() != form:
        raise InputError("the tokenizer file was made with other word rules", came=f"{path}: pattern {form.get('pattern')}",
                         expected="the pattern of that name in this release",
                         do="use the release that wrote it, or train again")
    return tokenizer
