"""The one place that knows which TOML reader this Python has. Floor 0."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from alpha.errors import CorruptError, InputError
from alpha.files import read_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """The tables of TOML text. ValueError for everything that is none: a syntax error (with line and column), bytes that are not UTF-8,
    a number of thousands of digits, brackets nested deeper than the stack."""
    try:
        return tomllib.loads(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. InputError if it is missing or no regular file, CorruptError if it does not parse."""
    try:
        return parse_toml(read_regular(path))
    except FileNotFoundError:
        raise InputError("no such file", came=path, do="check the path") from None
    except OSError as error:
        raise InputError("a TOML file cannot be read", came=f"{path} ({error.strerror})", expected="a readable file",
                         do="check the path") from error
    except ValueError as error:
        raise CorruptError("a TOML file does not parse", came=f"{path}: {error}", expected="TOML 1.0") from error


__all__ = ["parse_toml", "read_toml", "tomllib"]
