"""One source file as a set of module-level definitions: a stable text of each, and the names that it refers to. Floor 3.

The text of a definition is its syntax tree without docstrings, comments, line numbers, `pass`, imports from the package itself and
what errors say, so that none of these enters a digest. It is written field by field here and not by `ast.dump`, whose output changes
between Python versions: evidence made under one version must be current under another.

Methods and fields of a class, and entries of a table of names, are *members*: each has a text of its own, which counts only where the
code that is digested says its name.
"""

from __future__ import annotations

import ast
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from alpha.errors import InputError

_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind", "type_ignores"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

REFUSALS = frozenset({"expect"})
"""Functions that raise unless their first argument holds; texts among the others are what the error says."""

_PLAIN_CALLS = frozenset({"len", "str", "repr", "sorted", "type", "min", "max", "sum", "round", "hex", "list", "tuple", "set", "dict",
                          "map", "int", "float", "abs"})
"""Builtins that may stand in a text: they do nothing."""

_PLAIN_METHODS = frozenset({"join", "strip", "upper", "lower", "items", "keys", "values", "hex", "get", "format", "replace", "partition"})

_PLAIN_DECORATORS = frozenset({"property", "staticmethod", "classmethod", "cached_property", "cache", "lru_cache", "abstractmethod",
                               "contextmanager", "overload", "setter"})
"""Decorators under which a method is found by its name alone."""


@dataclass(frozen=True)
class Import:
    """One imported name. `symbol` None: the name is the module itself (for `import a.b`, the first part). `level`: leading dots."""

    module: str
    symbol: str | None
    level: int = 0


@dataclass(frozen=True)
class Reference:
    """A name as written, with its attributes: `np.add.reduce` is ('np', 'add', 'reduce').

    `through`: function-level imports that bind the first part (then it is looked up there and not in the module).
    """

    chain: tuple[str, ...]
    through: tuple[Import, ...] = ()


@dataclass(frozen=True)
class Definition:
    """`text`: sha256 of the stable text. `references`: names that are not local, in order of appearance, each once.
    `names`: every attribute, and '@' where a matrix product is written. `strings`: every text constant.

    `members`: methods and fields of a class, entries of a table; `text` and the rest are then without them, `whole` is with them.
    `bases`: of a class, None where one is no plain name; `fields`: those among its members.
    """

    text: str
    references: tuple[Reference, ...]
    names: frozenset[str]
    strings: frozenset[str]
    members: tuple[tuple[str, Definition], ...] = ()
    whole: Definition | None = None
    bases: tuple[Reference, ...] | None = ()
    fields: tuple[str, ...] = ()


class Source:
    """The module-level bindings of one file. `package`: name of the package whose imports are resolved and not hashed."""

    def __init__(self, text: str, package: str) -> None:
        self.package = package
        self.tree = ast.parse(text)
        self.statements: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, list[Import]] = {}
        self.stars: list[Import] = []
        self._definitions: dict[str, tuple[Definition, ...]] = {}
        self._lambdas: dict[int, tuple[Definition, ...]] = {}
        self._error_texts = _error_texts(self.tree)
        late: list[ast.stmt] = []
        for statement in self.tree.body:
            if _is_main_guard(statement):
                continue
            if isinstance(statement, ast.Expr) or _mutated(statement):
                late.append(statement)
            self._bind(statement)
        for statement in late:  # TABLE["x"] = f and TABLE.update(...) belong to the names that they mention
            for name in sorted({n.id for n in ast.walk(statement) if isinstance(n, ast.Name)} & self.statements.keys()):
                if statement not in self.statements[name]:
                    self.statements[name].append(statement)

    def _bind(self, statement: ast.stmt) -> None:
        names, imports, stars = _bound([statement])
        for name in names:
            self.statements.setdefault(name, []).append(statement)
        for name, targets in imports.items():
            self.imports.setdefault(name, []).extend(targets)
        self.stars.extend(stars)

    def definitions(self, name: str) -> tuple[Definition, ...]:
        """One Definition per statement that binds `name`; empty when there is none."""
        if name not in self._definitions:
            self._definitions[name] = tuple(self._define(s, ()) for s in self.statements.get(name, ()))
        return self._definitions[name]

    def _assigned(self, name: str) -> ast.AST | None:
        """What is assigned to a name that is bound once and filled nowhere."""
        bound = self.statements.get(name, [])
        return getattr(bound[0], "value", None) if len(bound) == 1 and isinstance(bound[0], (ast.Assign, ast.AnnAssign)) else None

    def entry(self, name: str, *keys: str) -> Definition | None:
        """The value under these keys of a table that is written as one (nested) dict of constant keys; as deep as it is written so.

        None when the name is bound otherwise, filled later, or lacks the first key.
        """
        node, entry = self._assigned(name), None
        for key in keys:
            if not isinstance(node, ast.Dict):
                break
            written = [(k.value, v) for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant)]
            found = [v for k, v in written if k == key] if len(written) == len(node.keys) else []
            if not found:
                break
            node = entry = found[-1]
        return None if entry is None else self._define(entry, ())

    def lambdas(self, line: int) -> tuple[Definition, ...]:
        """Every lambda that begins on `line` (one cannot tell several of one line apart); all of the file when none does, which
        happens if the file was edited after it was imported."""
        if line not in self._lambdas:
            here = [x for x in self._every_lambda if x[0].lineno == line]
            self._lambdas[line] = tuple(self._define(node, scopes) for node, scopes in here or self._every_lambda)
        return self._lambdas[line]

    @cached_property
    def _every_lambda(self) -> list[tuple[ast.Lambda, tuple[ast.AST, ...]]]:
        return list(_lambdas_with_scopes(self.tree, ()))

    def _define(self, node: ast.AST, scopes: tuple[ast.AST, ...]) -> Definition:
        if isinstance(node, ast.ClassDef):
            return self._define_class(node, scopes)
        return self._written(node, scopes, self._error_texts)

    def _written(self, node: ast.AST, scopes: tuple[ast.AST, ...], without: frozenset[ast.AST]) -> Definition:
        writer, collector = _Writer(self.package, without), _References(scopes, without)
        writer.write(node)
        collector.visit(node)
        return Definition(writer.hash(), tuple(collector.found), frozenset(writer.names), frozenset(writer.strings))

    def _define_class(self, node: ast.ClassDef, scopes: tuple[ast.AST, ...]) -> Definition:
        members: dict[ast.stmt, tuple[str, str]] = {}
        record = next((d for d in node.decorator_list if _called(d) == "dataclass"), None)
        ordered = isinstance(record, ast.Call) and any(k.arg == "kw_only" for k in record.keywords)
        mentioned = {n.id for s in node.body if isinstance(s, (ast.Assign, ast.Expr)) for n in ast.walk(s) if isinstance(n, ast.Name)}
        fields: list[str] = []
        for s in node.body:
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef)):
                known = all(_called(d) in _PLAIN_DECORATORS for d in s.decorator_list)
                if known and s.name not in mentioned and not (s.name.startswith("__") and s.name.endswith("__")):
                    members[s] = s.name, ""
            elif record is not None and isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name):
                fields.append(s.target.id)
                members[s] = s.target.id, "" if ordered else str(len(fields))  # at another place it is another argument
        inner = (*scopes, node)
        found = []
        for s, (name, place) in members.items():
            made = self._written(s, inner, self._error_texts)
            found.append((name, replace(made, text=place + made.text)))
        bases = [_chain(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases]
        plain = not node.keywords and all(bases)
        return replace(self._written(node, scopes, self._error_texts | members.keys()), members=tuple(found), fields=tuple(fields),
                       whole=self._written(node, scopes, self._error_texts),
                       bases=tuple(Reference(b) for b in bases) if plain else None)

    def header(self, name: str) -> tuple[Definition, ...]:
        """Classes by name and bases alone, all else as it stands."""
        found = []
        for s in self.statements.get(name, ()):
            body: frozenset[ast.AST] = self._error_texts | frozenset(s.body) if isinstance(s, ast.ClassDef) else self._error_texts
            found.append(self._written(s, (), body))
        return tuple(found)

    def table(self, name: str) -> Definition | None:
        """A table of names (a dict, tuple, list or set whose keys are text constants) with its entries as members; None if it is none."""
        node = self._assigned(name)
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values))
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            pairs = [(e, e) for e in node.elts]
        keys = [k.value for k, _ in pairs if isinstance(k, ast.Constant) and isinstance(k.value, str)]
        if not pairs or len(keys) != len(pairs):
            return None
        members = [(k, self._define(v, ())) for k, (_, v) in zip(keys, pairs)]
        return Definition(f"table {type(node).__name__}", (), frozenset(), frozenset(), tuple(members))


@lru_cache(maxsize=2048)
def read(text: str, package: str) -> Source:
    """The Source of a file's text, cached by content; InputError when it is not Python."""
    try:
        return Source(text, package)
    except SyntaxError as error:
        raise InputError("a source file cannot be parsed", came=f"line {error.lineno}: {error.msg}", expected="Python",
                         do="mend the file") from error


def same_meaning(a: str, b: str, package: str = "alpha") -> bool:
    """Whether two files differ in comments, docstrings and layout only."""
    return meaning(a, package) == meaning(b, package)


def meaning(text: str, package: str = "alpha") -> str:
    """Hash of a file without comments, docstrings and layout."""
    writer = _Writer("")
    writer.write(read(text, package).tree)
    return writer.hash()


def around(text: str, start: int, end: int) -> tuple[int, int]:
    """The part of a file, as offsets, made of the top-level statements that text[start:end] touches and the blanks around them.

    A change inside it can be parsed and compared without the rest of the file.
    """
    lines = _line_starts(text)
    first, last = bisect_right(lines, start), bisect_right(lines, max(start, end - 1))
    low, high = 1, len(lines)
    for s in read(text, "").tree.body:
        head = min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", ()))])
        assert s.end_lineno is not None, "what was parsed has an end"
        if s.end_lineno < first:
            low = s.end_lineno + 1
        elif head > last:
            high = head - 1
            break
    return lines[low - 1], lines[high] if high < len(lines) else len(text)


@lru_cache(maxsize=256)
def _line_starts(text: str) -> tuple[int, ...]:
    return (0, *(i + 1 for i, c in enumerate(text) if c == "\n"))


# The stable text -------------------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes a tree as text, `package` imports (unless it is empty) and the nodes of `without` left out, and notes attributes, products
    and text constants."""

    def __init__(self, package: str, without: frozenset[ast.AST] = frozenset()) -> None:
        self.package = package
        self.without = without
        self.out: list[str] = []
        self.names: set[str] = set()
        self.strings: set[str] = set()

    def hash(self) -> str:
        return hashlib.sha256("".join(self.out).encode("utf-8", "surrogatepass")).hexdigest()

    def write(self, node: object) -> None:
        out = self.out
        if isinstance(node, ast.AST) and node in self.without:
            out.append("-")
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                self.strings.add(node.value)
            out.append(f"({type(node.value).__name__} {node.value!r})")
        elif isinstance(node, ast.JoinedStr):
            out.append("(JoinedStr")
            for value in _merged(node.values):
                self.write(value)
            out.append(")")
        elif isinstance(node, ast.AST):
            if isinstance(node, (ast.Attribute, ast.MatMult)):
                self.names.add(node.attr if isinstance(node, ast.Attribute) else "@")
            out.append("(" + type(node).__name__)
            for field in node._fields:
                if field in _SKIPPED_FIELDS:
                    continue
                part: Any = getattr(node, field, None)
                if isinstance(part, list) and part:
                    if isinstance(part[0], ast.stmt):
                        part = [kept for s in part if s not in self.without and not _is_noise(s)
                                and (kept := _without_package(s, self.package)) is not None]
                    elif isinstance(part[0], ast.keyword):
                        part = [k for k in part if k not in self.without]
                if part is None or part == []:
                    continue
                out.append(" " + field + "=")
                self.write(part)
            out.append(")")
        elif isinstance(node, list):
            out.append("[")
            for element in node:
                self.write(element)
            out.append("]")
        else:
            out.append("~" if node is None else repr(node))


def _called(node: ast.expr) -> str:
    """The last name of what is called or used as a decorator, '' for anything but a name."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _chain(node: ast.expr) -> tuple[str, ...]:
    """`a.b.c` as its names; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _error_texts(tree: ast.AST) -> frozenset[ast.AST]:
    """What errors say and no result can depend on: arguments of what is called ...Error, texts among those of whatever else is raised and
    of a refusal. Only such as do nothing but read."""
    found: set[ast.AST] = set()
    for node in _walk(tree):
        made = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(made, ast.Call):
            continue
        name = _called(made)
        error = name.endswith("Error")
        if not error and not isinstance(node, ast.Raise) and name not in REFUSALS:
            continue
        for x in made.args[name in REFUSALS :]:
            if _is_plain(x) and (error or _is_text(x)):
                found.add(x)
        for k in made.keywords:
            if k.arg is not None and _is_plain(k.value) and (error or _is_text(k.value)):
                found.add(k)
    return frozenset(found)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_plain(node: ast.AST) -> bool:
    """Whether evaluating an expression, or a part of one, does nothing but read."""
    if isinstance(node, (ast.Constant, ast.Name, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)):
        return True
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute) and node.func.attr in _PLAIN_METHODS and _is_plain(node.func.value)
        named = isinstance(node.func, ast.Name) and node.func.id in _PLAIN_CALLS
        return (method or named) and all(_is_plain(x) for x in (*node.args, *(k.value for k in node.keywords)))
    if isinstance(node, (ast.NamedExpr, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)):
        return False
    return all(_is_plain(x) for x in ast.iter_child_nodes(node))


def _is_noise(statement: ast.stmt) -> bool:
    """Docstrings, strings that stand alone, `pass`: without effect."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str))


def _without_package(statement: ast.stmt, package: str) -> ast.stmt | None:
    """The statement, or None or a part of it when it imports from the package: such names are resolved instead."""
    if not package:
        return statement
    if isinstance(statement, ast.ImportFrom):
        return None if statement.level or str(statement.module).split(".")[0] == package else statement
    if isinstance(statement, ast.Import):
        names = [a for a in statement.names if a.name.split(".")[0] != package]
        return ast.Import(names=names) if names else None
    return statement


def _merged(values: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """Parts of an f-string with neighbouring constants joined: Python versions cut them differently."""
    text: str | None = None
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            text = (text or "") + value.value
            continue
        if text:
            yield ast.Constant(text)
        text = None
        yield value
    if text:
        yield ast.Constant(text)


def _children(node: ast.AST) -> list[ast.AST]:
    """As ast.iter_child_nodes, in half the time."""
    found: list[ast.AST] = []
    for name in node._fields:
        part = getattr(node, name, None)
        if isinstance(part, list):
            found += [x for x in part if isinstance(x, ast.AST)]
        elif isinstance(part, ast.AST):
            found.append(part)
    return found


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, in no order that is promised."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack += _children(node)


# What a statement binds ------------------------------------------------------------------------------------------------------------


def _imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Import]]:
    if isinstance(node, ast.Import):
        for a in node.names:
            yield (a.asname, Import(a.name, None)) if a.asname else (a.name.split(".")[0], Import(a.name.split(".")[0], None))
    else:
        for a in node.names:
            yield a.asname or a.name, Import(node.module or "", a.name, node.level)


_BINDING = frozenset((*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Name,
                      ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping))
"""Nodes that bind a name, or have a scope of their own. All others are passed by at once."""


def _bound(body: Iterable[ast.AST]) -> tuple[list[str], dict[str, list[Import]], list[Import]]:
    """Names bound by these nodes in their own scope (nested functions and classes not entered), imports apart, star imports apart."""
    names: dict[str, None] = {}
    imports: dict[str, list[Import]] = {}
    stars: list[Import] = []
    outside: set[str] = set()
    stack = list(body)[::-1]
    while stack:
        node = stack.pop()
        if type(node) not in _BINDING:
            stack.extend(_children(node)[::-1])
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = None
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, _COMPREHENSIONS):  # only `:=` leaves a comprehension
            names.update({n.target.id: None for n in ast.walk(node) if isinstance(n, ast.NamedExpr)})
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, target in _imports_of(node):
                if name == "*":
                    stars.append(target)
                else:
                    imports.setdefault(name, []).append(target)
            continue
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            outside.update(node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names[node.id] = None
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names[node.name] = None
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names[node.rest] = None
        stack.extend(_children(node)[::-1])
    return [n for n in names if n not in outside], imports, stars


def _mutated(statement: ast.stmt) -> bool:
    """Whether a statement assigns into something: `TABLE["x"] = 1`, `f.attribute = 2`."""
    targets = statement.targets if isinstance(statement, (ast.Assign, ast.Delete)) else [getattr(statement, "target", None)]
    return any(isinstance(t, (ast.Subscript, ast.Attribute)) for t in targets)


def _is_main_guard(statement: ast.stmt) -> bool:
    return (isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare)
            and isinstance(statement.test.left, ast.Name) and statement.test.left.id == "__name__")


# What a definition refers to -------------------------------------------------------------------------------------------------------


def _arguments(a: ast.arguments) -> list[ast.arg]:
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else [])]


class _Scope:
    def __init__(self, node: ast.AST) -> None:
        self.is_class = isinstance(node, ast.ClassDef)
        names: list[str] = []
        if isinstance(node, _FUNCTIONS):
            names += [x.arg for x in _arguments(node.args)]
        if isinstance(node, _COMPREHENSIONS):
            names += [n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)]
            body: Sequence[ast.AST] = []
        elif isinstance(node, ast.Lambda):
            body = [node.body]
        else:
            body = getattr(node, "body", [])
        bound, self.imports, _ = _bound(body)
        self.names = {*names, *bound, *self.imports}


class _References(ast.NodeVisitor):
    """Collects names that are not local, those of the nodes `without` left out. `scopes`: enclosing functions of the node that is
    visited."""

    def __init__(self, scopes: Sequence[ast.AST], without: frozenset[ast.AST] = frozenset()) -> None:
        self.found: dict[Reference, None] = {}
        self._without = without
        self._scopes = [_Scope(s) for s in scopes]

    def visit(self, node: ast.AST) -> None:
        """Each node that is not left out."""
        if node not in self._without:
            super().visit(node)

    def _use(self, chain: tuple[str, ...]) -> None:
        for depth, scope in enumerate(reversed(self._scopes)):
            if scope.is_class and depth:
                continue  # names of a class body are invisible inside its methods
            if chain[0] in scope.names:
                if chain[0] in scope.imports:
                    self.found.setdefault(Reference(chain, tuple(scope.imports[chain[0]])))
                return
        self.found.setdefault(Reference(chain))

    def visit_Name(self, node: ast.Name) -> None:
        self._use((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            chain.append(base.attr)
            base = base.value
        if isinstance(base, ast.Name):
            self._use((base.id, *reversed(chain)))
        else:
            self.visit(base)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "import_module" and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            self.found.setdefault(Reference(("",), (Import(node.args[0].value, None),)))
        self.generic_visit(node)

    def _annotation(self, node: ast.expr | None) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                self.visit(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return  # a string that is no annotation refers to nothing
        elif node is not None:
            self.visit(node)

    def _signature(self, args: ast.arguments) -> None:
        for a in _arguments(args):
            self._annotation(a.annotation)
        for default in (*args.defaults, *args.kw_defaults):
            if default is not None:
                self.visit(default)

    def _inside(self, scope: ast.AST, nodes: Iterable[ast.AST]) -> None:
        self._scopes.append(_Scope(scope))
        for node in nodes:
            self.visit(node)
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._signature(node.args)
        self._annotation(node.returns)
        self._inside(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._signature(node.args)
        self._inside(node, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outer in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(outer)
        self._inside(node, node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        for part in (node.target, node.value):
            if part is not None:
                self.visit(part)

    def _comprehension(self, node: ast.AST, generators: Sequence[ast.comprehension]) -> None:
        self.visit(generators[0].iter)  # evaluated outside
        self._inside(node, list(ast.iter_child_nodes(node)))

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node, node.generators)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node, node.generators)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node, node.generators)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, node.generators)


def _lambdas_with_scopes(node: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[tuple[ast.Lambda, tuple[ast.AST, ...]]]:
    if isinstance(node, ast.Lambda):
        yield node, scopes
    if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
        scopes = (*scopes, node)
    for child in ast.iter_child_nodes(node):
        yield from _lambdas_with_scopes(child, scopes)
