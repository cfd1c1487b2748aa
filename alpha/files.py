"""Reading files that somebody else may have touched: only regular ones, none too large, and JSON that cannot exhaust the stack. Floor 0.

A FIFO blocks whoever opens it until somebody writes; /dev/zero never ends. Both are refused before the first read, as an OSError, so
that a caller's own handler names the file and says what to do.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, BinaryIO

MOST_TEXT = 64 << 20
"""Bytes of the largest text file that is read whole (evidence, tokenizers, manifests); a run's own are far below 1 MiB."""

_MORE = 1 << 16

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path | str) -> BinaryIO:
    """`path` opened to be read, in bytes. OSError as `open`, and for what is no regular file; never waits for a writer."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for holds, name in _KINDS if holds(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return open(handle, "rb")


def read_regular(path: Path | str, most: int | None = MOST_TEXT) -> bytes:
    """The bytes of a regular file of at most `most` bytes (None: of any size). OSError otherwise. Memory follows the file's size, not
    `most`: a read of n bytes sets n aside before the first one comes."""
    with open_regular(path) as file:
        if most is None:
            return file.read()
        parts, left, some = [], most + 1, os.fstat(file.fileno()).st_size + 1
        while left and (part := file.read(min(left, some))):
            parts.append(part)
            left, some = left - len(part), _MORE  # where it grows meanwhile, or tells no size, as in /proc
    data = b"".join(parts)
    if not left:
        raise OSError(errno.EFBIG, f"it is larger than the {most} bytes that such a file may have", str(path))
    return data


def json_of(text: str | bytes) -> Any:
    """What JSON text says. ValueError for everything that is none: torn, not UTF-8, NaN, nested deeper than the stack."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def path_argument(text: str) -> str:
    """The type of a command's path argument: argparse refuses what no file system would take, before anything looks for it."""
    problem = path_problem(text)
    if problem:
        raise ArgumentTypeError(f"a path {problem}")
    return text


def path_problem(text: str, *, text_only: bool = False) -> str:
    """Why `text` cannot be a path, to stand behind 'a path'; '' when it can. `text_only`: also refuse file names that are not UTF-8, which
    the command line can hand over and a file of ours cannot hold."""
    if not text:
        return "is empty"
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        return "holds a control character"
    try:
        raw = text.encode() if text_only else os.fsencode(text)
    except UnicodeEncodeError:
        return "holds bytes that are not UTF-8"
    longest = max(len(part) for part in raw.split(b"/"))
    if longest > 255 or len(raw) > 4095:
        return f"is too long: {len(raw)} bytes, its longest name {longest} (at most 4095 and 255)"
    return ""


__all__ = ["MOST_TEXT", "json_of", "open_regular", "path_argument", "path_problem", "read_regular"]
