"""What is read of a source file: what its names are bound to and refer to, what of it counts and what does not, in tables of small texts
whose answers are written down; no cache stands between. Floor 7."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.registry.syntax import Definition, Import, Reference, Source, around, meaning, read, same_meaning

REFERS: Sequence[tuple[str, str]] = (
    ("def f(a, /, b, *c, d, e=D, **g):\n    return a, b, c, d, e, g, h", "D h"),
    ("def f(a: T, *b: U.V, c: 'W' = D, **d: X) -> 'R.S':\n    return a", "T W U.V X D R.S"),
    ("def f(a: 'no annotation!', b: 3):\n    return 'text'", ""),
    ("@dec.a(one)\ndef f():\n    return two", "dec.a one two"),
    ("async def f():\n    return await g(h)", "g h"),
    ("f = lambda a, *b, c=d: a + b + c + e", "f d e"),
    ("def f():\n    return [x for x in xs if y], x", "xs y x"),
    ("def f():\n    return {x for x in a.b}, {k: v for k, v in m if k}, (z for z in zs), k", "a.b m zs k"),
    ("def f():\n    return [x for x in x for y in x]", "x"),
    ("def f():\n    [y := g(x) for x in xs]\n    return y", "xs g"),
    ("def f():\n    global n\n    n = 1\n    return n", "n"),
    ("def f():\n    def g():\n        nonlocal n\n        n = m\n    n = 1\n    return g", "m"),
    ("def f():\n    try:\n        a\n    except E as e:\n        return e", "a E"),
    ("def f(a):\n    match a:\n        case {'k': [1, *b], **more} | C(b, more) as whole:\n            return b, more, whole", "C"),
    ("def f(a):\n    match a:\n        case {**more}:\n            return more, less", "less"),
    ("def f():\n    from mini.c import n\n    def g():\n        nonlocal n\n        n = n.a\n    return g", "n=mini.c:n n.a=mini.c:n"),
    ("def f():\n    with g() as (a, b), h as c.d:\n        return a, b", "g h c.d"),
    ("def f():\n    for a in b:\n        c = a\n    del d\n    return c, d", "b"),
    ("def f():\n    a: 'T' = g\n    b: V\n    return a, b", "T g V"),
    ("def f():\n    return g(1).h.k[l].m", "g l"),
    ("def f():\n    class g(B, metaclass=M):\n        n = o\n        def h(self):\n            return n, g\n    return g", "B M o n"),
    ("class f(B):\n    n = 1\n    m = n\n    def __call__(self):\n        return n, m", "B n m"),
    ("def f():\n    lambda x: (x, y)\n    return x", "y x"),
    ("def f():\n    return import_module(g), import_module(), import_module(3)", "import_module g"),
    ("def f():\n    import os, mini.a.b\n    from mini.c import d as e, g\n    return os.path, mini.a, e.h, i",
     "os.path=os: mini.a=mini: e.h=mini.c:d i"),
    ("def f():\n    from . import a\n    from ..b import c\n    return a, c", "a=.:a c=..b:c"),
    ("def f():\n    return import_module('mini.late').a, m.import_module('os')", "=mini.late: import_module =os: m.import_module"),
)
"""A text that binds f -> what f refers to: names in order, each once; behind = the imports inside f that bind it, module:name."""


def _reference(text: str) -> Reference:
    name, equals, bound = text.partition("=")
    if not equals:
        return Reference(tuple(name.split(".")))
    module, _, symbol = bound.partition(":")
    plain = module.lstrip(".")
    return Reference(tuple(name.split(".")), (Import(plain, symbol or None, len(module) - len(plain)),))


def references(rng: np.random.Generator) -> Measured:
    """What is local and what is not, by every way in which Python binds a name; the attributes and texts that are said."""
    checks = Checks()
    for text, refers in REFERS:
        (found,) = Source(text, "mini").definitions("f")
        wanted = tuple(_reference(one) for one in refers.split(" ") if one)
        found_ones = tuple(r for r in found.references if r.chain != ("f",) or "f = " not in text)
        wanted = tuple(r for r in wanted if r.chain != ("f",) or "f = " not in text)
        checks.that(found_ones == wanted, f"{text!r} refers to {found_ones}, not {wanted}")
    (found,) = Source("def f(a):\n    return a.b.c @ d('e', f'g{h}', b'i'), {'j k': 1}", "mini").definitions("f")
    checks.that((found.names, found.strings) == ({"b", "c", "@"}, {"e", "g", "j k"}), f"it says {found.names} {found.strings}")
    two = Source("f = 1\nif a:\n    f = b\n", "mini")
    checks.that(len(two.definitions("f")) == 2 and two.definitions("g") == (), "bound twice")
    checks.that(two.definitions("f") is two.definitions("f"), "definitions are made twice")
    return checks.measured()


MODULE = """
import os, a.b, a.c as d
from .near import *
from . import near as n
from ..far import g as h, i
from mini.x import i
def f(): pass
async def af(): pass
class C: pass
T = {}
T["x"] = f
T.update(z=C)
T["y"] = U = 1
for k in T: pass
"text that stands alone, T and f"
V: int = 3
W: int
with open(T) as w: X = 1
if __name__ == "__main__":
    main = T
"""


def bindings(rng: np.random.Generator) -> Measured:
    """Module-level names with the statements that belong to each; imports and star imports by where they come from."""
    checks = Checks()
    source = Source(MODULE, "mini")
    counts = {name: len(found) for name, found in source.statements.items()}
    wanted = {"f": 2, "af": 1, "C": 2, "T": 4, "U": 1, "k": 1, "V": 1, "W": 1, "w": 1, "X": 1}
    checks.that(counts == wanted, f"statements: {counts}")
    bound = {"os": [Import("os", None)], "a": [Import("a", None)], "d": [Import("a.c", None)], "n": [Import("", "near", 1)],
             "h": [Import("far", "g", 2)], "i": [Import("far", "i", 2), Import("mini.x", "i")]}
    checks.that(source.imports == bound and source.stars == [Import("near", "*", 1)], f"imports: {source.imports} {source.stars}")
    told = ("a source file cannot be parsed", "line 2: invalid syntax", "Python", "mend the file")
    checks.tells(InputError, told, lambda: read("a = 1\nb = = 2\n", "mini"))
    checks.that(read(MODULE, "mini") is read(MODULE, "mini") is not read(MODULE, "other"), "a text is read twice")
    return checks.measured()


TABLES = """
A = {"k": {"x": one, "y": two, **more}, "l": f(3), "k": {"x": three}}
B = {"k": 1}
B = {"k": 2}
C = {"k": 1, name: 2}
D: dict = {"k": 4, "l": {"m": 5}}
E = ("a", "b")
F = {"a", "b"}
G = ["a", 1]
H = ()
I = frozenset({"a"})
J = {}
J["k"] = 1
K = {1: "a"}
L: int
"""
ENTRIES: Mapping[tuple[str, ...], str] = {
    ("A", "k"): "{'x': three}", ("A", "k", "x"): "three", ("A", "k", "x", "deeper"): "three", ("A", "k", "z"): "{'x': three}",
    ("A", "l"): "f(3)", ("D", "k"): "4", ("D", "l", "m"): "5", ("D", "l"): "{'m': 5}",
    ("A", "z"): "", ("A",): "", ("B", "k"): "", ("C", "k"): "", ("E", "a"): "", ("J", "k"): "", ("K", "1"): "", ("L", "k"): "",
    ("none", "k"): "",
}
"""Table and keys -> the value that stands there, as far as it is written out; '' where the table does not say."""


def entries(rng: np.random.Generator) -> Measured:
    """Entries of tables by their keys, as deep as they are written out; tables of names with their members; lambdas by their line."""
    checks = Checks()
    source = Source(TABLES, "mini")
    for (name, *keys), value in ENTRIES.items():
        found = source.entry(name, *keys)
        wanted = _value(value) if value else None
        checks.that(found == wanted, f"{name} {keys}: {found}, not {value!r}")
    for name, kind, members in (("E", "Tuple", ("'a'", "'b'")), ("F", "Set", ("'a'", "'b'")), ("G", "", ()), ("H", "", ()), ("I", "", ()),
                                ("J", "", ()), ("K", "", ()), ("L", "", ()), ("B", "", ()), ("C", "", ()), ("none", "", ()),
                                ("D", "Dict", ("4", "{'m': 5}"))):
        table = source.table(name)
        names = ("k", "l") if name == "D" else ("a", "b")
        checks.that((table is None) == (kind == ""), f"{name} is {'no' if table is None else 'a'} table")
        if table is not None:
            made = tuple((key, _value(value)) for key, value in zip(names, members))
            checks.that(table == Definition(f"table {kind}", (), frozenset(), frozenset(), made), f"the table {name}: {table}")
    text = "a = lambda: x\ndef f(y):\n    return lambda: (y, z), lambda: w\nclass C:\n    n = 1\n    g = [lambda: n for n in m]\n"
    lambdas = Source(text, "mini")
    said = {line: [[r.chain for r in d.references] for d in lambdas.lambdas(line)] for line in (1, 3, 6, 2)}
    alone: dict[int, list[list[tuple[str, ...]]]] = {1: [[("x",)]], 3: [[("z",)], [("w",)]], 6: [[]]}
    checks.that(said == {**alone, 2: [*alone[1], *alone[3], *alone[6]]}, f"lambdas by line: {said}")
    checks.that(lambdas.lambdas(3) is lambdas.lambdas(3), "lambdas are looked for twice")
    return checks.measured()


def _value(text: str) -> Definition:
    """How a value that stands alone is defined."""
    table = Source(f"f = {{'k': {text}}}", "mini").table("f")
    assert table is not None
    return table.members[0][1]


CLASS = """
@dataclass{form}
class f(B, m.C[int]{more}):
    "Doc."
    one: int = 1
    two: T
    three = property(get)
    def get(self): return a
    @property
    def p(self): return b
    @odd
    def q(self): return c
    async def s(self): return d
    def __len__(self): return e
"""


def classes(rng: np.random.Generator) -> Measured:
    """Members of classes, their fields and bases: which count by name, and which with the class."""
    checks = Checks()

    def of(form: str = "", more: str = "", decorator: str = "@dataclass") -> Definition:
        (found,) = Source(CLASS.format(form=form, more=more).replace("@dataclass", decorator), "mini").definitions("f")
        return found

    plain = of()
    members = {"one": [], "two": [("T",)], "p": [("property",), ("b",)], "s": [("d",)]}
    for form in ("", "(frozen=True)", "(kw_only=True)"):
        found = of(form)
        refers = {name: [r.chain for r in member.references] for name, member in found.members}
        checks.that(refers == {**members, "one": refers["one"]} and found.fields == ("one", "two"), f"{form}: {refers} {found.fields}")
        bare = [dict(of("(kw_only=True)").members)[name].text for name in found.fields]
        at = ["" if form == "(kw_only=True)" else str(i) for i in (1, 2)]
        checks.that([dict(found.members)[n].text for n in found.fields] == [a + b for a, b in zip(at, bare)], f"places of fields, {form}")
        checks.that(found.bases == (Reference(("B",)), Reference(("m", "C"))), f"bases: {found.bases}")
    core = {r.chain for r in plain.references}
    checks.that(core == {("dataclass",), ("B",), ("m", "C"), ("int",), ("property",), ("a",), ("odd",), ("c",), ("e",)}, f"core: {core}")
    whole = plain.whole
    assert whole is not None
    checks.that({r.chain for r in whole.references} == core | {("T",), ("b",), ("d",)}, f"whole: {whole.references}")
    other = of(decorator="@other.thing")
    checks.that(other.fields == () and [n for n, _ in other.members] == ["p", "s"], f"no data class: {[n for n, _ in other.members]}")
    called = of(decorator="@a.dataclass")
    checks.that(called.fields == ("one", "two"), "a decorator by its last name")
    for more in (", metaclass=M", ", *bases", ", call()", ", a[0][1]"):
        checks.that(of(more=more).bases is None, f"bases{more} are plain names")
    headers = [Source(CLASS.format(form="", more="").replace("class f", f"class {n}").replace("one: int = 1", f"one: int = {i}"), "mini")
               .header(n) for n, i in (("f", 1), ("f", 2), ("g", 1))]
    checks.that(headers[0] == headers[1] != headers[2], "a header is of name and bases alone")
    checks.that([r.chain for r in headers[0][0].references] == [("dataclass",), ("B",), ("m", "C"), ("int",)], f"{headers[0]}")
    other_headers = [Source(text, "mini").header("f")[0].text for text in ("f = 1", "f = 2", "f = 1  # one")]
    checks.that(other_headers[0] == other_headers[2] != other_headers[1] and Source("f = 1", "mini").header("g") == (), "of no class")
    return checks.measured()


SAME: Sequence[tuple[str, ...]] = (
    ("x = f'ab{c}d'", "x = f'a' f'b{c}' 'd'", "x = 'a' f'b' f'{c}d'", "x = f'ab{c}' 'd' ''"),
    ("import os", "import mini.a, os", "import os, mini", "import mini.b\n    import os"),
    ("from os import a", "from os import a\n    from .c import d"),
    ("return 1", "from . import a\n    return 1", "from mini.a import b as c\n    return 1", "import mini\n    return 1",
     "'text'\n    return 1", "pass\n    return 1", "from .. import d\n    return 1"),
    ("raise ValueError('a', b)", "raise ValueError('c', len(d))"), ("raise Thing(x, 'a')", "raise Thing(x, 'b')", "raise Thing(x, f'{y}')"),
    ("raise m.OwnError(a, came=b)", "raise m.OwnError([c for c in d], came=e.f)", "raise m.OwnError(str(a).strip(), came={b: -c})"),
    ("made = OwnError('a')", "made = OwnError(b[0] if c else d)"), ("expect(a, 'b', c)", "expect(a, f'{d}', c)"),
    ("raise Thing(a='b')", "raise Thing(a='c')"), ("raise OwnError(sorted(max(a, key=b)))", "raise OwnError('a')"),
)
"""Bodies of a function that mean the same."""
OTHER: Sequence[tuple[str, ...]] = (
    ("x = f'ab{c}d'", "x = f'ab{c}e'", "x = f'ab{d}d'", "x = f'ab{c!r}d'", "x = f'ab{c:>3}d'", "x = f'{c}abd'", "x = 'ab{c}d'"),
    ("import os", "import os as o", "import sys", "import os, sys", "from os import a", "from os import b", "import minimal"),
    ("raise Thing(x, 'a')", "raise Thing(y, 'a')", "raise Other(x, 'a')", "raise Thing", "raise Thing(x, 'a') from x", "Thing(x, 'a')"),
    ("OwnError(a)", "OwnError(a := b)", "OwnError(lambda: a)", "OwnError(a.pop())", "OwnError(a.send())", "OwnError(run(a))",
     "OwnError(**a)", "OwnError(**b)", "OwnError(len(run(a)))", "OwnError(run().strip())", "OwnError((yield))",
     "OwnError(str(a, key=run(b)))", "OwnError((yield from a))"),
    ("expect(a, 'b')", "expect(c, 'b')", "expect('b', 'b')", "expect(a, b)", "expect(a, c)", "expects(a, 'b')", "expects(a, 'c')"),
    ("raise Thing(a=b)", "raise Thing(a=c)", "raise Thing(b=b)"), ("Thing(a=1)", "Thing(a=2)", "Thing(b=1)", "Thing(**{'a': 1})"),
    ("x = 1", "x = 1.0", "x = True", "x = '1'", "x = 1j", "x = b'1'", "x: int = 1"),
    ("x = a[b:]", "x = a[:b]", "x = a[::b]", "x = a[b]", "x = a[b,]"),
    ("return [x]", "return (x,)", "return {x}", "return", "return x", "return [x, x]"),
)
"""Bodies of a function of which each means something else."""


class _Cut(ast.NodeTransformer):
    """Cuts texts inside an f-string into letters, as no Python does, and some as small."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        """With nothing between two of them, too."""
        self.generic_visit(node)
        values: list[ast.expr] = [ast.Constant("")]
        for x in node.values:
            values += [ast.Constant(c) for c in str(x.value)] if isinstance(x, ast.Constant) else [x, ast.Constant("")]
        return ast.JoinedStr(values)


def counts(rng: np.random.Generator) -> Measured:
    """What of a function counts, and what does not: layout, imports of the package, what errors say."""
    checks = Checks()

    def of(body: str) -> str:
        (found,) = Source(f"def f():\n    {body}\n", "mini").definitions("f")
        return found.text

    for bodies in SAME:
        checks.that(len({of(body) for body in bodies}) == 1, f"{bodies[0]!r}: {[b for b in bodies if of(b) != of(bodies[0])]} count")
    for bodies in OTHER:
        made = [of(body) for body in bodies]
        alike = [body for body in bodies if made.count(of(body)) > 1]
        checks.that(not alike, f"{alike} are one")
    for body in ("x = f'ab{c}d'", "x = f'{c}'", "x = f'{c:ab{d}}{e}fg'"):
        was, real = of(body), ast.parse
        with mock.patch.object(ast, "parse", lambda text, real=real: _Cut().visit(real(text))):
            checks.that(of(body) == was, f"{body} under a Python that cuts it elsewhere")
    files = "import mini\nA = 1  # one\n\n\ndef f():\n    'Doc.'\n    return A\n"
    for old, new, same in (("# one", "# two", True), ("'Doc.'", "'Other.'", True), ("\n\n\n", "\n", True),
                           ("import mini", "import other", False), ("A = 1", "A = 2", False)):
        other = files.replace(old, new)
        means = same_meaning(files, other, "mini"), meaning(files) == meaning(other)
        checks.that(other != files and means == (same, same), f"{old!r} for {new!r}: {means}")
    return checks.measured()


def parts(rng: np.random.Generator) -> Measured:
    """The part of a file around drawn places: the statements that they touch with the blanks around, and nothing of any other."""
    checks = Checks()
    blocks = ("import a", "@dec\n@dec2\ndef f():\n    return 1", "# alone", "A = (1,\n     2)", "B = 1; C = 2",
              "class D:\n    x = 1\n\n    y = 2", "")
    for _ in range(40):
        text = "\n".join(blocks[i] for i in rng.integers(len(blocks), size=int(rng.integers(1, 8)))) + ("\n" if rng.random() < 0.8 else "")
        start, end = sorted(int(x) for x in rng.integers(0, max(1, len(text)), 2))
        low, high = around(text, start, end)
        first, last = text.count("\n", 0, start), text.count("\n", 0, max(start, end - 1))
        lines, owner = text.split("\n"), dict[int, int]()
        for n, s in enumerate(ast.parse(text).body):
            for line in range(min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", ()))]) - 1, s.end_lineno or 0):
                owner[line] = n
        begin, stop = first, last
        while begin > 0 and (owner.get(begin - 1) is None or owner[begin - 1] in {owner.get(i) for i in range(begin, stop + 1)}):
            begin -= 1
        while stop + 1 < len(lines) and (owner.get(stop + 1) is None or owner[stop + 1] in {owner.get(i) for i in range(begin, stop + 1)}):
            stop += 1
        wanted = "\n".join(lines[begin : stop + 1]) + ("\n" if stop + 1 < len(lines) else "")
        checks.that(text[low:high] == wanted, f"around {start} to {end} of {text!r}: {text[low:high]!r}, not {wanted!r}")
    return checks.measured()
