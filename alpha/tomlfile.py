"""The one place that knows which TOML reader this Python has. Floor 0."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from alpha.errors import CorruptError, InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. InputError if it is missing, CorruptError if it does not parse (with line and column)."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("no such file", came=path, do="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptError("a TOML file does not parse", came=f"{path}: {error}", expected="TOML 1.0") from error


__all__ = ["read_toml", "tomllib"]
