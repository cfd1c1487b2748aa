"""The files that a folder or a glob holds, and no text left out without a word. What stands in the way of one is an error that names it.

A folder that cannot be listed may hold texts, and so may a link to a folder; a link to a text may lead nowhere. A folder that
`alpha data prepare` made, or is making, holds no texts but what it made of them, and is passed over.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

from alpha.errors import InputError

MANIFEST = "prepared.json"
"""What describes prepared data."""
UNFINISHED = "preparing.json"
"""The plan of a folder that is being prepared; gone when it is done."""
_MARKS = "*?["


def is_prepared(path: Path) -> bool:
    """Whether data was prepared in a folder, or began to be. False where nobody may look."""
    return os.path.isfile(path / MANIFEST) or os.path.isfile(path / UNFINISHED)


def path_and_pattern(source: str, start: Path = Path()) -> tuple[Path, str]:
    """A source as its path and the glob below that; '' is none. What exists, seen from `start`, is a path, whatever marks it holds."""
    parts = Path(source).parts
    for i, part in enumerate(parts):
        if _is_pattern(part) and not os.path.lexists(start.joinpath(*parts[: i + 1])):
            return Path(*parts[:i]), "/".join(parts[i:])
    return Path(source), ""


def files_below(root: Path, wanted: Callable[[Path], bool], apart: Path | None = None) -> tuple[list[Path], int]:
    """The files below `root` that are `wanted` and neither hidden nor in a hidden folder, in no order, and how many others there are.
    Prepared data and the folder `apart` are passed over.

    InputError: a folder that cannot be listed, a link to a folder, a wanted file that cannot be reached; not for what is hidden.
    """

    def refuse(error: OSError) -> None:
        if not _hidden(Path(error.filename), root):
            raise unlisted(error) from error

    found, others = list[Path](), 0
    for name, folders, files in os.walk(root, onerror=refuse):
        folder = Path(name)
        folders[:] = [one for one in folders if not _passed_over(folder / one, apart)]
        for one in folders:
            if os.path.islink(folder / one) and not _hidden(folder / one, root):
                _refuse_link(folder / one)
        for one in files:
            path = folder / one
            if not wanted(path) or _hidden(path, root):
                others += os.path.isfile(path)
            elif _is_file(path):
                found.append(path)
    return found, others


def files_matching(root: Path, pattern: str, apart: Path | None = None) -> list[Path]:
    """The files below `root` that match the glob, in no order; `**` crosses folders. Prepared data and `apart` are passed over.

    InputError as `files_below`, and for what is no pattern.
    """

    @cache
    def passed_over(path: Path) -> bool:
        return path != root and (_passed_over(path, apart) or passed_over(path.parent))

    parts = Path(pattern).parts
    try:
        matching = [path for path in root.glob(pattern) if not passed_over(path)]
        for i, part in enumerate(parts):
            head = "/".join(parts[: i + (part == "**")])
            if _is_pattern(part):
                for folder in root.glob(head) if head else (root,):
                    if os.path.isdir(folder) and not passed_over(folder):
                        with os.scandir(folder) as entries:
                            links = [folder / entry.name for entry in entries if entry.is_symlink() and entry.is_dir()]
                        for link in links if part == "**" else ():  # the pattern goes on into this folder's folders, but into no link
                            if not passed_over(link) and not _hidden(link, root):
                                _refuse_link(link)
    except (ValueError, NotImplementedError, IndexError) as error:
        raise InputError("the corpus has an impossible pattern", came=f"{pattern}: {error}", expected="such as texts/**/*.md",
                         do="mend the pattern") from error
    except OSError as error:
        raise unlisted(error) from error
    return [path for path in matching if _is_file(path)]


def unlisted(error: OSError) -> InputError:
    """The error to raise where a folder could not be listed."""
    return InputError("a folder of texts cannot be listed", came=f"{error.filename} ({error.strerror})", expected="permission to read it",
                      do="allow it, or move the folder away: no text is left out without a word")


def _is_pattern(part: str) -> bool:
    return any(mark in part for mark in _MARKS)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _passed_over(folder: Path, apart: Path | None) -> bool:
    return is_prepared(folder) or (apart is not None and os.path.isdir(apart) and os.path.isdir(folder) and os.path.samefile(folder, apart))


def _is_file(path: Path) -> bool:
    """Whether a path is a regular file. InputError where nobody can tell: a link that leads nowhere, a folder that lets nobody in."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        why = "a link that leads nowhere" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError("a text cannot be reached", came=f"{path} ({why})", expected="a readable file",
                         do="mend or remove it: no text is left out without a word") from error


def _refuse_link(path: Path) -> NoReturn:
    raise InputError("a link to a folder is in a source", came=f"{path} -> {os.path.realpath(path)}", expected="folders and files",
                     do="name its target as a source of its own, and remove the link")
