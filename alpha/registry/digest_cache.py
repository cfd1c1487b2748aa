"""What was read of source files, kept on disk: two thirds of the time that digests take. Floor 3.

A `Source` (syntax.py) is a pure function of a file's text, so what it answered is kept under a digest of that text, of the code that reads
and keeps it, and of Python's version. An edit of a file, of this code, or another Python asks anew. Each file has a checksum: what is
damaged is read anew. One in SAMPLED of the files that are taken from here is read anew all the same and compared: a cache that lies is an
error, not a wrong digest. That a planted fault is a sound one is kept likewise (`question`). The folder may be removed at any time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import alpha
from alpha.errors import AlphaError, CorruptError
from alpha.files import json_of
from alpha.registry import syntax
from alpha.registry.syntax import Definition, Import, Reference, Source

SAMPLED = 40
"""One in so many files is read anew."""

MOST = 2000
"""Files that are kept; the oldest go first."""

MOST_CONFIRMED = 20_000
"""Verdicts that are kept: some of every planted fault, for several states of the code."""

Answers = dict[str, Any]
"""What was asked, as JSON -> the answer, as JSON holds it."""


def folder() -> Path:
    """Where this checkout keeps what was read."""
    return Path(alpha.__file__).parent.parent / ".alpha" / "digests"


@cache
def _code() -> str:
    """Digest of what an answer depends on besides the text."""
    files = (Path(syntax.__file__), Path(__file__))
    return hashlib.sha256("\0".join((sys.version, *(f.read_text(encoding="utf-8") for f in files))).encode()).hexdigest()


class Remembered:
    """A Source that parses its text only when it is asked what it was never asked before."""

    def __init__(self, text: str, package: str) -> None:
        self._text, self._package = text, package
        self._source: Source | None = None
        self._made: dict[str, Any] = {}
        key = hashlib.sha256("\0".join((_code(), package, text)).encode("utf-8", "surrogatepass")).hexdigest()
        self.path = folder() / f"{key[:40]}.json"
        self.answers = _load(self.path)
        self.new = False
        if self.answers and random.SystemRandom().randrange(SAMPLED) == 0:
            self.verify()
        names, imports, stars = self._asked("bindings", _Bindings)
        self.statements: Mapping[str, None] = dict.fromkeys(names)
        self.imports: Mapping[str, list[Import]] = imports
        self.stars: list[Import] = stars

    def definitions(self, name: str) -> tuple[Definition, ...]:
        """As Source.definitions."""
        return self._asked("definitions", _Definitions, name)

    def lambdas(self, line: int) -> tuple[Definition, ...]:
        """As Source.lambdas."""
        return self._asked("lambdas", _Definitions, line)

    def header(self, name: str) -> tuple[Definition, ...]:
        """As Source.header."""
        return self._asked("header", _Definitions, name)

    def entry(self, name: str, *keys: str) -> Definition | None:
        """As Source.entry."""
        return self._asked("entry", _Maybe, name, *keys)

    def table(self, name: str) -> Definition | None:
        """As Source.table."""
        return self._asked("table", _Maybe, name)

    def verify(self) -> None:
        """CorruptError unless every answer that is kept is what the text says today."""
        for question, answer in self.answers.items():
            what, *arguments = json.loads(question)
            real = self._answer(what, _FORMS[what], arguments)
            if json.loads(json.dumps(real)) != answer:
                raise CorruptError("the cache of digests does not hold what the source file says", came=f"{self.path.name}: {question}",
                                   expected="what reading the file anew gives", do=f"remove {self.path.parent}; it is made again")

    def _asked(self, what: str, form: type[_Form], *arguments: str | int) -> Any:
        question = json.dumps([what, *arguments])
        if question not in self._made:
            if question not in self.answers:
                self.answers[question] = self._answer(what, form, arguments)
                self.new = True
                _unsaved(self)
            self._made[question] = form.read(self.answers[question])
        return self._made[question]

    def _answer(self, what: str, form: type[_Form], arguments: Any) -> Any:
        if self._source is None:
            self._source = syntax.read(self._text, self._package)
        return form.write(self._source if what == "bindings" else getattr(self._source, what)(*arguments))

    def save(self) -> None:
        """Write what is new, beside what others have written since; a folder that cannot be written costs time and nothing else."""
        if self.new:
            _write(self.path, {**_load(self.path), **self.answers})
            self.new = False


@lru_cache(maxsize=4096)
def read(text: str, package: str) -> Remembered:
    """A file's Source, as far as it was ever asked; InputError when it is not Python."""
    return Remembered(text, package)


# Verdicts ------------------------------------------------------------------------------------------------------------------------------


def question(code: Path, *parts: str) -> str:
    """Key of a yes that follows from these texts, from the code in a file, from how sources are read and from Python's version."""
    text = "\0".join((_code(), code.read_text(encoding="utf-8"), *parts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def is_confirmed(key: str) -> bool:
    """Whether the answer was yes before. One in SAMPLED times the question is asked again all the same."""
    return key in _confirmed() and random.SystemRandom().randrange(SAMPLED) != 0


def confirm(key: str) -> None:
    """Keep a yes."""
    if key not in _confirmed():
        _confirmed()[key] = 1
        _unsaved(_CONFIRMED)


def _confirmed_file() -> Path:
    return folder() / "confirmed.json"


@cache
def _confirmed() -> Answers:
    return _load(_confirmed_file())


class _Confirmed:
    """All that was answered with yes, as a file."""

    def save(self) -> None:
        """Beside what others have written since; the newest MOST_CONFIRMED."""
        _write(_confirmed_file(), dict([*(_load(_confirmed_file()) | _confirmed()).items()][-MOST_CONFIRMED:]))


_CONFIRMED = _Confirmed()


def _load(path: Path) -> Answers:
    """What is kept there; {} where it is missing, torn or damaged."""
    try:
        checksum, _, body = path.read_text(encoding="ascii").partition("\n")
        return dict(json_of(body.encode())) if hashlib.sha256(body.encode()).hexdigest() == checksum else {}
    except (OSError, ValueError, TypeError, AlphaError):
        return {}


def _write(path: Path, answers: Answers) -> None:
    body = json.dumps(answers, separators=(",", ":"))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}", encoding="ascii")
        os.replace(part, path)


# Saved once, when the process ends ----------------------------------------------------------------------------------------------------

_WAITING: dict[int, list[Remembered | _Confirmed]] = {}
"""Process -> what it has to save: a fork does not write what its parent will."""


def _unsaved(source: Remembered | _Confirmed) -> None:
    if os.getpid() not in _WAITING:
        _WAITING.clear()
        _WAITING[os.getpid()] = []
        atexit.register(save_all)
    if source not in (waiting := _WAITING[os.getpid()])[-1:]:
        waiting.append(source)


def save_all() -> None:
    """Write all that is new in this process; drop the oldest where too much is kept."""
    for source in _WAITING.pop(os.getpid(), []):
        source.save()
    with suppress(OSError):
        kept = sorted(folder().glob("*.json"), key=lambda p: p.stat().st_mtime)
        for path in kept[: max(0, len(kept) - MOST)]:
            path.unlink(missing_ok=True)


# Answers as JSON ----------------------------------------------------------------------------------------------------------------------


class _Form:
    """How an answer is written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _import(i: Import) -> list[Any]:
    return [i.module, i.symbol, i.level]


def _reference(r: Reference) -> list[Any]:
    return [list(r.chain), [_import(i) for i in r.through]]


def _references(found: list[Any]) -> tuple[Reference, ...]:
    return tuple(Reference(tuple(chain), tuple(Import(*i) for i in through)) for chain, through in found)


def _definition(d: Definition) -> list[Any]:
    return [d.text, [_reference(r) for r in d.references], sorted(d.names), sorted(d.strings),
            [[n, _definition(m)] for n, m in d.members], None if d.whole is None else _definition(d.whole),
            None if d.bases is None else [_reference(r) for r in d.bases], list(d.fields)]  # fmt: skip


def _defined(v: list[Any]) -> Definition:
    return Definition(v[0], _references(v[1]), frozenset(v[2]), frozenset(v[3]), tuple((n, _defined(m)) for n, m in v[4]),
                      None if v[5] is None else _defined(v[5]), None if v[6] is None else _references(v[6]), tuple(v[7]))


class _Definitions(_Form):
    write = staticmethod(lambda found: [_definition(d) for d in found])
    read = staticmethod(lambda found: tuple(_defined(d) for d in found))


class _Maybe(_Form):
    write = staticmethod(lambda d: None if d is None else _definition(d))
    read = staticmethod(lambda d: None if d is None else _defined(d))


class _Bindings(_Form):
    write = staticmethod(lambda s: [[*s.statements], {n: [*map(_import, x)] for n, x in s.imports.items()}, [*map(_import, s.stars)]])
    read = staticmethod(lambda v: (v[0], {n: [Import(*i) for i in x] for n, x in v[1].items()}, [Import(*i) for i in v[2]]))


_FORMS: Mapping[str, type[_Form]] = {"bindings": _Bindings, "definitions": _Definitions, "lambdas": _Definitions, "header": _Definitions,
                                     "entry": _Maybe, "table": _Maybe}
