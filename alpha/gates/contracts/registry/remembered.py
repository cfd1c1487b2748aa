"""What is kept of source files promises: it says what they say, without reading them again; what is damaged is read anew, and what lies is
found. Every case has a folder, a draw and an end of its own: what this checkout keeps is neither asked nor changed. Floor 7."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import CorruptError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import folder
from alpha.registry import digest_cache, syntax
from alpha.registry.digest_cache import Remembered, confirm, is_confirmed, question, save_all
from alpha.registry.syntax import Source

TEXT = """
from os import path as p
from .a import *
T = {{"x": {n}, "y": {{"z": p}}}}
f = lambda x: x + {n}
class C(call(), B):
    n: int = {n}
class D(m.B[int]):
    def m(self) -> "C":
        from .b import c as d
        return T["x"] @ f, d
"""


class Cache:
    """A cache in a folder of its own: what was parsed, what is done at the end, what is drawn."""

    def __init__(self, at: Path) -> None:
        self.folder, self.drawn = at / "kept" / "digests", 1
        self.parsed = list[str]()
        self.asked = list[int]()
        self.ends = list[Callable[[], None]]()
        self.process = 11


@contextmanager
def alone() -> Iterator[Cache]:
    """Stands in for the folder of this checkout, for chance, and for the process."""
    with folder() as at:
        c = Cache(at)
        digest_cache._code()

        def parse(text: str, package: str) -> Source:
            c.parsed.append(text)
            return syntax.read(text, package)

        def draw(n: int) -> int:
            c.asked.append(n)
            return c.drawn

        with mock.patch.multiple(
            digest_cache, folder=lambda: c.folder, syntax=SimpleNamespace(read=parse), atexit=SimpleNamespace(register=c.ends.append),
            random=SimpleNamespace(SystemRandom=lambda: SimpleNamespace(randrange=draw)), _WAITING={},
            os=SimpleNamespace(getpid=lambda: c.process, replace=os.replace), _confirmed=cache(digest_cache._confirmed.__wrapped__),
        ):
            yield c


def _answers(source: Source | Remembered) -> list[object]:
    """All that can be asked about TEXT."""
    names = [*source.statements, "none"]
    return [names, source.imports, source.stars, [source.lambdas(line) for line in (5, 1)],
            [[ask(n) for ask in (source.definitions, source.header, source.table)] for n in names],
            [source.entry(n, *keys) for n in names for keys in (("x",), ("y", "z"), ("none",))]]  # fmt: skip


def _file(c: Cache, text: str) -> Path:
    return c.folder / (hashlib.sha256("\0".join((digest_cache._code(), "mini", text)).encode()).hexdigest()[:40] + ".json")


def kept(rng: np.random.Generator) -> Measured:
    """What was asked once is answered from the file, as the text says; what is new is written beside what others have written."""
    checks, text = Checks(), TEXT.format(n=int(rng.integers(99)))
    with alone() as c:
        first = Remembered(text, "mini")
        wanted = _answers(Source(text, "mini"))
        checks.that(_answers(first) == wanted == _answers(first) and c.parsed == [text], f"parsed {len(c.parsed)} times")
        checks.that(c.asked == [] and not c.folder.exists() and c.ends == [save_all], "something is written before the end")
        c.ends[0]()
        checks.that([*c.folder.iterdir()] == [_file(c, text)] == [first.path] and not first.new, "files that are kept")
        body = json.dumps(first.answers, separators=(",", ":"))
        checks.that(_file(c, text).read_text() == f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}", "how it is written")
        c.parsed.clear()
        again = Remembered(text, "mini")
        checks.that(_answers(again) == wanted and c.parsed == [] and not again.new, "it is read again")
        checks.that(c.asked == [digest_cache.SAMPLED], f"drawn from {c.asked}")
        again.verify()
        checks.that(c.parsed == [text], "what is verified is not read again")
        was = _file(c, text).stat().st_mtime_ns, _file(c, text).read_text()
        again.save()
        save_all()
        checks.that(was == (_file(c, text).stat().st_mtime_ns, _file(c, text).read_text()), "what is not new is written")
        other = Remembered(text, "other")
        checks.that(other.path != first.path and Remembered(text + "\n", "mini").path != first.path, "files of two texts are one")
        one, two = Remembered(f"a = {text!r}\n", "mini"), Remembered(f"a = {text!r}\n", "mini")
        one.definitions("a"), two.header("a")
        save_all()
        questions = ['["bindings"]', '["definitions", "a"]', '["header", "a"]']
        checks.that(sorted(digest_cache._load(one.path)) == questions, "one of two writers is lost")
        c.process = 12
        Remembered("b = 1\n", "mini").definitions("b")
        waiting = [source.path for source in digest_cache._WAITING[12]]  # type: ignore[union-attr]
        checks.that([*digest_cache._WAITING] == [12] and waiting == [_file(c, "b = 1\n")], "a fork writes what its parent will")
        checks.that(c.ends == [save_all] * 3, f"saved at {len(c.ends)} ends")  # of each process, and once more after one was saved early
    return checks.measured()


def damaged(rng: np.random.Generator) -> Measured:
    """A file that is torn, or another one, is read anew; one that lies is found where it is looked at; none costs more than time."""
    checks, text = Checks(), TEXT.format(n=int(rng.integers(99)))
    with alone() as c:
        wanted = _answers(Source(text, "mini"))

        def fresh() -> None:
            _answers(made := Remembered(text, "mini"))
            made.new = True
            made.save()

        fresh()
        path, sound = _file(c, text), _file(c, text).read_bytes()
        checksum, _, body = sound.partition(b"\n")
        other = b'["no table"]'
        damages: Sequence[tuple[str, bytes | None]] = (
            ("torn", sound[: int(rng.integers(1, len(sound) - 1))]), ("gone", None), ("no text", b"\xff\xfe" + sound), ("empty", b""),
            ("another checksum", b"0" + checksum[1:] + b"\n" + body if checksum[:1] != b"0" else b"1" + sound[1:]),
            ("tampered", sound.replace(b'"p"', b'"q"')), ("no table", hashlib.sha256(other).hexdigest().encode() + b"\n" + other))
        for what, data in damages:
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)
            c.parsed.clear()
            checks.that(_answers(Remembered(text, "mini")) == wanted and c.parsed == [text], f"{what}: not read anew")
        content = json.loads(body)
        content['["definitions", "f"]'][0][0] = "0" * 64
        lie = json.dumps(content).encode()
        path.write_bytes(hashlib.sha256(lie).hexdigest().encode() + b"\n" + lie)
        checks.that(_answers(Remembered(text, "mini")) != wanted, "a lie is found where nothing is looked at")
        c.drawn = 0
        told = ("the cache of digests does not hold what the source file says", f'{path.name}: ["definitions", "f"]',
                "what reading the file anew gives", f"remove {c.folder}; it is made again")
        checks.tells(CorruptError, told, lambda: Remembered(text, "mini"))
        fresh_one = Remembered("z = 1\n", "mini")
        checks.that(fresh_one.definitions("z") != (), "what was never kept is verified")
        blocked = c.folder.parent.parent / "a file"
        blocked.write_text("")
        with mock.patch.object(digest_cache, "folder", lambda: blocked / "digests"):
            unwritten = Remembered(text, "mini")
            checks.that(_answers(unwritten) == wanted, "a folder that cannot be made")
            save_all()
        checks.that(not unwritten.new and blocked.read_text() == "", "what cannot be written is tried for ever")
    return checks.measured()


def answered(rng: np.random.Generator) -> Measured:
    """A yes is kept under all that it follows from, and asked again now and then; the oldest files and answers go."""
    checks = Checks()
    with alone() as c:
        code = c.folder.parent.parent / "code.py"
        code.write_text("one")
        keys = [question(code, "a", "b"), question(code, "a"), question(code, "b", "a")]
        code.write_text("two")
        keys.append(question(code, "a", "b"))
        text = "\0".join((digest_cache._code(), "two", "a", "b"))
        checks.that(len({*keys}) == 4 and keys[3] == hashlib.sha256(text.encode()).hexdigest()[:40], f"keys: {keys}")
        checks.that(not is_confirmed(keys[0]) and c.asked == [], "a question that nobody answered")
        for key in (keys[0], keys[1], keys[0]):
            confirm(key)
        checks.that([is_confirmed(key) for key in keys] == [True, True, False, False], "what was answered with yes")
        c.drawn = 0
        checks.that(not is_confirmed(keys[0]) and c.asked == [digest_cache.SAMPLED] * 3, f"nothing is asked again: {c.asked}")
        c.drawn = 1
        save_all()
        file = c.folder / "confirmed.json"
        checks.that(digest_cache._load(file) == {keys[0]: 1, keys[1]: 1}, "the file of answers")
        digest_cache._write(file, {"of another": 1, **digest_cache._load(file)})
        with mock.patch.object(digest_cache, "MOST_CONFIRMED", 3):
            confirm(keys[2])
            save_all()
        checks.that([*digest_cache._load(file)] == [keys[0], keys[1], keys[2]], f"the newest: {[*digest_cache._load(file)]}")
        digest_cache._confirmed.cache_clear()  # type: ignore[attr-defined]
        checks.that(is_confirmed(keys[2]) and not is_confirmed(keys[3]), "another process does not know of it")
        order = rng.permutation(9).tolist()
        for i, age in enumerate(order):
            Remembered(f"a = {i}\n", "mini")
            save_all()
            os.utime(_file(c, f"a = {i}\n"), ns=(10**9 * age, 10**9 * age))
        (c.folder / "notes.txt").write_text("of somebody")
        os.utime(file, ns=(10**18, 10**18))
        with mock.patch.object(digest_cache, "MOST", 4):
            save_all()
        left = {_file(c, f"a = {i}\n") for i, age in enumerate(order) if age >= 6} | {file, c.folder / "notes.txt"}
        checks.that({*c.folder.iterdir()} == left, f"left: {len([*c.folder.iterdir()])}")
    return checks.measured()


