"""JSON files that hold the SHA-256 of their own content: an edit, a torn write or another kind of file is seen when one is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpha.data.files import read_file, sha256_hex, write_atomic
from alpha.errors import CorruptError, InputError
from alpha.files import MOST_TEXT, json_of


def canonical(content: Mapping[str, Any]) -> bytes:
    """`content` as JSON in the one form that is hashed: keys in order, no blanks, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def file_bytes(form: str, version: int, content: Mapping[str, Any]) -> bytes:
    """The whole file: `content` with its format, its version and the hash of all three."""
    whole = {**content, "format": form, "version": version}
    return canonical({**whole, "sha256": sha256_hex(canonical(whole))}) + b"\n"


def save_hashed(path: Path, form: str, version: int, content: Mapping[str, Any]) -> str:
    """Write the file, whole or not at all; the SHA-256 (hex) of its bytes. MachineError if the disk refuses."""
    data = file_bytes(form, version, content)
    write_atomic(path, data)
    return sha256_hex(data)


def load_hashed(path: Path, what: str, form: str, version: int, expected: str | None = None, *,
                do: str = "") -> dict[str, Any]:  # fmt: skip
    """What `save_hashed` wrote. `what` names the file in errors, `do` says what helps where it is damaged; `expected`: the SHA-256 (hex) of
    its bytes, where it is known.

    InputError: missing, or of a version that this program does not know. CorruptError: torn, edited, another kind, not the one expected.
    """
    raw = read_file(path, what, MOST_TEXT)

    def corrupt(why: str, came: object) -> CorruptError:
        return CorruptError(f"{what} is damaged: {why}", came=f"{path}: {came}", expected="the file as it was written",
                            do=do or f"restore it, or remove {path.parent} and make it again")

    try:
        content = json_of(raw)
        stated = content.pop("sha256")
        stands = (content["format"], content["version"])
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise corrupt("it is not complete JSON with a hash", f"{len(raw)} bytes ({error})") from error
    if raw != canonical({**content, "sha256": sha256_hex(canonical(content))}) + b"\n":
        raise corrupt("its content is not what its hash says", f"sha256 {sha256_hex(canonical(content))[:16]}, stated {str(stated)[:16]}")
    if stands[0] != form:
        raise corrupt("it is another kind of file", stands[0])
    if stands[1] != version:
        raise InputError(f"{what} has an unknown version", came=f"{path}: version {stands[1]}", expected=f"version {version}",
                         do="use the release that wrote it, or make the data again with this one")
    if expected is not None and sha256_hex(raw) != expected:
        raise corrupt("it is another file of its kind", f"sha256 {sha256_hex(raw)[:16]} instead of {expected[:16]}")
    return dict(content)
