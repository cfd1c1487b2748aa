"""What a snapshot of a package resolves names to, target by target, and which classes count by the names of their members: tables of a
made-up package whose answers are written down. Floor 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import alpha
from alpha.component import Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import folder, write_package
from alpha.registry.package import Package, Target, module_digest, symbol_digest

FILES: Mapping[str, str] = {
    "__init__.py": "from .a import one\nfrom . import sub\n__all__ = ['one']\nHERE = 1\n",
    "a.py": "from .b import two as deux, both\nfrom mini.c import *\nimport mini.sub.far\nimport os.path as p, numpy.linalg\n"
            "from . import sub as s\nfrom .absent import gone\nimport mini.lost as lost\nfrom .loop import around\n"
            "from mini import one as uno\n"
            "from .registry import record, judge\nfrom .registry.status import status\nfrom mini.registry.judge import LIMIT\n"
            "def one(): pass\nclass K:\n    def m(self): pass\nif p:\n    twice = 1\nelse:\n    from .b import two as twice\n",
    "b.py": "def two(): return three\nthree = 3\nfrom .c import starred as both\nboth = 4\n",
    "c.py": "from .d import *\nfrom . import d\ndef starred(): pass\n", "d.py": "def deep(): pass\n",
    "loop.py": "from .pool import around\n", "pool.py": "from .loop import around\n",
    "sub/__init__.py": "from .far import f\nfrom ..b import two\nfrom ... import beyond\n",
    "sub/far.py": "from .. import HERE\nfrom ..b import three\nfrom . import near\ndef f(): pass\n",
    "sub/near.py": "X = 1\n",
    "registry/__init__.py": "", "registry/record.py": "from .judge import LIMIT\nfrom ..b import two\ndef write(): return LIMIT\n",
    "registry/judge.py": "LIMIT = 2\nA = LIMIT\n",
    "registry/status.py": "from mini.registry.record import write\ndef status(): return write\n",
}
RESOLVED: Mapping[str, str] = {
    "mini.a one": "def mini.a one", "mini.a K.m": "def mini.a K", "mini.a deux": "def mini.b two", "mini.a len": "", "mini.a none.x": "",
    "mini.a starred": "def mini.c starred", "mini.a deep.x": "def mini.d deep", "mini.a uno": "def mini.a one",
    "mini.a both": "def mini.b both, def mini.c starred", "mini.a twice": "def mini.a twice, def mini.b two",
    "mini.a p.join.x": "text outside os.path.join", "mini.a numpy": "text outside numpy",
    "mini.a numpy.linalg.norm": "text outside numpy.linalg",
    "mini.a mini.sub.far.f": "def mini.sub.far f", "mini.a mini.sub.f": "def mini.sub.far f", "mini.a mini.sub.two": "def mini.b two",
    "mini.a mini.HERE": "def mini HERE", "mini.a mini": "all mini", "mini.a s": "all mini.sub", "mini.a s.far": "all mini.sub.far",
    "mini.a s.near.X": "def mini.sub.near X", "mini.a s.unknown": "all mini.sub", "mini.a s.__name__": "",
    "mini.a s.beyond": "text outside .beyond",
    "mini.a gone": "text absent mini.absent.gone", "mini.a lost.a.b": "text absent mini.lost.a", "mini.a around": "all mini.loop",
    "mini.a record.write": "text opaque write", "mini.a judge.LIMIT": "text opaque LIMIT", "mini.a judge": "text opaque ",
    "mini.a status": "text opaque status", "mini.a LIMIT": "text opaque LIMIT",
    "mini.registry.status write": "def mini.registry.record write", "mini.registry.record LIMIT": "text opaque LIMIT",
    "mini.registry.judge LIMIT": "def mini.registry.judge LIMIT", "mini.registry.record two": "def mini.b two",
    "mini.sub.far HERE": "def mini HERE", "mini.sub.far three": "def mini.b three", "mini.sub.far near.X": "def mini.sub.near X",
    "mini.nowhere x": "", "other.a x": "", "mini one": "def mini.a one",
}
"""Module and name -> what it may mean."""


def _targets(text: str) -> tuple[Target, ...]:
    return tuple((kind, *(rest.split(" ") if kind != "text" else [rest]))
                 for kind, _, rest in (one.partition(" ") for one in text.split(", ") if text))


def resolved(rng: np.random.Generator) -> Measured:
    """Every way in which a name can come from elsewhere; whole modules; functions of files outside; what cannot be resolved."""
    checks = Checks()
    with folder() as at:
        root = write_package(at / "copy", FILES)
        package = Package(root, "mini")
        for question, answer in RESOLVED.items():
            module, name = question.split(" ")
            found = package.resolve(module, tuple(name.split(".")))
            checks.that(found == _targets(answer), f"{question}: {found}, not {answer}")
        inits, _ = package.closure([("all", "mini")])
        far, _ = package.closure([("all", "mini.sub.far")])
        wanted = {*_targets("all mini, def mini.a one, def mini HERE, all mini.sub, def mini.sub.far f, def mini.b two, def mini.b three, "
                            "text outside .beyond")}
        checks.that(inits == wanted, f"all of a package's first file: {inits ^ wanted}")
        checks.that(far == {*_targets("all mini.sub.far, def mini.sub.far f")}, f"all of a module: {far}")
        texts = [*_targets("all mini.sub, text a, def mini.nowhere x, entry mini.a one k, def mini.a none")]
        checks.that([package.definitions(t) for t in texts] == [()] * 5, "definitions of what holds none")
        checks.that(len(package.definitions(("def", "mini.a", "twice"))) == 1, "one of two bindings is written here")
        for symbol, answer in (("mini.a:K.m", "whole mini.a K"), ("mini.a:deux", "def mini.b two")):
            checks.that(package.roots(symbol) == _targets(answer), f"{symbol}: {package.roots(symbol)}")
        _refused(checks, package, root)
        _outside(checks, root, rng)
        checks.that(symbol_digest("mini.b:two", root) == symbol_digest("mini.a:deux", package=package), "a root that is given")
        whole = package.hash([("all", "mini.b")])
        checks.that(module_digest("mini.b", root) == whole != module_digest("mini.c", root), "a module's digest")
    shared, alone = Package(), Package(alpha.__path__[0])
    word = alone.hash(alone.roots("alpha.registry.history:hash_of"))
    checks.that(shared.hash(shared.roots("alpha.registry.history:hash_of")) == word == symbol_digest("alpha.registry.history:hash_of"),
                "the running package, shared and alone")
    renamed = Package(None, "other")
    checks.that(renamed.root == shared.root and renamed.source("alpha.types") is None and renamed.source("other.types") is not None
                and renamed.resolve("other.registry.history", ("ROOT",)) == (("text", "outside alpha.resources.ROOT"),), "another name")
    return checks.measured()


def _refused(checks: Checks, package: Package, root: Path) -> None:
    table: Sequence[tuple[str, tuple[object, object, object, object]]] = (
        ("mini.a", ("not a symbol", "mini.a", "package.module:name", None)),
        ("mini.a:", ("not a symbol", "mini.a:", "package.module:name", None)),
        ("mini.x:f", ("no such module to digest", "mini.x", f"a file under {root}", "check the spelling")),
        ("mini.a:onee", ("no such symbol to digest", "mini.a:onee", "one of one, gone", None)),
        ("mini.a:zzz", ("no such symbol to digest", "mini.a:zzz", "a name of the module", None)),
    )
    for symbol, told in table:
        checks.tells(InputError, told, lambda symbol=symbol: package.roots(symbol))  # type: ignore[misc]
    told = ("no such module to digest", "mini.x", f"a file under {root.name}/", None)
    checks.tells(InputError, told, lambda: module_digest("mini.x", package=package))
    told = ("no such package folder", root / "none", "give the folder that holds the package's __init__.py", None)
    checks.tells(InputError, (told[0], told[1], None, told[2]), lambda: Package(root / "none"))


class _Nameless:
    """Of no module."""


def _outside(checks: Checks, root: Path, rng: np.random.Generator) -> None:
    """A function of a file outside the package is looked up in its file, and this snapshot alone knows of it."""
    package, path = Package(root, "mini"), root.parent / "outside.py"
    path.write_text(f"def f():\n    import mini.b as b\n    return b.two, g()\ndef g():\n    return {rng.integers(99)}\n")
    made: dict[str, object] = {"__name__": "outside"}
    exec(compile(path.read_text(), str(path), "exec"), made)
    checks.that([package.module_of(made["f"]) for _ in range(2)] == [str(path)] * 2, f"{package.module_of(made['f'])}")
    reached, _ = package.closure(package.roots(f"{path}:f"))
    wanted = {("def", str(path), "f"), ("def", str(path), "g"), ("def", "mini.b", "two"), ("def", "mini.b", "three")}
    checks.that(reached == wanted, f"reached: {reached}")
    checks.that(Package(root, "mini").source(str(path)) is None, "a file that nobody named is read")
    nameless = _Nameless()
    nameless.__module__ = None  # type: ignore[assignment]
    for value, came in ((nameless, f":{nameless}"), (len, "builtins:len"), (eval("lambda: 1", {"__name__": "made"}), "made:<lambda>")):
        told = ("no source file for a digest", came, "a symbol of the package mini, or a function written in a file", None)
        checks.tells(InputError, told, lambda value=value: package.module_of(value))  # type: ignore[misc]


MEMBERS = {
    "component.py": "KINDS = ('a', 'b')\n", "config.py": "FAMILIES = make()\nSCHEDULES = {}\nSCHEDULES['a'] = 1\ndef make(): pass\n",
    "errors.py": "class E(Exception):\n    def m(self): return helper\ndef helper(): pass\nclass F(E): pass\n",
    "types.py": "from dataclasses import dataclass\nSHAPE = 1\n@dataclass\nclass TensorType:\n    a: int = f()\n    def m(self): return g\n"
                "@dataclass\nclass Other:\n    a: int = f()\ndef f(): pass\ndef g(): pass\n",
    "m.py": "from abc import ABC\nimport threading\nfrom .errors import E\nfrom .other import Bare\n"
            + "".join(f"class {name}({bases}):\n    def m(self): return used\n" for name, bases in (
                ("Plain", ""), ("Known", "ABC, object"), ("Child", "Plain"), ("Built", "dict"), ("Thread", "threading.Thread"),
                ("Grand", "Built"), ("Made", "make()"), ("Round", "Trip"), ("Trip", "Round"), ("Err", "E"), ("Alias", "Name"),
                ("Meta", "Plain, metaclass=M"), ("Far", "Bare")))
            + "Name = Plain\ndef used(): pass\ndef make(): pass\n",
    "other.py": "class Bare: pass\n",
}
SLICED = {"Plain": True, "Known": True, "Child": True, "Built": False, "Thread": False, "Grand": False, "Made": False, "Round": False,
          "Trip": False, "Err": True, "Alias": True, "Meta": False, "Far": True}
"""Class -> whether its methods count by their names alone."""


def members(rng: np.random.Generator) -> Measured:
    """A method is reached where its name is said, or with its class where something outside may call it; tables, errors, shapes."""
    checks = Checks()
    with folder() as at:
        package = Package(write_package(at / "copy", MEMBERS), "mini")
        used = ("def", "mini.m", "used")
        for name, sliced in SLICED.items():
            roots = [("def", "mini.m", name)]
            silent, said = package.closure(roots)[0], package.closure(roots, frozenset({".m"}))[0]
            text = package.closure(roots, frozenset({"'m"}))[0]
            checks.that((used in silent, used in said, used in text) == (not sliced, True, True), f"{name}: {used in silent}")
        for roots, words, wanted in (
            ([("def", "mini.component", "KINDS")], {"'a"}, set()),
            ([("def", "mini.config", "FAMILIES")], {"'a"}, {("def", "mini.config", "make")}),
            ([("def", "mini.errors", "F")], {".m"}, {("def", "mini.errors", "E")}),
            ([("def", "mini.types", "TensorType")], {".a", ".m"}, {("def", "mini.types", "SHAPE"), ("def", "mini.types", "g")}),
            ([("def", "mini.types", "Other")], {".a"}, {("def", "mini.types", "f")}), ([("def", "mini.types", "Other")], {".b"}, set()),
        ):
            found = {t for t in package.closure(roots, frozenset(words))[0] if t[0] != "text"} - {*roots}
            checks.that(found == wanted, f"{roots[0][2]} where {words} are said reaches {found}, not {wanted}")
        kinds = [("def", "mini.component", "KINDS")]
        hashes = [package.hash(kinds, frozenset(words)) for words in ((), ("'a",), ("'b",), ("'a", "'b"), (".a",), ("'c",))]
        checks.that(len({*hashes[:4]}) == 4 and hashes[4] == hashes[1] and hashes[5] == hashes[0], "entries of a table")
        filled = package.hash([("def", "mini.config", "SCHEDULES")], frozenset())
        checks.that(filled == package.hash([("def", "mini.config", "SCHEDULES")], frozenset({"'a"})), "a table that is filled later")
        two = [("def", "mini.m", "used"), ("def", "mini.m", "make")]
        checks.that(package.hash(two) != package.hash(two[::-1]) != package.hash([*two, two[0]]) != package.hash(two), "order of roots")
    return checks.measured()
