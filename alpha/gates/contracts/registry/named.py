"""Members count by name: methods, fields and entries of tables where their names are said; what errors say never does. Floor 7."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import digest_of, folder, write_package
from alpha.registry.package import Package

MEMBERS: Mapping[str, str] = {
    "component.py": "from dataclasses import dataclass\n\nSHAPE = 1\nKINDS = ('kernel', 'pass')\n\n\n"
                    "@dataclass(frozen=True, kw_only=True)\nclass Component:\n    id: str\n    op: str = ''\n\n"
                    "    def known(self):\n        return self.op in KINDS\n\n    def spare(self):\n        return 1\n",
    "errors.py": "class Base(Exception):\n    def __init__(self, what, **more):\n        super().__init__(what)\n\n\n"
                 "class ShapeError(Base):\n    code = 2\n",
    "pool.py": "import threading\n\n\nclass Pool:\n    size: int = 1\n\n    def run(self):\n        return helper()\n\n"
               "    def other(self):\n        return 5\n\n    def __len__(self):\n        return self.size\n\n\n"
               "class Helper(threading.Thread):\n    def run(self):\n        return 1\n\n"
               "    def called_by_name(self):\n        return 1\n\n\n"
               "def helper():\n    return 9\n",
    "rows.py": "from dataclasses import dataclass\n\n\n@dataclass\nclass Row:\n    first: int = 1\n    second: int = 2\n",
    "main.py": "from mini.component import Component\nfrom mini.errors import ShapeError\n"
               "from mini.pool import Helper, Pool\nfrom mini.rows import Row\n\n\ndef expect(good, what, came):\n    if not good:\n"
               "        raise ShapeError(f'{what}, not {came}', do='mend it')\n\n\ndef root(c: Component, pool: Pool, name='pass'):\n"
               "    expect(c.known(), 'a kind that is known', c.op)\n    Helper().start()\n    return name, pool.run(), Row().second\n",
}


def _altered(file: str, old: str, new: str) -> dict[str, str]:
    assert MEMBERS[file].count(old) == 1, (file, old)
    return {**MEMBERS, file: MEMBERS[file].replace(old, new)}


def by_name(rng: np.random.Generator) -> Measured:
    """Methods, fields and entries of tables count where their names are mentioned; what errors say never does."""
    checks, n = Checks(), int(rng.integers(10, 1 << 20))
    was = digest_of(MEMBERS)
    same = {
        "a method that is not mentioned": _altered("pool.py", "return 5", f"return {n}"),
        "a new method": _altered("pool.py", "    def other", f"    def more(self):\n        return {n}\n\n    def other"),
        "a method of a plain class": _altered("component.py", "return 1\n", f"return {n}\n"),
        "a field with a default": _altered("component.py", "    op: str = ''\n", f"    op: str = ''\n    run: int = {n}\n"),
        "a field at the end that is not mentioned": _altered("rows.py", "second: int = 2\n", f"second: int = 2\n    third: int = {n}\n"),
        "a kind": _altered("component.py", "'pass')", "'pass', 'collective')"),
        "what an error says": _altered("main.py", "do='mend it'", f"do='mend {n} of it', came=c"),
        "what a refusal says": _altered("main.py", "'a kind that is known'", f"'one of {n} kinds'"),
        "how errors are written": _altered("errors.py", "super().__init__(what)", f"super().__init__(what, {n})"),
    }
    for what, files in same.items():
        checks.that(digest_of(files) == was, what)
    other = {
        "a method that is mentioned": _altered("pool.py", "return helper()", "return helper() + 1"),
        "a callee of a method": _altered("pool.py", "return 9", f"return {n}"),
        "a method with underscores": _altered("pool.py", "return self.size", "return self.size + 1"),
        "a method of a class with a base from outside": _altered("pool.py", "def called_by_name(self):\n        return 1",
                                                                 f"def called_by_name(self):\n        return {n}"),
        "a method of a data class": _altered("component.py", "self.op in KINDS", "self.op not in KINDS"),
        "the shape": _altered("component.py", "SHAPE = 1", f"SHAPE = {n}"),
        "a kind that is mentioned": _altered("component.py", "'pass')", "'passes')"),
        "the default of a field that is mentioned": _altered("rows.py", "second: int = 2", f"second: int = {n}"),
        "a field before one that is mentioned": _altered("rows.py", "    first", f"    zeroth: int = {n}\n    first"),
        "the condition of a refusal": _altered("main.py", "expect(c.known(),", "expect(not c.known(),"),
        "the class of an error": _altered("main.py", "raise ShapeError(", "raise ValueError("),
        "the base of an error": _altered("errors.py", "class ShapeError(Base)", "class ShapeError(ValueError)"),
        "what an error does": _altered("main.py", "do='mend it'", "do=came.pop()"),
    }
    for what, files in other.items():
        checks.that(digest_of(files) != was, what)
    with folder() as at:
        package = Package(write_package(at / "p", MEMBERS), "mini")
        pool = package.hash(package.roots("mini.pool:Pool"))
        more = Package(write_package(at / "q", _altered("pool.py", "return 5", f"return {n}")), "mini")
        checks.that(pool != more.hash(more.roots("mini.pool:Pool")), "a class that is asked for leaves out a method")
        folded = write_package(at / "r", _altered("pool.py", "return 5", "return helper()"))
        roots = frozenset({("def", "mini.pool", "Pool")})
        alone, taken_up = (Package(folded, "mini").closure(roots, frozenset({".other"}), among) for among in (frozenset(), roots))
        checks.that(alone == taken_up and ("def", "mini.pool", "helper") in alone[0], "a walk that is taken up misses a word heard later")
    return checks.measured()
