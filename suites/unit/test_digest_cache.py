"""What is kept of source files says what the files say, and what lies is found."""

from __future__ import annotations

import ast
import hashlib
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from alpha.errors import CorruptError, InputError
from alpha.registry import digest_cache, faults, package, syntax
from alpha.registry.digest_cache import Remembered
from alpha.registry.faults import Fault
from alpha.registry.package import Package
from alpha.registry.syntax import Source

PACKAGE = Path(digest_cache.__file__).parents[1]

TEXT = """
from os import path as p
from .a import *
TABLE = {"x": 1, "y": {"z": p}}
f = lambda x: x + 1
class C(Base):
    n: int = 3
    def m(self) -> "C":
        return TABLE["x"] @ f
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, of which nothing is verified at random."""
    monkeypatch.setattr(digest_cache, "folder", lambda: tmp_path / "digests")
    monkeypatch.setattr(digest_cache, "SAMPLED", 10**12)
    monkeypatch.setattr(digest_cache, "_WAITING", {})
    monkeypatch.setattr(digest_cache, "_confirmed", cache(digest_cache._confirmed.__wrapped__))
    return tmp_path / "digests"


def answers(source: Source | Remembered, text: str) -> list[object]:
    """All that can be asked about a text."""
    names = sorted(source.statements)
    lines = sorted({n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Lambda)})
    keys = sorted({n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)})[:5]
    return [list(source.statements), source.imports, source.stars, [source.lambdas(n) for n in lines],
            [[ask(n) for ask in (source.definitions, source.header, source.table)] for n in names],
            [source.entry(n, k) for n in names for k in keys]]  # fmt: skip


def kept(text: str) -> Remembered:
    """A text that was asked everything by an earlier process."""
    first = Remembered(text, "alpha")
    answers(first, text)
    first.save()
    return Remembered(text, "alpha")


def test_what_is_kept_is_what_the_files_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen files of the package that the seed draws, and one with everything in it: from disk, without parsing anything."""
    for text in (TEXT, *(p.read_text(encoding="utf-8") for p in random.Random(f"{seed} cache").sample(sorted(PACKAGE.rglob("*.py")), 12))):
        expected, again = answers(Source(text, "alpha"), text), kept(text)
        with monkeypatch.context() as patch:
            patch.setattr(syntax, "read", None)
            assert answers(again, text) == expected
        again.verify()


def test_digests_of_the_package_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [("all", "alpha.registry.judge"), ("all", "alpha.ops.matmul")]
    with monkeypatch.context() as patch:
        patch.setattr(digest_cache, "read", lambda text, package: Source(text, package))
        plain = [Package(PACKAGE).hash([r]) for r in roots]
    digest_cache.read.cache_clear()
    assert [Package(PACKAGE).hash([r]) for r in roots] == plain
    digest_cache.save_all()
    digest_cache.read.cache_clear()
    monkeypatch.setattr(syntax, "read", None)
    assert [Package(PACKAGE).hash([r]) for r in roots] == plain
    digest_cache.read.cache_clear()


@pytest.mark.parametrize("edit", [("x: x + 1", "x: x + 2"), ("n: int = 3", "n: int = 4"), ('"x": 1', '"x": 2')])
def test_an_edit_of_a_file_is_read(edit: tuple[str, str]) -> None:
    old, text = kept(TEXT), TEXT.replace(*edit)
    new = Remembered(text, "alpha")
    assert new.path != old.path and answers(new, text) == answers(Source(text, "alpha"), text) != answers(old, TEXT)


def test_another_reader_or_another_python_reads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    old = kept(TEXT)
    assert old.answers
    code, version = digest_cache._code(), digest_cache.sys.version
    monkeypatch.setattr(digest_cache.sys, "version", version + "+")
    digest_cache._code.cache_clear()
    assert digest_cache._code() != code
    other = Remembered(TEXT, "alpha")
    assert other.path != old.path and list(other.answers) == ['["bindings"]']
    monkeypatch.undo()
    digest_cache._code.cache_clear()
    assert digest_cache._code() == code


def tampered(source: Remembered, *, fitting: bool) -> None:
    """Another digest of a definition, with a checksum that fits or without."""
    checksum, _, body = source.path.read_text().partition("\n")
    content = json.loads(body)
    content['["definitions", "f"]'][0][0] = "0" * 64
    body = json.dumps(content)
    source.path.write_text(f"{hashlib.sha256(body.encode()).hexdigest() if fitting else checksum}\n{body}")


@pytest.mark.parametrize("damage", ["tampered", "torn", "gone", "no text"])
def test_a_damaged_file_is_read_anew(damage: str) -> None:
    source = kept(TEXT)
    if damage == "tampered":
        tampered(source, fitting=False)
    elif damage == "gone":
        source.path.unlink()
    else:
        content = source.path.read_bytes()
        source.path.write_bytes(content[: len(content) // 2] if damage == "torn" else b"\xff\xfe")
    assert answers(Remembered(TEXT, "alpha"), TEXT) == answers(Source(TEXT, "alpha"), TEXT)


def test_a_lie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an answer that is not what the file says, with a fitting checksum. Taken where nothing is verified, refused where it is."""
    tampered(kept(TEXT), fitting=True)
    assert answers(Remembered(TEXT, "alpha"), TEXT) != answers(Source(TEXT, "alpha"), TEXT)
    monkeypatch.setattr(digest_cache, "SAMPLED", 1)
    with pytest.raises(CorruptError, match="does not hold what the source file says"):
        Remembered(TEXT, "alpha")


def test_old_files_go(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(digest_cache, "MOST", 3)
    for i in range(5):
        Remembered(f"a = {i}", "alpha")
    digest_cache.save_all()
    assert len(list(folder.iterdir())) == 3


FAULT = Fault(id="a.b", component="a", gate="parity", mirrors=0, why="w", find="x + 1", replace="x + 2", file="a.py")


def test_a_fault_that_was_sound_is_so_as_long_as_its_text_stays(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[str] = []
    real = faults.same_meaning
    monkeypatch.setattr(faults, "same_meaning", lambda a, b: asked.append(b) or real(a, b))  # type: ignore[func-returns-value]
    broken = faults.broken(FAULT, TEXT)
    assert broken == TEXT.replace("x + 1", "x + 2") and len(asked) == 1
    digest_cache.save_all()
    digest_cache._confirmed.cache_clear()
    assert faults.broken(FAULT, TEXT) == broken and len(asked) == 1
    faults.broken(FAULT, TEXT + "g = 1\n")
    assert len(asked) == 2, "another file is another question"
    monkeypatch.setattr(digest_cache, "SAMPLED", 1)
    assert faults.broken(FAULT, TEXT) == broken and len(asked) == 3


@pytest.mark.parametrize("replace_by", ["x  +  1", "x +"])
def test_a_fault_that_is_not_sound_is_never_kept(replace_by: str) -> None:
    """It changes nothing, or does not parse: refused each time."""
    for _ in range(2):
        with pytest.raises(InputError):
            faults.broken(replace(FAULT, replace=replace_by), TEXT)
        digest_cache.save_all()


def test_snapshots_of_the_running_package_share_while_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot of it shares that, until a file changes in it, comes, goes or is added from elsewhere."""
    place = tmp_path / "alpha"
    place.mkdir()
    (place / "__init__.py").write_text("")
    monkeypatch.setattr(package, "alpha", SimpleNamespace(__file__=str(place / "__init__.py")))

    def asked(text: str) -> tuple[str, object]:
        (place / "m.py").write_text(text)
        made = Package()
        found = made.hash(made.roots("alpha.m:f"))
        assert found == (plain := Package(place)).hash(plain.roots("alpha.m:f"))
        return found, made._graph

    one, graph = asked("def f(): return 1")
    assert asked("def f(): return 1") == (one, graph) and asked("def f(): return 2")[0] != one
    asked("from .n import f")
    (place / "n.py").write_text("def f(): return 1")
    assert asked("from .n import f")[0] == one
    (place / "n.py").unlink()
    assert asked("from .n import f")[0] != one
    more = Package()
    more.module_of(test_snapshots_of_the_running_package_share_while_it_is_the_same)
    assert more._graph is not Package()._graph and Package()._graph is Package()._graph
