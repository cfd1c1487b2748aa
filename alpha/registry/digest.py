"""Digests: evidence binds to what can change the result, and to nothing else. Floor 3.

The digest of a symbol is the sha256 of its stable syntax tree (syntax.py) and of that of everything inside the package that it refers
to, transitively: functions, classes, constants, base classes, decorators, defaults, annotations (so that `cpu: Cpu` brings the class
whose methods are called), re-exports, function-level imports. The definitions form a rooted graph; they are numbered in order of
discovery and hashed with their edges, so neither file names nor the place in a file enter, and a cycle needs no special care.

Members count by name. A method or a field of a class, or an entry of a table of names (TABLES), is part of a digest only if the code
that the evidence binds to, all of it together, says its name: as an attribute or as a text. So a new field of `Component`, a new kind,
a new element type, or a method that only the CPU calls changes nothing elsewhere. A class that is itself asked for, or that has a base
from outside the package (which may call methods by names of its own), counts whole.

Files are read as text. Nothing is imported or executed, so a digest can be taken of code on a higher floor or of a broken copy.

Out of reach, because only running the program would tell: kernels looked up by a string, modules found by listing a
folder, `getattr` with a computed name, methods of an object whose class is named nowhere on the way, module state that another
function changes, data files, environment. Whoever depends on one of these names it beside the symbol: `component_digests` binds the op
rows whose names the code says, and for a whole program the kernels of these rows.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

import alpha
from alpha.component import Component
from alpha.errors import InputError
from alpha.ops.compose import FusedSpec
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.registry import policy
from alpha.registry.syntax import Definition, Import, Reference, Source, read

OPAQUE = ("registry.judge", "registry.policy", "cuda_runtime.compile", "cuda_runtime.manifest")
"""Modules of the package that no edge enters: judges and tolerances are not digested, CI runs them over every raw record instead; what
finds and calls the compiler is not, because the compiled files have digests of their own (`binaries`).
Edges from elsewhere into the registry are not followed either: it writes down what was measured and is gated by its own components."""

TABLES: Mapping[str, tuple[str, ...]] = {
    "component": ("KINDS",),
    "types": ("ITEMSIZE", "FLOATS", "NUMPY"),
    "ops.numerics": ("UNIT_ROUNDOFF", "LOWER", "ACCUMULATE", "_MACHINE", "_SIGNIFICAND", "_MIN_EXPONENT"),
}
"""Module -> tables of names in it: each entry counts only where its key is said. Code that walks over such a table meets a new entry when
its evidence is next renewed."""

BY_OP: Mapping[str, tuple[str, ...]] = {
    "gates.cuda.samples": ("SAMPLES", "EXACT"),
    "gates.cuda.widths": ("SAMPLES",),
    "gates.cuda.sizes": ("LARGE", "REPEATED", "TIMED"),
    "gates.cuda.large": ("MAKES",),
}
"""Module -> tables by op row in it: no edge enters them; the entry of a component's own row is one of its cases."""

SHAPES: Mapping[str, tuple[str, ...]] = {
    "component": ("Component", "Envelope", "Limit", "Measured"),
    "types": ("TensorType",),
    "ops.spec": ("OpSpec", "Sample"),
}
"""Module -> data classes in it whose fields are versioned by hand: the module's SHAPE counts in place of them, and of their objects the
fields that are not at their default. So a field with a default may be added; who changes a default, or what a field means, raises SHAPE
(suites/unit/test_stale.py holds what each SHAPE stands for). Methods count like all others."""

BARE = ("errors",)
"""Modules whose classes count by name and bases alone: what errors say changes no result."""

_BLAS_CALLS = frozenset({"@", "matmul", "dot", "vdot", "inner", "einsum", "tensordot", "linalg"})

_BASES = frozenset({"object", "Protocol", "Generic", "ABC", "Exception", "ValueError", "RuntimeError"})
"""Classes from outside the package that call no method by a name of their own."""

Key = tuple[str, str]
"""(module, name), to stop at imports that go in a circle."""

Target = tuple[str, ...]
"""('def', module, name) | ('whole', module, name) | ('lambda', module, line) | ('entry', module, name, *keys) | ('all', module)
| ('text', hashed as it stands). 'whole': a class with all its members."""

Edges = tuple[tuple[Target, ...], ...]
"""For each reference of a definition, in order, what it may mean (none for builtins; several where a name is bound twice)."""

Words = frozenset[str]
"""Names that code says: '.x' for an attribute, "'x" for a text that could be a name."""

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,60}")


@dataclass(frozen=True)
class Piece:
    """Something of a target that counts together: its text, its edges, the words that it says."""

    text: str
    edges: Edges
    words: Words

    @functools.cached_property
    def targets(self) -> frozenset[Target]:
        """All that the edges lead to."""
        return frozenset(itertools.chain.from_iterable(self.edges))


@dataclass(frozen=True)
class Node:
    """A target: what always counts, and members by name."""

    core: Piece
    members: tuple[tuple[str, Piece], ...] = ()

    def active(self, words: Words | set[str]) -> list[Piece]:
        """The pieces that count where these words are said."""
        return [self.core, *(p for name, p in self.members if said(name, words))]


def said(name: str, words: Words | set[str]) -> bool:
    """Whether a member's name is among words."""
    return f".{name}" in words or f"'{name}" in words


class Package:
    """A snapshot of a package's source files: each is read once, when first needed. Make a new one after files changed.

    `root`: the package's folder (default: that of the running package); `name`: its dotted name, whatever the folder is called.
    """

    def __init__(self, root: Path | str | None = None, name: str = "alpha") -> None:
        self.root = Path(root) if root is not None else Path(alpha.__file__).parent
        self.name = name
        self._sources: dict[str, Source | None] = {}
        self._files: dict[str, Path] = {}
        self._hashes: dict[tuple[tuple[Target, ...], Words], str] = {}
        self._nodes: dict[Target, Node] = {}
        self._slots: dict[tuple[Target, ...], Words] = {}
        self.calls: dict[tuple[str, frozenset[str]], frozenset[str]] = {}
        self.held: dict[tuple[Any, ...], tuple[Held, _Description, Words]] = {}
        self.texts: dict[tuple[Any, ...], str] = {}
        self._binaries: dict[int, tuple[Component, str]] = {}
        self._closures: dict[tuple[frozenset[Target], Words], tuple[frozenset[Target], Words]] = {}
        if not self.root.is_dir():
            raise InputError("no such package folder", came=self.root, do="give the folder that holds the package's __init__.py")

    def source(self, module: str) -> Source | None:
        """A module of the package (or a file added by `module_of`), None when there is no such file."""
        if module not in self._sources:
            path = self._path(module)
            try:
                self._sources[module] = None if path is None else read(path.read_text(encoding="utf-8"), self.name)
            except InputError as error:
                raise InputError(error.what, came=f"{module}: {error.came}", expected=error.expected, do=error.do) from error
        return self._sources[module]

    def _path(self, module: str) -> Path | None:
        if module in self._files:
            return self._files[module]
        head, *rest = module.split(".")
        if head != self.name:
            return None
        base = self.root.joinpath(*rest)
        return next((p for p in (base / "__init__.py", base.with_suffix(".py") if rest else base) if p.is_file()), None)

    def module_of(self, value: Any) -> str:
        """The dotted module in which a function or class is written; a file outside the package is added under its path."""
        module = getattr(value, "__module__", "") or ""
        if module.split(".")[0] == self.name:
            return module
        code = getattr(value, "__code__", None)
        path = Path(code.co_filename) if code is not None else None
        if path is None or not path.is_file():
            raise InputError("no source file for a digest", came=f"{module}:{getattr(value, '__qualname__', value)}",
                             expected=f"a symbol of the package {self.name}, or a function written in a file")
        self._files[str(path)] = path
        return str(path)

    def binaries(self, component: Component) -> str:
        """Digest of the compiled files that a component may load."""
        if id(component) not in self._binaries:
            listed = sorted(component.binaries().items()) if component.binaries is not None else []
            self._binaries[id(component)] = component, hashlib.sha256(repr(listed).encode()).hexdigest()
        return self._binaries[id(component)][1]

    # Resolution

    def resolve(self, module: str, chain: tuple[str, ...], seen: frozenset[Key] = frozenset()) -> tuple[Target, ...]:
        """Targets of `chain` (a name with attributes) looked up among a module's names; empty for builtins and the like."""
        source = self.source(module)
        if source is None or (module, chain[0]) in seen:
            return ()
        seen = seen | {(module, chain[0])}
        found: list[Target] = [("def", module, chain[0])] if chain[0] in source.statements else []
        for imported in source.imports.get(chain[0], ()):
            found += self._through(imported, module, chain[1:], seen)
        if not found:
            for star in source.stars:
                found += self.resolve(self._absolute(star, module), chain, seen)
        return tuple(found)

    def _absolute(self, imported: Import, module: str) -> str:
        if not imported.level:
            return imported.module
        path = self._path(module)
        parts = module.split(".")
        up = imported.level - (1 if path is not None and path.name == "__init__.py" else 0)
        parts = parts[: len(parts) - up]
        return ".".join([*parts, imported.module] if imported.module else parts)

    def _through(self, imported: Import, origin: str, rest: tuple[str, ...], seen: frozenset[Key]) -> tuple[Target, ...]:
        chain = rest if imported.symbol is None else (imported.symbol, *rest)
        return self._member(self._absolute(imported, origin), chain, origin, seen)

    def _member(self, module: str, chain: tuple[str, ...], origin: str, seen: frozenset[Key]) -> tuple[Target, ...]:
        """Targets of `module.chain` named in `origin`: submodules are walked through; a module used as a value stands for all of it."""
        if module.split(".")[0] != self.name and module not in self._files:
            return (("text", "outside " + ".".join([module, *chain[:1]])),)
        if self._opaque(module, origin):
            return (("text", "opaque " + ".".join(chain[:1])),)
        if self.source(module) is None:
            return (("text", "absent " + ".".join([module, *chain[:1]])),)
        if not chain:
            return (("all", module),)
        found = self.resolve(module, chain, seen)
        if found:
            return found
        if self._path(f"{module}.{chain[0]}") is not None:
            return self._member(f"{module}.{chain[0]}", chain[1:], origin, seen)
        return () if chain[0].startswith("__") else (("all", module),)

    def _opaque(self, module: str, origin: str) -> bool:
        registry = f"{self.name}.registry."
        inside = f"{origin}.".startswith(registry)
        return module != origin and (module in {f"{self.name}.{m}" for m in OPAQUE} or (module.startswith(registry) and not inside))

    def _follow(self, module: str, reference: Reference) -> tuple[Target, ...]:
        if not reference.through:
            return self.resolve(module, reference.chain)
        return tuple(t for imported in reference.through for t in self._through(imported, module, reference.chain[1:], frozenset()))

    # The graph

    def _node(self, target: Target) -> Node:
        if target not in self._nodes:
            self._nodes[target] = self._expand(target)
        return self._nodes[target]

    def _expand(self, target: Target) -> Node:
        kind = target[0]
        if kind == "text":
            return Node(Piece(target[1], (), frozenset()))
        module = target[1]
        source = self.source(module)
        if source is None:
            raise InputError("no such module to digest", came=module, expected=f"a file under {self.root.name}/")
        if kind == "all":
            names = sorted({*source.statements, *(source.imports if self._is_init(module) else ())} - {"__all__"})
            return Node(Piece("all", tuple(self.resolve(module, (n,)) for n in names), frozenset()))
        short = module.removeprefix(f"{self.name}.")
        if kind == "def" and target[2] in BY_OP.get(short, ()):
            return Node(Piece(f"by op {short}.{target[2]}", (), frozenset()))
        if kind == "def" and target[2] in TABLES.get(short, ()) and (table := source.table(target[2])) is not None:
            return Node(self._piece(module, [table]), tuple((n, self._piece(module, [d])) for n, d in table.members))
        if kind == "def" and short in BARE:
            return Node(self._piece(module, source.header(target[2])))
        found = self.definitions(target)
        if kind == "def" and all(self._sliced(module, d, frozenset()) for d in found if d.whole is not None):
            members = tuple((n, self._piece(module, [m])) for d in found for n, m in d.members)
            core = self._piece(module, found)
            if target[2] in SHAPES.get(short, ()):
                own = {n for d in found for n in d.fields}
                members = tuple((n, p) for n, p in members if n not in own)
                core = replace(core, edges=(*core.edges, self.resolve(module, ("SHAPE",))))
            return Node(core, members)
        return Node(self._piece(module, [d.whole or d for d in found]))

    def _piece(self, module: str, found: Sequence[Definition]) -> Piece:
        words = {f".{n}" for d in found for n in d.names} | {f"'{s}" for d in found for s in d.strings if _NAME.fullmatch(s)}
        edges = tuple(self._follow(module, r) for d in found for r in d.references)
        return Piece(" ".join(d.text for d in found), edges, frozenset(words))

    def _sliced(self, module: str, definition: Definition, seen: frozenset[Target]) -> bool:
        """Whether members of a class are reached by their names alone: no base from outside may call them."""
        if definition.bases is None:
            return False
        for base in definition.bases:
            targets = self._follow(module, base)
            if not targets and base.chain[-1] not in _BASES:
                return False
            for target in targets:
                if target[0] == "text" and target[1].rpartition(".")[2] in _BASES:
                    continue
                if target[0] != "def" or target in seen:
                    return False
                if not all(self._sliced(target[1], d, seen | {target}) for d in self.definitions(target)):
                    return False
        return True

    def definitions(self, target: Target) -> tuple[Definition, ...]:
        """What is written at a target; nothing for whole modules and text."""
        source = self.source(target[1]) if target[0] in ("def", "whole", "lambda", "entry") else None
        if source is None:
            return ()
        if target[0] == "lambda":
            return source.lambdas(int(target[2]))
        if target[0] == "entry":
            entry = source.entry(*target[2:])
            return () if entry is None else (entry,)
        return source.definitions(target[2])

    def _is_init(self, module: str) -> bool:
        path = self._path(module)
        return path is not None and path.name == "__init__.py"

    def closure(self, roots: Iterable[Target], words: Words = frozenset()) -> tuple[frozenset[Target], Words]:
        """(every target that the roots reach, every word that is said there). `words`: what is said besides."""
        key = frozenset(roots), words
        if key not in self._closures:
            self._closures[key] = self._closure(*key)
        return self._closures[key]

    def _closure(self, roots: frozenset[Target], words: Words) -> tuple[frozenset[Target], Words]:
        seen, heard, pieces = set(roots), set(words), list[Piece]()
        queue, waiting = list(roots), dict[str, list[Piece]]()
        awaited = set[str]()
        while queue:
            node = self._node(queue.pop())
            pieces.append(node.core)
            for name, piece in node.members:
                if said(name, heard):
                    pieces.append(piece)
                else:
                    for word in (f".{name}", f"'{name}"):
                        waiting.setdefault(word, []).append(piece)
                        awaited.add(word)
            while pieces:
                piece = pieces.pop()
                heard |= piece.words
                for word in piece.words & awaited:
                    awaited.discard(word)
                    pieces += waiting[word]
                new = piece.targets - seen
                seen |= new
                queue += new
        return frozenset(seen), frozenset(heard)

    def hash(self, roots: Iterable[Target], words: Words | None = None) -> str:
        """sha256 of the graph that the roots reach where these words are said (default: those that are said there)."""
        roots = tuple(roots)
        if words is None:
            words = self.closure(roots)[1]
        key = roots, words & self.members(roots)
        if key not in self._hashes:
            self._hashes[key] = self._hash(roots, words)
        return self._hashes[key]

    def members(self, roots: Iterable[Target]) -> Words:
        """Words on which the graph of the roots may depend."""
        roots = tuple(roots)
        if roots not in self._slots:
            seen, found = dict.fromkeys(roots), set[str]()
            queue = list(seen)
            for target in queue:  # grows while it is walked
                node = self._node(target)
                found.update(word for name, _ in node.members for word in (f".{name}", f"'{name}"))
                for piece in (node.core, *(p for _, p in node.members)):
                    new = piece.targets - seen.keys()
                    seen.update(dict.fromkeys(new))
                    queue += new
            self._slots[roots] = frozenset(found)
        return self._slots[roots]

    def _hash(self, roots: tuple[Target, ...], words: Words) -> str:
        order = dict.fromkeys(roots)
        queue = list(order)
        held: list[list[Piece]] = []
        for target in queue:  # grows while it is walked
            held.append(self._node(target).active(words))
            for edge in itertools.chain.from_iterable(itertools.chain.from_iterable(p.edges for p in held[-1])):
                if edge not in order:
                    order[edge] = None
                    queue.append(edge)
        number = {target: i for i, target in enumerate(queue)}
        h = hashlib.sha256()
        h.update(repr([number[r] for r in roots]).encode())
        for pieces in held:
            for piece in pieces:
                h.update(f"\n{piece.text}:{[[number[e] for e in group] for group in piece.edges]}".encode())
            h.update(b"\n")
        return h.hexdigest()

    def roots(self, symbol: str) -> tuple[Target, ...]:
        """Targets of 'module:qualname', a class with all its members. A method or inner function stands for the class or function that
        holds it."""
        module, colon, qualname = symbol.partition(":")
        if not colon or not qualname:
            raise InputError("not a symbol", came=symbol, expected="package.module:name")
        source = self.source(module)
        if source is None:
            raise InputError("no such module to digest", came=module, expected=f"a file under {self.root}", do="check the spelling")
        found = self.resolve(module, tuple(qualname.split(".")))
        if not found:
            near = difflib.get_close_matches(qualname, [*source.statements, *source.imports], n=3)
            raise InputError("no such symbol to digest", came=symbol,
                             expected=f"one of {', '.join(near)}" if near else "a name of the module")
        return tuple(("whole", *t[1:]) if any(d.whole is not None for d in self.definitions(t)) else t for t in found)


def symbol_digest(symbol: str, root: Path | str | None = None, *, package: Package | None = None) -> str:
    """Digest of 'package.module:name' with everything that it refers to inside the package.

    `root`: another copy of the package's folder; `package`: a snapshot to share among many calls (otherwise files are read anew).
    """
    package = package or Package(root, symbol.split(".")[0].split(":")[0])
    return package.hash(package.roots(symbol))


def module_digest(module: str, root: Path | str | None = None, *, package: Package | None = None) -> str:
    """Digest of all that a module defines, with everything that it refers to inside the package."""
    package = package or Package(root, module.split(".")[0])
    return package.hash([("all", module)])


def calls_blas(value: Any, package: Package) -> bool:
    """Whether a matrix product or another BLAS call can be reached from a function or class: decides what evidence carries over.

    Names are all that is looked at, so a function of ours called `dot` counts too, which only asks for more evidence.
    """
    targets, words = package.closure(_targets(value, package))
    return any(f".{name}" in words for name in _BLAS_CALLS) or any(
        t[0] == "text" and t[1].split(".")[-1] in _BLAS_CALLS for t in targets)


# Values that are held, not named: functions of an op row, limits of an envelope ----------------------------------------------------


def value_digest(value: Any, package: Package) -> str:
    """Digest of a value: functions and classes by their source, with what closures and defaults hold; plain data by content.

    An object of a class outside the package counts as its class's name and nothing more.
    """
    targets, words = _mentioned(value, package)
    return _digest(value, package, package.closure(targets, words)[1])


@dataclass(frozen=True, eq=False)
class Held:
    """A value that many digests hold: it is looked through once for a package. `key`: its name there."""

    key: tuple[Any, ...]
    value: Any
    of: Any = None
    """What the key's id belongs to: it lives as long as the key is known."""


class Fields(dict[str, Any]):
    """Fields by name, of which those count that are said."""


def _digest(value: Any, package: Package, words: Words) -> str:
    return hashlib.sha256(_Description(package, words).of(value).encode()).hexdigest()


def _mentioned(value: Any, package: Package) -> tuple[frozenset[Target], Words]:
    """What a value's functions and classes are, and the texts that it holds."""
    description = _Description(package, None)
    description.of(value)
    return frozenset(description.targets), frozenset(description.texts)


def _targets(value: Any, package: Package) -> tuple[Target, ...]:
    if isinstance(value, functools.partial):
        return _targets(value.func, package)
    if isinstance(value, MethodType):
        value = value.__func__
    if not hasattr(value, "__qualname__"):
        value = type(value)
    module, qualname = package.module_of(value), value.__qualname__
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        return (("lambda", module, str(value.__code__.co_firstlineno)),)
    return package.roots(f"{module}:{qualname.split('.<locals>')[0]}")


class _Description:
    """Writes a value down where these words are said; None: only notes `targets` and `texts`."""

    def __init__(self, package: Package, words: Words | None) -> None:
        self.package, self.words = package, words
        self.targets: dict[Target, None] = {}
        self.texts: set[str] = set()
        self.slots: set[str] = set()

    def _held(self, value: Held) -> str:
        package = self.package
        if value.key not in package.held:
            inside = _Description(package, None)
            inside.of(value.value)
            package.held[value.key] = value, inside, package.members(inside.targets) | inside.slots
        _, inside, slots = package.held[value.key]
        if self.words is None:
            self.targets.update(inside.targets)
            self.texts |= inside.texts
            self.slots |= inside.slots
            return ""
        key = *value.key, self.words & slots
        if key not in package.texts:
            package.texts[key] = _digest(value.value, package, self.words)
        return package.texts[key]

    def _fields(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Those that are said."""
        self.slots |= {word for name in state for word in (f".{name}", f"'{name}")}
        return {n: v for n, v in state.items() if self.words is None or said(n, self.words)}

    def _symbol(self, targets: tuple[Target, ...]) -> str:
        self.targets.update(dict.fromkeys(targets))
        return "" if self.words is None else self.package.hash(targets, self.words)

    def of(self, value: Any, held: tuple[int, ...] = ()) -> str:
        """The text of a value. `held`: what it lies in."""
        if isinstance(value, str) and _NAME.fullmatch(value):
            self.texts.add(f"'{value}")
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if id(value) in held:
            return f"again {held.index(id(value))}"
        if isinstance(value, Held):
            return self._held(value)
        held = (*held, id(value))
        if isinstance(value, Fields):
            value = self._fields(value)
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{self.of(k, held)}:{self.of(v, held)}" for k, v in value.items()) + "}"
        if isinstance(value, (tuple, list)):
            return "[" + ",".join(self.of(v, held) for v in value) + "]"
        if isinstance(value, (set, frozenset)):
            return "{" + ",".join(sorted(self.of(v, held) for v in value)) + "}"
        if isinstance(value, np.ndarray):
            return f"array {value.dtype.str} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        if isinstance(value, functools.partial):
            return "partial " + self.of([value.func, value.args, value.keywords], held)
        if isinstance(value, MethodType):
            return "method " + self.of([value.__func__.__name__, type(value.__self__), value.__self__], held)
        if isinstance(value, ModuleType):
            inside = value.__name__.split(".")[0] == self.package.name
            return self._symbol((("all", value.__name__),)) if inside else f"module {value.__name__}"
        if isinstance(value, FunctionType):
            cells = {n: c.cell_contents for n, c in zip(value.__code__.co_freevars, value.__closure__ or ()) if _filled(c)}
            inner = value.__name__ == "<lambda>" or "<locals>" in value.__qualname__
            bound = [cells, value.__defaults__, value.__kwdefaults__] if inner else [cells]
            own = "" if value.__name__ == "<lambda>" else value.__qualname__.rpartition("<locals>.")[2]
            return f"function {own} {self._symbol(_targets(value, self.package))} {self.of(bound, held)}"
        if hasattr(value, "__qualname__"):  # classes, cached functions, builtins, ufuncs of newer NumPy
            inside = (getattr(value, "__module__", "") or "").split(".")[0] == self.package.name
            return f"symbol {self._symbol(_targets(value, self.package)) if inside else _foreign(value)}"
        cls = type(value)
        if cls.__module__.split(".")[0] != self.package.name:
            return f"object {_foreign(cls)} {getattr(value, '__name__', '')}"
        state = self._fields(_state(value)) if is_dataclass(value) else dict(vars(value))
        return f"instance {self._symbol(_sliced(_targets(cls, self.package)))} {self.of(state, held)}"


def _sliced(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    return tuple(("def", *t[1:]) if t[0] == "whole" else t for t in targets)


def _state(value: Any) -> dict[str, Any]:
    """Fields of a data class's object that are not at their default."""
    found = {}
    for f in fields(value):
        held = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if default is MISSING or not (held is default or (type(held) is type(default) and repr(held) == repr(default))):
            found[f.name] = held
    return found


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises when a recursive function is not bound yet)
    except ValueError:
        return False
    return True


def _foreign(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


# What one gate's evidence of one component binds to ---------------------------------------------------------------------------------

_NOT_ROW = {"samples", "exact", "why_no_vjp", "vjp", "flops", "nbytes"}
"""Fields of a row that are cases or prose, or that count for some gates alone."""


def component_digests(component: Component, gate: str, *, package: Package | None = None,
                      extra: Mapping[str, Callable[[], str]] | None = None) -> dict[str, str]:
    """name -> hex of everything that evidence of `gate` on `component` binds to.

    implementation  the callable with its callees, and the declared envelope, in-place pairs and scratch (wider promises need new evidence)
    row             kernels: what the row and the rows that it calls by name (the parts of a composition) say, but their cases. FLOPs and
                    bytes: for perf alone. vjps: for gradient alone, with the rows that they emit; of a row without a vjp: those of the
                    forward rows that emit it
    rows, kernels   whole programs: every row that they name, and what their Programs may launch of these
    cases           kernels: samples and exact samples, of kernels of the GPU their own further ones; others: their entry of CASES
    measure         the gate's engine, and how it calls a kernel of this back end
    binaries        kernels of the GPU: digests of the compiled files (pinned compiler, no line information)
    `extra`         further names, such as the plan hashes of reference configs for a pass
    """
    package = package or Package()
    held: dict[str, Any] = {"implementation": _promised(component)}
    roots: dict[str, tuple[Target, ...]] = {
        "measure": tuple(t for symbol in policy.measure_symbols(gate, component) for t in package.roots(symbol))}
    if component.op is not None:
        own = _by_op(component.op, package.closure(roots["measure"])[0], package)
        held["cases"] = [row(component.op).samples, row(component.op).exact]
        held["row"] = _rows_of_kernel(row(component.op), gate, own, package)
        if own:
            roots["cases"] = own
    if component.contract:
        roots["cases"] = contract_targets(component, gate, package)
        held |= _program(component, roots["cases"], package)
    if component.binaries is not None:
        held["binaries"] = package.binaries(component)
    words = _words(component, gate, held, roots, package)
    digests = {name: _digest(value, package, words) for name, value in held.items()}
    for name, targets in roots.items():
        digests[name] = hashlib.sha256(f"{digests.get(name, '')}{package.hash(targets, words)}".encode()).hexdigest()
    for name, digest in (extra or {}).items():
        digests[name] = digest()
    return digests


def _words(component: Component, gate: str, held: Mapping[str, Any], roots: Mapping[str, tuple[Target, ...]], package: Package) -> Words:
    """Every word that is said by what the evidence binds to, all of it together."""
    targets = {t for found in roots.values() for t in found}
    words = {f"'{w}" for w in (component.op or "", component.kind, component.backend, gate)}
    for value in held.values():
        more, texts = _mentioned(value, package)
        targets |= more
        words |= texts
    return package.closure(frozenset(targets), frozenset(words))[1]


def _promised(component: Component) -> Held:
    limits = [x.holds for x in component.envelope.limits]
    promises = [component.envelope.dtypes, limits, component.inplace, component.scratch]
    return Held(("component", id(component)), [component.implementation, promises], component)


def contract_targets(component: Component, gate: str, package: Package) -> tuple[Target, ...]:
    """The component's entry of CASES where it is written as a table, else the whole contract module."""
    source = package.source(component.contract)
    if source is not None and source.entry("CASES", component.id, gate) is not None:
        return (("entry", component.contract, "CASES", component.id, gate),)
    return (("all", component.contract),)


def _by_op(op: str, reached: frozenset[Target], package: Package) -> tuple[Target, ...]:
    """The entries of a row in the tables by op that the measuring code reads."""
    found = []
    for module, names in BY_OP.items():
        source = package.source(f"{package.name}.{module}")
        found += [("entry", f"{package.name}.{module}", name, op) for name in names
                  if ("def", f"{package.name}.{module}", name) in reached and source is not None and source.entry(name, op) is not None]
    return tuple(found)


# Rows that are called by name --------------------------------------------------------------------------------------------------------


def _fields_of(spec: OpSpec, more: frozenset[str]) -> Held:
    return Held(("row", spec.name, more), Fields({n: v for n, v in _state(spec).items() if n not in _NOT_ROW - more}))


_EXECUTED = frozenset[str]()
_GRADIENT, _COUNTED = frozenset({"vjp"}), frozenset({"flops", "nbytes"})


def _named(targets: frozenset[Target], words: Words, package: Package) -> set[str]:
    """Rows whose names the code in reach says as texts."""
    spoken = package.closure(targets, words)[1]
    return {name for name in table() if f"'{name}" in spoken}


def _called(spec: OpSpec, more: frozenset[str], package: Package) -> frozenset[str]:
    """Rows that these fields of a row call by name."""
    key = spec.name, more
    if key not in package.calls:
        functions = [v for n, v in _state(spec).items() if callable(v) and n not in _NOT_ROW - more]
        package.calls[key] = frozenset(_named(*_mentioned(functions, package), package))
    return package.calls[key]


def _all_called(names: Iterable[str], more: frozenset[str], package: Package) -> list[str]:
    """Rows of these names and all that these fields of them call, sorted."""
    found = set(names)
    queue = list(found)
    for name in queue:  # grows while it is walked
        new = _called(row(name), more, package) - found
        found |= new
        queue += new
    return sorted(found)


def _rows_of_kernel(spec: OpSpec, gate: str, cases: tuple[Target, ...], package: Package) -> list[Any]:
    """The row of a kernel first, then what it calls, what its samples call, and for the gradient what the vjps in question emit."""
    targets, words = _mentioned([spec.samples, spec.exact], package)
    names = {spec.name, *_named(targets | set(cases), words, package)}
    differentiated: list[OpSpec] = []
    if gate == "gradient":
        differentiated = [spec] if spec.vjp is not None else _emitting(spec, package)
        names |= {name for r in differentiated for name in (r.name, *_called(r, _GRADIENT, package))}
    more = _COUNTED if gate == "perf" else _EXECUTED
    others = [_fields_of(row(name), _EXECUTED) for name in _all_called(names, _EXECUTED, package) if name != spec.name]
    return [_fields_of(spec, more), others, [r.vjp for r in differentiated]]


def _emitting(spec: OpSpec, package: Package) -> list[OpSpec]:
    """Rows whose vjp may emit this one: its name is a text constant in reach of the vjp. The gradient gate goes through them."""
    return [r for _, r in sorted(table().items()) if r.vjp is not None and spec.name in _called(r, _GRADIENT, package)]


def _program(component: Component, cases: tuple[Target, ...], package: Package) -> dict[str, Any]:
    """Rows and kernels of a component that runs whole graphs or Programs: every row whose name its code says, those that these rows call
    or emit, fused rows made of them, and of its kernels those of these rows."""
    if component.kind == "evidence":  # it speaks of rows and runs none
        return {}
    targets, words = _mentioned(component.implementation, package)
    reached, spoken = package.closure(targets | set(cases), words)
    if not any(("def", f"{package.name}.ops.table", name) in reached for name in ("row", "table")):
        return {}
    more = _GRADIENT | _COUNTED
    names = set(_all_called((n for n in table() if said(n, spoken)), more, package))  # a tracer's rows are attributes
    names |= {n for n, r in table().items() if isinstance(r, FusedSpec) and all(p.op in names for p in r.parts)}
    rows = _all_called(names, more, package)
    found: dict[str, Any] = {"rows": [_fields_of(row(name), more) for name in rows]}
    launched = [c for c in (component.launches() if component.launches is not None else ()) if c.op in rows]
    if launched:
        found["kernels"] = [[_promised(c), package.binaries(c)] for c in launched]
    return found
